"""One of two processes that train together. Arguments: PROCESS PORT FOLDER."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import canvax
from canvax.parallel import multihost
from canvax.train.loop import Plan, Session, fit
from canvax.train.lora import Lora, train_lora
from canvax.train.step import make_step
from canvax.train.task import Training

PLAN = Plan(steps=6, batch=8, chunk=2, warmup=0, average=0.0)
SAMPLES = 100


def data() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((SAMPLES, 3), np.float32)}


def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    wanted = shared["scale"] * samples["x"] + 0.1 * jax.random.normal(key, samples["x"].shape)
    return jnp.square(p["w"][None] - wanted).mean(), {}


def train(folder: Path, samples: dict[str, np.ndarray], deadline: float | None = None) -> tuple[Any, bool]:
    session = Session(folder, "toy", canvax.make_mesh(), deadline=deadline)
    start, shared = {"w": np.zeros(3, np.float32)}, {"scale": np.float32(2.0)}
    return fit(start, loss, samples, SAMPLES, PLAN, session, shared)


def layers() -> dict[str, dict[str, np.ndarray]]:
    """Matrices that are just large enough to be split, and vectors that are not."""
    rng = np.random.default_rng(0)
    return {str(i): {"w": (rng.standard_normal((64, 64)) / 8).astype(np.float32), "b": np.zeros(64, np.float32)}
            for i in range(2)}  # fmt: skip


def deep(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    hidden = samples + 0.1 * jax.random.normal(key, samples.shape)
    for layer in p.values():
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"][None])
    return jnp.square(hidden - 0.5).mean(), {}


def share(folder: Path, *, stop: bool = False) -> tuple[Any, bool]:
    """Train with parameters that all devices share; what callbacks get is in saved.npz of the process that writes."""

    def save(step: int, params: Any) -> None:
        if jax.process_index() == 0:
            np.savez(folder / "saved.npz", *map(np.asarray, jax.tree.leaves(params)))

    plan = replace(PLAN, average=0.9)
    deadline = time.monotonic() if stop else None
    session = Session(folder, "shared", canvax.make_mesh(), deadline=deadline, fsdp=True, save=save, save_steps=4)
    samples = np.random.default_rng(1).standard_normal((32, 64), np.float32)
    return fit(layers(), deep, samples, 32, plan, session)


def lora(folder: Path) -> None:
    """Train a LoRA on the folders ``model`` and ``pictures`` next to ``folder``; captions are encoded once."""
    model, pictures = folder.parent / "model", folder.parent / "pictures"
    plan = replace(PLAN, steps=4)
    train_lora(Training(model, pictures, folder, plan=plan, size=64), Lora(rank=2), canvax.make_mesh())


def main(process: int, port: str, folder: Path) -> None:
    multihost.initialize(f"localhost:{port}", 2, process)
    written: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{folder}/") and arguments[2] & 3:
            written.append(str(arguments[0]))

    sys.addaudithook(note)
    mine = data()
    used = PLAN.indices(0, SAMPLES), PLAN.indices(2, SAMPLES), PLAN.indices(4, SAMPLES)
    others = set(range(SAMPLES)) - set(np.concatenate(used)[:, :, 4 * process : 4 * process + 4].flat)
    mine["x"][list(others)] = np.nan  # samples that only the other process's devices need
    whole, finished = train(folder / "whole", mine)
    assert finished
    # One process's time is up; both stop, and both go on.
    _, finished = train(folder / "parts", mine, deadline=time.monotonic() if process else None)
    assert not finished
    parts, finished = train(folder / "parts", mine)
    assert finished
    np.testing.assert_array_equal(whole["w"], parts["w"])
    np.save(Path(f"{folder}-{process}.npy"), whole["w"])
    step = make_step(deep, optax.adam(1e-3), mesh=canvax.make_mesh())
    state = step.init(layers())
    for tree in (state.params, state.optimizer[0].mu):
        assert tree["0"]["w"].sharding.shard_shape((64, 64)) == (16, 64)
    for name in ("shared", "resumed"):
        params, finished = share(folder / name)
        assert finished
        np.savez(Path(f"{folder}-{name}-{process}.npz"), *map(np.asarray, jax.tree.leaves(params)))
        if name == "shared":
            assert not share(folder / "resumed", stop=True)[1]
            assert not share(folder / "one", stop=True)[1]
    lora(folder / "lora")
    print("written", len(written))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
