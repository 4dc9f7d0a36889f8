"""The documents' own scripts, run from first line to last on eight virtual devices against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub_imitation import HubImitation, Repository, folder_files
from tests.support.small_checkpoint import write_small_checker, write_small_checkpoint
from tests.support.small_sdxl import build

HERE = Path(__file__).parent
MODEL = "CompVis/stable-diffusion-v1-4"
XL = "stabilityai/stable-diffusion-xl-base-1.0"


def run(
    command: list[str], files: dict[str, bytes], folder: Path, model: str = MODEL, revision: str = "bf16"
) -> tuple[HubImitation, str]:
    """What a process prints that knows no hub but one with ``files`` as ``model`` at the revision."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    with HubImitation() as hub:
        hub.repositories[model] = Repository()
        hub.repositories[model].commit(revision, files)
        env = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-W", "error", *command]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return hub, done.stdout


@pytest.mark.parametrize(
    ("script", "form"),
    [
        pytest.param("how_to", "flax", marks=pytest.mark.weekly),
        pytest.param("negative_prompts", "torch", marks=pytest.mark.slow),
    ],
)
def test_script(script: str, form: str, tmp_path: Path) -> None:
    model = write_small_checkpoint(tmp_path / "model", form)
    write_small_checker(model / "safety_checker", form)
    _, printed = run([str(HERE / f"{script}.py")], folder_files(model), tmp_path)
    assert "Found 8 JAX devices" in printed


@pytest.mark.parametrize(
    ("script", "form"),
    [
        pytest.param("sdxl_single", "flax", marks=pytest.mark.weekly),
        pytest.param("sdxl_single_aot", "torch", marks=pytest.mark.weekly),
    ],
)
def test_sdxl_script(script: str, form: str, tmp_path: Path) -> None:
    files = folder_files(build(tmp_path / "model", form=form))
    _, printed = run([str(HERE / f"{script}.py")], files, tmp_path, XL, "refs/pr/95")
    assert "Compiled in" in printed
    assert "Inference in" in printed
    assert len(list(tmp_path.glob("castle_*.png"))) == 8


SCHEDULER = f"""
from canvax.flax_api import FlaxDPMSolverMultistepScheduler
for choice in ({{}}, {{"local_files_only": True}}):
    _, state = FlaxDPMSolverMultistepScheduler.from_pretrained(
        "{MODEL}", subfolder="scheduler", revision="bf16", **choice
    )
    print(state.config["_class_name"], state.config["beta_end"])
"""


@pytest.mark.slow
def test_scheduler_from_the_hub(tmp_path: Path) -> None:
    """Its file alone is fetched; with the model in the cache, nothing is."""
    files = folder_files(write_small_checkpoint(tmp_path / "model", "flax"))
    online = SCHEDULER.replace(', {"local_files_only": True}', ",")
    hub, printed = run(["-c", online], files, tmp_path)
    assert hub.fetched() == ["scheduler/scheduler_config.json"]
    assert printed.split() == ["DPMSolverMultistepScheduler", "0.012"]
    whole = (
        "from canvax.weights.open import open_files; from canvax.weights.location import Location; "
        f'open_files(Location("{MODEL}", revision="bf16"))'
    )
    _, printed = run(["-c", whole + SCHEDULER], files, tmp_path)
    assert printed.split() == ["DPMSolverMultistepScheduler", "0.012"] * 2
