"""Classifier-free guidance (Ho & Salimans 2022), its rescaling, and other rules of guidance.

A rule decides the samples of an image for which the denoiser is evaluated, and combines the outputs to one denoised
image. Its numbers are columns of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from canvax.call import GuidanceFunction, takes_row
from canvax.errors import InputError, shown
from canvax.models.denoiser import NEGATIVE, PERTURBED, PROMPT
from canvax.types import Array, HostArray

__all__ = [
    "KINDS",
    "NEGATIVE",
    "OFF",
    "PERTURBED",
    "PLAIN",
    "PROMPT",
    "Evaluated",
    "Guidance",
    "Number",
    "columns_of",
    "compose",
    "conditions_of",
    "filled_columns",
    "guide",
    "guided",
    "off",
    "per_image",
    "projected",
    "reads_negative",
    "rule_of",
    "zero_star",
]

OFF = 1.0
"""The guidance scale of rows without guidance: their output is that of the prompt."""

OF_ROW = ("timestep", "progress")
"""Columns of a row for functions, each [B]: the timestep, and the part of the run that is done, 0..1."""


class Number(NamedTuple):
    """A number of a rule, or several, which ``guidance_settings`` may change.

    Attributes:
        usual: the value by default.
        low: the smallest value.
        high: the largest value.
    """

    usual: float | tuple[float, ...]
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Evaluated:
    """The denoiser's outputs for the samples of each image in a row.

    Attributes:
        x: noisy latents [B, h, w, C] float32.
        outputs: outputs by role, in the order of the rule's samples, [B, h, w, C] float32 each.
        row: columns of the row, [B, ...] each: among them ``guidance``, the scale, and ``OF_ROW``.
        memory: what the rule kept of the rows before, [B, n, h, w, C] float32, zeros at first; n is its ``memory``.
        further: addition of outer rules to the guided output; for a user's rule, they add it themselves.
    """

    x: Array
    outputs: Mapping[int, Sequence[Array]]
    row: Mapping[str, Array]
    memory: Array
    further: Array | float = 0.0

    def output(self, role: int) -> Array:
        """Return the network's output for a role [B, h, w, C].

        Raises:
            InputError: the samples of the rule have no such role.
        """
        if role not in self.outputs:
            known = ", ".join(map(str, self.outputs))
            raise InputError("guidance_method", f"reads the role {role}, and its samples have {known}")
        return self.outputs[role][0]

    def image(self, role: int) -> Array:
        """Return the denoised image for a role [B, h, w, C]."""
        return self.denoised(self.output(role))

    def denoised(self, output: Array) -> Array:
        """Return the denoised image D of an output."""
        return per_image(self.row["p"]) * self.x + per_image(self.row["q"]) * output

    def moved(self, image: Array) -> Array:
        """Return a denoised image with ``further`` in its output."""
        return image + per_image(self.row["q"]) * self.further

    def column(self, name: str) -> Array:
        """Return a number of the rule or of the row, [B, ...].

        Raises:
            InputError: neither has it.
        """
        own = _COLUMN.format(name)
        if not {own, name} & self.row.keys():
            raise InputError("guidance_method", f"reads the number {name!r}, which is not among its columns")
        return self.row[own if own in self.row else name]


Guided = Array | tuple[Array, Array]
"""A denoised image [B, h, w, C], and of rules with a memory the new memory [B, n, h, w, C]."""


class Guidance(Protocol):
    """A rule of guidance. It is hashable and a part of the key of programs: its numbers are columns, not fields.

    A rule may have ``memory``: the number n of arrays of latent size that it keeps of each image from row to row.
    """

    @property
    def columns(self) -> Mapping[str, Number]:
        """The numbers of the rule by name. Changing them does not recompile."""
        ...

    @property
    def samples(self) -> tuple[int, ...]:
        """The role of each sample that the denoiser is evaluated for.

        NEGATIVE reads the negative prompt, each PROMPT the next of the prompts that are added up, any other role the
        first prompt. ``Facts.roles`` lists the other roles that a denoiser knows.
        """
        ...

    def denoised(self, seen: Evaluated) -> Guided:
        """Return one denoised image of the outputs for the samples [B, h, w, C]. It is traced into the program.

        With ``memory`` return a pair: the image, and the new memory [B, n, h, w, C].
        """
        ...


NO_NUMBERS: Mapping[str, Number] = {}


@dataclass(frozen=True)
class Alone:
    """No guidance: the image is the prompt's.

    Attributes:
        memory: of the rule in other rows of the run, which stays as it is.
    """

    memory: int = 0
    columns = NO_NUMBERS
    samples = (PROMPT,)

    def denoised(self, seen: Evaluated) -> Guided:
        image = seen.denoised(seen.output(PROMPT) + seen.further)
        return (image, seen.memory) if self.memory else image


@dataclass(frozen=True)
class CFG:
    """Classifier-free guidance, rescaled."""

    columns = NO_NUMBERS
    samples = (NEGATIVE, PROMPT)

    def denoised(self, seen: Evaluated) -> Array:
        scale, rescale = seen.column("guidance"), seen.column("rescale")
        return seen.denoised(guide(seen.output(NEGATIVE), seen.output(PROMPT), scale, rescale, seen.further))


@dataclass(frozen=True)
class CFGNorm:
    """``guide``, with the length of each token's vector, or each latent's, that of the prompt's output."""

    columns = NO_NUMBERS
    samples = (NEGATIVE, PROMPT)

    def denoised(self, seen: Evaluated) -> Array:
        conditional, scale = seen.output(PROMPT), seen.column("guidance")
        output = guide(seen.output(NEGATIVE), conditional, scale, jnp.zeros_like(scale), seen.further)
        lengths = [jnp.linalg.norm(each, axis=-1, keepdims=True) for each in (conditional, output)]
        return seen.denoised(output * (lengths[0] / jnp.maximum(lengths[1], 1e-12)))


