"""A batch job generates a folder of images from a file of prompts. It can be stopped and resumed at any time."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from canvax.errors import InputError
from canvax.pipelines.result import SELDOM, progress_bar
from canvax.scale.output import Output, as_written
from canvax.scale.rows import Row, check_names, digest_of, read_rows, settings_of
from canvax.scale.work import Made, image_file

WINDOW = 4096
"""Number of rows that are read together, so that rows of the same size share batches."""

_WRITERS = 2
_MOST_WAITING = 256
"""Number of images that may wait to be written; on a slow disk, generation waits."""

Results = tuple[int, list[Made]]
Generate = Callable[[Iterator[Row], int], Iterable[Results]]
"""Function from rows and their number to their results: see ``Worker.run``."""


@dataclass(frozen=True)
class Plan:
    """The rows that a file requests.

    Attributes:
        path: the file.
        defaults: settings that rows may override.
        carried: columns that are not settings, and are copied to the manifest.
        seed: base of the seeds of rows without a seed.
        total: number of rows.
        digests: digest of each row by id; "" for invalid rows.
        alike: ids that differ from an earlier id only in case.
    """

    path: Path
    defaults: Mapping[str, Any]
    carried: Sequence[str]
    seed: int
    total: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)
    alike: Collection[str] = ()

    @classmethod
    def read(
        cls,
        path: str | Path,
        defaults: Mapping[str, Any],
        carried: Sequence[str] = (),
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> Plan:
        """Read the file once. With ``share`` (k, n) the plan has every nth row from row k on; ``total`` counts all.

        Raises:
            InputError: it cannot be read, has no rows, unknown columns, none of the ``carried`` columns, or repeated
                ids.
        """
        digests: dict[str, str] = {}
        absent, folded, alike = set(carried), set[str](), set[str]()
        for row in read_rows(path):
            absent -= row.values.keys()
            if not digests and row.fault is None:
                check_names(row.values, carried, defaults)
            if row.id in digests:
                raise InputError(f"{path}: the id {row.id!r} is there twice; give each row its own")
            if (same := row.id.casefold()) in folded:
                alike.add(row.id)
            folded.add(same)
            try:
                digests[row.id] = digest_of(settings_of(row, defaults, carried, seed))
            except InputError:
                digests[row.id] = ""
        if not digests:
            raise InputError(f"{path}: holds no rows")
        if absent:
            raise InputError("carry", f"is in no row of {path}", cure="leave it out", value=" ".join(sorted(absent)))
        shared = dict(list(digests.items())[share[0] :: share[1]])
        return cls(Path(path), defaults, carried, seed, len(digests), shared, alike)

    def left(
        self, known: Mapping[str, Mapping[str, Any]], *, retry: bool = False, begun: Mapping[str, Any] | None = None
    ) -> set[str]:
        """Return the ids of the remaining rows; with ``retry`` including those that failed.

        ``begun`` are the defaults of the job's first run, if known.

        Raises:
            InputError: a finished row has changed.
        """
        todo = set()
        for name, digest in self.digests.items():
            line = known.get(name)
            if line is None or (retry and line.get("status") != "done"):
                todo.add(name)
            elif line.get("row", "") != digest:
                changed = "" if begun is None else _changed(self.defaults, begun)
                raise InputError(
                    f"{self.path}: the row {name!r} is done, but with other settings{changed}; put --output into a new "
                    f"folder, or undo what was changed in the {'flags' if changed else 'file or in the flags'}"
                )
        return todo

    def rows(self, todo: set[str]) -> Iterator[Row]:
        """Return the rows of ``todo``, in the order of the file."""
        return (row for row in read_rows(self.path) if row.id in todo)


def _changed(now: Mapping[str, Any], begun: Mapping[str, Any]) -> str:
    """Describe each default that differs from the first run: ", steps=4 and not 8"."""
    now = as_written(now)
    names = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
    return "".join(f", {name}={begun.get(name)!r} and not {now.get(name)!r}" for name in names)


@dataclass
class Tally:
    """Counts of a run.

    Attributes:
        rows: number of rows of the file.
        skipped: rows that earlier runs finished.
        done: images of this run and this process.
        errors: failed rows of this run and this process.
        seconds: time since the start of the first batch.
        first_seconds: time until the first image, including compiling and loading.
        images_per_second: images per second over the whole time.
    """

    rows: int
    skipped: int
    done: int = 0
    errors: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    images_per_second: float = 0.0


def run(
    plan: Plan,
    todo: set[str],
    output: Output,
    generate: Generate,
    *,
    image_format: str = "png",
    quality: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Tally]:
    """Generate the rows ``todo`` of a plan, with a tally after each batch. A stopped run can be resumed.

    Args:
        plan: the rows.
        todo: ids of the rows to generate.
        output: destination of images and manifest.
        generate: generates rows.
        image_format: png, webp or jpg.
        quality: 1..100 of a lossy WebP or JPEG.
        progress: shows a line of progress; None for no progress.

    Raises:
        CanvaxError: the images cannot be written.
    """
    tally, began = Tally(len(plan.digests), len(plan.digests) - len(todo)), time.perf_counter()
    pool, waiting = ThreadPoolExecutor(_WRITERS, "canvax files"), deque[Future[None]]()

    def write(made: Made) -> None:
        line, data = _line(made, plan.carried, image_format, quality)
        output.add(line, data, image_format, hashed=made.row.id in plan.alike)

    shown = Shown(len(todo), progress)
    try:
        for count, batch in generate(plan.rows(todo), len(todo)):
            for made in batch:
                waiting.append(pool.submit(write, made))
            tally.errors += sum(made.image is None for made in batch)
            tally.done += sum(made.image is not None for made in batch)
            while waiting and (len(waiting) > _MOST_WAITING or waiting[0].done()):
                waiting.popleft().result()
            tally.seconds = time.perf_counter() - began
            if tally.done:
                tally.first_seconds = tally.first_seconds or tally.seconds
                tally.images_per_second = tally.done / tally.seconds
            shown(count, tally)
            yield tally
    finally:
        pool.shutdown(wait=True)  # keep the generated images
        shown.close()
    for future in waiting:
        future.result()


def windows(run_rows: Callable[[Iterable[Row]], Iterator[Results]]) -> Generate:
    """Return a function that generates rows a window at a time, so that long files need little memory."""

    def generate(rows: Iterator[Row], _: int) -> Iterator[Results]:
        while window := list(islice(rows, WINDOW)):
            yield from run_rows(window)

    return generate


def _line(made: Made, carried: Sequence[str], kind: str, quality: int | None) -> tuple[dict[str, Any], bytes | None]:
    """Return the manifest's line for a row, and the file of its image."""
    line: dict[str, Any] = {"id": made.row.id, "row": made.digest}
    line |= {name: made.row.values[name] for name in carried if name in made.row.values}
    if made.image is not None:
        data = made.image if isinstance(made.image, bytes) else image_file(made.image, kind, quality)
        return line | {"status": "done", **{name: made.record[name] for name in ("seed", "width", "height")}}, data
    return line | {"status": "error", "error": made.error}, None


class Shown:
    """Progress display: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, say: Callable[[str], None] | None) -> None:
        terminal = say is not None and sys.stderr is not None and sys.stderr.isatty()
        self._bar = progress_bar(total, description="generating", unit="image", shown=terminal)
        self._say = None if terminal else say
        self._done, self._total, self._last = 0, total, time.perf_counter()

    def __call__(self, count: int, tally: Tally) -> None:
        """Show that ``count`` more rows are done."""
        self._done += count
        self._bar.update(count)
        if self._say and (now := time.perf_counter()) - self._last >= SELDOM:
            self._last = now
            left = (self._total - self._done) * tally.seconds / max(self._done, 1)
            self._say(f"{self._done} of {self._total} rows, {tally.images_per_second:.3g} images a second, "
                      f"{tally.errors} errors, {left / 60:.0f} minutes left")  # fmt: skip

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
