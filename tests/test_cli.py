"""The command line, in this process with one loaded model."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import save_file

import canvax
from canvax import cli
from canvax.call import ZERO_SNR, Load
from canvax.cli import BAD_INPUT, FAILED, INTERRUPTED, main
from canvax.cli.again import again
from canvax.cli.arguments import parse
from canvax.cli.images import SETTINGS, gather
from canvax.cli.loading import load_of, load_with
from canvax.cli.terminal import clean, command_line, table
from canvax.errors import InputError
from canvax.images.metadata import read_metadata, save_image
from canvax.pipelines import result
from canvax.samplers import CURVES, SAMPLERS
from canvax.settings import as_flags, declared
from canvax.train.loop import STATE
from canvax.weights.location import BUNDLED

Run = Callable[..., tuple[int, str, str]]
FAST = ("--steps", "2", "--quiet")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in an empty folder: (exit code, stdout, stderr). Nothing may ever show a traceback."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def generate(run: Run, monkeypatch: pytest.MonkeyPatch, emoji: canvax.Pipeline) -> Run:
    """Like ``run generate``, with the bundled model loaded already."""
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    return lambda *arguments: run("generate", *arguments)


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def shell_words(line: str) -> list[str]:
    """How a shell reads a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


# Images


def test_files_are_named_by_number_and_seed(generate: Run) -> None:
    code, out, err = generate("a cat", "a dog", "-s", 7, *FAST)
    assert (code, err) == (0, "")
    assert out.splitlines() == ["out/00000-7.png", "out/00001-8.png"]
    code, out, _ = generate("a cat", "-s", 7, *FAST, "-o", "out")
    assert out.splitlines() == ["out/00002-7.png"]
    assert sorted(os.listdir("out")) == ["00000-7.png", "00001-8.png", "00002-7.png"]
    first, alone = (pixels(f"out/0000{number}-7.png").astype(int) for number in (0, 2))
    assert np.abs(first - alone).max() <= 1  # in a batch of another size sums are rounded otherwise


def test_one_file_is_never_replaced(generate: Run) -> None:
    assert generate("a cat", "-o", "new/cat.png", *FAST)[:2] == (0, "new/cat.png\n")
    before = Path("new/cat.png").read_bytes()
    code, out, err = generate("a dog", "-o", "new/cat.png", *FAST)
    assert (code, out) == (BAD_INPUT, "")
    assert "not replaced" in err
    assert Path("new/cat.png").read_bytes() == before


def test_json_reports_everything(generate: Run) -> None:
    code, out, err = generate("a cat", "-n", 3, "-b", 1, "-s", 5, "--grid", "--json", *FAST)
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["files"] == [f"out/0000{i}-{5 + i}.png" for i in range(3)]
    assert report["grid"] == "out/grid-00000-5.png"
    assert report["seeds"] == [5, 6, 7]
    assert report["metadata"] == [read_metadata(Path(file)) for file in report["files"]]
    assert report["timings"].keys() == {"load", "compile", "encode", "denoise", "step", "first_step", "decode", "total"}
    assert 0 < report["timings"]["step"] < report["timings"]["denoise"] < report["timings"]["total"]
    assert (report["model"], report["dtype"], report["device"]["platform"]) == ("emoji", "float32", "cpu")
    assert report["versions"].keys() == {"canvax", "jax", "jaxlib", "python"}
    assert pixels(report["grid"]).shape == (128, 128, 3)
    assert read_metadata(Path(report["grid"]))["grid"] == report["metadata"]


def test_a_second_batch_compiles_nothing(generate: Run) -> None:
    generate("a cat", "-n", 2, "-b", 2, *FAST)
    for changes in (("-n", 5, "-b", 2), ("-n", 3, "-b", 2, "--steps", 5, "--sampler", "Euler a Karras", "-g", 9)):
        report = json.loads(generate("a dog", "-s", 4, "--quiet", "--steps", 2, *changes, "--json")[1])
        assert report["compilations"] == 0
        assert report["seeds"] == list(range(4, 4 + int(changes[1])))


