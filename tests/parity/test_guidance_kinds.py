"""Other kinds of guidance against PyTorch diffusers: its PAG pipeline, its guiders."""

from __future__ import annotations

from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import canvax
from canvax.guidance import projected, zero_star
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh

from .reference import nchw, psnr, relative_error
from .test_pipeline import NEGATIVE, PROMPTS, QUIET, SEEDS, build

_RANDOM = np.random.default_rng(0)
CONDITIONAL, UNCONDITIONAL = (_RANDOM.standard_normal((2, 6, 5, 4)).astype(np.float32) for _ in range(2))
CONDITIONAL += UNCONDITIONAL
SCALE = np.array([5.0, 2.0], np.float32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = build(tmp_path_factory.mktemp("model") / "m", "epsilon")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    return theirs, canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def images(theirs: Any, **changes: Any) -> np.ndarray:
    with torch.no_grad():
        return theirs(
            PROMPTS, negative_prompt=[NEGATIVE] * 2, num_inference_steps=5, output_type="np", height=128, width=128,
            latents=nchw(initial_noise(SEEDS, (16, 16, 4))), **{"guidance_scale": 5.0} | changes,
        ).images  # fmt: skip


def ours(pipe: canvax.Pipeline, **changes: Any) -> canvax.Result:
    usual = {"num_inference_steps": 5, "guidance_scale": 5.0, "seed": SEEDS[0], "options": QUIET}
    return pipe(PROMPTS, NEGATIVE, **usual | changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pag_scale": 3.0}, marks=pytest.mark.weekly),
        pytest.param({"pag_scale": 3.0, "guidance_scale": 1.0}, marks=pytest.mark.weekly),
        {"pag_scale": 3.0, "pag_adaptive_scale": 0.002},
    ],
    ids=["guided", "alone", "adaptive"],
)
@pytest.mark.slow
def test_perturbed_attention(changes: dict[str, float], pair: tuple[Any, canvax.Pipeline]) -> None:
    theirs, pipe = pair
    theirs = diffusers.StableDiffusionPAGPipeline.from_pipe(theirs, pag_applied_layers=["mid"])
    theirs.set_progress_bar_config(disable=True)
    got, want = ours(pipe, **changes), images(theirs, **changes)
    assert psnr(got.pixels, want) >= 60
    without = ours(pipe, **{name: value for name, value in changes.items() if name == "guidance_scale"})
    assert psnr(without.pixels, want) < 60


def torch_arrays() -> tuple[Any, Any]:
    return nchw(CONDITIONAL), nchw(UNCONDITIONAL)


@pytest.mark.parametrize(("eta", "norm"), [(0.0, 2.5), (0.4, 15.0), (1.0, 0.0)])
def test_projected(eta: float, norm: float) -> None:
    from diffusers.guiders.adaptive_projected_guidance import normalized_guidance

    conditional, unconditional = torch_arrays()
    want = [
        normalized_guidance(conditional[i : i + 1], unconditional[i : i + 1], float(SCALE[i]) - 1, None, eta, norm,
                            use_original_formulation=True)[0]
        for i in range(2)
    ]  # fmt: skip
    numbers = (jnp.full(2, value) for value in (eta, norm))
    got = projected(jnp.asarray(UNCONDITIONAL), jnp.asarray(CONDITIONAL), jnp.asarray(SCALE), *numbers)
    np.testing.assert_allclose(got, np.moveaxis(torch.stack(want).numpy(), 1, -1), atol=1e-4)


def test_zero_star() -> None:
    from diffusers.guiders.classifier_free_zero_star_guidance import cfg_zero_star_scale

    conditional, unconditional = (array.flatten(1) for array in torch_arrays())
    alpha = cfg_zero_star_scale(conditional, unconditional)
    want = alpha * unconditional + torch.tensor(SCALE)[:, None] * (conditional - alpha * unconditional)
    want = np.moveaxis(want.reshape(nchw(CONDITIONAL).shape).numpy(), 1, -1)
    rows, steps = jnp.array([3.0, 3.0]), jnp.array([2.0, 4.0])
    got = zero_star(jnp.asarray(UNCONDITIONAL), jnp.asarray(CONDITIONAL), jnp.asarray(SCALE), rows, steps)
    assert relative_error(got[0], want[0]) < 1e-5
    assert not np.asarray(got[1]).any()
