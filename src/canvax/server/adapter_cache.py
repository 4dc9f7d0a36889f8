"""The adapters of a server: the files that clients may name, and the ones that are next to a model's weights now.

A file is read in the thread of the first request that names it, and kept on the host in the layout of the slots. When
an image begins, its adapters are written into slots. They stay there until the image is over, and after that until
another image needs the slot. So nothing is compiled, and images with different adapters are in one batch.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from canvax.errors import CanvaxError, CheckpointError, InputError, nearest
from canvax.families.base import Model
from canvax.images.infotext import without_networks
from canvax.models.beside import ADAPTERS, LAYERS, Places, slots
from canvax.params import Params
from canvax.pipelines.adapter_files import AdapterFiles, a1111_hash_of, several, sha256_of
from canvax.pipelines.adapter_weights import Weights, per_image, plain_weight
from canvax.pipelines.slots import COUNT, LARGEST, Bank, Packed, RankTooHigh, Shares, bucket, share_rows
from canvax.pipelines.texts import tags_of
from canvax.server.jobs import LOOK_SECONDS, AdapterCard, Rejected, invalid, unusable
from canvax.weights.adapter_names import Module, module_table, split_name
from canvax.weights.identify import LORA, family_of
from canvax.weights.location import Location
from canvax.weights.lora import RECORD, read_adapter, suggested, trained_schedule, trigger_words
from canvax.weights.open import LORA_FILES, find_adapter
from canvax.weights.safetensors import open_safetensors, read_metadata

KEPT = 2 << 30
"""Bytes of unused adapters that are kept on the host."""

_LONGEST = 1 << 14
"""Characters of an entry of metadata that clients see; longer ones are thumbnails and large data sets."""

_USUAL_RANK, _MOST_RANK = 16, 128


@dataclass(frozen=True)
class AdapterSettings:
    """The operator's settings.

    Attributes:
        folder: files that clients may name; None for ``files`` alone.
        files: files that are read before the first request.
        rank: rank of the slots; None for the largest rank of the files.
        places: number of slots: adapters next to the weights at a time.
        layers: layers with slots, one of ``canvax.models.beside.LAYERS``; None for the layers that the files change.
    """

    folder: Path | None = None
    files: tuple[Path, ...] = ()
    rank: int | None = None
    places: int = COUNT
    layers: str | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """An adapter that was read.

    Attributes:
        name: in requests.
        file: its file's name, without the folder.
        sha256: of the file.
        a1111_hash: see ``a1111_hash_of``.
        trained: texts that it was trained with.
        packed: as places have it.
    """

    name: str
    file: str
    sha256: str
    a1111_hash: str
    trained: Sequence[str] = field(repr=False)
    packed: Packed = field(repr=False)

    @property
    def bytes(self) -> int:
        """On the host."""
        return sum(array.nbytes for array in self.packed.values())


Wanted = Mapping[Entry, Weights]
"""The adapters of an image."""


class Slots:
    """The adapter in each slot, and the adapters that images in the batch hold. No JAX.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: OrderedDict[Entry, int] = OrderedDict()  # the last used last
        self._pins: Counter[Entry] = Counter()
        self._lock = threading.Lock()

    def fit(self, wanted: Wanted) -> bool:
        """Check if there are slots for the adapters of an image that begins."""
        with self._lock:
            return len({*self._pins, *wanted}) <= self.count

    def pin(self, wanted: Wanted) -> None:
        """Keep the adapters of an image in their slots until it is over."""
        with self._lock:
            self._pins.update(wanted.keys())

    def unpin(self, wanted: Wanted) -> None:
        """Release the adapters of an image that is over."""
        with self._lock:
            self._pins.subtract(wanted.keys())
            self._pins += Counter()  # without those that are not pinned any more

    def place(self, wanted: Wanted, put: Callable[[int, Entry], None]) -> None:
        """Give the adapters of an image slots; ``put`` writes the weights of those that have none."""
        for entry in wanted:
            if entry in self.held:
                self.held.move_to_end(entry)
                continue
            free = set(range(self.count)) - set(self.held.values())
            if not free:
                with self._lock:
                    pinned = {*self._pins, *wanted}
                free = {self.held.pop(next(other for other in self.held if other not in pinned))}
            put(place := min(free), entry)
            self.held[entry] = place


