"""Reads captioned images from a folder or a zip file in the usual ``imagefolder`` layout.

Captions are in ``metadata.jsonl`` or ``metadata.csv`` (columns ``file_name`` and ``text``, or another caption column),
or in .txt files with the names of the images. Other columns are kept. An image can have a mask that weights its loss: a
file in the column ``mask``, or ``a-masklabel.png`` for ``a.jpg``, as in OneTrainer. For models that edit, an image can
have references: files in the column ``reference``, or those of the same names in a second folder.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from canvax.call import MAX_SIDE
from canvax.errors import HintWarning, InputError, check_count, warn
from canvax.files import named_path
from canvax.images.convert import upright, upright_mask, upright_rgb
from canvax.types import HostArray

Opened = TypeVar("Opened")
Size = tuple[int, int]
"""Height and width in pixels."""

_NOT_UTF8 = "{}: {} is not UTF-8 text; save it as UTF-8"

METADATA = "metadata.jsonl"
TABLES = (METADATA, "metadata.csv")
CAPTION = "text"
"""The default column of captions."""
SPLITS = ("test", "validation")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MASK, MASK_ENDING = "mask", "-masklabel.png"
"""The column of masks, and the ending of a mask's file name without a column."""
REFERENCE = "reference"
"""The column of reference images: a file, or in ``.jsonl`` a list of files."""

_MOST_FILES = 1_000_000
"""Limit on the files of a folder, since all names are in memory."""
_MOST_BYTES = 1 << 30
"""Limit on the uncompressed size of a file: a zip file of a few kilobytes can declare any size."""
_MASK_FILE = "mask_file"
"""A column added to rows: the mask's path relative to the source."""
_REPEATS = re.compile(r"(\d+)_(.+)")
"""Folder names that begin with a number of repeats, as in kohya's trainers."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Captioned images, all resized and cropped to the same size.

    Attributes:
        pixels: [N, H, W, 3] uint8.
        captions: one or more captions for each image.
        rows: the other columns of each image, including ``file_name``.
        frames: height and width of each file, and top and left of the crop, in pixels of the result: [N, 4] int32.
        control: control images [N, H, W, 3] uint8, resized and cropped in the same way; None without control images.
        masks: [N, H, W] uint8, resized and cropped in the same way; white counts fully, black not at all. An image
            without a mask has a white one. None if no image has a mask.
    """

    pixels: HostArray
    captions: Sequence[Sequence[str]]
    rows: Sequence[dict[str, Any]]
    frames: HostArray
    control: HostArray | None = None
    masks: HostArray | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, chosen: Sequence[int]) -> Pictures:
        """Return the chosen images, in this order."""
        indices = list(chosen)
        if other := [i for i in indices if not -len(self) <= i < len(self)]:
            raise InputError("chosen", f"has {other[0]}, which is not one of the {len(self)} pictures")
        return Pictures(
            self.pixels[indices],
            [self.captions[i] for i in indices],
            [self.rows[i] for i in indices],
            self.frames[indices],
            None if self.control is None else self.control[indices],
            None if self.masks is None else self.masks[indices],
        )

    @property
    def masked(self) -> int:
        """The number of images with a mask."""
        return 0 if self.masks is None else sum(_MASK_FILE in row for row in self.rows)

    def digest(self) -> str:
        """Return a short hash of images, captions, control images and masks."""
        digest = hashlib.sha256(np.ascontiguousarray(self.pixels).data)
        digest.update(json.dumps([list(texts) for texts in self.captions]).encode())
        for arrays in (self.control, self.masks):
            if arrays is not None:
                digest.update(np.ascontiguousarray(arrays).data)
        return digest.hexdigest()[:16]

    def split(self, name: str) -> Pictures:
        """Return the images whose column ``split`` is ``name``; the default is "train"."""
        return self.select([i for i, row in enumerate(self.rows) if row.get("split", "train") == name])


