"""What one plan asks of the compiler, in a form that goes from one process to another and into the name of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from canvax.models.described import describe, networks_of
from canvax.models.networks import Networks

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
        guided: with guidance, which doubles the denoiser's batch.
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
        same = {"program": program, "target": self.target, "mesh": self.mesh, "batch": self.batch, "dtype": self.dtype}
        if self.quantize and program != "decode":
            same["quantize"] = self.quantize
        networks, size = describe(self.model), {"height": self.height, "width": self.width}
        if program == "encode":
            return same | {"text": networks["text"]}
        if program == "decode":
            return same | size | {"vae": networks["vae"]}
        return same | size | networks | {"guided": self.guided}

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps({**self.describe("denoise"), "program": None})

    @classmethod
    def loads(cls, text: str) -> Self:
        """Inverse of ``dumps``."""
        said = json.loads(text)
        data, split = said["mesh"]
        rest = {name: said[name] for name in ("target", "batch", "height", "width", "guided", "dtype")}
        return cls(model=networks_of(said), mesh=(data, split), **rest, quantize=said.get("quantize"))
