"""The models of a server: loaded when they are wanted, within the memory there is, and warm before they are."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import jax

from canvax.compile.aot import Build, BuildCallback
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.engine.lanes import most_lanes
from canvax.errors import InputError
from canvax.families.base import Model
from canvax.models.beside import ADAPTERS
from canvax.parallel.multihost import is_spread
from canvax.parallel.rules import abstract_params
from canvax.params import Params
from canvax.pipelines.checks import check_size
from canvax.pipelines.safety import SafetyChecker
from canvax.server.control import cards
from canvax.server.files import Colours
from canvax.server.group import Group
from canvax.server.jobs import Ask, Job, ModelCard, Refused
from canvax.server.shelf import AdapterSettings, Shelf
from canvax.server.work import MOST_IMAGES, MOST_STEPS, Checked, GroupKey

_FAMILIES = {"sd": "Stable Diffusion", "sdxl": "Stable Diffusion XL"}

_KINDS = {
    "method": "options.guidance_method",
    "perturbs": "options.pag_scale",
    "image_prompts": "several images in image_prompt for one adapter",
}
"""What people call what decides programs."""

_MOST_ROWS = 16
"""Of an image that is generated for its timings alone."""

_EXAMPLES = 12


class Warm(NamedTuple):
    """Programs that are made before the first request.

    Attributes:
        size: width and height in pixels; None for the model's own.
        batches: images at once.
    """

    size: tuple[int, int] | None = None
    batches: tuple[int, ...] = (1, 4)

    @classmethod
    def parse(cls, text: str) -> Warm:
        """What a text such as ``512x512:1,4`` asks for.

        Raises:
            InputError: it is none.
        """
        found = re.fullmatch(r"(\d{1,5})[xX×](\d{1,5})(?::(\d{1,4}(?:,\d{1,4})*))?", text)
        if not found:
            raise InputError(f"--warm {text} is not WIDTHxHEIGHT:BATCHES; write 512x512:1,4")
        batches = tuple(int(part) for part in found[3].split(",")) if found[3] else cls().batches
        for name, side in (("width", found[1]), ("height", found[2])):
            check_size(f"--warm {text}: {name}", int(side), 0)
        if 0 in batches:
            raise InputError(f"--warm {text}: a batch of 0 holds nothing; write 512x512:1,4")
        return cls((int(found[1]), int(found[2])), batches)


class Loaded(Protocol):
    """What ``canvax.load`` gives, as far as a server uses it."""

    model: Model
    programs: Programs
    params: Params | None
    safety_checker: SafetyChecker | None


class Served:
    """A model that can be asked for.

    Args:
        name: what it is called in requests.
        load: loads it by its name; if its weights are loaded again, with ``revision=`` the commit that they are of.
        adapters: that requests may name; None for none.
        lanes: batches that are run at the same time, at most; None for as many as may be of use.

    Attributes:
        shelf: the adapters.
        model: everything but its weights.
        groups: by key, those whose programs are ready. Another dict after each change: any thread may read it.
        colours: for previews.
        safety_checker: looks at finished images, which have no previews then.
        used: when it was last run, on the engine's clock.
        load_seconds: what loading it took the last time.
        failed: times in a row that it could not be loaded again.
        retry: when it may be tried again after that, on the engine's clock.
    """

    def __init__(
        self,
        name: str,
        load: Callable[..., Loaded],
        adapters: AdapterSettings | None = None,
        lanes: int | None = None,
    ) -> None:
        self.name = name
        self.groups: Mapping[GroupKey, Group] = {}
        self.used, self.failed, self.retry = 0.0, 0, 0.0
        self._load = load
        began = time.perf_counter()
        loaded = load(name)
        self.load_seconds = time.perf_counter() - began
        self.model, self.programs, self.params = loaded.model, loaded.programs, loaded.params
        self.safety_checker = loaded.safety_checker
        self.created = int(time.time())
        self.colours = Colours(self.model.vae.latent_channels)
        if is_spread(self.programs.mesh):
            raise InputError("a server runs on the devices of one process; give it a mesh of jax.local_devices()")
        self._lanes = lanes or most_lanes(self.programs.mesh)
        self.shelf = Shelf(self.model, self.programs.mesh, adapters) if adapters else None

    @property
    def loaded(self) -> bool:
        """Whether its weights are on the devices."""
        return self.params is not None

    @cached_property
    def bytes(self) -> int:
        """Of its weights, on each device."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self._shapes)
        )

    @cached_property
    def _shapes(self) -> Params:
        """Shapes, dtypes and shardings of its weights."""
        mesh = self.programs.mesh
        shapes = {part.name: abstract_params(part.spec, self.model.dtype, mesh) for part in self.model.components}
        return {**shapes, ADAPTERS: self.shelf.bank.shapes} if self.shelf else shapes

    def put_on(self) -> None:
        """Load its weights: those of the commit that ``model`` was read from, wherever its branch is now."""
        if self.params is None:
            pinned = {"revision": self.model.revision} if self.model.revision else {}
            self.params = self._load(self.name, **pinned).params
            if self.shelf:
                self.shelf.put_on()

    def take_off(self) -> None:
        """Free what it holds on the devices; images on their way can go on later."""
        for group in self.groups.values():
            group.park()
        if self.shelf:
            self.shelf.take_off()
        self.params = None

    def own_params(self) -> Params:
        """Its weights, which are there."""
        assert self.params is not None
        return self.shelf.beside(self.params) if self.shelf else self.params

    def sizes(self, warm: Sequence[Warm]) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
        """Width, height and batches to warm.

        Raises:
            InputError: the model cannot have such a size.
        """
        tall, wide = self.model.native_size
        factor = self.model.vae.factor
        for one in warm:
            width, height = one.size or (wide, tall)
            check_size("width", width, wide, factor)
            check_size("height", height, tall, factor)
            yield (width, height), one.batches

    def build(self, key: GroupKey, batches: Sequence[int], announce: BuildCallback) -> Group:
        """A group with its programs, compiled or from the cache; in any thread."""
        group = Group(key, self.model, self.programs, self.own_params, batches, self._lanes)
        if isinstance(announce, Announcer):
            announce.expect(group.programs)
        group.compile(self._shapes, announce)
        return group

    def warm(self, shown: Checked, group: Group) -> None:
        """Run every network once that reads images of a request: first calls are slower."""
        job = Job(Ask(shown.request.prompts[0]), self.name, shown.pictures(), cancel=lambda job: None)
        group.draw(group.begin(shown.item(job, job.pictures[0])), 1)

    def time(self, asked: Checked, group: Group) -> None:
        """Run everything once for an image that is thrown away: first calls are slower, and costs are wanted."""
        ask = Ask(asked.request.prompts[0])
        job = Job(ask, self.name, asked.pictures(), cancel=lambda job: None)
        group.begin(asked.item(job, job.pictures[0]))
        began = time.perf_counter()
        carried = group.begin(asked.item(job, job.pictures[0]))
        group.timings.encode = time.perf_counter() - began
        group.measure(carried)
        latents, finished = group.draw(carried, _MOST_ROWS)
        pixels = group.decode([latents])
        group.timings.decode = 0.0
        group.decode([latents])
        if finished:
            self.colours.learn(latents, pixels[0])

    def refusal(self, wanted: GroupKey) -> Refused:
        """Why there are no programs for a key, and what to ask for in its place."""
        keys = list(self.groups)
        sizes = sorted({key.size for key in keys})
        if wanted.size not in sizes:
            message = f"{wanted.size} is not ready on this server; ask for {' or '.join(sizes)}"
            return Refused(400, "size_not_ready", message, param="width")
        usual = next(key.kinds for key in keys if key.size == wanted.size)
        differs = [name for name in Kinds._fields if getattr(wanted.kinds, name) != getattr(usual, name)]
        if differs == ["chunks"]:
            most = max(key.kinds.chunks for key in keys)
            message = f"prompt: it is longer than the {75 * most} tokens that this server has programs for; shorten it"
            return Refused(400, "prompt_too_long", message, param="prompt")
        if "parts" in differs:
            why, cure = "the number behind its colon weighs it", "end it with a word, or set guidance_scale"
            if wanted.kinds.parts > 1:
                why, cure = "prompts joined by AND", "send one of them"
            message = f"prompt: {why}, and this server has no programs for that; {cure}"
            return Refused(400, "not_compiled", message, param="prompt")
        named = " and ".join(_KINDS.get(name, name) for name in differs)
        message = f"{named}: this server has no programs for that; leave it out"
        param = "image_prompt" if differs == ["image_prompts"] else "options"
        return Refused(400, "not_compiled", message, param=param)

    def card(self, warm: Sequence[Warm], *, any_size: bool) -> ModelCard:
        """What is told of it."""
        model, (tall, wide) = self.model, self.model.native_size
        config = json.dumps([model.files.index, model.revision, model.dtype, str(model.networks)], default=str)
        concepts = model.concepts.names
        examples = concepts[:: max(1, len(concepts) // _EXAMPLES)][:_EXAMPLES]
        controls, ip_adapters = cards(model)
        tasks = ("text-to-image", "image-to-image", "inpainting", "upscaling")
        return ModelCard(
            id=self.name,
            family=_FAMILIES.get(model.family.name, model.family.name),
            native=(wide, tall),
            sizes=tuple(dict.fromkeys(size for size, _ in self.sizes(warm))),
            any_size=any_size,
            size_step=model.vae.factor,
            steps=model.defaults.num_inference_steps,
            guidance_scale=model.defaults.guidance_scale,
            sampler=model.sampler_names(None)[1],
            max_images=MOST_IMAGES,
            max_steps=MOST_STEPS,
            tasks=tasks[1:] if model.is_refiner else tasks,
            examples=tuple(examples) or ("a red apple on a wooden table", "a lighthouse at sunset, oil painting"),
            created=self.created,
            sha256=hashlib.sha256(config.encode()).hexdigest(),
            controls=controls,
            ip_adapters=ip_adapters,
        )


def model_names(models: Sequence[str]) -> dict[str, str]:
    """What each model is called in requests, and where it is. Folders on the disk are the operator's business.

    Raises:
        InputError: two would have the same name.
    """
    names: dict[str, str] = {}
    for model in models:
        path = Path(model).expanduser()
        name = path.resolve().name if path.is_dir() else path.stem if path.is_file() else model
        if name in names:
            raise InputError(f"{model}: there is a model {name!r} already; rename one of them")
        names[name] = model
    return names


class Announcer:
    """Tells operators and metrics what is compiled.

    Attributes:
        progress: how many programs of a size are ready, such as "3 of 7 programs".
    """

    def __init__(self, say: Callable[[str], None], compiled: Callable[[str, float], None]) -> None:
        self._say, self._compiled = say, compiled
        self._ready = self._all = 0
        self.progress = ""

    def expect(self, count: int) -> None:
        """The programs of another size come now."""
        self._ready, self._all = 0, count
        self.progress = f"0 of {count} programs"

    def __call__(self, build: Build) -> None:
        """As ``BuildCallback``."""
        if build.seconds is None:
            return
        self._ready += 1
        self.progress = f"{self._ready} of {max(self._ready, self._all)} programs"
        if not build.cached:
            self._compiled(build.program, build.seconds)
            self._say(f"compiled the {build.program} in {build.seconds:.1f} s, {self.progress} ready")
