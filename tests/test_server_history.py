"""The folder of images as the page's history: what is listed, sent, deleted, and what never leaves the disk."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from canvax.images.metadata import save_image
from canvax.server import history
from canvax.server.app import Settings
from tests.support.serving import Web, web


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Web, Path]]:
    folder = tmp_path_factory.mktemp("images") / "out"
    with web(Settings(history=folder)) as running:
        yield running, folder


@pytest.fixture
def folder(site: tuple[Web, Path]) -> Path:
    """The folder with three images of canvax, an image of another program, and files that lead elsewhere."""
    root = site[1]
    root.mkdir(exist_ok=True)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for number in range(3):
        write(root / f"{number:05d}-{number}.png", seed=number, when=1_700_000_000 + number)
    foreign = PngImagePlugin.PngInfo()
    foreign.add_text("parameters", "a cat\nSteps: 20, Seed: 1")
    Image.new("RGB", (8, 8)).save(root / "foreign.png", pnginfo=foreign)
    (root / "notes.txt").write_text("secret")
    (root / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    write(root.parent / "outside.png")
    os.symlink(root.parent / "outside.png", root / "link.png")
    return root


def write(path: Path, *, seed: int = 1, when: float | None = None, **more: Any) -> None:
    path.unlink(missing_ok=True)
    settings = {"prompt": f"apple {seed}", "seed": seed, "num_inference_steps": 4, "sampler": "ddim", **more}
    save_image(path, Image.new("RGB", (16, 8)), settings)
    if when:
        os.utime(path, (when, when))


def names(answer: Any) -> list[str]:
    return [image["file"] for image in answer.json()["images"]]


def test_images_are_listed_newest_first_with_their_settings(site: tuple[Web, Path], folder: Path) -> None:
    answer = site[0].http.get("/api/images")
    assert names(answer) == ["00002-2.png", "00001-1.png", "00000-0.png"]
    first = answer.json()["images"][0]
    assert first["settings"] == {"prompt": "apple 2", "seed": 2, "steps": 4, "sampler": "ddim"}
    assert (first["width"], first["height"], first["created"]) == (16, 8, 1_700_000_002_000)
    assert answer.json()["next"] is None


def test_pages_follow_each_other(site: tuple[Web, Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PAGE", 2)
    first = site[0].http.get("/api/images")
    write(folder / "00003-3.png", seed=3)  # a new image does not shift the next page
    second = site[0].http.get("/api/images", params={"after": first.json()["next"]})
    assert (names(first), names(second)) == (["00002-2.png", "00001-1.png"], ["00000-0.png"])
    assert second.json()["next"] is None


def test_files_of_other_programs_hide_nothing(
    site: tuple[Web, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer reads few files; the next one goes on behind them."""
    monkeypatch.setattr(history, "_MOST_READ", 2)
    for number in range(5):
        Image.new("RGB", (8, 8)).save(folder / f"other-{number}.png")
    seen, after, answers = [], None, 0
    while answers == 0 or after is not None:
        answer = site[0].http.get("/api/images", params=after and {"after": after})
        seen, after, answers = seen + names(answer), answer.json()["next"], answers + 1
    assert seen == ["00002-2.png", "00001-1.png", "00000-0.png"]
    assert answers == 5  # of ten files, one of which is a link


def test_an_image_is_sent_as_it_is(site: tuple[Web, Path], folder: Path) -> None:
    answer = site[0].http.get("/api/images/00001-1.png")
    assert answer.content == (folder / "00001-1.png").read_bytes()
    assert answer.headers["content-type"] == "image/png"
    assert "private" in answer.headers["cache-control"]  # no cache between keeps it for others


