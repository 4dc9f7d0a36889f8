"""Losses of every kind of training against a plain PyTorch loop over the models of diffusers and PEFT.

Both begin with the same weights and see the same latents, captions, times and noise; each has its own networks,
its own noising, gradients, clipping and AdamW.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import peft
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import canvax
from canvax.train import task as tasks
from canvax.train.controlnet import train_controlnet
from canvax.train.diffusion import draw
from canvax.train.finetune import finetune
from canvax.train.loop import LOG, Plan, read_log, step_key
from canvax.train.lora import Lora, train_lora
from canvax.train.pictures import METADATA
from canvax.train.task import Subject, Training
from canvax.train.textual_inversion import Inversion, train_inversion
from tests.support.drawing import one_device
from tests.support.small_sdxl import build as build_xl

from .peer import build
from .reference import nchw, psnr

STEPS, BATCH = 20, 2
PLAN = Plan(
    steps=STEPS, batch=BATCH, chunk=1, learning_rate=2e-3, warmup=0, final=1.0, b2=0.999, average=0.0, seed=3,
    weight_decay=0.01,
)  # fmt: skip
WORDS = ("a red apple", "two cats", "a lemon", "a blue house")
CLOSE = 1e-4
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sd"), "epsilon")


@pytest.fixture(scope="module")
def velocity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("v"), "v_prediction")


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_xl(tmp_path_factory.mktemp("xl"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    lines = []
    for i, words in enumerate(WORDS):
        for kind in ("image", "edges"):
            small = rng.integers(0, 256, (6, 4 + i, 3)).astype(np.uint8)  # no two are of one shape
            Image.fromarray(small).resize((64 + 16 * i, 96)).save(folder / f"{kind}{i}.png")
        lines.append(f'{{"file_name": "image{i}.png", "conditioning_image": "edges{i}.png", "text": "{words}"}}\n')
    (folder / METADATA).write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def masked(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures, with grey masks of three of them."""
    folder = shutil.copytree(pictures, tmp_path_factory.mktemp("masked") / "p")
    rng = np.random.default_rng(1)
    rows = [json.loads(line) for line in (folder / METADATA).read_text().splitlines()]
    for i, row in enumerate(rows[:3]):
        size = Image.open(folder / row["file_name"]).size
        small = Image.fromarray((255 * rng.integers(0, 2, (5, 5))).astype(np.uint8))
        small.resize(size, Image.Resampling.BILINEAR).save(folder / f"mask{i}.png")
        row["mask"] = f"mask{i}.png"
    for file in folder.glob("edges*"):  # DreamBooth takes every picture there is
        file.unlink()
    (folder / METADATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The data that a run trains on."""
    found: dict[str, Any] = {}
    real = tasks.fit

    def fit(start: Any, loss: Any, data: Any, samples: int, plan: Plan, session: Any, shared: Any) -> Any:
        more = {name: part for name, part in shared.items() if name != "frozen"}
        found.update(data=data, shared=more, samples=samples, plan=plan)
        found["start"] = jax.tree.map(np.array, start)
        return real(start, loss, data, samples, plan, session, shared)

    monkeypatch.setattr(tasks, "fit", fit)
    return found


def training(model: Path, folder: Path, pictures: Path, **more: Any) -> Training:
    size = 128 if model.name.startswith(("sd", "v")) else 64
    return Training(model, pictures, folder, **{"plan": PLAN, "size": size, "empty": 0.25, **more})


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / LOG)]


def draws(seen: Mapping[str, Any], step: int, empty: float = 0.25) -> Iterable[tuple[Any, Any]]:
    """What each batch of one update looks at."""
    plan: Plan = seen["plan"]
    (chosen,) = plan.indices(step, seen["samples"])[:1]
    for i, indices in enumerate(chosen):
        key = step_key(plan.seed, step)
        key = jax.random.fold_in(key, i) if plan.accumulate > 1 else key
        batch = jax.tree.map(lambda leaf, indices=indices: jax.numpy.asarray(leaf[indices]), seen["data"])
        shared = jax.tree.map(jax.numpy.asarray, seen["shared"])
        drawn = draw(batch, shared, key, 1000, focus=None, empty=empty)
        yield jax.tree.map(np.asarray, drawn), indices


def encoded(pipe: Any, captions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The UNet's conditions as in diffusers' training scripts, from token ids or features of captions."""
    if "text" in captions:
        features = {name: torch.from_numpy(array) for name, array in captions.items()}
        pooled = {"added_cond_kwargs": {"text_embeds": features["pooled"]}} if "pooled" in features else {}
        return {"encoder_hidden_states": features["text"], **pooled}
    tokens = {name: torch.from_numpy(array).long() for name, array in captions.items()}
    if len(tokens) == 1:
        return {"encoder_hidden_states": pipe.text_encoder(tokens["text_encoder"])[0]}
    found = [getattr(pipe, name)(tokens[name], output_hidden_states=True) for name in tokens]
    text = torch.cat([one.hidden_states[-2] for one in found], -1)
    return {"encoder_hidden_states": text, "added_cond_kwargs": {"text_embeds": found[-1].text_embeds}}


def loss_of(pipe: Any, drawn: Any, *, gamma: float | None = None, controlnet: Any = None) -> Any:
    """Errors of each image."""
    schedule = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    x0, noise = nchw(drawn.x0), nchw(drawn.noise)
    times = torch.from_numpy(drawn.times).long()
    told = encoded(pipe, drawn.captions)
    if "added_cond_kwargs" in told:
        told["added_cond_kwargs"]["time_ids"] = torch.from_numpy(drawn.conditions["time_ids"])
    noisy = schedule.add_noise(x0, noise, times)
    more = {}
    if controlnet is not None:
        image = nchw(drawn.conditions["control"].astype(np.float32) / 255)
        skips, middle = controlnet(noisy, times, controlnet_cond=image, return_dict=False, **told)
        more = {"down_block_additional_residuals": skips, "mid_block_additional_residual": middle}
    output = pipe.unet(noisy, times, **told, **more).sample
    velocity = schedule.config.prediction_type == "v_prediction"
    target = schedule.get_velocity(x0, noise, times) if velocity else noise
    errors = torch.nn.functional.mse_loss(output, target, reduction="none")
    if drawn.mask is not None:
        errors = errors * torch.from_numpy(drawn.mask)[:, None]
    errors = errors.mean((1, 2, 3))
    if gamma is None:
        return errors
    from diffusers.training_utils import compute_snr

    snr = compute_snr(schedule, times)
    bounded = torch.minimum(snr + velocity, torch.tensor(gamma))
    return errors * bounded / (snr + velocity)


def pytorch_losses(
    seen: Mapping[str, Any],
    parameters: Iterable[Any],
    loss: Callable[[Any], Any],
    *,
    empty: float = 0.25,
    rates: Mapping[float, Iterable[Any]] | None = None,
    after: Callable[[], None] = lambda: None,
) -> list[float]:
    """20 updates of AdamW, clipped, of a loss of what a step drew."""
    groups = [(2e-3, list(parameters)), *((rate, list(own)) for rate, own in (rates or {}).items())]
    split = [
        {"params": [p for p in own if (p.squeeze().ndim > 1) == decays], "lr": rate, "weight_decay": 0.01 * decays}
        for rate, own in groups
        for decays in (True, False)
    ]
    everything = [p for _, own in groups for p in own]
    optimizer = torch.optim.AdamW([group for group in split if group["params"]], betas=(0.9, 0.999), eps=1e-8)
    found = []
    for step in range(STEPS):
        total = 0.0
        parts = list(draws(seen, step, empty))
        for drawn, _ in parts:
            value = loss(drawn) / len(parts)
            value.backward()
            total += value.item()
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after()
        found.append(total)
    return found


def pipeline(folder: Path) -> Any:
    kind = diffusers.StableDiffusionXLPipeline if folder.name.startswith("xl") else diffusers.StableDiffusionPipeline
    pipe = kind.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if getattr(pipe, part, None) is not None:
            getattr(pipe, part).requires_grad_(False)
    return pipe


def check_losses(got: list[float], want: list[float]) -> None:
    assert len(got) == len(want) == STEPS
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)
    assert max(want) - min(want) > 100 * CLOSE  # they are not all the same


