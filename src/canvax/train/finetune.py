"""Training whole networks: the UNet, and the text encoders where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from canvax.checked import checked
from canvax.families.base import Model
from canvax.params import Params
from canvax.train.task import OWN_CAPTIONS, Start, Subject, Training, check_rate, train
from canvax.types import DType
from canvax.weights.cast import parse_dtype


@checked
@dataclass(frozen=True)
class Whole:
    """The ``Aim`` of training the UNet itself.

    Attributes:
        text: train the text encoders too.
        text_rate: their learning rate; by default that of the UNet.
        save_dtype: of the finished weights.
    """

    text: bool = False
    text_rate: float | None = None
    save_dtype: DType = "float32"

    name = "fine-tuning"
    part = "unet"

    def __post_init__(self) -> None:
        check_rate(self.text, self.text_rate)
        parse_dtype(self.save_dtype, "save_dtype")

    @property
    def facts(self) -> dict[str, Any]:
        """Whether text encoders are trained."""
        return {"text_encoder": True} if self.text else {}

    @property
    def rates(self) -> dict[str, float]:
        """Of the text encoders."""
        return dict.fromkeys(("text_encoder", "text_encoder_2"), self.text_rate) if self.text_rate else {}

    def target(self, folder: Path) -> Path:
        """A whole model."""
        return folder / "model"

    def check(self, model: Model, training: Training) -> None:
        """Every model will do."""

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> Start:
        """On the devices there is the copy that is trained, no other."""
        names = ["unet", *(model.text.names if self.text else ())]
        trained = {name: jax.device_get(params.pop(name)) for name in names}
        return Start(trained, {name: params[name] for name in model.text.names if name in params})

    def shown(self, params: Params, trained: Params) -> Params:
        """The networks as they are now."""
        return {**params, **trained}

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """In the diffusers layout."""
        return model.save(target, {**params, **trained}, dtype=self.save_dtype)


@checked
def finetune(
    training: Training,
    mesh: Mesh,
    *,
    subject: Subject = OWN_CAPTIONS,
    text: bool = False,
    text_rate: float | None = None,
    save_dtype: DType = "float32",
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train the whole UNet, and with ``text`` the text encoders. What comes of it is in the folder's ``model``.

    Args, returns and errors are those of ``canvax.train.task.train`` and ``Whole``.
    """
    aim = Whole(text, text_rate, parse_dtype(save_dtype, "save_dtype"))
    return train(training, aim, mesh, subject=subject, deadline=deadline, say=say)
