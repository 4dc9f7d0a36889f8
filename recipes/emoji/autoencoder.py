"""Training an ``AutoencoderKL`` on pictures, giving its latents unit variance, and encoding pictures with it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.kernels.target import compiling_on
from canvax.models.configs import VaeConfig
from canvax.models.vae import vae_decode, vae_encode, vae_spec
from canvax.parallel.mesh import padded_batch, replicated
from canvax.params import Params, init_params
from canvax.train.encoding import as_input, by_batches, encode_pictures, jitted
from canvax.train.loop import Plan, Session, fit
from canvax.train.objectives import autoencoder_loss, cast, reconstruction_loss
from canvax.types import Array, DType, HostArray

KL, EDGES = 3e-4, 0.05
"""Usual weights of the divergence and of the outlines beside the squared error. The divergence is only there to keep
the encoder's noise from vanishing, so that near latents mean near pictures."""

VARIANCE, LEAST = 0.5, 0.001
"""Mean variance of the channels of the latents, and the least beside the largest."""


def train_autoencoder(
    pixels: HostArray,
    cfg: VaeConfig,
    plan: Plan,
    session: Session,
    *,
    crop: int,
    kl: float = KL,
    dtype: DType = jnp.float32,
) -> tuple[Params, bool]:
    """Train on random ``crop`` x ``crop`` pieces of pictures [N, H, W, 3] uint8.

    Pieces make small batches of many pictures cheap, and a convolutional network draws whole ones as well.

    Args:
        pixels: the pictures.
        cfg: the config.
        plan: how long and how.
        session: where the run is kept.
        crop: pixels of a piece, divisible by the autoencoder's factor.
        kl: weight of the divergence.
        dtype: dtype computed in; parameters are kept in float32.

    Returns:
        The parameters, and whether the run is finished.
    """
    if crop % cfg.factor or crop > min(pixels.shape[1:3]):
        raise InputError(f"crop = {crop} must be divisible by {cfg.factor} and at most {min(pixels.shape[1:3])}")
    params = init_params(vae_spec(cfg), plan.seed)
    loss = partial(_crop_loss, cfg=cfg, crop=crop, kl=kl, dtype=dtype)
    return fit(params, loss, {"pixels": pixels}, len(pixels), plan, session)


def _crop_loss(
    p: Params,
    samples: dict[str, Array],
    shared: None,
    key: Array,
    *,
    cfg: VaeConfig,
    crop: int,
    kl: float,
    dtype: DType,
) -> tuple[Array, dict[str, Array]]:
    rows_key, columns_key, noise_key = jax.random.split(key, 3)
    count, height, width, _ = samples["pixels"].shape
    rows = jax.random.randint(rows_key, (count,), 0, height - crop + 1)
    columns = jax.random.randint(columns_key, (count,), 0, width - crop + 1)

    def piece(picture: Array, row: Array, column: Array) -> Array:
        return jax.lax.dynamic_slice(picture, (row, column, 0), (crop, crop, 3))

    images = as_input(jax.vmap(piece)(samples["pixels"], rows, columns)).astype(dtype)
    side = crop // cfg.factor
    noise = jax.random.normal(noise_key, (count, side, side, cfg.latent_channels), jnp.float32)
    return autoencoder_loss(cast(p, dtype), images, noise, cfg, kl=kl, edges=EDGES)


DECODER = ("decoder", "post_quant_conv")
"""Parts of an autoencoder that make pictures of latents."""

LATENT_NOISE = 0.2
"""Highest standard deviation of the noise that the decoder sees latents with: a denoiser's are never quite those of a
picture, and what they are off by shall not show as spots."""


def train_decoder(
    p: Params, pixels: HostArray, cfg: VaeConfig, plan: Plan, session: Session, *, dtype: DType = jnp.float32
) -> tuple[Params, bool]:
    """Train the decoder further, on whole pictures [N, H, W, 3] uint8 and mirrored ones; latents stay what they are.

    An autoencoder that has seen pieces alone knows neither the statistics of whole pictures, by which its
    normalisations and the attention in its middle go, nor their edges. The latents should be in the metric of pixels
    (:func:`in_pixel_metric`): they get noise, as much in each channel.

    Returns:
        The parameters of the autoencoder, and whether the run is finished.
    """
    forms = [encode_pictures(p, form, cfg, session.mesh).astype(np.float16) for form in (pixels, pixels[:, :, ::-1])]
    data = {"pixels": pixels, "latents": np.stack(forms, axis=1)}
    loss = partial(_decoder_loss, cfg=cfg, dtype=dtype)
    trained, finished = fit({name: p[name] for name in DECODER}, loss, data, len(pixels), plan, session)
    return {**p, **trained}, finished


def _decoder_loss(
    p: Params, samples: dict[str, Array], shared: None, key: Array, *, cfg: VaeConfig, dtype: DType
) -> tuple[Array, dict[str, Array]]:
    form_key, size_key, noise_key = jax.random.split(key, 3)
    form = jax.random.randint(form_key, samples["pixels"].shape[:1], 0, 2)
    images = as_input(samples["pixels"])
    images = jnp.where(form[:, None, None, None] == 1, images[:, :, ::-1], images)
    latents = jax.vmap(lambda forms, index: forms[index])(samples["latents"], form).astype(jnp.float32)
    size = jax.random.uniform(size_key, (*form.shape, 1, 1, 1), maxval=LATENT_NOISE)
    latents += size * jax.random.normal(noise_key, latents.shape)
    drawn = vae_decode(cast(p, dtype), latents.astype(dtype), cfg)
    loss, mse = reconstruction_loss(drawn, images, EDGES)
    return loss, {"mse": mse}


