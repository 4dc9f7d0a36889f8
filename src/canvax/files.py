"""Reading files that strangers made, and writing files that appear under their name whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, ENAMETOOLONG
from io import FileIO
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError

DAMAGED = "The file is damaged or incomplete: download or copy it again."

MAX_JSON = 50_000_000
"""Bytes of the longest JSON file that is read."""

_LONGEST_NAME = 255
"""Bytes of a part of a path; the usual file systems take no more."""

_LEFTOVER = 3600
"""Seconds without a change after which a temporary file is taken for one that a killed process left."""


def named_path(argument: str, name: Any) -> Path:
    """The path of a name that somebody gave, with ``~`` for a home; nothing needs to be there.

    Args:
        argument: the argument that errors are about.
        name: a text or a ``Path``.

    Raises:
        InputError: no file can have this name: it is empty, too long, has a null byte, names an unknown user, or lies
            where nobody may look; or it is neither.
    """
    if not isinstance(name, str | os.PathLike):
        raise InputError(argument, "is not the name of a file or folder", value=name)
    if not str(name):
        raise InputError(argument, "is empty", cure="give a name", value=name)
    try:
        path = Path(name).expanduser()
        _check_length(path)
        _is_there(path)
    except (RuntimeError, ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(argument, f"cannot be a name ({reason})", value=name) from None
    return path


def state_of(name: str | Path) -> tuple[int, int] | None:
    """Return a file's time of change and size, by which a cache notices another content; None if it is not there."""
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def open_regular(path: Path) -> FileIO:
    """A file opened for reading, unbuffered, if it is a regular file.

    A pipe would be waited for and ``/dev/zero`` read without an end, so nothing else is opened.

    Raises:
        OSError: it cannot be opened, or is a pipe, device, socket or folder.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer. Windows has none, and needs O_BINARY.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a name with a null byte
        raise OSError(EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))
    return open(descriptor, "rb", buffering=0)


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        CheckpointError: the file cannot be read, is not a regular file, or is larger.
    """
    try:
        with open_regular(path) as file:
            pieces, left = [], limit + 1
            while left and (piece := file.read(left)):
                pieces.append(piece)
                left -= len(piece)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); download or copy it again.") from None
    if not left:
        raise CheckpointError(f"{path}: is larger than {limit} bytes, too much for a file of its kind.")
    return b"".join(pieces)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 50 MB.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    try:
        value = json.loads(read_bytes(path, MAX_JSON))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: is not valid JSON. {DAMAGED}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object. {DAMAGED}")
    return value


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path``, to write to; it gets the name ``path`` when the block ends without an error.

    Its name cannot be guessed and no link is followed, so that nobody else's file is written to.
    """
    temporary = temporary_name(path.parent)
    # Not tempfile.mkstemp: that file would be readable for its owner alone, and the finished one with it.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(argument: str, folder: Path) -> None:
    """Refuse a folder in which nothing can be made; one that is not there yet is looked at where it will be made.

    Args:
        argument: the argument that errors are about.
        folder: its value; nothing is left there.

    Raises:
        InputError: it is no folder, or writing there fails.
    """
    try:
        _check_length(folder)
        there = first_there(folder)
        if not there.is_dir():
            leads = ", a link that leads to no folder" if there.is_symlink() else ""
            problem = f"cannot be written to: {there} is not a folder{leads}"
            raise InputError(argument, problem, cure="choose another one", value=folder)
        with temporary_folder(there) as probe:  # permissions alone do not say it: /proc, full disks, quotas, umask
            (probe / "file").touch()
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        if not isinstance(error, InputError):
            reason, cure = getattr(error, "strerror", None) or error, "choose another one"
            if isinstance(error, FileNotFoundError) and not folder.is_absolute():
                cure = "is the working folder gone? cd to one that is there"
            raise InputError(argument, f"cannot be written to ({reason})", cure=cure, value=folder) from None
        raise


def first_there(path: Path) -> Path:
    """The path, or the first of those above it that is there, be it a link that leads nowhere."""
    while path != path.parent and not _is_there(path):
        path = path.parent
    return path


def _check_length(path: Path) -> None:
    """Where a folder of the path is not there yet, nothing else says that a name below it is too long."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise OSError(ENAMETOOLONG, os.strerror(ENAMETOOLONG))


def _is_there(path: Path) -> bool:
    """Whether there is anything of that name, be it a link that leads nowhere."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside ``parent``, removed when the block ends if it still has its name; leftovers are removed."""
    remove_leftovers(parent)
    folder = temporary_name(parent)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # under a umask that forbids looking inside, an empty one is left
            folder.rmdir()


def temporary_name(folder: Path) -> Path:
    """A name in ``folder`` that no other thread or process has."""
    return folder / f".canvax-{secrets.token_hex(8)}.partial"


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left under temporary names.

    It is called when a folder is opened for writing, not at each file: it lists the folder, whose size grows.
    """
    for path in folder.glob(".canvax-*.partial"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFTOVER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for ``json.loads``; a ValueError if a name is there twice: one would win without a word."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r:.40} is there twice")
    return fields
