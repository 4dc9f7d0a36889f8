"""A folder of models, as A1111 and ComfyUI lay it out: files are called by their names."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import canvax
from canvax.cli import main
from canvax.cli.again import again, recorded_model
from canvax.cli.arguments import parse
from canvax.cli.images import gather, in_usual_syntax
from canvax.cli.info import folder_info
from canvax.cli.loading import load_of, load_with
from canvax.cli.serve import first_model
from canvax.errors import CheckpointError, InputError
from canvax.families.known import PRESETS
from canvax.families.local_models import local_models
from canvax.images.metadata import read_metadata, save_image
from canvax.params import flatten
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Job, JobRequest, Rejected, State, Status
from canvax.server.metrics import Metrics
from canvax.weights.data_folder import (
    VARIABLE,
    by_name,
    data_folder,
    files,
    find_named,
    lora_folder,
    using,
    usual_syntax,
)
from canvax.weights.location import BUNDLED, Location
from canvax.weights.open import open_files
from tests.support.adapter_files import write
from tests.support.serving import until

LORA = {"lora_unet_mid_block.lora_down.weight": np.zeros((1, 4), np.float32)}
VAE = {"encoder.conv_in.weight": np.zeros(1, np.float32), "decoder.conv_in.weight": np.zeros(1, np.float32)}


@pytest.fixture
def folder(tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two layouts in one: A1111's names and ComfyUI's, beside programs that are not searched."""
    files = {
        "models/Stable-diffusion/sd15/deliberate_v2.safetensors": {"model.diffusion_model.x": np.zeros(1, np.float32)},
        "models/VAE/ink.safetensors": VAE,
        "models/Lora/style/ink.safetensors": LORA,
        "models/Lora/twice.safetensors": LORA,
        "models/Lora/style/twice.safetensors": LORA,
        "venv/lib/deliberate_v2.safetensors": LORA,
        "embeddings/wool.safetensors": {"wool": np.zeros((1, 4), np.float32)},
    }
    for name, arrays in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, arrays)
    (tmp_path / "models/checkpoints").mkdir()
    (tmp_path / "models/checkpoints/tiny").symlink_to(small_folder)
    (tmp_path / "models/checkpoints/old.ckpt").write_bytes(b"")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "argument", "path"),
    [
        ("deliberate_v2", "model", "models/Stable-diffusion/sd15/deliberate_v2.safetensors"),
        ("deliberate_v2.safetensors", "model", "models/Stable-diffusion/sd15/deliberate_v2.safetensors"),
        ("tiny", "model", "models/checkpoints/tiny"),
        ("old", "model", "models/checkpoints/old.ckpt"),
        ("ink", "vae", "models/VAE/ink.safetensors"),
        ("ink", "lora", "models/Lora/style/ink.safetensors"),
        ("ink", "source", "models/Lora/style/ink.safetensors"),
        ("wool", "embedding", "embeddings/wool.safetensors"),
        ("unet", "model", None),  # a part of a model in the diffusers layout
        ("style/ink", "lora", "models/Lora/style/ink.safetensors"),
        ("models/Lora/style/ink.safetensors", "lora", "models/Lora/style/ink.safetensors"),
        ("e/ink", "lora", None),
        ("../models/Lora/style/ink", "lora", None),
        ("owner/ink", "lora", None),  # which may be a Hub id
        ("Lora", "lora", None),
        ("sd15_deliberate_v2", "model", "models/Stable-diffusion/sd15/deliberate_v2.safetensors"),  # of older A1111
        ("sd15_deliberate_v2.safetensors", "model", "models/Stable-diffusion/sd15/deliberate_v2.safetensors"),
        ("5_deliberate_v2", "model", None),
    ],
)
def test_names(folder: Path, name: str, argument: str, path: str | None) -> None:
    assert find_named(name, argument) == (None if path is None else folder / path)


