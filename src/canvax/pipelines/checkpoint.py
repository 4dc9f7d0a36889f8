"""Opens a checkpoint: configs, tokenizers, noise schedule and weights of a Stable Diffusion 1.x, 2.x or XL model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.compile.cache import size_limit
from canvax.compile.programs import Programs
from canvax.errors import CheckpointError, InputError, check_count, nearest
from canvax.files import read_json
from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.text import FIRST, SECOND, TextEncoders
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.parallel.memory import check_weights
from canvax.parallel.mesh import check_mesh, make_mesh
from canvax.parallel.rules import abstract_params, device_bytes, place
from canvax.params import Params
from canvax.pipelines.request import check_guidance
from canvax.quantize import check_kind, quantized_specs
from canvax.samplers import Scheduler, curve_label, find, from_scheduler_config, stable_diffusion_config
from canvax.tokenizers.clip import ClipTokenizer
from canvax.types import DType
from canvax.weights.files import ModelFiles
from canvax.weights.load import Component, load_components
from canvax.weights.open import open_files
from canvax.weights.save import save_checkpoint
from canvax.weights.source import Source

PIPELINES = ("StableDiffusionPipeline", "FlaxStableDiffusionPipeline")
XL_PIPELINES = ("StableDiffusionXLPipeline", "FlaxStableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline")
REQUIRED = ("unet", "vae", "scheduler")
TOKENIZERS = {FIRST: "tokenizer", SECOND: "tokenizer_2"}
"""The text encoders and their tokenizers."""

_DTYPES = {
    "float32": "float32", "fp32": "float32", "f32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """What a model is best drawn with; the optional ``canvax.json`` beside its ``model_index.json`` says otherwise."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything of a checkpoint but its weights.

    Attributes:
        checkout: the files.
        text: configs of the text encoders.
        unet: config of the UNet.
        vae: config of the autoencoder.
        tokenizers: the tokenizer of each text encoder.
        scheduler: the noise it was trained with and its own sampler.
        defaults: steps and guidance when the caller names none.
        dtype: name of the dtype its weights were loaded in.
        quantize: to what its large weights were quantised, or None.
    """

    checkout: ModelFiles
    text: TextEncoders
    unet: UNetConfig
    vae: VaeConfig
    tokenizers: Mapping[str, ClipTokenizer]
    scheduler: Scheduler
    defaults: Defaults
    dtype: str
    quantize: str | None = None

    @property
    def name(self) -> str:
        """The model as it was asked for."""
        return self.checkout.name

    @property
    def revision(self) -> str | None:
        """The commit of a Hub checkpoint."""
        return self.checkout.revision

    @property
    def is_xl(self) -> bool:
        """Whether it is SDXL or its refiner, which are told about sizes and crops."""
        return self.text.second is not None

    @property
    def is_refiner(self) -> bool:
        """Whether it only finishes pictures, and is told how beautiful they shall be in place of a target size."""
        return self.is_xl and bool(self.checkout.index.get("requires_aesthetics_score", False))

    @property
    def zeros_for_no_negative(self) -> bool:
        """Whether no negative prompt means zeros in place of the features of an empty one."""
        return self.is_xl and bool(self.checkout.index.get("force_zeros_for_empty_prompt", True))

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width the model was trained for, in pixels."""
        side = (self.unet.sample_size or 64) * self.vae.factor
        return side, side

    @property
    def components(self) -> list[Component]:
        """The parts that have weights."""
        specs = {**self.text.specs, "unet": unet_spec(self.unet), "vae": vae_spec(self.vae)}
        return [
            Component(name, spec, "transformers" if name in self.text.parts else "diffusers")
            for name, spec in quantized_specs(specs, self.quantize).items()
        ]

    def weight_bytes(self, dtype: DType, sizes: Mapping[str, int]) -> int:
        """Bytes of the weights on each device of a mesh with axes of these sizes; exact."""
        return sum(device_bytes(part.spec, dtype, sizes) for part in self.components)

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
        if curve := implied.get("sigmas"):
            return f"{spec.name}_{curve}", f"{spec.label} {curve_label(curve)}"
        own = self.scheduler.options.sigmas if spec.curves else "automatic"
        label = f"{spec.label} {curve_label(own)}" if isinstance(own, str) and own != "automatic" else spec.label
        return spec.name if same else spec.diffusers_class, label

    def save(self, folder: str | Path, params: Params, *, dtype: DType | None = None, overwrite: bool = False) -> Path:
        """Write the checkpoint in the diffusers layout into a folder that is empty, or with ``overwrite`` any.

        Raises:
            InputError: its weights are quantised, which that layout cannot say, or the folder is not empty.
        """
        if self.quantize is not None:
            raise InputError(f"weights quantised to {self.quantize} cannot be saved; load the model without quantize")
        return save_checkpoint(
            folder,
            self.components,
            params,
            index=self.checkout.index,
            configs={name: self.checkout.config(name) for name in (*self.text.parts, "unet", "vae", "scheduler")},
            copy_from=self.checkout.folder(),
            dtype=None if dtype is None else parse_dtype(dtype),
            overwrite=overwrite,
        )


