"""Parts of the losses: denoising loss of a diffusion model, reconstruction loss of an autoencoder."""

from __future__ import annotations

import jax.numpy as jnp

from canvax.errors import InputError
from canvax.models.configs import VaeConfig
from canvax.models.vae import vae_decode, vae_encode
from canvax.params import Params
from canvax.quantize import SCALE
from canvax.samplers.schedule import NoiseSchedule
from canvax.types import Array
from canvax.weights.cast import parse_dtype


def check_trainable(schedule: NoiseSchedule) -> None:
    """Refuse models whose noise this module does not implement.

    Raises:
        InputError: it has EDM preconditioning, or no numbered timesteps.
    """
    if schedule.sigma_data is not None or schedule.timestep_unit != "index":
        raise InputError(
            "the scheduler config is of an EDM or IPNDM class, which cannot be trained yet; trainable are those "
            "with numbered timesteps (DDIMScheduler, PNDMScheduler, EulerDiscreteScheduler, ...)"
        )


def add_noise(x0: Array, noise: Array, alphas_cumprod: Array) -> Array:
    """Return x_t of the forward process (Ho et al. 2020, eq. 4); ``alphas_cumprod`` is a_t of each image [B]."""
    a = alphas_cumprod[:, None, None, None]
    return jnp.sqrt(a) * x0 + jnp.sqrt(1.0 - a) * noise


def target_of(x0: Array, noise: Array, alphas_cumprod: Array, prediction_type: str) -> Array:
    """Return the training target of a diffusion: eps, v (Salimans and Ho 2022, section 4) or x0."""
    a = alphas_cumprod[:, None, None, None]
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "v_prediction":
        return jnp.sqrt(a) * noise - jnp.sqrt(1.0 - a) * x0
    return x0


def flow(x0: Array, noise: Array, t: Array) -> tuple[Array, Array]:
    """Return x_t of a rectified flow, (1 - t) x_0 + t eps, and its velocity eps - x_0 (Liu et al. 2022); t is [B]."""
    t = t[:, None, None, None]
    return (1.0 - t) * x0 + t * noise, noise - x0


def loss_weights(schedule: NoiseSchedule, gamma: float | None) -> Array:
    """Return the weight of the loss at each training timestep [num_train_timesteps] float32; 1 if ``gamma`` is None.

    Flow models are trained without these weights.

    Min-SNR (Hang et al. 2023, section 3.4) weights the loss on x0 by min(SNR, gamma), where SNR is a / (1 - a). This
    equals min(SNR, gamma) / SNR on eps and min(SNR, gamma) / (SNR + 1) on v. On v the weight would vanish at pure
    noise, and a model with zero terminal SNR would never learn its first step. So v uses min(SNR + 1, gamma) /
    (SNR + 1), which is 1 up to the bound.
    """
    a = jnp.asarray(schedule.alphas_cumprod, jnp.float32)
    if gamma is not None and schedule.is_flow:
        raise InputError("gamma", "is for diffusions, and the model is a flow", cure="give None", value=gamma)
    if gamma is None:
        return jnp.ones_like(a)
    snr = a / jnp.maximum(1.0 - a, 1e-8)
    if schedule.prediction_type == "v_prediction":
        return jnp.minimum(snr + 1.0, gamma) / (snr + 1.0)
    if schedule.prediction_type == "epsilon":
        return jnp.minimum(snr, gamma) / jnp.maximum(snr, 1e-8)
    return jnp.minimum(snr, gamma)


def squared_error(output: Array, target: Array, mask: Array | None = None) -> Array:
    """Return the mean squared error of each image [B], in float32.

    A mask [B, h, w] multiplies the error of each position. The mean is over all positions, masked or not, as in other
    trainers: an image with a small unmasked part counts less.
    """
    errors = jnp.square(output.astype(jnp.float32) - target.astype(jnp.float32))
    return (errors if mask is None else errors * mask[..., None]).mean((1, 2, 3))


def autoencoder_loss(
    p: Params, images: Array, noise: Array, cfg: VaeConfig, *, kl: float, edges: float
) -> tuple[Array, dict[str, Array]]:
    """Compute reconstruction loss plus KL divergence to the standard normal (Kingma and Welling 2014, appendix B).

    Args:
        p: parameters of the autoencoder.
        images: [B, H, W, 3] in -1..1, in the dtype of the computation.
        noise: standard normal [B, h, w, C].
        cfg: config of the autoencoder; its scaling factor does not affect the loss.
        kl: weight of the KL divergence, a mean over the numbers of the latents.
        edges: weight of the mean absolute error of differences between neighbouring pixels, which keeps edges sharp.

    Returns:
        The loss and its parts, ``mse`` in the units of ``images``.
    """
    mean, logvar = (part.astype(jnp.float32) for part in vae_encode(p, images, cfg))
    latents = mean + jnp.exp(0.5 * logvar) * noise
    # The decoder expects scaled latents.
    decoded = vae_decode(p, ((latents - cfg.shift) / cfg.scale).astype(images.dtype), cfg)
    loss, mse = reconstruction_loss(decoded, images, edges)
    divergence = 0.5 * (jnp.square(mean) + jnp.exp(logvar) - 1.0 - logvar).mean()
    return loss + kl * divergence, {"mse": mse, "kl": divergence}


def reconstruction_loss(decoded: Array, images: Array, edges: float) -> tuple[Array, Array]:
    """Return mse + ``edges`` x the mean absolute error of differences between neighbouring pixels; and the mse."""
    error = decoded.astype(jnp.float32) - images.astype(jnp.float32)
    mse = jnp.square(error).mean()
    outline = jnp.abs(jnp.diff(error, axis=1)).mean() + jnp.abs(jnp.diff(error, axis=2)).mean()
    return mse + edges * outline, mse


def cast(params: Params, dtype: jnp.dtype) -> Params:
    """Cast parameters to the dtype of the computation; gradients have the dtype of the original parameters.

    8-bit weights and their scales stay as they are.
    """
    dtype = parse_dtype(dtype)

    def inner(params: Params) -> Params:
        kept = ("weight", SCALE) if SCALE in params else ()
        return {
            name: value if name in kept else inner(value) if isinstance(value, dict) else value.astype(dtype)
            for name, value in params.items()
        }

    return inner(params)