def test_a_name_of_two_files_is_refused(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        Location("twice", argument="lora").local()
    assert (caught.value.argument, caught.value.value) == ("lora", "twice")


def test_files_of_one_name_have_their_folders_before_it(folder: Path) -> None:
    names = by_name([part.path for part in files()])
    assert {"Lora/twice", "style/twice", "deliberate_v2", "ink"} - names.keys() == {"ink"}
    assert {"VAE/ink", "style/ink"} < names.keys()
    for name, path in names.items():
        assert find_named(name, "model") == path, name
    with pytest.raises(InputError) as caught:
        find_named("twice", "lora")
    for name in ("Lora/twice", "style/twice"):
        assert name in caught.value.cure
        assert find_named(name, "lora") == names[name]


def test_the_syntax_of_prompts_is_that_of_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usual_syntax() == "a1111"
    (folder / "models/Stable-diffusion").rename(folder / "models/old")
    assert usual_syntax() == "comfy"
    monkeypatch.delenv(VARIABLE)
    assert usual_syntax() == "plain"


def test_the_command_line_reads_prompts_as_the_program_of_the_folder(
    folder: Path, small: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def syntax(*words: str, model: Any = small.model) -> str:
        arguments = parse(["generate", "a (cat:1.2)", *words])
        calls, _ = gather(arguments)
        return in_usual_syntax(calls, model, arguments)[0].options.prompt_syntax

    assert syntax() == "a1111"
    assert "--prompt-syntax plain" in capsys.readouterr().err
    assert syntax("--prompt-syntax", "plain") == "plain"
    assert syntax("--prompt-syntax", "compel") == "compel"
    assert syntax(model=replace(small.model, networks=PRESETS["z-image"])) == "plain"  # which reads no weights
    made = {"prompt": "a (cat:1.2)", "seed": 1, "model": "tiny", "canvax": "0.1.0"}
    assert "--prompt-syntax plain" in again(made).command
    assert "--prompt-syntax a1111" in again(made | {"options": {"prompt_syntax": "a1111"}}).command
    save_image(Path("a.png"), Image.new("RGB", (8, 8)), made)
    assert syntax("--from-image", "a.png") == "plain"
    monkeypatch.delenv(VARIABLE)
    assert syntax() == "plain"
    assert "syntax" not in again(made).command


def test_the_model_of_an_image_is_found_by_its_name(
    folder: Path, small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image names a file without its folder. Where none or several have the name, the user names it."""
    path = tmp_path / "a.png"
    save_image(path, Image.new("RGB", (8, 8)), {"prompt": "a cat", "seed": 1, "model": "./tiny", "canvax": "0.1.0"})

    def info() -> str:
        assert main(["info", str(path)]) == 0
        return capsys.readouterr().out

    assert "--model tiny" in info()
    (folder / "models/Stable-diffusion/tiny").symlink_to(small_folder)
    told = info()
    assert "--model MODEL" in told
    assert main(["generate", "--from-image", str(path), "-o", str(tmp_path / "b.png")]) == 2
    refused = capsys.readouterr().err
    assert "--model" in refused
    for twin in ("checkpoints/tiny", "Stable-diffusion/tiny"):
        assert twin in told
        assert twin in refused
    Path("tiny").symlink_to(small_folder)
    assert "--model ./tiny" in info()


def test_the_command_names_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a flag named it and something of the image is there."""
    monkeypatch.delenv(VARIABLE)

    def command(**metadata: Any) -> list[str]:
        made = {"prompt": "a cat", "seed": 1, "model": "emoji", "canvax": "0.1.0", **metadata}
        save_image(tmp_path / "a.png", Image.new("RGB", (8, 8)), made, overwrite=True)
        assert main(["info", str(tmp_path / "a.png"), "--data-dir", str(folder), "--json"]) == 0
        return shlex.split(json.loads(capsys.readouterr().out)["commands"][0])

    ink = folder / "models/Lora/style/ink.safetensors"
    for named, words in (
        ({"model": "sd15/deliberate_v2"}, ["--model", "sd15/deliberate_v2"]),
        ({"model": "./tiny"}, ["--model", "tiny"]),
        ({"vae": str(folder / "models/VAE/ink.safetensors")}, ["--vae", "ink"]),
        ({"adapters": {"ink": {"file": str(ink), "weight": 0.8}}}, ["--lora", "ink:0.8"]),
        ({"adapters": {"two": {"file": str(ink.with_name("twice.safetensors")), "weight": 1}}},
         ["--lora", "./twice.safetensors:1"]),
    ):  # fmt: skip
        line = command(**named)
        assert words[1] == line[line.index(words[0]) + 1]
        assert ("--data-dir" in line) == (words[1][0] != ".")
        if "--data-dir" in line:
            assert parse(line[1:]).data_dir == str(folder)
    assert "--data-dir" not in command()


def test_a_bare_name_leads_to_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for argument in ("model", "vae"):
        with pytest.raises(InputError) as caught:
            Location("deliberate_v2", argument=argument).local()
        assert VARIABLE in caught.value.cure


def test_files_that_cannot_be_used(folder: Path, small_folder: Path) -> None:
    (folder / "models/checkpoints/damaged.safetensors").write_bytes(b"\0" * 20)
    (folder / "models/checkpoints/page.safetensors").write_bytes(b"<!DOCTYPE html><html></html>")
    upscalers = ("ESRGAN/sharp.pth", "ESRGAN/4x.safetensors", "4x-UltraSharp.pth", "RealESRGAN_x4plus.pth")
    (folder / "models/ESRGAN").mkdir()
    for name in upscalers:
        write(folder / "models" / name, {"model.0.weight": np.zeros((1, 1, 3, 3), np.float32)})
    write(folder / "models/checkpoints/4x_ink.safetensors", LORA)  # whose arrays say what it is
    left_out = local_models().left_out
    for name in upscalers:
        assert left_out.pop(Path(name).name) == "an upscaler, which canvax does not use"
    assert "web page" in left_out.pop("page.safetensors")
    assert left_out.keys() == {"old.ckpt", "deliberate_v2.safetensors", "damaged.safetensors"}
    assert f"canvax convert {folder / 'models/checkpoints/old.ckpt'}" in left_out["old.ckpt"]
    assert "autoencoder" in left_out["deliberate_v2.safetensors"]  # which it lacks


def test_a_server_offers_models_of_one_name_by_their_folders(folder: Path, small_folder: Path) -> None:
    (folder / "models/checkpoints/other").symlink_to(small_folder)
    assert set(local_models().models) == {"other", "tiny"}
    (folder / "models/Stable-diffusion/tiny").symlink_to(small_folder)
    assert set(local_models().models) == {"other", "checkpoints/tiny", "Stable-diffusion/tiny"}


def test_files_beside_a_model_leave_its_name(folder: Path) -> None:
    """Previews and pickles, of which those with a safetensors file are not unusable."""
    for name in ("checkpoints/tiny.png", "checkpoints/tiny.preview.png", "checkpoints/tiny.ckpt", "VAE/ink.pt"):
        (folder / "models" / name).write_bytes(b"")
    models, left_out = local_models()
    assert models.keys() == {"tiny"}
    assert {name for name in left_out if not name.startswith("deliberate")} == {"old.ckpt", "tiny.ckpt"}
    faults = {Path(row["file"]).name for row in folder_info(folder / "models")["files"] if row["fault"]}
    assert faults == left_out.keys()


def test_a_pickle_is_converted_unless_it_is_an_upscaler(folder: Path) -> None:
    (folder / "models/4x-UltraSharp.pth").write_bytes(b"")
    for name, advice in (("old", True), ("4x-UltraSharp", False)):
        with pytest.raises(CheckpointError) as caught:
            open_files(Location(name))
        assert ("canvax convert" in str(caught.value)) == advice


def test_hidden_folders_are_not_searched(folder: Path) -> None:
    for hidden in (".trash", "VAE/.ipynb_checkpoints"):
        (folder / "models" / hidden).mkdir()
        write(folder / "models" / hidden / "gone.safetensors", VAE)
    assert find_named("gone", "vae") is None


@pytest.mark.parametrize("before", [None, "before"])
def test_the_folder_of_a_command_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    for name in ("before", "flag"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv(VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(VARIABLE, str(tmp_path / before))
    with using(str(tmp_path / "flag")):
        assert data_folder() == tmp_path / "flag"
    assert data_folder() == (tmp_path / before if before else None)


@pytest.mark.parametrize(
    ("name", "meant"), [("deliberate", "deliberate_v2"), ("wol", "wool"), ("nothing like these", "lists the files")]
)
def test_a_misspelt_name_is_answered(folder: Path, name: str, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        Location(name, argument="model").local()
    assert meant in caught.value.cure


def test_what_is_here_comes_first(folder: Path) -> None:
    Path("tiny").mkdir()
    assert Location("tiny").local() == Path("tiny")
    assert Location("emoji").local() != folder


def test_without_models_folder_all_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ink.safetensors", LORA)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "Lora").mkdir()  # without files it costs a server no places
    assert find_named("ink", "lora") == tmp_path / "ink.safetensors"
    assert lora_folder() is None


def test_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_named("ink", "lora") is None
    assert main(["generate", "a cat", "--data-dir", str(tmp_path / "gone")]) == 2
    assert "--data-dir" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_finds_them(
    folder: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE)
    command = ["generate", "a cat", "--steps", "2", "--seed", "1", "--quiet", "--data-dir", str(folder)]
    assert main([*command, "--model", "tiny", "--output", "named.png"]) == 0
    assert main([*command, "--model", str(small_folder), "--output", "path.png"]) == 0
    assert main(["info", "tiny", "--data-dir", str(folder)]) == 0
    assert "Pipeline" in capsys.readouterr().out
    named, path = (Image.open(file).tobytes() for file in ("named.png", "path.png"))
    assert named == path
    assert read_metadata("named.png")["options"]["prompt_syntax"] == "a1111"


def test_prompts_find_loras(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lora_folder() == folder / "models/Lora"
    command = ["generate", "a cat <lora:gone:1>", "--model", "tiny", "--steps", "1", "--output", "x.png"]
    assert main(command) == 2
    assert "gone" in capsys.readouterr().err


def test_a_server_begins_with_the_last_model_else_the_smallest(folder: Path, tmp_path: Path) -> None:
    for name, size in (("aaa", 0), ("bbb", 30), ("ccc", 20)):  # the first by name has no weights
        (folder / "models/checkpoints" / name / "unet").mkdir(parents=True)
        index = folder / "models/checkpoints" / name / "model_index.json"
        index.write_text('{"_class_name": "StableDiffusionPipeline"}')
        if size:
            (index.parent / "unet/model.safetensors").write_bytes(b"0" * size)
    offered = local_models().models
    assert [*offered][:3] == ["aaa", "bbb", "ccc"]
    output = tmp_path / "out"
    output.mkdir()
    assert first_model(offered, None)[0] == first_model(offered, output)[0] == ["ccc"]
    for number, model in enumerate(("aaa", "gone")):  # the newest is of a model that is not here
        save_image(output / f"{number}.png", Image.new("RGB", (8, 8)), {"prompt": "a cat", "model": model})
    assert first_model(offered, output)[0] == ["aaa"]


@pytest.mark.slow
def test_a_server_loads_the_others_when_asked(
    folder: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    tell = Job.tell
    monkeypatch.setattr(Job, "tell", lambda job, event: (waits.append(job.waits_for), tell(job, event))[1])
    (folder / "models/Stable-diffusion/sd15/deliberate_v2.safetensors").unlink()
    (folder / "models/checkpoints/broken").mkdir()
    (folder / "models/checkpoints/broken/model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    (folder / "models/checkpoints/emoji-copy").symlink_to(BUNDLED["emoji"])
    assert set(local_models().models) == {"tiny", "broken", "emoji-copy"}
    arguments = parse(["serve"])

    def load(name: str, **keywords: Any) -> Any:
        weights = keywords.pop("weights", True)
        return load_with(arguments, load_of(arguments, model=name, **keywords), weights=weights)

    spoken: list[str] = []
    settings = EngineSettings(on_request=("broken", "tiny"), memory=1 << 30)
    engine = ImageEngine(["emoji"], settings, Metrics(), load, say=spoken.append)
    engine.start()
    try:
        until(lambda: bool(engine._models.cards), 300)
        assert [card.id for card in engine.models()] == ["emoji", "tiny"]
        assert engine.starting  # they can be chosen before the first is loaded
        until(lambda: engine.state is not State.STARTING, 300)
        assert [card.id for card in engine.models()] == ["emoji", "tiny"]
        assert any(text.startswith("broken is left out") for text in spoken)
        assert "reading tiny" not in spoken
        with pytest.raises(Rejected) as refused:
            engine.submit(JobRequest("a cat", model="tiny", width=128, height=64))
        assert refused.value.code == "size_not_ready"
        job = engine.submit(JobRequest("a cat", model="tiny", seed=1, steps=2))
        until(lambda: job.status.over, 300)
        assert job.status is Status.DONE
        assert "reading tiny" in spoken
        assert "loading tiny" in waits
        assert any(text.startswith("compiling, 1 of ") for text in waits)
        assert not job.waits_for
        alone = canvax.load(small_folder, progress=False)("a cat", seed=1, num_inference_steps=2)
        with Image.open(io.BytesIO(job.pictures[0].data or b"")) as image:
            np.testing.assert_allclose(np.asarray(image, np.int16), np.asarray(alone[0], np.int16), atol=1)
    finally:
        engine.close()


@pytest.mark.parametrize(("vae", "found"), [("ink.safetensors", "ink"), ("gone.ckpt", None), ("Automatic", None)])
def test_an_image_of_a1111_names_its_vae(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], vae: str, found: str | None
) -> None:
    text = f"a fox\nSteps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64, Model: tiny, VAE: {vae}"
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png", pnginfo=info)
    _, source = gather(parse(["generate", "--from-image", str(tmp_path / "a.png")]))
    assert (source.model, source.vae) == ("tiny", found)
    assert main(["info", str(tmp_path / "a.png"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (f"--vae {found}" in told["commands"][0]) == (found is not None)
    assert [clause for clause in told["losses"][0] if "gone" in clause] == (
        [] if found or vae == "Automatic" else [ANY]
    )


@pytest.mark.parametrize(
    ("tag", "flags", "loras"),
    [
        ("<lora:ink:0.8>", [], ["ink:0.8"]),
        ("<lora:ink>", [], ["ink:1.0"]),
        ("<lora:ink:0.8>", ["--lora", "ink.safetensors:0.3"], ["ink.safetensors:0.3"]),
        ("<lora:ink:0.8>", ["--lora", "style/twice"], ["style/twice", "ink:0.8"]),
        ("<lora:twice:0.8>", [], []),  # two files
        ("<lora:deliberate_v2:0.8>", [], []),  # a model
        ("<lora:../Lora/style/ink:0.8>", [], []),
    ],
)
def test_an_image_of_a1111_names_its_loras(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tag: str, flags: list[str], loras: list[str]
) -> None:
    info = PngInfo()
    settings = "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64, Model: tiny"
    info.add_text("parameters", f"a fox {tag}\n{settings}")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png", pnginfo=info)
    arguments = parse(["generate", "--from-image", str(tmp_path / "a.png"), *flags])
    ((image,), _), loaded = gather(arguments), [lora for lora in loras if lora not in flags]
    assert (image.prompt, arguments.lora) == ("a fox", loras)
    said = capsys.readouterr().err
    assert all(f"--lora {lora}" in said for lora in loaded)
    assert (tag in said) == (not loras)
    assert main(["info", str(tmp_path / "a.png")]) == 0
    *told, command = capsys.readouterr().out.splitlines()
    assert all(f"--lora {lora}" in command for lora in loaded)
    assert ("--lora" in command) == bool(loras)
    assert any(tag in line or "takes one number" in line for line in told) == (not loras)


def test_an_image_of_a1111_has_a_lora_with_two_strengths(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tag is in the prompt, since --lora takes one number; with a prompt of the user it is reported."""
    info, tag = PngInfo(), "<lora:ink:0.5:0.8>"
    settings = "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64, Model: tiny"
    info.add_text("parameters", f"a fox {tag} <lora:gone:0.5:0.8>\n{settings}, Module 1: ae")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png", pnginfo=info)
    for words, prompt in (([], f"a fox {tag}"), (["a cat"], "a cat")):
        ((image,), _) = gather(parse(["generate", *words, "--from-image", str(tmp_path / "a.png")]))
        assert image.prompt == prompt
        warned = capsys.readouterr().err
        assert ("gone" in warned, tag in warned) == (True, bool(words))
    assert main(["info", str(tmp_path / "a.png"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["losses"], report["left_out"]) == ([[]], [["Module 1: ae"]])
    assert tag in report["commands"][0]
    assert "gone" not in report["commands"][0]


@pytest.mark.parametrize(("file", "found"), [("ink", True), ("./ink.safetensors", True), ("./gone.safetensors", False)])
def test_an_image_of_canvax_names_its_loras(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, found: bool
) -> None:
    adapters = {"it": {"file": file, "weight": 0.5}}
    recorded = {"prompt": "a cat", "seed": 1, "model": "tiny", "canvax": "0.1.0", "adapters": adapters}
    save_image(tmp_path / "a.png", Image.new("RGB", (8, 8)), recorded)
    arguments = parse(["generate", "--from-image", str(tmp_path / "a.png")])
    gather(arguments)
    assert arguments.lora == ["ink:0.5"] * found
    said = capsys.readouterr().err
    assert ("--lora ink:0.5" in said) == found
    assert ("generated with it" in said) != found


def test_an_image_of_canvax_has_a_lora_with_two_strengths(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = {"it": {"file": "./ink.safetensors", "weight": {"text_encoder": 0.5, "unet": 0.8}}}
    recorded = {"prompt": "a cat", "seed": 1, "model": "tiny", "canvax": "0.1.0", "adapters": adapters}
    save_image(tmp_path / "a.png", Image.new("RGB", (8, 8)), recorded)
    ((image,), _) = gather(parse(["generate", "--from-image", str(tmp_path / "a.png")]))
    assert image.prompt == "a cat <lora:ink:0.5:0.8>"
    assert main(["info", str(tmp_path / "a.png"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["losses"] == [[]]
    assert "<lora:ink:0.5:0.8>" in report["commands"][0]


@pytest.mark.parametrize(
    ("digits", "differs"), [("0123456789", True), ("ABABABABAB", False), ("ab" * 32, False), ("01234567", False)]
)
def test_another_file_of_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    digits: str, differs: bool,
) -> None:  # fmt: skip
    """As far as its hash is known; the 8 digits of the oldest A1111 are no part of it."""
    info, path = PngInfo(), str(tmp_path / "a.png")
    settings = "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64"
    info.add_text("parameters", f"a fox\n{settings}, Model hash: {digits}, Model: deliberate_v2")
    Image.new("RGB", (64, 64)).save(path, pnginfo=info)
    for known in ("ab" * 32, ""):
        monkeypatch.setattr("canvax.server.hashes.known_hash", lambda path, known=known: known)
        for flags in ([], ["--model", "deliberate_v2"]):
            gather(parse(["generate", "--from-image", path, *flags]))
            assert ("ababababab" in capsys.readouterr().err) == (differs and bool(known))
        assert main(["info", path, "--json"]) == 0
        losses = json.loads(capsys.readouterr().out)["losses"][0]
        assert len([clause for clause in losses if digits in clause]) == (differs and bool(known))


@pytest.mark.parametrize(
    ("file", "model"),
    [("checkpoints/tiny", "checkpoints/tiny"), ("gone\\tiny", None), ("tiny.safetensors", None)],
)
def test_an_image_of_comfyui_names_its_model_by_folder(
    folder: Path, small_folder: Path, tmp_path: Path, file: str, model: str | None
) -> None:
    (folder / "models/Stable-diffusion/tiny").symlink_to(small_folder)
    graph = {
        "1": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 2, "model": ["2", 0]}},
        "2": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": file}},
    }
    info = PngInfo()
    info.add_text("prompt", json.dumps(graph))
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png", pnginfo=info)
    assert recorded_model(read_metadata(tmp_path / "a.png")) == model


def _head(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a file of zeros, of which the disk holds only the header."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _language_model(width: int, *, normed: bool = True) -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    shapes = {f"{layer}self_attn.{name}_proj.weight": (128, width) for name in "qk"}
    shapes |= {"model.embed_tokens.weight": (8, width), f"{layer}mlp.gate_proj.weight": (8, width)}
    return shapes | ({f"{layer}self_attn.q_norm.weight": (128,)} if normed else {})


def _autoencoder(preset: str) -> dict[str, tuple[int, ...]]:
    shapes = {name: param.shape for name, param in flatten(PRESETS[preset].specs(None)["vae"])}
    return {name: (*shape[:-3:-1], *shape[:-2]) if len(shape) == 4 else shape for name, shape in shapes.items()}


def test_parts_name_the_families_that_read_them(tmp_path: Path) -> None:
    attention = "encoder.block.0.layer.0.SelfAttention."
    t5 = {"shared.weight": (8, 4096), f"{attention}relative_attention_bias.weight": (32, 64)}
    t5 |= {f"{attention}q.weight": (64, 4096), "encoder.block.0.layer.1.DenseReluDense.wi_0.weight": (8, 4096)}
    edit = {"txt_norm.weight": (8,), "transformer_blocks.0.img_mod.1.weight": (8, 8)}
    (tmp_path / "union").mkdir()
    (tmp_path / "union/config.json").write_text('{"_class_name": "FluxControlNetModel"}')
    files = {
        "qwen_3_4b": (_language_model(2560), "Z-Image, FLUX.2"),
        "qwen3vl_4b": (_language_model(2560), "FLUX.3, Krea 2"),
        "qwen_2.5_vl_7b": (_language_model(3584, normed=False), "Qwen-Image 1"),
        "other": (_language_model(64), None),
        "t5xxl": (t5, "FLUX.1, Chroma"),
        "ae": (_autoencoder("flux1-dev"), "Z-Image, FLUX.1, Chroma"),
        "flux2-vae": (_autoencoder("flux2-klein-4b"), "FLUX.2, FLUX.3"),
        "sd-vae": (_autoencoder("sd15"), "Stable Diffusion, Stable Diffusion XL"),
        "qwen_image_edit_2511": (edit, "Qwen-Image-Edit"),
        "qwen_image": (edit, "Qwen-Image 1"),
    }
    for name, (shapes, _) in files.items():
        _head(tmp_path / f"{name}.safetensors", shapes)
    found = {Path(row["file"]).stem: row["family"] for row in folder_info(tmp_path)["files"]}
    assert found == {name: families for name, (_, families) in files.items()} | {"union": "FLUX.1"}
