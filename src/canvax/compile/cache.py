"""A private folder of compiled programs: who may use it, what a file looks like, what is thrown out.

An executable is machine code. Whoever can write into the folder can run code as its owner, so a folder or file that
anyone else could have written is refused. Within that border the checks are against accidents: every file says what it
is for and carries a SHA-256 of all of it.

    programs/KEY.program    magic, SHA-256 of the rest, length of the header, header (JSON), executable
    xla/                    JAX's own persistent compilation cache
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
from typing import Any

from canvax.errors import InputError, warn

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
class Stored:
    """A file of the cache.

    Attributes:
        path: where it is.
        header: what it says about itself; None if it cannot be read.
        size: bytes on disk.
        used: when it was last used, in seconds since 1970.
    """

    path: Path
    header: dict[str, Any] | None
    size: int
    used: float


def cache_path() -> Path | None:
    """The folder that CANVAX_CACHE_DIR names, else :func:`usual_path`; None for "off". Nothing is looked at."""
    named = os.environ.get(FOLDER, "")
    if named.lower() == "off":
        return None
    return Path(named).expanduser().absolute() if named else usual_path()


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
    """The folder, made if need be and safe to use; None, after one warning, if it is not or cannot be made.

    Raises:
        InputError: CANVAX_CACHE_SIZE is not a size.
    """
    size_limit()
    try:
        folder = cache_path()
    except RuntimeError:  # no home folder
        return _without(f"there is no home folder; set {FOLDER} to a folder")
    if folder is None:
        return None
    for path in (folder, folder / "programs", folder / "xla"):
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700, parents=path is folder)
            fault = _why_not(path.stat(), stat.S_ISDIR)
        except OSError as error:
            fault = error.strerror or str(error)
        if fault:
            return _without(f"{path}: {fault}; choose another folder with {FOLDER}")
    return folder


def read(path: Path, key: str) -> tuple[dict[str, Any], bytes] | None:
    """Header and executable of a whole, private file that was made for ``key``; another is removed, and None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            fault = _why_not(os.fstat(file.fileno()), stat.S_ISREG)
            data = b"" if fault else file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        fault, data = str(error), b""
    if not fault:
        header, fault = _check(data, key)
        if header:
            with suppress(OSError):  # a folder that is only read has no order of use
                os.utime(path)
            return header, data[_START + int.from_bytes(data[_START - _LENGTH : _START], "little") :]
    forget(path, fault)
    return None


def write(path: Path, header: dict[str, Any], executable: bytes) -> int:
    """Keep an executable: whole under its name or not at all. Returns bytes written, 0 after a warning."""
    text = json.dumps(header).encode()
    length = len(text).to_bytes(_LENGTH, "little")
    total = hashlib.sha256(length)
    total.update(text)
    total.update(executable)
    size = _START + len(text) + len(executable)
    if size > size_limit():
        _without(f"one alone is larger than {SIZE} allows")
        return 0
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((MAGIC, total.digest(), length, text, executable))
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        _without(f"{path.parent}: {error.strerror or error}")
        return 0
    _evict(path)
    return size


def forget(path: Path, fault: str) -> None:
    """Remove a file that is of no use."""
    logger.debug("%s: %s; it is made again", path, fault)
    with suppress(OSError):
        path.unlink()


def programs() -> list[Stored]:
    """Every program kept, the last used first."""
    folder = cache_path()
    files = [] if folder is None else _files(folder)
    found = [_describe(path, size, used) for path, size, used in files if path.suffix == ".program"]
    return sorted(found, key=lambda one: -one.used)


def shared_bytes() -> int:
    """Bytes that JAX's own cache takes in the folder."""
    folder = cache_path()
    return 0 if folder is None else sum(size for path, size, _ in _files(folder) if path.suffix != ".program")


def clear(unused_seconds: float = 0.0) -> tuple[int, int]:
    """Remove what has not been used for so long; returns how many files, and their bytes. Other files stay."""
    folder, now = cache_path(), time.time()
    count = total = 0
    for path, size, used in [] if folder is None else _files(folder):
        if now - used >= unused_seconds:
            with suppress(OSError):
                path.unlink()
                count, total = count + 1, total + size
    return count, total


def _check(data: bytes, key: str) -> tuple[dict[str, Any] | None, str]:
    """The header, or what is wrong."""
    if not data.startswith(MAGIC):
        return None, "not a program of this version of canvax"
    begin = len(MAGIC) + _DIGEST
    if hashlib.sha256(memoryview(data)[begin:]).digest() != data[len(MAGIC) : begin]:
        return None, "damaged"
    try:
        header = json.loads(data[_START : _START + int.from_bytes(data[begin:_START], "little")])
        if header["key"] == key:
            return header, ""
    except (ValueError, KeyError, TypeError):
        pass
    return None, "made for something else"


def _why_not(status: os.stat_result, right_kind: Any) -> str:
    """Why something on disk cannot be trusted, or nothing. Root could write anywhere, so what is root's is trusted."""
    if not right_kind(status.st_mode):
        return "not a folder" if right_kind is stat.S_ISDIR else "not a file"
    if hasattr(os, "geteuid"):
        if status.st_uid not in (os.geteuid(), 0):
            return f"belongs to another user ({status.st_uid}), who could put code there"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "can be written to by others, who could put code there (chmod go-w makes it private)"
    return ""


def _files(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Files of the cache, their sizes and when they were last used; whatever else lies there is not touched."""
    for pattern in ("programs/*.program", "programs/.*.part", f"xla/{'[0-9a-f]' * 16}/*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    yield path, status.st_size, status.st_mtime


def _describe(path: Path, size: int, used: float) -> Stored:
    header = None
    with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        start = file.read(_START)
        length = int.from_bytes(start[-_LENGTH:], "little")
        if start.startswith(MAGIC) and length <= _MAX_HEADER:
            header = json.loads(file.read(length))
    return Stored(path, header if isinstance(header, dict) else None, size, used)


def _evict(just_written: Path) -> None:
    """Throw out what was used longest ago until the rest fits, and what dead processes left."""
    found = sorted(_files(just_written.parent.parent), key=lambda one: one[2])
    total, limit, now = sum(size for _, size, _ in found), size_limit(), time.time()
    for path, size, used in found:
        leftover = path.suffix == ".part" and now - used > _LEFTOVER
        if leftover or (total > limit and path != just_written):
            with suppress(OSError):
                path.unlink()
                total -= size


def _without(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warn(f"compiled programs are not kept for the next time: {reason}")
