"""Opens a model: files, configs, devices and weights, and what cannot be used is found before weights are fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from canvax.compile.cache import size_limit
from canvax.compile.programs import Programs
from canvax.families.base import Model
from canvax.families.read import family_of, read_model
from canvax.parallel.memory import check_weights
from canvax.parallel.mesh import check_mesh, make_mesh
from canvax.parallel.rules import abstract_params, check_split, device_bytes, place
from canvax.params import Params
from canvax.pipelines.checks import check_precision, default_dtype
from canvax.quantize import check_kind
from canvax.types import DType
from canvax.weights.cast import parse_dtype
from canvax.weights.files import ModelFiles
from canvax.weights.load import load_components
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides


def open_model(
    model: str | Path,
    *,
    dtype: DType | None = None,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    precision: str | None = None,
    weights: bool = True,
    accept: Callable[[Mapping[str, Any]], None] | None = None,
    check: Callable[[Model], object] | None = None,
    overrides: Overrides | None = None,
    **source: Any,
) -> tuple[Model, Programs, Params]:
    """Everything of a model; see ``canvax.load`` for the arguments.

    Without ``weights`` none are fetched, and the parameters are shapes, dtypes and shardings, enough to compile for.
    ``accept`` refuses models that the caller has no use for, by their ``model_index.json``; ``check`` by all of their
    configs, before weights are fetched. ``overrides`` are parts that the caller gives.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype, quantizes=True)
    check_kind(quantize)
    check_precision(precision)
    size_limit()
    mesh = make_mesh() if mesh is None else check_mesh(mesh)
    dtype = default_dtype(mesh) if dtype is None else dtype

    origin = Location(model, **source)
    models: list[Model] = []
    given = overrides or Overrides()

    def look(files: ModelFiles) -> None:
        opened = read_model(given.apply(files, **source), dtype, quantize)
        if check is not None:
            check(opened)
        check_split(opened.networks.denoiser.spec, mesh.shape, opened.name)
        if weights:
            needed = weight_bytes(opened, dtype, mesh.shape)
            check_weights(needed, mesh, opened.name, opened.dtype, quantized=quantize is not None)
        models.append(opened)

    def accepted(index: Mapping[str, Any]) -> None:
        family_of(index)
        if accept is not None:
            accept(index)

    own = {"prediction": given.prediction, "vae": given.vae is None}
    open_files(origin, accept=accepted, look=look, weights=weights, **own)
    (opened,) = models
    if weights:
        params = load_components(
            opened.files,
            opened.components,
            dtype=dtype,
            place=lambda param, array: place(param, array, mesh),
            finite=() if given.vae is None else ("vae",),
        )
    else:
        params = {part.name: abstract_params(part.spec, dtype, mesh) for part in opened.components}
    return opened, Programs(opened.networks, mesh, precision), params


def weight_bytes(model: Model, dtype: DType, sizes: Mapping[str, int]) -> int:
    """Bytes of the weights on each device of a mesh with axes of these sizes; exact."""
    return sum(device_bytes(part.spec, dtype, sizes) for part in model.components)
