"""Which files of compiled programs may be run.

An executable is machine code. It is loaded if this user's canvax signed it with a secret that is kept outside the
folder, and if the folder and the file belong to the user or root and nobody else can write to them. A folder that was
downloaded fails the first test: the files belong to the user, but a stranger's canvax made them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from canvax.errors import CanvaxError

FOLDER, SECRET = "CANVAX_CACHE_DIR", "CANVAX_CACHE_SECRET"
"""Environment variables."""

_SECRET_BYTES = 32


def check_folder(folder: Path) -> None:
    """Refuse a folder that others can write to.

    Raises:
        CanvaxError: naming the reason and the cure.
        OSError: the folder cannot be looked at.
    """
    status = folder.lstat()
    if fault := _fault(status) if stat.S_ISDIR(status.st_mode) else "is not a folder":
        raise CanvaxError(f"{folder} {fault}; or choose another folder with {FOLDER}")


def open_private(path: Path) -> BinaryIO:
    """Open a file that nobody else can write to; a link is refused, and a pipe, whose reader would wait for ever."""
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    status = os.fstat(descriptor)
    if fault := _fault(status) if stat.S_ISREG(status.st_mode) else "is not a file":
        os.close(descriptor)
        raise CanvaxError(f"{path} {fault}")
    return os.fdopen(descriptor, "rb")


def signature(digest: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of a digest with this user's secret.

    Raises:
        CanvaxError: there is no secret, and none can be stored.
    """
    return hmac.digest(_secret(), digest, hashlib.sha256)


def is_ours(file: BinaryIO, digest: bytes, signed: bytes) -> bool:
    """Whether this user's canvax wrote a file, or root wrote it for other users.

    Raises:
        CanvaxError: there is no secret, and none can be stored.
    """
    by_root = hasattr(os, "geteuid") and os.fstat(file.fileno()).st_uid == 0 != os.geteuid()
    return by_root or hmac.compare_digest(signature(digest), signed)


def user_folder(kind: Literal["cache", "config"]) -> Path:
    """``canvax`` in the folder where this system keeps a user's caches or settings.

    Raises:
        RuntimeError: there is no home folder.
    """
    named = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
    if named.startswith("/"):
        return Path(named, "canvax")
    if sys.platform == "win32":
        variable, folder = ("LOCALAPPDATA", "Local") if kind == "cache" else ("APPDATA", "Roaming")
        return Path(os.environ.get(variable) or Path.home() / "AppData" / folder, "canvax")
    macos = "Library/Caches" if kind == "cache" else "Library/Application Support"
    return Path.home() / (macos if sys.platform == "darwin" else f".{kind}") / "canvax"


def _secret() -> bytes:
    """The secret of the environment, else that of this user's file, which is made once."""
    if named := os.environ.get(SECRET):
        return named.encode(errors="surrogateescape")
    try:
        path = user_folder("config") / "cache-secret"
        if not path.exists():
            _make_secret(path)
        with open_private(path) as file:
            secret = file.read(_SECRET_BYTES + 1)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CanvaxError(f"the secret that signs programs cannot be stored ({reason}); set {SECRET} to one") from None
    if len(secret) != _SECRET_BYTES:
        raise CanvaxError(f"{path} is damaged: remove it")
    return secret


def _make_secret(path: Path) -> None:
    """Write a new secret under its name, unless another process was faster."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _fault(status: os.stat_result) -> str:
    """Why others could have written a file or a folder; empty if they could not. Root could write anywhere."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({status.st_uid}), who could put code there"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by others, who could put code there (chmod go-w makes it private)"
    return ""
