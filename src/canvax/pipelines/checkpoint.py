"""Opens a checkpoint: configs, tokenizer, noise schedule and weights of a Stable Diffusion 1.x or 2.x model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.compile.programs import Programs
from canvax.errors import CheckpointError, InputError, nearest
from canvax.models.clip import text_encoder_spec
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.parallel.mesh import check_mesh, make_mesh, replicated
from canvax.params import Params
from canvax.samplers import Scheduler, find, from_scheduler_config, stable_diffusion_config
from canvax.tokenizers.clip import ClipTokenizer
from canvax.types import DType
from canvax.weights.hub import Checkout, resolve
from canvax.weights.load import Component, load_components
from canvax.weights.save import save_checkpoint

PIPELINES = ("StableDiffusionPipeline", "FlaxStableDiffusionPipeline")
REQUIRED = ("text_encoder", "unet", "vae", "tokenizer", "scheduler")

_DTYPES = {
    "float32": "float32", "fp32": "float32", "f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What a model is best drawn with, from the optional ``canvax.json`` beside its ``model_index.json``."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything of a checkpoint but its weights.

    Attributes:
        checkout: the files.
        text: config of the text encoder.
        unet: config of the UNet.
        vae: config of the autoencoder.
        tokenizer: its tokenizer.
        scheduler: the noise it was trained with and its own sampler.
        defaults: steps and guidance when the caller names none.
        dtype: name of the dtype its weights were loaded in.
    """

    checkout: Checkout
    text: ClipTextConfig
    unet: UNetConfig
    vae: VaeConfig
    tokenizer: ClipTokenizer
    scheduler: Scheduler
    defaults: Defaults
    dtype: str

    @property
    def name(self) -> str:
        """The model as it was asked for."""
        return self.checkout.source

    @property
    def revision(self) -> str | None:
        """The commit of a Hub checkpoint."""
        return self.checkout.revision

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width the model was trained for, in pixels."""
        side = (self.unet.sample_size or 64) * self.vae.factor
        return side, side

    @property
    def components(self) -> list[Component]:
        """The parts that have weights."""
        return [
            Component("text_encoder", text_encoder_spec(self.text), "transformers"),
            Component("unet", unet_spec(self.unet), "diffusers"),
            Component("vae", vae_spec(self.vae), "diffusers"),
        ]

    def sampler_names(self, sampler: str | None) -> tuple[str, str]:
        """A name that draws the same again, and what other programs call the sampler; the checkpoint's own for None.

        The class name stands where the plain name would imply other options than those that were used.
        """
        if sampler is None:
            spec, implied = self.scheduler.spec, {}
            same = all(getattr(self.scheduler.options, name) == value for name, value in spec.implied.items())
        else:
            spec, implied = find(sampler)
            same = spec.implied.items() <= implied.items()
        curve = implied.get("sigmas")
        if curve:
            return f"{spec.name}_{curve}", f"{spec.label} {curve.capitalize()}"
        return spec.name if same else spec.diffusers_class, spec.label

    def save(self, folder: str | Path, params: Params, *, dtype: DType | None = None) -> Path:
        """Write the checkpoint in the diffusers layout into a folder that does not exist yet."""
        return save_checkpoint(
            folder,
            self.components,
            params,
            index=self.checkout.index,
            configs={name: self.checkout.config(name) for name in ("text_encoder", "unet", "vae", "scheduler")},
            copy_from=self.checkout.folder,
            dtype=None if dtype is None else parse_dtype(dtype),
        )


def open_checkpoint(
    model: str | Path,
    *,
    dtype: DType | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    mesh: Mesh | None = None,
    precision: str | None = None,
    progress: bool = True,
) -> tuple[Checkpoint, Programs, Params]:
    """Everything of a model; see :func:`canvax.load` for the arguments."""
    if dtype is not None:
        dtype = parse_dtype(dtype)
    checkout = resolve(
        model,
        revision=revision,
        variant=variant,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        progress=progress,
        accept=check_index,
    )
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    dtype = default_dtype(mesh) if dtype is None else dtype
    checkpoint = read_checkpoint(checkout, dtype)
    sharding = replicated(mesh)
    params = load_components(
        checkout,
        checkpoint.components,
        dtype=dtype,
        place=lambda _, array: jax.device_put(array, sharding),
    )
    programs = Programs(checkpoint.text, checkpoint.unet, checkpoint.vae, mesh, precision)
    return checkpoint, programs, params


def read_checkpoint(checkout: Checkout, dtype: DType) -> Checkpoint:
    """The configs, tokenizer and schedule of a checkout; no weights are read.

    Raises:
        CheckpointError: a component is missing or its config asks for what is not supported.
    """
    missing = [name for name in REQUIRED if name not in checkout.components]
    if missing:
        raise CheckpointError(f"{checkout}: {', '.join(missing)} not in its model_index.json; a pipeline needs them")
    unet = UNetConfig.from_dict(checkout.config("unet"))
    vae = VaeConfig.from_dict(checkout.config("vae"))
    text = ClipTextConfig.from_dict(checkout.config("text_encoder"))
    faults = []
    if unet.in_channels != vae.latent_channels or unet.out_channels != vae.latent_channels:
        faults.append(
            f"the UNet takes {unet.in_channels} channels and gives {unet.out_channels}, the VAE has "
            f"{vae.latent_channels} (inpainting and upscaling models are not text-to-image models)"
        )
    if unet.cross_attention_dim != text.hidden_size:
        faults.append(f"the UNet reads text of width {unet.cross_attention_dim}, the encoder gives {text.hidden_size}")
    if faults:
        raise CheckpointError(f"{checkout}: its components do not fit together: " + "; ".join(faults))
    try:
        scheduler = from_scheduler_config(stable_diffusion_config(checkout.config("scheduler")))
    except InputError as error:
        raise CheckpointError(f"{checkout}: {error}") from error
    return Checkpoint(
        checkout=checkout,
        text=text,
        unet=unet,
        vae=vae,
        tokenizer=ClipTokenizer.from_folder(checkout.folder / "tokenizer"),
        scheduler=scheduler,
        defaults=_read_defaults(checkout.folder / "canvax.json"),
        dtype=np.dtype(dtype).name,
    )


def check_index(index: Mapping[str, Any]) -> None:
    """Refuse a ``model_index.json`` of another kind of model, before its weights are fetched."""
    name = index.get("_class_name")
    if name not in PIPELINES:
        raise CheckpointError(
            f"model_index.json names the pipeline {name!r}; supported: {', '.join(map(repr, PIPELINES))} "
            "(Stable Diffusion 1.x and 2.x)"
        )


def parse_dtype(dtype: DType) -> DType:
    """A floating point dtype from itself or from any of its usual names.

    Raises:
        InputError: not float32, bfloat16 or float16.
    """
    name = dtype.lower().removeprefix("torch.").removeprefix("jnp.") if isinstance(dtype, str) else None
    if name is None:
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    if name not in _DTYPES:
        raise InputError(f"dtype={dtype!r} is not supported; {nearest(str(name), list(_DTYPES))}")
    return jnp.dtype(_DTYPES[name])


def default_dtype(mesh: Mesh) -> DType:
    """bfloat16 on TPU and GPU, float32 on the CPU, which computes bfloat16 slower."""
    return jnp.dtype(jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16)


def _read_defaults(path: Path) -> Defaults:
    if not path.is_file():
        return Defaults()
    try:
        return Defaults(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a list of defaults canvax knows: {error}") from error
