"""The images of a training: buckets of shapes, repeats, and what is kept on disk."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import compress, permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.errors import CheckpointError, HintWarning, InputError
from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.parallel.mesh import make_mesh
from canvax.parallel.place import on_host
from canvax.samplers.schedule import NoiseSchedule, make_betas
from canvax.train import diffusion, inputs, kohya, task
from canvax.train.buckets import bucket_of_update, bucket_sizes, nearest_bucket
from canvax.train.dataset import Dataset
from canvax.train.diffusion import denoising_data, denoising_loss, draw, validation_errors
from canvax.train.finetune import finetune
from canvax.train.inputs import Item, evened, held_out, items_of, varied
from canvax.train.kept import Store
from canvax.train.loop import LOG, STATE, Plan, Session, fit, read_log
from canvax.train.lora import Lora, train_lora
from canvax.train.pictures import open_pictures
from canvax.train.session import batch_indices, differences
from canvax.train.state import save_state
from canvax.train.task import Subject, Training
from canvax.train.validation import Validation
from canvax.weights.lora import trigger_words
from canvax.weights.safetensors import ArrayToSave, open_safetensors, read_metadata, write_safetensors
from tests.support.bundled import VOCABULARY
from tests.support.refusals import refused
from tests.support.small_checkpoint import SHALLOW_UNET, TEXT, UNET, write_small_checkpoint
from tests.support.small_sdxl import build as build_xl

PLAN = Plan(steps=6, batch=2, chunk=2, warmup=0, final=1.0, average=0.0, learning_rate=1e-3)
SCHEDULE = NoiseSchedule.from_betas(make_betas("scaled_linear", 0.00085, 0.012, 1000), "v_prediction")
SHAPES = {"a": (96, 32), "b": (90, 30), "c": (32, 96), "d": (60, 60), "e": (64, 60)}
"""Width and height of images."""


def one() -> Any:
    return make_mesh(jax.devices()[:1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("model") / "sd", unet=SHALLOW_UNET)


def write_shapes(folder: Path, **shapes: tuple[int, int]) -> Path:
    """Random images of these widths and heights."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, (width, height) in (shapes or SHAPES).items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"picture {name}")
    return folder


def training(model: Path, pictures: Path, folder: Path, **more: Any) -> Training:
    return Training(model, pictures, folder, **{"plan": PLAN, "size": 64, **more})


BUCKETS: dict[str, Any] = {"buckets": True, "bucket_step": 16}


# Buckets


def test_sizes_of_buckets_are_those_of_kohya() -> None:
    """``make_bucket_resolutions((512, 512), 256, 1024, 64)``, by hand."""
    short_of = {512: 512, 576: 448, 640: 384, 704: 320, 768: 320, 832: 256, 896: 256, 960: 256, 1024: 256}
    assert set(bucket_sizes(512)) == set(short_of.items()) | {pair[::-1] for pair in short_of.items()}
    for size, step in ((1024, 64), (640, 32)):
        sizes = bucket_sizes(size, step)
        assert all(side % step == 0 for sides in sizes for side in sides)
        assert all(0.75 * size**2 < math.prod(sides) <= size**2 for sides in sizes)
    assert nearest_bucket((640, 384), bucket_sizes(512)) == (640, 384)
    assert nearest_bucket((1000, 1100), bucket_sizes(512)) == (512, 512)
    assert nearest_bucket((3000, 4000), bucket_sizes(512)) == (448, 576)
    for limits in ({"least": 1024}, {"most": 256}, {"step": 1024}):
        with refused("buckets"):
            bucket_sizes(512, **limits)


def test_all_samples_of_all_buckets_come_equally_often() -> None:
    """Wherever a run is resumed; a bucket smaller than a batch waits until it fills one."""
    counts, batch = [7, 1, 4], 4
    updates = [bucket_of_update(3, update, batch, counts) for update in range(12 * len(counts))]
    assert [bucket_of_update(3, update, batch, counts) for update in range(12 * len(counts))] == updates
    assert all(earlier == sum(b == bucket for b, _ in updates[:i]) for i, (bucket, earlier) in enumerate(updates))
    first = Counter(bucket for bucket, _ in updates[:12])  # four epochs of three updates
    assert first == {0: 7, 1: 1, 2: 4}
    assert [bucket for bucket, _ in updates] != [bucket_of_update(4, i, batch, counts)[0] for i in range(len(updates))]
    # A single bucket has the order that it has without buckets.
    assert [bucket_of_update(3, i, 4, [10]) for i in range(9)] == [(0, i) for i in range(9)]


