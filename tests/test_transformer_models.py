"""Transformer models by themselves: what their specs declare is read, and devices share heads and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_specs import leaves_read

from canvax.errors import CheckpointError
from canvax.families.known import PRESETS
from canvax.kernels.attention import attention, plain_attention, using
from canvax.kernels.target import compiling_for, compiling_on
from canvax.models import dit
from canvax.models import krea2 as krea2_model
from canvax.models.decoder_lm import DecoderConfig, decoder_lm, decoder_lm_spec
from canvax.models.flux2 import Flux2Config, flux2, flux2_context, flux2_spec
from canvax.models.krea2 import Krea2Config, krea2, krea2_context, krea2_spec
from canvax.models.z_image import ZImageConfig, z_image, z_image_context, z_image_spec
from canvax.parallel.mesh import make_mesh, over_batch
from canvax.parallel.rules import place_all, placement
from canvax.params import Spec, flatten, init_params

TOKENS, ROWS = 15, 32


class Model(NamedTuple):
    """A network, as a function of its parameters and inputs without a batch."""

    spec: Spec
    run: Callable[..., Any]
    inputs: tuple[tuple[Any, tuple[int, ...]], ...]


def model_of(cfg: Any) -> Model:
    """The whole of a step, what happens before the loop included; of a language model its first three layers."""
    number = (jnp.int32, ())
    if isinstance(cfg, DecoderConfig):
        run = partial(decoder_lm, cfg=cfg, taps=(1, 3))
        return Model(decoder_lm_spec(cfg, 3), run, ((jnp.int32, (ROWS,)), number))

    def step(p: Any, x: Any, text: Any, lengths: Any, width: Any) -> Any:
        times = jnp.full(len(x), 500.0)
        if isinstance(cfg, Flux2Config):
            ids = jnp.zeros((len(x), 3, 4), jnp.int32) + 10
            context = flux2_context(p, text, width, x[:, :3], ids, cfg, tokens=TOKENS)
            return flux2(p, x, times, context, cfg, guidance=times / 200)
        if isinstance(cfg, Krea2Config):
            return krea2(p, x, times, krea2_context(p, text, lengths, width, cfg, tokens=TOKENS), cfg)
        return z_image(p, x, times, z_image_context(p, text, lengths, width, cfg, tokens=TOKENS), cfg)

    spec, channels, text = {
        ZImageConfig: lambda: (z_image_spec(cfg), 4 * cfg.in_channels, (cfg.cap_feat_dim,)),
        Flux2Config: lambda: (flux2_spec(cfg), cfg.in_channels, (cfg.joint_attention_dim,)),
        Krea2Config: lambda: (krea2_spec(cfg), cfg.in_channels, (cfg.num_text_layers, cfg.text_hidden_dim)),
    }[type(cfg)]()
    inputs = ((jnp.bfloat16, (TOKENS, channels)), (jnp.bfloat16, (ROWS, *text)), number, number)
    return Model(spec, step, inputs)


RELEASED = [
    ZImageConfig(),
    Flux2Config(num_layers=5, num_single_layers=20),
    Krea2Config(),
    DecoderConfig(head_dim=128),
    DecoderConfig(model_type="qwen2_5_vl_text", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4),
]


@pytest.mark.parametrize("cfg", RELEASED, ids=lambda cfg: getattr(cfg, "model_type", type(cfg).__name__))
def test_every_leaf_is_read(cfg: Any) -> None:
    """At released sizes, traced in bfloat16, which comes out as bfloat16."""
    spec, run, inputs = model_of(cfg)
    arrays = [jax.ShapeDtypeStruct((2, *shape), dtype) for dtype, shape in inputs]

    def checked(*arguments: Any) -> Any:
        got = run(*arguments)
        assert got.dtype == jnp.bfloat16
        return got

    assert leaves_read(spec, checked, *arrays) == {leaf for leaf, _ in flatten(spec)}


@pytest.mark.parametrize("preset", ["qwen-image-2.1", "qwen-image-edit-2511"])
def test_every_leaf_of_a_model_that_sees_is_read(preset: str) -> None:
    """Likewise, for a reference as large as they are, whose features replace the embedding of its tokens."""
    encoder = replace(PRESETS[preset].text.encoders[0].seeing([(1024, 1024)]), tap=4)
    names, shapes = zip(*encoder.inputs(128).items(), strict=True)
    arrays = [jax.ShapeDtypeStruct((2, *shape.shape), shape.dtype) for shape in shapes]

    def run(p: Any, *arrays: Any) -> Any:
        got = encoder.encode(p, **dict(zip(names, arrays, strict=True)))
        outputs = encoder.outputs(128, jnp.dtype(jnp.bfloat16))
        assert {name: (array.shape[1:], array.dtype) for name, array in got.items()} == {
            name: (shape.shape, shape.dtype) for name, shape in outputs.items()
        }
        return got["text"]

    assert leaves_read(encoder.spec, run, *arrays) == {leaf for leaf, _ in flatten(encoder.spec)}


SMALL = [
    ZImageConfig(dim=64, n_layers=1, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=(8, 4, 4)),
    Flux2Config(in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=4, attention_head_dim=16,
                joint_attention_dim=96, axes_dims_rope=(4, 4, 4, 4)),
    Krea2Config(in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=96, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=4,
                text_num_key_value_heads=2, text_intermediate_size=48, num_layerwise_text_blocks=1,
                num_refiner_text_blocks=1, axes_dims_rope=(8, 4, 4)),
    DecoderConfig(vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8),
]  # fmt: skip


def drawn(inputs: Any) -> list[np.ndarray]:
    """Random values of two images."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(1, 20, (2, *shape)).astype(np.int32) if dtype == jnp.int32 else
        rng.standard_normal((2, *shape), np.float32)
        for dtype, shape in inputs
    ]  # fmt: skip


