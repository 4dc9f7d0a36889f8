"""The solvers and curves of k-diffusion 0.1.1, probed with unit vectors in float64.

`pip install --no-deps k-diffusion==0.1.1.post1` is enough: only its formulas are loaded, not the training tools that
its package imports, and noise comes from the test.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from canvax.samplers import build_table, from_scheduler_config, run
from canvax.samplers.curves import curve_levels
from canvax.samplers.options import SamplerOptions

from .probe import BASE, STEPS, TOLERANCE, error

FOUND = importlib.util.find_spec("k_diffusion")
MODEL = from_scheduler_config({"_class_name": "EulerDiscreteScheduler", **BASE})


def _load(name: str) -> Any:
    """A module of k-diffusion without its package's own imports."""
    package = ModuleType("k_diffusion")
    assert FOUND is not None
    package.__path__ = list(FOUND.submodule_search_locations or [])
    utils: Any = ModuleType("k_diffusion.utils")
    utils.append_dims = lambda x, ndim: x[(...,) + (None,) * (ndim - x.ndim)]
    stubs: dict[str, Any] = {"k_diffusion": package, "k_diffusion.utils": utils}
    package.utils = utils  # type: ignore[attr-defined]
    for missing, members in (("torchsde", ()), ("torchdiffeq", ("odeint",))):
        stubs[missing] = ModuleType(missing)
        for member in members:
            setattr(stubs[missing], member, None)
    with pytest.MonkeyPatch.context() as patch:
        for key, module in stubs.items():
            patch.setitem(sys.modules, key, module)
        if name != "sampling":
            patch.setitem(sys.modules, "k_diffusion.sampling", _load("sampling"))
        patch.delitem(sys.modules, f"k_diffusion.{name}", raising=False)
        loaded = importlib.import_module(f"k_diffusion.{name}")
        sys.modules.pop(f"k_diffusion.{name}", None)
    return loaded


SAMPLING = _load("sampling")


class Path:
    """One Brownian path in sigma, made of the independent unit vectors of our rows."""

    def __init__(self, noises: np.ndarray, table: Any) -> None:
        ends = np.append(table.sigma[1:], 0.0)
        self.steps = [
            (float(a), float(b), torch.from_numpy(n)) for a, b, n in zip(table.sigma, ends, noises, strict=True)
        ]

    def __call__(self, start: Any, end: Any) -> Any:
        start, end = float(start), float(end)
        total = sum(
            (a - b) ** 0.5 * noise for a, b, noise in self.steps if a <= start * (1 + 1e-9) and b >= end * (1 - 1e-9)
        )
        return total / (start - end) ** 0.5


class Fresh:
    """The unit vector of the row that the reference is at: its latest evaluation."""

    def __init__(self, noises: np.ndarray, inputs: list[Any]) -> None:
        self.noises, self.inputs = noises, inputs

    def __call__(self, *_: Any) -> Any:
        return torch.from_numpy(self.noises[len(self.inputs) - 1])


def compare(ours: str, theirs: Callable[..., Any], steps: int, prediction: str, sigmas: str, **extra: Any) -> None:
    """The y that each evaluation sees, and the last, as linear maps of noise, outputs and step noises."""
    model = from_scheduler_config({"_class_name": "EulerDiscreteScheduler", **BASE, "prediction_type": prediction})
    eta = extra.get("eta")
    settings = {key: value for key, value in extra.items() if key.startswith("s_")}
    table = build_table(model, steps, sampler=ours, sigmas=sigmas, spacing="trailing", eta=eta, settings=settings)
    rows = len(table)
    units = np.eye(1 + 2 * rows)[:, None]
    x, outputs, noises = units[0], units[1 : 1 + rows], units[1 + rows :]
    still = build_table(model, steps, sampler=ours, sigmas=sigmas, spacing="trailing")
    levels = still.sigma[np.searchsorted(still.step, np.arange(steps))]
    inputs: list[np.ndarray] = []

    def network(y: Any, sigma: Any) -> Any:
        out, level = torch.from_numpy(outputs[len(inputs)]), sigma.reshape(-1, 1)
        inputs.append(y.numpy())
        if prediction == "epsilon":
            return y - level * out
        return y / (1 + level**2) - level / (1 + level**2) ** 0.5 * out

    if "sde" in ours or "2s_a" in ours or ours.endswith("_a"):
        along = ours == "dpmpp_sde"
        extra["noise_sampler"] = Path(noises, table) if along else Fresh(noises, inputs)
    churned = bool(settings.get("s_churn"))
    before = SAMPLING.torch.randn_like
    if churned:  # its noise comes before an evaluation, ours at the end of the row before, and in the initial noise
        last = [r - 1 for r in range(rows) if r == 0 or table.step[r] != table.step[r - 1]]
        drawn = iter([np.zeros_like(x) if r < 0 else noises[r] for r in last])
        SAMPLING.torch.randn_like = lambda *_: torch.from_numpy(next(drawn))
    start = table.init_scale * np.hypot(1, table.sigma[0])
    try:
        final = theirs(
            network,
            torch.from_numpy(start * x),
            torch.tensor([*levels, 0.0], dtype=torch.float64),
            disable=True,
            **extra,
        )
    finally:
        SAMPLING.torch.randn_like = before
    seen: list[np.ndarray] = []

    def denoise(network_input: np.ndarray, timestep: float, row: int) -> np.ndarray:
        seen.append(network_input * np.hypot(1, table.sigma[row]))
        return outputs[row]

    sample = run(table, denoise, x, noises)[-1]
    assert len(inputs) == rows
    for r in range(rows):
        assert error(seen[r], inputs[r]) < TOLERANCE, f"y before row {r}"
    assert error(sample, final.numpy()) < TOLERANCE


