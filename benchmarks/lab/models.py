"""Full-size checkpoints with random weights, in the real layout: nobody has to download anything to measure.

python -m benchmarks.lab.models sdxl out/sdxl
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.lab.layouts import LAYOUTS, SMALL, Stored, fields_of, write_chat_tokenizer
from canvax.errors import InputError
from canvax.families.known import PRESETS
from canvax.models.clip import clip_configs
from canvax.models.networks import Networks
from canvax.params import Param, flatten, init_param
from canvax.types import DType, HostArray
from canvax.weights.folder import INDEX, STEMS, library_of
from canvax.weights.layouts import arrays_to_save, reads_parts_of_arrays
from canvax.weights.location import BUNDLED
from canvax.weights.safetensors import ArrayToSave, write_safetensors

_NUMBERS = (1 << 24) - 3  # a prime: no two rows of a weight begin alike

_CLASSES = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}

KNOWN = {name: preset for name, preset in {**PRESETS, **SMALL}.items() if name != "sdxl-refiner"}
"""Presets that can draw by themselves, by name."""

_SCHEDULER = {
    "_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1,
}  # fmt: skip


def write_random(folder: Path, preset: Networks, *, dtype: DType | None = None, seed: int = 0) -> Path:
    """A checkpoint of ``preset`` with random weights; the tokenizers of CLIP are the bundled one.

    One array of each component at a time is made and written, so that memory does not matter.

    Args:
        folder: where to write; must not exist.
        preset: the networks.
        dtype: dtype of the stored weights; by default ``usual_dtype``.
        seed: of the weights.

    Raises:
        InputError: the disk has too little space; nothing has been written.
    """
    dtype = usual_dtype(preset) if dtype is None else dtype
    check_space(folder, preset, dtype)
    folder.mkdir(parents=True)
    layout = LAYOUTS.get(type(preset.denoiser))
    configs = layout.configs(preset) if layout else _unet_configs(preset)

    def write(name: str, arrays: Sequence[ArrayToSave]) -> None:
        (folder / name).mkdir()
        _write_json(folder / name / "config.json", configs[name])
        write_safetensors(folder / name / f"{STEMS[library_of(name)]}.safetensors", arrays, {"format": "pt"})

    with ThreadPoolExecutor() as threads:
        arrays = random_arrays(preset, dtype, seed)
        list(threads.map(write, arrays.keys(), arrays.values()))
    (folder / "scheduler").mkdir()
    if layout:
        write_chat_tokenizer(folder / "tokenizer")
        scheduler = layout.scheduler
    else:
        for name in clip_configs(preset.text):
            shutil.copytree(BUNDLED["emoji"] / "tokenizer", folder / name.replace("text_encoder", "tokenizer"))
        scheduler = _SCHEDULER | {"prediction_type": preset.prediction or "epsilon"}
    _write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    _write_json(folder / INDEX, layout.index_of(preset) if layout else _unet_index(preset))
    return folder


def random_arrays(preset: Networks, dtype: DType, seed: int = 0) -> dict[str, Sequence[ArrayToSave]]:
    """What the files of each component hold, under the names that diffusers and transformers give."""
    layout, supply = LAYOUTS.get(type(preset.denoiser)), min(_NUMBERS, preset_bytes(preset, np.int8))
    components: dict[str, Sequence[ArrayToSave]] = {}
    for i, (name, arrays) in enumerate(_arrays(preset).items()):
        numbers = _Numbers(seed + i, supply)  # one for each: they may be written at the same time
        components[name] = [
            ArrayToSave(key, shape, param.dtype_in(dtype), partial(numbers, param, param.dtype_in(dtype), shape))
            for key, param, shape in arrays
        ]
        if layout and not reads_parts_of_arrays(preset, name):
            components[name] = arrays_to_save(preset, name, layout.family.stacks, components[name])
    return components


def _arrays(preset: Networks) -> dict[str, list[Stored]]:
    """The arrays of each component of a checkpoint."""
    layout = LAYOUTS.get(type(preset.denoiser))
    return {
        name: list(layout.arrays(preset, name, spec))
        if layout
        else [Stored(key, param, param.checkpoint_shapes[0]) for key, param in flatten(spec)]
        for name, spec in preset.specs().items()
    }


def _unet_configs(preset: Networks) -> dict[str, dict[str, Any]]:
    configs = {"unet": preset.config, "vae": preset.vae, **clip_configs(preset.text)}
    kinds = {
        name: {"_class_name": _CLASSES[name]} if library_of(name) == "diffusers" else {"model_type": "clip_text_model"}
        for name in configs
    }
    return {name: fields_of(cfg) | kinds[name] for name, cfg in configs.items()}


def _unet_index(preset: Networks) -> dict[str, Any]:
    index: dict[str, Any] = {name: [library_of(name), _CLASSES[name]] for name in preset.specs()}
    for name in clip_configs(preset.text):
        index[name.replace("text_encoder", "tokenizer")] = ["transformers", "CLIPTokenizer"]
    index |= {
        "_class_name": "StableDiffusionXLPipeline" if preset.text.pooled_width else "StableDiffusionPipeline",
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    if "text_encoder" not in clip_configs(preset.text):
        index |= {"_class_name": "StableDiffusionXLImg2ImgPipeline", "requires_aesthetics_score": True}
    return index


class _Numbers:
    """Random arrays of ``count`` normal numbers that begin again and again, scaled and rounded once for a deviation.

    Drawing each weight of SDXL takes a minute, and rounding each of Krea 2 another.
    """

    def __init__(self, seed: int, count: int) -> None:
        self._seed, self._count, self._next = seed, count, 0
        self._made: dict[Any, HostArray] = {}

    def __call__(self, param: Param, dtype: DType, shape: tuple[int, ...]) -> HostArray:
        if param.init in ("zeros", "ones"):
            return np.full(shape, param.init == "ones", dtype)
        key = param.init, param.shape[:-1], dtype  # which decide the deviation
        if key not in self._made:
            made = init_param(param, np.random.default_rng(self._seed), dtype, (self._count,))
            self._made[key] = made.view(f"u{made.itemsize}")  # copied by all threads at the same time
        numbers, done = self._made[key], 0
        out = np.empty(math.prod(shape), numbers.dtype)
        while done < out.size:
            part = numbers[self._next :][: out.size - done]
            out[done : done + part.size] = part
            done, self._next = done + part.size, (self._next + part.size) % self._count
        return out.view(dtype).reshape(shape)


def usual_dtype(preset: Networks) -> DType:
    """That in which models of this kind are published."""
    return np.dtype(ml_dtypes.bfloat16 if type(preset.denoiser) in LAYOUTS else np.float16)


def preset_bytes(preset: Networks, dtype: DType) -> int:
    """Bytes of the weights of a preset."""
    arrays = (array for part in _arrays(preset).values() for array in part)
    return sum(math.prod(array.shape) for array in arrays) * np.dtype(dtype).itemsize


def check_space(folder: Path, preset: Networks, dtype: DType) -> None:
    """Refuse to write what the disk cannot hold.

    Raises:
        InputError: it cannot.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    needed, free = preset_bytes(preset, dtype), shutil.disk_usage(there).free
    if needed * 1.05 > free:
        raise InputError(
            f"a checkpoint of random weights needs {needed / 1e9:.1f} GB in {there}, where {free / 1e9:.1f} GB are "
            "free; set TMPDIR to a folder with more, or give --model a folder"
        )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(KNOWN))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write_random(given.folder, KNOWN[given.preset])
