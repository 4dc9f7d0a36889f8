"""Layers as pure functions of ``(params, x)``.

Only ``linear``, ``gated_linear`` and the convolutions read a weight leaf, so this module is the only place that handles
other kinds of leaf (quantised or streamed weights, low-rank adapters). Each layer is a pair of functions: the
declaration (``*_spec``) and the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from canvax.kernels.convolution import convolve, convolve_doubled, doubled
from canvax.kernels.matmul import matmul, matmul_8bit
from canvax.kernels.target import target_platform
from canvax.params import AxisName, Param, Params, Spec
from canvax.quantize import PRODUCT_SCALE, SCALE
from canvax.types import Array

__all__ = [
    "conv2d",
    "conv2d_spec",
    "embedding",
    "embedding_spec",
    "gated_linear",
    "gelu",
    "group_norm",
    "layer_norm",
    "linear",
    "linear_spec",
    "norm_spec",
    "quick_gelu",
    "upsample_nearest",
]


def __dir__() -> list[str]:
    return __all__


LOW_RANK = "lora"
"""Key of a low-rank adapter in the same layer as ``weight`` (Hu et al. 2021, section 4.1): ``down`` [in, r], for a
convolution [kh, kw, in, r], and ``up`` [r, out], into which the adapter's scale is multiplied. An optional ``share``
[B, r] weights the r inner channels for each image: with several adapters concatenated along r, each image of a batch
has a different mixture. A LoKr has ``w1`` [in, out] of its first factor, and ``down`` and ``up``, or ``w2`` in the
layout of a weight, of its second."""

SHARE = "share"
GAIN = "gain"
"""Key in a low-rank adapter: DoRA's factor of each output [out] before the bias, minus 1, for precision in 16 bits."""


def linear_spec(
    inputs: int,
    outputs: int,
    axes: tuple[AxisName, AxisName] = (None, None),
    *,
    bias: bool = True,
    conv: bool = False,
) -> Spec:
    """Declare a linear map; ``conv=True`` if the checkpoint stores it as a 1x1 convolution."""
    spec: Spec = {"weight": Param((inputs, outputs), axes, layout="conv1x1" if conv else "linear")}
    if bias:
        spec["bias"] = Param((outputs,), (axes[1],), init="zeros")
    return spec


class Ahead:
    """Copies the streamed weights of layers to the device, each while the layer before is computed.

    The copy for a layer begins when the input of the layer before is known, so that the weights of two layers are on
    the device. Without this, compilers begin most copies at once, and weights fill the memory until they are used.
    """

    def __init__(self) -> None:
        self._before: Array | None = None

    def __call__(self, layer: Params, x: Array) -> Params:
        """Return the parameters of a layer, on the device, for its input ``x``."""
        after, self._before = self._before, x
        leaves, structure = jax.tree.flatten(layer)
        return jax.tree.unflatten(structure, _copied(leaves, after)) if any(map(_on_host, leaves)) else layer


def _on_host(weight: Any) -> bool:
    return isinstance(weight, Array) and jax.typeof(weight).memory_space == jax.memory.Space.Host


def _copied(leaves: Sequence[Array], after: Array | None) -> list[Array]:
    """Return arrays with those of the host's memory copied to the device, not before ``after`` is known."""

    def copied(leaf: Array) -> Array:
        leaf = leaf if after is None else jax.lax.optimization_barrier((leaf, after))[0]
        if target_platform() != "tpu" or leaf.dtype.itemsize > 1 or leaf.ndim > 2 or leaf.shape[0] % 64:
            return jax.device_put(leaf, jax.memory.Space.Device)
        # XLA refuses to copy a whole matrix of 8 bits outside of a loop. Halves have whole tiles, of 32 rows.
        halves = jnp.split(leaf, 2)
        return jnp.concatenate([jax.device_put(half, jax.memory.Space.Device) for half in halves])

    return [copied(leaf) if _on_host(leaf) else leaf for leaf in leaves]


