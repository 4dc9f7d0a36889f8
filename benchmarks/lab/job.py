"""What the contenders of a benchmark are asked to do, and with which numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvax.families.base import Model
from canvax.models.clip import clip_configs
from canvax.models.denoiser import UNetDenoiser
from canvax.models.krea2 import DROPPED, Krea2Denoiser

PEERS = ("torch", "torch-compile", "torch-compile-default", "openvino")

GUIDANCE = 5.0
SAMPLER = "ddim"
"""Guidance scale and sampler of models with a UNet. DDIM evaluates the UNet once in each step, adds no noise, and every
library has it. The transformers here are distilled models: they use their default sampler, without guidance."""

DENOISERS = ("denoiser", "unet")
"""Names of the part that denoises; the second is that of Stable Diffusion."""

PROMPTS = ("a red apple", "a cat", "a lemon", "a hamburger")


@dataclass(frozen=True)
class Job:
    """The work of one benchmark, the same for every contender.

    Attributes:
        part: "denoiser" or "unet", "vae", "text", "picture", "load" or "start".
        folder: a checkpoint in the diffusers layout.
        width: of a picture, in pixels.
        height: likewise.
        batch: pictures at once. A UNet gets twice as many samples: guidance.
        steps: steps of a picture.
        dtype: of weights and activations.
        device: "cpu", "gpu" or "tpu".
        family: of the model, as canvax calls it.
        guidance: guidance scale of pictures.
        sampler: name of the sampler; None for the default of the model.
        texts: prompts of pictures, again and again.
        text_rows: to how many tokens a peer pads them, of its models that read language; None for its default.
        device_bytes: memory of the GPU, as far as it is known.
    """

    part: str
    folder: Path
    width: int
    height: int
    batch: int
    steps: int
    dtype: str
    device: str
    family: str = "sd"
    guidance: float = GUIDANCE
    sampler: str | None = SAMPLER
    texts: tuple[str, ...] = PROMPTS
    text_rows: int | None = None
    device_bytes: int | None = None

    @property
    def prompts(self) -> list[str]:
        """A prompt for each picture."""
        return [self.texts[i % len(self.texts)] for i in range(self.batch)]

    def write(self, path: Path, contender: str, **extra: Any) -> Path:
        """As JSON, for one contender."""
        fields = dataclasses.asdict(self) | {"contender": contender, "prompts": self.prompts}
        path.write_text(json.dumps(fields | extra, default=str), encoding="utf-8")
        return path


def text_rows(model: Model) -> int | None:
    """To how many tokens a peer pads a prompt, so that it has as many as in canvax; of models that read language."""
    dropped = DROPPED if isinstance(model.networks.denoiser, Krea2Denoiser) else 0
    return None if clip_configs(model.text) else min(model.text.shortest) - dropped


def lengthened(model: Model) -> tuple[str, ...]:
    """Returns prompts, each repeated until it nearly has the number of tokens that canvax pads short prompts to."""

    def long(text: str) -> str:
        whole = text
        while all(
            len(words.ids(f"{whole}, {text}")) <= min(model.text.shortest) for words in model.tokenizers.values()
        ):
            whole = f"{whole}, {text}"
        return whole

    return tuple(map(long, PROMPTS))


def names_of(part: str, model: Model) -> list[str]:
    """The components whose weights a part needs."""
    if part in DENOISERS:
        return [model.networks.denoiser.component]
    chosen = {"text": model.text.names, "vae": ("vae",)}.get(part, tuple(model.specs))
    return [name for name in model.specs if name in chosen]


def make_inputs(job: Job, model: Model) -> dict[str, np.ndarray]:
    """Inputs of a part: ``latents`` [n, h, w, C] and, for a denoiser, ``timesteps`` [n] and the conditioning; float32.

    For the text encoders: what each reads [B, ...], as "component/name".
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    text, networks = model.text, model.networks
    if job.part == "text":
        return {
            f"{encoder.component}/{name}": array
            for encoder, length in zip(text.encoders, text.shortest, strict=True)
            for name, array in encoder.read(model.tokenizers[encoder.component], job.prompts, length).items()
        }
    guided = isinstance(networks.denoiser, UNetDenoiser)
    samples = 2 * job.batch if job.part in DENOISERS and guided else job.batch
    inputs = {"latents": normal(*networks.latent_shape(samples, job.height, job.width))}
    if job.part in DENOISERS:
        inputs["timesteps"] = np.full(samples, 500, np.float32)
        rows = text.rows(text.shortest)
        inputs["text"] = normal(samples, rows, text.width)
        if not clip_configs(text):
            inputs["length"] = np.full(samples, rows, np.int32)
        if text.pooled_width:
            inputs["pooled"] = normal(samples, text.pooled_width)
            size = (job.height, job.width, 0, 0, job.height, job.width)[: networks.size_numbers]
            inputs["time_ids"] = np.tile(np.asarray(size, np.float32), (samples, 1))
    return inputs
