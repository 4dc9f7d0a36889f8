"""The folder that ``canvax ui`` saves images into, as the page's history. Nothing outside this folder is read.

Only images that canvax wrote, with their metadata inside, are listed or sent. Deleted ones move into ``deleted/``, and
those of a sheet into a folder of its name.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response

from canvax.errors import InputError
from canvax.files import open_regular
from canvax.images.convert import on_white
from canvax.images.formats import FORMATS
from canvax.images.grid import make_sheet
from canvax.images.metadata import canvax_metadata_in, prompt_of, save_numbered
from canvax.server.answers import decoding, json_answer, read_json
from canvax.server.jobs import Rejected
from canvax.server.jobs_api import as_job, error
from canvax.server.paths import ApiPath, Operation

PAGE = 60
"""Images of one answer."""

_MOST_READ = 1000
"""Files that are read for one answer, most of which may be other programs'."""

MOST_CELLS = 144
"""Cells of a sheet at most."""

_DELETED, _GRID = "deleted", "grid-"
_NAME = re.compile(r"[^./\\:\0][^/\\:\0]*\.(?:png|jpe?g|webp)", re.IGNORECASE)
_CURSOR = re.compile(r"(\d{1,20})-(.{1,255})", re.DOTALL)


Label = Annotated[str, Meta(max_length=200)]


class NewSheet(Struct, forbid_unknown_fields=True):
    """Put images of the folder on one sheet. They move into a folder of its name; the answer has its `name`."""

    files: Annotated[list[Label | None], Meta(min_length=1, max_length=MOST_CELLS)]
    columns: Annotated[list[Label], Meta(min_length=1, max_length=MOST_CELLS)]
    rows: Annotated[list[Label], Meta(max_length=MOST_CELLS)] = []


def routes(folder: Path, left_out: Mapping[str, str] | None = None) -> list[ApiPath]:
    """Return the paths under /api/images, and /api/left-out: files that cannot be used, with the reason and the
    cure."""

    async def unusable(_: Request) -> Response:
        return json_answer({"files": [{"name": name, "why": why} for name, why in (left_out or {}).items()]})

    async def images(request: Request) -> Response:
        content = await decoding(_listed, folder, _position(request.query_params.get("after")))
        return Response(json.dumps(content), media_type="application/json")  # as jobs_api writes prompts

    async def image(request: Request) -> Response:
        data, media_type = await decoding(_read, folder, request.path_params["name"])
        headers = {"Cache-Control": "private, max-age=86400"}
        return Response(data, headers=headers, media_type=media_type)

    async def sheet(request: Request) -> Response:
        return json_answer({"name": await decoding(_sheet, folder, await read_json(request, NewSheet))})

    async def moved(move: Callable[[Path, str], str], request: Request) -> Response:
        try:
            name = await decoding(move, folder, request.path_params["name"])
        except OSError as fault:
            raise Rejected(409, "not_moved", f"the file cannot be moved: {fault.strerror}") from None
        return json_answer({"name": name})

    listed = "Images in the folder of `canvax ui`, 60 at a time, newest first; `after` is `next` of the answer before."
    deleted = "Move it into the folder `deleted`. The answer has its `name` there."
    restored = "Move it back, by its name in `deleted`. The answer has its `name` then."
    without = "Files in the folder of models that cannot be used, with the reason and the cure."
    return [
        ApiPath(
            "/api/images",
            error,
            GET=Operation(images, listed),
            POST=Operation(sheet, (NewSheet.__doc__ or "").strip(), NewSheet),
        ),
        ApiPath(
            "/api/images/{name}",
            error,
            GET=Operation(image, "One of these images."),
            DELETE=Operation(partial(moved, _deleted), deleted),
            POST=Operation(partial(moved, _restored), restored),
        ),
        ApiPath("/api/left-out", error, GET=Operation(unusable, without)),
    ]


def _position(after: str | None) -> tuple[int, str] | None:
    """Return the modification time and name after which a listing continues.

    Raises:
        Rejected: the text is not a ``next`` of an answer.
    """
    match = _CURSOR.fullmatch(after or "")
    if after is not None and match is None:
        raise Rejected(400, "invalid_value", "after: is not the `next` of an answer", param="after")
    return (int(match[1]), match[2]) if match else None


