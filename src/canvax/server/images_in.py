"""Images that clients send: small PNG, JPEG or WebP files, recognised by their content. No URL is ever fetched."""

from __future__ import annotations

import base64
import binascii
import re
from io import BytesIO

from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from canvax.errors import InputError
from canvax.images.formats import FORMATS
from canvax.images.inputs import read_images
from canvax.server.jobs import Rejected

MOST_PIXELS = 1 << 24
"""Pixels of the largest image that is decoded, 4096 x 4096: a file of a few bytes may claim any number."""

_DATA_URL = re.compile(r"data:[\w.+-]{0,40}/?[\w.+-]{0,40}(?:;[\w.+=-]{0,40}){0,4},")
_SOMEWHERE = re.compile(r"\s*(?:[a-zA-Z][a-zA-Z0-9+.-]{1,20}:|//)")


class Pixels:
    """Several images of one request, which together may have as many pixels as one."""

    def __init__(self) -> None:
        self._left = MOST_PIXELS

    def read(self, name: str, sent: str | bytes, *, grey: bool = False) -> Image.Image:
        """Decode a file, or the base64 text of one, as ``colours`` returns it.

        Raises:
            Rejected: see ``decode``, ``bytes_of_text`` and ``colours``.
        """
        return colours(name, self.decode(name, bytes_of_text(name, sent) if isinstance(sent, str) else sent), grey=grey)

    def decode(self, name: str, data: bytes) -> Image.Image:
        """Decode a PNG, JPEG or WebP, turned upright, with its transparency; ``name`` is the field, for errors.

        Raises:
            Rejected: the file is of another kind, too large, animated or damaged.
        """
        try:
            with Image.open(BytesIO(data), formats=tuple(dict.fromkeys(FORMATS.values()))) as image:
                _check(name, image, self._left)
                image.load()
                self._left -= image.width * image.height
                return ImageOps.exif_transpose(image)
        except UnidentifiedImageError:
            raise _refused(name, "is not a PNG, JPEG or WebP; send one") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise _too_large(name) from None
        except (OSError, ValueError, SyntaxError, RuntimeError, LookupError, TypeError, ArithmeticError, EOFError):
            # Pillow's own words may hold addresses of memory.
            raise _refused(name, "is damaged; save it again and send that") from None


def _check(name: str, image: Image.Image, most: int) -> None:
    """Look at the header; no pixel is decoded yet."""
    if image.width * image.height > most:
        raise (
            _too_large(name)
            if most == MOST_PIXELS
            else _refused(name, f"has, with the images before it, more than {MOST_PIXELS} pixels; send smaller ones")
        )
    if min(image.size) < 2:
        raise _refused(name, f"has {image.width} x {image.height} pixels; 2 x 2 is the least")
    if image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False):
        raise _refused(name, "is animated; save one of its frames as an image")


def bytes_of_text(name: str, text: str) -> bytes:
    """Return the bytes of base64, bare or as a data: URL.

    Raises:
        Rejected: the text is not base64.
    """
    if head := _DATA_URL.match(text):
        if not head[0].endswith(";base64,"):
            raise _refused(name, "is a data: URL without base64; send the file itself as base64")
        text = text[head.end() :]
    elif _SOMEWHERE.match(text):
        raise _refused(name, "is an address; nothing is fetched here, so send the file itself as base64")
    bare = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise _refused(name, "is not base64; send a PNG, JPEG or WebP as base64 or as a data: URL") from None


def colours(name: str, image: Image.Image, *, grey: bool = False) -> Image.Image:
    """Return an image as RGB, or as RGBA if it has an alpha channel; with ``grey`` as a mask.

    White parts of a mask are generated anew. In an image with transparency the transparent parts are the mask.

    Raises:
        Rejected: the image has CMYK colours.
    """
    try:
        read = read_images(name, image, 1, grey=grey, alpha=True)[0]
        read.info = {}  # texts and profiles of the file's: nothing but pixels gets in
        return read
    except InputError as error:
        raise Rejected(400, "invalid_image", str(error), param=name) from None


def transparent_mask(name: str, image: Image.Image) -> Image.Image:
    """Return the mask of an image whose transparent parts are to be generated anew: white there.

    Raises:
        Rejected: the image has no transparency.
    """
    if not image.has_transparency_data:
        raise _refused(name, "has no transparency; make the part transparent that is to be generated anew")
    return ImageChops.invert(image.convert("RGBA").getchannel("A"))


def _too_large(name: str) -> Rejected:
    return _refused(name, f"has more than {MOST_PIXELS} pixels; send a smaller one")


def _refused(name: str, why: str) -> Rejected:
    return Rejected(400, "invalid_image", f"{name} {why}", param=name)
