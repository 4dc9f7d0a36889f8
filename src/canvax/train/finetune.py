"""Fine-tuning of the UNet, and optionally the text encoders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from canvax.families.base import Model
from canvax.params import Params
from canvax.settings import check_all
from canvax.train.settings import WholeRecord
from canvax.train.task import FILE_CAPTIONS, InitialState, Subject, Training, train
from canvax.types import DType
from canvax.weights.cast import parse_dtype


@dataclass(frozen=True)
class FullFinetune(WholeRecord):
    """The ``TrainingTask`` of fine-tuning the UNet.

    Attributes:
        text: train the text encoders too.
        text_rate: learning rate of the text encoders; by default that of the UNet.
        save_dtype: dtype of the saved weights.
    """

    name = "fine-tuning"
    part = "unet"
    for_transformers = False

    def __post_init__(self) -> None:
        check_all(self)
        parse_dtype(self.save_dtype, "save_dtype")

    @property
    def facts(self) -> dict[str, Any]:
        """True if text encoders are trained."""
        return {"text_encoder": True} if self.text else {}

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of the text encoders, if it is set."""
        return dict.fromkeys(("text_encoder", "text_encoder_2"), self.text_rate) if self.text_rate else {}

    def files(self, folder: Path) -> Sequence[Path]:
        """Return the folder of the finished model."""
        return [folder / "model"]

    def check(self, model: Model, training: Training) -> None:
        """Accept every model."""

    def exact(self, model: Model) -> Collection[str]:
        """Return the components that are written into the result."""
        return ("unet", *model.text.names)

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> InitialState:
        """Move the trained components out of ``params``, so that the devices have only the copy being trained."""
        names = ["unet", *(model.text.names if self.text else ())]
        trained = {name: jax.device_get(params.pop(name)) for name in names}
        return InitialState(trained, {name: params[name] for name in model.text.names if name in params})

    def shown(self, model: Model, params: Params, trained: Params) -> Params:
        """Return the parameters with the trained components."""
        return {**params, **trained}

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """Write the model in the diffusers layout."""
        return model.save(target, {**params, **trained}, dtype=self.save_dtype)


Whole = FullFinetune  # former name


def finetune(
    training: Training,
    mesh: Mesh,
    *,
    subject: Subject = FILE_CAPTIONS,
    text: bool = False,
    text_rate: float | None = None,
    save_dtype: DType = "float32",
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train the whole UNet, and with ``text`` the text encoders; write the model to ``training.folder / "model"``.

    For arguments, result and errors see ``canvax.train.task.train`` and ``FullFinetune``.
    """
    aim = FullFinetune(text, text_rate, parse_dtype(save_dtype, "save_dtype"))
    return train(training, aim, mesh, subject=subject, deadline=deadline, say=say)