def _listed(folder: Path, after: tuple[int, str] | None) -> dict[str, Any]:
    """Return images of the folder, newest first, and where the next answer begins."""
    found: list[tuple[int, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it was removed a moment ago
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    except OSError:  # no image was saved yet
        return {"images": [], "next": None}
    found = sorted((entry for entry in found if after is None or entry < after), reverse=True)
    images: list[dict[str, Any]] = []
    for count, (modified, name) in enumerate(found[:_MOST_READ], 1):
        if image := _described(folder / name, modified):
            images.append(image)
        if len(images) == PAGE or count == _MOST_READ:
            return {"images": images, "next": f"{modified}-{name}" if count < len(found) else None}
    return {"images": images, "next": None}


def _described(path: Path, modified: int) -> dict[str, Any] | None:
    """Return an image for the page; None if canvax did not write the file."""
    try:
        with open_regular(path) as raw, io.BufferedReader(raw) as file:
            metadata = canvax_metadata_in(file, path)
            if metadata is None:
                return None
            file.seek(0)
            width, height = Image.open(file).size
    except (InputError, OSError, ValueError, RecursionError, Image.DecompressionBombError):
        return None
    size = {"width": width, "height": height}
    grid = metadata.get("grid")
    shown = {"kind": "image", **as_job(metadata)} if grid is None else {"kind": "sheet", **_as_sheet(metadata, grid)}
    if prompt := prompt_of(metadata):  # of an enlarged image the job has none
        shown["settings"].setdefault("prompt", prompt)
    return {"file": path.name, "created": modified // 1_000_000, **size, **shown}


def _as_sheet(metadata: dict[str, Any], grid: Any) -> dict[str, Any]:
    """Return the settings that all images of a grid share, the first prompt, and names and texts of settings that
    vary."""
    first = as_job(metadata)
    cells = [as_job(cell)["settings"] for cell in grid if isinstance(cell, dict)] if isinstance(grid, list) else []
    names = dict.fromkeys(name for cell in cells for name in cell)
    texts = {name: list(dict.fromkeys(_text(cell.get(name, "none")) for cell in cells)) for name in names}
    varied = [(name, ", ".join(each)) for name, each in texts.items() if len(each) > 1]
    shared = {
        name: value for name, value in first["settings"].items() if name == "prompt" or len(texts.get(name, ())) < 2
    }
    return {**first, "settings": shared | ({"varied": varied} if varied else {})}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _sheet(folder: Path, body: NewSheet) -> str:
    """Write a sheet of images of the folder, which move into a folder of its name. Returns the name of its file."""
    paths = [None if name is None else _file(folder, name) for name in body.files]
    there = [path for path in paths if path is not None]
    if len({*there}) < len(there) or not there:
        raise Rejected(400, "invalid_value", "files: names a file twice, or none; name each once", param="files")
    grid, images = [], list[Image.Image | None]()
    try:
        for path in paths:
            if path is None:
                images.append(None)
                continue
            with open_regular(path) as raw, io.BufferedReader(raw) as file:
                grid.append(canvax_metadata_in(file, path))
                file.seek(0)
                images.append(on_white(Image.open(file)))
        sheet = make_sheet(images, body.columns, body.rows)
    except (InputError, OSError, ValueError, Image.DecompressionBombError):
        problem = "files: one is damaged, or they are too large for one sheet; send fewer"
        raise Rejected(400, "invalid_value", problem, param="files") from None
    seed = grid[0]["seed"] if grid[0] and isinstance(grid[0].get("seed"), int) else 0
    written = save_numbered(folder, sheet, {"grid": grid, "seed": seed}, seed, prefix=_GRID)
    cells = written.with_suffix("")
    cells.mkdir(exist_ok=True)
    for path in there:
        os.rename(path, cells / path.name)
    return written.name


def _file(folder: Path, name: str) -> Path:
    """Return the image of a name.

    Raises:
        Rejected: the folder has no such image that canvax wrote.
    """
    path = folder / name
    if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_file() or _described(path, 0) is None:
        raise Rejected(404, "image_not_found", f"there is no image {name!r:.80}")
    return path


def _read(folder: Path, name: str) -> tuple[bytes, str]:
    path = _file(folder, name)
    return path.read_bytes(), f"image/{FORMATS[path.suffix.lower()].lower()}"


def _deleted(folder: Path, name: str) -> str:
    path, bin_ = _file(folder, name), folder / _DELETED
    bin_.mkdir(exist_ok=True)
    return _moved(path, bin_)


def _restored(folder: Path, name: str) -> str:
    return _moved(_file(folder / _DELETED, name), folder)


def _moved(path: Path, folder: Path) -> str:
    """Move an image, or a sheet with its images, into a folder. Return the name there, with a number if the name was
    taken."""
    name, number = path.name, 0
    while (folder / name).exists():
        number += 1
        name = f"{path.stem}-{number}{path.suffix}"
    if name.startswith(_GRID) and path.with_suffix("").is_dir():
        os.rename(path.with_suffix(""), (folder / name).with_suffix(""))
    os.rename(path, folder / name)
    return name
