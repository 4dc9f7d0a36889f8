"""Levels around an autoencoder that make its pictures larger; its latents stay what they are.

The drawings are flat shapes with sharp edges, and a small picture says where these are to a fraction of its pixels. So
an autoencoder of small pictures, whose latents are cheap to learn, can draw large ones.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from canvax.models.configs import VaeConfig
from canvax.models.vae import down_blocks, up_blocks, vae_decode, vae_encode, vae_head, vae_middle, vae_spec
from canvax.nn import conv2d, conv2d_spec
from canvax.params import Params, Spec, init_params
from canvax.train.encoding import as_input
from canvax.train.loop import Plan, Session, fit
from canvax.train.objectives import cast
from canvax.types import Array, DType, HostArray

OUTLINES = 0.5
"""Weight of the error of differences between neighbouring pixels, where the error of pixels has weight 1.

Both errors are absolute: if the place of an edge is uncertain, the median of all pictures has a sharp edge, and their
mean a blur.
"""

CRITICISM = 0.03
"""Weight of the critic's opinion."""

NOISE = 0.2
"""Highest standard deviation of the noise on the latents of true drawings."""


def reduced(pixels: HostArray, factor: int) -> HostArray:
    """uint8 pictures [N, H, W, 3] with ``factor`` times fewer pixels along each side, the means of the others."""
    if factor == 1:
        return pixels
    zero = np.zeros((), np.uint16)
    rows = sum((pixels[:, i::factor] for i in range(factor)), zero)
    sums = sum((rows[:, :, i::factor] for i in range(factor)), zero)
    return ((sums + factor**2 // 2) // factor**2).astype(np.uint8)


def enlarged(small: Params, small_cfg: VaeConfig, cfg: VaeConfig, seed: int = 0) -> Params:
    """The parameters of ``small`` in an autoencoder of more levels, which are new, and those of a critic.

    The critic learns to tell true pieces of 31 pixels from drawn ones (Isola et al. 2017, section 3.2.2; the hinge loss
    of Lim and Ye 2017): where the latents leave an edge open, the decoder draws one all the same. The first of the
    small autoencoder's channels must be the last of the new ones.
    """
    new, _ = _parts(init_params(vae_spec(cfg), seed), small_cfg, cfg)
    shift, levels = len(cfg.block_out_channels) - len(small_cfg.block_out_channels), len(small_cfg.block_out_channels)
    moved = {
        **{name: small[name] for name in ("quant_conv", "post_quant_conv")},
        "encoder": {
            **{name: small["encoder"][name] for name in ("mid_block", "conv_norm_out", "conv_out")},
            "down_blocks": {str(i + shift): small["encoder"]["down_blocks"][str(i)] for i in range(levels)},
        },
        "decoder": {name: small["decoder"][name] for name in ("conv_in", "mid_block", "up_blocks")},
    }
    return _merged(jax.tree_util.tree_map_with_path(_calm, new), moved) | {"critic": init_params(_CRITIC, seed)}


def _calm(path: Any, leaf: HostArray) -> HostArray:
    """A new residual block begins by adding little."""
    return leaf * 0.1 if any(getattr(key, "key", None) == "conv2" for key in path) else leaf


def train_pieces(
    p: Params,
    small: Params,
    pixels: HostArray,
    latents: HostArray,
    configs: tuple[VaeConfig, VaeConfig],
    plan: Plan,
    session: Session,
    *,
    crop: int,
    new: bool,
    dtype: DType = jnp.float32,
) -> tuple[Params, bool]:
    """Train the decoder, and the encoder's new levels, on pieces of pictures.

    The levels that see a small picture see the whole of it, since they are cheap; the new ones see a piece.

    Args:
        p: parameters that :func:`enlarged` made.
        small: parameters of the autoencoder of small pictures.
        pixels: pictures [N, H, W, 3] uint8.
        latents: their latents in several versions, [N, V, h, w, C]: the true one first.
        configs: configs of the small and the large autoencoder.
        plan: how long and how.
        session: where the run is kept.
        crop: pixels of a piece in the small picture.
        new: train the new levels alone.
        dtype: dtype computed in.

    Returns:
        The parameters, and whether the run is finished.
    """
    levels, old = _parts(p, *configs)
    trained, frozen = (levels, old) if new else ({**levels, "decoder": p["decoder"]}, {**old, "decoder": {}})
    if not new:
        trained |= {name: frozen.pop(name) for name in ("post_quant_conv", "critic")}
    shared = {"frozen": frozen, "conv_in": small["encoder"]["conv_in"]}
    loss = partial(_pieces_loss, configs=configs, crop=crop, dtype=dtype)
    data = {"pixels": pixels, "latents": latents}
    trained, finished = fit(trained, loss, data, len(pixels), plan, session, shared)
    return _merged(trained, frozen), finished


def train_whole(
    p: Params,
    pixels: HostArray,
    latents: HostArray,
    cfg: VaeConfig,
    plan: Plan,
    session: Session,
    *,
    dtype: DType = jnp.float32,
) -> tuple[Params, bool]:
    """Train encoder and decoder further on whole pictures: group norms see other statistics there than in pieces.

    Arguments and result are those of :func:`train_pieces`.
    """
    loss = partial(_whole_loss, cfg=cfg, dtype=dtype)
    return fit(p, loss, {"pixels": pixels, "latents": latents}, len(pixels), plan, session)


_CRITIC_WIDTHS = (3, 16, 32, 64)
_CRITIC: Spec = {
    **{str(i): conv2d_spec(*widths) for i, widths in enumerate(pairwise(_CRITIC_WIDTHS))},
    "out": conv2d_spec(_CRITIC_WIDTHS[-1], 1),
}


def _judged(p: Params, images: Array) -> Array:
    """How true each piece of pictures in -1..1 seems to the critic [B, H / 8, W / 8, 1]."""
    h = images
    for i in range(len(_CRITIC_WIDTHS) - 1):
        h = jax.nn.leaky_relu(conv2d(p[str(i)], h, stride=2), 0.2)
    return conv2d(p["out"], h)


def _pieces_loss(
    p: Params, samples: dict[str, Array], shared: Any, key: Array, *, configs: tuple[VaeConfig, VaeConfig], crop: int,
    dtype: DType,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    small_cfg, cfg = configs
    factor = cfg.factor // small_cfg.factor
    latents_key, rows_key, columns_key = jax.random.split(key, 3)
    count, height, width, _ = samples["pixels"].shape
    latents, _ = _chosen(samples["latents"], latents_key)
    alone, critic = "critic" in shared["frozen"], {**p, **shared["frozen"]}["critic"]
    p = cast(_merged(p, shared["frozen"]), dtype)
    new, old = _parts(p, small_cfg, cfg)
    features = up_blocks(old["decoder"]["up_blocks"], vae_middle(old, latents.astype(dtype), small_cfg), small_cfg)
    rows = jax.random.randint(rows_key, (count,), 0, height // factor - crop + 1)
    columns = jax.random.randint(columns_key, (count,), 0, width // factor - crop + 1)

    def pieces(pictures: Array, scale: int) -> Array:
        def piece(picture: Array, row: Array, column: Array) -> Array:
            size = (scale * crop, scale * crop, picture.shape[-1])
            return jax.lax.dynamic_slice(picture, (scale * row, scale * column, 0), size)

        return jax.vmap(piece)(pictures, rows, columns)

    images = as_input(pieces(samples["pixels"], factor))
    drawn = vae_head(p["decoder"], up_blocks(new["decoder"]["up_blocks"], pieces(features, 1), cfg), cfg)
    inner = slice(factor, -factor)  # at the edges of a piece its neighbours are missing
    loss, error = picture_error(drawn[:, inner, inner], images[:, inner, inner])
    if not alone:
        loss += critical_error(critic, drawn[:, inner, inner], images[:, inner, inner])
    some = images[: _few(count)]
    wanted = conv2d(shared["conv_in"], some.reshape(-1, crop, factor, crop, factor, 3).mean((2, 4)))
    seen = down_blocks(new["encoder"]["down_blocks"], conv2d(p["encoder"]["conv_in"], some.astype(dtype)), cfg)
    inside = jnp.square(seen.astype(jnp.float32) - wanted)[:, 1:-1, 1:-1].mean() / jnp.var(wanted)
    return loss + inside, {"mse": error, "encoder": inside}


def _whole_loss(
    p: Params, samples: dict[str, Array], shared: None, key: Array, *, cfg: VaeConfig, dtype: DType
) -> tuple[Array, dict[str, Array]]:
    latents, true = _chosen(samples["latents"], key)
    critic, p, images = p["critic"], cast(p, dtype), as_input(samples["pixels"])
    drawn = vae_decode(p, latents.astype(dtype), cfg).astype(jnp.float32)
    loss, error = picture_error(drawn, images)
    loss += critical_error(critic, drawn, images)
    some = _few(len(images))
    mean, _ = vae_encode(p, images[:some].astype(dtype), cfg)
    encoder = jnp.square(mean.astype(jnp.float32) - true[:some]).mean()
    return loss + encoder, {"mse": error, "encoder": encoder}


def _few(count: int) -> int:
    """How many of a batch the encoder sees, which is quicker to learn than the decoder."""
    return max(1, count // 4)


def _chosen(versions: Array, key: Array) -> tuple[Array, Array]:
    """One version of each picture's latents [B, h, w, C], with noise if it is the true one; and the true ones."""
    which_key, size_key, noise_key = jax.random.split(key, 3)
    which = jax.random.randint(which_key, versions.shape[:1], 0, versions.shape[1])
    chosen = jax.vmap(lambda forms, index: forms[index])(versions, which).astype(jnp.float32)
    size = NOISE * jax.random.uniform(size_key, (len(which), 1, 1, 1)) * (which == 0)[:, None, None, None]
    return chosen + size * jax.random.normal(noise_key, chosen.shape), versions[:, 0].astype(jnp.float32)


def picture_error(drawn: Array, images: Array) -> tuple[Array, Array]:
    """Mean absolute error of pixels and outlines; and the mean squared error of pixels, for the log."""
    error = drawn.astype(jnp.float32) - images
    outlines = jnp.abs(jnp.diff(error, axis=1)).mean() + jnp.abs(jnp.diff(error, axis=2)).mean()
    return jnp.abs(error).mean() + OUTLINES * outlines, jnp.square(error).mean()


def critical_error(critic: Params, drawn: Array, images: Array) -> Array:
    """What the decoder loses if the critic sees that pictures are drawn, plus what the critic loses if it errs.

    Each is a constant to the other, so that one optimiser serves both.
    """
    drawn = drawn.astype(jnp.float32)
    seen = -_judged(jax.lax.stop_gradient(critic), drawn).mean()
    true, false = _judged(critic, images), _judged(critic, jax.lax.stop_gradient(drawn))
    return CRITICISM * seen + jax.nn.relu(1 - true).mean() + jax.nn.relu(1 + false).mean()


def _parts(p: Params, small: VaeConfig, cfg: VaeConfig) -> tuple[Params, Params]:
    """New levels, and those of the small autoencoder."""
    levels = len(small.block_out_channels)
    shift, last = len(cfg.block_out_channels) - levels, str(levels - 1)
    encoder, decoder = p["encoder"], p["decoder"]
    ups, downs = decoder["up_blocks"], encoder["down_blocks"]
    new = {
        "encoder": {
            "conv_in": encoder["conv_in"],
            "down_blocks": {i: block for i, block in downs.items() if int(i) < shift},
        },
        "decoder": {
            "up_blocks": {
                last: {"resnets": {}, "upsamplers": ups[last]["upsamplers"]},
                **{i: block for i, block in ups.items() if int(i) >= levels},
            },
            "conv_norm_out": decoder["conv_norm_out"],
            "conv_out": decoder["conv_out"],
        },
    }
    old = {
        **p,
        "encoder": {
            **{name: part for name, part in encoder.items() if name not in ("conv_in", "down_blocks")},
            "down_blocks": {i: block for i, block in downs.items() if int(i) >= shift},
        },
        "decoder": {
            **{name: part for name, part in decoder.items() if name in ("conv_in", "mid_block")},
            "up_blocks": {
                i: {"resnets": block["resnets"]} if i == last else block for i, block in ups.items() if int(i) < levels
            },
        },
    }
    return new, old


def _merged(a: Params, b: Params) -> Params:
    """Both, level by level."""
    shared = {name: _merged(a[name], b[name]) for name in a.keys() & b.keys() if isinstance(a[name], dict)}
    return {**a, **b, **shared}
