"""The description of a compilation, which can be sent to another process and hashed for a file name."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND, TextEncoders

PROGRAMS = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class Job:
    """The programs of a model to compile for a target.

    Attributes:
        model: the model's networks.
        target: name of the target.
        mesh: number of devices along ``data`` and ``model``.
        batch: images at once, on all devices together.
        height: height of an image in pixels.
        width: width of an image in pixels.
        guided: whether guidance doubles the UNet's batch.
        dtype: dtype of weights and activations.
        quantize: quantisation of large weights, or None.
    """

    model: Networks
    target: str
    mesh: tuple[int, int]
    batch: int
    height: int
    width: int
    guided: bool
    dtype: str
    quantize: str | None = None

    def describe(self, program: str) -> dict[str, Any]:
        """Returns everything that determines a program."""
        text = self.model.text
        same = {"program": program, "target": self.target, "mesh": self.mesh, "batch": self.batch, "dtype": self.dtype}
        if self.quantize and program != "decode":
            same["quantize"] = self.quantize
        encoders = {name: dataclasses.asdict(config) for name, config in text.parts.items()}
        size = {"height": self.height, "width": self.width, "vae": dataclasses.asdict(self.model.vae)}
        if program == "encode":
            return same | {"text": encoders}
        if program == "decode":
            return same | size
        return (
            same | size | {"text": encoders, "unet": dataclasses.asdict(self.model.denoiser.cfg), "guided": self.guided}
        )

    def dumps(self) -> str:
        """Serialises the job as JSON."""
        return json.dumps({**self.describe("denoise"), "program": None})

    @classmethod
    def loads(cls, text: str) -> Self:
        """Inverts ``dumps``."""
        values = json.loads(text)
        encoders = {name: ClipTextConfig.from_dict(config) for name, config in values["text"].items()}
        model = Networks(
            UNetDenoiser(UNetConfig.from_dict(values["unet"])),
            VaeConfig.from_dict(values["vae"]),
            TextEncoders(encoders.get(FIRST), encoders.get(SECOND)),
        )
        data, split = values["mesh"]
        rest = {name: values[name] for name in ("target", "batch", "height", "width", "guided", "dtype")}
        return cls(model=model, mesh=(data, split), **rest, quantize=values.get("quantize"))
