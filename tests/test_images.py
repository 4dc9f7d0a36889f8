"""Pictures: conversion, grids, and the text that a PNG carries."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import pickle
import stat
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import save_file

from canvax.call import OptionRecord
from canvax.errors import CanvaxError, HintWarning, InputError
from canvax.images import metadata as module
from canvax.images.comfy import from_comfy_graph
from canvax.images.convert import to_pil, to_uint8, upright_rgb
from canvax.images.formats import GeneratedImage
from canvax.images.grid import make_grid, make_sheet
from canvax.images.infotext import embeddings_in, from_infotext, parts_of, settings_left, to_infotext
from canvax.images.masks import painted_over
from canvax.images.metadata import UnreadError, read_metadata, save_image, save_numbered, unique_path
from canvax.pipelines.adapter_files import a1111_hash_of
from canvax.pipelines.again import left_out
from canvax.samplers import CURVES, SAMPLERS, find
from canvax.scale import work
from canvax.server import files
from canvax.server.files import Colours, preview_file
from canvax.settings import declared
from tests.support.refusals import refused
from tests.support.timing import processor_seconds

DATA = Path(__file__).parent / "data"
METADATA: dict[str, Any] = {
    "prompt": 'café 🍎, "quoted": 日本\nsecond line',
    "negative_prompt": "blurry, a: b\nugly",
    "seed": 2**64 - 1,
    "height": 64,
    "width": 72,
    "num_inference_steps": 20,
    "guidance_scale": 7.5,
    "sampler": "dpmpp_2m_karras",
    "options": {"clip_skip": 1, "eta": 0.25, "noise": "torch"},
    "model": "owner/name: a, b",
    "revision": None,
    "dtype": "float32",
    "noise": "torch",
    "canvax": "0.1.0",
}


def picture(width: int = 72, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), "red")


def saved(image: Image.Image, kind: str, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, quality=quality)
    return out.getvalue()


def of_a_batch(pixels: np.ndarray, kind: str, quality: int | None) -> bytes:
    return work.image_file(to_pil(pixels[None])[0], kind.replace("jpeg", "jpg"), quality)


def of_the_server(pixels: np.ndarray, kind: Any, quality: int | None) -> bytes:
    return files.image_file(pixels, kind, quality, {})


def with_text(path: Path, **texts: str) -> Path:
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    picture().save(path, pnginfo=info)
    return path


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


# Conversion


def test_rounds_half_to_even_and_clips() -> None:
    values = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, np.inf, -np.inf], np.float32)
    got = to_uint8(np.broadcast_to(values[:, None], (1, 1, 7, 3)))
    assert got[0, 0, :, 0].tolist() == [0, 0, 128, 255, 255, 255, 0]
    ramp = np.linspace(0, 1, 9999, dtype=np.float32).reshape(1, 1, -1, 1).repeat(3, -1)
    assert (to_uint8(ramp) == (ramp * 255).round().astype(np.uint8)).all()


def test_takes_bfloat16_and_device_arrays() -> None:
    assert (to_uint8(jnp.ones((1, 8, 8, 3), jnp.bfloat16)) == 255).all()


def test_not_a_number_is_black_and_said() -> None:
    with pytest.warns(RuntimeWarning, match="bfloat16 or float32"):
        assert (to_uint8(np.full((1, 2, 2, 3), np.nan)) == 0).all()


def test_there_and_back() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), np.uint8)
    images = to_pil(pixels)
    assert [image.size for image in images] == [(24, 16)] * 3
    assert (np.stack([np.asarray(upright_rgb(image)) for image in images]) == pixels).all()


def test_transparent_becomes_white() -> None:
    assert (np.asarray(upright_rgb(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))) == 255).all()


def test_grey_of_16_bits() -> None:
    grey = Image.fromarray(np.array([[0, 16384, 32768, 65535]], np.uint16))
    np.testing.assert_allclose(np.asarray(upright_rgb(grey))[0, :, 0], [0, 64, 128, 255], atol=1)


@pytest.mark.parametrize("images", [np.zeros((8, 8)), np.zeros((1, 8, 8, 5))])
def test_wrong_shapes_are_refused(images: np.ndarray) -> None:
    with refused("images"):
        to_pil(images)


def glass() -> Image.Image:
    """Red on the left, transparent black on the right."""
    (image,) = to_pil(np.repeat(np.array([[[1.0, 0, 0, 1], [0, 0, 0, 0]]]), 8, axis=1).repeat(16, axis=0))
    return image


@pytest.mark.parametrize("metadata", [{}, {"prompt": "a fox", "seed": 1}])
def test_files_of_transparent_images(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """PNG and WebP keep the transparency, a JPEG is on white, with a warning."""
    image = GeneratedImage.of(glass(), metadata)
    for name in ("a.png", "a.webp"):
        for save in (lambda path: image.save(path), lambda path: save_image(path, image, metadata, overwrite=True)):
            save(tmp_path / name)
            np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name))[..., 3], np.asarray(image)[..., 3])
    for save in (lambda path: image.save(path), lambda path: save_image(path, image, metadata, overwrite=True)):
        with pytest.warns(HintWarning):
            save(tmp_path / "a.jpg")
        got = np.asarray(Image.open(tmp_path / "a.jpg"), np.float32)
        assert got[8, 14].min() > 240


def test_grids_keep_transparency_and_sheets_are_on_white() -> None:
    grid, sheet = make_grid([glass()] * 3), make_sheet([glass()], ["a fox"])
    assert np.asarray(grid)[8, 14].tolist() == [0, 0, 0, 0]
    assert np.asarray(grid)[-1, -1].tolist() == [255] * 4
    assert (np.asarray(sheet)[-1, -1] == 255).all()


def test_holes_of_transparent_images_are_filled_from_around() -> None:
    mask = Image.new("L", (16, 16))
    mask.paste(255, (2, 2, 6, 14))
    filled = np.asarray(painted_over(glass(), mask))
    np.testing.assert_allclose(filled[8, 4], [255, 0, 0, 255], atol=60)
    np.testing.assert_array_equal(filled[:, 8:], np.asarray(glass())[:, 8:])


def test_previews_of_transparent_images_are_on_white() -> None:
    pixels, latents = np.zeros((16, 16, 4), np.float32), np.zeros((2, 2, 3), np.float32)
    shown = np.asarray(Image.open(io.BytesIO(preview_file(pixels, (16, 16)))))
    colours = Colours(3)
    colours.learn(latents, pixels)
    assert shown.min() > 240
    assert colours.pixels(latents).min() > 0.9


# Grids


@pytest.mark.parametrize(
    ("count", "rows", "cols", "size"),
    [(1, None, None, (1, 1)), (5, None, None, (3, 2)), (6, 1, None, (6, 1)), (6, None, 2, (2, 3))],
)
def test_grid_shape(count: int, rows: int | None, cols: int | None, size: tuple[int, int]) -> None:
    grid = make_grid([picture(10, 8)] * count, rows, cols)
    assert grid.size == (10 * size[0], 8 * size[1])


def test_grid_goes_row_by_row() -> None:
    colours = ["red", "lime", "blue"]
    grid = make_grid([Image.new("RGB", (2, 2), colour) for colour in colours])
    assert [grid.getpixel(at) for at in [(0, 0), (2, 0), (0, 2)]] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (0, None)])
def test_impossible_grids(rows: Any, cols: Any) -> None:
    with pytest.raises(InputError, match=r"rows|cols"):
        make_grid([picture()] * 3, rows, cols)


def test_grid_of_nothing_or_of_several_sizes() -> None:
    with pytest.raises(InputError, match="empty"):
        make_grid([])
    with pytest.raises(InputError, match=r"72x64.*80x64"):
        make_grid([picture(), picture(80)])


# Files


def test_metadata_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", picture(), METADATA)
    assert read_metadata(path) == METADATA
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    with Image.open(path) as image:
        assert image.size == (72, 64)
        assert image.text["parameters"] == to_infotext(METADATA)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.webp", "a.png"])
def test_every_format_carries_its_metadata(tmp_path: Path, name: str) -> None:
    """Written by canvax, and by ``Image.save`` of a generated image; A1111 looks for its text in UserComment."""
    metadata = METADATA | {"prompt": "un chat \u732b \U0001f431"}
    assert read_metadata(save_image(tmp_path / name, picture(), metadata)) == metadata
    generated = GeneratedImage.of(picture(), metadata)
    generated.save(tmp_path / f"own-{name}")
    assert read_metadata(tmp_path / f"own-{name}") == metadata
    pickle.loads(pickle.dumps(generated)).save(tmp_path / f"again-{name}")
    assert read_metadata(tmp_path / f"again-{name}") == metadata
    with Image.open(tmp_path / name) as image:
        assert (image.size, image.mode) == ((72, 64), "RGB")
        if image.format != "PNG":
            comment = image.getexif().get_ifd(0x8769)[0x9286]
            assert comment.removeprefix(b"UNICODE\0").decode("utf-16-be") == to_infotext(metadata)
        worst = np.abs(np.asarray(image, int) - np.asarray(picture(), int)).max()
        assert worst == 0 or image.format == "JPEG"
    generated.resize((8, 8)).save(tmp_path / "small.png")
    with pytest.raises(InputError, match="holds no description"):
        read_metadata(tmp_path / "small.png")


@pytest.mark.parametrize("write", [of_a_batch, of_the_server], ids=["batch", "server"])
def test_quality_is_that_of_the_file(write: Any) -> None:
    """As Pillow writes it by itself."""
    pixels = np.random.default_rng(0).random((64, 64, 3), np.float32)
    (image,) = to_pil(pixels[None])
    for quality in (10, 60):
        found = [
            Image.open(io.BytesIO(data)) for data in (write(pixels, "jpeg", quality), saved(image, "JPEG", quality))
        ]
        assert found[0].quantization == found[1].quantization  # type: ignore[attr-defined]
        assert write(pixels, "webp", quality) == saved(image, "WEBP", quality)
    assert len(write(pixels, "png", None)) > len(saved(image, "WEBP", 60))


def test_metadata_too_long_for_a_jpeg(tmp_path: Path) -> None:
    """The images are not lost; that their settings are left out is a warning."""
    for name, metadata in (("a", METADATA | {"prompt": "x" * 70_000}), ("grid", {"grid": [METADATA] * 400})):
        with pytest.warns(HintWarning):
            path = save_image(tmp_path / f"{name}.jpg", picture(), metadata)
        with Image.open(path) as image:
            assert image.size == picture().size
        with pytest.raises(InputError):
            read_metadata(path)
        assert read_metadata(save_image(tmp_path / f"{name}.webp", picture(), metadata)) == metadata


@pytest.mark.parametrize("model", ["/home/ada/models/sd", "~/models/sd", "models/sd"])
def test_the_folders_above_a_local_model_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models" / "sd").mkdir(parents=True)
    path = save_image(tmp_path / "a.png", picture(), METADATA | {"model": model})
    assert read_metadata(path)["model"] == "./sd"
    assert b"models" not in path.read_bytes()
    assert read_metadata(save_image(tmp_path / "b.png", picture(), METADATA | {"model": "a/b"}))["model"] == "a/b"


@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
@pytest.mark.parametrize("path", ["/home/ada/files/ink.safetensors", "~/files/ink.safetensors"])
def test_the_folders_above_other_local_files_stay_out(tmp_path: Path, path: str, ending: str) -> None:
    """Also of files that are not there any more; what is on the Hub keeps its name."""
    ink = {"file": path, "weight": 0.5, "sha256": "0" * 64}
    told: dict[str, Any] = {
        "adapters": {"ink": ink, "clay": {**ink, "file": "ada/clay/a.safetensors"}},
        "embeddings": {"wool": path, "<yarn>": "ada/yarn"},
        "controlnet": [path, "ada/edges"],
        "ip_adapter": [path],
        "vae": path,
        "scheduler": {"_name_or_path": path},
    }
    for metadata in (METADATA | told, {"grid": [METADATA | told]}):
        file = save_image(tmp_path / f"{len(metadata)}.{ending}", picture(), metadata)
        assert not any("files".encode(code) in file.read_bytes() for code in ("utf-8", "utf-16-be"))
    read = read_metadata(tmp_path / f"{len(METADATA | told)}.{ending}")
    assert read["adapters"]["ink"] == ink | {"file": "./ink.safetensors"}
    assert read["adapters"]["clay"]["file"] == "ada/clay/a.safetensors"
    assert read["embeddings"] == {"wool": "./ink.safetensors", "<yarn>": "ada/yarn"}
    assert read["controlnet"] == ["./ink.safetensors", "ada/edges"]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "eps"])
def test_only_regular_files_of_known_formats_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n")
    with pytest.raises(InputError, match=r"cannot be read|can be read"):
        read_metadata(path)


def test_half_a_surrogate_comes_back(tmp_path: Path) -> None:
    metadata = METADATA | {"prompt": "a \udcff b"}
    assert read_metadata(save_image(tmp_path / "a.png", picture(), metadata)) == metadata


def test_numpy_numbers_are_written(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", picture(), METADATA | {"seed": np.uint64(5), "guidance_scale": np.float32(2)})
    assert read_metadata(path)["seed"] == 5


def test_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("mine")
    with pytest.raises(InputError, match="not replaced"):
        save_image(path, picture(), METADATA)
    assert path.read_text() == "mine"
    save_image(path, picture(), METADATA, overwrite=True)
    assert read_metadata(path)["seed"] == METADATA["seed"]
    assert os.listdir(tmp_path) == ["a.png"]


def test_never_replaces_a_file_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    path = save_image(tmp_path / "a.png", picture(), METADATA)
    assert read_metadata(path) == METADATA
    with pytest.raises(InputError, match="not replaced"):
        save_image(path, picture(), {})
    assert os.listdir(tmp_path) == ["a.png"]


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Image.Image, file: Any, *_: Any, **__: Any) -> None:
        file.write(b"half a picture")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(CanvaxError, match="No space left"):
        save_image(tmp_path / "a.png", picture(), METADATA)
    assert os.listdir(tmp_path) == []


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CanvaxError, match="cannot be written"):
        save_image(tmp_path / "none" / "a.png", picture(), METADATA)


def test_free_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unique_path(tmp_path / "none", 7).name == "00000-7.png"
    for name in ("00000-7.png", "00004-9.jpg", "grid-00009-1.png", "notes.txt"):
        (tmp_path / name).touch()
    assert unique_path(tmp_path, 7).name == "00005-7.png"
    assert unique_path(tmp_path, 7, prefix="grid-").name == "grid-00010-7.png"
    (tmp_path / "999999999-x.png").touch()
    assert unique_path(tmp_path, 7).name == "00005-7.png"
    monkeypatch.setattr("os.listdir", os.readlink)  # which fails as one that may not be looked into
    with pytest.raises(InputError, match="cannot be looked into"):
        unique_path(tmp_path, 7)


def test_many_writers_share_a_folder(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda: [save_numbered(tmp_path, picture(8, 8), METADATA, 1) for _ in range(8)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(os.listdir(tmp_path)) == [f"{i:05d}-1.png" for i in range(32)]


def test_images_saved_at_once_have_different_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of different seeds, whose names differ in any case."""
    together = threading.Barrier(4)

    def save(*arguments: Any, **more: Any) -> Path:
        together.wait(10)  # all have their names, and no file is there
        return save_image(*arguments, **more)

    monkeypatch.setattr("canvax.images.metadata.save_image", save)
    threads = [threading.Thread(target=save_numbered, args=(tmp_path, picture(8, 8), METADATA, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name[:5] for name in os.listdir(tmp_path)) == [f"{i:05d}" for i in range(4)]


# What other programs wrote


def test_infotext_round_trip() -> None:
    text = to_infotext(METADATA)
    assert text.splitlines()[-1] == (
        "Steps: 20, Sampler: dpmpp_2m, Schedule type: Karras, CFG scale: 7.5, Seed: 18446744073709551615, Size: 72x64, "
        'Model: "owner/name: a, b", Eta: 0.25, Clip skip: 2, RNG: CPU, Version: canvax 0.1.0'
    )
    back = from_infotext(text)
    assert {key: back[key] for key in METADATA if key in back and key != "sampler"} == {
        key: METADATA[key] for key in METADATA if key in back and key != "sampler"
    }
    assert find(back["sampler"])[1]["sigmas"] == "karras"


SECOND = {"hires": 1.5, "hires_method": "latent", "hires_strength": 0.6, "hires_steps": 7, "hires_prompt": "a, b: c"}
IN_INFOTEXT: list[dict[str, Any]] = [
    {"variation_seed": 4, "variation_strength": 0.25, "seed_size": [48, 72]},
    {**SECOND, "hires_sampler": "DPM++ 2M Karras"},
]


def test_every_option_that_a1111_has_is_written_for_it() -> None:
    """And comes back; each option that declares a name there is in one of the cases."""
    for options in IN_INFOTEXT:
        back = from_infotext(to_infotext(METADATA | {"options": {**METADATA["options"], **options}}))
        assert {name: back["options"][name] for name in options} == options
        assert back["other"] == {"Version": "canvax 0.1.0"}
    of_a1111 = {name for name, field in declared(OptionRecord).items() if field.setting.infotext}
    assert of_a1111 <= {*METADATA["options"], *(name for options in IN_INFOTEXT for name in options)}


def test_a_strength_is_written_for_a1111() -> None:
    """Of an image to image, and of a second pass, whose default there is another one."""
    hires = {"options": {"hires": 2.0}}
    for metadata, text in (({"strength": 0.75}, "0.75"), (hires, "0.4"), ({"options": SECOND}, "0.6")):
        assert parts_of(to_infotext(METADATA | metadata))[2]["Denoising strength"] == text
    assert "Denoising strength" not in to_infotext(METADATA)


def test_masks_and_control_images_are_written_for_a1111() -> None:
    networks = {"controlnet": ["./edges.safetensors", "owner/pose", "depth"], "control_sha256": ["ab", None, "cd"]}
    options = {"padding_mask_crop": 32, "mask_blur": 4.0, "mask_fill": "noise", "control_scale": [0.5, 1, 0.8]}
    metadata = METADATA | networks | {"mask_sha256": "ab", "options": options | {"control_mode": "prompt"}}
    read = parts_of(to_infotext(metadata))[2]
    written = {"Mask blur": "4", "Inpaint area": "Only masked", "Masked area padding": "32"}
    assert read.items() >= (written | {"Masked content": "latent noise"}).items()
    end = "Guidance Start: 0.0, Guidance End: 1.0, Control Mode: My prompt is more important"
    assert read["ControlNet 0"] == f"Module: none, Model: edges, Weight: 0.5, {end}"
    assert read["ControlNet 1"] == f"Module: none, Model: depth, Weight: 0.8, {end}"
    assert "ControlNet 2" not in read
    assert parts_of(to_infotext(METADATA | {"mask_sha256": "ab"}))[2].items() >= {"Mask blur": "0"}.items()


def test_samplers_come_back_from_infotext() -> None:
    for spec, curve in itertools.product(SAMPLERS, ("", "_karras")):
        if curve and not spec.curves:
            continue
        label = f"{spec.label} Karras" if curve else spec.label
        for name in ({"sampler": spec.name + curve}, {"sampler": spec.name + curve, "sampler_label": label}):
            back = from_infotext(to_infotext(METADATA | name))
            found, implied = find(back["sampler"])
            assert found is spec
            assert implied.get("sigmas", "") == curve.strip("_")


def test_curves_come_back_from_infotext() -> None:
    """By their name, by A1111's and by every other; as an option and behind a sampler's name."""
    for curve, spelling in ((each, spelling) for each in CURVES for spelling in (each.name, *each.also)):
        if curve.name == "automatic" or spelling == "discrete":
            continue  # what other programs call no curve at all
        for metadata in (
            {"sampler": "Heun", "options": {"sigmas": spelling}},
            {"sampler": f"Heun {spelling}", "options": {}},
            {"sampler": f"heun_{spelling.lower().replace(' ', '_')}", "options": {}},
        ):
            text = to_infotext({"prompt": "x", "num_inference_steps": 4, "seed": 1, **metadata})
            assert f"Schedule type: {curve.also[0]}," in text, spelling
            back = from_infotext(text)
            spec, implied = find(back["sampler"])
            assert spec.name == "heun"
            assert back["options"].get("sigmas", implied.get("sigmas")) == curve.name


@pytest.mark.parametrize(
    ("sampler", "schedule", "read"),
    [
        ("DPM++ 2M", "Schedule type: Automatic, ", "karras"),
        ("DPM++ 3M SDE", "Schedule type: Automatic, ", "exponential"),
        ("DPM++ 2M", "", None),
        ("Euler", "Schedule type: Automatic, ", None),
    ],
)
def test_automatic_schedule_is_that_of_the_sampler(sampler: str, schedule: str, read: str | None) -> None:
    """As in A1111 1.9; before that an image without a curve in the sampler's name had none."""
    text = f"x\nSteps: 9, Sampler: {sampler}, {schedule}Hires upscale: 2, Hires sampler: {sampler}, Seed: 1"
    back = from_infotext(text)
    for name in (back["sampler"], back["options"]["hires_sampler"]):
        assert find(name)[1].get("sigmas") == read
    assert "Schedule type" not in back["other"]


def test_hashes_of_loras_as_a1111_writes_them(tmp_path: Path) -> None:
    """The trainer's, or that of the arrays alone, which other text in the header does not change."""
    plain, described, stated = (tmp_path / f"{name}.safetensors" for name in ("plain", "described", "stated"))
    for path, metadata in ((plain, {}), (described, {"title": "ink"}), (stated, {"sshs_model_hash": "ab" * 32})):
        save_file({"lora_unet_a.lora_down.weight": np.ones((1, 4), np.float32)}, path, metadata=metadata)
    digits = hashlib.sha256(np.ones(4, np.float32).tobytes()).hexdigest()[:12]
    assert [a1111_hash_of(path) for path in (plain, described, stated)] == [digits, digits, "ab" * 6]
    loras = {
        name: {"file": f"./{name}.safetensors", "weight": weight, "a1111_hash": digits}
        for name, weight in (("ink", 0.5), ("clay", 1), ("parts", {"unet": 1}))
    }
    text = to_infotext(METADATA | {"adapters": loras | {"old": {"file": "./old.safetensors", "weight": 1}}})
    assert f'Lora hashes: "ink: {digits}, clay: {digits}"' in text
    assert settings_left(from_infotext(text)).keys() == {f"<lora:{name}>" for name in ("ink:0.5", "clay:1", "old:1")}


def test_label_is_what_other_programs_read() -> None:
    text = to_infotext(METADATA | {"sampler_label": "DPM++ 2M Karras"})
    assert "Sampler: DPM++ 2M, Schedule type: Karras," in text


def test_options_overrule_the_name() -> None:
    text = to_infotext({"sampler": "euler", "options": {"sigmas": "exponential"}})
    assert "Sampler: euler, Schedule type: Exponential" in text
    text = to_infotext({"sampler": "ddim", "options": {"spacing": "trailing"}})
    assert from_infotext(f"x\n{text.strip()}, Steps: 3")["options"]["sigmas"] == "sgm_uniform"


def test_local_folders_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Model: mine" in to_infotext({"model": "/home/alice/models/mine/"})
    (tmp_path / "clients" / "secret").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "Model: secret" in to_infotext({"model": "clients/secret"})
    assert "Model: someone/model" in to_infotext({"model": "someone/model"})


def test_other_networks_are_named_and_left_out() -> None:
    told = from_infotext(
        "a cat <lora:fur:0.8> on a mat\nNegative prompt: <Lyco:x>\n"
        'Steps: 3, Sampler: Euler, Seed: 1, Hires upscale: 2, Hires prompt: "a dog, <lora:ink:1>"'
    )
    assert (told["prompt"], told["negative_prompt"]) == ("a cat on a mat", "")
    assert told["options"]["hires_prompt"] == "a dog,"
    assert told["other"] == {"<lora:fur:0.8>": "", "<Lyco:x>": "", "<lora:ink:1>": ""}


OTHERS = {row["from"]: row for row in json.loads((DATA / "images_of_others.json").read_text())}
"""What an image of another program holds, and what is read of it."""


def of_another(path: Path, name: str, **nodes: Any) -> dict[str, Any]:
    """Read an image of another program, with these nodes added to its graph."""
    texts = {key: text if isinstance(text, str) else json.dumps({k: v for k, v in (text | nodes).items() if v})
             for key, text in OTHERS[name]["texts"].items()}  # fmt: skip
    return read_metadata(with_text(path, **texts))


@pytest.mark.parametrize("name", OTHERS)
def test_images_of_others(tmp_path: Path, name: str) -> None:
    assert of_another(tmp_path / "a.png", name) == OTHERS[name]["read"]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


SAMPLER = OTHERS["ComfyUI"]["texts"]["prompt"]["3"]["inputs"]
HIRES = {
    "13": node("KSampler", **SAMPLER | {"latent_image": ["14", 0], "denoise": 0.5}),
    "14": node("LatentUpscaleBy", samples=["3", 0], upscale_method="bilinear", scale_by=1.5),
}
TO_PIXELS = {"15": node("VAEDecode", samples=["3", 0], vae=["4", 2]), "17": node("VAEEncode", pixels=["16", 0])}


@pytest.mark.parametrize(
    ("nodes", "options", "other"),
    [
        ({}, {"hires_method": "latent"}, {}),
        ({"14": node("LatentUpscale", samples=["3", 0], upscale_method="area", width=768, height=1152)},
         {"hires_method": "latent"}, {"hires upscale_method": "area"}),
        ({"13": node("KSampler", **SAMPLER | {"latent_image": ["14", 0], "denoise": 0.5, "steps": 9, "cfg": 3})},
         {"hires_method": "latent", "hires_steps": 9}, {"hires cfg": "3"}),
        ({"13": node("KSampler", **SAMPLER | {"latent_image": ["17", 0], "denoise": 0.5}), **TO_PIXELS,
          "16": node("ImageScaleBy", image=["15", 0], upscale_method="lanczos", scale_by=1.5), "14": None},
         {"hires_method": "pixel"}, {}),
    ],
)  # fmt: skip
def test_a_graph_with_a_second_pass(
    tmp_path: Path, nodes: dict[str, Any], options: dict[str, Any], other: dict[str, Any]
) -> None:
    plain, read = OTHERS["ComfyUI"]["read"], of_another(tmp_path / "a.png", "ComfyUI", **(HIRES | nodes))
    second = {"hires": 1.5, "hires_strength": 0.5, **options}
    assert read == plain | {"options": plain["options"] | second, "other": plain["other"] | other}


@pytest.mark.parametrize(
    "changed",
    [
        {"13": node("KSampler", **SAMPLER)},  # another image
        {"14": node("LatentUpscaleBy", samples=["3", 0], upscale_method="bilinear", scale_by=0.5)},
        {"14": node("LatentUpscale", samples=["3", 0], upscale_method="bilinear", width=768, height=768)},
        {"14": node("Rescale", samples=["18", 0], upscale_method="bilinear", scale_by=1.5),
         "18": node("Enlarge", samples=["3", 0])},
        {"13": node("KSampler", **HIRES["13"]["inputs"] | {"positive": ["7", 0]})},
        {"19": node("KSampler", **SAMPLER)},
        {"5": node("VAEEncode", pixels=["12", 0])},  # a first pass from an image
    ],
)  # fmt: skip
def test_graphs_of_several_samplers_that_are_not_read(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UnreadError):
        of_another(tmp_path / "a.png", "ComfyUI", **(HIRES | changed))


def test_prompts_of_comfyui_behind_other_nodes(tmp_path: Path) -> None:
    """By the linked output of nodes that pass two; a joined text; and one that cannot be read."""
    control = node("ControlNetApplyAdvanced", positive=["20", 0], negative=["7", 0])
    area = node("ConditioningSetArea", conditioning=["6", 0])
    joined = node("StringConcatenate", string_a=["31", 0], string_b="snow", delimiter=", ")
    sampler = node("KSampler", **SAMPLER | {"positive": ["21", 0], "negative": ["21", 1]})
    nodes = {"3": sampler, "20": area, "21": control, "30": joined, "31": node("PrimitiveString", value="a fox"),
             "6": node("CLIPTextEncode", text=["30", 0])}  # fmt: skip
    read = of_another(tmp_path / "a.png", "ComfyUI", **nodes)
    assert (read["prompt"], read["negative_prompt"]) == ("a fox, snow", "text, watermark")
    left = {f"node {kind}": "" for kind in ("ConditioningSetArea", "ControlNetApplyAdvanced", "PrimitiveString")}
    assert read["other"] == OTHERS["ComfyUI"]["read"]["other"] | left
    for bad in (node("Wildcards", seed=1, text_a="x"), node("StringConcatenate", string_a=["31", 0], string_b="x")):
        read = of_another(tmp_path / "a.png", "ComfyUI", **(nodes | {"31": bad}))
        assert "prompt" not in read
        assert "prompt: cannot be read" in left_out(read)


def test_two_texts_of_sdxl_in_comfyui(tmp_path: Path) -> None:
    sizes = {"width": 512, "height": 768, "target_width": 512, "target_height": 768, "crop_w": 0}
    skip = {"40": node("CLIPSetLastLayer", stop_at_clip_layer=-2, clip=["10", 1]),
            "7": node("CLIPTextEncode", text="text, watermark", clip=["40", 0])}  # fmt: skip
    for text, changed, options, other in (
        ("a fox", {}, {}, set()),
        ("oil", {}, {"prompt_2": "oil"}, set()),
        ("a fox", {"width": 4096}, {}, {"prompt, sizes"}),
        (["99", 0], {}, {}, {"prompt, text_g"}),
    ):
        encode = node("CLIPTextEncodeSDXL", text_l="a fox", text_g=text, clip=["40", 0], **sizes | changed)
        read = of_another(tmp_path / "a.png", "ComfyUI", **skip, **{"6": encode})
        plain = OTHERS["ComfyUI"]["read"]
        assert (read["prompt"], read["options"]) == ("a fox", plain["options"] | options | {"clip_skip": 1})
        assert read["other"].keys() - plain["other"].keys() == other


def test_clip_skip_and_two_strengths_of_comfyui(tmp_path: Path) -> None:
    skip = {"40": node("CLIPSetLastLayer", stop_at_clip_layer=-3, clip=["10", 1])}
    texts = {key: node("CLIPTextEncode", text=key, clip=["40", 0]) for key in "67"}
    read = of_another(tmp_path / "a.png", "ComfyUI", **skip, **texts)
    assert read["options"]["clip_skip"] == 2
    assert read["other"].keys() == {"<lora:ink:1.0:0.7>"}
    lora = {"model": ["4", 0], "lora_name": "ink.safetensors", "strength_model": 0.7}
    for kind, inputs, tag in (
        ("LoraLoader", {"strength_clip": 0.7}, "<lora:ink:0.7>"), ("LoraLoaderModelOnly", {}, "<lora:ink:0:0.7>"),
    ):  # fmt: skip
        read = of_another(
            tmp_path / "a.png", "ComfyUI", **skip, **{"6": texts["6"], "10": node(kind, **lora, **inputs)}
        )
        assert read["other"].keys() == {tag, "negative prompt, stop_at_clip_layer"}


def test_a_scale_that_the_model_reads() -> None:
    """It is the scale of guidance, and the other one ``true_cfg_scale``, unless it is 1."""
    flux = node("FluxGuidance", guidance=3.5, conditioning=["8", 0])
    for scale, options in ((1, {}), (4, {"true_cfg_scale": 4})):
        guider = node("CFGGuider", cfg=scale, model=["7", 0], positive=["20", 0], negative=["9", 0])
        graph = OTHERS["ComfyUI, of separate nodes"]["texts"]["prompt"] | {"20": flux, "3": guider}
        read = from_comfy_graph(json.dumps(graph))
        text = f"a fox\nSteps: 4, Sampler: Euler, CFG scale: {scale}, Distilled CFG Scale: 3.5, Seed: 1"
        for each, syntax in ((read, "comfy"), (from_infotext(text), "a1111")):
            assert each is not None
            assert (each["prompt"], each["guidance_scale"]) == ("a fox", 3.5)
            rest = {"noise": "torch"} if syntax == "comfy" else {}
            assert each["options"] == {"prompt_syntax": syntax, **rest, **options}
            assert not settings_left(each).keys() - {"batch size"}


@pytest.mark.parametrize("links", [["30", 0], ["3", 0], [], [{}], ["6"]])
def test_graphs_in_circles(tmp_path: Path, links: list[Any]) -> None:
    joined = node("StringConcatenate", string_a=links, string_b=links, delimiter=links, conditioning=links)
    nodes = {
        "6": node("CLIPTextEncode", text=["30", 0], clip=links),
        "30": joined,
        "7": joined,
        "10": node("A", model=links),
    }
    assert processor_seconds(lambda: of_another(tmp_path / "a.png", "ComfyUI", **nodes)) < 1


def test_samplers_of_comfyui_with_cfg_pp(tmp_path: Path) -> None:
    """The end of their names is a kind of guidance here."""
    choice = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler_ancestral_cfg_pp"}}
    name = "ComfyUI, of separate nodes"
    read = of_another(tmp_path / "a.png", name, **{"4": choice})
    assert find(read["sampler"])[0].name == "euler_a"
    assert read["options"]["guidance_method"] == "cfg_pp"
    assert "guidance_method" not in OTHERS[name]["read"]["options"]


def test_the_sampler_of_a1111_with_cfg_pp() -> None:
    """Its CFG scale of 12.5 is a lambda of 1."""
    read = from_infotext("a fox\nSteps: 20, Sampler: DDIM CFG++, Schedule type: Automatic, CFG scale: 7.5, Seed: 1")
    assert (find(read["sampler"])[0].name, read["guidance_scale"]) == ("ddim", 0.6)
    assert read["options"]["guidance_method"] == "cfg_pp"
    written = METADATA | {"sampler": "ddim", "guidance_scale": 0.6, "options": {"guidance_method": "cfg_pp"}}
    back = from_infotext(to_infotext(written))
    assert [back[name] for name in ("sampler", "guidance_scale")] == ["DDIM", 0.6]
    assert back["options"]["guidance_method"] == "cfg_pp"


def test_what_is_left_of_other_programs() -> None:
    assert find(OTHERS["stable-diffusion.cpp"]["read"]["sampler"])[0].name == "dpmpp_2m"
    assert settings_left(OTHERS["A1111"]["read"]) == {"Hires upscaler": "Latent", "<lora:x:0.5>": ""}
    facts = {"other": {"TI hashes": "bad: 1, a, b: 2", "User": "me", "Version": "1"}}
    assert (settings_left(facts), embeddings_in(facts)) == ({}, ["bad", "b"])
    assert embeddings_in({"embeddings": {"wool": {"file": "./wool.safetensors"}}}) == ["wool"]


@pytest.mark.parametrize("text", ["", "time: 3, place: here", "Steps: twenty", 'Steps: 1, Size: "a', "x\n\n"])
def test_texts_that_are_no_settings(text: str) -> None:
    assert from_infotext(text)["prompt"] == text.strip()


@pytest.mark.parametrize("part", ["a:", 'a: "', 'a: ["x", ', "a: [[", "a, ", " \n", "a b: c, ", "<lora:", " <lora:x> "])
def test_hostile_infotext_is_quick(part: str) -> None:
    """It takes hundredths of a second; where the time grows as the square of the text it takes tens of seconds."""
    text = f"x{part * (60_000 // len(part))}y"
    assert processor_seconds(lambda: from_infotext(text)) < 2


def test_blanks_around_other_networks() -> None:
    text = "a  <lora:x:1>  <lora:y:1> cat   \n  on <lora:x:1>\na mat"
    assert from_infotext(text)["prompt"] == "a  cat\n  on\na mat"


def test_blanks_and_networks_take_linear_time() -> None:
    def read() -> None:
        for text in (
            " " * 1_000_000 + "x",
            "x\n" + " " * 1_000_000 + "\nx",
            "<lora:a:1>" * 100_000,
            "<lora:a " * 100_000,
        ):
            assert len(from_infotext(f"a{text}")["prompt"]) <= len(text) + 1

    assert processor_seconds(read) < 5


def test_latin_1_text(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(chunk(b"tEXt", b"parameters\0caf\xe9")))
    assert read_metadata(path)["prompt"] == "café"
    path.write_bytes(png(chunk(b"tEXt", b"parameters\0" + "café".encode())))
    assert read_metadata(path)["prompt"] == "café"


def test_packed_text_after_the_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    packed = zlib.compress(json.dumps({"prompt": "x"}).encode())
    path.write_bytes(png(chunk(b"IDAT", b"?"), chunk(b"iTXt", b"canvax\0\1\0en\0\0" + packed)))
    assert read_metadata(path) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a PNG"),
        (png(), "holds no description"),
        (png(chunk(b"tEXt", b"workflow\0{}")), "settings of ComfyUI"),
        (png(chunk(b"tEXt", b"parameters\0a"))[:30], "damaged"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff\xff\xff\xfftEXt", "damaged"),
        (png(chunk(b"zTXt", b"parameters\0\0nonsense")), "damaged"),
        (png(chunk(b"zTXt", b"parameters\0\0" + zlib.compress(bytes(50_000_000)))), "longer than"),
        (png(*[chunk(b"tEXt", b"")] * 100_001), "parts"),
    ],
)
def test_unreadable_pictures(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        read_metadata(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": NaN}', "[" * 100_000])
def test_broken_json_falls_back_to_the_infotext(tmp_path: Path, text: str) -> None:
    path = with_text(tmp_path / "a.png", canvax=text, parameters="a cat")
    assert read_metadata(path)["prompt"] == "a cat"


def test_an_enormous_picture_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    path.write_bytes(png(chunk(b"IHDR", header), chunk(b"tEXt", b"parameters\0a cat")))
    assert read_metadata(path)["prompt"] == "a cat"
    assert module.MAX_TEXT < 2**23
