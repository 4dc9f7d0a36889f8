"""The denoising network as a record: what a family of models gives the loop.

A record is a frozen dataclass over a config: hashable, and with a ``repr`` that determines its programs, since both are
part of a compiled program's key. A call extends the network by a wrapper: a ControlNet (``canvax.models.controlled``),
``Reusing``, ``Perturbed``. The wrapper passes its requests to the network as ``Extras``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import InputError, shown
from canvax.models.configs import UNetConfig
from canvax.models.deep_features import Recall, deep_shape, unet_reusing
from canvax.models.dit import AnyArray, pack, unpack
from canvax.models.text import IMAGE_PROMPTS, Conditions
from canvax.models.unet import (
    BlockOptions,
    Residuals,
    cross_attention_kv,
    skip_connections,
    unet,
    unet_context,
    unet_spec,
)
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

ROLES = ("NEGATIVE", "PROMPT", "PERTURBED")
NEGATIVE = 0
"""Role of the sample of an image that reads the negative prompt.

A denoiser reads roles as the condition ``role``, an array of NumPy [B] int32. It may know others (``Facts.roles``), for
rules of guidance that name them."""
PROMPT = 1
"""Role of a sample that reads a prompt."""
PERTURBED = 2
"""Role of a sample that reads the prompt with a perturbed network."""

COLUMNS = "columns"
"""Condition of a network of tokens: the images' width in tokens, [B] int32."""

MOST_REFERENCES = 10
"""Reference images of a call."""

REFERENCES = "references"
"""Condition of a network that edits, with R tokens of reference images, padding included: ``tokens`` [B, R, C] float32;
``ids`` [B, R, 3] int32, index of the reference from 1 on, row and column of a token; ``count`` [B] int32, tokens
without padding.
"""

Shapes = dict[str, Any]
"""Trees of ``jax.ShapeDtypeStruct`` by name."""

Row = Mapping[str, Array]
"""A row of a sampler's table: columns [B, ...] such as ``timestep``, and the columns that a denoiser declares."""


