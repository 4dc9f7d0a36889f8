"""Less work for the same picture: what a run need not compute, and that the picture stays what it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import small_sdxl

import canvax
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.work import Stretch, Work
from canvax.samplers import SamplerTable, build_table

QUIET = canvax.Options(progress=False)
INTERVAL = dataclasses.replace(QUIET, guidance_interval=(0.2, 0.7), guidance_rescale=0.4)


def draw(pipe: canvax.StableDiffusion, prompts: Any = "a cat", **changes: Any) -> canvax.Result:
    return pipe(prompts, **{"num_inference_steps": 8, "seed": 3, "options": INTERVAL} | changes)


@pytest.fixture
def all_guided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row computes both halves, whatever its scale."""

    def of(table: SamplerTable, **_: Any) -> Work:
        return Work(table, (Stretch(0, len(table), guided=True),))

    monkeypatch.setattr(Work, "of", of)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> canvax.StableDiffusion:
    folder = small_sdxl.build(tmp_path_factory.mktemp("sdxl"))
    return canvax.load(folder, mesh=make_mesh(jax.devices()[:1]))


def stretches(emoji: canvax.StableDiffusion, steps: int, *, guided: bool = True, **settings: Any) -> list[Any]:
    work = Work.of(build_table(emoji.checkpoint.scheduler, steps, **settings), guided=guided)
    return [(one.start, one.stop, one.guided) for one in work.stretches]


def test_rows_of_scale_1_need_one_half(emoji: canvax.StableDiffusion) -> None:
    assert stretches(emoji, 10, guidance=5.0) == [(0, 10, True)]
    assert stretches(emoji, 10, guidance=1.0) == [(0, 10, False)]
    assert stretches(emoji, 3, guidance=(0.5, 1.0, 0.9), guided=False) == [(0, 3, False)]
    # A scale below 1 beside others is what it says: a mixture of both halves.
    assert stretches(emoji, 4, guidance=(0.5, 1.0, 1.0, 3.0)) == [(0, 1, True), (1, 3, False), (3, 4, True)]
    # Two evaluations a step, but for the last.
    assert stretches(emoji, 10, guidance=5.0, sampler="heun", guidance_interval=(0.0, 0.5)) == [
        (0, 10, True), (10, 19, False),
    ]  # fmt: skip


@pytest.mark.parametrize("sampler", ["Euler a", "DPM++ 2M", "Heun", "PNDM"])
def test_saved_guidance_draws_the_same(emoji: canvax.StableDiffusion, sampler: str, request: Any) -> None:
    got = draw(emoji, sampler=sampler)
    assert draw(emoji, sampler=sampler).compilations == 0
    request.getfixturevalue("all_guided")
    np.testing.assert_allclose(got.latents, draw(emoji, sampler=sampler).latents, atol=1e-4)


def test_saved_guidance_row_by_row(emoji: canvax.StableDiffusion) -> None:
    """A callback sees every row, and seeing it changes nothing."""
    seen: list[canvax.Step] = []
    got = draw(emoji, options=dataclasses.replace(INTERVAL, callback=seen.append))
    assert [step.index for step in seen] == list(range(8))
    np.testing.assert_array_equal(seen[-1].latents, got.latents)
    np.testing.assert_allclose(got.latents, draw(emoji).latents, atol=1e-5)


def test_saved_guidance_beyond_a_window(emoji: canvax.StableDiffusion, request: Any) -> None:
    got = draw(emoji, num_inference_steps=150)
    request.getfixturevalue("all_guided")
    np.testing.assert_allclose(got.latents, draw(emoji, num_inference_steps=150).latents, atol=1e-4)


def test_saved_guidance_on_devices(emoji: canvax.StableDiffusion) -> None:
    prompts = ["a cat", "a dog", "a red apple"]
    want = draw(emoji, prompts, sampler="Euler a")
    pipe = canvax.load("emoji", mesh=make_mesh(jax.devices()[:2]))
    np.testing.assert_allclose(draw(pipe, prompts, sampler="Euler a").latents, want.latents, atol=1e-4)


def test_saved_guidance_of_sdxl(sdxl: canvax.StableDiffusion, request: Any) -> None:
    got = draw(sdxl)
    request.getfixturevalue("all_guided")
    want = draw(sdxl).latents
    np.testing.assert_allclose(got.latents / want.std(), want / want.std(), atol=1e-4)


def test_saved_guidance_compiles_one_program_more(emoji: canvax.StableDiffusion) -> None:
    """The first of a size makes the decoder and one denoiser, an interval one more, and then nothing does."""
    size = {"height": 72, "width": 56}
    counts = [draw(emoji, **size, options=options).compilations for options in (QUIET, INTERVAL)]
    assert counts[0] in (2, 3)  # another test may have compiled the text encoder, which knows no size
    assert counts[1] == 1
    other = dataclasses.replace(QUIET, guidance_steps=(1.0, 4.0, 1.0, 3.0))
    assert draw(emoji, **size, num_inference_steps=4, options=other).compilations == 0
    assert draw(emoji, **size, guidance_scale=1.0).compilations == 0
