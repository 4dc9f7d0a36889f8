"""A model without its weights (files, networks, tokenizers, schedule, defaults), and the record of a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from canvax.call import HIRES_STRENGTHS, OptionRecord
from canvax.errors import CheckpointError, InputError, check_count, check_number, nearest
from canvax.files import read_json
from canvax.models.clip import ClipEncoder, PooledClip, clip_configs, clip_encoders
from canvax.models.configs import AutoencoderConfig, ClipTextConfig, Config, TinyConfig, UNetConfig, VaeConfig
from canvax.models.denoiser import COLUMNS, UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND, TextEncoder, TextEncoders
from canvax.params import Params, Spec
from canvax.samplers import NoiseSchedule, Scheduler, curve_label, find
from canvax.settings import check_setting
from canvax.tokenizers.clip import ClipTokenizer
from canvax.tokenizers.concepts import Concepts
from canvax.types import DType, HostArray
from canvax.weights.entries import Entry
from canvax.weights.files import ControlFiles, EncoderFiles, ModelFiles, NetworkFiles
from canvax.weights.folder import is_tokenizer, library_of
from canvax.weights.formats import whole_name
from canvax.weights.layouts import arrays_read, arrays_to_save, reads_parts_of_arrays
from canvax.weights.load import Component
from canvax.weights.rules import Names, Rule
from canvax.weights.safetensors import ArrayToSave
from canvax.weights.save import narrowed, save_checkpoint

TOKENIZERS = {FIRST: "tokenizer", SECOND: "tokenizer_2"}
"""Tokenizer of each text encoder."""

CLASSES = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL", "AutoencoderTiny"),
    FIRST: ("CLIPTextModel", "CLIPTextModelWithProjection"),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "scheduler": (),
}
"""Classes that ``model_index.json`` may name for each component, without the prefix Flax."""

SECOND_PROMPTS = ("prompt_2", "negative_prompt_2")
SIZES = (
    *("original_size", "crops_coords_top_left"),
    *("negative_original_size", "negative_crops_coords_top_left"),
)
TARGET_SIZES = ("target_size", "negative_target_size")
AESTHETICS = ("aesthetic_score", "negative_aesthetic_score")
"""Options of SDXL and its refiner that other families do not use."""


@dataclass(frozen=True)
class Defaults:
    """Recommended settings of a model; the optional ``canvax.json`` next to ``model_index.json`` overrides them."""

    num_inference_steps: int = 50
    guidance_scale: float = 7.5
    examples: tuple[str, ...] = ()
    """Prompts that it draws well, for the page."""
    hires_strength: float = HIRES_STRENGTHS["pixel"]
    """Strength of a second pass over the enlarged image."""


LATENT_CONSISTENCY = Defaults(num_inference_steps=4, guidance_scale=8.5)
"""Defaults of models whose guidance scale is an input (Luo et al. 2023, "Latent Consistency Models")."""

SizeConditions = Mapping[str, np.ndarray]
"""Conditions of an image besides its texts, by the names of the denoiser's inputs, without [B]."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by name."""


