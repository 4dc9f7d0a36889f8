"""Threads that make files of finished images and of previews."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from canvax.compile.key import usable_cores
from canvax.errors import CanvaxError
from canvax.images.convert import to_pil
from canvax.images.metadata import save_numbered
from canvax.server.files import image_file, preview_file
from canvax.server.job_store import JobStore, reason
from canvax.server.jobs import Previewed, Status
from canvax.server.metrics import Metrics
from canvax.server.models import ServedModel
from canvax.server.work import Item
from canvax.types import HostArray

log = logging.getLogger("canvax.server")

LEAST_THREADS, MOST_THREADS = 2, 8
"""Threads that make files: as many as there are cores, within these limits."""

HELD = 2
"""Images for each thread that the writer holds at most: one becomes a file, the next one waits."""

_SMOOTH = 0.2
"""Weight of a new measurement among the old ones."""


class Threads:
    """Threads for calls, begun at the first one. A process ends without those that hang.

    Args:
        count: of the threads.
        name: of each.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call as soon as a thread is free. From one thread alone."""
        if not self._threads:
            for _ in range(self._count):
                self._threads.append(thread := threading.Thread(target=self._run, name=self._name, daemon=True))
                thread.start()
        self._calls.put(partial(call, *arguments))

    def close(self, seconds: float) -> None:
        """End after the calls that were submitted; wait for that for at most so many seconds."""
        for _ in self._threads:
            self._calls.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("a file cannot be made")
            del call  # which holds its pixels


class Writer:
    """Makes files and tells the jobs.

    Args:
        book: records images that are done, and jobs that failed.
        metrics: the server's metrics.
        output: the folder in which finished images are saved as well; None for none.
        freed: called whenever there is room for another image.

    Attributes:
        images: number of images whose files are not made yet.
    """

    def __init__(
        self, book: JobStore, metrics: Metrics, output: Path | None = None, freed: Callable[[], None] = lambda: None
    ) -> None:
        self._book, self._metrics, self._output, self._freed = book, metrics, output, freed
        self._count = min(max(LEAST_THREADS, usable_cores()), MOST_THREADS)
        self._threads = Threads(self._count, "canvax files")
        self._lock = threading.Lock()
        self.images = self._previews = 0
        self._each, self._calls, self._began = 0.0, 0, dict[int, float]()

    def close(self, seconds: float) -> None:
        """Wait for what is being written, for at most so many seconds."""
        self._threads.close(seconds)

    @property
    def room(self) -> int:
        """Number of further images that it takes."""
        return max(0, HELD * self._count - self.images - self._previews)

    @property
    def pace(self) -> float:
        """Seconds after which it has done another image where many wait, as measured."""
        return self._each / self._count

    @property
    def oldest(self) -> float:
        """Seconds for which the file that takes longest is being made at present; 0 where none is."""
        with self._lock:
            return time.monotonic() - min(self._began.values()) if self._began else 0.0

    def image(self, served: ServedModel, item: Item, pixels: HostArray, latents: HostArray) -> None:
        """Make the file of an image [H, W, C] that is decoded, or put a tile into the image that it is of."""
        with self._lock:
            self.images += 1
        self._threads.submit(self._called, self._image, served, item, pixels, latents)

    def _called(self, make: Callable[..., None], *arguments: Any) -> None:
        """Make a file. Its memory is free when this returns, and so is its place."""
        began = time.monotonic()
        with self._lock:
            self._calls += 1
            self._began[call := self._calls] = began
        try:
            make(*arguments)
        finally:
            with self._lock:
                del self._began[call]
                if make == self._image:
                    self.images -= 1
                    took = time.monotonic() - began
                    self._each += (_SMOOTH if self._each else 1.0) * (took - self._each)
                else:
                    self._previews -= 1
            self._freed()

    def preview(self, served: ServedModel, item: Item, pixels: HostArray | None, latents: HostArray) -> None:
        """Make a preview of an image: decoded pixels [H, W, C] where there are any, else colours of its latents.

        Where there is no room there is no preview.
        """
        if not self.room:
            return
        number = item.previews.index(item.picture.step)
        if number == 0:
            self._metrics.first_preview.observe(time.time() - item.job.created)
        with self._lock:
            self._previews += 1
        step = item.progress().step
        self._threads.submit(self._called, self._preview, served, item, pixels, latents, step, number)

    def _preview(
        self,
        served: ServedModel,
        item: Item,
        pixels: HostArray | None,
        latents: HostArray | None,
        step: int,
        number: int,
    ) -> None:
        shown = item.picture
        if shown.status.over or item.job.over or served.safety_checker:
            return
        if pixels is None:
            assert latents is not None
            pixels = served.colours.pixels(latents)
        data = preview_file(pixels, (shown.width, shown.height))
        item.job.tell(Previewed(shown.index, step, shown.steps, data, "image/jpeg", number))

    def _image(self, served: ServedModel, item: Item, pixels: HostArray, latents: HostArray) -> None:
        job, shown, began = item.job, item.picture, time.perf_counter()
        try:
            served.colours.learn(latents, pixels)
            if item.request.init_images is not None:
                pixels = item.request.init_images.pasted(pixels[None], [0])[0]
            if item.whole:
                item.status = Status.DONE
                last, number = item.whole.add(item.tile, pixels)
                number = number if job.looked_at else None
                pixels = item.whole.tiles.pixels() if last or number is not None else pixels
                if number is not None:
                    self._preview(served, item, pixels, None, item.progress().step, number)
                if not last:
                    return
            metadata = item.metadata(served.of(item.group.variant).model)
            if served.sha256:
                metadata = {**metadata, "model_sha256": served.sha256}
            if served.safety_checker:
                (pixels,), (flag,) = served.safety_checker.blacken(pixels[None])
                metadata = {**metadata, "nsfw": flag}
            kept = metadata if job.request.metadata else {}
            data = image_file(pixels, job.request.format, job.request.quality, kept)
        except Exception as error:
            log.exception("an image cannot be written")
            self._book.fail(job, *reason(error))
            return
        self._metrics.written.observe(time.perf_counter() - began)
        if self._output is not None and not (shown.status.over or job.over):
            shown.file, shown.not_kept = self._save(self._output, pixels, kept, metadata["seed"])
        with self._book.lock:
            if shown.status.over or job.over:
                return
            shown.height, shown.width = pixels.shape[:2]
            shown.data, shown.metadata = data, metadata
            shown.step = shown.steps
            self._metrics.image(item.group.size, shown.width * shown.height)
        self._book.finished(job, shown.index)

    def _save(
        self, folder: Path, pixels: HostArray, metadata: Mapping[str, Any], seed: int
    ) -> tuple[str | None, str | None]:
        """Save an image [H, W, C] in a folder. Returns the file's name and None, or None and why there is none.

        A full disk is no fault of who asked for the image: the job is done, and says that this file is missing.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return save_numbered(folder, to_pil(pixels[None])[0], metadata, seed).name, None
        except (CanvaxError, OSError) as error:
            log.error("an image is not saved: %s", error)
            self._metrics.not_kept.inc()
            fault = error if isinstance(error, OSError) else error.__context__
            why = (fault.strerror if isinstance(fault, OSError) else None) or "the server's log says why"
            return None, f"the server could not save it: {why}"  # folders are the operator's business
