"""Samplers as tables of numbers. Host-side float64; knows no model.

scheduler = from_scheduler_config(config)          # what the checkpoint says
table = build_table(scheduler, steps, sampler="DPM++ 2M Karras")
"""

from canvax.samplers.catalog import (
    Scheduler,
    build_table,
    curve_named,
    find,
    from_scheduler_config,
    stable_diffusion_config,
)
from canvax.samplers.curve_names import CURVES, Curve, curve_label
from canvax.samplers.options import SamplerOptions
from canvax.samplers.schedule import NoiseSchedule
from canvax.samplers.specs import SAMPLERS, SamplerSpec
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
    "build_table",
    "curve_label",
    "curve_named",
    "find",
    "from_scheduler_config",
    "run",
    "stable_diffusion_config",
]
