"""Bad inputs and faults: each gets an error of canvax about the right argument, and leaves nothing behind.

One case for each mechanism; ``test_fuzz`` tries many more values. Wording is in ``golden/errors.txt``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import load_file, save_file

import canvax
from canvax.cli import BAD_INPUT, FAILED, main
from canvax.cli.arguments import parse
from canvax.cli.images import gather
from canvax.scale.rows import NAMES as FIELDS
from canvax.scale.rows import Row
from canvax.scale.work import Worker
from canvax.train import loop
from canvax.weights.location import BUNDLED

pytestmark = pytest.mark.bad


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


def check_message(message: str) -> None:
    """One line of a length that is read, and no fault of canvax itself."""
    assert "Traceback" not in message
    assert "CANVAX_DEBUG" not in message, message
    assert "\n" not in message.strip()
    assert len(message) <= 700, message


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the error of a command."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert out == "", out
    lines = [line for line in err.splitlines() if not line.startswith(("canvax: loading", "canvax: warning"))]
    check_message("\n".join(lines))
    return code, "\n".join(lines)


# Files that commands read and write

PATHS = {
    "missing": "nowhere/x.png", "empty": "", "folder": ".", "zero": "/dev/zero", "null": "/dev/null/x",
    "user": "~nobody-here/x.png", "pipe": "pipe.png", "loop": "loop.png", "cut": "cut.png", "nul": "a\0b.png",
}  # fmt: skip


def strange_files() -> None:
    Path("text.png").write_text("hello")
    os.mkfifo("pipe.png")
    Path("loop.png").symlink_to("loop.png")
    Image.new("RGB", (64, 64)).save("whole.png")
    Path("cut.png").write_bytes(Path("whole.png").read_bytes()[:40])


@pytest.mark.parametrize("kind", PATHS)
def test_files_to_read(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    code, message = command(capsys, "generate", "a cat", f"--image={PATHS[kind]}", "-o", "out.png")
    assert code == BAD_INPUT
    assert "--image" in message
    assert not os.path.exists("out.png")


@pytest.mark.parametrize("kind", ["missing", "zero"])
@pytest.mark.parametrize("flag", ["mask", "from-image", "prompt-file", "control"])
def test_other_files_to_read(flag: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    words = () if flag in ("prompt-file", "from-image") else ("a cat", "--image", "whole.png")
    assert command(capsys, "generate", *words, f"--{flag}={PATHS[kind]}", "-o", "out.png")[0] == BAD_INPUT
    assert not os.path.exists("out.png")


OUTPUTS = {
    "exists": "whole.png", "file as folder": "text.png/more", "null": "/dev/null/x", "long": "x" * 300 + ".png",
    "empty": "", "user": "~nobody-here/x.png", "nul": "a\0b.png", "loop as folder": "loop.png/x", "full": "/dev/full",
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS)
def test_files_to_write(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    before = sorted(os.listdir())
    code, message = command(capsys, "generate", "a cat", f"--output={OUTPUTS[kind]}")
    assert code == BAD_INPUT
    assert "--output" in message
    assert sorted(os.listdir()) == before


NAMES = ("", "x" * 5000, "/dev/zero", "a\0b", "..", "owner/", "owner/name@main", "text.png")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    strange_files()
    assert command(capsys, "info", "--", name)[0] in (FAILED, BAD_INPUT)


LINES: dict[str, str | bytes] = {
    "empty": "", "not UTF-8": b"\xff\xfe\xfa", "UTF-16": "a cat\n".encode("utf-16-le"),
    "a page": "<!DOCTYPE html>\n<title>a cat</title>", "of the command": '{"prompt": "a", "model": "b"}',
    "no prompt": '{"seed": 1}', "unknown": '{"prompt": "a", "stepz": 4}', "deep": "{" + '"a":{' * 60_000,
    "text": '{"prompt": "a", "steps": "4"}', "huge": '{"prompt": "a", "seed": ' + "9" * 400 + "}",
    "count": '{"prompt": "a", "n": 1000000000000}', "sampler": '{"prompt": "a", "sampler": "nope"}',
    "image": '{"prompt": "a", "image": 5}', "surrogate": '{"prompt": "\\ud800"}',
    "two names": '{"prompt": "a", "cfg": 3, "cfg_scale": 2}', "a name twice": '{"prompt": "a", "seed": 3, "seed": 2}',
}  # fmt: skip


@pytest.mark.parametrize("kind", LINES)
def test_prompt_files(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = LINES[kind]
    Path("p.txt").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    code, message = command(capsys, "generate", "--prompt-file", "p.txt")
    assert code == BAD_INPUT
    assert "p.txt" in message
    assert os.listdir() == ["p.txt"]


METADATA: dict[str, Any] = {
    "list": [], "deep": "[" * 60_000, "steps": {"num_inference_steps": "x"}, "seed": {"seed": 10**400},
    "guidance": {"guidance_scale": 1e39}, "options": {"options": {"eta": [1]}}, "grid": {"grid": 5},
    "controls": {"control_sha256": "x"}, "settings": {"options": {"sampler_settings": ["s_churn=" + "[" * 60_000]}},
    "dtype": {"dtype": "int4"},
}  # fmt: skip


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_of_images(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = METADATA[kind]
    if isinstance(value, dict):
        value = {"prompt": "a", "canvax": "0.1.0", "model": "emoji"} | value
        value = {name: one for name, one in value.items() if one is not ...}
    texts = PngInfo()
    texts.add_itxt("canvax", value if kind == "deep" else json.dumps(value))
    Image.new("RGB", (8, 8)).save("i.png", pnginfo=texts)
    assert command(capsys, "generate", "--from-image", "i.png", "-o", "out.png")[0] in (BAD_INPUT, FAILED)
    assert os.listdir() == ["i.png"]


def test_an_image_that_is_too_large_is_refused_by_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    start = struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0)  # Pillow warns of it

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    Path("i.png").write_bytes(b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", start) + piece(b"IDAT", b"") + piece(b"IEND", b""))
    assert main(["generate", "x", "--image", "i.png"]) == BAD_INPUT
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("beside", [["--mask", "0.png"], ["--strength", "0.5"]])
def test_further_references_are_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], beside: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        Image.new("RGB", (64, 64)).save(f"{number}.png")
    assert main(["generate", "x", "--image", "0.png", "--reference", "1.png", *beside]) == BAD_INPUT
    assert "--reference" in capsys.readouterr().err


# Models


@pytest.fixture
def model(empty: Path) -> Path:
    """A copy of the bundled model, to damage: weights are linked."""
    return shutil.copytree(BUNDLED["emoji"], empty / "model", copy_function=_link_weights)


def _link_weights(source: str, target: str) -> None:
    if source.endswith(".safetensors") and os.stat(source).st_dev == os.stat(Path(target).parent).st_dev:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def refused(model: Path, *names: str) -> None:
    with pytest.raises(canvax.CanvaxError) as caught:
        canvax.load(model, progress=False)
    message = str(caught.value)
    assert len(message) < 4000, message
    assert all(name in message for name in names), message


BROKEN: dict[str, bytes] = {
    "empty": b"", "list": b"[]", "null": b"null", "cut": b'{"a": ', "deep": b'{"a":' + b"[" * 60_000,
    "page": b"<!DOCTYPE html><html>", "latin": '{"ü": 1}'.encode("latin-1"),
}  # fmt: skip
JSON_CASES = [
    *(("unet/config.json", kind) for kind in (*BROKEN, "missing", "loop")),
    *((file, "cut") for file in ("model_index.json", "text_encoder/config.json", "scheduler/scheduler_config.json")),
]


@pytest.mark.parametrize(("file", "kind"), JSON_CASES)
def test_json_of_models(file: str, kind: str, model: Path) -> None:
    path = model / file
    path.unlink()
    if kind == "loop":
        path.symlink_to(path)
    elif kind != "missing":
        path.write_bytes(BROKEN[kind])
    refused(model, path.name)


def test_a_tensor_that_its_shard_has_not(model: Path) -> None:
    whole = model / "vae" / "diffusion_pytorch_model.safetensors"
    arrays, shard = load_file(whole), "diffusion_pytorch_model-00001-of-00001.safetensors"
    save_file(arrays, model / "vae" / shard)
    whole.unlink()
    index = model / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys([*arrays, "nope.weight"], shard)}))
    refused(model, "nope.weight")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unet", ["diffusers", "UNet3DConditionModel"]),
        ("vae", ["diffusers", "AutoencoderTiny"]),
        ("text_encoder", ["transformers", "T5EncoderModel"]),
        ("tokenizer", ["transformers", "T5Tokenizer"]),
        ("scheduler", ["diffusers", "NopeScheduler"]),
    ],
)
def test_classes_of_an_index(name: str, value: Any, model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    refused(model, value[1])


def test_a_pipe_is_no_model(empty: Path) -> None:
    os.mkfifo(empty / "a.safetensors")
    refused(empty / "a.safetensors")


def test_the_folder_around_a_model_names_the_model(model: Path) -> None:
    refused(model.parent, str(model))


def test_components_that_are_not_used_are_named(model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prior": ["diffusers", "PriorTransformer"]}))
    with pytest.warns(canvax.errors.HintWarning, match="PriorTransformer"):
        canvax.load(model, progress=False)


def test_the_scheduler_is_of_the_class_in_the_index(model: Path) -> None:
    path = model / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scheduler": ["diffusers", "EulerDiscreteScheduler"]}))
    assert canvax.load(model, progress=False).model.scheduler.spec.name == "euler"


# Calls from Python

LATENTS = np.zeros((1, 8, 8, 32), np.float32)


ODD: tuple[Any, ...] = ([], {}, "x", True, 1e308, [["x"]], {"a": 1}, -1, [1, "a"], 2**70, 0.5, {"left": "a"})


@pytest.mark.parametrize("name", ["prompt", *FIELDS])
def test_fields_of_files(name: str, emoji: canvax.Pipeline) -> None:
    """What JSON can hold is taken or refused, and is no fault of canvax."""
    worker = Worker(emoji)
    for value in ODD:
        row = {"prompt": "a cat", "hires": 1.5, name: value}
        worker.check(Row("1", row))
        Path("prompts.txt").write_text(json.dumps(row))
        with suppress(canvax.InputError):
            gather(parse(["generate", "--prompt-file", "prompts.txt"]))


LEAVES: dict[str, Callable[[Any], Any]] = {
    "objects": lambda leaf: np.asarray(leaf).astype(object), "whole numbers": lambda leaf: np.asarray(leaf).astype(int),
    "complex": lambda leaf: np.asarray(leaf, complex), "a list": lambda leaf: np.asarray(leaf).tolist(),
    "shape": lambda leaf: leaf[:1], "described": lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAVES)
def test_parameters(kind: str, emoji: canvax.Pipeline) -> None:
    params = jax.tree.map(lambda leaf: leaf, emoji.params)
    params["unet"]["conv_in"]["bias"] = LEAVES[kind](params["unet"]["conv_in"]["bias"])
    with pytest.raises(canvax.InputError) as caught:
        emoji("a cat", num_inference_steps=1, progress=False, params=params)
    assert caught.value.argument == "params"
    assert kind == "described" or "conv_in.bias" in str(caught.value)


def test_parameters_that_are_missing(emoji: canvax.Pipeline) -> None:
    """What somebody took out of them is missed before anything runs."""
    held = emoji.params["unet"].pop("conv_in")
    try:
        with pytest.raises(canvax.InputError) as caught:
            emoji("a cat", num_inference_steps=1, progress=False)
    finally:
        emoji.params["unet"]["conv_in"] = held
    assert caught.value.argument == "params"


def test_a_forked_process_gets_an_error() -> None:
    """It has none of JAX's threads, and would wait for them for ever."""
    script = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
