"""Make a batch that can be denoised from a checked request: encoded texts and images, initial noise, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.kinds import Compiled, Ready, reference_encoder
from canvax.compile.programs import Programs
from canvax.denoise import Known
from canvax.engine.batch import Begun, begun, filled
from canvax.engine.segments import DeepPlan
from canvax.families.base import Model
from canvax.guidance import filled_columns
from canvax.images.masks import as_floats
from canvax.models.beside import ADAPTERS
from canvax.models.configs import VaeConfig
from canvax.models.denoiser import REFERENCES
from canvax.models.text import IMAGE_PROMPTS
from canvax.noise import initial_noise, pasted_in_the_middle, seed_keys, slerp
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.control import encode_controls, strengths
from canvax.pipelines.encoding import encode, flight_of
from canvax.pipelines.references import References
from canvax.pipelines.request import Request
from canvax.samplers import SamplerTable
from canvax.types import HostArray


class Prepared(NamedTuple):
    """The initial state of a run.

    Attributes:
        state: the state of its images.
        keep: a function that changes the latents before a row, or None.
    """

    state: Begun
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
    """Prepare the state of all images of a request; ``ready`` are the programs for this batch.

    ``tables`` replace ``table`` for each image, if nothing else in the request depends on it. Programs may have
    networks and masks that the request does not use.
    """
    mesh = programs.mesh
    latents = (padded_batch(len(request.prompts), mesh), *request.shape[1:])
    split, size, count = over_batch(mesh), (request.height, request.width), len(request.prompts)
    prompts, later = encode(model, ready, params, programs, request, table)
    jax.block_until_ready(prompts)
    every = [half for conditions in (prompts, *later.values()) for half in conditions]
    images, known, masked = request.init_images and request.init_images.latents, None, None
    if "image encoder" in ready and request.init_images is not None and request.init_images.latents is None:
        images, known, masked = begin(
            model, request, partial(encode_images, programs, ready, params, request, sample=samples(model, request))
        )
    beside: dict[str, Any] = {}
    if masked is not None:
        beside["masked"] = put(filled(masked, latents[0]), split)
    if request.control is not None:
        beside |= encode_controls(programs, ready, params, request.control, size, count)
    if request.beside is not None:
        beside[ADAPTERS] = put(filled(request.beside.weights[model.networks.denoiser.component], latents[0]), split)
    beside |= {name: put(array, split) for name, array in model.networks.packing.sizes(latents[0], latents[2]).items()}
    if request.references is not None:
        beside[REFERENCES] = encode_references(programs, ready, params, request.references, latents[0])
    for half in every:
        half.update(beside)
    if request.image_prompts is not None:
        from canvax.pipelines.image_prompts import encode_image_prompts

        reading = encode_image_prompts(
            programs, ready, params, request.image_prompts, size, latents, count, guided=request.guided
        )
        for conditions in (prompts, *later.values()):
            for i, half in enumerate(conditions):
                negative = request.guided and i == 0
                half[IMAGE_PROMPTS] = reading.negative if negative else reading.positive  # pyright: ignore
    for conditions in (prompts, *later.values()):
        for half in conditions:
            _complete(half, ready)
    noise = noise_of(model, request) if request.latents is None else request.latents
    keep = None
    if known is not None and request.options.mask_blend == "renoised":
        keep, known = partial(keep_renoised, known, noise, table), None
    if images is not None:
        images = start(request, images, noise, model.vae.factor)
    if known is None and flight_of(ready).known is not None:  # a mask by which all is generated
        known = Known(np.ones((*noise.shape[:3], 1), np.float32), np.zeros_like(noise), np.zeros(count, bool))
    state = begun(
        model.networks.packing,
        split,
        latents,
        noise,
        prompts,
        seed_keys(request.seeds),
        tables or [table] * count,
        deep,
        images=images,
        known=known,
        later=later,
        columns=columns_of(model, request, table, [name for name, _ in model.networks.controls if name in ready]),
        slots=flight_of(ready).state.shape[1],
    )
    return Prepared(state, keep)


def _complete(half: dict[str, Any], ready: Ready) -> None:
    """Add conditions of strength 0 for networks of the programs that the request does not use."""
    shapes: dict[str, Any] = {**flight_of(ready).prompts[0]}
    adapters = shapes.pop(IMAGE_PROMPTS, {})
    for name in shapes.keys() - half.keys():
        half[name] = jax.tree.map(_zeros, shapes[name])
    for name, entry in adapters.items():
        nothing = {key: jax.tree.map(_zeros, part) for key, part in entry.items()}
        if "masks" in entry:
            nothing["masks"] = tuple(np.ones(mask.shape, mask.dtype) for mask in entry["masks"])
        prompts = half.setdefault(IMAGE_PROMPTS, {})
        prompts[name] = nothing | prompts.get(name, {})


def _zeros(shape: Any) -> HostArray:
    return np.zeros(shape.shape, shape.dtype)


def columns_of(
    model: Model, request: Request, table: SamplerTable, controls: Sequence[str]
) -> list[dict[str, HostArray]]:
    """Return the columns [R, ...] that the denoiser and its guidance read in addition to each image's table.

    ``controls`` are the networks of control images in its programs."""
    options = request.options
    shared: dict[str, HostArray] = {}
    if request.control is not None:
        steps = table.step - table.step[0]
        rows = max(len(table), int(steps[-1]) + 1)  # fewer are left of a table with forecasts
        column = strengths(model, request.control, options, rows, controls)
        shared["control"] = column if rows == len(table) else column[steps]
    numbers = [{**options.guidance_numbers, "weights": weights} for weights in request.texts.weights]
    return [{**shared, **filled_columns(request.rule, values, len(table))} for values in numbers]


def noise_of(model: Model, request: Request) -> HostArray:
    """Return the initial noise [n, h, w, C] float32 of each image's seed, mixed with that of its variation seed.

    PyTorch's generator skips the sample of the encoded image, if the image is encoded first.
    """
    options, shape = request.options, request.shape[1:]
    draw = int(samples(model, request) and _encodes_first(model, request))

    def noise(seeds: list[int]) -> HostArray:
        whole = initial_noise(seeds, shape, options.noise, draw)
        if options.seed_size is None:
            return whole
        factor = request.height // shape[0]
        size = (options.seed_size[0] // factor, options.seed_size[1] // factor, shape[2])
        return pasted_in_the_middle(whole, initial_noise(seeds, size, options.noise, draw))

    if not options.variation_strength:
        return noise(request.seeds)
    assert options.variation_seed is not None
    return slerp(noise(request.seeds), noise([options.variation_seed]), options.variation_strength)


def keeps(model: Model, request: Request) -> bool:
    """Return True if the loop must keep parts of the images; an inpainting network needs no help."""
    return bool(request.init_images and request.init_images.masks) and not model.networks.inpaints


def samples(model: Model, request: Request) -> bool:
    """Return True if latents of images are sampled: by default with PyTorch's noise and an ``AutoencoderKL``."""
    options = request.options
    if options.image_encoding is None:
        return options.noise == "torch" and request.latents is None and isinstance(model.vae, VaeConfig)
    return options.image_encoding == "sample"


