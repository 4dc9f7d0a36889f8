"""Kernels chosen by the platform compiled for: the TPU's, interpreted here, against the plain form."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from canvax import nn
from canvax.kernels import common, convolution, cpu, gpu, outline, target, tpu
from canvax.kernels.attention import attention, plain_attention
from canvax.kernels.matmul import matmul
from canvax.kernels.outline import by_rows, outlined, recomputed
from canvax.kernels.target import compiled_on, compiling_for, target_platform, traced
from canvax.models.wan_vae import resnet
from canvax.nn import conv2d, conv2d_of_doubled, group_norm
from canvax.parallel.mesh import make_mesh, over_batch
from canvax.params import Params
from tests.support.drawing import one_device
from tests.support.random_numbers import rng

ROUNDING = 1e-5
"""Of sums of hundreds of products of numbers up to five, in float32."""


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def with_slopes(function: Callable[..., jax.Array], *given: Any) -> tuple[jax.Array, Any]:
    """The result of a function, and the gradients of the sum of its sine, compiled together and anew."""

    def both(*given: Any) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(function, *given)
        return y, pull(jnp.cos(y))

    return jax.jit(both)(*given)


@pytest.mark.parametrize(
    ("queries", "keys", "width"),
    [(512, 512, 64), (600, 936, 40), (256, 4100, 32), (256, 2048, 256)],
    ids=["whole blocks", "filled up", "several blocks of keys", "wide"],
)
def test_flash_attention(queries: int, keys: int, width: int) -> None:
    q, k, v = normal(1, queries, 2, width), normal(1, keys, 2, width), normal(1, keys, 2, width)
    want = attention(q, k, v)
    with compiling_for("tpu"), pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda *qkv: attention(*qkv))(q, k, v)
    np.testing.assert_allclose(got, want, atol=ROUNDING)


@pytest.mark.parametrize(("platform", "length"), [("none", 8), ("cpu", 8), ("cpu", 800), ("gpu", 8)])
def test_scores_beyond_float16(platform: str, length: int) -> None:
    """Products of queries and keys may be more than 65504: what fits best takes all."""
    best = jnp.asarray(rng.permutation(length))
    keys = jnp.sign(normal(1, length, 1, 64)).astype(jnp.float16)
    q, k, v = 50 * keys[:, best], 50 * keys, normal(1, length, 1, 64).astype(jnp.float16)
    with compiling_for(platform):
        got = jax.jit(lambda *qkv: attention(*qkv))(q, k, v)
    np.testing.assert_allclose(got, v[:, best], rtol=1e-3)


@pytest.mark.parametrize(
    ("platform", "queries", "keys", "dtype", "flash"),
    [
        ("tpu", 4096, 4096, jnp.bfloat16, True),
        ("tpu", 4096, 77, jnp.bfloat16, False),
        ("tpu", 256, 256, jnp.bfloat16, False),
        ("tpu", 4096, 4096, jnp.float16, False),
        ("TPU v3", 4096, 4096, jnp.bfloat16, False),
        ("TPU v4", 4096, 4096, jnp.bfloat16, True),
    ],
)
def test_which_kernel(platform: str, queries: int, keys: int, dtype: jnp.dtype, flash: bool) -> None:
    """Asked of the trace alone: half precision is no TPU's, bfloat16 not all, a prompt's 77 tokens are too few."""
    q, k = jax.ShapeDtypeStruct((2, queries, 8, 40), dtype), jax.ShapeDtypeStruct((2, keys, 8, 40), dtype)
    with compiling_for(platform.split()[0].lower(), kind=platform):
        traced = str(jax.make_jaxpr(lambda *qkv: attention(*qkv))(q, k, k))  # a new function: traces are remembered
    assert ("pallas_call" in traced) == flash


@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_attention_head_by_head_rounds_nothing_more(dtype: jnp.dtype, width: int) -> None:
    """Scores of 16-bit queries and keys are those of the plain form, whatever rounding of q * Dh^-0.5 would do."""
    q, k = (3 * normal(1, length, 2, width).astype(dtype) for length in (700, 900))
    v = normal(1, 900, 2, width)  # float32, so that nothing is rounded but the scores
    with compiling_for("cpu"):
        got = jax.jit(lambda *qkv: attention(*qkv))(q, k, v)
        traced = str(jax.make_jaxpr(lambda *qkv: attention(*qkv))(q, k, v))
    assert "scan" in traced
    plain = jax.jit(plain_attention)(q.astype(jnp.float32), k.astype(jnp.float32), v)
    scores = np.einsum("bqnd,bknd->bnqk", *(np.asarray(x, np.float64) for x in (q, k))) / width**0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = np.einsum("bnqk,bknd->bqnd", weights / weights.sum(axis=-1, keepdims=True), np.asarray(v, np.float64))
    error, usual = (np.abs(x - exact).max() for x in (got, plain))
    assert error < 8 * usual < 5e-4  # a rounded q * Dh^-0.5 has 100 times the usual error, and more


@pytest.mark.parametrize(
    ("keys", "width", "dtype", "capability", "fused"),
    [
        (4096, 40, jnp.bfloat16, "9.0", True),
        (1024, 64, jnp.float16, "12.0", True),
        (77, 64, jnp.bfloat16, "9.0", True),
        (1024, 64, jnp.float16, "7.5", False),
        (1024, 64, jnp.bfloat16, "gfx942", False),
        (4096, 64, jnp.float32, "9.0", False),
        (4096, 512, jnp.bfloat16, "9.0", False),
    ],
)
def test_which_kernel_on_cuda(
    keys: int, width: int, dtype: jnp.dtype, capability: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: that cuDNN is asked for, and with which arguments, is all that can be seen."""
    asked = []

    def dot_product_attention(*qkv: jax.Array, implementation: str, **how: Any) -> jax.Array:
        asked.append(implementation)
        with jax.numpy_dtype_promotion("standard"):  # JAX's plain form needs it, cuDNN's does not
            return real(*qkv, implementation="xla", **how)

    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    q, k = normal(1, 64, 2, width).astype(dtype), normal(1, keys, 2, width).astype(dtype)
    with compiling_for("gpu", capability=capability):
        got = attention(q, k, k)
    assert asked == (["cudnn"] if fused else [])
    want = jax.jit(plain_attention)(q, k, k).astype(jnp.float32)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


