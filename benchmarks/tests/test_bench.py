"""``python -m benchmarks``: small models, real processes, no timing of different work; and ``canvax bench``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.command import run
from benchmarks.lab.job import Job, lengthened, make_inputs, names_of, text_rows
from benchmarks.lab.layouts import SMALL as FEW_STEPS
from benchmarks.lab.measure import _compare, _fit_together, measure
from benchmarks.lab.models import preset_bytes, write_random
from canvax.cli import BAD_INPUT, INTERRUPTED, main
from canvax.cli.bench import _figures, lines
from canvax.compile.programs import Programs
from canvax.errors import CanvaxError, InputError
from canvax.families.known import FAMILIES, PRESETS
from canvax.families.read import read_model
from canvax.kernels.target import compiling_for
from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.unet import cross_attention_kv, unet, unet_spec
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import abstract_params
from canvax.pipelines.loaded import open_model
from canvax.planning.chips import peak_flops
from canvax.planning.flops import count_flops, evaluation_flops
from canvax.weights.location import Location
from canvax.weights.open import open_files
from tests.support.small_checkpoint import TEXT, UNET, VAE

pytestmark = pytest.mark.slow

SMALL = Networks(UNetDenoiser(UNET), VAE, clip_encoders(TEXT))
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused as bad input; what it says."""

    def call(*arguments: object) -> str:
        assert main([*map(str, arguments)], run=run) == BAD_INPUT
        return capsys.readouterr().err

    return call


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs a benchmark that must succeed; its report."""

    def call(*arguments: object) -> dict[str, Any]:
        code = main([*map(str, arguments), "--device", "cpu", "--rounds", "2", "--json", "--quiet"], run=run)
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("model") / "small", SMALL, dtype=np.float16)


def without_site(folder: Path) -> str:
    """A Python that has the standard library and nothing else."""
    python = folder / "bare-python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return str(python)


# Measuring


@pytest.mark.parametrize("part", ["unet", pytest.param("picture", marks=pytest.mark.weekly)])
def test_beside_pytorch(bench: Bench, small: Path, part: str) -> None:
    """The VAE is in the picture."""
    pytest.importorskip("diffusers")
    report = bench(part, "--model", small, "--against", "torch", "--steps", 2, "--size", "64x64")
    ours, theirs = report["contenders"]["canvax"], report["contenders"]["torch"]
    assert (report["ours"], report["theirs"]) == (ours["median_s"], theirs["median_s"])
    assert report["ratio"] == ours["median_s"] / theirs["median_s"]
    assert report["peer"] == "torch"
    assert theirs["ratio_of_fastest"] == ours["min_s"] / theirs["min_s"]
    assert 0 < theirs["differs_by_rms"] < 1e-4
    assert 0 < theirs["differs_by"] < 1e-4
    assert ours["weight_bytes"] == theirs["weight_bytes"]
    assert theirs["versions"].keys() == {"torch", "diffusers", "transformers"}


@pytest.mark.parametrize(
    ("part", "model"),
    [
        pytest.param(part, name, marks=[] if (part, name) == ("picture", "krea-2-small") else pytest.mark.weekly)
        for name in FEW_STEPS
        for part in ("picture", "denoiser", "text", "vae", "load", "start")
    ],
)
def test_transformers_beside_pytorch(bench: Bench, part: str, model: str) -> None:
    """Two prompts, without guidance; steps and sampler are the model's own."""
    pytest.importorskip("diffusers")
    report = bench(part, "--model", model, "--against", "torch", "--size", "32x64", "--batch", 2)
    assert report["guidance"] <= 1
    assert report["steps"] == (4 if "klein" in model else 8)
    assert 0 < report["contenders"]["torch"]["differs_by"] < 1e-4
    assert report["contenders"]["canvax"]["weight_bytes"] > 0


@pytest.mark.weekly
def test_loading(bench: Bench, small: Path) -> None:
    pytest.importorskip("diffusers")
    report = bench("load", "--model", small, "--against", "torch", "--dtype", "bfloat16", "--cold")
    found = report["contenders"]
    assert found.keys() == {"canvax", "read", "read and keep", "torch"}
    assert found["read"]["over_reading"] == 1
    assert found["canvax"]["over_reading"] == found["canvax"]["median_s"] / found["read"]["median_s"]
    assert found["canvax"]["weight_bytes"] == preset_bytes(SMALL, np.float16)
    assert found["canvax"]["check"][0] == found["torch"]["check"][0] == preset_bytes(SMALL, np.int8)
    assert found["torch"]["differs_by"] < 1e-6


