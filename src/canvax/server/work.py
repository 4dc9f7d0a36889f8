"""From a request to images that can be generated: checked, counted, and with their costs."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from canvax.compile.additions import Keeps, ReadsImage
from canvax.compile.kinds import Kinds
from canvax.engine.batch import ParkedImage
from canvax.engine.segments import guided_rows
from canvax.errors import HintWarning, InputError, nearest
from canvax.families.base import Model
from canvax.guidance import reads_negative
from canvax.images.masks import proportioned
from canvax.noise import image_seeds, random_seed
from canvax.pipelines.control import OPTIONS as CONTROL_OPTIONS
from canvax.pipelines.generate import enlarged, larger_side, metadata, sampler_table, second_pass, work
from canvax.pipelines.hints import idle
from canvax.pipelines.options import Options, check_options
from canvax.pipelines.references import check_references
from canvax.pipelines.request import Call, Request, make_request
from canvax.pipelines.texts import texts_of
from canvax.pipelines.upscale import Tiles
from canvax.samplers import SamplerOptions, SamplerTable, find
from canvax.samplers.specs import SAMPLERS
from canvax.server.adapter_cache import AdapterCache, Wanted
from canvax.server.control import check_has_networks, examples, prompts_of, publicly, with_networks
from canvax.server.embedding_cache import EmbeddingCache, Words, reading
from canvax.server.enlarged import Enlarged, cut, tile_request
from canvax.server.images_in import MOST_PIXELS
from canvax.server.jobs import Job, JobRequest, Picture, Rejected, Status, Stepped, invalid
from canvax.server.part_cache import PLAIN, Variant
from canvax.settings import aliases, declared
from canvax.types import HostArray

MOST_IMAGES, MOST_STEPS = 64, 250
"""Limits of a job."""

MOST_EVALUATIONS = 1000
"""Limit of an image: samplers may take several evaluations for a step."""

MOST_PARTS = 16
"""Prompts joined by AND: each costs as much as an image."""

LARGEST_NOISE = 4096
"""Pixels of a side of ``options.seed_size``: noise is drawn on the engine's thread."""

MOST_NOISE = 1000
"""``s_noise``: far beyond any image, and far from numbers that are not finite."""

_LITTLE = 0.02
"""A part of an image that may be cut off without a hint."""

LONGEST_PROMPT = 16_000
"""Characters: a prompt is read word by word, in the time of everyone."""

NOT_OFFERED = {
    name: why for name, declaration in declared(Options).items() if (why := declaration.setting.closed.get("server"))
}
"""Options of a call that a server has no place for, and why."""

INVERSE = "ddim_inverse"
"""A sampler from an image to its noise, which no API offers."""

_lock = threading.Lock()  # tokenizers are not made for several threads
_NAMES = {"num_inference_steps": "steps", "negative_prompts": "negative_prompt", "prompts": "prompt"}
"""Arguments of a call, and their names in a job request."""


class GroupKey(NamedTuple):
    """Images with the same key can be in one batch: it is what decides the compiled programs."""

    model: str
    height: int
    width: int
    kinds: Kinds
    variant: Variant = PLAIN

    @property
    def size(self) -> str:
        """For people and metrics."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, eq=False)
class Stage:
    """A run of the network on the way to an image.

    Attributes:
        request: a call for images of this run.
        table: of its sampler.
        group: what it can be batched with.
        then: completes the request of the next stage with the pixels [H, W, C] and latents [h, w, C] of this one; None
            in the last stage.
    """

    request: Request
    table: SamplerTable
    group: GroupKey
    then: Callable[[Request, HostArray, HostArray], Request] | None = None

    @property
    def rows(self) -> float:
        """Rows of its table. A row without guidance counts half, but not in a model whose guidance scale is an
        input."""
        if self.request.embedded:
            return float(len(self.table))
        return float(guided_rows(self.table, guided=self.request.guided).mean() + 1) / 2 * len(self.table)


class Beside(NamedTuple):
    """Files and weights of an image in addition to the model's, or instead of them.

    Attributes:
        adapters: the adapters.
        shelf: cache of the adapters; None if the server has none.
        words: textual inversions that its prompts name.
        vae: the autoencoder that replaces the model's; None for the model's.
    """

    adapters: Wanted = MappingProxyType({})
    shelf: AdapterCache | None = None
    words: Words = ()
    vae: str | None = None


Cost = tuple[float, float]
"""Cost of a stage: seconds of an image alone, and the engine's seconds for it if many images wait."""


