"""The documents' own scripts, run from first line to last on eight virtual devices against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_imitation import HubImitation, Repository, folder_files
from small_checkpoint import write_small_checkpoint

HERE = Path(__file__).parent
MODEL = "CompVis/stable-diffusion-v1-4"


@pytest.mark.parametrize(("script", "form"), [("how_to", "flax"), ("negative_prompts", "torch")])
def test_script(script: str, form: str, tmp_path: Path) -> None:
    files = folder_files(write_small_checkpoint(tmp_path / "model", form))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    with HubImitation() as hub:
        hub.repositories[MODEL] = Repository()
        hub.repositories[MODEL].commit("bf16", files)
        env = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-W", "error", str(HERE / f"{script}.py")]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Found 8 JAX devices" in done.stdout
