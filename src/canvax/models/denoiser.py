"""What a family of models gives the loop: the network that denoises, as a record.

A record is a frozen dataclass over a config: hashable, and with a ``repr`` that says all that decides its programs,
since both are part of a compiled program's key. What a call adds to the network is a record that holds another one: a
ControlNet (``canvax.models.controlled``), reused features (``canvax.models.deep_features``), ``Perturbed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from canvax.models.beside import ADAPTERS, Places, with_adapters
from canvax.models.configs import UNetConfig
from canvax.models.deep_features import deep_shape, unet_reusing
from canvax.models.text import IMAGE_PROMPTS, Conditions
from canvax.models.unet import Special, cross_attention_kv, least_bytes, skip_connections, unet, unet_context, unet_spec
from canvax.params import Params, Spec
from canvax.quantize import compute_dtype
from canvax.types import Array, DType, HostArray

NEGATIVE, PROMPT, PERTURBED = range(3)
"""Roles of the samples of an image, which a denoiser reads as the condition ``role`` [B] int32."""

REFERENCES = "references"
"""Among the conditions: reference images, of a shape that is the denoiser's business."""

Shapes = dict[str, Any]
"""Trees of ``jax.ShapeDtypeStruct`` by name."""

Row = Mapping[str, Array]
"""A row of a sampler's table: columns [B, ...] such as ``timestep``, and those that a denoiser declares."""


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
    def native_size(self) -> tuple[int, int]:
        """Height and width of the latents that it was trained on."""
        return 64, 64

    @property
    def patch(self) -> int:
        """Sides of a square of latents that is one token: height and width of latents are multiples of it."""
        return 1

    def loop_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that latents of this size have in the loop, as the same numbers in the same order.

        Sizes with the same one share programs; ``size_inputs`` tells the network of the difference.
        """
        return height, width

    def size_inputs(self, height: int, width: int) -> dict[str, int]:
        """Those of ``inputs`` that say which size of latents is meant, int32 each."""
        del height, width
        return {}

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is its input ``guidance``, so that it needs no negative prompt."""
        return False

    @property
    def inpaints(self) -> bool:
        """Whether it reads a mask and the masked image beside the latents, as its input ``masked``."""
        return False

    @property
    def distilled(self) -> bool:
        """Whether it was trained to need no guidance, so that a guidance scale means nothing."""
        return False

    @property
    def edits(self) -> bool:
        """Whether it reads reference images, as its input ``references``, if its field of that name is not 0."""
        return False

    def read_references(self, latents: Sequence[HostArray]) -> dict[str, HostArray]:
        """That input for latents [B, h, w, C] of each reference image."""
        del latents
        return {}

    @property
    def most_layers(self) -> int:
        """The largest ``layers`` of ``Reusing`` around it, 0 if it has no features to reuse."""
        return 0

    def least_bytes(self, samples: int, height: int, width: int, itemsize: int) -> int:
        """Memory that an evaluation takes at least for latents of this size, to refuse what cannot fit early."""
        del samples, height, width, itemsize
        return 0

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Shapes:
        """Conditions beside those of the text encoders.

        Args:
            latents: [B, h, w, C].
            text: shapes of what the text encoders give.
            dtype: that of a component's parameters, by its name.
        """
        del latents, text, dtype
        return {}

    @property
    def columns(self) -> Shapes:
        """Columns of the row that it reads beside those of the sampler, each without [B]."""
        return {}

    @property
    def shared(self) -> Shapes:
        """Columns of the row that are the same for all images."""
        return {}

    def shared_of(self, columns: Mapping[str, HostArray]) -> dict[str, HostArray]:
        """Those of ``shared`` that follow from the ``columns`` of all images [B, R, ...], on the host."""
        del columns
        return {}

    def memory(self, latents: Sequence[int], dtype: Callable[[str], DType]) -> Any:
        """Shape of what it remembers from row to row for latents [B, h, w, C], zero at first; None: nothing."""
        del latents, dtype

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        """What ``apply`` needs of the conditions [B, ...] and is the same in each step; once before the loop."""
        ...

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        """Network output [B, h, w, C] for scaled noisy latents [B, h, w, C] float32, and what it remembers."""
        ...