class AdapterCache:
    """The adapters of one model.

    Places are the engine's thread's; the rest may be called in any.

    Attributes:
        slots: who has which place.
    """

    def __init__(self, model: Model, mesh: Mesh, settings: AdapterSettings) -> None:
        self._model, self._settings = model, settings
        self._entries: OrderedDict[Path, tuple[float, Entry]] = OrderedDict()
        self._cards: dict[tuple[str, Path], tuple[float, AdapterCard | None]] = {}
        self._reading = threading.Lock()
        self.refresh()
        ranks, layers = _looked_at(model, self._files.paths.values())
        rank = settings.rank or bucket(min(_MOST_RANK, max(ranks, default=_USUAL_RANK)))
        self.bank = Bank(model, mesh, Places(settings.places, rank, settings.layers or layers))
        self.slots = Slots(settings.places)
        for path in settings.files:
            try:
                self.read(path.stem)
            except Rejected as fault:  # it is no client's request
                raise CheckpointError(f"--lora {path}: {fault.message.removeprefix('adapters: ')}") from None

    def refresh(self) -> None:
        """Look into the folder again."""
        self._looked = time.monotonic()
        self._files = AdapterFiles(self._settings.folder, self._settings.files)

    def renew(self) -> None:
        """Look for new files, at most once in ``LOOK_SECONDS``."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            before = self._files
            self.refresh()
            if self._files.paths == before.paths:  # whose headers may have been read
                self._files = before

    def summary(self) -> str:
        """Return lines for the operator: how many adapters there are, the memory of the slots, and files that cannot
        be used."""
        places, size, cards = self.bank.places, self.bank.bytes / (1 << 20), self.cards()
        line = (
            f"usable adapters: {sum(not card.fault for card in cards)}; {places.count} slots of rank "
            f"{places.rank} (layers: {places.layers}) take up to {size:.0f} MB in addition to the weights"
        )
        return "\n".join([line, *unusable(cards, "adapters")])

    def cards(self) -> list[AdapterCard]:
        """Return the files that are adapters of this model by their headers, and those that cannot be read."""
        each = (self._card(name, path) for name, path in self._files.paths.items())
        return [card for card in each if card is not None]

    def _card(self, name: str, path: Path) -> AdapterCard | None:
        """Return what clients see of an adapter, read again when its file changes; None for files of another kind."""
        try:
            changed = path.stat().st_mtime
            if self._cards.get((name, path), (0.0, None))[0] != changed:
                self._cards[name, path] = changed, self._read_card(name, path)
        except (CheckpointError, OSError) as fault:
            return AdapterCard(name, name, path.name, fault=_reason(fault, path))
        return self._cards[name, path][1]

    def _read_card(self, name: str, path: Path) -> AdapterCard | None:
        """Read the header of an adapter for text of this model's width; None for other files."""
        shapes = {entry.name: entry.shape for entry in open_safetensors(path, plain_names=False)}
        if not LORA.is_this(shapes) or family_of(shapes)[1] not in (0, self._model.text.width):
            return None
        metadata = read_metadata(path)
        trained = trained_schedule(path, metadata)
        shown = {
            key: text
            for key, text in metadata.items()
            if key.startswith(("ss_", "modelspec.", RECORD)) and len(text) <= _LONGEST
        }
        usual = self._model.scheduler.config
        splits = ((split_name(array), shape) for array, shape in shapes.items())
        ranks = [shape[0] for split, shape in splits if split and split.role == "down" and shape]
        return AdapterCard(
            name, shown.get("ss_output_name") or name, path.name, shown, trigger_words(shown),
            suggested(path.stem, shown, unet=self._model.networks.denoiser.component == "unet"),
            {key: value for key, value in trained.items() if usual.get(key) != value},
            self._too_high(max(ranks, default=1)),
        )  # fmt: skip

    def _too_high(self, rank: int) -> str:
        """Return why an adapter of this rank cannot be used, and the cure; "" if it can."""
        cure = f"; start the server with --lora-rank {bucket(rank)}" if rank <= LARGEST else ""
        fault = f"has a rank of {rank}, and the server takes up to {self.bank.places.rank}{cure}"
        return fault if rank > self.bank.places.rank else ""

    def read(self, name: str) -> Entry:
        """Read an adapter by its name, or by the name that its trainer gave it. No path is made of a name.

        Raises:
            Rejected: no adapter or several have the name, or it does not fit this model.
        """
        if not self._files.matches(name):
            self.renew()
        files = self._files
        names = files.matches(name)
        if not names:
            there = nearest(name[:100], list(files.paths)) if files.paths else "this server has none"
            raise Rejected(404, "adapter_not_found", f"adapters: {name!r:.100} is not there; {there}", param="adapters")
        if len(names) > 1:
            raise invalid("adapters", f"adapters: {several(name, names)}")
        name, path = names[0], files.paths[names[0]]
        with self._reading:
            try:
                changed = path.stat().st_mtime
                before = self._entries.pop(path, None)
                entry = before[1] if before and before[0] == changed else self._read(name, path)
            except (CanvaxError, OSError) as fault:
                message = _reason(fault, path)
                message = re.sub(r"; (write|pass) .*", "; this server takes adapters of weights alone", message)
                raise _refused(message) from None
            self._entries[path] = changed, entry
            while sum(entry.bytes for _, entry in self._entries.values()) > KEPT and len(self._entries) > 1:
                self._entries.popitem(last=False)
            return entry

    def _read(self, name: str, path: Path) -> Entry:
        """Read an adapter from its file.

        Raises:
            CheckpointError, InputError: the file cannot be used.
        """
        (file, *_), config = find_adapter(Location(path), LORA_FILES)
        adapter = read_adapter(file, self._model.networks.adapted, config)
        if adapter.embeddings:
            words = ", ".join(repr(embedding.name) for embedding in adapter.embeddings)
            problem = f"{name!r:.100} contains textual inversions ({words:.200}), which a server does not load"
            raise _refused(f"{problem}; remove them from the file")
        try:
            packed = self.bank.pack(name, adapter)
        except InputError as fault:  # its cure is a call of Python
            problem = self._too_high(fault.rank) if isinstance(fault, RankTooHigh) else fault.problem
            raise _refused(f"{name!r:.100} {problem}") from None
        return Entry(name, path.name, sha256_of(file), a1111_hash_of(file), trigger_words(adapter.metadata), packed)

    def wanted(self, prompt: str, adapters: Mapping[str, Any]) -> tuple[str, Wanted]:
        """Return a prompt without its adapter tags, and the adapters of the tags and of the request.

        Raises:
            Rejected: an adapter or a weight cannot be used.
        """
        components = self.bank.components
        try:
            tags: dict[str, Any] = {
                name: {part: w for part, w in weight.items() if part in components}
                if isinstance(weight, dict)
                else weight
                for name, weight in tags_of(prompt, self._model.networks.denoiser.component).items()
            }
            weights = {name: per_image(name, weight, components) for name, weight in {**tags, **adapters}.items()}
        except InputError as fault:
            raise invalid("adapters", f"adapters: {str(fault).removeprefix('adapters: ')}") from None
        if twice := tags.keys() & adapters.keys():
            raise invalid("adapters", f"adapters: {min(twice)!r:.100} is in the prompt as well; name it once")
        if len(weights) > self.bank.places.count:
            count = self.bank.places.count
            raise invalid("adapters", f"adapters: {len(weights)} are more than an image can have here, {count}")
        wanted = {self.read(name): weight for name, weight in weights.items()}
        return without_networks(prompt) if tags else prompt, wanted

    # What follows is the engine's.

    def shares(self, wanted: Wanted) -> Shares:
        """Put an image's adapters into slots if they are not there, and return its share of each slot."""
        self.slots.place(wanted, lambda place, entry: self.bank.put(place, entry.packed))
        weights = share_rows(
            [{entry.name: weight for entry, weight in wanted.items()}],
            {entry.name: self.slots.held[entry] for entry in wanted},
            self.bank,
        )
        records = {
            entry.name: {
                "file": entry.file,
                "weight": plain_weight(weight),
                "sha256": entry.sha256,
                "a1111_hash": entry.a1111_hash,
            }
            for entry, weight in wanted.items()
        }
        return Shares(self.bank.places, self.bank.arrays, weights, [records])

    def beside(self, params: Params) -> Params:
        """Return parameters with the slots, for the programs."""
        return {**params, ADAPTERS: self.bank.arrays}

    def take_off(self) -> None:
        """Free what the places hold on the devices."""
        self.bank.clear()

    def put_on(self) -> None:
        """Fill the places again."""
        self.bank.fill()
        for entry, place in self.slots.held.items():
            self.bank.put(place, entry.packed)


