"""The interface of diffusers' JAX/Flax pipelines, implemented with canvax's programs.

    from canvax.flax_api import FlaxStableDiffusionPipeline, make_image_grid, replicate, shard

Scripts written for those pipelines run with these imports; ``docs/migrating-from-diffusers-flax.md`` explains each
line. New code should use ``canvax.load``, which needs neither copies of the parameters nor a device axis.
"""

from typing import Any

from canvax.familiar import FLAX, FLAX_PAGE, answer, no_such_name
from canvax.flax_api.controlnet import (
    FlaxControlNetModel,
    FlaxControlNetOutput,
    FlaxStableDiffusionControlNetPipeline,
)
from canvax.flax_api.devices import replicate, shard, unreplicate
from canvax.flax_api.from_images import FlaxStableDiffusionImg2ImgPipeline, FlaxStableDiffusionInpaintPipeline
from canvax.flax_api.output import (
    FlaxStableDiffusionPipelineOutput,
    FlaxStableDiffusionXLPipelineOutput,
    make_image_grid,
    numpy_to_pil,
)
from canvax.flax_api.pipelines import FlaxStableDiffusionPipeline, FlaxStableDiffusionXLPipeline
from canvax.flax_api.safety import FlaxStableDiffusionSafetyChecker
from canvax.flax_api.schedulers import (
    FlaxDDIMScheduler,
    FlaxDDPMScheduler,
    FlaxDPMSolverMultistepScheduler,
    FlaxEulerDiscreteScheduler,
    FlaxPNDMScheduler,
    SchedulerState,
)

__all__ = [
    "FlaxControlNetModel",
    "FlaxControlNetOutput",
    "FlaxDDIMScheduler",
    "FlaxDDPMScheduler",
    "FlaxDPMSolverMultistepScheduler",
    "FlaxEulerDiscreteScheduler",
    "FlaxPNDMScheduler",
    "FlaxStableDiffusionControlNetPipeline",
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionPipelineOutput",
    "FlaxStableDiffusionSafetyChecker",
    "FlaxStableDiffusionXLPipeline",
    "FlaxStableDiffusionXLPipelineOutput",
    "SchedulerState",
    "make_image_grid",
    "numpy_to_pil",
    "replicate",
    "shard",
    "unreplicate",
]


def __getattr__(name: str) -> Any:
    """Explain unknown names in the error."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise no_such_name(__name__, name, answer(name, FLAX, __all__, "in canvax.flax_api", FLAX_PAGE))
