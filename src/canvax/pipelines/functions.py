"""The networks as functions of arrays, for loops of your own: they can be jitted, differentiated and mapped.

``docs/under-the-pipeline.md`` has examples. The functions run where their arrays are; they do not use the pipeline's
programs, padding and mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.images.masks import as_floats
from canvax.kernels.target import jitted
from canvax.models.decode import decode_images, encode_images
from canvax.models.denoiser import evaluate
from canvax.models.text import SECOND, Conditions, check_read, encode_each, encode_text, fits
from canvax.noise import seed_keys
from canvax.parallel.mesh import replicated
from canvax.parallel.place import on_devices
from canvax.parallel.rules import check_params
from canvax.params import Params
from canvax.pipelines.checks import check_guidance, check_prompts, check_second, check_size
from canvax.pipelines.encoding import inputs_of, is_one_pass, mixed, passes_of, runs_of
from canvax.pipelines.generate import sampler_table
from canvax.pipelines.options import Options
from canvax.pipelines.prepare import noise_of
from canvax.pipelines.request import Request, check_clip_skip, check_init_images
from canvax.pipelines.texts import Wording, read_texts
from canvax.prompts.grammar import PromptSyntax
from canvax.quantize import compute_dtype
from canvax.rollouts import Start
from canvax.types import Array, HostArray

_encode_text = jitted(encode_text, static_argnames="cfg")
_encode_each = jitted(encode_each, static_argnames="cfg")
_encode_images = jitted(encode_images, static_argnames="cfg")
_decode_images = jitted(decode_images, static_argnames=("cfg", "tiled"))


def encode(
    model: Model,
    params: Params,
    prompt: str | Sequence[str],
    prompt_2: str | Sequence[str] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    clip_skip: int = 0,
    guidance_scale: float | None = None,
    prompt_syntax: PromptSyntax = "plain",
) -> Conditions:
    """See ``canvax.Pipeline.encode``."""
    prompts, _ = check_prompts(prompt, None, 1)
    seconds = check_second("prompt_2", prompt_2, prompts, 1)
    if prompt_2 is not None and SECOND not in model.text.names:
        raise InputError("prompt_2", f"does not go with {model.name}, which has one text encoder", cure="leave it out")
    if guidance_scale is not None and not model.networks.embeds_guidance:
        raise InputError("guidance_scale", f"is not supported by {model.name}", cure="leave it out")
    options = Options(clip_skip=clip_skip, prompt_syntax=prompt_syntax)
    check_clip_skip(options.clip_skip, model)
    texts = read_texts(model, (prompts, seconds), ([""], [""]), options, 1)
    if texts.parts > 1 or (texts.weights != 1).any():
        raise InputError("prompt", "adds prompts up (AND)", cure="encode each of them", value=prompt)
    (tall, wide), factor = model.native_size, model.networks.size_step
    size = check_size("height", height, tall, factor), check_size("width", width, wide, factor)
    scale = check_guidance(guidance_scale, model.defaults.guidance_scale)
    lengths = model.text.fit(texts.lengths)
    conditions = _encoded(model, params, texts.stages[0].parts[0], lengths)
    return _completed(model, conditions, model.size_conditions(*size, {})[0], scale)


def _completed(
    model: Model, conditions: dict[str, Any], numbers: Mapping[str, HostArray], guidance: float
) -> dict[str, Any]:
    """Add the conditions of the size, and the guidance scale for a network that reads it, to those of texts."""
    count = len(conditions["text"])
    added = {name: jnp.broadcast_to(jnp.asarray(row)[None], (count, *row.shape)) for name, row in numbers.items()}
    if model.networks.embeds_guidance:
        added["guidance"] = jnp.full(count, guidance, jnp.float32)
    return {**conditions, **added}


def _encoded(model: Model, params: Params, wordings: Sequence[Wording], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the conditions that the text encoders give, for texts that are brought to ``lengths``."""
    text, weights = model.text, {name: _weights(model, params, name) for name in model.text.names}
    passes = passes_of(model, wordings, lengths)
    for number in range(runs_of(passes)):
        check_read(text, inputs_of(text, passes, number), text.inputs(lengths))
    if is_one_pass(passes):
        return dict(_encode_text(weights, inputs_of(text, passes), cfg=text))
    conditions = dict(mixed(text, passes, partial(_encode_each, weights, cfg=text), range(len(wordings))))
    return {**conditions, "text": conditions["text"].astype(compute_dtype(weights))}