PAIRS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("euler", "sample_euler", {}),
    ("euler", "sample_euler", {"s_churn": 3.0, "s_tmin": 0.05, "s_tmax": 8.0, "s_noise": 1.01}),
    ("euler_a", "sample_euler_ancestral", {}),
    ("euler_a", "sample_euler_ancestral", {"eta": 0.4, "s_noise": 0.9}),
    ("heun", "sample_heun", {}),
    ("heun", "sample_heun", {"s_churn": 3.0, "s_tmax": 8.0, "s_noise": 1.01}),
    ("dpm2", "sample_dpm_2", {}),
    ("dpm2", "sample_dpm_2", {"s_churn": 3.0, "s_tmin": 0.3}),
    ("dpm2_a", "sample_dpm_2_ancestral", {}),
    ("dpm2_a", "sample_dpm_2_ancestral", {"eta": 0.4, "s_noise": 0.9}),
    ("lms", "sample_lms", {}),
    ("dpmpp_2s_a", "sample_dpmpp_2s_ancestral", {}),
    ("dpmpp_2s_a", "sample_dpmpp_2s_ancestral", {"eta": 0.4, "s_noise": 0.9}),
    ("dpmpp_sde", "sample_dpmpp_sde", {}),
    ("dpmpp_sde", "sample_dpmpp_sde", {"eta": 0.4, "s_noise": 0.9}),
    ("dpmpp_2m", "sample_dpmpp_2m", {}),
    ("dpmpp_2m_sde", "sample_dpmpp_2m_sde", {}),
    ("dpmpp_2m_sde", "sample_dpmpp_2m_sde", {"eta": 0.4, "s_noise": 0.9}),
    ("dpmpp_2m_sde_heun", "sample_dpmpp_2m_sde", {"solver_type": "heun"}),
    ("dpmpp_3m_sde", "sample_dpmpp_3m_sde", {}),
    ("dpmpp_3m_sde", "sample_dpmpp_3m_sde", {"eta": 0.4, "s_noise": 0.9}),
)


@pytest.mark.parametrize("sigmas", ["normal", "karras"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("ours", "theirs", "extra"), PAIRS, ids=str)
def test_solver(ours: str, theirs: str, extra: dict[str, Any], prediction: str, sigmas: str) -> None:
    for steps in STEPS[1:] if theirs.endswith("m_sde") else STEPS:  # one step of these fails on an unset variable
        compare(ours, getattr(SAMPLING, theirs), steps, prediction, sigmas, **extra)


def test_curves() -> None:
    external = _load("external")
    theirs = external.DiscreteSchedule(torch.from_numpy(MODEL.schedule.sigmas.copy()), quantize=False)
    largest, smallest = float(MODEL.schedule.sigmas[-1]), float(MODEL.schedule.sigmas[0])

    def ours(name: str, steps: int, rho: float | None = None) -> np.ndarray:
        return curve_levels(MODEL.schedule, steps, SamplerOptions(sigmas=name, rho=rho), largest, smallest)

    torch.set_default_dtype(torch.float64)
    try:
        for steps in STEPS[1:]:
            limits = (steps, smallest, largest)
            np.testing.assert_allclose(ours("normal", steps), theirs.get_sigmas(steps).numpy()[:-1], rtol=1e-6)
            np.testing.assert_allclose(ours("karras", steps), SAMPLING.get_sigmas_karras(*limits)[:-1], rtol=1e-9)
            np.testing.assert_allclose(
                ours("exponential", steps), SAMPLING.get_sigmas_exponential(*limits)[:-1], rtol=1e-9
            )
            np.testing.assert_allclose(
                ours("polyexponential", steps, 2.0), SAMPLING.get_sigmas_polyexponential(*limits, 2.0)[:-1], rtol=1e-9
            )
        levels = torch.from_numpy(ours("karras", 20))
        np.testing.assert_allclose(MODEL.schedule.timestep_of(levels.numpy()), theirs.sigma_to_t(levels), rtol=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)