def parts() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((count, size), np.float32)} for count, size in ((5, 3), (9, 2), (3, 4))]


def bucket_loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    noise = jax.random.normal(key, samples["x"].shape)
    return jnp.square(p["w"].mean() * jnp.float32(samples["x"].shape[1]) - samples["x"] - noise).mean(), {}


def learn(folder: Path, plan: Plan = PLAN, mesh: Any = None, **more: Any) -> tuple[Any, bool]:
    mesh = mesh or one()
    data = Dataset(parts(), plan.batches, mesh, plan.seed)
    return fit({"w": np.ones(64, np.float32)}, bucket_loss, data, len(data), plan, Session(folder, mesh=mesh, **more))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_killed_twice_with_buckets_is_bitwise_the_same(
    tmp_path: Path, accumulate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(PLAN, steps=9, accumulate=accumulate)
    whole, finished = learn(tmp_path / "whole", plan)
    assert finished
    assert {f"compiling program {number}" in capsys.readouterr().err for number in (2,)} == {True}
    for stop in (2, 5):

        def die(step: int, values: Any, images: Any, stop: int = stop) -> None:
            if step == stop + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            learn(tmp_path / "parts", plan, log=die, save_every=0.0)
    parted, finished = learn(tmp_path / "parts", plan)
    assert finished
    np.testing.assert_array_equal(parted["w"], whole["w"])
    assert (tmp_path / "parts" / STATE).read_bytes() == (tmp_path / "whole" / STATE).read_bytes()
    assert all("images_per_second" in line for line in read_log(tmp_path / "whole" / LOG))
    losses = [[line["loss"] for line in read_log(tmp_path / run / LOG)] for run in ("whole", "parts")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_devices_learn_from_buckets_what_one_does(tmp_path: Path, fsdp: bool) -> None:
    plan = replace(PLAN, batch=8)
    alone, _ = learn(tmp_path / "1", plan)
    shared, _ = learn(tmp_path / "2", plan, make_mesh(jax.devices()[:2]), fsdp=fsdp)
    np.testing.assert_allclose(shared["w"], alone["w"], rtol=1e-5)


def test_samples_repeat_as_often_as_they_should() -> None:
    part = {"x": np.arange(3, dtype=np.float32)}
    data = Dataset([part], (2,), one(), 0, [[1, 2, 5]])
    assert len(data) == 8
    for epoch in range(2):
        seen = np.concatenate([data(4 * epoch + step)["x"] for step in range(4)])
        assert Counter(seen.tolist()) == {0.0: 1, 1.0: 2, 2.0: 5}
    for argument, more in {"repeats": {"repeats": [[1, 0, 1]]}, "batch": {"batch": (2,), "mesh": make_mesh()}}.items():
        with refused(argument):
            replace(data, **more)
    np.testing.assert_array_equal(Dataset([part], (3,), one(), 5).chosen(1)[1], batch_indices(5, 1, 1, 3, 3)[0])


def fitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``train`` gives to ``fit``, which does nothing."""
    got: dict[str, Any] = {}

    def fit(start: Any, loss: Any, data: Any, samples: int, plan: Any, session: Any, shared: Any) -> Any:
        got.update(start=start, data=data, samples=samples, shared=shared, loss=loss, session=session)
        return {}, False

    monkeypatch.setattr(task, "fit", fit)
    return got


def test_images_in_their_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, crops and SDXL's conditions."""
    got, words = fitted(monkeypatch), list[str]()
    pictures = write_shapes(tmp_path / "p")
    run = training(build_xl(tmp_path / "xl"), pictures, tmp_path / "run", **BUCKETS)
    train_lora(run, Lora(rank=2), one(), say=words.append)
    data = got["data"]
    shapes = {part["latents"].shape[2:4]: part for part in data.parts}
    factor = 64 // max(high for high, wide in shapes if high == wide)
    assert {(high * factor, wide * factor): len(part["latents"]) for (high, wide), part in shapes.items()} == {
        (32, 96): 2, (96, 32): 1, (64, 64): 2,
    }  # fmt: skip
    wide = shapes[32 // factor, 96 // factor]
    np.testing.assert_array_equal(wide["time_ids"], [[32, 96, 0, 0, 32, 96], [30, 90, 0, 0, 32, 96]])
    square = shapes[64 // factor, 64 // factor]
    np.testing.assert_array_equal(square["time_ids"], [[60, 60, 0, 0, 64, 64], [60, 64, 0, 2, 64, 64]])
    assert "3 buckets (width x height): 96 x 32 (2), 64 x 64 (2), 32 x 96 (1)" in words[0]
    with refused("bucket_step"):
        train_lora(replace(run, folder=tmp_path / "other", bucket_step=8), Lora(rank=2), one())


# Repeats and images of the class


def test_repeats_and_captions_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    got, words = fitted(monkeypatch), list[str]()
    write_shapes(tmp_path / "p" / "3_ink cat", a=(64, 64), b=(64, 64))
    write_shapes(tmp_path / "p" / "1_ink", c=(64, 64))
    (tmp_path / "p" / "3_ink cat" / "a.txt").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error", HintWarning)
        train_lora(training(model, tmp_path / "p", tmp_path / "run"), Lora(rank=2), one(), say=words.append)
    assert got["samples"] == len(got["data"]) == 7
    rows = [got["data"].chosen(step)[1] for step in range(7)]  # two epochs of batches of two
    assert Counter(np.concatenate(rows).tolist()) == {0: 2, 1: 6, 2: 6}  # in the order of names
    assert "1_ink 1 times, 3_ink cat 3 times" in words[0]
    folder = open_pictures(tmp_path / "p")
    assert [list(texts) for texts in folder.captions] == [["picture c"], ["ink cat"], ["picture b"]]
    (tmp_path / "p" / "1_ink" / "c.txt").rename(tmp_path / "p" / "c.txt")
    (tmp_path / "p" / "1_ink" / "c.png").rename(tmp_path / "p" / "d.png")
    with pytest.raises(InputError, match=r"d\.png has no caption"):
        open_pictures(tmp_path / "p")


def test_images_of_the_class_come_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    got, words = fitted(monkeypatch), list[str]()
    write_shapes(tmp_path / "p" / "5_ink", a=(96, 32), b=(64, 64))
    write_shapes(tmp_path / "reg" / "1_cat", c=(96, 32), d=(64, 64), e=(60, 60))
    more = {**BUCKETS, "regularisation": tmp_path / "reg", "regularisation_weight": 0.5}
    run = training(model, tmp_path / "p", tmp_path / "run", **more)
    train_lora(run, Lora(rank=2), one(), say=words.append)
    data = got["data"]
    assert len(data) == 20
    weights = np.concatenate([part["weight"] for part in data.parts])
    repeats = np.concatenate([np.asarray(of_each) for of_each in data.repeats])
    assert sorted(zip(weights.tolist(), repeats.tolist(), strict=True)) == [(0.5, i) for i in (3, 3, 4)] + [(1, 5)] * 2
    assert "3 of the class, 3 to 4 times each" in words[0]
    few = [Item(open_pictures(tmp_path / "p"), 0, (1, 1), (1, 1), "", repeats=4)] * 5
    assert [item.repeats for item in evened(few, 10)] == [4, 4, 4]
    with refused("regularisation"):
        train_lora(replace(run, regularisation=tmp_path / "none"), Lora(rank=2), one())
    with refused("regularisation"):
        run = replace(run, buckets=False, bucket_step=64, folder=tmp_path / "other")
        task.train(run, Lora(rank=2), one(), subject=Subject(prior=tmp_path / "reg"))


def test_a_weight_multiplies_the_loss_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "encode_text", lambda *_, **__: {})
    monkeypatch.setattr(diffusion, "unet", lambda p, x, *_, **__: jnp.zeros_like(x))
    latents = np.random.default_rng(0).standard_normal((4, 1, 8, 8, 4), np.float32)
    reader = {"text_encoder": lambda texts, *, length: np.zeros((len(texts), length), np.int32)}

    def loss(*weight: float) -> tuple[Any, Any]:
        given = {"weight": np.array(weight, np.float32)} if weight else {}
        samples, shared = denoising_data(reader, latents, [["a"]] * 4, 8, **given)
        found = denoising_loss(clip_encoders(TEXT), UNET, SCHEDULE, gamma=None)
        return found({"unet": {}}, *jax.tree.map(jnp.asarray, (samples, shared)), jax.random.key(0))

    whole, logged = loss()
    parts = [loss(*row)[0] for row in np.eye(4)]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)
    np.testing.assert_allclose(loss(0, 0, 3, 0)[0], 3 * parts[2], rtol=1e-6)
    assert loss(0, 0, 3, 0)[1]["mse"] == logged["mse"]


def test_the_file_has_the_settings_of_its_run(tmp_path: Path) -> None:
    more = {"regularisation_weight": 0.5, **BUCKETS}
    run = training(tmp_path, tmp_path, tmp_path, regularisation=str(tmp_path / "reg"), **more)
    settings = json.loads(task.recorded(run, {})["canvax.training"])
    wanted = {"steps": 6, "batch": 2, "learning_rate": 1e-3, "size": 64, "regularisation": "reg"}
    assert settings | more | wanted == settings
    assert not settings.keys() & {"empty", "gamma", "model", "pictures", "folder"}


def test_kohya_and_a1111_know_its_facts(tmp_path: Path) -> None:
    """By the names of sd-scripts, and in the forms that A1111 reads."""
    write_shapes(tmp_path / "p" / "3_ink", a=(96, 32), b=(64, 64))
    write_shapes(tmp_path / "p" / "moss", c=(64, 64))
    for name, text in {"3_ink/a": "Ink, a cat", "3_ink/b": "ink,a dog, ink", "moss/c": "moss"}.items():
        (tmp_path / "p" / f"{name}.txt").write_text(text)
    write_shapes(tmp_path / "reg", d=(64, 64))
    fitted = partial(nearest_bucket, sizes=bucket_sizes(64, 16))
    own, of_class = (items_of(open_pictures(tmp_path / name), fitted) for name in ("p", "reg"))
    facts = kohya.facts_of_images([*own, *(replace(item, repeats=7) for item in of_class)], 64, PLAN)
    tables = {name: json.loads(text) for name, text in facts.items() if text.startswith("{")}
    ink = {"ink": 2, "a cat": 1, "a dog": 1}
    assert tables["ss_tag_frequency"] == {"3_ink": ink, "moss": {"moss": 1}}
    assert tables["ss_dataset_dirs"]["3_ink"] == {"n_repeats": 3, "img_count": 2}
    buckets = [(each["resolution"], each["count"]) for each in tables["ss_bucket_info"]["buckets"].values()]
    assert sorted(buckets) == [([64, 64], 11), ([96, 32], 3)]
    assert (facts["ss_num_train_images"], facts["ss_num_reg_images"], facts["ss_num_epochs"]) == ("7", "7", "1")
    assert facts["ss_resolution"] == "(64, 64)"
    assert trigger_words(facts)[0] == "ink"


@pytest.mark.parametrize(
    ("width", "prediction", "version", "architecture"),
    [
        (768, "epsilon", "sd_v1", "stable-diffusion-v1/lora"),
        (1024, "epsilon", "sd_v2", "stable-diffusion-v2-512/lora"),
        (1024, "v_prediction", "sd_v2_v", "stable-diffusion-v2-768-v/lora"),
        (2048, "epsilon", "sdxl_base_v1-0", "stable-diffusion-xl-v1-base/lora"),
        (32, "epsilon", None, None),
    ],
)
def test_its_base_model_is_stated(width: int, prediction: Any, version: Any, architecture: Any, tmp_path: Path) -> None:
    """A1111 hides LoRAs that do not state the version of the loaded model."""
    denoiser = UNetDenoiser(replace(UNET, cross_attention_dim=width))
    scheduler = SimpleNamespace(schedule=replace(SCHEDULE, prediction_type=prediction))
    model: Any = SimpleNamespace(networks=SimpleNamespace(denoiser=denoiser), scheduler=scheduler)
    run = training(tmp_path, tmp_path, tmp_path, tag_dropout=0.2, plan=replace(PLAN, accumulate=3))
    facts = kohya.facts_of_settings(run, model)
    assert (facts.get("ss_base_model_version"), facts.get("modelspec.architecture")) == (version, architecture)
    assert facts.get("ss_v2") == (None if version is None else str(width == 1024))
    assert facts["modelspec.prediction_type"] == ("v" if prediction == "v_prediction" else "epsilon")
    wanted = {"ss_total_batch_size": "6", "ss_caption_tag_dropout_rate": "0.2", "ss_lr_scheduler": "constant"}
    assert facts | wanted == facts


# References


@pytest.mark.slow
def test_references_of_pictures(tmp_path: Path, model: Path) -> None:
    """By the column or by a second folder; only a LoRA reads the column, and Stable Diffusion refuses it."""
    pictures = write_shapes(tmp_path / "p" / "train")
    names = {name: [f"{name}.png", "a.png"][: 1 + (name != "a")] for name in SHAPES}
    rows = [{"file_name": f"{name}.png", "text": name, "reference": of_each} for name, of_each in names.items()]
    rows[0]["reference"] = "a.png"
    (pictures / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = write_shapes(tmp_path / "before" / "train")
    for file in [*before.iterdir()]:
        if file.suffix == ".txt":
            file.unlink()
        elif file.stem != "a":
            Image.open(file).save(file.with_suffix(".webp"), lossless=True)
            file.unlink()
    both = open_pictures(tmp_path / "p", reference_column="reference")
    assert [list(files) for files in both.references] == [[f"train/{n}" for n in of_each] for of_each in names.values()]
    assert [size for size, _ in both.pair(1)] == [SHAPES["b"][::-1], SHAPES["a"][::-1]]
    assert [len(part) for part in both.select([2, 0]).references] == [2, 1]
    assert not open_pictures(tmp_path / "p").references
    second = open_pictures(tmp_path / "p", references=tmp_path / "before")
    for i, name in enumerate(SHAPES):
        (image,), (found,) = second.reference(i), second.pair(i)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(pictures / f"{name}.png")))
        assert found[0] == SHAPES[name][::-1]
    with refused("references"):
        open_pictures(tmp_path / "p", references=tmp_path / "before", reference_column="reference")
    (before / "c.webp").unlink()
    with refused("references"):
        open_pictures(tmp_path / "p", references=tmp_path / "before")
    run = training(model, tmp_path / "p", tmp_path / "run")
    with refused("references"):
        train_lora(run, Lora(rank=2), one())
    assert finetune(replace(run, plan=replace(PLAN, steps=1)), one())


# What is kept on disk


@pytest.mark.slow
def test_what_changed_is_encoded_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, sizes = fitted(monkeypatch), list[int]()
    real = inputs.encode_pictures

    def encode(p: Any, pixels: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(pixels))
        return real(p, pixels, *rest, **more)

    def go(model: Path, **more: Any) -> tuple[int, np.ndarray]:
        sizes.clear()
        run = training(
            model, pictures, tmp_path / f"run{len(list(tmp_path.iterdir()))}", encoded=tmp_path / "e", **more
        )
        train_lora(run, Lora(rank=2), one())
        return sum(sizes), got["data"]["latents"][:]

    monkeypatch.setattr(inputs, "encode_pictures", encode)
    pictures = write_shapes(tmp_path / "p", a=(64, 64), b=(64, 60))
    count, first = go(model)
    assert count == 2
    count, again = go(model)
    assert count == 0
    np.testing.assert_array_equal(again, first)
    monkeypatch.setattr(inputs, "available_bytes", lambda: 4)
    count, again = go(model)  # read when they are indexed
    assert count == 0
    np.testing.assert_array_equal(again, first)
    count, both = go(model, flip=True)
    assert (count, both.shape[1]) == (2, 2)
    np.testing.assert_array_equal(both[:, :1], first)
    Image.new("RGB", (64, 60)).save(pictures / "b.png")
    count, other = go(model)
    assert count == 1
    np.testing.assert_array_equal(other[:1], first[:1])
    assert go(model, size=32)[0] == 2
    vae = shutil.copytree(model, tmp_path / "model")
    weights = vae / "vae" / "diffusion_pytorch_model.safetensors"
    arrays = {entry.name: entry.read() * np.float32(1.1) for entry in open_safetensors(weights)}
    saved = [ArrayToSave(name, array.shape, array.dtype, partial(np.asarray, array)) for name, array in arrays.items()]
    write_safetensors(weights, saved, {"format": "pt"})
    assert go(vae)[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("xl", "learn"),
    [(xl, partial(train_lora, lora=Lora(rank=2))) for xl in (False, True)] + [(False, finetune)],
)
def test_captions_are_encoded_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xl: bool, learn: Any
) -> None:
    """The losses are those of encoding in each step, and the devices keep no weights that a step does not read."""
    model = build_xl(tmp_path / "xl") if xl else model
    pictures = write_shapes(tmp_path / "p", a=(64, 64), b=(64, 64))
    rows = [{"file_name": "a.png", "text": ["a", "red, blue"]}, {"file_name": "b.png", "text": "b"}]
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    got, before = fitted(monkeypatch), jax.live_arrays()
    unread = {(VOCABULARY, width) for width in (TEXT.hidden_size, 16, 24)}  # words of the text encoders
    there: list[tuple[int, ...]] = []
    record = task.fit

    def fit(*arguments: Any) -> Any:
        known = {id(array) for array in before}
        there[:] = [a.shape for a in jax.live_arrays() if a.shape in unread and id(a) not in known and not on_host(a)]
        return record(*arguments)

    def losses(folder: str, learn: Any) -> list[float]:
        learn(training(model, pictures, tmp_path / folder, empty=0.3), mesh=one())
        loss = jax.jit(got["loss"])
        return [float(loss(got["start"], got["data"], got["shared"], jax.random.key(i))[0]) for i in range(20)]

    monkeypatch.setattr(task, "fit", fit)
    once = losses("once", learn)
    assert there == []
    assert "text_encoder" not in got["shared"]["frozen"]
    assert got["data"]["captions"]["text"].shape[:2] == (2, 2)
    # New factors have no effect.
    each = partial(finetune, text=True) if learn is finetune else partial(train_lora, lora=Lora(rank=2, text=True))
    np.testing.assert_allclose(once, losses("each", each), rtol=1e-6)
    assert "text_encoder" in got["data"]["captions"]


