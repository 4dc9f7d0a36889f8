"""A training run in a process of its own, to be killed: ``training_process.py FOLDER``."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from canvax.parallel.mesh import make_mesh
from canvax.train.loop import Plan, Session, fit


def loss(p, samples, shared, key):
    wanted = samples["x"] @ p["w"] + jax.random.normal(key, samples["x"].shape)
    return jnp.square(wanted).mean(), {}


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((100, 64), np.float32)}
    start = {"w": rng.standard_normal((64, 64), np.float32)}
    plan = Plan(steps=3000, batch=16, chunk=10, warmup=10)
    print("begun", flush=True)
    fit(start, loss, data, 100, plan, Session(Path(sys.argv[1]), "test", make_mesh(), save_every=0.05))
