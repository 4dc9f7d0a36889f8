"""A ControlNet of small pictures learns to read large ones: the first layers of what reads its control images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.models.controlnet import HintConfig, controlnet_spec, embedded_hint
from canvax.params import Params, init_params
from canvax.train.loop import Plan, Session, fit
from canvax.types import Array, HostArray
from recipes.adapters.sets import edges
from recipes.emoji.enlarge import reduced

EMBEDDING = "controlnet_cond_embedding"
PLAN = Plan(steps=1500, batch=8, learning_rate=2e-3, warmup=50, average=0.99)


def larger_hints(
    net: Any, params: Params, pixels: HostArray, factor: int, folder: Path, mesh: Mesh, plan: Plan = PLAN
) -> tuple[Any, Params]:
    """The network for control images that are ``factor`` times larger; what it adds to the UNet stays what it is.

    Args:
        net: the record of the network, a ``ControlNet``.
        params: its parameters.
        pixels: large pictures [N, H, W, 3] uint8, whose edges it learns from.
        factor: a power of two.
        folder: where the run is kept.
        mesh: the devices.
        plan: how long and how.

    Returns:
        The record and the parameters of the larger network.
    """
    levels, widths = factor.bit_length() - 1, net.hint.conditioning_embedding_out_channels
    larger = replace(net, hint=replace(net.hint, conditioning_embedding_out_channels=(*widths[:1] * levels, *widths)))
    old = params[EMBEDDING]
    new = init_params(controlnet_spec(larger), 0)[EMBEDDING]
    blocks = {str(int(i) + 2 * levels): block for i, block in old["blocks"].items()}
    begin = {**new, "blocks": {**new["blocks"], **blocks}, "conv_out": old["conv_out"]}
    data = {
        "large": np.stack([edges(picture)[..., :1] for picture in pixels]),
        "small": np.stack([edges(picture)[..., :1] for picture in reduced(pixels, factor)]),
    }
    loss = partial(_loss, small=net.hint, large=larger.hint)
    trained, _ = fit(begin, loss, data, len(pixels), plan, Session(folder, "hints", mesh), {"old": old})
    return larger, {**params, EMBEDDING: trained}


def _loss(
    p: Params, samples: dict[str, Array], shared: Any, key: Array, *, small: HintConfig, large: HintConfig
) -> tuple[Array, dict[str, Array]]:
    def image(grey: Array) -> Array:
        return jnp.repeat(grey.astype(jnp.float32) / 255, 3, axis=-1)

    wanted = embedded_hint(shared["old"], image(samples["small"]), small)
    seen = embedded_hint(p, image(samples["large"]), large)
    error = jnp.square(seen - wanted).mean() / jnp.var(wanted)
    return error, {"mse": error}