def _weight(p: Params, x: Array) -> Array:
    """Return the weight of a layer with the input ``x``, copied to the device if it is streamed and not ``Ahead``."""
    return _copied([p["weight"]], x)[0]


def _multiplied(p: Params, x: Array) -> Array:
    """Return ``x @ weight``, without the low-rank adapter and the bias."""
    weight, scale = _weight(p, x), p.get(SCALE)
    if PRODUCT_SCALE in p:
        return matmul_8bit(x, weight, p[PRODUCT_SCALE])
    return matmul(x, weight) if scale is None else matmul(x, weight.astype(x.dtype), scale)


def _convolved(p: Params, x: Array, convolve: Callable[[Array, Array], Array]) -> Array:
    """Return ``convolve(weight, x)``, without the low-rank adapter and the bias.

    The scales of an 8-bit weight multiply the result. A CPU always computes convolutions in float32, so its result is
    rounded only once. The result for weights up to 127 can overflow float16: there the weight is first multiplied by
    the power of two nearest to its scale, which is exact.
    """
    weight, scale = _weight(p, x), p.get(SCALE)
    if scale is None:
        return convolve(weight, x)
    dtype = jnp.float32 if target_platform() == "cpu" else x.dtype
    weight = weight.astype(dtype)
    if dtype == jnp.float16:
        power = jnp.exp2(jnp.round(jnp.log2(scale)))
        weight = weight * jax.lax.broadcast_to_rank(power.astype(dtype), weight.ndim)
        scale = scale / power
    y = convolve(weight, x.astype(dtype)).astype(jnp.float32)
    return (y * jax.lax.broadcast_to_rank(scale, y.ndim)).astype(x.dtype)


def linear(p: Params, x: Array) -> Array:
    """Return ``x @ weight + bias`` over the last axis: (..., in) -> (..., out)."""
    return _completed(p, _multiplied(p, x), lambda down: matmul(x, down))


def _completed(p: Params, y: Array, inner: Callable[[Array], Array]) -> Array:
    """Add the layer's low-rank adapter and bias to ``y``; ``inner(down)`` applies the adapter's first half."""
    if LOW_RANK in p:
        y = y + _low_rank(p[LOW_RANK], inner)
        if GAIN in p[LOW_RANK]:
            y = y + y * jax.lax.broadcast_to_rank(p[LOW_RANK][GAIN], y.ndim)
    return _biased(p, y)


def _low_rank(factors: Params, inner: Callable[[Array], Array]) -> Array:
    """Return the low-rank adapter's contribution, ``(inner(down) * share) @ up``."""
    if "w1" in factors:
        return inner(product(factors))
    between = inner(factors["down"])
    if SHARE in factors:
        share = factors[SHARE]
        between = between * share.reshape(share.shape[0], *[1] * (between.ndim - 2), share.shape[1])
    return matmul(between, factors["up"])


def product(factors: Params) -> Array:
    """Return the change of a weight: ``down @ up``; of a LoKr the Kronecker product of ``w1`` and that, or ``w2``."""
    second = factors["w2"] if "w2" in factors else jnp.einsum("...ir,ro->...io", factors["down"], factors["up"])
    if "w1" not in factors:
        return second
    whole = jnp.einsum("ab,...io->...aibo", factors["w1"], second)
    *kernel, a, i, b, o = whole.shape
    return whole.reshape(*kernel, a * i, b * o)


def without_shares(p: Params) -> tuple[Params, Array | None]:
    """Remove every ``share`` from the parameters; return them and the share [B, r], the same array in all layers."""
    shares = _share_in(p)
    return (p, None) if shares is None else (_bare(p), shares)


def _share_in(p: Params) -> Array | None:
    if SHARE in p:
        return p[SHARE]
    shares = (_share_in(value) for value in p.values() if isinstance(value, dict))
    return next((share for share in shares if share is not None), None)


