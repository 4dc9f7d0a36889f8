"""Adapters: read strictly, merged as the equations say, and taken out again to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from adapter_files import (
    Draw,
    Made,
    dora,
    full,
    glora,
    ia3,
    kohya,
    kohya_ldm,
    layers,
    loha,
    loha_tucker,
    lokr,
    lora,
    lora_tucker,
    oft,
    replaced,
    stored,
    without_alpha,
    write,
)
from small_checkpoint import write_small_checkpoint
from small_sdxl import build

import canvax
from canvax.params import flatten

Make = Callable[[Draw, tuple[int, ...]], Made]
KERNEL = 4
"""Axes of the weight of a convolution."""


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> canvax.StableDiffusion:
    folder = write_small_checkpoint(tmp_path_factory.mktemp("sd") / "small")
    return canvax.load(folder, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> canvax.StableDiffusion:
    return canvax.load(build(tmp_path_factory.mktemp("xl")), mesh=canvax.make_mesh(jax.devices()[:1]))


def leaves(pipe: canvax.StableDiffusion) -> dict[str, np.ndarray]:
    assert pipe.params is not None
    return {name: np.asarray(leaf) for name, leaf in flatten(pipe.params)}


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test loads, taking it out gives the very bits back."""
    pipes = [request.getfixturevalue(name) for name in ("sd", "xl") if name in request.fixturenames]
    before = [leaves(pipe) for pipe in pipes]
    yield
    for pipe, was in zip(pipes, before, strict=True):
        pipe.adapters.remove()
        now = leaves(pipe)
        assert now.keys() == was.keys()
        assert all(now[name].tobytes() == was[name].tobytes() for name in was)
        assert not pipe.model.merged
        assert not any(tokenizer.added for tokenizer in pipe.model.tokenizers.values())


def check_merged(pipe: canvax.StableDiffusion, deltas: dict[tuple[str, str], Any], load: Callable[[], Any]) -> None:
    """Merged weights are the base and the deltas, computed in float64: 1e-6 relative; all others are as they were."""
    before = leaves(pipe)
    params = {part.name: dict(flatten(part.spec)) for part in pipe.model.components}
    load()
    after = leaves(pipe)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {".".join(key) for key in deltas}
    for (component, name), delta in deltas.items():
        param, path = params[component][name], f"{component}.{name}"
        base = stored(param, before[path])
        wanted = base + delta(base)
        error = np.abs(stored(param, after[path]) - wanted).max() / np.abs(wanted).max()
        assert error < 1e-6, (path, error)


def only_convs(shape: tuple[int, ...]) -> bool:
    return len(shape) == KERNEL and shape[-1] == 3


def only_linear(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


def even(shape: tuple[int, ...]) -> bool:
    return shape[0] % 4 == 0


FORMATS: dict[str, tuple[Make, Callable[[tuple[int, ...]], bool]]] = {
    "lora": (lora, lambda shape: True),
    "lora without alpha": (without_alpha, lambda shape: True),
    "lora with a core": (lora_tucker, only_convs),
    "dora by outputs": (dora(0), lambda shape: True),
    "dora by inputs": (dora(1), lambda shape: True),
    "loha": (loha, lambda shape: True),
    "loha with cores": (loha_tucker, only_convs),
    "lokr of wholes": (lokr("whole", "whole"), lambda shape: True),
    "lokr of a whole and a product": (lokr("whole", "product"), lambda shape: True),
    "lokr of products": (lokr("product", "product"), lambda shape: True),
    "lokr with a core": (lokr("whole", "tucker"), only_convs),
    "oft": (oft, even),
    "ia3 of inputs": (ia3(True), lambda shape: True),
    "ia3 of outputs": (ia3(False), lambda shape: True),
    "glora": (glora(False), only_linear),
    "glora of old": (glora(True), only_linear),
    "full": (full, lambda shape: True),
    "replaced": (replaced, lambda shape: True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, sd: canvax.StableDiffusion, tmp_path: Path) -> None:
    """Every format, on every layer that it is for, with ranks unlike alpha that differ by layer."""
    make, suits = FORMATS[name]
    draw, arrays, deltas = Draw(), {}, {}
    for (component, module), shape in layers(sd.model.networks.specs()).items():
        if suits(shape):
            made = make(draw, shape)
            arrays |= {kohya(component, module) + end: array for end, array in made.arrays.items()}
            deltas[component, f"{module}.weight"] = made.delta
    assert len(deltas) > 10
    file = write(tmp_path / "a.safetensors", arrays)
    check_merged(sd, deltas, lambda: sd.adapters.load("a", file))
