"""What the terminal shows while images are generated: compiling, then evaluations."""

from __future__ import annotations

import sys
import threading
import time
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

import jax

from canvax.compile.aot import Build
from canvax.errors import to_stderr

SELDOM = 30.0
"""Seconds between two lines about the same work where nobody watches, as in a log."""

_IN_A_LOG = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} so far, {remaining} left"
_LINES = {"loading": "loading the programs:", "compiling": "compiling (once for each size and batch):"}


def summary(pipe: Any) -> str:
    """A pipeline in a line, for ``repr``: its weights and tables would fill pages."""
    model = pipe.model
    height, width = model.native_size
    parts = [repr(str(model.files)), f"{width}x{height}", model.scheduler.spec.label]
    if leaves := jax.tree.leaves(getattr(pipe, "params", None)):
        parts += [f"{sum(leaf.size for leaf in leaves) / 1e6:.1f}M parameters", leaves[0].dtype.name]
    return f"{type(pipe).__name__}({', '.join(parts)})"


def _can_draw_bars() -> bool:
    """Whether somebody watches: a bar in a log is a line for each of its states."""
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this."""
    return "ipykernel" in sys.modules


def progress_bar(total: int, *, description: str, unit: str, shown: bool) -> Any:
    """A bar of tqdm's on stderr; in a notebook its own, if what that needs is there; in a log a line now and then."""
    if in_notebook() and find_spec("ipywidgets"):
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm  # late: importing canvax stays quick
    where: dict[str, Any] = {"file": sys.stderr}
    if not _can_draw_bars():
        where = {"file": _Log(), "delay": SELDOM, "mininterval": SELDOM, "miniters": 1}
        where |= {"bar_format": _IN_A_LOG, "leave": False}
    return tqdm(total=total, desc=description, unit=unit, disable=not shown, **where)


class _Log:
    """A file for tqdm where each state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            to_stderr(f"{line}\n")

    def flush(self) -> None:
        pass


class Display:
    """Progress on stderr, or nothing. Also records what was compiled or loaded.

    Args:
        shown: False for nothing, "programs" for what is compiled or loaded without a bar.
    """

    def __init__(self, *, shown: bool | str) -> None:
        # A process without a terminal may have no stderr at all.
        self.shown = bool(shown) and sys.stderr is not None
        self._with_bar = self.shown and shown is True
        self.builds: list[Build] = []
        self.compile_seconds = 0.0
        """Seconds in which programs were on their way."""
        self.first_step = 0.0
        self._lock = threading.Lock()
        self._since = 0.0
        self._running: set[int] = set()
        self._line = ""

    def announce(self, build: Build) -> None:
        """Say what is being compiled or loaded; without this the first image looks like a hang.

        Programs come from several threads, each busy with one at a time, and share a line. It says that programs are
        compiled as soon as one is; those of the other kind say so themselves.
        """
        with self._lock:
            kind = "loading" if build.cached else "compiling"
            if build.seconds is None:
                if not self._running:
                    self._since = time.perf_counter()
                self._running.add(threading.get_ident())
                if not self._line or (self._line, kind) == ("loading", "compiling"):
                    self._write(("\n" if self._line else "") + _LINES[kind])
                    self._line = kind
                return
            self.builds.append(build)
            self._running.discard(threading.get_ident())
            also = "" if kind == self._line else f" ({'loaded' if build.cached else 'compiled'})"
            self._write(f" {build.program} {build.seconds:.1f} s{also}" + ("," if self._running else "\n"))
            if not self._running:
                self.compile_seconds += time.perf_counter() - self._since
                self._line = ""

    def stepped(self) -> None:
        """Keep the time of the first step."""
        self.first_step = self.first_step or time.perf_counter()

    def bar(self, total: int) -> Bar:
        """A progress bar over ``total`` evaluations."""
        return Bar(total, shown=self._with_bar)

    def _write(self, text: str) -> None:
        if self.shown:
            to_stderr(text)


class Bar:
    """Progress over the steps. Decides how many steps one call of the program may do unseen."""

    INTERVAL, UNSEEN = 0.2, 1.0
    """Seconds between two updates: seldom enough to cost nothing, often enough to look alive. Where nothing is shown it
    is only Ctrl-C that waits for the end of a call."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = progress_bar(total, description="denoising", unit="evaluation", shown=shown)
        self._interval = self.INTERVAL if shown and _can_draw_bars() else self.UNSEEN
        self._steps_per_second: float | None = None
        self._began = time.perf_counter()

    def chunk(self, left: int) -> int:
        """Steps to do before the next update."""
        if self._steps_per_second is None:
            return 1
        return max(1, min(left, int(self._steps_per_second * self._interval)))

    def advance(self, steps: int) -> None:
        """``steps`` more are done."""
        self._bar.update(steps)
        now = time.perf_counter()
        self._steps_per_second = steps / max(now - self._began, 1e-6)
        self._began = now

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = ""
        self._began = 0.0

    def __call__(self, stage: str) -> Self:
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._stage] = time.perf_counter() - self._began
