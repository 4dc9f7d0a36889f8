"""The description of a compilation, which can be sent to another process and hashed for a file name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from canvax.models.described import describe, networks_of
from canvax.models.networks import Networks

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
        guided: whether guidance doubles the denoiser's batch.
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
        """Serialises the job as JSON."""
        return json.dumps({**self.describe("denoise"), "program": None})

    @classmethod
    def loads(cls, text: str) -> Self:
        """Inverts ``dumps``."""
        values = json.loads(text)
        data, split = values["mesh"]
        rest = {name: values[name] for name in ("target", "batch", "height", "width", "guided", "dtype")}
        return cls(model=networks_of(values), mesh=(data, split), **rest, quantize=values.get("quantize"))