def _bare(p: Params) -> Params:
    return {name: _bare(value) if isinstance(value, dict) else value for name, value in p.items() if name != SHARE}


def with_shares(p: Params, shares: Array | None) -> Params:
    """Invert ``without_shares``."""
    if shares is None:
        return p
    whole = {name: with_shares(value, shares) if isinstance(value, dict) else value for name, value in p.items()}
    return {**whole, LOW_RANK: {**p[LOW_RANK], SHARE: shares}} if LOW_RANK in p else whole


def _biased(p: Params, y: Array) -> Array:
    """Add the layer's bias, if it has any, to ``y``."""
    return y + jax.lax.broadcast_to_rank(p["bias"], y.ndim) if "bias" in p else y


def gated_linear(p: Params, x: Array) -> tuple[Array, Array]:
    """Return values and gate of a gated unit, the halves of a linear map's output: (..., in) -> 2 x (..., out / 2).

    The sharding rules store the weight as [in, 2, out / 2] to split both halves in the same way, so that each device
    has the gates of its values.
    """
    if p["weight"].ndim == 2:
        values, gate = jnp.split(linear(p, x), 2, axis=-1)
        return values, gate
    product, weight = partial(jnp.einsum, "...c,cgo->...go"), _weight(p, x)
    if PRODUCT_SCALE in p:
        y = matmul_8bit(x, weight, p[PRODUCT_SCALE])
    elif SCALE in p:
        y = product(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        y = (y * jax.lax.broadcast_to_rank(p[SCALE], y.ndim)).astype(x.dtype)
    else:
        y = product(x, weight)
    y = _biased(p, y)
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
    """Declare a square convolution; ``axes`` are the logical names of its input and output channels."""
    spec: Spec = {"weight": Param((kernel, kernel, inputs, outputs), (None, None, *axes), layout="conv")}
    if bias:
        spec["bias"] = Param((outputs,), (axes[1],), init="zeros")
    return spec


def conv2d(p: Params, x: Array, *, stride: int = 1, padding: tuple[int, int] = (1, 1)) -> Array:
    """Apply a 2-D convolution, [B, H, W, Cin] -> [B, H', W', Cout]; ``padding`` is (before, after) on both axes."""
    geometry = {"stride": stride, "padding": padding}
    return _completed(p, _convolved(p, x, partial(convolve, **geometry)), lambda down: convolve(down, x, **geometry))


def conv2d_of_doubled(p: Params, x: Array) -> Array:
    """Apply a 3x3 convolution to ``x`` after nearest-neighbour doubling: [B, h, w, Cin] -> [B, 2h, 2w, Cout]."""
    return _completed(p, _convolved(p, x, convolve_doubled), lambda down: convolve_doubled(down, x))


def norm_spec(channels: int) -> Spec:
    """Declare scale and shift of a normalisation."""
    return {
        "weight": Param((channels,), (None,), init="ones"),
        "bias": Param((channels,), (None,), init="zeros"),
    }


def group_norm(
    p: Params, x: Array, *, groups: int, eps: float, activation: Callable[[Array], Array] | None = None
) -> Array:
    """Apply group normalisation over height, width and the channels of a group (Wu & He 2018), [B, H, W, C].

    Statistics are float32. For float32 inputs they take two passes, since the one-pass form E[x^2] - E[x]^2 cancels if
    the mean is large. For 16-bit inputs the one-pass form loses less than the inputs' rounding already has, and saves a
    read of x. The ``activation`` that follows is computed in float32 too, before the result is rounded.
    """
    batch, channels = x.shape[0], x.shape[-1]
    half = x.dtype.itemsize < 4

    def widened() -> Array:
        """Return x as [B, pixels, C] in float32.

        On the CPU each call converts again: a shared result would be written to memory by XLA.
        """
        nonlocal x
        if half and target_platform() == "cpu":
            x = jax.lax.optimization_barrier(x)
        return x.astype(jnp.float32).reshape(batch, -1, channels)

    def mean_of(y: Array) -> Array:
        """Average [B, pixels, C] -> [B, groups]; pixels first, or a GPU would write a sum per pixel to memory."""
        parts = _parts(y.shape[1])
        return y.reshape(batch, parts, -1, channels).mean(2).reshape(batch, parts, groups, -1).mean((1, 3))

    mean = mean_of(widened())
    if half:
        variance = jnp.maximum(mean_of(jnp.square(widened())) - jnp.square(mean), 0.0)
    else:
        variance = mean_of(jnp.square(widened() - jnp.repeat(mean, channels // groups, 1)[:, None]))
    # A single multiply-add per element, which fuses with the activation that follows.
    weight = p["weight"].astype(jnp.float32).reshape(1, groups, -1)
    bias = p["bias"].astype(jnp.float32).reshape(1, groups, -1)
    scale = weight * jax.lax.rsqrt(variance + eps)[..., None]
    shift = bias - mean[..., None] * scale
    y = widened() * scale.reshape(batch, 1, channels) + shift.reshape(batch, 1, channels)
    return (activation(y) if activation else y).astype(x.dtype).reshape(x.shape)


def _parts(pixels: int) -> int:
    """Return the number of partial sums of a channel of an image.

    XLA's GPU kernel assigns 128 channels to a multiprocessor, and divides only more than 4,096 pixels among several.
    Two images of 64 x 64 pixels and 320 channels used 6 of an H100's 132 multiprocessors and took 32 microseconds,
    while reading them takes 2.
    """
    divided = target_platform() == "gpu" and 1024 < pixels <= 4096
    return max(part for part in range(1, 32) if pixels % part == 0) if divided else 1


def layer_norm(p: Params, x: Array, *, eps: float = 1e-5) -> Array:
    """Apply layer normalisation over the last axis, statistics in float32, in one or two passes as in
    ``group_norm``.

    A GPU always takes two passes: XLA compiles them to one kernel, but a single pass to three.
    """
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    centred = x32 - mean
    if x.dtype.itemsize < 4 and target_platform() != "gpu":
        variance = jnp.maximum(jnp.square(x32).mean(-1, keepdims=True) - jnp.square(mean), 0.0)
    else:
        variance = jnp.square(centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps)
    weight, bias = (jax.lax.broadcast_to_rank(p[name].astype(jnp.float32), x.ndim) for name in ("weight", "bias"))
    return (y * weight + bias).astype(x.dtype)


def embedding_spec(entries: int, width: int) -> Spec:
    """Declare a lookup table."""
    return {"weight": Param((entries, width), (None, None), init="normal")}


def embedding(p: Params, ids: Array) -> Array:
    """Look up rows of the table: ids (...) -> (..., D)."""
    return p["weight"][ids]


def gelu(x: Array) -> Array:
    """Apply exact (erf) GELU; the tanh approximation differs by up to 5e-4, which is visible after twenty steps."""
    x32 = x.astype(jnp.float32)
    return (x32 * (0.5 + 0.5 * jax.lax.erf(x32 * 0.5**0.5))).astype(x.dtype)


def quick_gelu(x: Array) -> Array:
    """Apply ``x * sigmoid(1.702 x)``, the activation of OpenAI's CLIP."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid(1.702 * x32)).astype(x.dtype)


ACTIVATIONS = {"gelu": gelu, "quick_gelu": quick_gelu}


def upsample_nearest(x: Array, height: int, width: int) -> Array:
    """Resize [B, h, w, C] by nearest neighbour; doubling is a broadcast, other sizes a gather."""
    _, h, w, _ = x.shape
    if (height, width) == (2 * h, 2 * w):
        return doubled(x)
    rows = jnp.arange(height) * h // height
    columns = jnp.arange(width) * w // width
    return x[:, rows][:, :, columns]
