"""A model family that the package does not know: records in this file alone make an image through the public call."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.compile import cache, key
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.engine import batch
from canvax.families.base import Defaults, Family, Model, Numbers
from canvax.guidance import Guidance
from canvax.models.beside import Places
from canvax.models.clip import ClipEncoder
from canvax.models.configs import ClipTextConfig
from canvax.models.controlled import Controlled
from canvax.models.denoiser import Around, Denoiser, Perturbed, Reusing, Row
from canvax.models.flux2 import Flux2Config, Flux2Denoiser
from canvax.models.networks import Networks
from canvax.models.presets import PRESETS
from canvax.models.text import Conditions, Shapes, TextEncoder, TextEncoders
from canvax.nn import gelu, linear, linear_spec
from canvax.originals import foreign
from canvax.parallel.mesh import make_mesh
from canvax.parallel.place import map_parts
from canvax.params import Params, Spec, init_params
from canvax.samplers import from_scheduler_config
from canvax.types import Array
from tests.support.small_checkpoint import UNET

WIDTH, CHANNELS, FACTOR = 8, 3, 2


@dataclass(frozen=True)
class MlpDenoiser(Denoiser):
    """Two layers for each latent, which see the mean of the text, the time and a number about the image."""

    @property
    def component(self) -> str:
        return "mixer"

    @property
    def spec(self) -> Spec:
        inputs = {"x": CHANNELS, "text": WIDTH, "time": 1, "hue": 1}
        return {name: linear_spec(size, WIDTH) for name, size in inputs.items()} | {"out": linear_spec(WIDTH, CHANNELS)}

    @property
    def native_size(self) -> tuple[int, int]:
        return 8, 8

    def inputs(self, latents: Sequence[int], text: Any, dtype: Any) -> dict[str, Any]:
        return {"hue": jax.ShapeDtypeStruct((latents[0], 1), jnp.float32)}

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Array:
        told = linear(p["text"], conditions["text"].mean(1)) + linear(p["hue"], conditions["hue"])
        return told[:, None, None]

    def apply(self, p: Params, x: Array, row: Row, prepared: Array, memory: Any) -> tuple[Array, Any]:
        time = linear(p["time"], row["timestep"][:, None, None, None] / 1000)
        return linear(p["out"], gelu(linear(p["x"], x) + time + prepared)), memory


@dataclass(frozen=True)
class Letters(TextEncoder):
    """A text encoder that embeds the letters of a text, and reads how many there are."""

    component: str
    lengths: tuple[int, ...]
    tokenizer = "letters"

    @property
    def spec(self) -> Spec:
        return {"embed": linear_spec(256, WIDTH)}

    def inputs(self, length: int) -> Shapes:
        return super().inputs(length) | {"count": jax.ShapeDtypeStruct((), jnp.int32)}

    def count(self, tokenizer: Any, text: str, images: Any) -> int:
        return len(text)

    def read(self, tokenizer: Any, texts: Sequence[str], length: int, images: Any = ()) -> dict[str, np.ndarray]:
        ids = [[*map(ord, text), *[0] * (length - len(text))] for text in texts]
        return {name: np.array(array, np.int32) for name, array in (("ids", ids), ("count", list(map(len, texts))))}

    def outputs(self, length: int, dtype: Any) -> Shapes:
        return {"text": jax.ShapeDtypeStruct((length, WIDTH), dtype)}

    def encode(self, p: Params, ids: Array, count: Array) -> Conditions:
        letters = jnp.arange(ids.shape[1])[None] < count[:, None]
        return {"text": linear(p["embed"], jax.nn.one_hot(jnp.where(letters, ids, -1), 256))}


@dataclass(frozen=True)
class OneAfterAnother(TextEncoders):
    """Joins texts on the axis of the tokens."""

    def join(self, outputs: Sequence[Any]) -> Any:
        return {"text": jnp.concatenate([output["text"] for output in outputs], axis=1)}


@dataclass(frozen=True)
class Squares:
    """An autoencoder that makes a square of one colour of each latent."""

    factor = FACTOR
    latent_channels = CHANNELS

    @property
    def spec(self) -> Spec:
        return {"colour": linear_spec(CHANNELS, 3)}

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        return jax.nn.sigmoid(linear(p["colour"], latents).repeat(FACTOR, 1).repeat(FACTOR, 2))

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> tuple[Array, Array]:
        latents = 4 * images[:, ::FACTOR, ::FACTOR] - 2
        return latents, jnp.zeros_like(latents)


def hues(model: Model, height: int, width: int, options: Any) -> tuple[Numbers, Numbers]:
    return {"hue": np.ones(1, np.float32)}, {"hue": np.zeros(1, np.float32)}


TEXT = OneAfterAnother((Letters("reader", (5, 20)), Letters("speller", (7,))))
NETWORKS = Networks(MlpDenoiser(), Squares(), TEXT)
FAMILY = Family(
    name="mixer",
    pipelines=("MixerPipeline",),
    read=lambda files: NETWORKS,
    tokenizer=lambda files, encoder: None,
    defaults=Defaults(num_inference_steps=4, guidance_scale=3.0),
    numbers=hues,
)


def pipeline_of(networks: Networks, family: Family = FAMILY) -> canvax.StableDiffusion:
    files: Any = SimpleNamespace(name="a mixer", revision=None, variant=None, overrides={})
    model = Model(
        files=files,
        family=family,
        networks=networks,
        tokenizers={one.component: FAMILY.tokenizer(files, one) for one in networks.text.encoders},
        scheduler=from_scheduler_config({"_class_name": "FlowMatchEulerDiscreteScheduler"}),
        defaults=family.defaults,
        dtype="float32",
    )
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(networks.specs().items())}
    mesh = make_mesh(jax.devices()[:1])
    pipe = canvax.StableDiffusion(model, Programs(networks, mesh))
    pipe.params = pipe.place(params)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> canvax.StableDiffusion:
    return pipeline_of(NETWORKS)


def draw(pipe: canvax.StableDiffusion, prompt: Any = "a fox", **keywords: Any) -> canvax.Result:
    return pipe(prompt, **{"seed": 1, "options": canvax.Options(progress=False)} | keywords)


def test_the_public_call_makes_an_image(pipe: canvax.StableDiffusion) -> None:
    result = draw(pipe)
    assert result.images[0].size == (8 * FACTOR, 8 * FACTOR)
    assert result.latents.shape == (1, 8, 8, CHANNELS)
    again = draw(pipe, ["a fox", "a hen"], seed=[1, 2], height=24, width=16, sampler="DPM++ 2M", num_inference_steps=6)
    assert again.pixels.shape == (2, 24, 16, 3)
    assert np.abs(again.pixels[0] - again.pixels[1]).max() > 0.01


def test_everything_a_user_changes_is_data(pipe: canvax.StableDiffusion) -> None:
    want = draw(pipe)
    changes: dict[str, Any]
    for changes in ({"guidance_scale": 5.0}, {"num_inference_steps": 6}, {"negative_prompt": "red"}, {"seed": 3}):
        got = draw(pipe, **changes)
        assert got.compilations == 0
        assert np.abs(got.latents - want.latents).max() > 1e-4


def test_encoders_have_lengths_of_their_own(pipe: canvax.StableDiffusion) -> None:
    """A longer prompt takes the longer length of one encoder; a prompt that one of them cannot read is refused."""
    short, long = (np.asarray(pipe.encode(text)["text"]) for text in ("a fox", "a foxes"))
    assert (short.shape, long.shape) == ((1, 5 + 7, WIDTH), (1, 20 + 7, WIDTH))
    np.testing.assert_allclose(short[:, :5], long[:, :5], atol=1e-6)
    assert np.abs(long[:, 6] - long[:, 7]).max() > 1e-3 > np.abs(long[:, 7] - long[:, 19]).max()  # behind 7 letters
    for prompt, syntax in {"a fox and a hen": "plain", "a (fox)": "a1111"}.items():
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, prompt, options=canvax.Options(progress=False, prompt_syntax=syntax))
        assert caught.value.argument == "prompt"


def test_conditions_in_place_of_prompts(pipe: canvax.StableDiffusion) -> None:
    """The other side is brought to their length; what was joined on its tokens cannot be brought to another."""
    short, long = map(pipe.encode, ("a fox", "a foxes"))
    for prompt, negative in ((short, "red"), (long, "red"), (long, short | {"text": long["text"]})):
        text = "a fox" if prompt is short else "a foxes"
        want = draw(pipe, text, negative_prompt=negative if isinstance(negative, str) else text)
        np.testing.assert_array_equal(draw(pipe, prompt, negative_prompt=negative).latents, want.latents)
    for prompt, negative in ((short, "a foxes"), (short | {"text": long["text"][:, :9]}, "red")):
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, prompt, negative_prompt=negative)
        assert caught.value.argument == "prompt"


@dataclass(frozen=True)
class Unweighted(Letters):
    """An encoder that passes weights over."""

    def words(self, tokenizer: Any, pieces: Sequence[Any], options: Any, images: Any = ()) -> Any:
        return super().words(tokenizer, [(text, 1.0) for text, _ in pieces], options, images)


def test_weights_and_chunks_of_clip_beside_another_encoder() -> None:
    """What the host mixes for CLIP is joined as the family joins it, and leaves the other encoder alone."""
    tokenizers = canvax.load("emoji").model.tokenizers | {"reader": None}
    cfg = ClipTextConfig(2500, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    encoders, pipes = (ClipEncoder("text_encoder", cfg), Unweighted("reader", (700,))), []
    for some in (encoders, encoders[:1], encoders[1:]):
        pipe = pipeline_of(dataclasses.replace(NETWORKS, text=OneAfterAnother(some)))
        pipes.append(dataclasses.replace(pipe, model=dataclasses.replace(pipe.model, tokenizers=tokenizers)))
        pipes[-1].params = pipes[0].params or pipe.params
    for prompt in ("a (red:1.3) apple", "apple " * 90 + "(red:0.5)"):
        both, *each = (np.asarray(pipe.encode(prompt, prompt_syntax="comfy")["text"]) for pipe in pipes)
        np.testing.assert_array_equal(both, np.concatenate(each, axis=1))
        options = canvax.Options(progress=False, prompt_syntax="comfy")
        want = draw(pipes[0], {"text": both}, negative_prompt={"text": both}, options=options).latents
        np.testing.assert_array_equal(draw(pipes[0], prompt, negative_prompt=prompt, options=options).latents, want)


@dataclass(frozen=True)
class Seeing(Letters):
    """An encoder that sees the reference images beside a prompt."""

    seen: ClassVar[list[Any]] = []

    def read(self, tokenizer: Any, texts: Sequence[str], length: int, images: Any = ()) -> dict[str, np.ndarray]:
        self.seen.append([[image.size for image in each] for each in images])
        return super().read(tokenizer, texts, length)


def test_an_encoder_sees_the_images_that_are_edited(transformer: canvax.StableDiffusion) -> None:
    networks = dataclasses.replace(transformer.model.networks, text=TextEncoders((Seeing("reader", (5,)),)))
    pipe = pipeline_of(networks, transformer.model.family)
    draw(pipe, ["a fox", "a hen"], image=[np.zeros((8, 12, 3), np.uint8)] * 2, height=8, width=8)
    assert [[(12, 8)] * 2] * 2 in Seeing.seen


def test_an_image_to_begin_from_and_a_mask(pipe: canvax.StableDiffusion) -> None:
    image, mask = np.full((16, 16, 3), 200, np.uint8), np.zeros((16, 16), np.uint8)
    mask[:, 8:] = 255
    result = draw(pipe, image=image, mask=mask, strength=0.5)
    assert np.isfinite(result.pixels).all()


def test_the_networks_are_functions_of_arrays(pipe: canvax.StableDiffusion) -> None:
    conditions = pipe.encode(["a fox", "a hen"])
    latents = jnp.ones((2, 8, 8, CHANNELS))
    assert pipe.denoiser(latents, 500.0, conditions).shape == latents.shape
    assert pipe.decode(latents).shape == (2, 16, 16, 3)
    with pytest.raises(canvax.InputError):
        pipe.denoiser(latents, 500.0, {"text": conditions["text"]})


def test_what_only_some_networks_can_do_is_refused(pipe: canvax.StableDiffusion) -> None:
    for name, value in {"reuse": 2, "pag_scale": 3.0, "pag_adaptive_scale": 0.01}.items():
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, options=canvax.Options(**{name: value}))
        assert caught.value.argument == name


@pytest.fixture(scope="module")
def transformer() -> canvax.StableDiffusion:
    """A pipeline around a small FLUX.2, whose loop has latents in one row."""
    cfg = Flux2Config(
        in_channels=CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    networks = dataclasses.replace(NETWORKS, denoiser=Flux2Denoiser(cfg))
    return pipeline_of(networks, Family("small", (), FAMILY.read, FAMILY.tokenizer, FAMILY.defaults))


def test_one_entry_of_conditions_is_for_all_latents(transformer: canvax.StableDiffusion) -> None:
    one = transformer.encode("a fox")
    latents = jax.random.normal(jax.random.key(0), (2, 4, 6, CHANNELS))
    both = {name: jnp.repeat(array, 2, axis=0) for name, array in one.items()}
    got, want = (transformer.denoiser(latents, 500.0, conditions) for conditions in (one, both))
    np.testing.assert_array_equal(got, want)


def test_latents_that_stay_on_the_devices(transformer: canvax.StableDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"height": 8, "width": 16, "num_inference_steps": 2}
    want = draw(transformer, ["a fox", "a hen"], **size)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "map_parts", None)  # by way of the host
        got = draw(transformer, ["a fox", "a hen"], output_type="jax", **size)
    np.testing.assert_array_equal(got.latents, want.latents)
    read = []
    monkeypatch.setattr(batch, "map_parts", lambda function, array: read.append(array) or map_parts(function, array))
    np.testing.assert_array_equal(draw(transformer, ["a fox", "a hen"], **size).latents, want.latents)
    assert len(read) == 1


@dataclass(frozen=True)
class Plain(Around):
    """A record around a denoiser, with nothing of its own."""

    base: Any


MEMBERS = [name for name in vars(Denoiser) if not name.startswith("_")]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_record_around_a_denoiser_has_all_that_it_has(name: str) -> None:
    inner: Any = SimpleNamespace(**{member: object() for member in MEMBERS}, cfg=object())
    for around in (Plain(inner), Plain(Plain(inner)), *([Perturbed(inner)] if name != "prepare" else [])):
        assert getattr(around, name) is getattr(inner, name)
        assert around.cfg is inner.cfg
    overridden = {name for kind in (Reusing, Controlled) for name in vars(kind)}
    if name not in overridden:
        assert getattr(Controlled(Reusing(inner, UNET, 1), ()), name) is getattr(inner, name)


def test_a_network_around_that_of_a_checkpoint() -> None:
    """Facts, and what a call adds to the network."""
    networks = canvax.load("emoji").model.networks
    mine = dataclasses.replace(networks, denoiser=Plain(networks.denoiser))
    assert (mine.native_size, mine.size_numbers) == (networks.native_size, networks.size_numbers)
    places = Places(2, 4)
    inner = mine.denoiser_of(places=places, reuse_layers=1, perturbs=True)
    assert inner.inputs((1, 8, 8, 32), {}, jnp.dtype) == networks.denoiser_of(places=places).inputs(
        (1, 8, 8, 32), {}, jnp.dtype
    )
    assert copy.copy(mine) == pickle.loads(pickle.dumps(mine)) == mine
    klein: Any = Networks(Plain(Flux2Denoiser(Flux2Config(), is_distilled=True)), Squares(), TEXT)
    assert klein.unguided
    assert klein.denoiser_of(references=1024).base.references == 1024


CELLS = {
    "helper": "def boosted(x): return {gain} * x",
    "denoiser": """