class SquareDenoiser(Denoiser):
    """A transformer whose tokens are squares of 2 x 2 latents.

    Images of as many tokens share programs: how many columns of tokens an image has is the input ``columns``.

    Attributes:
        places: for adapters beside its weights, as in ``UNetDenoiser``.
    """

    places: Places | None

    @property
    def component(self) -> str:
        return "transformer"

    @property
    def native_size(self) -> tuple[int, int]:
        return 128, 128

    @property
    def patch(self) -> int:
        return 2

    def loop_size(self, height: int, width: int) -> tuple[int, int]:
        return 1, height * width

    def size_inputs(self, height: int, width: int) -> dict[str, int]:
        return {"columns": width // 2}

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Shapes:
        if self.places is None:
            return {}
        return {ADAPTERS: jax.ShapeDtypeStruct((latents[0], self.places.count), jnp.float32)}


@dataclass(frozen=True)
class UNetDenoiser(Denoiser):
    """The UNet of Stable Diffusion 1.x, 2.x and XL.

    What it has prepared may get an entry of a record around it: ``residuals``, added to its features; ``perturbed``
    [B] bool, samples whose middle attends place by place; ``recall``, see ``Reusing``.

    Attributes:
        cfg: its config.
        places: for adapters beside its weights: they are in the parameters then, and each image's part of each of them
            is among its conditions.
    """

    cfg: UNetConfig
    places: Places | None = None

    @property
    def component(self) -> str:
        return "unet"

    @property
    def spec(self) -> Spec:
        return unet_spec(self.cfg)

    @property
    def native_size(self) -> tuple[int, int]:
        size = self.cfg.sample_size or 64
        return size if isinstance(size, tuple) else (size, size)

    @property
    def embeds_guidance(self) -> bool:
        return self.cfg.time_cond_proj_dim is not None

    @property
    def inpaints(self) -> bool:
        return self.cfg.in_channels == 2 * self.cfg.out_channels + 1

    @property
    def most_layers(self) -> int:
        return skip_connections(self.cfg)

    def least_bytes(self, samples: int, height: int, width: int, itemsize: int) -> int:
        return least_bytes(self.cfg, samples, height, width, itemsize)

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Shapes:
        batch, height, width, channels = latents
        shapes: dict[str, tuple[int, ...]] = {}
        pooled = text["pooled"].shape[-1] if "pooled" in text else 0
        if numbers := self.cfg.time_ids(pooled):
            shapes["time_ids"] = (batch, numbers)
        if self.inpaints:
            shapes["masked"] = (batch, height, width, channels + 1)
        if self.embeds_guidance:
            shapes["guidance"] = (batch,)
        if self.places is not None:
            shapes[ADAPTERS] = (batch, self.places.count)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int] = ()) -> dict[str, Any]:
        prepared: dict[str, Any] = {name: value for name, value in conditions.items() if name != "role"}
        if self.places is not None:
            p = with_adapters(p, prepared[ADAPTERS], self.spec, self.places)
            prepared[ADAPTERS] = p
        # Of the blocks, which are calls on the CPU, the compiler would not move the keys and values out of the loop.
        kv = cross_attention_kv(p, prepared["text"].astype(compute_dtype(p)), self.cfg)
        if (prompts := prepared.pop(IMAGE_PROMPTS, None)) is not None:
            from canvax.models.ip_adapter import with_image_prompts  # which most calls never need

            kv = with_image_prompts(kv, prompts, self.cfg)
        return {**prepared, "text": kv}

    def apply(self, p: Params, x: Array, row: Row, prepared: dict[str, Any], memory: Any = None) -> tuple[Array, Any]:
        prepared = dict(prepared)
        p = prepared.pop(ADAPTERS, p)
        if (masked := prepared.pop("masked", None)) is not None:  # the mask and the masked image behind the latents
            x = jnp.concatenate([x, masked], axis=-1)
        residuals, recall = prepared.pop("residuals", None), prepared.pop("recall", None)
        x, special = x.astype(compute_dtype(p)), Special(perturbed=prepared.pop("perturbed", None))
        if recall is None:
            return unet(p, x, row["timestep"], cfg=self.cfg, special=special, residuals=residuals, **prepared), memory
        layers, recall = recall
        context = unet_context(p, x, row["timestep"], cfg=self.cfg, **prepared)._replace(special=special)
        return unet_reusing(p, x, context, self.cfg, layers=layers, recall=recall)


