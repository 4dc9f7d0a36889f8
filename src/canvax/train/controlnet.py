"""Training a ControlNet (Zhang et al. 2023): a copy of the UNet's way down that learns to read control images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.checked import checked
from canvax.errors import InputError, check_count
from canvax.families.base import Model
from canvax.families.controls import control_of
from canvax.models.controlnet import ControlNet, HintConfig
from canvax.params import Params, init_params
from canvax.train.diffusion import CONTROL
from canvax.train.state import in_dtype
from canvax.train.task import PLAN, Start, Subject, Training, train
from canvax.types import DType
from canvax.weights.cast import parse_dtype
from canvax.weights.load import Component
from canvax.weights.save import save_component

CONTROL_PLAN = replace(PLAN, steps=5000)
"""1e-5, as the authors have it."""

COLUMN = "conditioning_image"
"""The column of control images, as data sets for the scripts of diffusers have it."""

_OF_UNET = (
    *("in_channels", "block_out_channels", "layers_per_block", "down_block_types", "norm_num_groups", "norm_eps"),
    *("attention_head_dim", "num_attention_heads", "transformer_layers_per_block", "cross_attention_dim"),
    *("use_linear_projection", "upcast_attention", "flip_sin_to_cos", "freq_shift"),
    *("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
)
"""What the config has as the UNet's has it."""

_WIDTHS = (16, 32, 96, 256)


@checked
@dataclass(frozen=True)
class Controlling:
    """The ``Aim`` of training a ControlNet.

    Attributes:
        widths: channels of the small network that reads the image, one more than it halves it; by default those of the
            paper, or as many of them as the autoencoder needs.
        save_dtype: of the finished weights.
    """

    widths: tuple[int, ...] | None = None
    save_dtype: DType = "float32"

    name = "ControlNet"
    part = "control"

    def __post_init__(self) -> None:
        parse_dtype(self.save_dtype, "save_dtype")
        for width in self.widths or ():
            check_count("widths of the hint network", width, 65536)
        if self.widths is not None and not len(self.widths):
            raise InputError("widths=() names no channels; leave it out for the paper's")

    @property
    def facts(self) -> dict[str, Any]:
        """The sizes that are not the UNet's."""
        return {"widths": None if self.widths is None else list(self.widths)}

    @property
    def rates(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def target(self, folder: Path) -> Path:
        """A folder of its config and its weights."""
        return folder / CONTROL

    def check(self, model: Model, training: Training) -> None:
        """Refuse what it cannot show."""
        if training.prompts:
            raise InputError("preview is not there for a ControlNet, whose images need a control image each")
        count = int(model.vae.factor).bit_length()
        if self.widths is not None and not (len(self.widths) == count and all(0 < one <= 4096 for one in self.widths)):
            raise InputError(
                f"hint-channels (widths) = {','.join(map(str, self.widths))}: {model.name} needs {count} numbers in "
                "1..4096, one more than its autoencoder halves an image; leave it out for the usual ones"
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
        made = control_of("the ControlNet", "controlnet", self._config(model), model)
        assert isinstance(made, ControlNet)
        return made

    def begin(self, model: Model, params: Params, training: Training, dtype: DType) -> Start:
        """The UNet's own weights; what joins it to the UNet is zero, so that at first it changes nothing."""
        net = self._net(model)
        fresh = init_params(net.spec, training.plan.seed)
        begun = {
            name: jax.device_get(params["unet"][name]) if name in params["unet"] else fresh[name] for name in fresh
        }
        for name in ("controlnet_down_blocks", "controlnet_mid_block"):
            begun[name] = jax.tree.map(np.zeros_like, begun[name])
        hint = begun["controlnet_cond_embedding"]
        hint["conv_out"] = jax.tree.map(np.zeros_like, hint["conv_out"])
        return Start({CONTROL: begun}, in_dtype(params, ["unet", *model.text.names], dtype), control=net)

    def shown(self, params: Params, trained: Params) -> Params:
        """It shows nothing; see ``check``."""
        return params

    def save(self, target: Path, model: Model, params: Params, trained: Params, training: Training) -> Path:
        """In the diffusers layout."""
        part = Component(CONTROL, self._net(model).spec, "diffusers")
        save_component(target, part, trained[CONTROL], self._config(model), dtype=self.save_dtype)
        return target


@checked
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
    """Train a ControlNet on pictures and control images; what comes of it is in the folder's ``controlnet``.

    Args:
        training: what to train on; the table of captions names each picture's control image too.
        mesh: see ``canvax.train.task.train``.
        widths: see ``Controlling``.
        control_column: the column of the control images.
        save_dtype: of the finished weights.
        deadline: see there.
        say: see there.
    """
    aim = Controlling(widths, parse_dtype(save_dtype, "save_dtype"))
    subject = Subject(control_column=control_column)
    return train(training, aim, mesh, subject=subject, deadline=deadline, say=say)
