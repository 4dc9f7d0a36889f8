"""The images in flight: whoever comes and goes beside it, an image is what it is alone, and nothing compiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import canvax
from canvax.compile.kinds import DENOISERS, Compiled, Kinds
from canvax.compile.monitor import compilations
from canvax.engine.batch import Batch
from canvax.errors import InputError
from canvax.noise import initial_noise, seed_keys
from canvax.parallel.mesh import make_mesh
from canvax.samplers import SamplerTable, build_table
from tests.support.bundled import LATENTS
from tests.support.parked import parked

QUIET = canvax.Options(progress=False)


class Image(NamedTuple):
    """One image, and when it is admitted: after so many rows of the batch."""

    prompt: str
    seed: int
    sampler: str
    steps: int
    guidance: float
    after: int


IMAGES = [
    Image("a dog face", 11, "euler_a", 6, 5.0, 0),
    Image("a red apple", 12, "dpmpp_2m karras", 9, 2.0, 0),
    Image("a lemon", 13, "heun", 6, 1.0, 2),
    Image("a cat", 14, "unipc", 8, 4.0, 3),
    Image("a house", 15, "dpmpp_sde", 3, 1.0, 5),
    Image("a tree", 16, "ddim", 7, 3.0, 8),
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one device"), pytest.param(2, id="two devices", marks=pytest.mark.weekly)],
)
def pipe(request: pytest.FixtureRequest) -> canvax.Pipeline:
    return canvax.load("emoji", mesh=make_mesh(jax.devices()[: request.param]), progress=False)


def alone(pipe: canvax.Pipeline, image: Image) -> np.ndarray:
    result = pipe(
        image.prompt, seed=image.seed, sampler=image.sampler, num_inference_steps=image.steps,
        guidance_scale=image.guidance, options=QUIET,
    )  # fmt: skip
    return result.latents[0]


def table_of(pipe: canvax.Pipeline, image: Image) -> SamplerTable:
    return build_table(pipe.model.scheduler, image.steps, sampler=image.sampler, guidance=image.guidance)


def encoded(pipe: canvax.Pipeline, prompt: str) -> dict[str, Any]:
    """Conditions of one prompt, each [1, ...] on the host."""
    count = pipe.programs.mesh.shape["data"]
    inputs = {
        encoder.component: encoder.read(pipe.model.tokenizers[encoder.component], [prompt] * count, 77)
        for encoder in pipe.model.text.encoders
    }
    assert pipe.params is not None
    program = pipe.programs.program("text encoder", pipe.params, (count, *LATENTS))
    features, _ = program(pipe.params, inputs)
    return {name: np.asarray(array)[:1] for name, array in features.items()}


def batch_of(pipe: canvax.Pipeline, slots: int, *, guided: tuple[bool, ...] = (True,)) -> Batch:
    assert pipe.params is not None
    latents = (slots, *LATENTS)
    wanted = pipe.programs.wanted(pipe.params, latents, Kinds(guided=guided))
    denoisers = {DENOISERS[half]: wanted[DENOISERS[half]] for half in guided}
    return Batch(pipe.programs.compile(pipe.params, denoisers), pipe.params, pipe.programs.mesh, latents)


def admit(pipe: canvax.Pipeline, batch: Any, slot: int, image: Image) -> None:
    (noise,) = initial_noise([image.seed], LATENTS)
    texts = ["", image.prompt] if image.guidance > 1 else [image.prompt]
    prompts, key = tuple(encoded(pipe, text) for text in texts), seed_keys([image.seed])[0]
    batch.join({slot: parked(noise, prompts, key, table_of(pipe, image))})


def serve(pipe: canvax.Pipeline, batch: Any, rows: int) -> dict[str, np.ndarray]:
    """All images through few slots, each admitted as soon as its time has come and a slot is free."""
    waiting, where, done, clock = list(IMAGES), {}, {}, 0
    while waiting or where:
        while waiting and waiting[0].after <= clock and batch.free:
            slot, image = batch.free[-1], waiting.pop(0)
            admit(pipe, batch, slot, image)
            where[slot] = image
        before = batch.rows_left
        for slot in batch.step(rows):
            done[where.pop(slot).prompt] = batch.take(slot)
        clock += max(1, before - batch.rows_left)
    return done


def same(got: np.ndarray, want: np.ndarray, name: str = "") -> None:
    """Within 1e-4 for latents of unit variance; those of few steps have a larger one."""
    scale = max(1.0, float(want.std()))
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_same_image_in_any_company(pipe: canvax.Pipeline, rows: int) -> None:
    want = {image.prompt: alone(pipe, image) for image in IMAGES}
    got = serve(pipe, batch_of(pipe, 4), rows)
    assert got.keys() == want.keys()
    for prompt, latents in want.items():
        same(got[prompt], latents, prompt)


@pytest.mark.slow
def test_nothing_compiles_for_who_comes_and_goes(pipe: canvax.Pipeline) -> None:
    serve(pipe, batch_of(pipe, 4), 2)
    before = compilations()
    serve(pipe, batch_of(pipe, 4), 2)
    assert compilations() == before


def watched(program: Compiled, half: bool, called: list[bool]) -> Compiled:
    def executable(*arguments: Any) -> Any:
        called.append(half)
        return program.executable(*arguments)

    return program._replace(executable=executable)


@pytest.mark.slow
def test_both_denoisers_share_the_rows(pipe: canvax.Pipeline) -> None:
    """Rows in which nobody needs guidance run at half the work, and are the same."""
    image = IMAGES[1]
    table = build_table(pipe.model.scheduler, 8, sampler="euler_a", guidance=3.0, guidance_interval=(0.25, 0.75))
    guided_calls, found = [], []
    for guided in ((True,), (True, False)):
        batch = batch_of(pipe, 2, guided=guided)
        called: list[bool] = []
        batch._denoisers = {half: watched(program, half, called) for half, program in batch._denoisers.items()}
        (noise,) = initial_noise([image.seed], LATENTS)
        prompts = encoded(pipe, ""), encoded(pipe, image.prompt)
        batch.join({1: parked(noise, prompts, seed_keys([image.seed])[0], table)})
        while not batch.step(64):
            pass
        guided_calls.append(called)
        found.append(batch.take(1))
    assert guided_calls == [[True], [False, True, False]]
    same(found[1], found[0])


@pytest.mark.slow
def test_a_finished_image_waits_unchanged(pipe: canvax.Pipeline) -> None:
    short, long = IMAGES[4], IMAGES[1]
    batch = batch_of(pipe, 2)
    admit(pipe, batch, 0, short)
    admit(pipe, batch, 1, long)
    while 0 not in batch.step(2):
        pass
    while batch.rows_left:
        batch.step(2)
    same(batch.take(0), alone(pipe, short))
    assert batch.free == [0]


def test_an_image_may_start_at_a_later_row(pipe: canvax.Pipeline) -> None:
    image = IMAGES[0]
    half = pipe(
        image.prompt, seed=image.seed, sampler=image.sampler, num_inference_steps=image.steps,
        guidance_scale=image.guidance, options=dataclasses.replace(QUIET, denoising_end=0.5),
    )  # fmt: skip
    table = table_of(pipe, image)
    row = len(table) - len(build_table(pipe.model.scheduler, image.steps, sampler=image.sampler, start=0.5))
    batch = batch_of(pipe, 2)
    prompts, key = (encoded(pipe, ""), encoded(pipe, image.prompt)), seed_keys([image.seed])[0]
    batch.join({0: parked(half.latents[0], prompts, key, table, row=row)})
    while not batch.step(64):
        pass
    same(batch.take(0), alone(pipe, image))


def test_a_slot_holds_one_image(pipe: canvax.Pipeline) -> None:
    batch = batch_of(pipe, 2)
    assert batch.step() == []
    admit(pipe, batch, 1, IMAGES[0])
    assert (batch.free, batch.rows_left) == ([0], IMAGES[0].steps)
    with pytest.raises(InputError, match=r"slot=1 holds an image.*\[0\]"):
        admit(pipe, batch, 1, IMAGES[1])
