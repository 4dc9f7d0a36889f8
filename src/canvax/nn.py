"""Layers as pure functions of ``(params, x)``.

Only :func:`linear`, :func:`gated_linear` and :func:`conv2d` look at a weight leaf, so another kind of leaf (quantised,
low-rank) has to be taught here and nowhere else. Each layer is two neighbours: what it declares (``*_spec``) and what
it computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from canvax.params import AxisName, Param, Params, Spec
from canvax.target import target_platform, weight_shards
from canvax.types import Array

SMALL_IMAGE = 20 * 20
"""Pixels up to which XLA's CPU convolution is slower than the same work as one matmul: 2.5 times at 8 x 8, 1.3 times
at 16 x 16, while at 32 x 32 it is 1.2 times faster (float32, 1280 channels)."""


def linear_spec(
    inputs: int,
    outputs: int,
    axes: tuple[AxisName, AxisName] = (None, None),
    *,
    bias: bool = True,
    conv: bool = False,
) -> Spec:
    """A linear map; ``conv=True`` when the checkpoint stores it as a 1x1 convolution."""
    spec: Spec = {"weight": Param((inputs, outputs), axes, layout="conv1x1" if conv else "linear")}
    if bias:
        spec["bias"] = Param((outputs,), (axes[1],), init="zeros")
    return spec


def linear(p: Params, x: Array) -> Array:
    """``x @ weight + bias`` over the last axis: (..., in) -> (..., out)."""
    y = x @ p["weight"]
    return y + p["bias"] if "bias" in p else y


def gated_linear(p: Params, x: Array) -> tuple[Array, Array]:
    """Values and gate of a gated unit, each half of the outputs of one linear map: (..., in) -> 2 x (..., out / 2).

    A weight [in, 2, out / 2] is one whose halves the sharding rules have split alike, so that each device has the
    gates of its own values.
    """
    if p["weight"].ndim == 2:
        values, gate = jnp.split(linear(p, x), 2, axis=-1)
        return values, gate
    y = jnp.einsum("...c,cgo->...go", x, p["weight"]) + p["bias"]
    return y[..., 0, :], y[..., 1, :]


def conv2d_spec(
    inputs: int, outputs: int, kernel: int = 3, *, axes: tuple[AxisName, AxisName] = ("conv_in", "conv_out")
) -> Spec:
    """A square convolution with bias; ``axes`` of its input and output channels."""
    return {
        "weight": Param((kernel, kernel, inputs, outputs), (None, None, *axes), layout="conv"),
        "bias": Param((outputs,), (axes[1],), init="zeros"),
    }


def conv2d(p: Params, x: Array, *, stride: int = 1, padding: tuple[int, int] = (1, 1)) -> Array:
    """2-D convolution, [B, H, W, Cin] -> [B, H', W', Cout]; ``padding`` is (before, after) on both axes."""
    weight = p["weight"]
    small = x.shape[1] * x.shape[2] <= SMALL_IMAGE and weight.shape[2] >= 64
    plain = weight.shape[:2] == (3, 3) and stride == 1 and padding == (1, 1)
    if target_platform() == "cpu" and plain and small and weight_shards() == 1:
        return _conv3x3_as_matmul(weight, x) + p["bias"]
    y = jax.lax.conv_general_dilated(
        x, weight, (stride, stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + p["bias"]


def _conv3x3_as_matmul(weight: Array, x: Array) -> Array:
    """3x3 convolution with padding 1 as one matmul: the nine shifted images side by side times the weight (im2col)."""
    b, h, w, c = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    columns = jnp.concatenate([padded[:, i : i + h, j : j + w] for i in range(3) for j in range(3)], axis=-1)
    return (columns.reshape(b * h * w, 9 * c) @ weight.reshape(9 * c, -1)).reshape(b, h, w, -1)


def norm_spec(channels: int) -> Spec:
    """Scale and shift of a normalisation."""
    return {
        "weight": Param((channels,), (None,), init="ones"),
        "bias": Param((channels,), (None,), init="zeros"),
    }


def group_norm(p: Params, x: Array, *, groups: int, eps: float) -> Array:
    """Group normalisation over height, width and the channels of a group (Wu & He 2018), [B, H, W, C].

    Statistics in float32, by two passes where x is: the one-pass form E[x^2] - E[x]^2 cancels where the mean is large.
    Of 16-bit numbers it loses less than their own rounding has lost already, and saves reading them once more.
    """
    batch, channels = x.shape[0], x.shape[-1]
    grouped = x.astype(jnp.float32).reshape(batch, -1, groups, channels // groups)
    mean = grouped.mean((1, 3))
    if x.dtype.itemsize < 4:
        variance = jnp.maximum(jnp.square(grouped).mean((1, 3)) - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(grouped - mean[:, None, :, None]).mean((1, 3))
    # Folded to one multiply-add per element, which fuses with the activation that follows.
    weight = p["weight"].astype(jnp.float32).reshape(groups, -1)
    bias = p["bias"].astype(jnp.float32).reshape(groups, -1)
    scale = weight * jax.lax.rsqrt(variance + eps)[..., None]
    shift = bias - mean[..., None] * scale
    broadcast = (batch, *(1 for _ in x.shape[1:-1]), channels)
    return (x.astype(jnp.float32) * scale.reshape(broadcast) + shift.reshape(broadcast)).astype(x.dtype)


def layer_norm(p: Params, x: Array, *, eps: float = 1e-5) -> Array:
    """Layer normalisation over the last axis, statistics in float32."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (y * p["weight"].astype(jnp.float32) + p["bias"].astype(jnp.float32)).astype(x.dtype)


def embedding_spec(entries: int, width: int) -> Spec:
    """A lookup table."""
    return {"weight": Param((entries, width), (None, None), init="normal")}


def embedding(p: Params, ids: Array) -> Array:
    """Rows of the table: ids (...) -> (..., D)."""
    return p["weight"][ids]


def gelu(x: Array) -> Array:
    """Exact (erf) GELU; the tanh approximation differs by up to 5e-4, visible after twenty steps."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: Array) -> Array:
    """``x * sigmoid(1.702 x)``, the activation of OpenAI's CLIP."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS = {"gelu": gelu, "quick_gelu": quick_gelu}


def conv2d_of_doubled(p: Params, x: Array) -> Array:
    """3x3 convolution of the image doubled by nearest neighbour: [B, h, w, Cin] -> [B, 2h, 2w, Cout].

    On the TPU the doubled image is never made: neighbours that are copies share a weight, so it is the same as a 4x4
    kernel over the pixels with a zero between any two, four ninths of the work.
    """
    if target_platform() != "tpu":
        return conv2d(p, upsample_nearest(x, 2 * x.shape[1], 2 * x.shape[2]))
    weight = p["weight"].astype(jnp.float32)
    pairs = sum(
        jnp.pad(weight, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0))) for i in (0, 1) for j in (0, 1)
    )  # fmt: skip
    y = jax.lax.conv_general_dilated(
        x, jnp.asarray(pairs, x.dtype), (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    return y + p["bias"]


def upsample_nearest(x: Array, height: int, width: int) -> Array:
    """Nearest-neighbour resize of [B, h, w, C]; doubling is a broadcast, other sizes a gather."""
    b, h, w, c = x.shape
    if (height, width) == (2 * h, 2 * w):
        doubled = jnp.broadcast_to(x[:, :, None, :, None, :], (b, h, 2, w, 2, c))
        return doubled.reshape(b, height, width, c)
    rows = jnp.arange(height) * h // height
    columns = jnp.arange(width) * w // width
    return x[:, rows][:, :, columns]
