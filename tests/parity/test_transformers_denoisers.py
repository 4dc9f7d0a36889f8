"""Z-Image, FLUX.2 and Krea 2 against diffusers with the same random weights, float32: whole networks and each block."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_flux2, transformer_krea2, transformer_z_image

from canvax.models import dit
from canvax.models.dit import Rope, pack, rotary_embedding, unpack
from canvax.models.flux2 import Flux2Config, flux2, flux2_context, flux2_spec, reference_ids
from canvax.models.krea2 import Krea2Config, krea2, krea2_context, krea2_spec
from canvax.models.z_image import ZImageConfig, z_image, z_image_context, z_image_spec
from canvax.params import Params, halves_first, pairs_together
from tests.support.random_numbers import normal

from .reference import nchw, nhwc, randomise, relative_error
from .transformers_reference import TOLERANCE, params_of, stored, to_torch, unfused

TIMES = np.array([981.0, 3.25], np.float32)
LENGTHS = np.array([19, 40], np.int32)
"""Of two prompts, one that fills up to 32 rows and one that fills up to 64."""

ROWS = 64
SIZES = [(6, 10), (10, 6), (8, 16)]
"""Of latents: fifteen tokens twice, and thirty-two."""


def modules(seed: int = 0) -> dict[str, Any]:
    z_image = randomise(
        diffusers.ZImageTransformer2DModel(
            dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[8, 4, 4],
            axes_lens=[128, 32, 32], norm_eps=3e-5,
        ),
        seed,
    )  # fmt: skip
    flux2 = randomise(
        diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, num_attention_heads=2, attention_head_dim=16,
            joint_attention_dim=96, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
        ),
        seed,
    )  # fmt: skip
    krea2 = randomise(
        diffusers.Krea2Transformer2DModel(
            in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=96, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=4,
            text_num_key_value_heads=2, text_intermediate_size=48, num_layerwise_text_blocks=1,
            num_refiner_text_blocks=2, axes_dims_rope=(8, 4, 4),
        ),
        seed,
    )  # fmt: skip
    with torch.no_grad():  # text must matter
        z_image.cap_embedder[1].weight.mul_(5)
        flux2.transformer_blocks[0].attn.add_v_proj.weight.mul_(5)
        krea2.txt_in.linear_2.weight.mul_(5)
    return {"z_image": z_image, "flux2": flux2, "krea2": krea2}


MODULES = modules()


def load(name: str) -> tuple[Any, Params]:
    theirs = MODULES[name]
    kind, spec_of = {
        "z_image": (ZImageConfig, z_image_spec),
        "flux2": (Flux2Config, flux2_spec),
        "krea2": (Krea2Config, krea2_spec),
    }[name]
    cfg = kind.from_dict(dict(theirs.config))
    spec, state = spec_of(cfg), stored(theirs)
    state = unfused(state, spec) if name == "flux2" else state
    return cfg, params_of(state, spec)


@partial(jax.jit, static_argnums=5)
def our_z_image(p: Params, x: Any, text: Any, lengths: Any, width: Any, cfg: ZImageConfig) -> Any:
    context = z_image_context(p, text, lengths, width, cfg, tokens=x.shape[1])
    return z_image(p, x, jnp.asarray(TIMES), context, cfg)


def their_z_image(latents: np.ndarray, text: np.ndarray, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    images = [nchw(one[None])[0][:, None] for one in latents]
    captions = [to_torch(rows[:length]) for rows, length in zip(text, lengths, strict=True)]
    with torch.no_grad():
        out = MODULES["z_image"](images, to_torch(1 - TIMES / 1000), captions, return_dict=False)[0]
    return -nhwc(torch.stack(out)[:, :, 0])


def tokens_of(latents: np.ndarray, *, channels_first: bool) -> jax.Array:
    tokens = pack(jnp.asarray(latents), channels_first=channels_first)
    return tokens.reshape(len(latents), -1, tokens.shape[-1])


def widths(latents: np.ndarray) -> jax.Array:
    return jnp.full(len(latents), latents.shape[2] // 2, jnp.int32)


@pytest.mark.parametrize("size", SIZES)
def test_z_image(size: tuple[int, int]) -> None:
    cfg, p = load("z_image")
    latents, text = normal(2, *size, 16), normal(2, ROWS, 32)
    want = their_z_image(latents, text)
    got = our_z_image(p, tokens_of(latents, channels_first=False), text, LENGTHS, widths(latents), cfg)
    got = unpack(got.reshape(2, size[0] // 2, size[1] // 2, -1), channels_first=False)
    print("z_image", relative_error(got, want))
    assert relative_error(got, want) <= TOLERANCE
    assert relative_error(their_z_image(latents, normal(2, ROWS, 32)), want) > 0.1  # text matters


def test_z_image_compiles_once() -> None:
    """For other prompts, widths and lengths; what lies behind a prompt, and how long its bucket is, changes nothing."""
    cfg, p = load("z_image")
    latents, text = normal(2, 6, 10, 16), normal(2, ROWS, 32)
    x, width = tokens_of(latents, channels_first=False), widths(latents)
    our_z_image.clear_cache()
    got = our_z_image(p, x, text, LENGTHS, width, cfg)
    other = np.where(np.arange(ROWS)[:, None] < LENGTHS[:, None, None], text, 9.0).astype(np.float32)
    np.testing.assert_array_equal(our_z_image(p, x, other, LENGTHS, width, cfg), got)
    our_z_image(p, x, text, LENGTHS - 5, width - 2, cfg)
    assert our_z_image._cache_size() == 1
    longer = np.pad(text, ((0, 0), (0, 32), (0, 0)))
    assert relative_error(our_z_image(p, x, longer, LENGTHS, width, cfg), got) < 1e-5


@partial(jax.jit, static_argnums=6)
def our_flux2(
    p: Params, x: Any, text: Any, width: Any, references: Any, ids: Any, cfg: Flux2Config, g: Any = None
) -> Any:
    context = flux2_context(p, text, width, references, ids, cfg, tokens=x.shape[1])
    return flux2(p, x, jnp.asarray(TIMES), context, cfg, guidance=g)


def their_flux2(model: Any, x: Any, text: Any, ids: Any, guidance: Any = None) -> np.ndarray:
    text_ids = np.pad(np.arange(text.shape[1])[:, None], ((0, 0), (3, 0)))
    with torch.no_grad():
        return model(
            to_torch(x), to_torch(text), to_torch(TIMES / 1000), to_torch(ids), to_torch(text_ids), guidance,
            return_dict=False,
        )[0].numpy()  # fmt: skip


def grid(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    return np.stack([0 * y, y, x, 0 * y], axis=-1)


@pytest.mark.parametrize("sizes", [[], [(3, 4)], [(3, 4), (2, 5)]], ids=["no", "one", "two"])
def test_flux2(sizes: list[tuple[int, int]]) -> None:
    """Without, with one and with two reference images."""
    cfg, p = load("flux2")
    tokens = [(number, y, x) for number, size in enumerate(sizes, 1) for y, x in np.ndindex(size)]
    ids = np.asarray(reference_ids(jnp.asarray(np.reshape(tokens, (1, -1, 3)), jnp.int32)))[0]
    x, text, references = normal(2, 15, 16), normal(2, ROWS, 96), normal(2, len(ids), 16)
    both, both_ids = np.concatenate([x, references], 1), np.concatenate([grid(3, 5), ids])
    want = their_flux2(MODULES["flux2"], both, text, both_ids)[:, :15]
    got = our_flux2(p, x, text, np.array([5, 5], np.int32), references, np.stack([ids] * 2), cfg)
    print("flux2", relative_error(got, want))
    assert relative_error(got, want) <= TOLERANCE
    assert relative_error(their_flux2(MODULES["flux2"], both, text[::-1], both_ids)[:, :15], want) > 0.1
    if sizes:
        assert relative_error(their_flux2(MODULES["flux2"], x, text, grid(3, 5)), want) > 0.01


@pytest.mark.slow
def test_flux2_that_embeds_guidance() -> None:
    theirs = randomise(
        diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16,
            joint_attention_dim=96, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True,
        )
    )  # fmt: skip
    cfg = Flux2Config.from_dict(dict(theirs.config))
    spec = flux2_spec(cfg)
    p = params_of(unfused(stored(theirs), spec), spec)
    x, text, guidance = normal(2, 15, 16), normal(2, 8, 96), np.array([4.0, 2.5], np.float32)
    want = their_flux2(theirs, x, text, grid(3, 5), to_torch(guidance))
    none = np.zeros((2, 0, 16), np.float32), np.zeros((2, 0, 4), np.int32)
    got = our_flux2(p, x, text, np.array([5, 5], np.int32), *none, cfg, guidance)
    assert relative_error(got, want) <= TOLERANCE
    assert relative_error(our_flux2(p, x, text, np.array([5, 5], np.int32), *none, cfg, 2 * guidance), want) > 1e-3


@partial(jax.jit, static_argnums=5)
def our_krea2(p: Params, x: Any, text: Any, lengths: Any, width: Any, cfg: Krea2Config) -> Any:
    context = krea2_context(p, text, lengths, width, cfg, tokens=x.shape[1])
    return krea2(p, x, jnp.asarray(TIMES), context, cfg)


def their_krea2(x: np.ndarray, text: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    ids = np.concatenate([np.zeros((ROWS, 3)), grid(*size)[:, :3]]).astype(np.float32)
    mask = torch.arange(ROWS)[None] < to_torch(LENGTHS)[:, None]
    with torch.no_grad():
        return MODULES["krea2"](
            to_torch(x), to_torch(text), to_torch(TIMES / 1000), to_torch(ids), mask, return_dict=False
        )[0].numpy()


@pytest.mark.parametrize("size", [(3, 5), (5, 3)])
def test_krea2(size: tuple[int, int]) -> None:
    cfg, p = load("krea2")
    x, text = normal(2, 15, 16), normal(2, ROWS, 3, 32)
    want = their_krea2(x, text, size)
    got = our_krea2(p, x, text, LENGTHS, np.array([size[1]] * 2, np.int32), cfg)
    print("krea2", relative_error(got, want))
    assert relative_error(got, want) <= TOLERANCE
    assert relative_error(their_krea2(x, text[::-1], size), want) > 0.1
    assert our_krea2._cache_size() == 1


@pytest.mark.parametrize("name", ["z_image", "flux2", "krea2"])
def test_bfloat16(name: str) -> None:
    """Weights and activations of 16 bits give what float32 gives but for their rounding."""
    cfg, p = load(name)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    width = np.array([5, 5], np.int32)

    def call(p: Params, dtype: Any) -> Any:
        x = draw[0].astype(dtype)
        if name == "flux2":
            return our_flux2(p, x, draw[1].astype(dtype), width, x[:, :0], np.zeros((2, 0, 4), np.int32), cfg)
        function = our_z_image if name == "z_image" else our_krea2
        return function(p, x, draw[1].astype(dtype), LENGTHS, width, cfg)

    shapes = {"z_image": (64, (ROWS, 32)), "flux2": (16, (ROWS, 96)), "krea2": (16, (ROWS, 3, 32))}[name]
    draw = jnp.asarray(normal(2, 15, shapes[0])), jnp.asarray(normal(2, *shapes[1]))
    want, got = call(p, jnp.float32), call(half, jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    error = np.asarray(got, np.float32) - np.asarray(want)
    print(name, np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)))
    assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)) < 0.05


def angles(ids: np.ndarray, axes: tuple[int, ...], theta: float) -> tuple[Any, Rope]:
    """Rotary tables of the reference (``FluxPosEmbed``) and of canvax."""
    theirs = transformer_flux2.Flux2PosEmbed(theta, list(axes))(to_torch(ids))
    return theirs, rotary_embedding(jnp.asarray(ids)[None], axes, theta)


def test_rotary_embedding() -> None:
    """Tables and products, at positions that bfloat16 does not have."""
    ids = np.stack([np.arange(500, 530), np.arange(30), np.arange(511, 481, -1), np.zeros(30, int)], -1)
    (cos, sin), mine = angles(ids, (4, 6, 4, 2), 2000.0)
    np.testing.assert_allclose(mine.cos[0], cos[:, ::2], atol=1e-4)
    np.testing.assert_allclose(mine.sin[0], sin[:, ::2], atol=1e-4)
    q, k = normal(1, 30, 2, 16), normal(1, 30, 2, 16)
    theirs = [transformer_flux2.apply_rotary_emb(to_torch(x), (cos, sin), sequence_dim=1).numpy() for x in (q, k)]
    order = halves_first(np.arange(16), 16)
    ours = [np.asarray(dit.rotate(jnp.asarray(x[..., order]), mine)) for x in (q, k)]
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other[..., order]) <= TOLERANCE
    scores = [np.einsum("bqnd,bknd->bnqk", *both) for both in (ours, theirs)]
    assert relative_error(*scores) <= TOLERANCE


def test_the_order_of_rotary_pairs_and_back() -> None:
    x = normal(3 * 16, 5)
    turned = halves_first(x, 16)
    np.testing.assert_array_equal(turned[16:32].reshape(2, 8, 5), np.stack([x[16:32:2], x[17:32:2]]))
    np.testing.assert_array_equal(pairs_together(turned, 16), x)


IDS = np.stack([np.arange(40), np.arange(40) % 7, np.arange(40) // 7, np.arange(40) % 3], -1)

SIZES_OF_BLOCKS = ["tiny", pytest.param("released", marks=pytest.mark.slow)]
SIZES_OF_LARGER_BLOCKS = ["tiny", pytest.param("released", marks=pytest.mark.weekly)]


def small_or_large(size: str, tiny: tuple[int, ...], released: tuple[int, ...]) -> tuple[int, ...]:
    return tiny if size == "tiny" else released


def block_params(theirs: Any, spec: dict[str, Any], head_dim: int) -> Params:
    """The weights of a block by itself, below a name that FLUX.2's tables know."""
    kind = {"Flux2TransformerBlock": "transformer_blocks", "Flux2SingleTransformerBlock": "single_transformer_blocks"}
    name = kind.get(type(theirs).__name__, "block")
    state = {f"{name}.0.{key}": array for key, array in stored(randomise(theirs)).items()}
    spec = {name: {"0": spec}}
    return params_of(unfused(state, spec), spec)[name]["0"]


