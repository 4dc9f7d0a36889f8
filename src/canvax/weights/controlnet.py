"""Files of networks that read control images: a folder of diffusers, or one safetensors file under several names.

    diffusers           controlnet_cond_embedding.conv_in.weight, conv_in.weight, down_blocks. ..., and config.json
    the original code   control_model.input_hint_block.0.weight, input_blocks. ..., zero_convs. ..., middle_block. ...
    control-LoRAs       lora_controlnet, and of what the UNet has NAME.up and NAME.down in place of NAME.weight
    T2I-Adapters        adapter.body.0.resnets.0.block1.weight; in the original code body.0.block1.weight

What cannot be used under any of these names is told by name. (Zhang et al. 2023; Mou et al. 2023.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from canvax.errors import CheckpointError
from canvax.weights.entries import Entry
from canvax.weights.layout import PICKLES, pickle_refused
from canvax.weights.ldm_names import unet_entries
from canvax.weights.open import open_network
from canvax.weights.safetensors import open_safetensors
from canvax.weights.source import Source

Kind = Literal["controlnet", "adapter"]
CLASSES: Mapping[str, Kind] = {
    "ControlNetModel": "controlnet",
    "FlaxControlNetModel": "controlnet",
    "ControlNetUnionModel": "controlnet",
    "ControlNetModel_Union": "controlnet",
    "T2IAdapter": "adapter",
}
"""Classes of diffusers."""

_DIFFERENCE = "difference"
_CONTROL_LORA = "lora_controlnet"
_PREFIX = "control_model."
_HINT = re.compile(r"input_hint_block\.(\d+)\.(weight|bias)")
_ZERO = re.compile(r"zero_convs\.(\d+)\.0\.(weight|bias)")
_ADAPTER = re.compile(r"body\.(\d+)\.(?:body\.(\d+)\.)?(block1|block2|in_conv|out_conv)\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class ControlFiles:
    """A network in files of its own.

    Attributes:
        name: as it was asked for.
        kind: of network.
        config: of diffusers, parsed; None where there is none, and shapes say what it would.
        arrays: all of its arrays, under the names of diffusers.
        difference: whether weights of the UNet's are what is to be added to those of the UNet itself.
        pairs: of a control-LoRA the two factors, [out, r] and [r, in] as PyTorch has them, of what is to be added to a
            weight of the UNet's; what is in neither is the UNet's.
        revision: the commit of a Hub repository.
        variant: of the weights.
    """

    name: str
    kind: Kind
    config: Mapping[str, Any] | None
    arrays: Sequence[Entry]
    difference: bool = False
    pairs: Mapping[str, tuple[Entry, Entry]] = field(default_factory=dict)
    revision: str | None = None
    variant: str | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.revision[:12]}" if self.revision else self.name

    def entries(self, component: str) -> Sequence[Entry]:
        """As in ``ModelFiles``, of which this is the part that loading needs."""
        del component
        return self.arrays

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each array, as in PyTorch."""
        whole = {name: (up.shape[0], *down.shape[1:]) for name, (up, down) in self.pairs.items()}
        return {one.name: one.shape for one in self.arrays} | whole


def open_control(source: Source, *, accept: Callable[[Kind, Mapping[str, Any]], object]) -> ControlFiles:
    """Find a ControlNet or a T2I-Adapter, fetching what is not on disk yet; no array is read.

    Args:
        source: a folder, a Hub id, or a safetensors file.
        accept: called with the kind and the parsed ``config.json``, if there is one, before weights are fetched.

    Raises:
        CheckpointError: it is missing, damaged, or something else.
        HubError: the Hub cannot be reached, refuses, or does not have it.
    """
    path = _path(source)
    if path is not None and path.suffix.lower() in PICKLES:
        raise CheckpointError(f"{source.name}: {pickle_refused(path)}")
    if path is not None and path.is_file():
        return _of_arrays(source.name, open_safetensors(path))
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        return _of_arrays(source.name, open_safetensors(_only_file(source.name, path)))

    try:
        source.local_folder()
    except CheckpointError:
        raise CheckpointError(
            f"controlnet={source.name[:200]!r}: there is no such folder or file, and it is not a Hub id 'owner/name'"
        ) from None

    def accepted(config: Mapping[str, Any]) -> None:
        accept(_kind_of(source.name, config), config)

    files = open_network(source, accept=accepted)
    config = files.config("")
    arrays = files.entries("")
    kind = _kind_of(source.name, config)
    return ControlFiles(source.name, kind, config, arrays, revision=files.revision, variant=files.variant)