@pytest.mark.parametrize(("shards", "heads"), [(1, [8, 2, 2]), (2, [4, 1, 1]), (4, [2, 2, 2])])
def test_cudnn_reads_grouped_heads_as_they_are(shards: int, heads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are not written once for each query head, unless the devices that share the weights are more than them."""
    asked = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *qkv, **_: asked.extend(x.shape[2] for x in qkv) or qkv[0]
    )
    q, k = (jax.ShapeDtypeStruct((1, 64, count, 64), jnp.bfloat16) for count in (8, 2))
    with compiling_for("gpu", make_mesh(jax.devices()[:shards], model=shards), capability="9.0"):
        jax.eval_shape(attention, q, k, k)
    assert asked == heads


@pytest.mark.parametrize(
    ("queries", "keys", "biased"), [(64, 77, True), (63, 64, True), (63, 77, True), (63, 77, False)]
)
@pytest.mark.parametrize("mask", [None, "lengths", "places"])
def test_gradient_of_cudnn_for_odd_numbers(
    queries: int, keys: int, mask: str | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX refuses the gradient for an odd number of queries or keys, such as the 77 of a prompt; its stand-in, too."""

    def dot_product_attention(*qkv: jax.Array, bias: Any, implementation: str, **how: Any) -> jax.Array:
        def plain(*operands: Any) -> jax.Array:
            return real(*operands, implementation="xla", **how)

        def forward(*operands: Any) -> Any:
            if any(x.shape[1] % 2 for x in operands[:3]):
                raise NotImplementedError
            return jax.vjp(plain, *operands)

        attend = jax.custom_vjp(plain)
        attend.defvjp(forward, lambda gradient, g: gradient(g))
        with jax.numpy_dtype_promotion("standard"):
            return attend(*qkv, bias)

    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    q, k, v = normal(2, queries, 2, 64), normal(2, keys, 2, 64), normal(2, keys, 2, 64)
    bias = normal(2, 1, queries, keys) if biased else None
    read = jnp.asarray(rng.random((2, keys)) < 0.5).at[:, 0].set(True)
    lengths = jnp.array([5, keys], jnp.int32)
    given = {"lengths": lengths, "places": read}.get(mask or "")
    plain = {"lengths": jnp.arange(keys)[None] < lengths[:, None], "places": read}.get(mask or "")
    _, got = with_slopes(partial(gpu.attend_by_cudnn, mask=given, bias=bias, scale=0.1), q, k, v)
    _, want = with_slopes(partial(plain_attention, mask=plain, bias=bias, scale=0.1), q, k, v)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("fails", ["tracing", "compiling"])
@pytest.mark.parametrize(
    ("error", "cured"),
    [
        ("cuDNN is not detected.", True),
        ("INTERNAL: No valid engine configs for Matmul_Reduction\nin external/xla/cuda_dnn.cc(10398): 'graph_'", True),
        ("RESOURCE_EXHAUSTED: Out of memory", False),
    ],
)
def test_a_gpu_whose_cudnn_has_no_attention(
    fails: str, error: str, cured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws without. There is no GPU here: what fails is a stand-in for it."""
    asked = []

    def dot_product_attention(*qkv: jax.Array, implementation: str, **how: Any) -> jax.Array:
        asked.append(implementation)
        if fails == "tracing":
            raise RuntimeError(error)
        with jax.numpy_dtype_promotion("standard"):  # JAX's plain form needs it, cuDNN's does not
            return real(*qkv, implementation="xla", **how)

    def compile(lowered: jax.stages.Lowered, options: dict[str, str]) -> jax.stages.Compiled:
        if asked and not compiled:
            compiled.append(lowered)
            raise jax.errors.JaxRuntimeError(error)
        return real_compile(lowered, options)

    compiled: list[jax.stages.Lowered] = []
    real, real_compile = jax.nn.dot_product_attention, jax.stages.Lowered.compile
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    monkeypatch.setattr(
        target, "compiling_on", lambda *_, fused, **__: compiling_for("gpu", capability="9.0" if fused else "")
    )
    if fails == "compiling":
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    q, k = (normal(1, length, 2, 64).astype(jnp.bfloat16) for length in (64, 77))
    if not cured:
        with pytest.raises(RuntimeError, match="Out of memory"):
            compiled_on(one_device(), attention, q, k, k)
        return
    with pytest.warns(UserWarning, match=r"cuDNN's attention cannot be used here.*\((cuDNN is not|INTERNAL: No valid)"):
        program = compiled_on(one_device(), attention, q, k, k)
    assert asked == ["cudnn"]
    got, want = (x.astype(jnp.float32) for x in (program(q, k, k), plain_attention(q, k, k)))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("platform", "given"), [("gpu", {"xla_gpu_dot_merger_threshold_mb": "0"}), ("cpu", {})])
def test_settings_of_xla(platform: str, given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU keeps the matmuls of queries, keys and values apart."""
    asked: list[Any] = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, options: asked.append(options))
    monkeypatch.setattr(target, "compiling_on", lambda *_, **__: compiling_for(platform))
    compiled_on(one_device(), jnp.sin, 1.0)
    assert asked == [given]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_some_queries_at_a_time_on_a_gpu(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuDNN has no kernel, as for the VAE's one wide head: the same numbers and gradients, in less memory."""
    mesh = make_mesh(jax.devices()[:devices])
    q, k, v = (jax.device_put(normal(2, length, 3, 136), over_batch(mesh)) for length in (50, 40, 40))
    monkeypatch.setattr(gpu, "SCORE_BYTES", 4 * 40 * 3 * 16)

    with compiling_for("gpu", mesh):
        traced = str(jax.make_jaxpr(lambda *qkv: attention(*qkv))(q, k, v))
        found = with_slopes(attention, q, k, v)
    assert f"f32[{2 // devices},3,50,40]" not in traced
    for one, other in zip(*map(jax.tree.leaves, (found, with_slopes(plain_attention, q, k, v))), strict=True):
        np.testing.assert_allclose(one, other, atol=ROUNDING)


def test_flash_attention_on_several_devices() -> None:
    """Each device attends to its own images, whatever XLA would make of a kernel it cannot split."""
    mesh = make_mesh(jax.devices()[:2])
    q = jax.device_put(normal(2, 512, 1, 32), over_batch(mesh))
    want = plain_attention(q, q, q)
    with compiling_for("tpu", mesh), pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda *qkv: attention(*qkv))(q, q, q)
    np.testing.assert_allclose(got, want, atol=ROUNDING)
    assert got.sharding.is_equivalent_to(q.sharding, 4)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "TPU v3"])