@dataclass(frozen=True)
class CFGZero:
    """``zero_star``."""

    columns = MappingProxyType({"zero_steps": Number(0.0, 0.0, 1000.0)})
    samples = (NEGATIVE, PROMPT)

    def denoised(self, seen: Evaluated) -> Array:
        numbers = (seen.column(name) for name in ("guidance", "step", "zero_steps"))
        return seen.denoised(zero_star(seen.output(NEGATIVE), seen.output(PROMPT), *numbers) + seen.further)


@dataclass(frozen=True)
class APG:
    """``projected``, of the sum of the differences so far: d_i + momentum d_(i-1) + momentum^2 d_(i-2) + ..."""

    columns = MappingProxyType(
        {"eta": Number(0.0, -10.0, 10.0), "norm": Number(2.5, 0.0, 1e6), "momentum": Number(0.0, -1.0, 1.0)}
    )
    samples = (NEGATIVE, PROMPT)
    memory = 1

    def denoised(self, seen: Evaluated) -> Guided:
        conditional = seen.image(PROMPT)
        away = conditional - seen.image(NEGATIVE) + per_image(seen.column("momentum")) * seen.memory[:, 0]
        numbers = (seen.column(name) for name in ("guidance", "eta", "norm"))
        return seen.moved(projected(away, conditional, *numbers)), away[:, None]


@dataclass(frozen=True)
class OfFunction:
    """A function of the user's: (denoised image for the negative prompt, for the prompt, scale) to the guided one.

    Images are [B, h, w, C] float32, the scale is [B]. With a parameter ``row`` it also gets ``OF_ROW``.
    """

    function: Callable[..., Array]
    columns = NO_NUMBERS
    samples = (NEGATIVE, PROMPT)

    def denoised(self, seen: Evaluated) -> Array:
        row = {"row": {name: seen.row[name] for name in OF_ROW}} if takes_row(self.function) else {}
        images = seen.image(NEGATIVE), seen.image(PROMPT)
        return seen.moved(_checked(self.function(*images, seen.column("guidance"), **row), seen, self.function))