def test_a_file_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path / "e")
    rows = [np.full(3, i, np.float32) for i in range(4)]
    for i, row in enumerate(rows):
        store.write(str(i), {"x": row})
    names = np.array([["3", "1"], ["0", "2"], ["1", "1"]], object)
    lazy = store.rows(names, "x")
    assert (lazy.shape, lazy.nbytes, len(lazy)) == ((3, 2, 3), 72, 3)
    np.testing.assert_array_equal(lazy[np.array([[2, 0]])], np.stack(rows)[[[[1, 1], [3, 1]]]])
    with pytest.raises(ValueError, match="announced"):
        store.write("4", {"x": rows[0], "y": cast(Any, Lying(rows[0]))})
    assert store.missing(["4", "1", "4", "5"]) == [0, 3]
    assert len(list((tmp_path / "e").iterdir())) == 4
    store.path("1").write_bytes(store.path("1").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="made again if you delete it"):
        lazy[0]


class Lying:
    """An array that has another shape when it is written."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype = (2,), array.dtype
        self._array = array

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self._array


def test_a_state_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """It has a hash of pixels instead of one of files."""
    state = tmp_path / STATE
    save_state(state, {}, {"pictures": "0" * 16, "prior": "1" * 16})
    assert not differences(state, {"pictures": "a" * 24, "prior": "b" * 24})
    save_state(state, {}, {"pictures": "0" * 24})
    assert differences(state, {"pictures": "a" * 24}).keys() == {"pictures"}


# Captions, noise and times


def test_tags_are_shuffled_in_each_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = fitted(monkeypatch)
    pictures = write_shapes(tmp_path / "p", a=(64, 64), b=(64, 60))
    for name in "ab":
        (pictures / f"{name}.txt").write_text(f"ink {name}, red ,green,blue")
    run = training(model, pictures, tmp_path / "run", shuffle_captions=True, keep_tokens=1)
    train_lora(run, Lora(rank=2), one())
    tokenizer = canvax.load(model, mesh=one()).model.tokenizers["text_encoder"]
    seen = set()
    for step in range(12):
        samples = jax.tree.map(np.asarray, got["data"](step))
        latents, ids = samples["latents"], samples["captions"]["text_encoder"]
        assert latents.shape[0] == ids.shape[0] == 2
        assert ids.shape[1] == 1
        seen |= {row.tobytes() for row in ids[:, 0]}
        _, rows = got["data"].chosen(step)
        np.testing.assert_array_equal(latents, got["data"].parts[0]["latents"][rows])
    every = {f"ink {name}, {', '.join(tags)}" for name in "ab" for tags in permutations(["red", "green", "blue"])}
    wanted = {tokenizer([text], length=ids.shape[-1])[0].tobytes() for text in every}
    assert seen <= wanted
    assert len(seen) > 6
    assert varied("a, b", np.random.default_rng(0), keep=5) == "a, b"


def test_tags_are_left_out_in_each_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At their rate, in their order, never the first; and a step has the same ones again."""
    got = fitted(monkeypatch)
    pictures = write_shapes(tmp_path / "p", a=(64, 64), b=(64, 60))
    for name in "ab":
        (pictures / f"{name}.txt").write_text("ink, red ,green,blue")
    run = training(model, pictures, tmp_path / "run", tag_dropout=0.25, keep_tokens=1)
    train_lora(run, Lora(rank=2), one())
    tokenizer = canvax.load(model, mesh=one()).model.tokenizers["text_encoder"]
    drawn = [np.asarray(got["data"](step)["captions"]["text_encoder"])[:, 0] for step in range(40)]
    np.testing.assert_array_equal(drawn[7], np.asarray(got["data"](7)["captions"]["text_encoder"])[:, 0])
    tags, length = ["red", "green", "blue"], drawn[0].shape[-1]
    counts = {}
    for chosen in product([True, False], repeat=3):
        text = ", ".join(["ink", *compress(tags, chosen)])
        counts[tokenizer([text], length=length)[0].tobytes()] = sum(chosen)
    kept = [counts[row.tobytes()] for rows in drawn for row in rows]
    assert 0.68 < np.mean(kept) / 3 < 0.82
    with refused("keep_tokens"):
        replace(run, tag_dropout=0.0)


