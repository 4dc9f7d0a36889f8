"""A private folder of compiled programs: who may use it, what a file looks like, what is thrown out.

An executable is machine code. Whoever can write into the folder can run code as its owner, so it is used only where
nobody else could have written to it or put another in its place. Within that border the checks are against accidents:
every file says what it is for and carries a SHA-256 of all of it.

    programs/KEY.program    magic, SHA-256 of the rest, length of the header, header (JSON), executable
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from canvax.errors import CanvaxError, InputError, warn

FOLDER, SIZE = "CANVAX_CACHE_DIR", "CANVAX_CACHE_SIZE"
"""Environment variables."""

DEFAULT_SIZE = 10_000_000_000
"""Bytes; a full-size model takes tens of megabytes for each size and batch."""

MAGIC = b"canvax program 1\n\0\0\0"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8
_START = len(MAGIC) + _DIGEST + _LENGTH
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
    """The folder that CANVAX_CACHE_DIR names, else :func:`usual_path`; None for "off". Nothing is looked at.

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
    if os.environ.get("XDG_CACHE_HOME", "").startswith("/"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "canvax"


def size_limit() -> int:
    """Bytes that the cache may take, from CANVAX_CACHE_SIZE.

    Raises:
        InputError: it is not a size.
    """
    text = os.environ.get(SIZE, "").strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text)
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
        _warn_once(str(error))
        return None
    return programs


def check_folder(programs: Path) -> None:
    """Refuse a folder of programs that anybody else could have written to or put in place of ours.

    Looked at are the folder, the one around it and all above, up to the home folder or the root. There links are
    followed, which only the user or root can have made: what they lead to is looked at as well.

    Raises:
        CanvaxError: naming the folder at fault, and the cure.
        OSError: one of them cannot be looked at.
    """
    homes = {Path(os.path.expanduser("~")), Path(os.path.realpath(os.path.expanduser("~")))}
    for folder in dict.fromkeys((programs, Path(os.path.realpath(programs)))):
        for path in (folder, *folder.parents):
            status = path.lstat()
            own = path in (programs, programs.parent)
            right_kind = stat.S_ISDIR(status.st_mode) or (path != programs and stat.S_ISLNK(status.st_mode))
            fault = _fault(status, sticky=not own) if right_kind else "is not a folder"
            if fault:
                raise CanvaxError(f"{path} {fault}; or choose another folder with {FOLDER}")
            if path in homes:
                break


def read(path: Path, key: str) -> tuple[dict[str, Any], bytes] | None:
    """Header and executable of a whole, private file that was made for ``key``; another is removed, and None."""
    try:
        with _open(path) as file:
            data = file.read()
        header = _checked_header(data, key)
    except FileNotFoundError:
        return None
    except (CanvaxError, OSError) as error:
        remove(path, str(error))
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
        _warn_once(f"one alone is larger than {SIZE} allows")
        return 0
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((MAGIC, total.digest(), length, text, executable))
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            _unlink(temporary)
        _warn_once(f"{path.parent}: {error.strerror or error}")
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
        CanvaxError: the folder cannot be used (:func:`cache_path`, :func:`check_folder`).
    """
    stored = [
        StoredProgram(path, _header(path), size, used) for path, size, used in _own_files() if path.suffix == ".program"
    ]
    return sorted(stored, key=lambda program: -program.used)


def clear(unused_seconds: float = 0.0) -> tuple[int, int]:
    """Remove what has not been used for so long; returns how many files, and their bytes. Other files stay.

    Raises:
        CanvaxError: the folder cannot be used (:func:`cache_path`, :func:`check_folder`).
    """
    now = time.time()
    sizes = [size for path, size, used in _own_files() if now - used >= unused_seconds and _unlink(path)]
    return len(sizes), sum(sizes)


def _own_files() -> list[tuple[Path, int, float]]:
    """:func:`_files` of the folder in use, if there is one."""
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


def _open(path: Path) -> BinaryIO:
    """A file of ours to read; a pipe would be waited for, and a link or another user's file cannot be trusted."""
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    status = os.fstat(descriptor)
    fault = _fault(status) if stat.S_ISREG(status.st_mode) else "is not a file"
    if fault:
        os.close(descriptor)
        raise CanvaxError(f"{path} {fault}")
    return os.fdopen(descriptor, "rb")


def _checked_header(data: bytes, key: str) -> dict[str, Any]:
    """The header of a whole file that was made for ``key``.

    Raises:
        CanvaxError: it is another, or not whole.
    """
    if not data.startswith(MAGIC):
        raise CanvaxError("not a program of this version of canvax")
    begin = len(MAGIC) + _DIGEST
    if hashlib.sha256(memoryview(data)[begin:]).digest() != data[len(MAGIC) : begin]:
        raise CanvaxError("damaged")
    header = _parsed(data[_START : _START + int.from_bytes(data[begin:_START], "little")])
    if header.get("key") != key:
        raise CanvaxError("made for something else")
    return header


def _header(path: Path) -> dict[str, Any]:
    """The header of a file, to be shown; empty if it cannot be read."""
    with suppress(OSError, CanvaxError), _open(path) as file:
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


def _fault(status: os.stat_result, *, sticky: bool = False) -> str:
    """Why something on disk cannot be trusted, or nothing. Root could write anywhere, so what is root's is trusted.

    Args:
        status: of a file, a folder or a link, whose own mode says nothing.
        sticky: whether it may be a folder such as /tmp, in which anybody can write and only the owner rename.
    """
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({status.st_uid}), who could put code there"
    mode = status.st_mode
    if stat.S_ISLNK(mode) or (sticky and mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private_group(status.st_gid)):
        return "can be written to by others, who could put code there (chmod go-w makes it private)"
    return ""


def _is_private_group(group: int) -> bool:
    """Whether a group is the user's alone, as many systems make one for each user and let it write."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # no such user or group
        return False
    return group == user.pw_gid and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}


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


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warn(f"compiled programs are not stored for the next time: {reason}")