@dataclass(eq=False)
class Item:
    """An image of a job, or a tile of one.

    Attributes:
        job: its job.
        picture: the job's record of the image.
        stages: its stages, with requests of this image alone.
        client: its client.
        beside: files and weights in addition to the model's.
        costs: costs of the stages.
        at: index of its present stage.
        status: its status.
        deadline: time on the engine's clock.
        previews: steps of its picture with a preview, if a client looks.
        decodes: previews are decoded; decided at the first of a stage, so that all of a stage are of one kind.
        turn: see ``canvax.server.policy.Work``.
        carried: its state while it has no slot; None before it is encoded.
        faults: number of faults of the devices at work on it.
        whole: the image that it is a tile of; None for an image that is no tile.
        tile: index of the tile.
    """

    job: Job
    picture: Picture
    stages: list[Stage]
    client: str
    beside: Beside
    costs: Sequence[Cost] = ((0.0, 0.0),)
    at: int = 0
    status: Status = Status.QUEUED
    deadline: float = 0.0
    previews: tuple[int, ...] = ()
    decodes: bool | None = None
    turn: float | None = None
    carried: ParkedImage | None = None
    faults: int = 0
    whole: Enlarged | None = None
    tile: int = 0
    _row: int = 0
    _holds: bool = False

    @property
    def request(self) -> Request:
        """Request of its stage."""
        return self.stages[self.at].request

    @request.setter
    def request(self, request: Request) -> None:
        self.stages[self.at] = replace(self.stages[self.at], request=request)

    @property
    def table(self) -> SamplerTable:
        """Table of its stage."""
        return self.stages[self.at].table

    @property
    def group(self) -> GroupKey:
        """Group of its stage."""
        return self.stages[self.at].group

    @property
    def stops(self) -> tuple[int, ...]:
        """Steps of its picture after which a client would see a preview."""
        return self.previews if self.job.looked_at else ()

    def hold(self) -> None:
        """Keep its adapters in their slots, from its begin on."""
        if self.beside.shelf is not None and not self._holds:
            self._holds = True
            self.beside.shelf.slots.pin(self.beside.adapters)

    def let_go(self) -> None:
        """Release its adapters, at its end."""
        if self.beside.shelf is not None and self._holds:
            self._holds = False
            self.beside.shelf.slots.unpin(self.beside.adapters)

    @property
    def adapted(self) -> bool:
        """See ``canvax.server.policy.Work``."""
        return bool(self.beside.adapters)

    def encoded(self) -> None:
        """Drop the images that its end does not need, after they were read."""
        init, control, prompts = self.request.init_images, self.request.control, self.request.image_prompts
        references = self.request.references
        if init is not None:
            init = replace(init, images=[], whole=init.whole if init.masks else ([], []))
        if control is not None:
            control = replace(control, images={})
        if prompts is not None:
            prompts = replace(prompts, prompts=[replace(prompt, images=[], masks=[]) for prompt in prompts.prompts])
        if references is not None:
            references = replace(references, images=[])
        self.request = replace(
            self.request, init_images=init, control=control, image_prompts=prompts, references=references
        )

    def advance(self, pixels: HostArray, latents: HostArray) -> bool:
        """Go to the next stage from pixels [H, W, C] and latents [h, w, C]; False where this one was the last."""
        if (then := self.stages[self.at].then) is None:
            return False
        self.at, self._row, self.carried, self.decodes = self.at + 1, 0, None, None
        self.request = then(self.request, pixels, latents)
        return True

    def inputs(self) -> Iterator[Image.Image]:
        """Yield the decoded images that it holds."""
        for stage in self.stages[self.at :]:
            yield from inputs_of(stage.request)
        if self.whole:
            yield self.whole.tiles.large

    @property
    def left(self) -> float:
        """Seconds that it still needs for its stage."""
        return self.costs[self.at][0] * self._undone

    @property
    def cost(self) -> float:
        """The engine's seconds that it still costs where many wait."""
        return self.costs[self.at][1] * self._undone + sum(shared for _, shared in self.costs[self.at + 1 :])

    @property
    def _undone(self) -> float:
        return 1 - self._row / max(1, len(self.table))

    @property
    def row(self) -> int:
        """Rows of its table that are done."""
        return self._row

    @row.setter
    def row(self, row: int) -> None:
        self.picture.step += row - self._row  # of which there may be other stages and other tiles
        self._row = row

    @property
    def over(self) -> bool:
        """True if it is done, failed, or not needed any more."""
        return self.status.over or self.picture.status.over or self.job.over

    def progress(self, slower: float = 1.0) -> Stepped:
        """Return its progress; ``slower``: factor by which a step of its batch takes longer than a step alone."""
        picture = self.picture
        left = self.left * slower + sum(alone for alone, _ in self.costs[self.at + 1 :])
        if self.whole:
            left = self.costs[self.at][1] * (picture.steps - picture.step) / len(self.table)
        return Stepped(picture.index, picture.step, picture.steps, left)

    def metadata(self, model: Model) -> dict[str, Any]:
        """Return the metadata that generate it again: those of the request of its first stage."""
        fields: dict[str, Any] = publicly(metadata(model, self.stages[0].request)[0]) | {"model": self.job.model}
        if self.beside.words:
            loaded: dict[str, Any] = fields.get("embeddings", {})
            fields["embeddings"] = loaded | {word.name: word.record for word in self.beside.words}
        if self.beside.vae:
            fields["vae"] = self.beside.vae
        if names := self.group.variant.controlnets:
            fields["controlnet"] = list(names)
        return self.whole.tiles.recorded(fields) if self.whole else fields


