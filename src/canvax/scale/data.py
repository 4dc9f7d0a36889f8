"""Ray Data: ``Generate`` for ``map_batches``, and a batch job whose images are generated on a cluster.

    ds = ray.data.read_parquet("prompts")                      # id, prompt, and further settings
    ds = ds.map_batches(Generate, fn_constructor_kwargs={"model": "owner/name"}, num_gpus=1, num_cpus=0,
                        compute=ray.data.ActorPoolStrategy(size=8), batch_size=64)
    ds.write_parquet("images")

ray is imported only where it is used.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from typing import Any

from canvax.errors import CanvaxError, InputError, check_count
from canvax.pipelines.checks import MOST_IMAGES
from canvax.scale.batch import Plan
from canvax.scale.rows import Row, pyarrow, row_of, settings_of
from canvax.scale.work import MOST, Made, Worker, image_file

PER_BLOCK = 64
"""Largest number of rows of a block, the unit of an actor's work, which is lost with a machine: up to a minute."""


class Generate:
    """Generates the images of rows, in an actor that holds one model; for ``map_batches`` of Ray Data.

    A batch may be a dict of arrays, a pandas or a pyarrow table, with a column ``id`` and settings as ``canvax batch``
    reads them. Each row is returned with all its columns and also ``image``, the bytes of a file, ``metadata``, its
    settings (JSON), ``seed``, ``height`` and ``width``; or without an image but with an ``error``. No row is lost, and
    no error ends the job. The same row has the same image in any actor, block and order.

    Args:
        model: a name or a folder, as for ``canvax.load``; a folder must exist on every machine.
        batch_size: images at once; None for a number that any device can hold.
        most: total number of rows, if it is small; a batch has at most as many slots.
        image_format: png, webp or jpg.
        quality: 1..100 of a lossy WebP or JPEG.
        defaults: settings that rows may override.
        carried: columns that are not settings.
        seed: base of the seeds of rows without a seed.
        load: further arguments of ``canvax.load``.
        ip_adapter: as for ``pipe.with_ip_adapter``: files that read the image prompts of rows (``ip_image``).
        ip_encoder: their image encoder; by default the one next to them.
    """

    def __init__(
        self,
        model: str = "emoji",
        *,
        batch_size: int | None = None,
        most: int = MOST,
        image_format: str = "png",
        quality: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        carried: Sequence[str] = (),
        seed: int = 0,
        load: Mapping[str, Any] | None = None,
        ip_adapter: str | Sequence[str] | None = None,
        ip_encoder: str | None = None,
    ) -> None:
        import canvax

        batch_size = None if batch_size is None else check_count("batch_size", batch_size, MOST_IMAGES)
        check_count("most", most)
        if image_format not in ("png", "webp", "jpg"):
            raise InputError("image_format", "is not one of 'png', 'webp', 'jpg'", value=image_format)
        if quality is not None and (not 1 <= quality <= 100 or image_format == "png"):
            raise InputError(
                "quality", "is for webp and jpg, in 1..100", cure=f"image_format={image_format!r}", value=quality
            )
        settings_of(Row("defaults", dict(defaults or {}, prompt="x")), {}, carried)  # refuses invalid arguments
        load = {"progress": False, **(load or {})}
        pipe = canvax.load(model, **load)
        if ip_adapter:
            hub = {name: load[name] for name in ("token", "cache_dir", "local_files_only") if name in load}
            pipe = pipe.with_ip_adapter(ip_adapter, ip_encoder, progress=False, **hub)
        self._worker = Worker(pipe, batch=batch_size, most=most, defaults=defaults, carried=carried, seed=seed)
        self._file = (image_format, quality)
        self._files = ThreadPoolExecutor(2, "canvax files")

    def __call__(self, batch: Any) -> Any:
        """Return the rows with their images, a pyarrow table in the order of ``batch``."""
        values = _listed(batch)
        rows = [row_of(number, value, named=True) for number, value in enumerate(values, 1)]
        made = {id(result.row): result for _, results in self._worker.run(rows) for result in results}
        images = list(self._files.map(self._columns, (made[id(row)] for row in rows)))
        joined = zip(values, rows, images, strict=True)
        return _table([{**value, "id": row.id, **columns} for value, row, columns in joined])

    def _columns(self, made: Made) -> dict[str, Any]:
        known = {name: made.record.get(name) for name in ("seed", "height", "width")}
        columns = {"row": made.digest, **known, "image": None, "error": made.error, "metadata": json.dumps(made.record)}
        if made.image is not None and not isinstance(made.image, bytes):
            return columns | {"image": image_file(made.image, *self._file), "error": None}
        return columns


class _Settings(Generate):
    """Generates the images of rows whose settings the driver has read: a column of ids, and a column of JSON.

    Args:
        folder: working directory of the driver: relative file names start there, if a machine has it.
        arguments: arguments of ``Generate``.
    """

    def __init__(self, folder: str, **arguments: Any) -> None:
        with suppress(OSError):
            os.chdir(folder)
        super().__init__(**arguments)

    def __call__(self, batch: Any) -> Any:
        rows = [Row(row["id"], json.loads(row["settings"])) for row in _listed(batch)]
        made = [result for _, results in self._worker.run(rows) for result in results]
        images = list(self._files.map(self._columns, made))
        return _table([{"id": result.row.id, **columns} for result, columns in zip(made, images, strict=True)])


