"""A look at a picture while it is drawn: a tiny decoder for what a callback is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from canvax.errors import NO_VALUE, CheckpointError, InputError
from canvax.images.convert import to_pil
from canvax.kernels.target import jitted
from canvax.models.configs import TinyConfig
from canvax.models.tiny import tiny_decode, tiny_spec
from canvax.params import Params
from canvax.types import Array, HostArray
from canvax.weights.load import Component, load_components
from canvax.weights.location import Location
from canvax.weights.open import open_network


@dataclass(frozen=True, eq=False)
class Preview:
    """A tiny decoder on the first device, in float32.

    Attributes:
        cfg: its config.
        params: its parameters, those of ``canvax.models.tiny.tiny_spec``.
    """

    cfg: TinyConfig
    params: Params = field(repr=False)

    def pixels(self, latents: HostArray) -> HostArray:
        """Latents [B, h, w, C], such as ``step.denoised`` -> pictures [B, f h, f w, 3] float32 in 0..1.

        It compiles once for each shape.

        Raises:
            InputError: latents of another model.
        """
        latents = np.asarray(latents, np.float32)
        if latents.ndim != 4 or latents.shape[-1] != self.cfg.latent_channels:
            raise InputError(
                "latents", NO_VALUE, f"are {latents.shape}", f"this decoder takes [B, h, w, {self.cfg.latent_channels}]"
            )
        return jax.device_get(_pixels(self.params, jax.device_put(latents), cfg=self.cfg))

    def images(self, latents: HostArray) -> list[Image.Image]:
        """The same as pictures of Pillow."""
        return to_pil(self.pixels(latents))


def load_preview(
    model: str | Path,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    progress: bool = True,
) -> Preview:
    """Load an ``AutoencoderTiny``, such as madebyollin/taesd for Stable Diffusion 1.x and 2.x or madebyollin/taesdxl.

    Args:
        model: a folder with ``config.json`` and its weights, or a Hub id of one.
        revision: branch, tag or commit of a Hub id.
        variant: which of several sets of weights.
        token: Hub token; by default HF_TOKEN or the stored login.
        cache_dir: where the Hub's files are kept.
        local_files_only: never ask the Hub.
        progress: show downloads on stderr.

    Raises:
        InputError, CheckpointError, HubError: as ``canvax.load``.
    """

    def accept(config: Mapping[str, Any]) -> None:
        kind = config.get("_class_name")
        if kind != "AutoencoderTiny":
            raise CheckpointError(
                f"{model}: is {kind!r}; a preview needs an 'AutoencoderTiny', such as madebyollin/taesd"
            )
        try:
            TinyConfig.from_dict(config)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from None

    source = Location(model, revision, variant, token, cache_dir, local_files_only, progress)
    files = open_network(source, accept=accept)
    cfg = TinyConfig.from_dict(files.config)
    device = jax.local_devices()[0]
    loaded = load_components(
        files,
        [Component("", tiny_spec(cfg), "diffusers")],
        dtype=np.float32,
        place=lambda param, array: jax.device_put(array, device),
        finite=("",),
    )
    return Preview(cfg, loaded[""])


@partial(jitted, static_argnames="cfg")
def _pixels(p: Params, latents: Array, *, cfg: TinyConfig) -> Array:
    return jnp.clip(tiny_decode(p, latents, cfg), 0.0, 1.0)
