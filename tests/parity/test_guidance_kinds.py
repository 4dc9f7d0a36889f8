"""Other kinds of guidance against the guiders of PyTorch diffusers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from canvax.guidance import projected, zero_star

from .reference import nchw, relative_error

_RANDOM = np.random.default_rng(0)
CONDITIONAL, UNCONDITIONAL = (_RANDOM.standard_normal((2, 6, 5, 4)).astype(np.float32) for _ in range(2))
CONDITIONAL += UNCONDITIONAL
SCALE = np.array([5.0, 2.0], np.float32)


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
