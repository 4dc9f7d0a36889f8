"""A model with some of its parts as the caller says: another autoencoder, other fields of its schedule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.errors import InputError, nearest, shown
from canvax.files import named_path, read_json
from canvax.samplers.schedule import PREDICTION_TYPES
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles

if TYPE_CHECKING:
    from canvax.weights.vae_file import VaeFiles

_FROM_HUB = ("token", "cache_dir", "local_files_only", "progress")


@dataclass(frozen=True)
class Overrides:
    """What ``canvax.load`` is told of a model beside its name.

    Attributes:
        vae: where another autoencoder is; None for the model's own.
        prediction: what the UNet predicts; None for what the model says.
        scheduler: fields of ``scheduler_config.json`` in place of the model's.
    """

    vae: str | None = None
    prediction: str | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, vae: Any = None, prediction_type: Any = None, scheduler: Any = None) -> Overrides:
        """Of the arguments of ``canvax.load``, checked as far as they can be without the model.

        Raises:
            InputError, CheckpointError: naming the argument.
        """
        if vae is not None:
            from canvax.weights.vae_file import check_vae_name  # which most models never need

            vae = os.fspath(vae) if isinstance(vae, os.PathLike) else vae
            check_vae_name(vae)
        if prediction_type is not None and str(prediction_type) not in PREDICTION_TYPES:
            told = nearest(str(prediction_type), list(PREDICTION_TYPES))
            raise InputError(f"prediction_type={shown(prediction_type)} is not known; {told}")
        fields = _fields(scheduler)
        own = fields.get("prediction_type", prediction_type) if isinstance(scheduler, Mapping) else prediction_type
        if prediction_type is not None and own != prediction_type:
            told = f"prediction_type={shown(prediction_type)}, and {own!r:.80} in scheduler"
            raise InputError(f"{told}; give one of them")
        return cls(vae, prediction_type, fields)

    @property
    def told(self) -> dict[str, Any]:
        """Those that there are, as arguments of ``canvax.load``."""
        found = {"vae": self.vae, "prediction_type": self.prediction, "scheduler": dict(self.scheduler) or None}
        return {name: value for name, value in found.items() if value is not None}

    def apply(self, files: ModelFiles, **source: Any) -> ModelFiles:
        """The files of a model with these parts in place of its own.

        Raises:
            InputError, CheckpointError, HubError: the autoencoder is missing, damaged or something else.
        """
        if not self.told:
            return files
        vae = None
        if self.vae is not None:
            from canvax.weights.vae_file import open_vae

            vae = open_vae(self.vae, files.config("vae"), **{k: v for k, v in source.items() if k in _FROM_HUB})
        return Overridden(files, self, vae)


@dataclass(frozen=True, eq=False)
class Overridden:
    """A ``ModelFiles`` over another one."""

    base: ModelFiles
    overrides: Overrides
    vae: VaeFiles | None

    def __str__(self) -> str:
        return str(self.base) if self.vae is None else f"{self.base} with vae={self.vae.name!r}"

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def revision(self) -> str | None:
        return self.base.revision

    @property
    def variant(self) -> str | None:
        return self.base.variant

    @property
    def unread(self) -> tuple[str, ...]:
        return self.base.unread

    @property
    def index(self) -> Mapping[str, Any]:
        changed = {name: ["diffusers", kind] for name, kind in self.components.items() if name in ("vae", "scheduler")}
        return {**self.base.index, **changed}

    @property
    def components(self) -> Mapping[str, str]:
        found = dict(self.base.components)
        if self.vae is not None:
            found["vae"] = str(self.vae.config["_class_name"]).removeprefix("Flax")
        if "_class_name" in self.overrides.scheduler:
            found["scheduler"] = str(self.overrides.scheduler["_class_name"])
        return found

    def config(self, component: str) -> dict[str, Any]:
        if component == "vae" and self.vae is not None:
            return dict(self.vae.config)
        config = self.base.config(component)
        if component == "scheduler":
            config |= self.overrides.scheduler
            config |= {"prediction_type": self.overrides.prediction} if self.overrides.prediction else {}
        return config

    def entries(self, component: str) -> list[Entry]:
        return list(self.vae.arrays) if component == "vae" and self.vae is not None else self.base.entries(component)

    def folder(self, component: str = "") -> Path:
        return self.base.folder(component)


def _fields(scheduler: Any) -> dict[str, Any]:
    """Fields of a config: of a table, of a scheduler of diffusers, of its folder or its ``scheduler_config.json``."""
    if scheduler is None:
        return {}
    if hasattr(scheduler, "config") and hasattr(scheduler, "set_timesteps"):
        return {"_class_name": type(scheduler).__name__, **dict(scheduler.config)}
    if isinstance(scheduler, Mapping) and all(isinstance(name, str) for name in scheduler):
        return dict(scheduler)
    if isinstance(scheduler, str | os.PathLike):
        path = named_path("scheduler", scheduler)
        path = path / "scheduler_config.json" if path.is_dir() else path
        if path.is_file():
            return read_json(path)
    raise InputError(
        f"scheduler={scheduler!r:.80} is not a table of fields of scheduler_config.json, such as "
        "{'rescale_betas_zero_snr': True}, nor such a file; a sampler is chosen in each call: sampler='Euler'"
    )
