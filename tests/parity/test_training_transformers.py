"""Losses of LoRAs of FLUX.2, Z-Image and Krea 2 against a plain PyTorch loop over the models of diffusers and PEFT.

Both begin with the same weights and see the same latents, captions, times and noise. Text features are those of the
pipelines of diffusers; noising and target are those of its training scripts, by its scheduler.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

import canvax  # noqa: E402
from canvax.errors import InputError  # noqa: E402
from canvax.train.finetune import finetune  # noqa: E402
from canvax.train.lora import Lora, train_lora  # noqa: E402
from canvax.train.task import Subject, Training  # noqa: E402

from . import test_flux2_pipeline, test_krea2_pipeline, test_z_image_pipeline  # noqa: E402
from .reference import nchw, psnr  # noqa: E402
from .test_krea2_pipeline import packed  # noqa: E402
from .test_training import (  # noqa: E402
    PLAN,
    WORDS,
    check_factors,
    check_losses,
    losses,
    one_device,
    pictures,
    pytorch_losses,
    seen,
    with_peft,
)

__all__ = ["pictures", "seen"]
SIZE = 32
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def flux2(pipe: Any, noisy: Any, sigmas: Any, texts: list[str]) -> Any:
    """Velocity [B, C, h, w] of FLUX.2 klein."""
    with torch.no_grad():
        text, text_ids = pipe.encode_prompt(texts, text_encoder_out_layers=(9, 18, 27))
    output = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy), timestep=sigmas, guidance=None, encoder_hidden_states=text,
        txt_ids=text_ids, img_ids=pipe._prepare_latent_ids(noisy), return_dict=False,
    )[0]  # fmt: skip
    return output.transpose(1, 2).reshape(noisy.shape)


def z_image(pipe: Any, noisy: Any, sigmas: Any, texts: list[str]) -> Any:
    """That of Z-Image, whose time runs the other way."""
    with torch.no_grad():
        text, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False)
    outputs = pipe.transformer(list(noisy[:, :, None]), 1 - sigmas, text, return_dict=False)[0]
    return -torch.stack(list(outputs))[:, :, 0]


def krea2(pipe: Any, noisy: Any, sigmas: Any, texts: list[str]) -> Any:
    """That of Krea 2."""
    with torch.no_grad():
        text, mask = pipe.encode_prompt(texts)
    batch, channels, height, width = noisy.shape
    ids = pipe.prepare_position_ids(text.shape[1], height // 2, width // 2, noisy.device)
    output = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy, batch, channels, height, width), timestep=sigmas,
        encoder_hidden_states=text, encoder_attention_mask=mask, position_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    squares = output.reshape(batch, height // 2, width // 2, channels, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


FAMILIES: dict[str, Any] = {
    "flux2": (test_flux2_pipeline.build, diffusers.Flux2KleinPipeline, flux2),
    "z-image": (test_z_image_pipeline.build, diffusers.ZImagePipeline, z_image),
    "krea-2": (test_krea2_pipeline.build, diffusers.Krea2Pipeline, krea2),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: build(folder / name) for name, (build, _, _) in FAMILIES.items()}


def training(model: Path, folder: Path, pictures: Path, **more: Any) -> Training:
    return Training(model, pictures, folder, **{"plan": PLAN, "size": SIZE, "empty": 0.25, **more})


@pytest.mark.parametrize(
    ("family", "layers", "remat"),
    [
        ("flux2", "transformer", True),
        pytest.param("z-image", "all", False, marks=pytest.mark.weekly),
        pytest.param("krea-2", "attention", True, marks=pytest.mark.weekly),
    ],
)
def test_lora(
    checkpoints: dict[str, Path],
    pictures: Path,
    seen: dict[str, Any],
    tmp_path: Path,
    family: str,
    layers: str,
    remat: bool,
) -> None:
    """Against PEFT's layers in the same places; then the file in diffusers and here gives one image."""
    folder, (_, kind, velocity) = checkpoints[family], FAMILIES[family]
    lora = Lora(rank=3, alpha=6.0, layers=layers)
    file = train_lora(training(folder, tmp_path / "run", pictures, remat=remat), lora, one_device())
    assert file is not None
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for part in ("transformer", "vae", "text_encoder"):
        getattr(pipe, part).requires_grad_(False)
    modules = with_peft(pipe, seen["start"], lora)
    ours = canvax.load(folder, dtype="float32", mesh=one_device())
    schedule = pipe.scheduler
    features = {"": seen["shared"]["empty"]["text"]}
    features |= {words: rows[0] for words, rows in zip(WORDS, seen["data"]["captions"]["text"], strict=True)}

    def loss_of(drawn: Any) -> Any:
        texts = [
            next(words for words, kept in features.items() if np.array_equal(kept, row))
            for row in drawn.captions["text"]
        ]
        order = len(schedule.timesteps) - 1 - torch.from_numpy(drawn.times).long()
        sigmas = (schedule.timesteps / schedule.config.num_train_timesteps)[order]
        x0, noise = nchw(drawn.x0), nchw(drawn.noise)
        level = sigmas[:, None, None, None]
        output = velocity(pipe, (1 - level) * x0 + level * noise, sigmas, texts)
        return torch.nn.functional.mse_loss(output, noise - x0)

    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    check_losses(losses(tmp_path / "run" / "lora"), pytorch_losses(seen, parameters, loss_of))
    saved = load_file(file)
    check_factors(saved, modules)
    call = {"prompt": "a red apple", "height": 64, "width": 48, "num_inference_steps": 2}
    noise = np.random.default_rng(0).standard_normal(ours.model.networks.latent_shape(1, 64, 48)).astype(np.float32)
    plain = ours(**call, latents=noise, progress=False).pixels
    ours.adapters.load("mine", file)
    got = ours(**call, latents=noise, progress=False).pixels
    theirs = kind.from_pretrained(folder)
    theirs.load_lora_weights(file.parent, weight_name=file.name)
    theirs.set_progress_bar_config(disable=True)
    tensor = packed(noise) if family == "krea-2" else nchw(noise)
    want = theirs(**call, latents=tensor, output_type="np", guidance_scale=ours.model.defaults.guidance_scale).images
    assert psnr(got, want) > 60
    assert psnr(got, plain) < 50
    again = replace(lora, start=file)
    run = training(folder, tmp_path / "again", pictures)
    fresh = canvax.load(folder, dtype="float32", mesh=one_device())
    assert fresh.params is not None
    factors = again.begin(fresh.model, dict(fresh.params), run, np.float32).trained["transformer"]
    for name, pair in factors.items():
        np.testing.assert_array_equal(pair["down"].T, saved[f"transformer.{name}.lora_A.weight"])
        assert pair["up"].any()


def test_what_is_not_there(checkpoints: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    run = training(checkpoints["flux2"], tmp_path / "run", pictures)
    for argument, begin in {
        "model": lambda: finetune(run, one_device()),
        "gamma": lambda: train_lora(replace(run, gamma=5.0), Lora(), one_device()),
        "names": lambda: train_lora(run, Lora(names="kohya"), one_device()),
        "text": lambda: train_lora(run, Lora(text=True), one_device()),
        "size": lambda: train_lora(replace(run, size=24), Lora(), one_device()),
        "caption": lambda: train_lora(run, Lora(), one_device(), subject=Subject(("a" * 2000,))),
    }.items():
        with pytest.raises(InputError) as caught:
            begin()
        assert caught.value.argument == argument
    assert not (tmp_path / "run").exists()