def in_pixel_metric(p: Params, pixels: HostArray, cfg: VaeConfig, mesh: Mesh) -> Params:
    """The same autoencoder with latents in which distances are about those of the pixels.

    Training leaves latents in a basis of its own making, where a channel that hardly shows can vary as much as one that
    is half the picture. A denoiser would spend as much on the one as on the other, and its errors in the first are
    speckle in the second's place. So channels are turned and scaled: with the covariance C of the latents and the mean
    G of J^T J over places, where J is the decoder's Jacobian, the eigenvectors of sqrt(C) G sqrt(C) are uncorrelated,
    and their eigenvalues are the squares that each adds to the pixels. Means become 0 and variances these eigenvalues,
    scaled to a mean of :data:`VARIANCE`, none below :data:`LEAST` of the largest.

    The change is folded into the 1x1 convolutions around the latents, so the scaling factor is 1 and no reader has to
    know of it. The encoder's variances become their average.

    Raises:
        InputError: the autoencoder lacks those convolutions, or has a scaling factor.
    """
    if not (cfg.use_quant_conv and cfg.use_post_quant_conv) or cfg.scaling_factor != 1 or cfg.shift_factor:
        raise InputError("this needs use_quant_conv, use_post_quant_conv and scaling_factor 1 in the VAE's config")
    latents = encode_pictures(p, pixels, cfg, mesh)
    flat = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
    mean, covariance = flat.mean(0), np.atleast_2d(np.cov(flat, rowvar=False))
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 1e-6 * values.max())) @ vectors.T
    energy, turn = np.linalg.eigh(root @ _pixel_gram(p, latents, cfg, mesh) @ root)
    energy = np.maximum(energy, LEAST * energy.max())
    std = np.sqrt(energy * VARIANCE / energy.mean())
    there = (turn * std).T @ np.linalg.inv(root)  # new = there @ (old - mean)
    back = root @ (turn / std)
    before, after = (
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p[n]) for n in ("quant_conv", "post_quant_conv")
    )
    half = cfg.latent_channels
    spread = np.exp(_mean_logvar(p, pixels, cfg, mesh))
    new = {
        "quant_conv": {
            "weight": np.concatenate([before["weight"][:, :half] @ there.T, 0 * before["weight"][:, half:]], axis=1),
            "bias": np.concatenate([there @ (before["bias"][:half] - mean), np.log(np.square(there) @ spread)]),
        },
        "post_quant_conv": {"weight": back.T @ after["weight"], "bias": after["bias"] + mean @ after["weight"]},
    }
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), {**p, **new})


def _pixel_gram(
    p: Params, latents: HostArray, cfg: VaeConfig, mesh: Mesh, *, seed: int = 0, pictures: int = 64
) -> HostArray:
    """Mean over places of J^T J [C, C], J being what the decoder makes of a small change of a place: E[g g^T] over
    g = J^T r with random r of unit variance."""
    rng = np.random.default_rng(seed)
    some = latents[rng.choice(len(latents), min(pictures, len(latents)), replace=False)]

    @jax.jit
    def gram(p: Params, latents: Array, key: Array) -> Array:
        drawn, pull = jax.vjp(lambda latents: vae_decode(p, latents, cfg), latents)
        (g,) = pull(jax.random.normal(key, drawn.shape))
        return jnp.einsum("bhwi,bhwj->ij", g, g) / g[..., 0].size

    with compiling_on(mesh):
        return np.asarray(gram(jax.device_put(p, replicated(mesh)), some, jax.random.key(seed)), np.float64)


def _mean_logvar(p: Params, pixels: HostArray, cfg: VaeConfig, mesh: Mesh) -> HostArray:
    """Mean over some pictures of the log of the encoder's variances [C]."""
    with compiling_on(mesh):
        _, logvar = jax.jit(partial(vae_encode, cfg=cfg))(
            jax.device_put(p, replicated(mesh)), as_input(jnp.asarray(pixels[:64]))
        )
    return np.asarray(logvar, np.float64).mean((0, 1, 2))


def decode_latents(p: Params, latents: HostArray, cfg: VaeConfig, mesh: Mesh, *, batch: int = 32) -> HostArray:
    """Pictures [N, H, W, 3] float32 in 0..1 from latents as the UNet sees them."""

    return by_batches(_decoder(cfg, mesh), p, latents, mesh, padded_batch(batch, mesh))


def reconstruction_psnr(p: Params, pixels: HostArray, cfg: VaeConfig, mesh: Mesh) -> HostArray:
    """Peak signal-to-noise ratio in dB of each picture after encoding and decoding [N]."""
    drawn = decode_latents(p, encode_pictures(p, pixels, cfg, mesh), cfg, mesh)
    error = np.square(drawn - pixels.astype(np.float32) / 255).mean((1, 2, 3))
    return -10 * np.log10(np.maximum(error, 1e-12))


@lru_cache(maxsize=4)
def _decoder(cfg: VaeConfig, mesh: Mesh) -> Any:
    def decode(p: Params, latents: Array) -> Array:
        return jnp.clip(vae_decode(p, latents, cfg) / 2 + 0.5, 0.0, 1.0)

    return jitted(decode, mesh)
