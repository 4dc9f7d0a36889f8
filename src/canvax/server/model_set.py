"""All models of a server: which one is meant, which programs are ready, and whose weights are on the devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from canvax.errors import InputError
from canvax.parallel.memory import free_bytes
from canvax.server.group import Group
from canvax.server.jobs import ModelCard, Refused
from canvax.server.policy import PATIENCE, Groups
from canvax.server.served import Announcer, Loaded, Served, Warm
from canvax.server.shelf import AdapterSettings
from canvax.server.work import Checked, GroupKey, sample

FREE_PART = 0.7
"""Of the free memory, that weights may take; programs and images need some as well."""

UNKNOWN_SECONDS = 60.0
"""Of an image, where nothing was measured yet."""

MOST_GROUPS = 32
"""That each model keeps; where there are more, those that no image needs are forgotten."""

LARGEST = 4
"""Times the pixels of the largest size in ``warm``, that are compiled on demand."""

RETRY = 5.0, 300.0
"""Seconds after which a model that could not be loaded is tried again: at first, doubled each time, and at most."""


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
        self._settled = 0.0

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
            self._served[name] = served
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
                    self.add(group)
                    self._say(group.summary())
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
        return self._served[key.model].groups[key]

    def groups(self) -> Groups:
        """The keys that are ready, with when their weights may displace others; None where they are on the devices."""
        return {
            key: None if served.loaded else self._settled for served in self._served.values() for key in served.groups
        }

    def expected(self, checked: Checked) -> float:
        """Seconds of one image alone.

        Raises:
            Refused: its programs are not ready, and they are not compiled on demand or the size is too large for that;
                or the model could not be loaded lately.
        """
        key, served = checked.group, self._served[checked.group.model]
        if not served.loaded and (wait := served.retry - time.monotonic()) > 0:
            raise Refused(503, "model_unavailable", unavailable(served.name), retry_after=wait)
        load = 0.0 if served.loaded else served.load_seconds
        if group := served.groups.get(key):
            return load + group.timings.image(checked.rows)
        if not self._on_demand:
            raise served.refusal(key)
        most = LARGEST * max(width * height for (width, height), _ in served.sizes(self._warm))
        if key.width * key.height > most:
            message = (
                f"{key.size} has more pixels than the {most} that this server compiles programs for; ask for fewer"
            )
            raise Refused(400, "size_not_ready", message, param="width")
        return load + next((group.scaled(key).image(checked.rows) for group in served.groups.values()), UNKNOWN_SECONDS)

    def cost(self, checked: Checked, alone: float) -> float:
        """The engine's seconds for an image where many wait; ``alone``: what it takes by itself."""
        group = self._served[checked.group.model].groups.get(checked.group)
        return alone if group is None else min(alone, group.timings.shared(checked.rows))

    def put_on(self, key: GroupKey) -> Served:
        """The model, with its weights on the devices.

        Raises:
            Exception: it cannot be loaded.
        """
        served = self._served[key.model]
        if not served.loaded:
            self._load_again(served)
        served.used = time.monotonic()
        return served

    def _load_again(self, served: Served) -> None:
        began = time.monotonic()
        try:
            self._make_room(served)
            self._say(f"reading {served.name}")
            served.put_on()
        except Exception:
            served.take_off()
            first, most = RETRY
            served.retry = time.monotonic() + min(first * 2**served.failed, most)
            served.failed += 1
            raise
        now = time.monotonic()
        served.load_seconds, served.failed = now - began, 0
        self._settled = now + PATIENCE * served.load_seconds  # so that loading takes a quarter of the time at most

    def loaded(self) -> int:
        """How many models have their weights on the devices."""
        return sum(served.loaded for served in self._served.values())

    def clear(self) -> None:
        """Everything off the devices but weights, as after a fault."""
        for served in self._served.values():
            for group in served.groups.values():
                group.clear()

    def build(self, key: GroupKey) -> Group:
        """Compile for requests, in a thread beside the engine's; ``add`` it then.

        Raises:
            Exception: it cannot be compiled.
        """
        served = self._served[key.model]
        usual = next(iter(served.groups.values()), None)
        group = served.build(key, (1,), self._announce)
        if usual:
            group.assume(usual)
        return group

    def add(self, group: Group) -> None:
        """A group whose programs are ready. Under the engine's lock, as ``trim``."""
        served = self._served[group.key.model]
        served.groups = {**served.groups, group.key: group}

    def trim(self, used: Callable[[], Collection[GroupKey]]) -> None:
        """Forget the groups that were not used for longest, where there are too many. In the engine's thread.

        Args:
            used: the groups of images that wait, are in a batch or are to be decoded.
        """
        for served in self._served.values():
            if (excess := len(served.groups) - MOST_GROUPS) > 0:
                busy = used()
                idle = sorted(served.groups.keys() - busy, key=lambda key: served.groups[key].used)
                served.groups = {key: group for key, group in served.groups.items() if key not in idle[:excess]}

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


def unavailable(name: str) -> str:
    """Of a model that cannot be loaded again."""
    return f"the model {name} cannot be loaded at present; the server's log says why"
