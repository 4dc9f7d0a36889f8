"""A model family that the package does not know: records in this file alone make an image through the public call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.compile.programs import Programs
from canvax.families.base import Defaults, Family, Model, Numbers
from canvax.models.denoiser import Denoiser, Row
from canvax.models.networks import Networks
from canvax.models.text import Conditions, TextEncoders
from canvax.nn import gelu, linear, linear_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import Params, Spec, init_params
from canvax.samplers import from_scheduler_config
from canvax.types import Array

WIDTH, CHANNELS, FACTOR, TOKENS = 8, 3, 2, 5


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
class Letters:
    """A text encoder that embeds the letters of a text."""

    component = "reader"
    tokenizer = "letters"
    tokens = TOKENS
    whole = False
    most = 0
    width = WIDTH
    pooled_width = 0
    max_skip = 0

    @property
    def spec(self) -> Spec:
        return {"embed": linear_spec(256, WIDTH)}

    def encode(self, p: Params, ids: Array, skip: Array) -> Conditions:
        return {"text": linear(p["embed"], jax.nn.one_hot(ids, 256))}


class LetterTokenizer:
    """A letter is a token."""

    bos, eos, pad = 0, 1, 2
    added: tuple[str, ...] = ()

    def ids(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]

    def units(self, text: str) -> list[tuple[int, ...]]:
        return [(i,) for i in self.ids(text)]


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


NETWORKS = Networks(MlpDenoiser(), Squares(), TextEncoders((Letters(),)))
FAMILY = Family(
    name="mixer",
    pipelines=("MixerPipeline",),
    read=lambda files: NETWORKS,
    tokenizer=lambda files, encoder: LetterTokenizer(),
    defaults=Defaults(num_inference_steps=4, guidance_scale=3.0),
    numbers=hues,
)


@pytest.fixture(scope="module")
def pipe() -> canvax.StableDiffusion:
    files: Any = SimpleNamespace(name="a mixer", revision=None, variant=None, overrides={})
    model = Model(
        files=files,
        family=FAMILY,
        networks=FAMILY.read(files),
        tokenizers={one.component: FAMILY.tokenizer(files, one) for one in NETWORKS.text.encoders},
        scheduler=from_scheduler_config({"_class_name": "FlowMatchEulerDiscreteScheduler"}),
        defaults=FAMILY.defaults,
        dtype="float32",
    )
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(NETWORKS.specs().items())}
    mesh = make_mesh(jax.devices()[:1])
    pipe = canvax.StableDiffusion(model, Programs(NETWORKS, mesh))
    pipe.params = pipe.place(params)
    return pipe


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
    with pytest.raises(canvax.InputError) as caught:
        draw(pipe, options=canvax.Options(reuse=2))
    assert caught.value.argument == "reuse"