def inputs_of(request: Request) -> Iterator[Image.Image]:
    """Yield the decoded images of a request."""
    if (init := request.init_images) is not None:
        yield from (*init.images, *init.masks, *init.whole[0], *init.whole[1])
    if request.references is not None:
        yield from (image for images in request.references.images for image in images)
    if request.control is not None:
        yield from (hint.image for images in request.control.images.values() for shown in images for hint in shown)
    if request.image_prompts is not None:
        yield from (image for prompt in request.image_prompts.prompts for image in (*prompt.images, *prompt.masks))


def byte_size(images: Iterable[Image.Image]) -> int:
    """Return the bytes of the pixels of images, each counted once."""
    different = {id(image): image for image in images}.values()
    return sum(image.width * image.height * len(image.getbands()) for image in different)


def may_begin(items: Iterable[Item]) -> list[Item]:
    """Return the images for whose adapters there are slots. If one has to wait, so do later ones with adapters."""
    ready, full = list[Item](), set[AdapterCache | None]()
    for item in items:
        shelf, adapters = item.beside.shelf, item.beside.adapters
        if shelf is None or not adapters or (shelf not in full and shelf.slots.fit(adapters)):
            ready.append(item)
        else:
            full.add(shelf)
    return ready


class Checked(NamedTuple):
    """A request that can be carried out: the stages of each of its images, or of each tile.

    ``hints``: hints about textual inversions that its prompts name and that cannot be used.
    """

    stages: tuple[Stage, ...]
    seeds: list[int]
    tiles: Tiles | None = None
    beside: Beside = Beside()
    hints: tuple[HintWarning, ...] = ()

    @property
    def request(self) -> Request:
        """Request of the first stage."""
        return self.stages[0].request

    @property
    def group(self) -> GroupKey:
        """Group of the first stage."""
        return self.stages[0].group

    @property
    def images(self) -> int:
        """Number of images in batches: tiles, if there are any."""
        return len(self.tiles) if self.tiles else len(self.seeds)

    @property
    def input_bytes(self) -> int:
        """Bytes of its decoded images while it waits."""
        size = byte_size(inputs_of(self.request))
        return size * len(self.tiles) + byte_size([self.tiles.large]) if self.tiles else size

    def pictures(self) -> list[Picture]:
        """Return the records of the images of a job."""
        whole = self.tiles or self.stages[-1].request
        steps = sum(len(stage.table) for stage in self.stages) * (len(self.tiles) if self.tiles else 1)
        return [Picture(i, seed, whole.width, whole.height, steps) for i, seed in enumerate(self.seeds)]

    def job(self, job_request: JobRequest, cancel: Callable[[Job], None]) -> Job:
        """Return a new job."""
        return Job(job_request, self.group.model, self.pictures(), cancel=cancel)

    def items(self, job: Job, picture: Picture) -> list[Item]:
        """Return the items of an image: one, or its tiles."""
        if self.tiles is None:
            return [self.item(job, picture)]
        whole = Enlarged(self.tiles, previews=job.request.previews)
        (stage,) = self.stages
        requests = [tile_request(stage.request, self.tiles, i) for i in range(len(self.tiles))]
        return [
            Item(
                job, picture, [replace(stage, request=request)], job.request.client, self.beside, whole=whole, tile=tile
            )
            for tile, request in enumerate(requests)
        ]

    def item(self, job: Job, picture: Picture) -> Item:
        """Return the item of one image, with its seeds."""
        stages = [replace(stage, request=replace(stage.request, seeds=[picture.seed])) for stage in self.stages]
        count = min(job.request.previews, picture.steps - 1)
        previews = tuple(sorted({round(picture.steps * (i + 1) / (count + 1)) for i in range(count)}))
        return Item(job, picture, stages, job.request.client, self.beside, previews=previews)


