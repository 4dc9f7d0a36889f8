"""The safety checker of Stable Diffusion 1.x, which replaces images of certain concepts by black ones.

CLIP's image encoder gives each image a vector, which is compared with those of 17 concepts, and of 3 that lower the
thresholds; vectors and thresholds are in the checkpoint (Rando et al. 2022, "Red-Teaming the Stable Diffusion Safety
Filter", describe it). It has false positives and false negatives, and was made for photographs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.images.convert import to_pil
from canvax.images.formats import GeneratedImage
from canvax.images.inputs import clip_square
from canvax.kernels.target import jitted
from canvax.models.clip_vision import vision_encoder, vision_encoder_spec
from canvax.models.configs import ClipVisionConfig
from canvax.nn import linear
from canvax.params import Param, Params, Spec
from canvax.pipelines.result import Result
from canvax.types import Array, HostArray
from canvax.weights.load import Component, load_components
from canvax.weights.location import Location
from canvax.weights.open import open_network

COMPONENT = "safety_checker"
CONCEPTS, SPECIAL = 17, 3
STRICTER = 0.01
"""Amount that a special concept in an image adds to its similarity to each other concept."""

_LIMITS = {"concept": "concept_embeds", "special": "special_care_embeds"}
"""The thresholds of ``SafetyChecker.params``, and the vectors that they belong to."""


@dataclass(frozen=True, eq=False)
class SafetyChecker:
    """A safety checker on the first device, in float32.

    Attributes:
        cfg: config of its image encoder.
        params: its parameters, those of ``safety_spec``.
    """

    cfg: ClipVisionConfig
    params: Params = field(repr=False)

    @classmethod
    def of(cls, cfg: ClipVisionConfig, tree: Params) -> SafetyChecker:
        """Make a checker from the parameters of ``safety_spec``, under the names of the released checkpoints."""
        return cls(cfg, {**tree, **{name: tree[f"{vectors}_weights"] for name, vectors in _LIMITS.items()}})

    def flags(self, pixels: HostArray) -> list[bool]:
        """Return for each image [B, H, W, C] in 0..1 whether it is refused."""
        if not len(pixels):
            return []
        return self.judge(np.stack([clip_square(image, self.cfg.image_size) for image in to_pil(pixels)]))

    def judge(self, seen: HostArray) -> list[bool]:
        """Judge images in CLIP's size: [B, S, S, 3] float32 in 0..1, where S is the config's ``image_size``."""
        special, concepts = (np.asarray(cosines, np.float64) for cosines in _cosines(self.params, seen, cfg=self.cfg))
        limits = {name: np.asarray(self.params[name], np.float64) for name in _LIMITS}
        return [refused(*row, limits["special"], limits["concept"]) for row in zip(special, concepts, strict=True)]

    def blacken(self, pixels: HostArray) -> tuple[HostArray, list[bool]]:
        """Make refused images [B, H, W, C] black; return the images, and whether each is refused."""
        flags = self.flags(pixels)
        black = np.zeros_like(pixels)
        black[..., 3:] = 1  # opaque
        return np.where(kept(flags), pixels, black), flags

    def __call__(self, result: Result) -> Result:
        """Return ``result`` with refused images in black, and with ``nsfw`` in the metadata of each.

        A result without pixels (``output_type="latent"``, ``denoising_end``) is returned unchanged.
        """
        if not len(result.pixels):
            return result
        pixels, flags = self.blacken(result.pixels)
        records = [{**record, "nsfw": flag} for record, flag in zip(result.metadata, flags, strict=True)]
        images = [GeneratedImage.of(image, record) for image, record in zip(to_pil(pixels), records, strict=True)]
        # The latents of a refused image are removed too.
        return replace(result, pixels=pixels, images=images, metadata=records, latents=result.latents * kept(flags))


def kept(flags: Sequence[bool]) -> HostArray:
    """Return the factor of each image [B, 1, 1, 1]: False if it is refused."""
    return ~np.asarray(flags, bool)[:, None, None, None]


def has_checker(index: Mapping[str, Any]) -> bool:
    """Return True if a ``model_index.json`` names a safety checker."""
    return index.get(COMPONENT) not in (None, [None, None])


def check_has_checker(index: Mapping[str, Any]) -> None:
    """Refuse a model without a safety checker, by its ``model_index.json``."""
    if not has_checker(index):
        raise CheckpointError(
            "safety_checker=True: this model has none (its model_index.json names none); leave it out"
        )


def load_safety_checker(source: Location) -> SafetyChecker:
    """Load the safety checker of a model onto the first device; errors are those of ``read_safety_checker``."""
    config, tree = read_safety_checker(source, jax.local_devices()[0])
    return SafetyChecker.of(vision_config(config), tree)


def read_safety_checker(source: Location, device: Any, folder: str = COMPONENT) -> tuple[dict[str, Any], Params]:
    """Read the config of a safety checker, and its parameters (``safety_spec``) in float32 onto ``device``.

    Args:
        source: a model, or a repository with the checker alone.
        device: device of its parameters.
        folder: folder of the checker, "" for the top.

    Raises:
        CheckpointError: the model has no safety checker, or it is damaged.
        HubError: the Hub cannot be reached.
    """

    def accept(config: Mapping[str, Any]) -> None:
        vision_config(config)

    files = open_network(source, accept=accept, component=folder, kind="transformers")
    config = files.config
    loaded = load_components(
        files,
        [Component(folder, safety_spec(vision_config(config)), "transformers")],
        dtype=np.float32,
        place=lambda param, array: jax.device_put(array, device),
    )
    return dict(config), loaded[folder]


def safety_spec(cfg: ClipVisionConfig) -> Spec:
    """Declare the parameters, named as in the released checkpoints."""
    width = cfg.projection_dim
    return {
        "vision_model": vision_encoder_spec(cfg),
        "visual_projection": {"weight": Param((cfg.hidden_size, width), ("embed", None), layout="linear")},
        "concept_embeds": Param((CONCEPTS, width), (None, None), "normal"),
        "special_care_embeds": Param((SPECIAL, width), (None, None), "normal"),
        "concept_embeds_weights": Param((CONCEPTS,), (None,), "ones"),
        "special_care_embeds_weights": Param((SPECIAL,), (None,), "ones"),
    }


def refused(special: Sequence[float], concepts: Sequence[float], stricter: HostArray, limits: HostArray) -> bool:
    """Return whether cosines are beyond their limits, each rounded to three digits as the original does."""
    adjustment = 0.0
    for cosine, limit in zip(special, stricter, strict=True):
        if round(cosine - limit + adjustment, 3) > 0:
            adjustment = STRICTER
    return any(round(cosine - limit + adjustment, 3) > 0 for cosine, limit in zip(concepts, limits, strict=True))


@partial(jitted, static_argnames="cfg")
def _cosines(p: Params, images: Array, *, cfg: ClipVisionConfig) -> tuple[Array, Array]:
    """Return the cosines of images [B, S, S, 3] with the special concepts [B, 3] and the others [B, 17]."""
    _, pooled = vision_encoder(p["vision_model"], images, cfg)
    seen = _unit(linear(p["visual_projection"], pooled))
    with jax.default_matmul_precision("highest"):
        return seen @ _unit(p["special_care_embeds"]).T, seen @ _unit(p["concept_embeds"]).T


def _unit(vectors: Array) -> Array:
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def vision_config(config: Mapping[str, Any]) -> ClipVisionConfig:
    """Return the config of the image encoder in a safety checker's ``config.json``.

    Raises:
        CheckpointError: it is missing.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise CheckpointError("the safety checker's config.json has no vision_config; canvax reads those of CLIP")
    return ClipVisionConfig.from_dict({**vision, "projection_dim": config.get("projection_dim")})
