"""What is written beside an image, so that it can be generated again."""

from __future__ import annotations

from typing import Any

from canvax._version import __version__
from canvax.families.base import Model
from canvax.pipelines.checks import check_second
from canvax.pipelines.given import entry
from canvax.pipelines.request import Request
from canvax.samplers import SAMPLERS, SamplerSpec, SamplerTable


def metadata(model: Model, request: Request) -> list[dict[str, Any]]:
    """For each image everything that generates it again, in plain values."""
    sampler, label, table_sha256 = request.sampler, "", ""
    if isinstance(sampler, SamplerTable):
        sampler, label, table_sha256 = "custom", "custom", sampler.sha256
    elif isinstance(sampler, SamplerSpec) and sampler not in SAMPLERS:
        sampler, label = "custom", sampler.label
    else:
        sampler, label = model.sampler_names(sampler.name if isinstance(sampler, SamplerSpec) else sampler)
    shared = {
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "sampler": sampler,
        "sampler_label": label,
        **({"sampler_sha256": table_sha256} if table_sha256 else {}),
        "model": model.name,
        "revision": model.revision,
        "dtype": model.dtype,
        "noise": "given" if request.latents is not None else request.options.noise,
        "canvax": __version__,
    }
    if request.given and request.given.fingerprints:
        shared["strength"] = request.given.strength
        if request.options.denoising_end == 1:
            shared["steps_run"] = request.given.steps - request.given.skipped
    if request.control:
        shared["controlnet"] = [files.name for files in model.controls]
    if request.image_prompts:
        shared["ip_adapter"] = [files.name for files in model.ip_adapters]
    optional = {"variant": model.files.variant, "quantize": model.quantize, **model.overrides}
    shared |= {name: value for name, value in optional.items() if value is not None}
    shared |= {name: dict(entries) for name, entries in model.merged.items()}
    # Where no negative prompt means zeros, None and "" are two images; elsewhere they are one.
    plain = model.zeros_for_no_negative and not request.zeros
    negatives = [negative if plain else negative or None for negative in request.negatives]
    beside = request.beside.records if request.beside else [{}] * len(request.prompts)
    return [
        {
            "prompt": prompt,
            "negative_prompt": negative,
            "seed": seed,
            **shared,
            **({"adapters": {**shared.get("adapters", {}), **beside[i]}} if beside[i] else {}),
            **_given(request, i),
            **_control(model, request, i),
            **({"image_prompts": request.image_prompts.record(i)} if request.image_prompts else {}),
            "options": options,
        }
        for i, (prompt, negative, seed, options) in enumerate(
            zip(request.prompts, negatives, request.seeds, _options_of_images(request), strict=True)
        )
    ]


def _given(request: Request, index: int) -> dict[str, str]:
    """By which pixels the image and the mask of one image are known again."""
    found = request.given.fingerprints if request.given else {}
    return {f"{name}_sha256": entry(values, index) for name, values in found.items()}


def _control(model: Model, request: Request, index: int) -> dict[str, list[Any]]:
    """By which pixels the control images of one image are known again, for each network; None for one without."""
    if request.control is None:
        return {}
    marks = request.control.fingerprints
    names = [name for name, _ in model.networks.controls]
    return {"control_sha256": [entry(marks[name], index) if name in marks else None for name in names]}


def _options_of_images(request: Request) -> list[dict[str, Any]]:
    """The options of each image: of a list of prompts, its own."""
    changed = request.options.changed()
    second = {"prompt_2": request.prompts_2, "negative_prompt_2": request.negatives_2}
    second["hires_prompt"] = check_second("hires_prompt", request.options.hires_prompt, request.prompts, 1)
    return [
        changed | {name: values[i] for name, values in second.items() if name in changed}
        for i in range(len(request.prompts))
    ]
