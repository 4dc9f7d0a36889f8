"""Text to image: tokenize, encode, noise and table, denoise, decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.monitor import Counts
from canvax.compile.programs import Kinds, Programs
from canvax.denoise import Composed, Known, Tuning
from canvax.engine.batch import Batch, Texts, filled
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.errors import Cancelled, CanvaxError, InputError
from canvax.families.base import Ids, Model
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.masks import as_floats
from canvax.models.text import Conditions
from canvax.noise import image_seeds, initial_noise, pasted_in_the_middle, seed_keys, slerp
from canvax.parallel import multihost
from canvax.parallel.memory import check_programs
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import map_parts, own_rows, put
from canvax.params import Params
from canvax.pipelines.checks import check_latents, is_tiled
from canvax.pipelines.display import Clock, Display
from canvax.pipelines.options import Step
from canvax.pipelines.record import metadata
from canvax.pipelines.request import Request
from canvax.pipelines.result import Result
from canvax.pipelines.texts import Embeds, Encoding, Stage, Wording, ids_of, is_plain
from canvax.samplers import SamplerTable, build_table
from canvax.types import Array, HostArray


def text_to_image(
    model: Model, programs: Programs, params: Params, request: Request, cure: Callable[[], str], counts: Counts
) -> Result:
    """Generate the images of a checked request.

    ``cure`` says what helps where memory runs out, ``counts`` what JAX compiles meanwhile.

    Where several processes generate together, each returns the images of its own devices.
    """
    began, clock = time.perf_counter(), Clock()
    mesh, count = programs.mesh, len(request.prompts)
    display = Display(shown=multihost.leads(mesh) and request.options.progress)
    table, deep, kinds = work(model, request)
    latents = (padded_batch(count, mesh), *request.shape[1:])
    ready = programs.ready(params, latents, kinds, display.announce)
    check_programs(ready.named, mesh, cure)

    with clock("encode"):
        texts, later = encode(model, programs, ready.encode, params, request, table)
        jax.block_until_ready(texts.conditions)
        images, known, masked = request.given and request.given.latents, None, None
        if ready.encode_image is not None:
            encode_image = partial(encode_images, programs, params, request, encoder=ready.encode_image)
            images, known, masked = begin(model, request, encode_image)
        if masked is not None:
            beside = put(filled(masked, latents[0]), over_batch(mesh))
            for half in (half for told in (texts, *later.values()) for half in told.halves):
                half["masked"] = beside
    with clock("denoise"):
        noise = request.latents
        if noise is None:
            noise = noise_of(request)
        batch = Batch(programs, params, latents, ready.denoisers)
        keys = seed_keys(request.seeds)
        renoised = None
        if known is not None and request.options.mask_blend == "renoised":
            renoised, known = partial(keep_renoised, known, noise, table), None
        if images is not None:
            images = start(request, images, noise, model.vae.factor)
        more = {
            "images": images,
            "known": known,
            "composed": texts.composed,
            "later": later,
            "tuning": tuning_of(request),
        }
        batch.fill(noise, texts.conditions, texts.negative, keys, [table] * count, deep, **more)
        denoise(batch, request, table, display, spread=multihost.is_spread(mesh), keep=renoised)
        indices, rows = own_rows(batch.state, count)
    with clock("decode"):
        pixels = np.zeros((0, request.height, request.width, 3), np.float32)
        if ready.decode:
            _, pixels = own_rows(ready.decode(params["vae"], map_parts(lambda part: part[:, 0], batch.state)), count)

    if request.given is not None:
        pixels = request.given.pasted(pixels, indices)
    if not np.isfinite(pixels).all():
        raise CanvaxError(
            f"the images have values that are not finite: {model.name} overflows in {model.dtype}; load it with "
            "dtype='bfloat16' or 'float32', or lower the guidance scale"
        )
    timings = {"compile": display.compile_seconds, **clock.seconds, "step": clock.seconds["denoise"] / len(table)}
    timings |= {"first_step": display.first_step - began, "total": time.perf_counter() - began}
    records = metadata(model, request)
    return Result(
        images=[GeneratedImage.of(image, records[i]) for i, image in zip(indices, to_pil(pixels), strict=False)],
        pixels=pixels,
        latents=rows[:, 0],
        metadata=[records[i] for i in indices],
        timings=timings,
        compilations=counts.compilations,
        indices=indices,
    )


def keeps(model: Model, request: Request) -> bool:
    """Whether parts of the given images stay; an inpainting UNet sees to that by itself."""
    return bool(request.given and request.given.masks) and not model.networks.inpaints


def tuning_of(request: Request) -> Tuning:
    """Numbers of other kinds of guidance for each image."""
    options, count = request.options, len(request.prompts)

    def rows(numbers: Sequence[float]) -> HostArray:
        return np.tile(np.array(numbers, np.float32), (count, 1))

    method = [*options.guidance_numbers.values(), 0.0, 0.0][:2]
    return Tuning(
        rows(method) if options.guidance_method != "cfg" and request.guided else None,
        rows((options.pag_scale, options.pag_adaptive_scale)) if options.pag_scale else None,
        rows(options.freeu) if options.freeu else None,
    )


def noise_of(request: Request) -> HostArray:
    """Initial noise of each image [n, h, w, C] float32, of its seed and, in part, of its variation seed."""
    options, shape = request.options, request.shape[1:]

    def noise(seeds: list[int]) -> HostArray:
        whole = initial_noise(seeds, shape, options.noise)
        if options.seed_size is None:
            return whole
        factor = request.height // shape[0]
        own = initial_noise(
            seeds, (options.seed_size[0] // factor, options.seed_size[1] // factor, shape[2]), options.noise
        )
        return pasted_in_the_middle(whole, own)

    if not options.variation_strength:
        return noise(request.seeds)
    assert options.variation_seed is not None
    return slerp(
        noise(request.seeds), noise(image_seeds(options.variation_seed, len(request.seeds))), options.variation_strength
    )


def work(model: Model, request: Request) -> tuple[SamplerTable, DeepPlan | None, Kinds]:
    """The table of a request, which rows compute deep features, and the kinds of programs for ``Programs.ready``."""
    table = sampler_table(model, request)
    guided = guided_rows(table, guided=request.guided) | request.composed
    deep = DeepPlan.of(table, guided, request.options.reuse, request.options.reuse_layers)
    way = "tiled" if is_tiled(request.height, request.width, request.options.tiling) else "whole"
    kinds = Kinds(
        guided=tuple(dict.fromkeys(guided.tolist())),
        clip=table.clip,
        deep_layers=deep.layers if deep else 0,
        known=keeps(model, request) and request.options.mask_blend == "denoised",
        decoder=None if request.options.denoising_end < 1 else way,
        image_encoder=None if request.given is None or request.given.latents is not None else way,
        chunks=request.chunks,
        parts=request.texts.parts if request.composed else 0,
        method=request.options.guidance_method if request.guided else "cfg",
        tuned=tuple(name for name, numbers in tuning_of(request)._asdict().items() if numbers is not None),
    )
    return table, deep, kinds


def sampler_table(model: Model, request: Request) -> SamplerTable:
    """The table of a request, the same for all its images."""
    options, given = request.options, request.given
    steps, skip = (given.steps, given.skipped) if given else (request.steps, 0)
    return build_table(
        model.scheduler,
        steps,
        sampler=request.sampler,
        eta=options.eta,
        spacing=options.spacing,
        sigmas=options.sigmas,
        guidance=options.guidance_steps or request.guidance,
        rescale=options.guidance_rescale,
        start=options.denoising_start,
        end=options.denoising_end,
        skip=skip,
        guidance_interval=options.guidance_interval,
        settings=options.settings,
    )


class Encoded(NamedTuple):
    """What the images of a call are told, on the devices.

    Attributes:
        first: from the beginning.
        later: from a row on.
    """

    first: Texts
    later: dict[int, Texts]


def encode(
    model: Model,
    programs: Programs,
    encoder: Callable[..., Conditions],
    params: Params,
    request: Request,
    table: SamplerTable,
) -> Encoded:
    """What each image is conditioned on and what it is guided away from, for each part of the run."""
    split = over_batch(programs.mesh)
    batch = padded_batch(len(request.prompts), programs.mesh)
    text_params, skip = programs.text_params(params), np.int32(request.options.clip_skip)
    numbers = model.size_conditions(request.height, request.width, request.options.changed()) or (None, None)
    rows = own_rows(put(np.zeros((batch, 1), np.float32), split))[0]

    def on_devices(ids: Ids) -> Conditions:
        placed = {name: put(filled(array, batch), split) for name, array in ids.items()}
        return encoder(text_params, placed, skip)

    def one_pass(ids: Ids) -> dict[str, HostArray]:
        return {name: own_rows(array)[1] for name, array in on_devices(ids).items()}

    encoding = Encoding(model, request.texts.syntax, request.chunks, one_pass, rows)

    def spread(array: HostArray, dtype: Any) -> Array:
        """Rows of this process, at their places."""
        whole = np.zeros((batch, *array.shape[1:]), dtype)
        whole[rows] = array.astype(dtype)
        return put(whole, split)

    def told(wordings: list[Wording], embeds: Embeds | None, *, negative: bool) -> Conditions:
        dtypes = programs.text_dtypes(params, batch, request.chunks)
        if embeds is not None:
            times = request.chunks * model.text.tokens // embeds["text"].shape[1]
            arrays = embeds | {"text": np.tile(embeds["text"], (1, times, 1))}
            found = {
                name: put(filled(array.astype(dtypes[name].dtype), batch), split) for name, array in arrays.items()
            }
        elif negative and request.zeros:
            found = {name: put(np.zeros(leaf.shape, leaf.dtype), split) for name, leaf in dtypes.items()}
        elif is_plain(wordings, request.chunks):
            found = on_devices(ids_of(model, wordings))
        else:
            whole = encoding([*wordings, *[wordings[-1]] * (batch - len(wordings))])
            found = {name: spread(array, dtypes[name].dtype) for name, array in whole.items()}
        if model.networks.embeds_guidance:
            found["guidance"] = put(np.full(batch, request.guidance, np.float32), split)
        if (row := numbers[negative]) is not None:
            found["time_ids"] = put(np.tile(row, (batch, 1)), split)
        return found

    def at(stage: Stage) -> Texts:
        first, *others = (told(part, request.embeds[0], negative=False) for part in stage.parts)
        negative = told(stage.negatives, request.embeds[1], negative=True) if request.guided else None
        weights = put(filled(request.texts.weights, batch), split) if request.composed else None
        return Texts(first, negative, None if weights is None else Composed(tuple(others), weights))

    first, *rest = request.texts.stages
    steps = table.step - table.step[0]
    return Encoded(at(first), {int(np.argmax(steps >= stage.step)): at(stage) for stage in rest})


EncodeImages = Callable[[list[HostArray]], HostArray]


def begin(
    model: Model, request: Request, encode: EncodeImages
) -> tuple[HostArray | None, Known | None, HostArray | None]:
    """What a run takes from the images of its request: each [n, h, w, ...], encoded where it is used, else None.

    Latents to begin from; what is to stay of them; and what an inpainting UNet sees beside the noisy latents.
    """
    given = request.given
    assert given is not None
    if model.networks.inpaints:
        holes, mask = given.behind_latents(model.vae.factor)
        latents = encode(holes)
        masked = np.concatenate([np.broadcast_to(mask, (*latents.shape[:3], 1)), latents], axis=-1)
        images = None if given.from_noise else encode([as_floats(image) for image in given.images])
        return images, None, masked
    images = encode([as_floats(image) for image in given.images])
    return None if given.from_noise else images, given.known(images, model.vae.factor, request.options), None


def start(request: Request, images: HostArray, noise: HostArray, factor: int) -> HostArray:
    """Latents to begin from [n, h, w, C]: those of the images, with something else where they are masked."""
    given, fill = request.given, request.options.mask_fill
    assert given is not None
    if not given.masks or fill in ("original", "fill"):
        return images
    mask = given.latent_masks(len(images), factor, hard=request.options.mask_mode == "hard")
    return (1 - mask) * images + (mask * noise if fill == "noise" else 0)


def encode_images(
    programs: Programs,
    params: Params,
    request: Request,
    images: list[HostArray],
    *,
    encoder: Callable[..., tuple[Any, Any]],
) -> HostArray:
    """Latents of the image of each image of the call [n, h, w, C] float32, on the host; each image is encoded once."""
    shape, split = (padded_batch(1, programs.mesh), request.height, request.width, 3), over_batch(programs.mesh)
    moments = []
    for image in images:
        # Every device encodes the same, so that each of several processes has it.
        outputs = encoder(params["vae"], put(np.broadcast_to(image, shape), split))
        moments.append([np.asarray(output.addressable_shards[0].data)[0] for output in outputs])
    means, deviations = (np.stack(parts) for parts in zip(*moments, strict=True))
    if request.options.image_encoding == "sample":
        seeds = [(seed + _ENCODING_SEED) % 2**64 for seed in request.seeds]
        means = means + deviations * initial_noise(seeds, request.shape[1:], request.options.noise)
    return np.broadcast_to(means, request.shape).astype(np.float32)


_ENCODING_SEED = 0x9E3779B97F4A7C15
"""Added to an image's seed for the noise of its encoding, which must not be its initial noise again."""


