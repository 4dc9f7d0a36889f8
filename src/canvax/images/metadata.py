"""Writes metadata into image files, and reads it from files of canvax and of other programs.

``canvax.images.formats`` defines where it is stored. Reading parses a PNG's chunks and never decodes pixels, so an
image that declares an enormous size costs nothing (PNG specification, sections 5 and 11.3.3).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from canvax.errors import CanvaxError, InputError
from canvax.files import open_regular, temporary_name
from canvax.images.comfy import from_comfy_graph
from canvax.images.infotext import from_infotext
from canvax.images.keys import KEYS

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TEXT = 4 << 20
"""Limit on the length of a text, in bytes, before and after decompression."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_MAX_CHUNKS = 100_000


def save_image(path: str | Path, image: Image, metadata: Mapping[str, Any], *, overwrite: bool = False) -> Path:
    """Write an image with its metadata atomically; replace an existing file only with ``overwrite``.

    Args:
        path: the new file, in an existing folder; its extension, .png, .jpg or .webp, selects the format.
        image: the image to write.
        metadata: as in ``canvax.Result.metadata``; the metadata of a grid is ``{"grid": [metadata, ...]}``.
        overwrite: whether a file of this name is replaced.

    Raises:
        InputError: the file exists, even if another process created it a moment ago, or its extension is unknown.
        CanvaxError: the file cannot be written.
    """
    from canvax.images.formats import format_of, save_keywords, storable

    path = Path(path)
    kind = format_of(path)
    keywords = save_keywords(kind, metadata)
    draft = temporary_name(path.parent)
    try:
        try:
            with open(draft, "xb") as file:
                storable(image, kind).save(file, kind, **keywords)
            os.replace(draft, path) if overwrite else _publish(draft, path)
        finally:
            with suppress(OSError, ValueError):
                draft.unlink()
    except FileExistsError:
        raise InputError(f"{path}: there is such a file already, and it is not replaced; choose another name") from None
    except (OSError, ValueError) as error:
        raise CanvaxError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    return path


