"""The text encoders of a model: from token ids to the conditions of a prompt.

Stable Diffusion 1.x and 2.x have one encoder. SDXL has two, read one layer earlier and put side by side, and the second
also gives one pooled vector (Podell et al. 2023, section 2.1). Its refiner has the second alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from canvax.models.beside import Places, with_adapters
from canvax.models.clip import hidden_states, pooled_text, text_encoder, text_encoder_spec
from canvax.models.configs import ClipTextConfig
from canvax.params import Params, Spec
from canvax.types import Array, DType

Conditions = dict[str, Array]
"""What a denoiser reads beside latents and row, by name: ``text`` [B, T, D]; SDXL also ``pooled`` [B, P] and
``time_ids`` [B, n] float32; of language models ``length`` [B] int32, how many rows of ``text`` are the prompt. What
networks have read of images is a tree of arrays."""

FIRST, SECOND = "text_encoder", "text_encoder_2"

IMAGE_PROMPTS = "image_prompts"
"""Among the conditions of an image: for each IP-Adapter, by its component, a ``canvax.models.ip_adapter.ImageKV``."""

IMAGE_ENCODER = "image_encoder"
"""The component of CLIP's image encoder, which all adapters of a pipeline share."""


class TextEncoder(Protocol):
    """A text encoder, as a record: frozen, with a ``repr`` that says all that decides its program."""

    @property
    def component(self) -> str:
        """Its key in ``params``, which is its folder in a checkpoint."""
        ...

    @property
    def tokenizer(self) -> str:
        """The folder of its tokenizer."""
        ...

    @property
    def spec(self) -> Spec:
        """Its parameters."""
        ...

    @property
    def tokens(self) -> int:
        """T: how many tokens a chunk of a prompt has."""
        ...

    @property
    def whole(self) -> bool:
        """Whether it reads all chunks of a prompt at once, and gives the ``length`` of the prompt too."""
        ...

    @property
    def most(self) -> int:
        """Tokens of the longest prompt that it reads; of encoders that are ``whole``."""
        ...

    @property
    def width(self) -> int:
        """D: width of its features."""
        ...

    @property
    def pooled_width(self) -> int:
        """P: width of its pooled output, 0 where there is none."""
        ...

    @property
    def max_skip(self) -> int:
        """How many layers may be left out at the end."""
        ...

    def encode(self, p: Params, ids: Array, skip: Array) -> Conditions:
        """Token ids [B, T] -> ``text`` [B, T, D] and, with a pooled output, ``pooled`` [B, P]."""
        ...


@dataclass(frozen=True)
class ClipEncoder:
    """CLIP's text encoder.

    Attributes:
        component: its key in ``params``.
        cfg: its config.
        early: it is read one layer earlier, as SDXL was trained with.
    """

    component: str
    cfg: ClipTextConfig
    early: bool = False
    whole = False
    most = 0

    @property
    def tokenizer(self) -> str:
        return self.component.replace("text_encoder", "tokenizer")

    @property
    def spec(self) -> Spec:
        return text_encoder_spec(self.cfg, projection=self.component == SECOND)

    @property
    def tokens(self) -> int:
        return self.cfg.max_position_embeddings

    @property
    def width(self) -> int:
        return self.cfg.hidden_size

    @property
    def pooled_width(self) -> int:
        return self.cfg.projection_dim if self.component == SECOND else 0

    @property
    def max_skip(self) -> int:
        return self.cfg.num_hidden_layers - 1

    def encode(self, p: Params, ids: Array, skip: Array) -> Conditions:
        if not self.early:
            return {"text": text_encoder(p, ids, self.cfg, skip=skip)}
        chosen, last = hidden_states(p, ids, self.cfg, skip=skip + 1)
        pooled = {"pooled": pooled_text(p, last, ids, self.cfg)} if self.pooled_width else {}
        return {"text": chosen, **pooled}


@dataclass(frozen=True)
class TextEncoders:
    """The text encoders of a model as one, whose features lie side by side.

    Attributes:
        encoders: in the order of their features.
        places: for adapters beside their weights.
    """

    encoders: tuple[TextEncoder, ...]
    places: Places | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """Their configs, by the names of their components; for those that have one."""
        return {encoder.component: encoder.cfg for encoder in self.encoders if isinstance(encoder, ClipEncoder)}

    @property
    def names(self) -> tuple[str, ...]:
        """Their components."""
        return tuple(encoder.component for encoder in self.encoders)

    @property
    def specs(self) -> dict[str, Spec]:
        """Parameters of each encoder."""
        return {encoder.component: encoder.spec for encoder in self.encoders}

    @property
    def tokens(self) -> int:
        """T: tokens of a prompt, 77 for CLIP."""
        return min(encoder.tokens for encoder in self.encoders)

    @property
    def whole(self) -> bool:
        """Whether all chunks of a prompt are read at once."""
        return any(encoder.whole for encoder in self.encoders)

    @property
    def most(self) -> int:
        """Tokens of the longest prompt that is read at once."""
        return max(encoder.most for encoder in self.encoders)

    @property
    def width(self) -> int:
        """D: width of the features."""
        return sum(encoder.width for encoder in self.encoders)

    @property
    def pooled_width(self) -> int:
        """P: width of the pooled output, 0 where there is none."""
        return max(encoder.pooled_width for encoder in self.encoders)

    @property
    def max_skip(self) -> int:
        """The largest ``clip_skip``."""
        return min(encoder.max_skip for encoder in self.encoders)

    def conditions(self, batch: int, dtypes: Sequence[DType], chunks: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what ``encode_text`` returns, for parameters of each encoder in ``dtypes``,
        of prompts of so many ``chunks``.

        Said here and not asked of ``jax.eval_shape``: a process whose programs come from the cache traces nothing.
        """
        shapes = {"text": jax.ShapeDtypeStruct((batch, chunks * self.tokens, self.width), jnp.result_type(*dtypes))}
        for encoder, dtype in zip(self.encoders, dtypes, strict=True):
            if encoder.pooled_width:
                shapes["pooled"] = jax.ShapeDtypeStruct((batch, encoder.pooled_width), dtype)
        if self.whole:
            shapes["length"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return shapes


def clip_encoders(first: ClipTextConfig | None, second: ClipTextConfig | None = None) -> TextEncoders:
    """Those of Stable Diffusion 1.x and 2.x (``first`` alone), of SDXL (both), or of its refiner (``second`` alone)."""
    parts = ((FIRST, first), (SECOND, second))
    early = second is not None
    return TextEncoders(tuple(ClipEncoder(name, cfg, early) for name, cfg in parts if cfg is not None))


def encode_text(
    p: Params, ids: dict[str, Array], skip: Array, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> Conditions:
    """Token ids -> the conditions of a prompt.

    Args:
        p: parameters of each encoder, by component.
        ids: [B, T] for each encoder: SDXL's two have tokenizers of their own.
        skip: layers left out at the end, data; SDXL counts from the last but one, which it was trained with.
        shares: with ``cfg.places``, how much of each every image has [B, K] float32, for each encoder.
        cfg: the encoders.

    Returns:
        ``text`` [B, T, D] and, with a pooled output, ``pooled`` [B, P], in the dtype of the parameters.
    """
    if cfg.places is not None and shares is not None:
        p = {name: with_adapters(p[name], shares[name], spec, cfg.places) for name, spec in cfg.specs.items()}
    outputs = [encoder.encode(p[encoder.component], ids[encoder.component], skip) for encoder in cfg.encoders]
    joined = {name: value for output in outputs for name, value in output.items()}
    return {**joined, "text": jnp.concatenate([output["text"] for output in outputs], axis=-1)}
