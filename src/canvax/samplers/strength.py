"""The steps that image to image runs for a strength, by the rule of diffusers, A1111 or ComfyUI."""

from __future__ import annotations

from canvax.call import StrengthRule
from canvax.errors import InputError


def steps_of_strength(strength: float, steps: int, rule: StrengthRule, most: int) -> tuple[int, int]:
    """Return the number of steps of the whole run, and how many of them to skip at its beginning.

    Args:
        strength: fraction of the run to do, 0..1.
        steps: the requested number of steps.
        rule: "diffusers" does ``int(steps * strength)`` steps; "a1111" one more, and at most 0.999 of the run; "exact",
            which ComfyUI calls denoise, does ``steps`` steps, the last ones of a longer run.
        most: maximum number of steps of the whole run.

    Raises:
        InputError: no step is left, or the run would be too long.
    """
    if rule == "a1111":
        return steps, steps - 1 - int(min(strength, 0.999) * steps)
    if rule == "exact":
        whole = steps if strength > 0.9999 else int(steps / strength)
        if whole > most:
            raise InputError(
                "strength",
                f"with num_inference_steps={steps} and strength_rule='exact' are the last steps of "
                f"{whole}, more than {most}",
                cure="use fewer steps or more strength",
                value=strength,
            )
        return whole, whole - steps
    if (run := min(int(steps * strength), steps)) < 1:
        raise InputError(
            "strength",
            f"of {steps} steps is less than one step",
            cure="use more of either, or {strength_rule='exact'}",
            value=strength,
        )
    return steps, steps - run
