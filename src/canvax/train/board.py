"""What TensorBoard shows of a run: loss, learning rate, pace and previews, in files of its own format."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from canvax.errors import InputError
from canvax.files import check_writable
from canvax.types import HostArray

_FLUSH = 30  # seconds, as often as TensorBoard looks again unless told otherwise


def check_board(folder: Path) -> None:
    """Refuse what ``Board`` cannot write, before anything is loaded.

    Raises:
        InputError: tensorboardX is not installed, or the folder cannot be written to.
    """
    check_writable("tensorboard", folder)
    _writer()


class Board:
    """Writes numbers and pictures of steps into ``folder``; the file is begun with the first of them.

    A run that goes on from its last state hides what was written after that state: TensorBoard drops steps from the
    first new one on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: Any = None

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each curve."""
        for name, value in values.items():
            self._at(step).add_scalar(name, value, step)

    def picture(self, step: int, name: str, pixels: HostArray) -> None:
        """A picture [H, W, 3] uint8."""
        self._at(step).add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """Write what is waiting."""
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
            f"writing for TensorBoard needs tensorboardX ({error}): pip install 'canvax[tensorboard]'"
        ) from None
