"""The exceptions canvax raises on purpose.

Every message names the argument, the value it got and the cure, so that the command line can print it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class CanvaxError(Exception):
    """Root of everything canvax raises on purpose."""


class InputError(CanvaxError, ValueError):
    """An argument cannot be used; raised before anything is downloaded, traced or compiled."""


class CheckpointError(CanvaxError):
    """A checkpoint is missing, damaged, refused for safety, or does not fit its config."""


class HubError(CanvaxError):
    """The model hub could not be reached or does not have what was asked for."""


class OutOfMemoryError(CanvaxError, MemoryError):
    """A device has too little memory for what was asked; the message says what would fit."""


class Cancelled(CanvaxError):
    """A callback asked to stop between two steps."""


def check_count(name: str, value: Any) -> int:
    """``value`` if it is a whole number of at least 1.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r} is not a whole number of at least 1")
    return value


def nearest(name: str, choices: Sequence[str]) -> str:
    """A ``did you mean`` clause for an unknown ``name``, or the full list when nothing is near."""
    lowered = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    if close:
        return f"did you mean {lowered[close[0]]!r}?"
    return "choose one of " + ", ".join(repr(choice) for choice in choices)
