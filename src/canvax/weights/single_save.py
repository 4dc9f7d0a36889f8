"""Writing a whole model as one safetensors file, under the names of the original Stable Diffusion code.

The names are the inverse of ``canvax.weights.ldm_names``; A1111, ComfyUI and PyTorch diffusers read the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from canvax.types import HostArray
from canvax.weights.entries import Entry
from canvax.weights.ldm_names import FUSED_PARTS, TEXT_ENDS, TEXT_PARTS, VAE_ATTENTION, VAE_PARTS, ldm_modules
from canvax.weights.safetensors import Outgoing
from canvax.weights.single_file import REFINER, SD1, SD2, UNET, VAE, XL, Kind, SingleFile

Parts = Mapping[str, Sequence[Outgoing]]
"""The arrays of each component, as PyTorch diffusers names and lays them out."""

_VAE_BLOCK = re.compile(r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(resnets|downsamplers|upsamplers)\.(\d+)\.(.+)")
_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid_block\.((?:resnets|attentions)\.\d+)\.(.+)")
_TEXT_LAYER = re.compile(r"text_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")

_XL = "stable-diffusion-xl-v1"
_ARCHITECTURES = {SD1: "stable-diffusion-v1", XL: f"{_XL}-base", REFINER: f"{_XL}-refiner"}


def single_arrays(kind: Kind, parts: Parts, *, v_prediction: bool, zero_snr: bool) -> list[Outgoing]:
    """All arrays of the file.

    Args:
        kind: of model.
        parts: see there.
        v_prediction: what the UNet predicts; SDXL's files say it by an array without numbers.
        zero_snr: likewise, that the last step of training was noise alone.
    """
    arrays = [replace(one, name=UNET + name) for one, name in _unet(parts["unet"])]
    arrays += [replace(one, name=VAE + one.name) for one in _vae(parts["vae"])]
    for component, start in kind.encoders.items():
        own = parts[component]
        own = _open_clip(own, unused_layer=kind is SD2) if component in kind.open_clip else own
        arrays += [replace(one, name=start + one.name) for one in own]
    marks = {"v_pred": v_prediction and kind is XL, "ztsnr": zero_snr}
    none = np.zeros(0, np.float32)
    return arrays + [Outgoing(name, (0,), none.dtype, lambda: none) for name, there in marks.items() if there]


def single_metadata(kind: Kind, *, v_prediction: bool, inpaints: bool) -> dict[str, str]:
    """ModelSpec's header (version 1.0.1): what the file cannot say by its arrays."""
    plain = _ARCHITECTURES.get(kind, "stable-diffusion-v2-768-v" if v_prediction else "stable-diffusion-v2-512")
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": plain + ("-inpainting" if inpaints else ""),
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.prediction_type": "v" if v_prediction else "epsilon",
    }


def as_read(path: Path, kind: Kind, arrays: Sequence[Outgoing], *, v_prediction: bool, zero_snr: bool) -> SingleFile:
    """What reading the file would find, before it is written."""
    entries = [Entry(one.name, one.shape, one.dtype, path, ((0, one.nbytes),), "torch") for one in arrays]
    told = ("v_prediction" if v_prediction else "epsilon"), "as modelspec.prediction_type says"
    return SingleFile(str(path), path, kind, entries, told, zero_snr)


def _unet(arrays: Sequence[Outgoing]) -> Iterator[tuple[Outgoing, str]]:
    names = {one.name for one in arrays}
    each = 1 + sum(name.startswith("down_blocks.0.resnets.") and name.endswith(".conv1.weight") for name in names)
    for one in arrays:
        layer, _, leaf = one.name.rpartition(".")
        start = f"{'.'.join(layer.split('.')[:2])}.attentions."  # of a level that attends
        places = ldm_modules(layer, each)
        last = len(places) > 1 and any(name.startswith(start) for name in names)
        yield one, f"{places[last]}.{leaf}" if places else one.name


def _vae(arrays: Sequence[Outgoing]) -> Iterator[Outgoing]:
    top = max(int(one.name.split(".")[2]) for one in arrays if one.name.startswith("decoder.up_blocks."))
    parts = {theirs: ours for ours, theirs in VAE_PARTS.items()}
    attention = {theirs: ours for ours, theirs in VAE_ATTENTION.items()}
    for one in arrays:
        name = one.name.replace(".conv_norm_out.", ".norm_out.")
        if match := _VAE_BLOCK.fullmatch(name):
            side, way, level, part, number, rest = match.groups()
            start = f"{side}.{way}.{int(level) if way == 'down' else top - int(level)}"
            own = f"block.{number}" if part == "resnets" else part.removesuffix("rs")
            name = f"{start}.{own}.{rest.replace('conv_shortcut.', 'nin_shortcut.')}"
        elif match := _VAE_MIDDLE.fullmatch(name):
            side, part, rest = match.groups()
            step, _, leaf = rest.rpartition(".")
            name = f"{side}.mid.{parts[part]}.{attention.get(step, step)}.{leaf}"
            if len(one.shape) == 2:  # the original code attends by 1x1 convolutions
                shape, get = (*one.shape, 1, 1), one.get
                one = replace(one, shape=shape, get=lambda get=get, shape=shape: get().reshape(shape))
        yield replace(one, name=name)


def _open_clip(arrays: Sequence[Outgoing], *, unused_layer: bool) -> Iterator[Outgoing]:
    """With queries, keys and values as one array; ``unused_layer``: and the last layer twice.

    2.x reads the last but one of OpenCLIP's layers. diffusers leaves the last one out, the original code has it.
    """
    by_name = {one.name: one for one in arrays}
    layers = 1 + max(int(match[1]) for name in by_name if (match := _TEXT_LAYER.fullmatch(name)))
    ends, inner = ({theirs: ours for ours, theirs in table.items()} for table in (TEXT_ENDS, TEXT_PARTS))
    for name, one in by_name.items():
        match = _TEXT_LAYER.fullmatch(name)
        if match is None:
            yield _turned(one) if name == "text_projection.weight" else replace(one, name=ends.get(name, name))
            continue
        number, part, leaf = match.groups()
        if part.startswith("self_attn.") and part.endswith(FUSED_PARTS):
            if not part.endswith(FUSED_PARTS[0]):
                continue
            three = [by_name[f"text_model.encoder.layers.{number}.self_attn.{own}.{leaf}"] for own in FUSED_PARTS]
            one, own = _joined(three), f"attn.in_proj_{leaf}"
        else:
            own = f"{inner.get(part, part)}.{leaf}"
        for i in [int(number)] + ([layers] if unused_layer and int(number) == layers - 1 else []):
            yield replace(one, name=f"transformer.resblocks.{i}.{own}")


def _turned(one: Outgoing) -> Outgoing:
    return replace(one, name="text_projection", shape=one.shape[::-1], get=lambda: np.ascontiguousarray(one.get().T))


def _joined(three: Sequence[Outgoing]) -> Outgoing:
    def get() -> HostArray:
        return np.concatenate([one.get() for one in three])

    rows, *rest = three[0].shape
    return replace(three[0], shape=(3 * rows, *rest), get=get)
