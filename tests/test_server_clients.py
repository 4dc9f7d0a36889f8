"""Programs of others, unmodified and in environments of their own, against a server with the model in the package.

Each script of ``tests/clients`` takes the server's address and a size, and prints what it read as JSON. With
``CANVAX_CLIENTS`` naming a folder, the environments are kept there for the next time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import generating

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "clients"
PYTHON = {  # litellm wants an older openai, so there are two
    "new": ["openai==3.54.0", "huggingface_hub==2.4.0", "pillow"],
    "old": ["openai>=2.54,<3", "litellm==1.106.2", "langchain-community==0.4.2", "webuiapi==0.9.17"],
}
NODE = ["openai@6.49.0", "@ai-sdk/openai-compatible@2.0.91", "ai@6", "@huggingface/inference@4.13.30"]
PNG = "89504e47"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("CANVAX_CLIENTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("clients")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with generating() as (base, _):
        yield base


def install(ready: Path, *commands: list[str], where: Path) -> None:
    """Run commands that make an environment, once; without a registry to ask, skip."""
    if ready.exists():
        return
    for command in commands:
        try:
            subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=900, check=True)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", None) or error).strip()
            pytest.skip(f"{Path(command[0]).name} cannot install the clients here: {said[-200:]}")
    ready.touch()


def python_with(folder: Path, name: str) -> str:
    environment = folder / name
    program = str(environment / "bin" / "python")
    uv = [sys.executable, "-m", "uv"]  # pip takes half a minute for each
    make = [*uv, "venv", "--python", sys.executable, str(environment)]
    install(environment / "ready", make, [*uv, "pip", "install", "--python", program, *PYTHON[name]], where=folder)
    return program


def heard(command: list[str], base: str, where: Path) -> dict[str, Any]:
    """What a script said at the end."""
    # Without paths of this process, and without the Hub's switch for offline work, which refuses any address.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    command = [*command, base, "64x64"]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def from_python(folder: Path, base: str, environment: str, script: str) -> dict[str, Any]:
    return heard([python_with(folder, environment), str(SCRIPTS / script)], base, folder)


def from_node(folder: Path, base: str, script: str) -> dict[str, Any]:
    npm, node = shutil.which("npm"), shutil.which("node")
    if not npm or not node:
        pytest.skip("there is no Node here")
    environment = folder / "node"
    environment.mkdir(exist_ok=True)
    (environment / "package.json").write_text('{"private": true}')
    install(environment / "ready", [npm, "install", "--no-audit", "--no-fund", *NODE], where=environment)
    shutil.copy(SCRIPTS / script, environment)  # packages are looked for beside the script
    return heard([node, script], base, environment)


@pytest.mark.weekly
def test_openai_python(folder: Path, base: str) -> None:
    said = from_python(folder, base, "new", "run_openai.py")
    assert said["images"] == said["completed"] == [PNG, PNG]
    assert (said["seeds"], said["created"], said["again"], said["model"]) == ([7, 8], True, True, "emoji")
    assert said["url"] == "data:image/png;base64,"
    assert (said["partial"], said["indices"], said["usage"]) == (True, True, 0)
    assert said["edit"] == said["edit of a list"] == PNG
    assert said["quality of an edit with options"] == "low"
    assert said["edit in a stream"] == "image_edit.completed"
    assert (said["models"], said["one model"], said["at once"]) == (["emoji"], "model", [PNG] * 4)
    assert said["errors"] == {
        "prompt": ["BadRequestError", "prompt", "invalid_value", True],
        "variation": ["NotFoundError", None, "not_found", True],
        "size": ["BadRequestError", "size", "invalid_value", True],
    }


@pytest.mark.weekly
def test_litellm(folder: Path, base: str) -> None:
    said = from_python(folder, base, "old", "run_litellm.py")
    assert said["openai/mine"] == said["hosted_vllm/mine"] == [PNG, PNG]
    assert (said["edit"], said["usage"], said["error"]) == (PNG, 0, "BadRequestError")


@pytest.mark.weekly
def test_langchain(folder: Path, base: str) -> None:
    assert from_python(folder, base, "old", "run_langchain.py") == {"urls": ["data:image/png;base64,"] * 2}


@pytest.mark.weekly
def test_webuiapi(folder: Path, base: str) -> None:
    said = from_python(folder, base, "old", "run_webuiapi.py")
    assert (said["images"], said["seeds"]) == ([[64, 64], [64, 64]], [1003, 1004])
    assert (said["ddim"], said["img2img"], said["inpaint"], said["model"]) == ("DDIM", [64, 64], [64, 64], True)
    assert (said["progress"], said["interrupted"], said["error"]) == (True, True, 422)


def test_huggingface_hub(folder: Path, base: str) -> None:
    said = from_python(folder, base, "new", "run_hf.py")
    assert said.pop("error") == 404
    assert said == {name: [64, 64] for name in ("url", "root", "token", "image to image", "async")}


@pytest.mark.weekly
def test_openai_node(folder: Path, base: str) -> None:
    said = from_node(folder, base, "run_openai.mjs")
    assert (said["images"], said["seeds"], said["completed"], said["edit"]) == ([PNG, PNG], [7, 8], [PNG], PNG)
    assert (said["partial"], said["models"]) == (True, ["emoji"])
    assert said["error"] == ["BadRequestError", 400, "prompt", True]


@pytest.mark.weekly
def test_ai_sdk(folder: Path, base: str) -> None:
    assert from_node(folder, base, "run_ai.mjs") == {"images": [["image/png", PNG]] * 3, "error": [400, True]}


@pytest.mark.weekly
def test_huggingface_inference(folder: Path, base: str) -> None:
    said = from_node(folder, base, "run_hf.mjs")
    assert (said["image"], said["edit"]) == (["image/png", PNG], PNG)
    assert said["error"] == ["InferenceClientProviderApiError", True]