def open_checkpoint(
    model: str | Path,
    *,
    dtype: DType | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    mesh: Mesh | None = None,
    precision: str | None = None,
    progress: bool = True,
    weights: bool = True,
    accept: Callable[[Mapping[str, Any]], None] | None = None,
) -> tuple[Checkpoint, Programs, Params]:
    """Everything of a model; see :func:`canvax.load` for the arguments.

    What cannot be used is found before weights are fetched. Without ``weights`` none are, and the parameters are
    shapes, dtypes and shardings, enough to compile for. ``accept`` refuses kinds of models that the caller has no use
    for, by their ``model_index.json``.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype)
    check_kind(quantize)
    _check_precision(precision)
    size_limit()
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    dtype = default_dtype(mesh) if dtype is None else dtype
    source = Source(model, revision, variant, token, cache_dir, local_files_only, progress)
    checkpoints: list[Checkpoint] = []

    def look(files: ModelFiles) -> None:
        checkpoint = read_checkpoint(files, dtype, quantize)
        if weights:
            needed = checkpoint.weight_bytes(dtype, mesh.shape)
            check_weights(needed, mesh, checkpoint.name, checkpoint.dtype, quantized=quantize is not None)
        checkpoints.append(checkpoint)

    def accepted(index: Mapping[str, Any]) -> None:
        check_index(index)
        if accept is not None:
            accept(index)

    files = open_files(source, accept=accepted, look=look, weights=weights)
    (checkpoint,) = checkpoints
    if weights:
        params = load_components(
            files,
            checkpoint.components,
            dtype=dtype,
            place=lambda param, array: place(param, array, mesh),
        )
    else:
        params = {part.name: abstract_params(part.spec, dtype, mesh) for part in checkpoint.components}
    programs = Programs(checkpoint.text, checkpoint.unet, checkpoint.vae, mesh, precision)
    return checkpoint, programs, params


def read_checkpoint(checkout: ModelFiles, dtype: DType, quantize: str | None = None) -> Checkpoint:
    """The configs, tokenizers and schedule of a checkout; no weights are read.

    Raises:
        CheckpointError: a component is missing or its config asks for what is not supported.
    """
    unet, vae, text = read_networks(checkout)
    scheduler = stable_diffusion_config(checkout.config("scheduler"), xl=text.second is not None)
    try:
        scheduler = from_scheduler_config(scheduler)
    except InputError as error:
        raise CheckpointError(f"{checkout}: {error}") from error
    usual = Defaults() if text.second is None else Defaults(guidance_scale=5.0)
    return Checkpoint(
        checkout=checkout,
        text=text,
        unet=unet,
        vae=vae,
        tokenizers={name: ClipTokenizer.from_folder(checkout.folder(TOKENIZERS[name])) for name in text.parts},
        scheduler=scheduler,
        defaults=_read_defaults(checkout.folder() / "canvax.json", usual),
        dtype=np.dtype(dtype).name,
        quantize=quantize,
    )


def read_networks(checkout: ModelFiles) -> tuple[UNetConfig, VaeConfig, TextEncoders]:
    """The configs of a checkout's networks, which are all that is read.

    Raises:
        CheckpointError: as :func:`read_checkpoint`.
    """
    encoders = _encoders(checkout)
    unet = _sized(UNetConfig.from_dict(checkout.config("unet")), checkout)
    vae = VaeConfig.from_dict(checkout.config("vae"))
    configs = {name: ClipTextConfig.from_dict(checkout.config(name)) for name in encoders}
    text = TextEncoders(configs.get(FIRST), configs.get(SECOND))
    if faults := _misfits(unet, vae, text, checkout):
        raise CheckpointError(f"{checkout}: its components do not fit together: " + "; ".join(faults))
    return unet, vae, text


def _sized(unet: UNetConfig, checkout: ModelFiles) -> UNetConfig:
    """Files from before diffusers 0.9 could say 32, the class's default then, where 64 was meant."""
    version = re.match(r"0\.(\d+)", str(checkout.config("unet").get("_diffusers_version", "")))
    old = version is not None and int(version[1]) < 9
    return replace(unet, sample_size=64) if old and (unet.sample_size or 64) < 64 else unet


