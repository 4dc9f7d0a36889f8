"""Fine-tuning on a folder of captioned pictures, and reading such folders."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.cli import main
from canvax.errors import InputError
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten
from canvax.train import task as tasks
from canvax.train.finetune import finetune
from canvax.train.loop import LOG, STATE, Plan, Session, check_same, facts_of, read_log
from canvax.train.pictures import read_pictures
from canvax.train.state import save_state
from canvax.train.task import Training
from recipes.emoji.__main__ import run as recipe
from tests.support.refusals import refused
from tests.support.small_checkpoint import SHALLOW_UNET, write_small_checkpoint

PLAN = Plan(steps=4, batch=2, chunk=2, warmup=0, final=1.0, average=0.0)
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def write_pictures(folder: Path, form: str = "jsonl") -> Path:
    folder.mkdir(parents=True)
    rows = []
    for name, colour in COLOURS.items():
        Image.new("RGB", (48, 32), colour).save(folder / f"{name}.png")
        rows.append({"file_name": f"{name}.png", "text": f"a {name} picture"})
        if form == "txt":
            (folder / f"{name}.txt").write_text(f"a {name} picture\n")
    if form == "jsonl":
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form == "csv":
        lines = ["file_name,text", *(f'{row["file_name"]},"{row["text"]}"' for row in rows)]
        (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("model") / "sd", unet=SHALLOW_UNET)


# Pictures


@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_three_forms_of_captions(tmp_path: Path, form: str) -> None:
    pictures = read_pictures(write_pictures(tmp_path / "p", form), 32)
    found = {
        captions[0]: tuple(picture[16, 16])
        for captions, picture in zip(pictures.captions, pictures.pixels, strict=True)
    }
    assert found == {f"a {name} picture": colour for name, colour in COLOURS.items()}


def test_a_zip_file_is_a_folder(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "p")
    shutil.make_archive(str(tmp_path / "p"), "zip", folder)
    np.testing.assert_array_equal(read_pictures(tmp_path / "p.zip", 32).pixels, read_pictures(folder, 32).pixels)


def test_pictures_are_fitted_turned_and_put_on_white(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255  # the middle
    turned = Image.fromarray(wide)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(folder / "a.jpg", exif=exif, quality=95)
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(folder / "b.png")
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.save(folder / "c.png", transparency=0)
    for name in "abc":
        (folder / f"{name}.txt").write_text(name)
    pictures = read_pictures(folder, 16)
    assert pictures.pixels[0][2:-2].min() > 200
    assert (pictures.pixels[1:] == 255).all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "red.png").unlink(), r"'red.png' is in the table of captions, but the file is not there"),
        (lambda f: (f / "metadata.jsonl").write_text("{"), r"metadata.jsonl cannot be read"),
        (lambda f: (f / "metadata.jsonl").write_text('{"file_name": "red.png"}'), r"row 1 has no caption 'text'"),
        (
            lambda f: (f / "metadata.jsonl").write_text('{"file_name": "red.png", "text": ["a", 3]}'),
            r"its caption 'text' is \['a', 3\], not text",
        ),
        (
            lambda f: (f / "metadata.jsonl").rename(f / "metadata.csv").write_text("file_name;text\nred.png;a"),
            r"has no file_name; its columns are file_name;text; part columns with commas",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, spoil: Any, message: str) -> None:
    folder = write_pictures(tmp_path / "p")
    spoil(folder)
    with pytest.raises(InputError, match=message):
        read_pictures(folder, 32)


def test_grey_of_16_bits_and_marks_before_captions(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    Image.fromarray(np.full((16, 16), 20000, np.uint16)).save(folder / "a.png")
    (folder / "a.TXT").write_bytes("\ufeffa caf\u00e9".encode())
    pictures = read_pictures(folder, 16)
    assert (pictures.pixels == 78).all()
    assert pictures.captions == [["a caf\u00e9"]]
    (folder / "a.TXT").write_bytes("a caf\u00e9".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.TXT is not UTF-8"):
        read_pictures(folder, 16)


# Masks


def write_masks(folder: Path, form: str) -> Path:
    """One picture's left half counts; form: the column of a table, or files beside the pictures."""
    write_pictures(folder, "txt" if form == "beside" else form)
    mask = np.zeros((32, 48), np.uint8)
    mask[:, :24] = 255
    Image.fromarray(mask).save(folder / ("red-masklabel.png" if form == "beside" else "half.png"))
    if form == "jsonl":
        rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
        (folder / "metadata.jsonl").write_text(
            "".join(json.dumps({**row, "mask": "half.png"} if i == 0 else row) + "\n" for i, row in enumerate(rows))
        )
    if form == "csv":
        lines = (folder / "metadata.csv").read_text().splitlines()
        ends = [",mask", ",half.png", *([","] * (len(lines) - 2))]
        (folder / "metadata.csv").write_text("".join(f"{line}{end}\n" for line, end in zip(lines, ends, strict=True)))
    return folder


