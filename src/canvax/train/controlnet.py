"""Training a ControlNet (Zhang et al. 2023): a copy of the UNet's encoder that learns to read control images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.families.controls import control_of
from canvax.files import temporary_folder
from canvax.models.controlnet import ControlNet, HintConfig
from canvax.params import Params, init_params
from canvax.settings import check_all
from canvax.train.diffusion import CONTROL
from canvax.train.settings import TASKS, ControlRecord, Pairs
from canvax.train.state import in_dtype
from canvax.train.task import PLAN, InitialState, Subject, Training, train
from canvax.types import DType
from canvax.weights.cast import parse_dtype
from canvax.weights.load import Component
from canvax.weights.save import save_component

CONTROL_PLAN = replace(PLAN, **TASKS["controlnet"].plan)
"""Learning rate 1e-5, as in the paper."""

COLUMN = Pairs.control_column
"""The column of control images, named as in data sets for diffusers' scripts."""

_OF_UNET = (
    *("in_channels", "block_out_channels", "layers_per_block", "down_block_types", "norm_num_groups", "norm_eps"),
    *("attention_head_dim", "num_attention_heads", "transformer_layers_per_block", "cross_attention_dim"),
    *("use_linear_projection", "upcast_attention", "flip_sin_to_cos", "freq_shift"),
    *("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
)
"""The fields that the ControlNet's config copies from the UNet's."""

_WIDTHS = (16, 32, 96, 256)


@dataclass(frozen=True)
class ControlNetTask(ControlRecord):
    """The ``TrainingTask`` of training a ControlNet.

    Attributes:
        widths: channels of the small network that reads the control image, one number more than it halves the image;
            by default those of the paper, adjusted to the autoencoder's factor.
        save_dtype: dtype of the saved weights.
    """

    name = "ControlNet"
    part = "control"
    for_transformers = False

    def __post_init__(self) -> None:
        check_all(self)
        parse_dtype(self.save_dtype, "save_dtype")

    @property
    def facts(self) -> dict[str, Any]:
        """The sizes that do not follow from the UNet."""
        return {"widths": None if self.widths is None else list(self.widths)}

    @property
    def rates(self) -> dict[str, float]:
        """No component has a special learning rate."""
        return {}

    def files(self, folder: Path) -> Sequence[Path]:
        """Return the folder of the ControlNet's config and weights."""
        return [folder / CONTROL]

    def check(self, model: Model, training: Training) -> None:
        """Refuse previews, and ``widths`` that do not match the model."""
        if training.prompts:
            raise InputError("prompts", "is not there for a ControlNet, whose images need a control image each")
        count = int(model.vae.factor).bit_length()
        if self.widths is not None and len(self.widths) != count:
            raise InputError(
                "widths",
                f"is not what {model.name} needs: {count} numbers in 1..4096, one more than its autoencoder halves an "
                "image",
                cure="leave it out for the usual ones",
                value=",".join(map(str, self.widths)),
            )
        self._net(model)

    def _config(self, model: Model) -> dict[str, Any]:
        halvings = int(model.vae.factor).bit_length() - 1
        widths = self.widths or (_WIDTHS[-1:] * max(0, halvings - 3) + _WIDTHS)[-halvings - 1 :]
        hint = {**asdict(HintConfig()), "conditioning_embedding_out_channels": list(widths)}
        unet = model.files.config("unet")
        same = {name: unet[name] for name in _OF_UNET if unet.get(name) is not None}
        return {"_class_name": "ControlNetModel", **same, **hint}

    def _net(self, model: Model) -> ControlNet:
        net = control_of("the ControlNet", "controlnet", self._config(model), model)
        assert isinstance(net, ControlNet)
        return net

    def exact(self, model: Model) -> Collection[str]:
        """Return the UNet, which is copied."""
        return ("unet",)

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> InitialState:
        """Copy the UNet's weights; the layers that connect it to the UNet are zero, so that it has no effect yet."""
        net = self._net(model)
        fresh = init_params(net.spec, training.plan.seed)
        initial = {
            name: jax.device_get(params["unet"][name]) if name in params["unet"] else fresh[name] for name in fresh
        }
        for name in ("controlnet_down_blocks", "controlnet_mid_block"):
            initial[name] = jax.tree.map(np.zeros_like, initial[name])
        hint = initial["controlnet_cond_embedding"]
        hint["conv_out"] = jax.tree.map(np.zeros_like, hint["conv_out"])
        return InitialState({CONTROL: initial}, in_dtype(params, ["unet", *model.text.names], dtype), control=net)

    def shown(self, model: Model, params: Params, trained: Params) -> Params:
        """Return ``params``: there are no previews (see ``check``)."""
        return params

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """Write the network in the diffusers layout."""
        part = Component(CONTROL, self._net(model).spec, "diffusers")
        with temporary_folder(target.parent) as draft:
            save_component(draft / CONTROL, part, trained[CONTROL], self._config(model), dtype=self.save_dtype)
            return (draft / CONTROL).rename(target)


Controlling = ControlNetTask  # former name


def train_controlnet(
    training: Training,
    mesh: Mesh,
    *,
    widths: tuple[int, ...] | None = None,
    control_column: str = COLUMN,
    save_dtype: DType = "float32",
    deadline: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train a ControlNet on images and control images; write it to ``training.folder / "controlnet"``.

    Args:
        training: model and images; the table of captions must also name the control image of each image.
        mesh: the devices; the batch is split over ``data``.
        widths: see ``ControlNetTask``.
        control_column: the column of the control images.
        save_dtype: dtype of the saved weights.
        deadline: ``time.monotonic()`` at which to write the state and stop.
        say: called with messages about the progress.

    Returns:
        The folder of the ControlNet, or None if the deadline came first.
    """
    aim = ControlNetTask(widths, parse_dtype(save_dtype, "save_dtype"))
    subject = Subject(control_column=control_column)
    return train(training, aim, mesh, subject=subject, deadline=deadline, say=say)
