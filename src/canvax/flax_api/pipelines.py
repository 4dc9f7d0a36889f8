"""The text-to-image pipelines, with the signatures of diffusers' Flax classes."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np

from canvax.errors import InputError, check_flag
from canvax.familiar import FLAX_CALL, FLAX_PAGE, accepts, answer, renamed
from canvax.flax_api.inputs import Call
from canvax.flax_api.output import FlaxStableDiffusionPipelineOutput, FlaxStableDiffusionXLPipelineOutput
from canvax.flax_api.traced import FlaxTextToImage
from canvax.params import Params
from canvax.types import Array


def translate_call(arguments: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Translate the keywords of a call, of which ``others`` are not parameters.

    Raises:
        InputError: an argument is unknown, passed twice or not supported by canvax.
    """
    for name in renamed(arguments, others, FLAX_CALL):
        known = list(signature(type(arguments["self"]).__call__).parameters)
        raise InputError(answer(name, FLAX_CALL, known, "an argument of a call", FLAX_PAGE))
    return arguments


class FlaxStableDiffusionPipeline(FlaxTextToImage):
    """Stable Diffusion 1.x and 2.x with the interface of diffusers' class of the same name."""

    XL = False

    @accepts(translate_call, table=FLAX_CALL)
    def __call__(
        self,
        prompt_ids: Any,
        params: Params,
        prng_seed: Array,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | Array = 7.5,
        latents: Array | None = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool | list[bool]]:
        """Generate images. B is the number of images per device; with ``jit``, D is the number of devices.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: number of steps.
            height: height in pixels, divisible by 8; by default the size the model was trained for.
            width: width in pixels, divisible by 8; by default the size the model was trained for.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: the negative prompts, shaped like ``prompt_ids``; by default "".
            return_dict: False returns a plain tuple.
            jit: generate on several devices, with a leading device axis in all arrays.

        Returns:
            Images in 0..1, float32 [B, H, W, 3], with ``jit`` [D, B, H, W, 3]; and for each whether the safety checker
            refused it, or False.

        Raises:
            InputError: an argument is invalid; nothing has been compiled.
        """
        size = (height, width)
        check_flag("return_dict", return_dict)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        return self._output(self._draw(call), params, jit, return_dict)


class FlaxStableDiffusionXLPipeline(FlaxTextToImage):
    """Stable Diffusion XL's base model with the interface of diffusers' class of the same name."""

    XL = True

    @accepts(translate_call, table=FLAX_CALL)
    def __call__(
        self,
        prompt_ids: Any,
        params: Params,
        prng_seed: Array,
        num_inference_steps: int = 50,
        guidance_scale: float | Array = 7.5,
        height: int | None = None,
        width: int | None = None,
        latents: Array | None = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        output_type: str | None = None,
        jit: bool = False,
    ) -> FlaxStableDiffusionXLPipelineOutput | tuple[np.ndarray]:
        """Generate images. B is the number of images per device; with ``jit``, D is the number of devices.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 2, 77]; with ``jit`` [D, B, 2, 77].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: number of steps.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off. As in diffusers, it comes
                before height and width in this class.
            height: height in pixels, divisible by 8; by default the size the model was trained for.
            width: width in pixels, divisible by 8; by default the size the model was trained for.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: the negative prompts; by default zeros or "", as the model was trained with.
            return_dict: False returns a plain tuple.
            output_type: "latent" returns the latents without decoding, [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            jit: generate on several devices, with a leading device axis in all arrays.

        Returns:
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3].

        Raises:
            InputError: an argument is invalid; nothing has been compiled.
        """
        if output_type not in (None, "latent"):
            raise InputError(f"output_type={output_type!r} is neither None, for images, nor 'latent'")
        check_flag("return_dict", return_dict)
        size = (height, width)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        images = self._draw(call, decode=output_type is None)
        return FlaxStableDiffusionXLPipelineOutput(images) if return_dict else (images,)
