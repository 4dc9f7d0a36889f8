"""The benchmark of training: canvax and its peer train the same, and work that differs is noticed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import train
from benchmarks.lab.tiny_xl import tiny_xl

from .families import build_flux2

pytestmark = [pytest.mark.weekly, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def work(model: Path, scratch: Path, **changes: Any) -> train.Work:
    scratch.mkdir()
    usual = {"size": 64, "batch": 2, "rank": 3, "remat": False, "dtype": "float32", "device": "cpu", "chunk": 2}
    made = train.Work(model, scratch, **{**usual, "rounds": 1, **changes})
    train.write_pictures(made.pictures, made.size)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"sdxl": tiny_xl("sdxl"), "klein": build_flux2(tmp_path_factory.mktemp("model") / "klein", layers=28)}


@pytest.mark.parametrize(("model", "remat"), [("sdxl", True), ("klein", False)])
def test_both_do_the_same_work(models: dict[str, Path], tmp_path: Path, model: str, remat: bool) -> None:
    made = work(models[model], tmp_path / "work", remat=remat)
    mine = train.ours(made)
    peer = train.theirs(made)
    for figures in (mine, peer):
        assert figures["steps_per_s"] == pytest.approx(2 / figures["chunks_s"][0])
        assert figures["images_per_s"] == pytest.approx(2 * figures["steps_per_s"])
        assert figures["host_peak_bytes"] > 10**8
        assert len(figures["losses"]) == 2
    found = train.compared({"canvax": mine, "torch": peer}, "float32")["against"]["torch"]
    assert found["ratio"] == pytest.approx(mine["steps_per_s"] / peer["steps_per_s"])
    assert found["losses_differ_by"] < 1e-4
    with np.load(made.same) as file:
        arrays = dict(file)
    np.savez(made.same, **{**arrays, "times": (arrays["times"] + 500) % 1000})
    other = train.theirs(made)
    assert "failed" in train.compared({"canvax": mine, "torch": other}, "float32")["against"]["torch"]


@pytest.mark.weekly
@pytest.mark.parametrize("model", ["sdxl", "klein"])
def test_the_autoencoder_in_each_step_gives_the_latents(models: dict[str, Path], tmp_path: Path, model: str) -> None:
    """The latents of klein are the same; those of SDXL are drawn."""
    made = work(models[model], tmp_path / "work")
    mine = train.ours(made)
    peer = train.theirs(made, vae=True)
    assert peer["first_loss"] == pytest.approx(mine["first_loss"], rel=1e-4 if model == "klein" else 0.1)
    assert train.compared({"canvax": mine, "torch-vae": peer}, "float32")["against"]["torch-vae"]["ratio"] > 0


def test_what_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own; the command ends with 1, and the figures say why."""
    file = tmp_path / "figures.json"
    command = ["", "--model", str(tmp_path / "nothing"), "--size", "64", "--remat", "both", "--json", str(file)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr("os.environ", os.environ.copy())
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 1
    runs = json.loads(file.read_text())["runs"]
    assert [run["remat"] for run in runs] == [False, True]
    assert all(run["contenders"]["canvax"]["failed"] and list(run["contenders"]) == ["canvax"] for run in runs)


def test_the_table() -> None:
    figures = {"steps_per_s": 4.0, "device_peak_bytes": 3 * 10**9, "host_peak_bytes": 1, "first_loss": 0.5}
    peer = figures | {"steps_per_s": 2.0, "device_peak_bytes": 6 * 10**9}
    contenders = {"canvax": figures, "torch": peer, "torch-vae": {"failed": "no memory"}}
    found = train.compared(contenders, "bfloat16")
    assert found["against"].keys() == {"torch"}
    lines = train.table([{"batch": 4, "remat": True, "contenders": contenders} | found])
    assert lines[2:] == [
        "| 4 | yes | canvax | 4 | 3.00 |  |  |",
        "| 4 | yes | torch | 2 | 6.00 | 2.00 | 0.50 |",
        "| 4 | yes | torch-vae | failed | | | |",
    ]
