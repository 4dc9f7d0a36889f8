"""``canvax generate``: generates images and prints their file names."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.cli.adapters import check_adapters, load_adapters
from canvax.cli.arguments import versions
from canvax.cli.batching import batch_size, batches
from canvax.cli.generate_arguments import OUTPUT
from canvax.cli.images import ZERO_SNR, ImageRequest, Source, check_table, gather, without_prompts
from canvax.cli.preview import previews
from canvax.cli.terminal import complain, keep_stdout_for_results, say, seconds
from canvax.errors import NO_VALUE, CanvaxError, CheckpointError, HintWarning, HubError, InputError, warn
from canvax.files import check_writable, named_path
from canvax.images.formats import names_file, new_image
from canvax.images.grid import make_grid
from canvax.images.metadata import save_image, save_numbered, unique_path
from canvax.pipelines.control import control_argument
from canvax.pipelines.image_prompts import image_prompt_argument

if TYPE_CHECKING:
    from PIL.Image import Image

    from canvax.pipelines.options import Callback
    from canvax.pipelines.pipeline import StableDiffusion
    from canvax.pipelines.result import Result

STAGES = ("load", "compile", "encode", "denoise", "step", "decode", "first_step", "total")


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Generate the images; ``report`` is updated after each batch, so that it is of use after an interruption."""
    from canvax.compile.monitor import process_age

    began = time.perf_counter()
    timings = dict.fromkeys(STAGES, 0.0)
    report |= {"files": [], "grid": None, "seeds": [], "metadata": [], "timings": timings, "compilations": 0}
    spread = join_others(arguments)
    requests, source = gather(arguments)
    if spread:
        requests = _with_common_seeds(requests)
    where = Destination.checked(arguments, requests)
    _check_batch_size(arguments.batch_size)
    preview = None if arguments.preview is None else new_image("preview", arguments.preview)
    if spread and preview is not None:
        raise InputError(
            "preview", NO_VALUE, "does not go with --distributed, where no process has all images", "leave it out"
        )
    _hint_at_quotes(arguments)
    check_against_model(arguments, requests, source)
    pipe = load_model(arguments, source)
    timings["load"] = time.perf_counter() - began
    report |= description(pipe)
    try:
        with previews(pipe, preview) as callback:
            images = _generate_all(pipe, requests, arguments, where, report, callback)
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
                warn(HintWarning(network, NO_VALUE, "has no effect without an image", f"give {{{image}}}"))
        is_folder = arguments.lora_dir and os.path.isdir(os.path.expanduser(arguments.lora_dir))
        if is_folder and not any("<l" in word for word in words):
            warn(HintWarning("lora_dir", NO_VALUE, "has no effect without <lora:name:0.8> in a prompt"))
    if words and not any(word.strip() for word in words) and not (arguments.image or arguments.ip_image):
        warn(HintWarning("the prompt is empty; is a variable of your shell empty?"))
    if len(words) > 1 and not any(" " in word for word in words):
        quoted = f'"{" ".join(words)}"'
        warn(HintWarning(f"{len(words)} prompts of one word each; to make them one, quote them: {quoted}"))


def join_others(arguments: argparse.Namespace) -> bool:
    """Whether other processes take part. They are joined here, before anything else uses JAX."""
    from canvax.parallel import multihost

    cluster = (arguments.coordinator, arguments.num_processes, arguments.process_id)
    if not arguments.distributed:
        if any(value is not None for value in cluster):
            raise InputError("--coordinator, --num-processes and --process-id go with --distributed; add it")
        return False
    if getattr(arguments, "grid", False):
        raise InputError(
            "grid", NO_VALUE, "does not go with --distributed, where no process has all images", "leave it out"
        )
    keep_stdout_for_results()
    multihost.initialize(*cluster)
    return True


def _with_common_seeds(requests: Sequence[ImageRequest]) -> list[ImageRequest]:
    """The requests with the seeds of process 0, so that randomly chosen seeds are the same in all processes."""
    from canvax.parallel import multihost

    must_match = [dataclasses.replace(request, seed=0) for request in requests]
    seeds = multihost.agree([request.seed for request in requests], must_match)
    return [dataclasses.replace(request, seed=seed) for request, seed in zip(requests, seeds, strict=True)]


