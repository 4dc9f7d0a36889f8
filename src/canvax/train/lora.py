"""Training a LoRA: the model is frozen, and only low-rank factors added to its weights are trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from canvax.errors import HintWarning, InputError, conflict, warn
from canvax.families.base import Model
from canvax.images.formats import written
from canvax.params import Params
from canvax.settings import check_all
from canvax.train import low_rank
from canvax.train.kohya import facts_of_settings
from canvax.train.settings import TASKS, LoraRecord
from canvax.train.state import in_dtype
from canvax.train.task import FILE_CAPTIONS, PLAN, InitialState, Subject, Training, recorded, train
from canvax.types import DType
from canvax.weights.cast import parse_dtype

LORA_PLAN = replace(PLAN, **TASKS["lora"].plan)
"""Learning rate 1e-4, as in diffusers' scripts."""

KINDS = ("dora", "conv_rank", "ranks", "lokr")
"""Settings that make another kind of factors than a LoRA of one rank."""

FILE = "pytorch_lora_weights.safetensors"
"""The file name that diffusers' ``load_lora_weights`` looks for in a folder."""


@dataclass(frozen=True)
class Lora(LoraRecord):
    """The ``TrainingTask`` of training a LoRA.

    Attributes:
        rank: rank of the factors.
        alpha: the change of a weight is alpha / rank x up down; by default the rank.
        layers: a key of ``LAYERS``.
        text: train factors of the text encoders too.
        text_rate: learning rate of the text encoders; by default that of the UNet.
        names: names of the arrays in the file: "peft" (diffusers) or "kohya" (A1111).
        trigger: trigger words to write into the file's metadata.
        title: title in the file's metadata; by default the name of the run's folder.
        start: a LoRA of the same rank and layers to begin with: a file, a folder or a Hub id.
        save_dtype: dtype of the file.
        dora: train the norm of the weights of each output, too (DoRA; Liu et al. 2024).
        conv_rank: rank of convolutions larger than 1 x 1 (LoCon). The alpha of each layer is in proportion to its rank.
        lokr: train a LoKr (LyCORIS) with a first factor of at most ``lokr`` x ``lokr``, in files of kohya's names.
        ranks: parts of layers' names with their ranks: ``{"mid_block": 8}``. The last one that fits a layer counts.
    """

    name = "LoRA"
    part = "lora"
    for_transformers = True

    def __post_init__(self) -> None:
        check_all(self)
        parse_dtype(self.save_dtype, "save_dtype")
        if self.lokr is not None and self.dora:
            raise conflict("dora", "lokr")
        if self.lokr is not None and self.start is not None:
            raise conflict("start", "lokr")

    @property
    def scale(self) -> float:
        """The factor of up x down."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine the factors."""
        facts = {"rank": self.rank, "alpha": self.alpha, "layers": self.layers, "text_encoder": self.text}
        start = None if self.start is None else str(self.start)
        kind = {name: getattr(self, name) for name in KINDS} | {"ranks": list(self.ranks)}
        return {**facts, **kind, "start": start}

    @property
    def changed(self) -> dict[str, Any]:
        """The kind and the ranks of the factors, where they are not the default."""
        return {name: value for name, value in self.facts.items() if value and name in KINDS}

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of the text encoders, if it is set."""
        has_rate = self.text and self.text_rate is not None
        return dict.fromkeys(("text_encoder", "text_encoder_2"), self.text_rate or 0.0) if has_rate else {}

    def files(self, folder: Path) -> Sequence[Path]:
        """Return the path of the LoRA file."""
        return [folder / (FILE if self.names == "peft" else f"{folder.resolve().name}.safetensors")]

    def check(self, model: Model, training: Training) -> None:
        """Refuse what only Stable Diffusion has; read the factors to begin with."""
        if model.networks.denoiser.component != "unet":
            absent = f"is not there for {model.family.name} models"
            for name, value in {"lokr": self.lokr, "text": self.text or None}.items():
                if value is not None:
                    raise InputError(name, absent, cure="leave it out", value=value)
            if self.names != "peft":
                raise InputError("names", absent, cure="give {names='peft'}", value=self.names)
        chosen = self._targets(model)
        layers = chosen[model.networks.denoiser.component].values()
        if self.layers == "transformer" and all("heads" in layer.axes for layer in layers):
            problem = "trains attention alone, since the spec of the denoiser has no axis 'mlp'"
            cure = "for all blocks give {layers='all'}"
            warn(HintWarning("layers", problem, cure=cure, value=self.layers))
        if self.dora:
            low_rank.check_single("dora", chosen)
        if self.start is not None:
            self._factors(model, training)

    def exact(self, model: Model) -> Collection[str]:
        """Return no component: the factors are new."""
        return ()

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> InitialState:
        """Make the factors; the whole model is frozen, in the dtype of the computation."""
        factors = self._factors(model, training)
        denoiser = model.networks.denoiser.component
        texts = () if model.networks.unet is None else model.text.names  # a transformer's are encoded before
        frozen = in_dtype(params, [denoiser, *texts], dtype)
        chosen = self._targets(model)
        if self.dora:
            factors = low_rank.with_magnitudes(factors, frozen, chosen, scale=self.scale)

        def assemble(trained: Params, frozen: Params) -> Params:
            return low_rank.with_factors(trained, frozen, chosen, scale=self.scale)

        return InitialState(factors, frozen, assemble)

    def shown(self, model: Model, params: Params, trained: Params) -> Params:
        """Return the parameters with the factors merged into them."""
        return low_rank.merged(trained, params, self._targets(model), scale=self.scale)

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """Write the LoRA file, with the model it was trained for in its metadata."""
        title = self.title or target.parent.name
        metadata = {
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.title": title,
            "modelspec.trigger_phrase": self.trigger,
            "ss_sd_model_name": written({"model": model.name})["model"],
            "ss_output_name": title,
            "ss_text_encoder_lr": str(self.text_rate) if self.rates else "",
            "ss_network_args": json.dumps(self._kohya_arguments) if self._kohya_arguments else "",
            **facts_of_settings(training, model),
            **training.facts,
            **recorded(training, model.overrides, self.changed),
        }
        low_rank.write_factors(
            target,
            trained,
            self._targets(model),
            alpha=self.rank if self.alpha is None else self.alpha,
            rank=self.rank,
            names=self.names,
            dtype=parse_dtype(self.save_dtype),
            metadata={key: value for key, value in metadata.items() if value},
        )
        return target

    @property
    def _kohya_arguments(self) -> dict[str, str]:
        """The kind of the factors as the ``network_args`` of kohya's trainers."""
        rank, lokr = self.conv_rank, self.lokr
        kinds = {"conv_dim": rank, "conv_alpha": rank and self.scale * rank, "algo": lokr and "lokr", "factor": lokr}
        return {name: str(value) for name, value in {**kinds, "dora_wd": self.dora}.items() if value}

    def _factors(self, model: Model, training: Training) -> Params:
        """Make new factors, or read those of ``start``."""
        chosen = self._targets(model)
        if self.lokr is not None:
            return low_rank.new_lokr(chosen, self.rank, self.lokr, training.plan.seed)
        if self.start is None:
            return low_rank.new_factors(chosen, self.rank, training.plan.seed)
        specs = model.networks.adapted
        return low_rank.read_factors(self.start, specs, chosen, self.rank, scale=self.scale, dora=self.dora)

    def _targets(self, model: Model) -> low_rank.Targets:
        specs = {
            name: spec for name, spec in model.networks.adapted.items() if self.text or name not in model.text.names
        }
        chosen = low_rank.targets(specs, self.layers, model.family.stacks)
        ranks = {name: int(rank) for name, _, rank in (text.rpartition("=") for text in self.ranks)}
        return low_rank.with_ranks(chosen, ranks, self.conv_rank)


def train_lora(
    training: Training,
    lora: Lora,
    mesh: Mesh,
    *,
    subject: Subject = FILE_CAPTIONS,
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train a LoRA; for arguments, result and errors see ``canvax.train.task.train``."""
    return train(training, lora, mesh, subject=subject, deadline=deadline, say=say)
