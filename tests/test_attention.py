"""Masks, biases and grouped heads in each platform's form, against the definition; and forms of a user's own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from test_new_family import pipeline_of

import canvax
from canvax.compile import cache, key
from canvax.families.known import PRESETS
from canvax.kernels import gpu
from canvax.kernels.attention import attention, keep, plain_attention, scope, using
from canvax.kernels.outline import keeping
from canvax.kernels.target import compiling_for
from canvax.kernels.tpu import key_block
from canvax.models.denoiser import evaluate
from canvax.models.dit import attend_in_order
from canvax.originals import replaced
from canvax.parallel.mesh import make_mesh
from canvax.params import Param
from examples.new_family import NETWORKS, Mlp
from tests.support.random_numbers import rng
from tests.support.refusals import refused

ROUNDING = 2e-5
BATCH, HEADS, GROUPS = 2, 4, 2


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def defined(q: Any, k: Any, v: Any, *, lengths: Any = None, mask: Any = None, bias: Any = None, scale: Any = None,
            causal: bool = False) -> np.ndarray:  # fmt: skip
    """Attention by its definition, in float64, a head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, queries, heads, width), (_, keys, groups, _) = q.shape, k.shape
    seen = np.ones((batch, heads, queries, keys), bool)
    if lengths is not None:
        seen &= (np.arange(keys) < np.asarray(lengths)[:, None])[:, None, None]
    if mask is not None:
        seen &= np.asarray(mask)[:, None, None]
    if causal:
        seen &= np.tril(np.ones((queries, keys), bool))
    added = np.broadcast_to(np.asarray(0.0 if bias is None else bias, np.float64), seen.shape)
    out = np.empty_like(q)
    for n in range(heads):
        group = n // (heads // groups)
        scores = q[:, :, n] @ k[:, :, group].swapaxes(1, 2) * (width**-0.5 if scale is None else scale) + added[:, n]
        scores = np.where(seen[:, n], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, n] = weights / weights.sum(-1, keepdims=True) @ v[:, :, group]
    return out


