"""Rows to images: checked one by one, then generated in full batches of what can share a program.

Each image has its own table in the batch, so rows that differ in steps, sampler or guidance scale share it. All batches
of a size have as many slots, whatever is in them: an image is the same bits in any company and at any place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from canvax.compile.kinds import Kinds
from canvax.compile.monitor import counting
from canvax.errors import NO_VALUE, CanvaxError, InputError, OutOfMemoryError
from canvax.images.formats import GeneratedImage, quality_keywords
from canvax.parallel import multihost
from canvax.parallel.memory import cures, explained
from canvax.parallel.mesh import padded_batch
from canvax.pipelines.control import control_argument, control_of
from canvax.pipelines.generate import metadata, second_pass, text_to_image, two_passes, work
from canvax.pipelines.image_prompts import image_prompt_argument, image_prompts_of
from canvax.pipelines.options import Options
from canvax.pipelines.prepare import noise_of
from canvax.pipelines.request import Call, Request, make_request
from canvax.samplers import SamplerTable
from canvax.scale.rows import ARGUMENTS, OPTIONS, Row, digest_of, settings_of
from canvax.settings import declared
from canvax.types import HostArray

if TYPE_CHECKING:
    from PIL.Image import Image

    from canvax.pipelines.pipeline import StableDiffusion

PIXELS = 512 * 512
"""Pixels that a device generates at once by default: safe for a full-size model on any device."""

MOST = 64
"""Images likewise."""

_NAMED = frozenset(ARGUMENTS) & Call.__dataclass_fields__.keys()
_SECOND = ("prompt_2", "negative_prompt_2")
_BY_IMAGE = {name: one.default for name, one in declared(Options).items() if one.setting.per_image}
"""Options that may differ within a batch: they are in the table, in the noise or in the prompts."""


class Key(NamedTuple):
    """Images with the same key can be in one batch.

    Attributes:
        height: in pixels.
        width: in pixels.
        kinds: of programs.
        flags: whether it is guided, and whether the negative side is zeros.
        options: what they must share.
        table: settings of the table, where the whole batch must have one; else empty.
    """

    height: int
    width: int
    kinds: Kinds
    flags: tuple[bool, bool]
    options: Options
    table: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Item:
    """A row that can be generated.

    Attributes:
        row: where it came from.
        digest: of its settings.
        settings: by canvax's own names.
        options: of its call.
        key: what it can be batched with.
        table: of its sampler.
        seconds: its second prompts, where it has them.
        noise: [1, h, w, C], where it is not that of its seed alone; else None.
        record: what generates it again.
    """

    row: Row
    digest: str
    settings: Mapping[str, Any]
    options: Options
    key: Key
    table: SamplerTable
    seconds: tuple[str, str]
    noise: HostArray | None
    record: Mapping[str, Any]


class Made(NamedTuple):
    """What became of a row: an image, or its file; or an error."""

    row: Row
    digest: str
    record: Mapping[str, Any] = {}
    image: Image | bytes | None = None
    error: str = ""


class Worker:
    """Generates rows with a model.

    Args:
        pipe: the model, with its weights.
        batch: images at once on the whole mesh; None for what any device can hold.
        most: rows that there are: a batch has no more slots than that.
        defaults: settings of rows that do not say otherwise, by canvax's own names.
        carried: names in rows that are not settings.
        seed: for seeds of rows without one, see ``rows.settings_of``.
        progress: whether to show what is compiled.

    Attributes:
        compilations: programs that JAX compiled so far.
    """

    def __init__(
        self,
        pipe: StableDiffusion,
        *,
        batch: int | None = None,
        most: int = MOST,
        defaults: Mapping[str, Any] | None = None,
        carried: Sequence[str] = (),
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        self.compilations = 0
        self._pipe = pipe
        self._batch, self._most = batch, most
        self._defaults, self._carried, self._seed = dict(defaults or {}), carried, seed
        self._progress: bool | str = "programs" if progress else False
        self._spread, self._leads = multihost.is_spread(pipe.mesh), multihost.leads(pipe.mesh)
        self._worked: dict[Any, Any] = {}
        self._too_large: set[Key] = set()

    def check(self, row: Row) -> Item | Made:
        """The row, checked without running anything; an error if it cannot be generated."""
        digest = ""
        try:
            settings = settings_of(row, self._defaults, self._carried, self._seed)
            digest = digest_of(settings)
            return self._item(row, digest, settings)
        except (CanvaxError, TypeError, ValueError, OverflowError) as error:  # of values of unforeseen types
            return Made(row, digest, error=str(error) or type(error).__name__)

    def run(self, rows: Iterable[Row]) -> Iterator[tuple[int, list[Made]]]:
        """All rows, a batch at a time; first those that cannot be generated.

        Yields:
            How many rows more are done, and what became of them: of several processes, each tells of its own images.
        """
        checked = [self.check(row) for row in rows]
        if wrong := [one for one in checked if isinstance(one, Made)]:
            yield len(wrong), wrong if self._leads else []
        groups: dict[Key, list[Item]] = {}
        for item in checked:
            if isinstance(item, Item):
                groups.setdefault(item.key, []).append(item)
        for key, items in groups.items():
            items.sort(key=lambda item: len(item.table))  # a batch takes as long as its longest image
            size = self.size(key.height, key.width)
            for start in range(0, len(items), size):
                yield len(items[start : start + size]), self.generate(items[start : start + size])

    def size(self, height: int, width: int) -> int:
        """Slots of every batch of a size in pixels."""
        data = self._pipe.mesh.shape["data"]
        usual = min(max(1, PIXELS // (height * width)), MOST) * data
        return padded_batch(self._batch or min(usual, self._most), self._pipe.mesh)

    def generate(self, items: Sequence[Item]) -> list[Made]:
        """Images of a batch; where several processes generate together, those of this one.

        Where a batch fails, each of its images is generated by itself, so that only the guilty ones are missing.
        """
        if items[0].key in self._too_large:
            return self._all(items, "is too large for this machine's memory; see the first such row")
        try:
            return self._at_once(items)
        except OutOfMemoryError as error:
            if (items[0].key.height, items[0].key.width) == self._pipe.model.native_size:
                raise
            self._too_large.add(items[0].key)
            return self._all(items, str(error))
        except CanvaxError as error:
            if len(items) == 1:
                return self._all(items, str(error))
            return [made for item in items for made in self.generate([item])]

    def _all(self, items: Sequence[Item], error: str) -> list[Made]:
        """Returns the same error for each; one process reports it."""
        return [Made(item.row, item.digest, error=error) for item in items] if self._leads else []

    def _at_once(self, items: Sequence[Item]) -> list[Made]:
        """A batch, filled up with copies of its last image, so that nothing compiles for a smaller one."""
        pipe, params, key = self._pipe, self._pipe.params, items[0].key
        assert params is not None
        size = self.size(key.height, key.width)
        full = [*items, *[items[-1]] * (size - len(items))]
        quantized = pipe.model.quantize is not None
        cure = partial(cures, pipe.mesh, pipe.model.dtype, quantized=quantized, batch=size, height=key.height,
                       width=key.width)  # fmt: skip
        failed: CanvaxError | None = None
        finished: dict[int, tuple[Image, Mapping[str, Any]]] = {}
        try:
            with explained(cure), counting() as counts:
                run = two_passes if key.options.hires > 1 else partial(text_to_image, tables=[i.table for i in full])
                result = run(pipe.model, pipe.programs, params, self._request(full), cure, counts)
            self.compilations += result.compilations
            result = pipe.safety_checker(result) if pipe.safety_checker else result
            seen = zip(result.indices, result.images, result.metadata, strict=True)
            finished = {i: (image, metadata) for i, image, metadata in seen if i < len(items)}
        except CanvaxError as error:
            failed = error
        if self._spread and multihost.any_of(failed is not None) and failed is None:
            failed = CanvaxError("failed in another process, whose own list says why")
        if failed is not None:
            raise failed
        return [self._made(items[i], *result) for i, result in finished.items()]

    def _made(self, item: Item, image: Image, metadata: Mapping[str, Any]) -> Made:
        """``metadata`` is that of the batch, which has the result of a safety checker."""
        record = {**item.record, **{name: metadata[name] for name in ("nsfw",) if name in metadata}}
        return Made(item.row, item.digest, record, GeneratedImage.of(image, record))

    def _item(self, row: Row, digest: str, settings: Mapping[str, Any]) -> Item:
        request = self._request_of(settings)
        options = request.options
        table, deep, kinds = self._work(request)
        noise = noise_of(request) if options.variation_strength or options.seed_size else None
        if options.hires > 1:
            second_pass(self._pipe.model, request)
            if self._spread or noise is not None:
                why = "no process of several has all images" if self._spread else "its noise is not that of a seed"
                raise InputError("hires", options.hires, f"is not for a batch: {why}", "leave it out")
        # What one table of the whole batch decides besides the table itself: features, texts, pieces of the run.
        alike = (deep is not None, len(kinds.guided) > 1, len(request.texts.stages) > 1, request.embedded,
                 options.hires > 1, request.given is not None)  # fmt: skip
        shared, common = replace(options, **_BY_IMAGE), ()
        if any(alike):
            given = [settings.get(name) for name in ("height", "width", "strength")] if request.given else []
            shared = replace(options, prompt_2=None, negative_prompt_2=None)
            common = (request.steps, request.guidance, request.sampler, "mask" in settings, *given)
        common += tuple(request.references.fingerprints) if request.references else ()  # all images of a call read them
        key = Key(request.height, request.width, kinds, (request.guided, request.zeros), shared, common)
        record = {**metadata(self._pipe.model, request)[0], "id": row.id}
        seconds = (request.prompts_2[0], request.negatives_2[0])
        return Item(row, digest, settings, options, key, table, seconds, noise, record)

    def _work(self, request: Request) -> Any:
        """``work``, remembered: rows of a file have few settings, and a table takes as long as all other checks."""
        own = (request.height, request.width, request.steps, request.guidance, request.sampler, request.options,
               request.chunks, request.texts.parts, request.composed, request.guided,
               request.control and request.control.names,
               request.image_prompts and request.image_prompts.kinds)  # fmt: skip
        from_images = request.given is not None or request.references is not None
        if from_images or own not in self._worked:
            if len(self._worked) > 1000:
                self._worked.clear()
            worked = work(self._pipe.model, request)
            if from_images:
                return worked
            self._worked[own] = worked
        return self._worked[own]

    def _request_of(self, settings: Mapping[str, Any]) -> Request:
        """A checked call for one image."""
        given = {name: settings.get(name) for name in ARGUMENTS}
        if given["prompt"] is None:
            raise InputError("prompt", NO_VALUE, "is missing", "give the row one, in a field or column of that name")
        options = Options(**{name: settings[name] for name in OPTIONS if name in settings}, progress=False)
        for name in ("prompt", "negative_prompt", "image", "mask"):
            if not isinstance(given[name], str | None):
                raise InputError(name, given[name], "is not text")
        return self._make(given, options, **self._shown([given]))

    def _request(self, items: Sequence[Item]) -> Request:
        """One call for a batch; what may differ within it is in lists, in tables and in the noise."""
        first = items[0]
        options = replace(first.options, **dict.fromkeys(_SECOND), progress=self._progress)
        for i, name in enumerate(_SECOND):
            if any(name in item.settings for item in items):
                options = replace(options, **{name: [item.seconds[i] for item in items]})
        negatives = None if first.key.flags[1] else [item.settings.get("negative_prompt") or "" for item in items]
        lists: dict[str, Any] = {name: [item.settings[name] for item in items] for name in ("prompt", "seed")}
        for name in ("image", "mask"):
            paths = [item.settings.get(name) for item in items]
            lists[name] = paths[0] if len(set(paths)) == 1 else paths
        settings = dict(first.settings)
        if first.key.kinds.controls and "image" not in settings:  # whose own sizes may differ
            settings |= {"height": first.key.height, "width": first.key.width}
        shown = self._shown([item.settings for item in items])
        request = self._make(settings, options, **lists, negative_prompt=negatives, **shown)
        if all(item.noise is None for item in items):
            return request
        plain = replace(options, **{name: _BY_IMAGE[name] for name in ("variation_strength", "seed_size")})
        request = replace(request, options=plain)
        noises = [noise_of(replace(request, seeds=[item.settings["seed"]])) if item.noise is None else item.noise
                  for item in items]  # fmt: skip
        return replace(request, latents=np.concatenate(noises))

    def _shown(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Control images and image prompts that rows name, as arguments of a call."""
        adapters = len(self._pipe.model.ip_adapters)
        control = control_argument([control_of(row) for row in rows])
        return {
            "control": control,
            "image_prompt": image_prompt_argument([image_prompts_of(row, adapters) for row in rows]),
        }

    def _make(self, settings: Mapping[str, Any], options: Options, **more: Any) -> Request:
        named = {name: settings[name] for name in _NAMED if name in settings}
        return make_request(self._pipe.model, Call(**{**named, **more}, options=options))


def image_file(image: Image, kind: str, quality: int | None = None) -> bytes:
    """The file of an image, with its metadata; ``kind`` is png, webp or jpg.

    Raises:
        InputError: a JPEG cannot hold its metadata.
    """
    name = {"jpg": "JPEG"}.get(kind, kind.upper())
    out = BytesIO()
    image.save(out, name, **quality_keywords(name, quality))
    return out.getvalue()