@pytest.mark.weekly
def test_starting(bench: Bench, small: Path) -> None:
    report = bench("start", "--model", small, "--steps", 2)
    warm, cold = report["contenders"]["canvax"], report["contenders"]["canvax cold"]
    assert (warm["traces"], warm["compilations"]) == (0, 0)
    assert cold["compilations"] == 3
    medians = [
        warm["moments"][name]["median_s"] for name in ("imported", "loaded", "programs", "first_step", "picture")
    ]
    assert medians == sorted(medians)
    assert report["ours"] == medians[-1]


# Refusing


class Given(SimpleNamespace):
    """Outputs in place of a process."""

    @classmethod
    def write(cls, folder: Path, name: str, **arrays: Any) -> Given:
        np.savez(folder / f"{name}.npz", **arrays)
        return cls(name=name, outputs=folder / f"{name}.npz")


def test_different_work_is_never_timed(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(dtype="float32", device="cpu")
    right = np.linspace(-1, 1, 100, dtype=np.float32).reshape(1, 10, 10, 1)
    ours: Any = Given.write(tmp_path, "canvax", output=right)

    def compare(output: np.ndarray) -> dict[str, Any]:
        return _compare(job, ours, Given.write(tmp_path, "torch", output=output))  # type: ignore[arg-type]

    assert compare(right + 1e-5)["differs_by"] == pytest.approx(1e-5, rel=0.1)
    for wrong in (right * 1.01, right + 0.01, np.where(right > 0.9, np.nan, right), -right):
        with pytest.raises(CanvaxError, match="different work"):
            compare(wrong)
    with pytest.raises(CanvaxError, match=r"torch gives output \(1, 5, 10, 1\), canvax output \(1, 10, 10, 1\)"):
        compare(right[:, :5])


@pytest.mark.parametrize(
    ("dtype", "one_step", "picture", "accepted"),
    [
        ("bfloat16", 0.01, 0.3, True), ("bfloat16", 0.2, 0.2, False), ("bfloat16", 0.01, 2.0, False),
        ("float32", 1e-5, 0.3, False), ("float32", 1e-5, 1e-5, True),
    ],
)  # fmt: skip
def test_few_steps_in_16_bits_may_drift(
    tmp_path: Path, dtype: str, one_step: float, picture: float, accepted: bool
) -> None:
    """But the first of them may not."""
    job: Any = SimpleNamespace(dtype=dtype, device="cpu")
    right = np.linspace(-1, 1, 100, dtype=np.float32)
    ours: Any = Given.write(tmp_path, "canvax", pixels=right, one_step_pixels=right)
    off = {"pixels": right * (1 + picture), "one_step_pixels": right * (1 + one_step)}
    theirs: Any = Given.write(tmp_path, "torch", **off)
    if accepted:
        assert _compare(job, ours, theirs)["one_step_differs_by_rms"] == pytest.approx(one_step, rel=0.05)
    else:
        with pytest.raises(CanvaxError):
            _compare(job, ours, theirs)


@pytest.mark.weekly
def test_a_contender_that_fails_says_why(small: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small, broken)
    weights = broken / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()
    with pytest.raises(CanvaxError, match=r"(?s)canvax failed: canvax.errors.CheckpointError.*truncated") as caught:
        measure(Job("unet", broken, 64, 64, 1, 2, "float32", "cpu"), [], 1, tell=lambda text: None)
    assert "Traceback" not in str(caught.value)
    assert sys.platform != "linux" or set(os.listdir("/proc/self/fd")) == before


@pytest.mark.weekly
def test_ended_from_outside_it_leaves_nothing(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "unet", "--model", str(small), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert any("loading and compiling" in line for line in process.stderr)
    process.terminate()
    assert process.wait(60) == INTERRUPTED
    process.stderr.close()
    assert list(tmp_path.glob("canvax-*")) == []


def test_bad_input(refused: Callable[..., str], tmp_path: Path) -> None:
    bare = without_site(tmp_path)
    message = refused("unet", "--against", "torch", "--torch-python", bare)
    assert "lacks torch diffusers transformers accelerate" in message
    assert "-m pip install torch diffusers transformers accelerate" in message
    assert "is not a Python that runs" in refused("unet", "--against", "torch", "--torch-python", tmp_path / "none")
    assert "does not take part in load" in refused("load", "--against", "torch-compile")
    assert "did you mean 'sdxl'?" in refused("unet", "--model", "sdxxl")
    assert "--rounds=0" in refused("unet", "--rounds", 0)
    assert "width=65" in refused("unet", "--size", "65x64", "--device", "cpu")
    assert "overflows" in refused("vae", "--dtype", "float16", "--device", "cpu")
    assert "invalid choice: 'decode'" in refused("decode")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=preset_bytes(SMALL, np.float16)))
    with pytest.raises(InputError, match="set TMPDIR"):
        write_random(tmp_path / "model", SMALL, dtype=np.float16)
    assert os.listdir(tmp_path) == []


