"""Metadata of an image -> a command, flags beside ``--from-image``, ``pipe.again`` -> the same image."""

from __future__ import annotations

import re
import shlex
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.call import ZERO_SNR, OptionRecord
from canvax.cli.again import OF_MODEL, again
from canvax.cli.arguments import parse
from canvax.cli.images import gather
from canvax.errors import HintWarning
from canvax.images.formats import written
from canvax.images.inputs import fingerprint
from canvax.images.keys import KEYS, keys_of
from canvax.images.metadata import save_image
from canvax.pipelines.again import lost_settings
from canvax.server.jobs_api import as_job
from canvax.settings import declared
from tests.test_idle_options import VALUES

QUICK: dict[str, Any] = {"num_inference_steps": 2, "progress": False}
BASE = {"prompt": "a cat", "canvax": "1", "model": "emoji", "seed": 1}
PHOTO = Image.fromarray(np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3))
MARK = fingerprint(PHOTO)


def _option(name: str, value: Any) -> dict[str, Any]:
    """Metadata of an image with one option, and with what that needs."""
    needs = declared(OptionRecord)[name].setting.error_without.partition("=")
    options = {name: value} | ({needs[0]: int(needs[2])} if needs[0] else {})
    options |= {"guidance_method": "apg"} if name == "guidance_settings" else {}
    images = {"image_sha256": MARK} if name in ("outpaint", "padding_mask_crop") else {}
    images |= {"mask_sha256": fingerprint(PHOTO.convert("L"))} if name == "padding_mask_crop" else {}
    return {"options": canvax.Options(**options).changed(), **images}


CASES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "-a 'cat' $HOME 🐈"},
    "negative_prompt": {"negative_prompt": "--bad"},
    "height": {"height": 48},
    "width": {"width": 96},
    "num_inference_steps": {"num_inference_steps": 7},
    "guidance_scale": {"guidance_scale": -0.5},
    "seed": {"seed": 2**64 - 1},
    "sampler": {"sampler": "dpmpp_2m_karras"},
    "strength": {"strength": 0.4, "image_sha256": MARK},
    "options": {"options": {"eta": 0.5}},
    "upscale": {"upscale": {"scale": 1.5, "overlap": 64}, "image_sha256": MARK},
    **{name: {name: "some/thing"} for name in ("revision", "variant", "vae", "tokenizer")},
    **{name: {name: "some/thing"} for name in ("text_encoder", "text_encoder_2")},
    "model": {"model": "owner/name"},
    "dtype": {"dtype": "bfloat16"},
    "quantize": {"quantize": "int8"},
    "precision": {"precision": "highest"},
    "prediction_type": {"prediction_type": "v_prediction"},
    "scheduler": {"scheduler": dict(ZERO_SNR)},
    "controlnet": {"controlnet": ["owner/net"], "control_sha256": [MARK]},
    "ip_adapter": {"ip_adapter": ["owner/a/b.safetensors"], "image_prompts": [{"sha256": MARK, "scale": 0.5}]},
    "ip_encoder": {
        "ip_encoder": "owner/clip", "ip_adapter": ["owner/a/b.safetensors"],
        "image_prompts": [{"sha256": MARK, "scale": 1.0, "adapter": 0}],
    },
    "image_sha256": {"image_sha256": MARK},
    "mask_sha256": {"image_sha256": MARK, "mask_sha256": fingerprint(PHOTO.convert("L"))},
    "references_sha256": {"references_sha256": [MARK, MARK]},
    "control_sha256": {"controlnet": ["owner/net", "owner/two"], "control_sha256": [{"depth": MARK}, MARK]},
    "image_prompts": {
        "ip_adapter": ["owner/a/b.safetensors"],
        "image_prompts": [{"sha256": MARK, "mask_sha256": fingerprint(PHOTO.convert("L")), "scale": 0.5}],
    },
    "adapters": {"adapters": {"ink": {"file": "owner/ink", "weight": 0.5}}},
    "embeddings": {"embeddings": {"<cat>": "owner/cat"}},
    **{f"options.{name}": _option(name, value) for name, value in VALUES.items()},
}  # fmt: skip
"""A case for each key that something repeats, and for each option."""

