"""Threads that make files of finished images and of previews, beside the engine's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


class Writer:
    """Makes files and tells those who wait for them.

    Args:
        book: records images that are done, and those that failed.
        metrics: likewise.
        output: the folder in which finished images are saved as well; None for none.
    """

    def __init__(self, book: JobStore, metrics: Metrics, output: Path | None = None) -> None:
        self._book, self._metrics, self._output = book, metrics, output
        self._threads = ThreadPoolExecutor(2, "canvax files")

    def close(self) -> None:
        """Wait for what is being written."""
        self._threads.shutdown(wait=True)

    def image(self, served: ServedModel, item: Item, pixels: HostArray, latents: HostArray) -> None:
        """Make the file of an image [H, W, 3] that is decoded, or put a tile into the image that it is of."""
        self._threads.submit(self._image, served, item, pixels, latents)

    def preview(self, served: ServedModel, item: Item, pixels: HostArray | None, latents: HostArray) -> None:
        """Make a preview of an image: decoded pixels [H, W, 3] where there are any, else colours of its latents."""
        number = item.previews.index(item.picture.step)
        if number == 0:
            self._metrics.first_preview(time.time() - item.job.created)
        self._threads.submit(self._preview, served, item, pixels, latents, item.progress().step, number)

    def _preview(
        self,
        served: ServedModel,
        item: Item,
        pixels: HostArray | None,
        latents: HostArray | None,
        step: int,
        number: int,
    ) -> None:
        shown = item.shown
        if shown.status.over or item.job.status.over or served.safety_checker:
            return
        if pixels is None:
            assert latents is not None
            pixels = served.colours.pixels(latents)
        data = preview_file(pixels, (shown.width, shown.height))
        item.job.tell(Previewed(shown.index, step, shown.steps, data, "image/jpeg", number))

    def _image(self, served: ServedModel, item: Item, pixels: HostArray, latents: HostArray) -> None:
        job, shown, began = item.job, item.shown, time.perf_counter()
        try:
            served.colours.learn(latents, pixels)
            if item.request.init_images is not None:
                pixels = item.request.init_images.pasted(pixels[None], [0])[0]
            if item.whole:
                item.picture.step, item.picture.status = item.picture.steps, Status.DONE
                last, number = item.whole.add(item.picture, pixels)
                pixels = item.whole.pixels() if last or number is not None else pixels
                if number is not None:
                    self._preview(served, item, pixels, None, item.progress().step, number)
                if not last:
                    return
            metadata = item.metadata(served.model)
            if served.safety_checker:
                (pixels,), (flag,) = served.safety_checker.blacken(pixels[None])
                metadata = {**metadata, "nsfw": flag}
            kept = metadata if job.request.metadata else {}
            data = image_file(pixels, job.request.format, job.request.quality, kept)
        except Exception as error:
            log.exception("an image cannot be written")
            self._book.fail(job, *reason(error))
            return
        self._metrics.written(time.perf_counter() - began)
        if self._output is not None and not (shown.status.over or job.status.over):
            shown.file = self._save(self._output, pixels, kept, metadata["seed"])
        with self._book.lock:
            if shown.status.over or job.status.over:
                return
            shown.height, shown.width = pixels.shape[:2]
            shown.data, shown.metadata = data, metadata
            shown.step = shown.steps
            self._metrics.image(item.group.size, shown.width * shown.height)
        self._book.finished(job, shown.index)

    def _save(self, folder: Path, pixels: HostArray, metadata: Mapping[str, Any], seed: int) -> str | None:
        """Save an image [H, W, 3] in a folder under the name returned.

        A full disk is no fault of who asked for the image: the log says so, and there is no name.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return save_numbered(folder, to_pil(pixels[None])[0], metadata, seed).name
        except (CanvaxError, OSError) as error:
            log.error("an image is not saved: %s", error)
            return None
