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
from canvax.models.denoiser import evaluate
from canvax.params import flatten, unflatten
from canvax.quantize import SCALE
from canvax.train import inputs
from canvax.train import task as tasks
from canvax.train.finetune import finetune
from canvax.train.loop import LOG, read_log
from canvax.train.lora import Lora, train_lora
from canvax.train.pictures import METADATA
from canvax.train.task import Subject, Training

from .families import (
    EDIT_PIXELS,
    build_anima,
    build_flux,
    build_flux2,
    build_flux3,
    build_krea2,
    build_qwen,
    build_qwen_1,
    build_qwen_edit,
    build_z_image,
    packed,
)
from .reference import nchw, psnr, relative_error
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
SIZE, WEEKLY = 32, pytest.mark.weekly
READ: dict[str, Any] = {"text_encoder_out_layers": (1, 2, 3)}
"""Layers of the shallow language model of FLUX.2."""
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def flux2(pipe: Any, noisy: Any, sigmas: Any, texts: list[str]) -> Any:
    """Velocity [B, C, h, w] of FLUX.2 klein."""
    with torch.no_grad():
        text, text_ids = pipe.encode_prompt(texts, **READ)
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
        pytest.param("flux", "transformer", True, False, marks=WEEKLY),
        pytest.param("z-image", "all", False, True, marks=WEEKLY),
        pytest.param("krea-2", "attention", True, False, marks=WEEKLY),
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
    call: dict[str, Any] = {"prompt": "a red apple", "height": 64, "width": 48, "num_inference_steps": 2}
    noise = np.random.default_rng(0).standard_normal(ours.model.networks.latent_shape(1, 64, 48)).astype(np.float32)
    plain = ours(**call, latents=noise, progress=False).pixels
    ours.adapters.load("mine", file)
    got = ours(**call, latents=noise, progress=False).pixels
    theirs = kind.from_pretrained(folder)
    theirs.load_lora_weights(file.parent, weight_name=file.name)
    theirs.set_progress_bar_config(disable=True)
    tensor = packed(noise) if family in ("krea-2", "flux") else nchw(noise)
    call |= {"guidance_scale": ours.model.defaults.guidance_scale, **(READ if family == "flux2" else {})}
    want = theirs(**call, latents=tensor, output_type="np").images
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