LOST: dict[str, dict[str, Any]] = {
    "noise": {"noise": "given"},
    "conditions": {"conditions": ["negative_prompt"]},
    "steered": {"steered": True},
    "sampler_sha256": {"sampler": "custom", "sampler_label": "custom", "sampler_sha256": "1f"},
    "guidance": {"options": {"guidance_method": "my_rule"}},
    "other": {"other": {"Hires": 2}},
    "unknown": {"made_up": 3},
}
"""What cannot be repeated, which must be said."""


def test_every_key_has_a_case() -> None:
    """Facts change no image."""
    facts = {"canvax", "sampler_label", "steps_run", "nsfw", "id", "grid", "model_sha256"}
    assert CASES.keys() | LOST.keys() >= KEYS.keys() - facts
    assert {name for name in CASES if "." not in name} <= KEYS.keys()
    assert set(VALUES) | {"progress", "callback"} == declared(OptionRecord).keys()


def test_folders_are_private() -> None:
    """Of every key that can hold a path."""
    keys = ("model", "vae", "text_encoder", "tokenizer", "scheduler", "ip_encoder")
    metadata = dict.fromkeys(keys, "/home/me/it") | {"embeddings": {"cat": "/home/me/it"}, "variant": "/home/me/it"}
    metadata |= {name: ["/home/me/it"] for name in ("controlnet", "ip_adapter")}
    metadata |= {"adapters": {"ink": {"file": "/home/me/it"}}}
    assert [name for name, value in written(metadata).items() if "me" in str(value)] == ["variant"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    PHOTO.save("photo.png")
    PHOTO.convert("L").save("mask.png")
    monkeypatch.setattr("canvax.cli.images.check_ip_adapters", lambda arguments: None)
    return tmp_path


def asked(words: list[str]) -> dict[str, Any]:
    """What a command line asks for, by the keys of metadata."""
    arguments = parse(words)
    (call,), load = gather(arguments)
    found = {name: getattr(call, name) for name, key in KEYS.items() if key.of == "call" and hasattr(call, name)}
    found |= {name: getattr(load, name) for name in ("model", "controlnet", *OF_MODEL)}
    found |= {name: getattr(arguments, name) for name in ("ip_adapter", "ip_encoder")}
    found |= {name: getattr(call, name) for name in ("image", "mask", "control", "image_prompt")}
    files = {"zero_snr": load.scheduler == ZERO_SNR, "lora": arguments.lora, "embedding": arguments.embedding}
    return found | files | call.options.changed()


FILES = {
    f"--{name}" for name in ("image", "mask", "reference", "control", "controlnet", "ip-image", "ip-mask", "ip-adapter")
} | {"--ip-encoder", "--lora", "--embedding"}
"""Flags that ``--from-image`` needs beside it."""


def put(text: str, photo: str = "photo.png") -> str:
    """A command with files in place of the words in capitals."""
    return re.sub(r"(IMAGE|MASK|CONTROL|PROMPT)\d*\b", lambda word: "mask.png" if word[1] == "MASK" else photo, text)


@pytest.mark.parametrize("name", CASES)
def test_the_command_and_from_image_repeat(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or say what they do not."""
    metadata = BASE | CASES[name]
    save_image("it.png", PHOTO, metadata)
    line = again(metadata)
    words = shlex.split(put(line.command))[1:]
    if "upscale" in metadata:
        arguments = parse(words)
        assert (arguments.command, arguments.scale, arguments.overlap) == ("upscale", 1.5, 64)
        return
    closed = {
        option for option in metadata.get("options", {}) if "command" in declared(OptionRecord)[option].setting.closed
    }
    assert len(line.losses) == len(closed)
    got = asked(words)
    named = [word for pair in pairwise(words) if pair[0] in FILES for word in pair]
    capsys.readouterr()
    assert asked(["generate", "--from-image", "it.png", *named]) == got
    said = capsys.readouterr().err
    assert bool(said) == bool(closed), said
    wanted = {key: value for key, value in metadata.items() if KEYS[key].of == "call" and key != "options"}
    wanted |= {key: value for key, value in metadata.get("options", {}).items() if key not in closed}
    assert {key: got[key] for key in wanted} == wanted
    for key in ("model", "ip_encoder", *OF_MODEL):
        assert got[key] == metadata.get(key)
    for key in ("controlnet", "ip_adapter"):
        assert list(got[key] or ()) == metadata.get(key, [])
    assert got["zero_snr"] == ("scheduler" in metadata)
    assert got["lora"] == [f"{entry['file']}:{entry['weight']}" for entry in metadata.get("adapters", {}).values()]
    assert got["embedding"] == [*metadata.get("embeddings", {}).values()]
    for key, of_images in keys_of("images").items():
        assert key not in metadata or got[of_images.argument]


@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_said(
    name: str, files: Path, emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = BASE | LOST[name]
    save_image("it.png", PHOTO, metadata)
    gather(parse(["generate", "--from-image", "it.png"]))
    assert capsys.readouterr().err
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        emoji.again("it.png", **QUICK)
    assert [warning for warning in caught if issubclass(warning.category, HintWarning)]
    assert set(lost_settings(metadata)) <= set(as_job(metadata)["missing"])
    assert as_job(metadata)["missing"]


def test_an_image_and_a_model_are_asked_for_at_once(files: Path) -> None:
    save_image("it.png", PHOTO, {**BASE, "model": "./nowhere.safetensors", "image_sha256": MARK})
    PHOTO.save("photo.png")
    with pytest.raises(canvax.InputError) as refused:
        gather(parse(["generate", "--from-image", "it.png"]))
    assert refused.value.argument == "image"
    assert "--model" in refused.value.cure
    with pytest.raises(canvax.InputError, match="--model"):
        gather(parse(["generate", "--from-image", "it.png", "--image", "photo.png"]))


@pytest.mark.parametrize("name", keys_of("images"))
def test_images_are_asked_for_and_compared(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = BASE | CASES[name]
    save_image("it.png", PHOTO, metadata)
    PHOTO.rotate(180).save("other.png")
    with pytest.raises(canvax.InputError) as refused:
        gather(parse(["generate", "--from-image", "it.png"]))
    assert refused.value.argument in (KEYS[name].argument, "image")  # a mask needs an image first
    assert ("--reference" in refused.value.cure) == (name == "references_sha256")
    marks = metadata[name]
    several = isinstance(marks, list) and len(marks) > 1
    assert (f"{len(marks)} {KEYS[name].noun}s" if several else KEYS[name].noun) in as_job(metadata)["missing"]
    PHOTO.rotate(180).convert("L").save("mask.png")
    words = shlex.split(put(again(metadata).command, "other.png"))[2:]
    gather(parse(["generate", "--from-image", "it.png", *words]))
    assert f"--{KEYS[name].argument.replace('image_prompt', 'ip-image')} " in capsys.readouterr().err


def generated(pipe: canvax.Pipeline, **keywords: Any) -> canvax.Result:
    return pipe("a cat", seed=3, **QUICK | keywords)


def test_a_pipeline_generates_an_image_again(emoji: canvax.Pipeline, tmp_path: Path) -> None:
    want = generated(emoji, sampler="euler_a", clip_skip=1, eta=0.5, negative_prompt="red", seed_size=(32, 48))
    (image,) = want.images
    image.save(tmp_path / "it.png")
    image.save(tmp_path / "it.webp")
    with Image.open(tmp_path / "it.png") as png, Image.open(tmp_path / "it.webp") as webp:
        for source in (tmp_path / "it.png", str(tmp_path / "it.webp"), png, webp, image, want.metadata[0]):
            got = emoji.again(source, progress=False)
            assert got.metadata == want.metadata
            np.testing.assert_array_equal(got.pixels, want.pixels)
    got = emoji.again(image, steps=1, options=canvax.Options(eta=0.25, progress=False))
    assert got.metadata[0] == want.metadata[0] | {
        "num_inference_steps": 1, "options": want.metadata[0]["options"] | {"eta": 0.25}
    }  # fmt: skip


@pytest.mark.slow
def test_images_are_given_again(emoji: canvax.Pipeline) -> None:
    want = generated(emoji, image=PHOTO, mask=PHOTO.convert("L"), strength=0.5, mask_mode="soft")
    (metadata,) = want.metadata
    for missing in ({}, {"image": PHOTO}):
        with pytest.raises(canvax.InputError) as refused:
            emoji.again(metadata, **missing)
        assert refused.value.argument == ("mask" if missing else "image")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HintWarning)
        warnings.filterwarnings("ignore", "emoji was trained")
        got = emoji.again(metadata, init_image=PHOTO, mask_image=PHOTO.convert("L"), progress=False)
    np.testing.assert_array_equal(got.pixels, want.pixels)
    with pytest.warns(HintWarning) as caught:
        emoji.again(metadata, image=PHOTO.rotate(180), mask=PHOTO.convert("L"), progress=False)
    assert "image" in {warning.message.argument for warning in caught if isinstance(warning.message, HintWarning)}


@pytest.mark.slow
def test_tiles_are_enlarged_again(emoji: canvax.Pipeline) -> None:
    """With options and names of other programs, as in a call."""
    want = emoji.upscale(PHOTO, "a cat", scale=1.5, seed=3, steps=4, clip_skip=1, progress=False)
    assert want.metadata[0]["options"] == {"clip_skip": 1}
    with pytest.raises(canvax.InputError) as refused:
        emoji.again(want.images[0])
    assert refused.value.argument == "image"
    got = emoji.again(want.images[0], image=PHOTO, progress=False)
    assert got.metadata == want.metadata
    np.testing.assert_array_equal(got.pixels, want.pixels)
    for name in ("n", "height"):
        with pytest.raises(canvax.InputError) as refused:
            emoji.upscale(PHOTO, "a cat", **{name: 2})  # type: ignore[arg-type]
        assert refused.value.argument in (name, "num_images_per_prompt")


def test_a_call_refuses_metadata(emoji: canvax.Pipeline) -> None:
    (metadata,) = generated(emoji).metadata
    with pytest.raises(canvax.InputError, match="again"):
        emoji(**metadata)


def test_metadata_names_no_files_to_read(files: Path, emoji: canvax.Pipeline) -> None:
    """Nor arguments that it does not hold otherwise."""
    enlarged = BASE | {"upscale": {"scale": 1.5, "image": "photo.png", "params": {}}, "image": "photo.png"}
    hidden = BASE | {"image_sha256": MARK, "options": {"image": "photo.png", "made_up": 3}}
    for metadata in (enlarged, enlarged | {"image_sha256": MARK}, hidden):
        with pytest.raises(canvax.InputError):
            emoji.again(metadata, **QUICK)
    del hidden["image_sha256"]
    with pytest.warns(HintWarning, match="made_up"):
        assert "image_sha256" not in emoji.again(hidden, **QUICK).metadata[0]


def test_a_grid_is_no_image(emoji: canvax.Pipeline) -> None:
    for wrong in (generated(emoji, num_images_per_prompt=2).grid(), {"options": 3}, {"seed": "x"}, 7, "none.png"):
        with pytest.raises(canvax.InputError):
            emoji.again(wrong)  # pyright: ignore[reportArgumentType]
