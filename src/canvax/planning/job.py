"""What one plan asks of the compiler, in a form that goes from one process to another and into the name of a file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from canvax.models.configs import ClipTextConfig, UNetConfig, VaeConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import FIRST, SECOND, clip_encoders

PROGRAMS = ("encode", "denoise", "decode")


@dataclass(frozen=True)
class Job:
    """The programs of a model for a target.

    Attributes:
        model: its networks.
        target: name of the target.
        mesh: devices along ``data`` and ``model``.
        batch: pictures at once, on all devices together.
        height: pixels.
        width: pixels.
        guided: with guidance, which doubles the UNet's batch.
        dtype: of weights and activations.
        quantize: what large weights are quantised to, or None.
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
        """All that decides a program."""
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
        """As JSON."""
        return json.dumps({**self.describe("denoise"), "program": None})

    @classmethod
    def loads(cls, text: str) -> Self:
        """Inverse of ``dumps``."""
        said = json.loads(text)
        encoders = {name: ClipTextConfig.from_dict(values) for name, values in said["text"].items()}
        model = Networks(
            UNetDenoiser(UNetConfig.from_dict(said["unet"])),
            VaeConfig.from_dict(said["vae"]),
            clip_encoders(encoders.get(FIRST), encoders.get(SECOND)),
        )
        data, split = said["mesh"]
        rest = {name: said[name] for name in ("target", "batch", "height", "width", "guided", "dtype")}
        return cls(model=model, mesh=(data, split), **rest, quantize=said.get("quantize"))