def test_a_log_has_a_line_now_and_then(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "of 6 images" not in generate("a cat", "-n", "6", "-b", "2", "--steps", "2")[2]
    monkeypatch.setattr(result, "SELDOM", 1e-9)
    err = generate("a cat", "-n", "6", "-b", "2", "--steps", "2")[2]
    assert "\ngenerating: 4 of 6 images, " in err
    assert "\r" not in err
    assert "\ndenoising: 1 of 2 evaluations, " in generate("a cat", "--steps", "2")[2]


def test_time_left_is_without_compiling(generate: Run, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiling:
        model, programs, adapters = emoji.model, emoji.programs, emoji.adapters

        def __call__(self, **call: Any) -> Any:
            made = emoji(**call)
            time.sleep(1.2)
            return replace(made, timings=made.timings | {"compile": made.timings["compile"] + 1.2})

    generate("a cat", "-n", 2, *FAST)
    monkeypatch.setattr(result, "SELDOM", 1e-9)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: Compiling())
    err = generate("a cat", "-n", 4, "-b", 2, "--steps", 2)[2]
    assert re.search("generating: 2 of 4 images, .* 00:00 left", err), err


def test_an_image_tells_how_to_generate_it_again(generate: Run, run: Run) -> None:
    flags = (
        "--negative-prompt=-bad, ugly",
        "-s",
        9,
        "--sampler",
        "euler a karras",
        "-g",
        4,
        "--eta",
        0.5,
        "--noise",
        "torch",
    )
    first = generate("--prompt=-a 'cat' 🐈\nin $HOME", *flags, "--clip-skip", 1, "-o", "a.png", *FAST)[1].strip()
    out = run("info", first)[1]
    assert "euler_a_karras" in out
    assert json.loads(run("info", first, "--json")[1])["commands"] == [out.splitlines()[-1]]
    program, command, *words = shell_words(out.splitlines()[-1])
    assert (program, command) == ("canvax", "generate")
    generate(*words, "-o", "b.png", "-q")
    generate("--from-image", first, "-o", "c.png", "-q")
    assert (pixels("a.png") == pixels("b.png")).all()
    assert (pixels("a.png") == pixels("c.png")).all()
    assert read_metadata(Path("a.png")) == read_metadata(Path("b.png")) == read_metadata(Path("c.png"))


def test_flags_override_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_image("a.png", Image.new("RGB", (8, 8)), {"prompt": "a cat", "seed": 9, "model": "emoji", "canvax": "1"})
    (first,), model = gather(parse(["generate", "--from-image", "a.png"]))
    assert (first.prompt, first.seed) == ("a cat", 9)
    for words, changes in ((["--steps", "3"], {"num_inference_steps": 3}), (["a dog"], {"prompt": "a dog"})):
        (other,), same = gather(parse(["generate", *words, "--from-image", "a.png"]))
        assert (vars(other), same) == (vars(first) | changes, model)


def test_images_of_other_programs(generate: Run, run: Run) -> None:
    info = PngInfo()
    info.add_text("parameters", "a cat\nNegative prompt: x\nSteps: 2, Sampler: DPM++ 2M, Schedule type: Karras, "
                  "CFG scale: 3, Seed: 4, Size: 64x64, Model: v1-5, ENSD: 31337")  # fmt: skip
    Image.new("RGB", (8, 8)).save("a.png", pnginfo=info)
    code, out, err = generate("--from-image", "a.png", "-m", "emoji", "-q")
    got = read_metadata(Path(out.strip()))
    assert (code, got["sampler"], got["seed"]) == (0, "dpmpp_2m_karras", 4)
    assert "ENSD" in err
    assert "--sampler 'DPM++ 2M Karras'" in run("info", "a.png")[1]
    assert "Sampler: DPM++ 2M, Schedule type: Karras" in Image.open(out.strip()).text["parameters"]  # type: ignore[attr-defined]


def test_a_prompt_may_be_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it ends as an image does and is not marked as a prompt."""
    monkeypatch.chdir(tmp_path)
    for name in ("fox", "a.png", "b.TIFF"):
        Path(name).touch()
    assert parse(["generate", "fox", "c.png", "-p", "a.png", "--", "b.TIFF"]).prompts == ["fox", "c.png", "b.TIFF"]
    for words in (["generate", "b.TIFF"], ["sheet", "fox", "--image", "c.png", "a.png"]):
        with pytest.raises(InputError):
            parse(words)


def test_prompt_file(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# birds", "a robin 🐦", "", '{"prompt": "a crow", "seed": 40, "steps": 3, "n": 2}', "an owl"]
    Path("prompts.txt").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    report = json.loads(generate("a cat", "--prompt-file", "prompts.txt", "-s", 1, "-b", 1, "--json", *FAST)[1])
    rows = {(row["prompt"], row["seed"], row["num_inference_steps"]) for row in report["metadata"]}
    assert rows == {("a cat", 1, 2), ("a robin 🐦", 2, 2), ("a crow", 40, 3), ("a crow", 41, 3), ("an owl", 5, 2)}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
    assert generate("--prompt-file", "-", *FAST)[0] == 0


def test_stopping_keeps_what_is_finished(generate: Run, emoji: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stop(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return emoji(*arguments, **keywords)

    class Stoppable:
        model, programs, adapters = emoji.model, emoji.programs, emoji.adapters
        __call__ = staticmethod(stop)

    monkeypatch.setattr(canvax, "load", lambda *_, **__: Stoppable())
    code, out, err = generate("a cat", "a dog", "-s", 1, "-b", 1, "--json", *FAST)
    assert code == INTERRUPTED
    assert err == "canvax: cancelled; finished images are kept\n"
    assert json.loads(out)["files"] == ["out/00000-1.png"]
    assert os.listdir("out") == ["00000-1.png"]


def test_training_that_is_stopped_can_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(arguments: Any) -> None:
        if (Path("m") / "lora").is_dir():
            (Path("m") / "lora" / STATE).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("canvax.cli.train._lora", stop)
    for words in ("begins again", "resumes"):
        code, _, err = run("train", "lora", ".", "-o", "m")
        assert (code, len(err.splitlines())) == (INTERRUPTED, 1)
        assert words in err
        (Path("m") / "lora").mkdir(parents=True, exist_ok=True)


def test_unforeseen_errors_are_one_line(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nlots\nof\nlines")

    monkeypatch.setattr(canvax, "load", load)
    code, _, err = generate("a cat", "-q")
    assert code == FAILED
    assert "smaller --batch-size" in err
    monkeypatch.setattr(canvax, "load", lambda *_, **__: 1 / 0)
    code, out, err = generate("a cat", "-q", "--json")
    assert (code, err.count("\n")) == (FAILED, 1)
    assert "CANVAX_DEBUG=1" in err
    assert json.loads(out)["error"]["type"] == "ZeroDivisionError"
    monkeypatch.setenv("CANVAX_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["generate", "a cat", "-q"])


def test_a_grid_in_a_file_of_its_own(generate: Run) -> None:
    code, out, _ = generate("a cat", "a dog", "--grid", "-o", "g.jpg", "-s", 1, *FAST)
    assert (code, out, os.listdir()) == (0, "g.jpg\n", ["g.jpg"])
    assert [one["prompt"] for one in read_metadata(Path("g.jpg"))["grid"]] == ["a cat", "a dog"]
    assert generate("--from-image", "g.jpg", *FAST)[0] == BAD_INPUT


def test_hints(generate: Run) -> None:
    """Each on one line of stderr, and the images are generated all the same."""
    prompts = ("astronaut", "(cat:1.5)", "<lora:x:1>")
    code, out, err = generate(*prompts, "-q", "-W", 24, "-H", 24, "--steps", 2, "--mask-mode", "soft")
    assert (code, len(out.split())) == (0, 3)
    assert all(line.startswith("canvax: warning: ") for line in err.splitlines())
    for named in ('"astronaut (cat:1.5) <lora:x:1>"', "astronaut, lora", "24 x 24", "--mask-mode", "(cat:1.5), which"):
        assert named in err


def test_emoji_name_their_concepts(generate: Run, run: Run) -> None:
    _, out, err = generate("\U0001f680", "a rocket", "-s", 1, "--json", *FAST)
    assert err == ""
    files = json.loads(out)["files"]
    assert len(files) == 2
    listed = run("info", "emoji", "--prompts")[1].splitlines()
    assert len(listed) == 1015
    assert {"rocket", "red apple"} <= set(listed)
    err = generate("a rokcet", "-s", 1, *FAST)[2]
    assert "rokcet" in err
    assert "rocket" in err  # the nearest word


# Bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("a \udcff b",), "prompt"),
        (("--prompt-file", "broken.txt"), "broken.txt, line 2"),
        (("--prompt-file", "field.txt"), "steps"),
        (("--prompt-file", "a1111.txt"), "line 2"),
        (("--prompt-file", "sizes.txt", "--grid"), "--grid"),
        (("--from-image", "plain.png"), "plain.png"),
        (("--from-image", "grid.png"), "grid.png"),
    ],
    ids=lambda value: " ".join(map(ascii, value)) if isinstance(value, tuple) else "",
)
def test_bad_input(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str) -> None:
    monkeypatch.setattr(canvax, "load", lambda *_, **__: pytest.fail("bad input was found too late"))
    files = {
        "broken.txt": b'a cat\n{"prompt": ',
        "field.txt": b'{"prompt": "a", "stesp": 3}',
        "sizes.txt": b'{"prompt": "a", "width": 64}\na cat',
        "a1111.txt": b"a cat\r\nNegative prompt: ugly\r\nSteps: 20, Sampler: Euler a",
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_bytes(content)
    Image.new("RGB", (8, 8)).save("plain.png")
    save_image("grid.png", Image.new("RGB", (8, 8)), {"grid": [{"prompt": "a"}]})
    before = sorted(os.listdir())
    code, out, err = run("generate", *arguments)
    assert (code, out) == (BAD_INPUT, "")
    assert named in err
    assert err.startswith("canvax: error: ")
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == before
    code, out, _ = run("generate", *arguments, "--json")
    assert code == BAD_INPUT
    assert named in json.loads(out)["error"]["message"]


def test_bad_models(run: Run) -> None:
    Path("model.ckpt").write_bytes(b"PK\x03\x04")
    shutil.copytree(BUNDLED["emoji"], "damaged")
    weights = Path("damaged/unet/diffusion_pytorch_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    shutil.copytree(BUNDLED["emoji"], "partial", ignore=shutil.ignore_patterns("vae"))
    Path("bare").mkdir()
    before = sorted(os.listdir())
    for model, said in (
        ("./none", "./none"),
        ("emojy", "emoji"),
        ("model.ckpt", "pickles"),
        ("damaged", "damaged or incomplete"),
        ("partial", "vae"),
        ("bare", "model_index.json"),
        ("partial/unet", "is a network alone (UNet2DConditionModel), not a model; pass the folder of the whole model"),
    ):
        code, out, err = run("generate", "a cat", "-m", model, "-q")
        assert (code, out) == (BAD_INPUT if model in ("./none", "emojy") else FAILED, ""), model
        assert said in err
        assert err.startswith("canvax: error: ")
        assert err.count("canvax:") == 1
        if model not in ("damaged", "bare", "partial/unet"):  # info describes parts, and folders that are no models
            assert said in run("info", model)[2]
    assert sorted(os.listdir()) == before


# Other commands


def test_info_of_a_model(run: Run) -> None:
    code, out, err = run("info", "emoji")
    assert (code, err) == (0, "")
    for said in ("8,071,200", "UNet2DConditionModel", "64 x 64", "v_prediction", "DDIM (ddim)", "20 steps", "16.1 MB"):
        assert said in out
    report = json.loads(run("info", "emoji", "--json")[1])
    assert report["components"]["vae"]["stored"] == {"float16": 2574379}
    assert report["memory_bytes"]["float32"] == 4 * report["parameters"]
    unet = report["components"]["unet"]  # its arrays alone: a file may hold those of several components
    assert sum(unet["files"].values()) == 2 * unet["parameters"]


def test_info_names_what_is_not_used(run: Run) -> None:
    shutil.copytree(BUNDLED["emoji"], "model")
    index = json.loads(Path("model/model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    Path("model/model_index.json").write_text(json.dumps(index))
    assert "safety_checker: recognised, but not supported yet" in run("info", "model")[1]


def test_info_never_steers_the_terminal(run: Run) -> None:
    save_image("a.png", Image.new("RGB", (8, 8)), {"prompt": "a \x1b[2J b \u202e c", "canvax": "0.1.0"})
    out = run("info", "a.png")[1]
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert "\u202e" not in out


def test_info_of_a_folder(run: Run, tmp_path: Path) -> None:
    """Each file has a line; nothing is said of a file that is not so, and no pickle is opened."""

    def write(name: str, *names: str, width: int = 768, metadata: dict[str, str] | None = None) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({one: np.zeros((2, width), np.float16) for one in names}, tmp_path / name, metadata=metadata)

    to_k = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    write("m/xl.safetensors", to_k, "first_stage_model.a", "conditioner.embedders.0.transformer.a",
          "conditioner.embedders.1.model.a", width=2048)  # fmt: skip
    write("m/two.safetensors", to_k, "first_stage_model.a", "cond_stage_model.model.a", width=1024)
    write("m/pruned.safetensors", to_k)
    write("m/flux.safetensors", "double_blocks.0.a")
    write("m/vae.safetensors", "decoder.conv_in.weight", "encoder.conv_in.weight")
    lora = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight"
    write("m/sub/ink.safetensors", lora, width=2048)
    control = ("control_model.input_hint_block.0.weight", f"control_model.{to_k[22:]}")
    write("m/sub/control.safetensors", *control, width=1024)
    write("m/sub/wool.safetensors", "emb_params")
    write("m/sub/odd.safetensors", "x.y")
    (tmp_path / "m/old.ckpt").write_bytes(b"\x80\x02.")
    (tmp_path / "m/cut.safetensors").write_bytes(b"\x08")
    (tmp_path / "m/readme.txt").touch()
    (tmp_path / "m/edges").mkdir()
    (tmp_path / "m/edges/config.json").write_text('{"_class_name": "ControlNetModel", "cross_attention_dim": 768}')
    shutil.copytree(BUNDLED["emoji"], tmp_path / "m" / "toy")
    code, out, err = run("info", "m", "--json")
    assert (code, err) == (0, "")
    found = {row["file"]: (row["kind"], row["family"]) for row in json.loads(out)["files"]}
    assert found == {
        "m/cut.safetensors": ("damaged", None),
        "m/flux.safetensors": ("weights that canvax does not run", "FLUX"),
        "m/old.ckpt": ("a pickle, which is not opened", None),
        "m/pruned.safetensors": ("a model without an autoencoder and a text encoder", "Stable Diffusion 1.x"),
        "m/two.safetensors": ("a model", "Stable Diffusion 2.x"),
        "m/vae.safetensors": ("an autoencoder", None),
        "m/xl.safetensors": ("a model", "Stable Diffusion XL"),
        "m/edges": ("a ControlNet", "Stable Diffusion 1.x"),
        "m/sub/control.safetensors": ("a ControlNet", "Stable Diffusion 2.x"),
        "m/sub/ink.safetensors": ("a LoRA", "Stable Diffusion XL"),
        "m/sub/odd.safetensors": ("not recognised", None),
        "m/sub/wool.safetensors": ("a textual inversion", "Stable Diffusion 1.x"),
        "m/toy": ("a model", None),
    }
    code, out, _ = run("info", "m")
    assert code == 0
    listed, _, faults = out.partition("These files cannot be used:\n")
    assert len([line for line in listed.splitlines() if line]) == len(found) + 1
    assert [line.partition(":")[0] for line in faults.splitlines()] == [
        *("cut.safetensors", "flux.safetensors", "old.ckpt", "pruned.safetensors", "odd.safetensors"),
    ]
    assert run("info", "m", "--memory")[0] == BAD_INPUT
    assert run("info", "m", "--prompts")[0] == BAD_INPUT
    (tmp_path / "empty").mkdir()
    assert run("info", "empty")[0] == BAD_INPUT


@pytest.mark.parametrize(
    ("names", "kind", "flag"),
    [
        (("decoder.conv_in.weight", "encoder.conv_in.weight"), "an autoencoder", "--vae"),
        (("control_model.input_hint_block.0.weight",), "a ControlNet", "--controlnet"),
        (("image_proj.proj.weight", "ip_adapter.1.to_k_ip.weight"), "an IP-Adapter", "--ip-adapter"),
    ],
)
def test_info_of_a_part(run: Run, tmp_path: Path, names: tuple[str, ...], kind: str, flag: str) -> None:
    save_file({name: np.zeros((2, 768), np.float32) for name in names}, tmp_path / "a.safetensors")
    code, out, err = run("info", "a.safetensors", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["kind"], report["flag"]) == (kind, flag)
    assert report["bytes"] == len(names) * 2 * 768 * 4
    assert flag in run("info", "a.safetensors")[1]
    assert run("info", "a.safetensors", "--prompts")[0] == BAD_INPUT


@pytest.mark.parametrize(
    ("packages", "vendor", "platforms"),
    [
        (["libtpu"], "0x8086", "cpu"),
        (["libtpu"], "0x1ae0", None),  # a TPU
        (["libtpu", "jax_cuda13_plugin"], "0x8086", None),
        ([], "0x8086", None),
    ],
)
def test_libtpu_without_a_tpu_is_not_loaded(
    packages: list[str], vendor: str, platforms: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:00:00.0").mkdir()
    (tmp_path / "0000:00:00.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(cli, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(cli, "find_spec", lambda name: name in packages or None)
    monkeypatch.setenv("JAX_PLATFORMS", "")  # what was there comes back after the test
    monkeypatch.delenv("JAX_PLATFORMS")
    cli.without_missing_tpu()
    assert os.environ.get("JAX_PLATFORMS") == platforms


def test_a_pickle_is_refused_with_its_name(generate: Run, run: Run, tmp_path: Path) -> None:
    (tmp_path / "wool.pt").write_bytes(b"\x80\x02.")
    for code, _, err in (run("info", "wool.pt"), generate("a cat", "--lora", "wool.pt")):
        assert code != 0
        assert "canvax convert wool.pt wool.safetensors" in err


def test_a_folder_of_files_is_no_model(run: Run, tmp_path: Path) -> None:
    """It is not said to hold only the pickle that lies beside usable files, nor are local files to be fetched."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old.ckpt").write_bytes(b"\x80\x02.")
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "m" / "new.safetensors")
    code, _, err = run("generate", "a cat", "-m", "./m")
    assert code != 0
    assert "m/new.safetensors" in err
    assert "old.ckpt" not in err


