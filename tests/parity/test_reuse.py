"""Reusing deep features against diffusers' UNet, which computes all of it in every row, and is told what to overlook.

A hook puts the features of other rows in the place of those just computed: no path through the network is left out
here, so none can be left out wrongly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch

from canvax.denoise import WINDOW, InFlight, StepInputs, denoise
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.models.configs import UNetConfig
from canvax.models.denoiser import Reusing, UNetDenoiser
from canvax.models.unet import skip_connections, unet_spec
from canvax.samplers import SamplerTable, build_table, from_scheduler_config
from canvax.samplers.table import SLOTS, run
from tests.support.random_numbers import rng

from .peer import given
from .reference import nchw, nhwc, params_of, randomise, relative_error
from .test_models import SMALL_UNET

SCHEDULER = from_scheduler_config({"_class_name": "DDIMScheduler", "clip_sample": False})
STEPS, GUIDANCE = 9, 3.0


class Overlooking:
    """diffusers' UNet with guidance, whose deep features are kept and forecast as a published schedule says."""

    def __init__(self, cfg: UNetConfig, layers: int, reuse: int) -> None:
        self.unet: Any = randomise(diffusers.UNet2DConditionModel(**given(cfg)))
        resnets: list[Any] = [resnet for block in self.unet.up_blocks for resnet in block.resnets]
        widths = [cfg.block_out_channels[-1], *(resnet.out_channels for resnet in resnets)]
        self.channels = widths[len(resnets) - layers]
        resnets[-layers].register_forward_pre_hook(self.overlook)
        self.reuse = reuse
        self.row, self.time = 0, 0.0
        self.past: list[tuple[float, Any]] = []

    def overlook(self, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        deep, skip = inputs[0].split((self.channels, inputs[0].shape[1] - self.channels), dim=1)
        if self.row == 0 or (self.row - 1) % self.reuse == 0:
            self.past = [(self.time, deep), *self.past[:1]]
        else:
            (last, deep), (before, older) = self.past[0], self.past[-1]
            if last != before:
                deep = deep + (deep - older) * (self.time - last) / (last - before)
        return (torch.cat((deep, skip), dim=1), *inputs[1:])

    def __call__(self, x: np.ndarray, time: float, row: int, text: np.ndarray, negative: np.ndarray) -> np.ndarray:
        self.row, self.time = row, time
        both = nchw(np.concatenate([x, x]).astype(np.float32))
        with torch.no_grad():
            output = self.unet(both, time, torch.from_numpy(np.concatenate([negative, text]))).sample
        without, wanted = nhwc(output).reshape(2, *x.shape)
        return without + GUIDANCE * (wanted - without)


def ours(
    params: Any, cfg: UNetConfig, plan: DeepPlan, table: SamplerTable, noise: np.ndarray, *texts: np.ndarray
) -> np.ndarray:
    """x after each row, the loop called for one row at a time."""
    batch, denoiser = len(noise), Reusing(UNetDenoiser(cfg), plan.layers)
    program = jax.jit(denoise, static_argnames="denoiser")
    state: Any = np.zeros((batch, SLOTS, *noise.shape[1:]), np.float32)
    state[:, 0] = noise * table.init_scale
    memory: Any = denoiser.inputs(noise.shape, {}, lambda _: np.dtype("float32")).memory
    memory = np.zeros((2 * batch, *memory.shape), memory.dtype)
    text, negative = ({"text": one} for one in texts)
    keys, noisy, seen = np.zeros((batch, 2), np.uint32), np.zeros(WINDOW, bool), []
    for row in range(len(table)):
        columns = table.window(row, WINDOW)
        rows = {name: np.broadcast_to(column, (batch, *column.shape)) for name, column in columns.items()}
        shared = {"noisy": noisy, **plan.window(row)}
        inputs = StepInputs(InFlight(state, (negative, text), keys), rows, shared, np.int32(1), memory)
        state, _, memory, _ = program(params, inputs, denoiser=denoiser)
        seen.append(np.asarray(state)[:, 0])
    return np.stack(seen)


def compare(cfg: UNetConfig, layers: int, reuse: int, sampler: str, size: tuple[int, int]) -> None:
    reference = Overlooking(cfg, layers, reuse)
    params = params_of(reference.unet, unet_spec(cfg))
    table: SamplerTable = build_table(SCHEDULER, STEPS, sampler=sampler, guidance=GUIDANCE)
    noise = rng.standard_normal((2, *size, 4)).astype(np.float32)
    text, negative = (rng.standard_normal((2, 77, 48)).astype(np.float32) for _ in range(2))
    want = run(table, lambda x, time, row: reference(x, time, row, text, negative), noise)
    plan = DeepPlan.of(table, guided_rows(table), reuse, layers)
    assert plan is not None
    assert not plan.full.all()
    got = ours(params, cfg, plan, table, noise, text, negative)
    for row in range(len(table)):
        assert relative_error(got[row], want[row]) <= 1e-4, row


@pytest.mark.parametrize("layers", [1, *(pytest.param(count, marks=pytest.mark.weekly) for count in (4, 9))])
@pytest.mark.slow
def test_some_depths(layers: int) -> None:
    assert skip_connections(SMALL_UNET) == 9
    compare(SMALL_UNET, layers, 3, "ddim", (8, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reuse", "sampler"),
    [(2, "heun"), pytest.param(4, "dpmpp_2m", marks=pytest.mark.weekly)],
)
def test_schedules_and_samplers(reuse: int, sampler: str) -> None:
    compare(SMALL_UNET, 2, reuse, sampler, (8, 8))


@pytest.mark.weekly
def test_odd_sizes_and_other_blocks() -> None:
    cfg = dataclasses.replace(
        SMALL_UNET,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )
    for layers in (2, 4):
        compare(cfg, layers, 3, "euler", (14, 9))