@pytest.mark.parametrize("captions", [(), ("a",)], ids=["captioned", "not captioned"])
@pytest.mark.parametrize("form", ["jsonl", "csv", "beside"])
def test_masks_are_fitted_as_their_pictures(tmp_path: Path, form: str, captions: tuple[str, ...]) -> None:
    """And are no pictures themselves, where every picture of the folder is taken."""
    folder = write_masks(tmp_path / "p", form)
    found = read_pictures(folder, 16, masked=True, captions=captions)
    names = [row["file_name"] for row in found.rows]
    assert sorted(names) == ["blue.png", "green.png", "red.png", "white.png"]
    assert found.masked == 1
    # 48 x 32 pixels become 24 x 16, of which the middle 16 are kept: the half ends in the middle.
    mask = found.masks[names.index("red.png")]
    assert (mask[:, :8] == 255).all()
    assert (mask[:, 8:] == 0).all()
    assert (found.masks[names.index("blue.png")] == 255).all()
    without = read_pictures(folder, 16, captions=captions)
    assert without.masks is None
    assert [row["file_name"] for row in without.rows] == names
    assert without.digest() != found.digest()
    assert found.select([names.index("blue.png")]).masked == 0


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((32, 48), r"half.png is a mask of 32 x 48 pixels for red.png, which has 48 x 32"),
        (b"no", r"half.png: is not a picture"),
        (None, r"'half.png' is in the table of captions, but the file is not there"),
    ],
)
def test_masks_that_cannot_be(tmp_path: Path, size: Any, message: str) -> None:
    folder = write_masks(tmp_path / "p", "jsonl")
    if isinstance(size, tuple):
        Image.new("L", size).save(folder / "half.png")
    elif size:
        (folder / "half.png").write_bytes(size)
    else:
        (folder / "half.png").unlink()
    assert len(read_pictures(folder, 16)) == 4
    with pytest.raises(InputError, match=message):
        read_pictures(folder, 16, masked=True)


def test_masks_that_leave_nothing(model: Path, tmp_path: Path) -> None:
    folder = write_masks(tmp_path / "p", "jsonl")

    def start(**more: Any) -> None:
        finetune(Training(model, folder, tmp_path / "run", PLAN, size=32, **more), make_mesh(jax.devices()[:1]))

    Image.new("L", (48, 32)).save(folder / "half.png")
    with pytest.raises(InputError, match=r"the mask of red\.png is black all over"):
        start()
    (folder / "half.png").unlink()
    shutil.copy(write_pictures(tmp_path / "q") / "metadata.jsonl", folder / "metadata.jsonl")
    with refused("unmasked_weight"):
        start(unmasked_weight=0.1)
    with refused("unmasked_weight"):
        start(unmasked_weight=1.5)
    assert not (tmp_path / "run").exists()


# More pictures


def test_a_picture_without_a_caption_is_named(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "p", "txt")
    (folder / "red.txt").unlink()
    with pytest.raises(InputError, match=r"red\.png has no caption"):
        read_pictures(folder, 16)


def test_tables_one_folder_down(tmp_path: Path) -> None:
    """A zip file of a folder, and one table for each split."""
    write_pictures(tmp_path / "p" / "train")
    write_pictures(tmp_path / "p" / "test", "csv")
    shutil.make_archive(str(tmp_path / "p"), "zip", tmp_path, "p/train")
    assert len(read_pictures(tmp_path / "p.zip", 16).split("train")) == 4
    both = read_pictures(tmp_path / "p", 16)
    assert [len(both.split(name)) for name in ("train", "test")] == [4, 4]


def test_a_table_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    folder = write_pictures(tmp_path / "p")
    (folder / "metadata.jsonl").write_text('{"file_name": "../secret.png", "text": "a"}')
    with pytest.raises(InputError, match="the file is not there"):
        read_pictures(folder, 8)


def test_no_such_folder_and_no_zip(tmp_path: Path) -> None:
    with refused("pictures"):
        read_pictures(tmp_path / "nothing", 32)
    (tmp_path / "x.zip").write_text("text")
    with refused("pictures"):
        read_pictures(tmp_path / "x.zip", 32)
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with refused("pictures"):
        read_pictures(tmp_path / "empty.zip", 32)


# Fine-tuning


def task(model: Path, folder: Path, pictures: Path, **more: Any) -> Training:
    return Training(model, pictures, folder, **{"plan": PLAN, "size": 64, **more})