def is_union(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a ControlNet-Union; its first files name the class of a plain ControlNet."""
    return "Union" in str(config.get("_class_name")) or "num_control_type" in config


def _path(source: Source) -> Path | None:
    """The file or folder that is named; None for a Hub id and for what is nowhere, which ``open_network`` reports."""
    try:
        path = Path(source.model).expanduser()
        return path if path.exists() or path.suffix.lower() in PICKLES else None
    except (OSError, RuntimeError, ValueError):
        return None


def _only_file(name: str, folder: Path) -> Path:
    """The safetensors file of a folder without a config."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    pickles = sorted(one for one in folder.iterdir() if one.suffix.lower() in PICKLES)
    if pickles and not files:
        raise CheckpointError(f"{name}: holds only {pickles[0].name}. {pickle_refused(pickles[0])}")
    raise CheckpointError(
        f"{name}: has no config.json and {len(files) or 'no'} safetensors files; name a folder of diffusers with "
        "config.json and diffusion_pytorch_model.safetensors, or one file"
    )


def _kind_of(name: str, config: Mapping[str, Any]) -> Kind:
    cls = config.get("_class_name")
    if isinstance(cls, str) and cls in CLASSES:
        return CLASSES[cls]
    raise CheckpointError(
        f"{name}: its config.json is of the class {str(cls)[:80]!r}; canvax reads ControlNetModel, "
        "ControlNetUnionModel and T2IAdapter"
    )


def _of_arrays(name: str, arrays: Sequence[Entry]) -> ControlFiles:
    """By names alone."""
    names = {one.name for one in arrays}
    if (fault := _other(names)) is not None:
        raise CheckpointError(f"{name}: is {fault}")
    if _CONTROL_LORA in names:
        return _control_lora(name, arrays)
    difference = _DIFFERENCE in names
    arrays = [one for one in arrays if one.name != _DIFFERENCE]
    if any(one.startswith(_PREFIX) for one in names):
        arrays = [replace(one, name=one.name.removeprefix(_PREFIX)) for one in arrays]
        names = {one.name for one in arrays}
    if "input_hint_block.0.weight" in names:
        return ControlFiles(name, "controlnet", None, list(_controlnet_entries(arrays)), difference)
    if "controlnet_cond_embedding.conv_in.weight" in names:
        return ControlFiles(name, "controlnet", None, arrays, difference)
    if any(one.startswith("adapter.body.0.") for one in names):
        return ControlFiles(name, "adapter", None, arrays)
    if any(_ADAPTER.fullmatch(one) for one in names):
        return ControlFiles(name, "adapter", None, list(_adapter_entries(arrays)))
    raise CheckpointError(
        f"{name}: holds no ControlNet and no T2I-Adapter: neither input_hint_block, controlnet_cond_embedding nor "
        f"adapter.body is among its {len(names)} arrays"
    )


def _other(names: set[str]) -> str | None:
    """What a file is that people take for a ControlNet."""
    if not names:
        return "empty"
    if any(one.startswith("lllite_") for one in names):
        return "a ControlLLLite, another method than ControlNet; canvax does not have it"
    if _CONTROL_LORA not in names and any("lora_down" in one or "lora_A" in one or ".lora." in one for one in names):
        return "a LoRA, no ControlNet; pass it to pipe.adapters.load or --lora"
    if any(one.startswith(("first_stage_model.", "model.diffusion_model.")) for one in names) and not any(
        one.startswith(_PREFIX) for one in names
    ):
        return "a whole model, no ControlNet; pass it to canvax.load"
    return None


def _control_lora(name: str, arrays: Sequence[Entry]) -> ControlFiles:
    """A ControlNet as what is to be added to a UNet, in two factors for each weight (Stability AI, 2023)."""
    arrays = [replace(one, name=one.name.removeprefix(_PREFIX)) for one in arrays if one.name != _CONTROL_LORA]
    ups, downs = (
        {one.name.removesuffix(end): one for one in arrays if one.name.endswith(end)} for end in (".up", ".down")
    )
    alone = sorted(ups.keys() ^ downs.keys())
    if alone or not ups:
        told = f"{alone[0]} has one of its two factors" if alone else "it has no factors"
        raise CheckpointError(f"{name}: is no whole control-LoRA: {told}")
    for key in ups:
        up, down = ups[key], downs[key]
        if len(up.shape) < 2 or len(down.shape) < 2 or up.shape[1] != down.shape[0] or set(up.shape[2:]) - {1}:
            raise CheckpointError(f"{name}: the factors of {key}, {up.shape} and {down.shape}, do not fit together")
        if not up.is_float or not down.is_float:
            raise CheckpointError(f"{name}: the factors of {key} are no floating point numbers")
    whole = [one for one in arrays if not one.name.endswith((".up", ".down"))]
    # Names are told together, each factor in the place of the weight.
    both = [[replace(one, name=f"{key}.weight") for key, one in ups.items()], [downs[key] for key in ups]]
    named = list(_controlnet_entries([*whole, *both[0]]))
    pairs = {up.name: (up, replace(down, name=up.name)) for up, down in zip(named[len(whole) :], both[1], strict=True)}
    return ControlFiles(name, "controlnet", None, named[: len(whole)], pairs=pairs)


def _controlnet_entries(arrays: Sequence[Entry]) -> Iterable[Entry]:
    """Names of the original code -> those of diffusers."""
    hints = [int(match[1]) for one in arrays if (match := _HINT.fullmatch(one.name))]
    last = max(hints, default=0)
    for entry in unet_entries(arrays):
        name = entry.name
        if match := _HINT.fullmatch(name):  # convolutions with an activation after each
            at = int(match[1])
            part = {0: "conv_in", last: "conv_out"}.get(at, f"blocks.{at // 2 - 1}")
            name = f"controlnet_cond_embedding.{part}.{match[2]}"
        elif match := _ZERO.fullmatch(name):
            name = f"controlnet_down_blocks.{match[1]}.{match[2]}"
        elif name.startswith("middle_block_out.0."):
            name = f"controlnet_mid_block.{name.rpartition('.')[2]}"
        yield replace(entry, name=name)


def _adapter_entries(arrays: Sequence[Entry]) -> Iterable[Entry]:
    """Names of the original code -> those of diffusers. It numbers residual blocks through, two for each block."""
    for entry in arrays:
        match = _ADAPTER.fullmatch(entry.name)
        name = entry.name
        if match and match[2] is not None:  # of light adapters, which have lists in lists
            name = f"body.{match[1]}.resnets.{match[2]}.{match[3]}.{match[4]}"
        elif match and match[3].startswith("block"):
            name = f"body.{int(match[1]) // 2}.resnets.{int(match[1]) % 2}.{match[3]}.{match[4]}"
        elif match and "conv_in.weight" in {one.name for one in arrays}:
            name = f"body.{int(match[1]) // 2}.{match[3]}.{match[4]}"
        yield replace(entry, name=f"adapter.{name}")
