"""How much memory a model will take, before anything is loaded or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from canvax.compile.programs import Programs
from canvax.errors import check_count
from canvax.kernels.target import compiling_for
from canvax.parallel.liveness import peak_bytes
from canvax.parallel.memory import Memory
from canvax.parallel.mesh import AXES
from canvax.parallel.rules import abstract_params
from canvax.pipelines.checkpoint import Checkpoint
from canvax.pipelines.request import check_size, is_tiled
from canvax.types import DType


def estimate(
    checkpoint: Checkpoint,
    *,
    dtype: DType,
    size: tuple[int | None, int | None],
    batch: int,
    sizes: Mapping[str, int],
    platform: str,
    guided: bool = True,
    limit: int | None = None,
) -> Memory:
    """Memory on each device, from a trace of each program: seconds, where compiling takes minutes.

    What a split over ``model`` saves of the activations is left out: most of them are whole on every device.

    Args:
        checkpoint: the model.
        dtype: dtype of the weights.
        size: height and width of an image in pixels; None for what the model was trained for.
        batch: images drawn at once, on all devices.
        sizes: sizes of the mesh, ``{"data": 4, "model": 2}``.
        platform: "cpu", "gpu" or "tpu", which decides the kernels.
        guided: whether guidance is on.
        limit: bytes that a device has, to be told in the result.

    Raises:
        InputError: size or batch cannot be used.
    """
    native = checkpoint.native_size
    height, width = check_size("height", size[0], native[0]), check_size("width", size[1], native[1])
    mesh: Any = AbstractMesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2)
    each = -(-check_count("batch", batch) // sizes.get("data", 1))
    factor = checkpoint.vae.factor
    latents = (each, height // factor, width // factor, checkpoint.unet.in_channels)
    params = {part.name: abstract_params(part.spec, dtype, mesh) for part in checkpoint.components}
    traced = _Traced(checkpoint.text, checkpoint.unet, checkpoint.vae, mesh, platform=platform)
    programs: dict[str, Any] = {
        "text encoder": traced.encode_text(params, each),
        "denoiser": traced.denoise(params, latents, guided=guided),
        "decoder": traced.decode(params, latents, tiled=is_tiled(height, width)),
    }
    return Memory(checkpoint.weight_bytes(dtype, sizes), programs, limit)


@dataclass(frozen=True)
class _Traced(Programs):
    """Gives in place of each program how many bytes it would take."""

    platform: str = "cpu"

    def _get(self, name: str, function: Any, arguments: tuple[Any, ...], announce: Any) -> Any:
        with compiling_for(self.platform):
            return peak_bytes(function, *arguments)