@dataclass(frozen=True)
class Destination:
    """Where images are written: a folder, or one file."""

    path: Path
    is_file: bool
    grid: bool = False

    @classmethod
    def checked(cls, arguments: argparse.Namespace, requests: Sequence[ImageRequest]) -> Destination:
        """The destination that ``--output`` names. Creates nothing.

        Raises:
            InputError: the images cannot be written there.
        """
        path = named_path("output", OUTPUT if arguments.output is None else arguments.output)
        is_file = names_file(path)
        if str(path) == "-":
            raise InputError("output", "-", "is stdout, to which images are not written", "name a folder or a file")
        if is_file and len(requests) > 1 and not arguments.grid:
            raise InputError("output", path, f"is one file for {len(requests)} images", "name a folder")
        if is_file and os.path.lexists(path):
            raise InputError("output", path, "exists and is not replaced", "choose another name")
        check_writable("output", path.parent if is_file else path)
        if not is_file:
            unique_path(path, 0)  # which looks into the folder, as saving will
        preview = named_path("preview", arguments.preview) if getattr(arguments, "preview", None) else None
        if is_file and preview is not None and preview.absolute() == path.absolute():
            raise InputError("preview", preview, "is the file of --output, which it would be in the way of")
        sizes = {(request.height, request.width) for request in requests}
        if arguments.grid and len(sizes) > 1:
            raise InputError(
                "grid",
                NO_VALUE,
                "does not go with images of different sizes",
                "leave it out, or give all the same size",
            )
        return cls(path, is_file, grid=arguments.grid)

    def save(self, image: Image, metadata: Mapping[str, Any]) -> Path | None:
        """Write an image, unless only the grid is asked for; the folder is made now, if need be."""
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
        """Write all images in one."""
        grid = {"grid": list(metadata)}
        if self.is_file:
            return save_image(self.path, make_grid(images), grid)
        return save_numbered(self.path, make_grid(images), grid, metadata[0]["seed"], prefix="grid-")


def _check_batch_size(size: int | None) -> None:
    if size is not None and not 1 <= size <= 1_000_000:
        raise InputError("batch_size", size, "is not a whole number in 1..1000000")


def check_against_model(arguments: argparse.Namespace, requests: Sequence[ImageRequest], source: Source) -> None:
    """Checks that depend on the model, if its files are on disk. Reads no weights."""
    from canvax.families.read import family_of, read_model
    from canvax.pipelines.request import check_for_model, check_start
    from canvax.quantize import check_kind
    from canvax.weights.cast import parse_dtype
    from canvax.weights.location import Location as ModelLocation
    from canvax.weights.open import open_files
    from canvax.weights.overrides import Overrides

    if source.dtype is not None:
        parse_dtype(source.dtype, quantizes=True)
    check_kind(source.quantize)
    if any(request.control for request in requests) and not source.controlnet:
        raise InputError(
            "control", NO_VALUE, "needs a ControlNet", "name the network that reads the image with {controlnet}"
        )
    overrides = Overrides.of(source.vae, source.prediction_type, ZERO_SNR if source.zero_snr else None)
    try:
        origin = ModelLocation(
            source.model, source.revision, source.variant, cache_dir=arguments.cache_dir, local_files_only=True
        )
        files = open_files(origin, accept=family_of, prediction=overrides.prediction, vae=overrides.vae is None)
        files = dataclasses.replace(overrides, vae=None).apply(files)
    except (CheckpointError, HubError):
        return  # not on disk yet, or no such model: loading reports it
    model = read_model(files, "float32")
    for request in without_prompts(requests):
        default = request.options.own_steps or model.defaults.num_inference_steps
        steps = default if request.steps is None else request.steps
        check_table(dataclasses.replace(request, steps=steps), model.scheduler)
        check_for_model(request.options, model)
        check_start(request.options, request.sampler, None, model, image=request.image is not None)