@pytest.mark.parametrize("cfg", SMALL, ids=lambda cfg: type(cfg).__name__)
def test_bfloat16(cfg: Any) -> None:
    """Weights and activations of 16 bits give what float32 gives but for their rounding."""
    spec, run, inputs = model_of(cfg)
    params, arrays = init_params(spec, 0), drawn(inputs)
    want = jax.jit(run)(params, *arrays)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    rounded = [jnp.asarray(array, dtype) for array, (dtype, _) in zip(arrays, inputs, strict=True)]
    error = np.asarray(jax.jit(run)(half, *rounded), np.float32) - np.asarray(want)
    assert np.sqrt(np.mean(error**2) / np.mean(np.square(want))) < 0.05


@pytest.mark.parametrize("cfg", SMALL, ids=lambda cfg: type(cfg).__name__)
def test_devices_share_heads_and_feed_forward(cfg: Any) -> None:
    """Two devices share the weights and two the batch; what comes out is that of one device."""
    spec, run, inputs = model_of(cfg)
    params, arrays = init_params(spec, 0), drawn(inputs)
    want = jax.jit(run)(params, *arrays)
    mesh: Mesh = make_mesh(jax.devices()[:4], model=2)
    split = [name for name, param in flatten(spec) if not placement(param, mesh.shape).whole]
    assert all(any(part in name for part in ("attn", "attention", "ff", "feed_forward", "mlp")) for name in split)
    assert len(split) > 6
    with compiling_on(mesh):
        placed = place_all(spec, params, mesh)
        got = jax.jit(run)(placed, *(jax.device_put(x, over_batch(mesh)) for x in arrays))
    np.testing.assert_allclose(got, want, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("cfg", SMALL, ids=lambda cfg: type(cfg).__name__)
def test_new_normalisations_scale_by_one(cfg: Any) -> None:
    """Those of Krea 2 store the difference from 1."""
    params = dict(flatten(init_params(model_of(cfg).spec, 0)))
    norms = [leaf for name, leaf in params.items() if "norm" in name and leaf.ndim == 1 and "bias" not in name]
    assert norms
    assert all((np.asarray(leaf) + krea2_model.OFFSET * isinstance(cfg, Krea2Config) == 1).all() for leaf in norms)


@pytest.mark.parametrize("cfg", [SMALL[0], SMALL[2]], ids=lambda cfg: type(cfg).__name__)
def test_a_slot_without_a_prompt_attends_to_something(cfg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need a key for each query; a server's free slots have prompts of no length, less what is dropped."""
    spec, run, inputs = model_of(cfg)
    arrays = [jnp.ones((3, *shape), dtype) for dtype, shape in inputs]
    arrays[2] = jnp.array([0, -34, 5], jnp.int32)
    seen: list[Any] = []

    def recorded(*arguments: Any, lengths: Any = None, **keywords: Any) -> Any:
        seen.extend([] if lengths is None else [lengths])
        return attention(*arguments, lengths=lengths, **keywords)

    monkeypatch.setattr(dit, "attention", recorded)
    with compiling_for("none"):  # whose blocks are not traced apart
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(spec, 0))
        got, attended = jax.jit(lambda *given: (run(*given), [*seen]))(params, *arrays)
    assert jnp.isfinite(got).all()
    assert len(attended) > 1
    assert all((lengths >= 1).all() for lengths in attended)


@pytest.mark.parametrize("cfg", SMALL, ids=lambda cfg: type(cfg).__name__)
@pytest.mark.parametrize("platform", ["none", "cpu"])
def test_attention_of_ones_own_knows_each_layer(cfg: Any, platform: str) -> None:
    """A path in the parameters for each block; blocks that a CPU's compiler shares too."""
    spec, run, inputs = model_of(cfg)
    arrays = [jax.ShapeDtypeStruct((1, *shape), dtype) for dtype, shape in inputs]
    params = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(spec, 0)))
    seen: list[str] = []

    def recorded(q: Any, k: Any, v: Any, *, where: str, **terms: Any) -> Any:
        seen.append(where)
        return plain_attention(q, k, v, **terms)

    with compiling_for(platform), using(recorded):
        jax.eval_shape(run, params, *arrays)
    names = {name.rpartition(".to_q.")[0] or name.rpartition(".q_proj.")[0] for name, _ in flatten(spec)} - {""}
    blocks = {name.rpartition(".")[0].replace("model.layers", "text_encoder.layers") for name in names}
    assert set(seen) == blocks
    assert len(seen) == len(blocks)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ZImageConfig, {"n_kv_heads": 10}),
        (ZImageConfig, {"siglip_feat_dim": 1152}),
        (ZImageConfig, {"qk_norm": False}),
        (ZImageConfig, {"all_patch_size": [2, 4]}),
        (ZImageConfig, {"axes_dims": [32, 48, 50]}),
        (Flux2Config, {"axes_dims_rope": [64, 64]}),
        (Flux2Config, {"patch_size": 2}),
        (Krea2Config, {"num_key_value_heads": 7}),
        (Krea2Config, {"axes_dims_rope": [32, 48, 50]}),
        (Krea2Config, {"_class_name": "Flux2Transformer2DModel"}),
    ],
)
def test_configs_that_are_not_supported(kind: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        kind.from_dict(changes)
