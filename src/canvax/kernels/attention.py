"""Scaled dot-product attention: the plain form, and the choice of a platform's kernel. Models never choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from canvax.errors import InputError, check_function, shown
from canvax.kernels import cpu, gpu, tpu
from canvax.kernels.matmul import matmul
from canvax.kernels.outline import keep as keep
from canvax.kernels.outline import scope as scope
from canvax.kernels.outline import where
from canvax.kernels.target import on_each_device, target_platform, weight_shards
from canvax.originals import replacing
from canvax.types import Array

Form = Callable[[Array, Array, Array, Array | None, Array | None], Array]
"""Maps queries, keys and values of as many heads, a mask and a bias to attention's output. It gets one device's part,
and is never causal."""

_replacement: ContextVar[Callable[..., Array] | None] = ContextVar("canvax_own_attention", default=None)
_traced_with = jax.make_user_context(None)
"""The replacement as a part of JAX's trace context: functions of the user's that are compiled are traced again."""


@contextmanager
def using(form: Callable[..., Array]) -> Iterator[None]:
    """Compute all attention of the context by your function. Programs are compiled again and not stored.

        def local(q, k, v, *, where, **terms):
            if where.endswith("attn1"):
                near = jnp.abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]) < 64
                terms["bias"] = jnp.where(near, 0.0, -1e9)[None, None]
            return attention(q, k, v, **terms)

        with using(local):
            pipe("a red apple")

    Args:
        form: called with queries, keys and values [B, T, heads, Dh], of all devices and perhaps fewer heads of keys;
            with the keywords ``mask``, ``bias``, ``scale`` and ``causal`` of ``attention``; and with ``where``, the
            layer's path, that of its ``scope``. Within it, ``attention`` is canvax's.

    Raises:
        InputError: it cannot be called so; or, when it is traced, it returns another shape than ``attention``.
    """
    check_function("form", form, 3, "(q, k, v, *, where, **terms)", ("mask", "bias", "scale", "causal", "where"))
    token = _replacement.set(form)
    try:
        with replacing(__name__, "using", form), _traced_with(id(form)):  # it need not be hashable, and is kept alive
            yield
    finally:
        _replacement.reset(token)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    upcast: bool = False,
) -> Array:
    """Compute scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32.

    Args:
        q: queries [B, Tq, N, Dh].
        k: keys [B, Tk, N, Dh]; or of fewer heads, each for a group of neighbouring query heads (Ainslie et al. 2023).
        v: values [B, Tk, N, Dh], of as many heads as the keys.
        lengths: number of keys that each sample attends to, int [B], at least 1; the keys after them are padding.
        mask: keys that each sample attends to, bool [B, Tk], at least one True; for padding in other places.
        bias: added to the scaled scores, [B or 1, N or 1, Tq or 1, Tk].
        scale: positive factor of the scores; ``Dh ** -0.5`` by default.
        causal: a token attends to itself and earlier tokens only.
        upcast: compute the scores in float32 (``upcast_attention`` of Stable Diffusion 2.x).

    Returns:
        [B, Tq, N, Dh] in the dtype of ``v``.
    """
    shards = weight_shards()
    if k.shape[2] % shards and q.shape[2] % shards == 0:  # no device has all query heads of a group
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    replacement = _replacement.get()
    # A kernel does not pay off for a text encoder's 77 tokens.
    form = None if causal or replacement else _special_form(q, k)
    if upcast and form not in (gpu.attend_by_cudnn, tpu.attend_by_flash):  # their scores are always float32
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if lengths is not None and not (form is gpu.attend_by_cudnn and mask is None):
        prefix = jnp.arange(k.shape[1])[None] < lengths[:, None]
        mask = prefix if mask is None else mask & prefix
    scaled = {"scale": q.shape[-1] ** -0.5 if scale is None else scale}
    if replacement:
        token = _replacement.set(None)  # so that it may call this function
        try:
            y = replacement(q, k, v, mask=mask, bias=bias, causal=causal, where=where(), **scaled)
        finally:
            _replacement.reset(token)
        if getattr(y, "shape", None) != (shape := (*q.shape[:3], v.shape[3])):
            problem = f"returned {shown(y)} in the layer {where()!r}, not {list(shape)}"
            raise InputError("form", problem, cure="return [B, T, heads, Dh]", value=replacement)
        return y
    if form is None:
        return plain_attention(q, k, v, mask=mask, bias=bias, causal=causal, **scaled)
    if form is gpu.attend_by_cudnn:
        return _on_each_device(partial(form, **scaled), q, k, v, lengths if mask is None else mask, bias)
    return _on_each_device(partial(_by_group, partial(form, **scaled)), q, k, v, mask, bias)


def plain_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> Array:
    """Compute attention as in the paper, with all scores [B, N, Tq, Tk] in memory; arguments as for ``attention``."""
    queries, factor = q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale

    def attend(q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None) -> Array:
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) * factor
        if bias is not None:
            scores = scores + bias.astype(jnp.float32)
        if causal:
            tokens = jnp.tile(jnp.arange(queries), q.shape[1] // queries)
            future = jnp.arange(k.shape[1])[None, :] > tokens[:, None]
            scores = jnp.where(future[None, None], jnp.finfo(jnp.float32).min, scores)
        if mask is not None:
            scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return matmul(weights, v.swapaxes(1, 2)).swapaxes(1, 2)  # by head: [B, N, Tq, Tk] times [B, N, Tk, Dh]

    return _by_group(attend, q, k, v, mask, bias)


def _by_group(form: Form, q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None) -> Array:
    """Call ``form`` with a head for each group, whose queries are those of its heads, one head after the other."""
    (batch, queries, heads, _), groups = q.shape, k.shape[2]
    if heads == groups:
        return form(q, k, v, mask, bias)
    q = jnp.einsum("btgrd->brtgd", q.reshape(batch, queries, groups, heads // groups, -1))
    if bias is not None:
        shape = bias.shape[0], heads, queries, bias.shape[3]
        bias = jnp.broadcast_to(bias, shape).reshape(bias.shape[0], groups, -1, bias.shape[3])
    y = form(q.reshape(batch, -1, groups, q.shape[-1]), k, v, mask, bias)
    y = jnp.einsum("brtgd->btgrd", y.reshape(batch, heads // groups, queries, groups, -1))
    return y.reshape(batch, queries, heads, -1)


def _special_form(q: Array, k: Array) -> Callable[..., Array] | None:
    """Return the form that is faster than the plain form on the target platform, or None."""
    platform = target_platform()
    if platform == "cpu" and cpu.many_scores(q, k):
        return cpu.attend_head_by_head
    if platform == "gpu" and gpu.supports_cudnn(q):
        return gpu.attend_by_cudnn
    if platform == "gpu" and gpu.score_bytes(q, k) > gpu.SCORE_BYTES:
        return partial(gpu.attend_in_parts, plain_attention)
    if platform == "tpu" and tpu.supports_flash(q, k):
        return tpu.attend_by_flash
    return None


def _on_each_device(form: Form, q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None) -> Array:
    """Run a form that XLA cannot partition on each device's images and, if the weights are split, on its heads."""
    split = "model" if weight_shards() > 1 and k.shape[2] % weight_shards() == 0 else None
    spec, images = PartitionSpec("data", None, split, None), PartitionSpec("data")
    for_bias = None
    if bias is not None:
        for_bias = PartitionSpec("data" if bias.shape[0] > 1 else None, split if bias.shape[1] > 1 else None)
    return on_each_device(form, (spec, spec, spec, images, for_bias), spec)(q, k, v, mask, bias)
