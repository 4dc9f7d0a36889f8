"""Other autoencoders and schedules than a model's own, against PyTorch diffusers with the same parts."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.models.configs import TinyConfig
from canvax.models.decode import decode_images, encode_images
from canvax.models.tiny import tiny_spec
from canvax.weights import single_file
from canvax.weights.overrides import vae_of_file
from tests.support.ldm_files import ldm_vae, model, write_folder, write_single

from .peer import NEGATIVE, PROMPTS, SEEDS, SIZE, USUAL, WEIGHTS, Case, Peer, Peers, autoencoder, load, photo
from .reference import nchw, nhwc, params_of, psnr, randomise, relative_error
from .test_preview import SHAPES

SHORT: dict[str, Any] = {"num_inference_steps": 4}
CASE = Case(both=SHORT, count=1)


def kl(seed: int, **changes: Any) -> Any:
    """Another autoencoder of the same kind as that of ``build``, with other widths."""
    return randomise(autoencoder(**{"block_out_channels": (16, 32, 32, 48), "layers_per_block": 2} | changes), seed)


def tiny(seed: int = 4) -> Any:
    """As released, weaker, so that random images are no noise of black and white."""
    found = randomise(diffusers.AutoencoderTiny(), seed)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(0.6 if p.ndim > 1 else 1)
    return found


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peers(tmp_path_factory.mktemp("peers"))["sd"]


@pytest.fixture(scope="module")
def folder(peer: Peer) -> Path:
    return peer.folder


def draw(pipe: canvax.Pipeline, **changes: Any) -> canvax.Result:
    told = {"height": SIZE, "width": SIZE, "seed": SEEDS[0], "progress": False, **USUAL, **SHORT, **changes}
    return pipe(PROMPTS[0], NEGATIVE, sampler="DDIM", **told)


@pytest.mark.parametrize("name", SHAPES)
def test_tiny(name: str) -> None:
    """Its encoder, and both ways of an image."""
    theirs: Any = randomise(diffusers.AutoencoderTiny(**SHAPES[name]))
    cfg = TinyConfig.from_dict(dict(theirs.config))
    params = params_of(theirs, tiny_spec(cfg))
    images: Any = np.random.default_rng(0).random((2, 40, 48, 3), np.float32)
    with torch.no_grad():
        latents = theirs.encode(nchw(2 * images - 1)).latents
        pixels = nhwc(theirs.decode(latents).sample) / 2 + 0.5
    mean, deviation = encode_images(params, images, cfg=cfg)
    assert relative_error(mean, nhwc(latents)) < 1e-5
    np.testing.assert_array_equal(deviation, 0)
    np.testing.assert_allclose(decode_images(params, mean, cfg=cfg), np.clip(pixels, 0, 1), atol=2e-4)


@pytest.mark.weekly
def test_tiny_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile sees all that its middle is made of, so that nothing changes but rounding."""
    from canvax.models import decode

    monkeypatch.setattr(decode, "TILE", 512)
    theirs = tiny()
    cfg = TinyConfig.from_dict(dict(theirs.config))
    params = params_of(theirs, tiny_spec(cfg))
    latents: Any = np.random.default_rng(0).standard_normal((1, 72, 32, 4), np.float32)
    whole, tiled = (decode_images(params, latents, cfg=cfg, tiled=tiled) for tiled in (False, True))
    assert psnr(tiled, whole) > 60
    whole, tiled = (encode_images(params, whole, cfg=cfg, tiled=tiled)[0] for tiled in (False, True))
    assert relative_error(tiled, whole) < 0.05


@pytest.mark.slow
def test_taesd_in_a_pipeline(peer: Peer, folder: Path, tmp_path: Path) -> None:
    """As a folder of diffusers and as TAESD's own file, which numbers the decoder's layers from one."""
    theirs = tiny()
    theirs.save_pretrained(tmp_path / "taesd")
    ours = load(folder, vae=tmp_path / "taesd")
    got, _ = peer.same(dataclasses.replace(CASE, parts={"vae": theirs}), ours)
    from_image = {"cls": "StableDiffusionImg2ImgPipeline", "both": SHORT | {"image": photo(1), "strength": 0.5}}
    peer.same(dataclasses.replace(CASE, parts={"vae": theirs}, **from_image), ours)
    assert draw(ours, seed=5).compilations == 0

    original = {}
    for name, tensor in load_file(tmp_path / "taesd" / WEIGHTS).items():
        half, _, number, rest = name.split(".", 3)
        original[f"{half}.{int(number) + (half == 'decoder')}.{rest}"] = tensor
    save_file(original, tmp_path / "taesd.safetensors")
    np.testing.assert_array_equal(draw(load(folder, vae=tmp_path / "taesd.safetensors")).pixels, got.pixels)
    for half in ("encoder", "decoder"):
        own = {name.removeprefix(f"{half}."): one for name, one in original.items() if name.startswith(half)}
        save_file(own, tmp_path / f"taesd_{half}.safetensors")
        with pytest.raises(canvax.CheckpointError, match="half of a TAESD"):
            load(folder, vae=tmp_path / f"taesd_{half}.safetensors")


