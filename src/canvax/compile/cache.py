"""A private folder of compiled programs: which files may be run, their format, and which files are removed.

An executable is machine code. It is loaded only if its folder and its file belong to the user or root, and no other
user can write to them.

programs/KEY.program    a header (JSON with the SHA-256 of the executable, on one line), then the executable
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from canvax.errors import CanvaxError, InputError, warn

FOLDER, SIZE = "CANVAX_CACHE_DIR", "CANVAX_CACHE_SIZE"
"""Environment variables."""

DEFAULT_SIZE = 10_000_000_000
"""Bytes; a full-size model takes tens of megabytes for each size and batch."""

_MAX_HEADER = 1 << 20
_LEFTOVER = 3600.0
"""Seconds after which a file that was never finished belongs to a dead process."""

logger = logging.getLogger(__name__)
_warned: set[str] = set()


class StoredProgram(NamedTuple):
    """A file of the cache: where it is, its bytes, and when it was last used in seconds since 1970."""

    path: Path
    size: int
    used: float

    @property
    def header(self) -> dict[str, Any]:
        """The file's unchecked description of itself; empty if it cannot be read."""
        with suppress(OSError, CanvaxError), _open_private(self.path) as file:
            return _parsed(file.readline(_MAX_HEADER))
        return {}


def cache_path() -> Path | None:
    """Return the folder that CANVAX_CACHE_DIR names, else ``usual_path``; None for "off". Nothing is looked at.

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
    if not folder.is_absolute():  # in a downloaded folder it could hold programs of other people
        raise InputError(
            f"the cache folder {str(folder)!r} depends on where canvax is started; set {FOLDER} to an absolute path"
        )
    return folder


def usual_path() -> Path:
    """Return ``canvax`` in the folder where this system keeps a user's caches.

    Raises:
        RuntimeError: there is no home folder.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):
        return Path(named, "canvax")
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "canvax")
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "canvax"


def size_limit() -> int:
    """Return the bytes that the cache may take, from CANVAX_CACHE_SIZE.

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
    """Return the folder of programs, made if need be and safe to use; None, after one warning, if it is not.

    Raises:
        InputError: CANVAX_CACHE_SIZE is not a size.
    """
    size_limit()
    try:
        folder = cache_path()
        if folder is None:
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "programs").mkdir(mode=0o700, exist_ok=True)
        _refuse(folder / "programs", (folder / "programs").lstat(), folder=True)
    except (CanvaxError, OSError) as error:
        _not_stored(error)
        return None
    return folder / "programs"


def read(path: Path, key: str) -> bytes | None:
    """Return the executable of a whole, private file that was made for ``key``; None where there is none.

    Another file is removed.
    """
    try:
        with _open_private(path) as file:
            header, executable = _parsed(file.readline(_MAX_HEADER)), file.read()
    except FileNotFoundError:
        return None
    except (CanvaxError, OSError) as error:
        remove(path, error)
        return None
    if header.get("key") != key or header.get("sha256") != hashlib.sha256(executable).hexdigest():
        remove(path, "damaged, or made for something else")
        return None
    with suppress(OSError):  # in a folder that is only read
        os.utime(path)
    return executable


def write(path: Path, header: dict[str, Any], executable: bytes) -> int:
    """Store an executable: whole under its name or not at all. Return the bytes written, 0 after a warning."""
    line = json.dumps({**header, "sha256": hashlib.sha256(executable).hexdigest()}).encode() + b"\n"
    size, temporary = len(line) + len(executable), ""
    if size > size_limit():
        _not_stored(f"one alone is larger than {SIZE} allows")
        return 0
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((line, executable))
        os.replace(temporary, path)
        _evict(path)
    except OSError as error:
        _unlink(temporary)
        _not_stored(f"{path.parent}: {error.strerror or error}")
        return 0
    return size


def remove(path: Path, reason: object) -> None:
    """Remove a file that cannot be used."""
    logger.debug("%s: %s; it is made again", path, reason)
    _unlink(path)


def stored_programs() -> list[StoredProgram]:
    """Return every stored program, the last used first.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``), or others can write to it.
    """
    programs = [file for file in _files_in_use() if file.path.suffix == ".program"]
    return sorted(programs, key=lambda program: -program.used)


def clear(unused_seconds: float = 0.0) -> tuple[int, int]:
    """Remove programs that have not been used for so long; return how many, and their bytes. Other files stay.

    Raises:
        CanvaxError: the folder cannot be used (``cache_path``), or others can write to it.
    """
    now = time.time()
    sizes = [file.size for file in _files_in_use() if now - file.used >= unused_seconds and _unlink(file.path)]
    return len(sizes), sum(sizes)


def _open_private(path: Path) -> BinaryIO:
    """Open a file that no other user can write to; refuse links and pipes, whose reader would wait for ever."""
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    try:
        _refuse(path, os.fstat(descriptor), folder=False)
    except CanvaxError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _refuse(path: Path, status: os.stat_result, *, folder: bool) -> None:
    """Raise CanvaxError for another kind of file, such as a link, and for files that other users could have written.

    Files of root are accepted, since root could write anywhere.
    """
    owned = hasattr(os, "geteuid")
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        fault = f"is not a {'folder' if folder else 'file'}"
    elif owned and status.st_uid not in (os.geteuid(), 0):
        fault = f"belongs to another user ({status.st_uid}), who could put code there"
    elif owned and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = "can be written to by others, who could put code there (chmod go-w makes it private)"
    else:
        return
    raise CanvaxError(f"{path} {fault}; or choose another folder with {FOLDER}")


def _files_in_use() -> list[StoredProgram]:
    """Return the files of the folder in use, if there is one."""
    folder = cache_path()
    if folder is None or not os.path.lexists(folder / "programs"):
        return []
    _refuse(folder / "programs", (folder / "programs").lstat(), folder=True)
    return list(_files(folder / "programs"))


def _files(programs: Path) -> Iterator[StoredProgram]:
    """Yield the files of a folder, also those that are not finished; links and other files are left alone."""
    with os.scandir(programs) as entries:
        for entry in entries:
            if entry.name.endswith(".program") or (entry.name.startswith(".") and entry.name.endswith(".part")):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield StoredProgram(Path(entry.path), status.st_size, status.st_mtime)


def _evict(just_written: Path) -> None:
    """Remove leftovers of killed processes, then the programs used longest ago until the rest fits."""
    stored = sorted(_files(just_written.parent), key=lambda file: file.used)
    total, limit = sum(file.size for file in stored), size_limit()
    for path, size, used in stored:
        left = path.suffix == ".part" and time.time() - used > _LEFTOVER
        if left or (total > limit and path != just_written):
            total -= size * _unlink(path)


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one for anything else, also for brackets in brackets without end."""
    with suppress(ValueError, RecursionError):
        header = json.loads(text)
        if isinstance(header, dict):
            return header
    return {}


def _unlink(path: str | Path) -> bool:
    """Remove a file or link; return whether that could be done."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _not_stored(reason: object) -> None:
    if isinstance(reason, OSError):
        reason = f"{reason.filename}: {reason.strerror or reason}"
    message = f"compiled programs are not stored for the next time: {reason}"
    if message not in _warned:
        _warned.add(message)
        warn(message)
