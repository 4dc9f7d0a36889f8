"""What the contenders of a benchmark are asked to do, and with which numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canvax.families.base import Model

PEERS = ("torch", "torch-compile", "torch-compile-default", "openvino")

GUIDANCE = 5.0
SAMPLER = "ddim"
"""Of pictures: one evaluation a step, no noise on the way, and in every library."""

PROMPTS = ("a red apple", "a cat", "a lemon", "a hamburger")


@dataclass(frozen=True)
class Job:
    """The work of one benchmark, the same for every contender.

    Attributes:
        part: "unet", "vae", "text", "picture", "load" or "start".
        folder: a checkpoint in the diffusers layout.
        width: of a picture, in pixels.
        height: likewise.
        batch: pictures at once. The UNet gets twice as many samples: guidance.
        steps: guided steps of a picture.
        dtype: of weights and activations.
        device: "cpu", "gpu" or "tpu".
    """

    part: str
    folder: Path
    width: int
    height: int
    batch: int
    steps: int
    dtype: str
    device: str

    @property
    def prompts(self) -> list[str]:
        """A prompt for each picture."""
        return [PROMPTS[i % len(PROMPTS)] for i in range(self.batch)]

    def write(self, path: Path, contender: str, **extra: Any) -> Path:
        """As JSON, for one contender."""
        fields = dataclasses.asdict(self) | {"contender": contender, "prompts": self.prompts, "guidance": GUIDANCE}
        path.write_text(json.dumps(fields | {"sampler": SAMPLER} | extra, default=str), encoding="utf-8")
        return path


def make_inputs(job: Job, model: Model) -> dict[str, np.ndarray]:
    """Inputs of a part: ``latents`` [n, h, w, C] and, for the UNet, ``timesteps`` [n] and the conditioning; float32.

    For the text encoders: ``ids`` [B, T] of each, by component.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    text, networks = model.text, model.networks
    if job.part == "text":
        return {name: tokenizer(job.prompts, length=text.tokens) for name, tokenizer in model.tokenizers.items()}
    samples = 2 * job.batch if job.part == "unet" else job.batch
    inputs = {"latents": normal(*networks.latent_shape(samples, job.height, job.width))}
    if job.part == "unet":
        inputs["timesteps"] = np.full(samples, 500, np.float32)
        inputs["text"] = normal(samples, text.tokens, text.width)
        if text.pooled_width:
            inputs["pooled"] = normal(samples, text.pooled_width)
            size = (job.height, job.width, 0, 0, job.height, job.width)[: networks.size_numbers]
            inputs["time_ids"] = np.tile(np.asarray(size, np.float32), (samples, 1))
    return inputs
