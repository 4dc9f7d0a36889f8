"""Every block type and every whole model against PyTorch with the same random weights, float32, on the CPU."""

from __future__ import annotations

import dataclasses

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from canvax.models import blocks
from canvax.models.clip import text_encoder, text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.unet import unet, unet_spec
from canvax.models.vae import vae_decode, vae_encode, vae_spec
from tests.support.random_numbers import normal, rng

from .reference import nchw, nhwc, params_of, randomise, relative_error

TOLERANCE = 1e-4


def strip(config: object, **changes: object) -> dict[str, object]:
    """Keyword arguments of the reference class from a canvax config."""
    return {k: v for k, v in dataclasses.asdict(config).items() if v is not None} | changes


SMALL_UNET = UNetConfig(
    sample_size=16,
    block_out_channels=(32, 64, 96),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=2,
    attention_head_dim=4,
    cross_attention_dim=48,
    norm_num_groups=16,
)
UNETS = {
    "sd1": SMALL_UNET,
    "sd2": dataclasses.replace(
        SMALL_UNET, attention_head_dim=(2, 4, 6), use_linear_projection=True, upcast_attention=True
    ),
    "one_layer": dataclasses.replace(SMALL_UNET, layers_per_block=1),
    "no_attention_below": dataclasses.replace(
        SMALL_UNET,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "deep_transformers": dataclasses.replace(SMALL_UNET, transformer_layers_per_block=(1, 2, 3)),
    "sine_first": dataclasses.replace(SMALL_UNET, flip_sin_to_cos=False, freq_shift=1),
}


ODD = ("one_layer", "no_attention_below", "sd2")
"""Models that every run of the tests looks at in an odd size, and at the others in an even one. The slow tests swap."""
CASES = [
    pytest.param(name, size, id=f"{name}-{kind}", marks=() if (name in ODD) == (kind == "odd") else pytest.mark.slow)
    for name in UNETS
    for kind, size in (("even", (16, 16)), ("odd", (18, 13)))
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_unet(name: str, size: tuple[int, int]) -> None:
    cfg = UNETS[name]
    reference = randomise(diffusers.UNet2DConditionModel(**strip(cfg)))
    params = params_of(reference, unet_spec(cfg))
    x, text = normal(2, *size, 4), normal(2, 77, 48)
    t = np.array([981.0, 3.25], np.float32)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(t), torch.from_numpy(text)).sample)
    got = jax.jit(unet, static_argnums=4)(params, x, t, text, cfg)
    assert relative_error(got, want) <= TOLERANCE


VAES = {
    "sd": VaeConfig(
        block_out_channels=(32, 64, 96, 96),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=16,
    ),
    "no_quant_no_attention": VaeConfig(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        norm_num_groups=8,
        shift_factor=0.6,
    ),
}


@pytest.mark.parametrize("name", VAES)
def test_vae(name: str) -> None:
    cfg = VAES[name]
    reference = randomise(diffusers.AutoencoderKL(**strip(cfg)))
    params = params_of(reference, vae_spec(cfg))
    z, image = normal(2, 6, 9, 4), normal(2, 48, 72, 3)
    with torch.no_grad():
        decoded = nhwc(reference.decode(nchw(z) / cfg.scaling_factor + (cfg.shift_factor or 0.0)).sample)
        posterior = reference.encode(nchw(image)).latent_dist
    assert relative_error(jax.jit(vae_decode, static_argnums=2)(params, z, cfg), decoded) <= TOLERANCE
    mean, logvar = jax.jit(vae_encode, static_argnums=2)(params, image, cfg)
    assert relative_error(mean, nhwc(posterior.mean)) <= TOLERANCE
    assert relative_error(logvar, nhwc(posterior.logvar)) <= TOLERANCE


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("skip", [0, 1])
def test_text_encoder(act: str, skip: int) -> None:
    cfg = ClipTextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        hidden_act=act,
    )  # fmt: skip
    reference = randomise(transformers.CLIPTextModel(transformers.CLIPTextConfig(**strip(cfg))))
    params = params_of(reference, text_encoder_spec(cfg), prefix="text_model.")
    ids = rng.integers(0, 300, (3, 77))
    with torch.no_grad():
        out = reference(torch.from_numpy(ids), output_hidden_states=True)
        want = reference.final_layer_norm(out.hidden_states[-(skip + 1)])
    got = jax.jit(text_encoder, static_argnums=2)(params, ids, cfg, skip=skip)
    assert relative_error(got, want.numpy()) <= TOLERANCE


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (32, 64)])
def test_resnet_block(inputs: int, outputs: int) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    reference = randomise(ResnetBlock2D(in_channels=inputs, out_channels=outputs, temb_channels=40, groups=8))
    params = params_of(reference, blocks.resnet_block_spec(inputs, outputs, 40))
    x, time = normal(2, 9, 7, inputs), normal(2, 40)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(time)))
    got = blocks.resnet_block(params, jnp.asarray(x), jax.nn.silu(time), groups=8, eps=1e-6)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("linear_projection", [False, True])