import canvax
pipe = canvax.load("emoji", progress=False)
def kind(name):
    try:
        pipe("a cat") if name == "call" else pipe.encode("a cat") if name == "encode" else canvax.load("emoji")
    except canvax.InputError as error:
        return type(error).__name__
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(*pool.map(kind, ["call", "encode", "load"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["InputError"] * 3


# Other commands


def test_a_server_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--memory", "1", "--port", "0"]) in (BAD_INPUT, FAILED)
    check_message(capsys.readouterr().err.strip().splitlines()[-1])
    assert os.listdir() == []


def test_a_file_in_place_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("o").write_text("")
    Path("a.txt").write_text("a cat")
    code, message = command(capsys, "batch", "a.txt", "-o", "o")
    assert code == BAD_INPUT
    assert "--output" in message


def test_a_bad_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "seed": 1, "seed": 2}\n')
    assert main(["batch", "rows.jsonl", "-o", "images", "--steps", "1", "-q"]) == 0
    assert "1 row with an error" in capsys.readouterr().err  # which --quiet does not hide
    assert json.loads(Path("images/manifest.jsonl").read_text())["error"]


LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"loss": lambda p, d, i, k: np.zeros(4, np.float32)}, "loss"),
    ({"loss": lambda p, d: 0}, "loss"),
    ({"params": {}}, "params"),
    ({"samples": 0}, "samples"),
]


