"""``canvax generate``: generate images and print their file names."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.call import Call, Load
from canvax.cli.adapters import check_adapters, load_adapters, load_named
from canvax.cli.arguments import versions
from canvax.cli.generate_arguments import OUTPUT
from canvax.cli.images import check_table, gather, in_usual_syntax, shared, sized
from canvax.cli.loading import load_with, model_on_disk, overrides_of
from canvax.cli.preview import previews
from canvax.cli.terminal import complain, keep_stdout_for_results, say, seconds
from canvax.errors import (
    CanvaxError,
    HintWarning,
    InputError,
    conflict,
    needs,
    warn,
)
from canvax.files import check_writable, named_path
from canvax.images.formats import format_of, names_file, new_image
from canvax.images.grid import make_grid
from canvax.images.metadata import save_image, save_numbered, unique_path
from canvax.pipelines.references import read_references
from canvax.pipelines.texts import TAG
from canvax.scale.work import grouped, joined, most_at_once

if TYPE_CHECKING:
    from PIL.Image import Image

    from canvax.pipelines.options import Callback
    from canvax.pipelines.pipeline import Pipeline
    from canvax.pipelines.result import Result

STAGES = ("load", "compile", "encode", "denoise", "step", "decode", "first_step", "total")


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Generate the images; ``report`` is updated after each batch, so that it is of use after an interruption."""
    from canvax.compile.monitor import process_age

    began = time.perf_counter()
    timings = dict.fromkeys(STAGES, 0.0)
    report |= {"files": [], "grid": None, "seeds": [], "metadata": [], "timings": timings, "compilations": 0}
    spread = join_others(arguments)
    calls, load = gather(arguments)
    if spread:
        calls = _with_common_seeds(calls)
    where = Destination.checked(arguments, calls)
    check_batch_size(arguments.batch_size)
    preview = None if arguments.preview is None else new_image("preview", arguments.preview)
    if spread and preview is not None:
        raise conflict("preview", "distributed", why="no process has all images")
    _hint_at_quotes(arguments)
    check_against_model(calls, load)
    pipe = load_model(arguments, load, calls)
    timings["load"] = time.perf_counter() - began
    report |= description(pipe)
    calls = in_usual_syntax(sized(calls, pipe.model), pipe.model, arguments)
    try:
        with previews(pipe, preview) as callback:
            images = _save_all(generate_all(pipe, calls, arguments, callback), arguments, where, report)
    finally:
        timings["total"] = process_age()
    if arguments.grid:
        report["grid"] = str(where.save_grid(images, report["metadata"]))
        if not arguments.json:
            say(report["grid"])
    if not arguments.quiet:
        _summarise(report)


def _hint_at_quotes(arguments: argparse.Namespace) -> None:
    words = arguments.prompts
    if not (arguments.prompt_file or arguments.from_image):
        for network, image in (("controlnet", "control"), ("ip_adapter", "ip_image")):
            if getattr(arguments, network) and not getattr(arguments, image):
                warn(HintWarning(network, "has no effect without an image", cure=f"give {{{image}}}"))
        is_folder = arguments.lora_dir and os.path.isdir(os.path.expanduser(arguments.lora_dir))
        if is_folder and not any("<l" in word for word in words):
            warn(HintWarning("lora_dir", "has no effect without <lora:name:0.8> in a prompt"))
    if words and not any(word.strip() for word in words) and not (arguments.image or arguments.ip_image):
        warn(HintWarning("the prompt is empty; is a variable of your shell empty?"))
    if len(words) > 1 and not any(" " in word for word in words):
        quoted = f'"{" ".join(words)}"'
        warn(HintWarning(f"{len(words)} prompts of one word each; to make them one, quote them: {quoted}"))


def join_others(arguments: argparse.Namespace) -> bool:
    """Return whether other processes take part. They are joined here, before anything else uses JAX."""
    from canvax.parallel import multihost

    cluster = {name: getattr(arguments, name) for name in ("coordinator", "num_processes", "process_id")}
    if not arguments.distributed:
        for name, value in cluster.items():
            if value is not None:
                raise needs(name, "distributed")
        return False
    if getattr(arguments, "grid", False):
        raise conflict("grid", "distributed", why="no process has all images")
    keep_stdout_for_results()
    multihost.initialize(*cluster.values())
    return True


