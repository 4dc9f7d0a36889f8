"""A private folder of compiled programs: what a file looks like, what is thrown out. ``trust.py`` says what may be run.

Every file says what it is for, and carries a SHA-256 against accidents and its signature against strangers.

    programs/KEY.program    magic, signature, SHA-256 of the rest, length of the header, header (JSON), executable
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

MAGIC = b"canvax program 2\n\0\0\0"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8
_SIGNED = len(MAGIC) + _DIGEST
_START = _SIGNED + _DIGEST + _LENGTH
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

    @property
    def batch(self) -> int:
        """Images at once; 0 if the file does not say."""
        description = self.header.get("description")
        batch = description.get("batch") if isinstance(description, dict) else 0
        return batch if isinstance(batch, int) else 0


def cache_path() -> Path | None:
    """The folder that CANVAX_CACHE_DIR names, else ``usual_path``; None for "off". Nothing is looked at.

    Raises:
        InputError: it is not a whole path, or there is no home folder.
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
            f"the cache folder {str(folder)!r} depends on where canvax is started; set {FOLDER} to a whole path"
        )
    return folder


def usual_path() -> Path:
    """``canvax`` in the folder where this system keeps a user's caches.

    Raises:
        RuntimeError: there is no home folder.
    """
    return user_folder("XDG_CACHE_HOME", ".cache", "Library/Caches", "LOCALAPPDATA", "Local")


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
        for path in reversed([path for path in (programs, *programs.parents) if not path.exists()]):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        check_folder(programs)
        for path, _, used in _files(programs):
            if path.suffix == ".part" and time.time() - used > _LEFTOVER:
                _unlink(path)
    except (CanvaxError, OSError) as error:
        _not_stored(error)
        return None
    return programs


def read(path: Path, key: str) -> tuple[dict[str, Any], bytes] | None:
    """Header and executable of a whole, private file that was made for ``key``; another is removed, and None."""
    try:
        with open_private(path) as file:
            data = file.read()
            header = _checked_header(data, key)
            ours = is_ours(file, data[_SIGNED : _SIGNED + _DIGEST], data[len(MAGIC) : _SIGNED])
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
    with suppress(OSError):  # a folder that is only read has no order of use
        os.utime(path)
    return header, data[_START + int.from_bytes(data[_START - _LENGTH : _START], "little") :]


def write(path: Path, header: dict[str, Any], executable: bytes) -> int:
    """Keep an executable: whole under its name or not at all. Returns bytes written, 0 after a warning."""
    text = json.dumps(header).encode()
    length = len(text).to_bytes(_LENGTH, "little")
    total = hashlib.sha256(length)
    total.update(text)
    total.update(executable)
    size = _START + len(text) + len(executable)
    if size > size_limit():
        _not_stored(f"one alone is larger than {SIZE} allows")
        return 0
    temporary = None
    try:
        signed = signature(total.digest())
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((MAGIC, signed, total.digest(), length, text, executable))
        os.replace(temporary, path)
    except (CanvaxError, OSError) as error:
        if temporary:
            _unlink(temporary)
        _not_stored(error, path.parent)
        return 0
    with suppress(OSError):
        _evict(path)
    return size


def remove(path: Path, fault: str) -> None:
    """Remove a file that is of no use."""
    logger.debug("%s: %s; it is made again", path, fault)
    _unlink(path)


def programs() -> list[StoredProgram]:
    """Every stored program, the last used first.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``, ``check_folder``).
    """
    stored = [
        StoredProgram(path, header(path), size, used) for path, size, used in _own_files() if path.suffix == ".program"
    ]
    return sorted(stored, key=lambda program: -program.used)


def clear(unused_seconds: float = 0.0) -> tuple[int, int]:
    """Remove what has not been used for so long; returns how many files, and their bytes. Other files stay.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``, ``check_folder``).
    """
    now = time.time()
    sizes = [size for path, size, used in _own_files() if now - used >= unused_seconds and _unlink(path)]
    return len(sizes), sum(sizes)


def _own_files() -> list[tuple[Path, int, float]]:
    """``_files`` of the folder in use, if there is one."""
    folder = cache_path()
    if folder is None or not os.path.lexists(folder / "programs"):
        return []
    check_folder(folder / "programs")
    return list(_files(folder / "programs"))


def _files(programs: Path) -> Iterator[tuple[Path, int, float]]:
    """Files of the cache, their sizes and when they were last used; links and whatever else lies there are not."""
    with os.scandir(programs) as entries:
        for entry in entries:
            name = entry.name
            if name.endswith(".program") or (name.startswith(".") and name.endswith(".part")):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Path(entry.path), status.st_size, status.st_mtime


def _checked_header(data: bytes, key: str) -> dict[str, Any]:
    """The header of a whole file that was made for ``key``.

    Raises:
        CanvaxError: it is another, or not whole.
    """
    if not data.startswith(MAGIC):
        raise CanvaxError("not a program of this version of canvax")
    begin = _SIGNED + _DIGEST
    if hashlib.sha256(memoryview(data)[begin:]).digest() != data[_SIGNED:begin]:
        raise CanvaxError("damaged")
    header = _parsed(data[_START : _START + int.from_bytes(data[begin:_START], "little")])
    if header.get("key") != key:
        raise CanvaxError("made for something else")
    return header


def header(path: Path) -> dict[str, Any]:
    """The header of a file, to be shown; empty if it cannot be read."""
    with suppress(OSError, CanvaxError), open_private(path) as file:
        start = file.read(_START)
        length = int.from_bytes(start[-_LENGTH:], "little")
        if start.startswith(MAGIC) and length <= _MAX_HEADER:
            return _parsed(file.read(length))
    return {}


def _parsed(text: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else, brackets in brackets without end included."""
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
