"""Full-size Stable Diffusion 1.5, 2.1, XL and its refiner against PyTorch, float32: UNet, VAE, text encoders.

    python -m benchmarks.parity_full_size [--families sd15 sd21 sdxl sdxl-refiner]

Weights are random. Prints the largest difference over the largest value of the reference for each model. Minutes; about
12 GB of memory, and for XL 14 GB of memory and of disk. One model of one library is in memory at a time.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import torch
import transformers

from benchmarks.lab.models import write_random
from canvax.families.base import Model
from canvax.families.known import PRESETS
from canvax.families.read import read_model
from canvax.models.clip import clip_configs
from canvax.models.text import encode_text
from canvax.models.unet import unet
from canvax.models.vae import vae_decode, vae_encode
from canvax.weights.load import load_components
from canvax.weights.location import Location
from canvax.weights.open import open_files

rng = np.random.default_rng(0)


def difference(got: Any, want: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute value of the reference."""
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


def nhwc(x: torch.Tensor) -> np.ndarray:
    return np.moveaxis(x.numpy(), 1, -1)


def load(checkpoint: Model, *names: str) -> dict[str, Any]:
    """Parameters of some components."""
    components = [c for c in checkpoint.components if c.name in names]
    return load_components(checkpoint.files, components, dtype=np.float32, place=lambda _, a: jax.device_put(a))


def text(checkpoint: Model, folder: Path) -> Iterator[tuple[str, float]]:
    """All encoders of the model at once: features side by side, and the pooled output where there is one."""
    cfg = checkpoint.text
    ids = {name: rng.integers(0, part.vocab_size, (2, 77)) for name, part in clip_configs(cfg).items()}
    features, pooled = [], None
    for name in ids:
        second = name == "text_encoder_2"
        cls = transformers.CLIPTextModelWithProjection if second else transformers.CLIPTextModel
        out = cls.from_pretrained(folder / name).eval()(torch.from_numpy(ids[name]), output_hidden_states=True)
        features.append(out.hidden_states[-2].numpy() if cfg.pooled_width else out.last_hidden_state.numpy())
        pooled = out.text_embeds.numpy() if second else None
    params = load(checkpoint, *ids)
    got = jax.jit(encode_text, static_argnames="cfg")(
        params, {name: {"ids": each} for name, each in ids.items()}, cfg=cfg
    )
    yield "text encoders", difference(got["text"], np.concatenate(features, axis=-1))
    if pooled is not None:
        yield "pooled text", difference(got["pooled"], pooled)


def vae(checkpoint: Model, folder: Path) -> Iterator[tuple[str, float]]:
    """Decoder and encoder at 512 x 512."""
    cfg = checkpoint.vae
    latents, image = normal(1, 64, 64, 4), np.clip(normal(1, 512, 512, 3), -1, 1)
    model = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    decoded = nhwc(model.decode(nchw(latents) / cfg.scaling_factor).sample)
    encoded = nhwc(model.encode(nchw(image)).latent_dist.mean)
    params = load(checkpoint, "vae")["vae"]
    yield "VAE decoder", difference(jax.jit(vae_decode, static_argnums=2)(params, latents, cfg), decoded)
    yield "VAE encoder", difference(jax.jit(vae_encode, static_argnums=2)(params, image, cfg)[0], encoded)


def denoiser(checkpoint: Model, folder: Path) -> Iterator[tuple[str, float]]:
    """The UNet: a batch of 2 at the native size; one image at half of it for XL, which is large."""
    cfg, xl = checkpoint.unet, checkpoint.text.pooled_width > 0
    side, batch = ((cfg.sample_size or 64) // 2, 1) if xl else (cfg.sample_size or 64, 2)
    x, features = normal(batch, side, side, 4), normal(batch, 77, cfg.cross_attention_dim)
    t = np.array([981, 21], np.float32)[:batch]
    conditions, added = {}, {}
    if xl:
        numbers = [1024, 768, 0, 64, 6] if checkpoint.family.is_refiner else [1024, 768, 0, 64, 512, 512]
        conditions = {"pooled": normal(batch, 1280), "time_ids": np.array([numbers], np.float32)}
        added = {
            "text_embeds": torch.from_numpy(conditions["pooled"]),
            "time_ids": torch.from_numpy(conditions["time_ids"]),
        }
    model = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet").eval()
    arguments = (nchw(x), torch.from_numpy(t), torch.from_numpy(features))
    want = nhwc(model(*arguments, added_cond_kwargs=added).sample)
    del model
    gc.collect()
    params = load(checkpoint, "unet")["unet"]
    got = jax.jit(unet, static_argnames="cfg")(params, x, t, features, cfg=cfg, **conditions)
    yield f"UNet {8 * side}x{8 * side}", difference(got, want)


PARTS: list[Callable[[Model, Path], Iterator[tuple[str, float]]]] = [text, vae, denoiser]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = ["sd15", "sd21", "sdxl", "sdxl-refiner"]
    parser.add_argument("--families", nargs="+", choices=families, default=families)
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory(prefix="canvax-parity-") as scratch, torch.inference_mode():
            folder = write_random(Path(scratch) / family, PRESETS[family], dtype=np.float32)
            checkpoint = read_model(open_files(Location(folder)), np.float32)
            for part in PARTS:
                for model, figure in part(checkpoint, folder):
                    print(f"{family} {model}: {figure:.1e}", flush=True)
                gc.collect()


if __name__ == "__main__":
    main()