@pytest.mark.weekly
def test_the_whole_unet(xl: Path, pictures: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    """With min-SNR weights, two batches an update; of SDXL the pooled text and the sizes."""
    plan = tasks.replace(PLAN, accumulate=2)
    assert finetune(training(xl, tmp_path, pictures, plan=plan, gamma=5.0, flip=True), one_device())
    pipe = pipeline(xl)
    pipe.unet.requires_grad_(True)
    want = pytorch_losses(seen, pipe.unet.parameters(), lambda drawn: loss_of(pipe, drawn, gamma=5.0).mean())
    check_losses(losses(tmp_path / "unet"), want)
    trained = pipeline_of_result(xl, tmp_path / "model").unet.state_dict()
    for key, value in pipe.unet.state_dict().items():
        np.testing.assert_allclose(trained[key], value, atol=5e-3)
    sizes = np.asarray(seen["data"]["time_ids"])  # of the files, and where they were cropped
    np.testing.assert_array_equal(sizes[0], [96, 64, 16, 0, 64, 64])
    np.testing.assert_array_equal(sizes[3], [96, 112, 0, round((112 * 64 / 96 - 64) / 2), 64, 64])


def pipeline_of_result(folder: Path, result: Path) -> Any:
    kind = diffusers.StableDiffusionXLPipeline if folder.name.startswith("xl") else diffusers.StableDiffusionPipeline
    return kind.from_pretrained(result)


@pytest.mark.weekly
@pytest.mark.parametrize("more", [{}, {"dora": True, "conv_rank": 2, "ranks": {"mid_block": 3, "attn2": 5}}])
def test_lora(xl: Path, pictures: Path, seen: dict[str, Any], tmp_path: Path, more: dict[str, Any]) -> None:
    """Against PEFT's layers in the same places; then the file in diffusers and here gives one image."""
    folder, lora = xl, Lora(rank=4, alpha=2.0, layers="all", text=True, text_rate=5e-4, **more)
    file = train_lora(training(folder, tmp_path / "run", pictures), lora, one_device())
    assert file is not None
    assert file == tmp_path / "run" / "pytorch_lora_weights.safetensors"
    pipe = pipeline(folder)
    modules = with_peft(pipe, seen["start"], lora)
    groups: dict[float, list[Any]] = {}
    for key, module in modules.items():
        rate = lora.text_rate if key[0] != "unet" and lora.text_rate else 2e-3
        groups.setdefault(rate, []).extend(p for p in module.parameters() if p.requires_grad)
    first = groups.pop(2e-3)
    want = pytorch_losses(seen, first, lambda drawn: loss_of(pipe, drawn).mean(), rates=groups)
    check_losses(losses(tmp_path / "run" / "lora"), want)
    check_factors(load_file(file), modules)
    check_images(folder, file, pipe)


def check_factors(saved: Mapping[str, Any], modules: Mapping[tuple[str, str], Any]) -> None:
    """The arrays of a LoRA file against PEFT's layers after the same training."""
    assert len(saved) == sum(p.requires_grad for layer in modules.values() for p in layer.parameters())
    for (component, module), layer in modules.items():
        for magnitudes in layer.lora_magnitude_vector.values():
            got = saved[f"{component}.{module}.lora_magnitude_vector{'.weight' * component.startswith('text')}"]
            assert got.shape == magnitudes.weight.shape
            assert (got - magnitudes.weight).abs().max() < 1e-3
        for half in "AB":
            trained = getattr(layer, f"lora_{half}")["default"].weight.detach()
            got = saved[f"{component}.{module}.lora_{half}.weight"]
            assert got.shape == trained.shape
            # Adam gives a gradient that is nothing but rounding a step as long as any other.
            assert (got - trained).abs().median() < 1e-4


def with_peft(pipe: Any, start: Mapping[str, Any], lora: Lora) -> dict[tuple[str, str], Any]:
    """PEFT's layers with the factors that canvax begins with."""
    found = {}
    for component, of in start.items():
        network = getattr(pipe, component)
        alpha = lora.rank if lora.alpha is None else lora.alpha
        known = dict(network.named_modules())
        # Newer versions of transformers have no text_model in front.
        theirs = {name: name if name in known else name.removeprefix("text_model.") for name in of}
        exactly = "|".join(name.replace(".", r"\.") for name in theirs.values())
        ranks = {theirs[name]: len(pair["up"]) for name, pair in of.items()}
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=alpha, target_modules=f"({exactly})", use_dora=lora.dora, rank_pattern=ranks,
            alpha_pattern={name: alpha * rank / lora.rank for name, rank in ranks.items()},
        )  # fmt: skip
        peft.inject_adapter_in_model(config, network)
        named = dict(network.named_modules())
        for name, pair in of.items():
            layer = named[theirs[name]]
            down = pair["down"]
            down = down.transpose(3, 2, 0, 1) if down.ndim == 4 else down.T
            weight = layer.lora_A["default"].weight
            with torch.no_grad():
                weight.copy_(torch.from_numpy(down.copy()).reshape(weight.shape))
            assert not layer.lora_B["default"].weight.any()
            found[component, name] = layer
    return found


