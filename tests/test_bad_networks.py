"""Broken networks beside a model: each file gives one clear error, and the pipeline is as it was and generates."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_bad_adapters import Harm

import canvax
from canvax.errors import CanvaxError
from canvax.models.configs import TinyConfig
from canvax.models.tiny import tiny_spec
from canvax.params import flatten, init_params
from canvax.pipelines.result import load_preview
from canvax.weights.load import Component
from canvax.weights.save import save_component
from tests.support.checkpoints import raw_safetensors
from tests.support.control_files import adapter, controlnet, union
from tests.support.ip_adapter_files import encoder, ip_adapter
from tests.support.small_checkpoint import UNET
from tests.support.small_sdxl import build

pytestmark = pytest.mark.bad

TINY = TinyConfig(
    encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8), num_encoder_blocks=(1, 1, 1, 1),
    num_decoder_blocks=(1, 1, 1, 1),
)  # fmt: skip
NETWORKS = ("controlnet", "union", "t2i-adapter", "vae", "taesd", "preview", "image encoder")
"""Folders of a config and weights."""


class Place:
    """What is broken: a folder, or one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path if path.is_file() else next(path.glob("*.safetensors"))

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def write_config(self, **changes: Any) -> None:
        (self.path / "config.json").write_text(json.dumps({**self.config, **changes}))

    def write(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        """The arrays as ``change`` leaves them or returns them."""
        arrays = load_file(self.weights)
        save_file(changed if isinstance(changed := change(arrays), dict) else arrays, self.weights)

    def cut(self, count: int) -> None:
        self.weights.write_bytes(self.weights.read_bytes()[:count])


def largest(arrays: dict[str, np.ndarray]) -> str:
    return max(arrays, key=lambda name: arrays[name].size)


def put(value: float) -> Callable[[dict[str, np.ndarray]], object]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        name = largest(arrays)
        arrays[name] = arrays[name].copy()
        arrays[name].flat[5] = value

    return change


def only_pickle(place: Place) -> None:
    place.weights.unlink()
    (place.weights.parent / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Harm()))


