"""Classifier-free guidance (Ho & Salimans 2022), its rescaling, and what others made of it."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from canvax.types import Array

Method = Literal["cfg", "cfg_zero", "apg"]
"""How the two outputs become one."""

SETTINGS: dict[str, dict[str, tuple[float, float, float]]] = {
    "cfg": {},
    "cfg_zero": {"zero_steps": (0.0, 0.0, 1000.0)},
    "apg": {"eta": (0.0, -10.0, 10.0), "norm": (2.5, 0.0, 1e6)},
}
"""The numbers of each method, which are data: by name the usual value and its limits."""


def guide(
    unconditional: Array, conditional: Array, scale: Array, rescale: Array, further: Array | float = 0.0
) -> Array:
    """Move the network's output away from the unconditional one.

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: output for the prompt [B, h, w, C], float32.
        scale: guidance scale of each image [B].
        rescale: 0..1 for each image [B]: how far the result's standard deviation is brought back to that of the
            conditional output (Lin et al. 2024, section 3.4, eq. 15 and 16).
        further: what other kinds of guidance add.

    Returns:
        [B, h, w, C] float32.
    """
    scale, rescale = scale[:, None, None, None], rescale[:, None, None, None]
    guided = unconditional + scale * (conditional - unconditional) + further
    ratio = _std(conditional) / jnp.maximum(_std(guided), 1e-12)
    return guided * (1.0 + rescale * (ratio - 1.0))


def compose(unconditional: Array, conditional: Array, weights: Array) -> Array:
    """One output in place of those of several prompts: u + sum_k w_k (c_k - u) (Liu et al. 2022, eq. 11).

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: outputs for the prompts [B, K, h, w, C], float32.
        weights: of the prompts [B, K].

    Returns:
        [B, h, w, C] float32.
    """
    away = conditional - unconditional[:, None]
    return unconditional + (weights[:, :, None, None, None] * away).sum(axis=1)


def zero_star(unconditional: Array, conditional: Array, scale: Array, step: Array, zero_steps: Array) -> Array:
    """CFG-Zero* (Fan et al. 2025, section 4): the unconditional output times <c, u> / |u|^2, 0 in the first steps."""
    share = _dot(conditional, unconditional) / jnp.maximum(_dot(unconditional, unconditional), 1e-12)
    guided = share * unconditional + _each(scale) * (conditional - share * unconditional)
    return jnp.where(_each(step) < _each(zero_steps), 0.0, guided)


def projected(unconditional: Array, conditional: Array, scale: Array, eta: Array, norm: Array) -> Array:
    """Adaptive projected guidance (Sadat et al. 2024, section 4), without momentum, on denoised images [B, h, w, C].

    The difference is cut to length ``norm`` (0: never), and of it what is parallel to the conditional image, which
    saturates, has the share ``eta``.
    """
    away = conditional - unconditional
    length = jnp.sqrt(_dot(away, away))
    away = away * jnp.where(_each(norm) > 0, jnp.minimum(1.0, _each(norm) / jnp.maximum(length, 1e-12)), 1.0)
    along = _dot(away, conditional) / jnp.maximum(_dot(conditional, conditional), 1e-12) * conditional
    return conditional + (_each(scale) - 1) * (away - along + _each(eta) * along)


def _each(numbers: Array) -> Array:
    return numbers[:, None, None, None]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum((1, 2, 3), keepdims=True)


def _std(x: Array) -> Array:
    return x.std((1, 2, 3), keepdims=True)
