"""The base class of the Flax pipelines: loading, and calls that run canvax's three programs.

With ``jit=True`` every array has a leading device axis, and each device generates its images with its copy of the
parameters; otherwise there is one device and no device axis. In both cases the programs are compiled once for an image
size and batch size: steps, sampler, guidance, prompts and keys are runtime arguments. ``_generate`` is the same
computation as a single traceable function, for ``jax.pmap``, ``jax.jit`` and ahead-of-time compilation by the caller;
there the number of steps is static.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.compile.additions import ReadsControls, ReadsImage
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.denoise import WINDOW
from canvax.engine.batch import Batch, begun
from canvax.errors import CheckpointError, InputError, check_flag
from canvax.familiar import FLAX_ATTRIBUTES, FLAX_LOAD, FLAX_PAGE, Both, accepts, answer
from canvax.families.base import TOKENIZERS, Model
from canvax.files import named_path
from canvax.flax_api.devices import home_device, host_device, on_host, stacked_devices
from canvax.flax_api.images import CONTROL_STEP, ControlImage, SourceImages, check_images
from canvax.flax_api.inputs import (
    Call,
    Inputs,
    check_ids,
    check_inputs,
    check_kind,
    check_pair,
    check_weights,
    latents_shape,
    refuse_traced,
    weights_of,
    zeros_like,
)
from canvax.flax_api.output import FlaxStableDiffusionPipelineOutput, numpy_to_pil
from canvax.flax_api.parts import TextEncoder, Tokenizer, UNet, Vae
from canvax.flax_api.safety import FlaxStableDiffusionSafetyChecker, ImageProcessor, check_checker, load_checker
from canvax.flax_api.schedulers import FlaxScheduler, SchedulerState, table_of
from canvax.models.text import FIRST, SECOND, Conditions
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.params import Params
from canvax.pipelines.checks import check_steps, check_strength
from canvax.pipelines.loaded import open_model
from canvax.pipelines.result import summary
from canvax.pipelines.safety import COMPONENT, has_checker
from canvax.pipelines.translate import loader
from canvax.samplers import SamplerTable
from canvax.samplers.strength import steps_of_strength
from canvax.types import DType

FROM_PRETRAINED = (
    *("pretrained_model_name_or_path", "dtype", "scheduler", "safety_checker", "feature_extractor", "from_pt"),
    *("use_memory_efficient_attention", "split_head_dim", "revision", "variant", "token", "cache_dir"),
    *("local_files_only", "progress"),
)


@dataclass(frozen=True, eq=False, repr=False)
class FlaxPipeline:
    """A checkpoint with the interface of diffusers' Flax pipelines; subclasses add ``__call__``.

    Attributes:
        model: the model's source, configs and tokenizers.
        scheduler: the scheduler to use if ``params`` contains no scheduler state.
        safety_checker: checks the images of each call, with ``params["safety_checker"]``; None for no checks.
    """

    model: Model
    scheduler: FlaxScheduler
    safety_checker: FlaxStableDiffusionSafetyChecker | None = None
    _programs: dict[Any, Programs] = field(default_factory=dict, repr=False)

    XL: ClassVar[bool]
    INPAINTS: ClassVar[bool] = False

    def __repr__(self) -> str:
        return summary(self, type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        """Explain, in the error, attributes of the original pipelines that do not exist here."""
        if name == "_generate":
            raise AttributeError(f"{name}: with images there is none to trace: call the pipeline ({FLAX_PAGE})")
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(answer(name, FLAX_ATTRIBUTES, dir(type(self)), "an attribute of a pipeline", FLAX_PAGE))

    numpy_to_pil = staticmethod(numpy_to_pil)

    @property
    def unet(self) -> UNet:
        """The denoiser as a separate network."""
        return UNet(self.model, "unet")

    @property
    def vae(self) -> Vae:
        """The autoencoder as a separate network."""
        return Vae(self.model, "vae")

    @property
    def text_encoder(self) -> TextEncoder:
        """The first text encoder as a separate network."""
        return TextEncoder(self.model, FIRST)

    @property
    def text_encoder_2(self) -> TextEncoder:
        """SDXL's second text encoder as a separate network."""
        return TextEncoder(self.model, self._second(SECOND))

    @property
    def feature_extractor(self) -> ImageProcessor | None:
        """The image processor of the safety checker; None without a safety checker."""
        return self.safety_checker and self.safety_checker.feature_extractor

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the first text encoder."""
        return Tokenizer(self.model, TOKENIZERS[FIRST])

    @property
    def tokenizer_2(self) -> Tokenizer:
        """The tokenizer of SDXL's second text encoder."""
        return Tokenizer(self.model, TOKENIZERS[self._second(SECOND)])

    def _second(self, name: str) -> str:
        if not self.XL:
            raise AttributeError(name)
        return name

    def save_pretrained(self, save_directory: str | Path, params: Params, *, overwrite: bool = False) -> Path:
        """Write the model in the diffusers layout.

        Args:
            save_directory: the folder; it must be empty unless ``overwrite``.
            params: the parameters without a device axis; scheduler state and safety checker are not saved.
            overwrite: whether files there may be replaced.
        """
        save_directory = named_path("save_directory", save_directory)
        weights = weights_of(params, self.model.specs)
        check_weights(self.model.specs, weights)
        return self.model.save(save_directory, weights, overwrite=overwrite)

    @classmethod
    @accepts(loader(FLAX_LOAD, FROM_PRETRAINED, "an argument of from_pretrained", FLAX_PAGE), table=FLAX_LOAD)
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: DType | None = None,
        scheduler: FlaxScheduler | None = None,
        safety_checker: FlaxStableDiffusionSafetyChecker | Literal["own"] | None = "own",
        feature_extractor: None = None,
        from_pt: bool = False,
        use_memory_efficient_attention: bool = False,
        split_head_dim: bool = False,
        revision: str | None = None,
        variant: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        progress: bool = True,
    ) -> tuple[Self, Params]:
        """Load a pipeline; return it and its parameters in host memory, with the scheduler state as ``"scheduler"``.

        Args:
            pretrained_model_name_or_path: a Hub id, a folder, or "emoji".
            dtype: dtype of the parameters and the computation; by default float32.
            scheduler: replaces the checkpoint's scheduler.
            safety_checker: by default the checkpoint's, if it has one, with its parameters in
                ``params["safety_checker"]``; None for no checks; or a checker whose parameters the caller puts there.
            feature_extractor: must be None; the safety checker brings its feature extractor.
            from_pt: ignored: PyTorch's safetensors and Flax's msgpack can both be loaded.
            use_memory_efficient_attention: ignored: size and platform decide the attention kernel.
            split_head_dim: ignored: heads are always a separate axis.
            revision: branch, tag or commit on the Hub.
            variant: which of several sets of weights to load, e.g. "fp16".
            token: Hub token.
            cache_dir: folder of the Hub's files.
            local_files_only: never connect to the Hub.
            progress: show downloads on stderr.

        Raises:
            InputError: an argument is invalid.
            CheckpointError: the checkpoint is missing, damaged or not supported.
            HubError: the Hub cannot be reached or does not have the model.
        """
        del from_pt, use_memory_efficient_attention, split_head_dim
        if feature_extractor is not None:
            raise InputError(f"feature_extractor={feature_extractor!r:.80}: the safety checker has its own; pass None")
        check_checker(safety_checker)
        if scheduler is not None and not isinstance(scheduler, FlaxScheduler):
            raise InputError(
                f"scheduler={scheduler!r} is no scheduler of canvax.flax_api; their from_pretrained returns one and "
                "its state: pass the first"
            )
        hub: dict[str, Any] = {"revision": revision, "variant": variant, "token": token, "cache_dir": cache_dir}
        hub |= {"local_files_only": local_files_only, "progress": progress}
        model, _, params = open_model(
            pretrained_model_name_or_path,
            dtype=jnp.float32 if dtype is None else dtype,
            mesh=make_mesh([host_device()]),
            accept=partial(check_kind, str(pretrained_model_name_or_path), cls.XL),
            **hub,
        )
        if model.networks.embeds_guidance:
            raise CheckpointError(f"{model.name} takes the guidance scale as an input; load it with canvax.load")
        if model.networks.inpaints != cls.INPAINTS:
            raise CheckpointError(
                f"{model.name} is no inpainting model: its UNet has {model.unet.in_channels} channels and not "
                f"{2 * model.vae.latent_channels + 1}; write pipe = canvax.load(...), then pipe(prompt, image=, mask=)"
                if cls.INPAINTS
                else f"{model.name} takes the masked image as an input; load it with "
                f"{'' if cls.XL else 'FlaxStableDiffusionInpaintPipeline or '}canvax.load"
            )
        checkpoint_state = SchedulerState.of(model.files.config("scheduler"))
        state = checkpoint_state if scheduler is None else scheduler.create_state()
        params = {**on_host(params), "scheduler": state}
        if safety_checker == "own":
            named = not cls.XL and has_checker(model.files.index)
            loaded = load_checker(pretrained_model_name_or_path, hub) if named else None
            safety_checker = loaded[0] if loaded else None
            params |= {COMPONENT: loaded[1]} if loaded else {}
        return Both(cls(model, FlaxScheduler.of(state, xl=cls.XL), safety_checker), params)

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent along an axis."""
        return self.model.vae.factor

    def _ids(self, prompt: str | list[str]) -> np.ndarray:
        """Return the token ids of prompts, int32 [B, 77]; for SDXL's two tokenizers [B, 2, 77]."""
        if isinstance(prompt, list | tuple) and not prompt:
            raise InputError(f"prompt={prompt!r} is empty; give one prompt or more")
        if not isinstance(prompt, str | list):
            raise InputError(f"prompt={prompt!r} is neither a string nor a list of strings")
        prompts, length = [prompt] if isinstance(prompt, str) else prompt, min(self.model.text.shortest)
        ids = [tokenizer(prompts, length=length) for tokenizer in self.model.tokenizers.values()]
        return np.stack(ids, axis=1) if self.XL else ids[0]

    def _draw(
        self,
        call: Call,
        *,
        images: Mapping[str, Any] | None = None,
        strength: Any = None,
        control: tuple[Any, Any] | None = None,
        decode: bool = True,
    ) -> np.ndarray:
        """Generate images [(D,) B, H, W, 3], or without ``decode`` latents [(D,) B, C, h, w].

        ``images`` are the arguments for image and mask, by name. With ``strength`` the run begins from the image, and
        ``call.latents`` is the noise added to it. ``control`` is a control image, which determines the size, and its
        scale.
        """
        images, jit, params, size = images or {}, call.jit, call.params, call.size
        check_flag("jit", jit)
        if self.safety_checker is not None:
            self.safety_checker.check(params, stacked=jit)
        refuse_traced(**call._asdict(), strength=strength, control=control, **images)
        text = self.model.text
        ids = check_ids("prompt_ids", call.prompt_ids, text, jit)
        negative = None if call.neg_prompt_ids is None else check_pair(ids, call.neg_prompt_ids, text, jit)
        weights = weights_of(params, self.model.specs)
        devices = stacked_devices(weights, len(ids)) if jit else []
        check_weights(self.model.specs, weights, stacked=jit)
        table = self._table(params, call.num_inference_steps, strength)
        lead = ids.shape[: 2 if jit else 1]
        pixels, mask = check_images(images, lead) if images else (None, None)
        if pixels is not None and mask is None:
            size = (pixels.shape[2] if size[0] is None else size[0], pixels.shape[3] if size[1] is None else size[1])
        steered = control and ControlImage.of(*control, lead, CONTROL_STEP)
        if steered:
            size = steered.pixels.shape[2:4]
        shape = self._latents_shape(lead[-1], *size)
        if negative is None and not self.model.zero_negative_embeds:
            negative = np.broadcast_to(self._ids("")[0], ids.shape)
        inputs = check_inputs(call, ids, negative, shape[1:], lead, "latents" if strength is None else "noise")
        inputs = replace(inputs, control=steered)
        if pixels is not None:
            source = SourceImages.of(pixels, mask, shape, self.vae_scale_factor, call.prng_seed, lead)
            inputs = replace(inputs, source=source)
        programs = self._programs_on(devices or [home_device(weights)], stacked=jit)
        drawn = self._run(programs, weights, inputs, table, decode=decode)
        if not decode:
            drawn = np.moveaxis(drawn, -1, 1)
        return drawn.reshape(*lead, *drawn.shape[1:])

    def _output(
        self, images: np.ndarray, params: Params, jit: bool, return_dict: bool
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool | list[bool]]:
        """Return a call's output: images, and for each whether the safety checker refused it (False without)."""
        output: tuple[np.ndarray, bool | list[bool]] = images, False
        if self.safety_checker is not None:
            output = self.safety_checker.look(images, params, stacked=jit)
        return FlaxStableDiffusionPipelineOutput(*output) if return_dict else output

    def _run(
        self, programs: Programs, weights: Params, inputs: Inputs, table: SamplerTable, *, decode: bool
    ) -> np.ndarray:
        """Encode, denoise and decode on the devices of ``programs``.

        Returns images [N, H, W, 3], or without ``decode`` latents [N, h, w, C].
        """
        split, count = over_batch(programs.mesh), len(inputs.ids)
        params = jax.device_put(weights, split if programs.stacked else replicated(programs.mesh))
        latents = (count, *inputs.noise.shape[1:])
        kinds = Kinds(
            guided=(inputs.guided,),
            decoder="whole" if decode else None,
        ).adding(
            inputs.source is not None and ReadsImage("whole"),
            inputs.control and ReadsControls(tuple(name for name, _ in self.model.networks.controls)),
        )
        ready = programs.ready(params, latents, kinds)

        def encoded(ids: np.ndarray) -> Conditions:
            skip = np.zeros(count, np.int32)
            inputs = {name: {"ids": each, "skip": skip} for name, each in self._by_encoder(ids).items()}
            return ready["text encoder"](params, jax.device_put(inputs, split))[0]

        conditions, negative = encoded(inputs.ids), None
        if inputs.guided:
            negative = zeros_like(conditions) if inputs.negative is None else encoded(inputs.negative)
        sizes = jax.device_put(self._size_conditions(count, latents[1:3]), split)
        images = None
        if inputs.source is not None:
            encoder = partial(ready["image encoder"], params)
            images = inputs.source.encoded(lambda pixels: encoder(jax.device_put(pixels, split)), programs.mesh.size)
            if inputs.source.masks is not None:
                masked = np.concatenate([inputs.source.masks, images], axis=-1)
                sizes, images = sizes | {"masked": jax.device_put(masked, split)}, None
        conditions, negative = conditions | sizes, negative and negative | sizes
        columns = None
        if inputs.control is not None:
            ((name, net),) = self.model.networks.controls
            read = partial(ready[name], params)
            kept = inputs.control.read(lambda pixels: read(jax.device_put(pixels, split)), programs.mesh.size, count)
            steered: Any = {name: jax.device_put(kept, split)}
            conditions, negative = conditions | steered, negative and negative | steered
            shape = (len(table), 1, 2, net.layers)
            columns = [{"control": np.full(shape, scale, np.float32)} for scale in inputs.control.scales]

        batch = Batch(ready, params, programs.mesh, latents)
        tables = [table.with_guidance(scale) for scale in inputs.guidance]
        prompts = (conditions,) if negative is None else (negative, conditions)
        placing = self.model.networks.packing, split, latents
        batch.begin(begun(*placing, inputs.noise, prompts, inputs.words, tables, images=images, columns=columns))
        while batch.rows_left:
            batch.step(WINDOW)
        final = jax.device_get(batch.samples)
        return jax.device_get(ready["decoder"](params, jax.device_put(final, split))) if decode else final

    def _by_encoder(self, ids: Any) -> dict[str, Any]:
        """Split the ids of ``prepare_inputs`` into the ids [B, 77] of each text encoder."""
        names = list(self.model.text.names)
        return {name: ids[:, i] for i, name in enumerate(names)} if self.XL else {names[0]: ids}

    def _table(self, params: Params, steps: int, strength: Any = None) -> SamplerTable:
        most = self.model.scheduler.schedule.num_train_timesteps
        steps, skip = check_steps(steps, None, 50, most), 0
        if strength is not None:
            _, skip = steps_of_strength(check_strength(strength), steps, "diffusers", most)
        return table_of(params.get("scheduler", self.scheduler.create_state()), steps, xl=self.XL, skip=skip)

    def _latents_shape(self, batch: int, height: Any, width: Any) -> tuple[int, int, int, int]:
        vae = self.model.vae
        return latents_shape(batch, height, width, self.model.native_size[0], vae.factor, vae.latent_channels)

    def _size_conditions(self, batch: int, latents: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return SDXL's size conditions of uncropped images for latents [B, h, w, ...]; {} for other models.

        They are the same for prompt and negative prompt.
        """
        height, width = (side * self.vae_scale_factor for side in latents)
        numbers, _ = self.model.size_conditions(height, width, {})
        return {name: np.tile(row, (batch, 1)) for name, row in numbers.items()}

    def _programs_on(self, devices: list[Any], *, stacked: bool) -> Programs:
        key = (stacked, *(device.id for device in devices))
        if key not in self._programs:
            self._programs[key] = Programs(self.model.networks, make_mesh(devices), stacked=stacked)
        return self._programs[key]