def check(
    job_request: JobRequest,
    name: str,
    model: Model,
    shelf: AdapterCache | None = None,
    embeddings: EmbeddingCache | None = None,
    vae: str | None = None,
    variant: Variant = PLAIN,
) -> Checked:
    """Check a job request.

    Args:
        job_request: the request.
        name: the model's name in requests.
        model: the model.
        shelf: cache of its adapters.
        embeddings: cache of its textual inversions.
        vae: the autoencoder that replaces the model's.
        variant: files that need other programs than the model's.

    Raises:
        Rejected: a field cannot be used.
    """
    if not 1 <= job_request.n <= MOST_IMAGES:
        raise invalid("n", f"n={job_request.n} is not in 1..{MOST_IMAGES}; send several jobs")
    if job_request.steps is not None and job_request.steps > MOST_STEPS:
        raise invalid("steps", f"steps={job_request.steps} is more than {MOST_STEPS}")
    for name_of in ("prompt", "negative_prompt"):
        if len(getattr(job_request, name_of) or "") > LONGEST_PROMPT:
            raise invalid(name_of, f"{name_of} is longer than {LONGEST_PROMPT} characters; shorten it")
    for option in job_request.options:
        if option in NOT_OFFERED:
            raise invalid("options", f"options.{option} is not offered: {NOT_OFFERED[option]}; leave it out")
    adapters: Wanted = {}
    if shelf is not None:
        prompt, adapters = shelf.wanted(job_request.prompt, job_request.adapters)
        job_request = dataclasses.replace(job_request, prompt=prompt)
    elif job_request.adapters:
        raise invalid("adapters", "adapters: this server offers none; it was started without --lora-dir")
    check_has_networks(job_request, model)
    seed = _seed(job_request) if job_request.seed in (None, -1) else job_request.seed
    try:
        sampler = job_request.sampler
        if not (sampler is None or model.scheduler.has_sampler(sampler)) and find(sampler)[0].name == INVERSE:
            why = "goes from an image to its noise, and latents do not go over the wire; choose another sampler"
            raise invalid("sampler", f"sampler={sampler!r} {why}")
        words: Words = ()
        unread: tuple[HintWarning, ...] = ()
        if embeddings is not None:
            texts = texts_of(job_request.prompt, job_request.negative_prompt, _options(job_request))
            words, unread = embeddings.named(texts)
            model = reading(model, words)
        seeds, tiles = image_seeds(seed, job_request.n), None
        if job_request.upscale is not None:
            job_request, tiles = cut(job_request, model, seeds[0], check_options(_options(job_request)).noise)
        job_request, of_cut = _proportioned(job_request, model)
        with _lock:
            request = _request(job_request, model, seeds[0])
            larger = _second_pass(model, request) if request.options.hires > 1 else None
        stages = (_stage(name, model, request, shelf, variant),)
        if larger is not None:
            stages = (replace(stages[0], then=_enlarged), _stage(name, model, larger, shelf, variant))
    except InputError as error:
        raise _refusal(error) from None
    for hint in () if job_request.lenient else idle(model, request):
        raise _refusal(InputError(hint.argument, hint.problem, cure="leave it out", value=hint.value))
    if (times := request.options.settings.get("s_noise", 1)) > MOST_NOISE:
        raise invalid("options", f"options.sampler_settings: s_noise={times:g} is more than {MOST_NOISE}; 1 is usual")
    if max(request.options.seed_size or (0,)) > LARGEST_NOISE:
        raise invalid("options", f"options.seed_size: a side is longer than {LARGEST_NOISE} pixels")
    if request.composed and request.texts.parts > MOST_PARTS:
        raise invalid("prompt", f"prompt: {request.texts.parts} prompts joined by AND are more than {MOST_PARTS}")
    if request.options.mask_blend != "denoised":
        raise invalid("options", "options.mask_blend: 'renoised' is not offered; leave it out")
    return Checked(stages, seeds, tiles, Beside(adapters, shelf, words, vae), (*unread, *of_cut))


