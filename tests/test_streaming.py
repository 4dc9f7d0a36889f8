"""Weights that stay in the host's memory and are copied as their layers run: the same images, less device memory."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax import nn
from canvax.call import LAYERS, Load
from canvax.cli.arguments import build_parser
from canvax.cli.loading import load_of, load_with
from canvax.compile.additions import ReadsReferences
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.errors import HintWarning
from canvax.families.known import PRESETS
from canvax.models.denoiser import TransformerDenoiser
from canvax.parallel import memory
from canvax.parallel.memory import MOST_OFFLOADED, streams
from canvax.parallel.place import on_host
from canvax.parallel.rules import abstract_params
from canvax.params import Param, flatten
from canvax.pipelines import loaded
from canvax.settings import as_flags, declared
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.small_checkpoint import write_small_checkpoint

pytestmark = pytest.mark.slow

QUIET = canvax.Options(progress=False)
ONE = canvax.make_mesh(jax.devices()[:1])


def load(model: str | Path = "emoji", **arguments: Any) -> canvax.Pipeline:
    return canvax.load(model, **{"progress": False, "mesh": ONE} | arguments)


def draw(pipe: canvax.Pipeline, prompt: str = "a red apple", **changes: Any) -> canvax.Result:
    return pipe(prompt, **{"seed": 1, "num_inference_steps": 3, "options": QUIET} | changes)


def as_declared(pipe: canvax.Pipeline) -> bool:
    """Whether the large weights of all networks but the autoencoder are on the host, and nothing else is."""
    wanted = {(name, key) for name, spec in pipe.model.networks.specs(pipe.model.quantize).items()
              for key, param in flatten(spec) if name != "vae" and param.large}  # fmt: skip
    there = {(name, key) for name, params in pipe.params.items() for key, leaf in flatten(params) if on_host(leaf)}
    return there == wanted != set()


@pytest.mark.parametrize("quantize", [None, "int8-w8a8"])
def test_same_image_and_programs(quantize: str | None) -> None:
    """Nothing compiles for another prompt, seed, number of steps or sampler."""
    usual = load(quantize=quantize)
    with pytest.warns(HintWarning) as seen:  # on a CPU it saves nothing
        pipe = load(quantize=quantize, offload="layers")
    assert [getattr(warning.message, "argument", None) for warning in seen] == ["offload"]
    assert as_declared(pipe)
    np.testing.assert_array_equal(draw(pipe).pixels, draw(usual).pixels)
    assert draw(pipe, "a blue house", seed=7, num_inference_steps=5, sampler="Euler").compilations == 0
    one, other = pipe.memory(), usual.memory()
    small = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(params) if not on_host(leaf))
             for name, params in pipe.params.items()}  # fmt: skip
    assert one.weights == sum(small.values()) < other.streamed < other.total
    assert one.parts["denoiser"] == small["unet"] < other.parts["denoiser"] / 4
    with pytest.raises(canvax.InputError) as refused:
        load(offload="layer")
    assert refused.value.argument == "offload"


def test_with_adapters(tmp_path: Path) -> None:
    """Merged into weights, which stay on the host, and beside them."""
    usual, pipe, arrays = load(), load(offload="layers"), {}
    for (component, module), shape in layers(pipe.model.networks.specs()).items():
        if "attn" in module:
            arrays |= {f"{component}.{module}{end}": a * 0.5 for end, a in lora(Draw(1), shape).arrays.items()}
    file, plain = write(tmp_path / "ink.safetensors", arrays), draw(pipe).pixels
    for beside in (False, True):
        both = []
        for each in (usual, pipe):
            each.adapters.load("ink", file, 0.8, **({"beside": True} if beside else {}))
            both.append(draw(each).pixels)
            each.adapters.remove()
        np.testing.assert_array_equal(*both)
        assert np.abs(both[0] - plain).max() > 0.05
        assert as_declared(pipe)
    np.testing.assert_array_equal(draw(pipe).pixels, plain)
    pipe.save(tmp_path / "saved")
    np.testing.assert_array_equal(draw(load(tmp_path / "saved")).pixels, plain)


def test_split_weights(tmp_path: Path) -> None:
    folder, mesh = write_small_checkpoint(tmp_path / "model"), canvax.make_mesh(jax.devices()[:4], data=2, model=2)
    usual, pipe = load(folder, mesh=mesh), load(folder, mesh=mesh, offload="layers")
    assert as_declared(pipe)
    np.testing.assert_array_equal(*(draw(each, ["a cat", "a dog"]).pixels for each in (usual, pipe)))


def test_pure_functions() -> None:
    usual, pipe = load(), load(offload="layers")
    both = []
    for each in (usual, pipe):
        latents = np.ones((1, *each.model.networks.latent_shape(1, *each.model.native_size)[1:]), np.float32)
        step = jax.jit(lambda params, text, x, each=each: each.denoiser(x, 500, text, params=params))
        text = each.encode("a red apple")
        both.append(step(each.params, text, latents))
        np.testing.assert_allclose(each.denoiser(latents, 500, text), both[-1], atol=1e-4)  # not compiled as a whole
    np.testing.assert_array_equal(*both)


def test_chosen_where_a_network_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so. What fits as a whole is offloaded as a whole; a processor's weights are on the host in any case."""

    def device(platform: str, free: int) -> Any:
        stats = {"bytes_limit": free, "bytes_in_use": 0}
        chip = SimpleNamespace(platform=platform, process_index=0, memory_stats=lambda: stats)
        return SimpleNamespace(devices=np.array([[chip]]))

    assert streams(95, device("gpu", 100))
    assert not streams(int(100 * MOST_OFFLOADED), device("gpu", 100))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: 100)
        assert not streams(95, device("cpu", 100))
    largest = []

    def small(needed: int, mesh: Any) -> bool:
        largest.append(needed)
        return True

    monkeypatch.setattr(loaded, "streams", small)
    with pytest.warns(HintWarning):
        pipe = load(offload=True)
    assert as_declared(pipe)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(params)) for params in pipe.params.values()]
    assert largest == [max(sizes)]
    assert not load().model.streamed
    monkeypatch.setattr(loaded, "streams", lambda needed, mesh: False)
    assert not load(offload=True).model.streamed


