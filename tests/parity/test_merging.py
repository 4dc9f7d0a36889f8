"""Merged tokens against ``tomesd``, the package of the paper's authors, on diffusers' UNet.

Which token of a window stays is random in both, from other generators; here it is the first one. And which tokens are
merged is a choice between similarities: where two are alike but for rounding, either is right, and the outputs differ
in the second digit. So the inputs are the first ones in which every choice is clear.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
tomesd = pytest.importorskip("tomesd")

from canvax.models import merging  # noqa: E402
from canvax.models.merging import Merging  # noqa: E402
from canvax.models.unet import unet, unet_spec  # noqa: E402

from .reference import nchw, nhwc, params_of, randomise, relative_error  # noqa: E402
from .test_models import UNETS, strip  # noqa: E402


@pytest.fixture(autouse=True)
def first_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    def corners(key: jax.Array, shape: tuple[int, ...], *_: int) -> jax.Array:
        del key
        return jnp.zeros(shape, jnp.int32)

    monkeypatch.setattr(merging.jax.random, "randint", corners)


CLEAR = 5e-6
"""How far apart similarities are whose order cannot depend on how a sum was rounded."""


def closest_choice(metric: torch.Tensor, w: int, h: int, merged: int) -> float:
    """The least difference between a similarity that :mod:`tomesd` chose and the next best.

    It chooses the ``merged`` tokens most like one that stays, and for each the one it is most like.
    """
    row, column = torch.arange(h * w) // w, torch.arange(h * w) % w
    stays = (row % 2 == 0) & (column % 2 == 0) & (row < h // 2 * 2) & (column < w // 2 * 2)
    unit = metric / metric.norm(dim=-1, keepdim=True)
    best = (unit[:, ~stays] @ unit[:, stays].mT).topk(2).values
    by_likeness, order = best[..., 0].sort(descending=True)
    ahead = (best[..., 0] - best[..., 1]).gather(1, order[:, :merged])
    last_and_next = by_likeness[:, merged - 1 : merged + 1]
    return float(torch.cat([ahead, last_and_next[:, :-1] - last_and_next[:, 1:]], dim=1).min())


@pytest.mark.parametrize(
    ("name", "size", "ratio"),
    [
        ("sd1", (16, 16), 0.5),
        ("sd1", (18, 13), 0.3),
        ("sd1", (18, 13), 0.75),
        ("no_attention_below", (16, 16), 0.75),
        ("no_attention_below", (18, 13), 0.5),
        ("deep_transformers", (18, 13), 0.5),
    ],
)
def test_merged_as_by_the_authors(
    name: str, size: tuple[int, int], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = UNETS[name]
    reference = randomise(diffusers.UNet2DConditionModel(**strip(cfg)))
    params = params_of(reference, unet_spec(cfg))
    time = np.array([981.0, 3.25], np.float32)
    choices: list[float] = []
    by_authors = tomesd.merge.bipartite_soft_matching_random2d

    def watched(metric: torch.Tensor, w: int, h: int, sx: int, sy: int, r: int, **more: Any) -> Any:
        choices.append(closest_choice(metric, w, h, r))
        return by_authors(metric, w, h, sx, sy, r, **more)

    monkeypatch.setattr(tomesd.merge, "bipartite_soft_matching_random2d", watched)

    def torch_output(x: np.ndarray, text: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return nhwc(reference(nchw(x), torch.from_numpy(time), torch.from_numpy(text)).sample)

    finest = 2 if cfg.down_block_types[0] == "DownBlock2D" else 1
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x, text = (rng.standard_normal(shape, np.float32) for shape in ((2, *size, 4), (2, 77, 48)))
        choices.clear()
        tomesd.apply_patch(reference, ratio=ratio, max_downsample=finest, use_rand=False)
        want = torch_output(x, text)
        if min(choices) > CLEAR:
            break
    else:
        pytest.fail("no inputs whose choices are all clear")
    tomesd.remove_patch(reference)
    whole = torch_output(x, text)
    merge = Merging(ratio, jnp.zeros((2, 2), jnp.uint32))
    got = jax.jit(lambda p, *told: unet(p, *told, cfg, merging=merge))(params, x, time, text)
    assert relative_error(got, want) < 1e-5
    assert relative_error(whole, want) > 1e-3
