"""The solvers. Each is a function (NoiseSchedule, steps, options) -> SamplerTable."""

from canvax.samplers.solvers.derivative import (
    dpm2,
    dpm2_ancestral,
    dpmpp_2s_ancestral,
    dpmpp_sde,
    euler,
    euler_ancestral,
    heun,
    ipndm,
    lms,
)
from canvax.samplers.solvers.dpm import deis, dpm_multistep, dpm_singlestep
from canvax.samplers.solvers.pndm import pndm
from canvax.samplers.solvers.predictor_corrector import sa_solver, unipc
from canvax.samplers.solvers.training import ddim, ddim_inverse, ddpm, lcm, tcd

__all__ = [
    "ddim",
    "ddim_inverse",
    "ddpm",
    "deis",
    "dpm2",
    "dpm2_ancestral",
    "dpm_multistep",
    "dpm_singlestep",
    "dpmpp_2s_ancestral",
    "dpmpp_sde",
    "euler",
    "euler_ancestral",
    "heun",
    "ipndm",
    "lcm",
    "lms",
    "pndm",
    "sa_solver",
    "tcd",
    "unipc",
]