@pytest.mark.parametrize("flag", ["--offload", "--offload-layers"])
def test_commands(flag: str) -> None:
    """``compile`` too: programs with streamed weights are others."""
    wanted = {"--offload": True, "--offload-layers": LAYERS}[flag]
    for words in (["generate", "a cat", flag], ["serve", "emoji", flag], ["bench", "emoji", flag]):
        assert load_of(build_parser().parse_args(words), model="emoji") == Load(offload=wanted, progress=True)
    assert as_flags(declared(Load)["offload"], wanted) == [flag]
    arguments = build_parser().parse_args(["compile", "emoji", "--mesh", "data=1", flag, "-q"])
    shapes = load_with(arguments, weights=False).params
    assert any(map(on_host, jax.tree.leaves(shapes))) == (wanted == LAYERS)


TRANSFORMERS = [name for name, networks in PRESETS.items() if isinstance(networks.denoiser, TransformerDenoiser)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_layers_are_copied_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer's weights are copied when they are used: released sizes and the shortest text, or with a reference."""
    networks, late = PRESETS[name], list[str]()
    params = {part: abstract_params(spec, "bfloat16", ONE) for part, spec in networks.specs(streamed=True).items()}
    wanted, latents = Programs(networks, ONE).wanted, networks.latent_shape(1, 512, 512)
    kinds = Kinds(guided=(True,), decoder=None)
    every = [wanted(params, latents, kinds._replace(lengths=networks.text.up_to_shortest(1)[0]))]
    if networks.denoiser.facts.edits:
        every.append(wanted(params, latents, kinds.adding(ReadsReferences(((512, 512),)))))
    weight, names = nn._weight, dict[int, str]()

    def used(p: Any, x: Any) -> Any:
        late.extend([names.get(id(p["weight"]), "of blocks.0")] * nn._on_host(p["weight"]))
        return weight(p, x)

    monkeypatch.setattr(nn, "_weight", used)
    for program in (some[name] for some in every for name in ("text encoder", "guided denoiser")):

        def traced(weights: Any, *inputs: Any, function: Any = program.function) -> Any:
            names.update((id(leaf), key) for key, leaf in flatten(weights))
            return function(weights, *inputs)

        jax.clear_caches()  # a block that was traced before would not be seen
        jax.jit(traced).trace(program.weights(params, lambda leaf: leaf), *program.inputs)
        assert [name for name in late if re.search(r"(block|layer)s\.\d", name)] == []


def test_declared() -> None:
    """Only what ``canvax.nn`` reads can be streamed: matrices and convolutions that may have 8 bits."""
    matrix = Param((2, 3), (None, None), layout="linear")
    assert matrix.large
    assert not Param((2, 3), (None, None)).large
    assert not Param((2, 3), (None, None), layout="linear", whole=True).large
