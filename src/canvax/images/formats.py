"""Storage of metadata in each file format, and images that write their metadata when they are saved.

PNG: the texts ``parameters`` (read by A1111 and related programs) and ``canvax`` (JSON). JPEG and WebP: EXIF, with
``parameters`` as UserComment, as in A1111, and the JSON as MakerNote (EXIF 2.3, tags 0x9286 and 0x927C).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from canvax.errors import CanvaxError, HintWarning, InputError, shown, warn
from canvax.files import check_writable, named_path
from canvax.files import written as whole
from canvax.images.convert import on_white
from canvax.images.infotext import to_infotext
from canvax.images.keys import KEYS

JSON_TEXT = "canvax"
INFOTEXT = "parameters"
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}

MAX_EXIF = 65_000
"""Bytes of EXIF that fit into a JPEG, approximately: a segment of 64 KiB."""

HAVE_PATHS = tuple(name for name, key in KEYS.items() if key.has_paths)
"""Keys of metadata under which paths can be."""

_EXIF, _MAKER_NOTE, _USER_COMMENT = 0x8769, 0x927C, 0x9286
_UTF16 = b"UNICODE\0"
# PNG uses run-length encoding only: a photograph of 1024 x 1024 takes 0.08 s instead of 0.2 to 0.6 s, and fewer bytes.
# Drawings take up to a tenth more bytes.
_QUALITY = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"lossless": True, "exact": True},
    "PNG": {"compress_type": zlib.Z_RLE},
}


def format_of(path: str | Path, argument: str = "path") -> str:
    """Return Pillow's name of the format that a file's extension selects; an error is about ``argument``.

    Raises:
        InputError: the extension is not in ``FORMATS``.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        what = f"ends in {suffix}, which is not written" if suffix else "has no ending"
        raise InputError(argument, what, cure="end it with .png, .jpg or .webp", value=path)
    return FORMATS[suffix]


def names_file(path: Path) -> bool:
    """Return whether the path of an output is an image file, not a folder."""
    return path.suffix.lower() in FORMATS and not path.is_dir()


def new_image(argument: str, name: Any) -> Path:
    """Check, before any work is done, that an image can be written as ``name``; return the path.

    Raises:
        InputError: the extension is unknown, the file exists, or it cannot be written; about ``argument``.
    """
    path = named_path(argument, name)
    format_of(path, argument)
    if os.path.lexists(path):
        raise InputError(argument, "exists and is not replaced", cure="choose another name", value=path)
    if not path.parent.is_dir():
        problem = f"is not in a folder that can be written to: {path.parent}"
        raise InputError(argument, problem, cure="choose another one", value=path)
    check_writable(argument, path.parent)
    return path


def written(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as it is written to files: each local path becomes ``./name``, since its folders are private."""
    if "grid" in metadata:
        return {**metadata, "grid": [written(entry) for entry in metadata["grid"]]}
    return {name: _without_folders(value) if name in HAVE_PATHS else value for name, value in metadata.items()}


def _without_folders(value: Any) -> Any:
    """Replace each local path in ``value`` by ``./`` and its last part. Names of Hub repositories are unchanged."""
    if isinstance(value, Mapping):
        return {name: _without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(inner) for inner in value]
    if isinstance(value, str) and (
        os.path.isabs(value) or value.startswith(("~", "./", "../")) or os.path.exists(os.path.expanduser(value))
    ):
        return f"./{os.path.basename(os.path.normpath(value))}"
    return value


def save_keywords(kind: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``Image.save`` that write ``metadata`` to a file of this format."""
    keywords = dict(_QUALITY[kind])
    if not metadata:
        return keywords
    metadata = written(metadata)
    grid = metadata.get("grid")
    info = _encodable(to_infotext(grid[0] if grid else metadata))
    text = _encodable(json.dumps(metadata, ensure_ascii=False, default=_plain))
    if kind == "PNG":
        keywords["pnginfo"] = texts = PngInfo()
        texts.add_text(INFOTEXT, info)
        texts.add_itxt(JSON_TEXT, text)
        return keywords
    exif = Image.Exif()
    tags = exif.get_ifd(_EXIF)
    tags[_USER_COMMENT] = _UTF16 + info.encode("utf-16-be")
    tags[_MAKER_NOTE] = text.encode()
    if len(exif.tobytes()) > MAX_EXIF and kind == "JPEG":
        warn(HintWarning(f"an image's metadata is longer than the {MAX_EXIF} bytes of a JPEG and left out; use PNG"))
        return keywords
    return keywords | {"exif": exif}


def storable(image: Image.Image, kind: str) -> Image.Image:
    """Return an image as a file of this format can hold it: for JPEG, put transparent parts on white."""
    if kind != "JPEG" or not image.has_transparency_data:
        return image
    if any(image.convert("RGBA").getchannel("A").histogram()[:255]):
        warn(HintWarning("a JPEG has no transparency: transparent parts are on white; use PNG or WebP to keep them"))
    return on_white(image)


def quality_keywords(kind: str, quality: int | None) -> dict[str, Any]:
    """Return the keywords of ``Image.save`` for a JPEG or WebP ``quality``; none for None or PNG."""
    if quality is None or kind == "PNG":
        return {}
    return {"quality": quality} | ({"lossless": False} if kind == "WEBP" else {})


def texts_of_exif(file: BinaryIO, path: Path) -> dict[str, str]:
    """Read the texts of a JPEG or WebP, under the names they have in a PNG, without decoding pixels.

    Raises:
        InputError: the file is neither.
    """
    try:
        with Image.open(file, formats=("JPEG", "WEBP")) as image:
            return exif_texts(image)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError):
        raise InputError(f"{path}: is not a PNG, JPEG or WebP that can be read") from None