@dataclass(frozen=True)
class Packing:
    """Layout of latents [..., h, w, C] in the loop: unchanged, or as tokens [..., 1, L, C].

    Images with the same number of tokens share programs: their width is the condition ``COLUMNS``.

    Attributes:
        patch: side of the square of latents that one token holds; 0 for no tokens.
        channels_first: order of the features of a token, as in ``canvax.models.dit.pack``.
    """

    patch: int = 0
    channels_first: bool = False

    @property
    def step(self) -> int:
        """Height and width of latents must be multiples of this."""
        return max(1, self.patch)

    def sizes(self, batch: int, width: int) -> dict[str, HostArray]:
        """Return the conditions [B] that give the width of latents."""
        return {COLUMNS: np.full(batch, width // self.patch, np.int32)} if self.patch else {}

    def shape(self, latents: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that latents [..., h, w, C] have in the loop."""
        *batch, height, width, channels = latents
        squares = self.step**2
        return (*batch, 1, height * width // squares, squares * channels) if self.patch else tuple(latents)

    def pack(self, latents: AnyArray) -> AnyArray:
        """Return latents [..., h, w, C], on the host or a device, in the layout of the loop."""
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
    """Facts about a denoiser.

    Attributes:
        native_size: height and width of the latents it was trained on.
        packing: layout of its latents in the loop.
        embeds_guidance: it reads the guidance scale as its input ``guidance``, so it needs no negative prompt.
        distilled: it was trained to need no guidance, so the guidance scale has no effect.
        flow_map: it predicts the mean velocity of an Euler step, so other samplers cannot use it.
        inpaints: it also reads a mask and the masked image, as its input ``masked``.
        folded_mask: that mask has all pixels of a latent as channels, after the masked image; otherwise one pixel,
            before it.
        edits: it reads ``REFERENCES``.
        only_edits: it was not trained without them.
        reference_sizes: heights and widths of references, each of which gets the one nearest to its proportions; () if
            references keep their size.
        whole_reference: maximum pixels of a single reference image that is padded by reflection instead of cropped; 0
            if it is always cropped, as several references are.
        reference_pixels: pixels that every reference is scaled to, with sides of an even number of tokens; 0 if only
            large ones are made smaller.
        most_references: maximum number of references.
        offers: names of the ``Extras`` that it supports.
        roles: those that it knows; it need not tell the prompt from the negative one.
    """

    native_size: tuple[int, int] = (64, 64)
    packing: Packing = Packing()
    embeds_guidance: bool = False
    distilled: bool = False
    flow_map: bool = False
    inpaints: bool = False
    folded_mask: bool = False
    edits: bool = False
    only_edits: bool = False
    reference_sizes: tuple[tuple[int, int], ...] = ()
    whole_reference: int = 0
    reference_pixels: int = 0
    most_references: int = MOST_REFERENCES
    offers: tuple[str, ...] = ()
    roles: tuple[int, ...] = (NEGATIVE, PROMPT)


@dataclass(frozen=True)
class Inputs:
    """Shapes of a denoiser's inputs besides latents, text and the columns of the sampler.

    Attributes:
        conditions: [B, ...] each.
        columns: of the row of each image, each without [B].
        shared: columns that are the same for all images. ``any NAME``, booleans [n], says where a column ``NAME``
            [n, ...] is not 0 for any image.
        memory: state of a sample that is kept from row to row, without [B], zero at first; None for none.
    """

    conditions: Shapes = field(default_factory=dict)
    columns: Shapes = field(default_factory=dict)
    shared: Shapes = field(default_factory=dict)
    memory: Any = None


class Denoiser(Protocol):
    """The network inside the loop."""

    @property
    def component(self) -> str:
        """Key in ``params``, which is the folder in a checkpoint."""
        ...

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        ...

    @property
    def facts(self) -> Facts:
        """Facts about the network."""
        return Facts()

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        """Return the shapes of its inputs.

        Args:
            latents: shape of the latents in the loop, [B, h, w, C].
            text: shapes of the text encoders' outputs.
            dtype: returns the dtype of a component's parameters by its name.
        """
        del latents, text, dtype
        return Inputs()

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        """Return the inputs of ``apply`` that follow from the conditions [B, ...] and are the same in each step.

        It runs once before the loop. ``latents`` is their shape in the loop.
        """
        ...

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        """Return the network's output for scaled noisy latents [B, h, w, C] float32, and its new memory."""
        ...


class TransformerDenoiser(Denoiser):
    """A denoiser whose parameters are the component ``transformer``."""

    @property
    def component(self) -> str:
        return "transformer"


class Extras(NamedTuple):
    """Requests of a wrapper to the denoiser's evaluation; ``Facts.offers`` lists those that a denoiser supports.

    Attributes:
        residuals: arrays to add to its features.
        perturbed: [B] bool, samples in whose middle each position attends only to itself.
        recall: ``layers`` of ``Reusing``, and a ``canvax.models.deep_features.Recall``; what is remembered is returned
            as the memory.
    """

    residuals: Residuals | None = None
    perturbed: Array | None = None
    recall: tuple[int, Recall] | None = None


PLAIN = Extras()
"""No requests."""


class Extensible(Denoiser, Protocol):
    """A denoiser that supports extras."""

    def apply(
        self, p: Params, x: Array, row: Row, prepared: Any, memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        """Evaluate as ``Denoiser.apply``, with the requested extras."""
        ...


class Reusable(Extensible, Protocol):
    """A denoiser that supports ``recall``."""

    @property
    def most_layers(self) -> int:
        """Largest ``layers`` of ``Reusing``."""
        ...

    def deep_shape(self, latents: Sequence[int], layers: int) -> tuple[int, ...]:
        """Return the shape of its deep features for latents [B, h, w, C]."""
        ...


def applied(denoiser: Denoiser, *arguments: Any) -> tuple[Array, Any]:
    """Call ``denoiser.apply`` of a user.

    Raises:
        InputError: it does not return two things, since a batch of two images could be taken for them, or an output of
            another shape than the latents.
    """
    result, (_, latents, *_) = denoiser.apply(*arguments), arguments
    if not isinstance(result, tuple | list) or len(result) != 2:
        problem = f"returned {shown(result)} from {type(denoiser).__name__}.apply"
        raise InputError("denoiser", problem, cure="return (output, memory)")
    if np.shape(result[0]) != latents.shape:
        problem = f"returned {shown(result[0])} from {type(denoiser).__name__}.apply for latents {[*latents.shape]}"
        raise InputError("denoiser", problem, cure="return an output of the same shape")
    return result


def evaluate(denoiser: Denoiser, p: Params, latents: Array, timestep: Array, conditions: Conditions) -> Array:
    """Evaluate a denoiser on its own, as the loop does.

    Args:
        denoiser: the network.
        p: its parameters.
        latents: scaled noisy latents [B, h, w, C].
        timestep: [B].
        conditions: [B, ...] each, without ``COLUMNS``; without ``role`` all are samples of the prompt.

    Returns:
        The network's output [B, h, w, C].
    """
    packing, (batch, height, width, _) = denoiser.facts.packing, latents.shape
    sizes: dict[str, Any] = packing.sizes(batch, width)
    sizes |= {} if "role" in conditions else {"role": np.full(batch, PROMPT, np.int32)}
    x = packing.pack(latents)
    prepared = denoiser.prepare(p, {**conditions, **sizes}, x.shape)
    output, _ = applied(denoiser, p, x, {"timestep": timestep}, prepared, None)
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
        # The compiler does not move keys and values out of the loop if the blocks are calls, as on the CPU.
        kv = cross_attention_kv(p, prepared["text"].astype(compute_dtype(p)), self.cfg)
        if (prompts := prepared.pop(IMAGE_PROMPTS, None)) is not None:
            from canvax.models.ip_adapter import with_image_prompts  # which most calls never need

            kv = with_image_prompts(kv, prompts, self.cfg)
        return {**prepared, "text": kv}

    def apply(
        self, p: Params, x: Array, row: Row, prepared: dict[str, Any], memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        prepared = dict(prepared)
        if (masked := prepared.pop("masked", None)) is not None:  # the mask and the masked image follow the latents
            x = jnp.concatenate([x, masked], axis=-1)
        x, options = x.astype(compute_dtype(p)), BlockOptions(perturbed=extras.perturbed)
        if extras.recall is None:
            arguments = {"cfg": self.cfg, "options": options, "residuals": extras.residuals}
            return unet(p, x, row["timestep"], **prepared, **arguments), memory
        layers, recall = extras.recall
        context = unet_context(p, x, row["timestep"], cfg=self.cfg, **prepared)._replace(options=options)
        return unet_reusing(p, x, context, self.cfg, layers=layers, recall=recall)


_ARGUMENTS_OF_APPLY = 6
"""self, p, x, row, prepared and memory; what follows are ``Extras``."""


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name))


class DenoiserWrapper:
    """Wrapper of another denoiser, with the same parameters. Members that it does not define are those of the denoiser.

    Attributes:
        base: the wrapped denoiser.
        needs: the extra that the wrapped denoiser must support; "" for none.

    Raises:
        InputError: the wrapped denoiser does not support it.
    """

    base: Any
    needs: ClassVar[str] = ""
    component, spec = _of_base("component"), _of_base("spec")
    inputs, prepare, apply = _of_base("inputs"), _of_base("prepare"), _of_base("apply")

    @property
    def facts(self) -> Facts:
        """Facts of the wrapped denoiser, without extras that an ``apply`` of the wrapper has no parameter for."""
        facts, apply = self.base.facts, vars(type(self)).get("apply")
        takes = apply is None or len(inspect.signature(apply).parameters) > _ARGUMENTS_OF_APPLY
        return facts if takes or not facts.offers else replace(facts, offers=())

    def __post_init__(self) -> None:
        if self.needs and self.needs not in self.base.facts.offers:
            offers, kind = self.base.facts.offers, type(self).__name__
            problem = (
                f"does not offer {self.needs!r}, which {kind} asks for; it offers {', '.join(offers) or 'nothing'}"
            )
            raise InputError("denoiser", problem, cure=f"use a network without {kind}", value=self.base.component)

    def __getattr__(self, name: str) -> Any:
        """Return a further member of the wrapped denoiser, such as its config."""
        if name.startswith("__") or name == "base":  # ``copy`` asks for attributes before there are any
            raise AttributeError(name)
        return getattr(self.base, name)


@dataclass(frozen=True)
class Perturbed(DenoiserWrapper):
    """A denoiser in which each position attends only to itself, in samples of role ``PERTURBED`` (Ahn et al. 2024)."""

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
class Reusing(DenoiserWrapper):
    """A denoiser that computes its deep features in some rows and forecasts them in the others.

    DeepCache (Ma et al. 2024) reuses the last features, TaylorSeer (Liu et al. 2025) extrapolates linearly from the
    last two. Its memory is the last two features, newest first [B, 2, h', w', C'].

    Attributes:
        base: the denoiser.
        layers: number of layers that are always computed, see ``canvax.models.deep_features.unet_reusing``.
    """

    base: Reusable
    layers: int
    needs = "recall"

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        """Add the columns ``recompute``, bool, and ``reuse``, the weights of the last two features in a row.

        Rows that compute the features have the weights (1, 0).
        """
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