@pytest.mark.parametrize(
    "name",
    ["..%2Foutside.png", "%2e%2e%2foutside.png", "..%5coutside.png", "link.png", "foreign.png",
     "notes.txt", "broken.png", "deleted", "a%00.png", "nothing.png", "C:outside.png"],
)  # fmt: skip
def test_nothing_else_is_sent_or_deleted(site: tuple[Web, Path], folder: Path, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    for method in ("GET", "DELETE", "POST"):
        assert site[0].http.request(method, f"/api/images/{name}").status_code in (404, 405)
    assert sorted(folder.parent.rglob("*")) == before


def test_a_deleted_image_can_come_back(site: tuple[Web, Path], folder: Path) -> None:
    http, data = site[0].http, (folder / "00001-1.png").read_bytes()
    assert http.delete("/api/images/00001-1.png").status_code == 200
    assert "00001-1.png" not in names(http.get("/api/images"))
    assert (folder / "deleted" / "00001-1.png").read_bytes() == data
    assert http.post("/api/images/00001-1.png").status_code == 200
    assert names(http.get("/api/images"))[1] == "00001-1.png"
    http.delete("/api/images/00001-1.png")
    write(folder / "00001-1.png", seed=7)
    assert http.post("/api/images/00001-1.png").json() == {"name": "00001-1-1.png"}
    assert (folder / "00001-1-1.png").read_bytes() == data


def test_images_of_one_name_are_deleted_side_by_side(site: tuple[Web, Path], folder: Path) -> None:
    http, path = site[0].http, folder / "00001-1.png"
    files = {}
    for seed in (7, 8):
        write(path, seed=seed)
        data = path.read_bytes()
        files[http.delete("/api/images/00001-1.png").json()["name"]] = data
    assert len(files) == 2
    assert {file.name: file.read_bytes() for file in (folder / "deleted").iterdir()} == files
    for name, data in files.items():
        there = http.post(f"/api/images/{name}").json()["name"]
        assert (folder / there).read_bytes() == data


def test_a_grid_is_a_sheet_with_the_settings_of_its_first_image(site: tuple[Web, Path], folder: Path) -> None:
    cells = [{"prompt": prompt, "guidance_scale": scale} for prompt, scale in (("a", 1.0), ("b", 7.5))]
    save_image(folder / "grid.png", Image.new("RGB", (32, 16)), {"grid": cells})
    first = site[0].http.get("/api/images").json()["images"][0]
    varied = [["prompt", "a, b"], ["guidance_scale", "1, 7.5"]]
    assert (first["kind"], first["settings"]) == ("sheet", {"prompt": "a", "varied": varied})


def test_images_become_a_sheet(site: tuple[Web, Path], folder: Path) -> None:
    """One file with the settings that they share; they move into a folder of its name, and are deleted with it."""
    http = site[0].http
    body = {"files": ["00000-0.png", None, "00001-1.png"], "columns": ["seed 0", "seed 9", "seed 1"]}
    answer = http.post("/api/images", json=body)
    assert answer.json() == {"name": "grid-00000-0.png"}
    (sheet, single) = http.get("/api/images").json()["images"]
    assert (sheet["file"], sheet["kind"], single["file"]) == ("grid-00000-0.png", "sheet", "00002-2.png")
    settings = {"prompt": "apple 0", "steps": 4, "sampler": "ddim"}
    assert sheet["settings"] == settings | {"varied": [["prompt", "apple 0, apple 1"], ["seed", "0, 1"]]}
    cells = ["grid-00000-0/00000-0.png", "grid-00000-0/00001-1.png"]
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.glob("grid*/*"))] == cells
    http.delete("/api/images/grid-00000-0.png")
    assert not list(folder.glob("grid*"))
    http.post("/api/images/grid-00000-0.png")
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.glob("grid*/*"))] == cells


@pytest.mark.parametrize(
    "files",
    [["../outside.png"], ["link.png"], ["foreign.png"], ["00000-0.png", "00000-0.png"], [None], []],
)  # fmt: skip
def test_nothing_else_becomes_a_sheet(site: tuple[Web, Path], folder: Path, files: list[str | None]) -> None:
    before = sorted(folder.parent.rglob("*"))
    answer = site[0].http.post("/api/images", json={"files": files, "columns": ["a"]})
    assert answer.status_code in (400, 404)
    assert sorted(folder.parent.rglob("*")) == before


def test_an_enlarged_image_has_the_prompt_of_the_one_before(site: tuple[Web, Path], folder: Path) -> None:
    write(folder / "00009-9.png", prompt="", upscale={"scale": 2.0, "overlap": 96, "prompt": "a fox"})
    settings = site[0].http.get("/api/images").json()["images"][0]["settings"]
    assert (settings["prompt"], settings["upscale"]) == ("a fox", 2.0)


def test_a_wrong_position_is_refused(site: tuple[Web, Path], folder: Path) -> None:
    answer = site[0].http.get("/api/images", params={"after": "yesterday"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


def test_a_server_without_a_folder_has_no_history() -> None:
    with web() as site:
        assert site.http.get("/api/images").status_code == 404
        assert "data-history" not in site.http.get("/").text


def test_the_page_knows_of_the_folder(site: tuple[Web, Path]) -> None:
    assert '<body data-history data-syntax="plain">' in site[0].http.get("/").text


def test_decoded_size_is_read_without_pixels(site: tuple[Web, Path], folder: Path) -> None:
    """A file that claims to be enormous costs nothing and hides no other."""
    data = bytearray((folder / "00000-0.png").read_bytes())
    at = data.index(b"IHDR") + 4
    data[at : at + 8] = (60_000).to_bytes(4) * 2
    (folder / "00009-9.png").write_bytes(io.BytesIO(bytes(data)).getvalue())
    assert len(names(site[0].http.get("/api/images"))) >= 3