@dataclass(frozen=True, eq=False)
class SingleFile:
    """A family's transformer in a separate file, as in ComfyUI; the other parts of the model are files, too.

    Attributes:
        marks: prefixes of names that only this family's transformer has.
        config: returns the transformer's config from shapes of arrays under the names of diffusers. Raises ``KeyError``
            or ``IndexError`` for missing arrays, ``ValueError`` with the reason for other models.
        named: returns further fields of it for the name of the file without its suffix.
        configs: fields of the other parts' configs that their arrays do not determine.
        tokenizer: folder of the tokenizer for a text encoder without one next to it.
        stems: parts of the names of files of the base model, "" for any, and of the distilled one; None if the arrays
            differ.
        base: fields of the scheduler's config that mark the base model; if empty, ``model_index.json`` marks it.
        index: further fields of ``model_index.json``, or a function that returns them for the transformer's config and
            the name of the file without its suffix.
        schedule: returns further fields of the scheduler's config for the transformer's config.
        unused: prefixes of names of unused arrays.
        inside: further components in the file: the prefix of their names, and a function that returns the config from
            shapes under the names without it.
        packaged: folders of further tokenizers.
    """

    marks: tuple[str, ...]
    config: Callable[[Shapes], dict[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    tokenizer: Path
    stems: tuple[str, str] | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    index: Mapping[str, Any] | Callable[[Mapping[str, Any], str], Mapping[str, Any]] = field(default_factory=dict)
    schedule: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    unused: tuple[str, ...] = ()
    inside: Mapping[str, tuple[str, Callable[[Shapes], dict[str, Any]]]] = field(default_factory=dict)
    packaged: Mapping[str, Path] = field(default_factory=dict)
    named: Callable[[str], Mapping[str, Any]] | None = None

    def is_distilled(self, stem: str) -> tuple[bool, str] | None:
        """Return whether the file's name is that of a distilled model, with the evidence; None if its arrays decide."""
        if self.stems is None:
            return None
        base, distilled = (mark in stem.lower() for mark in self.stems)
        if base or distilled:
            base = base and bool(self.stems[0] or not distilled)
            return not base, f"by {self.stems[not base]!r} in the name of the file; no array tells"
        return True, (
            f"a guess: the name of the file has neither {self.stems[0]!r} nor {self.stems[1]!r} in it, and no array "
            f"tells; if it is the base model, put {self.stems[0]!r} into the name of the file"
        )


def no_networks(files: ModelFiles) -> Networks:
    """Refuse files: ``read`` of a family whose models are made in Python."""
    raise CheckpointError(f"{files}: models of this family are not read from files")


def no_tokenizer(files: ModelFiles, encoder: TextEncoder) -> None:
    """Return None: ``tokenizer`` of a family whose encoders read text without one."""


@dataclass(frozen=True, eq=False)
class Family:
    """A kind of model: data, and a few functions.

    Attributes:
        name: short unique name.
        title: display name.
        models: display names of the supported models, if not all are.
        pipelines: pipeline classes in ``model_index.json``.
        read: returns the networks of a checkpoint, from configs only. Raises ``CheckpointError``.
        tokenizer: returns the tokenizer of a text encoder, as its ``words`` and ``read`` use it.
        classes: classes of each component that is read, in ``model_index.json``; a model in single files has the first.
        index: fields of ``model_index.json`` that distinguish it from families with the same pipelines.
        defaults: defaults of models without their own.
        defaults_by_networks: returns the defaults, where networks and schedule determine more than ``is_distilled``.
        distilled: defaults of models that were distilled to few steps; None if they are the same.
        is_distilled: recognises the schedule of a distilled model; None if the networks determine it.
        scheduler: returns the scheduler of a checkpoint, if its config alone does not determine it.
        even_times: see ``NoiseSchedule.even_times``; False if the model's pipeline in diffusers leaves the times to the
            scheduler's class, as that of Stable Diffusion 3 does.
        mu: returns the shift for the tokens of an image and the steps, if the scheduler's config does not determine it.
        guidance_off: guidance scale without an effect: 1, or 0 for models that add guidance.
        guidance: kind of guidance by default, a name in ``canvax.guidance.KINDS``.
        names: names of the denoiser's layers in single files and LoRAs.
        stacks: layers of the denoiser that diffusers stores as one.
        single_file: layout of files with only the denoiser; None for families without such files.
        unused_options: options that a model does not use, with the reason. Without ``size_conditions`` those of SDXL
            are unused, and second prompts with one text encoder.
        size_conditions: returns further conditions of the prompt and the negative prompt, for height, width and
            explicit options.
        zero_negative_embeds: without a negative prompt, use zeros instead of the features of an empty prompt;
            ``model_index.json`` may override it.
        is_refiner: True for models that only finish images.
        presets: networks of published models, by the names that ``canvax plan`` takes.
    """

    name: str
    pipelines: tuple[str, ...] = ()
    read: Callable[[ModelFiles], Networks] = no_networks
    tokenizer: Callable[[ModelFiles, TextEncoder], Any] = no_tokenizer
    title: str = ""
    models: str = ""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    index: Mapping[str, Any] = field(default_factory=dict)
    defaults: Defaults = Defaults()
    defaults_by_networks: Callable[[Networks, NoiseSchedule | None], Defaults] | None = None
    distilled: Defaults | None = None
    is_distilled: Callable[[NoiseSchedule], bool] | None = None
    scheduler: Callable[[Mapping[str, Any], ModelFiles], Scheduler] | None = None
    even_times: bool = True
    mu: Callable[[int, int], float] | None = None
    guidance_off: float = 1.0
    guidance: str = "cfg"
    names: Sequence[Rule] = ()
    stacks: Sequence[Rule] = ()
    single_file: SingleFile | None = None
    unused_options: Mapping[str, str] = field(default_factory=dict)
    size_conditions: Callable[[Model, int, int, Mapping[str, Any]], tuple[SizeConditions, SizeConditions]] | None = None
    zero_negative_embeds: bool = False
    is_refiner: bool = False
    presets: dict[str, Networks] = field(default_factory=dict)

    def defaults_of(self, networks: Networks, schedule: NoiseSchedule | None = None) -> Defaults:
        """Return the defaults of a model, from its networks and its schedule."""
        distilled = networks.unguided or (schedule and self.is_distilled and self.is_distilled(schedule))
        defaults = self.distilled if distilled and self.distilled else self.defaults
        if self.defaults_by_networks:
            defaults = self.defaults_by_networks(networks, schedule)
        steps = len(schedule.run_times) if schedule else 0
        return replace(defaults, num_inference_steps=steps) if steps else defaults

    def scheduled(self, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler of a model with the times of runs that the family has."""
        return replace(scheduler, schedule=replace(scheduler.schedule, even_times=self.even_times))

    def guides(self, networks: Networks, scale: float) -> bool:
        """Return whether a prompt at this guidance scale needs the negative prompt, which doubles the batch."""
        return scale > self.guidance_off and not networks.unguided


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint without its weights.

    Attributes:
        files: its files.
        family: its family.
        networks: its networks.
        tokenizers: the tokenizer of each text encoder.
        scheduler: noise schedule and default sampler.
        defaults: default steps and guidance scale.
        dtype: name of the dtype of its weights.
        quantize: kind of quantisation of its large weights, or None.
        streamed: the large weights stay in the host's memory, and are copied to the devices as their layers run.
        concepts: concepts of a small model; empty for most models.
        merged: adapters that are merged into the pipeline's weights, as in metadata of images.
        controls: files of ``networks.controls``, in the same order.
        ip_adapters: files of ``networks.ip_adapters``, in the same order.
        image_encoder: files of ``networks.image_encoder``.
    """

    files: ModelFiles
    family: Family
    networks: Networks
    tokenizers: Mapping[str, Any]
    scheduler: Scheduler
    defaults: Defaults
    dtype: str
    quantize: str | None = None
    streamed: bool = False
    concepts: Concepts = field(default_factory=Concepts)
    merged: dict[str, Any] = field(default_factory=dict)
    controls: tuple[ControlFiles, ...] = ()
    ip_adapters: tuple[NetworkFiles, ...] = ()
    image_encoder: EncoderFiles | None = None

    @property
    def name(self) -> str:
        """The model's name as the caller wrote it."""
        return self.files.name

    @property
    def revision(self) -> str | None:
        """Commit of a Hub checkpoint."""
        return self.files.revision

    @property
    def overrides(self) -> dict[str, Any]:
        """Changes to the checkpoint, as arguments of ``canvax.load``: replaced parts, precision."""
        return dict(self.files.overrides)

    @property
    def reasons(self) -> dict[str, str]:
        """Properties of a model in one file that were inferred from its arrays, with the evidence."""
        return dict(self.files.reasons)

    @property
    def text(self) -> TextEncoders:
        """Configs of the CLIP text encoders."""
        return self.networks.text

    @property
    def unet(self) -> UNetConfig:
        """Config of the UNet.

        Raises:
            CheckpointError: the model has another denoiser.
        """
        if self.networks.unet is None:
            raise CheckpointError(
                f"{self.name} is a {self.family.name} model, which has no UNet; this network or training is for Stable "
                "Diffusion 1.x, 2.x and XL"
            )
        return self.networks.unet

    @property
    def vae(self) -> Any:
        """The autoencoder, or its config."""
        return self.networks.vae

    @property
    def zero_negative_embeds(self) -> bool:
        """True if zeros replace the features of an empty negative prompt."""
        return self.family.zero_negative_embeds and index_flag(self.files, "force_zeros_for_empty_prompt", True)

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width the model was trained for, in pixels."""
        return self.networks.native_size

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Declared parameters of each part with weights, quantised and streamed as loaded."""
        return self.networks.specs(self.quantize, streamed=self.streamed)

    @property
    def components(self) -> list[Component]:
        """Parts with weights."""
        return [
            Component(
                name,
                spec,
                library_of(name),
                partial(arrays_read, self.networks, name, self.family.names),
                partial(arrays_to_save, self.networks, name, self.family.stacks),
                Names(self.family.names if name == self.networks.denoiser.component else ()).others,
            )
            for name, spec in self.specs.items()
        ]

    def size_conditions(
        self, height: int, width: int, options: Mapping[str, Any]
    ) -> tuple[SizeConditions, SizeConditions]:
        """Return the conditions of an image besides its texts; ``options`` are the explicit ones.

        Raises:
            InputError: the family does not return those that the denoiser declares.
        """
        conditions, networks = self.family.size_conditions, self.networks
        text = networks.text.conditions(1, [np.float32] * len(networks.text.encoders))
        loop = networks.packing.shape(networks.latent_shape(1, height, width))
        declared = networks.denoiser.inputs(loop, text, lambda _: np.dtype(np.float32)).conditions
        others = {"guidance": networks.embeds_guidance, "masked": networks.inpaints, COLUMNS: networks.packing.patch}
        wanted = {name: leaf for name, leaf in declared.items() if name not in text and not others.get(name)}

        def checked(side: SizeConditions) -> SizeConditions:
            arrays = {name: np.asarray(row) for name, row in side.items()}
            shapes = {name: array.shape for name, array in arrays.items()}
            alike = shapes == {name: leaf.shape[1:] for name, leaf in wanted.items()} and all(
                np.can_cast(array.dtype, wanted[name].dtype, "same_kind") for name, array in arrays.items()
            )
            if not alike:
                got = ", ".join(f"{name} {array.dtype}{[*array.shape]}" for name, array in arrays.items())
                want = ", ".join(f"{name} {leaf.dtype}{[*leaf.shape[1:]]}" for name, leaf in wanted.items())
                problem = f"of the family {self.family.name} gives {got or 'nothing'}, and "
                problem += f"{type(networks.denoiser).__name__}.inputs declares {want or 'nothing'}"
                raise InputError("size_conditions", problem, cure="let both have the same names and shapes")
            return {name: array.astype(wanted[name].dtype) for name, array in arrays.items()}

        positive, negative = conditions(self, height, width, options) if conditions else ({}, {})
        return checked(positive), checked(negative)

    def sampler_names(self, sampler: str | None) -> tuple[str, str]:
        """Return a name that selects the same sampler again, and its name in other programs; None is the checkpoint's.

        The class name is used if the plain name would imply other options.
        """
        if sampler is None:
            spec, implied = self.scheduler.spec, {}
            same = all(getattr(self.scheduler.options, name) == value for name, value in spec.implied.items())
        else:
            spec, implied = find(sampler)
            same = spec.implied.items() <= implied.items()
        if curve := implied.get("sigmas"):
            return f"{spec.name}_{curve}", f"{spec.label} {curve_label(curve)}"
        default = self.scheduler.options.sigmas if spec.curves else "automatic"
        label = (
            f"{spec.label} {curve_label(default)}"
            if isinstance(default, str) and default != "automatic"
            else spec.label
        )
        return spec.name if same or spec.diffusers_class is None else spec.diffusers_class, label

    def save(self, folder: str | Path, params: Params, *, dtype: DType | None = None, overwrite: bool = False) -> Path:
        """Write the checkpoint in the diffusers layout into a folder that is empty, or with ``overwrite`` any.

        Networks that read control images or image prompts are separate files and are not written. Components that were
        made in Python are written under the names of their specs, with the files of their tokenizers if these were read
        from files. ``canvax.families.read.unsaved`` lists values that the files do not have.

        Raises:
            InputError: its weights are quantised, which that layout does not support, or the folder is not empty.
            CheckpointError: unused layers are copied from the original files, which are missing.
        """
        if self.quantize is not None:
            raise InputError(f"weights quantised to {self.quantize} cannot be saved; load the model without quantize")
        names = (*self.text.names, self.networks.denoiser.component, "vae")
        made = {part.name for part in self.components if part.name not in self.files.configs}
        parts = [
            Component(part.name, part.spec, part.kind) if part.name in made else part
            for part in self.components
            if part.name in names
        ]
        files = self.files_to_save(folder)
        return save_checkpoint(
            folder,
            parts,
            {name: params[name] for name in names if name in params},
            index=files.index,
            configs={name: files.configs[name] for name in (*names, "scheduler")},
            copy_from=self.files.folder if self.files.index else self.tokenizer_folder,
            dtype=dtype,
            overwrite=overwrite,
            rest={part.name: self._unread(part, params, dtype) for part in parts if part.name not in made},
        )

    @property
    def made_tokenizers(self) -> dict[str, Any]:
        """The tokenizers of a model that was made in Python, by their components."""
        pairs = [(encoder.tokenizer, self.tokenizers.get(encoder.component)) for encoder in self.text.encoders]
        return {} if self.files.index else {name: each for name, each in pairs if name and each is not None}

    def tokenizer_folder(self, component: str) -> Path | None:
        """Return the folder of a made tokenizer's files; None if it has none, or has words that they lack."""
        tokenizer = self.made_tokenizers.get(component)
        complete = is_tokenizer(component) and not getattr(tokenizer, "added", None)
        return getattr(tokenizer, "folder", None) if complete else None

    def files_to_save(self, folder: str | Path) -> ModelFiles:
        """Return the files that ``save`` writes into a folder: the index and the configs.

        Components that were made in Python have the fields of the ``Config`` in their record. The index names their
        tokenizers, too; ``save`` leaves those out that have no files.
        """
        records = {encoder.component: encoder for encoder in self.text.encoders}
        records |= {self.networks.denoiser.component: self.networks.denoiser, "vae": self.networks.vae}
        made = {name: config_of(record) for name, record in records.items() if name not in self.files.configs}
        configs = {**self.files.configs, **made}
        configs.setdefault("scheduler", dict(self.scheduler.config))
        kinds = {name: getattr(each, "CLASS", type(each).__name__) for name, each in self.made_tokenizers.items()}
        kinds |= dict(zip(made, made, strict=True))
        usual = {name: next(iter(self.family.classes.get(name, ())), kind) for name, kind in kinds.items()}
        classes = {name: made.get(name, {}).get("_class_name", kind) for name, kind in usual.items()}
        index = {"_class_name": next(iter(self.family.pipelines), self.family.name), **self.files.index}
        index |= {name: [library_of(name), kind] for name, kind in classes.items()}
        index.setdefault("scheduler", ["diffusers", configs["scheduler"].get("_class_name")])
        return replace(
            self.files,
            name=str(folder),
            path=(path := Path(folder)),
            index=index,
            components={**self.files.components, **classes, "scheduler": index["scheduler"][1]},
            configs=configs,
            folders=lambda component: path / component,
            overrides={},
        )

    def _unread(self, part: Component, params: Params, dtype: DType | None) -> list[ArrayToSave]:
        """Return the further arrays that saving a component needs.

        They are the unused layers of a language model, or all arrays of a video autoencoder, of which only parts are
        used.
        """
        copied, reads_all = reads_parts_of_arrays(self.networks, part.name), part.name in clip_configs(self.text)
        if not copied and (reads_all or part.name not in self.text.names):
            return []
        entries = self.files.entries(part.name)
        read = set() if copied else {(entry.path, entry.segments) for entry in part.entries(entries)}
        dtype = np.dtype(jax.tree.leaves(params[part.name])[0].dtype if dtype is None else dtype)
        return [
            ArrayToSave(
                entry.name if copied else whole_name(entry.name), entry.shape, dtype, partial(_as_dtype, entry, dtype)
            )
            for entry in entries
            if (entry.path, entry.segments) not in read
        ]


def config_of(record: Any) -> dict[str, Any]:
    """Return the fields of the first ``Config`` in a record as ``config.json`` has them; none for other records."""
    values = (record, *getattr(record, "__dict__", {}).values())
    config = next((value for value in values if isinstance(value, Config)), None)
    if config is None:
        return {}
    return ({"_class_name": config.CLASS} if config.CLASS else {}) | asdict(config)


def _as_dtype(entry: Entry, dtype: DType) -> HostArray:
    return narrowed(entry.read(), dtype)


def read_clip_unet_vae(
    files: ModelFiles, encoders: Sequence[str], faults_of: Callable[[Networks, ModelFiles], list[str]]
) -> Networks:
    """Return the networks of a family with CLIP encoders, a UNet and a VAE, from configs only.

    Args:
        files: the checkpoint.
        encoders: its text encoders, in the order of their features.
        faults_of: returns the inconsistencies between valid components.

    Raises:
        CheckpointError: a component is missing or its config is not supported.
    """
    wanted = [*encoders, *(TOKENIZERS[name] for name in encoders), "unet", "vae", "scheduler"]
    check_components(files, {name: CLASSES.get(name.removesuffix("_2"), ()) for name in wanted})
    unet, vae = read_unet(files), read_autoencoder(files)
    configs = {name: parsed(ClipTextConfig, files, name) for name in encoders}
    text = clip_encoders(configs.get(FIRST), configs.get(SECOND))
    networks = Networks(UNetDenoiser(unet), vae, text)
    faults = []
    if (unet.in_channels != vae.latent_channels and not networks.inpaints) or unet.out_channels != vae.latent_channels:
        faults.append(
            f"the UNet takes {unet.in_channels} channels and gives {unet.out_channels}, the VAE has "
            f"{vae.latent_channels} (upscaling and editing models are not supported)"
        )
    if len(lengths := {cfg.max_position_embeddings for cfg in configs.values()}) > 1:
        faults.append(f"its text encoders read {' and '.join(map(str, sorted(lengths)))} tokens")
    elif unet.cross_attention_dim != text.width:
        faults.append(f"the UNet reads text of width {unet.cross_attention_dim}, the encoders give {text.width}")
    if faults := faults + faults_of(networks, files):
        raise CheckpointError(f"{files}: its components do not fit together: " + "; ".join(faults))
    return networks


def read_clip_tokenizer(files: ModelFiles, encoder: TextEncoder) -> ClipTokenizer:
    """Return the tokenizer of a CLIP encoder, checked against the encoder's embeddings.

    JAX would silently clamp ids without an embedding.
    """
    assert isinstance(encoder, ClipEncoder | PooledClip)
    tokenizer, size = ClipTokenizer.from_folder(files.folder(encoder.tokenizer)), encoder.cfg.vocab_size
    if tokenizer.largest >= size:
        has, embeds = f"{encoder.tokenizer} has the id {tokenizer.largest}", f"{encoder.component} embeds 0..{size - 1}"
        raise CheckpointError(f"{files}: {has}, and {embeds} (vocab_size={size}); take both from the same model")
    return tokenizer


def check_components(files: ModelFiles, classes: Mapping[str, Sequence[str]]) -> None:
    """Refuse models that lack a component or have one of an unsupported class.

    Weights of other classes might fit nevertheless. A component without ``classes`` may have any class.
    """
    if missing := [name for name in classes if name not in files.components]:
        raise CheckpointError(f"{files}: {', '.join(missing)} not in its model_index.json; a pipeline needs them")
    faults = []
    for name, known in classes.items():
        kind = files.components[name]
        if known and kind not in known:
            faults.append(f"its model_index.json names {kind!r} as {name}, and canvax reads {' or '.join(known)}")
        elif name in ("unet", "transformer", "vae"):
            class_name = str(files.config(name).get("_class_name", kind)).removeprefix("Flax")
            if class_name in known and class_name != kind:
                faults.append(f"its model_index.json names {kind!r} as {name}, and {name}/config.json {class_name!r}")
    if faults:
        raise CheckpointError(f"{files}: {'; '.join(faults)}")


def index_flag(files: ModelFiles, name: str, usual: bool) -> bool:
    """Return a boolean field of ``model_index.json``; ``usual`` replaces null.

    Raises:
        CheckpointError: it is not a boolean.
    """
    value = files.index.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{files}: {name} = {value!r:.80} in its model_index.json is neither true nor false")
    return usual if value is None else value


Parsed = TypeVar("Parsed", bound=Config)


def parsed(kind: type[Parsed], files: ModelFiles, name: str) -> Parsed:
    """Return the config of a component; its errors name the model and the component."""
    try:
        return kind.from_dict(files.config(name))
    except CheckpointError as error:
        message = str(error)
        raise CheckpointError(message if str(files) in message else f"{files}, {name}: {message}") from None


def read_autoencoder(files: ModelFiles) -> AutoencoderConfig:
    """Return the autoencoder's config."""
    config = files.config("vae")
    tiny = config.get("_class_name", files.components["vae"]) == "AutoencoderTiny"
    return parsed(TinyConfig if tiny else VaeConfig, files, "vae")


def read_unet(files: ModelFiles) -> UNetConfig:
    """Return the UNet's config.

    Files from before diffusers 0.9 may have a ``sample_size`` of 32, its default then, instead of 64.
    """
    config = files.config("unet")
    unet = parsed(UNetConfig, files, "unet")
    version = re.match(r"0\.(\d+)", str(config.get("_diffusers_version", "")))
    old = version is not None and int(version[1]) < 9
    small = isinstance(unet.sample_size, int) and unet.sample_size < 64
    return replace(unet, sample_size=64) if old and small else unet


def read_defaults(path: Path, usual: Defaults) -> Defaults:
    """Return the defaults in ``canvax.json``, or ``usual`` if it does not exist.

    Raises:
        CheckpointError: it contains anything else.
    """
    if not path.is_file():
        return usual
    try:
        values = read_json(path)
        for name in values.keys() - (known := {field.name for field in fields(usual)}):
            raise InputError("name", "is none of them", cure=nearest(name, sorted(known)), value=name)
        defaults = replace(usual, **values)
        check_count("num_inference_steps", defaults.num_inference_steps)
        examples = tuple(values.get("examples", ()))
        if isinstance(values.get("examples"), str) or not all(isinstance(text, str) for text in examples):
            raise InputError("examples", "is not a list of texts", value=values["examples"])
        scale = check_number("guidance_scale", defaults.guidance_scale)
        strength = check_setting(OptionRecord, "hires_strength", defaults.hires_strength)
        return replace(defaults, guidance_scale=scale, examples=examples, hires_strength=strength)
    except (ValueError, TypeError, InputError) as error:
        raise CheckpointError(f"{path}: not a list of defaults canvax knows: {error}") from error
