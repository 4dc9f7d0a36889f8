"""``FlaxStableDiffusionPipeline``: the old calls over canvax's three programs.

With ``jit=True`` every array has a leading device axis and each device draws its own images with its own copy of the
parameters; without it there is one device and no such axis. Either way the programs are compiled once for a size and
batch: steps, sampler, guidance, prompts and keys are arguments. ``_generate`` is the same computation as one traceable
function, for ``jax.pmap``, ``jax.jit`` and ahead-of-time compiling by the caller; there the steps are static.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.compile.programs import Programs, decode_images
from canvax.denoise import WINDOW, denoise, initial_state
from canvax.errors import CheckpointError, InputError
from canvax.flax_api.devices import home_device, host_device, on_host, stacked_devices
from canvax.flax_api.inputs import Inputs, check_inputs, check_static, latents_shape, weights_of
from canvax.flax_api.keys import draw, wrap_keys
from canvax.flax_api.output import FlaxStableDiffusionPipelineOutput, numpy_to_pil
from canvax.flax_api.schedulers import FlaxScheduler, SchedulerState, table_of
from canvax.models.text import FIRST, Conditions, encode_text
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.params import Params
from canvax.pipelines.checkpoint import Checkpoint, open_checkpoint
from canvax.samplers import SLOTS, SamplerTable
from canvax.samplers.table import NOISE
from canvax.types import Array, DType


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionPipeline:
    """Stable Diffusion 1.x and 2.x behind the interface of diffusers' class of that name.

    Attributes:
        checkpoint: where the model came from, its configs and its tokenizer.
        scheduler: the state that draws when ``params`` has none.
    """

    checkpoint: Checkpoint
    scheduler: SchedulerState
    _programs: dict[Any, Programs] = field(default_factory=dict, repr=False)

    numpy_to_pil = staticmethod(numpy_to_pil)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: DType | None = None,
        scheduler: FlaxScheduler | None = None,
        safety_checker: None = None,
        feature_extractor: None = None,
        from_pt: bool = False,
        use_memory_efficient_attention: bool = False,
        split_head_dim: bool = False,
        **download: Any,
    ) -> tuple[Self, Params]:
        """The pipeline, and its parameters in host memory with the scheduler's state under ``"scheduler"``.

        Args:
            pretrained_model_name_or_path: a Hub id, a folder, or "emoji".
            dtype: dtype of the parameters, and so of what is computed with them; float32 if not given.
            scheduler: in place of the checkpoint's own.
            safety_checker: None. A checkpoint's own is not read.
            feature_extractor: None, likewise.
            from_pt: needed no more: PyTorch's safetensors and Flax's msgpack are both read.
            use_memory_efficient_attention: decides nothing: the kernel is chosen by size and platform.
            split_head_dim: decides nothing: heads are always kept apart, which is what it asked for.
            download: ``revision``, ``variant``, ``token``, ``cache_dir``, ``local_files_only`` and ``progress``, as for
                :func:`canvax.load`.

        Raises:
            InputError: an argument cannot be used.
            CheckpointError: the checkpoint is missing, damaged or refused.
            HubError: the Hub cannot be reached or does not have it.
        """
        del from_pt, use_memory_efficient_attention, split_head_dim
        for name, value in (("safety_checker", safety_checker), ("feature_extractor", feature_extractor)):
            if value is not None:
                raise InputError(f"{name}={value!r}: canvax has no safety checker; pass None")
        if unknown := set(download) - _DOWNLOAD:
            raise InputError(f"from_pretrained takes no {', '.join(sorted(unknown))}; see its documentation")
        checkpoint, _, params = open_checkpoint(
            pretrained_model_name_or_path,
            dtype=jnp.float32 if dtype is None else dtype,
            mesh=make_mesh([host_device()]),
            **download,
        )
        if checkpoint.is_xl:
            raise CheckpointError(
                f"{checkpoint.name} is an SDXL checkpoint, which this class does not draw; use canvax.load"
            )
        if scheduler is None:
            state = SchedulerState.of(checkpoint.checkout.config("scheduler"))
        else:
            state = scheduler.create_state()
        return cls(checkpoint, state), {**on_host(params), "scheduler": state}

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent along an axis."""
        return self.checkpoint.vae.factor

    def prepare_inputs(self, prompt: str | list[str]) -> np.ndarray:
        """Token ids of one prompt or several, int32 [B, 77].

        Raises:
            InputError: neither a string nor a list of strings.
        """
        if not isinstance(prompt, str | list):
            raise InputError(f"prompt={prompt!r} is neither a string nor a list of strings")
        tokenizer = self.checkpoint.tokenizers[FIRST]
        return tokenizer([prompt] if isinstance(prompt, str) else prompt, length=self.checkpoint.text.tokens)

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
    ) -> FlaxStableDiffusionPipelineOutput | tuple[np.ndarray, bool]:
        """Draw pictures. D is the number of devices, B that of images on each; without ``jit`` there is no D.

        Args:
            prompt_ids: from :meth:`prepare_inputs`, [B, 77]; with ``jit`` [D, B, 77].
            params: from :meth:`from_pretrained`; with ``jit`` after :func:`canvax.flax_api.replicate`.
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
            Images in 0..1, float32 [B, H, W, 3]; with ``jit`` [D, B, H, W, 3]. And False, for no safety checker.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        weights, table = weights_of(params), self._table(params, num_inference_steps)
        ids = np.asarray(prompt_ids)
        shape = self._latents_shape(ids.shape[-2] if ids.ndim > 1 else 1, height, width)
        empty = self.prepare_inputs("")
        inputs = check_inputs(ids, prng_seed, guidance_scale, latents, neg_prompt_ids, empty, shape[1:], jit)
        devices = stacked_devices(weights, ids.shape[0]) if jit else [home_device(weights)]
        images = _run(self._programs_on(devices, stacked=jit), weights, inputs, table)
        images = images.reshape(*ids.shape[:-1], *images.shape[1:])
        return FlaxStableDiffusionPipelineOutput(images, False) if return_dict else (images, False)

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
        """The images of one device [B, H, W, 3] as one traceable function; arguments as without ``jit``.

        Steps, height, width and ``return_latents`` (arguments 3, 4, 5, 9) are static. With the last, the latents
        [B, C, h, w] are returned before they are decoded.
        """
        check_static("num_inference_steps", num_inference_steps)
        batch = prompt_ids.shape[0]
        shape = self._latents_shape(batch, height, width)
        table = self._table(params, num_inference_steps)
        noise, words = draw(wrap_keys(prng_seed), shape)
        if latents is not None:
            if latents.shape != shape:
                raise InputError(f"latents has shape {latents.shape}; each device needs {shape} of unit variance")
            noise = jnp.moveaxis(latents.astype(jnp.float32), 1, -1)

        if neg_prompt_ids is None:
            neg_prompt_ids = jnp.broadcast_to(self.prepare_inputs(""), prompt_ids.shape)
        guided = not isinstance(guidance_scale, int | float) or guidance_scale > 1

        def encode(ids: Array) -> Conditions:
            return encode_text({FIRST: params[FIRST]}, {FIRST: ids}, jnp.int32(0), cfg=self.checkpoint.text)

        conditions, negative = encode(prompt_ids), encode(neg_prompt_ids) if guided else None

        rows = table.window(0, len(table))
        noisy = jnp.asarray(rows["M"][:, :, NOISE].any(axis=1))
        batched = {name: jnp.broadcast_to(column, (batch, *column.shape)) for name, column in rows.items()}
        guidance = jnp.maximum(jnp.asarray(guidance_scale, jnp.float32).reshape(-1, 1), 1.0)
        batched["guidance"] = jnp.broadcast_to(guidance, (batch, len(table)))
        state = jnp.zeros((batch, SLOTS, *noise.shape[1:])).at[:, 0].set(noise * np.float32(table.init_scale))
        count, cfg, unet = jnp.int32(len(table)), self.checkpoint.unet, params["unet"]
        state, _ = denoise(unet, state, conditions, negative, batched, words, noisy, count, cfg=cfg, clip=table.clip)
        if return_latents:
            return jnp.moveaxis(state[:, 0], -1, 1)
        return decode_images(params["vae"], state[:, 0], cfg=self.checkpoint.vae)

    def _table(self, params: Params, steps: int) -> SamplerTable:
        return table_of(params.get("scheduler", self.scheduler), steps)

    def _latents_shape(self, batch: int, height: Any, width: Any) -> tuple[int, int, int, int]:
        unet, factor = self.checkpoint.unet, self.vae_scale_factor
        return latents_shape(batch, height, width, _native_side(self.checkpoint), factor, unet.in_channels)

    def _programs_on(self, devices: list[Any], *, stacked: bool) -> Programs:
        key = (stacked, *(device.id for device in devices))
        if key not in self._programs:
            c = self.checkpoint
            self._programs[key] = Programs(c.text, c.unet, c.vae, make_mesh(devices), stacked=stacked)
        return self._programs[key]


_DOWNLOAD = {"revision", "variant", "token", "cache_dir", "local_files_only", "progress"}


def _run(programs: Programs, weights: Params, inputs: Inputs, table: SamplerTable) -> np.ndarray:
    """Encode, denoise, decode on the devices of ``programs``; images [N, H, W, 3]."""
    split = over_batch(programs.mesh)
    params = jax.device_put(weights, split if programs.stacked else replicated(programs.mesh))
    count = len(inputs.ids)

    def put(array: np.ndarray) -> Array:
        return jax.device_put(array, split)

    encode = programs.encode_text(params, count)
    denoise_rows = programs.denoise(params, inputs.noise.shape, guided=inputs.guided, clip=table.clip)
    decode = programs.decode(params, inputs.noise.shape)

    def told(ids: np.ndarray) -> Conditions:
        return encode(programs.text_params(params), {FIRST: put(ids)}, np.int32(0))

    conditions, negative = told(inputs.ids), told(inputs.negative) if inputs.guided else None
    state, words = put(initial_state(inputs.noise, np.full(count, table.init_scale))), put(inputs.words)
    guidance = put(np.repeat(inputs.guidance[:, None], WINDOW, axis=1))
    for done in range(0, len(table), WINDOW):
        rows = table.window(done, WINDOW)
        noisy = rows["M"][:, :, NOISE].any(axis=1)
        batched = {name: put(np.stack([column] * count)) for name, column in rows.items()} | {"guidance": guidance}
        left = np.int32(min(WINDOW, len(table) - done))
        state, _ = denoise_rows(params["unet"], state, conditions, negative, batched, words, noisy, left)
    return np.asarray(decode(params["vae"], put(np.asarray(state)[:, 0])))


def _native_side(checkpoint: Checkpoint) -> int:
    """Height and width the model was trained for.

    Files from before diffusers 0.9 could say 32, the class's default then, where 64 was meant.
    """
    config = checkpoint.checkout.config("unet")
    version = re.match(r"0\.(\d+)", str(config.get("_diffusers_version", "")))
    if version and int(version[1]) < 9 and (config.get("sample_size") or 64) < 64:
        return 64 * checkpoint.vae.factor
    return checkpoint.native_size[0]