def test_noise_offset_is_the_same_all_over_a_channel() -> None:
    latents = np.zeros((3, 1, 4, 4, 2), np.float32)
    reader = {"text_encoder": lambda texts, *, length: np.zeros((len(texts), length), np.int32)}
    samples, shared = jax.tree.map(jnp.asarray, denoising_data(reader, latents, [["a"]] * 3, 8))
    key = jax.random.key(1)
    plain, offset = (draw(samples, shared, key, 9, focus=None, empty=0.0, noise_offset=n).noise for n in (0.0, 0.1))
    change = np.asarray(offset - plain)
    assert np.ptp(change, axis=(1, 2)).max() < 1e-6
    assert 0.02 < change.std() < 0.3
    assert len(np.unique(change.round(5))) == 6
    flow = NoiseSchedule.flow(10)
    with refused("noise_offset"):
        denoising_loss(clip_encoders(TEXT), UNET, flow, gamma=None, noise_offset=0.1)


# Held-out images


def test_the_validation_loss_is_a_function_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the batch, the devices or the seed. Here the network's output is its time, a fraction of the schedule."""
    monkeypatch.setattr(diffusion, "encode_text", lambda *_, **__: {})

    def unet(p: Any, x: Any, times: Any, **_: Any) -> Any:
        return jnp.broadcast_to(p["scale"] * (times / 1000)[:, None, None, None], x.shape)

    monkeypatch.setattr(diffusion, "unet", unet)
    rng, reader = (
        np.random.default_rng(0),
        {"text_encoder": lambda texts, *, length: np.zeros((len(texts), 8), np.int32)},
    )
    sizes = ((3, 2, 8, 8, 4), (2, 1, 4, 8, 4))
    parts = [denoising_data(reader, rng.standard_normal(size, np.float32), [["a"]] * size[0], 8)[0] for size in sizes]
    schedule = NoiseSchedule.from_betas(make_betas("scaled_linear", 0.00085, 0.012, 1000), "epsilon")
    errors = validation_errors(clip_encoders(TEXT), UNET, schedule, gamma=None)
    wanted, number = [], 0
    for size in sizes:
        for _ in range(size[0]):
            for part, time in enumerate((125, 375, 625, 875)):
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), part), number)
                wanted.append(np.square(time / 1000 - np.asarray(jax.random.normal(key, size[2:]))).mean())
            number += 1
    for mesh, batch in ((one(), 1), (one(), 2), (make_mesh(), 3)):
        found = Validation(errors, parts, {}, mesh, batch)
        np.testing.assert_allclose(found({"unet": {"scale": jnp.float32(1)}}), np.mean(wanted), rtol=1e-5)
        assert found({"unet": {"scale": jnp.float32(2)}}) > np.mean(wanted)


