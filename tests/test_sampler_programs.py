"""Every sampler through the compiled programs of the bundled model."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.compile.additions import DeepFeatures, Keeps, ReadsImage, ReadsReferences
from canvax.compile.kinds import Addition, Kinds, ProgramSpec, Site
from canvax.compile.programs import Programs
from canvax.denoise import step_noise
from canvax.errors import InputError
from canvax.noise import initial_noise, seed_keys
from canvax.parallel.rules import abstract_params
from canvax.pipelines.functions import denoise
from canvax.samplers import SAMPLERS, Scheduler, build_table, from_scheduler_config, run
from tests.support.bundled import LATENTS
from tests.support.drawing import one_device


def rows_on_the_host(
    emoji: canvax.Pipeline, sampler: str, steps: list[canvax.Step], x: np.ndarray, seed: int
) -> np.ndarray:
    """x after every row [R, 1, h, w, C]: the sampler's table in float64, given the denoised images of a run."""
    table = build_table(emoji.model.scheduler, 5, sampler=sampler)
    assert len(steps) == len(table)
    noises = [
        np.asarray(step_noise(seed_keys([seed]), np.int32([row]), x.shape[1:]))  # pyright: ignore
        for row in range(len(table))
    ]
    # With p = 0 and q = 1 the network's output is the denoised image itself.
    given = dataclasses.replace(table, p=0 * table.p, q=0 * table.q + 1)
    return run(given, lambda _, __, row: steps[row].denoised.astype(np.float64), x, np.stack(noises))


@pytest.mark.slow
def test_all_samplers_run_one_compiled_program(emoji: canvax.Pipeline) -> None:
    """One compilation of each denoiser in total: the first picture's, which makes the other two programs as well.

    After every row the latents are what the table makes of the denoised images so far and of the noise of each row.
    """
    counts, drawn = [], []
    side = 40 // emoji.programs.networks.vae.factor
    picture = np.random.default_rng(0).standard_normal((1, side, side, LATENTS[-1])).astype(np.float32)
    for spec in SAMPLERS:
        latents = picture if spec.name == "ddim_inverse" else None
        steps: list[canvax.Step] = []
        options = canvax.Options(
            progress=False, guidance_interval=(0.0, 0.8), guidance_rescale=0.3, callback=steps.append
        )
        result = emoji(
            "a cat",
            seed=3,
            height=40,
            width=40,
            num_inference_steps=5,
            sampler=spec.name,
            options=options,
            latents=latents,
        )
        counts.append(result.compilations)
        drawn.append(result.pixels)
        x = initial_noise([3], picture.shape[1:]) if latents is None else latents
        want = rows_on_the_host(emoji, spec.name, steps, x, 3)
        np.testing.assert_allclose([step.latents for step in steps], want, rtol=1e-3, atol=1e-3, err_msg=spec.name)
        np.testing.assert_array_equal(steps[-1].latents, result.latents)
    # Denoisers with guidance and without; another test may have compiled the text encoder, which knows no size.
    assert counts[0] in (3, 4)
    assert counts[1:] == [0] * (len(SAMPLERS) - 1)
    assert len({pixels.tobytes() for pixels in drawn}) > len(SAMPLERS) - 6  # a few are others' under another name


def test_inversion_wants_a_picture(emoji: canvax.Pipeline) -> None:
    with pytest.raises(InputError, match=r"result\.latents"):
        emoji("a cat", sampler="DDIM inversion", options=canvax.Options(progress=False))


def test_the_first_timestep_of_a_flow_model(emoji: canvax.Pipeline) -> None:
    flow = from_scheduler_config({"_class_name": "FlowMatchEulerDiscreteScheduler"})
    latents, conditions = jnp.ones((1, *LATENTS)), emoji.encode("a cat")

    def output(scheduler: Scheduler, timestep: float) -> Any:
        model = dataclasses.replace(emoji.model, scheduler=scheduler)
        return denoise(model, emoji.params, latents, timestep, conditions)  # pyright: ignore[reportArgumentType]

    assert np.isfinite(output(flow, 1000)).all()
    for scheduler, timestep in ((flow, 1001), (emoji.model.scheduler, 1000)):
        with pytest.raises(InputError):
            output(scheduler, timestep)


def test_a_call_like_one_before_does_not_look_at_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made ready for a call holds for the same arrays alone, and keeps none of them alive."""
    looked: list[Kinds] = []

    def wanted(_: Programs, params: Any, latents: Any, kinds: Kinds) -> dict[str, Any]:
        looked.append(kinds)
        return {}

    monkeypatch.setattr(Programs, "wanted", wanted)
    programs = Programs(None, one_device())  # type: ignore[arg-type]
    params = {"unet": {"a": jnp.ones(2), "b": jnp.ones(3)}, "vae": jnp.ones(4)}
    first = programs.ready(params, (1, 8, 8, 4), Kinds())
    assert programs.ready(jax.tree.map(lambda leaf: leaf, params), (1, 8, 8, 4), Kinds()) is first
    assert len(looked) == 1
    for other in ({**params, "vae": params["vae"] + 0}, params, {**params, "more": jnp.ones(1)}):
        programs.ready(other, (1, 8, 8, 4), Kinds())
    programs.ready(params, (1, 8, 8, 4), Kinds(guided=(False,)))
    programs.ready(params, (2, 8, 8, 4), Kinds(guided=(False,)))
    with jax.default_matmul_precision("highest"):
        programs.ready(params, (2, 8, 8, 4), Kinds(guided=(False,)))
    assert len(looked) == 6
    leaf = weakref.ref(params["vae"])
    del params, other
    gc.collect()
    assert leaf() is None


@dataclass(frozen=True)
class Own(Addition):
    """What a call of a user's adds."""

    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return ("mine",)

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        return {"mine": site.reader("image encoder", partial(jnp.asarray, dtype=jnp.float32), "vae", self.size)}

    def conditions(self, site: Site) -> dict[str, Any]:
        return {"mine": jax.ShapeDtypeStruct((site.latents[0], self.size), jnp.float32)}


@pytest.mark.parametrize(
    "add", [Own(3), DeepFeatures(1), Keeps(), ReadsImage("tiled"), ReadsReferences(((64, 48),) * 2)]
)
def test_what_a_call_adds_brings_its_programs(add: Addition) -> None:
    """The programs of a run have no other names, and the denoiser is another one if it reads more."""
    networks = canvax.load("emoji").model.networks
    programs = Programs(networks, one_device())
    params = {name: abstract_params(spec, "float32", programs.mesh) for name, spec in networks.specs().items()}
    plain = programs.wanted(params, (1, 8, 8, 32))
    wanted = programs.wanted(params, (1, 8, 8, 32), Kinds().adding(add))
    assert wanted.keys() == plain.keys() | {*add.names}
    inputs = [str(each["guided denoiser"].inputs) for each in (plain, wanted)]
    assert (inputs[0] == inputs[1]) == isinstance(add, ReadsImage)


def test_additions_of_kinds() -> None:
    """One of each class, in whatever order they were added; what is false is nothing."""
    one = Kinds().adding(Own(1), None, Keeps(), False).adding(Own(2))
    assert one == Kinds().adding(Keeps(), Own(2))
    assert (one.of(Own), one.of(DeepFeatures)) == (Own(2), None)
    assert len(Kinds._fields) <= 6
