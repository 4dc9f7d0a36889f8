"""The drawings: four sets of emoji as SVG from npm packages, rendered and captioned into one file.

The file is a zip in the ``imagefolder`` layout (pictures beside ``metadata.jsonl``), the same bytes every time:
packages are pinned by version and hash, and the renderer works on the CPU.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from canvax.errors import CanvaxError, InputError
from canvax.files import written
from canvax.tokenizers.concepts import FILE as CONCEPTS
from canvax.train.pictures import METADATA
from recipes.emoji.captions import STYLES, captions

LICENCES = "LICENCES.txt"

SIZE = 256
"""Pixels of a rendered drawing along each side."""

HELD_OUT = 0.05
"""Share of the (concept, style) pairs that training never sees; their concepts are seen in other styles."""

GROUPS = {0: "face", 3: "nature", 4: "food", 5: "place", 6: "activity", 7: "object"}
"""emojibase's groups that are drawn. People (and skin tones), flags and symbols are left out."""


@dataclass(frozen=True)
class Package:
    """One npm package, pinned.

    Attributes:
        name: its name.
        version: its version.
        sha256: of the tarball.
        licence: SPDX name.
        credit: whom the licence asks to name.
    """

    name: str
    version: str
    sha256: str
    licence: str
    credit: str

    @property
    def file(self) -> str:
        """What ``npm pack`` calls it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


LABELS = Package(
    "emojibase-data",
    "17.0.0",
    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
    "MIT",
    "labels and tags: emojibase-data, Miles Johnson",
)
DRAWINGS = {
    "noto": Package(
        "@iconify-json/noto",
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "Apache-2.0",
        "Noto Emoji, Google",
    ),
    "twemoji": Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        "CC-BY-4.0",
        "Twemoji, Twitter and other contributors",
    ),
    "fluent": Package(
        "@iconify-json/fluent-emoji",
        "1.2.7",
        "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b",
        "MIT",
        "Fluent Emoji, Microsoft",
    ),
    "fluent flat": Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        "MIT",
        "Fluent Emoji (flat), Microsoft",
    ),
}
"""The package of each style."""

PACKAGES = (LABELS, *DRAWINGS.values())


def prepare_drawings(
    target: str | Path, *, packages: str | Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> Path:
    """Gather, render and caption all drawings into one zip file.

    Args:
        target: the file to write.
        packages: folder with the tarballs of :data:`PACKAGES`; by default they are fetched with ``npm pack``, from the
            registry that npm is configured for.
        progress: told what is going on.

    Returns:
        The file.

    Raises:
        InputError: the file exists, a tarball is not the pinned one, or resvg-py is not installed.
        CanvaxError: npm is missing or failed.
    """
    target = Path(target)
    if target.exists():
        raise InputError(f"target = {str(target)!r} exists already; choose another name, or delete it.")
    render = _renderer()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(packages) if packages is not None else Path(scratch)
        if packages is None:
            progress(f"fetching {len(PACKAGES)} packages with npm")
            fetch_packages(folder)
        bodies = {style: _read_icons(folder, package) for style, package in DRAWINGS.items()}
        concepts = [c for c in _read_concepts(folder) if all(slug(c["label"]) in found for found in bodies.values())]
    rows = describe(concepts)
    progress(f"{len(concepts)} concepts in {len(bodies)} styles: {len(rows)} drawings")
    target.parent.mkdir(parents=True, exist_ok=True)
    with written(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, LICENCES, licences().encode())
        _add(archive, CONCEPTS, named(concepts).encode())
        _add(archive, METADATA, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        for done, row in enumerate(rows):
            _add(archive, row["file_name"], _encoded(render(bodies[row["style"]][slug(row["label"])])))
            if (done + 1) % 500 == 0:
                progress(f"{done + 1} drawings")
    return target


def render_one(label: str, packages: Path | None) -> dict[str, Image.Image]:
    """One drawing in each style, trained on or not.

    Args:
        label: its name.
        packages: folder with the tarballs of :data:`PACKAGES`; by default they are fetched.
    """
    render = _renderer()
    with tempfile.TemporaryDirectory() as scratch:
        if packages is None:
            fetch_packages(Path(scratch))
        folder = packages or Path(scratch)
        return {style: render(_read_icons(folder, package)[slug(label)]) for style, package in DRAWINGS.items()}


def fetch_packages(folder: Path) -> None:
    """Put the tarballs of :data:`PACKAGES` into ``folder`` by ``npm pack``.

    Raises:
        CanvaxError: npm is not installed, or failed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise CanvaxError("npm is not installed; install it, or give a folder with the packages: --packages FOLDER.")
    for package in PACKAGES:
        command = [npm, "pack", "--silent", f"{package.name}@{package.version}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CanvaxError(f"npm pack {package.name}@{package.version} failed: {last}")


def slug(label: str) -> str:
    """The name of a concept in the packages: "cat with tears of joy" is "cat-with-tears-of-joy"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub("[’'“”]", "", label.lower())).strip("-")


def describe(concepts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of ``metadata.jsonl`` for each drawing: file, captions, concept, style and split.

    The held-out pairs are a fixed random choice: of that many concepts, one style each.
    """
    concepts = list(concepts)
    choice = np.random.Generator(np.random.Philox(20)).permutation(len(concepts))
    count = round(HELD_OUT * len(concepts) * len(STYLES))
    held_out = {int(concept): place % len(STYLES) for place, concept in enumerate(choice[:count])}
    return [
        {
            "file_name": f"{style.replace(' ', '-')}/{slug(concept['label'])}.webp",
            "text": captions(concept["label"], [GROUPS[concept["group"]], *concept.get("tags", [])], style),
            "label": concept["label"],
            "style": style,
            "split": "test" if held_out.get(i) == j else "train",
        }
        for i, concept in enumerate(concepts)
        for j, style in enumerate(STYLES)
    ]


def named(concepts: Iterable[dict[str, Any]]) -> str:
    """The file by which a model tells what it can generate: emoji -> [name, word about it, ...], one on each line."""
    rows = ((concept["emoji"], [concept["label"].lower(), *concept.get("tags", [])]) for concept in concepts)
    lines = (": ".join(json.dumps(part, ensure_ascii=False) for part in row) for row in rows)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def licences() -> str:
    """Where the drawings come from, and under which licences."""
    lines = [f"{p.credit}: {p.licence} (npm package {p.name} {p.version})" for p in PACKAGES]
    return "\n".join(["Rendered from, and captioned with:", *lines, ""])


def _read_concepts(folder: Path) -> list[dict[str, Any]]:
    """emojibase's entries of the groups that are drawn."""
    entries = json.loads(_member(folder, LABELS, "package/en/data.json"))
    return [entry for entry in entries if entry.get("group") in GROUPS]


def _read_icons(folder: Path, package: Package) -> dict[str, str]:
    """Name -> SVG of each icon of a package (Iconify's JSON format)."""
    icons = json.loads(_member(folder, package, "package/icons.json"))
    usual = {"left": 0, "top": 0, "width": icons.get("width", 16), "height": icons.get("height", 16)}
    return {name: _svg(usual | icon) for name, icon in icons["icons"].items()}


def _svg(icon: dict[str, Any]) -> str:
    box = " ".join(str(icon[key]) for key in ("left", "top", "width", "height"))
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{SIZE}" height="{SIZE}"'
    return f"<svg {frame}>{icon['body']}</svg>"


def _member(folder: Path, package: Package, name: str) -> bytes:
    """A file of a package's tarball, after checking that it is the pinned one."""
    path = folder / package.file
    if not path.is_file():
        raise InputError(f"packages = {str(folder)!r} has no {package.file}; fetch it: npm pack {package.name}")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != package.sha256:
        raise InputError(f"{path}: sha256 is {found}, not {package.sha256}; fetch version {package.version} again.")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        file = archive.extractfile(name)
        assert file is not None, name
        return file.read()


def _renderer() -> Callable[[str], Image.Image]:
    """SVG text -> RGB picture on white."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise InputError("rendering needs resvg-py: pip install resvg-py") from error

    def render(svg: str) -> Image.Image:
        drawn = Image.open(io.BytesIO(bytes(svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE)))).convert("RGBA")
        white = Image.new("RGBA", drawn.size, "white")
        return Image.alpha_composite(white, drawn).convert("RGB")

    return render


def _encoded(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "WEBP", lossless=True, quality=80, method=4)
    return out.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """A member without the time of day, so that the same content is the same file."""
    archive.writestr(zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0)), data)
