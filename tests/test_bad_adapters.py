"""Broken adapters: each one clear error, and the pipeline is as it was and generates."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import canvax
from canvax.cli import main
from canvax.errors import CanvaxError, HintWarning, InputError
from canvax.params import flatten
from canvax.pipelines.adapter_weights import parse_weight
from canvax.weights.lora import Adapter
from tests.support.adapter_files import Draw, write
from tests.support.checkpoints import raw_safetensors
from tests.support.refusals import refused

pytestmark = pytest.mark.bad

draw = Draw()
Q = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
CONV = "lora_unet_conv_in"
K = Q.replace("attn1_to_q", "attn2_to_k")
TEXT = "lora_te_text_model_encoder_layers_0_mlp_fc1"
"""Layers of shapes (64, 64), (32, 4, 3, 3), (64, 48) and (96, 48)."""


def pair(name: str = Q, out: int = 64, into: int = 64, r: int = 4, **more: Any) -> dict[str, Any]:
    return {f"{name}.lora_down.weight": draw(r, into), f"{name}.lora_up.weight": draw(out, r),
            **{f"{name}.{end}": array for end, array in more.items()}}  # fmt: skip


def with_nan(arrays: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(arrays))
    arrays[first] = arrays[first].copy()
    arrays[first].flat[3] = np.nan
    return arrays


def peft_header(**settings: Any) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({f"unet.{name}": value for name, value in settings.items()})}


ARRAYS: dict[str, dict[str, Any]] = {
    "no array": {}, "of SDXL by the width of its text": pair(K, 64, 2048),
    "of FLUX": pair("lora_unet_double_blocks_0_img_attn_qkv"),
    "of an IP-Adapter": {"image_proj.x": draw(4), "ip_adapter.x": draw(4, 4)},
    "of the second text encoder": pair(TEXT.replace("lora_te_", "lora_te2_"), 96, 48),
    "of one good and one unknown module": {**pair(), **pair("lora_unet_x")}, "down of another width": pair(into=63),
    "ranks that differ": {**pair(), f"{Q}.lora_up.weight": draw(64, 5)},
    "a matrix for a convolution": pair(CONV, 32, 4), "NaN": with_nan(pair()),
    "float64 beyond float32": {**pair(), f"{Q}.lora_up.weight": np.full((64, 4), 1e300)},
    "alpha that is NaN": pair(alpha=np.float32(np.nan).reshape(())), "a gigantic rank": pair(r=5000),
    "down alone": {f"{Q}.lora_down.weight": draw(4, 64)},
    "LoHa without a factor": {f"{Q}.hada_w1_a": draw(64, 4), f"{Q}.hada_w1_b": draw(4, 64)},
    "LoKr that does not divide": {f"{Q}.lokr_w1": draw(5, 4), f"{Q}.lokr_w2": draw(12, 16)},
    "LoHa and LoRA of one layer": {**pair(), f"{Q}.hada_w1_a": draw(64, 4)},
    "DoRA of another length": pair(dora_scale=draw(63, 1)),
    "a full change of another shape": {f"{Q}.diff": draw(64, 63)},
    "a bias where there is none": {f"{Q}.diff_b": draw(64)},
    "one layer under two names": {**pair(), **pair("lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q")},
    "OFT": {f"{Q}.oft_R": draw(4, 6)}, "an unknown algorithm": {f"{Q}.quantum_a": draw(4), f"{Q}.quantum_b": draw(4)},
    "whole numbers": {**pair(), f"{Q}.lora_up.weight": np.ones((64, 4), np.int32)},
    "a whole model": {"model.diffusion_model.out.2.weight": draw(4, 32, 3, 3)},
    "a textual inversion": {"emb_params": draw(2, 48)},
    "an embedding of another width": {**pair(), "bundle_emb.x.emb_params": draw(2, 768)},
}  # fmt: skip

HEADERS: dict[str, dict[str, str]] = {
    "no JSON": {"lora_adapter_metadata": "{"},
    "JSON of a list": {"lora_adapter_metadata": "[]"},
    "a rank of text": peft_header(r="four", lora_alpha=1),
    "alpha beyond all": peft_header(r=4, lora_alpha=float("inf")),
    "deep JSON": {"lora_adapter_metadata": "[" * 100_000},
}


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it ran')",))


def whole(path: Path) -> bytes:
    return write(path.with_suffix(".good"), pair()).read_bytes()


FILES: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "nothing": ("a.safetensors", lambda path: b""),
    "cut arrays": ("a.safetensors", lambda path: whole(path)[:-100]),
    "a pickle under another name": ("a.safetensors", lambda path: pickle.dumps(Harm())),
    "a pickle": ("a.pt", lambda path: pickle.dumps(Harm())),
    "a header that lies": (
        "a.safetensors",
        lambda path: raw_safetensors({"x.diff": {"dtype": "F32", "shape": [64], "data_offsets": [0, 8]}}, b"x" * 8),
    ),
}

EMBEDDINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of another width": ({"emb_params": draw(2, 768)}, {}),
    "of SDXL with a right half": ({"clip_l": draw(2, 48), "clip_g": draw(2, 1280)}, {}),
    "of NaN": ({"emb_params": np.full((1, 48), np.nan, np.float32)}, {}),
    "of too many vectors": ({"emb_params": draw(76, 48)}, {}),
    "of a cube": ({"emb_params": draw(2, 2, 48)}, {}),
    "that is a LoRA": (pair(), {}),
    "two names for three vectors": ({"emb_params": draw(3, 48)}, {"token": ["a1", "a2"]}),
    "a name with an end of line": ({"emb_params": draw(3, 48)}, {"token": "a\nb"}),
}


@pytest.fixture(scope="module")
def sd(small: canvax.Pipeline) -> canvax.Pipeline:
    return small


@pytest.fixture
def before(sd: canvax.Pipeline) -> dict[str, Any]:
    return dict(flatten(sd.params))


def generate(sd: canvax.Pipeline) -> np.ndarray:
    return sd("a cat", num_inference_steps=1, seed=1, progress=False).pixels


def check(sd: canvax.Pipeline, before: Any, do: Callable[[], Any]) -> None:
    with pytest.raises(CanvaxError):
        do()
    assert not sd.adapters
    assert not sd.adapters.words
    assert not sd.model.merged
    assert all(leaf is before[name] for name, leaf in flatten(sd.params))


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, sd: canvax.Pipeline, before: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", ARRAYS[name])
    check(sd, before, lambda: sd.adapters.load("a", file))


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, sd: canvax.Pipeline, before: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", pair(), HEADERS[name])
    check(sd, before, lambda: sd.adapters.load("a", file))


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, sd: canvax.Pipeline, before: Any, tmp_path: Path) -> None:
    file, content = FILES[name]
    (tmp_path / file).write_bytes(content(tmp_path / file))
    check(sd, before, lambda: sd.adapters.load("a", tmp_path / file))
    check(sd, before, lambda: sd.adapters.load_embedding(tmp_path / file))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name: str, sd: canvax.Pipeline, before: Any, tmp_path: Path) -> None:
    arrays, more = EMBEDDINGS[name]
    file = write(tmp_path / "a.safetensors", arrays)
    check(sd, before, lambda: sd.adapters.load_embedding(file, **more))


def test_arguments(sd: canvax.Pipeline, before: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", pair())
    several = tmp_path / "several"
    several.mkdir()
    for name in ("x", "y"):
        write(several / f"{name}.safetensors", pair())
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    load: Any = sd.adapters.load
    set_: Any = sd.adapters.set
    both = {"text_encoder": 0.5, "unet": 0.8}
    unet = Adapter(Path("a"), {("unet", "a", "weight"): ()})  # pyright: ignore[reportArgumentType]
    with pytest.warns(HintWarning, match="'text_encoder'"):
        assert parse_weight(both, unet) == {"unet": 0.8}
    with pytest.raises(InputError):
        parse_weight({"text_encoder": 0.5}, unet)
    for do in (
        lambda: load("a", file, weight=float("nan")),
        lambda: load("a", file, weight="much"),
        lambda: load("a", file, weight=1e6),
        lambda: load("a", file, weight={"unet.down": 1}),
        lambda: load("a", file, weight={5: 1}),
        lambda: load("", file),
        lambda: load(None, file),
        lambda: load("a", 5),
        lambda: load("a", "nowhere.safetensors"),
        lambda: load("a", "../../x/y"),
        lambda: load("a", several),
        lambda: load("a", several, weight_name="z.safetensors"),
        lambda: load("a", several, weight_name="z.bin"),
        lambda: load("a", file, weight_name="z.safetensors"),
        lambda: load("a", model),
        lambda: set_({"b": 1}),
        lambda: set_(["b"]),
        lambda: sd.adapters.remove("b"),
        lambda: setattr(sd.adapters, "folder", tmp_path / "nowhere"),
        lambda: type(sd)(sd.model, sd.programs).adapters.load("a", file),
    ):
        check(sd, before, do)
    sd.adapters.load("a", file)
    with refused("name"):
        sd.adapters.load("a", file)
    with refused("adapter"):
        sd.adapters.set({"A b": 1})
    with pytest.warns(HintWarning, match="80"):
        sd.adapters.set({"a": 80})
    sd.adapters.remove()
    with refused("adapter"):
        sd.adapters["a"]


@pytest.mark.parametrize(
    "flags",
    [["--lora", "nowhere.safetensors:0.5"], ["--lora", "x.safetensors:nan"], ["--lora-dir", "nowhere"]],
)
def test_flags(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "a cat", *flags, "-o", str(tmp_path / "x.png")]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("error: ")) == ("", 1)
