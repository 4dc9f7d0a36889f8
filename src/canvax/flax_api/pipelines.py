"""The old classes: what each is called with, and what it returns."""

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


def translate_call(own: dict[str, Any], others: dict[str, Any]) -> tuple[dict[str, Any], None]:
    """The keywords of a call.

    Raises:
        InputError: an argument is not known, is given twice or means what canvax does not have.
    """
    for name in renamed(own, others, FLAX_CALL):
        known = list(signature(type(own["self"]).__call__).parameters)
        raise InputError(answer(name, FLAX_CALL, known, "an argument of a call", FLAX_PAGE))
    return own, None


class FlaxStableDiffusionPipeline(FlaxTextToImage):
    """Stable Diffusion 1.x and 2.x behind the interface of diffusers' class of that name."""

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
        """Draw pictures. D is the number of devices, B that of images on each; without ``jit`` there is no D.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: steps of the sampler.
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: what to keep away from, shaped like ``prompt_ids``; "" if not given.
            return_dict: False returns a plain tuple.
            jit: draw on several devices, the parameters of each under a leading axis.

        Returns:
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3]. And whether each was refused, or False.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        size = (height, width)
        check_flag("return_dict", return_dict)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        return self._output(self._draw(call), params, jit, return_dict)


class FlaxStableDiffusionXLPipeline(FlaxTextToImage):
    """Stable Diffusion XL, its base model, behind the interface of diffusers' class of that name."""

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
        """Draw pictures; as ``FlaxStableDiffusionPipeline.__call__``, with these differences.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 2, 77]; with ``jit`` [D, B, 2, 77].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: steps of the sampler.
            guidance_scale: before height and width, as it always was here.
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: what to keep away from; if not given zeros or "", whichever the model was trained with.
            return_dict: False returns a plain tuple.
            output_type: "latent" returns the latents [B, C, h, w], with ``jit`` [D, B, C, h, w], not decoded.
            jit: draw on several devices, the parameters of each under a leading axis.

        Returns:
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3].

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
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
