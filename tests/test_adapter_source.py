"""Adapters from the Hub, by an imitation of it; and on several devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.params import flatten
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.forks import run_fork
from tests.support.hub_imitation import HubImitation, Repository
from tests.support.small_checkpoint import write_small_checkpoint

# huggingface_hub reads HF_* when it is imported.
SCRIPT = """
import json, sys
from canvax.errors import CanvaxError
from canvax.weights.location import Location
from canvax.weights.open import EMBEDDING_FILES, LORA_FILES, find_adapter
answers = []
for call in json.load(sys.stdin):
    usual = EMBEDDING_FILES if call.pop("embedding", False) else LORA_FILES
    try:
        paths, config = find_adapter(Location(**call, argument="source"), usual)
        answers.append([[path.name for path in paths], config])
    except CanvaxError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def find(hub: HubImitation, home: Path, *calls: dict[str, Any], **variables: str) -> list[Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
           "NO_PROXY": "127.0.0.1", **variables}  # fmt: skip
    return run_fork(SCRIPT, calls, env, home.parent / "fork")[0]


@pytest.mark.slow
def test_hub(tmp_path: Path) -> None:
    """What is needed is fetched and nothing else, by the usual names or the one given; later without the Hub."""
    data = write(tmp_path / "a.safetensors", {"x.diff": Draw()(3)}).read_bytes()
    config = json.dumps({"r": 4, "lora_alpha": 8}).encode()
    files = {
        "o/usual": {"pytorch_lora_weights.safetensors": data, "other.safetensors": data, "README.md": b"#"},
        "o/peft": {"adapter_model.safetensors": data, "adapter_config.json": config, "training.py": b"raise"},
        "o/single": {"ink.safetensors": data},
        "o/several": {"ink.safetensors": data, "clay.safetensors": data},
        "o/pickle": {"pytorch_lora_weights.bin": b"PK\3\4"},
        "o/word": {"learned_embeds.safetensors": data, "learned_embeds_2.safetensors": data},
    }
    with HubImitation() as hub:
        for name, content in files.items():
            hub.repositories[name] = Repository()
            hub.repositories[name].commit("main", content)
        calls: list[dict[str, Any]] = [
            {"name": "o/usual"},
            {"name": "o/peft"},
            {"name": "o/single"},
            {"name": "o/several/clay.safetensors"},
            {"name": "o/several", "weight_name": "ink.safetensors"},
            {"name": "o/word", "embedding": True},
        ]
        wanted = [
            [["pytorch_lora_weights.safetensors"], None],
            [["adapter_model.safetensors"], json.loads(config)],
            [["ink.safetensors"], None],
            [["clay.safetensors"], None],
            [["ink.safetensors"], None],
            [["learned_embeds.safetensors", "learned_embeds_2.safetensors"], None],
        ]
        bad: list[dict[str, Any]] = [{"name": "o/several"}, {"name": "o/pickle"}, {"name": "o/nobody"}]
        *found, several, pickle, nobody = find(hub, tmp_path / "home", *calls, *bad)
        assert found == wanted
        fetched = hub.fetched()
        assert not {"other.safetensors", "training.py", "README.md", "pytorch_lora_weights.bin"} & set(fetched)
        assert "several files; name one of them, FOLDER/FILE: clay.safetensors" in several
        assert "has only pytorch_lora_weights.bin. canvax does not open pickles" in pickle
        assert "there is no such repository" in nobody
        before = len(hub.requests)
        named = [calls[0], calls[1], {**calls[2], "weight_name": "ink.safetensors"}, *calls[3:]]
        assert find(hub, tmp_path / "home", *named, HF_HUB_OFFLINE="1") == wanted
        assert len(hub.requests) == before
        (message,) = find(hub, tmp_path / "elsewhere", calls[0], HF_HUB_OFFLINE="1")
        assert "is not in the cache" in message


@pytest.mark.weekly
def test_several_devices(tmp_path: Path) -> None:
    """Weights that devices share lie as before, and are those of one device."""
    folder = write_small_checkpoint(tmp_path / "small")
    pipes = [canvax.load(folder, mesh=canvax.make_mesh(jax.devices()[:count], **axes))
             for count, axes in ((1, {}), (4, {"data": 2, "model": 2}))]  # fmt: skip
    draw, arrays = Draw(), {}
    for (component, module), shape in layers(pipes[0].model.networks.specs()).items():
        arrays |= {f"{component}.{module}{end}": a for end, a in lora(draw, shape).arrays.items()}
    file = write(tmp_path / "a.safetensors", arrays)
    laid = [dict(flatten(pipe.params)) for pipe in pipes if pipe.params]
    for pipe in pipes:
        pipe.adapters.load("a", file, weight=0.5)
        assert pipe.params is not None
    one, four = (dict(flatten(pipe.params)) for pipe in pipes if pipe.params)
    split = 0
    for name, leaf in four.items():
        assert leaf.sharding == laid[1][name].sharding
        assert leaf.shape == laid[1][name].shape
        split += not leaf.is_fully_replicated
        np.testing.assert_array_equal(np.asarray(leaf).reshape(one[name].shape), one[name])
    assert split > 20
    images = [pipe(["a cat"] * 2, num_inference_steps=1, seed=[1, 2], progress=False).pixels for pipe in pipes]
    np.testing.assert_allclose(images[0], images[1], atol=2e-3)
    for pipe, before in zip(pipes, laid, strict=True):
        pipe.adapters.remove()
        assert pipe.params is not None
        assert all(np.array_equal(before[name], leaf) for name, leaf in flatten(pipe.params))
