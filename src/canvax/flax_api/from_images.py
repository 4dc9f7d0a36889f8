"""The old classes that begin from images: what each is called with, and what it returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from canvax.errors import InputError, check_flag
from canvax.familiar import FLAX_CALL, accepts
from canvax.flax_api.base import FlaxPipeline
from canvax.flax_api.images import prepare_images
from canvax.flax_api.inputs import Call
from canvax.flax_api.output import FlaxStableDiffusionPipelineOutput
from canvax.flax_api.pipelines import translate_call
from canvax.params import Params
from canvax.types import Array


class FlaxStableDiffusionImg2ImgPipeline(FlaxPipeline):
    """Image to image with Stable Diffusion 1.x and 2.x behind the interface of diffusers' class of that name."""

    XL = False

    def prepare_inputs(self, prompt: str | list[str], image: Any) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [B, 77], and images float32 [B, 3, H, W] in -1..1.

        Args:
            prompt: one prompt or several.
            image: a PIL image, a path or an array, for all prompts; or a list with one for each. Its sides are brought
                down to multiples of 32 pixels.

        Raises:
            InputError: naming the argument and what is wrong with it.
        """
        ids = self._ids(prompt)
        return ids, 2 * prepare_images("image", image, len(ids)) - 1

    @accepts(translate_call, table=FLAX_CALL)
    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Params,
        prng_seed: Array,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | Array = 7.5,
        noise: Array | None = None,
        neg_prompt_ids: Any = None,
        return_dict: bool = True,
        jit: bool = False,
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool | list[bool]]:
        """Draw pictures from pictures. D is the number of devices, B that of images on each; without ``jit`` no D.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            image: from ``prepare_inputs``, [B, 3, H, W] in -1..1, with ``jit`` [D, B, 3, H, W]; 1 for B or D is one
                image for all.
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            strength: 0..1, how much of the run is done: the last ``int(strength * num_inference_steps)`` steps.
            num_inference_steps: steps of the whole run.
            height: pixels, divisible by 8; the image's if not given, else it is resized.
            width: likewise.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            noise: of unit variance [B, C, h, w], with ``jit`` [D, B, C, h, w], to add to the image.
            neg_prompt_ids: what to keep away from, shaped like ``prompt_ids``; "" if not given.
            return_dict: False returns a plain tuple.
            jit: draw on several devices, the parameters of each under a leading axis.

        Returns:
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3]. And whether each was refused, or False.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        if strength is None:
            raise InputError("strength=None is not a number; give one in 0..1")
        check_flag("return_dict", return_dict)
        size = (height, width)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, noise, neg_prompt_ids, jit
        )
        images = self._draw(call, given={"image": image}, strength=strength)
        return self._output(images, params, jit, return_dict)


class FlaxStableDiffusionInpaintPipeline(FlaxPipeline):
    """Inpainting models of Stable Diffusion, whose UNets have 9 channels, behind diffusers' class of that name."""

    XL, INPAINTS = False, True

    def prepare_inputs(
        self, prompt: str | list[str], image: Any, mask: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids int32 [B, 77], masked images [B, 3, H, W] in -1..1, and masks of 0 and 1 [B, 1, H, W], float32.

        Args:
            prompt: one prompt or several.
            image: a PIL image, a path or an array, for all prompts; or a list with one for each. Its sides are brought
                down to multiples of 32 pixels.
            mask: likewise, of the size of the image: what is white, or nearer to that than to black, is generated.

        Raises:
            InputError: naming the argument and what is wrong with it.
        """
        ids = self._ids(prompt)
        images = 2 * prepare_images("image", image, len(ids)) - 1
        masks = (prepare_images("mask", mask, len(ids), grey=True) >= 0.5).astype(np.float32)
        if masks.shape[2:] != images.shape[2:]:
            raise InputError(
                f"mask is {masks.shape[3]} x {masks.shape[2]} and image {images.shape[3]} x {images.shape[2]}, in "
                "multiples of 32; bring them to one size with image.resize"
            )
        return ids, np.where(masks < 0.5, images, np.float32(0)), masks

    @accepts(translate_call, table=FLAX_CALL)
    def __call__(
        self,
        prompt_ids: Any,
        mask: Any,
        masked_image: Any,
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
        """Draw what is masked; as ``FlaxStableDiffusionImg2ImgPipeline.__call__``, with these differences.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            mask: from ``prepare_inputs``, [B, 1, H, W] in 0..1, with ``jit`` [D, B, 1, H, W]; from 0.5 on a pixel is
                generated.
            masked_image: from ``prepare_inputs``, [B, 3, H, W] in -1..1, with ``jit`` [D, B, 3, H, W].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: steps of the sampler.
            height: pixels, divisible by 8; by default the size the model was trained for. Masked image and mask are
                resized to it.
            width: likewise.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: what to keep away from, shaped like ``prompt_ids``; "" if not given.
            return_dict: False returns a plain tuple.
            jit: draw on several devices, the parameters of each under a leading axis.

        Returns:
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3]. And whether each was refused, or False.
            What stays has been through the autoencoder; ``canvax.load`` pastes the given pixels back.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        check_flag("return_dict", return_dict)
        size = (height, width)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        images = self._draw(call, given={"masked_image": masked_image, "mask": mask})
        return self._output(images, params, jit, return_dict)
