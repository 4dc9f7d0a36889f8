"""The three networks as functions of arrays, for loops of one's own: they can be jitted, differentiated and mapped.

``docs/under-the-pipeline.md`` shows them at work. They run where their arrays are; the pipeline's own programs, its
padding and its mesh have no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from canvax.errors import InputError
from canvax.families.base import Ids, Model
from canvax.images.masks import as_floats
from canvax.models.decode import decode_images, encode_images
from canvax.models.text import Conditions, encode_text
from canvax.params import Params
from canvax.pipelines.checks import check_guidance, check_prompts, check_second, check_size
from canvax.pipelines.encoding import Encoding, ids_of, is_plain
from canvax.pipelines.given import check_given
from canvax.pipelines.options import Options
from canvax.pipelines.texts import read_texts
from canvax.prompts.grammar import PromptSyntax
from canvax.types import Array

_encode_text = jax.jit(encode_text, static_argnames="cfg")
_encode_images = jax.jit(encode_images, static_argnames="cfg")
_decode_images = jax.jit(decode_images, static_argnames=("cfg", "tiled"))


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
    """See ``canvax.StableDiffusion.encode``."""
    prompts, _ = check_prompts(prompt, None, 1)
    seconds = check_second("prompt_2", prompt_2, prompts, 1)
    options = Options(clip_skip=clip_skip, prompt_syntax=prompt_syntax)
    texts = read_texts(model, (prompts, seconds), ([""], [""]), options, 1)
    if texts.parts > 1 or (texts.weights != 1).any():
        raise InputError(f"prompt={prompt!r:.80} adds prompts up (AND): encode each of them")
    weights = {name: params[name] for name in model.text.parts}

    def one_pass(ids: Ids) -> Conditions:
        return _encode_text(weights, dict(ids), jnp.int32(options.clip_skip), cfg=model.text)

    wordings = texts.stages[0].parts[0]
    if is_plain(wordings, texts.chunks):
        conditions = dict(one_pass(ids_of(model, wordings)))
    else:
        encoding = Encoding(model, texts.syntax, texts.chunks, one_pass, range(len(prompts)), jnp)
        conditions = encoding(wordings)
        conditions["text"] = conditions["text"].astype(jax.tree.leaves(weights)[0].dtype)
    (tall, wide), factor = model.native_size, model.vae.factor
    size = check_size("height", height, tall, factor), check_size("width", width, wide, factor)
    if (numbers := model.size_conditions(*size, {})) is not None:
        conditions["time_ids"] = jnp.tile(jnp.asarray(numbers[0]), (len(prompts), 1))
    if model.networks.embeds_guidance:
        scale = check_guidance(guidance_scale, model.defaults.guidance_scale)
        conditions["guidance"] = jnp.full(len(prompts), scale, jnp.float32)
    return conditions


def encode_image(model: Model, params: Params, image: Any, height: int | None, width: int | None) -> Array:
    """See ``canvax.StableDiffusion.encode_image``."""
    count = len(image) if isinstance(image, list | tuple) else 1
    given = check_given(image, None, 1.0, (height, width), count, model.vae.factor, Options())
    if given is None:
        raise InputError("image=None: give a PIL image, a path, an array or a list of these")
    pixels = jnp.asarray(np.stack([as_floats(one) for one in given.images]))
    return _encode_images(params["vae"], pixels, cfg=model.vae)[0]


def denoise(model: Model, params: Params, latents: Array, timestep: Any, conditions: Conditions) -> Array:
    """See ``canvax.StableDiffusion.denoiser``."""
    denoiser = model.networks.denoiser
    weights = params[denoiser.component]
    timesteps = jnp.broadcast_to(jnp.asarray(timestep, jnp.float32), latents.shape[:1])
    output = denoiser.apply(weights, latents, timesteps, denoiser.prepare(weights, conditions))
    return output.astype(jnp.float32)


def decode(model: Model, params: Params, latents: Array) -> Array:
    """See ``canvax.StableDiffusion.decode``."""
    if not isinstance(latents, Tracer):
        channels = model.vae.latent_channels
        if np.ndim(latents) != 4 or np.shape(latents)[-1] != channels or np.asarray(latents).dtype.kind not in "fiuV":
            raise InputError(f"latents of shape {np.shape(latents)} are not [B, h, w, {channels}] numbers")
        if 0 in np.shape(latents):
            raise InputError(f"latents of shape {np.shape(latents)} hold no image; give those of at least one")
    return _decode_images(params["vae"], jnp.asarray(latents), cfg=model.vae)
