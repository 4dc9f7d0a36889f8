"""The ControlNet classes of diffusers' Flax API: the network, and the pipeline that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, check_flag
from canvax.familiar import FLAX_CALL, FLAX_LOAD, FLAX_PAGE, Both, accepts
from canvax.families.controls import check_family, controlnet_config
from canvax.flax_api.base import FlaxPipeline
from canvax.flax_api.devices import host_device, on_host
from canvax.flax_api.images import CONTROL_STEP, prepare_images
from canvax.flax_api.inputs import Call
from canvax.flax_api.output import FlaxStableDiffusionPipelineOutput
from canvax.flax_api.parts import check_array
from canvax.flax_api.pipelines import translate_call
from canvax.models.controlnet import ControlNet, embedded_hint
from canvax.models.controlnet import controlnet as add_to_unet
from canvax.models.presets import SD15_UNET
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import place
from canvax.params import Params
from canvax.pipelines import functions
from canvax.pipelines.translate import loader
from canvax.types import Array, DType
from canvax.weights.cast import parse_dtype
from canvax.weights.controlnet import ControlFiles, ControlKind, open_control
from canvax.weights.load import Component, load_components
from canvax.weights.location import Location

NAME = "controlnet"
_FROM_PRETRAINED = ("pretrained_model_name_or_path", "dtype", "from_pt", "revision", "variant", "token", "cache_dir")


class FlaxControlNetOutput(NamedTuple):
    """The features that a ControlNet adds to the UNet's, [B, C, h, w] each."""

    down_block_res_samples: tuple[Array, ...]
    mid_block_res_sample: Array


