"""The front door: a model by name, ready to draw."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from canvax.pipelines.checkpoint import open_checkpoint
from canvax.pipelines.text_to_image import StableDiffusion
from canvax.types import DType


def load(
    model: str | Path = "emoji",
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
) -> StableDiffusion:
    """Load a model, ready to draw.

    Args:
        model: "emoji" (in the package), a folder in the diffusers layout, or a Hub id "owner/name".
        dtype: dtype of weights and activations; by default bfloat16 on TPU and GPU, float32 on the CPU.
        quantize: "int8" or "float8": keep the large weights of text encoders and UNet in 8 bits, which saves memory and
            costs some precision (docs/less-work.md); None to leave them as they are.
        revision: branch, tag or commit of a Hub id.
        variant: which of several sets of weights, for example "fp16".
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: where the Hub's files are kept.
        local_files_only: never ask the Hub.
        mesh: devices with the axes ``data`` and ``model``, as :func:`canvax.make_mesh` makes them; by default all
            devices on ``data``, those of all processes that ``jax.distributed`` has joined.
        precision: JAX matmul precision; "highest" for real float32 on TPU and GPU.
        progress: show downloads on stderr.

    Raises:
        InputError: an argument cannot be used.
        CheckpointError: the checkpoint is missing, damaged or refused.
        HubError: the Hub cannot be reached or does not have it.
        OutOfMemoryError: the weights do not fit into the devices.
    """
    checkpoint, programs, params = open_checkpoint(
        model,
        dtype=dtype,
        quantize=quantize,
        revision=revision,
        variant=variant,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        mesh=mesh,
        precision=precision,
        progress=progress,
    )
    return StableDiffusion(checkpoint, programs, params)