def zeros_like(conditions: Conditions) -> Conditions:
    """SDXL's conditions for no negative prompt. Made on the host: on the device it would be one more program."""
    return {name: put(np.zeros(array.shape, array.dtype), array.sharding) for name, array in conditions.items()}


def keep_renoised(known: Known, noise: HostArray, table: SamplerTable, latents: HostArray, row: int) -> HostArray:
    """Latents [n, h, w, C] before ``row`` with the known ones, as noisy, where they stay; at the end without noise."""
    before = known.latents if row == len(table) else table.noised(known.latents, noise, row)
    return ((1 - known.mask) * before + known.mask * latents).astype(np.float32)


def denoise(
    batch: Batch,
    request: Request,
    table: SamplerTable,
    display: Display,
    *,
    spread: bool,
    keep: Callable[[HostArray, int], HostArray] | None = None,
) -> None:
    """Run all rows, a few at a time, with progress on the way; ``spread`` over several processes.

    ``keep`` changes the latents before a row.

    Raises:
        Cancelled: the callback returned False.
        InputError: it returned what cannot be gone on from.
    """
    total, count, callback = batch.rows_left, len(request.prompts), request.options.callback
    # Every process must run the same number of rows per call, so its size must not depend on local timing.
    singly = spread or callback is not None or keep is not None
    with display.bar(total) as bar:
        while left := batch.rows_left:
            batch.step(1 if singly else bar.chunk(left))
            bar.advance(left - batch.rows_left)
            display.stepped()
            if keep is not None:
                if spread:
                    raise InputError("mask_blend='renoised' with several processes: use 'denoised'")
                latents = own_rows(batch.state, count)[1][:, 0]
                batch.replace(keep(latents, total - batch.rows_left))
            if callback:
                row = total - batch.rows_left - 1
                assert batch.denoised is not None
                latents, denoised = own_rows(batch.state, count)[1][:, 0], own_rows(batch.denoised, count)[1]
                step = Step(row, total, float(table.timestep[row]), latents.copy(), denoised)
                returned = callback(step)
                if isinstance(returned, bool | np.bool_) and not returned:
                    raise Cancelled(f"cancelled by the callback after evaluation {row + 1} of {total}")
                if not isinstance(returned, bool | np.bool_ | None):
                    batch.replace(steered(returned, latents.shape, spread=spread))
                elif not np.array_equal(step.latents, latents):
                    batch.replace(steered(step.latents, latents.shape, spread=spread))


def steered(returned: Any, shape: tuple[int, ...], *, spread: bool) -> np.ndarray:
    """The latents that a callback wants to go on from, checked."""
    if isinstance(returned, Mapping):
        returned = returned.get("latents")
    latents = check_latents(returned, shape, "the latents that the callback returned")
    if latents is None or spread:
        why = "several processes generate together" if spread else "it is neither latents nor None nor a bool"
        raise InputError(f"the callback returned {type(returned).__name__}, which cannot be used: {why}")
    return latents
