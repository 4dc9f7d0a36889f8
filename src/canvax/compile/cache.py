"""A private folder of compiled programs: what a file looks like, and which files go. ``trust.py`` says what may be run.

programs/KEY.program    magic, signature, SHA-256 of the rest, header (a line of JSON), executable
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canvax.compile.trust import FOLDER, SECRET, check_folder, is_ours, open_private, signature, user_folder
from canvax.errors import CanvaxError, InputError, warn

SIZE = "CANVAX_CACHE_SIZE"
"""Environment variable."""

DEFAULT_SIZE = 10_000_000_000
"""Bytes; a full-size model takes tens of megabytes for each size and batch."""

MAGIC = b"canvax program 3\n"
_SIGNED = len(MAGIC) + 32
_START = _SIGNED + 32
_MAX_HEADER = 1 << 20
_LEFTOVER = 3600.0
"""Seconds after which a file that was never finished belongs to a dead process."""

logger = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True)
class StoredProgram:
    """A file of the cache.

    Attributes:
        path: where it is.
        header: its description of itself; empty if it cannot be read.
        size: bytes on disk.
        used: when it was last used, in seconds since 1970.
    """

    path: Path
    header: dict[str, Any]
    size: int
    used: float


def cache_path() -> Path | None:
    """The folder that CANVAX_CACHE_DIR names, else ``usual_path``; None for "off". Nothing is looked at.

    Raises:
        InputError: it is not an absolute path, or there is no home folder.
    """
    named = os.environ.get(FOLDER, "")
    if named.lower() == "off":
        return None
    try:
        folder = Path(os.path.expanduser(named)) if named else usual_path()
    except RuntimeError:
        raise InputError(f"there is no home folder; set {FOLDER} to a folder") from None
    if not folder.is_absolute():  # in a downloaded folder it would be the programs of whoever made that
        raise InputError(
            f"the cache folder {str(folder)!r} depends on where canvax is started; set {FOLDER} to an absolute path"
        )
    return folder


def usual_path() -> Path:
    """``canvax`` in the folder where this system keeps a user's caches.

    Raises:
        RuntimeError: there is no home folder.
    """
    return user_folder("cache")


def size_limit() -> int:
    """Bytes that the cache may take, from CANVAX_CACHE_SIZE.

    Raises:
        InputError: it is not a size.
    """
    text = os.environ.get(SIZE, "").strip()
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12}) ?([kMGT]?)B?", text)
    if not text:
        return DEFAULT_SIZE
    if not match:
        raise InputError(f"{SIZE}={text!r} is not a size; write 500MB or 10GB")
    return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))


def open_cache() -> Path | None:
    """The folder of programs, made if need be and safe to use; None, after one warning, if it is not.

    Raises:
        InputError: CANVAX_CACHE_SIZE is not a size.
    """
    size_limit()
    try:
        folder = cache_path()
        if folder is None:
            return None
        programs = folder / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        programs.mkdir(mode=0o700, exist_ok=True)
        check_folder(programs)
        for path, _, used in _files(programs):
            if path.suffix == ".part" and time.time() - used > _LEFTOVER:
                _unlink(path)
    except (CanvaxError, OSError) as error:
        _not_stored(error)
        return None
    return programs


def read(path: Path, key: str) -> bytes | None:
    """The executable of a whole, signed, private file that was made for ``key``; None where there is none.

    Another file is removed, unless it is whole and has a stranger's signature.
    """
    try:
        with open_private(path) as file:
            data = file.read()
            digest = data[_SIGNED:_START]
            if not data.startswith(MAGIC) or hashlib.sha256(memoryview(data)[_START:]).digest() != digest:
                raise CanvaxError("damaged, or of another version of canvax")
            ours = is_ours(file, digest, data[len(MAGIC) : _SIGNED])
    except FileNotFoundError:
        return None
    except (CanvaxError, OSError) as error:
        remove(path, str(error))
        return None
    if not ours:
        _warn_once(
            f"{path.parent} holds compiled programs that this user's canvax did not write; they are compiled again. "
            f"Set {SECRET} to the same text wherever this folder is used"
        )
        return None
    header, _, executable = data[_START:].partition(b"\n")
    if _parsed(header).get("key") != key:
        remove(path, "made for something else")
        return None
    with suppress(OSError):  # in a folder that is only read
        os.utime(path)
    return executable


def write(path: Path, header: dict[str, Any], executable: bytes) -> int:
    """Keep an executable: whole under its name or not at all. Returns bytes written, 0 after a warning."""
    data = json.dumps(header).encode() + b"\n" + executable
    size = _START + len(data)
    if size > size_limit():
        _not_stored(f"one alone is larger than {SIZE} allows")
        return 0
    temporary, digest = None, hashlib.sha256(data).digest()
    try:
        signed = signature(digest)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((MAGIC, signed, digest, data))
        os.replace(temporary, path)
    except (CanvaxError, OSError) as error:
        if temporary:
            _unlink(temporary)
        _not_stored(error, path.parent)
        return 0
    with suppress(OSError):
        _evict(path)
    return size


def remove(path: Path, reason: str) -> None:
    """Remove a file that is of no use."""
    logger.debug("%s: %s; it is made again", path, reason)
    _unlink(path)


def programs() -> list[StoredProgram]:
    """Every stored program, the last used first.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``, ``check_folder``).
    """
    files = [file for file in _files_in_use() if file[0].suffix == ".program"]
    stored = [StoredProgram(path, _header(path), size, used) for path, size, used in files]
    return sorted(stored, key=lambda program: -program.used)


def clear(unused_seconds: float = 0.0) -> tuple[int, int]:
    """Remove what has not been used for so long; returns how many files, and their bytes. Other files stay.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``, ``check_folder``).
    """
    now = time.time()
    sizes = [size for path, size, used in _files_in_use() if now - used >= unused_seconds and _unlink(path)]
    return len(sizes), sum(sizes)


def _files_in_use() -> list[tuple[Path, int, float]]:
    """``_files`` of the folder in use, if there is one."""
    folder = cache_path()
    if folder is None or not os.path.lexists(folder / "programs"):
        return []
    check_folder(folder / "programs")
    return list(_files(folder / "programs"))


def _files(programs: Path) -> Iterator[tuple[Path, int, float]]:
    """Files of the cache, their sizes and when they were last used; links and other files are left alone."""
    with os.scandir(programs) as entries:
        for entry in entries:
            name = entry.name
            if name.endswith(".program") or (name.startswith(".") and name.endswith(".part")):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Path(entry.path), status.st_size, status.st_mtime


def _header(path: Path) -> dict[str, Any]:
    """The header of a file, unchecked, to be shown; empty if it cannot be read."""
    with suppress(OSError, CanvaxError), open_private(path) as file:
        if file.read(_START).startswith(MAGIC):
            return _parsed(file.readline(_MAX_HEADER))
    return {}


def _parsed(text: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else, also for brackets in brackets without end."""
    with suppress(ValueError, RecursionError):
        header = json.loads(text)
        if isinstance(header, dict):
            return header
    return {}


def _evict(just_written: Path) -> None:
    """Throw out what was used longest ago until the rest fits."""
    stored = sorted(_files(just_written.parent), key=lambda file: file[2])
    total, limit = sum(size for _, size, _ in stored), size_limit()
    for path, size, _ in stored:
        if total > limit and path != just_written and _unlink(path):
            total -= size


def _unlink(path: str | Path) -> bool:
    """Remove a file or link; whether that could be done."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _not_stored(reason: object, where: Path | None = None) -> None:
    if isinstance(reason, OSError):
        reason = f"{where or reason.filename}: {reason.strerror or reason}"
    _warn_once(f"compiled programs are not stored for the next time: {reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warn(message)
