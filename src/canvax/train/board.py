"""Logs loss, learning rate, speed and previews of a run for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from canvax.errors import InputError
from canvax.files import check_writable
from canvax.types import HostArray

_FLUSH = 30  # seconds, TensorBoard's default interval for reloading


def check_board(folder: Path) -> None:
    """Raise InputError, before anything is loaded, if tensorboardX is missing or ``folder`` cannot be written to."""
    check_writable("tensorboard", folder)
    _writer()


class Board:
    """Writes numbers and images of steps to a file in ``folder``, which is created at the first write.

    When a run resumes, TensorBoard discards the old points from the first new step on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Any = None

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._at(step).add_scalar(name, value, step)

    def picture(self, step: int, name: str, pixels: HostArray) -> None:
        """Add an image [H, W, 3] uint8."""
        self._at(step).add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write pending data and close the file."""
        if self._open is not None:
            self._open.close()

    def _at(self, step: int) -> Any:
        if self._open is None:
            self._open = _writer()(str(self._folder), purge_step=step, flush_secs=_FLUSH, filename_suffix=f".{step}")
        return self._open


def _writer() -> Any:
    try:
        return import_module("tensorboardX").SummaryWriter
    except ImportError as error:
        raise InputError(
            f"writing for TensorBoard needs tensorboardX ({error}): pip install '.[tensorboard]'"
        ) from None