# canvax alone


@pytest.mark.parametrize("guidance", [pytest.param(5.0, marks=pytest.mark.weekly), 1.0])
def test_this_machine_alone(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str], guidance: float) -> None:
    """Images a second, compiling apart, and FLOPs of an evaluation, of which a model without guidance needs half."""
    folder = shutil.copytree(small, tmp_path / "model")
    (folder / "canvax.json").write_text(json.dumps({"num_inference_steps": 3, "guidance_scale": guidance}))
    words = ["bench", str(folder), "--size", "64x32", "--batch", "2", "--rounds", "2", "--mesh", "data=1", "--json"]
    words += ["--tasks"] * (guidance > 1)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-3:] == ["canvax: compiling", "canvax: round 1 of 2", "canvax: round 2 of 2"]
    report = json.loads(out)
    assert (report["width"], report["height"], report["batch"], report["steps"]) == (64, 32, 2, 3)
    assert report["compilations"] == 3
    assert len(report["seconds"]) == 2
    assert max(report["seconds"]) < report["compile_s"]
    assert report["images_per_s"] == pytest.approx(2 / report["median_s"])
    assert report["share_of_peak"] is None
    assert report["memory_bytes"] > preset_bytes(SMALL, np.float32)
    model = read_model(open_files(Location(small)), np.float32)
    inputs = make_inputs(Job("unet", small, 64, 32, 2 if guidance > 1 else 1, 1, "float32", "cpu"), model)
    params = abstract_params(unet_spec(UNET), "float32", make_mesh(jax.devices()[:1]))
    with compiling_for("none"):
        text = jax.eval_shape(partial(cross_attention_kv, cfg=UNET), params, inputs["text"])  # once before the loop
        want = count_flops(partial(unet, cfg=UNET), params, inputs["latents"], inputs["timesteps"], text)
    assert report["flops_per_s"] * report["evaluation_s"] == pytest.approx(want, rel=1e-6)
    text = lines(report | {"share_of_peak": 0.25})
    if guidance > 1:
        assert report["tasks"].keys() == {"image to image at strength 0.5", "inpainting"}
        assert all(ratio > 0 for task in report["tasks"].values() for ratio in task.values())
    assert "2 images of 64 x 32, 3 steps of ddim" in text[0]
    assert any(line.endswith(", 25% of the peak") for line in text)


