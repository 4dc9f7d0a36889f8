"""The base class of text to image: ``prepare_inputs``, and ``_generate``, which callers can trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from canvax.denoise import InFlight, StepInputs, denoise
from canvax.flax_api.base import FlaxPipeline
from canvax.flax_api.inputs import (
    check_guidance,
    check_ids,
    check_latents,
    check_pair,
    check_static,
    check_weights,
    weights_of,
)
from canvax.flax_api.keys import draw, wrap_keys
from canvax.models.decode import decode_images
from canvax.models.text import Conditions, encode_text
from canvax.params import Params
from canvax.samplers import SLOTS
from canvax.samplers.table import NOISE
from canvax.types import Array


class FlaxTextToImage(FlaxPipeline):
    """The base class of pipelines that need only prompts."""

    def prepare_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Return the token ids of prompts, int32 [B, 77]; for SDXL's two tokenizers [B, 2, 77].

        Raises:
            InputError: ``prompt`` is neither a string nor a list of strings.
        """
        return self._ids(prompt)

    def _generate(
        self,
        prompt_ids: Array,
        params: Params,
        prng_seed: Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | Array = 7.5,
        latents: Array | None = None,
        neg_prompt_ids: Array | None = None,
        return_latents: bool = False,
    ) -> Array:
        """Generate the images of a device [B, H, W, 3] as a single traceable function, with arguments as without jit.

        Steps, height, width and ``return_latents`` (arguments 3, 4, 5, 9) are static. With ``return_latents`` the
        result is the latents [B, C, h, w] without decoding.
        """
        check_static("num_inference_steps", num_inference_steps)
        prompt_ids = check_ids("prompt_ids", prompt_ids, self.model.text)
        batch = prompt_ids.shape[0]
        check_weights(self.model.specs, weights_of(params, self.model.specs))
        shape = self._latents_shape(batch, height, width)
        table = self._table(params, num_inference_steps)
        noise, words = draw(wrap_keys(prng_seed), shape)
        if latents is not None:
            noise = jnp.moveaxis(check_latents(latents, shape), 1, -1)
        if neg_prompt_ids is not None:
            neg_prompt_ids = check_pair(prompt_ids, neg_prompt_ids, self.model.text)
        traced = isinstance(guidance_scale, Tracer)
        scales: Any = guidance_scale if traced else check_guidance(guidance_scale, (batch,))

        def encode(ids: Array) -> Conditions:
            text = self.model.text
            inputs = {name: {"ids": each} for name, each in self._by_encoder(ids).items()}
            return encode_text({name: params[name] for name in text.names}, inputs, cfg=text)

        conditions, negative = encode(prompt_ids), None
        if traced or (scales > 1).any():
            if neg_prompt_ids is not None:
                negative = encode(neg_prompt_ids)
            elif self.model.zero_negative_embeds:
                negative = jax.tree.map(jnp.zeros_like, conditions)
            else:
                negative = encode(jnp.broadcast_to(self._ids(""), prompt_ids.shape))
        sizes = jax.tree.map(jnp.asarray, self._size_conditions(batch, shape[2:]))
        conditions, negative = conditions | sizes, negative and negative | sizes

        rows = {
            name: jnp.broadcast_to(column, (batch, *column.shape))
            for name, column in table.window(0, len(table)).items()
        }
        guidance = jnp.maximum(jnp.asarray(scales, jnp.float32).reshape(-1, 1), 1.0)
        rows["guidance"] = jnp.broadcast_to(guidance, (batch, len(table)))
        state = jnp.zeros((batch, SLOTS, *noise.shape[1:])).at[:, 0].set(noise * np.float32(table.init_scale))
        noisy, count = jnp.asarray(table.M[:, :, NOISE].any(axis=1)), jnp.int32(len(table))
        prompts = (conditions,) if negative is None else (negative, conditions)
        inputs = StepInputs(InFlight(state, prompts, words), rows, {"noisy": noisy}, count)
        denoiser = self.model.networks.denoiser
        state, *_ = denoise(params[denoiser.component], inputs, denoiser=denoiser)
        if return_latents:
            return jnp.moveaxis(state[:, 0], -1, 1)
        return decode_images(params["vae"], state[:, 0], cfg=self.model.vae)