def exif_texts(image: Image.Image) -> dict[str, str]:
    """Return the texts in the EXIF of an image, under the names they have in a PNG."""
    tags = image.getexif().get_ifd(_EXIF)
    texts = {}
    if isinstance(note := tags.get(_MAKER_NOTE), bytes):
        texts[JSON_TEXT] = note.decode("utf-8", "replace")
    comment = tags.get(_USER_COMMENT)
    if isinstance(comment, bytes) and comment.startswith(_UTF16):
        texts[INFOTEXT] = comment.removeprefix(_UTF16).decode("utf-16-be", "replace")
    return texts


class GeneratedImage(Image.Image):
    """A PIL image that writes its generation settings into the PNG, JPEG or WebP file it is saved as.

    Images that Pillow derives from it, e.g. a smaller copy, are ordinary images.

    Attributes:
        metadata: as in ``canvax.Result.metadata``.
    """

    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, image: Image.Image, metadata: Mapping[str, Any]) -> GeneratedImage:
        """Copy ``image`` and attach ``metadata``."""
        copy = cls()
        copy.__setstate__([{}, image.mode, image.size, None, image.tobytes(), metadata])
        return copy

    def __getstate__(self) -> list[Any]:
        return [*super().__getstate__(), getattr(self, "metadata", {})]

    def __setstate__(self, state: list[Any]) -> None:
        super().__setstate__(state[:5])
        self.metadata = state[5] if len(state) > 5 else {}

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """Save like ``PIL.Image.Image.save``, and add the metadata; ``params`` take precedence.

        A file is written atomically.
        """
        if not isinstance(format, str | None):
            raise InputError("format", "is not the name of a format, such as PNG", value=format)
        name = fp if isinstance(fp, str | os.PathLike) else getattr(fp, "name", "")
        suffix = Path(str(name)).suffix.lower()
        kind = str(format or FORMATS.get(suffix, "")).upper().replace("JPG", "JPEG")
        keywords = save_keywords(kind, getattr(self, "metadata", {})) if kind in _QUALITY else {}
        kind = kind or Image.registered_extensions().get(suffix, "")
        try:
            path = Path(name).resolve() if isinstance(fp, str | os.PathLike) and kind else None
            if path is None or (path.exists() and not path.is_file()):
                self._as(kind, fp, format, **keywords | params)
            else:
                with whole(path) as draft, open(draft, "wb") as file:
                    self._as(kind, file, kind, **keywords | params)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            problem = f"{name} cannot be written ({error.strerror}); give a name in a folder that is there"
            raise InputError(problem) from None
        except OSError as error:
            raise CanvaxError(f"{name or shown(fp)} cannot be written ({error.strerror or error})") from None
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:  # Pillow's errors about a format
            raise InputError(
                f"{name or shown(fp)} cannot be saved ({error}); end it with .png, .jpg or .webp"
            ) from None

    def _as(self, kind: str, fp: Any, format: str | None, **params: Any) -> None:
        image = storable(self, kind)
        super().save(fp, format, **params) if image is self else image.save(fp, format, **params)


def _encodable(text: str) -> str:
    """Escape, as JSON does, what UTF-8 cannot encode, e.g. half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python number."""
    return value.item() if hasattr(value, "item") else str(value)