def test_doubling_inside_the_convolution(platform: str) -> None:
    p = {"weight": normal(3, 3, 16, 8), "bias": normal(8)}
    x = normal(2, 7, 9, 16)
    want = conv2d(p, jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
    with compiling_for(platform.split()[0].lower(), kind=platform):
        got = conv2d_of_doubled(p, x)
    assert got.shape == (2, 14, 18, 8)
    np.testing.assert_allclose(got, want, atol=5e-5)


AT_A_TIME = ("all", "an image", "rows that do not come out even")
"""Sums of a convolution by its taps or tiles."""


def xla_convolution(weight: jax.Array, x: jax.Array, stride: int, padding: common.Padding) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=numbers)


def plain(weight: jax.Array, x: jax.Array, *, doubled: bool) -> jax.Array:
    """A 3x3 convolution with padding 1 by XLA, of an image or of one that has been doubled."""
    return xla_convolution(weight, jnp.repeat(jnp.repeat(x, 2, 1), 2, 2) if doubled else x, 1, ((1, 1), (1, 1)))


FORMS: dict[str, tuple[str, dict[str, bool], bool]] = {
    "taps": ("tpu", {}, False),
    "taps of a doubled image": ("tpu", {}, True),
    "products of a doubled image": ("cpu", {}, True),
    "tiles": ("cpu", {"amx": False}, False),
    "16-bit taps": ("cpu", {"amx": True}, False),
}
"""Of a convolution: the platform, whether its processor has AMX, and whether the image is doubled first."""


