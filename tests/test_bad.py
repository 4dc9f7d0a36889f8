"""Bad inputs and faults: each is answered with one short sentence that names what is wrong, and leaves nothing behind.

`make test-bad` runs these alone. A row is what is done and words that its answer must have.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import canvax
from canvax.cli import BAD_INPUT, FAILED, main
from canvax.samplers import NoiseSchedule, build_table, curve_label, from_scheduler_config
from canvax.scale.data import Generate
from canvax.weights.source import BUNDLED

pytestmark = pytest.mark.bad

LONGEST = 600
"""Letters of an answer; one that lists several faults may have more."""

Case = tuple[str, Any, str]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to be in; what takes longer than a minute hangs."""

    def stop(*_: Any) -> None:
        raise TimeoutError("no answer within a minute")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check_answer(message: str, words: str) -> None:
    assert "Traceback" not in message
    assert "CANVAX_DEBUG" not in message, message
    assert len(message) <= LONGEST, message
    assert "\n" not in message.strip(), message
    assert re.search(words, message, re.IGNORECASE), message


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the error of a command."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert out == "", out
    lines = [line for line in err.splitlines() if not line.startswith(("canvax: loading", "canvax: warning"))]
    return code, "\n".join(lines)


# Flags

HUGE = "9" * 5000
WHOLE = ("x", "1.5", "nan", "inf", "", "-7", "1e3", "0x10", HUGE, "१०x")
WHOLE_FLAGS = ("steps", "num-images", "width", "height", "batch-size", "clip-skip", "reuse", "reuse-layers")
NUMBER = ("x", "nan", "inf", "-inf", "", "1e400", "1,5", HUGE)
NUMBER_FLAGS = ("guidance-scale", "eta", "guidance-rescale", "strength", "mask-blur", "aesthetic-score")
NAMES = ("nonsense", "", "é" * 300, "a" * 5000, "\x1b[2J", "-")
NAME_FLAGS = ("sampler", "sigmas", "spacing", "noise", "dtype", "quantize", "mesh", "vae-tiling", "strength-rule",
              "mask-mode", "image-encoding", "set", "guidance-steps", "guidance-interval", "platform")  # fmt: skip
FLAG_CASES = [
    *((flag, value) for flag in WHOLE_FLAGS for value in WHOLE),
    *((flag, value) for flag in NUMBER_FLAGS for value in NUMBER),
    *((flag, value) for flag in NAME_FLAGS for value in NAMES),
    *(("seed", value) for value in WHOLE if value != "-7"),
]


@pytest.mark.parametrize(("flag", "value"), FLAG_CASES, ids=lambda value: str(value)[:12])
def test_values_of_flags(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = ("--image", "i.png") if flag in ("strength", "mask-blur") else ()
    Image.new("RGB", (64, 64)).save("i.png")
    code, message = command(capsys, "generate", "a cat", *image, f"--{flag}={value}", "-o", "out.png")
    assert code == BAD_INPUT
    names = {flag, flag.replace("-", "_"), flag.replace("-", " "), "tiling", "num_images_per_prompt", "interval"}
    names |= {"sampler_settings"} if flag == "set" else set()
    check_answer(message, "|".join(names))
    assert os.listdir() == ["i.png"]


PATHS = {
    "missing": ("nowhere/x.png", "such|cannot|not"), "empty": ("", "is empty"), "folder": (".", "not|folder"),
    "zero": ("/dev/zero", "not|regular|longer"), "null": ("/dev/null/x", "not|cannot"), "long": ("x" * 5000 + ".png", "long|cannot|not"),
    "user": ("~nobody-here/x.png", "home|such|cannot|not"), "line": ("a\nb.png", "such|cannot|not"), "text": ("text.png", "not|cannot"),
    "pipe": ("pipe.png", "not|cannot|regular"), "loop": ("loop.png", "such|cannot|not|link"), "cut": ("cut.png", "not|cannot|cut|ends"),
}  # fmt: skip


def strange_files() -> None:
    Path("text.png").write_text("hello")
    os.mkfifo("pipe.png")
    Path("loop.png").symlink_to("loop.png")
    Image.new("RGB", (64, 64)).save("whole.png")
    Path("cut.png").write_bytes(Path("whole.png").read_bytes()[:40])


@pytest.mark.parametrize("flag", ["image", "mask", "from-image", "prompt-file"])
@pytest.mark.parametrize("kind", PATHS)
def test_files_to_read(flag: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    if (flag, kind) == ("prompt-file", "pipe"):
        pytest.skip("prompts may come from a pipe: --prompt-file <(command)")
    strange_files()
    path, words = PATHS[kind]
    if flag == "prompt-file" and kind in ("text", "cut"):
        path, words = "whole.png", "is an image; --image or --from-image reads it"
    prompt = () if flag in ("prompt-file", "from-image") else ("a cat",)
    image = ("--image", "whole.png") if flag == "mask" else ()
    code, message = command(capsys, "generate", *prompt, *image, f"--{flag}={path}", "-o", "out.png")
    assert code == BAD_INPUT, message
    check_answer(message, words)
    assert not os.path.exists("out.png")


OUTPUTS = {
    "exists": "whole.png", "unknown ending of a file": "whole.png/x.png", "file as folder": "text.png/more", "null": "/dev/null/x",
    "long": "x" * 300 + ".png", "longer": "y/" * 3000 + "z.png", "empty": "", "user": "~nobody-here/x.png",
    "zero": "a\0b.png", "pipe": "pipe.png", "loop": "loop.png", "full": "/dev/full", "no file can be made": "/proc/x", "loop as folder": "loop.png/x", "longest": "n" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS)
def test_files_to_write(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    before = sorted(os.listdir())
    code, message = command(capsys, "generate", "a cat", f"--output={OUTPUTS[kind]}")
    assert code == BAD_INPUT, message
    check_answer(message, "output")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["", "sd15", "emojy", "a/b/c", "x" * 5000, "~nobody-here/x", "./nowhere", "/dev/zero",
                                  "a\0b", "..", "owner/", "/owner", "a b/c", "owner/name@main", "é/ü", "text.png",
                                  "model.safetensors", "https://example.org/a/b"])  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "info"])
