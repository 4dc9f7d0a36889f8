"""Values of configs: each has a type and a range, and nothing else than canvax's own errors comes of a wrong one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.call import Call
from canvax.errors import CheckpointError
from canvax.models.configs import TinyConfig, UNetConfig, VaeConfig
from canvax.models.controlnet import ControlNet
from canvax.models.presets import SD15_TEXT, SD15_UNET, SD_VAE, SDXL_UNET
from canvax.models.vae import vae_decode, vae_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params
from canvax.pipelines.request import make_request
from canvax.samplers.config import faults_of
from tests.support.small_checkpoint import write_small_checkpoint

WRONG: list[Any] = [
    "64", -1, 0, 1.5, float("nan"), float("inf"), True, None, [], [1, 2], [True], {"a": 1}, ["x"],
    10**9, 10**5000, 1e300,
    [[1]], "x" * 5000,
]  # fmt: skip
CONFIGS = {"unet": SD15_UNET, "xl": SDXL_UNET, "vae": SD_VAE, "text": SD15_TEXT, "tiny": TinyConfig()}


def refuses(kind: Any, config: dict[str, Any]) -> bool:
    try:
        kind.from_dict(config)
    except CheckpointError as caught:
        message = str(caught)
    else:
        return False
    assert len(message) < 1500
    assert "\n" not in message
    return True


@pytest.mark.parametrize("kind", CONFIGS)
def test_wrong_values(kind: str) -> None:
    """A wrong value is an error that names the field, or a config whose parameters can be listed."""
    config = CONFIGS[kind]
    good = dataclasses.asdict(config)
    assert type(config).from_dict(json.loads(json.dumps(good))) == config
    refused = 0
    for name in [*good, *config.FIXED]:
        for value in WRONG:
            refused += refuses(type(config), good | {name: value})
    assert refused > 10 * len(good)


def test_all_faults_of_a_file_are_told_together() -> None:
    with pytest.raises(CheckpointError, match=r"norm_eps.*layers_per_block.*freq_shift"):
        UNetConfig.from_dict({"norm_eps": -1, "layers_per_block": "2", "freq_shift": "x"})


def test_a_network_of_another_class() -> None:
    assert UNetConfig.from_dict({"_class_name": "FlaxUNet2DConditionModel"}) == UNetConfig()
    for kind, name in ((UNetConfig, "UNet3DConditionModel"), (VaeConfig, "AsymmetricAutoencoderKL"), (VaeConfig, 5)):
        with pytest.raises(CheckpointError, match=f"class .*{name}.*, not "):
            kind.from_dict({"_class_name": name})


LEFT_OVER = {"decay": 0.0, "inv_gamma": 1.0, "min_decay": 0.0, "optimization_step": 37000, "power": 0.6666666666666666,
             "update_after_step": 0, "use_ema_warmup": False}  # fmt: skip


def test_left_over_fields_of_training() -> None:
    """The UNet of SDXL inpainting 0.1 was saved by diffusers' EMAModel."""
    assert UNetConfig.from_dict(LEFT_OVER) == UNetConfig()
    assert ControlNet.from_dict(LEFT_OVER) == ControlNet.from_dict({})


def test_unknown_fields() -> None:
    """What is off or empty changes nothing; a number may, also 0."""
    assert UNetConfig.from_dict({"a": None, "b": False, "c": [], "d": [None, False], "e": "", "f": {}}) == UNetConfig()
    for value in (0, 0.0, 1, True, "x", [0, 1], {"a": None}):
        with pytest.raises(CheckpointError, match="unknown field"):
            UNetConfig.from_dict({"a": value})


def test_null_means_the_default() -> None:
    """As the UNet of SDXL base 1.0 has it; a flag that is null is off, as PyTorch takes it."""
    flags = ("upcast_attention", "flip_sin_to_cos", "use_linear_projection")
    others = ("norm_eps", "attention_head_dim", "downsample_padding", "attention_type")
    assert UNetConfig.from_dict(dict.fromkeys(flags + others)) == UNetConfig(flip_sin_to_cos=False)
    with pytest.raises(CheckpointError, match="mid_block_type = null"):  # a UNet without a middle
        UNetConfig.from_dict({"mid_block_type": None})
    fields = {"upcast_attention": None, "global_pool_conditions": None, "conditioning_channels": None}
    assert ControlNet.from_dict(fields) == ControlNet.from_dict({})


def test_a_scheduler_file_with_eta() -> None:
    """An argument of another scheduler's step, which some files hold."""
    assert faults_of({"eta": 0.5}, "DDIMScheduler") == []


def test_a_sample_size_of_two(tmp_path: Path) -> None:
    """diffusers allows [height, width]; without a size in the call, images have it."""
    folder = write_small_checkpoint(tmp_path / "model", "torch")
    path = folder / "unet" / "config.json"
    config = json.loads(path.read_text())
    side = config["sample_size"]
    path.write_text(json.dumps(config | {"sample_size": [side, 2 * side]}))
    pipe = canvax.load(folder, mesh=make_mesh(jax.devices()[:1]), progress=False)
    height, width = pipe.model.native_size
    assert width == 2 * height
    request = make_request(pipe.model, Call("a"))
    assert (request.height, request.width) == (height, width)


SMALL = VaeConfig(
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(8, 8),
    norm_num_groups=4, scaling_factor=0.5,
)  # fmt: skip
MEAN, STD = (-1.5, 0.25, 0.0, 3.0), (8.5, 5.5, 0.5, 1.0)


def test_mean_and_deviation_of_latents() -> None:
    """As PyTorch's pipeline for Playground v2.5: latents * std / scaling_factor + mean goes into its decoder."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    values = {"block_out_channels": [8, 8], "norm_num_groups": 4, "latent_channels": 4,
              "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}  # fmt: skip
    theirs = diffusers.AutoencoderKL(**values).eval()
    cfg = VaeConfig.from_dict({**dict(theirs.config), "scaling_factor": 0.5, "latents_mean": MEAN, "latents_std": STD})
    params = init_params(vae_spec(cfg), 0)
    plain = dataclasses.replace(cfg, latents_mean=None, latents_std=None)
    latents = np.random.default_rng(0).standard_normal((2, 4, 4, 4), np.float32)
    scaled = torch.tensor(latents).permute(0, 3, 1, 2) * torch.tensor(STD).view(1, 4, 1, 1) / 0.5
    scaled = (scaled + torch.tensor(MEAN).view(1, 4, 1, 1)).permute(0, 2, 3, 1).numpy()
    want = vae_decode(params, scaled * 0.5, plain)
    np.testing.assert_allclose(vae_decode(params, latents, cfg), want, atol=1e-5)
    np.testing.assert_allclose(scaled, latents * cfg.scale + cfg.shift, atol=1e-6)
    with pytest.raises(CheckpointError, match="latents_std of 2 channels"):
        VaeConfig.from_dict({**dataclasses.asdict(SMALL), "latents_std": [1.0, 2.0]})