def test_info_of_a_grid(run: Run) -> None:
    save_image("a.png", Image.new("RGB", (8, 8)), {"grid": [{"prompt": text, "canvax": "1"} for text in "ab"]})
    assert run("info", "a.png")[1].splitlines()[-2:] == ["canvax generate --prompt a", "canvax generate --prompt b"]


@pytest.mark.parametrize("command", ["compile", "serve", "ui", "bench", "info"])
def test_what_a_model_does_not_say_is_a_flag_of_each_command_that_opens_it(command: str) -> None:
    arguments = parse([command, "emoji", "--prediction-type", "v_prediction", "--zero-snr"])
    load = load_of(arguments, model="emoji", progress=False)
    assert load_with(arguments, load, weights=False).model.overrides == {
        "prediction_type": "v_prediction", "scheduler": ZERO_SNR,
    }  # fmt: skip


def test_an_adapter_brings_its_words() -> None:
    """They are not loaded once more; a revision cannot be named."""
    adapters = {"ink": {"file": "o/ink/ink.safetensors", "weight": 0.5, "revision": "v2"}}
    words = {"<ink>": "o/ink/ink.safetensors", "<wool>": "wool.safetensors"}
    found = again({"canvax": "1", "prompt": "a", "adapters": adapters, "embeddings": words})
    arguments = parse(shlex.split(found.command)[1:])
    assert (arguments.lora, arguments.embedding) == (["o/ink/ink.safetensors:0.5"], ["wool.safetensors"])
    assert len(found.losses) == 1