def _encodes_first(model: Model, request: Request) -> bool:
    """Return True if PyTorch diffusers encodes the image before it draws the noise."""
    init = request.init_images
    return init is not None and init.latents is None and not (model.networks.inpaints and init.from_noise)


EncodeImages = Callable[[list[HostArray], int], HostArray]
"""A function from images, and the number of tensors that PyTorch's generator gives before, to their latents."""


def begin(
    model: Model, request: Request, encode: EncodeImages
) -> tuple[HostArray | None, Known | None, HostArray | None]:
    """Encode the images of a request as far as they are used; return None for the rest.

    The results [n, h, w, ...] are latents to begin from, the latents to keep, and the further input of an inpainting
    network.
    """
    init = request.init_images
    assert init is not None
    if model.networks.inpaints:
        folded = model.networks.denoiser.facts.folded_mask
        holes, mask = init.behind_latents(model.vae.factor, folded=folded)
        latents = encode(holes, 1 + _encodes_first(model, request))
        parts = [np.broadcast_to(mask, (*latents.shape[:3], mask.shape[-1])), latents]
        masked = model.networks.packing.pack(np.concatenate(parts[::-1] if folded else parts, axis=-1))
        images = None if init.from_noise else encode([as_floats(image) for image in init.images], 0)
        return images, None, masked
    images = encode([as_floats(image) for image in init.images], 0)
    return None if init.from_noise else images, init.known(images, model.vae.factor, request.options), None


