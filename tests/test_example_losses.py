"""The losses of examples/from_scratch.py and examples/dpo.py, where the answer is known in closed form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from canvax.extend import init_params
from canvax.nn import linear_spec
from canvax.train import make_step
from examples import dpo, from_scratch
from examples.from_scratch import WIDTH, Dit, distance, flow_error, loss_of, mean_flow_error

pytestmark = pytest.mark.slow

MEAN, DEVIATION = 0.7, 0.4
"""Of the data, which is normal: so is every z, and its path of the flow is known."""


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_scratch, "DEPTH", 2)


def centre_and_deviation(t: Any) -> tuple[Any, Any]:
    return (1 - t) * MEAN, jnp.sqrt(((1 - t) * DEVIATION) ** 2 + t**2)


def mean_velocity(z: Any, r: Any, t: Any) -> tuple[Any, None]:
    """(z_t - z_r) / (t - r) on the path through z, on which the quantile is constant."""
    (centre, deviation), (centre_r, deviation_r) = centre_and_deviation(t), centre_and_deviation(r)
    return (z - centre_r - deviation_r / deviation * (z - centre)) / (t - r), None


def velocity(z: Any, r: Any, t: Any) -> tuple[Any, None]:
    centre, deviation = centre_and_deviation(t)
    return -MEAN + (t - (1 - t) * DEVIATION**2) / deviation**2 * (z - centre), None


def test_the_error_of_flow_matching_is_the_variance_that_is_left() -> None:
    """The best velocity is E[noise - x | z]; its squared error is Var[noise - x | z]."""
    rng, t = np.random.default_rng(0), np.array([0.2, 0.5, 0.9])
    with jax.enable_x64(True):
        x, noise = MEAN + DEVIATION * rng.standard_normal((200_000, 3)), rng.standard_normal((200_000, 3))
        times = jnp.broadcast_to(jnp.asarray(t), x.shape)
        error, _ = flow_error(velocity, jnp.asarray(x), jnp.asarray(noise), times)
        wrong, _ = flow_error(lambda z, r, t: (1.5 * velocity(z, r, t)[0], None), jnp.asarray(x), noise, times)
    variance = ((1 - t) * DEVIATION) ** 2 + t**2
    left = 1 + DEVIATION**2 - (t - (1 - t) * DEVIATION**2) ** 2 / variance
    np.testing.assert_allclose(np.square(error).mean(0), left, rtol=0.02)
    assert (np.square(wrong).mean(0) > 1.05 * np.square(error).mean(0)).all()


def test_the_mean_velocity_of_a_normal_distribution_has_no_error() -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        z, r = jnp.asarray(rng.standard_normal(100)), jnp.asarray(rng.uniform(0, 0.5, 100))
        t = r + jnp.asarray(rng.uniform(0.1, 0.5, 100))
        v = velocity(z, r, t)[0]
        x, noise = z - t * v, z + (1 - t) * v  # the pair at z whose velocity is the mean of all pairs
        error, _ = mean_flow_error(mean_velocity, x, noise, r, t)
        wrong, _ = mean_flow_error(velocity, x, noise, r, t)
    assert error.dtype == np.float64
    assert np.abs(error).max() < 1e-12 < 1e-3 < np.abs(wrong).max()


def test_at_one_time_mean_flow_is_flow_matching() -> None:
    dit, rng = Dit(channels=2, text=4, leaps=True), np.random.default_rng(0)
    p = init_params(dit.spec, seed=0)
    p["output"]["weight"] = rng.standard_normal(p["output"]["weight"].shape).astype(np.float32)
    x, noise = (jnp.asarray(rng.standard_normal((3, 16, 8)), jnp.float32) for _ in range(2))
    t = jnp.array([0.3, 0.6, 0.9])[:, None, None]

    def u(z: Any, r: Any, t: Any) -> Any:
        return dit.velocity(p, z, r[:, 0, 0], t[:, 0, 0], jnp.ones((3, 4)))

    plain, _ = flow_error(u, x, noise, t)
    np.testing.assert_allclose(mean_flow_error(u, x, noise, t, t)[0], plain, atol=1e-5)
    assert np.abs(mean_flow_error(u, x, noise, 0.5 * t, t)[0] - plain).max() > 0.01


def test_the_denoiser_reads_the_time_that_a_step_leads_to() -> None:
    dit, rng = Dit(channels=2, text=4, leaps=True), np.random.default_rng(0)
    p = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32) / 10, init_params(dit.spec, seed=0))
    x, text, t, r = jnp.asarray(rng.standard_normal((1, 1, 16, 8)), jnp.float32), jnp.ones((1, 4)), 0.75, 0.25
    row = {"timestep": jnp.array([1000 * t]), "target": jnp.array([1000 * r])}
    (leap, _), (still, _) = (dit.apply(p, x, {**row, **more}, text, None) for more in ({}, {"target": row["timestep"]}))
    np.testing.assert_allclose(leap[:, 0], dit.velocity(p, x[:, 0], jnp.array([r]), jnp.array([t]), text)[0], rtol=1e-5)
    assert np.abs(leap - still).max() > 1e-3


@pytest.mark.parametrize("leaps", [False, True])
def test_features_are_learned(leaps: bool) -> None:
    """The features are a fixed map of the images; both losses fall."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 16, 8)).astype(np.float32)
    samples = {"x": x, "text": np.zeros((8, 4), np.float32), "features": x @ rng.standard_normal((8, 12)).astype("f")}
    dit = Dit(channels=2, text=4, leaps=leaps)
    step = make_step(loss_of(dit), optax.adam(3e-3))
    state = step.init({"dit": init_params(dit.spec, 0), "project": init_params(linear_spec(WIDTH, 12), 1)})
    update, values = jax.jit(step), []
    for number in range(40):
        state, logged = update(state, samples, None, jax.random.key(number))
        values.append(jax.device_get(logged))
    assert values[0]["repa"] > 0.9 > 0.6 > values[-1]["repa"]
    assert np.mean([v["error"] for v in values[-5:]]) < np.mean([v["error"] for v in values[:5]])


def test_repa_is_one_minus_the_cosine() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(from_scratch.repa_loss(a, b), 1 - cosine.mean(), rtol=1e-5)


def test_the_distance_of_points() -> None:
    assert distance(np.zeros((2, 3)), np.full((5, 3), 2.0)) == pytest.approx(2 * 12**0.5)
    assert distance(np.eye(3), np.eye(3)) == pytest.approx(0)


def test_the_loss_of_preferences() -> None:
    """Equation 14 of the paper, with the expectation over pairs as a mean."""
    new, old = np.random.default_rng(0).uniform(0, 1, (2, 2, 6)).astype(np.float32)
    beta_t = 3.0
    inside = -beta_t * (new[0] - old[0] - (new[1] - old[1]))
    wanted = -np.log(1 / (1 + np.exp(-inside.astype(np.float64)))).mean()
    np.testing.assert_allclose(dpo.dpo_loss(new, old, beta_t), wanted, rtol=1e-6)
    np.testing.assert_allclose(dpo.dpo_loss(old, old, beta_t), np.log(2), rtol=1e-6)
    winner, loser = jax.grad(dpo.dpo_loss)(jnp.asarray(old), jnp.asarray(old), beta_t)
    assert (winner > 0).all()
    assert (loser < 0).all()
