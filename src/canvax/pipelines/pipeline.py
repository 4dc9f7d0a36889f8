"""The front door, a model by name; and the pipeline, which holds a model, its programs and its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.compile.aot import Build
from canvax.compile.kinds import PROGRAMS, Kinds, Ready
from canvax.compile.monitor import counting
from canvax.compile.programs import Programs
from canvax.errors import InputError, check_count, reading_arguments, refuse_tracers
from canvax.familiar import ATTRIBUTES, accepts, answer
from canvax.families.base import Model
from canvax.models.text import Conditions
from canvax.parallel import multihost
from canvax.parallel.memory import Memory, cures, explained, free_bytes, program_bytes
from canvax.parallel.mesh import make_mesh, padded_batch
from canvax.parallel.rules import abstract_params, check_params, is_on, place_all
from canvax.params import Params
from canvax.pipelines import functions
from canvax.pipelines.checks import MOST_IMAGES, check_size, is_tiled, parse_dtype
from canvax.pipelines.display import Display, summary
from canvax.pipelines.hints import give_hints
from canvax.pipelines.hires import two_passes
from canvax.pipelines.open import open_model, weight_bytes
from canvax.pipelines.options import Options, check_options
from canvax.pipelines.prompt_tags import has_tags
from canvax.pipelines.request import Request, check_layers, make_request
from canvax.pipelines.result import Result
from canvax.pipelines.text_to_image import text_to_image
from canvax.pipelines.tiles import STRENGTH
from canvax.pipelines.translate import translate_call, translate_load
from canvax.pipelines.upscale import AT_ONCE, upscaled
from canvax.prompts.grammar import PromptSyntax
from canvax.samplers import build_table
from canvax.types import Array, DType
from canvax.weights.overrides import Overrides
from canvax.weights.source import Source

if TYPE_CHECKING:
    from canvax.pipelines.adapters import Adapters
    from canvax.pipelines.controls import Opened
    from canvax.pipelines.safety import SafetyChecker


@dataclass(eq=False, repr=False)
class StableDiffusion:
    """A pipeline from text to images. Made by ``canvax.load`` or ``from_pretrained``.

    Attributes:
        model: where it came from, its configs, tokenizers and noise schedule.
        programs: the compiled programs.
        params: ``{"unet": ..., "vae": ..., "text_encoder": ...}`` (SDXL also ``text_encoder_2``), nested dicts of
            arrays; None when the caller keeps them and passes them to each call.
        safety_checker: looks at the images of each call, if ``canvax.load`` was asked for it.
    """

    model: Model
    programs: Programs
    params: Params | None = None
    safety_checker: SafetyChecker | None = None

    def __repr__(self) -> str:
        return summary(self)

    def __getattr__(self, name: str) -> Any:
        """Attributes that diffusers' pipelines have and this one has not get a sentence that says what to do."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(answer(name, ATTRIBUTES, dir(type(self)), "an attribute of a pipeline"))

    def __setattr__(self, name: str, value: Any) -> None:
        """Parameters may be replaced; nothing else, since programs and configs belong together."""
        if name != "params" and (name not in ("model", "programs", "safety_checker") or name in vars(self)):
            raise AttributeError(f"cannot be set: {answer(name, ATTRIBUTES, [], 'an attribute that can be set')}")
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a pipeline is how to load it again: for the processes of a pool, each of which has devices."""
        if self.params is None:
            raise TypeError("a pipeline without parameters cannot be pickled; call canvax.load in each process")
        files, model = self.model.files, self.model
        keywords = {"revision": files.revision, "variant": files.variant, "dtype": model.dtype}
        keywords |= model.overrides
        keywords |= {"controlnet": [one.name for one in model.controls]} if model.controls else {}
        if model.ip_adapters:
            encoder = model.image_encoder.name if model.image_encoder else False
            keywords["ip_adapter"] = [one.name for one in model.ip_adapters], encoder
        keywords |= {"quantize": model.quantize, "precision": self.programs.precision}
        keywords["safety_checker"] = self.safety_checker is not None
        adapters = self.adapters.recipe() if self.model.merged else ()
        return _load_again, (files.name, keywords, dict(self.mesh.shape), adapters)

    @cached_property
    def adapters(self) -> Adapters:
        """LoRAs and textual inversions in this pipeline: load, set, remove (docs/adapters.md)."""
        from canvax.pipelines.adapters import Adapters  # which most pipelines never need

        return Adapters(self.model, self.mesh, lambda: self._params(None))

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
        """What the denoiser is conditioned on: ``text`` [B, T, D], and for SDXL ``pooled`` [B, P] and ``time_ids``.

        A pure function of ``params``: it can stand inside ``jax.jit`` and ``jax.grad``.

        Args:
            prompt: one or several.
            prompt_2: what SDXL's second text encoder reads, if not ``prompt``.
            height: pixels of the images, of which SDXL is told; by default the size the model was trained for.
            width: likewise.
            clip_skip: layers of the text encoder left out at the end.
            guidance_scale: of a latent consistency model, which takes it as an input; others do not look at it.
            prompt_syntax: what brackets in the prompt mean; see ``canvax.Options``.
            params: the parameters, if not those of the pipeline.
        """
        params = self._own(params)
        more = {"height": height, "width": width, "clip_skip": clip_skip, "guidance_scale": guidance_scale}
        more["prompt_syntax"] = prompt_syntax
        return functions.encode(self.model, params, prompt, prompt_2, **more)

    def encode_image(
        self, image: Any, *, height: int | None = None, width: int | None = None, params: Params | None = None
    ) -> Array:
        """Latents of images [B, h, w, C] float32, scaled as the denoiser sees them: the mean of what the encoder gives.

        Args:
            image: as in a call: a PIL image, a path, an array, or a list of these.
            height: pixels to resize to; by default the image's own.
            width: likewise.
            params: the parameters, if not those of the pipeline.
        """
        return functions.encode_image(self.model, self._own(params), image, height, width)

    def denoiser(self, latents: Array, timestep: Any, conditions: Conditions, *, params: Params | None = None) -> Array:
        """The network's output [B, h, w, C] float32: the noise, or what ``pipe.model.networks.prediction`` says.

        A pure function of its arrays: it can stand inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            latents: noisy latents [B, h, w, C], of variance 1 or less (variance-preserving).
            timestep: one of the checkpoint's, 0..999; one for all or [B].
            conditions: as from ``encode``.
            params: the parameters, if not those of the pipeline.
        """
        return functions.denoise(self.model, self._own(params), latents, timestep, conditions)

    def decode(self, latents: Array, *, params: Params | None = None) -> Array:
        """Images [B, H, W, 3] float32 in 0..1 of latents [B, h, w, C], such as ``Result.latents``.

        A pure function of its arrays: it can stand inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.
        """
        return functions.decode(self.model, self._own(params), latents)

    def with_ip_adapter(
        self,
        ip_adapter: str | Path | Sequence[str | Path] | None,
        image_encoder: str | Path | bool | None = None,
        **source: Any,
    ) -> StableDiffusion:
        """This model with IP-Adapters, which read image prompts; weights and programs are shared with this pipeline.

        Args:
            ip_adapter: a safetensors file, or a file on the Hub ("h94/IP-Adapter/models/ip-adapter_sd15.safetensors"),
                or a list of these; None for none.
            image_encoder: the folder or Hub id of CLIP's image encoder for all of them; by default the one that lies
                beside the adapter; False for none, where calls give embeds.
            source: ``weight_name``, ``revision``, ``token``, ``cache_dir``, ``local_files_only``, ``progress``.

        Raises:
            InputError, CheckpointError, HubError, OutOfMemoryError: as ``canvax.load``; this pipeline is as before.
        """
        from canvax.pipelines.ip_adapters import ip_adapter_sources, with_ip_adapters

        sources = ip_adapter_sources(ip_adapter or [], image_encoder, **source)
        other = with_ip_adapters(self.model, self.programs, self.params, sources, image_encoder)
        pipe = StableDiffusion(*other, self.safety_checker)
        vars(pipe)["adapters"] = self.adapters  # they change the weights that both share
        return pipe

    def with_controlnet(self, controlnet: str | Path | Sequence[str | Path] | None, **source: Any) -> StableDiffusion:
        """This model with networks that read control images, which shares its weights and programs with this pipeline.

        Args:
            controlnet: as in ``canvax.load``; None or an empty list for none.
            source: ``variant``, ``token``, ``cache_dir``, ``local_files_only``, ``progress``: see ``canvax.load``.

        Raises:
            InputError, CheckpointError, HubError, OutOfMemoryError: as ``canvax.load``; this pipeline is as before.
        """
        from canvax.pipelines.controls import control_sources, open_controls, with_controls

        opened = open_controls(self.model, control_sources(controlnet or [], **source))
        other = with_controls(self.model, self.programs, self.params, opened)
        pipe = StableDiffusion(*other, self.safety_checker)
        vars(pipe)["adapters"] = self.adapters  # they change the weights that both share
        return pipe

    @classmethod
    def from_pretrained(cls, model: str | Path, **keywords: Any) -> tuple[Self, Params]:
        """Load a model as ``(pipeline, params)``; keywords are those of ``canvax.load``."""
        pipe = load(model, **keywords)
        assert pipe.params is not None
        return cls(pipe.model, pipe.programs, None, pipe.safety_checker), pipe.params

    @accepts(translate_call)
    def __call__(
        self,
        prompt: str | Sequence[str] | Conditions,
        negative_prompt: str | Sequence[str] | Conditions | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        seed: int | Sequence[int] | None = None,
        sampler: str | None = None,
        latents: np.ndarray | Array | None = None,
        options: Options | None = None,
        params: Params | None = None,
        image: Any = None,
        mask: Any = None,
        strength: float | None = None,
        control: Any = None,
        image_prompt: Any = None,
    ) -> Result:
        """Generate images. Nothing but height, width, the number of images and guidance on or off ever compiles again.

        Guidance that is on in a part of the run alone takes both programs.

        Args:
            prompt: what to show; a list gives an image of each. What ``encode`` returned does as well.
            negative_prompt: what to keep away from; one for all, or one for each prompt; likewise.
            height: pixels, divisible by 8; by default the size the model was trained for.
            width: likewise.
            num_inference_steps: steps of the sampler; by default the model's own, else 50.
            guidance_scale: how closely to follow the prompt; 1 or less switches guidance off and halves the work. By
                default the model's own, else 7.5, and 5 for SDXL.
            num_images_per_prompt: images for each prompt.
            seed: image i of the call uses ``seed + i``; a list gives each image its own; None or -1 chooses one.
            sampler: any name from ``canvax samplers``; by default the checkpoint's own.
            latents: initial noise of unit variance [B, h, w, C] float32 in place of the seed's; with
                ``options.denoising_start``, the noisy latents to go on from.
            options: what is seldom changed.
            params: the parameters, if the pipeline does not hold them; if they are not on its
                devices, ``place`` puts them there, for this call alone.
            image: what to begin from: a PIL image, a path, an array [H, W, 3] (uint8, or floats in 0..1), or a list of
                one for each image. Its size is what is generated unless height and width say otherwise.
            mask: with an image: white is generated, black stays as it is; likewise.
            strength: with an image: how much of the run is done, 0..1; by default 0.8, with a mask 1.
            control: what a ControlNet or T2I-Adapter reads, such as edges: one for all images, or a list of one for
                each. With several networks a list of such, None for one to leave out. Resized to what is generated,
                whose size it gives if nothing else does (docs/controlnet.md).
            image_prompt: what an IP-Adapter reads beside the prompt: an image, or a list of one for each image; a
                ``canvax.ImagePrompt`` or a list of several for a strength, a mask, several at once
                (docs/ip-adapter.md).

        Returns:
            The images; where several processes generate together, those of this process.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
            Cancelled: the callback returned False.
            OutOfMemoryError: a device has too little memory; before anything runs where that can be foreseen.
        """
        if params is None and not isinstance(prompt, Mapping) and self._names_adapters(prompt):
            with self.adapters.named_in(prompt) as words:
                return self(
                    words, negative_prompt, height, width, num_inference_steps, guidance_scale, num_images_per_prompt,
                    seed, sampler, latents, options, params, image, mask, strength, control, image_prompt,
                )  # fmt: skip
        spread = multihost.is_spread(self.programs.mesh)
        # One process that refuses must not leave the others waiting for it.
        with multihost.together("canvax generate") if spread else nullcontext(), reading_arguments():
            params = self._params(params)
            request = make_request(
                self.model,
                prompt,
                negative_prompt,
                num_images_per_prompt,
                size=(height, width),
                steps=num_inference_steps,
                guidance=guidance_scale,
                seed=seed,
                sampler=sampler,
                latents=latents,
                options=options,
                image=(image, mask, strength),
                control=control,
                image_prompt=image_prompt,
            )
        return self._generate(request, params, seed)

    def _names_adapters(self, prompt: Any) -> bool:
        """Whether a prompt names adapters that may be read from a folder."""
        return has_tags(prompt) and self.adapters.folder is not None

    def _generate(self, request: Request, params: Params, seed: Any) -> Result:
        """A checked call; ``seed`` is what was asked for."""
        mesh, spread = self.programs.mesh, multihost.is_spread(self.programs.mesh)
        if not spread or multihost.leads(mesh):
            give_hints(self.model, request)
        if spread:
            request = replace(request, seeds=multihost.agree(request.seeds, seed, *request.fingerprint()))
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
            # Parameters of the caller's have no adapters, so that their images tell of none.
            model = self.model if params is self.params else replace(self.model, merged={})
            result = run(model, self.programs, params, request, cure, counts)
        return self.safety_checker(result) if self.safety_checker else result

    def upscale(
        self,
        image: Any,
        prompt: str = "",
        negative_prompt: str | None = None,
        *,
        scale: float = 2.0,
        strength: float = STRENGTH,
        overlap: int | None = None,
        batch: int = AT_ONCE,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | None = None,
        sampler: str | None = None,
        options: Options | None = None,
        params: Params | None = None,
    ) -> Result:
        """An image made larger, with details that the model adds: enlarged, then image to image tile by tile.

        All tiles have the size the model was trained for, so that nothing compiles for another image or scale.

        Args:
            image: a PIL image, a path or an array, of any size.
            prompt: what it shows; what fits every part of it does best.
            negative_prompt: what to keep away from.
            scale: how many times larger, 1..16.
            strength: 0..1, how much the model may change.
            overlap: pixels that neighbouring tiles share at least; by default a quarter of a tile.
            batch: tiles at once.
            num_inference_steps: as in a call, and so are all below.
            guidance_scale: see there.
            seed: see there.
            sampler: see there.
            options: see there.
            params: see there.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        keywords = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale, "sampler": sampler}
        keywords |= {"negative_prompt": negative_prompt, "params": params}
        return upscaled(
            self, self.model, image, prompt, scale=scale, strength=strength, overlap=overlap, batch=batch, seed=seed,
            options=check_options(options), **keywords,
        )  # fmt: skip

    def save(
        self, folder: str | Path, params: Params | None = None, *, dtype: Any = None, overwrite: bool = False
    ) -> Path:
        """Write the model in the diffusers layout, which PyTorch diffusers loads.

        Where several processes run, the first one writes and all wait for it.

        Args:
            folder: where to write; one that is not empty only with ``overwrite``, which replaces files.
            params: the parameters, if the pipeline does not hold them.
            dtype: of the written arrays; their own by default.
            overwrite: see ``folder``.
        """
        if not isinstance(folder, str | Path) or "\0" in str(folder):
            raise InputError(f"folder={folder!r} cannot be a folder's name")
        params, spread = self._params(params), multihost.is_spread(self.programs.mesh)
        if any(len({device.process_index for device in row}) > 1 for row in self.programs.mesh.devices):
            raise InputError("mesh splits the weights over several processes; load with model=1 to save them")
        with multihost.together("canvax save") if spread else nullcontext():
            if not spread or multihost.leads(self.programs.mesh):
                self.model.save(
                    folder, params, dtype=None if dtype is None else parse_dtype(dtype), overwrite=overwrite
                )
        return Path(folder)

    save_pretrained = save

    def place(self, params: Params) -> Params:
        """``params`` on the devices of this pipeline, each of which receives its own part; what is there stays there.

        Args:
            params: arrays of any kind, on the host or on devices; nested dicts as ``from_pretrained`` returns them.

        Raises:
            InputError: they do not fit the model.
        """
        if not isinstance(params, Mapping):
            raise InputError(f"params={params!r:.80} are not parameters, as canvax.StableDiffusion.params holds them")
        return {
            part.name: place_all(part.spec, params.get(part.name, {}), self.programs.mesh, part.name)
            for part in self.model.components
        }

    def memory(
        self, height: int | None = None, width: int | None = None, batch: int = 1, *, guidance: bool = True
    ) -> Memory:
        """What each device needs to generate ``batch`` images at once, as the compiler says.

        The programs are made for it, as by ``compile``, and are ready then; nothing runs.

        Args:
            height: pixels; by default the size the model was trained for.
            width: likewise.
            batch: images of one call.
            guidance: whether the guidance scale is above 1.
        """
        params, mesh = self.params, self.programs.mesh
        if params is None:
            params = {part.name: abstract_params(part.spec, self.model.dtype, mesh) for part in self.model.components}
        ready = self._ready(params, (height, width), batch, guidance, Display(shown=False))
        weights, free = weight_bytes(self.model, self.model.dtype, mesh.shape), free_bytes(mesh)
        held = weights if self.params is not None else 0
        programs = {name: program_bytes(program) or 0 for name, program in ready.named}
        return Memory(weights, programs, None if free is None else free + held)

    def compile(
        self,
        height: int | None = None,
        width: int | None = None,
        batch: int = 1,
        *,
        guidance: bool = True,
        reuse_layers: int = 0,
        image: bool = False,
        mask: bool = False,
        control: bool = False,
        progress: bool = True,
        params: Params | None = None,
    ) -> tuple[Build, ...]:
        """Make the three programs of a size and batch ready, without running them.

        They come from the cache if they are there, and are compiled and stored there if not.

        Args:
            height: pixels; by default the size the model was trained for.
            width: likewise.
            batch: number of images, rounded up to the number of devices.
            guidance: with it on; a guidance scale of 1 or less is another program.
            reuse_layers: for ``options.reuse``: ``options.reuse_layers``, which is 1 unless you change it.
            image: for calls with an image, second passes and ``upscale`` too: the image encoder.
            mask: for calls with a mask: the denoiser that keeps parts of an image.
            control: for calls with control images for all networks that read one.
            progress: show what is done on stderr.
            params: the parameters, if the pipeline does not hold them. Shapes, dtypes and shardings are enough
                (``jax.ShapeDtypeStruct``).

        Returns:
            What was loaded or compiled, and what that took; nothing for what this pipeline had ready.

        Raises:
            InputError: an argument cannot be used; nothing has been compiled.
        """
        display = Display(shown=progress and multihost.leads(self.programs.mesh))
        if reuse_layers:
            check_layers(reuse_layers, self.model)
        more: dict[str, Any] = {"deep_layers": reuse_layers, "known": mask and not self.model.networks.inpaints}
        more |= {"controls": tuple(name for name, _ in self.model.networks.controls if control)}
        self._ready(self._params(params), (height, width), batch, guidance, display, image=image or mask, **more)
        return tuple(sorted(display.builds, key=lambda build: PROGRAMS.index(build.program)))

    def _ready(
        self,
        params: Params,
        size: tuple[Any, Any],
        batch: int,
        guided: bool,
        display: Display,
        *,
        image: bool = False,
        **more: Any,
    ) -> Ready:
        """The programs of a size in pixels and a batch."""
        (tall, wide), factor = self.model.native_size, self.model.vae.factor
        height, width = check_size("height", size[0], tall, factor), check_size("width", size[1], wide, factor)
        images = padded_batch(check_count("batch", batch, MOST_IMAGES), self.programs.mesh)
        table = build_table(self.model.scheduler, self.model.defaults.num_inference_steps)
        way = "tiled" if is_tiled(height, width) else "whole"
        guides = (guided and not self.model.networks.embeds_guidance,)
        return self.programs.ready(
            params,
            self.model.networks.latent_shape(images, height, width),
            Kinds(guided=guides, clip=table.clip, decoder=way, image_encoder=way if image else None, **more),
            display.announce,
        )

    def _own(self, params: Params | None) -> Params:
        params = self.params if params is None else params
        if params is None:
            raise InputError("params=None: this pipeline holds no parameters; pass those that from_pretrained returned")
        return params

    def _params(self, params: Params | None) -> Params:
        """Checked parameters on the devices; those of the pipeline stay there, should the user have edited them."""
        own = params is None or params is self.params
        params = self._own(params)
        if not isinstance(params, Mapping):
            raise InputError(f"params={params!r} is not a dict of arrays; pass those that from_pretrained returned")
        refuse_tracers("params", params)
        placed = is_on(params, self.programs.mesh)
        if own and placed:
            return params
        for part in self.model.components:
            check_params(part.spec, params.get(part.name, {}), part.name)
        if not placed:
            params = {**params, **self.place(params)}
            if own and self.params is not None:
                self.params.update(params)
        return params