def forced(form: str, at_a_time: str, size: tuple[int, int, int], outputs: int, patch: pytest.MonkeyPatch) -> None:
    """Let a form be taken for so small a convolution, with its sums at once, an image's, or those of some rows."""
    images, height, width = size
    rows = {"all": images * height, "an image": height}.get(at_a_time, 2)
    if form.startswith("taps"):
        patch.setattr(tpu, "ACCUMULATOR_BYTES", rows * 4 * width * outputs)
    elif form.startswith("products"):
        patch.setattr(cpu, "PRODUCT_BYTES", rows * 4 * width * 9 * outputs)
    elif form == "tiles":
        tiles = {"all": 4 * 10, "an image": 10}.get(at_a_time, 2)
        for name, value in {"TILES_AT_ONCE": tiles, "MIN_TILES": 1, "TILE_CHANNELS": 32}.items():
            patch.setattr(cpu, name, value)
    else:
        patch.setattr(cpu, "TAP_CHANNELS", 32)
        patch.setattr(cpu, "TAP_BYTES", rows * 4 * width * outputs)


CONVOLUTIONS = [
    pytest.param(form, at_a_time, dtype, id=f"{form}-{at_a_time}-{jnp.dtype(dtype).name}", marks=marks)
    for form in FORMS
    for at_a_time, dtype, marks in (
        *((one, jnp.bfloat16 if form == "16-bit taps" else jnp.float32,
           pytest.mark.slow if form == "taps of a doubled image" else ()) for one in AT_A_TIME),
        *([("all", jnp.bfloat16, pytest.mark.slow)] if form in ("tiles", "products of a doubled image") else []),
    )
    if form != "taps of a doubled image" or at_a_time == "all"
]  # fmt: skip