@pytest.mark.parametrize("index", range(len(LOSSES)))
def test_what_is_trained_is_looked_at_before_it_is_compiled(index: int, empty: Path) -> None:
    changes, argument = LOSSES[index]
    given: dict[str, Any] = {
        "params": {"w": np.zeros(4, np.float32)}, "data": {"x": np.eye(4, dtype=np.float32)}, "samples": 4,
        "plan": loop.Plan(1, 1), "session": loop.Session(empty / "s", "n", canvax.make_mesh()),
        "loss": lambda p, d, s, k: ((d["x"] @ p["w"]).mean(), {}),
    }  # fmt: skip
    with pytest.raises(canvax.InputError) as caught:
        loop.fit(**given | changes)
    assert caught.value.argument == argument
    assert not os.listdir()


@pytest.mark.parametrize(
    ("name", "value"),
    [("CANVAX_CACHE_DIR", "relative"), ("CANVAX_CACHE_SIZE", "plenty"), ("CANVAX_CACHE_SIZE", "9" * 400),
     ("CANVAX_CACHE_DIR", __file__), ("CANVAX_CACHE_DIR", "~nobody-here/x")],
)  # fmt: skip
def test_environment(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANVAX_CACHE_DIR", os.getcwd())
    monkeypatch.setenv(name, value)
    assert main(["cache", "list"]) in (BAD_INPUT, FAILED)
    message = capsys.readouterr().err
    check_message(message)
    assert name in message


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
    assert name in capsys.readouterr().err
