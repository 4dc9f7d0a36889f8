"""Classifier-free guidance (Ho & Salimans 2022) and its rescaling."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.types import Array


def guide(unconditional: Array, conditional: Array, scale: Array, rescale: Array) -> Array:
    """Move the network's output away from the unconditional one.

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: output for the prompt [B, h, w, C], float32.
        scale: guidance scale of each image [B].
        rescale: 0..1 for each image [B]: how far the result's standard deviation is brought back to that of the
            conditional output (Lin et al. 2024, section 3.4, eq. 15 and 16).

    Returns:
        [B, h, w, C] float32.
    """
    scale, rescale = scale[:, None, None, None], rescale[:, None, None, None]
    guided = unconditional + scale * (conditional - unconditional)
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


def _std(x: Array) -> Array:
    return x.std((1, 2, 3), keepdims=True)