@dataclass(frozen=True)
class UserRule:
    """A checked rule of the user.

    Attributes:
        rule: the user's rule.

    Raises:
        InputError: it is not a rule.
    """

    rule: Guidance

    def __post_init__(self) -> None:
        columns: Any = getattr(self.rule, "columns", None)
        samples: Any = getattr(self.rule, "samples", None)
        if not isinstance(columns, Mapping) or not all(isinstance(number, Number) for number in columns.values()):
            raise InputError(
                "guidance_method", "has no columns by name", cure="write {'strength': Number(1.0)}", value=self.rule
            )
        whole = isinstance(samples, tuple) and all(isinstance(role, int) and role >= 0 for role in samples)
        if not whole:
            problem = f"has samples={samples!r}, which is not a tuple of roles, whole numbers from 0 on"
            raise InputError("guidance_method", problem, cure="write (NEGATIVE, PROMPT)", value=self.rule)
        if isinstance(kept := memory_of(self.rule), bool) or not isinstance(kept, int) or kept < 0:
            problem = f"has memory={shown(kept)}, which is not a number of arrays"
            raise InputError("guidance_method", problem, cure="write memory = 1", value=self.rule)
        if PROMPT not in samples or len({*samples}) < len(samples):
            problem = f"has samples={samples!r}, which are not different roles, PROMPT among them"
            raise InputError("guidance_method", problem, cure="write (NEGATIVE, PROMPT)", value=self.rule)

    @property
    def columns(self) -> Mapping[str, Number]:
        return self.rule.columns

    @property
    def samples(self) -> tuple[int, ...]:
        return self.rule.samples

    @property
    def memory(self) -> int:
        return memory_of(self.rule)

    def denoised(self, seen: Evaluated) -> Guided:
        got: Any = self.rule.denoised(replace(seen, further=0.0))
        if not self.memory:
            return seen.moved(_checked(got, seen, self.rule))
        if not isinstance(got, tuple) or len(got) != 2 or np.shape(got[1]) != seen.memory.shape:
            problem = f"returned {shown(got)}, not an image and its memory {list(seen.memory.shape)}"
            raise InputError("guidance_method", problem, cure="return image, memory", value=self.rule)
        return seen.moved(_checked(got[0], seen, self.rule)), jnp.asarray(got[1], jnp.float32)


def _checked(image: Any, seen: Evaluated, rule: Any) -> Array:
    """Return the result of the user's code.

    Raises:
        InputError: it is not one denoised image for each image of the batch.
    """
    if np.shape(image) != seen.x.shape:
        problem = f"returned {shown(image)} of shape {list(np.shape(image))}, not an image {list(seen.x.shape)}"
        raise InputError("guidance_method", problem, cure="return [B, h, w, C]", value=rule)
    return jnp.asarray(image, jnp.float32)


@dataclass(frozen=True)
class Composed:
    """A rule for the sum of several prompts of an image, each with its weight (Liu et al. 2022).

    Attributes:
        base: the rule.
        parts: number of prompts.
    """

    base: Guidance
    parts: int

    @property
    def columns(self) -> Mapping[str, Number]:
        return {**self.base.columns, "weights": Number((1.0,) * self.parts)}

    @property
    def samples(self) -> tuple[int, ...]:
        others = (role for role in self.base.samples if role not in (NEGATIVE, PROMPT))
        return NEGATIVE, *(PROMPT,) * self.parts, *others

    @property
    def memory(self) -> int:
        return memory_of(self.base)

    def denoised(self, seen: Evaluated) -> Guided:
        prompts = jnp.stack(seen.outputs[PROMPT], axis=1)
        total = compose(seen.output(NEGATIVE), prompts, seen.column("weights"))
        return self.base.denoised(replace(seen, outputs={**seen.outputs, PROMPT: (total,)}))


