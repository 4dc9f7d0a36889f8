"""How much memory a model will take, before anything is loaded or compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from canvax.compile.programs import Programs
from canvax.errors import check_count
from canvax.families.base import Model
from canvax.kernels.target import compiling_for
from canvax.parallel.liveness import peak_bytes
from canvax.parallel.memory import Memory
from canvax.parallel.mesh import AXES
from canvax.parallel.rules import abstract_params, device_bytes
from canvax.pipelines.checks import check_size, is_tiled
from canvax.types import DType


def estimate(
    model: Model,
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
        model: the model.
        dtype: dtype of the weights.
        size: height and width of an image in pixels; None for what the model was trained for.
        batch: images generated at once, on all devices.
        sizes: sizes of the mesh, ``{"data": 4, "model": 2}``.
        platform: "cpu", "gpu" or "tpu", which decides the kernels.
        guided: whether guidance is on.
        limit: bytes that a device has, to be told in the result.

    Raises:
        InputError: size or batch cannot be used.
    """
    (tall, wide), factor = model.native_size, model.vae.factor
    height, width = check_size("height", size[0], tall, factor), check_size("width", size[1], wide, factor)
    mesh: Any = AbstractMesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2)
    each = -(-check_count("batch", batch) // sizes.get("data", 1))
    latents = model.networks.latent_shape(each, height, width)
    params = {part.name: abstract_params(part.spec, dtype, mesh) for part in model.components}
    traced = _Traced(model.networks, mesh, platform=platform)
    programs: dict[str, Any] = {
        "text encoder": traced.encode_text(params, each),
        "denoiser": traced.denoise(params, latents, guided=guided),
        "decoder": traced.decode(params, latents, tiled=is_tiled(height, width)),
    }
    return Memory(weight_bytes(model, dtype, sizes), programs, limit)


def weight_bytes(model: Model, dtype: DType, sizes: Mapping[str, int]) -> int:
    """Bytes of the weights on each device of a mesh with axes of these sizes; exact."""
    return sum(device_bytes(part.spec, dtype, sizes) for part in model.components)


@dataclass(frozen=True)
class _Traced(Programs):
    """Gives in place of each program how many bytes it would take."""

    platform: str = "cpu"

    def _get(self, name: str, function: Any, arguments: tuple[Any, ...], announce: Any) -> Any:
        with compiling_for(self.platform):
            return peak_bytes(function, *arguments)