def start(request: Request, images: HostArray, noise: HostArray, factor: int) -> HostArray:
    """Return the latents to begin from [n, h, w, C]: those of the images, with the masked area filled."""
    init, fill = request.init_images, request.options.mask_fill
    assert init is not None
    if not init.masks or fill in ("original", "fill"):
        return images
    mask = init.latent_masks(len(images), factor, hard=request.options.mask_mode == "hard")
    return (1 - mask) * images + (mask * noise if fill == "noise" else 0)


def encode_images(
    programs: Programs,
    ready: Ready,
    params: Params,
    request: Request,
    images: list[HostArray],
    draw: int,
    *,
    sample: bool,
) -> HostArray:
    """Return the latents [n, h, w, C] float32 of each image of the call, on the host; an image is encoded once.

    ``draw`` is that of ``initial_noise``, for a ``sample``.
    """
    means, deviations = _moments(programs, ready["image encoder"], params, images)
    if sample:
        seeds, noise = request.seeds, request.options.noise
        if noise != "torch":
            seeds = [(seed + _ENCODING_SEED) % 2**64 for seed in seeds]
        means = means + deviations * initial_noise(seeds, request.shape[1:], noise, draw)
    return np.broadcast_to(means, request.shape).astype(np.float32)


def encode_references(
    programs: Programs, ready: Ready, params: Params, references: References, batch: int
) -> dict[str, Any]:
    """Return the condition ``REFERENCES`` for each image of a batch."""
    networks, tokens, ids = programs.networks, [], []
    for number, (images, size) in enumerate(zip(references.images, references.sizes, strict=True), 1):
        pixels = [as_floats(image) for image in images]
        latents = _moments(programs, ready[reference_encoder(size)], params, pixels)[0]
        tokens.append(networks.packing.pack(latents)[:, 0])
        grid = np.indices([side // networks.size_step for side in size], np.int32).reshape(2, -1).T
        ids.append(np.pad(grid, ((0, 0), (1, 0)), constant_values=number))
    count, shapes = max(map(len, tokens)), networks.references(batch, references.sizes)
    lengths = np.full(count, sum(map(len, ids)), np.int32)
    padding = (0, 0), (0, shapes["ids"].shape[1] - lengths[0]), (0, 0)
    tokens = np.concatenate([np.broadcast_to(image, (count, *image.shape[1:])) for image in tokens], axis=1)
    arrays = {
        "tokens": np.pad(tokens, padding),
        "ids": np.pad(np.tile(np.concatenate(ids), (count, 1, 1)), padding),
        "count": lengths,
    }
    return {name: put(filled(array, batch), over_batch(programs.mesh)) for name, array in arrays.items()}


def _moments(
    programs: Programs, encoder: Compiled, params: Params, images: Sequence[HostArray]
) -> tuple[HostArray, HostArray]:
    """Return mean and deviation of the latents of images of one size, each [n, h, w, C]."""
    means, deviations = zip(*programs.features(encoder, params, np.stack(images)), strict=True)
    return np.stack(means), np.stack(deviations)


_ENCODING_SEED = 0x9E3779B97F4A7C15
"""Offset of an image's seed for the noise of its encoding, which must differ from its initial noise. PyTorch's noise
is another draw."""


def keep_renoised(known: Known, noise: HostArray, table: SamplerTable, latents: HostArray, row: int) -> HostArray:
    """Put the known latents, with the noise of ``row``, into latents [n, h, w, C]; at the end without noise."""
    before = known.latents if row == len(table) else table.noised(known.latents, noise, row)
    return ((1 - known.mask) * before + known.mask * latents).astype(np.float32)