def _encoders(checkout: ModelFiles) -> list[str]:
    """The text encoders that a checkout's kind of pipeline has."""
    found = [FIRST]
    if checkout.index.get("_class_name") in XL_PIPELINES:
        # The refiner has the second one alone.
        found = [FIRST, SECOND] if {FIRST, TOKENIZERS[FIRST]} & checkout.components.keys() else [SECOND]
    wanted = [*found, *(TOKENIZERS[name] for name in found), *REQUIRED]
    missing = [name for name in wanted if name not in checkout.components]
    if missing:
        raise CheckpointError(f"{checkout}: {', '.join(missing)} not in its model_index.json; a pipeline needs them")
    return found


def _misfits(unet: UNetConfig, vae: VaeConfig, text: TextEncoders, checkout: ModelFiles) -> list[str]:
    """What is wrong between components that are right by themselves."""
    faults = []
    if unet.in_channels != vae.latent_channels or unet.out_channels != vae.latent_channels:
        faults.append(
            f"the UNet takes {unet.in_channels} channels and gives {unet.out_channels}, the VAE has "
            f"{vae.latent_channels} (inpainting and upscaling models are not text-to-image models)"
        )
    if unet.cross_attention_dim != text.width:
        faults.append(f"the UNet reads text of width {unet.cross_attention_dim}, the encoders give {text.width}")
    if (text.second is None) != (unet.addition_embed_type is None):
        faults.append(f"addition_embed_type {unet.addition_embed_type!r} of the UNet does not suit its text encoders")
    elif text.second is not None:
        wanted = 5 if checkout.index.get("requires_aesthetics_score", False) else 6
        told = unet.time_ids(text.pooled_width)
        if told != wanted:
            faults.append(
                f"the UNet is told {told} numbers about a picture, the pipeline gives {wanted} "
                "(requires_aesthetics_score in model_index.json)"
            )
        if not isinstance(text.second.eos_token_id, int):
            faults.append(f"eos_token_id {text.second.eos_token_id!r} of the second text encoder is not one token")
    return faults


def check_index(index: Mapping[str, Any]) -> None:
    """Refuse a ``model_index.json`` of another kind of model, before its weights are fetched."""
    name = index.get("_class_name")
    if name not in PIPELINES + XL_PIPELINES:
        raise CheckpointError(
            f"model_index.json names the pipeline {name!r}; supported: "
            f"{', '.join(map(repr, PIPELINES + XL_PIPELINES))} (Stable Diffusion 1.x, 2.x and XL)"
        )


def _check_precision(precision: str | None) -> None:
    """Refuse a matmul precision that JAX has not."""
    try:
        with jax.default_matmul_precision(precision or "default"):
            pass
    except ValueError:
        raise InputError(f"precision={precision!r} is not known to JAX; 'highest' is real float32") from None


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


def _read_defaults(path: Path, usual: Defaults) -> Defaults:
    if not path.is_file():
        return usual
    try:
        said = replace(usual, **read_json(path))
        check_count("num_inference_steps", said.num_inference_steps)
        return replace(said, guidance_scale=check_guidance(said.guidance_scale, usual.guidance_scale))
    except (ValueError, TypeError, InputError) as error:
        raise CheckpointError(f"{path}: not a list of defaults canvax knows: {error}") from error
