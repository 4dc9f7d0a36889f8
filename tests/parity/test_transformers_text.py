"""Language models and T5 as text encoders against transformers with the same random weights: every layer, float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from canvax.errors import CheckpointError
from canvax.models.decoder_lm import DecoderConfig, decoder_lm, decoder_lm_spec
from canvax.models.t5 import T5Config, t5, t5_spec
from canvax.params import Params

from .reference import randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, stored, to_torch

LAYERS = 4
SIZES = {
    "vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
POSITIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}

# Without a width of a head in the last: it is the model's over the number of heads.
KINDS = {
    "qwen3": ("Qwen3Model", transformers.Qwen3Config, {"head_dim": 8, "rope_theta": 1e6}),
    "qwen3_vl": ("Qwen3VLTextModel", transformers.Qwen3VLTextConfig, {"head_dim": 8, "rope_parameters": POSITIONS}),
    "qwen2_5_vl": (
        "Qwen2_5_VLTextModel", transformers.Qwen2_5_VLTextConfig,
        {"rope_parameters": POSITIONS | {"mrope_section": [1, 1, 0]}},
    ),
}  # fmt: skip

LENGTHS = np.array([7, 13], np.int32)
IDS = np.where(np.arange(13) < LENGTHS[:, None], np.random.default_rng(0).integers(1, 100, (2, 13)), 0)


def model(kind: str) -> tuple[Any, DecoderConfig]:
    name, config, changes = KINDS[kind]
    config = config(**SIZES, **changes)
    modeling = getattr(transformers, name, None) or getattr(
        transformers.models.qwen2_5_vl.modeling_qwen2_5_vl, name, None
    )
    theirs = randomise(modeling._from_config(config, attn_implementation="eager"))
    return theirs, DecoderConfig.from_dict(config.to_dict())


def weights(theirs: Any, cfg: DecoderConfig, layers: int) -> Params:
    """Of the layers that are read."""
    state = {f"model.{name}": array for name, array in stored(theirs).items()}
    unread = tuple(f"model.layers.{i}." for i in range(layers, LAYERS))
    unread += ("model.norm.",) if layers < LAYERS else ()
    return params_of(
        {name: array for name, array in state.items() if not name.startswith(unread)}, decoder_lm_spec(cfg, layers)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer(kind: str) -> None:
    """Two prompts of different lengths side by side, and their padding: FLUX.2 reads that too."""
    theirs, cfg = model(kind)
    with torch.no_grad():
        want = theirs(
            to_torch(IDS), torch.arange(13)[None] < to_torch(LENGTHS)[:, None], output_hidden_states=True
        ).hidden_states
    taps = tuple(range(LAYERS + 1))
    p = weights(theirs, cfg, LAYERS)
    run = jax.jit(partial(decoder_lm, cfg=cfg, taps=taps))
    got = run(p, IDS, LENGTHS)
    assert got.shape == (2, 13, LAYERS + 1, 16)
    for tap in taps:
        print(kind, tap, relative_error(got[:, :, tap], want[tap]))
        assert relative_error(got[:, :, tap], want[tap]) <= TOLERANCE
    assert relative_error(got[:1, :, 3], got[1:, :, 3]) > 0.1  # text matters
    run(p, np.roll(IDS, 1, 0), LENGTHS[::-1])
    assert run._cache_size() == 1


def test_a_longer_bucket_changes_nothing() -> None:
    theirs, cfg = model("qwen3")
    p = weights(theirs, cfg, 2)
    got = decoder_lm(p, IDS, LENGTHS, cfg, taps=(2,))
    longer = decoder_lm(p, np.pad(IDS, ((0, 0), (0, 5))), LENGTHS, cfg, taps=(2,))
    np.testing.assert_allclose(longer[:, :13], got, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [
    {"model_type": "llama"},
    {"hidden_act": "gelu"},
    {"use_sliding_window": True},
    {"attention_bias": True},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}},
    {"num_key_value_heads": 3},
])  # fmt: skip
def test_what_is_not_supported(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        DecoderConfig.from_dict({**SIZES, "model_type": "qwen3", "head_dim": 8, **changes})


def test_configs_before_transformers_5() -> None:
    """The base of the positions by itself, and a text half inside a model that also sees."""
    old = {**SIZES, "model_type": "qwen3", "head_dim": 8, "rope_theta": 3e6, "rope_scaling": None}
    assert DecoderConfig.from_dict(old).rope_theta == 3e6
    both = {"model_type": "qwen3_vl", "text_config": {**old, "model_type": "qwen3_vl_text"}, "vision_config": {}}
    assert DecoderConfig.from_dict(both).model_type == "qwen3_vl_text"
    flat = {**SIZES, "model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
    assert "bias" in decoder_lm_spec(DecoderConfig.from_dict(flat), 1)["model"]["layers"]["0"]["self_attn"]["q_proj"]


T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": 4, "vocab_size": 50}


def t5_model(scale: float = 1.0) -> tuple[Any, T5Config, Params]:
    """T5's encoder in both; ``scale`` is that of the last matrix of each block."""
    config = transformers.T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    theirs = randomise(transformers.T5EncoderModel(config), 1)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("wo.weight"):
                weight.mul_(scale)
            if "relative_attention_bias" in name:
                weight.mul_(20)
    cfg = T5Config.from_dict(config.to_dict())
    state = {name: array for name, array in stored(theirs).items() if name != "encoder.embed_tokens.weight"}
    return theirs, cfg, params_of(state, t5_spec(cfg))


@pytest.mark.parametrize("masked", [False, True])
def test_t5(masked: bool) -> None:
    """Of more tokens than the largest distance, with padding read or masked."""
    theirs, cfg, p = t5_model()
    ids, lengths = np.random.default_rng(0).integers(2, 50, (2, 300)), np.array([3, 290], np.int32)
    mask = to_torch((np.arange(300) < lengths[:, None]).astype(np.int64)) if masked else None
    with torch.no_grad():
        want = theirs(to_torch(ids), attention_mask=mask)[0].numpy()
    got = np.asarray(t5(p, jnp.asarray(ids, jnp.int32), cfg, lengths=jnp.asarray(lengths) if masked else None))
    read = np.arange(300) < (lengths[:, None] if masked else np.full((2, 1), 300))
    assert relative_error(got[read], want[read]) < TOLERANCE
    other = np.asarray(t5(p, jnp.asarray(ids[:, ::-1], jnp.int32), cfg))[:, ::-1]
    assert relative_error(other, want) > 0.1  # places matter


def test_t5_in_float16() -> None:
    """Sums of the feed-forward are beyond its range, as in the largest encoder."""
    _, cfg, p = t5_model(2e4)
    ids = jnp.asarray(np.random.default_rng(0).integers(2, 50, (1, 20)), jnp.int32)
    half = t5(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float16), p), ids, cfg)
    assert half.dtype == jnp.float16
    assert relative_error(half, t5(p, ids, cfg)) < 0.02
