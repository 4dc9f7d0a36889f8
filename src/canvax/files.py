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
from errno import EINVAL
from io import FileIO
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError

DAMAGED = "The file is damaged or incomplete: download or copy it again."

MAX_JSON = 50_000_000
"""Bytes of the longest JSON file that is read."""

_LEFTOVER = 3600
"""Seconds without a change after which a temporary file is taken for one that a killed process left."""


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
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(EINVAL, "it is not a regular file", str(path))
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


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside ``parent``, removed when the block ends if it still has its name."""
    folder = temporary_name(parent)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_name(folder: Path) -> Path:
    """A name that no other thread or process has; what killed processes left under such names is removed."""
    for left in folder.glob(".canvax-*.partial"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _LEFTOVER:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return folder / f".canvax-{secrets.token_hex(8)}.partial"