@dataclass(frozen=True, eq=False)
class FlaxControlNetModel:
    """A ControlNet of Stable Diffusion 1.x or 2.x with the interface of diffusers' class of the same name.

    Attributes:
        files: the source of the network.
        net: the configuration of the network.
    """

    files: ControlFiles
    net: ControlNet

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``, parsed."""
        return self.files.config

    @classmethod
    @accepts(loader(FLAX_LOAD, _FROM_PRETRAINED, "an argument of from_pretrained", FLAX_PAGE), table=FLAX_LOAD)
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: DType | None = None,
        from_pt: bool = False,
        revision: str | None = None,
        variant: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        progress: bool = True,
    ) -> tuple[Self, Params]:
        """Load a network; return it and its parameters in host memory, for ``params["controlnet"]``.

        Args:
            pretrained_model_name_or_path: a Hub id, a folder, or a safetensors file.
            dtype: dtype of the parameters; by default float32.
            from_pt: ignored: PyTorch's safetensors and Flax's msgpack can both be loaded.
            revision: branch, tag or commit on the Hub.
            variant: which of several sets of weights to load, e.g. "fp16".
            token: Hub token.
            cache_dir: folder of the Hub's files.
            local_files_only: never connect to the Hub.
            progress: show downloads on stderr.

        Raises:
            InputError: an argument is invalid.
            CheckpointError: the network is missing, damaged or not supported.
            HubError: the Hub cannot be reached or does not have the network.
        """
        del from_pt

        def accept(kind: ControlKind, config: Mapping[str, Any]) -> None:
            if kind != "controlnet":
                raise InputError(f"{pretrained_model_name_or_path}: is no ControlNet; canvax.load takes T2I-Adapters")
            ControlNet.from_dict(config)

        source = Location(
            pretrained_model_name_or_path, revision=revision, variant=variant, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only, progress=progress, argument="controlnet",
        )  # fmt: skip
        files = open_control(source, accept=accept)
        config = files.config or controlnet_config(files.shapes, SD15_UNET)
        net, mesh = ControlNet.from_dict(config), make_mesh([host_device()])
        if files.difference:
            raise InputError(f"{files}: holds differences to a UNet; canvax.load(model, controlnet=...) reads it")
        params = load_components(
            files,
            [Component(NAME, net.spec, "diffusers")],
            dtype=jnp.float32 if dtype is None else parse_dtype(dtype),
            place=lambda param, array: place(param, array, mesh),
        )
        return cls(files, net), on_host(params[NAME])

    def apply(
        self,
        variables: Mapping[str, Any],
        sample: Array,
        timesteps: Any,
        encoder_hidden_states: Array,
        controlnet_cond: Array,
        conditioning_scale: float | Array = 1.0,
    ) -> FlaxControlNetOutput:
        """Compute the features to add to the UNet's; it is a pure function of its arrays.

        Args:
            variables: ``{"params": params["controlnet"]}``.
            sample: noisy latents [B, C, h, w].
            timesteps: [B], or a single number.
            encoder_hidden_states: features of the prompts [B, T, D].
            controlnet_cond: control images [B, 3, H, W] in 0..1.
            conditioning_scale: factor of the outputs.
        """
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise InputError("variables has no 'params'; write net.apply({'params': params['controlnet']}, ...)")
        p, factor = variables["params"], 2 ** len(self.net.hint.conditioning_embedding_out_channels[1:])
        check_array("sample", sample, (None, self.net.unet.in_channels, None, None))
        check_array("encoder_hidden_states", encoder_hidden_states, (None, None, self.net.unet.cross_attention_dim))
        height, width = (factor * side for side in np.shape(sample)[2:])
        check_array("controlnet_cond", controlnet_cond, (None, 3, height, width))
        functions.numbers("timesteps", timesteps)
        x, images = (jnp.moveaxis(jnp.asarray(array), 1, -1) for array in (sample, controlnet_cond))
        hint = embedded_hint(p["controlnet_cond_embedding"], images.astype(x.dtype), self.net.hint)
        times = jnp.broadcast_to(jnp.asarray(timesteps), x.shape[:1])
        outputs = add_to_unet(p, x, times, hint, self.net, text=jnp.asarray(encoder_hidden_states))
        *down, middle = (jnp.moveaxis(conditioning_scale * output, -1, 1) for output in outputs)
        return FlaxControlNetOutput(tuple(down), middle)


class FlaxStableDiffusionControlNetPipeline(FlaxPipeline):
    """Stable Diffusion 1.x and 2.x with a ControlNet, with the interface of diffusers' class of the same name."""

    XL = False

    @property
    def controlnet(self) -> FlaxControlNetModel:
        """The ControlNet as a separate network."""
        ((_, net),) = self.model.networks.controls
        assert isinstance(net, ControlNet)
        return FlaxControlNetModel(self.model.controls[0], net)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, controlnet: Any = None, **keywords: Any
    ) -> tuple[Self, Params]:
        """Load a pipeline; return it and its parameters, to which the caller adds those of the ControlNet.

        Args:
            pretrained_model_name_or_path: a Hub id or a folder of the model.
            controlnet: the network. ``FlaxControlNetModel.from_pretrained`` returns it and its parameters, which belong
                in ``params["controlnet"]``.
            keywords: the arguments of ``FlaxStableDiffusionPipeline.from_pretrained``.

        Raises:
            InputError: an argument is invalid, or the network is for another kind of model.
            CheckpointError: the checkpoint is missing, damaged or not supported.
            HubError: the Hub cannot be reached or does not have the model.
        """
        if not isinstance(controlnet, FlaxControlNetModel):
            raise InputError(
                f"controlnet={controlnet!r:.80} is no FlaxControlNetModel; write controlnet, controlnet_params = "
                "FlaxControlNetModel.from_pretrained(...), and pass the first"
            )
        pipeline, params = super().from_pretrained(pretrained_model_name_or_path, **keywords)
        model = pipeline.model
        check_family(str(controlnet.files), controlnet.net.unet, model)
        networks = replace(model.networks, controls=((NAME, controlnet.net),))
        model = replace(model, networks=networks, controls=(controlnet.files,))
        return Both(cls(model, pipeline.scheduler, pipeline.safety_checker), params)

    def prepare_text_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Return the token ids of prompts, int32 [B, 77]."""
        return self._ids(prompt)

    def prepare_image_inputs(self, image: Any) -> np.ndarray:
        """Return control images float32 [B, 3, H, W] in 0..1.

        Args:
            image: a PIL image, a path or an array, or a list of these. Sides are reduced to multiples of 64 pixels.

        Raises:
            InputError: an image cannot be read, or the images have several sizes.
        """
        count = len(image) if isinstance(image, list | tuple) else 1
        return prepare_images("image", image, count, step=CONTROL_STEP)

    @accepts(translate_call, table=FLAX_CALL)
    def __call__(
        self,
        prompt_ids: Any,
        image: Any,
        params: Params,
        prng_seed: Array,
        num_inference_steps: int = 50,
        guidance_scale: float | Array = 7.5,
        latents: Array | None = None,
        neg_prompt_ids: Any = None,
        controlnet_conditioning_scale: float | Array = 1.0,
        return_dict: bool = True,
        jit: bool = False,
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool | list[bool]]:
        """Generate images of the control images' size. B is the images per device; with ``jit``, D is the devices.

        Args:
            prompt_ids: from ``prepare_text_inputs``, [B, 77]; with ``jit`` [D, B, 77].
            image: from ``prepare_image_inputs``, [B, 3, H, W] in 0..1, with ``jit`` [D, B, 3, H, W]. An axis B or D of
                length 1 is broadcast.
            params: from ``from_pretrained``, with those of the ControlNet in ``params["controlnet"]``; with ``jit``
                after ``canvax.flax_api.replicate``.
            prng_seed: a key; with ``jit`` D keys.
            num_inference_steps: number of steps.
            guidance_scale: a number, or one for each image; 1 or less switches guidance off.
            latents: initial noise of unit variance [B, C, h, w]; with ``jit`` [D, B, C, h, w].
            neg_prompt_ids: the negative prompts, shaped like ``prompt_ids``; by default "".
            controlnet_conditioning_scale: strength of the ControlNet: a number, or one for each device or image.
            return_dict: False returns a plain tuple.
            jit: generate on several devices, with a leading device axis in all arrays.

        Returns:
            Images in 0..1, float32 [B, H, W, 3], with ``jit`` [D, B, H, W, 3]; and for each whether the safety checker
            refused it, or False.

        Raises:
            InputError: an argument is invalid; nothing has been compiled.
        """
        check_flag("return_dict", return_dict)
        size = (None, None)
        call = Call(
            prompt_ids, params, prng_seed, num_inference_steps, size, guidance_scale, latents, neg_prompt_ids, jit
        )
        images = self._draw(call, control=(image, controlnet_conditioning_scale))
        return self._output(images, params, jit, return_dict)