@pytest.mark.slow
def test_another_autoencoder(peer: Peer, folder: Path, tmp_path: Path) -> None:
    """A folder, one with a model around it, one file of either naming, in a whole model's file."""
    theirs = randomise(autoencoder(layers_per_block=2, norm_num_groups=32), 7)  # the usual groups of a bare file
    theirs.save_pretrained(tmp_path / "vae")
    got, want = peer.same(dataclasses.replace(CASE, parts={"vae": theirs}), load(folder, vae=tmp_path / "vae"))
    assert psnr(draw(peer.base).pixels, want) < 40

    state = load_file(tmp_path / "vae" / WEIGHTS)
    renamed = ldm_vae(state)
    forms = {
        "diffusers": state,
        "ldm": renamed,
        "whole": {"model.x": torch.zeros(1), **{f"first_stage_model.{name}": one for name, one in renamed.items()}},
        "trained": renamed | {"loss.logvar": torch.zeros(1), "model_ema.decay": torch.zeros(1)},
    }
    for name, arrays in forms.items():
        save_file({k: v.contiguous() for k, v in arrays.items()}, tmp_path / f"{name}.safetensors")
        found = vae_of_file(name, tmp_path / f"{name}.safetensors", {"scaling_factor": 0.18215})
        assert {one.name for one in found.arrays} >= {"decoder.conv_in.weight", "quant_conv.bias"}, name
    np.testing.assert_array_equal(draw(load(folder, vae=tmp_path / "ldm.safetensors")).pixels, got.pixels)
    shutil.copytree(tmp_path / "vae", tmp_path / "around" / "vae")
    np.testing.assert_array_equal(draw(load(folder, vae=tmp_path / "around")).pixels, got.pixels)


@pytest.mark.slow
def test_what_is_saved(folder: Path, tmp_path: Path) -> None:
    """The folder is that of the model as it was loaded, for PyTorch too."""
    tiny().save_pretrained(tmp_path / "taesd")
    ours = load(folder, vae=tmp_path / "taesd", scheduler={"timestep_spacing": "trailing"}, prediction_type="sample")
    ours.save(tmp_path / "saved")
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved", safety_checker=None)
    assert isinstance(again.vae, diffusers.AutoencoderTiny)
    assert again.scheduler.config["timestep_spacing"] == "trailing"
    assert again.scheduler.config["prediction_type"] == "sample"
    np.testing.assert_array_equal(draw(load(tmp_path / "saved")).pixels, draw(ours).pixels)
    record = draw(ours).metadata[0]
    assert record["vae"] == str(tmp_path / "taesd")
    assert (record["prediction_type"], record["scheduler"]) == ("sample", {"timestep_spacing": "trailing"})


ZERO = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


@pytest.mark.parametrize(("prediction", "changes"), [
    pytest.param("v_prediction", ZERO, marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.weekly) for case in (
        ("v_prediction", {}), (None, {"timestep_spacing": "trailing"}))),
])  # fmt: skip
def test_schedule(prediction: str | None, changes: dict[str, Any], peer: Peer, tmp_path: Path) -> None:
    told = changes | ({"prediction_type": prediction} if prediction else {})
    case = dataclasses.replace(CASE, parts={"scheduler": diffusers.DDIMScheduler.from_config(peer.config, **told)})
    ours = load(peer.folder, prediction_type=prediction, scheduler=changes)
    case = dataclasses.replace(case, sampler=None, ours={"sampler": "DDIM"})
    got, want = peer.same(case, ours)
    assert psnr(draw(peer.base).pixels, want) < 40
    scheduler = case.parts["scheduler"]
    scheduler.save_pretrained(tmp_path / "scheduler")
    for given in (scheduler, tmp_path / "scheduler", tmp_path / "scheduler" / "scheduler_config.json"):
        np.testing.assert_array_equal(draw(load(peer.folder, scheduler=given)).pixels, got.pixels)


