"""What is written beside a picture, so that it can be drawn again."""

from __future__ import annotations

from typing import Any

from canvax._version import __version__
from canvax.pipelines.checkpoint import Checkpoint
from canvax.pipelines.request import Request


def metadata(checkpoint: Checkpoint, request: Request) -> list[dict[str, Any]]:
    """For each image everything that draws it again, in plain values."""
    sampler, label = checkpoint.sampler_names(request.sampler)
    shared = {
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "sampler": sampler,
        "sampler_label": label,
        "model": checkpoint.name,
        "revision": checkpoint.revision,
        "dtype": checkpoint.dtype,
        "noise": "given" if request.latents is not None else request.options.noise,
        "canvax": __version__,
    }
    told = {"variant": checkpoint.checkout.variant, "quantize": checkpoint.quantize}
    shared |= {name: value for name, value in told.items() if value is not None}
    # To SDXL None and "" are two pictures, and elsewhere one.
    negatives = [
        None if request.zeros else negative if checkpoint.is_xl else negative or None for negative in request.negatives
    ]
    return [
        {"prompt": prompt, "negative_prompt": negative, "seed": seed, **shared, "options": options}
        for prompt, negative, seed, options in zip(
            request.prompts, negatives, request.seeds, _options_of_images(request), strict=True
        )
    ]


def _options_of_images(request: Request) -> list[dict[str, Any]]:
    """The options of each image: of a list of second prompts, its own."""
    changed = request.options.changed()
    second = {"prompt_2": request.prompts_2, "negative_prompt_2": request.negatives_2}
    return [
        changed | {name: values[i] for name, values in second.items() if name in changed}
        for i in range(len(request.prompts))
    ]
