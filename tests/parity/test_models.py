"""Every whole model against PyTorch with the same random weights, float32, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers

from canvax.models.clip import text_encoder, text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.unet import unet, unet_spec
from canvax.models.vae import vae_decode, vae_encode, vae_spec
from tests.support.random_numbers import normal, rng

from .peer import given
from .reference import nchw, nhwc, params_of, randomise, relative_error

TOLERANCE = 1e-4


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


LOUD = ("norm", "to_q", "to_k", "to_v", "ff.net.0", "proj_out")
"""What keeps its size in ``quiet`` models: else a branch after a normalisation would be too faint to be compared."""


def made(cls: Any, config: object, *, quiet: bool = False) -> Any:
    """Return a model of the reference.

    A quiet one has its own epsilons, and what makes the inputs of normalisations is scaled down by 1,000: their
    variances are then as small as an epsilon. With inputs of unit variance an epsilon of 1e-5 in place of 1e-6 is lost
    in the tolerance.
    """
    values = given(config)
    if not quiet:
        return randomise(cls(**values))
    return quieten(randomise(cls(**{name: value for name, value in values.items() if not name.endswith("eps")})))


def quieten(module: Any) -> Any:
    with torch.no_grad():
        for name, p in module.named_parameters():
            if not any(part in name for part in LOUD):
                p.mul_(1e-3)
    return module


def check_unet(cfg: UNetConfig, size: tuple[int, int], *, quiet: bool = False) -> None:
    reference = made(diffusers.UNet2DConditionModel, cfg, quiet=quiet)
    params = params_of(reference, unet_spec(cfg))
    x, text, t = normal(2, *size, 4), normal(2, 77, 48), np.array([981.0, 3.25], np.float32)
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(t), torch.from_numpy(text)).sample)
    got = jax.jit(unet, static_argnums=4)(params, x, t, text, cfg)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize(("name", "size"), CASES)
def test_unet(name: str, size: tuple[int, int]) -> None:
    check_unet(UNETS[name], size)


def test_epsilon_of_unet() -> None:
    """1e-5 in its residual blocks and layer normalisations, 1e-6 where a transformer begins."""
    cfg = dataclasses.replace(
        UNETS["one_layer"], block_out_channels=(32, 32), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    check_unet(cfg, (8, 8), quiet=True)


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
    "quiet": VaeConfig(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VAES)
def test_vae(name: str) -> None:
    """With 1e-6 in every group normalisation, in residual blocks, attention and heads alike."""
    cfg = VAES[name]
    reference = made(diffusers.AutoencoderKL, cfg, quiet=name == "quiet")
    params = params_of(reference, vae_spec(cfg))
    z, image = normal(2, 6, 9, 4), normal(2, 48, 72, 3)
    with torch.no_grad():
        decoded = nhwc(reference.decode(nchw(z) / cfg.scaling_factor + (cfg.shift_factor or 0.0)).sample)
        posterior = reference.encode(nchw(image)).latent_dist
    assert relative_error(jax.jit(vae_decode, static_argnums=2)(params, z, cfg), decoded) <= TOLERANCE
    mean, logvar = jax.jit(vae_encode, static_argnums=2)(params, image, cfg)
    assert relative_error(mean, nhwc(posterior.mean)) <= TOLERANCE
    assert relative_error(logvar, nhwc(posterior.logvar)) <= TOLERANCE


@pytest.mark.parametrize(("act", "skip", "quiet"), [
    ("quick_gelu", 0, False), ("quick_gelu", 1, False), ("gelu", 0, False), ("gelu", 1, False), ("quick_gelu", 0, True),
])  # fmt: skip
def test_text_encoder(act: str, skip: int, quiet: bool) -> None:
    cfg = ClipTextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=1 if quiet else 3,
        num_attention_heads=4, hidden_act=act,
    )  # fmt: skip
    reference = made(lambda **values: transformers.CLIPTextModel(transformers.CLIPTextConfig(**values)), cfg,
                     quiet=quiet)  # fmt: skip
    params = params_of(reference, text_encoder_spec(cfg), prefix="text_model.")
    ids = rng.integers(0, 300, (3, 77))
    with torch.no_grad():
        out = reference(torch.from_numpy(ids), output_hidden_states=True)
        want = reference.final_layer_norm(out.hidden_states[-(skip + 1)])
    got = jax.jit(text_encoder, static_argnums=2)(params, ids, cfg, skip=skip)
    assert relative_error(got, want.numpy()) <= TOLERANCE