def _second_pass(model: Model, request: Request) -> Request:
    """Return the result of ``second_pass`` without the blank images, which would take memory while it waits."""
    times = request.options.hires
    height, width = (larger_side(model, side, times) for side in (request.height, request.width))
    if height * width > MOST_PIXELS:
        raise InputError(
            "hires", f"makes {width} x {height} pixels, more than {MOST_PIXELS}", cure="use less", value=times
        )
    larger = second_pass(model, request)
    assert larger.init_images is not None
    return replace(larger, init_images=replace(larger.init_images, images=[], whole=([], [])))


def _enlarged(larger: Request, pixels: HostArray, latents: HostArray) -> Request:
    """Return the request of a second pass from an image of the first one."""
    return enlarged(larger, pixels[None], latents[None])


def _stage(name: str, model: Model, request: Request, shelf: AdapterCache | None, variant: Variant) -> Stage:
    """Return the stage of a request.

    Raises:
        InputError: its options do not go together.
        Rejected: it has too many steps.
    """
    table, _, kinds = work(model, request)
    if request.steps > MOST_STEPS or len(table) > MOST_EVALUATIONS:
        raise invalid(
            "steps", f"steps: {request.steps} of them, {len(table)} evaluations of the network, are more than "
            f"{MOST_STEPS} and {MOST_EVALUATIONS}",
        )  # fmt: skip
    # Every size has one set of programs, in which plain images, given ones and masked ones mix.
    kinds = kinds._replace(
        guided=(True,) if reads_negative(kinds.guidance) else (True, False),
        places=shelf.bank.places if shelf else None,
    )
    reads = kinds.decoder and ReadsImage(kinds.decoder)
    kinds = with_networks(kinds.adding(not model.networks.inpaints and Keeps(), reads), model)
    if request.embedded:
        kinds = kinds._replace(guided=(False,))
    return Stage(request, table, GroupKey(name, request.height, request.width, kinds, variant))


def _seed(job_request: JobRequest) -> int:
    """Return a seed for a request without one: from its Idempotency-Key, so that other replicas give the same image."""
    if not job_request.once:
        return random_seed()
    return int.from_bytes(hashlib.sha256(f"{job_request.client}\n{job_request.once}".encode()).digest()[:4], "big")


def sample(
    name: str,
    model: Model,
    width: int,
    height: int,
    *,
    chunks: int = 1,
    steps: int = 12,
    shelf: AdapterCache | None = None,
    shown: bool = False,
    references: int = 0,
) -> Checked:
    """Return an ordinary request at a size, with a prompt of so many chunks and so many reference images; ``shown``:
    with an image for every network."""
    concepts = model.concepts.names
    prompt = concepts[0] if concepts else "a"  # which fits the text of any model
    steps = min(steps, model.scheduler.schedule.alphas_cumprod.size)
    images = examples(model, width, height) if shown else {}
    if references:
        blank = Image.new("RGB", (width, height))
        images |= {"image": blank, "references": (blank,) * (references - 1)}
    checked = check(JobRequest(prompt, width=width, height=height, steps=steps, seed=0, **images), name, model, shelf)
    if chunks == 1:
        return checked
    longer = replace(checked.request, texts=checked.request.texts.longer(chunks))
    return checked._replace(stages=(_stage(name, model, longer, shelf, PLAIN),))