def on_ray(plan: Plan, arguments: Mapping[str, Any], *, address: str | None = None, actors: int | None = None) -> Any:
    """Generate the rows of a plan on a cluster, for ``canvax.scale.batch.run``.

    This process writes the images: the cluster needs no shared folder, and a row is in the manifest once, even if
    machines fail.

    Args:
        plan: the rows.
        arguments: arguments of ``Generate``, without the plan's defaults, names and seed.
        address: address of the cluster; "local" starts one on this machine; "auto" finds this machine's.
        actors: number of loaded models; None for one per device or, without devices, per machine.

    Raises:
        InputError: Ray is not installed, or there is no such cluster.
    """
    ray = connected(address)

    def generate(rows: Iterator[Row], _: int) -> Iterator[tuple[int, list[Made]]]:
        known: dict[str, Row] = {}
        items: list[tuple[int, int, dict[str, str]]] = []
        wrong: list[Made] = []
        for row in rows:
            try:
                settings = settings_of(row, plan.defaults, plan.carried, plan.seed)
            except InputError as error:
                wrong.append(Made(row, "", error=str(error)))
                continue
            known[row.id] = row
            entry = {"id": row.id, "settings": json.dumps(settings, default=str)}
            items.append((_side(settings.get("height")), _side(settings.get("width")), entry))
        if wrong:
            yield len(wrong), wrong
        if not items:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        pool, resources = _resources(ray, actors)
        items.sort(key=lambda item: item[:2])  # one size per block, if possible
        made = ray.data.from_items(
            [entry for *_, entry in items], override_num_blocks=blocks_of(len(items), pool)
        ).map_batches(
            _Settings,
            batch_size=None,
            fn_constructor_kwargs={"folder": os.getcwd(), **arguments},
            compute=ray.data.ActorPoolStrategy(size=pool),
            **resources,
        )
        # Ray reports lost machines on stdout, which is for results.
        with redirect_stdout(sys.stderr):
            try:
                for table in made.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                    results = [_made(known[row["id"]], row) for row in table.to_pylist()]
                    yield len(results), results
            except ray.exceptions.RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                why = next((line for line in reversed(lines) if "Error: " in line), lines[-1])
                raise CanvaxError(f"the job ended on the cluster ({why}); the same command resumes it") from error
            ray.shutdown()

    return generate


def connected(address: str | None) -> Any:
    """Return ``ray``, connected to the cluster at ``address``: "auto" for this machine's, "local" for a new one.

    Raises:
        InputError: Ray is not installed, or there is no such cluster.
    """
    ray = ray_module()
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise InputError(
            "ray", f"is no cluster that answers ({first})", cure="{ray=local} starts one here", value=address
        ) from None
    return ray


def blocks_of(rows: int, actors: int) -> int:
    """Return a number of blocks with which every actor gets some: Ray would make one block of a small file."""
    return max(-(-rows // PER_BLOCK), min(rows, actors))


def _side(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _made(row: Row, columns: Mapping[str, Any]) -> Made:
    return Made(row, columns["row"], json.loads(columns["metadata"]), columns["image"], columns["error"] or "")


def _resources(ray: Any, actors: int | None) -> tuple[int, dict[str, Any]]:
    """Return the number of actors, and the resources of each: a GPU, the chips of a machine, or none.

    Actors reserve no processors: reading tasks need whole ones, and a pool with the last one would wait forever.
    """
    resources = ray.cluster_resources()
    wanted: dict[str, Any] = {"num_cpus": 0}
    count = sum(node["Alive"] for node in ray.nodes())
    if gpus := int(resources.get("GPU", 0)):
        count, wanted["num_gpus"] = gpus, 1
    elif resources.get("TPU"):
        hosts = [int(node["Resources"]["TPU"]) for node in ray.nodes() if node["Resources"].get("TPU")]
        count, wanted["resources"] = len(hosts), {"TPU": min(hosts)}
    return actors or max(count, 1), wanted


def ray_module() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        cure = 'install it from canvax\'s folder: pip install ".[ray]"'
        raise InputError("ray", f"needs {error.name}", cure=cure) from None
    return ray


def _listed(batch: Any) -> list[dict[str, Any]]:
    """Return a batch of Ray Data, in any of its forms, as a list of rows."""
    if hasattr(batch, "to_pylist"):
        return batch.to_pylist()
    if hasattr(batch, "to_dict"):
        return batch.to_dict("records")
    if not isinstance(batch, Mapping):
        raise InputError("batch", "is not a batch of Ray Data: a table, or a dict of columns", value=batch)
    return [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a table whose columns have fixed types: blocks with errors and blocks without errors must fit together."""
    pa = pyarrow("Ray Data")
    kinds = {"image": pa.binary(), "error": pa.string(), "metadata": pa.string(), "row": pa.string(), "id": pa.string()}
    kinds |= {"seed": pa.uint64(), "height": pa.int32(), "width": pa.int32()}
    return pa.table({name: pa.array([row[name] for row in rows], kinds.get(name)) for name in rows[0]})
