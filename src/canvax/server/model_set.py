"""All models of a server: which one is meant, which programs are ready, and whose weights are on the devices."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from canvax.errors import CanvaxError, InputError
from canvax.parallel.memory import free_bytes
from canvax.server.group import Group
from canvax.server.jobs import ModelCard, Refused
from canvax.server.served import MOST_GROUPS, Announcer, Loaded, Served, Warm
from canvax.server.shelf import AdapterSettings
from canvax.server.work import Checked, GroupKey, Item, sample

log = logging.getLogger("canvax.server")

FREE_PART = 0.7
"""Of the free memory, that weights may take; programs and images need some as well."""

UNKNOWN_SECONDS = 60.0
"""Of an image, where nothing was measured yet."""

Built = Callable[[GroupKey, str | None], None]


class ModelSet:
    """The models by name, the first of which is the default.

    Args:
        names: of the models.
        load: loads one (see ``Served``).
        warm: sizes and batches that are made ready by ``begin``.
        chunks: of prompts, likewise.
        on_demand: whether what is not ready is compiled when somebody asks for it.
        memory: bytes of weights on each device; None for what is free.
        adapters: that requests may name.
        lanes: as in ``Served``.
        say: told what is done.
        announce: told of programs that are compiled.

    Attributes:
        cards: what is told of the models, once they are there.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[..., Loaded],
        *,
        warm: Sequence[Warm],
        chunks: Sequence[int],
        on_demand: bool,
        memory: int | None,
        adapters: AdapterSettings | None = None,
        lanes: int | None = None,
        say: Callable[[str], None],
        announce: Announcer,
    ) -> None:
        self.cards: list[ModelCard] = []
        self._names, self._load, self._warm, self._chunks = names, load, warm, chunks
        self._adapters, self._lanes = adapters, lanes
        self._on_demand, self._memory, self._say, self._announce = on_demand, memory, say, announce
        self._served: dict[str, Served] = {}
        self._ready: dict[GroupKey, Group] = {}
        self._building: set[GroupKey] = set()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Load all, and make their programs ready."""
        for name in self._names:
            self._say(f"reading {name}")
            self._make_room(None)
            served = Served(name, self._load, self._adapters, self._lanes)
            if self._memory is not None and served.bytes > self._memory:
                raise InputError(
                    f"--memory {self._memory} bytes: the weights of {name} take {served.bytes}; allow more"
                )
            if served.shelf:
                self._say(served.shelf.summary())
            for size, batches in served.sizes(self._warm):
                for chunks in self._chunks:
                    more: dict[str, Any] = {"chunks": chunks, "shelf": served.shelf}
                    asked = sample(name, served.model, *size, **more)
                    group = served.build(asked.group, batches, self._announce)
                    if served.model.networks.controls or served.model.networks.ip_adapters:
                        served.warm(sample(name, served.model, *size, **more, shown=True), group)
                    served.time(asked, group)
                    self._ready[asked.group] = group
                    self._say(group.summary())
            self._served[name] = served
        self.cards = [served.card(self._warm, any_size=self._on_demand) for served in self._served.values()]

    def named(self, name: str | None) -> Served:
        """The model of a name, or the default.

        Raises:
            Refused: it is not served.
        """
        served = self._served.get(self._names[0] if name is None else name)
        if served is None:
            known = ", ".join(self._served)
            message = f"model={name!r:.80} is not served here; ask for {known}"
            raise Refused(404, "model_not_found", message, param="model")
        return served

    def group(self, key: GroupKey) -> Group:
        """Of a key that is ready."""
        return self._ready[key]

    def groups(self) -> Mapping[GroupKey, bool]:
        """The keys that are ready, with whether the model's weights have to be loaded."""
        return {key: not self._served[key.model].loaded for key in self._ready}

    def expected(self, checked: Checked, built: Built) -> float:
        """Seconds of one image alone; where its programs are not ready, they are begun.

        Args:
            checked: the image.
            built: called in another thread with the key when they are, and with what went wrong, if something did.

        Raises:
            Refused: they are not, and nothing is compiled on demand.
        """
        key, served = checked.group, self._served[checked.group.model]
        load = 0.0 if served.loaded else served.load_seconds
        if group := self._ready.get(key):
            return load + group.timings.image(checked.rows)
        if not self._on_demand:
            raise served.refusal(key)
        with self._lock:
            if key not in self._building:
                self._building.add(key)
                threading.Thread(target=self._build, args=(served, key, built), daemon=True).start()
        return load + next((group.scaled(key).image(checked.rows) for group in served.groups.values()), UNKNOWN_SECONDS)

    def cost(self, checked: Checked, alone: float) -> float:
        """The engine's seconds for an image where many wait; ``alone``: what it takes by itself."""
        group = self._ready.get(checked.group)
        return alone if group is None else min(alone, group.timings.shared(checked.rows))

    def put_on(self, key: GroupKey) -> Served:
        """The model, with its weights on the devices."""
        served = self._served[key.model]
        if not served.loaded:
            self._make_room(served)
            self._say(f"reading {served.name}")
            served.put_on()
        served.used = time.monotonic()
        return served

    def loaded(self) -> int:
        """How many models have their weights on the devices."""
        return sum(served.loaded for served in self._served.values())

    def clear(self) -> list[Item]:
        """Everything off the devices but weights, as after a fault; what was in flight."""
        return [item for group in list(self._ready.values()) for item in group.clear()]

    def _build(self, served: Served, key: GroupKey, built: Built) -> None:
        """Compile for a request, beside the engine."""
        error = None
        try:
            usual = next(iter(served.groups.values()), None)
            group = served.build(key, (1,), self._announce)
            if usual:
                group.assume(usual)
        except Exception as fault:
            log.exception("compiling failed")
            error = str(fault) if isinstance(fault, CanvaxError) else "its programs cannot be compiled"
        else:
            self._ready[key] = group
            if len(served.groups) > MOST_GROUPS:
                self._drop_one(served, key)
        with self._lock:
            self._building.discard(key)
        built(key, error)

    def _drop_one(self, served: Served, but: GroupKey) -> None:
        """The group that was not used for longest and has no image."""
        idle = [group for key, group in served.groups.items() if key != but and not group.seated]
        if idle:
            oldest = min(idle, key=lambda group: group.used)
            del served.groups[oldest.key], self._ready[oldest.key]

    def _make_room(self, coming: Served | None) -> None:
        """Take models off the devices, the one that was not used for longest first, until another one fits."""
        loaded = sorted((one for one in self._served.values() if one.loaded), key=lambda one: one.used)
        while loaded:
            needed = coming.bytes if coming else max(one.bytes for one in loaded)
            if self._memory is not None:
                fits = sum(one.bytes for one in loaded) + needed <= self._memory
            else:
                free = free_bytes(loaded[0].programs.mesh)
                fits = free is None or needed < FREE_PART * free
            if fits:
                return
            self._say(f"taking {loaded[0].name} off the devices")
            loaded.pop(0).take_off()
