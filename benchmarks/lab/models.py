"""Full-size checkpoints with random weights, in the real layout: nobody has to download anything to measure.

python -m benchmarks.lab.models sdxl out/sdxl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import InputError
from canvax.models.networks import Networks
from canvax.models.presets import PRESETS
from canvax.params import count, flatten, init_param
from canvax.types import DType
from canvax.weights.folder import KINDS, STEMS
from canvax.weights.identify import INDEX
from canvax.weights.location import BUNDLED
from canvax.weights.safetensors import Outgoing, write_safetensors

_NUMBERS = (1 << 24) - 3  # a prime: no two rows of a weight begin alike

_CLASSES = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}

_SCHEDULER = {
    "_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1,
}  # fmt: skip


def write_random(folder: Path, preset: Networks, *, dtype: DType = np.float32, seed: int = 0) -> Path:
    """A checkpoint of ``preset`` with random weights; the tokenizer is the bundled one.

    One array at a time is made and written, so that memory does not matter.

    Args:
        folder: where to write; must not exist.
        preset: the networks.
        dtype: dtype of the stored weights, float32 or float16.
        seed: of the weights.

    Raises:
        InputError: the disk has too little space; nothing has been written.
    """
    check_space(folder, preset, dtype)
    folder.mkdir(parents=True)
    rng = _Repeated(seed)
    configs = {"unet": preset.denoiser.cfg, "vae": preset.vae, **preset.text.parts}
    for name, spec in preset.specs().items():
        library = KINDS[name]
        kind = {"_class_name": _CLASSES[name]} if library == "diffusers" else {"model_type": "clip_text_model"}
        (folder / name).mkdir()
        config = {key: value for key, value in dataclasses.asdict(configs[name]).items() if value is not None}
        _write_json(folder / name / "config.json", config | kind)
        arrays = [
            Outgoing(key, shape, np.dtype(dtype), partial(init_param, param, rng, dtype, shape))
            for key, param in flatten(spec)
            for shape in param.checkpoint_shapes[:1]
        ]
        write_safetensors(folder / name / f"{STEMS[library]}.safetensors", arrays, {"format": "pt"})
    index: dict[str, Any] = {name: [KINDS[name], _CLASSES[name]] for name in preset.specs()}
    for name in preset.text.parts:
        tokenizer = name.replace("text_encoder", "tokenizer")
        shutil.copytree(BUNDLED["emoji"] / "tokenizer", folder / tokenizer)
        index[tokenizer] = ["transformers", "CLIPTokenizer"]
    (folder / "scheduler").mkdir()
    _write_json(folder / "scheduler" / "scheduler_config.json", _SCHEDULER | {"prediction_type": preset.prediction})
    index |= {
        "_class_name": "StableDiffusionXLPipeline" if preset.text.pooled_width else "StableDiffusionPipeline",
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    if "text_encoder" not in preset.text.parts:
        index |= {"_class_name": "StableDiffusionXLImg2ImgPipeline", "requires_aesthetics_score": True}
    _write_json(folder / INDEX, index)
    return folder


class _Repeated(np.random.Generator):
    """Normal numbers that begin again after 16 million: drawing each of SDXL's weights takes a minute."""

    def __init__(self, seed: int) -> None:
        super().__init__(np.random.PCG64(seed))
        self._numbers = np.tile(super().standard_normal(_NUMBERS, dtype=np.float32), 2)
        self._next = 0

    def standard_normal(self, size: Any = None, dtype: Any = None, out: Any = None) -> Any:  # pyright: ignore
        del dtype, out
        values = np.resize(self._numbers[self._next :], size)
        self._next = (self._next + values.size) % _NUMBERS
        return values


def preset_bytes(preset: Networks, dtype: DType) -> int:
    """Bytes of the weights of a preset."""
    return sum(count(spec) for spec in preset.specs().values()) * np.dtype(dtype).itemsize


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


def find_preset(model: str) -> Networks | None:
    """The preset of that name that can draw by itself; None if ``model`` is something else."""
    return None if model == "sdxl-refiner" else PRESETS.get(model)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write_random(given.folder, PRESETS[given.preset], dtype=np.float16)