def chunks(x: np.ndarray, count: int) -> tuple[Any, ...]:
    return tuple(jnp.asarray(part)[:, None] for part in np.split(x, count, axis=-1))


def close(name: str, got: Any, want: Any) -> None:
    print(name, relative_error(got, want))
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("size", SIZES_OF_LARGER_BLOCKS)
def test_double_block(size: str) -> None:
    heads, head_dim = small_or_large(size, (2, 16), (24, 128))
    width = heads * head_dim
    theirs = transformer_flux2.Flux2TransformerBlock(width, heads, head_dim)
    p = block_params(theirs, dit.double_block_spec(width, heads, 3 * width), head_dim)
    rope, mine = angles(IDS, (head_dim // 4,) * 4, 2000.0)
    image, text, a, b = normal(2, 27, width), normal(2, 13, width), normal(2, 6 * width), normal(2, 6 * width)
    with torch.no_grad():
        want = theirs(*(to_torch(x) for x in (image, text, a, b)), rope)
    got = dit.double_block(p, image, text, chunks(a, 6), chunks(b, 6), mine, eps=1e-6)
    close("double block, image", got[0], want[1])
    close("double block, text", got[1], want[0])


@pytest.mark.parametrize("size", SIZES_OF_BLOCKS)
def test_parallel_block(size: str) -> None:
    heads, head_dim = small_or_large(size, (2, 16), (24, 128))
    width = heads * head_dim
    theirs = transformer_flux2.Flux2SingleTransformerBlock(width, heads, head_dim)
    p = block_params(theirs, dit.parallel_block_spec(width, heads, 3 * width), head_dim)
    rope, mine = angles(IDS, (head_dim // 4,) * 4, 2000.0)
    x, a = normal(2, 40, width), normal(2, 3 * width)
    with torch.no_grad():
        want = theirs(to_torch(x), None, to_torch(a), rope)
    close("parallel block", dit.parallel_block(p, x, chunks(a, 3), mine, eps=1e-6), want)


@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("size", SIZES_OF_BLOCKS)
def test_sandwich_block(size: str, modulated: bool) -> None:
    from canvax.models.z_image import _modulation

    heads, *axes = small_or_large(size, (4, 8, 4, 4), (30, 32, 48, 48))
    width = heads * sum(axes)
    theirs = transformer_z_image.ZImageTransformerBlock(0, width, heads, heads, 3e-5, True, modulated)
    cfg = ZImageConfig(dim=width, n_heads=heads, n_kv_heads=heads, axes_dims=tuple(axes))
    p = block_params(theirs, z_image_spec(cfg)["layers" if modulated else "context_refiner"]["0"], sum(axes))
    x, time = normal(2, 40, width), normal(2, cfg.time_width)
    mask = torch.arange(40)[None] < torch.tensor([[31], [40]])
    table = transformer_z_image.RopeEmbedder(256.0, axes, [128, 32, 32])(to_torch(IDS[:, :3]))
    with torch.no_grad():
        want = theirs(to_torch(x), mask, table[None], to_torch(time))
    modulation = _modulation(p, jnp.asarray(time)) if modulated else None
    mine = rotary_embedding(jnp.asarray(IDS[None, :, :3]), axes, 256.0)
    got = dit.sandwich_block(p, x, mine, jnp.array([31, 40]), modulation, eps=3e-5, qk_eps=1e-5)
    close("sandwich block", got, want)


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize("size", SIZES_OF_LARGER_BLOCKS)
def test_krea2_block(size: str, kind: str) -> None:
    from canvax.models.krea2 import _block

    if kind == "text":
        heads, groups, head_dim, inner = small_or_large(size, (4, 2, 8, 48), (20, 20, 128, 6912))
    else:
        heads, groups, head_dim, inner = small_or_large(size, (4, 2, 16, 96), (48, 12, 128, 16384))
    width, axes = heads * head_dim, (head_dim // 2, head_dim // 4, head_dim // 4)
    cfg = Krea2Config(
        attention_head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=groups, intermediate_size=inner,
        text_hidden_dim=width, text_num_attention_heads=heads, text_num_key_value_heads=groups,
        text_intermediate_size=inner, axes_dims_rope=axes,
    )  # fmt: skip
    x, a = normal(2, 40, width), normal(2, 1, 6 * width)
    mask = (torch.arange(40)[None] < torch.tensor([[31], [40]]))[:, None, None]
    lengths = jnp.array([31, 40])
    if kind == "text":
        theirs = transformer_krea2.Krea2TextFusionBlock(width, heads, groups, inner, 1e-5)
        p = block_params(theirs, krea2_spec(cfg)["text_fusion"]["refiner_blocks"]["0"], head_dim)
        with torch.no_grad():
            want = theirs(to_torch(x), mask)
        got = _block(p, x, None, lengths, eps=1e-5)
    else:
        theirs = transformer_krea2.Krea2TransformerBlock(width, inner, heads, groups, 1e-5)
        p = block_params(theirs, krea2_spec(cfg)["transformer_blocks"]["0"], head_dim)
        rope, mine = angles(IDS[:, :3], axes, 1000.0)
        with torch.no_grad():
            want = theirs(to_torch(x), to_torch(a), rope, mask)
        modulation = tuple(jnp.split(a.reshape(2, 6, width) + p["scale_shift_table"], 6, axis=1))
        got = _block(p, x, mine, lengths, modulation, eps=1e-5)
    close(f"krea2 block, {kind}", got, want)


@pytest.mark.parametrize("channels_first", [True, False])
def test_packing(channels_first: bool) -> None:
    """The two orders of the reference's pipelines, and back."""
    x = normal(2, 6, 10, 4)
    got = pack(jnp.asarray(x), channels_first=channels_first)
    if channels_first:
        want = nhwc(diffusers.Flux2KleinPipeline._patchify_latents(nchw(x)))
    else:
        want = np.stack([
            diffusers.ZImageTransformer2DModel._patchify_image(None, nchw(one[None])[0][:, None], 2, 1)[0].numpy()
            for one in x
        ]).reshape(got.shape)  # fmt: skip
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(unpack(got, channels_first=channels_first), x)