@pytest.mark.parametrize(
    ("words", "key", "names"),
    [(("samplers",), "samplers", [spec.label for spec in SAMPLERS]),
     (("samplers", "curves"), "curves", [curve.name for curve in CURVES])],
)  # fmt: skip
def test_samplers_and_curves(run: Run, words: tuple[str, ...], key: str, names: list[str]) -> None:
    out = run(*words)[1]
    assert all(name in out for name in names)
    assert len(json.loads(run(*words, "--json")[1])[key]) == len(names)
    assert run(*words[:1], "crves")[0] == run(*words, "karras")[0] == BAD_INPUT


def test_help_and_version(run: Run) -> None:
    assert run("--version")[1].startswith(f"canvax {canvax.__version__}, jax ")
    code, out, _ = run("help", "generate")
    assert code == 0
    assert "examples:" in out
    assert all(f"--{name.replace('_', '-')}" in out for name in SETTINGS if name != "num_images_per_prompt")
    assert "examples:" in run()[1]
    assert "did you mean: canvax generate 'a cat'?" in run("a cat")[2]
    assert "did you mean: canvax generate?" in run("gen")[2]
    assert "did you mean" in run("info", "--jsn", "x")[2]
    assert "is not expected" in run("info", "x", "y")[2]


# Pieces


