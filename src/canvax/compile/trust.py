"""Which files of compiled programs may be run.

An executable is machine code. Two questions are asked before one is loaded: whether anybody else could have written to
its folder or put another in its place (owners and modes), and whether this user's canvax wrote it (a message
authentication code with a secret that is kept outside the folder). The second refuses a folder that was downloaded or
unpacked: such files belong to the user, but were made by a stranger.
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
from typing import BinaryIO

from canvax.errors import CanvaxError

FOLDER, SECRET = "CANVAX_CACHE_DIR", "CANVAX_CACHE_SECRET"
"""Environment variables."""

_SECRET_BYTES = 32


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


def open_private(path: Path) -> BinaryIO:
    """A file of ours to read; a pipe would be waited for, and a link or another user's file cannot be trusted."""
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    status = os.fstat(descriptor)
    fault = _fault(status) if stat.S_ISREG(status.st_mode) else "is not a file"
    if fault:
        os.close(descriptor)
        raise CanvaxError(f"{path} {fault}")
    return os.fdopen(descriptor, "rb")


def signature(digest: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of a digest with the secret of this user, or of ``SECRET``.

    Raises:
        CanvaxError: there is no secret, and none can be stored.
    """
    return hmac.digest(_secret(), digest, hashlib.sha256)


def is_ours(file: BinaryIO, digest: bytes, signed: bytes) -> bool:
    """Whether this user's canvax wrote an executable, or root for others.

    Raises:
        CanvaxError: there is no secret to ask, and none can be stored.
    """
    by_root = hasattr(os, "geteuid") and os.fstat(file.fileno()).st_uid == 0 != os.geteuid()
    return by_root or hmac.compare_digest(signature(digest), signed)


def user_folder(variable: str, unix: str, macos: str, windows: str, otherwise: str) -> Path:
    """``canvax`` in a folder of the user's: the one that ``variable`` names, else that of this system in the home.

    ``windows`` is the variable that names it there, ``otherwise`` its name below ``AppData``.

    Raises:
        RuntimeError: there is no home folder.
    """
    if os.environ.get(variable, "").startswith("/"):
        base = Path(os.environ[variable])
    elif sys.platform == "win32":
        base = Path(os.environ.get(windows) or Path.home() / "AppData" / otherwise)
    else:
        base = Path.home() / (macos if sys.platform == "darwin" else unix)
    return base / "canvax"


def secret_path() -> Path:
    """``canvax/cache-secret`` in the folder where this system keeps a user's settings.

    Raises:
        RuntimeError: there is no home folder.
    """
    return (
        user_folder("XDG_CONFIG_HOME", ".config", "Library/Application Support", "APPDATA", "Roaming") / "cache-secret"
    )


def _secret() -> bytes:
    """The secret: of the environment, else of this user's file, which is made once."""
    if named := os.environ.get(SECRET):
        return named.encode(errors="surrogateescape")
    try:
        path = secret_path()
        for _ in range(2):
            with suppress(FileNotFoundError), open_private(path) as file:
                if len(secret := file.read(_SECRET_BYTES + 1)) == _SECRET_BYTES:
                    return secret
                raise CanvaxError(f"{path} is damaged: remove it")
            _make_secret(path)
        raise CanvaxError(f"{path} cannot be read")
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CanvaxError(
            f"the secret that marks this user's programs cannot be stored ({reason}); set {SECRET} to one"
        ) from None


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