@dataclass(frozen=True)
class Mine(MlpDenoiser):
    def apply(self, p, x, row, prepared, memory):
        out, memory = MlpDenoiser.apply(self, p, x, row, prepared, memory)
        return {gain} * boosted(out), memory
""",
    "text": """
@dataclass(frozen=True)
class Mine(Letters):
    def encode(self, p, ids, count):
        return {{"text": {gain} * boosted(Letters.encode(self, p, ids, count)["text"])}}
""",
    "vae": """
import typing
class Mine(typing.NamedTuple):
    factor: int = FACTOR
    latent_channels: int = CHANNELS
    spec = property(lambda self: Squares().spec)

    def decode(self, p, latents, *, tiled=False):
        return Squares().decode(p, {gain} * boosted(latents))
""",
}
"""Cells of a notebook, with a number to edit."""


def run_cell(notebook: dict[str, Any], name: str, gain: float) -> None:
    exec(CELLS[name].format(gain=gain), notebook)


def networks_of(notebook: dict[str, Any], part: str) -> Networks:
    mine = notebook["Mine"](*(["reader", (5,)] if part == "text" else []))
    return dataclasses.replace(NETWORKS, **{part: TextEncoders((mine,)) if part == "text" else mine})


@pytest.mark.parametrize(("part", "method"), [("denoiser", "apply"), ("text", "encode"), ("vae", "decode")])
def test_an_edited_network_is_another_program(
    part: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defined again, and edited in place: neither in memory nor on disk is it taken for the old one."""
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(key, "edited", lambda: False)  # by whoever edits while the tests run
    notebook = {**globals(), "__name__": "__main__"}
    run_cell(notebook, "helper", 1.0)
    run_cell(notebook, part, 1.0)
    first, pipe = notebook["Mine"], pipeline_of(networks_of(notebook, part))
    pixels = [draw(pipe).pixels]
    assert draw(pipe).compilations == 0
    assert not cache.programs()

    def changed(pipe: canvax.StableDiffusion) -> bool:
        pixels.append(draw(pipe).pixels)
        return bool(np.abs(pixels[-1] - pixels[-2]).max() > 1e-3)

    run_cell(notebook, "helper", 2.0)
    assert changed(pipe)
    run_cell(notebook, part, 3.0)
    monkeypatch.setattr(first, method, vars(notebook["Mine"])[method])
    assert changed(pipe)
    run_cell(notebook, part, 5.0)
    assert changed(pipeline_of(networks_of(notebook, part)))


