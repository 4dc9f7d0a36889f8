"""Layers as pure functions of ``(params, x)``.

Only ``linear``, ``gated_linear`` and the convolutions look at a weight leaf, so another kind of leaf (quantised, a
low-rank adapter beside it) is taught here and nowhere else. Each layer is two neighbours: what it declares
(``*_spec``) and what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from canvax.kernels.convolution import convolve, convolve_doubled, doubled
from canvax.kernels.matmul import matmul
from canvax.kernels.target import target_platform
from canvax.params import AxisName, Param, Params, Spec
from canvax.quantize import SCALE
from canvax.types import Array

LOW_RANK = "lora"
"""Name of a low-rank adapter beside ``weight`` (Hu et al. 2021, section 4.1): ``down`` [in, r], of a convolution
[kh, kw, in, r], and ``up`` [r, out], which its scale is multiplied into. Where there is a ``share`` [B, r], each image
has its own part of what lies between them: several adapters one behind the other along r are then mixed for each image
as it wants them."""

SHARE = "share"


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


def _multiplied(p: Params, x: Array) -> Array:
    """``x @ weight``, without what is beside the weight."""
    weight, scale = p["weight"], p.get(SCALE)
    return matmul(x, weight) if scale is None else matmul(x, weight.astype(x.dtype), scale)


def _convolved(p: Params, x: Array, convolve: Callable[[Array, Array], Array]) -> Array:
    """``convolve(weight, x)``, without what is beside the weight.

    Of a weight of 8 bits the scales multiply the result. A CPU computes convolutions in float32 in any case, and so its
    result is rounded once. Float16 cannot hold results of weights up to 127: those are multiplied by the power of two
    next to their scale before, which rounds nothing.
    """
    weight, scale = p["weight"], p.get(SCALE)
    if scale is None:
        return convolve(weight, x)
    dtype = jnp.float32 if target_platform() == "cpu" else x.dtype
    weight = weight.astype(dtype)
    if dtype == jnp.float16:
        power = jnp.exp2(jnp.round(jnp.log2(scale)))
        weight, scale = weight * power.astype(dtype), scale / power
    return (convolve(weight, x.astype(dtype)).astype(jnp.float32) * scale).astype(x.dtype)


def linear(p: Params, x: Array) -> Array:
    """``x @ weight + bias`` over the last axis: (..., in) -> (..., out)."""
    return _completed(p, _multiplied(p, x), lambda down: matmul(x, down))


def _completed(p: Params, y: Array, inner: Callable[[Array], Array]) -> Array:
    """``y`` with what is beside the weight: a low-rank adapter, whose first half ``inner`` applies, and a bias."""
    if LOW_RANK in p:
        y = y + _low_rank(p[LOW_RANK], inner)
    return _biased(p, y)


def _low_rank(factors: Params, inner: Callable[[Array], Array]) -> Array:
    """What a low-rank adapter adds; ``inner`` applies its first half."""
    between = inner(factors["down"])
    if SHARE in factors:
        share = factors[SHARE]
        between = between * share.reshape(share.shape[0], *[1] * (between.ndim - 2), share.shape[1])
    return matmul(between, factors["up"])


def without_shares(p: Params) -> tuple[Params, Array | None]:
    """Parameters without what differs between the images of a batch, and that [B, r], which all layers have alike."""
    shares = _share_in(p)
    return (p, None) if shares is None else (_bare(p), shares)


def _share_in(p: Params) -> Array | None:
    if SHARE in p:
        return p[SHARE]
    found = (_share_in(value) for value in p.values() if isinstance(value, dict))
    return next((share for share in found if share is not None), None)


def _bare(p: Params) -> Params:
    return {name: _bare(value) if isinstance(value, dict) else value for name, value in p.items() if name != SHARE}


def with_shares(p: Params, shares: Array | None) -> Params:
    """The inverse of ``without_shares``."""
    if shares is None:
        return p
    whole = {name: with_shares(value, shares) if isinstance(value, dict) else value for name, value in p.items()}
    return {**whole, LOW_RANK: {**p[LOW_RANK], SHARE: shares}} if LOW_RANK in p else whole


def _biased(p: Params, y: Array) -> Array:
    """``y`` and the bias of its layer, if it has one."""
    return y + p["bias"] if "bias" in p else y


def gated_linear(p: Params, x: Array) -> tuple[Array, Array]:
    """Values and gate of a gated unit, each half of the outputs of one linear map: (..., in) -> 2 x (..., out / 2).

    A weight [in, 2, out / 2] is one whose halves the sharding rules have split alike, so that each device has the
    gates of its own values.
    """
    if p["weight"].ndim == 2:
        values, gate = jnp.split(linear(p, x), 2, axis=-1)
        return values, gate
    product = partial(jnp.einsum, "...c,cgo->...go")
    if SCALE in p:
        y = product(x, p["weight"].astype(x.dtype), preferred_element_type=jnp.float32) * p[SCALE]
        y = y.astype(x.dtype) + p["bias"]
    else:
        y = product(x, p["weight"]) + p["bias"]
    if LOW_RANK in p:
        y = y + _low_rank(p[LOW_RANK], lambda down: matmul(x, down)).reshape(y.shape)
    return y[..., 0, :], y[..., 1, :]


def conv2d_spec(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    axes: tuple[AxisName, AxisName] = ("conv_in", "conv_out"),
    bias: bool = True,
) -> Spec:
    """A square convolution; ``axes`` of its input and output channels."""
    spec: Spec = {"weight": Param((kernel, kernel, inputs, outputs), (None, None, *axes), layout="conv")}
    if bias:
        spec["bias"] = Param((outputs,), (axes[1],), init="zeros")
    return spec


def conv2d(p: Params, x: Array, *, stride: int = 1, padding: tuple[int, int] = (1, 1)) -> Array:
    """2-D convolution, [B, H, W, Cin] -> [B, H', W', Cout]; ``padding`` is (before, after) on both axes."""
    how = {"stride": stride, "padding": padding}
    return _completed(p, _convolved(p, x, partial(convolve, **how)), lambda down: convolve(down, x, **how))


def conv2d_of_doubled(p: Params, x: Array) -> Array:
    """3x3 convolution of the image doubled by nearest neighbour: [B, h, w, Cin] -> [B, 2h, 2w, Cout]."""
    return _completed(p, _convolved(p, x, convolve_doubled), lambda down: convolve_doubled(down, x))


def norm_spec(channels: int) -> Spec:
    """Scale and shift of a normalisation."""
    return {
        "weight": Param((channels,), (None,), init="ones"),
        "bias": Param((channels,), (None,), init="zeros"),
    }


def group_norm(
    p: Params, x: Array, *, groups: int, eps: float, activation: Callable[[Array], Array] | None = None
) -> Array:
    """Group normalisation over height, width and the channels of a group (Wu & He 2018), [B, H, W, C].

    Statistics in float32, by two passes where x is: the one-pass form E[x^2] - E[x]^2 cancels where the mean is large.
    Of 16-bit numbers it loses less than their own rounding has lost already, and saves reading them once more. The
    ``activation`` that follows is computed in float32 too, before what comes out is rounded.
    """
    batch, channels = x.shape[0], x.shape[-1]
    half = x.dtype.itemsize < 4

    def widened() -> Array:
        """[B, pixels, C] in float32; on the CPU each time anew, or XLA would write them to memory for all uses."""
        nonlocal x
        if half and target_platform() == "cpu":
            x = jax.lax.optimization_barrier(x)
        return x.astype(jnp.float32).reshape(batch, -1, channels)

    def mean_of(y: Array) -> Array:
        """[B, pixels, C] -> [B, groups]; over pixels first, since a GPU would write each pixel's sums to memory."""
        parts = _parts(y.shape[1])
        return y.reshape(batch, parts, -1, channels).mean(2).reshape(batch, parts, groups, -1).mean((1, 3))

    mean = mean_of(widened())
    if half:
        variance = jnp.maximum(mean_of(jnp.square(widened())) - jnp.square(mean), 0.0)
    else:
        variance = mean_of(jnp.square(widened() - jnp.repeat(mean, channels // groups, 1)[:, None]))
    # Folded to one multiply-add per element, which fuses with the activation that follows.
    weight = p["weight"].astype(jnp.float32).reshape(groups, -1)
    bias = p["bias"].astype(jnp.float32).reshape(groups, -1)
    scale = weight * jax.lax.rsqrt(variance + eps)[..., None]
    shift = bias - mean[..., None] * scale
    y = widened() * scale.reshape(batch, 1, channels) + shift.reshape(batch, 1, channels)
    return (activation(y) if activation else y).astype(x.dtype).reshape(x.shape)


def _parts(pixels: int) -> int:
    """How many sums are made of each channel of a picture, to be added up then.

    XLA's kernel for GPUs gives 128 channels to one multiprocessor, and divides only more than 4,096 pixels among
    several: 64 x 64 pixels of 320 channels, two pictures of them, took 6 of 132 on an H100, and 32 microseconds where
    reading them takes 2.
    """
    divided = target_platform() == "gpu" and 1024 < pixels <= 4096
    return max(part for part in range(1, 32) if pixels % part == 0) if divided else 1


def layer_norm(p: Params, x: Array, *, eps: float = 1e-5) -> Array:
    """Layer normalisation over the last axis, statistics in float32, in one pass or two as in ``group_norm``.

    Always in two on a GPU: of these XLA makes one kernel, of a single pass three.
    """
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    centred = x32 - mean
    if x.dtype.itemsize < 4 and target_platform() != "gpu":
        variance = jnp.maximum(jnp.square(x32).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps)
    return (y * p["weight"].astype(jnp.float32) + p["bias"].astype(jnp.float32)).astype(x.dtype)


def embedding_spec(entries: int, width: int) -> Spec:
    """A lookup table."""
    return {"weight": Param((entries, width), (None, None), init="normal")}


def embedding(p: Params, ids: Array) -> Array:
    """Rows of the table: ids (...) -> (..., D)."""
    return p["weight"][ids]


def gelu(x: Array) -> Array:
    """Exact (erf) GELU; the tanh approximation differs by up to 5e-4, visible after twenty steps."""
    x32 = x.astype(jnp.float32)
    return (x32 * (0.5 + 0.5 * jax.lax.erf(x32 * 0.5**0.5))).astype(x.dtype)


def quick_gelu(x: Array) -> Array:
    """``x * sigmoid(1.702 x)``, the activation of OpenAI's CLIP."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid(1.702 * x32)).astype(x.dtype)


ACTIVATIONS = {"gelu": gelu, "quick_gelu": quick_gelu}


def upsample_nearest(x: Array, height: int, width: int) -> Array:
    """Nearest-neighbour resize of [B, h, w, C]; doubling is a broadcast, other sizes a gather."""
    _, h, w, _ = x.shape
    if (height, width) == (2 * h, 2 * w):
        return doubled(x)
    rows = jnp.arange(height) * h // height
    columns = jnp.arange(width) * w // width
    return x[:, rows][:, :, columns]