def _load_again(
    model: str, keywords: Mapping[str, Any], mesh: Mapping[str, int], adapters: Sequence[Any] = ()
) -> StableDiffusion:
    """A pickled pipeline in its new process; on the same mesh, if there are as many devices."""
    count, own = math.prod(mesh.values()), dict(keywords)
    devices, ip_adapter = jax.devices(), own.pop("ip_adapter", None)
    pipe = load(model, mesh=make_mesh(devices[:count], **mesh) if count <= len(devices) else None, **own)
    pipe = pipe.with_ip_adapter(*ip_adapter) if ip_adapter else pipe
    if adapters:
        pipe.adapters.restore(adapters)
    return pipe


@accepts(translate_load)
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
    safety_checker: bool | None = None,
    progress: bool = True,
    controlnet: str | Path | Sequence[str | Path] | None = None,
    vae: str | Path | None = None,
    prediction_type: str | None = None,
    scheduler: Mapping[str, Any] | str | Path | None = None,
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
        mesh: devices with the axes ``data`` and ``model``, as ``canvax.make_mesh`` makes them; by default all
            devices on ``data``, those of all processes that ``jax.distributed`` has joined.
        precision: JAX matmul precision; "highest" for real float32 on TPU and GPU.
        safety_checker: True to load the model's own, another 1.2 GB: images that it refuses become black, and
            ``nsfw`` in their metadata is true.
        progress: show downloads on stderr.
        controlnet: a ControlNet or T2I-Adapter, or a list of them: a folder of diffusers, a Hub id, or a safetensors
            file, for calls with ``control`` (docs/controlnet.md).
        vae: another autoencoder than the model's own: a folder of diffusers, a Hub id, or a safetensors file; TAESD too
            (docs/single-files.md).
        prediction_type: what the UNet predicts, "epsilon" or "v_prediction", where the model does not say or is wrong.
        scheduler: fields of its ``scheduler_config.json`` in place of its own, such as
            ``{"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}``; or such a file.

    Raises:
        InputError: an argument cannot be used.
        CheckpointError: the checkpoint is missing, damaged or refused.
        HubError: the Hub cannot be reached or does not have it.
        OutOfMemoryError: the weights do not fit into the devices.
    """
    from canvax.pipelines.controls import control_sources, open_controls, with_controls
    from canvax.pipelines.safety import check_has_checker, load_safety_checker

    if not isinstance(safety_checker, bool | None):
        raise InputError(f"safety_checker={safety_checker!r:.80} is not True, for the model's own, or None")
    hub = {"variant": variant, "token": token, "cache_dir": cache_dir}
    hub |= {"local_files_only": local_files_only, "progress": progress}
    sources = control_sources(controlnet or [], **hub)
    controls: list[Opened] = []
    opened = open_model(
        model,
        overrides=Overrides.of(vae, prediction_type, scheduler),
        dtype=dtype,
        quantize=quantize,
        mesh=mesh,
        precision=precision,
        accept=check_has_checker if safety_checker else None,
        check=lambda found: controls.extend(open_controls(found, sources)),
        revision=revision,
        **hub,
    )
    checker = load_safety_checker(Source(model, revision, **hub)) if safety_checker else None
    return StableDiffusion(*(with_controls(*opened, controls) if controls else opened), checker)
