"""The description of a compilation, which can be sent to another process and hashed for a file name."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass
from typing import Any, Self

from canvax.compile.kinds import reference_encoder
from canvax.models.networks import Networks

PROGRAMS = ("encode", "denoise", "decode")
"""Programs of all models; each size of reference images has a further program."""


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
        references: height and width of each reference image in pixels.
        streamed: large weights stay in the host's memory.
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
    references: tuple[tuple[int, int], ...] = ()
    streamed: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of all programs."""
        return (*PROGRAMS, *dict.fromkeys(map(reference_encoder, self.references)))

    def describe(self, program: str) -> dict[str, Any]:
        """Return everything that determines a program."""
        same = {"program": program, "target": self.target, "mesh": self.mesh, "batch": self.batch, "dtype": self.dtype}
        if self.quantize and program in ("encode", "denoise"):
            same["quantize"] = self.quantize
        if self.streamed:
            same["streamed"] = True
        networks, size = self.model, {"height": self.height, "width": self.width}
        if program == "encode":
            return same | {"text": repr(networks.text.seeing(self.references))}
        if program == "decode":
            return same | size | {"vae": repr(networks.vae), "packing": repr(networks.packing)}
        if program != "denoise":
            return same | {"vae": repr(networks.vae)}
        denoiser: dict[str, Any] = {
            "text": repr(networks.text.seeing(self.references)),
            "denoiser": repr(networks.denoiser),
        }
        if self.references:
            denoiser["references"] = networks.room(self.references)
        return same | size | denoiser | {"guided": self.guided}

    def dumps(self) -> str:
        """Serialise the job as a line, for the process that compiles."""
        return base64.b64encode(pickle.dumps(self)).decode()

    @classmethod
    def loads(cls, text: str) -> Self:
        """Invert ``dumps``."""
        job = pickle.loads(base64.b64decode(text))
        assert isinstance(job, cls)
        return job
