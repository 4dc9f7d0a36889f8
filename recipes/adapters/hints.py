"""A ControlNet of small images learns to read larger ones: only the layers that read its control images change."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import canvax
from canvax.models.controlnet import ControlNet, HintConfig, embedded_hint
from canvax.parallel.mesh import make_mesh
from canvax.params import Params, init_params
from canvax.train.loop import Plan, Session, fit
from canvax.types import Array, HostArray
from canvax.weights.load import Component
from canvax.weights.save import save_component
from recipes.adapters.sets import edges
from recipes.emoji.enlarge import reduced

EMBEDDING = "controlnet_cond_embedding"
PLAN = Plan(steps=1500, batch=8, learning_rate=2e-3, warmup=50, average=0.99, chunk=25)


def with_larger_hints(
    model: str, network: Path, pixels: HostArray, folder: Path, factor: int = 4, plan: Plan = PLAN
) -> Path:
    """Write the ControlNet for control images that are ``factor`` times larger.

    Its new first layers learn, from edges of large pictures, what the old ones make of the edges of small ones.

    Args:
        model: the model of small images, which the network was trained for.
        network: folder of the network.
        pixels: large pictures [N, H, W, 3] uint8.
        folder: where the run is kept; the network is written to ``trained/edges/controlnet`` in it.
        factor: a power of two.
        plan: how long and how.
    """
    mesh = make_mesh(jax.devices()[:1])
    pipe = canvax.load(model, controlnet=network, dtype="float32", mesh=mesh, progress=False)
    ((name, net),) = pipe.model.networks.controls
    assert isinstance(net, ControlNet)
    assert pipe.params is not None
    params = jax.device_get(pipe.params[name])
    levels, widths = factor.bit_length() - 1, net.hint.conditioning_embedding_out_channels
    larger = replace(net, hint=replace(net.hint, conditioning_embedding_out_channels=(*widths[:1] * levels, *widths)))
    new, old = init_params(larger.spec, plan.seed)[EMBEDDING], params[EMBEDDING]
    moved = {str(int(i) + 2 * levels): block for i, block in old["blocks"].items()}
    begin = {**new, "blocks": {**new["blocks"], **moved}, "conv_out": old["conv_out"]}
    data = {
        "large": np.stack([edges(picture)[..., :1] for picture in pixels]),
        "small": np.stack([edges(picture)[..., :1] for picture in reduced(pixels, factor)]),
    }
    loss = partial(_loss, small=net.hint, large=larger.hint)
    trained, _ = fit(begin, loss, data, len(pixels), plan, Session(folder / "hints", "hints", mesh), {"old": old})
    config = json.loads((network / "config.json").read_text())
    config["conditioning_embedding_out_channels"] = list(larger.hint.conditioning_embedding_out_channels)
    target = folder / "trained" / "edges" / "controlnet"
    part = Component("controlnet", larger.spec, "diffusers")
    save_component(target, part, {**params, EMBEDDING: jax.device_get(trained)}, config, dtype="float16")
    return target


def _loss(
    p: Params, samples: dict[str, Array], shared: Any, key: Array, *, small: HintConfig, large: HintConfig
) -> tuple[Array, dict[str, Array]]:
    def image(grey: Array) -> Array:
        return jnp.repeat(grey.astype(jnp.float32) / 255, 3, axis=-1)

    wanted = embedded_hint(shared["old"], image(samples["small"]), small)
    seen = embedded_hint(p, image(samples["large"]), large)
    error = jnp.square(seen - wanted).mean() / jnp.var(wanted)
    return error, {"mse": error}