def test_names_of_models(name: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    arguments = ("generate", "x", f"--model={name}") if verb == "generate" else ("info", "--", name)
    code, message = command(capsys, *arguments)
    assert code in (FAILED, BAD_INPUT)
    check_answer(message, ".")


# Prompt files

LINES: dict[str, tuple[str | bytes, str]] = {
    "an object over lines": ('{\n  "prompt": "a"\n}\n', "line 1: .*write all of it on one line"),
    "empty": ("", "holds no prompt"), "comments": ("# a\n\n# b", "holds no prompt"), "not UTF-8": (b"\xff\xfe\xfa", "UTF-8"), "UTF-16": ("a cat\n".encode("utf-16-le"), "bytes of 0.*UTF-8"),
    "a web page": ("<!DOCTYPE html>\n<title>a cat</title>", "web page"), "of the command": ('{"prompt": "a", "model": "b"}', "'model'; it is one for all images: --model"),
    "list": ('{"prompt": ["a"]}', "prompt"), "number": ('{"prompt": 5}', "prompt"), "no prompt": ('{"seed": 1}', "prompt"),
    "broken": ('{"prompt": "a"', "JSON"), "null": ('{"prompt": null}', "null"), "unknown": ('{"prompt": "a", "stepz": 4}', "stepz.*steps|steps"), "deep": ("{" + '"a":{' * 60_000, "JSON"),
    "text steps": ('{"prompt": "a", "steps": "4"}', "steps"), "list steps": ('{"prompt": "a", "steps": [4]}', "steps"),
    "true": ('{"prompt": "a", "steps": true}', "steps"), "huge": ('{"prompt": "a", "seed": ' + "9" * 400 + "}", "seed"),
    "infinite": ('{"prompt": "a", "guidance_scale": 1e999}', "guidance"), "nan": ('{"prompt": "a", "guidance_scale": NaN}', "guidance"),
    "count": ('{"prompt": "a", "n": 1000000000000}', "images"), "negative count": ('{"prompt": "a", "n": -1}', "num_images|images"),
    "size": ('{"prompt": "a", "width": 65}', "width"), "object": ('{"prompt": "a", "sampler": {}}', "sampler"),
    "sampler": ('{"prompt": "a", "sampler": "nope"}', "sampler"), "eta": ('{"prompt": "a", "eta": "much"}', "eta"),
    "image": ('{"prompt": "a", "image": 5}', "image"), "image there": ('{"prompt": "a", "image": "nope.png"}', "image"),
    "strength": ('{"prompt": "a", "strength": 0.5}', "strength"), "negative": ('{"prompt": "a", "negative_prompt": 3}', "negative"),
    "surrogate": ('{"prompt": "\\ud800"}', "UTF-8"), "sigmas": ('{"prompt": "a", "sigmas": [1, 2]}', "sigmas"),
    "timesteps": ('{"prompt": "a", "sampler_settings": {"timesteps": [true]}}', "timesteps"),
    "settings": ('{"prompt": "a", "sampler_settings": {"nope": 1}}', "nope"), "interval": ('{"prompt": "a", "guidance_interval": null, "n": 0}', "images"),
    "interval order": ('{"prompt": "a", "guidance_interval": [1, 0]}', "interval"), "one": ('{"prompt": "a", "guidance_interval": [1]}', "interval"),
    "clip": ('{"prompt": "a", "clip_skip": 1.5}', "clip_skip"), "tiling": ('{"prompt": "a", "tiling": 1}', "tiling"),
    "sizes": ('{"prompt": "a", "original_size": [1]}', "original_size"), "reuse": ('{"prompt": "a", "reuse": 0}', "reuse"),
    "callback": ('{"prompt": "a", "callback": "x"}', "callback"), "two names": ('{"prompt": "a", "cfg": 3, "cfg_scale": 2}', "guidance_scale.*two names"), "curve": ('{"prompt": "a", "sampler": "Karras"}', "sigma schedule"), "twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "seed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LINES)
def test_prompt_files(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = LINES[kind]
    Path("p.txt").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    code, message = command(capsys, "generate", "--prompt-file", "p.txt")
    assert code == BAD_INPUT, message
    check_answer(message, words)
    assert os.listdir() == ["p.txt"]


# Metadata of images

METADATA: dict[str, Any] = {
    "list": [], "text": "a", "null": None, "deep": "[" * 60_000, "steps": {"num_inference_steps": "x"}, "model": {"model": 5},
    "steps list": {"num_inference_steps": [1]}, "size": {"height": -8}, "seed": {"seed": 10**400}, "seed text": {"seed": "x"},
    "guidance": {"guidance_scale": 1e39}, "options": {"options": {"eta": [1]}}, "sampler": {"sampler": "nope"}, "prompt": {"prompt": 5},
    "nothing": {"prompt": ..., "canvax": ...}, "adapters": {"adapters": "nope"}, "grid": {"grid": 5}, "controls": {"control_sha256": "x"}, "prompts": {"image_prompts": 5}, "options list": {"options": [1]},
    "settings": {"options": {"sampler_settings": ["s_churn=" + "[" * 60_000]}}, "noise": {"noise": "nope"}, "image": {"image_sha256": "0"},
    "dtype": {"dtype": "int4"}, "dtype number": {"dtype": 3}, "quantize": {"quantize": "int2"}, "sigmas": {"options": {"sigmas": [1, 5]}},
}  # fmt: skip


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_of_images(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = METADATA[kind]
    if isinstance(value, dict):
        value = {"prompt": "a", "canvax": "0.1.0", "model": "emoji"} | value
        value = {name: one for name, one in value.items() if one is not ...}
    text = value if kind == "deep" else json.dumps(value)
    texts = PngInfo()
    texts.add_itxt("canvax", text)
    Image.new("RGB", (8, 8)).save("i.png", pnginfo=texts)
    code, message = command(capsys, "generate", "--from-image", "i.png", "-o", "out.png")
    assert code in (BAD_INPUT, FAILED), message
    check_answer(message, ".")
    assert os.listdir() == ["i.png"]


# Model folders


@pytest.fixture
def model(empty: Path) -> Path:
    """A copy of the bundled model, to damage: weights are linked."""
    return shutil.copytree(BUNDLED["emoji"], empty / "model", copy_function=_link_weights)


def _link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors"):
        os.link(source, target) if os.stat(source).st_dev == os.stat(Path(target).parent).st_dev else shutil.copy(
            source, target
        )
    else:
        shutil.copyfile(source, target)


def refused(model: Path, words: str) -> None:
    with pytest.raises(canvax.CanvaxError) as caught:
        canvax.load(model, progress=False)
    message = str(caught.value).replace(str(model), "MODEL")
    assert len(message) < 4000, message
    assert re.search(words, message, re.IGNORECASE), message


JSON_FILES = ("model_index.json", "unet/config.json", "vae/config.json", "text_encoder/config.json",
              "scheduler/scheduler_config.json")  # fmt: skip
BROKEN: dict[str, bytes] = {
    "empty": b"", "list": b"[]", "null": b"null", "text": b'"a"', "cut": b'{"a": ', "deep": b'{"a":' + b"[" * 60_000,
    "page": b"<!DOCTYPE html><html>", "latin": '{"ü": 1}'.encode("latin-1"),
}  # fmt: skip


@pytest.mark.parametrize("file", JSON_FILES)
@pytest.mark.parametrize("kind", [*BROKEN, "missing", "pipe", "folder", "zero", "loop"])
def test_json_of_models(file: str, kind: str, model: Path) -> None:
    path = model / file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("zero", "loop"):
        path.symlink_to("/dev/zero" if kind == "zero" else path)
    elif kind != "missing":
        path.write_bytes(BROKEN[kind])
    refused(model, path.name.removesuffix(".json") + "|model_index")


CONFIGS: list[tuple[str, str, Any]] = [
    ("scheduler/scheduler_config.json", name, value)
    for name, values in {
        "num_train_timesteps": (0, -1, 1.5, "1000", None, 10**12, True, [1000], 10**400),
        "beta_start": (-1, "x", 2.0, float("nan"), [0.1], 1e400),
        "beta_end": (0, -0.5, 1.5, "x", float("inf")),
        "beta_schedule": ("nope", 3, [], {}),
        "prediction_type": ("nope", 5, []),
        "timestep_spacing": ("nope", 1, {}),
        "steps_offset": (-1, 10**9, "x", 0.5),
        "skip_prk_steps": ("x", 5),
        "thresholding": ("x",),
        "trained_betas": ([], "x", [2.0], [0.1] * 3, [float("nan")] * 1000, {}),
        "_class_name": ("NopeScheduler", 5, None, [], "../../x"),
        "rescale_betas_zero_snr": ("x", 3, []),
    }.items()
    for value in values
]


@pytest.mark.parametrize(("file", "name", "value"), CONFIGS, ids=lambda value: str(value)[:16])
def test_values_of_scheduler_configs(file: str, name: str, value: Any, model: Path) -> None:
    path = model / file
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {name: value}))
    refused(model, name)


TOKENIZERS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "ids beyond": ("vocab.json", lambda data: json.dumps({k: v + 10**6 for k, v in json.loads(data).items()}).encode(), "vocab|ids|token"),
    "negative": ("vocab.json", lambda data: json.dumps({k: v - 5 for k, v in json.loads(data).items()}).encode(), "vocab|ids|token"),
    "all zero": ("vocab.json", lambda data: json.dumps(dict.fromkeys(json.loads(data), 0)).encode(), "vocab|ids|token"),
    "text": ("vocab.json", lambda data: json.dumps(dict.fromkeys(json.loads(data), "a")).encode(), "vocab|ids|token"),
    "empty": ("vocab.json", lambda _: b"{}", "vocab|token"), "list": ("vocab.json", lambda _: b"[]", "vocab|token"),
    "cut": ("vocab.json", lambda data: data[:1000], "vocab|token"), "nothing": ("vocab.json", lambda _: b"", "vocab|token"),
    "merges": ("merges.txt", lambda _: b"\xff\xfe", "merges|token"), "no merges": ("merges.txt", lambda _: b"", "merges|token"),
    "unknown merges": ("merges.txt", lambda _: b"#version: 0.2\nzz qq\n", "merges|token"), "one": ("merges.txt", lambda _: b"a\n", "merges|token"),
    "config": ("tokenizer_config.json", lambda _: b"[]", "token"), "cut config": ("tokenizer_config.json", lambda _: b"{", "token"),
    "special": ("special_tokens_map.json", lambda _: b'{"eos_token": 5}', "neither a text nor a table"),
    **{f"added {text}": ("added_tokens.json", lambda _, text=text: text.encode(), "added") for text in ('{"a": -1}', '{"a": 1000000}', '{"a": "x"}', '{"a": 1.5}', '{"zz": 3}')},
    **{f"decoder {text}": ("tokenizer_config.json", lambda _, text=text: f'{{"added_tokens_decoder": {text}}}'.encode(), "added|token") for text in ('5', '{"x": 5}', '{"-5": {"content": "a"}}', '{"5": {"content": 7}}', '{"999999": {"content": "a"}}')},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer_files(kind: str, model: Path) -> None:
    name, change, words = TOKENIZERS[kind]
    (model / "tokenizer" / "tokenizer.json").unlink()  # else it is the one that is read
    path = model / "tokenizer" / name
    data = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    path.write_bytes(change(data))
    refused(model, words)


def header(entries: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
WEIGHTS: dict[str, bytes] = {
    "empty": b"", "short": b"abc", "length": header(b"{}", length=2**63), "beyond": header(b"{}", length=10**6), "page": b"<!DOCTYPE html>" * 10,
    "list": header([]), "nothing": header({}), "deep": header(b'{"a":' + b"[" * 60_000), "cut": header(b'{"a": '), "latin": header(b'{"\xff": 1}'),
    "no dtype": header({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"0000"), "dtype": header({"a": TENSOR | {"dtype": "F99"}}, b"0000"),
    "shape": header({"a": TENSOR | {"shape": [-1]}}, b"0000"), "big shape": header({"a": TENSOR | {"shape": [10**30]}}, b"0000"),
    "shape text": header({"a": TENSOR | {"shape": "x"}}, b"0000"), "offsets": header({"a": TENSOR | {"data_offsets": [4, 0]}}, b"0000"),
    "past the end": header({"a": TENSOR | {"data_offsets": [0, 400]}}, b"0000"), "overlap": header({"a": TENSOR, "b": TENSOR}, b"0000"),
    "hole": header({"a": TENSOR | {"data_offsets": [4, 8]}}, b"00000000"), "twice": header(b'{"a": {}, "a": {}}'), "other": header({"a": TENSOR}, b"0000"),
    "one offset": header({"a": TENSOR | {"data_offsets": [0]}}, b"0000"), "number": header({"a": 5}), "metadata": header({"__metadata__": 5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*WEIGHTS, "missing", "folder", "pipe", "zero"])
def test_weight_files(kind: str, model: Path) -> None:
    path = next((model / "vae").glob("*.safetensors"))
    path.unlink()
    if kind in WEIGHTS:
        path.write_bytes(WEIGHTS[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    refused(model, "vae|safetensors")


# Calls from Python

LATENTS = np.zeros((1, 8, 8, 32), np.float32)


class Strange:
    """What raises an error of its own whenever it is looked at, as an array does whose buffer is gone."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("deleted")

    __index__ = __float__ = __repr__ = __array__ = __len__ = __iter__ = _fail


def deleted() -> jax.Array:
    array = jnp.float32(3) + 1
    array.delete()
    return array


CALLS: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": value}, "prompt") for value in (None, 5, [], [5], b"a", {}, object(), ["a", None], ())),
    *(({"negative_prompt": value}, "negative_prompt") for value in (5, ["a", "b"], [5], b"a", {})),
    *(({"height": value}, "height") for value in (0, -8, 65, 1.5, "64", True, 10**9, float("nan"), [64], 10**400, 1 << 70)),
    *(({"width": value}, "width") for value in (7, "x", object(), np.array([64, 64]))),
    *(({"num_inference_steps": value}, "num_inference_steps") for value in (0, -1, 1.5, "4", True, 10**12, [4], float("inf"))),
    *(({"guidance_scale": value}, "guidance_scale") for value in ("x", [1], float("nan"), 1e39, 10**400, 1j, object(), np.ones(3))),
    *(({"num_images_per_prompt": value}, "num_images_per_prompt") for value in (0, -1, 1.5, "2", 10**12, True, [1])),
    *(({"seed": value}, "seed") for value in ("x", 1.5, -2, 2**64, 10**5000, [1, 2], float("nan"), object(), True)),
    *(({"sampler": value}, "sampler") for value in (5, "nope", ["euler"], "", object(), "x" * 5000)),
    *(({"latents": value}, "latents") for value in ("x", LATENTS[..., :4], LATENTS * np.nan, LATENTS + 1j, [[1], [1, 2]], 5)),
    *(({"options": value}, "options") for value in (5, "x", [], {"nope": 1}, object())),
    *(({"params": value}, "param") for value in (5, {}, {"unet": {}}, [], "x", {"unet": 1, "vae": 2, "text_encoder": 3})),
    *(({"callback": value}, "callback") for value in (5, "x", lambda: None, lambda a, b: None, [])),
    *(({"sigmas": value}, "sigmas|levels") for value in (5, [1, 2], [float("nan")], "nope", [], [[1]], "1,x", [1e308, 1, 0], "1e-320,0")),
    *(({"guidance_steps": value}, "guidance|scales") for value in ([1, 2], "x", [float("nan")] * 4, [1e39] * 4, {}, [[1]] * 4)),
    *(({"guidance_interval": value}, "guidance_interval") for value in (None, [1], [0.5, 0.2], "x", [0, 2], [float("nan"), 1])),
    *(({"sampler_settings": value}, "sampler_settings|nope|s_churn|timesteps|order|5=6") for value in (5, {"nope": 1}, {"s_churn": "x"}, ["x"], {"timesteps": [5, 6]}, {5: 6})),
    *(({name: value}, name) for name in ("eta", "guidance_rescale") for value in ("x", -1, 2, float("nan"), [0], 10**400)),
    *(({name: value}, name) for name in ("reuse", "reuse_layers", "clip_skip") for value in ("x", -1, 1.5, 10**9 if name != "reuse" else [2], None, True)),
    *(({name: value}, name) for name in ("tiling", "noise", "spacing", "progress") for value in (5, "nope", [])),
    *(({name: value}, name) for name in ("denoising_start", "denoising_end") for value in ("x", -1, 2, float("nan"))),
    *(({"original_size": value}, "original_size") for value in (5, (1,), "x", (0.5, 1), (64, 64))),
    *(({name: Strange()}, f"^{name} cannot be read") for name in ("prompt", "seed", "num_inference_steps", "guidance_scale", "image")),
    *(({name: Strange()}, f"^{name} cannot be read") for name in ("outpaint", "sigmas", "hires")), ({"callback": Strange()}, "^callback=.* that cannot be read"), ({"seed": deleted()}, "^seed .* deleted"),
    *(({name: np.timedelta64(5, "s")}, f"{name}=.* is a time") for name in ("seed", "num_inference_steps")),
    ({"latents": LATENTS.astype("datetime64[s]")}, "latents"), ({"latents": LATENTS.astype([("a", "f4")])}, "latents"), ({"sampler": "Euler \u2603"}, "sampler="),
    ({"hires": 2, "hires_sampler": "nope"}, "^hires_sampler="), ({"image": np.zeros((64, 64, 3)), "outpaint": {"left": 3}}, "outpaint=.* multiple of 8"),
    *(({name: itertools.count()}, name) for name in ("sigmas", "guidance_interval", "guidance_steps", "outpaint")),
    *(({name: "a" * 200_000}, name) for name in ("prompt", "negative_prompt")),
    ({"prompt": " AND ".join("a" * 17), "prompt_syntax": "a1111"}, "adds up 17"), ({"prompt": {"text": LATENTS, "x": 1}}, "'x'"),
    ({"image": np.broadcast_to(np.uint8(0), (10**5, 10**5, 3))}, "pixels"), ({"image": "https://example.org/a.png"}, "download"),
    *(({"seed_size": value}, "seed_size") for value in ((7, 7), (64, 10**9))),
    *(({name: ["norm=1", "norm=2"], "guidance_method": "apg"}, "twice") for name in ("guidance_settings", "sampler_settings")),
    ({"prompt_embeds": "a cat", "prompt": None}, "^prompt_embeds='a cat' is text"), ({"guidance_scale": 1e30}, "^guidance_scale=1e.30 is beyond"),
    ({"sampler": "DPM++ 2M Exponential", "sigmas": "karras"}, "^sigmas='karras' with sampler="), ({"hires": 1.03}, "^hires=1.03 leaves 64 x 64"),
    ({"sampler": "euler", "sampler_settings": {"s_churn": 5, "s_tmin": 10, "s_tmax": 1}}, "^s_tmin=10 is above"), ({"noise": LATENTS}, "^noise=.{0,90} is not known"),
    ({"callback_on_step_end": lambda *_: {"prompt_embeds": None}}, "^callback_on_step_end returned 'prompt_embeds'"), ({"image": "data:image/png;base64,AAAA"}, "^image='data:.*data URL"),
    ({"image": canvax.Result([], LATENTS, LATENTS, [], {}, 0, [])}, "^image=Result.*such as result.images.0."), ({"timestep_spacing": "even"}, "spacing='trailing'"),
    ({"guidance_steps": [1, 2]}, "guidance_steps"), ({"W": 65}, "^W=65"), ({"prompt": LATENTS}, "prompt={'text': array}"),
    *(({"nope": 1}, "nope"), ({"cross_attention_kwargs": {}}, "LoRA"), ({"output_type": "pt"}, "output_type"), ({"generator": 5}, "generator")),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CALLS)))
def test_calls(index: int, emoji: canvax.StableDiffusion) -> None:
    changes, words = CALLS[index]
    with pytest.raises((canvax.CanvaxError, TypeError)) as caught:
        emoji(**{"prompt": "a cat", "num_inference_steps": 4, "progress": False} | changes)
    check_answer(str(caught.value), words)


LOADS: list[tuple[dict[str, Any], str]] = [
    *(({"model": value}, "model|name|folder|hub") for value in (5, None, [], "", b"emoji", object(), Strange(), "none/none.safetensors")),
    *(({"dtype": value}, "dtype") for value in ("int8", 5, "nope", [], object(), "complex64")),
    ({"dtype": "fp8"}, "quantize="),
    *(({"quantize": value}, "quantize") for value in ("int4", 5, [], {}, object())),
    *(({"revision": value}, "revision") for value in (5, [], "", b"a")),
    *(({"variant": value}, "variant") for value in (5, [], "../x")),
    *(({"cache_dir": value}, "cache_dir") for value in (5, [], object())),
    *(({"token": value}, "token") for value in (5, [], "a\nb", "é", "a b")),
    *(({"mesh": value}, "mesh") for value in (5, "data=2", [], object())),
    *(({"precision": value}, "precision") for value in (5, "nope", [])),
    ({"controlnet": ""}, "controlnet=''"), ({"model": "a/b", "cache_dir": __file__}, "cache_dir"),
    ({"scheduler": {"prediction_type": "v_prediction"}, "prediction_type": "epsilon"}, "^prediction_type='epsilon', and 'v_prediction'"),
    *(({"nope": 1}, "nope"), ({"custom_pipeline": "x"}, "custom_pipeline"), ({"safety_checker": 5}, "safety_checker")),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(LOADS)))
def test_loads(index: int) -> None:
    changes, words = LOADS[index]
    with pytest.raises((canvax.CanvaxError, TypeError)) as caught:
        canvax.load(**{"model": "emoji", "progress": False} | changes)
    check_answer(str(caught.value), words)


async def later(step: canvax.Step) -> None: ...


ROWS = build_table(from_scheduler_config({"_class_name": "DDIMScheduler"}), 3)
OTHERS: dict[str, tuple[Callable[[canvax.StableDiffusion], Any], str]] = {
    "save": (lambda pipe: pipe.save(5), "5"), "save none": (lambda pipe: pipe.save(None), "None"), "save nul": (lambda pipe: pipe.save("a\0b"), "NUL|null|name"),
    "save below a file": (lambda pipe: pipe.save(f"{__file__}/model"), "cannot be written"), "key": (lambda pipe: pipe("a", num_inference_steps=1, progress=False)["images"], r"result\.images"),
    "save dtype": (lambda pipe: pipe.save("m", dtype="nope"), "dtype"), "place": (lambda pipe: pipe.place(5), "param"), "place none": (lambda pipe: pipe.place(None), "param"),
    "mesh": (lambda _: canvax.make_mesh(5), "device|mesh"), "mesh list": (lambda _: canvax.make_mesh([1, 2]), "device"), "data": (lambda _: canvax.make_mesh(data=0), "data"),
    "model axis": (lambda _: canvax.make_mesh(model=10**9), "model"), "axis": (lambda _: canvax.make_mesh(data="x"), "data"),
    "compile": (lambda pipe: pipe.compile(batch=10**9), "batch"), "compile text": (lambda pipe: pipe.compile(batch="x"), "batch"), "compile size": (lambda pipe: pipe.compile(height=7), "height"),
    "compile layers": (lambda pipe: pipe.compile(reuse_layers=99), "reuse_layers"), "memory": (lambda pipe: pipe.memory(batch=0), "batch"),
    "decode nothing": (lambda pipe: pipe.decode(LATENTS[:0]), "no image"), "devices": (lambda pipe: canvax.make_mesh(pipe.devices * 2), "twice"),
    "save gif": (lambda pipe: pipe("a", num_inference_steps=1, progress=False).save("x.gif"), r"\.gif"),
    "encode": (lambda pipe: pipe.encode(5), "prompt"), "encode size": (lambda pipe: pipe.encode("a", height=7), "height"), "decode": (lambda pipe: pipe.decode("x"), "latents"),
    "decode shape": (lambda pipe: pipe.decode(np.zeros((1, 8, 8, 4))), "latents"), "encode image": (lambda pipe: pipe.encode_image(5), "image"),
    "attribute": (lambda pipe: pipe.enable_nothing, "enable_nothing"), "options": (lambda _: canvax.Options(nope=1), "nope"),
    "preview": (lambda _: canvax.load_preview("emoji"), "emoji|preview|config"), "preview number": (lambda _: canvax.load_preview(5), "5|model|name"),
    "plan": (lambda _: canvax.plan("emoji", "nope"), "nope|target"), "plan mesh": (lambda _: canvax.plan("emoji", "tpu-v5e:2x2", mesh="x"), "mesh"),
    **{f"under {i}": (lambda pipe, do=do: do(pipe, LATENTS, pipe.encode("a")), words) for i, (do, words) in enumerate([
        (lambda pipe, z, c: pipe.denoiser(5, 5, c), "latents"), (lambda pipe, z, c: pipe.denoiser(z[..., :4], 5, c), "latents"), (lambda pipe, z, c: pipe.denoiser(z, "x", c), "timestep"),
        (lambda pipe, z, c: pipe.denoiser(z, [1, 2, 3], c), "timestep"), (lambda pipe, z, c: pipe.denoiser(z, None, c), "timestep"), (lambda pipe, z, c: pipe.denoiser(z, 5, {}), "'text'"),
        (lambda pipe, z, c: pipe.denoiser(z, 5, "a"), "conditions"), (lambda pipe, z, c: pipe.denoiser(z, 5, {"text": c["text"][..., :3]}), "conditions"),
        (lambda pipe, z, c: pipe.denoiser(z + 1j, 5, c), "latents is complex"), (lambda pipe, z, c: pipe.denoiser(z, 5, c, params=5), "params"), (lambda pipe, z, c: pipe.denoiser([[1], [2, 3]], 5, c), "latents"),
        (lambda pipe, z, c: pipe.encode("a", params={}), "params"), (lambda pipe, z, c: pipe.decode(z, params=[]), "params"), (lambda pipe, z, c: pipe.compile(control=True), "control"),
    ])},
    "save empty": (lambda pipe: pipe.save(""), "folder"), "save long": (lambda pipe: pipe.save("a" * 5000), "folder"), "overwrite": (lambda pipe: pipe.save("m", overwrite="x"), "overwrite"),
    "convert to nothing": (lambda _: canvax.convert("emoji", ""), "output"), "flag": (lambda _: canvax.load("emoji", progress="no"), "progress"), "offline": (lambda _: canvax.load("a/b", local_files_only="yes"), "local_files_only"),
    "vae": (lambda _: canvax.load("emoji", vae="v" * 5000), "vae"), "no such vae": (lambda _: canvax.load("emoji", vae="nope"), "vae"), "scheduler": (lambda _: canvax.load("emoji", scheduler="s" * 5000), "scheduler"),
    "result": (lambda pipe: pipe("a", num_inference_steps=1, progress=False).save(""), "path"), "grid": (lambda pipe: pipe("a", num_inference_steps=1, progress=False).grid(rows=10**9), "rows"),
    "other format": (lambda pipe: pipe("a", num_inference_steps=1, progress=False)[0].save("x.nope"), r"\.nope"),
    "step end": (lambda pipe: pipe("a", callback_on_step_end=5), "callback_on_step_end"), "truth": (lambda pipe: pipe("a", timesteps=[True, 0]), "timesteps"),
    "upscaled": (lambda pipe: pipe.upscale(Image.new("RGB", (64, 64)), ["a"]), r"prompt=\['a'\]"), "table": (lambda _: build_table(5, 5), "scheduler"),  # pyright: ignore[reportArgumentType]
    "skip": (lambda pipe: pipe.encode("a", clip_skip=99), "clip_skip=99"), "weights": (lambda pipe: pipe.denoiser(LATENTS, 5, pipe.encode("a"), params={"unet": {}}), "conv_in.weight is missing"),
    "condition": (lambda pipe: pipe.denoiser(LATENTS, 5, {**pipe.encode("a"), "pooled": 1}), "'pooled', which"), "convert": (lambda _: canvax.convert("emoji", "y", dtype="x"), "dtype='x'"),
    "no adapter": (lambda pipe: pipe.with_ip_adapter(""), "ip_adapter=''"), "beside controlnet": (lambda pipe: pipe.with_controlnet(None, nope=4), "'nope'"), "beside": (lambda pipe: pipe.adapters.load("a", "b.safetensors", beside="x"), "beside"),  # pyright: ignore[reportArgumentType]
    "end": (lambda pipe: pipe.adapters.load_embedding("b.safetensors", "<|endoftext|>"), "endoftext"),
    **{f"samplers {i}": (lambda _, do=do: do(), words) for i, (do, words) in enumerate([
        (lambda: from_scheduler_config(None), "config=None"), (lambda: from_scheduler_config({5: 1}), "5"), (lambda: curve_label("x"), "curve 'x'"),  # pyright: ignore[reportArgumentType]
        (lambda: ROWS.with_guidance("x"), "scale="), (lambda: ROWS.take(9), "rows 9"), (lambda: ROWS.noised(np.zeros(3), np.zeros(4)), "shapes"), (lambda: ROWS.noised(LATENTS, LATENTS, 99), "row=99"),  # pyright: ignore[reportArgumentType]
        (lambda: NoiseSchedule(np.linspace(0.1, 0.9, 9)), "rises"), (lambda: NoiseSchedule("x"), "alphas_cumprod"),  # pyright: ignore[reportArgumentType]
    ])},
    "ends": (lambda pipe: pipe.upscale(Image.new("RGB", (64, 64)), options=canvax.Options(denoising_end=0.5)), "denoising_end"),
    "no prompt": (lambda pipe: pipe(), "^a call: missing a required argument: 'prompt'"), "prompt twice": (lambda pipe: pipe(["a"], prompt="b"), "^a call: multiple values"),
    "places": (lambda _: canvax.load("emoji", "float32"), "^load: what follows model is given by name, such as dtype="), "no model": (lambda _: canvax.StableDiffusion.from_pretrained(), "missing a required argument: 'model'"),  # pyright: ignore[reportCallIssue]
    "timestep": (lambda pipe: pipe.denoiser(LATENTS, 1000, pipe.encode("a")), "^timestep=1000 is not in 0[.][.]999"), "plan guidance": (lambda _: canvax.plan("sdxl", "gpu-h100", guidance=7), "no argument 'guidance'"),
    "whole repository": (lambda pipe: pipe.with_ip_adapter("h94/IP-Adapter"), "^adapter 'h94/IP-Adapter' names a repository"),
    "result's": (lambda pipe: pipe("a", num_inference_steps=1, progress=False).image, "'images'"), "no folder": (lambda pipe: pipe("a", num_inference_steps=1, progress=False)[0].save("no/x.png"), "^no/x.png cannot be written"),
    "callback": (lambda pipe: pipe("a", num_inference_steps=2, progress=False, callback=lambda step: {"latent": 1}), "a dict of .'latent'.; give {'latents'"),
    "class": (lambda _: canvax.StableDiffusion.from_single_file("x"), r"^from_single_file: canvax[.]load"),
    "rows": (lambda _: Generate("emoji", defaults={"stpes": 5}), "'stpes'.*'steps'"), "image format": (lambda _: Generate("emoji", image_format="gif"), "^image_format='gif'"),
    "skipped": (lambda pipe: build_table(pipe.model.scheduler, 20, skip=20), "^skip=20 leaves none of 20"),
    "callbacks": (lambda pipe: pipe("a", callback=print, callback_on_step_end=lambda *_: {}), "^callback and callback_on_step_end"), "a float": (lambda pipe: pipe("a", image=Image.new("F", (64, 64))), "^image has the mode F"),
    "callback's 0": (lambda pipe: pipe("a", num_inference_steps=2, progress=False, callback=lambda step: 0), "^the callback returned 0; give None"), "async": (lambda pipe: pipe("a", callback=later), "^callback=.*async"),
    "of a call, as others call it": (lambda _: canvax.Options(steps=5), "'steps'; num_inference_steps: it is an argument of the call"),  # pyright: ignore[reportCallIssue]
    "of a call": (lambda _: canvax.Options(num_inference_steps=5), "'num_inference_steps'; it is an argument of the call"),  # pyright: ignore[reportCallIssue]
    "class called": (lambda _: canvax.StableDiffusion("emoji"), "is made by canvax.load"),  # pyright: ignore[reportArgumentType]
    "near": (lambda _: canvax.Optoins, "'Optoins'; did you mean 'Options'"),  # pyright: ignore[reportAttributeAccessIssue]
    "plan batch": (lambda _: canvax.plan("emoji", "tpu-v5e:2x2", batch=0), "batch"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_calls(kind: str, emoji: canvax.StableDiffusion) -> None:
    do, words = OTHERS[kind]
    with pytest.raises((canvax.CanvaxError, TypeError, AttributeError)) as caught:
        do(emoji)
    check_answer(str(caught.value), words)


# Other commands

COMMANDS: list[tuple[str, str]] = [
    ("nope", "nope"), ("txt2img x", "mean: canvax generate[?]"), ("img2img x", "generate --image"), ("generate", "prompt"), ("generate x --nope", "nope"), ("samplers nope", "nope"),
    ("cache nope", "nope"), ("cache clear --older-than x", "older-than"), ("cache clear --older-than nan", "older-than"), ("cache list --older-than 3", "older-than"),
    ("compile emoji --batch 0", "batch"), ("compile emoji --batch x", "batch"), ("compile emoji --batch 1000000000", "batch"), ("compile emoji --size 7x7", "7"),
    ("compile emoji --size x", "size"), ("compile emoji --size 64", "size"), ("compile nope", "nope"), ("compile emoji --dtype nope", "dtype"),
    ("info", "what|argument|required"), ("info nope.png", "nope.png"), ("info nope", "nope"), ("info emoji -W 64", "memory"), ("info emoji --memory -W 7", "7|width"),
    ("info emoji --memory -b 0", "-b 0 is|batch"), ("plan", "required|model|target"), ("plan emoji", "target"), ("plan emoji --target nope", "nope"),
    ("plan emoji --target tpu-v5e:0x2", "0x2"), ("plan emoji --target tpu-v5e:2x2 --steps 0", "steps"), ("plan emoji --target tpu-v5e:2x2 --size 7x7", "7"),
    ("plan emoji --target tpu-v5e:2x2 -b 0", "-b 0 is|batch"), ("plan emoji --target tpu-v5e:2x2 --dtype x", "dtype"), ("plan emoji --target tpu-v5e:2x2 --mesh x", "mesh"),
    ("bench nope", "nope"), ("bench emoji --steps 0", "steps"), ("bench emoji --rounds 0", "rounds"), ("bench emoji -b 0", "-b 0 is|batch"), ("bench emoji --size x", "size"),
    ("train", "finetune|train|usage"), ("train nope", "nope"), ("train finetune nope -m emoji -o m", "nope"), ("train finetune . -m nope -o m", "nope|image|picture|caption"),
    ("train finetune . -m emoji -o m --steps 0", "steps|caption"), ("train finetune . -m emoji -o m --learning-rate nan", "learning-rate|learning_rate|caption"),
    ("train finetune . -m emoji -o m --size 7", "size|caption"), ("train finetune . -m emoji -o m --batch-size 0", "batch|caption"), ("--nope", "required|nope"), ("generate x --distributed --grid", "grid"),
    ("generate x --ip-encoder y", "ip-adapter"), ("convert emoji out.gguf", r"\.safetensors"), ("convert emoji out.ckpt", r"\.safetensors"),
    ("batch . -o b", "folder"), ("batch x.png -o b", r"\.png"), ("generate x --lora none/none.safetensors", "no such file"), ("generate x -m none/none.safetensors", "no such file"),
    ("generate x -o x.gif", r"\.gif"), ("generate x -o -", "stdout"), ("generate x --outpaint left=8,left=16", "twice"), ("generate x --width 512x512", "whole number"),
    ("generate x --guidance-method apg --guidance-settings norm=1 --guidance-settings norm=2", "twice"), ("generate x --seed-size 7 7", "--seed-size="),
    ("generate x --cfg 7,5", "'7,5' is not a number; write 7.5"), ("generate x --image http://127.0.0.1:9/x.png", "download"), ("serve --keys /dev/zero", "regular"),
    ("serve --warm 7x7:1", "width"), ("serve --chunks 9", "chunks"), ("serve --mesh x", "mesh"), ("serve --dtype int3", "dtype"), ("ui --no-page", "no-page"),
    ("serve emoji nope/nope/nope", "nope/nope/nope"), ("cache clear --older-than inf", "older-than"),
    ("serve --host 192.0.2.1 --no-keys", "address"),
    *((f"train lora . -o m {flags}", "^canvax: error: --") for flags in (
        "--steps 1000000000000", "-b 1000000000", "--lr 1e39", "--lr nan", "--warmup 9 --steps 5", "--final-lr 2", "--final-lr nan", "--weight-decay -1",
        "--weight-decay nan", "--size 0", "--min-snr nan", "--min-snr 0", "--text-lr 1e-4", "--stop-after nan", "--accumulate 0", "--seed -1", f"--seed {2**32}")),
    ("train dreambooth . -o m -p x --prior-weight 2", "class-prompt"), ("train dreambooth . -o m -p x --rank 8", "--rank without --lora"),
    ("train lora . -o /dev/null/m", "output"), ("bench -b 1000000000", "batch"),
    ("sheet a --x steps=1,2 --x eta=0,1", "--x is given twice"), ("sheet a --x steps=1,2 --steps 5", "leave out the flag"), ("generate --prompt-file p.csv", "canvax batch"), ("generate --prompt-file p.yaml", "JSON object a line"),
    ("batch https://x/y.jsonl -o b", "download"), ("serve --memory 1", "memory"),
    ("generate x --vae nope", "vae='nope'"), (f"generate x --vae {'v' * 5000}", "vae="), (f"info {'a' * 4000}/{'b' * 4000}", "name"), ("info ~nobody-here/x", "name"),
    ("--nope --also", "'--nope' is not a flag"),
    ("generate x --seed-size 63 64", "--seed-size=63"), ("generate x --preview a.png -o a.png", "--preview"), ("generate x --guidance-steps 1,2,3 --steps 2", "--guidance-steps has 3"),
    ("generate x -b 99999999999", "--batch-size"), ("generate x --mesh data=0", "mesh"), ("generate x --distributed --coordinator a:1 --num-processes 0 --process-id 0", "--num-processes=0 is"),
    ("generate x --distributed --coordinator a:99999 --num-processes 1 --process-id 0", "coordinator='a:99999'"),
    (f"generate x --lora {__file__}:abc", "'abc' is not a weight"), ("generate x --lora a.safetensors --lora a.safetensors:0.5", "no such file|twice"), ("serve --lora-rank 0", "--lora-rank without"),
    ("serve --lora-places 3", "--lora-places without"), (f"batch {__file__[:-3]}.txt -o x.png", r"x\.png"), ("train controlnet . -o m --hint-channels 0", "hint|caption"),
    ("generate x --steps=--", "--steps.* '--' is not a value"), ("generate x --lora=--", "is not a value"), ("generate x -o x.txt", r"\.txt"), ("convert emoji x.txt", "a folder is written"),
    ("compile emoji --variant x", "variant"), ("compile emoji --batch 99999999999", "--batch"), ("info emoji -W 0", "--width"), ("train lora . -o m.png", "ends a file"),
    ("generate x \u2013steps 2", "^canvax: error: '\u2013steps' begins with a dash"), ("generate -prompt x", "'-prompt' has one hyphen; write --prompt"), ("generate x --guid 3", "did you mean '--guidance-scale'"), ("generate x -output y", "write --output"),
    ("generate x -o .png", "an ending without a name"), ("train lora . -o m --ema=99.9", "^canvax: error: --ema=99.9"), ("batch nope.jsonl -o b --ray local --share 0/4", "needs ray|nope.jsonl"),
    (f"upscale {__file__}", "image"), (f"upscale {__file__} {__file__}", "no place for another file; a prompt goes with -p"), ("train lora . -o m --save-dtype int8", "--save-dtype='int8'"), ("pull emoji", "did you mean: canvax info"), ("generate x --CFG 7", "did you mean '--cfg'"), ("generate x --process-id 3", "distributed"), ("generate x --from-image a --model", "model|argument"), ("generate x --original-size 5", "original-size|SDXL|original_size"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(COMMANDS)))
def test_commands(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    line, words = COMMANDS[index]
    code = main(line.split())
    out, err = capsys.readouterr()
    assert code in (BAD_INPUT, FAILED), out + err
    check_answer(err.strip().splitlines()[-1], words)
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("info", "MODEL"),
        ("upscale", "IMAGE"),
        ("convert emoji", "OUTPUT"),
        ("train lora -o m", "IMAGES"),
        ("generate x --tiling", "--tiling"),
        ("generate x --vae", "--vae"),
    ],
)
def test_what_is_empty_is_called_as_it_was_written(words: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = command(capsys, *words.split(), "")
    assert code == BAD_INPUT
    cure = "leave it out, or give it a value" if name.startswith("--") else "give it a value"
    check_answer(message, f"error: {name}.* is empty; {cure}")


ELSEWHERE: list[tuple[str, str]] = [
    ("generate x --H 1", "did you mean '--height'"), ("generate x --torch_dtype 1", "did you mean '--dtype'"),
    ("generate x --foo 1", r"not a flag of canvax generate \(see: canvax generate --help\)$"),
    ("generate x --batch_size 1", "did you mean '--batch-size'"), ("train lora . -o m --network_dim 4", "did you mean '--network-dim'"),
    ("train lora --pretrained_model_name_or_path emoji", "did you mean '--model'"),
    ("train finetune . -o m --lora_rank 3", r"not a flag of canvax train finetune \(see"),
    ("generate x --strength 75%", "'75%' is not a number; write 0.75"), ("generate x --strength 0,6", "'0,6' is not a number; write 0.6"), ("convert nothing.ckpt x.safetensors", "there is no such file"),
    ("--verison", "did you mean '--version'"), ("generate x -m https://civitai.com/models/4384", "download the file"),
    ("convert emoji m --dtype int8", "choose one of 'float32', 'bfloat16', 'float16'"), ("train lora . -o m --lr -1", "--learning-rate=-1 is not in"),

    ("upscale x.png -i y.png", "-i' is not a flag of canvax upscale"),
    ("generate x --vae-tiling --steps 1", "expected one argument: decode in tiles, in less memory; auto"), ("generate x \u2014-steps 1", "begins with a dash that is no hyphen; write --steps"),
    ("batch none.txt -o o", "there is no such file$"), ("batch none.xlsx -o o", "there is no such file$"), ("batch cat -o o", "no such file; for one image: canvax generate cat"),
    ("sheet --x steps=1,2", "try: canvax sheet .* --x"), ("sheet", "try: canvax sheet|--x"),
    ("generate x --embedding none.pt", "there is no such file"), ("generate x --lora a.safetensors,b.safetensors", "each is given by itself"),
]  # fmt: skip
"""What people know from other programs."""


@pytest.mark.parametrize("index", range(len(ELSEWHERE)))
def test_what_other_programs_have(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    line, words = ELSEWHERE[index]
    _, message = command(capsys, *line.split())
    check_answer(message, words)
    assert os.listdir() == []


COLUMNS: dict[str, tuple[str, str, str]] = {
    "no head": ("a.csv", "a fox,1\na cat,2\n", "its first line, 'a fox,1', must name the columns"),
    "another column": ("a.csv", "id,caption\na,a cat\n", "there is no prompt: .*is it in 'caption'"),
    "a slip": ("a.csv", "id,sed\na,1\n", "did you mean 'seed'"),
    "an open quote": ("a.csv", 'id,prompt\na,"a cat\nb,a dog\n', "a quotation mark after line 1 is never closed"),
    "options of a job": ("a.jsonl", '{"prompt": "a cat", "options": {"clip_skip": 1}}\n', "options: write its fields"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_batches(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, words = COLUMNS[kind]
    Path(name).write_text(text)
    code, message = command(capsys, "batch", name, "-o", "o")
    assert code == BAD_INPUT
    check_answer(message, words)


def test_a_file_in_place_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("o").write_text("")
    Path("a.txt").write_text("a cat")
    code, message = command(capsys, "batch", "a.txt", "-o", "o")
    assert code == BAD_INPUT
    check_answer(message, "--output o: is a file, or lies under one")


def test_a_guidance_scale_that_nobody_means(emoji: canvax.StableDiffusion) -> None:
    for scale, words in ((-3, "switches guidance off, as 1 does; 2 is usual"), (90, "burns the image; 2 is usual")):
        with pytest.warns(canvax.HintWarning, match=words):
            emoji("a cat", guidance_scale=scale, num_inference_steps=1, seed=1)


def test_what_is_empty_and_needed(capsys: pytest.CaptureFixture[str]) -> None:
    _, message = command(capsys, "train", "textual-inversion", ".", "-o", "m", "--token", "<a>", "--initializer", "")
    check_answer(message, "--initializer.* is empty; give it a value")


def test_an_empty_prompt_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", " ", "-m", "nope"]) == FAILED
    assert "the prompt is empty" in capsys.readouterr().err
    assert main(["generate", "", "--image", "none.png", "-m", "nope"]) in (BAD_INPUT, FAILED)
    assert "the prompt is empty" not in capsys.readouterr().err
    assert main(["generate", "a=b", "steps=5", "-m", "nope"]) == FAILED
    said = capsys.readouterr().err
    assert "a setting is written --steps 5" in said
    assert "--a b" not in said


JOBS: dict[str, tuple[str, list[str], str]] = {
    "a name twice": ('{"prompt": "a", "seed": 1, "seed": 2}', [], "'seed' is there twice"),
    "nothing to carry": ('{"prompt": "a"}', ["--carry", "topic"], "--carry topic: no row"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_jobs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    row, flags, words = JOBS[kind]
    Path("rows.jsonl").write_text(row + "\n")
    code = main(["batch", "rows.jsonl", "-o", "images", "--steps", "1", "-q", *flags])
    message = capsys.readouterr().err
    if code == 0:  # a bad row is a line
        assert "1 row with an error" in message  # which --quiet does not hide
        message = json.loads(Path("images/manifest.jsonl").read_text())["error"]
    check_answer(message, words)


# Parameters of a caller's own

LEAVES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "objects": (lambda leaf: np.asarray(leaf).astype(object), "holds object"), "whole numbers": (lambda leaf: np.asarray(leaf).astype(int), "holds int64"),
    "text": (lambda leaf: np.full(leaf.shape, "a"), "holds <U1"), "complex": (lambda leaf: np.asarray(leaf, complex), "holds complex128"), "a list": (lambda leaf: np.asarray(leaf).tolist(), "is a list"),
    "None": (lambda leaf: None, "is a NoneType"), "deleted": (lambda leaf: deleted(), "deleted"), "shape": (lambda leaf: leaf[:1], "is .*, not"),
    "described": (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "ShapeDtypeStruct"), "times": (lambda leaf: np.zeros(leaf.shape, "datetime64[s]"), "holds datetime64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAVES)
def test_parameters(kind: str, emoji: canvax.StableDiffusion) -> None:
    change, words = LEAVES[kind]
    params = jax.tree.map(lambda leaf: leaf, emoji.params)
    assert params is not None
    params["unet"]["conv_in"]["bias"] = change(params["unet"]["conv_in"]["bias"])
    with pytest.raises(canvax.InputError) as caught:
        emoji("a cat", num_inference_steps=1, progress=False, params=params)
    check_answer(str(caught.value), words)
    assert kind == "described" or "conv_in.bias" in str(caught.value)


def test_parameters_of_its_own(emoji: canvax.StableDiffusion) -> None:
    """What somebody took out of them is missed before anything runs."""
    assert emoji.params is not None
    held = emoji.params["unet"].pop("conv_in")
    try:
        with pytest.raises(canvax.InputError, match=r"conv_in\.weight is missing"):
            emoji("a cat", num_inference_steps=1, progress=False)
    finally:
        emoji.params["unet"]["conv_in"] = held


# What model_index.json names

INDEX: list[tuple[str, Any, str]] = [
    ("unet", ["diffusers", "UNet3DConditionModel"], "UNet3DConditionModel"), ("unet", ["diffusers", "AutoencoderKL"], "'AutoencoderKL' as unet"),
    ("vae", ["diffusers", "AutoencoderTiny"], "'AutoencoderTiny' as vae, and vae/config.json 'AutoencoderKL'"), ("vae", ["diffusers", "VQModel"], "VQModel"),
    ("text_encoder", ["transformers", "T5EncoderModel"], "T5EncoderModel"), ("tokenizer", ["transformers", "T5Tokenizer"], "T5Tokenizer"),
    ("scheduler", ["diffusers", "NopeScheduler"], "NopeScheduler"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), INDEX)
def test_classes_of_an_index(name: str, value: Any, words: str, model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    refused(model, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("control_model.input_hint_block.0.weight", "is a ControlNet"),
        ("ip_adapter.1.to_k_ip.weight", "is an IP-Adapter"),
        ("<toy>", "is a textual inversion"),
        ("down_blocks.0.resnets.0.conv1.weight", "is a UNet alone"),
        ("text_model.final_layer_norm.weight", "is a text encoder alone"),
        ("decoder.conv_in.weight", "is an autoencoder"),
    ],
)
def test_files_of_other_kinds_are_told(name: str, words: str, empty: Path) -> None:
    path = empty / "a.safetensors"
    path.write_bytes(header({name: TENSOR}, b"0000"))
    refused(path, words)


def test_a_pipe_is_no_model(empty: Path) -> None:
    os.mkfifo(empty / "a.safetensors")
    refused(empty / "a.safetensors", "it is not a regular file")


def test_the_folder_around_a_model(model: Path) -> None:
    refused(model.parent, "model in it has one: pass MODEL/model")


def test_components_that_are_not_used_are_named(model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prior": ["diffusers", "PriorTransformer"]}))
    with pytest.warns(canvax.errors.HintWarning, match="PriorTransformer"):
        canvax.load(model, progress=False)


def test_the_scheduler_is_of_the_class_in_the_index(model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": ["diffusers", "EulerDiscreteScheduler"]}))
    assert canvax.load(model, progress=False).model.scheduler.spec.name == "euler"


# Folders to train on

PICTURES: dict[str, tuple[Callable[[], Any], list[str], str]] = {
    "a column of .txt": (lambda: Path("d/0.txt").write_text("a cat"), ["--caption-column", "words"], "--caption-column='words'"),
    "two tables": (lambda: [Path("d/metadata.csv").write_text("file_name,text\n0.png,a\n"), Path("d/metadata.jsonl").write_text('{"file_name": "0.png", "text": "a"}')], [], "both .*metadata"),
    "a comma": (lambda: Path("d/metadata.csv").write_text("file_name,text\n0.png,a cat, on a mat\n"), [], "row 1 has more cells"),
    "an open quote": (lambda: Path("d/metadata.csv").write_text('file_name,text\n0.png,"a cat\n'), [], "metadata.csv cannot be read"),
    "a NUL": (lambda: Path("d/metadata.csv").write_bytes(b"file_name,text\n0.png,a\0b\n"), [], "caption of row 1 has a NUL"),
    "a long cell": (lambda: Path("d/metadata.csv").write_text("file_name,text\n0.png," + "a" * 200_000), [], "metadata.csv cannot be read"),
    "another column": (lambda: Path("d/metadata.jsonl").write_text('{"file_name": "0.png", "caption": "a"}'), [], "write --caption-column caption"),
    "half a line": (lambda: Path("d/metadata.jsonl").write_text('{"file_name": "0.png", "text": "a"}\n{"file_name": '), [], "line 2, .*is not JSON .*mend it"),
    "an unknown flag": (lambda: None, ["--foo_bar", "3"], r"not a flag of canvax train lora \(see"),
    "depth": (lambda: Path("d/metadata.jsonl").write_text("[" * 100_000), [], "metadata.jsonl cannot be read"),
    "Latin-1": (lambda: Path("d/metadata.csv").write_bytes(b"file_name,text\n0.png,caf\xe9\n"), [], "metadata.csv is not UTF-8 text; save it as UTF-8$"),
    "a surrogate": (lambda: Path("d/metadata.jsonl").write_text('{"file_name": "0.png", "text": "\\ud800"}'), [], "caption of row 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICTURES)
def test_folders_to_train_on(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write, flags, words = PICTURES[kind]
    Path("d").mkdir()
    Image.new("RGB", (64, 64)).save("d/0.png")
    write()
    code, message = command(capsys, "train", "lora", "d", "-o", "m", "--steps", "1", *flags)
    assert code == BAD_INPUT
    check_answer(message, words)
    assert os.listdir() == ["d"]


PLANS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in ("steps", "batch") for value in (0, 1.5, True, "x", None)),
    *(({name: value}, name) for name in ("minutes", "final", "weight_decay", "learning_rate", "b2", "average") for value in ("x", float("nan"), -1)),
    ({"rates": [1]}, "rates"), ({"rates": {"a": "x"}}, "rates"), ({"seed": None}, "seed"), ({"warmup": "x"}, "warmup"), ({"final": 2}, "^final = 2 is a share"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_plans_of_training(index: int) -> None:
    from canvax.train.loop import Plan

    changes, words = PLANS[index]
    with pytest.raises(canvax.InputError) as caught:
        Plan(**{"steps": 1, "batch": 1} | changes)
    check_answer(str(caught.value), words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("CANVAX_CACHE_DIR", "relative", "whole path"), ("CANVAX_CACHE_SIZE", "plenty", "CANVAX_CACHE_SIZE"), ("CANVAX_CACHE_SIZE", "9" * 400, "CANVAX_CACHE_SIZE"),
     ("CANVAX_CACHE_DIR", "x" * 5000, "whole path"), ("CANVAX_CACHE_DIR", __file__, "not a folder"), ("CANVAX_CACHE_DIR", "~nobody-here/x", "whole path|home")],
)  # fmt: skip
def test_environment(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANVAX_CACHE_DIR", os.getcwd())
    monkeypatch.setenv(name, value)
    code = main(["cache", "list"])
    assert code in (BAD_INPUT, FAILED)
    check_answer(capsys.readouterr().err, words)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("JAX_ENABLE_X64", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_DEFAULT_MATMUL_PRECISION", 'Invalid value "maybe" for JAX flag jax_default_matmul_precision'),
    ],
)
def test_variables_of_jax(
    name: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports_jax(*_: Any) -> None:
        raise ValueError(error)

    monkeypatch.setenv(name, "maybe")
    assert main(["cache"], run=imports_jax) == BAD_INPUT
    check_answer(capsys.readouterr().err, f"{name}='maybe'")


def test_an_image_that_is_too_large_is_refused_by_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    header = struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0)  # Pillow warns of it

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    Path("i.png").write_bytes(b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", header) + piece(b"IDAT", b"") + piece(b"IEND", b""))
    code, message = command(capsys, "generate", "x", "--image", "i.png")
    assert code == BAD_INPUT
    check_answer(message, "too many")
    assert "warning" not in message


def count() -> Iterator[int]:
    yield from (len(FLAG_CASES), 4 * len(PATHS), len(OUTPUTS), 36, len(LINES), len(METADATA), len(JSON_FILES) * 14)
    yield from (len(CONFIGS), len(TOKENIZERS), len(WEIGHTS) + 4, len(CALLS), len(LOADS), len(OTHERS), len(COMMANDS))


def test_there_are_many() -> None:
    assert sum(count()) >= 400
