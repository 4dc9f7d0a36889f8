"""The text encoders of a model as one: from token ids to everything the UNet is told about a prompt.

Stable Diffusion 1.x and 2.x have one encoder. SDXL has two, read one layer earlier and put side by side, and the second
also gives one pooled vector (Podell et al. 2023, section 2.1). Its refiner has the second alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from canvax.models.beside import Places, with_adapters
from canvax.models.clip import hidden_states, pooled_text, text_encoder, text_encoder_spec
from canvax.models.configs import ClipTextConfig
from canvax.params import Params, Spec
from canvax.types import Array, DType

Conditions = dict[str, Array]
"""What the UNet is told beside latents and timestep, by the names of its arguments: ``text`` [B, T, D]; SDXL also
``pooled`` [B, P] and ``time_ids`` [B, n] float32. What networks have read of images is a tree of arrays."""

FIRST, SECOND = "text_encoder", "text_encoder_2"

IMAGE_PROMPTS = "image_prompts"
"""Among the conditions of an image: for each IP-Adapter, by its component, a ``canvax.models.ip_adapter.ImageKV``."""

IMAGE_ENCODER = "image_encoder"
"""The component of CLIP's image encoder, which all adapters of a pipeline share."""


@dataclass(frozen=True)
class TextEncoders:
    """Configs of a model's text encoders.

    Attributes:
        first: ``text_encoder``; None in SDXL's refiner.
        second: ``text_encoder_2``, the one with the pooled output; None in Stable Diffusion 1.x and 2.x.
        places: for adapters beside their weights.
    """

    first: ClipTextConfig | None
    second: ClipTextConfig | None = None
    places: Places | None = None

    @property
    def parts(self) -> dict[str, ClipTextConfig]:
        """The encoders there are, by the names of their components, in the order of their features."""
        return {name: cfg for name, cfg in ((FIRST, self.first), (SECOND, self.second)) if cfg is not None}

    @property
    def specs(self) -> dict[str, Spec]:
        """Parameters of each encoder."""
        return {name: text_encoder_spec(cfg, projection=name == SECOND) for name, cfg in self.parts.items()}

    @property
    def tokens(self) -> int:
        """T: tokens of a prompt, 77."""
        return min(cfg.max_position_embeddings for cfg in self.parts.values())

    @property
    def width(self) -> int:
        """D: width of the features."""
        return sum(cfg.hidden_size for cfg in self.parts.values())

    @property
    def pooled_width(self) -> int:
        """P: width of the pooled output, 0 where there is none."""
        return self.second.projection_dim if self.second else 0

    @property
    def max_skip(self) -> int:
        """The largest ``clip_skip``."""
        return min(cfg.num_hidden_layers for cfg in self.parts.values()) - 1

    def conditions(self, batch: int, dtypes: Sequence[DType], chunks: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of what ``encode_text`` returns, for parameters of each encoder in ``dtypes``,
        of prompts of so many ``chunks``.

        Said here and not asked of ``jax.eval_shape``: a process whose programs come from the cache traces nothing.
        """
        found = {"text": jax.ShapeDtypeStruct((batch, chunks * self.tokens, self.width), jnp.result_type(*dtypes))}
        if self.second is not None:
            found["pooled"] = jax.ShapeDtypeStruct((batch, self.pooled_width), dtypes[-1])
        return found


def encode_text(
    p: Params, ids: dict[str, Array], skip: Array, shares: dict[str, Array] | None = None, *, cfg: TextEncoders
) -> Conditions:
    """Token ids -> what the UNet is told about a prompt.

    Args:
        p: parameters of each encoder, by component.
        ids: [B, T] for each encoder: SDXL's two have tokenizers of their own.
        skip: layers left out at the end, data; SDXL counts from the last but one, which it was trained with.
        shares: with ``cfg.places``, how much of each every image has [B, K] float32, for each encoder.
        cfg: the configs.

    Returns:
        ``text`` [B, T, D] and, with a second encoder, ``pooled`` [B, P], in the dtype of the parameters.
    """
    if cfg.places is not None and shares is not None:
        specs = cfg.specs
        p = {name: with_adapters(p[name], shares[name], specs[name], cfg.places) for name in cfg.parts}
    if cfg.first is not None and cfg.second is None:
        return {"text": text_encoder(p[FIRST], ids[FIRST], cfg.first, skip=skip)}
    features, pooled = [], {}
    for name, part in cfg.parts.items():
        chosen, last = hidden_states(p[name], ids[name], part, skip=skip + 1)
        features.append(chosen)
        if name == SECOND:
            pooled = {"pooled": pooled_text(p[name], last, ids[name], part)}
    return {"text": jnp.concatenate(features, axis=-1), **pooled}