def _publish(draft: Path, path: Path) -> None:
    """Rename the finished file to ``path``, unless that exists."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system: claim the name with an empty file, then replace that
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            os.replace(draft, path)
        except OSError:
            path.unlink()
            raise


MOST = 10**9 - 1
"""Larger numbers in file names are not counters, but e.g. dates."""


_NAMING, _BEING_WRITTEN = threading.Lock(), set[Path]()
"""Names of files that threads are writing: they are in no listing of their folder yet."""


def unique_path(folder: str | Path, seed: int, *, prefix: str = "") -> Path:
    """Return a free name ``00001-SEED.png`` in a folder: above the highest number there.

    Each ``prefix`` is counted separately.

    Raises:
        InputError: the folder cannot be listed.
    """
    folder = Path(folder)
    names = [path.name for path in tuple(_BEING_WRITTEN) if path.parent == folder]  # before those that are written
    try:
        names += os.listdir(folder) if folder.is_dir() else []
    except OSError as error:
        why = f"cannot be looked into ({error.strerror}), so that no free name is known"
        raise InputError(f"{folder}: {why}; choose another folder") from None
    numbered = re.compile(re.escape(prefix) + r"(\d{5,9})-")
    numbers = [int(match[1]) + 1 for match in map(numbered.match, names) if match and int(match[1]) < MOST]
    return folder / f"{prefix}{max(numbers, default=0):05d}-{seed}.png"


def save_numbered(
    folder: str | Path, image: Image, metadata: Mapping[str, Any], seed: int, *, prefix: str = ""
) -> Path:
    """Write an image under the next free name (``unique_path``), also if other processes write to the folder.

    Images that threads of this process write at once have different numbers.
    """
    while True:
        with _NAMING:
            path = unique_path(folder, seed, prefix=prefix)
            _BEING_WRITTEN.add(path)
        try:
            return save_image(path, image, metadata)
        except InputError:
            if not path.exists():
                raise
        finally:
            _BEING_WRITTEN.discard(path)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Read the settings an image was generated with from a PNG, JPEG or WebP, as in ``canvax.Result.metadata``.

    For files of canvax the result is exactly what was written. For files of A1111, Forge and stable-diffusion.cpp it
    has the settings in their text, for files of ComfyUI those of a graph with one sampler, or with a second one as
    hires fix; ``other`` contains those without an equivalent in canvax. No pixel is decoded.

    Raises:
        InputError: the file does not exist, is not a PNG, JPEG or WebP, or has no readable metadata.
    """
    path = Path(path)
    try:
        with open_regular(path) as raw, BufferedReader(raw) as file:
            return metadata_in(file, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of an image") from None


COMFY_TEXT = "prompt"
"""Name of the text in which ComfyUI stores the graph that it ran."""

_GRAPH = "ComfyUI (a graph without a sampler, or with several that are no hires fix)"
_OTHERS = {
    "workflow": _GRAPH, "prompt": _GRAPH, "invokeai_metadata": "InvokeAI",
    "sd-metadata": "InvokeAI", "Dream": "InvokeAI", "fooocus_scheme": "Fooocus",
}  # fmt: skip
"""Name of a PNG text -> the program that writes it."""


class UnreadError(InputError):
    """A file holds the settings of a program or a graph that canvax does not read."""


def metadata_in(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Read the metadata of an open file, like ``read_metadata``; errors name ``path``."""
    return _parsed(_texts_of(file, path), path)


def metadata_of(image: Image, name: str = "the image") -> dict[str, Any]:
    """Read the metadata of an image in memory, like ``read_metadata``; errors call it ``name``.

    Pillow keeps the texts of a file that it opened, until the image is changed.
    """
    from canvax.images.formats import exif_texts

    if isinstance(metadata := getattr(image, "metadata", None), Mapping):
        return dict(metadata)
    texts = {key: text for key, text in image.info.items() if isinstance(key, str) and isinstance(text, str)}
    return _parsed(exif_texts(image) | texts, name)


def _parsed(texts: Mapping[str, str], path: Path | str) -> dict[str, Any]:
    from canvax.images.formats import INFOTEXT, JSON_TEXT

    if (metadata := _canvax_metadata(texts.get(JSON_TEXT))) is not None:
        return metadata
    if texts.get(INFOTEXT, "").strip():
        return from_infotext(texts[INFOTEXT])
    if damaged := [repr(name) for name in (JSON_TEXT, INFOTEXT) if name in texts]:
        raise InputError(
            f"{path}: its description of how it was made, the text {' and '.join(damaged)}, is damaged or empty; use "
            "the file as it was first saved"
        )
    if (metadata := from_comfy_graph(texts.get(COMFY_TEXT, ""))) is not None:
        return metadata
    if other := next((program for name, program in _OTHERS.items() if name in texts), None):
        raise UnreadError(f"{path}: holds settings of {other}, which canvax cannot read; type its prompt and settings")
    raise InputError(
        f"{path}: holds no description of how it was made (no text 'parameters' or 'canvax'); editors and web sites "
        "often remove it, so use the file as it was first saved"
    )


def canvax_metadata_in(file: BinaryIO, path: Path) -> dict[str, Any] | None:
    """Read the metadata of an open file; return None if canvax did not write it.

    Raises:
        InputError: the file is not a PNG, JPEG or WebP, or is damaged.
    """
    from canvax.images.formats import JSON_TEXT

    return _canvax_metadata(_texts_of(file, path).get(JSON_TEXT))


def _texts_of(file: BinaryIO, path: Path) -> dict[str, str]:
    """Read the texts in which programs store settings."""
    from canvax.images.formats import INFOTEXT, JSON_TEXT, texts_of_exif

    is_png = file.read(len(_SIGNATURE)) == _SIGNATURE
    file.seek(0)
    return dict(_texts(file, path, (JSON_TEXT, INFOTEXT, COMFY_TEXT))) if is_png else texts_of_exif(file, path)


def prompt_of(metadata: Mapping[str, Any]) -> str:
    """Return the prompt of an image; of one that was enlarged without a prompt, that of the image before."""
    enlarged = metadata.get("upscale")
    before = enlarged.get("prompt") if isinstance(enlarged, dict) else None
    return next((text for text in (metadata.get("prompt"), before) if text and isinstance(text, str)), "")


def prompt_in(file: BinaryIO) -> str:
    """Return the prompt that the metadata of an open image file holds; empty if it holds none."""
    with suppress(InputError, ValueError, RecursionError):
        return prompt_of(metadata_in(file, Path("the image")))
    return ""


def check_kinds(path: Path | str, metadata: Mapping[str, Any]) -> None:
    """Raise InputError if an entry of metadata to generate from has the wrong type.

    Reading does not check this, so that damaged metadata can still be shown.
    """
    for name, key in KEYS.items():
        value = metadata.get(name)
        if key.kind and value is not None and not isinstance(value, key.kind):
            wanted = {dict: "a table", list: "a list", str: "text"}.get(key.kind, "true or false")
            raise InputError(
                f"{path}: its {name} {value!r:.80} is not {wanted}; its description was changed: use the file as it "
                "was first saved"
            )


def _canvax_metadata(text: str | None) -> dict[str, Any] | None:
    """Parse the JSON that canvax writes; return None if it is something else, without a prompt or a grid's images."""
    try:
        metadata = json.loads(text or "", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) and metadata.keys() & {"prompt", "grid"} else None


def _finite(text: str) -> float:
    """Parse a number of the JSON text; canvax never writes infinity or NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _texts(file: BinaryIO, path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each text chunk of a PNG, in order; the text is empty if not in ``names``."""
    size = file.seek(0, os.SEEK_END)
    file.seek(len(_SIGNATURE))
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
            wanted = name in names
            if wanted and length > MAX_TEXT:
                raise InputError(f"{path}: its text {name!r} is longer than {MAX_TEXT} bytes and is not read")
            file.seek(end - 4 - length + len(keyword) + 1)
            yield name, _decode(kind, file.read(length - len(keyword) - 1), path, name) if wanted else ""
        file.seek(end)
    raise InputError(f"{path}: has more than {_MAX_CHUNKS} parts and is not read")


def _decode(kind: bytes, body: bytes, path: Path, name: str) -> str:
    """Decode the text of a chunk from ``body``, the bytes after its keyword."""
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
        return body.decode("utf-8")  # some programs write UTF-8 even in tEXt chunks
    except UnicodeDecodeError:
        return body.decode("latin-1")