def start(model: Model, params: Params, request: Request, mesh: Mesh) -> Start:
    """See ``canvax.Pipeline.start``. Noise and keys are on the devices of the parameters."""
    options, stages = request.options, request.texts.stages
    others = {
        "image": request.init_images or request.references,
        "control": request.control,
        "image_prompt": request.image_prompts,
        "adapters": request.beside,
        "hires": options.hires > 1,
        "reuse": options.reuse > 1,
        "prompt": request.composed or len(stages) > 1 or any(request.embeds),
    }
    for name, value in others.items():
        if value:
            what = "has conditions, AND or texts by step" if name == "prompt" else "is set"
            raise InputError(name, f"{what}, which rollout does not read", cure="leave it out, or call the pipeline")
    numbers, of_negative = model.size_conditions(request.height, request.width, options.changed())
    positive = _encoded(model, params, stages[0].parts[0], request.lengths)
    sides = [(positive, numbers)]
    if request.guided:
        zeros = jax.tree.map(jnp.zeros_like, positive) if request.zeros else None
        sides.insert(0, (zeros or _encoded(model, params, stages[0].negatives, request.lengths), of_negative))
    conditions = tuple(_completed(model, *side, request.guidance) for side in sides)
    noise = noise_of(model, request) if request.latents is None else request.latents
    noise, keys = jax.device_put((noise, seed_keys(request.seeds)), replicated(mesh))
    return Start(noise, keys, conditions, sampler_table(model, request), request.rule, options.guidance_numbers)


def encode_image(model: Model, params: Params, image: Any, height: int | None, width: int | None) -> Array:
    """See ``canvax.Pipeline.encode_image``."""
    shape = np.shape(image) if isinstance(image, Tracer | jax.Array | np.ndarray) else ()
    if isinstance(image, Tracer) or (len(shape) == 4 and shape[-1] in _channels(model) and height is width is None):
        if (height, width) != (None, None):
            raise InputError("image", "is traced and cannot be resized", cure="leave height and width out")
        return _encode_images(_weights(model, params, "vae"), _pixels(model, image), cfg=model.vae)[0]
    image = list(image) if len(shape) == 4 else image
    count = len(image) if isinstance(image, list | tuple) else 1
    if not count:
        raise InputError(
            "image", "holds no image", cure="give a PIL image, a path, an array or a list of these", value=[]
        )
    if image is None:
        raise InputError(
            "image", "is no image", cure="give a PIL image, a path, an array or a list of these", value=None
        )
    mode = model.networks.image_mode
    step, native = model.networks.size_step, model.native_size
    images = check_init_images(image, None, 1.0, (height, width), count, step, Options(), mode, native)
    assert images is not None
    pixels = jnp.asarray(np.stack([as_floats(image) for image in images.images]))
    return _encode_images(_weights(model, params, "vae"), pixels, cfg=model.vae)[0]


def denoise(model: Model, params: Params, latents: Array, timestep: Any, conditions: Conditions) -> Array:
    """See ``canvax.Pipeline.denoiser``."""
    denoiser = model.networks.denoiser
    weights = _weights(model, params, denoiser.component)
    latents = _latents(model, latents)
    _check_conditions(model, conditions, count := len(latents))
    arrays = {name: jnp.asarray(array) for name, array in conditions.items()}
    conditions = {name: jnp.broadcast_to(array, (count, *array.shape[1:])) for name, array in arrays.items()}
    timesteps = numbers("timestep", timestep)
    # The value of an array on a device is not read: a loop would wait for it in each step. EDM has negative timesteps.
    if isinstance(timestep, int | float | np.ndarray | np.generic):
        schedule, times = model.scheduler.schedule, np.asarray(timestep, np.float64)
        if not np.isfinite(times).all():
            raise InputError("timestep", "is not finite", value=timestep)
        last = schedule.last_timestep
        if schedule.timestep_unit == "index" and not ((times >= 0) & (times <= last)).all():
            raise InputError("timestep", f"is not in 0..{last}, the timesteps that the model knows", value=timestep)
    if timesteps.ndim > 1 or timesteps.size not in (1, len(latents)):
        raise InputError(
            "timestep", f"has shape {timesteps.shape}", cure=f"give one number, or one for each of {len(latents)}"
        )
    timesteps = jnp.broadcast_to(timesteps.astype(jnp.float32), latents.shape[:1])
    return evaluate(denoiser, weights, latents, timesteps, conditions).astype(jnp.float32)


def decode(model: Model, params: Params, latents: Array) -> Array:
    """See ``canvax.Pipeline.decode``."""
    return _decode_images(_weights(model, params, "vae"), _latents(model, latents), cfg=model.vae)


