"""The progress line of training."""

from __future__ import annotations

import sys
import time

from canvax.errors import to_stderr


class Progress:
    """Writes the progress to stderr: on a terminal a line that is overwritten, otherwise a line every minute."""

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.name = name
        self._write = to_stderr if shown else lambda _: None
        self.steps, self.batch = 0, 0
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = -60.0

    def begin(self, steps: int, batch: int, done: int) -> None:
        """Start counting ``steps`` of ``batch`` samples, of which ``done`` are already done."""
        self.steps, self.batch = steps, batch
        self._first, self._began = done, time.monotonic()

    def advance(self, done: int, loss: float) -> None:
        """Report that ``done`` steps are done in total."""
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else 60.0) and done < self.steps:
            return
        self._shown = now
        pace = (done - self._first) / max(now - self._began, 1e-9)
        speed = pace * self.batch
        left = duration(max(self.steps - done, 0) / max(pace, 1e-9))
        text = f"{self.name}: step {done} of {self.steps}, loss {loss:.4f}, {speed:.1f} samples/s, {left} left"
        self._write(f"\r{text:<100}" if self._terminal else f"{text}\n")

    def say(self, what: str) -> None:
        """Write a separate line, before the first step."""
        self._write(f"{self.name}: {what}\n")

    def close(self) -> None:
        """End the line."""
        if self._terminal:
            self._write("\n")


def duration(seconds: float) -> str:
    """Format a duration: "2 h 05 min", "3 min 10 s"."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