@dataclass(frozen=True, eq=False)
class PictureFolder:
    """Captioned images of a folder or a zip file, which are read when they are needed.

    Attributes:
        files: the folder or zip file.
        captions: one or more captions for each image.
        rows: the other columns of each image, including ``file_name``.
        control: the file of each image's control image; empty without control images.
        masked: whether masks are read.
        references: the files of each image's references; empty without references.
        beside: the folder of ``references``; None if they are among ``files``.
    """

    files: _Files
    captions: Sequence[Sequence[str]]
    rows: Sequence[dict[str, Any]]
    control: Sequence[str] = ()
    masked: bool = False
    references: Sequence[tuple[str, ...]] = ()
    beside: _Files | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def source(self) -> Path:
        """The folder or zip file."""
        return self.files.source

    @property
    def masks(self) -> int:
        """The number of images with a mask that is read."""
        return sum(_MASK_FILE in row for row in self.rows) if self.masked else 0

    @property
    def repeats(self) -> HostArray:
        """The number of times that an epoch has each image: [N] int32, from names of folders such as ``10_ink``."""
        return np.array([repeats_of(row["file_name"])[0] for row in self.rows], np.int32)

    @property
    def repeated(self) -> dict[str, int]:
        """The repeats of each folder whose name has some."""
        folders = (part for row in self.rows for part in PurePosixPath(row["file_name"]).parts[:-1])
        return {part: int(match[1]) for part in dict.fromkeys(folders) if (match := _REPEATS.fullmatch(part))}

    def select(self, chosen: Sequence[int]) -> PictureFolder:
        """Return the chosen images, in this order."""
        names = ("captions", "rows", "control", "references")
        return replace(self, **{name: [part[i] for i in chosen] for name in names if (part := getattr(self, name))})

    def split(self, *names: str) -> PictureFolder:
        """Return the images whose column ``split`` is one of ``names``; the default is "train"."""
        return self.select([i for i, row in enumerate(self.rows) if row.get("split", "train") in names])

    def header(self, index: int) -> tuple[Size, str, str]:
        """Return height and width of an upright image, a hash of its file, and one of its control image and mask.

        The files are read, but not decoded.

        Raises:
            InputError: a file is missing, or the image has no header.
        """
        row = self.rows[index]
        data = self.files.read(row["file_name"])
        size = _opened(data, f"{self.source}: {row['file_name']}", partial(_upright_size, data))
        others = [*self.control[index : index + 1], *([row[_MASK_FILE]] if self.masked and _MASK_FILE in row else [])]
        rest = hashlib.sha256(b"".join(hashlib.sha256(self.files.read(name)).digest() for name in others))
        return size, hashlib.sha256(data).hexdigest(), rest.hexdigest() if others else ""

    def pair(self, index: int) -> tuple[tuple[Size, str], ...]:
        """Return height and width of each upright reference of an image, and a hash of its file.

        Raises:
            InputError: a file is missing, or has no header.
        """
        files, found = self.beside or self.files, list[tuple[Size, str]]()
        for name in self.references[index] if self.references else ():
            data = files.read(name)
            size = _opened(data, f"{files.source}: {name}", partial(_upright_size, data))
            found.append((size, hashlib.sha256(data).hexdigest()))
        return tuple(found)

    def reference(self, index: int) -> list[Image.Image]:
        """Read the references of an image, upright, RGB or RGBA."""
        files = self.beside or self.files
        return [_opened(files.read(name), f"{files.source}: {name}", upright) for name in self.references[index]]

    def pixels(self, index: int, size: Size) -> HostArray:
        """Read an image, resized to cover ``size`` (height, width) and cropped to its centre: [H, W, 3] uint8."""
        name = self.rows[index]["file_name"]
        return _fitted(self.files.read(name), f"{self.source}: {name}", size)[0]

    def hint(self, index: int, size: Size) -> HostArray:
        """Read a control image in the same way."""
        return _fitted(self.files.read(self.control[index]), f"{self.source}: {self.control[index]}", size)[0]

    def mask(self, index: int, size: Size, sides: Size) -> HostArray | None:
        """Read the mask of an image of ``sides`` in the same way: [H, W] uint8; None if it has none."""
        row = self.rows[index]
        if not self.masked or _MASK_FILE not in row:
            return None
        name = row[_MASK_FILE]
        mask = _opened(self.files.read(name), f"{self.source}: {name}", upright_mask)
        if mask.size != (sides[1], sides[0]):
            raise InputError(
                f"{self.source}: {name} is a mask of {mask.width} x {mask.height} pixels for {row['file_name']}, which "
                f"has {sides[1]} x {sides[0]}; they must be of the same size"
            )
        # The box filter keeps the mean weight, and never exceeds white.
        return np.asarray(ImageOps.fit(mask, (size[1], size[0]), Image.Resampling.BOX))

    def read(self, size: int) -> Pictures:
        """Read all images as squares."""
        shape, frames = (size, size), np.empty((len(self), 4), np.int32)

        def fitted(names: Sequence[str]) -> HostArray:
            pixels = np.empty((len(self), *shape, 3), np.uint8)
            for i, name in enumerate(names):
                pixels[i], frames[i] = _fitted(self.files.read(name), f"{self.source}: {name}", shape)
            return pixels

        control = fitted(self.control) if self.control else None
        pixels, masks = fitted([row["file_name"] for row in self.rows]), None
        if self.masks:
            each = [self.mask(i, shape, (int(height), int(width))) for i, (height, width, *_) in enumerate(frames)]
            masks = np.stack([np.full(shape, 255, np.uint8) if mask is None else mask for mask in each])
        return Pictures(pixels, self.captions, self.rows, frames, control, masks)


