"""Classifier-free guidance (Ho & Salimans 2022), its rescaling, and what others made of it."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from canvax.call import GuidanceMethod as Method
from canvax.types import Array

__all__ = ["SETTINGS", "Method", "compose", "guide", "projected", "thresholded", "zero_star"]

Rule = Callable[[Array, Array, Array], Array]
"""A method of one's own: (denoised image for the negative prompt, denoised image for the prompt, guidance scale) to the
guided one. Images are [B, h, w, C] float32, the scale is [B]."""

SETTINGS: dict[str, dict[str, tuple[float, float, float]]] = {
    "cfg": {},
    "cfg_zero": {"zero_steps": (0.0, 0.0, 1000.0)},
    "apg": {"eta": (0.0, -10.0, 10.0), "norm": (2.5, 0.0, 1e6)},
    "threshold": {"mimic": (7.0, 0.0, 100.0), "percentile": (1.0, 0.0, 1.0)},
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


def thresholded(unconditional: Array, conditional: Array, scale: Array, mimic: Array, percentile: Array) -> Array:
    """Dynamic thresholding: denoised images [B, h, w, C] guided by ``scale`` with the range that ``mimic`` would give.

    Channel by channel, around the mean: values beyond ``percentile`` are cut, and the rest is scaled (mcmonkey 2023,
    after Saharia et al. 2022, section 2.3).
    """
    wanted, guided = (unconditional + _each(s) * (conditional - unconditional) for s in (mimic, scale))
    mean = guided.mean((1, 2), keepdims=True)
    limit = jnp.abs(wanted - wanted.mean((1, 2), keepdims=True)).max((1, 2), keepdims=True)
    away = guided - mean
    sizes = jnp.sort(jnp.abs(away).reshape(away.shape[0], -1, away.shape[-1]), axis=1)
    last = sizes.shape[1] - 1
    place = jnp.clip(jnp.round(percentile * last).astype(jnp.int32), 0, last)
    most = jnp.take_along_axis(sizes, place[:, None, None], axis=1)[:, :, None]
    most = jnp.maximum(most, limit)
    return mean + jnp.clip(away, -most, most) * (limit / jnp.maximum(most, 1e-12))


def _each(numbers: Array) -> Array:
    return numbers[:, None, None, None]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum((1, 2, 3), keepdims=True)


def _std(x: Array) -> Array:
    return x.std((1, 2, 3), keepdims=True)
