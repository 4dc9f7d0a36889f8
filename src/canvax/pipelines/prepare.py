"""The images of a checked request in a batch, ready to be denoised: texts encoded, given images too, noise drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from canvax.compile.kinds import Ready
from canvax.compile.programs import Programs
from canvax.engine.batch import Batch, filled
from canvax.engine.segments import DeepPlan
from canvax.families.base import Model
from canvax.models.beside import ADAPTERS
from canvax.models.text import IMAGE_PROMPTS
from canvax.noise import seed_keys
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.control_images import encode_controls, strengths
from canvax.pipelines.encoding import encode
from canvax.pipelines.request import Request
from canvax.pipelines.start import begin, encode_images, keep_renoised, noise_of, start, tuning_of
from canvax.samplers import SamplerTable
from canvax.types import HostArray


class Prepared(NamedTuple):
    """What a run goes on from.

    Attributes:
        batch: its images.
        keep: changes the latents before a row; None for nothing.
    """

    batch: Batch
    keep: Callable[[HostArray, int], HostArray] | None


def prepare(
    model: Model,
    programs: Programs,
    params: Params,
    request: Request,
    ready: Ready,
    table: SamplerTable,
    deep: DeepPlan | None = None,
    tables: Sequence[SamplerTable] | None = None,
) -> Prepared:
    """A batch of all images of a request; ``ready`` are the programs for as many.

    ``tables`` give each image its own in place of ``table``, where nothing else of the request depends on it.
    """
    latents = (padded_batch(len(request.prompts), programs.mesh), *request.shape[1:])
    texts, later = encode(model, programs, ready.encode, params, request, table)
    jax.block_until_ready(texts.conditions)
    images, known, masked = request.given and request.given.latents, None, None
    if ready.encode_image is not None and request.given is not None and request.given.latents is None:
        encode_image = partial(encode_images, programs, params, request, encoder=ready.encode_image)
        images, known, masked = begin(model, request, encode_image)
    if masked is not None:
        beside = put(filled(masked, latents[0]), over_batch(programs.mesh))
        for half in (half for told in (texts, *later.values()) for half in told.halves):
            half["masked"] = beside
    if request.control is not None:
        size, count = (request.height, request.width), len(request.prompts)
        read = encode_controls(programs, params, request.control, size, count, ready.encode_controls)
        for half in (half for told in (texts, *later.values()) for half in told.halves):
            half |= read
    if request.image_prompts is not None:
        from canvax.pipelines.image_prompts import encode_image_prompts

        size, count = (request.height, request.width), len(request.prompts)
        reading = encode_image_prompts(
            programs, params, request.image_prompts, size, latents, count, ready.encode_prompts, guided=request.guided
        )
        for told in (texts, *later.values()):
            halves: list[Any] = told.halves
            for half in halves:
                half[IMAGE_PROMPTS] = reading.negative if half is told.negative else reading.positive
    places = request.beside.places if request.beside else None
    if request.beside is not None:
        own = request.beside.weights[model.networks.denoiser.component]
        shares = put(filled(own, latents[0]), over_batch(programs.mesh))
        for half in (half for told in (texts, *later.values()) for half in told.halves):
            half[ADAPTERS] = shares
    noise = noise_of(request) if request.latents is None else request.latents
    keep = None
    if known is not None and request.options.mask_blend == "renoised":
        keep, known = partial(keep_renoised, known, noise, table), None
    if images is not None:
        images = start(request, images, noise, model.vae.factor)
    controls = request.control.names if request.control else ()
    batch = Batch(programs, params, latents, ready.denoisers, controls, places)
    batch.fill(
        noise,
        texts,
        seed_keys(request.seeds),
        tables or [table] * len(request.prompts),
        deep,
        images=images,
        known=known,
        later=later,
        tuning=tuning_of(request),
        control=request.control
        and [strengths(model, request.control, request.options, len(table))] * len(request.prompts),
    )
    return Prepared(batch, keep)
