"""What a family of models gives the loop: the network that denoises, as a record.

A record is a frozen dataclass over a config: hashable, and with a ``repr`` that says all that decides its programs,
since both are part of a compiled program's key. What a call adds to the network is a record around another one: a
ControlNet (``canvax.models.controlled``), ``Reusing``, ``Perturbed``. What such a record asks of the network is
declared as ``Extras``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from canvax.errors import InputError
from canvax.models.configs import UNetConfig
from canvax.models.deep_features import Recall, deep_shape, unet_reusing
from canvax.models.dit import AnyArray, pack, unpack
from canvax.models.text import IMAGE_PROMPTS, Conditions
from canvax.models.unet import Residuals, Special, cross_attention_kv, skip_connections, unet, unet_context, unet_spec
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

ROLES = ("NEGATIVE", "PROMPT", "PERTURBED")
NEGATIVE, PROMPT, PERTURBED = range(3)
"""Roles of the samples of an image, which a denoiser reads as the condition ``role`` [B] int32. A denoiser may know
others (``Facts.roles``), for rules of guidance that name them."""

COLUMNS = "columns"
"""Among the conditions of a network of tokens: how many tokens wide the images are, [B] int32."""

REFERENCES = "references"
"""Among the conditions of a network that edits, of a call with R tokens of reference images, padding included:
``tokens`` [B, R, C] float32; ``ids`` [B, R, 3] int32, the number of the reference from 1 on, row and column of a token;
``count`` [B] int32, how many tokens are no padding."""

Shapes = dict[str, Any]
"""Trees of ``jax.ShapeDtypeStruct`` by name."""

Row = Mapping[str, Array]
"""A row of a sampler's table: columns [B, ...] such as ``timestep``, and those that a denoiser declares."""


