"""A second pass at a larger size: what the model draws well at its own size, made larger and gone over again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from canvax.compile.monitor import Counts
from canvax.compile.programs import Programs
from canvax.errors import InputError
from canvax.families.base import Model
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.masks import resized
from canvax.parallel import multihost
from canvax.params import Params
from canvax.pipelines.checks import MAX_SIDE, check_second, check_steps
from canvax.pipelines.given import Given
from canvax.pipelines.request import Request
from canvax.pipelines.result import Result
from canvax.pipelines.text_to_image import sampler_table, text_to_image
from canvax.pipelines.texts import read_texts
from canvax.samplers.strength import steps_of_strength
from canvax.types import HostArray

STRENGTHS = {"pixel": 0.4, "latent": 0.7}
"""Of the second pass: latents that are made larger stay blurred below 0.55 or so."""


def larger_side(model: Model, side: int, times: float) -> int:
    """The side, in pixels, that a second pass makes of another one: a size that the model can have."""
    step = max(8, model.networks.size_step)
    return max(step, round(side * times / step) * step)


def two_passes(
    model: Model, programs: Programs, params: Params, request: Request, cure: Callable[[], str], counts: Counts
) -> Result:
    """``text_to_image`` at the size of the request, then again at ``options.hires`` times that."""
    larger = second_pass(model, request)
    if multihost.is_spread(programs.mesh):
        raise InputError(
            "hires", request.options.hires, "does not go with several processes: no process has all images"
        )
    first = text_to_image(model, programs, params, replace(request, on_device=False), cure, counts)
    assert larger.given is not None
    if request.options.hires_method == "latent":
        latents = _latents_resized(first.latents, *larger.shape[1:3])
        given = replace(larger.given, latents=latents)
    else:
        images = [resized(image, larger.height, larger.width) for image in to_pil(first.pixels)]
        given = replace(larger.given, images=images, whole=(images, []))
    second = text_to_image(model, programs, params, replace(larger, given=given), cure, counts)
    both = {name: first.timings[name] + value for name, value in second.timings.items()}
    records, images = first.metadata, second.images
    if not request.on_device:
        images = [GeneratedImage.of(image, own) for image, own in zip(to_pil(second.pixels), records, strict=True)]
    return replace(
        second,
        images=images,
        metadata=records,
        timings=both | {name: first.timings[name] for name in ("step", "first_step")},
    )


def second_pass(model: Model, request: Request) -> Request:
    """The request of the second pass, still without images.

    Raises:
        InputError: it cannot be run.
    """
    options = request.options
    if request.given is not None:
        cure = "pipe.upscale(image, prompt) and canvax upscale IMAGE make one larger"
        raise InputError("hires", options.hires, "cannot be combined with an image", cure)
    if options.denoising_start or options.denoising_end < 1:
        raise InputError(
            "hires", options.hires, "cannot be combined with denoising_start or denoising_end", "leave one out"
        )
    height, width = (larger_side(model, side, options.hires) for side in (request.height, request.width))
    if (height, width) == (request.height, request.width):
        raise InputError("hires", options.hires, f"leaves {width} x {height} pixels as they are", "1.5 or 2 is usual")
    if max(height, width) > MAX_SIDE:
        raise InputError("hires", options.hires, f"makes {width} x {height} pixels, more than {MAX_SIDE}", "use less")
    most = model.scheduler.schedule.alphas_cumprod.size
    steps = check_steps(options.hires_steps, None, request.steps, most)
    strength = STRENGTHS[options.hires_method] if options.hires_strength is None else options.hires_strength
    whole, skipped = steps_of_strength(strength, steps, "exact", most)
    # A text that changes on the way has become its last one.
    texts = replace(request.texts, stages=[replace(request.texts.stages[-1], step=0)])
    if options.hires_prompt is not None:
        prompts = check_second("hires_prompt", options.hires_prompt, request.prompts, 1)
        texts = read_texts(model, (prompts, prompts), (request.negatives, request.negatives_2), options, steps)
    blank = [Image.new("RGB", (width, height))]
    larger = replace(
        request,
        height=height,
        width=width,
        shape=model.networks.latent_shape(len(request.prompts), height, width),
        steps=steps,
        sampler=request.sampler if options.hires_sampler is None else options.hires_sampler,
        latents=None,
        texts=texts,
        given=Given(blank, [], strength, {}, (blank, []), [], whole, skipped),
    )
    try:
        sampler_table(model, larger)
    except InputError as error:  # of lists that are for the steps of the first pass, or of another sampler
        raise InputError("hires", options.hires, f"has a second pass that cannot be run: {error}") from None
    return larger


def _latents_resized(latents: HostArray, height: int, width: int) -> HostArray:
    """[n, h, w, C] float32 at another size, bilinear."""

    def one(channel: HostArray) -> HostArray:
        return np.asarray(Image.fromarray(channel).resize((width, height), Image.Resampling.BILINEAR))

    return np.stack([np.stack([one(image[..., i]) for i in range(image.shape[-1])], axis=-1) for image in latents])
