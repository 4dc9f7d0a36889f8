"""Two processes with several devices each, joined by jax.distributed: each draws and writes its own part."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.images.metadata import read_metadata
from canvax.parallel import multihost
from canvax.train.loop import LOG, read_log
from tests.support.multihost_worker import INTERVAL, PROMPTS, WEIGHTED
from tests.support.small_checkpoint import SHALLOW_UNET, write_small_checkpoint
from tests.test_finetune import write_pictures

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("multihost") / "model")


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> canvax.Result:
    pipe = canvax.load(checkpoint, mesh=canvax.make_mesh(jax.devices()[:1]))
    options = canvax.Options(progress=False, guidance_interval=INTERVAL)
    return pipe(PROMPTS, seed=5, num_inference_steps=3, sampler="Euler a", options=options)


def run_two(command: list[str], *rest: str, devices: int = 4) -> list[subprocess.CompletedProcess[str]]:
    """``command`` in two processes with so many devices each; its words PROCESS and PORT are replaced."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    running = []
    for process in range(2):
        words = [word.replace("PROCESS", str(process)).replace("PORT", port) for word in (*command, *rest)]
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    done = []
    for child in running:
        try:
            out, err = child.communicate(timeout=540)
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            raise
        done.append(subprocess.CompletedProcess(child.args, child.returncode, out, err))
    return done


@pytest.mark.parametrize(
    "model", [2, pytest.param(8, marks=pytest.mark.weekly)]
)  # 1 is what test_batch and test_command_line have
@pytest.mark.slow
def test_two_processes(model: int, checkpoint: Path, alone: canvax.Result, tmp_path: Path) -> None:
    """The pictures of one device; 8 splits the weights over both processes, and the first answers for the images."""
    worker = [sys.executable, str(HERE / "support" / "multihost_worker.py"), "PROCESS", "2", "PORT"]
    runs = run_two(worker, str(model), str(checkpoint), str(tmp_path))
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    parts = [np.load(tmp_path / f"{process}.npz") for process in range(2)]
    own = [part["indices"].astype(int).tolist() for part in parts]
    assert own == {2: [[0, 1, 2, 3], [4, 5]], 8: [[0, 1, 2, 3, 4, 5], []]}[model]
    for indices, part in zip(own, parts, strict=True):
        assert part["prompts"].tolist() == [PROMPTS[i] for i in indices]
        scale = alone.latents.std()
        np.testing.assert_allclose(part["latents"] / scale, alone.latents[indices] / scale, rtol=0, atol=1e-4)
        np.testing.assert_allclose(part["pixels"], alone.pixels[indices], rtol=0, atol=1e-4)
    whole = canvax.load(checkpoint, mesh=canvax.make_mesh(jax.devices()[:1]))
    weighted = whole(WEIGHTED, seed=5, num_inference_steps=2, prompt_syntax="a1111", progress=False)
    for process, indices in enumerate(own):
        part = np.load(tmp_path / f"weighted{process}.npz")
        assert part["indices"].astype(int).tolist() == indices
        scale = weighted.latents.std()
        np.testing.assert_allclose(part["latents"] / scale, weighted.latents[indices] / scale, rtol=0, atol=1e-4)
    written = [read_metadata(path) for path in (tmp_path / "pictures").glob("*.png")]
    assert sorted((one["seed"], one["prompt"]) for one in written) == [(5 + i, PROMPTS[i]) for i in range(6)]
    # Only the first shows progress, the seeds are those of one choice, and other arguments are refused in both.
    assert "compiling" in runs[0].stderr
    assert "compiling" not in runs[1].stderr
    seeds = {}
    for run in runs:
        seeds |= ast.literal_eval(next(line for line in run.stdout.splitlines() if line[:5] == "seeds")[6:])
        assert "refused the processes were given different arguments" in run.stdout
        assert ("not saved mesh splits the weights over several processes" in run.stdout) == (model == 8)
    assert [seeds[i] - seeds[0] for i in range(6)] == list(range(6))
    if model < 8:
        again = canvax.load(tmp_path / "saved", mesh=canvax.make_mesh(jax.devices()[:1]))
        jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


@pytest.mark.weekly
def test_command_line(checkpoint: Path, tmp_path: Path) -> None:
    """Seeds that nobody gave are the same choice in both, and each file is named by its writer alone."""
    out = tmp_path / "out"
    flags = ["--distributed", "--coordinator", "localhost:PORT", "--num-processes", "2", "--process-id", "PROCESS"]
    asked = ["a cat", "a dog", "a pear", "-n", "2", "--steps", "2", "-m", str(checkpoint), "-o", str(out)]
    runs = run_two([sys.executable, "-m", "canvax", "generate"], *asked, *flags, "--mesh", "data=4,model=2")
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    named = [run.stdout.split() for run in runs]
    assert all(named)
    assert sorted(named[0] + named[1]) == sorted(map(str, out.glob("*")))
    written = sorted((one["seed"], one["prompt"]) for one in map(read_metadata, out.glob("*.png")))
    assert [prompt for _, prompt in written] == ["a cat", "a cat", "a dog", "a dog", "a pear", "a pear"]
    assert [seed - written[0][0] for seed, _ in written] == list(range(6))
    assert "loading" in runs[0].stderr
    assert "loading" not in runs[1].stderr