@dataclass(frozen=True)
class Perturbed:
    """A rule that also moves away from the first prompt's output with perturbed attention (Ahn et al. 2024).

    Attributes:
        base: the rule.
    """

    base: Guidance

    @property
    def columns(self) -> Mapping[str, Number]:
        return {**self.base.columns, "pag_scale": Number(0.0), "pag_adaptive_scale": Number(0.0)}

    @property
    def samples(self) -> tuple[int, ...]:
        return *(role for role in self.base.samples if role != PERTURBED), PERTURBED

    @property
    def memory(self) -> int:
        return memory_of(self.base)

    def denoised(self, seen: Evaluated) -> Guided:
        falls = seen.column("pag_adaptive_scale") * (1000 - seen.column("timestep"))
        scale = jnp.maximum(seen.column("pag_scale") - falls, 0)
        further = per_image(scale) * (seen.output(PROMPT) - seen.output(PERTURBED))
        return self.base.denoised(replace(seen, further=further))


PLAIN = CFG()

KINDS: Mapping[str, Guidance] = {
    "cfg": PLAIN, "cfg_pp": PLAIN, "cfg_norm": CFGNorm(), "cfg_zero": CFGZero(), "apg": APG()
}  # fmt: skip
"""The rules that have names. CFG++ is ordinary guidance at scales that the table has for it
(``SamplerTable.guidance_of_lambda``), so both are one program."""

_COLUMN = "guidance {}"
"""Names of the columns of a rule among those of the row, of whatever name they are."""


def rule_of(method: GuidanceFunction | str | Guidance, *, perturbs: bool = False, parts: int = 0) -> Guidance:
    """Return the rule of guidance of a call; a rule or function of a user is checked.

    Args:
        method: the name of a rule, a rule, or a function that combines the denoised samples.
        perturbs: for perturbed-attention guidance.
        parts: prompts of each image that are added up; 0 for none.

    Raises:
        InputError: the method is not a rule.
    """
    chosen: Any = method
    rule: Guidance
    if isinstance(chosen, str):
        rule = KINDS[chosen]
    elif chosen in KINDS.values() or isinstance(chosen, OfFunction | UserRule | Composed | Perturbed):
        rule = chosen  # it was checked
    elif hasattr(chosen, "denoised"):
        rule = UserRule(chosen)
    else:
        rule = OfFunction(chosen)
    rule = Composed(rule, parts) if parts else rule
    return Perturbed(rule) if perturbs else rule


def off(rule: Guidance) -> Guidance:
    """Return the rule of rows at scale ``OFF``, which only needs samples of ``rule``.

    It reads the prompt alone, with the parts that do not depend on the scale: composed prompts, perturbed attention.
    """
    return replace(rule, base=off(rule.base)) if isinstance(rule, Composed | Perturbed) else Alone(memory_of(rule))


def memory_of(rule: Guidance) -> int:
    """Return the number of arrays of latent size that a rule keeps of each image."""
    return getattr(rule, "memory", 0)


def reads_negative(rule: Guidance) -> bool:
    """Return whether rows at scale ``OFF`` need the program with guidance, too."""
    return NEGATIVE in off(rule).samples


def columns_of(rule: Guidance) -> dict[str, Any]:
    """Return the shapes of the columns of the row that a rule reads, without [B]."""
    return {
        _COLUMN.format(name): jax.ShapeDtypeStruct(np.shape(number.usual), jnp.float32)
        for name, number in rule.columns.items()
    }


def filled_columns(rule: Guidance, values: Mapping[str, Any], rows: int) -> dict[str, HostArray]:
    """Return the columns that a rule reads, [rows, ...], from values by name; the others have their defaults."""
    numbers = {name: np.array(values.get(name, number.usual), np.float32) for name, number in rule.columns.items()}
    return {_COLUMN.format(name): np.tile(value, (rows, *[1] * value.ndim)) for name, value in numbers.items()}


