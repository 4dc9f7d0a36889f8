"""What the old pipelines share: loading, and the old way of calling over canvax's three programs.

With ``jit=True`` every array has a leading device axis and each device draws its own images with its own copy of the
parameters; without it there is one device and no such axis. Either way the programs are compiled once for a size and
batch: steps, sampler, guidance, prompts and keys are arguments. ``_generate`` is the same computation as one traceable
function, for ``jax.pmap``, ``jax.jit`` and ahead-of-time compiling by the caller; there the steps are static.
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

from canvax.checked import checked
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.denoise import WINDOW
from canvax.engine.batch import Batch
from canvax.errors import CheckpointError, InputError, check_flag
from canvax.familiar import FLAX_ATTRIBUTES, FLAX_LOAD, FLAX_PAGE, Both, accepts, answer
from canvax.families.base import TOKENIZERS, Model
from canvax.files import named_folder
from canvax.flax_api.devices import home_device, host_device, on_host, stacked_devices
from canvax.flax_api.images import CONTROL_STEP, ControlImage, Given, check_given
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
from canvax.flax_api.safety import FlaxStableDiffusionSafetyChecker, ImageProcessor, check_checker, own_checker
from canvax.flax_api.schedulers import FlaxScheduler, SchedulerState, table_of
from canvax.models.text import FIRST, SECOND, Conditions
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.params import Params
from canvax.pipelines.checks import check_steps
from canvax.pipelines.display import summary
from canvax.pipelines.open import open_model
from canvax.pipelines.safety import COMPONENT, has_checker
from canvax.pipelines.translate import loader
from canvax.samplers import SamplerTable
from canvax.samplers.strength import check_strength, steps_of_strength
from canvax.types import DType

FROM_PRETRAINED = (
    *("pretrained_model_name_or_path", "dtype", "scheduler", "safety_checker", "feature_extractor", "from_pt"),
    *("use_memory_efficient_attention", "split_head_dim", "revision", "variant", "token", "cache_dir"),
    *("local_files_only", "progress"),
)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class FlaxPipeline:
    """A checkpoint behind the interface of diffusers' Flax pipelines; its classes add their ``__call__``.

    Attributes:
        model: where the model came from, its configs and its tokenizers.
        scheduler: what draws when ``params`` has no state of one.
        safety_checker: looks at the images of each call, with ``params["safety_checker"]``; None for none.
    """

    model: Model
    scheduler: FlaxScheduler
    safety_checker: FlaxStableDiffusionSafetyChecker | None = None
    _programs: dict[Any, Programs] = field(default_factory=dict, repr=False)

    XL: ClassVar[bool]
    INPAINTS: ClassVar[bool] = False

    def __repr__(self) -> str:
        return summary(self)

    def __getattr__(self, name: str) -> Any:
        """What the old pipelines had and this one has not gets a sentence."""
        if name == "_generate":
            raise AttributeError(f"{name}: with images there is none to trace: call the pipeline ({FLAX_PAGE})")
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(answer(name, FLAX_ATTRIBUTES, dir(type(self)), "an attribute of a pipeline", FLAX_PAGE))

    numpy_to_pil = staticmethod(numpy_to_pil)

    @property
    def unet(self) -> UNet:
        """The denoiser by itself."""
        return UNet(self.model, "unet")

    @property
    def vae(self) -> Vae:
        """The autoencoder by itself."""
        return Vae(self.model, "vae")

    @property
    def text_encoder(self) -> TextEncoder:
        """The first text encoder by itself."""
        return TextEncoder(self.model, FIRST)

    @property
    def text_encoder_2(self) -> TextEncoder:
        """SDXL's second one."""
        return TextEncoder(self.model, self._second(SECOND))

    @property
    def feature_extractor(self) -> ImageProcessor | None:
        """What prepares images for the safety checker; None without one."""
        return self.safety_checker and self.safety_checker.feature_extractor

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the first text encoder."""
        return Tokenizer(self.model, TOKENIZERS[FIRST])

    @property
    def tokenizer_2(self) -> Tokenizer:
        """That of SDXL's second one."""
        return Tokenizer(self.model, TOKENIZERS[self._second(SECOND)])

    def _second(self, name: str) -> str:
        if not self.XL:
            raise AttributeError(name)
        return name

    @checked
    def save_pretrained(self, save_directory: str | Path, params: Params, *, overwrite: bool = False) -> Path:
        """Write the model in the diffusers layout; ``params`` without a device axis.

        Args:
            save_directory: where to write; one that is not empty only with ``overwrite``.
            params: the parameters; a scheduler's state and a safety checker in them are left out.
            overwrite: whether files there may be replaced.
        """
        save_directory = named_folder("save_directory", save_directory)
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
        """The pipeline, and its parameters in host memory with the scheduler's state under ``"scheduler"``.

        Args:
            pretrained_model_name_or_path: a Hub id, a folder, or "emoji".
            dtype: dtype of the parameters, and so of what is computed with them; float32 if not given.
            scheduler: in place of the checkpoint's own.
            safety_checker: by default the checkpoint's own where it has one, with its parameters under
                "safety_checker"; None for none; or one whose parameters the caller puts there.
            feature_extractor: None; the safety checker has its own.
            from_pt: needed no more: PyTorch's safetensors and Flax's msgpack are both read.
            use_memory_efficient_attention: decides nothing: the kernel is chosen by size and platform.
            split_head_dim: decides nothing: heads are always kept apart, which is what it asked for.
            revision: as for ``canvax.load``, like those that follow.
            variant: which of several sets of weights.
            token: Hub token.
            cache_dir: where the Hub's files are kept.
            local_files_only: never ask the Hub.
            progress: show downloads on stderr.

        Raises:
            InputError: an argument cannot be used.
            CheckpointError: the checkpoint is missing, damaged or refused.
            HubError: the Hub cannot be reached or does not have it.
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
        own = SchedulerState.of(model.files.config("scheduler"))
        state = own if scheduler is None else scheduler.create_state()
        params = {**on_host(params), "scheduler": state}
        if safety_checker == "own":
            named = not cls.XL and has_checker(model.files.index)
            found = own_checker(pretrained_model_name_or_path, hub) if named else None
            safety_checker = found[0] if found else None
            params |= {COMPONENT: found[1]} if found else {}
        return Both(cls(model, FlaxScheduler.of(state, xl=cls.XL), safety_checker), params)

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent along an axis."""
        return self.model.vae.factor

    def _ids(self, prompt: str | list[str]) -> np.ndarray:
        """Token ids of one prompt or several, int32 [B, 77]; SDXL has two tokenizers and [B, 2, 77].

        Raises:
            InputError: neither a string nor a list of strings.
        """
        if isinstance(prompt, list | tuple) and not prompt:
            raise InputError(f"prompt={prompt!r} is empty; give one prompt or more")
        if not isinstance(prompt, str | list):
            raise InputError(f"prompt={prompt!r} is neither a string nor a list of strings")
        prompts, length = [prompt] if isinstance(prompt, str) else prompt, self.model.text.tokens
        ids = [tokenizer(prompts, length=length) for tokenizer in self.model.tokenizers.values()]
        return np.stack(ids, axis=1) if self.XL else ids[0]

    def _draw(
        self,
        call: Call,
        *,
        given: Mapping[str, Any] | None = None,
        strength: Any = None,
        control: tuple[Any, Any] | None = None,
        decode: bool = True,
    ) -> np.ndarray:
        """Images [(D,) B, H, W, 3], or latents [(D,) B, C, h, w] if not to ``decode``.

        ``given`` are the arguments that hold the image and the mask. With ``strength`` the run begins from the image,
        and ``call.latents`` are the noise that is added. ``control`` is a control image, whose size is generated, and
        how strong it is.
        """
        given, jit, params, size = given or {}, call.jit, call.params, call.size
        check_flag("jit", jit)
        if self.safety_checker is not None:
            self.safety_checker.check(params, stacked=jit)
        refuse_traced(**call._asdict(), strength=strength, control=control, **given)
        text = self.model.text
        ids = check_ids("prompt_ids", call.prompt_ids, text, jit)
        negative = None if call.neg_prompt_ids is None else check_pair(ids, call.neg_prompt_ids, text, jit)
        weights = weights_of(params, self.model.specs)
        devices = stacked_devices(weights, len(ids)) if jit else []
        check_weights(self.model.specs, weights, stacked=jit)
        table = self._table(params, call.num_inference_steps, strength)
        lead = ids.shape[: 2 if jit else 1]
        pixels, mask = check_given(given, lead) if given else (None, None)
        if pixels is not None and mask is None:
            size = (pixels.shape[2] if size[0] is None else size[0], pixels.shape[3] if size[1] is None else size[1])
        steered = control and ControlImage.of(*control, lead, CONTROL_STEP)
        if steered:
            size = steered.pixels.shape[2:4]
        shape = self._latents_shape(lead[-1], *size)
        if negative is None and not self.model.zeros_for_no_negative:
            negative = np.broadcast_to(self._ids("")[0], ids.shape)
        inputs = check_inputs(call, ids, negative, shape[1:], lead, "latents" if strength is None else "noise")
        inputs = replace(inputs, control=steered)
        if pixels is not None:
            inputs = replace(inputs, given=Given.of(pixels, mask, shape, self.vae_scale_factor, call.prng_seed, lead))
        programs = self._programs_on(devices or [home_device(weights)], stacked=jit)
        drawn = self._run(programs, weights, inputs, table, decode=decode)
        if not decode:
            drawn = np.moveaxis(drawn, -1, 1)
        return drawn.reshape(*lead, *drawn.shape[1:])

    def _output(
        self, images: np.ndarray, params: Params, jit: bool, return_dict: bool
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool | list[bool]]:
        """What a call returns: images, and which of them the safety checker refused; False where there is none."""
        found: tuple[np.ndarray, bool | list[bool]] = images, False
        if self.safety_checker is not None:
            found = self.safety_checker.look(images, params, stacked=jit)
        return FlaxStableDiffusionPipelineOutput(*found) if return_dict else found

    def _run(
        self, programs: Programs, weights: Params, inputs: Inputs, table: SamplerTable, *, decode: bool
    ) -> np.ndarray:
        """Encode, denoise, decode on the devices of ``programs``; images [N, H, W, 3], or latents [N, h, w, C]."""
        split, count = over_batch(programs.mesh), len(inputs.ids)
        params = jax.device_put(weights, split if programs.stacked else replicated(programs.mesh))
        latents = (count, *inputs.noise.shape[1:])
        kinds = Kinds(
            guided=(inputs.guided,),
            decoder="whole" if decode else None,
            image_encoder=None if inputs.given is None else "whole",
            controls=tuple(name for name, _ in self.model.networks.controls if inputs.control),
        )
        ready = programs.ready(params, latents, kinds)

        def encoded(ids: np.ndarray) -> Conditions:
            return ready["text encoder"](params, jax.device_put(self._by_encoder(ids), split), np.int32(0))

        conditions, negative = encoded(inputs.ids), None
        if inputs.guided:
            negative = zeros_like(conditions) if inputs.negative is None else encoded(inputs.negative)
        sizes = jax.device_put(self._size_conditions(count, latents[1:3]), split)
        images = None
        if inputs.given is not None:
            encoder = partial(ready["image encoder"], params)
            images = inputs.given.encoded(lambda one: encoder(jax.device_put(one, split)), programs.mesh.size)
            if inputs.given.masks is not None:
                masked = np.concatenate([inputs.given.masks, images], axis=-1)
                sizes, images = sizes | {"masked": jax.device_put(masked, split)}, None
        conditions, negative = conditions | sizes, negative and negative | sizes
        columns = None
        if inputs.control is not None:
            ((name, net),) = self.model.networks.controls
            read = partial(ready[name], params)
            kept = inputs.control.read(lambda one: read(jax.device_put(one, split)), programs.mesh.size, count)
            steered: Any = {name: jax.device_put(kept, split)}
            conditions, negative = conditions | steered, negative and negative | steered
            shape = (len(table), 1, 2, net.layers)
            columns = [{"control": np.full(shape, scale, np.float32)} for scale in inputs.control.scales]

        batch = Batch(ready, params, programs.mesh, latents)
        tables = [table.with_guidance(scale) for scale in inputs.guidance]
        prompts = (conditions,) if negative is None else (negative, conditions)
        batch.fill(inputs.noise, prompts, inputs.words, tables, images=images, columns=columns)
        while batch.rows_left:
            batch.step(WINDOW)
        final = jax.device_get(batch.state)[:, 0]
        return jax.device_get(ready["decoder"](params, jax.device_put(final, split))) if decode else final

    def _by_encoder(self, ids: Any) -> dict[str, Any]:
        """Ids of each text encoder [B, 77], from those of ``prepare_inputs``."""
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
        """SDXL: the numbers about images that are not cropped, for latents of h x w; the same for both halves."""
        height, width = (side * self.vae_scale_factor for side in latents)
        numbers, _ = self.model.numbers(height, width, {})
        return {name: np.tile(row, (batch, 1)) for name, row in numbers.items()}

    def _programs_on(self, devices: list[Any], *, stacked: bool) -> Programs:
        key = (stacked, *(device.id for device in devices))
        if key not in self._programs:
            self._programs[key] = Programs(self.model.networks, make_mesh(devices), stacked=stacked)
        return self._programs[key]
