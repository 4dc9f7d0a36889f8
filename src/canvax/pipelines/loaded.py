"""A model with its weights on devices: open its files, call its networks, save, place, compile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from canvax.call import LAYERS, Offload
from canvax.compile.additions import DeepFeatures, Keeps, ReadsControls, ReadsImage, ReadsImagePrompts, ReadsReferences
from canvax.compile.aot import Build
from canvax.compile.cache import size_limit
from canvax.compile.kinds import PROGRAMS, Kinds, Ready
from canvax.compile.programs import Programs
from canvax.errors import HintWarning, InputError, check_count, check_flag, refuse_tracers, warn
from canvax.familiar import SAVE, accepts
from canvax.families.base import Model
from canvax.families.known import family_of
from canvax.families.local_models import completed
from canvax.families.read import read_model, unsaved
from canvax.files import named_path
from canvax.guidance import rule_of
from canvax.models.denoiser import DenoiserWrapper
from canvax.models.text import Conditions
from canvax.parallel import multihost
from canvax.parallel.memory import Memory, check_weights, free_bytes, gigabytes, program_bytes, streams
from canvax.parallel.mesh import check_mesh, mesh_of, padded_batch, refuse_fork
from canvax.parallel.place import HOST, waits
from canvax.parallel.rules import (
    AHEAD,
    abstract_params,
    check_params,
    check_split,
    device_bytes,
    is_on,
    largest_layer,
    place,
    place_all,
)
from canvax.params import Params, Spec
from canvax.pipelines import functions
from canvax.pipelines.checks import MOST_IMAGES, check_precision, check_size, default_dtype, is_tiled
from canvax.pipelines.request import check_layers
from canvax.pipelines.result import Display
from canvax.pipelines.translate import loader
from canvax.prompts.grammar import PromptSyntax
from canvax.quantize import check_kind
from canvax.types import Array, DType
from canvax.weights.cast import parse_dtype
from canvax.weights.files import ModelFiles
from canvax.weights.load import Component, load_components
from canvax.weights.location import Location
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides


@dataclass(eq=False, repr=False)
class LoadedModel:
    """The model, programs and parameters of a pipeline, with all methods except those that generate.

    Attributes:
        model: its source, configs, tokenizers and noise schedule.
        programs: the compiled programs.
        params: ``{"unet": ..., "vae": ..., "text_encoder": ...}`` (SDXL also ``text_encoder_2``), nested dicts of
            arrays. None after ``from_pretrained``, whose caller passes them to each call.
    """

    model: Model
    programs: Programs
    params: Params = None  # pyright: ignore[reportAssignmentType]
    _fitting: list[tuple[Any, list[weakref.ref[Any]]]] = field(default_factory=list, init=False)
    _changing: threading.RLock = field(default_factory=threading.RLock, init=False)
    """Lock that is held while ``model`` and ``params`` change, and while a call reads both."""

    @property
    def mesh(self) -> Mesh:
        """The devices, with the axes ``data`` and ``model``."""
        return self.programs.mesh

    @property
    def devices(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def device(self) -> Any:
        """The first device."""
        return self.mesh.devices.flat[0]

    @property
    def dtype(self) -> DType:
        """The dtype of weights and activations."""
        return parse_dtype(self.model.dtype)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the first text encoder."""
        return next(iter(self.model.tokenizers.values()))

    def encode(
        self,
        prompt: str | Sequence[str],
        prompt_2: str | Sequence[str] | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        clip_skip: int = 0,
        guidance_scale: float | None = None,
        prompt_syntax: PromptSyntax = "plain",
        params: Params | None = None,
    ) -> Conditions:
        """Encode prompts into conditions: ``text`` [B, T, D], and for SDXL ``pooled`` [B, P] and ``time_ids``.

        This is a pure function of ``params``: use it inside ``jax.jit`` and ``jax.grad``.

        Args:
            prompt: one prompt or several.
            prompt_2: the prompt of SDXL's second text encoder, by default ``prompt``.
            height: pixels of the images, which SDXL reads; by default the size that the model was trained for.
            width: pixels, as ``height``.
            clip_skip: layers of the text encoder left out at the end.
            guidance_scale: input of latent consistency models; other models ignore it.
            prompt_syntax: meaning of brackets in the prompt; see ``canvax.Options``.
            params: the parameters, by default those of the pipeline.
        """
        params = self._own(params)
        keywords = {"height": height, "width": width, "clip_skip": clip_skip, "guidance_scale": guidance_scale}
        keywords["prompt_syntax"] = prompt_syntax
        return functions.encode(self.model, params, prompt, prompt_2, **keywords)

    def encode_image(
        self, image: Any, *, height: int | None = None, width: int | None = None, params: Params | None = None
    ) -> Array:
        """Encode images into latents [B, h, w, C] float32, scaled for the denoiser: the mean of the encoder's output.

        For an array [B, H, W, 3], floats in 0..1 or uint8, this is a pure function, the inverse of ``decode``: use it
        inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            image: an array as above, or as in a call: a PIL image, a path, an array, or a list of these.
            height: pixels to resize to; by default the image's height.
            width: pixels to resize to; by default the image's width.
            params: the parameters, by default those of the pipeline.
        """
        return functions.encode_image(self.model, self._own(params), image, height, width)

    def denoiser(self, latents: Array, timestep: Any, conditions: Conditions, *, params: Params | None = None) -> Array:
        """Return the network's output [B, h, w, C] float32.

        It is what the schedule's ``prediction_type`` names: the noise for "epsilon", the velocity for "v_prediction".

        This is a pure function of its arrays: use it inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            latents: noisy latents [B, h, w, C], of variance 1 or less (variance-preserving).
            timestep: a timestep of the checkpoint, 0..999; one for all or [B].
            conditions: the output of ``encode``.
            params: the parameters, by default those of the pipeline.
        """
        return functions.denoise(self.model, self._own(params), latents, timestep, conditions)

    def decode(self, latents: Array, *, params: Params | None = None) -> Array:
        """Decode latents [B, h, w, C], such as ``Result.latents``, into images [B, H, W, 3] float32 in 0..1.

        This is a pure function of its arrays: use it inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.
        """
        return functions.decode(self.model, self._own(params), latents)

    @accepts(loader(SAVE, ("folder", "params", "dtype", "overwrite"), "an argument of save"), table=SAVE)
    def save(
        self, folder: str | Path, params: Params | None = None, *, dtype: Any = None, overwrite: bool = False
    ) -> Path:
        """Write the model in the diffusers layout, which PyTorch diffusers loads.

        If several processes run, the first one writes and all wait for it.

        Args:
            folder: the folder to write to, empty unless ``overwrite`` is set.
            params: the parameters, if the pipeline does not hold them.
            dtype: dtype of the written arrays; by default unchanged.
            overwrite: replace files of a folder that is not empty.
        """
        folder = named_path("folder", folder)
        check_flag("overwrite", overwrite)
        params, spread = self._params(params), multihost.is_spread(self.programs.mesh)
        if any(len({device.process_index for device in row}) > 1 for row in self.programs.mesh.devices):
            raise InputError(
                "mesh", "splits the weights over several processes", cure="load with {model=1} to save them"
            )
        with multihost.fail_together("canvax save") if spread else nullcontext():
            if not spread or multihost.is_main_process(self.programs.mesh):
                if beside := [
                    name for name, adapter in vars(self).get("adapters", {}).items() if adapter.place is not None
                ]:
                    warn(f"adapters beside the weights are not in what is saved: {', '.join(beside)}", HintWarning)
                if isinstance(denoiser := self.model.networks.denoiser, DenoiserWrapper):
                    problem = "is code, which is not in what is saved; wrap the loaded denoiser again"
                    warn(f"the wrapper {type(denoiser).__name__} of the denoiser {problem}", HintWarning)
                self.model.save(
                    folder, params, dtype=None if dtype is None else parse_dtype(dtype), overwrite=overwrite
                )
                for problem in unsaved(self.model, folder):
                    warn(f"{folder}: {problem}", HintWarning)
        return Path(folder)

    save_pretrained = save

    def place(self, params: Params) -> Params:
        """Put parameters on the devices of this pipeline; arrays that are there already are not copied.

        Args:
            params: arrays of any kind, on the host or on devices; nested dicts as ``from_pretrained`` returns them.

        Raises:
            InputError: the parameters do not fit the model.
        """
        if not isinstance(params, Mapping):
            raise InputError("params", "are not parameters, as canvax.Pipeline.params holds them", value=params)
        return {
            part.name: place_all(part.spec, params.get(part.name, {}), self.programs.mesh, part.name)
            for part in self.model.components
        }

    def memory(
        self,
        height: int | None = None,
        width: int | None = None,
        batch: int = 1,
        *,
        guidance: bool | None = None,
        references: int | Sequence[tuple[int, int]] = 0,
    ) -> Memory:
        """Return the memory that each device needs to generate ``batch`` images at once, as the compiler reports it.

        The programs are compiled for this, as by ``compile``, and are ready then; none is run.

        Args:
            height: pixels; by default the size that the model was trained for.
            width: pixels, as ``height``.
            batch: images of one call.
            guidance: True for images with guidance; by default as in a call without a guidance scale.
            references: reference images of the call, as for ``compile``.
        """
        params, mesh = self.params, self.programs.mesh
        if params is None:
            params = {part.name: abstract_params(part.spec, self.model.dtype, mesh) for part in self.model.components}
        adds = [ReadsReferences(self._references(references, height, width))] if references else []
        measured = replace(self.programs, described=True)  # figures also of what does not fit
        ready = self._ready(params, (height, width), batch, guidance, Display(shown=False), *adds, programs=measured)
        weights, free = weight_bytes(self.model.components, self.model.dtype, mesh.shape), free_bytes(mesh)
        programs, parts, ahead = dict[str, int](), dict[str, int](), dict[str, int]()
        networks, kind = self.model.networks, self.model.quantize

        def size(spec: Spec) -> int:
            return device_bytes(spec, self.dtype, mesh.shape)

        sizes = {part.name: size(part.spec) for part in self.model.components}
        layers = {name: largest_layer(spec, size) for name, spec in networks.specs(kind).items() if name != "vae"}
        for program, executable in ready.values():
            programs[program.name] = max(programs.get(program.name, 0), program_bytes(executable) or 0)
            parts[program.name] = sum(sizes[name] for name in program.reads)
            ahead[program.name] = AHEAD * max(layers.get(name, 0) for name in program.reads)
        left = sum(map(size, networks.specs(kind, streamed=True).values()))
        streamed = left + max((used + ahead[name] for name, used in programs.items()), default=0)
        if self.offloads:
            return Memory(0, {name: used + parts[name] for name, used in programs.items()}, free, streamed=streamed)
        held = weights if self.params is not None else 0
        return Memory(weights, programs, None if free is None else free + held, parts, streamed)

    @property
    def offloads(self) -> bool:
        """True if weights are in the host's memory, and on the devices only while their network runs."""
        return self.params is not None and waits(self.params[self.model.networks.denoiser.component])

    def compile(
        self,
        height: int | None = None,
        width: int | None = None,
        batch: int = 1,
        *,
        guidance: bool | None = None,
        reuse_layers: int = 0,
        image: bool = False,
        mask: bool = False,
        control: bool = False,
        image_prompt: bool = False,
        references: int | Sequence[tuple[int, int]] = 0,
        progress: bool = True,
        params: Params | None = None,
    ) -> tuple[Build, ...]:
        """Load or compile the three programs of a size and batch, without running them.

        Programs are loaded from the cache if it has them; others are compiled and stored there.

        Args:
            height: pixels; by default the size that the model was trained for.
            width: pixels, as ``height``.
            batch: number of images, rounded up to the number of devices.
            guidance: True for images with guidance, which is another program; by default as in a call without a
                guidance scale.
            reuse_layers: for ``options.reuse``: ``options.reuse_layers``, which is 1 unless you change it.
            image: for calls with an image, and for second passes and ``upscale``: the image encoder.
            mask: for calls with a mask: the denoiser that keeps parts of an image.
            control: for calls with control images for all networks that read one.
            image_prompt: for calls with an image prompt, without a mask, for each IP-Adapter.
            references: for calls with reference images: their number, each of the image's size, or the height and
                width of each. Other sizes with the same number of tokens in all, rounded up to 1024, only need another
                image encoder.
            progress: show progress on stderr.
            params: the parameters, if the pipeline does not hold them. Shapes, dtypes and shardings are enough
                (``jax.ShapeDtypeStruct``).

        Returns:
            The programs that were loaded or compiled now, with their times.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        display = Display(shown=progress and multihost.is_main_process(self.programs.mesh))
        if reuse_layers:
            check_layers(reuse_layers, self.model)
        adds: list[Any] = [
            reuse_layers and DeepFeatures(reuse_layers),
            mask and not self.model.networks.inpaints and Keeps(),
        ]
        if control and not self.model.networks.controls:
            raise InputError(
                "control",
                f"does not go with {self.model.name}, which has no ControlNet",
                cure="leave it out",
                value=True,
            )
        adds.append(control and ReadsControls(tuple(name for name, _ in self.model.networks.controls)))
        if image_prompt:
            from canvax.pipelines.networks import usual_kinds  # which most pipelines never need

            adds.append(ReadsImagePrompts(kinds := usual_kinds(self.model.networks), sees=True))
            if not kinds:
                why = "no IP-Adapter with an image encoder; leave it out"
                raise InputError("image_prompt", f"does not go with {self.model.name}, which has {why}", value=True)
        if references:
            adds.append(ReadsReferences(self._references(references, height, width)))
        self._ready(
            self._params(params, described=True), (height, width), batch, guidance, display, *adds, image=image or mask
        )
        return tuple(sorted(display.builds, key=lambda build: PROGRAMS.index(build.program)))

    def _references(
        self, references: int | Sequence[tuple[int, int]], height: int | None, width: int | None
    ) -> tuple[tuple[int, int], ...]:
        """Return the sizes in which reference images are read."""
        from canvax.pipelines.references import check_editing, reference_sizes

        check_editing(self.model.networks, self.model.name)
        tall, wide = self.model.native_size
        return reference_sizes(references, (height or tall, width or wide), self.model.networks)

    def _ready(
        self,
        params: Params,
        size: tuple[Any, Any],
        batch: int,
        guided: bool | None,
        display: Display,
        *adds: Any,
        image: bool = False,
        programs: Programs | None = None,
    ) -> Ready:
        """Return the programs of a size in pixels and a batch."""
        model, networks = self.model, self.model.networks
        (tall, wide), factor = model.native_size, networks.size_step
        height, width = check_size("height", size[0], tall, factor), check_size("width", size[1], wide, factor)
        images = padded_batch(check_count("batch", batch, MOST_IMAGES), self.programs.mesh)
        way = "tiled" if is_tiled(height, width) else "whole"
        usual = model.family.guides(networks, model.defaults.guidance_scale)
        guides = (usual if guided is None else guided and not networks.unguided,)
        reads = image or networks.inpaints
        latents, ready = networks.latent_shape(images, height, width), {}
        for lengths in model.text.up_to_shortest(height * width):
            rule = rule_of(model.family.guidance)
            kinds = Kinds(guides, rule, decoder=way, lengths=lengths).adding(*adds, reads and ReadsImage(way))
            ready = (programs or self.programs).ready(params, latents, kinds, display.announce)
        return ready

    def _own(self, params: Params | None) -> Params:
        refuse_fork()
        params = self.params if params is None else params
        if params is None:
            raise InputError(
                "params",
                "is missing: this pipeline holds no parameters",
                cure="pass those that from_pretrained returned",
                value=None,
            )
        return params

    def _params(self, params: Params | None, *, described: bool = False) -> Params:
        """Check parameters and put them on the devices; the pipeline keeps edited parameters there.

        With ``described``, shapes, dtypes and shardings are enough.
        """
        is_own = params is None or params is self.params
        params = self._own(params)
        if not isinstance(params, Mapping):
            raise InputError(
                "params", "is not a dict of arrays", cure="pass those that from_pretrained returned", value=params
            )
        # Checking thousands of arrays takes 10 ms. Comparing them with those of the last call takes 1 ms.
        leaves, structure = jax.tree.flatten(params)
        for last, refs in self._fitting:
            same = last == structure and all(ref() is leaf for ref, leaf in zip(refs, leaves, strict=True))
            if same and not any(leaf.is_deleted() for leaf in leaves):
                return params
        placed = is_on(params, self.programs.mesh)
        if not (is_own and placed):
            refuse_tracers("params", params)
            if not described and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
                raise InputError("params", "are jax.ShapeDtypeStruct, which hold no numbers", cure="pass arrays")
        for part in self.model.components:
            check_params(part.spec, params.get(part.name, {}), part.name)
        if not placed:
            params = {**params, **self.place(params)}
            if is_own:
                vars(self)["params"] = params  # the dict itself is the caller's
        elif all(isinstance(leaf, jax.Array) for leaf in leaves):
            self._fitting[:] = [(structure, [weakref.ref(leaf) for leaf in leaves])]
        return params


def open_model(
    model: str | Path,
    *,
    dtype: DType | None = None,
    quantize: str | None = None,
    mesh: Mesh | str | None = None,
    precision: str | None = None,
    offload: Offload = False,
    weights: bool | Collection[str] = True,
    accept: Callable[[Mapping[str, Any]], None] | None = None,
    check: Callable[[Model], object] | None = None,
    overrides: Overrides | None = None,
    **source: Any,
) -> tuple[Model, Programs, Params]:
    """Open a model: its configs, programs and parameters. See ``canvax.load`` for most arguments.

    With ``weights=False`` the parameters are shapes, dtypes and shardings, enough to compile. ``weights`` can also be
    the names of the components to load. ``accept`` and ``check`` refuse models that the caller cannot use, by their
    ``model_index.json`` or all their configs, before weights are fetched. ``overrides`` are parts from other files.
    """
    if dtype is not None:
        dtype = parse_dtype(dtype, quantizes=True)
    check_kind(quantize)
    check_precision(precision)
    size_limit()
    mesh = mesh_of(mesh) if isinstance(mesh, str | None) else check_mesh(mesh)
    dtype = default_dtype(mesh) if dtype is None else dtype

    origin = Location(model, **source)
    models: list[Model] = []
    replaced = completed(overrides or Overrides(), origin)

    def look(files: ModelFiles) -> None:
        files = replaced.apply(files, **source)
        if precision is not None:  # images differ by it, and their metadata has it
            files = replace(files, overrides={**files.overrides, "precision": precision})
        opened = replace(read_model(files, dtype, quantize), streamed=offload == LAYERS)
        if check is not None:
            check(opened)
        check_split(opened.networks.denoiser.spec, mesh.shape, opened.name)
        needed = weight_bytes(_chosen(opened, weights), dtype, mesh.shape, at_once=offload is not True)
        if offload is True and streams(needed, mesh):
            warn(f"{opened.name}: a network of {gigabytes(needed)} leaves too little memory on the devices; layers are "
                 "copied there one after another, in every step (offload='layers')", HintWarning)  # fmt: skip
            opened = replace(opened, streamed=True)
        elif weights:
            check_weights(needed, mesh, opened.name, opened.dtype, quantized=quantize is not None)
        if offload and mesh.devices.flat[0].platform == "cpu":
            warn(HintWarning("offload", "saves nothing on a CPU, whose devices are the host", cure="leave it out",
                             value=offload))  # fmt: skip
        models.append(opened)

    def accepted(index: Mapping[str, Any]) -> None:
        family_of(index)
        if accept is not None:
            accept(index)

    open_files(
        origin, accept=accepted, look=look, weights=bool(weights), prediction=replaced.prediction, given=replaced.parts
    )
    (opened,) = models
    params = {part.name: abstract_params(part.spec, dtype, mesh) for part in opened.components}
    kind = HOST if offload and not opened.streamed else None
    if weights:
        params |= load_components(
            opened.files,
            _chosen(opened, weights),
            dtype=dtype,
            place=lambda param, array: place(param, array, mesh, kind),
            finite=replaced.parts,
        )
    return opened, Programs(opened.networks, mesh, precision), params


def _chosen(model: Model, weights: bool | Collection[str]) -> list[Component]:
    """Return the components whose weights are loaded."""
    return [part for part in model.components if isinstance(weights, bool) or part.name in weights]


def weight_bytes(parts: Sequence[Component], dtype: DType, sizes: Mapping[str, int], *, at_once: bool = True) -> int:
    """Return the exact bytes of the weights on each device of a mesh with axes of these sizes.

    With ``at_once=False``, these are the bytes of the largest component, since only one is on the devices.
    """
    return (sum if at_once else max)(device_bytes(part.spec, dtype, sizes) for part in parts)
