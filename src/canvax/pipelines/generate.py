"""Text to image: texts, noise and table, denoising, decoding; a second pass at a larger size; the metadata."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image

from canvax._version import __version__
from canvax.call import HIRES_STRENGTHS, MAX_SIDE
from canvax.compile.additions import (
    DeepFeatures,
    Keeps,
    ReadsControls,
    ReadsImage,
    ReadsImagePrompts,
    ReadsReferences,
)
from canvax.compile.kinds import Kinds
from canvax.compile.monitor import Counts
from canvax.compile.programs import Programs
from canvax.engine.batch import Batch, filled
from canvax.engine.segments import DeepPlan, guided_rows
from canvax.errors import Cancelled, CanvaxError, InputError, conflict, shown
from canvax.families.base import Model
from canvax.guidance import reads_negative
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.inputs import entry
from canvax.images.masks import resized
from canvax.parallel import multihost
from canvax.parallel.memory import check_programs
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import local_rows, put
from canvax.params import Params
from canvax.pipelines.checks import check_latents, is_tiled
from canvax.pipelines.options import Step
from canvax.pipelines.prepare import keeps, prepare
from canvax.pipelines.request import InitImages, Output, Request, check_composed
from canvax.pipelines.result import Clock, Display, Result
from canvax.pipelines.texts import read_texts
from canvax.samplers import SAMPLERS, SamplerSpec, SamplerTable, build_table
from canvax.samplers.forecast import FEWEST_STEPS, with_forecasts
from canvax.samplers.strength import steps_of_strength
from canvax.settings import listed
from canvax.types import HostArray


def text_to_image(
    model: Model,
    programs: Programs,
    params: Params,
    request: Request,
    cure: Callable[[], str],
    counts: Counts,
    tables: Sequence[SamplerTable] | None = None,
) -> Result:
    """Generate the images of a checked request.

    ``cure`` gives the advice of out-of-memory errors; ``counts`` counts what JAX compiles meanwhile. ``tables`` give
    each image its own steps, sampler and guidance; the metadata describe the request.

    If several processes generate together, each returns the images of its devices.
    """
    began, clock = time.perf_counter(), Clock()
    mesh, count, spread = programs.mesh, len(request.prompts), multihost.is_spread(programs.mesh)
    if spread and keeps(model, request) and request.options.mask_blend == "renoised":
        raise InputError("mask_blend", "does not go with several processes", cure="use 'denoised'", value="renoised")
    display = Display(shown=multihost.is_main_process(mesh) and request.options.progress)
    table, deep, kinds = work(model, request)
    latents = (padded_batch(count, mesh), *request.shape[1:])
    ready = programs.ready(params, latents, kinds, display.announce)
    check_programs(((compiled.program.name, compiled.executable) for compiled in ready.values()), mesh, cure)

    with clock("encode"):
        state, keep = prepare(model, programs, params, request, ready, table, deep, tables)
        batch = Batch(ready, params, mesh, latents)
        batch.begin(state)
    with clock("denoise"):
        is_steered = denoise(batch, request, table, display, spread=spread, keep=keep)
        samples, rows = batch.samples, None
        indices, rows = (list(range(count)), samples[:count]) if request.on_device else local_rows(samples, count)
        rows = batch.unpacked(rows)
    del batch  # with its copy of weights that wait elsewhere
    with clock("decode"):
        pixels: Any = np.zeros((0, request.height, request.width, model.networks.image_channels), np.float32)
        if "decoder" in ready:
            decoded = ready["decoder"](params, samples)
            pixels = decoded[:count] if request.on_device else local_rows(decoded, count)[1]

    if "decoder" in ready and request.init_images is not None and request.init_images.masks:
        pasted = request.init_images.pasted(np.asarray(pixels), indices)
        pixels = put(filled(pasted, latents[0]), over_batch(mesh))[:count] if request.on_device else pasted
    kind, checked = ("images", pixels) if "decoder" in ready else ("latents", rows)
    if not (jnp if request.on_device else np).isfinite(checked).all():
        half = model.dtype == "float16"
        cause = "" if half else ", or its weights (params) are not finite"
        advice = "load it with dtype='bfloat16' or 'float32'" if half else "look at the weights"
        raise CanvaxError(
            f"the {kind} have values that are not finite: {model.name} overflows in {model.dtype}{cause}; {advice}, or "
            "lower the guidance scale"
        )
    timings = {"compile": display.compile_seconds, **clock.seconds, "step": clock.seconds["denoise"] / len(table)}
    timings |= {"first_step": display.first_step - began, "total": time.perf_counter() - began}
    records = [{**record, "steered": True} if is_steered else record for record in metadata(model, request)]
    return Result(
        images=pixels
        if request.on_device
        else [GeneratedImage.of(image, records[i]) for i, image in zip(indices, to_pil(pixels), strict=False)],
        pixels=pixels,
        latents=rows,
        metadata=[records[i] for i in indices],
        timings=timings,
        compilations=counts.compilations,
        indices=indices,
    )


def work(model: Model, request: Request) -> tuple[SamplerTable, DeepPlan | None, Kinds]:
    """Return the table of a request, the rows that compute deep features, and the kinds for ``Programs.ready``."""
    table = sampler_table(model, request)
    rule = request.rule
    guided = guided_rows(table, guided=request.guided) | reads_negative(rule)
    deep = DeepPlan.of(table, guided, request.options.reuse, request.options.reuse_layers)
    way = "tiled" if is_tiled(request.height, request.width, request.options.tiling) else "whole"
    kinds = Kinds(
        guided=tuple(dict.fromkeys(guided.tolist())),
        guidance=rule,
        decoder=None if request.options.denoising_end < 1 or request.output == "latent" else way,
        lengths=request.lengths,
        places=request.beside.places if request.beside else None,
    )
    prompts, init = request.image_prompts, request.init_images
    kinds = kinds.adding(
        deep and DeepFeatures(deep.layers),
        keeps(model, request) and request.options.mask_blend == "denoised" and Keeps(),
        init and init.latents is None and ReadsImage(way),
        request.control and ReadsControls(request.control.names),
        prompts and ReadsImagePrompts(prompts.kinds, prompts.sees(guided=request.guided)),
        request.references and ReadsReferences(request.references.sizes),
    )
    return table, deep, kinds


def sampler_table(model: Model, request: Request) -> SamplerTable:
    """Build the table of a request, the same for all its images."""
    options, init = request.options, request.init_images
    steps, skip = (init.steps, init.skipped) if init else (request.steps, 0)
    settings, schedule, mu = options.settings, model.scheduler.schedule, model.family.mu
    if schedule.size_shift and not isinstance(request.sampler, SamplerTable):
        tokens = model.networks.tokens([(request.height, request.width)])
        settings = {"mu": mu(tokens, steps) if mu else schedule.mu_of(tokens), **settings}
    table = build_table(
        model.scheduler,
        steps,
        sampler=request.sampler,
        eta=options.eta,
        spacing=options.spacing,
        sigmas=options.sigmas,
        guidance=request.scales if options.guidance_steps else request.scales[0],
        rescale=options.guidance_rescale,
        start=options.denoising_start,
        end=options.denoising_end,
        skip=skip,
        guidance_interval=options.guidance_interval,
        unguided_noise=options.unguided_noise,
        settings=settings,
    )
    # A network of mean velocities reads how long each step is.
    few = steps < FEWEST_STEPS or model.networks.denoiser.facts.flow_map
    if options.quality == "full" or few:
        return table
    changes, first = [skip + stage.step for stage in request.texts.stages], int(table.step[0])
    if request.control is not None:
        rows = int(table.step[-1]) + 1 - first
        changes += [first + math.ceil(round(start * rows, 6)) for start in listed(options.control_start)]
        changes += [first + math.floor(round(end * rows, 6)) for end in listed(options.control_end)]
    return with_forecasts(table, changes)


def denoise(
    batch: Batch,
    request: Request,
    table: SamplerTable,
    display: Display,
    *,
    spread: bool,
    keep: Callable[[HostArray, int], HostArray] | None = None,
) -> bool:
    """Run all rows, a few at a time, with progress on the way; ``spread`` over several processes.

    ``keep`` changes the latents before a row. Return whether the callback changed them.

    Raises:
        Cancelled: the callback returned False.
        InputError: it returned a value that the run cannot continue from.
    """
    total, count, callback = batch.rows_left, len(request.prompts), request.options.callback
    # Every process must run the same number of rows per call, so its size must not depend on local timing.
    singly, changed = spread or callback is not None or keep is not None, False
    with display.bar(total) as bar:
        while left := batch.rows_left:
            batch.step(1 if singly else bar.chunk(left))
            bar.advance(left - batch.rows_left)
            display.stepped()
            if keep is not None:
                latents = batch.unpacked(local_rows(batch.samples, count)[1])
                batch.replace(keep(latents, total - batch.rows_left))
            if callback:
                row = total - batch.rows_left - 1
                assert batch.denoised is not None
                latents, denoised = (
                    batch.unpacked(local_rows(array, count)[1]) for array in (batch.samples, batch.denoised)
                )
                step = Step(
                    row, total, float(table.timestep[row]), latents.copy(), denoised, scale=float(table.scale[row])
                )
                returned = callback(step)
                if isinstance(returned, bool | np.bool_) and not returned:
                    stopped = f"cancelled by the callback after evaluation {row + 1} of {total}"
                    raise Cancelled(f"{stopped}; denoising_end=0.5 in the call stops there and keeps the latents")
                returned = step.latents if isinstance(returned, bool | np.bool_ | None) else returned
                if returned is not step.latents or not np.array_equal(returned, latents):
                    batch.replace(steered(returned, latents.shape, spread=spread))
                    changed = True
    return changed


def steered(returned: Any, shape: tuple[int, ...], *, spread: bool) -> np.ndarray:
    """Check the latents that a callback returned to continue from."""
    if isinstance(returned, Mapping):
        if returned.get("latents") is None:
            problem = f"returned a dict of {sorted(map(str, returned))!s:.80}"
            raise InputError("callback", problem, cure="return {'latents': array}")
        returned = returned["latents"]
    if returned is not None and not (isinstance(returned, list | tuple) or getattr(returned, "ndim", 0)):
        cure = f"return None to go on, False to stop, or latents {list(shape)}"
        raise InputError("callback", f"returned {shown(returned)}", cure=cure)
    try:
        latents = check_latents(returned, shape)
    except InputError as error:
        raise InputError("callback", f"returned what {error.problem}", cure=error.cure) from None
    if latents is None or spread:
        why = "several processes generate together" if spread else "it is neither latents nor None nor a bool"
        raise InputError("callback", f"returned {type(returned).__name__}, which cannot be used: {why}")
    return latents


def larger_side(model: Model, side: int, times: float) -> int:
    """Return the height or width of the second pass in pixels, rounded to a size that the model can have."""
    step = max(8, model.networks.size_step)
    return max(step, round(side * times / step) * step)


def two_passes(
    model: Model, programs: Programs, params: Params, request: Request, cure: Callable[[], str], counts: Counts
) -> Result:
    """Run ``text_to_image`` at the size of the request, then again at ``options.hires`` times that size."""
    larger = second_pass(model, request)
    if multihost.is_spread(programs.mesh):
        raise InputError(
            "hires", "does not go with several processes: no process has all images", value=request.options.hires
        )
    between: Output = "latent" if request.options.hires_method == "latent" else "np"
    first = text_to_image(model, programs, params, replace(request, output=between), cure, counts)
    second = text_to_image(model, programs, params, enlarged(larger, first.pixels, first.latents), cure, counts)
    both = {name: first.timings[name] + value for name, value in second.timings.items()}
    steered = {"steered": True} if any("steered" in one.metadata[0] for one in (first, second)) else {}
    records, images = [record | steered for record in first.metadata], second.images
    if not request.on_device:
        images = [
            GeneratedImage.of(image, record) for image, record in zip(to_pil(second.pixels), records, strict=False)
        ]
    return replace(
        second,
        images=images,
        metadata=records,
        timings=both | {name: first.timings[name] for name in ("step", "first_step")},
    )


def enlarged(larger: Request, pixels: HostArray, latents: HostArray) -> Request:
    """Put the images [n, H, W, C] or the latents [n, h, w, C] of the first pass into the request of ``second_pass``."""
    assert larger.init_images is not None
    if larger.options.hires_method == "latent":
        init = replace(larger.init_images, latents=_latents_resized(latents, *larger.shape[1:3]))
    else:
        images = [resized(image, larger.height, larger.width) for image in to_pil(pixels)]
        init = replace(larger.init_images, images=images, whole=(images, []))
    return replace(larger, init_images=init)


def second_pass(model: Model, request: Request) -> Request:
    """Return the request of the second pass, without images.

    Raises:
        InputError: an option cannot be used with a second pass.
    """
    options = request.options
    if request.init_images is not None:
        cure = "pipe.upscale(image, prompt) and canvax upscale IMAGE make one larger"
        given = "an image" if request.init_images.fingerprints else f"{model.name}, an inpainting model"
        raise InputError("hires", f"cannot be combined with {given}", cure=cure, value=options.hires)
    if options.denoising_start or options.denoising_end < 1:
        raise conflict("hires", "denoising_start", "denoising_end", value=options.hires)
    height, width = (larger_side(model, side, options.hires) for side in (request.height, request.width))
    if (height, width) == (request.height, request.width):
        raise InputError(
            "hires", f"leaves {width} x {height} pixels as they are", cure="1.5 or 2 is usual", value=options.hires
        )
    if max(height, width) > MAX_SIDE:
        raise InputError(
            "hires", f"makes {width} x {height} pixels, more than {MAX_SIDE}", cure="use less", value=options.hires
        )
    sampler = request.sampler if options.hires_sampler is None else options.hires_sampler
    for name, given in (
        ("guidance_steps", options.guidance_steps),
        ("sigmas", isinstance(options.sigmas, tuple)),
        ("sampler_settings", "timesteps" in options.settings),
        ("sampler", isinstance(sampler, SamplerTable)),
    ):
        if given:
            cure = "give {hires_sampler}, or leave one out" if name == "sampler" else "leave one out"
            raise conflict(name, "hires", why="it is for the steps of one pass", cure=cure)
    most = model.scheduler.schedule.alphas_cumprod.size
    steps = request.steps if options.hires_steps is None else options.hires_steps
    strength = HIRES_STRENGTHS[options.hires_method] if options.hires_strength is None else options.hires_strength
    try:
        whole, skipped = steps_of_strength(strength, steps, "exact", most)
    except InputError as error:
        raise InputError("hires_steps", error.problem, cure=error.cure, value=steps) from None
    # The second pass reads the last text of prompts that change during the run.
    texts, embeds = replace(request.texts, stages=[replace(request.texts.stages[-1], step=0)]), request.embeds
    if options.hires_prompt is not None:
        prompts, embeds = request.hires_prompts, (None, embeds[1])
        negatives = (request.negatives, request.negatives_2)
        texts = read_texts(model, (prompts, prompts), negatives, options, steps, request.references)
    blank = [Image.new(model.networks.image_mode, (width, height))]
    larger = replace(
        request,
        height=height,
        width=width,
        shape=model.networks.latent_shape(len(request.prompts), height, width),
        steps=steps,
        sampler=sampler,
        latents=None,
        texts=texts,
        embeds=embeds,
        init_images=InitImages(blank, [], strength, {}, (blank, []), [], whole, skipped),
    )
    if options.hires_prompt is not None:
        check_composed(larger, model, "hires_prompt")
    try:
        sampler_table(model, larger)
    except InputError as error:  # the second sampler lacks settings of the first
        problem = f"{error.problem} (of hires_sampler={sampler!r})" if options.hires_sampler else error.problem
        raise InputError(error.argument, problem, cure=error.cure, value=error.value) from None
    return larger


def _latents_resized(latents: HostArray, height: int, width: int) -> HostArray:
    """Resize latents [n, h, w, C] float32 bilinearly."""

    def one(channel: HostArray) -> HostArray:
        return np.asarray(Image.fromarray(channel).resize((width, height), Image.Resampling.BILINEAR))

    return np.stack([np.stack([one(image[..., i]) for i in range(image.shape[-1])], axis=-1) for image in latents])


def metadata(model: Model, request: Request) -> list[dict[str, Any]]:
    """Return for each image all settings that generate it again, as plain values."""
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
        **record_of_model(model),
        "noise": "given" if request.latents is not None else request.options.noise,
        "canvax": __version__,
    }
    if request.init_images and request.init_images.fingerprints:
        shared["strength"] = request.init_images.strength
        if request.options.denoising_end == 1:
            shared["steps_run"] = request.init_images.steps - request.init_images.skipped
    if request.references and request.references.fingerprints:
        shared["references_sha256"] = request.references.fingerprints
    if request.control:
        shared["controlnet"] = [files.name for files in model.controls]
    if given := [name for name, embeds in zip(("prompt", "negative_prompt"), request.embeds, strict=True) if embeds]:
        shared["conditions"] = given
    if request.image_prompts:
        shared["ip_adapter"] = [files.name for files in model.ip_adapters]
        if model.image_encoder is not None and model.image_encoder.named:
            shared["ip_encoder"] = model.image_encoder.name
    shared |= {name: dict(entries) for name, entries in model.merged.items()}
    # Where no negative prompt means zeros, None and "" are two images; elsewhere they are one.
    plain = model.zero_negative_embeds and not request.zeros
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


def record_of_model(model: Model) -> dict[str, Any]:
    """Return the model's settings in metadata, under the names of ``canvax.load``."""
    optional = {"variant": model.files.variant, "quantize": model.quantize, **model.overrides}
    record = {"model": model.name, "revision": model.revision, "dtype": model.dtype}
    return record | {name: value for name, value in optional.items() if value is not None}


def _given(request: Request, index: int) -> dict[str, str]:
    """Return the hashes of the source image and the mask of one image."""
    fingerprints = request.init_images.fingerprints if request.init_images else {}
    return {f"{name}_sha256": entry(values, index) for name, values in fingerprints.items()}


def _control(model: Model, request: Request, index: int) -> dict[str, list[Any]]:
    """Return the hashes of the control images of one image, for each network; None for a network without an image."""
    if request.control is None:
        return {}
    marks = request.control.fingerprints
    names = [name for name, _ in model.networks.controls]
    return {"control_sha256": [entry(marks[name], index) if name in marks else None for name in names]}


def _options_of_images(request: Request) -> list[dict[str, Any]]:
    """Return the options of each image, with its own text where an option is a list of prompts."""
    changed = request.options.changed()
    second = {"prompt_2": request.prompts_2, "negative_prompt_2": request.negatives_2}
    second["hires_prompt"] = request.hires_prompts
    return [
        changed | {name: values[i] for name, values in second.items() if name in changed}
        for i in range(len(request.prompts))
    ]