def frame_of(sides: Size, size: Size) -> tuple[int, int, int, int]:
    """Return height and width of an image, and top and left of its crop to ``size``, in pixels of the result."""
    (height, width), (tall, wide) = sides, size
    grown = max(tall / height, wide / width)
    return height, width, round((height * grown - tall) / 2), round((width * grown - wide) / 2)


def repeats_of(name: str) -> tuple[int, str]:
    """Return repeats and words in the name of an image's folder, such as ``10_ink``; without them 1 and ""."""
    for part in PurePosixPath(name).parts[:-1]:
        if match := _REPEATS.fullmatch(part):
            return int(match[1]), match[2]
    return 1, ""


def read_pictures(
    source: str | Path,
    size: int,
    *,
    caption_column: str = CAPTION,
    captions: Sequence[str] = (),
    control_column: str | None = None,
    masked: bool = False,
    limit: int | None = None,
) -> Pictures:
    """Read captioned images, each resized to cover ``size`` x ``size`` pixels and cropped to its centre.

    Args:
        source: a folder, or a zip file of a folder.
        size: side of the result in pixels.
        caption_column: the column of the captions; in ``.jsonl`` a cell can be a list of captions.
        captions: captions of every image in the folder, instead of captions from files.
        control_column: the column of the files of control images, if any.
        masked: read masks, where there are any.
        limit: read only this many images.

    Raises:
        InputError: there are no images, an image or mask is missing or damaged, a mask differs in size from its image,
            or a caption is missing.
    """
    if check_count("size", size, MAX_SIDE) < 8:
        raise InputError("size", "is too small", cure="give the pixels of a side, such as 512", value=size)
    folder = open_pictures(
        source, caption_column=caption_column, captions=captions, control_column=control_column, masked=masked,
        limit=limit,
    )  # fmt: skip
    if repeated := [name for name, times in folder.repeated.items() if times != 1]:
        problem = f"the number of {repeated[0]!r:.80} is not read as repeats, all pictures count alike"
        warn(f"{folder.source}: {problem}", HintWarning)
    return folder.read(size)


