"""Losses of LoRAs of FLUX.2, Z-Image and Krea 2 against a plain PyTorch loop over the models of diffusers and PEFT.

Both begin with the same weights and see the same latents, captions, times and noise. Text features are those of the
pipelines of diffusers; noising and target are those of its training scripts, by its scheduler.
"""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import canvax
from canvax.errors import InputError
from canvax.params import flatten, unflatten
from canvax.quantize import SCALE
from canvax.train import inputs
from canvax.train import task as tasks
from canvax.train.finetune import finetune
from canvax.train.lora import Lora, train_lora
from canvax.train.task import Subject, Training

from .families import (
    build_anima,
    build_flux,
    build_flux2,
    build_flux3,
    build_krea2,
    build_qwen,
    build_qwen_1,
    build_z_image,
    packed,
)
from .reference import nchw, psnr
from .test_training import (
    BATCH,
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


def flux(pipe: Any, noisy: Any, sigmas: Any, texts: list[str]) -> Any:
    """That of FLUX.1-dev, at a guidance scale of 1."""
    with torch.no_grad():
        text, pooled, text_ids = pipe.encode_prompt(texts, None)
    batch, channels, height, width = noisy.shape
    ids = pipe._prepare_latent_image_ids(batch, height // 2, width // 2, noisy.device, noisy.dtype)
    output = pipe.transformer(
        hidden_states=pipe._pack_latents(noisy, batch, channels, height, width), timestep=sigmas,
        guidance=torch.ones(batch), pooled_projections=pooled, encoder_hidden_states=text, txt_ids=text_ids,
        img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    squares = output.reshape(batch, height // 2, width // 2, channels, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


FAMILIES: dict[str, Any] = {
    "flux": (build_flux, diffusers.FluxPipeline, flux),
    "flux2": (build_flux2, diffusers.Flux2KleinPipeline, flux2),
    "z-image": (build_z_image, diffusers.ZImagePipeline, z_image),
    "krea-2": (build_krea2, diffusers.Krea2Pipeline, krea2),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: build(folder / name) for name, (build, _, _) in FAMILIES.items()}


def training(model: Path, folder: Path, pictures: Path, **more: Any) -> Training:
    return Training(model, pictures, folder, **{"plan": PLAN, "size": SIZE, "empty": 0.25, "times": "uniform", **more})


@pytest.mark.parametrize(
    ("family", "layers", "remat", "prior"),
    [
        ("flux2", "transformer", True, False),
        ("flux", "transformer", True, False),
        pytest.param("z-image", "all", False, True, marks=pytest.mark.weekly),
        pytest.param("krea-2", "attention", True, False, marks=pytest.mark.weekly),
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
    prior: bool,
) -> None:
    """Against PEFT's layers in the same places; then the file in diffusers and here gives one image."""
    folder, (_, kind, velocity) = checkpoints[family], FAMILIES[family]
    lora = Lora(rank=3, alpha=6.0, layers=layers, dora=family == "z-image")
    of_class = Subject(prior=pictures, prior_caption="a fruit", prior_weight=0.5) if prior else Subject()
    file = train_lora(training(folder, tmp_path / "run", pictures, remat=remat), lora, one_device(), subject=of_class)
    assert file is not None
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    modules = with_peft(pipe, seen["start"], lora)
    ours = canvax.load(folder, dtype="float32", mesh=one_device())
    schedule = pipe.scheduler
    features = {"": seen["shared"]["empty"]["text"]}
    features |= {words: rows[0] for words, rows in zip(WORDS, seen["data"]["captions"]["text"], strict=True)}
    if prior:
        (features["a fruit"],) = seen["shared"]["prior"]["captions"]["text"][0]
    assert len({row.tobytes() for row in features.values()}) == 1 + len(WORDS) + prior

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
        errors = torch.nn.functional.mse_loss(output, noise - x0, reduction="none").mean((1, 2, 3))
        return errors.reshape(-1, BATCH).mean(1) @ torch.tensor([1.0, 0.5][: 1 + prior])

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
    tensor = packed(noise) if family in ("krea-2", "flux") else nchw(noise)
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


@pytest.mark.parametrize(("build", "layer"), [
    (partial(build_flux3, distilled=False), "single_transformer_blocks.1.attn.to_q."),
    (partial(build_flux3, distilled=True), "single_transformer_blocks.1.attn.to_q."),
    (build_anima, "transformer_blocks.1.attn2.to_k."),
    (build_qwen_1, "transformer_blocks.1.attn.add_k_proj."),
    (partial(build_flux, kind="schnell"), "single_transformer_blocks.1.proj_out."),
    (partial(build_flux, kind="kontext"), "transformer_blocks.1.attn.add_k_proj."),
    (partial(build_flux, kind="chroma"), "transformer_blocks.1.attn.to_q."),
    (build_qwen, "transformer_blocks.1.attn.to_q."),
], ids=["flux3-base", "flux3", "anima", "qwen-1", "schnell", "kontext", "chroma", "qwen"])  # fmt: skip
def test_lora_of_other_families(pictures: Path, tmp_path: Path, build: Any, layer: str) -> None:
    """Two steps change the image, and the file has names of diffusers; those of Anima's adapter are not in it."""
    build(tmp_path / "model")
    run = training(tmp_path / "model", tmp_path / "run", pictures, plan=replace(PLAN, steps=2))
    file = train_lora(run, Lora(rank=3, alpha=60.0), one_device())
    assert file is not None
    names = load_file(file)
    assert any(name.startswith(f"transformer.{layer}") for name in names)
    assert all(name.startswith("transformer.") for name in names)
    pipe = canvax.load(tmp_path / "model", dtype="float32", mesh=one_device())
    call: dict[str, Any] = {"prompt": "a red apple", "height": 64, "width": 48, "num_inference_steps": 2, "seed": 1}
    plain = pipe(**call).pixels
    pipe.adapters.load("mine", file)
    assert psnr(pipe(**call).pixels, plain) < 80


@pytest.fixture
def on_devices(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many arrays of a kind are on the devices when a run begins its steps, beside those before it."""

    def count(shape: tuple[int, ...], dtype: str) -> int:
        gc.collect()
        return sum(array.shape == shape and array.dtype == dtype for array in jax.live_arrays())

    words = json.loads((checkpoints["flux2"] / "text_encoder" / "config.json").read_text())["vocab_size"]
    kinds = {"embedding": ((words, 16), "float32"), "float": ((32, 32), "float32"), "int8": ((32, 32), "int8")}
    found = {name: -count(*kind) for name, kind in kinds.items()}
    real = tasks.fit

    def fit(*arguments: Any) -> Any:
        found.update({name: found[name] + count(*kind) for name, kind in kinds.items()})
        return real(*arguments)

    monkeypatch.setattr(tasks, "fit", fit)
    return found


def test_captions_are_encoded_once(
    checkpoints: dict[str, Path], pictures: Path, on_devices: dict[str, int], tmp_path: Path
) -> None:
    """Then the language model leaves the devices."""
    run = training(checkpoints["flux2"], tmp_path, pictures, plan=replace(PLAN, steps=2))
    assert train_lora(run, Lora(), one_device())
    assert on_devices["embedding"] == 0
    assert on_devices["float"] > 0


def test_texts_are_kept_on_disk(
    checkpoints: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run has the same losses without the language model, also if they are read in each step."""

    def go(name: str, **more: Any) -> list[float]:
        words.clear()
        run = training(folder, tmp_path / name, pictures, plan=replace(PLAN, steps=2), encoded=tmp_path / "e", **more)
        train_lora(run, Lora(), one_device(), say=words.append)
        return losses(tmp_path / name / "lora")

    words, folder = list[str](), checkpoints["flux2"]
    first = go("first", prompts=("a pear",))
    assert any("encoding 6 of 7 texts" in text for text in words)  # the empty one is one of the previews', too
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "encode_captions", lambda *_: pytest.fail("texts were encoded"))
        patch.setattr(inputs, "encode_pictures", lambda *_, **__: pytest.fail("images were encoded"))
        patch.setattr(inputs, "available_bytes", lambda: 4)
        assert go("second", prompts=("a pear",)) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()} == files
    # Another language model
    folder = shutil.copytree(folder, tmp_path / "other")
    weights = folder / "text_encoder" / "model.safetensors"
    arrays = {name: 1.1 * array for name, array in load_file(weights).items()}
    save_file(arrays, weights, metadata={"format": "pt"})
    assert go("third") != first
    assert any("encoding 5 of 5 texts" in text for text in words)
    assert any("encoded images are kept" in text for text in words)


def dequantised(model: Path, folder: Path) -> Path:
    """The checkpoint with those weights that 8 bits keep exactly."""
    whole, small = (canvax.load(model, dtype="float32", quantize=kind, mesh=one_device()) for kind in (None, "int8"))
    assert whole.params is not None
    assert small.params is not None
    params = dict(flatten(whole.params["transformer"]))
    kept = dict(flatten(small.params["transformer"]))
    for name, array in kept.items():
        if name.endswith(SCALE):
            weight = name.removesuffix(SCALE) + "weight"
            params[weight] = np.asarray(kept[weight], np.float32) * np.asarray(array)
    whole.save(folder, {**whole.params, "transformer": unflatten(params)})
    return folder


def test_a_lora_over_weights_of_8_bits(
    checkpoints: dict[str, Path], pictures: Path, on_devices: dict[str, int], tmp_path: Path
) -> None:
    """Losses and factors are those over the same weights in float32."""
    lora, steps = Lora(rank=3, layers="transformer"), replace(PLAN, steps=8)
    model = dequantised(checkpoints["flux2"], tmp_path / "model")
    runs = {"int8": checkpoints["flux2"], "same": model, "whole": checkpoints["flux2"]}
    files: dict[str, Any] = {}
    for name, source in runs.items():
        small = "int8" if name == "int8" else None
        run = training(source, tmp_path / name, pictures, plan=steps, quantize=small)
        files[name] = train_lora(run, lora, one_device())
        if small:
            assert on_devices["int8"] > on_devices["float"]
    got, same, whole = (losses(tmp_path / name / "lora") for name in runs)
    np.testing.assert_allclose(got, same, rtol=1e-4)
    # A weight's error is up to 1/254 of the largest weight of its output channel.
    np.testing.assert_allclose(got, whole, rtol=0.02)
    assert max(abs(np.array(got) - whole)) > 1e-5  # the weights were quantised
    saved = [load_file(files[name]) for name in runs]
    assert saved[0].keys() == saved[1].keys() == saved[2].keys()
    for name, array in saved[0].items():
        assert (array - saved[1][name]).abs().median() < 1e-4
    files["int8"].unlink()
    with pytest.raises(InputError) as caught:
        train_lora(training(checkpoints["flux2"], tmp_path / "int8", pictures, plan=steps), lora, one_device())
    assert caught.value.argument == "quantize"


@pytest.mark.weekly
@pytest.mark.parametrize(("family", "quantize"), [("flux2", "int8"), ("z-image", None)])
def test_previews(
    checkpoints: dict[str, Path], pictures: Path, tmp_path: Path, family: str, quantize: str | None
) -> None:
    """Without the language model they are the images of the finished LoRA."""
    folder = shutil.copytree(checkpoints[family], tmp_path / "model")
    (folder / "canvax.json").write_text(json.dumps({"num_inference_steps": 2, "guidance_scale": 3.0}))
    run = training(folder, tmp_path / "run", pictures, prompts=("a red apple",), quantize=quantize)
    file = train_lora(run, Lora(rank=3, alpha=60.0, layers="transformer"), one_device())
    assert file is not None
    (preview,) = (tmp_path / "run" / "previews").glob("*.png")
    pipe = canvax.load(folder, dtype="float32", quantize=quantize, mesh=one_device())
    plain = np.asarray(pipe("a red apple", seed=0, progress=False).images[0])
    pipe.adapters.load("mine", file)
    want = np.asarray(pipe("a red apple", seed=0, progress=False).images[0])
    got = np.asarray(Image.open(preview))[: want.shape[0], : want.shape[1]]
    assert psnr(got / 255, want / 255) > 45
    assert psnr(plain / 255, want / 255) < 40


def test_features_that_do_not_fit(
    checkpoints: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk: four captions and the empty one."""
    needed = 5 * 512 * 48 * 4

    class Encoding(Exception):
        pass

    def encode(*_: Any) -> Any:
        raise Encoding

    monkeypatch.setattr(tasks, "encode_captions", encode)
    run = training(checkpoints["flux2"], tmp_path, pictures)
    monkeypatch.setattr(tasks, "disk_usage", lambda _: SimpleNamespace(free=needed))
    with pytest.raises(Encoding):
        train_lora(run, Lora(), one_device())
    monkeypatch.setattr(tasks, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(InputError) as caught:
        train_lora(run, Lora(), one_device())
    assert caught.value.argument == "pictures"


def test_times_are_those_of_the_family(
    checkpoints: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.2's are shifted for the size of images."""

    class LossMade(Exception):
        pass

    def made(text: Any, network: Any, schedule: Any, **_: Any) -> None:
        raise LossMade(schedule.shift)

    monkeypatch.setattr(tasks, "denoising_loss", made)
    shifts = {}
    for times in (None, "shifted", "uniform"):
        run = training(checkpoints["flux2"], tmp_path / str(times), pictures, times=times, encoded=tmp_path / "e")
        with pytest.raises(LossMade) as caught:
            train_lora(run, Lora(), one_device())
        (shifts[times],) = caught.value.args
    assert shifts[None] == shifts["shifted"] != shifts["uniform"] == 1


def test_what_is_not_there(checkpoints: dict[str, Path], pictures: Path, tmp_path: Path) -> None:
    run = training(checkpoints["flux2"], tmp_path / "run", pictures)
    fill = training(build_flux(tmp_path / "fill", kind="fill"), tmp_path / "run", pictures)
    with pytest.raises(InputError) as caught:
        train_lora(fill, Lora(), one_device())
    assert caught.value.argument == "model"
    for argument, begin in {
        "model": lambda: finetune(run, one_device()),
        "quantize": lambda: finetune(replace(run, quantize="int8"), one_device()),
        "gamma": lambda: train_lora(replace(run, gamma=5.0), Lora(), one_device()),
        "noise_offset": lambda: train_lora(replace(run, noise_offset=0.1), Lora(), one_device()),
        "shuffle_captions": lambda: train_lora(replace(run, shuffle_captions=True), Lora(), one_device()),
        "names": lambda: train_lora(run, Lora(names="kohya"), one_device()),
        "text": lambda: train_lora(run, Lora(text=True), one_device()),
        "dora": lambda: train_lora(run, Lora(dora=True), one_device()),
        "lokr": lambda: train_lora(run, Lora(lokr=8, names="kohya"), one_device()),
        "conv_rank": lambda: train_lora(run, Lora(conv_rank=8, layers="all"), one_device()),
        "ranks": lambda: train_lora(run, Lora(ranks={"mid_block": 8}), one_device()),
        "size": lambda: train_lora(replace(run, size=24), Lora(), one_device()),
        "caption": lambda: train_lora(run, Lora(), one_device(), subject=Subject(("a" * 2000,))),
    }.items():
        with pytest.raises(InputError) as caught:
            begin()
        assert caught.value.argument == argument
    assert not (tmp_path / "run").exists()