def _with_common_seeds(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with the seeds of process 0, so that all processes have the same randomly chosen seeds."""
    from canvax.parallel import multihost

    must_match = [dataclasses.replace(call, seed=0) for call in calls]
    seeds = multihost.broadcast_seeds([int(call.seed or 0) for call in calls], must_match)
    return [dataclasses.replace(call, seed=seed) for call, seed in zip(calls, seeds, strict=True)]


@dataclass(frozen=True)
class Destination:
    """The folder or file to which images are written."""

    path: Path
    is_file: bool
    grid: bool = False

    @classmethod
    def checked(cls, arguments: argparse.Namespace, calls: Sequence[Call]) -> Destination:
        """Return the destination that ``--output`` names. Nothing is created yet.

        Raises:
            InputError: the images cannot be written there.
        """
        path = named_path("output", OUTPUT if arguments.output is None else arguments.output)
        is_file = names_file(path)
        if str(path) == "-":
            raise InputError(
                "output", "is stdout, to which images are not written", cure="name a folder or a file", value="-"
            )
        if not is_file and not path.is_dir() and (guess_type(path.name)[0] or "").startswith("image/"):
            format_of(path, "output")  # raises
        if is_file and len(calls) > 1 and not arguments.grid:
            raise InputError("output", f"is one file for {len(calls)} images", cure="name a folder", value=path)
        if is_file and os.path.lexists(path):
            raise InputError("output", "exists and is not replaced", cure="choose another name", value=path)
        check_writable("output", path.parent if is_file else path)
        if not is_file:
            unique_path(path, 0)  # it reads the folder, as saving will
        preview = named_path("preview", arguments.preview) if getattr(arguments, "preview", None) else None
        if is_file and preview is not None and preview.absolute() == path.absolute():
            raise InputError("preview", "is the same file as --output", value=preview)
        if arguments.grid and len({_size(call) for call in calls}) > 1:
            raise InputError(
                "grid", "does not go with images of different sizes", cure="leave it out, or give all the same size"
            )
        return cls(path, is_file, grid=arguments.grid)

    def save(self, image: Image, metadata: Mapping[str, Any]) -> Path | None:
        """Write an image, unless only the grid is asked for. A missing folder is created now."""
        if self.is_file and self.grid:
            return None
        folder = self.path.parent if self.is_file else self.path
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CanvaxError(f"--output {folder}: the folder cannot be created ({error.strerror})") from error
        if self.is_file:
            return save_image(self.path, image, metadata)
        return save_numbered(self.path, image, metadata, metadata["seed"])

    def save_grid(self, images: Sequence[Image], metadata: Sequence[Mapping[str, Any]]) -> Path:
        """Write all images as one grid."""
        grid = {"grid": list(metadata)}
        if self.is_file:
            return save_image(self.path, make_grid(images), grid)
        return save_numbered(self.path, make_grid(images), grid, metadata[0]["seed"], prefix="grid-")


def _size(call: Call) -> tuple[int | None, int | None]:
    """Height and width of an image, as far as they are known without the model."""
    height, width = call.height, call.width
    if call.image is not None and None in (height, width):
        image = read_references(call.image)[0]
        height, width = height or image.height, width or image.width
    return height, width


def check_batch_size(size: int | None) -> None:
    """Refuse batch sizes that are too large or too small."""
    if size is not None and not 1 <= size <= 1_000_000:
        raise InputError("batch_size", "is not a whole number in 1..1000000", value=size)


def check_against_model(calls: Sequence[Call], load: Load) -> None:
    """Check what depends on the model, if its files are on disk. No weights are read."""
    from canvax.pipelines.checks import check_precision
    from canvax.pipelines.request import check_for_model, check_start
    from canvax.weights.cast import parse_dtype

    if load.dtype is not None:
        parse_dtype(load.dtype, quantizes=True)
    check_precision(load.precision)
    if any(call.control for call in calls) and not load.controlnet:
        raise needs("control", "controlnet", cure="it is the network that reads the image")
    overrides_of(load)
    if (model := model_on_disk(load)) is None:
        return  # loading reports it
    sized(calls, model)
    for call, *_ in grouped(calls, shared):
        default = call.options.listed_steps or model.defaults.num_inference_steps
        steps = default if call.num_inference_steps is None else call.num_inference_steps
        check_table(dataclasses.replace(call, num_inference_steps=steps), model.scheduler)
        check_for_model(call.options, model)
        check_start(call.options, call.sampler, None, model, image=call.image is not None)


def load_model(arguments: argparse.Namespace, load: Load, calls: Sequence[Call] = ()) -> Pipeline:
    """Load the model that the flags ask for onto their devices, with the textual inversions that the calls name."""
    from canvax.parallel import multihost
    from canvax.parallel.mesh import mesh_of

    check_adapters(arguments)
    mesh = mesh_of(load.mesh)
    if not multihost.is_main_process(mesh):
        arguments.quiet = True
    if not arguments.quiet:
        complain(f"loading {load.model}")
    pipe = load_with(arguments, dataclasses.replace(load, mesh=mesh, progress=not arguments.quiet))
    if not arguments.quiet:
        for name, reason in pipe.model.reasons.items():
            if name in pipe.model.files.components:  # a part that was chosen; canvax info says how the rest is known
                complain(f"{name.replace('_', ' ')}: {reason}", label="")
    load_adapters(pipe, arguments)
    load_named(pipe, calls, arguments)
    return pipe


def description(pipe: Pipeline) -> dict[str, Any]:
    """Describe the model and the machine for the report."""
    devices = pipe.programs.mesh.devices
    first = devices.flat[0]
    return {
        "model": pipe.model.name,
        "revision": pipe.model.revision,
        "dtype": pipe.model.dtype,
        "quantize": pipe.model.quantize,
        "device": {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": devices.size,
            "mesh": dict(pipe.programs.mesh.shape),
        },
        "versions": versions(),
    }


def generate_all(
    pipe: Pipeline, calls: Sequence[Call], arguments: argparse.Namespace, callback: Callback | None = None
) -> Iterator[tuple[Sequence[Call], Result]]:
    """Generate the images batch by batch; each batch has the same settings.

    Several batches are all of one size, so that one program is compiled: the rest of the last batch are copies of its
    last image. Without ``--batch-size`` they are as large as any device can hold, and of one size as far as possible.
    """
    from canvax.pipelines.result import progress_bar

    tags = TAG.findall if pipe.adapters.folder else lambda prompt: ()  # adapters that prompts name are those of a batch
    groups = grouped(calls, lambda call: (shared(call), _reference(pipe, call), *tags(call.prompt)))
    size = arguments.batch_size or _batch_size(pipe, groups)
    several = len(calls) > size
    progress: bool | str = not arguments.quiet and ("programs" if several else True)
    bar = progress_bar(len(calls), description="generating", unit="image", shown=several and bool(progress))
    for batch in (group[start : start + size] for group in groups for start in range(0, len(group), size)):
        full = [*batch, *[batch[-1]] * (size - len(batch))] if several else batch
        result = pipe(**vars(joined(full, progress=progress, callback=callback)))
        yield batch, result
        if not bar.disable:
            bar.last_print_t += result.timings["compile"]  # the batches to come do not wait for it
        bar.update(len(batch))
    bar.close()


def _reference(pipe: Pipeline, call: Call) -> Any:
    """Return the image that a model made for editing reads, which is one of a whole batch; None for other calls."""
    edits = pipe.model.networks.denoiser.facts.edits and call.strength is None and call.mask is None
    return call.image if edits else None


def _batch_size(pipe: Pipeline, groups: Sequence[Sequence[Call]]) -> int:
    (height, width), largest = pipe.model.native_size, max(map(len, groups))
    sizes = {(call.height or height, call.width or width) for group in groups for call in group}
    most = min(most_at_once(pipe.programs.mesh, *size) for size in sizes)
    return math.ceil(largest / math.ceil(largest / most))


def _save_all(
    batches: Iterator[tuple[Sequence[Call], Result]],
    arguments: argparse.Namespace,
    where: Destination,
    report: dict[str, Any],
) -> list[Image]:
    """Save the images of each batch; return all of them if a grid was asked for, else an empty list."""
    from canvax.compile.monitor import process_age

    evaluations, images = 0.0, []
    timings = report["timings"]
    for batch, result in batches:
        first_step = process_age() - result.timings["total"] + result.timings["first_step"]
        timings["first_step"] = timings["first_step"] or first_step
        for stage in ("compile", "encode", "denoise", "decode"):
            timings[stage] += result.timings[stage]
        evaluations += result.timings["denoise"] / max(result.timings["step"], 1e-9)
        timings["step"] = timings["denoise"] / max(evaluations, 1.0)
        report["compilations"] += result.compilations
        generated = zip(result.indices, result.images, result.metadata, strict=True)
        for image, metadata in [(image, metadata) for i, image, metadata in generated if i < len(batch)]:
            path = where.save(image, metadata)
            report["seeds"].append(metadata["seed"])
            report["metadata"].append(metadata)
            if path is not None:
                report["files"].append(str(path))
                if not arguments.json:
                    say(str(path))
        if arguments.grid:
            images += result.images[: len(batch)]
    return images


def _summarise(report: Mapping[str, Any]) -> None:
    timings = report["timings"]
    compiled = "compile" if report["compilations"] else "programs from the cache"
    names = {"load": "load", "compile": compiled, "encode": "encode", "denoise": "denoise"}
    parts = [f"{name} {seconds(timings[stage])}" for stage, name in names.items()]
    parts[-1] += f" ({seconds(timings['step'])} an evaluation)"
    parts += [f"decode {seconds(timings['decode'])}", f"total {seconds(timings['total'])}"]
    parts += [f"first step {seconds(timings['first_step'])} after the start"]
    count = len(report["metadata"])
    complain(f"{count} image{'s' if count > 1 else ''}; " + ", ".join(parts))