def open_pictures(
    source: str | Path,
    *,
    caption_column: str = CAPTION,
    captions: Sequence[str] = (),
    control_column: str | None = None,
    masked: bool = False,
    limit: int | None = None,
    reference_column: str | None = None,
    references: str | Path | None = None,
) -> PictureFolder:
    """Read the captions of a folder or zip file, and open its images; for arguments and errors see ``read_pictures``.

    ``reference_column`` is the column of the files of reference images, if any; ``references`` a folder or zip file of
    references that have the names of the images. Where one image has a reference, all need one.

    In a folder named ``10_ink`` each image counts 10 times, and has the caption "ink" if no file has another one, as
    for kohya's trainers.
    """
    source = named_path("pictures", source)
    if limit is not None:
        check_count("limit", limit)
    if isinstance(captions, str):
        raise InputError("captions", "is a text", cure=f"give a list of captions, [{captions!r:.40}]", value=captions)
    files = _Files(source)
    if captions:
        mask_files = {row["file_name"]: row[_MASK_FILE] for row in _tables(files, source, None) if _MASK_FILE in row}
        mask_names = set(mask_files.values())
        names = [name for name in _pictures(files) if name not in mask_names][:limit]
        rows: list[dict[str, Any]] = [{"file_name": name, caption_column: list(captions)} for name in names]
        for row in rows:
            if row["file_name"] in mask_files:
                row[_MASK_FILE] = mask_files[row["file_name"]]
        if not rows:
            raise InputError(
                "pictures", "holds no pictures", cure=f"files that end in {', '.join(SUFFIXES)} are read", value=source
            )
    else:
        rows = (_tables(files, source, caption_column) or _with_text_files(files, source, caption_column))[:limit]
    if not rows:
        tables, endings = " or ".join(TABLES), ", ".join(SUFFIXES)
        needs = (
            f"it needs {tables}, or a caption for each picture, 1.txt for 1.png (pictures end in {endings}); "
            "canvax train dreambooth --lora --instance-prompt PROMPT reads no captions"
        )
        raise InputError("pictures", "holds no captioned pictures", cure=needs, value=source)
    if masked:
        _name_masks(files, source, rows)
    control = [] if control_column is None else [_control_file(row, control_column, source) for row in rows]
    pairs, beside = [_reference_files(row, reference_column, source) for row in rows], None
    if references is not None:
        if any(pairs):
            problem = f"and the column {reference_column!r} of {source} both give references"
            raise InputError("references", problem, cure="leave one out", value=references)
        beside = _second_folder(references)
        pairs = _same_names(rows, beside)
    if any(pairs) and not all(pairs):
        without = rows[pairs.index(())]["file_name"]
        raise InputError(
            "references",
            "are there for some images only",
            cure="give every image a reference, or none",
            value=without,
        )
    texts = [row.pop(caption_column) for row in rows]
    caption_lists = [[text] if isinstance(text, str) else list(text) for text in texts]
    if not any(caption.strip() for captions in caption_lists for caption in captions):
        warn(f"{source}: all captions are empty, so that pictures are learnt without words", HintWarning)
    return PictureFolder(files, caption_lists, rows, control, masked, pairs if any(pairs) else (), beside)


def check_apart(source: str | Path, folder: Path) -> None:
    """Raise InputError if ``folder`` is inside the folder of training images, unless a table lists the images.

    Images generated there would otherwise be read as training images.
    """
    pictures, where = (os.path.realpath(path) for path in (named_path("pictures", source), folder))
    if Path(where).is_relative_to(pictures) and not any(Path(pictures, table).is_file() for table in TABLES):
        raise InputError(
            "folder",
            "lies in that of the pictures, and images that are generated there would be read as some",
            cure="choose another one",
            value=folder,
        )


def _control_file(row: Mapping[str, Any], column: str, source: Path) -> str:
    """Return the path of an image's control image, which is relative to the folder of the table."""
    name = row.get(column)
    if not isinstance(name, str) or not name:
        known = ", ".join(sorted(row.keys() - {"table"}))
        raise InputError(f"{source}: {row['file_name']} has no control image {column!r}; its columns are {known}")
    return (PurePosixPath(row.get("table", "")) / name).as_posix()


def _reference_files(row: Mapping[str, Any], column: str | None, source: Path) -> tuple[str, ...]:
    """Return the paths of an image's references, which are relative to the folder of the table."""
    value = None if column is None else row.get(column)
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problem = f"of {row['file_name']} are {value!r:.80}, not the name of a file or a list of names"
        raise InputError("references", problem, value=source)
    return tuple((PurePosixPath(row.get("table", "")) / name).as_posix() for name in names if name)


def _second_folder(references: str | Path) -> _Files:
    """Open the folder of references."""
    try:
        return _Files(named_path("references", references))
    except InputError as error:
        raise error.about("references") from None


def _same_names(rows: Sequence[Mapping[str, Any]], files: _Files) -> list[tuple[str, ...]]:
    """Return the file that has the name of each image, apart from its ending; () for none."""
    by_stem = {PurePosixPath(name).with_suffix(""): name for name in _pictures(files)}
    found = [by_stem.get(PurePosixPath(row["file_name"]).with_suffix("")) for row in rows]
    if not any(found):
        raise InputError(
            "references",
            "has no image with the name of one that is trained on",
            cure=f"call that of {rows[0]['file_name']} the same",
            value=files.source,
        )
    return [(name,) if name else () for name in found]


