"""FLUX.3's transformer against diffusers with the same random weights, float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from canvax.families.flux3 import STACKS
from canvax.models.flux3 import Flux3Config, flux3, flux3_context, flux3_spec, reference_ids
from tests.support.random_numbers import normal

from .families import flux3_network
from .reference import relative_error
from .transformers_reference import TOLERANCE, params_of, stored, to_torch, unfused

TIMES, TARGETS = np.array([981.0, 303.25], np.float32), np.array([903.0, 0.0], np.float32)
LENGTHS = np.array([19, 90], np.int32)
"""Of two texts: one window, and two."""
WINDOWS, ROWS = (80, 160), 240
REFERENCES = [(4, 6), (5, 3)]


def ids(height: int, width: int, index: int = 0) -> torch.Tensor:
    from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

    return _prepare_image_ids(height, width, 0.5, index)


@pytest.mark.parametrize("flow_map", [False, True], ids=["base", "distilled"])
@pytest.mark.parametrize("references", [0, 1, 2])
def test_network(flow_map: bool, references: int) -> None:
    """Two images of other sizes, other texts and another number of references, each as if it were alone."""
    theirs = flux3_network(flow_map)
    cfg = Flux3Config.from_dict(dict(theirs.config))
    params = params_of(unfused(stored(theirs), flux3_spec(cfg), STACKS), flux3_spec(cfg))
    sizes, x, text = [(3, 5), (5, 3)], normal(2, 15, 16), normal(2, ROWS, 96)
    counts = [references, max(references - 1, 0)]
    room = 48 if references else 0
    tokens = normal(2, 48, 16)
    places = [np.stack(np.meshgrid(k, range(h), range(w), indexing="ij"), axis=-1).reshape(-1, 3)
              for k, (h, w) in enumerate(REFERENCES, 1)]  # fmt: skip
    known = [np.concatenate([np.zeros((0, 3), int), *places[:count]]) for count in counts]
    given: dict[str, Any] = {}
    if references:
        padded = np.stack([np.pad(part, ((0, room - len(part)), (0, 0)), constant_values=7) for part in known])
        given = {
            "references": tokens,
            "ids": reference_ids(jnp.asarray(padded, jnp.int32)),
            "count": np.array([len(part) for part in known], np.int32),
        }

    @jax.jit
    def run(params: Any, given: Any) -> Any:
        width = jnp.array([w for _, w in sizes], jnp.int32)
        context = flux3_context(params, jnp.asarray(text), jnp.asarray(LENGTHS), width, cfg, tokens=15, **given)
        target = jnp.asarray(TARGETS) if flow_map else None
        return flux3(params, jnp.asarray(x), jnp.asarray(TIMES), context, cfg, target=target)

    got = run(params, given)
    for i, (count, window, size) in enumerate(zip(counts, WINDOWS, sizes, strict=True)):
        more: dict[str, Any] = {}
        if count:
            more["image_cond_hidden_states"] = to_torch(tokens[i : i + 1, : len(known[i])])
            more["image_cond_ids"] = torch.cat([ids(*REFERENCES[k], -1 - k) for k in range(count)])
        if flow_map:
            more["target_timestep"] = to_torch(TARGETS[i : i + 1] / 1000)
        with torch.no_grad():
            want = theirs(
                to_torch(x[i : i + 1]), to_torch(text[i : i + 1, :window]), to_torch(TIMES[i : i + 1] / 1000),
                ids(*size), torch.nn.functional.pad(torch.arange(window)[:, None], (3, 0)).float(), **more,
            ).sample.numpy()  # fmt: skip
        assert relative_error(got[i : i + 1], want) < TOLERANCE