@pytest.mark.parametrize(
    ("scale", "none", "unguided", "guided"),
    [(5.0, 1.0, False, True), (1.0, 1.0, False, False), (1.0, 0.0, False, True), (0.0, 0.0, False, False),
     (8.0, 1.0, True, False)],
)  # fmt: skip
def test_guidance_is_that_of_the_model(
    scale: float, none: float, unguided: bool, guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``none`` is the scale without guidance; an ``unguided`` model reads the scale itself, or none."""
    seen = []
    monkeypatch.setattr("canvax.planning.flops.evaluation_flops", lambda *_, guided: seen.append(guided) or 1.0)
    networks = SimpleNamespace(latent_shape=lambda *sides: (*sides, 4), unguided=unguided)
    family = replace(FAMILIES[0], guidance_off=none)
    pipe = SimpleNamespace(
        model=SimpleNamespace(name="model", dtype="float32", family=family, networks=networks),
        programs=SimpleNamespace(mesh=make_mesh(jax.devices()[:1])),
        params={},
        memory=lambda *_, guidance: SimpleNamespace(total=seen.append(guidance)),
    )
    metadata = {"width": 64, "height": 64, "num_inference_steps": 2, "sampler": "ddim", "guidance_scale": scale}
    timings = {"total": 1.0, "step": 0.1, "compile": 1.0}
    result = SimpleNamespace(metadata=[metadata], timings=timings, compilations=0)
    _figures(pipe, [result, result], 1)
    assert seen == [guided, guided]


@pytest.mark.weekly
def test_an_evaluation_is_as_published() -> None:
    """0.80 TFLOP for each sample of Stable Diffusion 1.5 at 512 x 512, multiply-adds as two."""
    networks, mesh = PRESETS["sd15"], make_mesh(jax.devices()[:1])
    params = {name: abstract_params(spec, "bfloat16", mesh) for name, spec in networks.specs().items()}
    latents = networks.latent_shape(1, 512, 512)
    with compiling_for("none"):
        each = [evaluation_flops(Programs(networks, mesh), params, latents, guided=guided) for guided in (False, True)]
    assert each == pytest.approx([0.80e12, 1.60e12], rel=0.01)


# Parts


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_random_checkpoints_are_checkpoints(tmp_path: Path, dtype: Any) -> None:
    folder = write_random(tmp_path / "model", SMALL, dtype=dtype)
    checkpoint, _, params = open_model(folder, dtype="float32")
    assert (checkpoint.unet, checkpoint.vae, checkpoint.text) == (UNET, VAE, SMALL.text)
    weight = np.asarray(params["unet"]["conv_in"]["weight"])
    assert weight.std() == pytest.approx((9 * 4) ** -0.5, rel=0.1)
    stored = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    assert preset_bytes(SMALL, dtype) < stored < 1.2 * preset_bytes(SMALL, dtype)


@pytest.mark.parametrize(
    ("name", "rows", "latents", "text"),
    [
        ("z-image-small", 128, (2, 4, 8, 16), (2, 128, 32)),
        ("flux2-klein-small", 512, (2, 2, 4, 16), (2, 512, 96)),
        ("krea-2-small", 94, (2, 4, 8, 4), (2, 128, 96)),
    ],
)
def test_transformers(tmp_path: Path, name: str, rows: int, latents: Any, text: Any) -> None:
    """A random checkpoint is one of its family; inputs and prompts are such that peers have as many tokens."""
    preset = FEW_STEPS[name]
    model, _, params = open_model(write_random(tmp_path / "model", preset), dtype="bfloat16")
    assert (model.networks.denoiser, model.text) == (preset.denoiser, preset.text)
    assert model.networks.autoencoder == preset.autoencoder
    assert set(params) == set(preset.specs())
    embedded = np.asarray(params["text_encoder"]["model"]["embed_tokens"]["weight"], np.float32)
    assert embedded.std() == pytest.approx(0.02, rel=0.02)
    assert text_rows(model) == rows
    counts = [len(model.tokenizers["text_encoder"].ids(text)) for text in lengthened(model)]
    (most,) = model.text.shortest
    assert all(most - 32 < count <= most for count in counts)
    job = Job("denoiser", tmp_path, 64, 32, 2, 1, "float32", "cpu")
    inputs = make_inputs(job, model)
    assert {key: array.shape for key, array in inputs.items()} == {
        "latents": latents, "timesteps": (2,), "text": text, "length": (2,)
    }  # fmt: skip
    assert make_inputs(replace(job, part="text"), model)["text_encoder/ids"].shape == (2, most)
    assert names_of("unet", model) == ["transformer"]


def test_contenders_share_a_gpu_that_holds_them(small: Path) -> None:
    """Weights of each, and gigabytes for each picture of a batch."""
    model = read_model(open_files(Location(small)), np.float32)
    job = Job("picture", small, 64, 64, 4, 2, "bfloat16", "gpu", device_bytes=33 * 10**9)
    assert _fit_together(job, model, 2)
    assert not _fit_together(job, model, 3)
    assert _fit_together(replace(job, batch=2), model, 3)
    assert _fit_together(replace(job, device_bytes=None), model, 9)


def test_peaks() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "float16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("TPU v5 lite", "bfloat16") == 197e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