def test_words_survive_the_shell() -> None:
    words = ["plain", "two words", "it's", "$HOME `x`", "a\nb", "\x1b[2J", "\\n 'q'\n", "café 🍎", ""]
    assert shell_words(command_line(words)) == words


def test_ordinary_text_is_left_alone() -> None:
    text = "café 日本語 👩‍👩‍👧 नमस्ते\n\ttab"
    assert clean(text) == text


def test_no_negative_prompt_is_not_an_empty_one() -> None:
    """SDXL treats them differently, so the command and the PNG must keep them apart."""
    for said, want in (((), None), (("--negative-prompt", ""), ""), (("-N", "red"), "red")):
        (image,), _ = gather(parse(["generate", "a cat", "-s", "1", *said]))
        assert image.negative_prompt == want
        command = again({"canvax": "1", "prompt": "a cat", "negative_prompt": want}).command
        words = shlex.split(command)
        assert ("--negative-prompt" in words) == (want is not None)
        (other,), _ = gather(parse([*words[1:], "-s", "1"]))
        assert other.negative_prompt == want


def test_wide_tables_fit_the_terminal() -> None:
    rows = [("name", "when"), ("a", "one two three four five six seven eight nine ten")]
    assert table(rows) == table(rows, fold=80) == ["name  when", f"a     {rows[1][1]}"]
    assert table(rows, fold=40) == ["name  when", "a     one two three four five six seven", "      eight nine ten"]
    below = ["name", "    when", "a", "    one two three four", "    five six seven eight", "    nine ten"]
    assert table(rows, fold=24) == below