@pytest.mark.parametrize(("form", "at_a_time", "dtype"), CONVOLUTIONS)
def test_forms_of_a_convolution(form: str, at_a_time: str, dtype: jnp.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and gradients are those of XLA's convolution on two devices, but for one rounding of 16 bits.

    Taps are matmuls, nine of them; tiles are Winograd's form, also of sizes that are no multiples of 4; of a doubled
    image the products are doubled.
    """
    platform, processor, doubled = FORMS[form]
    odd = at_a_time == "rows that do not come out even"
    height, width = (19 if odd else 18, 6) if "amx" in processor else (9, 5)
    inputs, outputs = {"tpu": (64, 64)}.get(platform, (24, 16) if doubled else (32, 40))
    forced(form, at_a_time, (4, height, width), outputs, monkeypatch)
    if processor:
        monkeypatch.setattr(cpu, "has_amx", lambda: processor["amx"])
    mesh = make_mesh(jax.devices()[:2])
    weight = (normal(3, 3, inputs, outputs) / (1 if platform == "tpu" else 16)).astype(dtype)
    x = jax.device_put(normal(4, height, width, inputs).astype(dtype), over_batch(mesh))
    function = convolution.convolve_doubled if doubled else convolution.convolve
    want, pulled = with_slopes(partial(plain, doubled=doubled), weight.astype(jnp.float32), x.astype(jnp.float32))
    with compiling_for(platform, mesh, "TPU v5 lite" if platform == "tpu" else ""):
        text = jax.jit(lambda *given: function(*given)).lower(weight, x).as_text()
        got, slopes = with_slopes(function, weight, x)
    assert got.dtype == dtype
    assert "stablehlo.convolution" not in text
    assert form != "16-bit taps" or text.count("stablehlo.dot_general") >= 9
    assert f"x{2 * height}x{2 * width}x{inputs}x" not in text or platform == "tpu"  # the doubled image
    exact = dtype == jnp.float32
    np.testing.assert_allclose(
        got.astype(jnp.float32), want, rtol=0 if exact else 2**-8, atol=3e-4 if platform == "tpu" else 1e-5
    )
    for slope, wanted in zip(slopes, pulled, strict=True):
        difference = float(jnp.abs(slope.astype(jnp.float32) - wanted).max() / jnp.abs(wanted).max())
        assert difference < (3e-5 if exact else 0.03)


@pytest.mark.parametrize(("inputs", "amx", "taps"), [(256, True, True), (128, True, False), (256, False, False)])
def test_where_a_bfloat16_convolution_is_by_taps(
    inputs: int, amx: bool, taps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_amx", lambda: amx)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 3, inputs, 256), (2, 64, 64, inputs)))
    text = jax.jit(lambda weight, x: convolution.convolve(weight, x)).lower(*arrays).as_text()
    assert ("stablehlo.gather" not in text) == taps


@pytest.mark.parametrize(
    ("pixels", "inputs", "outputs", "tiles", "of_bfloat16"),
    [
        (512, 128, 128, False, True),
        (16, 128, 128, False, False),
        (512, 256, 128, True, True),
        (128, 512, 512, True, True),
        (64, 320, 4, False, False),
        (24, 640, 640, True, True),
        (16, 640, 640, False, False),
    ],
)
def test_where_a_convolution_on_a_cpu_is_by_tiles(
    pixels: int, inputs: int, outputs: int, tiles: bool, of_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_amx", lambda: False)
    for dtype, wanted in ((jnp.float32, tiles), (jnp.float16, tiles), (jnp.bfloat16, of_bfloat16)):
        shapes = ((3, 3, inputs, outputs), (2, pixels, pixels, inputs))
        given = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        text = jax.jit(lambda weight, x: convolution.convolve(weight, x)).lower(*given).as_text()
        assert ("stablehlo.gather" in text) == wanted


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_sums_of_bfloat16_matmuls(kind: str) -> None:
    """On a CPU they are float32 ones, by name; the result and its gradient are bfloat16 all the same."""
    x, weight = normal(3, 5, 64).astype(jnp.bfloat16), (normal(64, 32) / 8).astype(jnp.bfloat16)
    with compiling_for(kind):
        text = jax.jit(lambda *given: matmul(*given)).lower(x, weight).as_text()
        got, pull = jax.vjp(matmul, x, weight)
    assert ("-> tensor<3x5x32xf32>" in text) == (kind == "cpu")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), x.astype(jnp.float32) @ weight.astype(jnp.float32), rtol=2**-7)
    assert [slope.dtype for slope in pull(got)] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (3, 1, ((1, 1), (1, 1)), (8, 6)),
        (3, 2, ((1, 1), (1, 1)), (8, 6)),
        (3, 2, ((1, 1), (1, 1)), (7, 9)),
        (3, 2, ((0, 1), (0, 1)), (8, 8)),
        (2, 1, ((1, 0), (0, 1)), (6, 5)),
        (1, 1, ((0, 0), (0, 0)), (5, 7)),
    ],
)
def test_gradient_of_convolutions_on_a_cpu(
    kernel: int, stride: int, padding: common.Padding, size: tuple[int, int]
) -> None:
    """The gradient canvax gives XLA's convolution is the one XLA would."""
    weight, x = normal(kernel, kernel, 5, 4), normal(2, *size, 5)
    want, pulled = with_slopes(lambda *given: xla_convolution(*given, stride, padding), weight, x)
    got, slopes = with_slopes(lambda *given: cpu.by_xla(*given, stride, padding), weight, x)
    np.testing.assert_array_equal(got, want)
    for slope, wanted in zip(slopes, pulled, strict=True):
        np.testing.assert_allclose(slope, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("pixels", "stride", "inputs", "outputs", "matmul"),
    [(8, 1, 640, 1280, True), (16, 1, 640, 1280, True), (16, 1, 640, 640, False), (8, 1, 640, 192, False),
     (32, 2, 640, 1280, True), (32, 2, 640, 640, False), (64, 1, 3, 24, True), (64, 1, 4, 320, True),
     (64, 1, 9, 320, False)],
)  # fmt: skip
def test_where_a_convolution_on_a_cpu_is_one_matmul(
    pixels: int, stride: int, inputs: int, outputs: int, matmul: bool
) -> None:
    """For few pixels, in the whole batch that comes out, beside the output channels; and for a first layer."""
    shapes = ((3, 3, inputs, outputs), (2, pixels, pixels, inputs))
    given = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    text = jax.jit(lambda weight, x: convolution.convolve(weight, x, stride=stride)).lower(*given).as_text()
    assert ("stablehlo.convolution" not in text) == matmul


@pytest.mark.parametrize(("stride", "padding"), [(1, (1, 1)), (2, (1, 1)), (2, (0, 1))])
@pytest.mark.parametrize("inputs", [4, 64])
def test_convolution_as_one_matmul(stride: int, padding: tuple[int, int], inputs: int) -> None:
    size = (5, 3)
    weight, x = normal(3, 3, inputs, 96) / 24, normal(1, *size, inputs)
    want = xla_convolution(weight, x, stride, (padding, padding))
    with compiling_for("cpu"):
        got = convolution.convolve(weight, x, stride=stride, padding=padding)
        assert "dot_general" in str(jax.make_jaxpr(partial(convolution.convolve, stride=stride))(weight, x))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "pictures", "taps"),
    [("TPU v3", 16, False), ("TPU v4", 2, True), ("TPU v5 lite", 16, True)],
)
def test_where_convolutions_are_by_taps(kind: str, pictures: int, taps: bool) -> None:
    weight, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 3, 64, 320), (pictures, 128, 128, 64)))
    with compiling_for("tpu", None, kind):
        text = jax.jit(lambda weight, x: convolution.convolve(weight, x)).lower(weight, x).as_text()
    assert ("stablehlo.convolution" not in text) == taps


