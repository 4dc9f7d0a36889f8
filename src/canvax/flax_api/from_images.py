"""The image-to-image and inpainting pipelines, with the signatures of diffusers' Flax classes."""

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
    """Image to image with Stable Diffusion 1.x and 2.x, with the interface of diffusers' class of the same name."""

    XL = False

    def prepare_inputs(self, prompt: str | list[str], image: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids int32 [B, 77], and images float32 [B, 3, H, W] in -1..1.

        Args:
            prompt: one prompt or several.
            image: a PIL image, a path or an array, for all prompts; or a list with one for each. Its sides are reduced
                to multiples of 32 pixels.

        Raises:
            InputError: an argument is invalid, or an image cannot be read.
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
        """Generate images from images. B is the number of images per device; with ``jit``, D is the devices.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            image: from ``prepare_inputs``, [B, 3, H, W] in -1..1, with ``jit`` [D, B, 3, H, W]. An axis B or D of
                length 1 is broadcast.
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            strength: fraction of the run to do, 0..1: the last ``int(strength * num_inference_steps)`` steps.
            num_inference_steps: number of steps of the whole run.
            height: height in pixels, divisible by 8; by default the image's. The image is resized to it.
            width: width in pixels, divisible by 8; by default the image's. The image is resized to it.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            noise: noise of unit variance to add to the image, [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: the negative prompts, shaped like ``prompt_ids``; by default "".
            return_dict: False returns a plain tuple.
            jit: generate on several devices, with a leading device axis in all arrays.

        Returns:
            Images in 0..1, float32 [B, H, W, 3], with ``jit`` [D, B, H, W, 3]; and for each whether the safety checker
            refused it, or False.

        Raises:
            InputError: an argument is invalid; nothing has been compiled.
        """
        if strength is None:
            raise InputError("strength=None is not a number; give one in 0..1")
        check_flag("return_dict", return_dict)
        size = (height, width)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, noise, neg_prompt_ids, jit
        )
        images = self._draw(call, images={"image": image}, strength=strength)
        return self._output(images, params, jit, return_dict)


class FlaxStableDiffusionInpaintPipeline(FlaxPipeline):
    """Inpainting models of Stable Diffusion (UNets with 9 channels) with the interface of diffusers' class."""

    XL, INPAINTS = False, True

    def prepare_inputs(
        self, prompt: str | list[str], image: Any, mask: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids int32 [B, 77], masked images [B, 3, H, W] in -1..1, and masks of 0 and 1 [B, 1, H, W], float32.

        Args:
            prompt: one prompt or several.
            image: a PIL image, a path or an array, for all prompts; or a list with one for each. Its sides are reduced
                to multiples of 32 pixels.
            mask: a mask of the image's size, in the same forms; pixels nearer to white than to black are generated.

        Raises:
            InputError: an argument is invalid, an image cannot be read, or the sizes of image and mask differ.
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
        """Generate the masked part of images. B is the images per device; with ``jit``, D is the devices.

        Args:
            prompt_ids: from ``prepare_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            mask: from ``prepare_inputs``, [B, 1, H, W] in 0..1, with ``jit`` [D, B, 1, H, W]; pixels of 0.5 and more
                are generated.
            masked_image: from ``prepare_inputs``, [B, 3, H, W] in -1..1, with ``jit`` [D, B, 3, H, W].
            params: from ``from_pretrained``; with ``jit`` after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: number of steps.
            height: height in pixels, divisible by 8; by default the size the model was trained for. Masked image and
                mask are resized to it.
            width: width in pixels, divisible by 8; by default the size the model was trained for. Masked image and mask
                are resized to it.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: the negative prompts, shaped like ``prompt_ids``; by default "".
            return_dict: False returns a plain tuple.
            jit: generate on several devices, with a leading device axis in all arrays.

        Returns:
            Images in 0..1, float32 [B, H, W, 3], with ``jit`` [D, B, H, W, 3]; and for each whether the safety checker
            refused it, or False. The unmasked part has passed through the autoencoder; pipelines of ``canvax.load``
            paste the original pixels back.

        Raises:
            InputError: an argument is invalid; nothing has been compiled.
        """
        check_flag("return_dict", return_dict)
        size = (height, width)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        images = self._draw(call, images={"masked_image": masked_image, "mask": mask})
        return self._output(images, params, jit, return_dict)
