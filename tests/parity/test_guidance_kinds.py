"""Other kinds of guidance against the guiders of PyTorch diffusers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from canvax.guidance import APG, guided, zero_star

from .reference import nchw, relative_error

_RANDOM = np.random.default_rng(0)
CONDITIONAL, UNCONDITIONAL = (_RANDOM.standard_normal((2, 6, 5, 4)).astype(np.float32) for _ in range(2))
CONDITIONAL += UNCONDITIONAL
SCALE = np.array([5.0, 2.0], np.float32)


def torch_arrays() -> tuple[Any, Any]:
    return nchw(CONDITIONAL), nchw(UNCONDITIONAL)


@pytest.mark.parametrize(
    ("eta", "norm", "momentum"), [(0.0, 2.5, 0.0), (0.4, 15.0, -0.5), (1.0, 0.0, 0.9), (0.0, 2.5, -0.75)]
)
def test_apg(eta: float, norm: float, momentum: float) -> None:
    """In three rows, as its guider is called in a run."""
    from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance

    buffers = [MomentumBuffer(momentum) for _ in range(2)]
    numbers = {"eta": eta, "norm": norm, "momentum": momentum}
    row: Any = {f"guidance {name}": jnp.full(2, value, jnp.float32) for name, value in numbers.items()}
    row |= {"p": jnp.zeros(2), "q": jnp.ones(2), "guidance": jnp.asarray(SCALE)}
    memory = jnp.zeros((2, 1, *CONDITIONAL.shape[1:]))
    for share in (1.0, 0.7, 1.3):
        conditional, unconditional = share * CONDITIONAL, UNCONDITIONAL
        want = [
            normalized_guidance(nchw(conditional[i : i + 1]), nchw(unconditional[i : i + 1]), float(SCALE[i]) - 1,
                                buffers[i], eta, norm, use_original_formulation=True)[0]
            for i in range(2)
        ]  # fmt: skip
        outputs = jnp.stack([jnp.asarray(unconditional), jnp.asarray(conditional, jnp.float32)], axis=1)
        got, memory = guided(APG(), outputs[:, 0], outputs, row, memory)
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