def _of_base(name: str) -> Any:
    return property(lambda self: getattr(self.base, name))


class Around(Denoiser):
    """A record around another denoiser, whose parameters it has. What it does not define is that of the other one."""

    base: Denoiser
    prepare, apply = _of_base("prepare"), _of_base("apply")

    @property
    def component(self) -> str:
        return self.base.component

    @property
    def spec(self) -> Spec:
        return self.base.spec

    def __getattr__(self, name: str) -> Any:
        """Return what only the other one has, such as its config."""
        if name.startswith("__") or name == "base":  # which a copy asks for before it has any
            raise AttributeError(name)
        return getattr(self.base, name)


for _name in vars(Denoiser).keys() - vars(Around).keys():
    if not _name.startswith("_"):
        setattr(Around, _name, _of_base(_name))


def with_fields(denoiser: Denoiser, **fields: Any) -> Denoiser:
    """Return a denoiser with other values of its fields; of a record around others, those of the innermost one."""
    if isinstance(denoiser, Around):
        return replace(cast("Any", denoiser), base=with_fields(denoiser.base, **fields))
    return replace(cast("Any", denoiser), **fields)


@dataclass(frozen=True)
class Perturbed(Around):
    """A denoiser that attends place by place in samples whose role is ``PERTURBED`` (Ahn et al. 2024)."""

    base: Denoiser

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        return {**self.base.prepare(p, conditions, latents), "perturbed": conditions["role"] == PERTURBED}


@dataclass(frozen=True)
class Reusing(Around):
    """A UNet that computes its deep features in some rows and forecasts them in the others.

    DeepCache (Ma et al. 2024) takes the last features as they are, TaylorSeer (Liu et al. 2025) follows the line
    through the last two. It remembers those, newest first [B, 2, h', w', C'].

    Attributes:
        base: the UNet, or a record around it.
        cfg: of the UNet.
        layers: what is computed in any case: ``layers`` of ``canvax.models.deep_features.unet_reusing``.
    """

    base: Denoiser
    cfg: UNetConfig
    layers: int

    @property
    def shared(self) -> Shapes:
        """``recompute``: whether a row computes the features; ``reuse``: what a row makes of the last two, (1, 0)
        where it computes them."""
        return {
            "recompute": jax.ShapeDtypeStruct((), jnp.bool_),
            "reuse": jax.ShapeDtypeStruct((2,), jnp.float32),
        }

    def memory(self, latents: Sequence[int], dtype: Callable[[str], DType]) -> Any:
        batch, *deep = deep_shape(self.cfg, latents, self.layers)
        return jax.ShapeDtypeStruct((batch, 2, *deep), dtype(self.component))

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        weights = row["reuse"]

        def recall(compute: Callable[[], Array]) -> tuple[Array, Array]:
            def fresh() -> Array:
                return jnp.stack([compute(), memory[:, 0]], axis=1)

            last = jax.lax.cond(row["recompute"], fresh, lambda: memory)
            deep = weights[0] * last[:, 0].astype(jnp.float32) + weights[1] * last[:, 1].astype(jnp.float32)
            return deep.astype(memory.dtype), last

        return self.base.apply(p, x, row, {**prepared, "recall": (self.layers, recall)}, memory)