# Sizes for which each platform takes its special form: many scores on a CPU, a wide head on a GPU, 512 keys on a TPU.
CASES = {"none": (8, 12, 16), "cpu": (700, 800, 16), "gpu": (50, 40, 136), "tpu": (512, 600, 32)}
TERMS: dict[str, Any] = {
    "nothing": lambda queries, keys: {},
    "lengths": lambda queries, keys: {"lengths": jnp.array([keys // 3, keys])},
    "mask": lambda queries, keys: {"mask": jnp.asarray(rng.random((BATCH, keys)) < 0.6).at[:, 0].set(True)},
    "bias": lambda queries, keys: {"bias": normal(1, HEADS, queries, keys)},
    "all": lambda queries, keys: {
        "lengths": jnp.array([keys // 2, keys]), "bias": normal(BATCH, 1, 1, keys),
        "mask": jnp.asarray(rng.random((BATCH, keys)) < 0.6).at[:, 0].set(True),
    },
}  # fmt: skip


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("platform", CASES)
def test_a_form_is_what_is_defined(platform: str, terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With grouped heads, on two devices that share the batch."""
    queries, keys, width = CASES[platform]
    monkeypatch.setattr(gpu, "SCORE_BYTES", 4 * 40 * 3 * 16)
    mesh = make_mesh(jax.devices()[:2])
    q, k, v = normal(BATCH, queries, HEADS, width), *(normal(BATCH, keys, GROUPS, width) for _ in range(2))
    given, scale = TERMS[terms](queries, keys), 0.7 if terms == "bias" else None
    with compiling_for(platform, mesh), pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda qkv, given: attention(*qkv, scale=scale, **given))((q, k, v), given)
    np.testing.assert_allclose(got, defined(q, k, v, scale=scale, **given), atol=ROUNDING)


@pytest.mark.parametrize(("model", "groups"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("platform", CASES)
def test_devices_share_grouped_heads(platform: str, model: int, groups: int) -> None:
    """Each group is on one device; if they are fewer than the devices, a device has a part of a group's heads."""
    queries, keys, width = CASES[platform]
    mesh = make_mesh(jax.devices()[:model], model=model)
    q, k, v = normal(1, queries, HEADS, width), *(normal(1, keys, groups, width) for _ in range(2))
    bias, mask = normal(1, HEADS, queries, keys), jnp.arange(keys)[None] % 3 > 0
    placed = jax.device_put(q, NamedSharding(mesh, PartitionSpec("data", None, "model", None)))
    with compiling_for(platform, mesh), pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda *qkv, **how: attention(*qkv, **how))(placed, k, v, bias=bias, mask=mask)
    np.testing.assert_allclose(got, defined(q, k, v, bias=bias, mask=mask), atol=ROUNDING)


@pytest.mark.parametrize("terms", TERMS)
def test_cudnn_is_asked_for_what_is_defined(terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernel is for a GPU; JAX's plain form of the same call takes its place."""
    plain, asked = jax.nn.dot_product_attention, []

    def dot_product_attention(*qkv: jax.Array, implementation: str, **how: Any) -> jax.Array:
        asked.append(how)
        for term in (how["bias"], how["mask"]):  # cuDNN refuses other shapes
            assert term is None or term.shape[2:] == (9, 12)
        with jax.numpy_dtype_promotion("standard"):  # which this form needs, and cuDNN's does not
            return plain(*qkv, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    q, k, v = (normal(BATCH, length, heads, 16).astype(jnp.bfloat16) for length, heads in ((9, 4), (12, 2), (12, 2)))
    given = TERMS[terms](9, 12)
    scale = 0.7 if terms == "bias" else None
    with compiling_for("gpu", capability="9.0"):
        got = attention(q, k, v, scale=scale, **given)
    want = defined(*(x.astype(jnp.float32) for x in (q, k, v)), scale=scale, **given)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)
    assert (asked[0]["key_value_seq_lengths"] is not None) == (terms == "lengths")  # for which cuDNN reads nothing


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_bias_in_16_bits(dtype: Any) -> None:
    """Head by head the scores are scaled late; a bias is not scaled with them."""
    queries, keys, width = CASES["cpu"]
    q, k, v = (normal(1, length, 2, width).astype(dtype) for length in (queries, keys, keys))
    bias = 3 * normal(1, 2, 1, keys)
    with compiling_for("cpu"):
        got = attention(q, k, v, bias=bias, scale=0.4)
    want = defined(*(x.astype(jnp.float32) for x in (q, k, v)), bias=bias, scale=0.4)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=ROUNDING if dtype == jnp.float32 else 0.03)


def test_causal_attention_to_a_padded_prompt() -> None:
    """Padding behind a prompt is no key, for later padding neither."""
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    given: dict[str, Any] = {"lengths": jnp.array([3, 7]), "bias": normal(1, 4, 7, 7)}
    got = attention(q, k, v, causal=True, **given)
    np.testing.assert_allclose(got, defined(q, k, v, causal=True, **given), atol=ROUNDING)


def test_grouped_heads_are_not_repeated() -> None:
    """Neither keys nor values are written once for each query head."""
    for platform, (queries, keys, width) in CASES.items():
        if platform != "tpu":
            q, k = (jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32) for length, heads in
                    ((queries, 8), (keys, 2)))  # fmt: skip
            with compiling_for(platform):
                lowered = jax.jit(lambda q, k: attention(q, k, k)).lower(q, k).as_text()
            assert f"tensor<1x{keys}x8x{width}xf32>" not in lowered
            assert f"tensor<8x{width}x{keys}xf32>" not in lowered


@pytest.mark.parametrize(
    ("keys", "width", "padded"),
    [(4608, 128, 4608), (4224, 128, 4224), (4096, 64, 4096), (600, 32, 640), (2048, 256, 2048), (4700, 64, 5120)],
)
def test_blocks_of_keys_are_even(keys: int, width: int, padded: int) -> None:
    block = key_block(keys, width)
    assert block % 128 == 0
    assert block <= (4096 if width <= 128 else 1024)
    assert -(-keys // block) * block == padded


@pytest.mark.slow
def test_a_form_of_ones_own(small: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows where it is, is compiled for itself and stored nowhere, and is gone afterwards."""
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(key, "edited", lambda: False)  # by whoever edits while the tests run
    seen: list[str] = []

    def draw() -> canvax.Result:
        options = canvax.Options(progress=False)
        return small("a cat", seed=3, num_inference_steps=2, guidance_scale=4.0, options=options)

    def blind(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
        seen.append(where)
        y = plain_attention(q, k, v, **terms)
        return jnp.zeros_like(y) if where.endswith("attn1") else y

    want, stored = draw(), len(cache.stored_programs())
    with using(blind):
        got = draw()
        assert got.compilations > 0
        assert draw().compilations == 0
        with using(unchanged):
            np.testing.assert_allclose(draw().latents, want.latents, atol=1e-5)
    assert len(cache.stored_programs()) == stored
    assert np.abs(got.latents - want.latents).max() > 0.01
    assert replaced() == ()
    after = draw()
    assert after.compilations == 0
    np.testing.assert_array_equal(after.latents, want.latents)
    unet = [where for where in seen if where.startswith(("down_blocks", "mid_block", "up_blocks"))]
    assert {where.rpartition(".")[2] for where in unet} == {"attn1", "attn2"}
    for where in unet:
        layer = small.params["unet"]  # type: ignore[index]
        for name in where.split("."):
            layer = layer[name]
        assert "to_q" in layer
    assert {"text_encoder.layers.0"} <= set(seen)


@pytest.mark.slow
def test_a_compiled_function_notices_another_form(small: canvax.Pipeline) -> None:
    """One that was compiled before is traced again within, and is the first one afterwards."""
    latents, text = jnp.ones((1, 8, 8, 4)), small.encode("a cat")
    run = jax.jit(lambda params: small.denoiser(latents, 500.0, text, params=params))
    plain = run(small.params)

    class Nothing:
        __hash__: Any = None

        def __call__(self, q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
            return jnp.zeros_like(q)

    with using(Nothing()):
        assert jnp.abs(run(small.params) - plain).max() > 1e-3
    np.testing.assert_array_equal(run(small.params), plain)


@pytest.mark.parametrize(
    "form",
    [
        lambda q, k, v: q,
        lambda q, k, v, *, where, **terms: attention(q, k, v, **terms)[:, :1],
        lambda q, k, v, *, where, **terms: attention(q, k, v, **terms).reshape(*q.shape[:2], -1),
        lambda q, k, v, *, where, **terms: None,
    ],
)
def test_a_form_that_cannot_be_called_or_returns_another_shape(form: Any, small: canvax.Pipeline) -> None:
    with refused("form"), using(form):
        small.encode("a cat")


def mapped(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
    """Attention that keeps its probabilities for the text."""
    if where.endswith("attn2"):
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * terms["scale"]
        keep(where, jax.nn.softmax(scores.astype(jnp.float32)))
    return attention(q, k, v, **terms)


@pytest.mark.slow
def test_attention_maps_are_recorded(small: canvax.Pipeline) -> None:
    """Of each row, layer and sample, in a jitted rollout, with recomputation too; they are those of the row alone."""
    start = small.start(["a red apple", "a fox"], seed=[1, 2], num_inference_steps=3, sampler="DDIM")
    rule = start.guidance, start.guidance_settings

    def run(params: Any, columns: Any, remat: bool = False) -> Any:
        reader = {"record": lambda seen: (seen.kept, seen.x), "remat": remat}
        return canvax.rollout(small, params, *start[:3], columns, *rule, **reader)

    def row(x: Any, text: Any) -> Any:
        with keeping() as alone:
            small.denoiser(x, start.table.timestep[2], text)
        return alone

    columns = start.table.columns()
    with using(mapped):
        kept, x = jax.jit(run)(small.params, columns).record
        slope = jax.grad(lambda p: sum(m.sum() for m in jax.tree.leaves(run(p, columns, True).record[0])))
        assert jax.tree.leaves(jax.eval_shape(slope, small.params))
        text = {name: jnp.concatenate([each[name] for each in start.conditions]) for name in start.conditions[0]}
        alone = jax.jit(row)(start.table.c_in[2] * jnp.concatenate([x[2], x[2]]), text)
    assert kept.keys() == alone.keys()
    assert len(kept) > 1
    for name, maps in kept.items():
        assert maps.shape[:2] == (3, 4)
        np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-4)
        np.testing.assert_allclose(maps[2, [0, 2, 1, 3]], alone[name], atol=1e-3)
    assert canvax.rollout(small, small.params, *start, record=lambda seen: seen.kept).record == {}
    with using(mapped):
        images = small("a fox", seed=1, num_inference_steps=1, progress=False)  # where no one reads them
    assert np.isfinite(images.latents).all()


def unchanged(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
    return attention(q, k, v, **terms)


def test_attention_in_order() -> None:
    """A few queries at a time are the same as all at once: a triangle, in which tokens of an image are one."""
    tokens, width = 37, 8
    q, k, v = normal(BATCH, tokens, HEADS, width), *(normal(BATCH, tokens, GROUPS, width) for _ in "kv")
    order = jnp.asarray([[*range(5), *[5] * 12, *range(17, tokens)], [*range(tokens - 4), *[2**30] * 4]], jnp.int32)
    got = attend_in_order(q, k, v, order, at_once=6)
    np.testing.assert_allclose(got, attend_in_order(q, k, v, order), atol=ROUNDING)
    for sample, row, seen in ((0, 4, 5), (0, 5, 17), (0, 16, 17), (0, 17, 18), (1, 32, 33)):
        one = slice(sample, sample + 1)
        want = plain_attention(q[one, row : row + 1], k[one, :seen], v[one, :seen])
        np.testing.assert_allclose(got[one, row : row + 1], want, atol=ROUNDING)


class Layers(Mlp):
    """Two layers of attention, before the network."""

    names: ClassVar[tuple[str, ...]] = ("blocks.0", "blocks.1")

    def apply(self, p: Any, x: Any, row: Any, prepared: Any, memory: Any) -> tuple[Any, Any]:
        for name in self.names:
            with scope(name) if name else nullcontext():
                tokens = x.reshape(*x.shape[:1], -1, 1, x.shape[-1])
                x = x + attention(tokens, tokens, tokens).reshape(x.shape)
        return super().apply(p, x, row, prepared, memory)


class Nameless(Layers):
    names = ("", "")


def test_layers_of_a_network_of_ones_own() -> None:
    """They have the names of their scopes, and two arrays of a name are refused."""
    pipe = pipeline_of(replace(NETWORKS, denoiser=Layers()))
    start = pipe.start("a fox", num_inference_steps=2, guidance_scale=1.0)

    def noted(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
        keep(where, q)
        return attention(q, k, v, **terms)

    def kept(denoiser: Any) -> Any:
        networks = replace(NETWORKS, denoiser=denoiser)
        reader = {"record": lambda seen: seen.kept}
        with using(noted):
            return jax.eval_shape(lambda: canvax.rollout(networks, pipe.params, *start, **reader).record)

    assert kept(Layers()).keys() == {"blocks.0", "blocks.1"}
    with refused("name"):
        kept(Nameless())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.slow
def test_every_layer_has_the_name_of_its_parameters(name: str) -> None:
    networks, seen = PRESETS[name], []
    denoiser, shape = networks.denoiser, networks.latent_shape(1, 256, 256)
    conditions = networks.conditions(networks.packing.shape(shape))

    def noted(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
        seen.append(where)
        keep(where, q)
        return attention(q, k, v, **terms)

    def of(params: Any, x: Any, conditions: Any) -> Any:
        with keeping() as kept:
            evaluate(denoiser, params, x, jnp.full(1, 500.0), conditions)
        return kept

    def is_param(node: Any) -> bool:
        return isinstance(node, Param)

    spec = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), denoiser.spec, is_leaf=is_param)
    with using(noted):
        kept = jax.eval_shape(of, spec, jax.ShapeDtypeStruct(shape, jnp.float32), conditions)
    assert kept.keys() == set(seen)
    for where in seen:
        layer = spec
        for part in where.split("."):
            layer = layer[part]  # type: ignore[index]
