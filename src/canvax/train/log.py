"""Listeners of a run: functions ``(step, values, images)``, for a terminal, a file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from canvax.errors import InputError, to_stderr
from canvax.files import check_writable
from canvax.types import HostArray

Log = Callable[[int, Mapping[str, float], Mapping[str, HostArray]], None]
"""Gets the number of steps done, the means of the logged values since the last call, or images [H, W, 3] uint8."""

VALIDATION = "validation_loss"
"""The name of the loss on held-out images."""

SELDOM = 60.0
"""Seconds between two lines of progress where there is no terminal."""

_FLUSH = 30  # seconds, TensorBoard's default interval for reloading


class Progress:
    """Writes the progress to stderr: on a terminal a line that is overwritten, otherwise a line every minute."""

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.name = name
        self._write = to_stderr if shown else lambda _: None
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = -math.inf

    def say(self, what: str) -> None:
        """Write a separate line."""
        self._write(f"{self.name}: {what}\n")

    def begin(self, steps: int, done: int) -> None:
        """Start counting ``steps``, of which ``done`` are already done."""
        self.steps, self._first, self._began = steps, done, time.monotonic()

    def skip(self, seconds: float) -> None:
        """Leave a while out of the estimate: steps to come do not wait again."""
        self._began += seconds

    def __call__(self, step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        """Report that ``step`` steps are done in total."""
        if VALIDATION in values or images:
            self._write(f"\r{'':<100}\r" * self._terminal)
            news = f"validation loss {values[VALIDATION]:.4f}" if VALIDATION in values else ", ".join(images)
            self.say(f"step {step} of {self.steps}, {news}")
            return
        now = time.monotonic()
        if not values or (now - self._shown < (0.5 if self._terminal else SELDOM) and step < self.steps):
            return
        self._shown = now
        name = "loss" if "loss" in values else next(iter(values))
        speed = f"{pace:.1f} samples/s, " if (pace := values.get("images_per_second")) else ""
        left = duration((self.steps - step) * (now - self._began) / (step - self._first))
        text = f"{self.name}: step {step} of {self.steps}, {name} {values[name]:.4f}, {speed}{left} left"
        self._write(f"\r{text:<100}" if self._terminal else f"{text}\n")

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


class Lines:
    """Writes a line of JSON for each call with values. Lines after the step that a run resumes from are removed."""

    def __init__(self, path: Path, done: int) -> None:
        self._path = path
        if path.is_file():
            kept = [line for line in read_log(path) if line["step"] <= done]
            path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def __call__(self, step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        """Write a line."""
        if not values:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_log(path: Path) -> list[dict[str, float]]:
    """Read the lines of a log, without a last line that is incomplete because the process was killed."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


class TensorBoard:
    """Writes values and images to a file in ``folder``, which is created at the first write.

    When a run resumes, TensorBoard discards the old points from the first new step on.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._open: Any = None

    def __call__(self, step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        """Add a point to each curve, and images."""
        if self._open is None:
            self._open = _writer()(str(self._folder), purge_step=step, flush_secs=_FLUSH, filename_suffix=f".{step}")
        for name, value in values.items():
            self._open.add_scalar(name, value, step)
        for name, pixels in images.items():
            self._open.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write pending data and close the file."""
        if self._open is not None:
            self._open.close()


def check_board(folder: Path) -> None:
    """Raise InputError, before anything is loaded, if tensorboardX is missing or ``folder`` cannot be written to."""
    check_writable("tensorboard", folder)
    _writer()


def _writer() -> Any:
    try:
        return import_module("tensorboardX").SummaryWriter
    except ImportError as error:
        raise InputError(
            f'writing for TensorBoard needs tensorboardX ({error}): pip install ".[tensorboard]"'
        ) from None


class WeightsAndBiases:
    """Writes values and images to a project of Weights & Biases; ``options`` are arguments of ``wandb.init``."""

    def __init__(self, project: str, **options: Any) -> None:
        try:
            self._wandb = import_module("wandb")
        except ImportError as error:
            raise InputError(f"writing for Weights & Biases needs wandb ({error}): pip install wandb") from None
        self._run = self._wandb.init(project=project, **options)

    def __call__(self, step: int, values: Mapping[str, float], images: Mapping[str, HostArray]) -> None:
        """Add a point to each curve, and images."""
        pictures = {name: self._wandb.Image(pixels) for name, pixels in images.items()}
        self._run.log({**values, **pictures}, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
