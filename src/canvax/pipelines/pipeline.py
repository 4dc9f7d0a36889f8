"""``canvax.load``, which opens a model by name; and the pipeline, which holds a model, its programs and its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from canvax.call import Enlarging, Load
from canvax.compile.abstract import abstract_of
from canvax.compile.kinds import DENOISERS, Kinds
from canvax.compile.monitor import counting
from canvax.compile.programs import Programs
from canvax.errors import CanvaxError, HintWarning, InputError, refuse_tracers, warn
from canvax.familiar import ASSIGNED, ATTRIBUTES, LOAD, Both, accepts, answer
from canvax.families.base import Family, Model
from canvax.families.read import check_scheduler
from canvax.models.beside import ADAPTERS
from canvax.models.clip import usual_layer
from canvax.models.denoiser import Denoiser, DenoiserWrapper
from canvax.models.networks import Networks
from canvax.models.text import Conditions
from canvax.originals import foreign
from canvax.parallel import multihost
from canvax.parallel.memory import cures, explained
from canvax.parallel.mesh import check_mesh, make_mesh, mesh_of, padded_batch
from canvax.params import Params
from canvax.pipelines import functions
from canvax.pipelines.checks import check_precision
from canvax.pipelines.generate import metadata as metadata_of
from canvax.pipelines.generate import text_to_image, two_passes
from canvax.pipelines.hints import hints
from canvax.pipelines.loaded import LoadedModel, open_model
from canvax.pipelines.options import Options, check_options
from canvax.pipelines.request import Call, Request, make_request
from canvax.pipelines.result import Result, summary
from canvax.pipelines.texts import has_tags
from canvax.pipelines.translate import (
    GIVEN,
    Output,
    arguments_of_call,
    as_output,
    check_output,
    decided,
    place_of,
    translate_call,
    translate_load,
    translate_upscale,
)
from canvax.pipelines.upscale import upscaled
from canvax.quantize import compute_dtype
from canvax.rollouts import Start
from canvax.samplers import SamplerSpec, SamplerTable, Scheduler, Solver, from_scheduler_config
from canvax.settings import check_setting, declared
from canvax.types import Array, DType
from canvax.weights.files import ModelFiles
from canvax.weights.location import Location, warn_unused_cache
from canvax.weights.overrides import Overrides

if TYPE_CHECKING:
    from canvax.pipelines.adapters import Adapters
    from canvax.pipelines.keywords import AgainFields, CallFields, ForeignFields, LoadFields
    from canvax.pipelines.networks import ControlSource, IPAdapterSource, Opened
    from canvax.pipelines.safety import SafetyChecker


@dataclass(eq=False, repr=False)
class Pipeline(LoadedModel):
    """A pipeline from text to images, made by ``canvax.load`` or ``from_pretrained``.

    Attributes:
        model, programs, params: see ``LoadedModel``.
        safety_checker: checks the images of each call; None unless ``canvax.load`` has loaded it.
    """

    safety_checker: SafetyChecker | None = None
    _made_by: MadeBy = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return summary(self)

    if not TYPE_CHECKING:  # or every attribute would be known to type checkers

        def __getattr__(self, name: str) -> Any:
            """Raise an error that says what replaces an attribute of diffusers' pipelines."""
            if name.startswith("_"):
                raise AttributeError(name)
            if hasattr(type(self), name):  # a property with a fault: raise its error again
                return object.__getattribute__(self, name)
            known = () if (place := place_of(name)) else dir(type(self))
            public = ", ".join(attribute for attribute in dir(type(self)) if not attribute.startswith("_"))
            raise AttributeError(
                answer(name, ATTRIBUTES, known, "an attribute of a pipeline", takes=place or f"it has {public}")
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``params``; refuse other attributes, since programs and configs belong together."""
        once = ("model", "programs", "safety_checker", "_changing", "_fitting", "_made_by")
        if name != "params" and (name not in once or name in vars(self)):
            problem = answer(name, ASSIGNED, (), "an attribute that can be set", takes=place_of(name))
            raise AttributeError(f"cannot be set: {problem}")
        if name == "params" and value is not vars(self).get(name, value):
            self._made_by.clear()  # ``canvax.load`` would give other parameters
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the calls that load the pipeline again, for the processes of a pool, each with its devices.

        Tokens of the Hub are left out: the new process has HF_TOKEN or the stored login.
        """
        if self.params is None or not self._made_by:
            why = "without parameters" if self.params is None else "with parameters that canvax.load did not give it"
            raise TypeError(f"a pipeline {why} cannot be pickled; call canvax.load in each process")
        adapters = self.adapters._recipe() if "adapters" in vars(self) else ()
        return _load_again, (self._made_by, dict(self.mesh.shape), adapters)

    @cached_property
    def adapters(self) -> Adapters:
        """LoRAs and textual inversions in this pipeline: load, set, remove (docs/adapters.md)."""
        from canvax.pipelines.adapters import Adapters  # which most pipelines never need

        return vars(self).setdefault("adapters", Adapters(self))  # the same in all threads that ask at once

    def _with(self, method: str, arguments: tuple[Any, ...], source: Mapping[str, Any], *made: Any) -> Pipeline:
        """Return the pipeline that a method made from this one, with the adapters that are in the weights of both."""
        pipe = Pipeline(*made, safety_checker=self.safety_checker)
        if "adapters" in vars(self):
            vars(pipe)["adapters"] = self.adapters._handed_to(pipe)
        keywords = {name: value for name, value in source.items() if name not in ("token", "progress")}
        pipe._made_by.update({**self._made_by, method: (arguments, keywords)} if self._made_by else {})
        return pipe

    def with_denoiser(self, denoiser: Denoiser, params: Params | None = None) -> Pipeline:
        """Return a pipeline with another network in the loop, which reads the same latents and text.

        Other weights are shared with this pipeline; adapters that are merged into them stay there.

        Args:
            denoiser: for example a ``canvax.extend.DenoiserWrapper`` around ``pipe.model.networks.denoiser``.
            params: its parameters; by default those of this pipeline's component of the same name.

        Raises:
            InputError: the parameters are not those that the network declares, or it cannot read the latents or text.
        """
        networks = replace(self.model.networks, denoiser=denoiser)
        kept = {name: tree for name, tree in self._own(None).items() if name in networks.components}
        pipe = Pipeline(
            replace(self.model, networks=networks),
            replace(self.programs, networks=networks),
            safety_checker=self.safety_checker,
        )
        pipe.params = pipe.place(kept if params is None else {**kept, denoiser.component: params})
        _check_reads(pipe)
        return pipe

    def with_ip_adapter(
        self,
        ip_adapter: str | Path | Sequence[str | Path] | None,
        image_encoder: str | Path | bool | None = None,
        **source: Unpack[IPAdapterSource],
    ) -> Pipeline:
        """Return a pipeline with IP-Adapters, which read image prompts; it shares weights and programs with this one.

        Its adapters are those of this pipeline. Later changes of adapters affect one of the two pipelines only.

        Args:
            ip_adapter: a safetensors file, or a file on the Hub ("h94/IP-Adapter/models/ip-adapter_sd15.safetensors"),
                or a list of these; None for none.
            image_encoder: the folder or Hub id of CLIP's image encoder for all of them; by default the one in the
                adapter's repository or folder; False for none, if calls give embeds.
            source: ``weight_name``, ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``progress``.

        Raises:
            InputError, CheckpointError, HubError, OutOfMemoryError: as ``canvax.load``; this pipeline is unchanged.
        """
        from canvax.pipelines.networks import ip_adapter_sources, with_ip_adapters

        sources = ip_adapter_sources([] if ip_adapter is None else ip_adapter, image_encoder, **source)
        with self._changing:
            other = with_ip_adapters(self.model, self.programs, self.params, sources, image_encoder)
            return self._with("with_ip_adapter", (ip_adapter, image_encoder), source, *other)

    def with_controlnet(
        self, controlnet: str | Path | Sequence[str | Path] | None, **source: Unpack[ControlSource]
    ) -> Pipeline:
        """Return a pipeline with networks that read control images; it shares weights and programs with this one.

        Its adapters are those of this pipeline. Later changes of adapters affect one of the two pipelines only. A
        network that adds to the UNet's weights (a control-LoRA) adds to the weights without adapters.

        Args:
            controlnet: as in ``canvax.load``; None or an empty list for none.
            source: ``variant``, ``token``, ``cache_dir``, ``local_files_only``, ``progress``: see ``canvax.load``.

        Raises:
            InputError, CheckpointError, HubError, OutOfMemoryError: as ``canvax.load``; this pipeline is unchanged.
        """
        from canvax.pipelines.networks import control_sources, open_controls, with_controls

        opened = open_controls(self.model, control_sources([] if controlnet is None else controlnet, **source))
        with self._changing:
            trained = self.adapters._without if "adapters" in vars(self) else None
            other = with_controls(self.model, self.programs, self.params, opened, trained=trained)
            return self._with("with_controlnet", (controlnet,), source, *other)

    @classmethod
    def from_pretrained(cls, model: str | Path, **keywords: Any) -> tuple[Self, Params]:
        """Load a model as ``(pipeline, params)``; keywords are those of ``canvax.load``."""
        pipe = load(model, **keywords)
        return Both(cls(pipe.model, pipe.programs, safety_checker=pipe.safety_checker), pipe.params)

    @overload
    def __call__(
        self,
        prompt: str | Sequence[str] | Conditions,
        negative_prompt: str | Sequence[str] | Conditions | None = None,
        *,
        output_type: Literal["pil"] | None = "pil",
        **arguments: Unpack[CallFields],
    ) -> Result: ...
    @overload
    def __call__(
        self,
        prompt: str | Sequence[str] | Conditions,
        negative_prompt: str | Sequence[str] | Conditions | None = None,
        *,
        output_type: Literal["np", "numpy", "latent"],
        **arguments: Unpack[CallFields],
    ) -> Result[np.ndarray]: ...
    @overload
    def __call__(
        self,
        prompt: str | Sequence[str] | Conditions,
        negative_prompt: str | Sequence[str] | Conditions | None = None,
        *,
        output_type: Output | None = "pil",
        **arguments: Unpack[CallFields],
    ) -> Result[Any]: ...
    @accepts(translate_call, refuse_tracers, GIVEN, by_place=True)
    def __call__(
        self,
        prompt: str | Sequence[str] | Conditions,
        negative_prompt: str | Sequence[str] | Conditions | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | np.ndarray | Array | None = None,
        sampler: str | SamplerTable | SamplerSpec | Solver | None = None,
        latents: np.ndarray | Array | None = None,
        options: Options | None = None,
        params: Params | None = None,
        image: Any = None,
        mask: Any = None,
        strength: float | None = None,
        control: Any = None,
        image_prompt: Any = None,
        adapters: Any = None,
        output_type: Output | None = "pil",
        **more: Any,
    ) -> Result[Any]:
        """Generate images. Only another size, number of images, or guidance on or off compiles a program.

        Guidance that is on in a part of the run only takes both programs.

        Args:
            prompt: the text to show, or conditions that ``encode`` returned; a list gives an image of each text.
            negative_prompt: the text to avoid, or conditions; one for all prompts, or one for each.
            height: pixels, a multiple of 8, 16 or 32, as the model needs; by default the size that it was trained for.
            width: pixels, as ``height``.
            num_inference_steps: steps of the sampler; by default the model's, else 50.
            guidance_scale: how closely to follow the prompt; 1 or less (0 for Z-Image and Krea 2) switches guidance off
                and halves the work. By default the model's, else 7.5, and 5 for SDXL.
            num_images_per_prompt: images for each prompt.
            seed: image i of the call uses ``seed + i``; a list gives a seed for each image; None or -1 chooses one. A
                JAX key is read as a seed, an array of keys as a list of seeds (docs/seeds.md).
            sampler: any name from ``canvax samplers``, a solver of your own, a spec or a table (docs/samplers.md); by
                default the checkpoint's.
            latents: initial noise of unit variance [B, h, w, C] float32 instead of the seed's; with
                ``options.denoising_start``, the noisy latents to continue from.
            options: settings that are seldom changed, as a record.
            more: options as keywords, ``clip_skip=1``, also under names of diffusers and A1111
                (docs/coming-from-diffusers.md).
            params: the parameters, if the pipeline does not hold them; ``place`` puts them on its devices for this call
                if they are elsewhere.
            image: the image to begin from: a PIL image, a path, an array [H, W, 3] (uint8, or floats in 0..1), or a
                list with one for each image. The result has its size unless height and width are given. A model that
                edits reads it, or the images of a list, unless there is a strength or a mask (docs/flux2.md).
            mask: with an image: white is generated, black stays; one for all images, or a list with one for each.
            strength: with an image: the part of the run to do, 0..1; by default 0.8, with a mask 1.
            control: the image that a ControlNet or T2I-Adapter reads, such as edges: one for all images, or a list with
                one for each. Several networks take a list of these, with None for a network without one. It is resized
                to the size of the result, which it decides if there is no other. A ControlNet-Union takes a dict of
                types to images (docs/controlnet.md).
            image_prompt: the image that an IP-Adapter reads: an image, or a list with one for each image; a
                ``canvax.ImagePrompt`` or a list of several for a strength, a mask, several at once
                (docs/ip-adapter.md).
            adapters: weights of adapters beside the weights, ``{"ink": 0.8}``, or a list with a table for each image,
                None for an image without; by default as they are set (docs/adapters.md).
            output_type: kind of ``Result.images``: "pil"; "np" for ``Result.pixels``; "jax" for the same as an array
                on the devices, split over the mesh, which is not copied to the host; "latent" for ``Result.latents``,
                without the decoder and the safety checker.

        Returns:
            The images; if several processes generate together, those of this process.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
            Cancelled: the callback returned False.
            OutOfMemoryError: a device has too little memory; raised before the run if this can be foreseen.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "more")}
        merges = not self._beside and params is None
        if merges and not isinstance(prompt, Mapping) and has_tags(prompt) and self.adapters.folder is not None:
            with self.adapters._named_in(prompt) as words:
                everything: dict[str, Any] = {**arguments, "prompt": words}
                return self(**everything)
        spread = multihost.is_spread(self.programs.mesh)
        # One process that refuses must not leave the others waiting for it.
        together = multihost.fail_together("canvax generate") if spread else nullcontext()
        with together, self._changing:
            output = check_output(output_type)
            if output == "jax" and (spread or self.safety_checker):
                why = "several processes" if spread else "a safety checker, which reads images on the host"
                raise InputError(
                    "output_type", f"does not work with {why}", cure="use {output_type='np'}", value=output
                )
            as_set, attached = params is None, params is None or params is self.params
            params = self._params(params)
            # The caller's parameters have no adapters, so the metadata of their images has none.
            model = self.model if attached else replace(self.model, merged={})
            call = Call(**{field.name: arguments[field.name] for field in fields(Call)})
            request = replace(self._request(call, adapters, as_set=as_set), output=output)
        return as_output(self._generate(model, request, params, seed), output)

    def start(
        self, prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None = None, **arguments: Any
    ) -> Start:
        """Return what the images of a call begin from, for ``canvax.rollout`` or a loop of yours.

        Args:
            prompt: as in a call.
            negative_prompt: as in a call.
            arguments: arguments of a call, except images, control, adapters beside the weights and a second pass.

        Raises:
            InputError: an argument cannot be used.
        """
        given = arguments_of_call(self, {"prompt": prompt, "negative_prompt": negative_prompt, **arguments})
        call = Call(**{field.name: given[field.name] for field in fields(Call) if field.name in given})
        request = self._request(call, given.get("adapters"), as_set=True)
        return functions.start(self.model, self._params(given.get("params")), request, self.mesh)

    @property
    def _beside(self) -> bool:
        """True if adapters are beside the weights."""
        loaded = vars(self).get("adapters")  # an empty one is false
        return loaded is not None and loaded._bank is not None

    def _request(self, call: Call, adapters: Any, *, as_set: bool) -> Request:
        """Check a call, and find the weights that its images give to adapters beside the weights."""
        if adapters is None and not self._beside:
            return make_request(self.model, call)
        from canvax.pipelines.shares import shares_of  # which most pipelines never need

        count = check_setting(Call, "num_images_per_prompt", call.num_images_per_prompt)
        prompt, shares = shares_of(self.adapters, call.prompt, adapters, count, as_set=as_set)
        request = make_request(self.model, replace(call, prompt=prompt))
        return replace(request, beside=shares) if shares else request

    def _generate(self, model: Model, request: Request, params: Params, seed: Any) -> Result:
        """Run a checked request with the model and parameters that it was checked for; ``seed`` is the caller's."""
        mesh, spread = self.programs.mesh, multihost.is_spread(self.programs.mesh)
        if not spread or multihost.is_main_process(mesh):
            adapters = vars(self).get("adapters", {}).values()
            for hint in hints(model, request, (text for adapter in adapters for text in adapter.trigger_words)):
                warn(hint)
        if spread:
            request = replace(request, seeds=multihost.broadcast_seeds(request.seeds, seed, *request.fingerprint()))
        cure = partial(
            cures,
            mesh,
            self.model.dtype,
            quantized=self.model.quantize is not None,
            batch=len(request.prompts),
            height=request.height,
            width=request.width,
        )
        with explained(cure), counting() as counts:
            run = two_passes if request.options.hires > 1 else text_to_image
            params = {**params, ADAPTERS: request.beside.arrays} if request.beside else params
            result = run(model, self.programs, params, request, cure, counts)
        return self.safety_checker(result) if self.safety_checker else result

    @overload
    def again(
        self, image: str | Path | Image.Image | Mapping[str, Any], /, **changes: Unpack[AgainFields]
    ) -> Result: ...
    @overload
    def again(
        self,
        image: str | Path | Image.Image | Mapping[str, Any],
        /,
        *,
        output_type: Output,
        **changes: Unpack[AgainFields],
    ) -> Result[Any]: ...
    def again(self, image: str | Path | Image.Image | Mapping[str, Any], /, **changes: Any) -> Result[Any]:
        """Generate an image again from its metadata, with changes: ``pipe.again("apple.png", num_inference_steps=50)``.

        Adapters have their recorded weights in this call. Source images are not in the metadata: pass the same again.
        Warnings name settings that are not repeated, and images that are not the same.

        Args:
            image: an image file of canvax, A1111, Forge or ComfyUI; an image of PIL; or metadata as in
                ``Result.metadata``.
            changes: arguments of a call; for an image made by ``upscale``, arguments of ``upscale``.

        Raises:
            InputError: an image or an adapter is missing, or as for a call.
        """
        from canvax.pipelines import again as past  # which most pipelines never need

        metadata, where = past.recorded(image)
        changed, enlarges = decided(changes), "upscale" in metadata
        by_default = {"sampler"} if self.model.scheduler.has_sampler(metadata.get("sampler")) else set()
        for clause in past.not_repeated(metadata, {*changed, *by_default}):
            warn(HintWarning(f"{where}: {clause}"))
        settings = past.settings_of(metadata, changed, usual_layer(self.model.text))
        keywords = {**settings, **past.settings_of_tiles(metadata), **changes}
        keywords = {name: value for name, value in keywords.items() if value is not None or name in changes}
        weights = None if "adapters" in changed else past.weights_of(metadata, self.adapters, where)
        with self._changing, nullcontext() if weights is None else self.adapters._weighed(weights):
            arguments = arguments_of_call(self, keywords, ("scale", "overlap", "batch") if enlarges else ())
            del arguments["self"]
            past.check_named(metadata, arguments, where)
            if enlarges:
                arguments.setdefault("image", None)
            new = past.record_of_tiles(self.model, arguments["image"]) if enlarges else self._record(arguments)
            for hint in (*past.other_model(metadata, new, where), *past.compared(metadata, new, where)):
                warn(hint)
            return self.upscale(**arguments) if enlarges else self(**arguments)

    def _record(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata that the first image of a call will have."""
        call = Call(**{field.name: arguments[field.name] for field in fields(Call) if field.name in arguments})
        return metadata_of(self.model, self._request(call, arguments.get("adapters"), as_set=True))[0]

    @accepts(translate_upscale, refuse_tracers, GIVEN)
    def upscale(
        self,
        image: Any,
        prompt: str = "",
        negative_prompt: str | None = None,
        *,
        scale: float = 2.0,
        strength: float | None = None,
        overlap: int | None = None,
        batch: int = 4,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | None = None,
        sampler: str | SamplerTable | SamplerSpec | Solver | None = None,
        options: Options | None = None,
        params: Params | None = None,
        control: bool = False,
        **more: Unpack[ForeignFields],
    ) -> Result:
        """Enlarge an image and add details with the model: resize it, then run image to image tile by tile.

        All tiles have the size that the model was trained for, so another image or scale does not compile.

        Args:
            image: a PIL image, a path or an array, of any size.
            prompt: a text that fits every part of the image.
            negative_prompt: the text to avoid.
            scale: factor of width and height, 1..16.
            strength: how much the model may change, 0..1; by default 0.3 or the model's, if that is less. A sampler
                that is a table begins at its first row instead.
            overlap: the fewest pixels that neighbouring tiles share; by default three eighths of a tile.
            batch: tiles at once.
            num_inference_steps: as in a call.
            guidance_scale: as in a call.
            seed: as in a call.
            sampler: as in a call.
            options: as in a call.
            more: as in a call.
            params: as in a call.
            control: use each enlarged tile also as the control image of this pipeline's networks, such as a tile
                ControlNet; a ControlNet-Union reads it as its type "tile".

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        keywords = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, "sampler": sampler}
        keywords |= {"negative_prompt": negative_prompt, "params": params}
        how = Enlarging(scale, strength, overlap, batch, control)
        options = check_options(options)
        return upscaled(self, self.model, image, prompt, how=how, seed=seed, options=options, **keywords)


def pipeline_of(
    networks: Networks,
    params: Params,
    scheduler: Scheduler | Mapping[str, Any] | str,
    *,
    family: Family | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    name: str = "custom",
    mesh: Mesh | str | None = None,
    precision: str | None = None,
) -> Pipeline:
    """Make a pipeline of networks and parameters that are no checkpoint (docs/new-family.md).

    Args:
        networks: a denoiser, an autoencoder and text encoders.
        params: parameters of each component; ``networks.specs()`` declares their shapes.
        scheduler: the noise that the denoiser was trained with: a ``canvax.extend.Scheduler``, the fields of a
            ``scheduler_config.json``, or the name of a class of diffusers such as "FlowMatchEulerDiscreteScheduler".
        family: defaults and other facts about models of this kind.
        tokenizers: tokenizer of each text encoder that needs one, by component.
        name: name of the model in messages and in the metadata of images.
        mesh: as in ``canvax.load``.
        precision: as in ``canvax.load``.

    Raises:
        InputError: the parameters are not those of the networks, the denoiser cannot read the latents or text, or
            another argument cannot be used.
    """
    family = family or Family(name)
    if not isinstance(scheduler, Scheduler):
        scheduler = from_scheduler_config({"_class_name": scheduler} if isinstance(scheduler, str) else scheduler)
    denoiser = networks.denoiser.component
    if not isinstance(params, Mapping) or denoiser not in params:
        raise InputError("params", f"have no {denoiser!r}", cure="give the parameters of each component by name")
    check_scheduler(networks, scheduler, name)
    for encoder in networks.text.encoders:
        if encoder.tokenizer and (tokenizers or {}).get(encoder.component) is None:
            problem = f"has none for {encoder.component!r}, which reads text with {encoder.tokenizer!r}"
            raise InputError("tokenizers", problem, cure="give one by the component's name")
    model = Model(
        files=ModelFiles.none(name),
        family=family,
        networks=networks,
        tokenizers=dict.fromkeys(networks.text.names) | dict(tokenizers or {}),
        scheduler=family.scheduled(scheduler),
        defaults=family.defaults_of(networks, scheduler.schedule),
        dtype=np.dtype(compute_dtype(params[denoiser])).name,
    )
    check_precision(precision)
    devices = mesh_of(mesh) if isinstance(mesh, str | None) else check_mesh(mesh)
    pipe = Pipeline(model, Programs(networks, devices, precision))
    pipe.params = pipe.place(params)
    _check_reads(pipe)
    return pipe


def _check_reads(pipe: Pipeline) -> None:
    """Trace a user's denoiser for an image without guidance; those of canvax, and wrappers, are not traced.

    Raises:
        InputError: it cannot read the latents or the text of the other networks.
    """
    networks, programs = pipe.model.networks, pipe.programs
    denoiser = networks.denoiser
    if isinstance(denoiser, DenoiserWrapper) or denoiser.facts.only_edits or not foreign(denoiser):
        return
    latents = networks.latent_shape(padded_batch(1, pipe.mesh), *networks.native_size)
    program = programs.wanted(pipe.params, latents, Kinds(guided=(False,), decoder=None))[DENOISERS[False]]
    (inputs,) = program.inputs
    try:
        jax.eval_shape(program.function, program.weights(pipe.params, abstract_of), inputs)
    except CanvaxError:  # the first call says the same
        return
    except (TypeError, ValueError) as error:
        text = {name: shape.shape for name, shape in inputs.flight.prompts[0].items()}
        problem = f"cannot read latents {latents} and conditions {text}: {error}"
        cure = "check its config, and native_size of its facts"
        raise InputError("denoiser", problem, cure=cure, value=denoiser) from error


MadeBy = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The calls that made a pipeline, by name, "load" first: positional arguments and keywords."""


def _load_again(made_by: MadeBy, mesh: Mapping[str, int], adapters: Sequence[Any] = ()) -> Pipeline:
    """Load a pickled pipeline in its new process, on the same mesh if there are as many devices."""
    devices, count, calls = jax.devices(), math.prod(mesh.values()), dict(made_by)
    arguments, keywords = calls.pop("load")
    pipe = load(*arguments, mesh=make_mesh(devices[:count], **mesh) if count <= len(devices) else None, **keywords)
    for method, (arguments, keywords) in calls.items():
        pipe = getattr(pipe, method)(*arguments, **keywords)
    for method, values, source in adapters:
        getattr(pipe.adapters, method)(*values, **source)
    return pipe


@accepts(translate_load, refuse_tracers, LOAD)
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
    mesh: Mesh | str | None = None,
    precision: str | None = None,
    safety_checker: bool | None = None,
    progress: bool = True,
    controlnet: str | Path | Sequence[str | Path] | None = None,
    vae: str | Path | None = None,
    prediction_type: str | None = None,
    scheduler: Mapping[str, Any] | str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
    tokenizer: str | Path | None = None,
    offload: Literal["layers"] | bool = False,
    **more: Unpack[LoadFields],
) -> Pipeline:
    """Load a model.

    Args:
        model: "emoji" (in the package), a folder in the diffusers layout, a safetensors or GGUF file, or a Hub id
            "owner/name".
        dtype: dtype of weights and activations; by default bfloat16 on TPU and GPU (float16 before Ampere), float32 on
            the CPU.
        quantize: "int8" or "float8": keep the large weights of text encoders and denoiser in 8 bits, which saves memory
            and costs some precision; "int8-w8a8" or "float8-w8a8": multiply in 8 bits as well (docs/less-work.md); None
            for neither.
        revision: branch, tag or commit of a Hub id.
        variant: name of a set of weights, for example "fp16".
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: folder for the Hub's files.
        local_files_only: never ask the Hub.
        mesh: devices with the axes ``data`` and ``model``, as ``canvax.make_mesh`` makes them, or a text such as
            "data=4,model=2"; by default all devices on ``data``, those of all processes that ``jax.distributed`` has
            joined.
        precision: JAX matmul precision; "highest" for real float32 on TPU and GPU.
        safety_checker: True to load the model's, another 1.2 GB: images that it refuses become black, and
            ``nsfw`` in their metadata is true.
        progress: show downloads on stderr.
        controlnet: a ControlNet or T2I-Adapter, or a list of them: a folder of diffusers, a Hub id, or a safetensors
            file, for calls with ``control`` (docs/controlnet.md).
        vae: an autoencoder instead of the model's: a folder of diffusers, a Hub id, or a safetensors file; TAESD too
            (docs/single-files.md).
        prediction_type: the UNet's prediction, "epsilon" or "v_prediction", if the model's config lacks it or is wrong.
        scheduler: fields that replace those of its ``scheduler_config.json``, such as
            ``{"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}``; or a file with these.
        text_encoder: a language model instead of the model's, or that of a transformer in one file: a folder of
            transformers, a Hub id, or a safetensors or GGUF file (docs/single-files.md).
        text_encoder_2: T5 as the second text encoder of FLUX.1, as ``text_encoder``, which then is CLIP.
        tokenizer: its tokenizer: a folder with ``tokenizer.json``, or a Hub id; by default the model's, or the
            one in the folder of ``text_encoder``.
        offload: keep weights in the host's memory, and on the devices only those of the network that runs: text
            encoders, then the denoiser, then the autoencoder. This is for GPUs and TPUs that hold each network, but not
            all of them. With "layers", or if a network does not fit, programs copy the large weights to the devices as
            their layers run, in every step (docs/less-work.md).
        more: names of diffusers, such as ``torch_dtype`` (docs/coming-from-diffusers.md).

    Raises:
        InputError: an argument cannot be used.
        CheckpointError: the checkpoint is missing, damaged or refused.
        HubError: the Hub cannot be reached or does not have it.
        OutOfMemoryError: the weights do not fit into the devices.
    """
    given = locals()
    del given["more"]  # names that the decorator translated
    arguments = Load(**given)
    from canvax.pipelines.networks import control_sources, open_controls, with_controls
    from canvax.pipelines.safety import check_has_checker, load_safety_checker

    hub = {"variant": variant, "token": token, "cache_dir": cache_dir}
    hub |= {"local_files_only": local_files_only, "progress": progress}
    sources = control_sources([] if controlnet is None else controlnet, **hub)
    controls: list[Opened] = []
    opened = open_model(
        model,
        overrides=(overrides := Overrides.of(vae, prediction_type, scheduler, text_encoder, tokenizer, text_encoder_2)),
        dtype=dtype,
        quantize=quantize,
        mesh=mesh,
        precision=precision,
        offload=arguments.offload,
        accept=check_has_checker if safety_checker else None,
        check=lambda files: controls.extend(open_controls(files, sources)),
        revision=revision,
        **hub,
    )
    warn_unused_cache(cache_dir, model, *(source.name for source in sources), *overrides.parts.values())
    checker = load_safety_checker(Location(model, revision, **hub)) if safety_checker else None
    pipe = Pipeline(*(with_controls(*opened, controls) if controls else opened), checker)
    again = [name for name in declared(Load) if name not in ("model", "mesh", "token", "progress")]
    keywords = {name: getattr(arguments, name) for name in again}
    keywords |= {"dtype": pipe.model.dtype, "revision": pipe.model.revision, **pipe.model.overrides}
    pipe._made_by["load"] = (pipe.model.name,), keywords
    return pipe
