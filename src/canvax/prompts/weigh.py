"""What a weight does to the features of a token."""

from __future__ import annotations

from typing import Any

from canvax.prompts.grammar import PromptSyntax

_NOTHING = 1e-8
"""A mean whose square is a smaller part of the mean square than this is taken for 0."""


def weighed(features: Any, weights: Any, empty: Any, syntax: PromptSyntax) -> Any:
    """Features of one chunk [..., T, D] float32 with the weights of its tokens [..., T].

    A1111 multiplies each, and brings the mean back to what it was, unless that is 0. Here it is that of each chunk by
    itself: A1111 takes it over all prompts of a batch, so that an image depends on its neighbours. ComfyUI and Compel
    move each away from ``empty``, the features of an empty prompt at the same position.
    """
    weights = weights[..., None]
    if syntax == "a1111":
        scaled = features * weights
        before, after = (array.mean((-2, -1), keepdims=True) for array in (features, scaled))
        size = (scaled**2).mean((-2, -1), keepdims=True)
        known = after**2 > _NOTHING * size  # else it is rounding alone, and so would be the ratio
        return scaled * (known * before / (after + ~known) + ~known)
    return empty + (features - empty) * weights