@pytest.mark.slow
def test_single_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a 2.x predicts is a guess, which the caller may end; a file without an autoencoder is given one."""
    parts = model("sd2")
    path = write_single(tmp_path / "model.safetensors", "sd2", parts)
    # The bias by which it is guessed is not in so small a model.
    monkeypatch.setattr(single_file, "_prediction", lambda *_: ("epsilon", "a guess by the spread of a bias, 0.01"))
    with pytest.warns(canvax.HintWarning):
        guessed = load(path)
    other = {"epsilon": "v_prediction", "v_prediction": "epsilon"}[guessed.model.scheduler.schedule.prediction_type]
    said = load(path, prediction_type=other)
    assert said.model.scheduler.schedule.prediction_type == other
    assert said.model.unet.upcast_attention == (other == "v_prediction")
    assert said.model.reasons["prediction_type"] == f"{other}, as you say"
    assert guessed.model.reasons["kind"] == "Stable Diffusion 2.x: it has cond_stage_model.model"
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["info", str(path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["read_as"]["zero_snr"] == "no, as all that have no array ztsnr"

    bare = {name: one for name, one in load_file(path).items() if not name.startswith("first_stage_model.")}
    save_file(bare, tmp_path / "bare.safetensors")
    with pytest.raises(canvax.CheckpointError, match=r"an autoencoder may be given with vae="):
        load(tmp_path / "bare.safetensors")
    write_folder(tmp_path / "folder", "sd2", parts)
    whole = load(tmp_path / "bare.safetensors", vae=tmp_path / "folder", prediction_type=other)
    want = draw(load(path, prediction_type=other), height=64, width=64)
    np.testing.assert_array_equal(draw(whole, height=64, width=64).pixels, want.pixels)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"vae": 3}, "vae"),
    "nowhere": ({"vae": "./nowhere"}, "vae"),
    "pickle": ({"vae": "vae-ft-mse.ckpt"}, "canvax convert"),
    "prediction": ({"prediction_type": "v"}, "prediction_type"),
    "a sampler": ({"scheduler": "Euler"}, "scheduler"),
    "an unknown field": ({"scheduler": {"rescale_beta_zero_snr": True}}, "unknown field rescale_beta_zero_snr"),
    "a value": ({"scheduler": {"beta_start": "x"}}, "beta_start"),
    "a class": ({"scheduler": {"_class_name": "NoScheduler"}}, "NoScheduler"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, folder: Path) -> None:
    changes, expected = BAD[case]
    with pytest.raises(canvax.CanvaxError) as caught:
        load(folder, **changes)
    argument = caught.value.argument if isinstance(caught.value, canvax.InputError) else ""
    assert argument == expected or expected in str(caught.value)


def test_bad_files(folder: Path, tmp_path: Path) -> None:
    """A text encoder, a damaged one, one of other latents, one for another kind of model."""
    with pytest.raises(canvax.CheckpointError, match="not an autoencoder"):
        load(folder, vae=folder / "text_encoder" / "model.safetensors")
    with pytest.raises(canvax.CheckpointError, match="is of the class"):
        load(folder, vae=folder / "unet")
    kl(1).save_pretrained(tmp_path / "vae")
    state = load_file(tmp_path / "vae" / WEIGHTS)
    state.pop("decoder.conv_out.bias")
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(canvax.CheckpointError):
        load(folder, vae=tmp_path / "less.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "less.safetensors").read_bytes()[:5000])
    with pytest.raises(canvax.CheckpointError, match="truncated"):
        load(folder, vae=tmp_path / "cut.safetensors")
    kl(1, latent_channels=16).save_pretrained(tmp_path / "wide")
    with pytest.raises(canvax.CheckpointError, match="the VAE has 16"):
        load(folder, vae=tmp_path / "wide")
    kl(1, scaling_factor=0.13025).save_pretrained(tmp_path / "xl")
    with pytest.warns(UserWarning, match=r"scaling_factor is 0\.13025"):
        load(folder, vae=tmp_path / "xl")
    tiny().save_pretrained(tmp_path / "half")
    small = {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32)}
    small |= {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    diffusers.AutoencoderTiny(**small).save_pretrained(tmp_path / "factor")
    with pytest.raises(canvax.CheckpointError):
        load(folder, vae=tmp_path / "factor")


@pytest.mark.slow
def test_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained(tmp_path / "taesd")
    common = ["-m", str(folder), "--mesh", "data=1", "--steps", "4", "--seed", "11", "-q", "--dtype", "float32"]
    changed = ["--vae", "taesd", "--prediction-type", "v_prediction", "--zero-snr", "--sampler", "DDIM"]
    assert main(["generate", "a red apple", *common, *changed, "-o", "a.png"]) == 0
    capsys.readouterr()
    assert main(["info", "a.png"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"--vae \./taesd --prediction-type v_prediction .*--zero-snr", told)
    parts = load(folder, vae="taesd", prediction_type="v_prediction", scheduler=ZERO)
    want = parts("a red apple", num_inference_steps=4, seed=11, sampler="DDIM", progress=False).images[0]
    np.testing.assert_allclose(np.asarray(Image.open("a.png"), int), np.asarray(want, int), atol=1)
    assert main(["generate", "--from-image", "a.png", "-m", str(folder), "--mesh", "data=1", "-q", "-o", "b.png"]) == 0
    np.testing.assert_array_equal(np.asarray(Image.open("a.png")), np.asarray(Image.open("b.png")))
    assert main(["generate", "a red apple", *common, "--vae", "x.pt", "-o", "c.png"]) != 0
    assert "canvax convert" in capsys.readouterr().err
    assert main(["generate", "a red apple", *common, "--prediction-type", "v", "-o", "c.png"]) == BAD_INPUT