@pytest.mark.slow
@pytest.mark.parametrize(("height", "strip"), [(48, 16 + 4), (37, 13 + 4)], ids=["even", "uneven"])
def test_an_image_strip_by_strip(height: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual block has the same numbers and gradients as at once, also at the borders, on two devices."""
    monkeypatch.setattr(tpu, "STRIP_BYTES", 22 * 4 * 6 * 16 * 2)  # 18 rows and two on each side, of two images
    mesh = make_mesh(jax.devices()[:2])
    p = {name: {"gamma": normal(width)} if "norm" in name else {"weight": normal(3, 3, width, 16), "bias": normal(16)}
         for name, width in (("norm1", 8), ("conv1", 8), ("norm2", 16), ("conv2", 16))}  # fmt: skip
    p["conv_shortcut"] = {"weight": normal(8, 16), "bias": normal(16)}
    x = jax.device_put(normal(4, height, 6, 8), over_batch(mesh))

    def block(p: Params, x: jax.Array) -> tuple[jax.Array, Params]:
        y, pull = jax.vjp(resnet, p, x)
        return y, pull(jnp.cos(y))

    wanted = jax.jit(block)(p, x)
    with compiling_for("tpu", mesh, "TPU v5 lite"):
        lowered = jax.jit(lambda *given: block(*given)).lower(p, x)
    assert f"tensor<4x{strip}x6x8xf32>" in lowered.as_text()
    for got, want in zip(jax.tree.leaves(lowered.compile()(p, x)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=ROUNDING * float(jnp.abs(want).max()))


def some_rows(p: dict[str, jax.Array], x: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["weight"]) @ k


@pytest.mark.parametrize("rows", [1024, 1031], ids=["whole parts", "filled up"])
def test_rows_a_few_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers and gradients as all at once, each image with its own ``k``, on one device and on two."""
    monkeypatch.setattr(outline, "LARGE_ROWS", 1)
    mesh = make_mesh(jax.devices()[:2])
    p, x, k = {"weight": normal(8, 32)}, normal(2, rows, 8), normal(2, 32, 16)
    x, k = (jax.device_put(array, over_batch(mesh)) for array in (x, k))
    with compiling_for("cpu", mesh):
        got, slopes = with_slopes(partial(by_rows, some_rows), p, x, k)
        traced = str(jax.make_jaxpr(lambda *given: by_rows(some_rows, *given))(p, x, k))
    assert "scan" in traced
    want, wanted = with_slopes(some_rows, p, x, k)
    np.testing.assert_allclose(got, want, atol=ROUNDING)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-3), slopes, wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_group_norm_of_16_bits(dtype: jnp.dtype) -> None:
    """One pass of statistics loses less than half of what rounding ``x`` has lost, even where the mean is large."""
    mean = 100.0
    x = (normal(2, 16, 16, 32) + mean).astype(dtype)
    p = {"weight": jnp.ones(32, dtype), "bias": jnp.zeros(32, dtype)}
    got = group_norm(p, x, groups=8, eps=1e-5).astype(jnp.float32)
    exact = np.asarray(x, np.float64).reshape(2, 256, 8, 4)
    exact = (exact - exact.mean((1, 3), keepdims=True)) / np.sqrt(exact.var((1, 3), keepdims=True) + 1e-5)
    rounding = mean * float(jnp.finfo(dtype).eps) / 2  # of x, whose standard deviation is one
    np.testing.assert_allclose(got, exact.reshape(x.shape), rtol=float(jnp.finfo(dtype).eps), atol=rounding / 2)