def steps_without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``train`` does around the loop: each run is over at once, and its weights stay as they were."""

    def fit(start: Any, loss: Any, data: Any, samples: int, plan: Plan, session: Session, shared: Any) -> Any:
        state, facts = session.folder / STATE, facts_of(plan, samples) | {**session.about, "total": plan.steps}
        if state.is_file():
            check_same(state, plan, samples, session.about)
        save_state(state, {}, facts)
        for step in range(plan.steps):
            if session.save and session.saves(step, plan.steps):
                session.save(step, start)
        return start, True

    monkeypatch.setattr(tasks, "_data", lambda *_, **__: ({}, {}, []))
    monkeypatch.setattr(tasks, "fit", fit)


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("run")
    mesh = make_mesh(jax.devices()[:1])
    result = finetune(task(model, folder / "run", write_pictures(folder / "p"), flip=True, gamma=5.0), mesh)
    assert result is not None
    assert result == folder / "run" / "model"
    return result


@pytest.mark.weekly
def test_only_the_unet_changes(model: Path, done: Path) -> None:
    mesh = make_mesh(jax.devices()[:1])
    before, after = canvax.load(model, mesh=mesh), canvax.load(done, mesh=mesh)
    for part in ("vae", "text_encoder"):
        for (_, a), (_, b) in zip(flatten(before.params[part]), flatten(after.params[part]), strict=True):
            np.testing.assert_array_equal(a, b)
    changed = [(a != b).any() for (_, a), (_, b) in
               zip(flatten(before.params["unet"]), flatten(after.params["unet"]), strict=True)]  # fmt: skip
    assert all(changed)
    assert after.model.scheduler.config == before.model.scheduler.config


@pytest.mark.weekly
def test_it_learns_from_the_pictures(model: Path, tmp_path: Path) -> None:
    """Four flat pictures are soon known; and drawing along the way leaves grids."""
    plan = Plan(steps=60, batch=4, chunk=20, warmup=0, final=1.0, average=0.0, learning_rate=1e-3)
    pictures = write_pictures(tmp_path / "p")
    finetune(
        task(model, tmp_path / "run", pictures, plan=plan, prompts=("a red picture",)), make_mesh(jax.devices()[:1])
    )
    losses = [line["loss"] for line in read_log(tmp_path / "run" / "unet" / LOG)]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "run" / "previews" / "0000060.png").is_file()


@pytest.mark.slow
def test_stopped_and_gone_on_with_it_is_the_same_model(model: Path, done: Path, tmp_path: Path) -> None:
    mesh, pictures = make_mesh(jax.devices()[:1]), write_pictures(tmp_path / "p")
    parts = task(model, tmp_path / "parts", pictures, flip=True, gamma=5.0)
    assert finetune(parts, mesh, deadline=0.0) is None
    again = finetune(parts, mesh)
    weights = Path("unet") / "diffusion_pytorch_model.safetensors"
    assert (done / weights).read_bytes() == (again / weights).read_bytes()
    with pytest.raises(InputError, match="this run is finished"):
        finetune(parts, mesh)


def test_another_run_in_the_same_folder_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_without_training(monkeypatch)
    mesh, pictures = make_mesh(jax.devices()[:1]), write_pictures(tmp_path / "p")
    given = task(model, tmp_path / "run", pictures, flip=True, gamma=5.0)
    assert finetune(given, mesh)
    given = replace(given, plan=replace(PLAN, steps=6))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    for change, message in (
        ({"model": other}, "model was"),
        ({"gamma": None}, "gamma was 5.0, now None"),
        ({"flip": False}, "flip was True, now False"),
    ):
        with pytest.raises(InputError, match=message):
            finetune(replace(given, **change), mesh)
    Image.new("RGB", (48, 32), (9, 9, 9)).save(pictures / "red.png")
    with pytest.raises(InputError, match="pictures was"):
        finetune(given, mesh)
    with pytest.raises(InputError, match="fp8"):
        finetune(given, mesh, save_dtype="fp8")


@pytest.mark.weekly
def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = write_pictures(tmp_path / "p", "txt")
    words = ["train", "finetune", str(pictures), "-m", str(model), "-o", str(tmp_path / "run"), "--size", "64"]
    assert main([*words, "--steps", "2", "-b", "8", "--lr", "1e-4", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"output": str(tmp_path / "run" / "model"), "finished": True}
    assert told.err.index("fine-tuning: compiling\n") < told.err.index("fine-tuning: step")
    assert main([*words, "--lr", "0"]) == 2
    assert "--learning-rate" in capsys.readouterr().err
    assert main(["train", str(pictures), "-o", str(tmp_path / "e"), "--recipe", "cpus"], run=recipe) == 2
    assert "did you mean 'cpu'?" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
