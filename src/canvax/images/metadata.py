"""The metadata of an image: written into a PNG, read back from PNGs of canvax and of other programs.

A PNG of canvax carries two texts: ``parameters``, in the form that A1111 and its relatives read, and ``canvax``, the
whole metadata as JSON. Reading looks at the PNG's own structure and never decodes pixels, so an image that claims to
be enormous costs nothing. (Format: the PNG specification, sections 5 and 11.3.3.)
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from canvax.errors import CanvaxError, InputError
from canvax.images.infotext import from_infotext, to_infotext

if TYPE_CHECKING:
    from PIL.Image import Image

JSON_TEXT = "canvax"
INFOTEXT = "parameters"

MAX_TEXT = 4 << 20
"""The longest text that is read, in bytes, before and after it is unpacked."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_MAX_CHUNKS = 100_000


def save_png(path: str | Path, image: Image, metadata: Mapping[str, Any]) -> Path:
    """Write an image with its metadata, whole or not at all, and never over a file that is there.

    Args:
        path: the file to make, in a folder that exists.
        image: what to write.
        metadata: as in :attr:`canvax.Result.metadata`; the metadata of a grid is ``{"grid": [metadata, ...]}``.

    Raises:
        InputError: the file exists, even if another process made it a moment ago.
        CanvaxError: it cannot be written.
    """
    from PIL.PngImagePlugin import PngInfo

    path = Path(path)
    texts = PngInfo()
    if metadata:
        grid = metadata.get("grid")
        texts.add_text(INFOTEXT, _encodable(to_infotext(grid[0] if grid else metadata)))
        texts.add_itxt(JSON_TEXT, _encodable(json.dumps(dict(metadata), ensure_ascii=False, default=_plain)))
    draft = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        try:
            with open(draft, "xb") as file:
                image.save(file, "PNG", pnginfo=texts)
            _publish(draft, path)
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()
    except FileExistsError:
        raise InputError(f"{path}: there is such a file already, and it is not replaced; choose another name") from None
    except OSError as error:
        raise CanvaxError(f"{path}: cannot be written ({error.strerror or error})") from error
    return path


def _publish(draft: Path, path: Path) -> None:
    """Give the finished file its name, unless the name is taken."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: claim the name, then replace what claimed it
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            os.replace(draft, path)
        except OSError:
            path.unlink()
            raise


def _encodable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot hold, such as half of a surrogate pair; the same ones as in JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python number."""
    return value.item() if hasattr(value, "item") else str(value)


MOST = 10**9 - 1
"""Numbers of files are counted below it; a greater one is something else, such as a date."""


def unique_path(folder: str | Path, seed: int, index: int = 0, *, prefix: str = "") -> Path:
    """A free name ``00001-SEED.png`` in a folder: one above the highest number there, and at least ``index``.

    Names with a ``prefix`` are counted on their own.
    """
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    numbered = re.compile(re.escape(prefix) + r"(\d{5,9})-")
    numbers = [int(match[1]) + 1 for match in map(numbered.match, names) if match and int(match[1]) < MOST]
    return folder / f"{prefix}{max([index, *numbers]):05d}-{seed}.png"


def save_numbered(
    folder: str | Path, image: Image, metadata: Mapping[str, Any], seed: int, *, prefix: str = ""
) -> Path:
    """Write an image into a folder under the next free name (:func:`unique_path`), whoever else writes there."""
    while True:
        path = unique_path(folder, seed, prefix=prefix)
        try:
            return save_png(path, image, metadata)
        except InputError:
            if not path.exists():
                raise


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How a PNG was made, with the keys of :attr:`canvax.Result.metadata`.

    PNGs of canvax give back exactly what was written. Those of A1111, Forge and stable-diffusion.cpp give the keys that
    their text tells, and under ``other`` what canvax has no key for. No pixel is decoded.

    Raises:
        InputError: no such file, not a PNG, or nothing in it that can be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            texts = dict(_texts(file, path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of a PNG") from None
    if JSON_TEXT in texts:
        try:
            metadata = json.loads(texts[JSON_TEXT], parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            metadata = None
        if isinstance(metadata, dict):
            return metadata
    if INFOTEXT in texts:
        return from_infotext(texts[INFOTEXT])
    if "workflow" in texts or "prompt" in texts:
        raise InputError(f"{path}: holds a ComfyUI workflow, which canvax cannot read; type its prompt and settings")
    raise InputError(
        f"{path}: holds no description of how it was made (no text 'parameters' or 'canvax'); editors and web sites "
        "often remove it, so use the file as it was first saved"
    )


def _finite(text: str) -> float:
    """A number of the JSON text; canvax writes none that is infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _texts(file: BinaryIO, path: Path) -> Iterator[tuple[str, str]]:
    """The texts of a PNG, in order; those under names that are not read are given as empty."""
    if file.read(len(_SIGNATURE)) != _SIGNATURE:
        raise InputError(f"{path}: is not a PNG; only PNGs carry metadata that canvax reads")
    size = os.fstat(file.fileno()).st_size
    for _ in range(_MAX_CHUNKS):
        head = file.read(8)
        length, kind = int.from_bytes(head[:4]), head[4:]
        end = file.tell() + length + 4
        if len(head) < 8 or end > size:
            raise InputError(f"{path}: ends in the middle, so it is damaged; copy or download it again")
        if kind == b"IEND":
            return
        if kind in _TEXTS:
            keyword, separator, _ = file.read(min(length, 80)).partition(b"\0")
            name = keyword.decode("latin-1") if separator else ""
            wanted = name in (JSON_TEXT, INFOTEXT)
            if wanted and length > MAX_TEXT:
                raise InputError(f"{path}: its text {name!r} is longer than {MAX_TEXT} bytes and is not read")
            file.seek(end - 4 - length + len(keyword) + 1)
            yield name, _decode(kind, file.read(length - len(keyword) - 1), path, name) if wanted else ""
        file.seek(end)
    raise InputError(f"{path}: has more than {_MAX_CHUNKS} parts and is not read")


def _decode(kind: bytes, body: bytes, path: Path, name: str) -> str:
    """The text of a chunk, given what follows its keyword."""
    packed = kind == b"zTXt"
    if packed:
        body = body[1:]
    elif kind == b"iTXt":
        packed, body = body[:1] == b"\1", body[2:]
        body = body.split(b"\0", 2)[-1]  # after the language and the translated keyword
    if packed:
        unpack = zlib.decompressobj()
        try:
            body = unpack.decompress(body, MAX_TEXT)
        except zlib.error:
            raise InputError(f"{path}: its text {name!r} is damaged; copy or download the file again") from None
        if unpack.unconsumed_tail:
            raise InputError(f"{path}: its text {name!r} is longer than {MAX_TEXT} bytes and is not read")
    try:
        return body.decode("utf-8")  # some programs write it in plain tEXt, too
    except UnicodeDecodeError:
        return body.decode("latin-1")
