"""One of two processes that train together. Arguments: PROCESS PORT FOLDER."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import canvax
from canvax.parallel import multihost
from canvax.train.loop import Plan, Session, fit

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
    print("written", len(written))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