class _Files:
    """Reads files from a folder or a zip file."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.archive = None
        if source.is_file():
            try:
                self.archive = zipfile.ZipFile(source)
            except zipfile.BadZipFile as error:
                raise InputError("pictures", "is neither a folder nor a zip file", value=source) from error
            names = self.archive.namelist()
            self.names = sorted(name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/"))
        elif source.is_dir():
            try:
                paths = list(islice(source.rglob("*"), _MOST_FILES + 1))
                self.names = sorted(path.relative_to(source).as_posix() for path in paths if path.is_file())
            except OSError as error:
                raise InputError("pictures", f"cannot be read ({error})", value=source) from None
            if len(paths) > _MOST_FILES:
                raise InputError(
                    "pictures", f"holds more than {_MOST_FILES} files", cure="is it this folder?", value=source
                )
        else:
            raise InputError("pictures", "is no folder or zip file that is there", value=source)
        self._known = frozenset(self.names)

    def read(self, name: str) -> bytes:
        if name not in self._known:
            raise InputError(f"{self.source}: {name!r} is in the table of captions, but the file is not there")
        try:
            size = self.archive.getinfo(name).file_size if self.archive else (self.source / name).stat().st_size
            if size > _MOST_BYTES:
                raise InputError(f"{self.source}: {name!r} has {size} bytes, more than {_MOST_BYTES}; is it a picture?")
            return self.archive.read(name) if self.archive else (self.source / name).read_bytes()
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: encrypted
            raise InputError(f"{self.source}: {name!r} cannot be read: {error}") from error


def _pictures(files: _Files) -> list[str]:
    """Return the names of all images whose names are not those of masks."""
    return [name for name in files.names if name.lower().endswith(SUFFIXES) and not name.lower().endswith(MASK_ENDING)]


def _name_masks(files: _Files, source: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Set ``_MASK_FILE`` in the rows with a mask."""
    by_stem = {name[: -len(MASK_ENDING)]: name for name in files.names if name.lower().endswith(MASK_ENDING)}
    for row in rows:
        if not isinstance(row.get(MASK), str | None):
            raise InputError(
                f"{source}: {row['file_name']}: {MASK} = {row[MASK]!r} is not the name of a file; with an unmasked "
                "weight of 1 masks are not read"
            )
        if name := row.get(_MASK_FILE) or by_stem.get(row["file_name"].rpartition(".")[0]):
            row[_MASK_FILE] = name


def _tables(files: _Files, source: Path, column: str | None) -> list[dict[str, Any]]:
    """Read and check the rows of all tables; [] if there is no table. Without ``column`` captions are not read."""
    tables: dict[PurePosixPath, str] = {}
    for name in (name for name in files.names if PurePosixPath(name).name in TABLES):
        if (other := tables.setdefault(PurePosixPath(name).parent, name)) != name:
            raise InputError(f"{source}: has both {other} and {name}; keep the one that the captions are to come from")
    depth = min((len(folder.parts) for folder in tables), default=0)
    return [
        row
        for folder, table in sorted(tables.items())
        if len(folder.parts) == depth
        for row in _table(files, source, table, folder, column)
    ]


