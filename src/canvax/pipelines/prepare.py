"""The images of a checked request in a batch, ready to be denoised: texts encoded, given images too, noise drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

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
from canvax.pipelines.start import begin, encode_images, keep_renoised, noise_of, start
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
    mesh = programs.mesh
    latents = (padded_batch(len(request.prompts), mesh), *request.shape[1:])
    split, size, count = over_batch(mesh), (request.height, request.width), len(request.prompts)
    prompts, later = encode(model, ready, params, mesh, request, table)
    jax.block_until_ready(prompts)
    every = [half for told in (prompts, *later.values()) for half in told]
    images, known, masked = request.given and request.given.latents, None, None
    if "image encoder" in ready and request.given is not None and request.given.latents is None:
        images, known, masked = begin(model, request, partial(encode_images, ready, params, mesh, request))
    beside: dict[str, Any] = {}
    if masked is not None:
        beside["masked"] = put(filled(masked, latents[0]), split)
    if request.control is not None:
        beside |= encode_controls(programs, ready, params, request.control, size, count)
    if request.beside is not None:
        beside[ADAPTERS] = put(filled(request.beside.weights[model.networks.denoiser.component], latents[0]), split)
    for half in every:
        half.update(beside)
    if request.image_prompts is not None:
        from canvax.pipelines.image_prompts import encode_image_prompts

        reading = encode_image_prompts(
            programs, ready, params, request.image_prompts, size, latents, count, guided=request.guided
        )
        for told in (prompts, *later.values()):
            for i, half in enumerate(told):
                negative = request.guided and i == 0
                half[IMAGE_PROMPTS] = reading.negative if negative else reading.positive  # pyright: ignore
    noise = noise_of(request) if request.latents is None else request.latents
    keep = None
    if known is not None and request.options.mask_blend == "renoised":
        keep, known = partial(keep_renoised, known, noise, table), None
    if images is not None:
        images = start(request, images, noise, model.vae.factor)
    batch = Batch(ready, params, mesh, latents)
    batch.fill(
        noise,
        prompts,
        seed_keys(request.seeds),
        tables or [table] * count,
        deep,
        images=images,
        known=known,
        later=later,
        columns=columns_of(model, request, len(table)),
    )
    return Prepared(batch, keep)


def columns_of(model: Model, request: Request, rows: int) -> list[dict[str, HostArray]]:
    """What the denoiser and its guidance read of each row beside the table, [rows, ...] for each image."""
    options = request.options
    fixed: dict[str, Sequence[float]] = {}
    if request.guided and options.guidance_numbers:
        fixed["method"] = [*options.guidance_numbers.values()]
    if options.pag_scale:
        fixed["pag"] = (options.pag_scale, options.pag_adaptive_scale)
    shared = {name: np.tile(np.array(numbers, np.float32), (rows, 1)) for name, numbers in fixed.items()}
    if request.control is not None:
        shared["control"] = strengths(model, request.control, options, rows)
    if not request.composed:
        return [shared] * len(request.prompts)
    return [{**shared, "weights": np.tile(weights, (rows, 1))} for weights in request.texts.weights]