def conditions_of(rule: Guidance, prompts: Sequence[Mapping[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Return the conditions of each sample of the images, of the prompts as ``InFlight`` has them."""
    texts = prompts[1:] or prompts
    following, samples = iter(texts), []
    for role in rule.samples:
        prompt = prompts[0] if role == NEGATIVE else next(following) if role == PROMPT else texts[0]
        samples.append({**prompt, "role": np.full(batch, role, np.int32)})
    return samples


def guided(rule: Guidance, x: Array, outputs: Array, row: Mapping[str, Array], memory: Array) -> tuple[Array, Array]:
    """Combine the outputs for the samples of each image [B, n, h, w, C], in a row with the columns of the rule.

    Returns:
        D [B, h, w, C], and the new memory of the rule [B, n, h, w, C].
    """
    by_role: dict[int, list[Array]] = {}
    for i, role in enumerate(rule.samples):
        by_role.setdefault(role, []).append(outputs[:, i])
    seen, alone = Evaluated(x, by_role, row, memory), off(rule)

    def of(rule: Guidance) -> tuple[Array, Array]:
        result: Any = rule.denoised(seen)
        return result if memory_of(rule) else (result, memory)

    if alone == rule:
        return of(rule)
    # Rows at scale OFF get the result of an image that is alone in its batch, which runs without guidance.
    without = per_image(row["guidance"]) == OFF
    (image, _), (moved, kept) = of(alone), of(rule)
    return jnp.where(without, image, moved), jnp.where(without[:, None], memory, kept)


def guide(
    unconditional: Array, conditional: Array, scale: Array, rescale: Array, further: Array | float = 0.0
) -> Array:
    """Move the network's output away from the unconditional one.

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: output for the prompt [B, h, w, C], float32.
        scale: guidance scale of each image [B].
        rescale: for each image [B], how far, 0..1, the result's standard deviation is brought back to that of the
            conditional output (Lin et al. 2024, section 3.4, eq. 15 and 16).
        further: addition of other kinds of guidance.

    Returns:
        [B, h, w, C] float32.
    """
    scale, rescale = scale[:, None, None, None], rescale[:, None, None, None]
    guided = unconditional + scale * (conditional - unconditional) + further
    ratio = _std(conditional) / jnp.maximum(_std(guided), 1e-12)
    return guided * (1.0 + rescale * (ratio - 1.0))


def compose(unconditional: Array, conditional: Array, weights: Array) -> Array:
    """Combine the outputs of several prompts: u + sum_k w_k (c_k - u) (Liu et al. 2022, eq. 11).

    Args:
        unconditional: output for the negative prompt [B, h, w, C], float32.
        conditional: outputs for the prompts [B, K, h, w, C], float32.
        weights: weights of the prompts [B, K].

    Returns:
        [B, h, w, C] float32.
    """
    away = conditional - unconditional[:, None]
    return unconditional + (weights[:, :, None, None, None] * away).sum(axis=1)


def zero_star(unconditional: Array, conditional: Array, scale: Array, step: Array, zero_steps: Array) -> Array:
    """Apply CFG-Zero* (Fan et al. 2025, section 4): scale u by <c, u> / |u|^2; the first steps are 0."""
    share = _dot(conditional, unconditional) / jnp.maximum(_dot(unconditional, unconditional), 1e-12)
    guided = share * unconditional + per_image(scale) * (conditional - share * unconditional)
    return jnp.where(per_image(step) < per_image(zero_steps), 0.0, guided)


def projected(away: Array, conditional: Array, scale: Array, eta: Array, norm: Array) -> Array:
    """Apply adaptive projected guidance (Sadat et al. 2024, section 4) to denoised images [B, h, w, C].

    The difference ``away`` from the unconditional image is cut to length ``norm`` (0: never). Its part parallel to the
    conditional image, which saturates, is multiplied by ``eta``.
    """
    length = jnp.sqrt(_dot(away, away))
    away = away * jnp.where(per_image(norm) > 0, jnp.minimum(1.0, per_image(norm) / jnp.maximum(length, 1e-12)), 1.0)
    along = _dot(away, conditional) / jnp.maximum(_dot(conditional, conditional), 1e-12) * conditional
    return conditional + (per_image(scale) - 1) * (away - along + per_image(eta) * along)


def per_image(numbers: Array) -> Array:
    """Return numbers [B] as [B, 1, 1, 1], by which images are multiplied."""
    return numbers[:, None, None, None]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum((1, 2, 3), keepdims=True)


def _std(x: Array) -> Array:
    return x.std((1, 2, 3), keepdims=True)
