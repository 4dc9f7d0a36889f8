"""Applies prompt weights to the features of tokens."""

from __future__ import annotations

from typing import Any

from canvax.prompts.grammar import PromptSyntax

_NOTHING = 1e-8
"""A mean counts as 0 if its square is below this fraction of the mean square."""


def weighed(features: Any, weights: Any, empty: Any, syntax: PromptSyntax) -> Any:
    """Apply the weights [..., T] of a chunk's tokens to its features [..., T, D] float32.

    A1111 multiplies the features and then restores their mean, unless the mean is 0. This function takes the mean of
    each chunk; A1111 takes it over all prompts of a batch, so that an image depends on its neighbours. ComfyUI and
    Compel move the features away from ``empty``, the features of an empty prompt at the same position.
    """
    weights = weights[..., None]
    if syntax == "a1111":
        scaled = features * weights
        before, after = (array.mean((-2, -1), keepdims=True) for array in (features, scaled))
        size = (scaled**2).mean((-2, -1), keepdims=True)
        # Otherwise the mean, and so the ratio, is only rounding error.
        known = (after**2 > _NOTHING * size).astype(scaled.dtype)
        return scaled * (known * before / (after + (1 - known)) + (1 - known))
    return empty + (features - empty) * weights