def _of_json(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        problem = str(error).partition(": line ")[0]
        raise ValueError(f"line {number}, {line.strip()[:60]!r}, is not JSON ({problem}); mend it") from None


def _table(files: _Files, source: Path, table: str, folder: PurePosixPath, column: str | None) -> list[dict[str, Any]]:
    """Read the rows of a table. File names are relative to its folder, whose name can be that of a split."""
    try:
        text = files.read(table).decode("utf-8-sig")
        if table.endswith(".csv"):
            rows: list[Any] = list(csv.DictReader(io.StringIO(text), strict=True))
        else:
            rows = [_of_json(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(_NOT_UTF8.format(source, table)) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise InputError(f"{source}: {table} cannot be read: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            columns = ", ".join(str(entry) for entry in row if entry) if isinstance(row, dict) else ""
            problem = f"has no file_name; its columns are {columns:.80}" if columns else "has no file_name"
            problem += "; part columns with commas" if re.search(r"[;|\t]", columns) else ""
            if columns and "file_name" in row:
                problem = f"has the file_name {row['file_name']!r:.80}, which is not text"
            raise InputError(f"{source}: {table}: row {number} {problem}")
        if None in row:  # only in .csv
            raise InputError(
                f"{source}: {table}: row {number} has more cells than there are columns, from {row[None][0]!r:.80} "
                "on; put a caption with commas into quotation marks"
            )
        if column is not None:
            _check_caption(row, column, f"{source}: {table}", number)
        row.pop(_MASK_FILE, None)  # ignore a user's column of this name
        if isinstance(row.get(MASK), str) and row[MASK]:
            row[_MASK_FILE] = (folder / row[MASK]).as_posix()
        row["table"] = folder.as_posix()
        row["file_name"] = (folder / row["file_name"]).as_posix()
        row["split"] = row.get("split") or (folder.name if folder.name in SPLITS else "train")
    return rows


def _check_caption(row: dict[str, Any], column: str, table: str, number: int) -> None:
    caption = row.get(column)
    good = isinstance(caption, str) or (
        isinstance(caption, list) and caption and all(isinstance(text, str) for text in caption)
    )
    if not good and caption is not None:
        raise InputError(f"{table}: row {number}: its caption {column!r} is {caption!r:.80}, not text")
    if not good:
        known = ", ".join(sorted(str(key) for key in row))
        others = [str(key) for key, value in row.items() if isinstance(value, str) and key != "file_name"]
        cure = f"; write --caption-column {others[0]}, in Python caption_column={others[0]!r}" if others else ""
        raise InputError(f"{table}: row {number} has no caption {column!r}; its columns are {known}{cure}")
    try:
        nul = b"\0" in "".join(caption or "").encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{table}: the caption of row {number} is no valid Unicode: {error}") from None
    if nul:
        raise InputError(f"{table}: the caption of row {number} has a NUL character; is it text?")


def _with_text_files(files: _Files, source: Path, column: str) -> list[dict[str, Any]]:
    """Return rows for images with captions in .txt files of the same names."""
    texts = {PurePosixPath(name).with_suffix(""): name for name in files.names if name.lower().endswith(".txt")}
    pictures = _pictures(files)
    if texts and column != CAPTION:
        raise InputError(
            "caption_column",
            f"is not read: {source} has no {' or '.join(TABLES)}, and .txt files have no columns",
            cure="leave it out, or write a table",
            value=column,
        )
    words = {name: repeats_of(name)[1] for name in pictures}  # kohya's captions of pictures without a file
    without = [name for name in pictures if PurePosixPath(name).with_suffix("") not in texts and not words[name]]
    if (texts or any(words.values())) and without:
        others = f" and {len(without) - 1} more" if len(without) > 1 else ""
        raise InputError(f"{source}: {without[0]}{others} has no caption; write one into a .txt file of the same name")
    rows = []
    for name in pictures if texts or any(words.values()) else ():
        text_file = texts.get(PurePosixPath(name).with_suffix(""))
        if text_file is None:
            rows.append({"file_name": name, column: words[name]})
            continue
        try:
            rows.append({"file_name": name, column: files.read(text_file).decode("utf-8-sig").strip()})
        except UnicodeDecodeError as error:
            raise InputError(_NOT_UTF8.format(source, text_file)) from error
    return rows


def _opened(data: bytes, name: str, turned: Callable[[Image.Image], Opened]) -> Opened:
    try:
        return turned(Image.open(io.BytesIO(data)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # PIL's SyntaxError: a broken PNG
        # Pillow's message contains the address of an object.
        reason = "no kind of image that is known" if isinstance(error, UnidentifiedImageError) else error
        raise InputError(f"{name}: is not a picture that can be read: {reason}") from error


def _upright_size(data: bytes, image: Image.Image) -> Size:
    """Return height and width after the EXIF rotation, from an image's header."""
    # Pillow decodes a PNG to look for EXIF tags behind the pixels.
    tagged = image.format != "PNG" or "exif" in image.info or b"eXIf" in data
    turned = tagged and image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    width, height = image.size
    return (width, height) if turned else (height, width)


def _fitted(data: bytes, name: str, size: Size) -> tuple[HostArray, tuple[int, int, int, int]]:
    """Resize and crop an image to [*size, 3] uint8, with transparent parts on white; also return its frame."""
    picture = _opened(data, name, upright_rgb)
    (width, height), (tall, wide) = picture.size, size
    if picture.size != (wide, tall):
        # An integer reduction is an exact box filter: a 128-pixel drawing at 64 is the mean of 2 x 2 pixels.
        exact = width * tall == height * wide and width % wide == 0
        picture = (
            picture.reduce(width // wide) if exact else ImageOps.fit(picture, (wide, tall), Image.Resampling.LANCZOS)
        )
    return np.asarray(picture), frame_of((height, width), size)
