"""Every block type and every whole model against PyTorch with the same random weights, float32, on the CPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

from canvax.models import blocks  # noqa: E402
from canvax.models.clip import text_encoder, text_encoder_spec  # noqa: E402
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig  # noqa: E402
from canvax.models.unet import unet, unet_spec  # noqa: E402
from canvax.models.vae import vae_decode, vae_encode, vae_spec  # noqa: E402

from .reference import nchw, nhwc, params_of, randomise, relative_error  # noqa: E402

TOLERANCE = 1e-4
rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


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
    ),
}


@pytest.mark.parametrize("name", VAES)
def test_vae(name: str) -> None:
    cfg = VAES[name]
    reference = randomise(diffusers.AutoencoderKL(**strip(cfg)))
    params = params_of(reference, vae_spec(cfg))
    z, image = normal(2, 6, 9, 4), normal(2, 48, 72, 3)
    with torch.no_grad():
        decoded = nhwc(reference.decode(nchw(z) / cfg.scaling_factor).sample)
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
    seen = blocks.attended_text(params, jnp.asarray(text), 4)
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