@dataclass(frozen=True)
class Packing:
    """How latents [..., h, w, C] lie in the loop: as they are, or as tokens [..., 1, L, C].

    Images of as many tokens share programs: how wide they are is the condition ``COLUMNS``.

    Attributes:
        patch: sides of the square of latents that is one token; 0 for no tokens.
        channels_first: order of the features of a token, as in ``canvax.models.dit.pack``.
    """

    patch: int = 0
    channels_first: bool = False

    @property
    def step(self) -> int:
        """Height and width of latents are multiples of it."""
        return max(1, self.patch)

    def sizes(self, width: int) -> dict[str, int]:
        """Return the conditions that say how wide latents are."""
        return {COLUMNS: width // self.patch} if self.patch else {}

    def shape(self, latents: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that latents [..., h, w, C] have in the loop."""
        *batch, height, width, channels = latents
        squares = self.step**2
        return (*batch, 1, height * width // squares, squares * channels) if self.patch else tuple(latents)

    def pack(self, latents: AnyArray) -> AnyArray:
        """Return latents [..., h, w, C], on the host or a device, as the loop has them."""
        if not self.patch:
            return latents
        return pack(latents, self.patch, channels_first=self.channels_first).reshape(self.shape(latents.shape))

    def unpack(self, packed: AnyArray, height: int, width: int) -> AnyArray:
        """Invert ``pack`` for latents of ``height`` x ``width``."""
        if not self.patch:
            return packed
        *batch, _, _, features = packed.shape
        squares = packed.reshape(*batch, height // self.patch, width // self.patch, features)
        return unpack(squares, self.patch, channels_first=self.channels_first)


@dataclass(frozen=True)
class Facts:
    """What is known of a denoiser.

    Attributes:
        native_size: height and width of the latents that it was trained on.
        packing: how the loop holds its latents.
        embeds_guidance: the guidance scale is its input ``guidance``, so that it needs no negative prompt.
        distilled: it was trained to need no guidance, so that a guidance scale means nothing.
        flow_map: it gives the mean velocity of a step of Euler's, so that other samplers mean nothing.
        inpaints: it reads a mask and the masked image beside the latents, as its input ``masked``.
        edits: it reads ``REFERENCES``.
        whole_reference: the most pixels of a single reference image, which is read whole, padded with its reflection;
            0 if its edges are cut to fit, as those of several are.
        offers: names of the ``Extras`` that it takes.
        roles: those that it knows; it need not tell the prompt from the negative one.
    """

    native_size: tuple[int, int] = (64, 64)
    packing: Packing = Packing()
    embeds_guidance: bool = False
    distilled: bool = False
    flow_map: bool = False
    inpaints: bool = False
    edits: bool = False
    whole_reference: int = 0
    offers: tuple[str, ...] = ()
    roles: tuple[int, ...] = (NEGATIVE, PROMPT)


@dataclass(frozen=True)
class Inputs:
    """Shapes of what a denoiser reads beside latents, text and the columns of the sampler.

    Attributes:
        conditions: [B, ...] each.
        columns: of the row of each image, each without [B].
        shared: columns that are the same for all images. ``any NAME``, booleans [n], is whether a column ``NAME``
            [n, ...] is not 0 for any image.
        memory: what it remembers of a sample from row to row, without [B], zero at first; None: nothing.
    """

    conditions: Shapes = field(default_factory=dict)
    columns: Shapes = field(default_factory=dict)
    shared: Shapes = field(default_factory=dict)
    memory: Any = None


class Denoiser(Protocol):
    """The network inside the loop."""

    @property
    def component(self) -> str:
        """Its key in ``params``, which is its folder in a checkpoint."""
        ...

    @property
    def spec(self) -> Spec:
        """Its parameters."""
        ...

    @property
    def facts(self) -> Facts:
        """What is known of it."""
        return Facts()

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        """Return what it reads.

        Args:
            latents: their shape in the loop, [B, h, w, C].
            text: shapes of what the text encoders give.
            dtype: that of a component's parameters, by its name.
        """
        del latents, text, dtype
        return Inputs()

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        """Return what ``apply`` needs of the conditions [B, ...] and is the same in each step; once before the loop.

        ``latents`` is their shape in the loop.
        """
        ...

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        """Return the network's output for scaled noisy latents [B, h, w, C] float32, and what it remembers."""
        ...


class Extras(NamedTuple):
    """What a record around a denoiser asks of an evaluation. The facts of a denoiser say which of them it offers.

    Attributes:
        residuals: added to its features.
        perturbed: [B] bool, samples whose middle attends place by place.
        recall: ``layers`` of ``Reusing``, and what makes of a function that computes its deep features those to use and
            those to remember, which it returns as its memory.
    """

    residuals: Residuals | None = None
    perturbed: Array | None = None
    recall: tuple[int, Recall] | None = None


PLAIN = Extras()
"""Nothing."""


class Extensible(Denoiser, Protocol):
    """A denoiser that offers extras."""

    def apply(
        self, p: Params, x: Array, row: Row, prepared: Any, memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        """As ``Denoiser.apply``, with what is asked of the evaluation."""
        ...


class Reusable(Extensible, Protocol):
    """A denoiser that offers ``recall``."""

    @property
    def most_layers(self) -> int:
        """The largest ``layers`` of ``Reusing``."""
        ...

    def deep_shape(self, latents: Sequence[int], layers: int) -> tuple[int, ...]:
        """Return the shape of its deep features for latents [B, h, w, C]."""
        ...


def evaluate(denoiser: Denoiser, p: Params, latents: Array, timestep: Array, conditions: Conditions) -> Array:
    """Evaluate a denoiser by itself, as the loop does.

    Args:
        denoiser: the network.
        p: its parameters.
        latents: scaled noisy latents [B, h, w, C].
        timestep: [B].
        conditions: [B, ...] each, without ``COLUMNS``.

    Returns:
        The network's output [B, h, w, C].
    """
    packing, (batch, height, width, _) = denoiser.facts.packing, latents.shape
    sizes = {name: jnp.full(batch, number, jnp.int32) for name, number in packing.sizes(width).items()}
    x = packing.pack(latents)
    prepared = denoiser.prepare(p, {**conditions, **sizes}, x.shape)
    output, _ = denoiser.apply(p, x, {"timestep": timestep}, prepared, None)
    return packing.unpack(output, height, width)


@dataclass(frozen=True)
class UNetDenoiser(Reusable):
    """The UNet of Stable Diffusion 1.x, 2.x and XL.

    Attributes:
        cfg: its config.
    """

    cfg: UNetConfig

    @property
    def component(self) -> str:
        return "unet"

    @property
    def spec(self) -> Spec:
        return unet_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        size = self.cfg.sample_size or 64
        return Facts(
            native_size=size if isinstance(size, tuple) else (size, size),
            embeds_guidance=self.cfg.time_cond_proj_dim is not None,
            inpaints=self.cfg.in_channels == 2 * self.cfg.out_channels + 1,
            offers=Extras._fields,
        )

    @property
    def most_layers(self) -> int:
        return skip_connections(self.cfg)

    def deep_shape(self, latents: Sequence[int], layers: int) -> tuple[int, ...]:
        return deep_shape(self.cfg, latents, layers)

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        batch, height, width, channels = latents
        shapes: dict[str, tuple[int, ...]] = {}
        pooled = text["pooled"].shape[-1] if "pooled" in text else 0
        if numbers := self.cfg.time_ids(pooled):
            shapes["time_ids"] = (batch, numbers)
        if self.facts.inpaints:
            shapes["masked"] = (batch, height, width, channels + 1)
        if self.facts.embeds_guidance:
            shapes["guidance"] = (batch,)
        return Inputs({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> dict[str, Any]:
        prepared: dict[str, Any] = {name: value for name, value in conditions.items() if name != "role"}
        # Of the blocks, which are calls on the CPU, the compiler would not move the keys and values out of the loop.
        kv = cross_attention_kv(p, prepared["text"].astype(compute_dtype(p)), self.cfg)
        if (prompts := prepared.pop(IMAGE_PROMPTS, None)) is not None:
            from canvax.models.ip_adapter import with_image_prompts  # which most calls never need

            kv = with_image_prompts(kv, prompts, self.cfg)
        return {**prepared, "text": kv}

    def apply(
        self, p: Params, x: Array, row: Row, prepared: dict[str, Any], memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        prepared = dict(prepared)
        if (masked := prepared.pop("masked", None)) is not None:  # the mask and the masked image behind the latents
            x = jnp.concatenate([x, masked], axis=-1)
        x, special = x.astype(compute_dtype(p)), Special(perturbed=extras.perturbed)
        if extras.recall is None:
            more = {"cfg": self.cfg, "special": special, "residuals": extras.residuals}
            return unet(p, x, row["timestep"], **prepared, **more), memory
        layers, recall = extras.recall
        context = unet_context(p, x, row["timestep"], cfg=self.cfg, **prepared)._replace(special=special)
        return unet_reusing(p, x, context, self.cfg, layers=layers, recall=recall)


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name))


class Around:
    """A record around another denoiser, whose parameters it has. What it does not define is that of the other one.

    Attributes:
        base: the other one.
        needs: the name of the extra that it asks of the other one; "" for none.

    Raises:
        InputError: the other one does not offer it.
    """

    base: Any
    needs: ClassVar[str] = ""
    component, spec, facts = _of_base("component"), _of_base("spec"), _of_base("facts")
    inputs, prepare, apply = _of_base("inputs"), _of_base("prepare"), _of_base("apply")

    def __post_init__(self) -> None:
        if self.needs and self.needs not in self.base.facts.offers:
            offers, kind = self.base.facts.offers, type(self).__name__
            problem = (
                f"does not offer {self.needs!r}, which {kind} asks for; it offers {', '.join(offers) or 'nothing'}"
            )
            raise InputError("denoiser", self.base.component, problem, f"use a network without {kind}")

    def __getattr__(self, name: str) -> Any:
        """Return what only the other one has, such as its config."""
        if name.startswith("__") or name == "base":  # which a copy asks for before it has any
            raise AttributeError(name)
        return getattr(self.base, name)


@dataclass(frozen=True)
class Perturbed(Around):
    """A denoiser that attends place by place in samples whose role is ``PERTURBED`` (Ahn et al. 2024)."""

    base: Extensible
    needs = "perturbed"

    @property
    def facts(self) -> Facts:
        return replace(self.base.facts, roles=(*self.base.facts.roles, PERTURBED))

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> tuple[Any, Array]:
        return self.base.prepare(p, conditions, latents), conditions["role"] == PERTURBED

    def apply(
        self, p: Params, x: Array, row: Row, prepared: tuple[Any, Array], memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        inner, perturbed = prepared
        return self.base.apply(p, x, row, inner, memory, extras._replace(perturbed=perturbed))


@dataclass(frozen=True)
class Reusing(Around):
    """A denoiser that computes its deep features in some rows and forecasts them in the others.

    DeepCache (Ma et al. 2024) takes the last features as they are, TaylorSeer (Liu et al. 2025) follows the line
    through the last two. It remembers those, newest first [B, 2, h', w', C'].

    Attributes:
        base: the denoiser.
        layers: what is computed in any case: ``layers`` of ``canvax.models.deep_features.unet_reusing``.
    """

    base: Reusable
    layers: int
    needs = "recall"

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        """``recompute``: whether a row computes the features; ``reuse``: what a row makes of the last two, (1, 0)
        where it computes them."""
        _, *deep = self.base.deep_shape(latents, self.layers)
        inner = self.base.inputs(latents, text, dtype)
        recompute, reuse = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((2,), jnp.float32)
        memory = jax.ShapeDtypeStruct((2, *deep), dtype(self.component))
        return replace(inner, shared={**inner.shared, "recompute": recompute, "reuse": reuse}, memory=memory)

    def apply(
        self, p: Params, x: Array, row: Row, prepared: Any, memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        weights = row["reuse"]

        def recall(compute: Callable[[], Array]) -> tuple[Array, Array]:
            def fresh() -> Array:
                return jnp.stack([compute(), memory[:, 0]], axis=1)

            last = jax.lax.cond(row["recompute"], fresh, lambda: memory)
            deep = weights[0] * last[:, 0].astype(jnp.float32) + weights[1] * last[:, 1].astype(jnp.float32)
            return deep.astype(memory.dtype), last

        return self.base.apply(p, x, row, prepared, memory, extras._replace(recall=(self.layers, recall)))