LIE = raw_safetensors({"x.weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}, b"x" * 8)

FILES: dict[str, Callable[[Place], object]] = {
    "nothing": lambda p: p.weights.write_bytes(b""),
    "a cut header": lambda p: p.cut(40),
    "cut arrays": lambda p: p.cut(-100),
    "more than its header tells": lambda p: p.weights.write_bytes(p.weights.read_bytes() + b"xx"),
    "a pickle with code under its name": lambda p: p.weights.write_bytes(pickle.dumps(Harm())),
    "a page": lambda p: p.weights.write_bytes(b"<!doctype html><html>" + b" " * 90),
    "a pointer": lambda p: p.weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3),
    "a header that lies": lambda p: p.weights.write_bytes(LIE),
    "NaN": lambda p: p.write(put(np.nan)),
    "infinity": lambda p: p.write(put(np.inf)),
    "no array": lambda p: p.write(lambda arrays: {"x": np.zeros(1, np.float32)}),
    "no array that fits": lambda p: p.write(lambda arrays: {f"other.{name}": array for name, array in arrays.items()}),
    "one array too few": lambda p: p.write(lambda arrays: arrays.pop(largest(arrays))),
    "one array too many": lambda p: p.write(lambda arrays: {**arrays, "other.weight": np.zeros(3, np.float32)}),
    "another shape": lambda p: p.write(lambda arrays: arrays.update({largest(arrays): np.zeros((3, 5), np.float32)})),
    "whole numbers": lambda p: p.write(lambda arrays: {name: array.astype(np.int32) for name, array in arrays.items()}),
}  # fmt: skip
"""What befalls a file of weights, whichever network it is of."""

FOLDERS: dict[str, Callable[[Place], object]] = {
    "nothing but a pickle": only_pickle,
    "no weights": lambda p: p.weights.unlink(),
    "no config": lambda p: (p.path / "config.json").unlink(),
    "a config that is no JSON": lambda p: (p.path / "config.json").write_text("{"),
    "a config that is a list": lambda p: (p.path / "config.json").write_text("[]"),
    "another class": lambda p: p.write_config(_class_name="Transformer2DModel", model_type="bert"),
}  # fmt: skip
"""What befalls the folder around it."""

SIZES: dict[str, tuple[str, Any]] = {  # of every network one size that cannot be
    "controlnet": ("block_out_channels", [1 << 40, 1 << 40]),
    "union": ("num_control_type", 10**12),
    "t2i-adapter": ("channels", [10**12] * 4),
    "vae": ("block_out_channels", [10**12] * 2),
    "taesd": ("decoder_block_out_channels", [10**12] * 4),
    "preview": ("decoder_block_out_channels", [10**12] * 4),
    "image encoder": ("hidden_size", 10**12),
}

CASES = [
    *(("controlnet", what, FILES[what]) for what in FILES),
    *(
        (network, what, FILES[what])
        for network in (*NETWORKS[1:], "ip-adapter")
        for what in ("cut arrays", "another shape")
    ),
    *(("vae", what, FOLDERS[what]) for what in FOLDERS),
    *(
        (network, f"{name} = {str(value)[:10]}", lambda p, name=name, value=value: p.write_config(**{name: value}))
        for network, (name, value) in SIZES.items()
    ),
    ("vae", "widths of text", lambda p: p.write_config(block_out_channels="many")),
]


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def sd(small: canvax.Pipeline) -> canvax.Pipeline:
    return small


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    """ControlNet-Unions are for SDXL alone."""
    return canvax.load(build(tmp_path_factory.mktemp("xl")), mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def good(
    sd: canvax.Pipeline, xl: canvax.Pipeline, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What is broken of each kind, whole."""
    root = tmp_path_factory.mktemp("good")
    tiny = Component("", tiny_spec(TINY), "diffusers")
    config = {**vars(TINY), "_class_name": "AutoencoderTiny"}
    for name in ("taesd", "preview"):
        save_component(root / name, tiny, init_params(tiny.spec, 1), config)
    shutil.copytree(folder / "vae", root / "vae")
    controlnet(root / "controlnet", sd)
    union(root / "union", xl)
    adapter(root / "t2i-adapter", sd)
    encoder(root / "image encoder")
    ip_adapter(root / "ip-adapter" / "a.safetensors", "plain", UNET)
    found = {name: root / name for name in NETWORKS} | {"ip-adapter": root / "ip-adapter" / "a.safetensors"}
    for name, path in found.items():
        load(name, path, xl if name == "union" else sd, folder, found)
    return found


def load(network: str, path: Path, sd: canvax.Pipeline, folder: Path, good: dict[str, Path]) -> Any:
    if network == "preview":
        return load_preview(path)
    if network in ("vae", "taesd"):
        return canvax.load(folder, vae=path, mesh=sd.mesh, progress=False)
    if network == "ip-adapter":
        return sd.with_ip_adapter(path, image_encoder=good["image encoder"])
    if network == "image encoder":
        return sd.with_ip_adapter(good["ip-adapter"], image_encoder=path)
    return sd.with_controlnet(path)


@pytest.mark.parametrize(("network", "what", "spoil"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_broken(
    network: str,
    what: str,
    spoil: Callable[[Place], object],
    sd: canvax.Pipeline,
    xl: canvax.Pipeline,
    good: dict[str, Path],
    folder: Path,
    tmp_path: Path,
) -> None:
    source = good[network]
    path = tmp_path / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    spoil(Place(path))
    pipe = xl if network == "union" else sd
    before = dict(flatten(pipe.params))
    with pytest.raises(CanvaxError) as caught:
        load(network, path, pipe, folder, good)
    assert str(path) in str(caught.value)  # and not only the model's
    assert all(leaf is before[name] for name, leaf in flatten(pipe.params))
