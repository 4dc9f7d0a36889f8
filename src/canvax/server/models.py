"""The models of a server: loaded within the memory there is, warmed up, and taken off the devices for one another."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import jax

from canvax.call import LAYERS
from canvax.compile.aot import Build, BuildCallback
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.errors import CanvaxError, CheckpointError, InputError, nearest
from canvax.families.base import Model
from canvax.families.controls import component_name
from canvax.files import named_path
from canvax.guidance import PROMPT, Perturbed, reads_negative
from canvax.models.beside import ADAPTERS
from canvax.models.clip import clip_configs, most_skipped, usual_layer
from canvax.models.denoiser import MOST_REFERENCES
from canvax.parallel.memory import free_bytes
from canvax.parallel.multihost import is_spread
from canvax.parallel.place import on_devices, on_host, waits
from canvax.parallel.rules import abstract_params
from canvax.params import Params
from canvax.pipelines.checks import check_size
from canvax.pipelines.networks import Opened, open_controls, with_controls
from canvax.pipelines.safety import SafetyChecker
from canvax.prompts.chunks import MOST_CHUNKS
from canvax.server.adapter_cache import AdapterCache, AdapterSettings
from canvax.server.control import cards, file_cards, publicly
from canvax.server.embedding_cache import EmbeddingCache, Words
from canvax.server.files import Colours
from canvax.server.group import Group
from canvax.server.hashes import compute_hash, known_hash
from canvax.server.jobs import LARGEST, JobRequest, ModelCard, Rejected, invalid
from canvax.server.part_cache import CONTROLNET, VAE, Variant, control_cache, vae_cache, with_vae
from canvax.server.policy import PATIENCE, Groups
from canvax.server.work import (
    MOST_IMAGES,
    MOST_STEPS,
    Checked,
    Cost,
    GroupKey,
    Item,
    Stage,
    check,
    sample,
    usable_samplers,
)
from canvax.tokenizers.concepts import STYLES
from canvax.weights.data_folder import control_files, data_folder, vae_files
from canvax.weights.location import Location

_KINDS = {
    "ReadsImagePrompts": "several images in image_prompt for one adapter",
    "ReadsReferences": "several reference images",
}
"""Public names of properties that need other programs."""

_ON_DEMAND = "start the server with --compile-on-demand"
"""The operator's cure; the operator is often also the client."""

_MOST_ROWS = 16
"""Rows of an image that is generated for its timings alone."""

_EXAMPLES = 12

_READ_SPEED = 1e9
"""Bytes a second that weights are read with, where nothing was measured yet."""


class Warm(NamedTuple):
    """Programs that are made before the first request.

    Attributes:
        size: width and height in pixels; None for the model's default.
        batches: images at once.
    """

    size: tuple[int, int] | None = None
    batches: tuple[int, ...] = (1, 4)

    @classmethod
    def parse(cls, text: str) -> Warm:
        """Parse a text such as ``512x512:1,4``.

        Raises:
            InputError: the text has another form.
        """
        match = re.fullmatch(r"(\d{1,5})[xX×](\d{1,5})(?::(\d{1,4}(?:,\d{1,4})*))?", text)
        if not match:
            raise InputError(f"--warm {text} is not WIDTHxHEIGHT:BATCHES; write 512x512:1,4")
        batches = tuple(int(part) for part in match[3].split(",")) if match[3] else cls().batches
        for name, side in (("width", match[1]), ("height", match[2])):
            check_size(f"--warm {text}: {name}", int(side), 0)
        if 0 in batches:
            raise InputError(f"--warm {text}: a batch of 0 holds nothing; write 512x512:1,4")
        return cls((int(match[1]), int(match[2])), batches)


class Varied(NamedTuple):
    """A model with files of a variant.

    Attributes:
        model: everything but its weights.
        programs: its programs; compiled ones are shared with the model as it was loaded.
        shapes: shapes, dtypes and shardings of its weights.
    """

    model: Model
    programs: Programs
    shapes: Params


class Loaded(Protocol):
    """Result of ``canvax.load``, as far as a server uses it."""

    model: Model
    programs: Programs
    params: Params
    safety_checker: SafetyChecker | None