@pytest.mark.weekly
def test_batch(checkpoint: Path, tmp_path: Path) -> None:
    """A batch job of two processes: each writes its own images, which are those of one process, and nothing is done
    twice, by whomever it was done; a row that cannot be generated is told once."""
    rows = [{"id": f"r{i}", "prompt": f"cat {i}", "steps": 1 + i % 2, "width": 24 if i == 3 else 16} for i in range(11)]
    rows.insert(5, {"id": "bad", "prompt": "a", "width": 13})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["batch", str(tmp_path / "rows.jsonl"), "-m", str(checkpoint), "-b", "8", "-H", "16", "--json", "-o"]
    command = [sys.executable, "-m", "canvax", *asked]
    flags = ["--distributed", "--coordinator", "localhost:PORT", "--num-processes", "2", "--process-id", "PROCESS"]
    runs = run_two(command, str(tmp_path / "two"), *flags)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    reports = [json.loads(run.stdout) for run in runs]
    assert sum(report["done"] for report in reports) == 11
    assert all(report["done"] for report in reports)
    (tmp_path / "two" / "manifest-0001.jsonl").unlink()  # what the second had done is to be done again
    again = [json.loads(run.stdout) for run in run_two(command, str(tmp_path / "two"), *flags)]
    assert [report["skipped"] for report in again] == [1 + reports[0]["done"]] * 2
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, str(tmp_path / "one")], check=True, capture_output=True, env=env)
    for i in range(11):
        one, two = (np.asarray(Image.open(tmp_path / name / f"r{i}.png")).astype(int) for name in ("one", "two"))
        np.testing.assert_allclose(two, one, rtol=0, atol=1)
    lines = [json.loads(line) for path in (tmp_path / "two").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == sorted(row["id"] for row in rows)
    assert [line["error"] for line in lines if line["id"] == "bad"] == ["width=13 is not divisible by 8; use 8 or 16"]


@pytest.mark.slow
def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process writes; each sends its own samples; both stop together and continue with the same numbers."""
    from tests.support import training_hosts_worker

    folder = tmp_path / "run"
    for place in (folder, tmp_path):
        write_small_checkpoint(place / "model", unet=SHALLOW_UNET)
        write_pictures(place / "pictures")
    worker = [sys.executable, str(HERE / "support" / "training_hosts_worker.py"), "PROCESS", "PORT", str(folder)]
    runs = run_two(worker, devices=2)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    assert int(runs[0].stdout.split()[-1]) > 0
    assert runs[1].stdout.split()[-1] == "0"
    whole, parts = folder / "whole", folder / "parts"
    assert (whole / "state.safetensors").read_bytes() == (parts / "state.safetensors").read_bytes()
    losses = [[(line["step"], line["loss"]) for line in read_log(run / "log.jsonl")] for run in (whole, parts)]
    assert losses[0] == losses[1] != []
    mesh = canvax.make_mesh(jax.devices()[:2])
    monkeypatch.setattr(canvax, "make_mesh", lambda: mesh)  # of this process, for the same numbers
    alone, _ = training_hosts_worker.train(tmp_path / "alone", training_hosts_worker.data())
    for process in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"run-{process}.npy"), alone["w"], rtol=1e-5)
    # Parameters that both share: the numbers of one process, which can also go on from their state.
    params, finished = training_hosts_worker.share(tmp_path / "alone-shared")
    assert finished
    losses = [line["loss"] for line in read_log(tmp_path / "alone-shared" / "log.jsonl")]
    for name in ("shared", "resumed"):
        np.testing.assert_allclose([line["loss"] for line in read_log(folder / name / "log.jsonl")], losses, atol=1e-5)
        for process in range(2):
            with np.load(tmp_path / f"run-{name}-{process}.npz") as found:
                for want, got in zip(jax.tree.leaves(params), found.values(), strict=True):
                    np.testing.assert_allclose(got, want, atol=1e-5)
    training_hosts_worker.lora(tmp_path / "lora")
    losses = [[line["loss"] for line in read_log(place / "lora" / "lora" / LOG)] for place in (folder, tmp_path)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    shared = [folder / name / "state.safetensors" for name in ("shared", "resumed")]
    assert shared[0].read_bytes() == shared[1].read_bytes()
    went_on, finished = training_hosts_worker.share(folder / "one")
    assert finished
    jax.tree.map(lambda want, got: np.testing.assert_allclose(got, want, atol=1e-5), params, went_on)
    with np.load(folder / "shared" / "saved.npz") as there, np.load(tmp_path / "alone-shared" / "saved.npz") as wanted:
        for name in wanted:
            np.testing.assert_allclose(there[name], wanted[name], atol=1e-5)
    assert "step 6 of 6" in runs[0].stderr
    assert "toy" not in runs[1].stderr


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (("localhost:1234", None, None), "num_processes, process_id not given"),
        (("localhost:1234", 2, 2), "process_id=2 is not in 0..1"),
        (("localhost", 2, 0), "coordinator='localhost' is not host:port"),
    ],
)
def test_bad_cluster(said: tuple[str, int, int], message: str) -> None:
    with pytest.raises(canvax.InputError, match=message):
        multihost.initialize(*said)


def test_too_late_to_join() -> None:
    jax.devices()
    with pytest.raises(canvax.CanvaxError, match=r"could not be joined .* before it uses JAX"):
        multihost.initialize("localhost:1234", 2, 0)