def check_images(folder: Path, file: Path, trained: Any = None) -> None:
    """The same image by diffusers from the file, by the networks that were trained in PyTorch, and by canvax."""
    ours, theirs = canvax.load(folder, mesh=one_device()), pipeline(folder)
    side = theirs.unet.config.sample_size
    noise = np.random.default_rng(0).standard_normal((1, side, side, 4)).astype(np.float32)
    call = {"prompt": "a red apple", "num_inference_steps": 4, "guidance_scale": 3.0}
    size = {"height": 8 * side, "width": 8 * side}

    def drawn(pipe: Any) -> np.ndarray:
        return pipe(**call, **size, latents=nchw(noise), output_type="np").images

    more = {"sampler": type(theirs.scheduler).__name__, "latents": noise, "progress": False}
    plain = ours(**call, **size, **more).pixels
    ours.adapters.load("mine", file)
    got = ours(**call, **size, **more).pixels
    theirs.load_lora_weights(file.parent, weight_name=file.name)
    assert psnr(got, drawn(theirs)) > 60
    if trained is not None:
        assert psnr(got, drawn(trained)) > 40
    assert psnr(got, plain) < 40


@pytest.mark.weekly
def test_names_of_kohya(xl: Path, pictures: Path, tmp_path: Path) -> None:
    plan = tasks.replace(PLAN, steps=6, learning_rate=0.02)
    lora = Lora(rank=2, alpha=2.0, text=True, names="kohya", trigger="apple")
    file = train_lora(training(xl, tmp_path / "style", pictures, plan=plan), lora, one_device())
    assert file is not None
    assert file == tmp_path / "style" / "style.safetensors"
    assert all(key.startswith(("lora_unet_", "lora_te")) for key in load_file(file))
    check_images(xl, file)


