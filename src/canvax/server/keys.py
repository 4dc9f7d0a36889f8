"""API keys: kept as SHA-256 digests, compared in a time that says nothing about them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from canvax.errors import InputError, warn
from canvax.files import open_regular

SHORTEST = 16
"""Characters of a key."""

LONGEST_FILE = 1 << 20
"""Bytes of a file of keys."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)
_COMMENT = re.compile(r"(?:^|\s)#.*")


class Keys:
    """The API keys.

    Args:
        digests: id of each key -> SHA-256 of the key.
        file: where they come from; None for the variable alone.
    """

    def __init__(self, digests: dict[str, bytes], file: Path | None = None) -> None:
        self._digests, self._file = digests, file

    def reread(self) -> None:
        """Read the file again, as ``read``. After an error the former keys stay.

        Raises:
            InputError: as ``read``, or there is no file.
        """
        if self._file is None:
            raise InputError("CANVAX_KEYS cannot change while the server runs; restart it, or use --keys FILE")
        again = self.read(self._file)
        self._digests = again._digests if again else self._digests

    @classmethod
    def read(cls, file: Path | None) -> Self | None:
        """Read the keys of a file, and of the variable CANVAX_KEYS; None if there is neither.

        Lines are ``id:key`` or ``id:sha256:HEX``; the variable may have commas between them too. A comment begins with
        # at the beginning of a line or after a space: keys may contain #.

        Raises:
            InputError: the file cannot be read, an entry has another form, or an id is there twice.
        """
        digests: dict[str, bytes] = {}
        if file is not None:
            try:
                with open_regular(file) as opened:
                    text = opened.read(LONGEST_FILE + 1).decode("utf-8-sig")
                    status = os.fstat(opened.fileno())
                if len(text) > LONGEST_FILE:
                    raise InputError(f"--keys {file}: is longer than {LONGEST_FILE} bytes, so it is no file of keys")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise InputError(f"--keys {file}: cannot be read ({reason})") from None
            # A Secret of Kubernetes belongs to root, and this process reads it by the permission of its group.
            owned = os.name == "posix" and os.geteuid() in (0, status.st_uid)
            if os.name == "posix" and status.st_mode & (stat.S_IROTH | stat.S_IRGRP * owned):
                warn(f"--keys {file}: others on this machine can read it; chmod 600 {file}")
            for number, line in _lines(text):
                _add(digests, line, f"--keys {file}, line {number}")
            if not digests:
                raise InputError(f"--keys {file}: holds no key; write lines such as alice:a-secret-of-16-characters")
        for number, line in _lines(os.environ.get("CANVAX_KEYS", "")):
            for part in filter(None, map(str.strip, line.split(","))):
                _add(digests, part, f"CANVAX_KEYS, line {number}")
        return cls(digests, file) if digests else None

    def client(self, authorization: str, key: str) -> str | None:
        """Return the id of the key in the headers Authorization or X-API-Key; None if no key is right.

        The time says nothing about the keys: digests are compared, each time all of them.
        """
        sent = key or _secret(authorization)
        digest = hashlib.sha256(sent.encode("utf-8", "surrogateescape")).digest()
        right = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        return right[0] if sent and right else None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something, without comments, each with its number from 1."""
    for number, line in enumerate(text.splitlines(), 1):
        if line := _COMMENT.sub("", line).strip():
            yield number, line


def _add(digests: dict[str, bytes], line: str, where: str) -> None:
    name, colon, secret = line.partition(":")
    secret = secret.strip()
    if not colon or not re.fullmatch(r"[\w.@-]{1,64}", name, re.ASCII):
        raise InputError(f"{where}: is not id:key, where an id is of letters, digits and .-_@")
    if name in digests:
        raise InputError(f"{where}: there is a key of {name} already; give each key another id")
    if secret.lower().startswith("sha256:"):
        digest = _DIGEST.fullmatch(secret)
        if digest is None:
            raise InputError(f"{where}: what follows sha256: is not 64 hexadecimal digits; write what sha256sum prints")
        digests[name] = bytes.fromhex(digest[1])
        return
    if len(secret) < SHORTEST or not (secret.isascii() and secret.isprintable()):
        raise InputError(
            f"{where}: the key of {name} is shorter than {SHORTEST} characters, or has others than ASCII; make a "
            "longer one of letters and digits"
        )
    digests[name] = hashlib.sha256(secret.encode()).digest()


def _secret(authorization: str) -> str:
    """Return the value of a Bearer header, or the password of a Basic one."""
    kind, _, value = authorization.strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""
