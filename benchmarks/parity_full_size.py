"""Full-size Stable Diffusion 1.5 and 2.1 against PyTorch, random weights, float32: UNet, VAE, text encoder.

    python benchmarks/parity_full_size.py [--families sd15 sd21]

Prints the largest difference over the largest value of the reference for each model. Minutes, and about 12 GB.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import diffusers
import jax
import numpy as np
import torch
import transformers
from full_size import write_checkpoint

from canvax.models.clip import text_encoder
from canvax.models.unet import unet
from canvax.models.vae import vae_decode, vae_encode
from canvax.pipelines.checkpoint import read_checkpoint
from canvax.weights.hub import resolve
from canvax.weights.load import load_components


def difference(got: jax.Array, want: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value of the reference, [B, C, h, w] or [B, T, D]."""
    reference = np.moveaxis(want.numpy(), 1, -1) if want.ndim == 4 else want.numpy()
    return float(np.abs(np.asarray(got) - reference).max() / np.abs(reference).max())


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


@torch.inference_mode()
def compare(folder: Path) -> dict[str, float]:
    """Differences of every model of a checkpoint."""
    checkout = resolve(folder)
    checkpoint = read_checkpoint(checkout, np.float32)
    rng = np.random.default_rng(0)
    figures = {}

    def load(name: str) -> dict:
        component = [c for c in checkpoint.components if c.name == name]
        return load_components(checkout, component, dtype=np.float32, place=lambda _, a: jax.device_put(a))[name]

    params, cfg = load("text_encoder"), checkpoint.text
    ids = rng.integers(0, cfg.vocab_size, (2, 77))
    clip = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    want = clip(torch.from_numpy(ids)).last_hidden_state
    figures["text encoder"] = difference(jax.jit(text_encoder, static_argnums=2)(params, ids, cfg), want)

    params, cfg = load("vae"), checkpoint.vae
    latents = rng.standard_normal((1, 64, 64, 4), dtype=np.float32)
    image = np.clip(rng.standard_normal((1, 512, 512, 3), dtype=np.float32), -1, 1)
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    want = vae.decode(nchw(latents) / cfg.scaling_factor).sample
    figures["VAE decoder"] = difference(jax.jit(vae_decode, static_argnums=2)(params, latents, cfg), want)
    want = vae.encode(nchw(image)).latent_dist.mean
    figures["VAE encoder"] = difference(jax.jit(vae_encode, static_argnums=2)(params, image, cfg)[0], want)

    params, cfg = load("unet"), checkpoint.unet
    side = cfg.sample_size or 64
    x = rng.standard_normal((2, side, side, 4), dtype=np.float32)
    t = np.array([981, 21], np.float32)
    text = rng.standard_normal((2, 77, cfg.cross_attention_dim), dtype=np.float32)
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
    want = model(nchw(x), torch.from_numpy(t), torch.from_numpy(text)).sample
    figures[f"UNet {8 * side}x{8 * side}"] = difference(jax.jit(unet, static_argnums=4)(params, x, t, text, cfg), want)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=["sd15", "sd21"], default=["sd15", "sd21"])
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory(prefix="canvax-parity-") as scratch:
            for model, figure in compare(write_checkpoint(Path(scratch) / family, family)).items():
                print(f"{family} {model}: {figure:.1e}", flush=True)


if __name__ == "__main__":
    main()
