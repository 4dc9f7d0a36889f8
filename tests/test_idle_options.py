"""Each option changes the image, is refused, or is said to change nothing, whatever it is beside."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image, ImageDraw

import canvax
from canvax.pipelines.hints import hints, idle
from canvax.pipelines.request import Call, make_request
from canvax.samplers import NoiseSchedule, SamplerOptions, SamplerTable
from canvax.samplers.rows import D, X, column, rows, step_table
from canvax.samplers.spacing import training_path
from tests.support.small_sdxl import build

VALUES: dict[str, Any] = {
    "eta": 0.5, "spacing": "leading", "sigmas": "exponential", "sampler_settings": {"s_noise": 1.5},
    "guidance_steps": (1.5, 2.0, 3.0, 9.0), "guidance_interval": (0.0, 0.4), "guidance_rescale": 0.7,
    "true_cfg_scale": 4.0,
    "guidance_method": "apg", "guidance_settings": {"eta": 0.5}, "pag_scale": 2.0, "pag_adaptive_scale": 0.01,
    "quality": "fast", "reuse": 2, "reuse_layers": 2, "tiling": "on", "clip_skip": 1, "noise": "torch",
    "prompt_syntax": "a1111", "strength_rule": "exact", "image_encoding": "sample", "mask_mode": "soft",
    "mask_blur": 6.0, "mask_fill": "noise", "mask_blend": "renoised", "padding_mask_crop": 8, "outpaint": (0, 8, 0, 0),
    "control_scale": 0.5, "control_start": 0.3, "control_end": 0.5, "control_mode": "guess", "variation_seed": 7,
    "variation_strength": 0.5, "seed_size": (48, 48), "hires": 1.5, "hires_method": "latent", "hires_strength": 0.9,
    "hires_steps": 2, "hires_sampler": "Euler a", "hires_prompt": "a dog face", "denoising_start": 0.5,
    "denoising_end": 0.5, "prompt_2": "x", "negative_prompt_2": "y", "original_size": (32, 32),
    "crops_coords_top_left": (8, 8), "target_size": (32, 32), "negative_original_size": (32, 32),
    "negative_crops_coords_top_left": (8, 8), "negative_target_size": (32, 32), "aesthetic_score": 5.0,
    "negative_aesthetic_score": 3.0,
}  # fmt: skip
"""Of each option one that is not its default."""

AS_BEFORE = {"tiling", "spacing"}
"""Tiles change no small image; some samplers and curves place the steps themselves, and no hint says so."""

IMAGE = Image.effect_noise((64, 64), 90).convert("RGB")
MASK = Image.new("L", (64, 64))
ImageDraw.Draw(MASK).rectangle((8, 8, 55, 55), 90)
ImageDraw.Draw(MASK).rectangle((20, 20, 43, 43), 255)
LATENTS = np.random.default_rng(0).standard_normal((1, 8, 8, 32), np.float32)

BESIDE: dict[str, dict[str, Any]] = {
    "a prompt": {},
    "no guidance": {"guidance_scale": 1},
    "an image": {"image": IMAGE, "strength": 0.75},
    "a mask": {"image": IMAGE, "mask": MASK, "strength": 0.75},
    "latents": {"latents": LATENTS},
    "LCM": {"sampler": "LCM"},
}


def test_all_options_are_tried() -> None:
    assert VALUES.keys() == {field.name for field in dataclasses.fields(canvax.Options)} - {"progress", "callback"}


@pytest.mark.weekly
@pytest.mark.parametrize("beside", BESIDE)
def test_an_option_does_something_or_says_that_it_does_not(emoji: canvax.Pipeline, beside: str) -> None:
    assert_answered(emoji, BESIDE[beside], VALUES)


@pytest.mark.slow
def test_those_of_sdxl(tmp_path: Path) -> None:
    pipe = canvax.load(build(tmp_path / "xl"), mesh=canvax.make_mesh(jax.devices()[:1]))
    prompts = {name: pipe.encode(name) for name in ("a", "b")}
    own = {name: VALUES[name] for name in VALUES if "prompt_2" in name or "_size" in name or "crop" in name}
    for beside in ({}, {"guidance_scale": 1}, {"prompt": prompts["a"], "negative_prompt": prompts["b"]}):
        assert_answered(pipe, {"height": 64, "width": 64, **beside}, own)


def test_what_a_second_pass_reads(emoji: canvax.Pipeline) -> None:
    """It encodes the first one's image, whatever that was begun from; and what goes with a mask is said once."""

    def names(**option: Any) -> list[str]:
        call = Call("a", image=IMAGE, strength=1, options=canvax.Options(**option))
        return [hint.argument for hint in idle(emoji.model, make_request(emoji.model, call))]

    assert names(image_encoding="sample") == ["image_encoding"]
    assert names(image_encoding="sample", hires=1.5) == []
    assert names(mask_fill="noise") == ["mask_fill"]


def test_settings_of_noise(emoji: canvax.Pipeline) -> None:
    """They have an effect where the sampler adds noise, or would, or reads them otherwise."""

    def blurred(schedule: NoiseSchedule, steps: int, options: SamplerOptions) -> SamplerTable:
        path = training_path(schedule, steps, options)
        kept = column(path.alpha[:-1]) * X + options.s_noise * D
        return step_table(path, rows(len(path), {0: kept}))

    def hinted(sampler: Any, **settings: float) -> bool:
        call = Call("a", sampler=sampler, options=canvax.Options(sampler_settings=settings))
        return "sampler_settings" in [hint.argument for hint in idle(emoji.model, make_request(emoji.model, call))]

    assert hinted("Euler", s_noise=1.1)
    assert not hinted("Euler", s_noise=1.1, s_churn=5.0)
    assert not hinted("Euler a", s_noise=1.1)
    assert not hinted("Euler a", s_noise=0.0)
    assert not hinted(blurred, s_noise=0.5)


def test_adapters_named_in_a_second_prompt(emoji: canvax.Pipeline) -> None:
    call = Call("a cat", options=canvax.Options(hires=2, hires_prompt="a dog <lora:ink:1>"))
    assert [hint.argument for hint in hints(emoji.model, make_request(emoji.model, call))] == ["hires_prompt"]


def assert_answered(pipe: canvax.Pipeline, beside: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Each option changes the image, or is refused, or has a hint, and not a wrong one."""

    def draw(**option: Any) -> tuple[canvax.Result, list[str]]:
        options = canvax.Options(progress=False, **option)
        asked = {"prompt": "a (red) apple", "num_inference_steps": 4, "seed": 1, **beside}
        with warnings.catch_warnings(record=True) as hints:
            warnings.simplefilter("always")
            result = pipe(**asked, options=options)
        found = [hint.message for hint in hints if isinstance(hint.message, canvax.HintWarning)]
        return result, [hint.argument for hint in found if "no effect" in hint.problem]

    plain, silent, wrong = draw()[0], [], []
    for name, value in values.items():
        try:
            result, idle = draw(**{name: value})
        except canvax.InputError:
            continue
        same = all(np.array_equal(*pair) for pair in ((plain.latents, result.latents), (plain.pixels, result.pixels)))
        if same and not idle and name not in AS_BEFORE:
            silent.append(name)
        if not same and name in idle:
            wrong.append(name)
    assert not silent
    assert not wrong