@pytest.mark.parametrize("upcast", [False, True])
def test_transformer(linear_projection: bool, upcast: bool) -> None:
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    reference = randomise(
        Transformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=32, num_layers=2, norm_num_groups=8,
            cross_attention_dim=24, use_linear_projection=linear_projection, upcast_attention=upcast,
        )
    )  # fmt: skip
    params = params_of(reference, blocks.transformer_spec(32, 24, 2, heads=4, linear_projection=linear_projection))
    x, text = normal(2, 5, 6, 32), normal(2, 77, 24)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(text)).sample)
    seen = blocks.transformer_kv(params, jnp.asarray(text), 4)
    got = blocks.transformer(params, jnp.asarray(x), seen, heads=4, groups=8, upcast=upcast)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("padding", [(1, 1), (0, 1)])
def test_downsample(padding: tuple[int, int]) -> None:
    from diffusers.models.downsampling import Downsample2D

    reference = randomise(Downsample2D(16, use_conv=True, out_channels=16, padding=padding[0], name="op"))
    params = {"conv": params_of(reference.conv, blocks.downsample_spec(16)["conv"])}
    x = normal(2, 9, 8, 16)
    with torch.no_grad():
        want = nhwc(reference(nchw(x)))
    assert relative_error(blocks.downsample(params, x, padding=padding), want) <= TOLERANCE


@pytest.mark.parametrize("size", [(10, 14), (9, 13)])
def test_upsample(size: tuple[int, int]) -> None:
    from diffusers.models.upsampling import Upsample2D

    reference = randomise(Upsample2D(16, use_conv=True, out_channels=16))
    params = params_of(reference, blocks.upsample_spec(16))
    x = normal(2, 5, 7, 16)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), output_size=size))
    assert relative_error(blocks.upsample(params, jnp.asarray(x), *size), want) <= TOLERANCE


# Epsilons


LOUD = ("norm", "to_q", "to_k", "to_v", "ff.net.0", "proj_out")
"""What keeps its size in :func:`make_quiet`: else a branch after a normalisation would be too faint to be compared."""


def make_quiet(module: torch.nn.Module) -> torch.nn.Module:
    """Scale what makes the inputs of normalisations down by 1,000: their variances are then as small as an epsilon.

    With inputs of unit variance an epsilon of 1e-5 in place of 1e-6 is lost in the tolerance.
    """
    with torch.no_grad():
        for name, p in module.named_parameters():
            if not any(part in name for part in LOUD):
                p.mul_(1e-3)
    return module


def without_epsilon(config: object) -> dict[str, object]:
    """Arguments of the reference class, whose own epsilons are then used."""
    return {name: value for name, value in strip(config).items() if not name.endswith("eps")}


def test_epsilon_of_unet() -> None:
    """1e-5 in its residual blocks and layer normalisations, 1e-6 where a transformer begins."""
    cfg = dataclasses.replace(
        UNETS["one_layer"], block_out_channels=(32, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    reference = make_quiet(randomise(diffusers.UNet2DConditionModel(**without_epsilon(cfg))))
    params = params_of(reference, unet_spec(cfg))
    x, text, t = normal(1, 8, 8, 4), normal(1, 7, 48), np.array([500.0], np.float32)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(t), torch.from_numpy(text)).sample)
    got = jax.jit(unet, static_argnums=4)(params, x, t, text, cfg)
    assert relative_error(got, want) <= TOLERANCE


def test_epsilon_of_transformer() -> None:
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    reference = make_quiet(
        randomise(
            Transformer2DModel(
                num_attention_heads=4, attention_head_dim=8, in_channels=32, norm_num_groups=8, cross_attention_dim=24
            )
        )
    )
    params = params_of(reference, blocks.transformer_spec(32, 24, 1, heads=4, linear_projection=False))
    x, text = 1e-3 * normal(2, 5, 6, 32), normal(2, 7, 24)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(text)).sample)
    seen = blocks.transformer_kv(params, jnp.asarray(text), 4)
    got = blocks.transformer(params, jnp.asarray(x), seen, heads=4, groups=8, upcast=False)
    # Of what the block adds: x itself passes beside it.
    assert relative_error(got - x, want - x) <= TOLERANCE


def test_epsilon_of_vae() -> None:
    """1e-6 in every group normalisation, in residual blocks, attention and heads alike."""
    cfg = dataclasses.replace(VAES["sd"], block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
                              up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1)  # fmt: skip
    reference = make_quiet(randomise(diffusers.AutoencoderKL(**without_epsilon(cfg))))
    params = params_of(reference, vae_spec(cfg))
    z, image = normal(1, 4, 5, 4), normal(1, 8, 10, 3)
    with torch.no_grad():
        decoded = nhwc(reference.decode(nchw(z) / cfg.scaling_factor).sample)
        mean = nhwc(reference.encode(nchw(image)).latent_dist.mean)
    assert relative_error(jax.jit(vae_decode, static_argnums=2)(params, z, cfg), decoded) <= TOLERANCE
    assert relative_error(jax.jit(vae_encode, static_argnums=2)(params, image, cfg)[0], mean) <= TOLERANCE


def test_epsilon_of_text_encoder() -> None:
    cfg = ClipTextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    reference = make_quiet(randomise(transformers.CLIPTextModel(transformers.CLIPTextConfig(**without_epsilon(cfg)))))
    params = params_of(reference, text_encoder_spec(cfg), prefix="text_model.")
    ids = rng.integers(0, 300, (2, 77))
    with torch.no_grad():
        want = reference(torch.from_numpy(ids)).last_hidden_state
    got = jax.jit(text_encoder, static_argnums=2)(params, ids, cfg)
    assert relative_error(got, want.numpy()) <= TOLERANCE
