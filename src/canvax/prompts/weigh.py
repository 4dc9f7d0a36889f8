"""What a weight does to the features of a token."""

from __future__ import annotations

from typing import Any

from canvax.prompts.grammar import PromptSyntax


def weighed(features: Any, weights: Any, empty: Any, syntax: PromptSyntax) -> Any:
    """Features of one chunk [..., T, D] float32 with the weights of its tokens [..., T].

    A1111 multiplies each, and brings the mean back to what it was (here of each chunk by itself: A1111 takes it over
    all prompts of a batch, so that an image depends on its neighbours). ComfyUI and Compel move each away from
    ``empty``, the features of an empty prompt at the same position.
    """
    weights = weights[..., None]
    if syntax == "a1111":
        scaled = features * weights
        return scaled * (features.mean((-2, -1), keepdims=True) / scaled.mean((-2, -1), keepdims=True))
    return empty + (features - empty) * weights
