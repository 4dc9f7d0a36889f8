"""SHA-256 hashes of model files, as other programs name a file: each is computed once and kept in the cache folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from canvax.compile.cache import cache_path
from canvax.errors import CanvaxError, InputError
from canvax.files import read_json, state_of, written
from canvax.pipelines.adapter_files import sha256_of

_FILE = "hashes.json"
"""Path of a model -> its time of change in nanoseconds, its size, and its hash."""


def known_hash(path: Path) -> str:
    """Return the hash of a file in hexadecimal digits; "" if it was not computed yet, or the file was changed since."""
    with suppress(OSError, CanvaxError, LookupError, TypeError):
        *state, digest = read_json(_kept())[str(path.resolve())]
        return str(digest) if tuple(state) == state_of(path) else ""
    return ""


def compute_hash(path: Path) -> str:
    """Return the hash of a file, which is read whole if need be.

    Raises:
        OSError: it cannot be read.
    """
    if digest := known_hash(path):
        return digest
    state, digest = state_of(path), sha256_of(path)
    with suppress(OSError, CanvaxError):  # without a cache folder it is computed again next time
        _kept().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        hashes = {}
        with suppress(CanvaxError):
            hashes = read_json(_kept())
        with written(_kept()) as temporary:
            temporary.write_text(json.dumps({**hashes, str(path.resolve()): [*(state or ()), digest]}))
    return digest


def _kept() -> Path:
    folder = cache_path()
    if folder is None:
        raise InputError("there is no cache folder")
    return folder / _FILE
