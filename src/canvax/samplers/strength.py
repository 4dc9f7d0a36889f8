"""Which steps of a run image to image does: three rules, as PyTorch diffusers, A1111 and ComfyUI have them."""

from __future__ import annotations

from typing import Any

from canvax.call import StrengthRule
from canvax.errors import InputError, check_number


def check_strength(strength: Any) -> float:
    """How much of a run to do, as a float.

    Raises:
        InputError: not a number above 0 and up to 1.
    """
    if not 0 < (number := check_number("strength", strength, "; give one in 0..1")) <= 1:
        raise InputError(f"strength={number:g} is not in 0..1, 0 left out; 0.8 changes much, 0.3 little")
    return number


def steps_of_strength(strength: float, steps: int, rule: StrengthRule, most: int) -> tuple[int, int]:
    """Steps of the whole run, and how many of them to leave out at its beginning.

    Args:
        strength: 0..1, how much of the run to do.
        steps: as asked for.
        rule: "diffusers" does ``int(steps * strength)`` steps; "a1111" one more, and at most 0.999 of the run; "exact",
            which ComfyUI calls denoise, does ``steps`` steps, the last ones of a longer run.
        most: steps of the longest run.

    Raises:
        InputError: no step is left, or the run would be too long.
    """
    if rule == "a1111":
        return steps, steps - 1 - int(min(strength, 0.999) * steps)
    if rule == "exact":
        whole = steps if strength > 0.9999 else int(steps / strength)
        if whole > most:
            raise InputError(
                f"strength={strength:g} with num_inference_steps={steps} and strength_rule='exact' are the last steps "
                f"of {whole}, more than {most}; use fewer steps or more strength"
            )
        return whole, whole - steps
    if (run := min(int(steps * strength), steps)) < 1:
        raise InputError(
            f"strength={strength:g} of num_inference_steps={steps} is less than one step; use more of either, or "
            "strength_rule='exact'"
        )
    return steps, steps - run