@pytest.mark.weekly
def test_the_variant_is_kept(run: Run, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED["emoji"], tmp_path / "halves")
    for weights in (tmp_path / "halves").glob("*/*.safetensors"):
        weights.rename(weights.with_suffix(".fp16.safetensors"))
    run("generate", "a cat", "-m", "./halves", "--variant", "fp16", "-o", "a.png", "-s", 1, *FAST)
    assert "--variant fp16" in again(read_metadata(Path("a.png"))).command
    code, _, err = run("generate", "--from-image", "a.png", "-o", "b.png", "-q")
    assert (code, err) == (0, "")
    assert (pixels("a.png") == pixels("b.png")).all()


def keywords_of_load(run: Run, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, dict[str, Any]]:
    """What ``canvax generate`` hands to ``canvax.load``: the model and the keywords."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def load(model: str, **keywords: Any) -> None:
        calls.append((model, keywords))
        raise canvax.CheckpointError("far enough")

    monkeypatch.setattr(canvax, "load", load)
    code, _, err = run("generate", *arguments)
    assert (code, "far enough" in err) == (FAILED, True)
    ((model, keywords),) = calls
    keywords["mesh"] = dict(keywords["mesh"].shape)  # made before it is loaded, for several processes
    return model, keywords


FLAGS = {
    "dtype": "bfloat16", "quantize": "int8", "precision": "highest", "safety_checker": True,
    "prediction_type": "v_prediction", "scheduler": ZERO_SNR, "vae": "o/vae", "text_encoder": "o/text",
    "text_encoder_2": "o/t5",
    "tokenizer": "o/words", "revision": "v2", "variant": "fp16", "cache_dir": "files", "local_files_only": True,
    "token": "hf_x", "controlnet": ["o/canny"], "mesh": "data=2,model=2", "offload": True,
}  # fmt: skip


def test_every_flag_of_the_model_reaches_load(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert FLAGS.keys() == declared(Load).keys() - {"model", "progress"}
    call = ("a cat", "-m", "someone/model", "--quiet")
    usual = {"mesh": {"data": 8, "model": 1}}
    assert keywords_of_load(run, monkeypatch, *call) == ("someone/model", usual | {"progress": False})
    assert keywords_of_load(run, monkeypatch, *call[:-1]) == ("someone/model", usual)
    words = [word for name, value in FLAGS.items() for word in as_flags(declared(Load)[name], value)]
    given = FLAGS | {"mesh": {"data": 2, "model": 2}, "progress": False}
    assert keywords_of_load(run, monkeypatch, *call, *words) == ("someone/model", given)


@pytest.mark.parametrize("command", ["compile", "bench", "plan", "generate", "sheet", "batch"])
def test_commands_spell_the_model_size_and_batch_alike(command: str) -> None:
    rest = {"plan": ["--target", "gpu-l4"], "batch": ["rows.jsonl", "-o", "images"]}.get(command, [])
    arguments = parse([command, *rest, "-m", "owner/name", "--batch", "2", "--size", "128x64"])
    assert arguments.model == "owner/name"
    assert 2 in (vars(arguments).get("batch"), vars(arguments).get("batch_size")) or arguments.batch == [2]
    assert arguments.size == ["128x64"] if command == "compile" else (arguments.width, arguments.height) == (128, 64)
    if command in ("compile", "bench", "plan"):
        assert parse([command, "sdxl", *rest]).model == "sdxl"
        assert parse([command, *rest]).model == "emoji"


@pytest.mark.parametrize("command", ["compile", "bench", "plan", "info"])
def test_sizes_and_batches_have_the_same_flags_everywhere(command: str) -> None:
    words = [command, "emoji", *(["--target", "gpu-l4"] if command == "plan" else [])]
    for batch in ("-b", "--batch", "--batch-size"):
        arguments = parse([*words, batch, "2", "-W", "128", "--height", "64"])
        assert (arguments.batch, arguments.width, arguments.height) in ((2, 128, 64), ([2], 128, 64))
    arguments = parse([*words, "--size", "128x64"])
    assert command == "compile" or (arguments.width, arguments.height) == (128, 64)
    for flag in ("--width=12", "--size=12x64"):
        assert main([*words, *(["--memory"] if command == "info" else []), flag]) == BAD_INPUT


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("generate", ()), ("sheet", ()), ("batch", ()), ("upscale", ()), ("serve", ()), ("ui", ()),
        ("compile", ("safety_checker",)), ("bench", ("safety_checker", "controlnet")),
    ],
)  # fmt: skip
def test_commands_that_open_a_model_open_it_alike(command: str, without: tuple[str, ...]) -> None:
    """Those that are left out change nothing there: programs are the same, and nothing is looked at."""
    words = [word for name, value in FLAGS.items() if name not in without
             for word in as_flags(declared(Load)[name], value)]  # fmt: skip
    needed = {"batch": ["rows.txt", "-o", "out"]}
    wanted = Load(**{name: value for name, value in FLAGS.items() if name not in without}, model="someone/model")
    arguments = parse([command, *needed.get(command, ["someone/model"]), *words])
    assert load_of(arguments, model="someone/model", progress=True) == wanted


def test_the_model_of_an_image_reaches_load(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"revision": "v2", "variant": "fp16", "dtype": "bfloat16", "quantize": "int8"}
    metadata = {"prompt": "a cat", "canvax": "1", "model": "someone/model", **recorded}
    save_image("a.png", Image.new("RGB", (8, 8)), metadata)
    model, keywords = keywords_of_load(run, monkeypatch, "--from-image", "a.png", "-q")
    assert (model, {name: keywords[name] for name in recorded}) == ("someone/model", recorded)
    _, keywords = keywords_of_load(run, monkeypatch, "--from-image", "a.png", "-q", "--dtype", "float32")
    assert {name: keywords[name] for name in recorded} == recorded | {"dtype": "float32"}


def a1111(path: str, prompt: str, more: str = ", Model: mine", *, negative: str = "") -> None:
    """An image whose text is that of A1111."""
    text = f"{prompt}\n{negative and f'Negative prompt: {negative}'}\n".replace("\n\n", "\n")
    settings = "Steps: 3, Sampler: Euler a, Schedule type: Karras, CFG scale: 3, Seed: 5, Size: 64x64"
    info = PngInfo()
    info.add_text("parameters", f"{text}{settings}{more}, Version: v1.10.1")
    Image.new("RGB", (64, 64)).save(path, pnginfo=info)


@pytest.mark.parametrize(
    ("prompt", "more", "options"),
    [
        ("a (red:1.8) fox, [cat|dog]", "", {"prompt_syntax": "a1111"}),
        ("-a 'fox' AND a cat:0.5\nBREAK (sky)", ", Clip skip: 2, RNG: CPU, Eta: 0.5", {"clip_skip": 1, "eta": 0.5}),
        (
            "a fox",
            ", Variation seed: 9, Variation seed strength: 0.5, Seed resize from: 32x48",
            {"variation_seed": 9, "variation_strength": 0.5, "seed_size": (48, 32)},
        ),
        (
            "a fox",
            ", Denoising strength: 0.6, Hires upscale: 1.5, Hires steps: 2, Hires upscaler: Latent, Hires sampler: "
            'Euler, Hires prompt: "a (cat:1.3), red"',
            {"hires": 1.5, "hires_method": "latent", "hires_strength": 0.6, "hires_steps": 2,
             "hires_sampler": "Euler", "hires_prompt": "a (cat:1.3), red"},
        ),
    ],
    ids=["weights", "clip skip", "variation", "hires"],
)  # fmt: skip
def test_info_and_from_image_agree_on_an_image_of_a1111(
    run: Run, prompt: str, more: str, options: dict[str, Any]
) -> None:
    a1111("a.png", prompt, more, negative="(blur:0.5), bad")
    *_, line = run("info", "a.png")[1].splitlines()
    program, command, *words = shell_words(line)
    assert (program, command) == ("canvax", "generate")
    assert words[words.index("--model") + 1] == "MODEL"
    words[words.index("MODEL")] = "emoji"
    (image,), model = gather(parse(["generate", "--from-image", "a.png", "--model", "emoji"]))
    (other,), same = gather(parse(["generate", *words]))
    assert (vars(other), same) == (vars(image), model)
    assert {name: getattr(image.options, name) for name in options} == options


def test_an_upscaler_that_canvax_lacks_is_named(run: Run) -> None:
    """The second pass is made by the means that canvax has, and what made the first image larger is still told."""
    a1111("a.png", "a fox", ", Denoising strength: 0.6, Hires upscale: 2, Hires upscaler: R-ESRGAN 4x+")
    metadata = read_metadata(Path("a.png"))
    assert metadata["options"]["hires"] == 2
    assert metadata["other"]["Hires upscaler"] == "R-ESRGAN 4x+"


@pytest.mark.parametrize("model", ["", ", Model: mine"])
def test_an_image_of_others_needs_its_model_named(generate: Run, model: str) -> None:
    a1111("a.png", "a fox", model)
    code, out, err = generate("--from-image", "a.png", "-q")
    assert (code, out) == (BAD_INPUT, "")
    assert "--model" in err
    assert not os.path.exists("out")
    assert generate("--from-image", "a.png", "--model", "emoji", "-q", "--steps", 1)[0] == 0


def test_an_empty_negative_prompt_of_others_is_none(generate: Run) -> None:
    info = PngInfo()
    info.add_text("parameters", "a cat\nNegative prompt:\nSteps: 2, Sampler: Euler, CFG scale: 2, Seed: 1, Size: 64x64")
    Image.new("RGB", (64, 64)).save("a.png", pnginfo=info)
    (image,), _ = gather(parse(["generate", "--from-image", "a.png", "-m", "emoji"]))
    assert image.negative_prompt is None


ODD_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "options no dict": ({"options": "x"}, "canvax generate --prompt 'a cat'"),
    "prompt null": ({"prompt": None}, "canvax generate"),
    "seed a text": ({"seed": "; rm -r ~"}, "canvax generate --prompt 'a cat' --seed '; rm -r ~'"),
    "lists": (
        {"options": {"sigmas": [3.0, 0], "original_size": [8, 9]}},
        "canvax generate --prompt 'a cat' --sigmas 3.0,0 --original-size 8 9",
    ),
}
"""What a PNG's own text may hold, and the command to generate it again that is shown."""


@pytest.mark.parametrize("name", ODD_METADATA)
def test_odd_metadata(run: Run, name: str) -> None:
    metadata, command = ODD_METADATA[name]
    info = PngInfo()
    info.add_text("canvax", json.dumps({"canvax": "1", "prompt": "a cat", **metadata}))
    Image.new("RGB", (8, 8)).save("odd_one.png", pnginfo=info)
    code, out, err = run("info", "odd_one.png")
    assert (code, out.splitlines()[-1:], err) == (0, [command], "")
    assert name != "lists" or "3.0, 0\n" in out


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--prompt-file", "-"]) == BAD_INPUT
    assert "--prompt-file" in capsys.readouterr().err


def test_a_folder_of_loras_that_no_prompt_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prompt, hinted in (("a lemon", True), ("a lemon <lora:x>", False)):
        main(["generate", prompt, "-m", "nope", "--lora-dir", str(tmp_path)])
        assert ("warning: --lora-dir" in capsys.readouterr().err) == hinted