def test_a_trace_is_for_its_target_alone() -> None:
    """JAX caches traces by function; one that was made for another target must not come back."""
    seen = []

    def function(x: jax.Array) -> jax.Array:
        seen.append(target_platform())
        return x + 1

    for platform in ("none", "tpu", "none"):
        with compiling_for(platform):
            traced(function, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert seen == ["none", "tpu"]  # the third is the first again


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_blocks_are_recomputed_for_gradients(platform: str) -> None:
    @outlined
    def block(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x) * jnp.cos(y)

    for recompute in (False, True):
        with recomputed(recompute), compiling_for(platform):
            gradient = jax.make_jaxpr(jax.grad(lambda x: block(x, x).sum()))(jnp.ones(3))
        assert ("remat" in str(gradient)) is recompute


def test_of_calls_only_a_block_is_outlined() -> None:
    """What JAX makes of loops while it lowers is calls as well; kept, they would be copies that nothing fuses with."""

    @outlined
    def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def one(rows: jax.Array) -> jax.Array:
            return jax.lax.map(lambda row: jax.nn.silu(row @ p["weight"]), rows)

        return jax.lax.map(one, x)

    def two(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return block(p, block(p, x))

    with compiling_for("cpu"):
        lowered = jax.jit(two).lower({"weight": jnp.ones((8, 8))}, jnp.ones((4, 4, 16, 8)))
    calls = [line for line in lowered.compile().as_text().splitlines() if 'inlineable="false"' in line]
    assert len(calls) == 2
    assert all(" call(" in line for line in calls)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu(dtype: jnp.dtype) -> None:
    """As its definition x P(X <= x), in 16 bits but for the rounding of the result, in the far tail too."""
    x = jnp.linspace(-6, 6, 2001, dtype=dtype)
    want = [0.5 * v * math.erfc(-v * 0.5**0.5) for v in np.asarray(x, np.float64)]
    np.testing.assert_allclose(np.asarray(nn.gelu(x), np.float64), want, atol=1e-6, rtol=float(jnp.finfo(dtype).eps))