def load_model(arguments: argparse.Namespace, source: Source) -> StableDiffusion:
    """The model that the flags ask for, on their devices."""
    import canvax
    from canvax.parallel import multihost
    from canvax.parallel.mesh import mesh_of

    check_adapters(arguments)
    mesh = mesh_of(arguments.mesh)
    if not multihost.leads(mesh):
        arguments.quiet = True
    if not arguments.quiet:
        complain(f"loading {source.model}")
    keywords: dict[str, Any] = {"controlnet": list(source.controlnet)} if source.controlnet else {}
    parts: dict[str, Any] = {"vae": source.vae, "prediction_type": source.prediction_type}
    parts["scheduler"] = ZERO_SNR if source.zero_snr else None
    keywords |= {name: value for name, value in parts.items() if value is not None}
    pipe = canvax.load(
        source.model,
        dtype=source.dtype,
        quantize=source.quantize,
        revision=source.revision,
        variant=source.variant,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        local_files_only=arguments.local_files_only,
        mesh=mesh,
        safety_checker=arguments.safety_checker or None,
        progress=not arguments.quiet,
        **keywords,
    )
    if not arguments.quiet:
        for name, reason in pipe.model.reasons.items():
            complain(f"{name.replace('_', ' ')}: {reason}", label="")
    if source.ip_adapter:
        hub = {name: getattr(arguments, name) for name in ("token", "cache_dir", "local_files_only")}
        pipe = pipe.with_ip_adapter(source.ip_adapter, source.ip_encoder, progress=not arguments.quiet, **hub)
    load_adapters(pipe, arguments)
    return pipe


def description(pipe: StableDiffusion) -> dict[str, Any]:
    """The model and the machine, for the report."""
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


def _generate_all(
    pipe: StableDiffusion,
    requests: Sequence[ImageRequest],
    arguments: argparse.Namespace,
    where: Destination,
    report: dict[str, Any],
    callback: Callback | None = None,
) -> list[Image]:
    """Generate and save batch by batch; returns the images if a grid was asked for, else an empty list."""
    size = arguments.batch_size or batch_size(pipe, requests)
    from canvax.compile.monitor import process_age
    from canvax.pipelines.result import progress_bar

    evaluations, images = 0.0, []
    timings = report["timings"]
    several = len(requests) > size
    fits = not several and arguments.batch_size is not None
    progress: bool | str = not arguments.quiet and ("programs" if several else True)
    bar = progress_bar(len(requests), description="generating", unit="image", shown=several and bool(progress))
    for batch in batches(requests, size, edits=pipe.model.networks.denoiser.edits):
        age = process_age()
        result = generate_batch(pipe, batch, len(batch) if fits else size, progress, callback)
        timings["first_step"] = timings["first_step"] or age + result.timings["first_step"]
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
        bar.update(len(batch))
        if arguments.grid:
            images += result.images[: len(batch)]
    bar.close()
    return images


def generate_batch(
    pipe: StableDiffusion,
    batch: Sequence[ImageRequest],
    size: int,
    progress: bool | str,
    callback: Callback | None = None,
) -> Result:
    """One call, filled up to ``size`` with copies of the last image, so that nothing compiles for a smaller one."""
    full = [*batch, *[batch[-1]] * (size - len(batch))]
    first = full[0]
    return pipe(
        [request.prompt for request in full],
        None if first.negative is None else [request.negative or "" for request in full],
        height=first.height,
        width=first.width,
        num_inference_steps=first.steps,
        guidance_scale=first.guidance,
        seed=[request.seed for request in full],
        sampler=first.sampler,
        options=dataclasses.replace(first.options, progress=progress, callback=callback),
        **_given(full),
        control=control_argument([request.control for request in full]),
        image_prompt=image_prompt_argument([request.image_prompts for request in full]),
    )


def _given(batch: Sequence[ImageRequest]) -> dict[str, Any]:
    """The images and masks of a batch; one that all share is encoded once."""
    first = batch[0]
    files = {name: [getattr(request, name) for request in batch] for name in ("image", "mask")}
    shared = {name: paths[0] if len(set(paths)) == 1 else paths for name, paths in files.items()}
    return {**shared, "strength": first.strength} if first.image is not None else {}


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