def test_a_log_of_the_user(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets values and images, and so does TensorBoard. The folders are texts."""
    got, seen, on_board = fitted(monkeypatch), list[Any](), list[Any]()

    def board(folder: Path) -> Any:
        return Mock(side_effect=lambda *news: on_board.append((folder, *news)))

    monkeypatch.setattr(task, "check_board", lambda folder: None)
    monkeypatch.setattr(task, "TensorBoard", board)
    pictures = str(write_shapes(tmp_path / "p", a=(64, 64)))
    run = Training(str(model), pictures, str(tmp_path / "run"), plan=PLAN, size=64, tensorboard=str(tmp_path / "board"))
    with pytest.raises(InputError) as caught:
        task.train(run, Lora(rank=2), one(), log=lambda step: None)  # pyright: ignore[reportArgumentType]
    assert caught.value.argument == "log"
    assert not (tmp_path / "run").exists()
    news = (3, {"loss": 1.0}, {"previews": np.zeros((2, 2, 3), np.uint8)})
    task.train(run, Lora(rank=2), one(), log=lambda *news: seen.append(news))
    got["session"].log(*news)
    assert seen == [news]
    assert on_board == [(tmp_path / "board", *news)]


def test_which_images_are_held_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, words = fitted(monkeypatch), list[str]()
    pictures = write_shapes(tmp_path / "p" / "2_x", **dict.fromkeys("abcde", (64, 64)))
    rows = [
        {"file_name": "a.png", "text": "a"}, {"file_name": "b.png", "text": "b", "split": "test"},
    ]  # fmt: skip
    tables = write_shapes(tmp_path / "q", a=(64, 64), b=(32, 64))
    (tables / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def go(pictures: Path, validation: Any) -> int:
        words.clear()
        run = training(model, pictures, tmp_path / "run", validation=validation)
        train_lora(run, Lora(rank=2), one(), say=words.append)
        return got["samples"]

    assert go(tmp_path / "p", 0.4) == 6
    assert "3 pictures at" in words[0]
    assert "2 held out" in words[0]
    assert go(tmp_path / "p", str(tables)) == 10
    assert "1 held out" in words[0]
    assert go(tables, "test") == 1
    assert callable(got["session"].preview)
    items = items_of(open_pictures(pictures.parent), lambda sides: sides)
    train, out = held_out(items, 0.4)
    assert {item.content for item in out} == set(sorted(item.content for item in items)[:2])
    assert held_out(items[::-1], 0.4)[1] == out[::-1]
    assert {item.index for item in (*train, *out)} == set(range(5))


@pytest.mark.slow
def test_a_validation_loss_in_the_log_and_the_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the training is the same as without."""
    pictures, others = write_shapes(tmp_path / "p", a=(64, 64), b=(64, 64)), write_shapes(tmp_path / "q", c=(96, 32))
    logs = []
    for name, more in {"with": {"validation": others, "preview_steps": 4, **BUCKETS}, "without": BUCKETS}.items():
        train_lora(training(model, pictures, tmp_path / name, **more), Lora(rank=2), one())
        logs.append(read_log(tmp_path / name / "lora" / LOG))
    validated = {line["step"]: line["validation_loss"] for line in logs[0] if "validation_loss" in line}
    assert validated.keys() == {4, 6}
    assert f"step 4 of 6, validation loss {validated[4]:.4f}" in capsys.readouterr().err
    assert [line["loss"] for line in logs[0] if "loss" in line] == [line["loss"] for line in logs[1]]


@pytest.mark.weekly
def test_a_lora_in_buckets_killed_twice(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = write_shapes(tmp_path / "p")

    def go(folder: str, stop: int | None = None) -> None:
        real = Session

        def made(*arguments: Any, **more: Any) -> Session:
            def die(step: int, values: Any, images: Any) -> None:
                if step == stop:
                    raise KeyboardInterrupt

            return real(*arguments, **more | {"log": die, "save_every": 0.0})

        monkeypatch.setattr(task, "Session", made)
        train_lora(training(model, pictures, tmp_path / folder, **BUCKETS), Lora(rank=2), one())

    go("whole")
    for stop in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            go("parts", stop)
    go("parts")
    assert (
        read_metadata(tmp_path / "parts" / "pytorch_lora_weights.safetensors").items()
        >= task.recorded(training(model, pictures, tmp_path, **BUCKETS), {}).items()
    )
    files = [(tmp_path / run / "pytorch_lora_weights.safetensors").read_bytes() for run in ("whole", "parts")]
    assert [line["loss"] for line in read_log(tmp_path / "whole" / "lora" / LOG)] == [
        line["loss"] for line in read_log(tmp_path / "parts" / "lora" / LOG)
    ]
    assert files[0].replace(b"whole", b"parts") == files[1]
