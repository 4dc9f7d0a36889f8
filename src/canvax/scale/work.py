"""Generates rows: checks them one by one, then generates full batches of images that can share a program.

Each image has its own sampler table in the batch, so rows with different steps, samplers or guidance scales share a
batch. All batches of a size have the same number of slots, so that an image has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from canvax.call import ImageEncoding
from canvax.compile.additions import ReadsControls
from canvax.compile.kinds import Kinds
from canvax.compile.monitor import counting
from canvax.errors import CanvaxError, InputError, OutOfMemoryError, check_utf8
from canvax.images.formats import GeneratedImage, quality_keywords
from canvax.parallel import multihost
from canvax.parallel.memory import cures, explained
from canvax.parallel.mesh import padded_batch
from canvax.pipelines.generate import metadata, second_pass, text_to_image, two_passes, work
from canvax.pipelines.options import Options
from canvax.pipelines.prepare import noise_of, samples
from canvax.pipelines.request import Call, Request, is_alone, make_request
from canvax.pipelines.texts import has_tags
from canvax.samplers import SamplerTable
from canvax.scale.named_images import control_argument, image_prompt_argument, named_control, named_prompts
from canvax.scale.rows import ARGUMENTS, OPTIONS, Row, digest_of, settings_of
from canvax.settings import check_setting, declared, offered
from canvax.types import HostArray

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from PIL.Image import Image

    from canvax.families.base import Model
    from canvax.pipelines.pipeline import Pipeline

PIXELS = 512 * 512
"""Pixels that a device generates at once by default: safe for a full-size model on any device."""

MOST = 64
"""Images that a device generates at once by default."""

T = TypeVar("T")
_TEXTS = [
    name
    for record in (Call, Options)
    for name, field in offered(record, "file").items()
    if field.is_text and not (field.setting.repeats or field.kind.choices)
]
"""Settings that are a single text in a row, although a call accepts lists."""
_NAMED = frozenset(ARGUMENTS) & Call.__dataclass_fields__.keys()
_BY_IMAGE = {name: option.default for name, option in declared(Options).items() if option.setting.per_image}
"""Options that may differ within a batch: they affect only the table, the noise or the prompts."""


def call_of(settings: Mapping[str, Any], adapters: int, **options: Any) -> Call:
    """Return the call for one image with these settings; input images are still file names.

    Args:
        settings: settings by canvax's names.
        adapters: IP-Adapters of the model.
        options: further options of the call.

    Raises:
        InputError: there is no prompt, or a value has the wrong type or is out of range.
    """
    if settings.get("prompt") is None:
        raise InputError("prompt", "is missing", cure="give the row one, in a field or column of that name")
    for name in _TEXTS:
        if not isinstance(value := settings.get(name), str | None):
            raise InputError(name, "is not text", value=value)
        check_utf8(name, value or "")
    named = {name: check_setting(Call, name, settings[name]) for name in _NAMED if name in settings}
    if references := settings.get("reference"):
        named["image"] = _with_references(settings.get("image"), references)
    named |= {"control": named_control(settings), "image_prompt": named_prompts(settings, adapters)}
    return Call(**named, options=Options(**{name: settings[name] for name in OPTIONS if name in settings}, **options))


def _with_references(image: str | None, references: Any) -> tuple[str, ...]:
    """Return the files of all input images of a model that edits."""
    files = tuple(references) if isinstance(references, list | tuple) else (references,)
    if wrong := [file for file in files if not isinstance(file, str)]:
        raise InputError("reference", "is not the name of a file", value=wrong[0])
    if image is None:
        raise InputError("reference", "is a further image", cure="name the first one with {image}", value=files[0])
    return image, *files


def check_references_of(call: Call, model: Model | None = None) -> None:
    """Refuse further images in a call for one image if nothing reads them; ``model``: None before it is loaded.

    Raises:
        InputError: about the first of them.
    """
    if isinstance(call.image, tuple):
        problem = ""
        if not is_alone(call, call.options):
            problem = "cannot be combined with a mask or a strength, which take a single image"
        elif model is not None and not model.networks.denoiser.facts.edits:
            problem = f"is for models that edit, and {model.name} is none"
        if problem:
            raise InputError("reference", problem, cure="leave it out", value=call.image[1])


def joined(calls: Sequence[Call], **options: Any) -> Call:
    """Return one call for the images of several calls of ``call_of``, with the contents of image files.

    Prompts, seeds and images may differ. Everything else is that of the first call, with ``options`` replaced.
    """
    first = calls[0]
    for name in ("prompt", "negative_prompt"):
        seconds = [getattr(call.options, f"{name}_2") for call in calls]
        if len(set(seconds)) > 1:
            usual = [getattr(call, name) or "" for call in calls]
            options[f"{name}_2"] = [usual[i] if second is None else second for i, second in enumerate(seconds)]
    negatives = [call.negative_prompt for call in calls]
    files = {name: [getattr(call, name) for call in calls] for name in ("image", "mask")}
    return replace(
        first,
        prompt=[call.prompt for call in calls],
        negative_prompt=None if negatives.count(None) == len(negatives) else [text or "" for text in negatives],
        seed=[call.seed for call in calls],
        options=replace(first.options, **options) if options else first.options,
        **{name: paths[0] if len(set(paths)) == 1 else paths for name, paths in files.items()},  # encoded once
        control=control_argument([call.control for call in calls]),
        image_prompt=image_prompt_argument([call.image_prompt for call in calls]),
    )


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the items sorted into groups with equal keys; the order of first items is kept."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def most_at_once(mesh: Mesh, height: int, width: int) -> int:
    """Return the number of images of a size in pixels that any devices can generate at once."""
    return min(max(1, PIXELS // (height * width)), MOST) * mesh.shape["data"]


class Key(NamedTuple):
    """Images with the same key can be in one batch.

    Attributes:
        height: height in pixels.
        width: width in pixels.
        kinds: kinds of programs.
        flags: whether guidance is used, and whether the negative prompt is replaced by zeros.
        options: options that they must share.
        table: settings of the sampler table if the whole batch must share it; otherwise empty.
    """

    height: int
    width: int
    kinds: Kinds
    flags: tuple[bool, bool]
    options: Options
    table: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Item:
    """A row ready for generation.

    Attributes:
        row: the row of the file.
        digest: digest of its settings.
        call: the call for this image; input images are file names.
        key: key of batches that it can be in.
        table: table of its sampler.
        noise: [1, h, w, C], or None if only the seed determines it.
        record: settings that generate it again.
    """

    row: Row
    digest: str
    call: Call
    key: Key
    table: SamplerTable
    noise: HostArray | None
    record: Mapping[str, Any]


class Made(NamedTuple):
    """The result of a row: an image, or the bytes of its file; or an error."""

    row: Row
    digest: str
    record: Mapping[str, Any] = {}
    image: Image | bytes | None = None
    error: str = ""


class Worker:
    """Generates rows with a model.

    Args:
        pipe: the model, with its weights.
        batch: images at once on the whole mesh; None for a number that any device can hold.
        most: number of rows; a batch has at most as many slots.
        defaults: settings that a row may override, by canvax's names.
        carried: names in rows that are not settings.
        seed: base of the seeds of rows without a seed, see ``rows.settings_of``.
        progress: show compilations.

    Attributes:
        compilations: programs that JAX compiled so far.
    """

    def __init__(
        self,
        pipe: Pipeline,
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
        self._spread, self._leads = multihost.is_spread(pipe.mesh), multihost.is_main_process(pipe.mesh)
        self._worked: dict[Any, Any] = {}
        self._too_large: set[Key] = set()

    def check(self, row: Row) -> Item | Made:
        """Check a row without running anything; return an error if it cannot be generated."""
        digest = ""
        try:
            settings = settings_of(row, self._defaults, self._carried, self._seed)
            digest = digest_of(settings)
            return self._item(row, digest, call_of(settings, len(self._pipe.model.ip_adapters), progress=False))
        except CanvaxError as error:
            return Made(row, digest, error=str(error))

    def run(self, rows: Iterable[Row]) -> Iterator[tuple[int, list[Made]]]:
        """Generate all rows, a batch at a time; errors of rows that cannot be generated come first.

        Yields:
            The number of rows in the batch, and their results; each of several processes yields the images it has.
        """
        checked = [self.check(row) for row in rows]
        if wrong := [made for made in checked if isinstance(made, Made)]:
            yield len(wrong), wrong if self._leads else []
        for items in grouped((item for item in checked if isinstance(item, Item)), lambda item: item.key):
            items.sort(key=lambda item: len(item.table))  # a batch takes as long as its longest image
            size = self.size(items[0].key.height, items[0].key.width)
            for start in range(0, len(items), size):
                yield len(items[start : start + size]), self.generate(items[start : start + size])

    def size(self, height: int, width: int) -> int:
        """Return the slots of every batch of a size in pixels."""
        usual = min(most_at_once(self._pipe.mesh, height, width), self._most)
        return padded_batch(self._batch or usual, self._pipe.mesh)

    def generate(self, items: Sequence[Item]) -> list[Made]:
        """Generate a batch; if several processes generate together, each returns the images of its devices.

        If a batch fails, each image is generated separately, so that only those that cause the error are missing.
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
        """Return the same error for each item; one process reports it."""
        return [Made(item.row, item.digest, error=error) for item in items] if self._leads else []

    def _at_once(self, items: Sequence[Item]) -> list[Made]:
        """Generate a batch, filled up with copies of its last image, so that smaller batches do not recompile."""
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
        if self._spread:
            failed = _agreed(failed, cure)
        if failed is not None:
            raise failed
        return [self._made(items[i], *result) for i, result in finished.items()]

    def _made(self, item: Item, image: Image, metadata: Mapping[str, Any]) -> Made:
        """Return the result of an item; ``metadata`` is that of the batch, with the answer of a safety checker."""
        record = {**item.record, **{name: metadata[name] for name in ("nsfw",) if name in metadata}}
        return Made(item.row, item.digest, record, GeneratedImage.of(image, record))

    def _item(self, row: Row, digest: str, call: Call) -> Item:
        if has_tags(call.prompt):
            why = "names an adapter, but a batch has the same adapters for all rows"
            raise InputError("prompt", why, cure="write --lora FILE:0.8 instead", value=call.prompt)
        check_references_of(call, self._pipe.model)
        request, options = make_request(self._pipe.model, joined([call])), call.options
        table, deep, kinds = self._work(request)
        noise = noise_of(self._pipe.model, request) if options.variation_strength or options.seed_size else None
        if options.hires > 1:
            second_pass(self._pipe.model, request)
            if self._spread or noise is not None:
                why = "no process of several has all images" if self._spread else "its noise is not that of a seed"
                raise InputError("hires", f"is not for a batch: {why}", cure="leave it out", value=options.hires)
        # Settings with a shared table that also affect features, texts or parts of the run.
        alike = (deep is not None, len(kinds.guided) > 1, len(request.texts.stages) > 1, request.embedded,
                 options.hires > 1, request.init_images is not None)  # fmt: skip
        shared, common = replace(options, **_BY_IMAGE), ()
        if any(alike):
            size = [call.height, call.width, call.strength] if request.init_images else []
            shared = replace(options, prompt_2=None, negative_prompt_2=None)
            common = (request.steps, request.guidance, request.sampler, call.mask is None, *size)
        common += (call.image,) if request.references else ()  # shared by all images of a call
        key = Key(request.height, request.width, kinds, (request.guided, request.zeros), shared, common)
        record = {**metadata(self._pipe.model, request)[0], "id": row.id}
        return Item(row, digest, call, key, table, noise, record)

    def _work(self, request: Request) -> Any:
        """Return ``work`` of a request, cached: settings rarely differ, and a table takes as long as all checks."""
        key = (request.height, request.width, request.steps, request.guidance, request.sampler, request.options,
               request.lengths, request.texts.parts, request.composed, request.guided,
               request.control and request.control.names,
               request.image_prompts and request.image_prompts.kinds)  # fmt: skip
        from_images = request.init_images is not None or request.references is not None
        if from_images or key not in self._worked:
            if len(self._worked) > 1000:
                self._worked.clear()
            worked = work(self._pipe.model, request)
            if from_images:
                return worked
            self._worked[key] = worked
        return self._worked[key]

    def _request(self, items: Sequence[Item]) -> Request:
        """Return the request of a batch; differences between images are in lists, in tables and in the noise."""
        model, key = self._pipe.model, items[0].key
        call = joined([item.call for item in items], progress=self._progress)
        if key.kinds.of(ReadsControls) and call.image is None:  # control images may differ in size
            call = replace(call, height=key.height, width=key.width)
        request = make_request(model, call)
        if all(item.noise is None for item in items):
            return request
        kind: ImageEncoding = "sample" if samples(model, request) else "mean"
        in_noise = {name: _BY_IMAGE[name] for name in ("variation_strength", "seed_size")}
        plain = replace(request.options, image_encoding=kind, **in_noise)
        request = replace(request, options=plain)
        noises = [noise_of(model, replace(request, seeds=[item.call.seed])) if item.noise is None else item.noise
                  for item in items]  # fmt: skip
        return replace(request, latents=np.concatenate(noises))


def _agreed(failed: CanvaxError | None, cure: Callable[[], str]) -> CanvaxError | None:
    """Return the error that all processes must raise: their next batches must be the same."""
    memory = isinstance(failed, OutOfMemoryError)
    any_memory, any_other = multihost.any_process([memory, failed is not None and not memory])
    if any_memory:
        return failed if memory else OutOfMemoryError(f"another process ran out of memory; {cure()}")
    if any_other and failed is None:
        return CanvaxError("failed in another process, whose own list says why")
    return failed


def image_file(image: Image, kind: str, quality: int | None = None) -> bytes:
    """Return the file of an image, with its metadata; ``kind`` is png, webp or jpg."""
    name = {"jpg": "JPEG"}.get(kind, kind.upper())
    out = BytesIO()
    image.save(out, name, **quality_keywords(name, quality))
    return out.getvalue()
