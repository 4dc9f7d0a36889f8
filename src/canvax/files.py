"""Read files of strangers, and write files that appear under their name whole or not at all."""

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
"""The most bytes of a JSON file."""

_LONGEST_NAME = 255
"""The most bytes of a part of a path in the usual file systems."""

_LEFTOVER = 3600
"""Seconds without a change after which a temporary file counts as left by a killed process."""


def named_path(argument: str, name: Any) -> Path:
    """Return the path of a user's name for a file, with ``~`` for a home; the file need not exist.

    Args:
        argument: the argument that errors are about.
        name: a text or a ``Path``.

    Raises:
        InputError: no file can have this name: it is empty, too long, has a null byte, names an unknown user, or is in
            a folder that cannot be read; or it is neither a text nor a path.
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
    """Return a file's time of change and size, which tell a cache of another content; None if it does not exist."""
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered.

    Other files are refused: reading a pipe would wait, and ``/dev/zero`` has no end.

    Raises:
        OSError: the file cannot be opened, or is a pipe, device, socket or folder.
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
    """Read a regular file of at most ``limit`` bytes.

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
    """Read a JSON object from a file of at most 50 MB.

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
    """Yield a new, empty file in the folder of ``path``; it gets the name ``path`` after the block, unless this fails.

    Its name cannot be guessed and no link is followed, so that no other user's file is written to.
    """
    temporary = temporary_name(path.parent)
    # Not tempfile.mkstemp: only the owner could read that file, and so the finished one.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(argument: str, folder: Path) -> None:
    """Refuse a folder that cannot be written to; if it does not exist, check the folder in which it will be made.

    Args:
        argument: the argument that errors are about.
        folder: its value; the check leaves no file there.

    Raises:
        InputError: it is not a folder, or writing there fails.
    """
    try:
        _check_length(folder)
        there = first_there(folder)
        if not there.is_dir():
            leads = ", a link that leads to no folder" if there.is_symlink() else ""
            problem = f"cannot be written to: {there} is not a folder{leads}"
            raise InputError(argument, problem, cure="choose another one", value=folder)
        with temporary_folder(there) as probe:  # permissions do not tell: /proc, full disks, quotas, umask
            (probe / "file").touch()
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        if not isinstance(error, InputError):
            reason, cure = getattr(error, "strerror", None) or error, "choose another one"
            if isinstance(error, FileNotFoundError) and not folder.is_absolute():
                cure = "is the working folder gone? cd to one that is there"
            raise InputError(argument, f"cannot be written to ({reason})", cure=cure, value=folder) from None
        raise


def first_there(path: Path) -> Path:
    """Return the path, or the first folder above it that exists, which may be a broken link."""
    while path != path.parent and not _is_there(path):
        path = path.parent
    return path


def _check_length(path: Path) -> None:
    """Refuse a name that is too long: in a folder that does not exist yet, no other check notices it."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise OSError(ENAMETOOLONG, os.strerror(ENAMETOOLONG))


def _is_there(path: Path) -> bool:
    """Return True if the path exists, or is a broken link."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in ``parent``, removed after the block if it still has its name; remove leftovers first."""
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
    """Return a name in ``folder`` that no other thread or process has."""
    return folder / f".canvax-{secrets.token_hex(8)}.partial"


def remove_leftovers(folder: Path) -> None:
    """Remove files that killed processes left under temporary names.

    Call this when a folder is opened for writing, not for each file: it lists the folder, which grows.
    """
    for path in folder.glob(".canvax-*.partial"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFTOVER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object for ``json.loads``; raise ValueError for a repeated name, of which one would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r:.40} is there twice")
    return fields