def _reason(fault: CanvaxError | OSError, path: Path) -> str:
    """Return why a file cannot be used, without the folders above it, which are the operator's business."""
    if isinstance(fault, OSError) and fault.strerror:
        return f"{path.name} cannot be read ({fault.strerror})"
    return str(fault).replace(str(path), path.name)


def _refused(message: str) -> Rejected:
    return Rejected(400, "adapter_unusable", f"adapters: {message}", param="adapters")


def _looked_at(model: Model, files: Iterable[Path]) -> tuple[set[int], str]:
    """Return the ranks of files and the layers that they change, from their headers; all layers without files."""
    specs = model.networks.adapted
    table, ranks, changed = module_table(specs), set[int](), set[Module]()
    for path in files:
        try:
            entries = open_safetensors(path, plain_names=False)
        except (CheckpointError, OSError):
            continue  # ``cards`` has the reason
        for entry in entries:
            split = split_name(entry.name)
            stack = table.get(split.module.replace(".", "_")) if split else None
            if split is not None and stack:
                changed.update(stack.modules)
                ranks |= {entry.shape[0]} if split.role == "down" and entry.shape else set()
    for layers in LAYERS:  # the fewest first
        there = {(part, name) for part, spec in specs.items() for name in slots(spec, Places(1, 1, layers))}
        if changed and all((module.component, module.name) in there for module in changed):
            return ranks, layers
    return ranks, "all"