def usable_samplers(model: Model, width: int, height: int) -> tuple[str, ...] | None:
    """Return the names of samplers that can generate images of a size with a model; None if the model cannot."""
    try:
        request, usable = sample("", model, width, height, steps=4).request, []
    except Rejected:
        return None
    for spec in SAMPLERS:
        with suppress(InputError):
            sampler_table(model, replace(request, sampler=spec.name))
            usable.append(spec.name)
    return tuple(name for name in usable if name != INVERSE)


def _options(job_request: JobRequest) -> Options:
    names = declared(Options)
    unknown = next((name for name in job_request.options if name not in names), None)
    if unknown is not None:
        renamed = aliases(Options).get(unknown)
        cure = f"send {renamed!r}" if renamed else nearest(unknown, list(names))
        raise InputError("options", f"has no {unknown!r:.80}", cure=cure)
    return Options(**{**job_request.options, "progress": False})


def _request(job_request: JobRequest, model: Model, seed: int) -> Request:
    image, (width, height) = _references(job_request, model)
    call = Call(
        job_request.prompt,
        job_request.negative_prompt,
        height,
        width,
        job_request.steps,
        job_request.guidance_scale,
        seed=seed,
        sampler=job_request.sampler,
        options=_options(job_request),
        image=image,
        mask=job_request.mask,
        strength=job_request.strength,
        control=job_request.control,
        image_prompt=prompts_of(job_request),
    )
    return make_request(model, call)


def _proportioned(job_request: JobRequest, model: Model) -> tuple[JobRequest, tuple[HintWarning, ...]]:
    """Cut the image that a run begins from, and its mask, to the proportions of the size. Return a hint if it was cut.

    References are cut in ``_references``, with hints from here; of an image with ``padding_mask_crop`` only the masked
    part is resized.
    """
    image, mask, options = job_request.image, job_request.mask, job_request.options
    read = model.networks.denoiser.facts.edits and mask is None and job_request.strength is None
    whole = options.get("outpaint") or options.get("padding_mask_crop") is not None
    if image is None or whole or job_request.lenient or (mask is not None and mask.size != image.size):
        return job_request, ()
    width, height = job_request.width or image.width, job_request.height or image.height
    named = [("image", image), *((f"references[{i}]", each) for i, each in enumerate(job_request.references))]
    parts, hints = [proportioned(each, width, height) for _, each in named], []
    for (name, each), part in zip(named, parts, strict=True):
        if min(part.width / each.width, part.height / each.height) <= 1 - _LITTLE:
            problem = (
                f"of {each.width} x {each.height} pixels is cut at its edges to the proportions of {width} x {height}"
            )
            hints.append(HintWarning(name, problem))
    if not read:
        cut_mask = None if mask is None else proportioned(mask, width, height)
        job_request = replace(job_request, image=parts[0], mask=cut_mask)
    return job_request, tuple(hints)


def _references(job_request: JobRequest, model: Model) -> tuple[Any, tuple[int | None, int | None]]:
    """Return the image of a call, and its width and height. References are cut to one size, so that every size has one
    set of programs for each number of them."""
    image, size = job_request.image, (job_request.width, job_request.height)
    begins = job_request.mask is not None or job_request.strength is not None
    if image is None or begins or not model.networks.denoiser.facts.edits:
        if job_request.references:
            why = "need an image, no mask, no strength and a model that edits"
            raise InputError("references", why, cure="leave them out")
        return image, size
    images = [image, *job_request.references]
    height, width = check_references(images, model.networks, "references").sizes[0]
    size = size[0] or width, size[1] or height
    return [
        image if image.size == size else ImageOps.fit(image, size, Image.Resampling.LANCZOS) for image in images
    ], size


def _refusal(error: InputError) -> Rejected:
    """Return a refusal for an error of a call, about the field that the client wrote."""
    options, settings = set(declared(Options)), {field.name for field in dataclasses.fields(SamplerOptions)}
    name = _NAMES.get(error.argument, error.argument)

    def write(argument: str, value: str | None) -> str:
        field = _NAMES.get(argument, argument)
        if field in options - set(CONTROL_OPTIONS):
            field = f"options.{field}"
        elif field in settings:
            field = f"options.sampler_settings.{field}"
        return field if value is None else f"{field}={value}"

    fields = {field.name for field in dataclasses.fields(JobRequest)} | set(CONTROL_OPTIONS)
    param = name if name in fields else "options" if name in options | settings else None
    return invalid(param, error.format(write))
