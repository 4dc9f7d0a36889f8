"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, to write to; the file gets its own when the block ends without an error."""
    temporary = partial_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A temporary name beside ``path`` for this process; what processes that were killed left under theirs goes.

    Of this host's processes alone: the folder may be one that several hosts write to.
    """
    stem = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(stem)}*.partial"):
        process = left.name[len(stem) :].removesuffix(".partial")
        if process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f"{stem}{os.getpid()}.partial")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