def test_an_edited_network_is_traced_again_in_loops_of_ones_own() -> None:
    notebook, latents, decoded = dict(globals()), jnp.ones((1, 8, 8, CHANNELS)), []
    run_cell(notebook, "helper", 1.0)
    run_cell(notebook, "vae", 1.0)
    pipe = pipeline_of(networks_of(notebook, "vae"))
    for gain in (1.0, 2.0):
        run_cell(notebook, "helper", gain)
        decoded.append(pipe.decode(latents))
    assert np.abs(decoded[0] - decoded[1]).max() > 1e-3


def test_what_a_function_leaves_behind_is_no_edit(pipe: canvax.StableDiffusion) -> None:
    """Nor is what a pipeline that it names has done since."""
    seen: ClassVar[list[Any]] = []

    def rule(negative: Array, prompt: Array, scale: Array) -> Array:
        seen.append((pipe, scale))
        return prompt

    images = [draw(pipe, guidance_method=rule) for _ in range(3)]
    assert [image.compilations > 0 for image in images] == [True, False, False]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_code_of_the_package_is_the_users(preset: str) -> None:
    assert foreign(PRESETS[preset], Kinds(), Guidance()) == ()


def test_what_is_code_of_the_user() -> None:
    assert foreign(NETWORKS, Kinds()) == foreign(NETWORKS, Kinds()) != ()
    assert foreign(canvax.load("emoji").model.networks, Kinds(), Guidance()) == ()
    wrapped = jax.jit(lambda *_: 0.0)
    for value in (draw, partial(draw), lambda: draw, {"a": [draw]}, Perturbed(MlpDenoiser()), np.zeros(2000), wrapped):
        assert foreign(value)


PROCESS = """
import sys
from tests.test_new_family import *
notebook = dict(globals())
run_cell(notebook, "helper", 1.0)
run_cell(notebook, "denoiser", float(sys.argv[1]))
print(draw(pipeline_of(networks_of(notebook, "denoiser"))).pixels.std())
"""


@pytest.mark.slow
def test_an_edited_network_in_a_second_process(tmp_path: Path) -> None:
    environment = os.environ | {"CANVAX_CACHE_DIR": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROCESS, gain], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for gain in ("1", "5")
    ]
    assert printed[0] != printed[1]