@pytest.mark.weekly
def test_controlnet(xl: Path, pictures: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    """Against ``ControlNetModel.from_unet``; then the folder that was written, read by diffusers."""
    result = train_controlnet(training(xl, tmp_path, pictures, flip=True), one_device())
    assert result == tmp_path / "controlnet"
    pipe = pipeline(xl)
    theirs = diffusers.ControlNetModel.from_unet(pipe.unet)
    hint = seen["start"]["controlnet"]["controlnet_cond_embedding"]
    with torch.no_grad():  # the one part that begins at random
        for key, value in theirs.controlnet_cond_embedding.state_dict().items():
            own: Any = hint
            for step in key.split("."):
                own = own[step]
            value.copy_(torch.from_numpy(own.transpose(3, 2, 0, 1).copy() if own.ndim == 4 else own))
    want = pytorch_losses(seen, theirs.parameters(), lambda drawn: loss_of(pipe, drawn, controlnet=theirs).mean())
    check_losses(losses(tmp_path / "control"), want)
    written = diffusers.ControlNetModel.from_pretrained(result)
    assert written.config.block_out_channels == list(theirs.config.block_out_channels)
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    drawn = next(iter(draws(seen, 0)))[0]
    told = encoded(pipe, {part: ids[:1] for part, ids in drawn.captions.items()})
    told["added_cond_kwargs"]["time_ids"] = torch.from_numpy(drawn.conditions["time_ids"][:1])
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for ours, own in zip(*(net(latents, 500, controlnet_cond=image, return_dict=False, **told)
                           for net in (written.eval(), theirs.eval())), strict=True):  # fmt: skip
        for one, other in zip([*ours] if isinstance(ours, list | tuple) else [ours],
                              [*own] if isinstance(own, list | tuple) else [own], strict=True):  # fmt: skip
            assert float((one - other).abs().max()) < 0.02 * float(other.abs().max())
    canvax.load(xl, mesh=one_device(), controlnet=result)


def test_textual_inversion(xl: Path, pictures: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    """Only the rows of the word move; the files load in diffusers and here."""
    inversion = Inversion("<toy>", "red apple", vectors=3)
    result = train_inversion(training(xl, tmp_path / "run", pictures), inversion, one_device())
    assert result is not None
    assert result == tmp_path / "run" / "learned_embeds.safetensors"
    pipe = pipeline(xl)
    tables = {part: getattr(pipe, part).get_input_embeddings().weight for part in seen["start"]}
    rows = {}
    first = pipe.tokenizer("red apple", add_special_tokens=False).input_ids
    tokenizers = canvax.load(xl, mesh=one_device()).model.tokenizers
    for part, table in tables.items():
        rows[part] = list(tokenizers[part].spare[:3])
        assert set(rows[part]) <= set(np.unique(seen["data"]["captions"][part]))
        with torch.no_grad():
            for place, row in enumerate(rows[part]):
                table[row] = table[first[place % len(first)]]
    parameters = [torch.nn.Parameter(table.detach()[rows[part]].clone()) for part, table in tables.items()]

    def with_rows(drawn: Any) -> Any:
        for (part, table), own in zip(tables.items(), parameters, strict=True):
            network = getattr(pipe, part).get_input_embeddings()
            network.forward = lambda ids, table=table, own=own, part=part: torch.nn.functional.embedding(
                ids, table.detach().index_put((torch.tensor(rows[part]),), own)
            )
        return loss_of(pipe, drawn).mean()

    want = pytorch_losses(seen, parameters, with_rows)
    check_losses(losses(tmp_path / "run" / "embedding"), want)
    saved = load_file(result)
    assert list(saved) == ["<toy>"]
    np.testing.assert_allclose(saved["<toy>"], parameters[0].detach(), atol=2e-3)
    second = load_file(tmp_path / "run" / "learned_embeds_2.safetensors")["<toy>"]
    np.testing.assert_allclose(second, parameters[1].detach(), atol=2e-3)
    ours = canvax.load(xl, mesh=one_device())
    assert ours.adapters.load_embedding(tmp_path / "run") == ("<toy>",)
    fresh = pipeline(xl)
    fresh.load_textual_inversion(result)
    ids = fresh.tokenizer.convert_tokens_to_ids(["<toy>", "<toy>_1", "<toy>_2"])
    np.testing.assert_array_equal(fresh.text_encoder.get_input_embeddings().weight[ids].detach(), saved["<toy>"])


@pytest.mark.weekly
def test_dreambooth(sd: Path, pictures: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    """Images of a class beside; the text encoder is trained too, at a rate of its own."""
    subject = Subject(("a photo of sks apple",), prior=pictures, prior_caption="a photo of an apple", prior_weight=0.5)
    run = training(sd, tmp_path, pictures, empty=0.0)
    assert finetune(run, one_device(), subject=subject, text=True, text_rate=5e-4)
    pipe = pipeline(sd)
    pipe.unet.requires_grad_(True)
    pipe.text_encoder.requires_grad_(True)
    rates = {5e-4: pipe.text_encoder.parameters()}

    def loss(drawn: Any) -> Any:
        errors = loss_of(pipe, drawn)
        assert len(errors) == 2 * BATCH
        return errors[:BATCH].mean() + 0.5 * errors[BATCH:].mean()

    want = pytorch_losses(seen, pipe.unet.parameters(), loss, rates=rates, empty=0.0)
    check_losses(losses(tmp_path / "unet"), want)


MASKED = {  # what is trained, and where its losses are
    "lora": ("xl", "lora"),
    "dreambooth": ("velocity", "unet"),
    "textual-inversion": ("sd", "embedding"),
}


@pytest.mark.parametrize("task", MASKED)
@pytest.mark.weekly
def test_masks(task: str, request: pytest.FixtureRequest, masked: Path, seen: dict[str, Any], tmp_path: Path) -> None:
    """Losses are weighted by masks at the size of the latents, by PyTorch's ``interpolate(mode="area")``."""
    name, part = MASKED[task]
    folder = request.getfixturevalue(name)
    run = training(folder, tmp_path, masked, flip=True, unmasked_weight=0.1, empty=0.0)
    pipe = pipeline(folder)
    if task == "textual-inversion":
        inversion = Inversion("<toy>", "red apple", vectors=2)
        assert train_inversion(run, inversion, one_device())
        table = pipe.text_encoder.get_input_embeddings().weight
        rows = canvax.load(folder, mesh=one_device()).model.tokenizers["text_encoder"].spare[:2]
        first = pipe.tokenizer("red apple", add_special_tokens=False).input_ids
        own = torch.nn.Parameter(table.detach()[first[:2]].clone())
        network, places = pipe.text_encoder.get_input_embeddings(), (torch.tensor(list(rows)),)
        network.forward = lambda ids: torch.nn.functional.embedding(ids, table.detach().index_put(places, own))
        parameters = [own]
    elif task == "lora":
        lora = Lora(rank=3)
        assert train_lora(run, lora, one_device())
        modules = with_peft(pipe, seen["start"], lora)
        parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    else:
        # Of the class no picture has a mask, or all of them have their own.
        own = Subject(("sks",), prior=masked, prior_caption="an apple", prior_weight=0.5)
        assert finetune(run, one_device(), subject=own if task == "dreambooth" else Subject())
        pipe.unet.requires_grad_(True)
        parameters = pipe.unet.parameters()
    check_masks(seen["data"]["mask"], masked, run.size or 0)

    def loss(drawn: Any) -> Any:
        errors = loss_of(pipe, drawn)
        return errors[:BATCH].mean() + (0.5 * errors[BATCH:].mean() if len(errors) > BATCH else 0)

    want = pytorch_losses(seen, parameters, loss, empty=0.0)
    got = losses(tmp_path / part)
    check_losses(got, want)
    without = {**seen, "data": {**seen["data"], "mask": np.ones_like(seen["data"]["mask"])}}
    (drawn, _), (bare, _) = next(iter(draws(seen, 0, 0.0))), next(iter(draws(without, 0, 0.0)))
    assert float(loss(bare)) > 1.05 * float(loss(drawn))  # they do count


def check_masks(got: np.ndarray, folder: Path, size: int) -> None:
    """Masks of both forms against PIL's crop and PyTorch's area."""
    for i, forms in enumerate(got):
        file = folder / f"mask{i}.png"
        if not file.is_file():
            np.testing.assert_array_equal(forms, 1)
            continue
        mask = Image.open(file)
        scale = size / min(mask.size)
        left, top = (mask.width - size / scale) / 2, (mask.height - size / scale) / 2
        cut = mask.resize((size, size), Image.Resampling.BOX, (left, top, left + size / scale, top + size / scale))
        pixels = torch.from_numpy(np.array(cut, np.float32) / 255)[None, None]
        want = torch.nn.functional.interpolate(pixels, size=forms.shape[1:], mode="area")[0, 0].clamp(0.1, 1).numpy()
        np.testing.assert_allclose(forms[0], want, atol=1e-6)
        np.testing.assert_allclose(forms[1], want[:, ::-1], atol=1e-6)
        assert 0.1 < want.mean() < 0.9