@pytest.fixture(scope="module")
def edits(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures, each with two references of other sizes; the first one in a folder of its own, too."""
    folder = shutil.copytree(pictures, tmp_path_factory.mktemp("edits") / "p")
    (folder.parent / "before").mkdir()
    rng, rows = np.random.default_rng(5), [json.loads(line) for line in (folder / METADATA).read_text().splitlines()]
    for i, row in enumerate(rows):
        row["reference"] = [f"before{i}.png", f"style{i}.png"]
        for name, size in zip(row["reference"], [(32, 48), (48, 32)][:: 1 if i % 2 else -1], strict=True):
            size = size if name[0] == "s" or i else (32, 32)
            small = rng.integers(0, 256, (4, 4, 3)).astype(np.uint8)
            Image.fromarray(small).resize(size).save(folder / name)
        shutil.copy(folder / row["reference"][0], folder.parent / "before" / f"image{i}.png")
    (folder / METADATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tensors(folder: Path, names: list[str]) -> list[Any]:
    """Images in -1..1, as pipelines of diffusers encode them."""
    arrays = [np.asarray(Image.open(folder / name).convert("RGB"), np.float32) for name in names]
    return [nchw(array[None] / 127.5 - 1) for array in arrays]


def flux2_edit(pipe: Any, noisy: Any, sigmas: Any, text: str, images: list[Any]) -> Any:
    """Velocity of FLUX.2 klein for one image with references."""
    with torch.no_grad():
        features, text_ids = pipe.encode_prompt([text], **READ)
        tokens, ids = pipe.prepare_image_latents(images, 1, None, noisy.device, noisy.dtype)
    packed, own = pipe._pack_latents(noisy), pipe._prepare_latent_ids(noisy)
    output = pipe.transformer(
        hidden_states=torch.cat([packed, tokens], 1), timestep=sigmas, guidance=None, encoder_hidden_states=features,
        txt_ids=text_ids, img_ids=torch.cat([own, ids], 1), return_dict=False,
    )[0]  # fmt: skip
    return output[:, : packed.shape[1]].transpose(1, 2).reshape(noisy.shape)


def kontext_edit(pipe: Any, noisy: Any, sigmas: Any, text: str, images: list[Any]) -> Any:
    """That of FLUX.1 Kontext, which has one reference, at a guidance scale of 1."""
    channels, height, width = noisy.shape[1:]
    with torch.no_grad():
        features, pooled, text_ids = pipe.encode_prompt(text, None)
        _, tokens, own, ids = pipe.prepare_latents(
            images[0], 1, channels, 8 * height, 8 * width, noisy.dtype, noisy.device, None, latents=noisy
        )
    packed = pipe._pack_latents(noisy, 1, channels, height, width)
    output = pipe.transformer(
        hidden_states=torch.cat([packed, tokens], 1), timestep=sigmas, guidance=torch.ones(1),
        pooled_projections=pooled, encoder_hidden_states=features, txt_ids=text_ids, img_ids=torch.cat([own, ids], 0),
        return_dict=False,
    )[0][:, : packed.shape[1]]  # fmt: skip
    squares = output.reshape(1, height // 2, width // 2, channels, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


@pytest.mark.parametrize(("kind", "pipeline", "velocity"), [
    ("flux2", diffusers.Flux2KleinPipeline, flux2_edit),
    pytest.param("kontext", diffusers.FluxKontextPipeline, kontext_edit, marks=WEEKLY),
])  # fmt: skip
def test_edit_pairs(
    edits: Path,
    seen: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    pipeline: Any,
    velocity: Any,
) -> None:
    """References of several sizes; of Kontext one each, from a second folder."""
    monkeypatch.setattr("canvax.models.flux.REFERENCE_SIZES", ((48, 32), (32, 48), (32, 32)))
    folder = build_flux2(tmp_path / "model") if kind == "flux2" else build_flux(tmp_path / "model", kind="kontext")
    lora, source, second = Lora(rank=3, alpha=6.0, layers="transformer"), edits, None
    if kind == "kontext":
        source, second = shutil.copytree(edits, tmp_path / "p"), edits.parent / "before"
        rows = [json.loads(line) for line in (source / METADATA).read_text().splitlines()]
        rows = [{"file_name": row["file_name"], "text": row["text"]} for row in rows]
        (source / METADATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = training(folder, tmp_path / "run", source, references=second)
    file = train_lora(run, lora, one_device())
    assert file is not None
    pipe = pipeline.from_pretrained(folder)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    modules, schedule, latents = with_peft(pipe, seen["start"], lora), pipe.scheduler, seen["data"]["latents"]
    empty = seen["shared"]["empty"]["text"]
    names = [[f"before{i}.png", f"style{i}.png"][: 1 + (kind == "flux2")] for i in range(len(WORDS))]
    images = [tensors(edits, of_image) for of_image in names]

    def loss_of(drawn: Any) -> Any:
        order = len(schedule.timesteps) - 1 - torch.from_numpy(drawn.times).long()
        sigmas, total = (schedule.timesteps / schedule.config.num_train_timesteps)[order], torch.zeros(())
        x0, noise = nchw(drawn.x0), nchw(drawn.noise)
        for i in range(BATCH):
            (which,) = (n for n, kept in enumerate(latents) if np.array_equal(kept[0], drawn.x0[i]))
            text = "" if np.array_equal(drawn.captions["text"][i], empty) else WORDS[which]
            one, level = slice(i, i + 1), sigmas[i]
            output = velocity(pipe, (1 - level) * x0[one] + level * noise[one], sigmas[one], text, images[which])
            total = total + torch.nn.functional.mse_loss(output, noise[one] - x0[one]) / BATCH
        return total

    parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    check_losses(losses(tmp_path / "run" / "lora"), pytorch_losses(seen, parameters, loss_of))
    check_factors(load_file(file), modules)


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of references that take less time."""
    monkeypatch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
    monkeypatch.setattr("canvax.models.flux.REFERENCE_SIZES", ((48, 32), (32, 48), (32, 32)))
    for name in ("qwen_image", "qwen_image_1"):
        monkeypatch.setattr(f"canvax.models.{name}.REFERENCE_PIXELS", EDIT_PIXELS["VAE_IMAGE_SIZE"])
    monkeypatch.setattr("canvax.models.qwen25_vision.VIEWED_PIXELS", EDIT_PIXELS["CONDITION_IMAGE_SIZE"])


@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize("build", [  # those of FLUX.2 are compared with diffusers before a merge
    *(pytest.param(build, marks=WEEKLY) for build in (
        build_flux2, partial(build_flux3, distilled=False), partial(build_flux, kind="kontext"), build_qwen)),
    build_qwen_edit,
], ids=["flux2", "flux3", "kontext", "qwen", "qwen-edit"])  # fmt: skip
def test_references_are_read_as_in_a_call(
    edits: Path, seen: dict[str, Any], tmp_path: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step reads gives the output of the call with the same noise, of captions and of the empty one."""
    folder = build(tmp_path / "model")
    monkeypatch.setattr(inputs, "available_bytes", lambda: 4)  # what is on disk is read in each step
    run = training(folder, tmp_path / "run", edits, plan=replace(PLAN, steps=2))
    assert train_lora(run, Lora(rank=3), one_device())
    pipe = canvax.load(folder, dtype="float32", mesh=one_device())
    data = jax.tree.map(lambda leaf: leaf[:], seen["data"])
    denoiser: Any = pipe.model.networks.denoiser
    shape = pipe.model.networks.latent_shape(1, 64, 64)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    empty = data.get("empty") or jax.tree.map(lambda leaf: np.stack([[leaf]] * len(WORDS)), seen["shared"]["empty"])
    for captions, words in ((data["captions"], WORDS), (empty, [""] * len(WORDS))):
        for i in (0, 3):
            conditions = {name: array[i, :1] for name, array in captions.items()}
            references = {name: array[i : i + 1] for name, array in data["references"].items()}
            conditions["references"] = {**references, "tokens": references["tokens"][:, 0]}
            if denoiser.facts.embeds_guidance:
                conditions["guidance"] = np.ones(1, np.float32)
            given = jax.tree.map(np.asarray, conditions)
            velocity = evaluate(denoiser, pipe.params[denoiser.component], noise, np.float32([1000]), given)
            images = [edits / f"{name}{i}.png" for name in ("before", "style")]
            call: dict[str, Any] = {"height": 64, "width": 64, "sigmas": [1.0], "guidance_scale": 1.0}
            result = pipe(words[i], image=images, latents=noise, progress=False, **call)
            assert relative_error(noise - np.asarray(velocity), result.latents) < 1e-4


def write_edits(folder: Path, count: int, size: tuple[int, int] = (32, 32)) -> Path:
    """Images that are their references with the colours turned around, in folders ``after`` and ``before``."""
    rng = np.random.default_rng(7)
    for name in ("after", "before"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        side = size if i % 2 else size[::-1]
        small = Image.fromarray(rng.integers(0, 256, (2, 2, 3)).astype(np.uint8)).resize(side)
        small.save(folder / "before" / f"{i}.png")
        Image.fromarray(255 - np.asarray(small)).save(folder / "after" / f"{i}.jpg")
        (folder / "after" / f"{i}.txt").write_text("turn the colours around")
    return folder


@pytest.mark.weekly
def test_an_edit_is_learned(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The loss falls to less than half, and so does that of validation."""
    for i in range(2):
        for kind, shade in (("before", 255 * i), ("after", 255 * (1 - i))):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.new("RGB", (32, 32), (shade,) * 3).save(tmp_path / kind / f"{i}.png")
            (tmp_path / kind / f"{i}.txt").write_text("turn the colours around")
    run = training(
        checkpoints["flux2"], tmp_path / "run", tmp_path / "after", references=tmp_path / "before", empty=0.0,
        validation=tmp_path / "after", plan=replace(PLAN, steps=60, chunk=10, learning_rate=0.02),
    )  # fmt: skip
    assert train_lora(run, Lora(rank=4, layers="all"), one_device())
    rows = read_log(tmp_path / "run" / "lora" / LOG)
    first, last = rows[0]["loss"], [row["loss"] for row in rows if "loss" in row][-1]
    (validation,) = (row["validation_loss"] for row in rows if "validation_loss" in row)
    assert max(last, validation) < 0.5 * first, rows


@pytest.mark.usefixtures("small_references")
def test_a_stopped_run_on_pairs(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With buckets, mirrored images, a mask, and references that are read in each step; bit for bit."""
    pairs, words = write_edits(tmp_path / "p", 6, (64, 32)), list[str]()
    Image.new("L", (64, 32), 99).save(pairs / "after" / "1-masklabel.png")
    more: dict[str, Any] = {"flip": True, "buckets": True, "bucket_step": 16, "size": 48, "prompts": ("turn",)}
    more |= {"references": pairs / "before", "plan": replace(PLAN, steps=4), "encoded": tmp_path / "e"}
    whole = training(checkpoints["flux2"], tmp_path / "whole", pairs / "after", **more)
    assert train_lora(whole, Lora(rank=2), one_device(), say=words.append)
    assert any("with 1 reference image each" in text for text in words)
    assert any("encoding 12 of 12 references" in text for text in words)
    monkeypatch.setattr(inputs, "available_bytes", lambda: 4)
    monkeypatch.setattr(inputs, "encode_pictures", lambda *_, **__: pytest.fail("images were encoded"))
    parts = replace(whole, folder=tmp_path / "parts")
    for _ in range(10):
        if file := train_lora(parts, Lora(rank=2), one_device(), deadline=0.0):
            break
    assert file is not None
    assert losses(tmp_path / "parts" / "lora") == losses(tmp_path / "whole" / "lora")
    # Previews are those of a call with the first references.
    (preview,) = (tmp_path / "whole" / "previews").glob("*.png")
    pipe = canvax.load(checkpoints["flux2"], dtype="float32", mesh=one_device())
    pipe.adapters.load("mine", file)
    want = pipe("turn", image=pairs / "before" / "0.png", seed=0, progress=False).images[0]
    other = pipe("turn", image=pairs / "before" / "2.png", seed=0, progress=False).images[0]
    got = np.asarray(Image.open(preview))[: want.height, : want.width] / 255
    assert psnr(got, np.asarray(want) / 255) > 45
    assert psnr(got, np.asarray(other) / 255) < 40
    # Another reference is another run.
    Image.new("RGB", (32, 32)).save(pairs / "before" / "3.png")
    monkeypatch.undo()
    with pytest.raises(InputError) as caught:
        train_lora(replace(parts, plan=replace(PLAN, steps=9)), Lora(rank=2), one_device())
    assert "pictures" in str(caught.value)


def test_pairs_that_are_refused(checkpoints: dict[str, Path], edits: Path, pictures: Path, tmp_path: Path) -> None:
    pairs = write_edits(tmp_path / "p", 3)
    klein, before, z_image = checkpoints["flux2"], pairs / "before", checkpoints["z-image"]
    some, few = shutil.copytree(edits, tmp_path / "some"), shutil.copytree(before, tmp_path / "few")
    rows = [json.loads(line) for line in (some / METADATA).read_text().splitlines()]
    del rows[1]["reference"]
    (some / METADATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (few / "1.png").unlink()
    tiny = shutil.copytree(before, tmp_path / "tiny")
    Image.new("RGB", (4, 4)).save(tiny / "0.png")
    for name, run in {
        "references": [
            training(z_image, tmp_path / "run", pairs / "after", references=before),
            training(z_image, tmp_path / "run", edits),
            training(klein, tmp_path / "run", pairs / "after", references=tmp_path / "nowhere"),
            training(klein, tmp_path / "run", pairs / "after", references=few),
            training(klein, tmp_path / "run", pairs / "after", references=pictures),
            training(klein, tmp_path / "run", pairs / "after", references=tiny),
            training(klein, tmp_path / "run", some),
            training(klein, tmp_path / "run", edits, references=before),
            training(klein, tmp_path / "run", edits, regularisation=pictures),
            training(build_qwen(tmp_path / "qwen"), tmp_path / "run", edits, flip=True),
            training(tmp_path / "qwen", tmp_path / "run", edits, prompts=("a",)),
        ],
        "validation": [training(klein, tmp_path / "run", edits, validation=pictures)],
    }.items():
        for each in run:
            with pytest.raises(InputError) as caught:
                train_lora(each, Lora(rank=2), one_device())
            assert caught.value.argument == name, caught.value
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("build", "layer"), [
    pytest.param(partial(build_flux3, distilled=False), "single_transformer_blocks.1.attn.to_q.", marks=WEEKLY),
    (partial(build_flux3, distilled=True), "single_transformer_blocks.1.attn.to_q."),
    (build_anima, "transformer_blocks.1.attn2.to_k."),
    pytest.param(build_qwen_1, "transformer_blocks.1.attn.add_k_proj.", marks=WEEKLY),
    pytest.param(partial(build_flux, kind="schnell"), "single_transformer_blocks.1.proj_out.", marks=WEEKLY),
    pytest.param(partial(build_flux, kind="kontext"), "transformer_blocks.1.attn.add_k_proj.", marks=WEEKLY),
    pytest.param(partial(build_flux, kind="chroma"), "transformer_blocks.1.attn.to_q.", marks=WEEKLY),
    pytest.param(build_qwen, "transformer_blocks.1.attn.to_q.", marks=WEEKLY),
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


def test_texts_are_kept_on_disk(
    checkpoints: dict[str, Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run reads the same without the language model, also if they are read in each step."""
    words, folder, got = list[str](), checkpoints["flux2"], list[Any]()
    monkeypatch.setattr(tasks, "fit", lambda *arguments: (got.append(arguments[2]), ({}, False))[1])

    def go(name: str, **more: Any) -> dict[str, Any]:
        words.clear()
        run = training(folder, tmp_path / name, pictures, encoded=tmp_path / "e", **more)
        train_lora(run, Lora(), one_device(), say=words.append)
        return jax.tree.map(lambda leaf: np.asarray(leaf[:]), got.pop())

    first = go("first", prompts=("a pear",))
    assert any("encoding 6 of 7 texts" in text for text in words)  # the empty one is one of the previews', too
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "encode_captions", lambda *_: pytest.fail("texts were encoded"))
        patch.setattr(inputs, "encode_pictures", lambda *_, **__: pytest.fail("images were encoded"))
        patch.setattr(inputs, "available_bytes", lambda: 4)
        jax.tree.map(np.testing.assert_array_equal, go("second", prompts=("a pear",)), first)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()} == files
    # Another language model
    folder = shutil.copytree(folder, tmp_path / "other")
    weights = folder / "text_encoder" / "model.safetensors"
    arrays = {name: 1.1 * array for name, array in load_file(weights).items()}
    save_file(arrays, weights, metadata={"format": "pt"})
    third = go("third")
    np.testing.assert_array_equal(third["latents"], first["latents"])
    assert relative_error(third["captions"]["text"], first["captions"]["text"]) > 0.01
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
            assert on_devices["embedding"] == 0  # captions are encoded once; then the language model leaves
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
        "tag_dropout": lambda: train_lora(replace(run, tag_dropout=0.1), Lora(), one_device()),
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
