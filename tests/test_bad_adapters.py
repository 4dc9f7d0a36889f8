"""Broken adapters: each one clear error, and the pipeline is as it was and generates."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from adapter_files import Draw, write
from checkpoints import raw_safetensors
from small_checkpoint import write_small_checkpoint

import canvax
from canvax.cli import main
from canvax.errors import CanvaxError, HintWarning, InputError
from canvax.params import flatten
from canvax.pipelines.adapter_weights import parse_weight
from canvax.weights.lora import Adapter

pytestmark = pytest.mark.bad

LONGEST = 1200
"""Letters of an answer, which lists several faults."""

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


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no array": ({}, "is empty"),
    "of SDXL by the width of its text": (pair(K, 64, 2048), r"width 2048 \(Stable Diffusion XL\), this model reads 48"),
    "of SD 1.x by the width of its text": (pair(K, 64, 768), r"width 768 \(Stable Diffusion 1.x\)"),
    "of FLUX": (pair("lora_unet_double_blocks_0_img_attn_qkv"), "was made for FLUX"),
    "of Stable Diffusion 3": (pair("transformer.joint_blocks.0.x"), "was made for Stable Diffusion 3"),
    "of an IP-Adapter": ({"image_proj.x": draw(4), "ip_adapter.x": draw(4, 4)}, "is an IP-Adapter, not a LoRA"),
    "of no module": (pair("lora_unet_middle_nowhere"), "2 modules that the model does not have"),
    "of a module that is misspelt": (pair(Q.replace("to_q", "to_qq")), r"nearest: unet\.mid_block.*to_q\)"),
    "of the second text encoder": (pair(TEXT.replace("lora_te_", "lora_te2_"), 96, 48), "Stable Diffusion XL|not have"),
    "of one good and one unknown module": ({**pair(), **pair("lora_unet_x")}, "2 modules that the model does not have"),
    "down of another width": (pair(into=63), r"down is \(4, 63\), not \(4, 64\)"),
    "up of another width": (pair(out=65), r"up is \(65, 4\), not \(64, 4\)"),
    "ranks that differ": ({**pair(), f"{Q}.lora_up.weight": draw(64, 5)}, r"up is \(64, 5\), not \(64, 4\)"),
    "a matrix for a convolution": (pair(CONV, 32, 4), r"down is \(4, 4\), not \(4, 4, 3, 3\)"),
    "NaN": (with_nan(pair()), "not finite: .* has NaN or infinity"),
    "infinity": ({**pair(), f"{Q}.lora_up.weight": np.full((64, 4), np.inf, np.float32)}, "has NaN or infinity"),
    "float64 beyond float32": ({**pair(), f"{Q}.lora_up.weight": np.full((64, 4), 1e300)}, "has NaN or infinity"),
    "alpha that is NaN": (pair(alpha=np.float32(np.nan).reshape(())), "has NaN or infinity"),
    "alpha of several numbers": (pair(alpha=draw(3)), "alpha is no single number"),
    "a gigantic rank": (pair(r=5000), "a rank of 5000 is more than it has"),
    "a rank of 0": (pair(r=0), "1 empty: "),
    "down alone": ({f"{Q}.lora_down.weight": draw(4, 64)}, "incomplete: .* has down"),
    "up alone": ({f"{Q}.lora_up.weight": draw(64, 4)}, "incomplete: .* has up"),
    "alpha alone": ({f"{Q}.alpha": np.float32(1).reshape(())}, "has alpha alone"),
    "LoHa without a factor": ({f"{Q}.hada_w1_a": draw(64, 4), f"{Q}.hada_w1_b": draw(4, 64)}, "no known adapter"),
    "LoKr that does not divide": ({f"{Q}.lokr_w1": draw(5, 4), f"{Q}.lokr_w2": draw(12, 16)}, r"w1 is \(5, 4\)"),
    "LoKr of half a product": ({f"{Q}.lokr_w1": draw(4, 4), f"{Q}.lokr_w2_a": draw(16, 2)}, "no known adapter"),
    "LoHa and LoRA of one layer": ({**pair(), f"{Q}.hada_w1_a": draw(64, 4)}, "no known adapter"),
    "DoRA of another length": (pair(dora_scale=draw(63, 1)), r"dora_scale is \(63, 1\)"),
    "a full change of another shape": ({f"{Q}.diff": draw(64, 63)}, r"diff is \(64, 63\)"),
    "a bias where there is none": ({f"{Q}.diff_b": draw(64)}, "has no bias"),
    "a bias of another length": ({f"{CONV}.diff_b": draw(31)}, r"diff_b is \(31,\)"),
    "LoRA of a normalisation": (pair("lora_unet_conv_norm_out", 32, 32), "is no layer that LoRA is for"),
    "one layer under two names": ({**pair(), **pair("lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q")},
                                  "given twice: .* as .* and as "),
    "OFT": ({f"{Q}.oft_R": draw(4, 6)}, "is of OFT"),
    "IA3": ({f"{Q}.ia3_l": draw(4, 6)}, "is of IA3"),
    "sparse biases": ({f"{Q}.bias_values": draw(4)}, "is of a sparse change"),
    "an unknown algorithm": ({f"{Q}.quantum_a": draw(4), f"{Q}.quantum_b": draw(4)}, "2 arrays of an unknown kind"),
    "whole numbers": ({**pair(), f"{Q}.lora_up.weight": np.ones((64, 4), np.int32)}, "is int32"),
    "truth values": ({**pair(), f"{Q}.lora_up.weight": np.ones((64, 4), bool)}, "is bool"),
    "a model's weights": ({"unet.conv_in.weight": draw(32, 4, 3, 3)}, "no adapter's but a model's"),
    "a whole model": ({"model.diffusion_model.out.2.weight": draw(4, 32, 3, 3)}, "is a model, not a LoRA"),
    "a textual inversion": ({"emb_params": draw(2, 48)}, "is a textual inversion, not a LoRA"),
    "a textual inversion of diffusers": ({"<toy>": draw(2, 48)}, "is a textual inversion, not a LoRA"),
    "an embedding of another width": ({**pair(), "bundle_emb.x.emb_params": draw(2, 768)}, r"width 768 \(Stable Diff"),
}  # fmt: skip

HEADERS: dict[str, tuple[dict[str, str], str]] = {
    "no JSON": ({"lora_adapter_metadata": "{"}, "is not JSON"),
    "JSON of a list": ({"lora_adapter_metadata": "[]"}, "is not JSON of a table"),
    "a rank of text": (peft_header(r="four", lora_alpha=1), "not what PEFT writes"),
    "a rank of 0": (peft_header(r=0, lora_alpha=1), "not what PEFT writes"),
    "no alpha": (peft_header(r=4), "not what PEFT writes"),
    "alpha beyond all": (peft_header(r=4, lora_alpha=float("inf")), "not what PEFT writes"),
    "patterns of a list": (peft_header(r=4, lora_alpha=4, alpha_pattern=["x"]), "not what PEFT writes"),
    "deep JSON": ({"lora_adapter_metadata": "[" * 100_000}, "is not JSON"),
}


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it ran')",))


def whole(path: Path) -> bytes:
    return write(path.with_suffix(".good"), pair()).read_bytes()


FILES: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "nothing": ("a.safetensors", lambda path: b"", "is truncated"),
    "a cut header": ("a.safetensors", lambda path: whole(path)[:40], "is truncated"),
    "cut arrays": ("a.safetensors", lambda path: whole(path)[:-100], "is truncated"),
    "more than its header tells": ("a.safetensors", lambda path: whole(path) + b"xx", "does not describe"),
    "a pickle under another name": ("a.safetensors", lambda path: pickle.dumps(Harm()), "is a pickle"),
    "a pickle": (
        "a.pt",
        lambda path: pickle.dumps(Harm()),
        r"does not open pickles.*canvax convert \S*a.pt \S*a.safetensors",
    ),
    "a .bin": ("pytorch_lora_weights.bin", lambda path: b"PK\3\4", "does not open pickles"),
    "a page": ("a.safetensors", lambda path: b"<!doctype html><html>" + b" " * 90, "is a web page"),
    "a pointer": ("a.safetensors", lambda path: b"version https://git-lfs.github.com/spec/v1\n" * 3, "Git LFS pointer"),
    "a text": ("a.txt", lambda path: b"hello", "is no safetensors file"),
    "a header that lies": (
        "a.safetensors",
        lambda path: raw_safetensors({"x.diff": {"dtype": "F32", "shape": [64], "data_offsets": [0, 8]}}, b"x" * 8),
        "claims shape",
    ),
    "a name with an end of line": (
        "a.safetensors",
        lambda path: raw_safetensors({"x\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"x" * 4),
        "unusable name",
    ),
}

EMBEDDINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "of another width": ({"emb_params": draw(2, 768)}, {}, r"width 768 \(Stable Diffusion 1.x\), this model's tokens"),
    "of SDXL": ({"clip_l": draw(2, 768), "clip_g": draw(2, 1280)}, {}, "this model's tokens have 48"),
    "of SDXL with a right half": ({"clip_l": draw(2, 48), "clip_g": draw(2, 1280)}, {}, "this model's tokens have 48"),
    "of NaN": ({"emb_params": np.full((1, 48), np.nan, np.float32)}, {}, "not finite"),
    "of too many vectors": ({"emb_params": draw(76, 48)}, {}, "76 vectors, not 1 to 75"),
    "of no vector": ({"emb_params": draw(0, 48)}, {}, "0 vectors"),
    "of whole numbers": ({"emb_params": np.ones((1, 48), np.int32)}, {}, "is int32"),
    "of a cube": ({"emb_params": draw(2, 2, 48)}, {}, r"is \(2, 2, 48\)"),
    "of one number": ({"emb_params": np.float32(1).reshape(())}, {}, r"is \(\)"),
    "that is a LoRA": (pair(), {}, "is a LoRA"),
    "that is empty": ({}, {}, "is empty"),
    "two names for three vectors": ({"emb_params": draw(3, 48)}, {"token": ["a1", "a2"]}, "token"),
    "a name of nothing": ({"emb_params": draw(3, 48)}, {"token": "  "}, "token"),
    "a name of a number": ({"emb_params": draw(3, 48)}, {"token": 5}, "token"),
    "a name with an end of line": ({"emb_params": draw(3, 48)}, {"token": "a\nb"}, "token"),
}


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> canvax.StableDiffusion:
    folder = write_small_checkpoint(tmp_path_factory.mktemp("sd") / "small")
    return canvax.load(folder, mesh=canvax.make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def before(sd: canvax.StableDiffusion) -> tuple[dict[str, Any], np.ndarray]:
    assert sd.params is not None
    return dict(flatten(sd.params)), generate(sd)


def generate(sd: canvax.StableDiffusion) -> np.ndarray:
    return sd("a cat", num_inference_steps=1, seed=1, progress=False).pixels


def check(sd: canvax.StableDiffusion, before: Any, expected: str, do: Callable[[], Any]) -> None:
    """``expected`` is the argument that an InputError names, and what the message of another error has."""
    with pytest.raises(CanvaxError) as caught:
        do()
    message = str(caught.value)
    if isinstance(caught.value, InputError) and caught.value.argument:
        assert caught.value.argument == expected, message
    else:
        assert re.search(expected, message), message
    assert "\n" not in message
    assert len(message) <= LONGEST, message
    assert not sd.adapters
    assert not sd.adapters.words
    assert not sd.model.merged
    assert sd.params is not None
    assert all(leaf is before[0][name] for name, leaf in flatten(sd.params))
    np.testing.assert_array_equal(generate(sd), before[1])


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, sd: canvax.StableDiffusion, before: Any, tmp_path: Path) -> None:
    arrays, words = ARRAYS[name]
    file = write(tmp_path / "a.safetensors", arrays)
    check(sd, before, words, lambda: sd.adapters.load("a", file))


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, sd: canvax.StableDiffusion, before: Any, tmp_path: Path) -> None:
    metadata, words = HEADERS[name]
    file = write(tmp_path / "a.safetensors", pair(), metadata)
    check(sd, before, words, lambda: sd.adapters.load("a", file))


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, sd: canvax.StableDiffusion, before: Any, tmp_path: Path) -> None:
    file, content, words = FILES[name]
    (tmp_path / file).write_bytes(content(tmp_path / file))
    check(sd, before, words, lambda: sd.adapters.load("a", tmp_path / file))
    check(sd, before, ".", lambda: sd.adapters.load_embedding(tmp_path / file))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(name: str, sd: canvax.StableDiffusion, before: Any, tmp_path: Path) -> None:
    arrays, more, words = EMBEDDINGS[name]
    file = write(tmp_path / "a.safetensors", arrays)
    check(sd, before, words, lambda: sd.adapters.load_embedding(file, **more))


def test_arguments(sd: canvax.StableDiffusion, before: Any, tmp_path: Path) -> None:
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
    for words, do in (
        ("is not a finite number", lambda: load("a", file, weight=float("nan"))),
        ("is not a finite number", lambda: load("a", file, weight="much")),
        ("is beyond 1000", lambda: load("a", file, weight=1e6)),
        ("the adapter changes nothing there; did you mean|choose", lambda: load("a", file, weight={"unet.down": 1})),
        ("where the name of a part belongs", lambda: load("a", file, weight={5: 1})),
        ("cannot be the name of an adapter", lambda: load("", file)),
        ("cannot be the name of an adapter", lambda: load(None, file)),
        ("source", lambda: load("a", 5)),
        ("source", lambda: load("a", "nowhere.safetensors")),
        ("source", lambda: load("a", "../../x/y")),
        (
            "several files.*x.safetensors, y.safetensors",
            lambda: load("a", several),
        ),
        ("has no file 'z.safetensors': x", lambda: load("a", several, weight_name="z.safetensors")),
        ("weight_name", lambda: load("a", several, weight_name="z.bin")),
        ("weight_name", lambda: load("a", file, weight_name="z.safetensors")),
        ("a whole model in it", lambda: load("a", model)),
        ("is not loaded; none is loaded", lambda: set_({"b": 1})),
        ("is not a table of weights", lambda: set_(["b"])),
        ("is not loaded", lambda: sd.adapters.remove("b")),
        ("is not a folder", lambda: setattr(sd.adapters, "folder", tmp_path / "nowhere")),
        (
            "holds no parameters",
            lambda: type(sd)(sd.model, sd.programs).adapters.load("a", file),
        ),
    ):
        check(sd, before, words, do)
    sd.adapters.load("a", file)
    with pytest.raises(CanvaxError, match="such an adapter is loaded"):
        sd.adapters.load("a", file)
    with pytest.raises(CanvaxError, match=r"weight of the adapter 'a' cannot be set: write pipe\.adapters\.set"):
        sd.adapters["a"].weight = 0.5
    with pytest.raises(CanvaxError, match=r"'A b' is not loaded; .*'a'"):
        sd.adapters.set({"A b": 1})
    with pytest.warns(HintWarning, match="the weight of 'a', 80, is far beyond 1"):
        sd.adapters.set({"a": 80})
    sd.adapters.remove()
    with pytest.raises(CanvaxError, match="is not loaded"):
        sd.adapters["a"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--lora", "nowhere.safetensors:0.5"], "nowhere.safetensors"),
        (["--lora", ":0.5"], "write FILE:0.8"),
        (["--lora", "a.pt"], "a.pt"),
        (["--lora", "x.safetensors:nan"], "write FILE:0.8"),
        (["--lora-dir", "nowhere"], "is not a folder"),
        (["--embedding", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--lora-model", "x"], "write --lora FILE:0.8"),
    ],
)
def test_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["generate", "a cat", *flags, "-o", str(tmp_path / "x.png")])
    out, err = capsys.readouterr()
    assert (code in (1, 2), out) == (True, "")
    assert re.search(words, err), err
    assert "Traceback" not in err