class ServedModel:
    """A model that requests may name.

    Args:
        name: its name in requests.
        load: loads it by its name; a second time with ``revision=``, the commit of its weights, and ``offload=`` if
            they are streamed.
        adapters: settings of the adapters; None for no adapters.
        weights: load the weights now; else at the first request.
        files: for ``VAE`` and ``CONTROLNET`` the files that requests may name, by name.
        on_demand: allow files that need other programs.
        controlnets: networks that its programs evaluate, where they fit the model.

    Attributes:
        unfit: why each of the other networks does not fit, by its source.
        shelf: cache of the adapters.
        embeddings: cache of the textual inversions.
        vaes: cache of the autoencoders of files.
        controlnets: cache of the control networks of files.
        model: everything but its weights.
        groups: groups with their programs ready, by key. Replaced as a whole, so any thread may read it.
        colours: linear map for previews.
        sha256: hash of its file; "" for a folder, or until it is computed.
        safety_checker: checks finished images; images have no previews then.
        on_request: it was opened without weights, and has no programs before its first request.
        used: time of its last run, on the engine's clock.
        load_seconds: seconds of its last loading.
        failed: consecutive failures to load it again.
        retry: time of the next attempt to load it, on the engine's clock.
    """

    def __init__(
        self,
        name: str,
        load: Callable[..., Loaded],
        adapters: AdapterSettings | None = None,
        *,
        weights: bool = True,
        files: Mapping[str, Mapping[str, Path]] = MappingProxyType({}),
        on_demand: bool = False,
        controlnets: Sequence[Location] = (),
    ) -> None:
        self.name, self.on_request = name, not weights
        self.groups: Mapping[GroupKey, Group] = {}
        self.used, self.failed, self.retry = 0.0, 0, 0.0
        self._load = load
        began = time.perf_counter()
        loaded = load(name) if weights else load(name, weights=False)
        named = replace(loaded.model.files, name=name)  # folders on the disk are the operator's business
        networks = replace(loaded.model.networks, text=loaded.model.text.without_short())
        self.model, self.programs = replace(loaded.model, files=named, networks=networks), loaded.programs
        self._controls: list[Opened] = []
        self.unfit: dict[str, str] = {}
        for source in controlnets:
            try:
                self._controls += open_controls(self.model, [source])
            except CheckpointError as fault:
                self.unfit[source.text] = str(fault)
        params = loaded.params
        if self._controls:
            opened = self.model, self.programs, params
            self.model, self.programs, params = with_controls(*opened, self._controls, weights=weights)
        path = self.model.files.path
        self.sha256 = known_hash(path) if path.is_file() else ""
        self._waiting: frozenset[str] = frozenset()
        self.params = self._as_served(params) if weights else None
        self.safety_checker = loaded.safety_checker
        self.created = int(time.time())
        self.colours = Colours(self.model.vae.latent_channels)
        if is_spread(self.programs.mesh):
            raise InputError("a server runs on the devices of one process; give it a mesh of jax.local_devices()")
        self.shelf = AdapterCache(self.model, self.programs.mesh, adapters) if adapters else None
        self.embeddings = EmbeddingCache(self.model, self.programs.mesh)
        mesh = self.programs.mesh
        self.vaes = vae_cache(self.model, mesh, files.get(VAE, {}), on_demand=on_demand)
        networks = files.get(CONTROLNET, {})
        self.controlnets = control_cache(self.model, self.programs, networks, self._park, on_demand=on_demand)
        self._varied: dict[Variant, Varied] = {}
        if self.shelf and not weights:
            self.shelf.take_off()
        self.load_seconds = time.perf_counter() - began if weights else self.bytes / _READ_SPEED

    @property
    def loaded(self) -> bool:
        """True if its weights are on the devices."""
        return self.params is not None

    @property
    def bytes(self) -> int:
        """Bytes of its weights on each device at a time."""
        waiting = [size for name, size in self._sizes.items() if name in self._waiting]
        return sum(self._sizes.values()) - sum(waiting) + max(waiting, default=0)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """Bytes of each component on each device."""
        return {name: _bytes_of(part) for name, part in self._shapes.items()}

    def _as_served(self, params: Params) -> Params:
        """Return its parameters as they are served: the denoiser's stay on the devices unless they are streamed,
        others may wait in the host's memory.

        Images are encoded and decoded while others are denoised.
        """
        often = params.keys() - {*self.model.text.names, "vae"}
        served = {name: on_devices(part) if name in often else part for name, part in params.items()}
        self._waiting = frozenset(name for name, part in served.items() if waits(part))
        return served

    @cached_property
    def _shapes(self) -> Params:
        """Shapes, dtypes and shardings of its weights."""
        mesh = self.programs.mesh
        shapes = {part.name: abstract_params(part.spec, self.model.dtype, mesh) for part in self.model.components}
        return {**shapes, ADAPTERS: self.shelf.bank.shapes} if self.shelf else shapes

    def put_on(self) -> None:
        """Load its weights, from the same commit as ``model``, whatever its branch is now."""
        if self.params is None:
            pinned = {"revision": self.model.revision} if self.model.revision else {}
            pinned |= {"offload": LAYERS} if self.model.streamed else {}  # its programs are made for that
            loaded = self._load(self.name, **pinned)
            now, before = loaded.model.files, self.model.files
            if (now.index, now.configs) != (before.index, before.configs):
                raise CanvaxError(f"{self.name} was replaced on the disk; start the server again to serve the new one")
            params = loaded.params
            if self._controls:
                *_, params = with_controls(loaded.model, loaded.programs, params, self._controls)
            self.params, self.safety_checker = self._as_served(params), loaded.safety_checker
            if self.shelf:
                self.shelf.put_on()

    def put_beside(self, controlnet: str, variant: Variant) -> None:
        """Load the weights of one of a variant's ControlNets."""
        assert self.params is not None
        self.controlnets.weights(controlnet, self.params, variant.controlnets)

    def take_off(self) -> None:
        """Free what it holds on the devices; images on their way can go on later."""
        for group in self.groups.values():
            group.park()
        if self.shelf:
            self.shelf.take_off()
        self.vaes.take_off()
        self.controlnets.take_off()
        self.params = None

    def idle(self, key: GroupKey | None) -> list[tuple[float, str, Callable[[], None]]]:
        """Return what can leave the devices for images of a key: time of its last use, name, and a function that frees
        it."""
        stays = key.variant.controlnets if key and key.model == self.name else None
        beside = [
            (cache.used[name], name, partial(cache.drop, name))
            for cache in (self.vaes, self.controlnets)
            for name in cache.held
            if name not in (stays or ())
        ]
        return [*beside, (self.used, self.name, self.take_off)] if stays is None else beside

    def _park(self, controlnet: str) -> None:
        """Take the images off the devices that a network is used for."""
        for key, group in self.groups.items():
            if controlnet in key.variant.controlnets:
                group.park()

    def of(self, variant: Variant) -> Varied:
        """Return the model with the files of a variant; no weights are read."""
        if variant not in self._varied:
            made = Varied(self.model, self.programs, self._shapes)
            if variant.controlnets:
                opened = [self.controlnets.networks[name] for name in variant.controlnets]
                made = Varied(*with_controls(*made, opened, weights=False))
            if variant.vae:
                model = with_vae(made.model, self.vaes.networks[variant.vae])
                vae = abstract_params(model.specs[VAE], model.dtype, made.programs.mesh)
                programs = replace(made.programs, networks=model.networks)
                made = Varied(model, programs, {**made.shapes, VAE: vae})
            self._varied = dict([*self._varied.items(), (variant, made)][-MOST_GROUPS:])  # any thread may read it
            return made
        return self._varied[variant]

    def bytes_beside(self, variant: Variant) -> int:
        """Return the bytes of the weights of a variant's ControlNets on each device."""
        shapes = self.of(variant).shapes
        return sum(_bytes_of(shapes[component_name(i)]) for i in range(len(variant.controlnets)))

    def has_programs(self, key: GroupKey) -> bool:
        """Check if the programs of a key are compiled: for its files, or for other files with the same configs."""
        networks = self.of(key.variant).model.networks
        return any(
            other._replace(variant=key.variant) == key and self.of(other.variant).model.networks == networks
            for other in self.groups
        )

    def missing(self, variant: Variant) -> str:
        """Return the names of the missing weights of a variant: the model's, or ControlNets'; "" if none are
        missing."""
        if not self.loaded:
            return self.name
        return ", ".join(name for name in variant.controlnets if name not in self.controlnets.held)

    def check(self, job_request: JobRequest) -> Checked:
        """Check a request.

        Raises:
            Rejected: a field cannot be used.
        """
        vae = self.vaes.find(job_request.vae) if job_request.vae else None
        names = job_request.controlnet or []
        controlnets = tuple(map(self.controlnets.find, [names] if isinstance(names, str) else names))
        if controlnets and job_request.control is None:
            raise invalid(CONTROLNET, f"controlnet={controlnets[0]!r} needs a control image; send control as well")
        usable = list(self.controlnets.networks)
        if usable and job_request.control is not None and not (controlnets or self.model.networks.controls):
            raise invalid("control", f"control: needs a network; send controlnet: {nearest('', usable)}")
        variant = Variant(vae if vae and self.vaes.networks[vae] != self.model.vae else "", controlnets)
        return check(job_request, self.name, self.of(variant).model, self.shelf, self.embeddings, vae, variant)

    def loaded_params(self, words: Words = (), vae: str | None = None, controlnets: Sequence[str] = ()) -> Params:
        """Return its weights, which are loaded, with the vectors of these words, another autoencoder and these
        ControlNets. With any of these arguments, call this in the engine's thread."""
        assert self.params is not None
        params = self.params = self.embeddings.fill(self.params, words) if words else self.params
        if vae is not None:
            params = {**params, VAE: self.vaes.weights(vae, self.params)}
        for i, name in enumerate(controlnets):
            params = {**params, component_name(i): self.controlnets.held[name]}
        return self.shelf.beside(params) if self.shelf else params

    def sizes(self, warm: Sequence[Warm]) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        """Yield width, height and batches to warm.

        Raises:
            InputError: the model cannot have such a size.
        """
        tall, wide = self.model.native_size
        factor = self.model.networks.size_step
        for entry in warm:
            width, height = entry.size or (wide, tall)
            check_size("width", width, wide, factor)
            check_size("height", height, tall, factor)
            yield (width, height), entry.batches

    def build(self, key: GroupKey, batches: Sequence[int], announce: BuildCallback, *, image: bool = True) -> Group:
        """Return a group with its programs, compiled or from the cache; without ``image`` it cannot encode images to
        begin from. In any thread."""
        model, programs, shapes = self.of(key.variant)
        group = Group(key, model, programs, self.loaded_params, batches)
        image = image or model.networks.inpaints
        if isinstance(announce, Announcer):
            announce.expect(group.count(image=image))
        group.compile(shapes, announce, image=image)
        return group

    def build_encoder(self, key: GroupKey, announce: Announcer) -> None:
        """Make the encoder of images to begin from ready for a group. In any thread."""
        announce.expect(1)
        self.groups[key].compile_encoder(self.of(key.variant).shapes, announce)

    def warm(self, shown: Checked, group: Group) -> None:
        """Run every network that reads images of a request once: first calls are slower."""
        group.draw(group.begin(_thrown_away(shown)), 1)

    def time(self, asked: Checked, group: Group) -> None:
        """Run all programs once, for an image that is thrown away: first calls are slower. Measure the costs, unless an
        earlier process has."""
        carried = group.begin(_thrown_away(asked))
        entry = group.entry(self._shapes)
        known = entry is not None and group.recall(entry, carried)
        if not known:
            self.programs.features.clear()
            began = time.perf_counter()
            group.begin(_thrown_away(asked))
            group.timings.encode = time.perf_counter() - began
            group.measure(carried)
        latents, finished = group.draw(carried, 1 if known and self.colours.known else _MOST_ROWS)
        decode, (pixels,) = group.timings.decode, group.decode([latents])
        group.timings.decode = decode
        if not known:
            group.decode([latents])
            if entry is not None:
                group.keep(entry)
        if finished:
            self.colours.learn(latents, pixels)
        group.looked_up()  # no image of a job

    def refusal(self, wanted: GroupKey, warm: Sequence[Warm], *, of_tiles: bool = False) -> Rejected:
        """Return the reason why a key has no programs, and the cure; ``of_tiles``: the key is that of tiles."""
        keys = list(self.groups)
        alike = [key for key in keys if key.size == wanted.size]
        if not alike and of_tiles:
            message = (
                f"upscale: its tiles have {wanted.size} pixels, and this server has no programs for that; "
                f"start the server with --warm {wanted.size} as well, or with --compile-on-demand"
            )
            return Rejected(400, "size_not_ready", message, param="upscale")
        if not alike:
            sizes = sorted(
                {key.size for key in keys} | {f"{width}x{height}" for (width, height), _ in self.sizes(warm)}
            )
            message = f"{wanted.size} is not ready on this server; ask for {' or '.join(sizes)}, or {_ON_DEMAND}"
            return Rejected(400, "size_not_ready", message, param="width")
        each = (_differences(wanted.kinds, key.kinds) for key in alike)
        differs = min(each, key=lambda names: (len(names), names != ["lengths"]))
        if differs == ["lengths"]:
            room = max(self.groups[key].room for key in alike if _differences(wanted.kinds, key.kinds) == differs)
            each = zip(wanted.kinds.lengths, self.model.text.shortest, strict=True)
            chunks = min(max(-(-length // shortest) for length, shortest in each), MOST_CHUNKS)
            cure = f"shorten it, or start the server with --chunks {chunks}"
            message = f"prompt: it is longer than the {room} tokens that this server has programs for; {cure}"
            return Rejected(400, "prompt_too_long", message, param="prompt")
        rule = wanted.kinds.guidance
        if reads_negative(rule) and "guidance" in differs:
            why, cure = "the number behind its colon weighs it", "end it with a word, or set guidance_scale"
            if rule.samples.count(PROMPT) > 1:
                why, cure = "prompts joined by AND", "send one of them"
            message = f"prompt: {why}, and this server has no programs for that; {cure}"
            return Rejected(400, "not_compiled", message, param="prompt")
        pag = "options.pag_scale" if isinstance(rule, Perturbed) else "options.guidance_method"
        named = " and ".join({**_KINDS, "guidance": pag}.get(name, name) for name in differs)
        message = f"{named}: this server has no programs for that; leave it out, or {_ON_DEMAND}"
        param = {"ReadsImagePrompts": "image_prompt", "ReadsReferences": "image"}.get(differs[0], "options")
        return Rejected(400, "not_compiled", message, param=param)

    @property
    def file(self) -> str:
        """Path of its file in the folder of models; "" for a model from elsewhere."""
        path, folder = self.model.files.path, data_folder()
        return path.relative_to(folder).as_posix() if folder and path.is_relative_to(folder) else ""

    def card(self, warm: Sequence[Warm], *, any_size: bool, references: int) -> ModelCard:
        """Return its card; ``references``: the most reference images of a request that edits."""
        model, (tall, wide) = self.model, self.model.native_size
        sizes = tuple(dict.fromkeys(size for size, _ in self.sizes(warm)))
        networks, facts = model.networks, model.networks.denoiser.facts
        concepts = model.concepts.names
        examples = model.defaults.examples or tuple(concepts[:: max(1, len(concepts) // _EXAMPLES)][:_EXAMPLES])
        controls, ip_adapters = cards(model, self.unfit)
        from_images = ("inpainting", "image-to-image") if networks.inpaints else ("image-to-image", "inpainting")
        tasks = ("text-to-image", *from_images, "upscaling")
        return ModelCard(
            id=self.name,
            family=model.family.title or model.family.name,
            native=(wide, tall),
            sizes=sizes,
            any_size=any_size,
            size_step=networks.size_step,
            steps=model.defaults.num_inference_steps,
            guidance_scale=model.defaults.guidance_scale,
            sampler=model.sampler_names(None)[1],
            max_images=MOST_IMAGES,
            max_steps=MOST_STEPS,
            tasks=(
                *tasks[model.family.is_refiner or networks.inpaints or facts.only_edits :],
                *(["editing"] if facts.edits else []),
            ),
            examples=examples or ("a red apple on a wooden table", "a lighthouse at sunset, oil painting"),
            created=self.created,
            sha256=self.sha256,
            file=self.file,
            controls=controls,
            ip_adapters=ip_adapters,
            prompts=tuple(concepts),
            styles=STYLES if concepts else (),
            guided=not facts.distilled,
            no_guidance=model.family.guidance_off,
            negative_prompt=not networks.unguided,
            prompt_weights=bool(clip_configs(model.text)),
            clip_skip=most_skipped(model.text),
            usual_layer=usual_layer(model.text),
            references=min(references, facts.most_references) if facts.edits else 0,
            samplers=usable_samplers(model, *sizes[0]),
            vae=publicly({"vae": vae})["vae"] if (vae := model.overrides.get("vae")) else "",
            vaes=self.vaes.names,
            controlnets=file_cards(self.controlnets),
            hires_strength=model.defaults.hires_strength,
            alpha=networks.image_channels == 4,
        )


def _differences(one: Kinds, other: Kinds) -> list[str]:
    """Return the names of the facts in which kinds differ."""
    changed = {type(add).__name__ for add in {*one.adds} ^ {*other.adds}}
    return [name for name in Kinds._fields[:-1] if getattr(one, name) != getattr(other, name)] + sorted(changed)


def _thrown_away(checked: Checked) -> Item:
    """Return an image of a job that no client submitted."""
    job = checked.job(JobRequest(checked.request.prompts[0]), lambda job: None)
    return checked.item(job, job.pictures[0])


def _bytes_of(shapes: Params) -> int:
    """Return the bytes on each device; weights that are streamed from the host's memory do not count."""
    leaves = [leaf for leaf in jax.tree.leaves(shapes) if not on_host(leaf)]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


_NAMED = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=(.+)")
"""A model by the name that requests use, as in photo=./v1/model."""


def model_names(models: Sequence[str]) -> dict[str, str]:
    """Return the names of models in requests, and their locations. Folders are private to the operator.

    Args:
        models: folders, files and Hub ids, each alone or as ``NAME=MODEL``.

    Raises:
        InputError: two models would have the same name.
    """
    names: dict[str, str] = {}
    for text in models:
        model, path = text, named_path("models", text)
        if not path.exists() and (named := _NAMED.fullmatch(text)):
            name, model = named.groups()
        else:
            name = path.resolve().name if path.is_dir() else path.stem if path.is_file() else model
        if name in names:
            raise InputError("models", f"would be a second {name!r}", cure=f"name it: {name}-2={model}", value=text)
        names[name] = model
    return names


class Announcer:
    """Tells operators, metrics and those who wait what is compiled.

    Attributes:
        progress: how many programs of a size are ready, such as "3 of 7 programs".
    """

    def __init__(self, say: Callable[[str], None], built: Callable[[Build], None], changed: Callable[[], None]) -> None:
        self._say, self._built, self._changed = say, built, changed
        self._ready = self._all = 0
        self._compiles = self._keeps = False
        self.progress = ""

    @property
    def starting(self) -> str:
        """Progress of a start: whether it loads or compiles, and how many programs are ready."""
        if not self._compiles:
            return f"loading its models ({self.progress})" if self.progress else "loading its models"
        once = " (only the first time, they are kept)" if self._keeps else ""
        return f"compiling programs, {self.progress.removesuffix(' programs')}{once}"

    def expect(self, count: int) -> None:
        """Begin to count the programs of another size."""
        self._ready, self._all = 0, count
        self._compiles = self._keeps = False
        self.progress = f"0 of {count} programs"
        self._changed()

    def __call__(self, build: Build) -> None:
        """Count a program; see ``BuildCallback``."""
        self._compiles |= not build.cached
        self._keeps |= not build.cached and build.size > 0
        if build.seconds is None:
            return
        self._ready += 1
        self.progress = f"{self._ready} of {max(self._ready, self._all)} programs"
        self._changed()
        self._built(build)
        if not build.cached:
            self._say(f"compiled the {build.program} in {build.seconds:.1f} s, {self.progress} ready")


Batching = Literal["steps", "requests", "none"]


@dataclass(frozen=True)
class EngineSettings:
    """The operator's settings of the engine.

    Attributes:
        warm: sizes and batches whose programs are made before the first request.
        chunks: chunks of prompts whose programs are made then: 2 is for prompts of 76 to 150 tokens. Empty: 1, and
            for language models also 2 if programs are not compiled on demand.
        references: most reference images whose programs are made then, for models that edit.
        on_request: further models, loaded at their first request.
        compile_on_demand: requests may wait for a compiler.
        queue_seconds: seconds of work that may wait; more is refused.
        queue_images: images that may wait; more are refused.
        rate: images a minute of each client; clients without a key share one rate. None for no limit.
        keep_seconds: how long finished images wait to be fetched.
        memory: bytes of weights on each device at a time; None for the free memory.
        batching: "steps"; for comparisons also "requests" (a batch ends before the next one begins) and "none" (one
            image after the other).
        log_prompts: write prompts into the log.
        adapters: settings of the adapters; None for no adapters.
        controlnets: networks of every model that they fit.
        output: the folder in which finished images are saved; None for none.
        stall_seconds: seconds without progress after which an engine with work counts as failed. Loading weights and
            compiling do not count; a call of a device does.
    """

    warm: tuple[Warm, ...] = (Warm(),)
    chunks: tuple[int, ...] = ()
    references: int = 1
    on_request: tuple[str, ...] = ()
    compile_on_demand: bool = False
    queue_seconds: float = 600.0
    queue_images: int = 1000
    rate: float | None = None
    keep_seconds: float = 600.0
    memory: int | None = None
    batching: Batching = "steps"
    log_prompts: bool = False
    adapters: AdapterSettings | None = None
    controlnets: tuple[Location, ...] = ()
    output: Path | None = None
    stall_seconds: float = 600.0


FREE_PART = 0.7
"""Share of the free memory for weights; the rest is for programs and images."""

UNKNOWN_SECONDS = 60.0
"""Seconds of an image if nothing was measured yet."""

MOST_GROUPS = 32
"""Groups that each model keeps, in addition to those of the start. Further groups that no image needs are forgotten."""

RETRY = 5.0, 300.0
"""Seconds after which a model that could not be loaded is tried again: at first, doubled each time, and at most."""


class ModelSet:
    """The models by name, the first of which is the default.

    Args:
        names: names of the models.
        load: loads a model (see ``ServedModel``).
        settings: the operator's settings.
        say: called with a line for the operator about each thing that is done.
        announce: called for programs that are compiled.

    Attributes:
        cards: what clients see of the models, once they are there.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[..., Loaded],
        settings: EngineSettings,
        say: Callable[[str], None],
        announce: Announcer,
    ) -> None:
        self.cards: list[ModelCard] = []
        self._lock = threading.Lock()
        self._names, self._load, self._settings = names, load, settings
        self._say, self._announce = say, announce
        alone = settings.batching == "none"
        self._warm = [warm._replace(batches=(1,)) for warm in settings.warm] if alone else settings.warm
        self._served: dict[str, ServedModel] = {}
        self._kept: set[GroupKey] = set()
        self._settled = 0.0

    def begin(self) -> None:
        """Load all, and make their programs ready.

        Where a model can be refused, all are opened before that, and clients see them.
        """
        more: dict[str, Any] = {
            "files": {VAE: vae_files(), CONTROLNET: control_files()},
            "on_demand": self._settings.compile_on_demand,
            "controlnets": self._settings.controlnets,
        }
        names = (*self._names, *self._settings.on_request)
        for name in names if len(names) > 1 or self._settings.controlnets else ():
            try:
                served = ServedModel(name, self._load, self._settings.adapters, weights=False, **more)
                served.on_request = name in self._settings.on_request
                self._served[name] = served
            except CanvaxError as error:
                if name in self._names:
                    raise
                self._say(f"{name} is left out: {error}")
        self._check_controlnets()
        self._show_cards()
        for name in self._names:
            if (served := self._served.get(name)) is None:
                self._say(f"reading {name}")
                served = self._served[name] = ServedModel(name, self._load, self._settings.adapters, **more)
                self._hash(served)
            if self._settings.memory is not None and served.bytes > self._settings.memory:
                raise InputError(
                    f"--memory {self._settings.memory} bytes: the weights of {name} take {served.bytes}; allow more"
                )
            if not served.loaded:
                self._load_again(served)
            for cache in filter(None, (served.shelf, served.embeddings)):
                for line in cache.summary().splitlines():
                    self._say(line)
            for request, group in self._groups(served, image=not self._settings.compile_on_demand):
                if served.model.networks.controls or served.model.networks.ip_adapters:
                    served.warm(request(shown=True), group)
                served.time(request(), group)
                self.add(group)
                self._kept.add(group.key)
                self._say(group.summary())
        self._show_cards()

    def _check_controlnets(self) -> None:
        """Say which models are served without a ControlNet.

        Raises:
            CheckpointError: it fits none of them.
        """
        for source in self._settings.controlnets:
            faults = {name: fault for name, served in self._served.items() if (fault := served.unfit.get(source.text))}
            if faults:
                fault = next(iter(faults.values()))
                if len(faults) == len(self._served):
                    raise CheckpointError(fault)
                self._say(f"served without --controlnet {source.text}: {', '.join(faults)} ({fault})")

    def compile(self) -> None:
        """Make the programs of ``begin`` from shapes, for the cache: no weights are read."""
        more: dict[str, Any] = {"weights": False, "controlnets": self._settings.controlnets}
        for name in self._names:
            self._say(f"reading {name}")
            self._served[name] = ServedModel(name, self._load, self._settings.adapters, **more)
        self._check_controlnets()
        for served in self._served.values():
            for _ in self._groups(served, image=True):
                pass

    def _groups(self, served: ServedModel, *, image: bool) -> Iterator[tuple[Callable[..., Checked], Group]]:
        """Yield the groups of a model at the start, with their programs, each with ``sample`` for its requests.

        Without ``image`` the encoder of images to begin from is compiled for the first image.
        """
        facts = served.model.networks.denoiser.facts
        most = min(self._settings.references, facts.most_references) if facts.edits else 0
        few = self._settings.compile_on_demand or clip_configs(served.model.text)
        lengths, made = self._settings.chunks or ((1,) if few else (1, 2)), set[GroupKey]()
        for size, batches in served.sizes(self._warm):
            for chunks, references in product(lengths, range(1 + most)):
                options: dict[str, Any] = {"chunks": chunks, "shelf": served.shelf, "references": references}
                request = partial(sample, served.name, served.model, *size, **options)
                if (key := request().group) not in made:  # all lengths of some models are the same
                    made.add(key)
                    yield request, served.build(key, batches, self._announce, image=image)

    def _show_cards(self) -> None:
        most = MOST_REFERENCES if self._settings.compile_on_demand else self._settings.references
        with self._lock:
            self.cards = [
                served.card(self._warm, any_size=self._settings.compile_on_demand, references=most)
                for served in self._served.values()
            ]

    def card(self, name: str) -> ModelCard:
        """Return what clients see of a model."""
        return next(card for card in self.cards if card.id == name)

    def check(self, job_request: JobRequest) -> tuple[ServedModel, Checked]:
        """Return the model of a request, and what it is asked for. Sides that it leaves out are those of the card.

        Raises:
            Rejected: naming the field and the cure.
        """
        served = self.named(job_request.model)
        # An image decides the size itself, unless a part of it is drawn anew.
        if "padding_mask_crop" in job_request.options or not (job_request.image or job_request.control):
            width, height = self.card(served.name).size
            sides = {"width": job_request.width or width, "height": job_request.height or height}
            job_request = replace(job_request, **sides)
        return served, served.check(job_request)

    def named(self, name: str | None) -> ServedModel:
        """Return the model of a name, or the default.

        Raises:
            Rejected: no such model is served.
        """
        served = self._served.get(self._names[0] if name is None else name)
        if served is None:
            known = ", ".join(self._served)
            message = f"model={name!r:.80} is not served here; ask for {known}"
            raise Rejected(404, "model_not_found", message, param="model")
        return served

    def group(self, key: GroupKey) -> Group:
        """Return the group of a key that is ready."""
        return self._served[key.model].groups[key]

    def groups(self) -> Groups:
        """Return the ready keys, with the time from which their weights may displace others; None if these are on the
        devices."""
        return {
            key: self._settled if served.missing(key.variant) else None
            for served in self._served.values()
            for key in served.groups
        }

    def missing(self, key: GroupKey) -> str:
        """Return the missing weights of a key; see ``ServedModel.missing``."""
        return self._served[key.model].missing(key.variant)

    def expected(self, stage: Stage, *, of_tiles: bool = False) -> Cost:
        """Return what a stage of one image costs; ``of_tiles``: the stages draw tiles of a larger image.

        Raises:
            Rejected: its programs are not ready, and they are not compiled on demand or the size is too large for that;
                or the model could not be loaded lately.
        """
        key, served = stage.group, self._served[stage.group.model]
        if not served.loaded and (wait := served.retry - time.monotonic()) > 0:
            raise Rejected(503, "model_unavailable", unavailable(served.name), retry_after=wait)
        beside = served.bytes_beside(key.variant) if key.variant.controlnets else 0
        if beside and self._settings.memory is not None and served.bytes + beside > self._settings.memory:
            message = f"controlnet={key.variant}: its {beside} bytes and the model are more than --memory allows"
            raise Rejected(400, "controlnet_unusable", message, param=CONTROLNET)
        load = 0.0 if served.loaded else served.load_seconds
        if group := served.groups.get(key):
            alone = load + group.timings.image(stage.rows)
            return alone, min(alone, group.timings.shared(stage.rows))
        warm = {size for size, _ in served.sizes(self._warm)}
        on_request = served.on_request and (key.width, key.height) in warm
        if not (self._settings.compile_on_demand or on_request or served.has_programs(key)):
            raise served.refusal(key, self._warm, of_tiles=of_tiles)
        most = LARGEST * max(width * height for (width, height), _ in served.sizes(self._warm))
        if key.width * key.height > most:
            message = (
                f"{key.size} has more pixels than the {most} that this server compiles programs for; ask for fewer"
            )
            raise Rejected(400, "size_not_ready", message, param="width")
        usual = next((group.scaled(key).image(stage.rows) for group in served.groups.values()), UNKNOWN_SECONDS)
        return load + usual, usual

    def put_on(self, key: GroupKey) -> ServedModel:
        """Return the model, with its weights on the devices.

        Raises:
            Exception: the model cannot be loaded.
        """
        served = self._served[key.model]
        if not served.loaded:
            self._load_again(served)
        for name in key.variant.controlnets:
            if name not in served.controlnets.held:
                self._make_room(served.bytes_beside(Variant(controlnets=(name,))), key)
                self._say(f"reading {name}")
            served.put_beside(name, key.variant)
        served.used = time.monotonic()
        return served

    def _hash(self, served: ServedModel) -> None:
        """Put the hash of a model's file on its card, in a separate thread, since files are large."""
        path = served.model.files.path

        def compute() -> None:
            with suppress(OSError):
                served.sha256 = digest = compute_hash(path)
                with self._lock:
                    cards = self.cards
                    self.cards = [replace(card, sha256=digest) if card.id == served.name else card for card in cards]

        if path.is_file() and not served.sha256:
            threading.Thread(target=compute, name="canvax hash", daemon=True).start()

    def _load_again(self, served: ServedModel) -> None:
        began = time.monotonic()
        try:
            self._make_room(served.bytes)
            self._say(f"reading {served.name}")
            served.put_on()
        except Exception:
            served.take_off()
            first, most = RETRY
            served.retry = time.monotonic() + min(first * 2**served.failed, most)
            served.failed += 1
            raise
        self._hash(served)
        now = time.monotonic()
        served.load_seconds, served.failed = now - began, 0
        self._settled = now + PATIENCE * served.load_seconds  # so that loading takes a quarter of the time at most

    def loaded(self) -> int:
        """Return how many models have their weights on the devices."""
        return sum(served.loaded for served in self._served.values())

    def clear(self) -> None:
        """Take everything off the devices but weights, as after a fault."""
        for served in self._served.values():
            for group in served.groups.values():
                group.clear()

    def lacks(self, item: Item) -> bool:
        """Return whether programs must be compiled before an image can begin."""
        group = self._served[item.group.model].groups.get(item.group)
        return group is None or group.lacks(item)

    def build(self, key: GroupKey, *, image: bool) -> Group:
        """Compile programs for requests, in a thread other than the engine's; then ``add`` the group.

        ``image``: one of them begins from an image. A group that exists lacks only the encoder for that.

        Raises:
            Exception: a program cannot be compiled.
        """
        served = self._served[key.model]
        if key in served.groups:
            served.build_encoder(key, self._announce)
            return served.groups[key]
        usual = next(iter(served.groups.values()), None)
        group = served.build(key, (1,), self._announce, image=image)
        if usual:
            group.assume(usual)
        else:
            group.timings.row = {group.alone: UNKNOWN_SECONDS / served.model.defaults.num_inference_steps}
            group.timings.guessed = True
        return group

    def add(self, group: Group) -> None:
        """Add a group whose programs are ready. With the engine's lock, as ``trim``."""
        served = self._served[group.key.model]
        served.groups = {**served.groups, group.key: group}

    def trim(self, used: Callable[[], Collection[GroupKey]]) -> None:
        """Forget the least recently used groups, if too many were made for requests. In the engine's thread.

        Args:
            used: the groups of images that wait, are in a batch or are to be decoded.
        """
        for served in self._served.values():
            made = served.groups.keys() - self._kept
            if (excess := len(made) - MOST_GROUPS) > 0:
                idle = sorted(made - set(used()), key=lambda key: served.groups[key].used)
                served.groups = {key: group for key, group in served.groups.items() if key not in idle[:excess]}

    def _make_room(self, needed: int, key: GroupKey | None = None) -> None:
        """Take models, VAEs and ControlNets off the devices, the one that was not used for longest first, until so many
        bytes fit. What images of a key need stays."""
        while loaded := [served for served in self._served.values() if served.loaded]:
            if self._settings.memory is not None:
                held = sum(served.bytes + served.vaes.bytes + served.controlnets.bytes for served in loaded)
                fits = held + needed <= self._settings.memory
            else:
                free = free_bytes(loaded[0].programs.mesh)
                fits = free is None or needed < FREE_PART * free
            idle = [entry for served in loaded for entry in served.idle(key)]
            if fits or not idle:
                return
            _, name, take_off = min(idle, key=itemgetter(0))
            self._say(f"taking {name} off the devices")
            take_off()


def unavailable(name: str) -> str:
    """Return the message about a model that cannot be loaded again."""
    return f"the model {name} cannot be loaded at present; the server's log says why"
