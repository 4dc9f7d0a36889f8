"""Classifier-free guidance (Ho & Salimans 2022), its rescaling, and other kinds of it.

A kind of guidance says which samples of an image the denoiser is evaluated for, and makes one denoised image of the
outputs. Its numbers are columns of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from canvax.call import GuidanceMethod as Method
from canvax.call import takes_row
from canvax.models.denoiser import NEGATIVE, PERTURBED, PROMPT
from canvax.types import Array

__all__ = ["PLAIN", "SETTINGS", "Guidance", "Method", "Rule", "compose", "guide", "projected", "zero_star"]

Rule = Callable[..., Array]
"""A method of one's own: (denoised image for the negative prompt, denoised image for the prompt, guidance scale) to the
guided one. Images are [B, h, w, C] float32, the scale is [B]. Rows at scale 1 are the prompt's, whatever it returns.
With a parameter ``row`` it also gets ``OF_ROW``."""

OF_ROW = ("timestep", "progress")
"""What a rule may see of a row, each [B]: the timestep, and the part of the run that is done, 0..1."""

SETTINGS: dict[str, dict[str, tuple[float, float, float]]] = {
    "cfg": {},
    "cfg_zero": {"zero_steps": (0.0, 0.0, 1000.0)},
    "apg": {"eta": (0.0, -10.0, 10.0), "norm": (2.5, 0.0, 1e6)},
}
"""The numbers of each method, which are data: by name the usual value and its limits."""


@dataclass(frozen=True)
class Guidance:
    """A kind of guidance, which decides a program.

    Attributes:
        method: how two outputs become one.
        perturbs: perturbed-attention guidance (Ahn et al. 2024): the first prompt is evaluated once more, perturbed,
            and the output moves away from that.
        composes: the prompts of an image are added up, each with its weight (Liu et al. 2022).
    """

    method: Method | Rule = "cfg"
    perturbs: bool = False
    composes: bool = False

    def columns(self, prompts: int) -> dict[str, Any]:
        """Columns of the row that ``denoised`` reads, for as many ``prompts`` as ``InFlight`` has; without [B].

        method   numbers of the method, in the order of ``SETTINGS``
        pag      scale of perturbed-attention guidance, and how it falls with the timestep
        weights  of the prompts that are added up
        """
        numbers = len(SETTINGS[self.method]) if isinstance(self.method, str) and prompts > 1 else 0
        sizes = {"method": numbers, "pag": 2 if self.perturbs else 0}
        sizes["weights"] = prompts - 1 if self.composes else 0
        return {name: jax.ShapeDtypeStruct((size,), jnp.float32) for name, size in sizes.items() if size}

    def samples(self, prompts: Sequence[Mapping[str, Any]], batch: int) -> list[dict[str, Any]]:
        """Conditions of each sample of the images, of the prompts as ``InFlight`` has them."""
        guided = len(prompts) > 1
        samples = [(PROMPT, prompt) for prompt in prompts]
        if guided:
            samples[0] = (NEGATIVE, prompts[0])
        if self.perturbs:
            samples.append((PERTURBED, prompts[int(guided)]))
        return [{**sample, "role": jnp.full(batch, role, jnp.int32)} for role, sample in samples]

    def denoised(self, x: Array, outputs: Array, row: Mapping[str, Array]) -> Array:
        """D of the outputs for the samples of each image [B, n, h, w, C]."""

        def at(output: Array) -> Array:
            return _each(row["p"]) * x + _each(row["q"]) * output

        further: Array | float = 0.0
        if self.perturbs:
            outputs, perturbed = outputs[:, :-1], outputs[:, -1]
            scale = jnp.maximum(row["pag"][:, 0] - row["pag"][:, 1] * (1000 - row["timestep"]), 0)
            further = _each(scale) * (outputs[:, int(outputs.shape[1] > 1)] - perturbed)
        if outputs.shape[1] == 1:
            return at(outputs[:, 0] + further)
        negative, conditional = outputs[:, 0], outputs[:, 1]
        if self.composes:
            conditional = compose(negative, outputs[:, 1:], row["weights"])
        guided = self._guided(at, negative, conditional, row, further)
        # As rows of an image that is alone are run, whatever the method makes of a scale that asks for nothing.
        return jnp.where(_each(row["guidance"]) == 1, at(conditional + further), guided)

    def _guided(
        self,
        at: Callable[[Array], Array],
        negative: Array,
        conditional: Array,
        row: Mapping[str, Array],
        further: Array | float,
    ) -> Array:
        """D of two outputs; ``at`` makes D of an output."""
        scale = row["guidance"]
        if self.method == "cfg":
            return at(guide(negative, conditional, scale, row["rescale"], further))
        if not isinstance(self.method, str):
            seen = {"row": {name: row[name] for name in OF_ROW}} if takes_row(self.method) else {}
            return self.method(at(negative), at(conditional), scale, **seen) + _each(row["q"]) * further
        if self.method == "cfg_zero":
            return at(zero_star(negative, conditional, scale, row["step"], row["method"][:, 0]) + further)
        eta, norm = row["method"][:, 0], row["method"][:, 1]
        return projected(at(negative), at(conditional), scale, eta, norm) + _each(row["q"]) * further


PLAIN = Guidance()
"""Classifier-free guidance; without a negative prompt none."""


def guide(
    unconditional: Array, conditional: Array, scale: Array, rescale: Array, further: Array | float = 0.0
) -> Array:
    """Move the network's output away from the unconditional one.

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: output for the prompt [B, h, w, C], float32.
        scale: guidance scale of each image [B].
        rescale: 0..1 for each image [B]: how far the result's standard deviation is brought back to that of the
            conditional output (Lin et al. 2024, section 3.4, eq. 15 and 16).
        further: what other kinds of guidance add.

    Returns:
        [B, h, w, C] float32.
    """
    scale, rescale = scale[:, None, None, None], rescale[:, None, None, None]
    guided = unconditional + scale * (conditional - unconditional) + further
    ratio = _std(conditional) / jnp.maximum(_std(guided), 1e-12)
    return guided * (1.0 + rescale * (ratio - 1.0))


def compose(unconditional: Array, conditional: Array, weights: Array) -> Array:
    """One output in place of those of several prompts: u + sum_k w_k (c_k - u) (Liu et al. 2022, eq. 11).

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: outputs for the prompts [B, K, h, w, C], float32.
        weights: of the prompts [B, K].

    Returns:
        [B, h, w, C] float32.
    """
    away = conditional - unconditional[:, None]
    return unconditional + (weights[:, :, None, None, None] * away).sum(axis=1)


def zero_star(unconditional: Array, conditional: Array, scale: Array, step: Array, zero_steps: Array) -> Array:
    """CFG-Zero* (Fan et al. 2025, section 4): the unconditional output times <c, u> / |u|^2, 0 in the first steps."""
    share = _dot(conditional, unconditional) / jnp.maximum(_dot(unconditional, unconditional), 1e-12)
    guided = share * unconditional + _each(scale) * (conditional - share * unconditional)
    return jnp.where(_each(step) < _each(zero_steps), 0.0, guided)


def projected(unconditional: Array, conditional: Array, scale: Array, eta: Array, norm: Array) -> Array:
    """Adaptive projected guidance (Sadat et al. 2024, section 4), without momentum, on denoised images [B, h, w, C].

    The difference is cut to length ``norm`` (0: never), and of it what is parallel to the conditional image, which
    saturates, has the share ``eta``.
    """
    away = conditional - unconditional
    length = jnp.sqrt(_dot(away, away))
    away = away * jnp.where(_each(norm) > 0, jnp.minimum(1.0, _each(norm) / jnp.maximum(length, 1e-12)), 1.0)
    along = _dot(away, conditional) / jnp.maximum(_dot(conditional, conditional), 1e-12) * conditional
    return conditional + (_each(scale) - 1) * (away - along + _each(eta) * along)


def _each(numbers: Array) -> Array:
    return numbers[:, None, None, None]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum((1, 2, 3), keepdims=True)


def _std(x: Array) -> Array:
    return x.std((1, 2, 3), keepdims=True)
