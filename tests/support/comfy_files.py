"""Quantised weights as ComfyUI stores them, by its documented formulas in float64."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]

KINDS = ("scale_weight", "weight_scale", "int8", "int8 convrot")
"""Both generations of scaled 8-bit floats, and integers, rotated or not."""

FOUR = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]


def rotated(array: np.ndarray, group: int) -> np.ndarray:
    """Rows times ComfyUI's Hadamard matrix, group by group; twice is the array itself."""
    turn = np.ones((1, 1))
    while len(turn) < group:
        turn = np.kron(turn, FOUR) / 2
    return (np.float64(array).reshape(len(array), -1, group) @ turn.T).reshape(array.shape)


def mark(**config: object) -> np.ndarray:
    """The array ``comfy_quant``."""
    return np.frombuffer(json.dumps(config).encode(), np.uint8)


def matrix(stem: str, array: np.ndarray, kind: str, group: int = 256) -> tuple[Arrays, np.ndarray]:
    """The arrays of a matrix under names that begin with ``stem``, and the numbers that they are, in float32."""
    if kind in ("scale_weight", "weight_scale"):
        scale = np.float32(np.abs(array).max() / 448)
        stored = (array / scale).astype(ml_dtypes.float8_e4m3fn)
        named = {f"{stem}{kind}": np.full((1,) if kind == "weight_scale" else (), scale, np.float32)}
        if kind == "weight_scale":
            named |= {f"{stem}comfy_quant": mark(format="float8_e4m3fn"), f"{stem}input_scale": np.float32([0.5])}
        return {f"{stem}weight": stored, **named}, stored.astype(np.float32) * scale
    turned = rotated(array, group) if kind == "int8 convrot" else np.float64(array)
    scale = (np.abs(turned).max(axis=1, keepdims=True) / 127).astype(np.float32)
    stored = np.rint(turned / scale).astype(np.int8)
    how = {"convrot": True, "convrot_groupsize": group} if kind == "int8 convrot" else {"per_row": True}
    numbers = stored * np.float64(scale)
    return (
        {f"{stem}weight": stored, f"{stem}weight_scale": scale,
         f"{stem}comfy_quant": mark(format="int8_tensorwise", **how)},
        np.float32(rotated(numbers, group) if kind == "int8 convrot" else numbers),
    )  # fmt: skip
