"""Samplers as tables of numbers, computed on the host in float64 and independent of any model.

scheduler = from_scheduler_config(config)          # a checkpoint's scheduler_config.json
table = build_table(scheduler, steps, sampler="DPM++ 2M Karras")
"""

from canvax.samplers.catalog import (
    Scheduler,
    build_table,
    curve_named,
    find,
    from_scheduler_config,
    spec_of,
    stable_diffusion_config,
)
from canvax.samplers.curve_names import CURVES, Curve, curve_label
from canvax.samplers.options import SamplerOptions
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.specs import SAMPLERS, SamplerSpec, Solver
from canvax.samplers.table import SLOTS, SamplerTable, run

__all__ = [
    "CURVES",
    "SAMPLERS",
    "SLOTS",
    "Curve",
    "NoiseSchedule",
    "SamplerOptions",
    "SamplerSpec",
    "SamplerTable",
    "Scheduler",
    "Solver",
    "build_table",
    "curve_label",
    "curve_named",
    "find",
    "from_scheduler_config",
    "run",
    "spec_of",
    "stable_diffusion_config",
]
