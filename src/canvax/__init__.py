"""canvax: images from text in JAX.

It runs Stable Diffusion, Z-Image, FLUX.1, Chroma, FLUX.2 klein, FLUX.3 klein, Krea 2, Qwen-Image 1 and
Qwen-Image-2.1, Anima.

    pipe = canvax.load("emoji")
    pipe("a red apple", seed=1).images[0].save("apple.png")

Names are imported when first used, so that ``import canvax`` and the use of one submodule stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from canvax._version import __version__
from canvax.originals import watch

watch(__name__)

if TYPE_CHECKING:
    from canvax.errors import (
        Cancelled,
        CanvaxError,
        CheckpointError,
        HintWarning,
        HubError,
        InputError,
        OutOfMemoryError,
    )
    from canvax.families.convert import convert
    from canvax.guidance import Guidance
    from canvax.images.metadata import read_metadata
    from canvax.kernels.target import plain_kernels
    from canvax.parallel.memory import Memory
    from canvax.parallel.mesh import make_mesh
    from canvax.pipelines.image_prompts import ImagePrompt
    from canvax.pipelines.options import Options, Step
    from canvax.pipelines.pipeline import Pipeline, load, pipeline_of
    from canvax.pipelines.result import Preview, Result, load_preview
    from canvax.planning.plan import Plan, plan
    from canvax.rollouts import Evaluation, Rollout, Start, rollout
    from canvax.samplers import SamplerSpec, SamplerTable, Solver

    StableDiffusion = Pipeline

_HOMES = {
    "Cancelled": "canvax.errors",
    "CanvaxError": "canvax.errors",
    "CheckpointError": "canvax.errors",
    "Evaluation": "canvax.rollouts",
    "Guidance": "canvax.guidance",
    "HintWarning": "canvax.errors",
    "HubError": "canvax.errors",
    "ImagePrompt": "canvax.pipelines.image_prompts",
    "InputError": "canvax.errors",
    "Memory": "canvax.parallel.memory",
    "Options": "canvax.pipelines.options",
    "OutOfMemoryError": "canvax.errors",
    "Pipeline": "canvax.pipelines.pipeline",
    "Plan": "canvax.planning.plan",
    "Preview": "canvax.pipelines.result",
    "Result": "canvax.pipelines.result",
    "Rollout": "canvax.rollouts",
    "SamplerSpec": "canvax.samplers",
    "SamplerTable": "canvax.samplers",
    "Solver": "canvax.samplers",
    "Start": "canvax.rollouts",
    "Step": "canvax.pipelines.options",
    "convert": "canvax.families.convert",
    "load": "canvax.pipelines.pipeline",
    "load_preview": "canvax.pipelines.result",
    "make_mesh": "canvax.parallel.mesh",
    "pipeline_of": "canvax.pipelines.pipeline",
    "plain_kernels": "canvax.kernels.target",
    "plan": "canvax.planning.plan",
    "read_metadata": "canvax.images.metadata",
    "rollout": "canvax.rollouts",
}

__all__ = [
    "Cancelled",
    "CanvaxError",
    "CheckpointError",
    "Evaluation",
    "Guidance",
    "HintWarning",
    "HubError",
    "ImagePrompt",
    "InputError",
    "Memory",
    "Options",
    "OutOfMemoryError",
    "Pipeline",
    "Plan",
    "Preview",
    "Result",
    "Rollout",
    "SamplerSpec",
    "SamplerTable",
    "Solver",
    "Start",
    "Step",
    "__version__",
    "convert",
    "load",
    "load_preview",
    "make_mesh",
    "pipeline_of",
    "plain_kernels",
    "plan",
    "read_metadata",
    "rollout",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "extend", "flax_api"):  # canvax.errors.HintWarning, before anything else was used
        return import_module(f"canvax.{name}")
    if name == "StableDiffusion":
        from canvax.errors import warn

        warn("canvax.StableDiffusion is called canvax.Pipeline now", DeprecationWarning)
        return __getattr__("Pipeline")
    if name not in _HOMES:
        if name.startswith("_"):
            raise AttributeError(f"module 'canvax' has no attribute {name!r}")
        from canvax.errors import did_you_mean
        from canvax.familiar import missing_class, no_such_name

        if (message := missing_class(name)) is None:
            near = did_you_mean(name, __all__) or f"it has {', '.join(__all__)}"
            message = f"module 'canvax' has no attribute {name!r}; {near}"
        raise no_such_name("canvax", name, message)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