def _weights(model: Model, params: Any, component: str) -> Params:
    """Return the parameters of a component, traced or not."""
    if not isinstance(params, Mapping) or not isinstance(params.get(component), Mapping):
        names = sorted(map(str, params)) if isinstance(params, Mapping) else type(params).__name__
        raise InputError("params", f"has no {component!r} ({names!s:.80})", cure="pass pipe.params, or a dict like it")
    check_params(model.specs[component], params[component], component, more=True)
    return on_devices(params[component])


def numbers(name: str, value: Any, *, flags: bool = False) -> Array:
    """Return ``value`` as an array of real numbers, or of booleans if they are ``flags``; traced or not."""
    kinds, wanted = (jnp.floating, jnp.integer), "a number or an array of real numbers"
    if flags:
        kinds, wanted = (jnp.bool_,), "an array of booleans"
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of text, None, ragged lists, lists of deleted arrays
        array = None
    if array is None or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        kind = f"{array.dtype} {array.shape}" if array is not None else f"a {type(value).__name__}"
        raise InputError(name, f"is {kind}, not {wanted}")
    return array


def _channels(model: Model) -> list[int]:
    """Return how many channels an image to encode may have: 3, and 4 if the model has alpha."""
    return sorted({3, model.networks.image_channels})


def _pixels(model: Model, value: Any) -> Array:
    """Return images [B, H, W, C] float32 in 0..1 from an array of these, or of uint8, traced or not."""
    images, step = numbers("image", value), model.networks.size_step
    images = images[None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[-1] not in _channels(model) or 0 in images.shape:
        wanted = " or ".join(f"[B, H, W, {count}]" for count in _channels(model))
        raise InputError("image", f"has shape {images.shape}, not {wanted}")
    if any(side % step for side in images.shape[1:3]):
        problem = f"has shape {images.shape}, whose sides are not divisible by {step}"
        raise InputError("image", problem, cure="resize it")
    if jnp.issubdtype(images.dtype, jnp.integer):
        return images.astype(jnp.float32) / 255
    if not isinstance(images, Tracer):
        on_host = isinstance(value, np.ndarray)
        pixels = value if on_host else images
        low, high = jax.device_get((pixels.min(), pixels.max()))
        slack = 0 if on_host else 0.5  # pixels that an optimizer moves may leave the range
        if not (low >= -slack and high <= 1 + slack):
            raise InputError("image", f"has values in {low:g}..{high:g}, not in 0..1", cure="scale it, or give uint8")
    return images.astype(jnp.float32)


def _latents(model: Model, value: Any) -> Array:
    latents, channels = numbers("latents", value), model.vae.latent_channels
    if latents.ndim != 4 or latents.shape[-1] != channels:
        raise InputError("latents", f"has shape {latents.shape}, not [B, h, w, {channels}] numbers")
    if 0 in latents.shape:
        raise InputError("latents", f"has shape {latents.shape} and holds no image", cure="give those of at least one")
    return latents


def _check_conditions(model: Model, conditions: Any, count: int) -> None:
    """Check the structure of the conditions of ``count`` latents. Values are not read, since they may be traced."""
    cure = "give what pipe.encode returns, one entry or as many as there are latents"
    if not isinstance(conditions, Mapping):
        raise InputError("conditions", "is not a dict of arrays", cure=cure, value=conditions)
    networks = model.networks
    shapes = networks.conditions(networks.packing.shape(networks.latent_shape(count, *model.native_size)))
    patterns = {name: (*(None for _ in leaf.shape[1:-1]), *leaf.shape[1:][-1:]) for name, leaf in shapes.items()}
    patterns |= networks.text.patterns
    if unknown := sorted(map(repr, conditions.keys() - {*shapes, "role"})):
        raise InputError("conditions", f"has {', '.join(unknown)}, which {model.name} does not read", cure=cure)
    for name, leaf in shapes.items():
        if name not in conditions:
            if name == "guidance":  # the network does without
                continue
            raise InputError("conditions", f"has no {name!r}", cure=cure)
        array = numbers(f"conditions[{name!r}]", conditions[name], flags=leaf.dtype == jnp.bool_)
        if not (array.ndim and len(array) in (1, count) and fits(array.shape[1:], patterns[name])):
            shape = f"[{', '.join([str(count), *('T' if size is None else str(size) for size in patterns[name])])}]"
            raise InputError("conditions", f"has {name!r} of shape {array.shape}, not {shape}", cure=cure)
