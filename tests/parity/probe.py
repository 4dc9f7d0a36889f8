"""Probing reference schedulers with unit vectors, in float64.

A sampler is a linear map of the initial noise, the network's outputs and the step noises. Both sides run on the unit
vectors of that space, so that one run compares every coefficient after every evaluation. The references compute much in
float32; here their modules see a numpy and a torch whose float32 is float64, so that only their formulas are compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from canvax.samplers import SamplerTable, Scheduler, from_scheduler_config, run

TOLERANCE = 1e-6
STEPS = (1, 2, 3, 4, 5, 10, 20, 50)
PREDICTIONS = ("epsilon", "v_prediction", "sample")
SPACINGS = ("leading", "trailing", "linspace")
MODULES = {
    "DDIMScheduler": "ddim",
    "DDIMInverseScheduler": "ddim_inverse",
    "DDIMParallelScheduler": "ddim_parallel",
    "DDPMScheduler": "ddpm",
    "DDPMParallelScheduler": "ddpm_parallel",
    "PNDMScheduler": "pndm",
    "EulerDiscreteScheduler": "euler_discrete",
    "EulerAncestralDiscreteScheduler": "euler_ancestral_discrete",
    "HeunDiscreteScheduler": "heun_discrete",
    "KDPM2DiscreteScheduler": "k_dpm_2_discrete",
    "KDPM2AncestralDiscreteScheduler": "k_dpm_2_ancestral_discrete",
    "LMSDiscreteScheduler": "lms_discrete",
    "DPMSolverSDEScheduler": "dpmsolver_sde",
    "DPMSolverMultistepScheduler": "dpmsolver_multistep",
    "DPMSolverSinglestepScheduler": "dpmsolver_singlestep",
    "DEISMultistepScheduler": "deis_multistep",
    "UniPCMultistepScheduler": "unipc_multistep",
    "SASolverScheduler": "sasolver",
    "IPNDMScheduler": "ipndm",
    "LCMScheduler": "lcm",
    "TCDScheduler": "tcd",
    "EDMEulerScheduler": "edm_euler",
    "EDMDPMSolverMultistepScheduler": "edm_dpmsolver_multistep",
    "FlowMatchEulerDiscreteScheduler": "flow_match_euler_discrete",
    "FlowMatchHeunDiscreteScheduler": "flow_match_heun_discrete",
}
BASE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
NOISE: list[Any] = [None]
"""The noise of the row that a reference is at, which its patched generators return."""
Output = Callable[[int, np.ndarray], np.ndarray]


class Doubled:
    """A module whose float32 is float64."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.float32 = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Brownian:
    """Normalised increments of one path. A second interval from the same start ends with the noise of its own row."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.before: Any = None

    def __call__(self, start: Any, end: Any) -> Any:
        start, end, noise = float(start), float(end), NOISE[0]
        if self.before is not None and self.before[0] == pytest.approx(start, rel=1e-12):
            _, middle, earlier = self.before
            self.before = None
            moved = (start - middle) ** 0.5 * earlier + (middle - end) ** 0.5 * noise
            return moved / (start - end) ** 0.5
        self.before = (start, end, noise)
        return noise


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The references compute in float64, and draw `NOISE`."""
    for name in MODULES.values():
        module = importlib.import_module(f"diffusers.schedulers.scheduling_{name}")
        monkeypatch.setattr(module, "np", Doubled(np), raising=False)
        monkeypatch.setattr(module, "torch", Doubled(torch))
        if hasattr(module, "randn_tensor"):
            monkeypatch.setattr(module, "randn_tensor", lambda *args, **kwargs: NOISE[0])
        if hasattr(module, "BrownianTreeNoiseSampler"):
            monkeypatch.setattr(module, "BrownianTreeNoiseSampler", Brownian)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def reference_run(
    name: str,
    config: dict[str, Any],
    steps: int,
    x: np.ndarray,
    output: Output,
    noises: np.ndarray,
    *,
    mu: float | None = None,
    **extra: float,
) -> dict[str, np.ndarray]:
    """Timesteps, network inputs and samples of a reference run, all in the reference's own frame."""
    # Through from_config, as a checkpoint's file is read: it also keeps fields that the class does not declare.
    scheduler = getattr(diffusers, name).from_config(config)
    scheduler.set_timesteps(steps, **({} if mu is None else {"mu": mu}))
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    state = torch.from_numpy(x) * getattr(scheduler, "init_noise_sigma", 1.0)
    inputs, samples = [], []
    for r, t in enumerate(scheduler.timesteps):
        seen = scheduler.scale_model_input(state, t) if hasattr(scheduler, "scale_model_input") else state
        inputs.append(seen.numpy())
        NOISE[0] = torch.from_numpy(noises[r])
        state = scheduler.step(torch.from_numpy(output(r, inputs[-1])), t, state, **extra).prev_sample
        samples.append(state.numpy())
    return {
        "timesteps": scheduler.timesteps.numpy().astype(np.float64),
        "inputs": np.stack(inputs),
        "samples": np.stack(samples),
    }


def compare(
    table: SamplerTable, name: str, config: dict[str, Any], steps: int, mu: float | None = None, **extra: float
) -> None:
    """Unit vectors through both; agreement of timesteps, network inputs and samples after every evaluation."""
    rows = len(table)
    units = np.eye(1 + 2 * rows).reshape(1 + 2 * rows, 1, 1, 1, 1 + 2 * rows)
    x, outputs, noises = units[0], units[1 : 1 + rows], units[1 + rows :]
    expected = reference_run(name, config, steps, x, lambda r, seen: outputs[r], noises, mu=mu, **extra)
    assert_agrees(table, expected, x, lambda r, seen: outputs[r], noises)


def assert_agrees(
    table: SamplerTable,
    expected: dict[str, np.ndarray],
    x: np.ndarray,
    output: Output,
    noises: np.ndarray,
) -> None:
    """The table run like the reference, whose samples are in the frame of the solver."""
    np.testing.assert_allclose(table.timestep, expected["timesteps"], rtol=1e-9, atol=1e-6)
    inputs = []

    def denoise(seen: np.ndarray, timestep: float, row: int) -> np.ndarray:
        inputs.append(seen)
        return output(row, seen)

    samples = run(table, denoise, x, noises)
    for r in range(len(table)):
        assert error(inputs[r], expected["inputs"][r]) < TOLERANCE, f"network input of row {r}"
        assert error(samples[r] / table.scale[r], expected["samples"][r]) < TOLERANCE, f"sample after row {r}"


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference over the largest value."""
    assert np.isfinite(theirs).all(), "the reference itself is not finite"
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def checkpoint(name: str, **fields: Any) -> tuple[Scheduler, dict[str, Any]]:
    """A scheduler config of class `name`, read by canvax, and the config."""
    config = {"_class_name": name, **BASE, **fields}
    return from_scheduler_config(config), config
