"""Calls that begin from an image: what is read, which steps are run, what stays as it was."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.cli import main
from canvax.cli.arguments import parse
from canvax.cli.images import gather, sized
from canvax.compile.monitor import counting
from canvax.denoise import Known, _blend_known
from canvax.errors import InputError
from canvax.images.inputs import fingerprint, read_images
from canvax.images.masks import around, box_of, extended, painted_over
from canvax.noise import initial_noise
from canvax.pipelines.generate import text_to_image
from canvax.pipelines.hints import hints
from canvax.pipelines.options import check_options
from canvax.pipelines.prepare import encode_images
from canvax.pipelines.request import Call, check_init_images, is_alone, make_request
from canvax.samplers import build_table, from_scheduler_config
from canvax.samplers.strength import steps_of_strength
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.work import check
from tests.support.refusals import refused

SIZE = 64


def draw(emoji: canvax.Pipeline, prompt: str = "a cat", **changes: Any) -> canvax.Result:
    return emoji(prompt, **{"seed": 1, "num_inference_steps": 4, "progress": False} | changes)


@pytest.fixture(scope="module")
def apple(emoji: canvax.Pipeline) -> Image.Image:
    return draw(emoji, "a red apple", num_inference_steps=8).images[0]


def half(white: int = 255) -> Image.Image:
    """White above, black below."""
    mask = Image.new("L", (SIZE, SIZE), 0)
    mask.paste(white, (0, 0, SIZE, SIZE // 2))
    return mask


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


# What stays


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hard", "soft", "graded"])
def test_kept_pixels_come_back_bit_for_bit(mode: str, emoji: canvax.Pipeline, apple: Image.Image) -> None:
    got = draw(emoji, image=apple, mask=half(), mask_mode=mode).images[0]
    np.testing.assert_array_equal(array(got)[SIZE // 2 :], array(apple)[SIZE // 2 :])
    assert np.abs(array(got)[: SIZE // 2] - array(apple)[: SIZE // 2]).mean() > 5


@pytest.mark.slow
def test_masks_of_one_colour(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    kept = draw(emoji, image=apple, mask=Image.new("L", apple.size, 0))
    np.testing.assert_array_equal(array(kept.images[0]), array(apple))
    white = Image.new("L", apple.size, 255)
    whole = draw(emoji, image=apple, mask=white)  # strength 1: nothing is owed to the image
    np.testing.assert_allclose(whole.latents, draw(emoji).latents, atol=1e-4)
    partly = draw(emoji, image=apple, mask=white, strength=0.75)
    np.testing.assert_allclose(partly.latents, draw(emoji, image=apple, strength=0.75).latents, atol=1e-5)


def test_a_crop_without_surroundings_is_a_crop() -> None:
    """An editing model begins from the image then, and does not read it as a reference."""
    call = Call("a fox", image="fox.png")
    assert is_alone(call, canvax.Options())
    assert not is_alone(call, canvax.Options(padding_mask_crop=0))


def test_strength_is_how_much_changes(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    changes = [
        np.abs(
            array(draw(emoji, image=apple, strength=strength, num_inference_steps=10).images[0]) - array(apple)
        ).mean()
        for strength in (0.1, 0.5, 1.0)
    ]
    assert changes == sorted(changes)
    assert changes[0] < changes[-1] / 3


def test_a_graded_mask_begins_later_where_it_is_darker() -> None:
    mask = np.array([[0.0, 0.3, 0.6, 1.0]], np.float32).reshape(1, 1, 4, 1)
    known = Known(mask, np.zeros((1, 1, 4, 1), np.float32), np.array([True]))
    seen = [np.asarray(_blend_known(np.ones((1, 1, 4, 1), np.float32), known, np.float32([part]))).ravel().tolist()
            for part in (0.0, 0.5, 0.75)]  # fmt: skip
    assert seen == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    mixed = _blend_known(np.ones((1, 1, 4, 1), np.float32), known._replace(graded=np.array([False])), np.float32([0]))
    np.testing.assert_allclose(np.asarray(mixed).ravel(), mask.ravel())


@pytest.mark.slow
def test_encode_image(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    latents = emoji.encode_image(apple)
    assert latents.shape == (1, 8, 8, 32)
    again = np.asarray(emoji.decode(latents))[0]
    error = np.mean((again - np.asarray(apple, np.float32) / 255) ** 2)
    assert -10 * np.log10(error) > 25  # the autoencoder's own loss


@pytest.mark.slow
def test_encoding_arrays_is_a_pure_function(small: canvax.Pipeline) -> None:
    """The latents of files of the same pixels, in any batch; under ``jit``, ``grad`` and ``vmap``."""
    side = 2 * small.model.networks.size_step
    images = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), np.uint8)
    wanted = small.encode_image([Image.fromarray(image) for image in images])
    floats = jnp.asarray(images, jnp.float32) / 255
    encode = jax.jit(lambda images, params: small.encode_image(images, params=params))
    several = jax.vmap(lambda image: small.encode_image(image)[0])
    for got in (small.encode_image(images), small.encode_image(floats), encode(floats, small.params), several(floats)):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert small.encode_image(images, height=side * 2, width=side).shape[:2] == (2, 2 * wanted.shape[1])

    def total(images: Any) -> Any:
        return (small.encode_image(images) ** 2).sum()

    slope = jax.grad(total)(floats)
    change = 3e-4 * slope / jnp.abs(slope).max()
    np.testing.assert_allclose(total(floats + change) - total(floats - change), 2 * (slope * change).sum(), rtol=0.05)
    outside = np.asarray(1.2 * floats), 255 * floats, 2 * floats - 1
    for wrong in (images[:, :-1], images[:0], floats.astype(bool), *outside):
        with refused("image"):
            small.encode_image(wrong)


def test_sizes_of_numpy_and_sizes_that_are_none(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    result = draw(emoji, image=apple, height=np.int64(SIZE), width=np.int64(SIZE), strength=0.5)
    assert result.metadata[0]["image_sha256"] == fingerprint(apple)
    np.testing.assert_array_equal(result.latents, draw(emoji, image=apple, strength=0.5).latents)


def test_an_inpainting_model_without_a_mask(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(emoji.model.networks), "inpaints", True)
    image = Image.new("RGB", (SIZE, SIZE))
    for more, hinted in (({"image": image}, True), ({"image": image, "mask": half()}, False), ({}, True)):
        request = make_request(emoji.model, Call("a cat", options=canvax.Options(progress=False), **more))
        assert [hint.argument for hint in hints(emoji.model, request)].count("image") == hinted


def test_an_edit_model_without_a_reference(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = emoji.model.networks.denoiser
    for alone in (True, False):
        monkeypatch.setattr(type(denoiser), "facts", replace(denoiser.facts, only_edits=alone))
        request = make_request(emoji.model, Call("a cat", options=canvax.Options(progress=False)))
        assert [hint.argument for hint in hints(emoji.model, request)] == ["image"] * alone


# Other canvases


def test_an_extended_image_keeps_its_proportions(apple: Image.Image) -> None:
    def size(wanted: tuple[int | None, int | None], **more: Any) -> tuple[int, int]:
        options = check_options(canvax.Options(outpaint=f"left={SIZE}", **more))
        return check_init_images(apple, None, None, wanted, 1, 8, options).size

    assert size((None, None)) == (SIZE, 2 * SIZE)
    assert size((SIZE // 2, SIZE)) == (SIZE // 2, SIZE)
    for wanted in ((SIZE, SIZE), (None, SIZE), (2 * SIZE, None)):
        with pytest.raises(InputError) as squeezed:
            size(wanted)
        assert squeezed.value.argument == "outpaint"
    assert size((SIZE, SIZE), padding_mask_crop=8) == (SIZE, SIZE)  # the size of the part


@pytest.mark.slow
def test_outpaint(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    (image,) = draw(emoji, "a red apple", image=apple, outpaint={"left": 32, "bottom": 8}).images
    assert image.size == (SIZE + 32, SIZE + 8)
    np.testing.assert_array_equal(array(image)[:SIZE, 32:], array(apple))
    assert array(image)[:, :32].std() > 0
    for same in ("left=32,bottom=8", (32, 0, 0, 8), "32,0,0,8", [32, 0, 0, 8]):
        assert canvax.Options(outpaint=same).outpaint == (32, 0, 0, 8)
    wide = extended(apple, (2, 0, 3, 1))
    np.testing.assert_array_equal(array(wide)[0, :3], array(apple)[0, [0, 0, 0]])
    new = np.asarray(around(half(), apple.size, (2, 0, 3, 1)))
    assert (new[:, :2] == 255).all()
    assert (new[-1] == 255).all()
    np.testing.assert_array_equal(new[:-1, 2:-3], np.asarray(half()))


def test_only_the_masked_part(emoji: canvax.Pipeline) -> None:
    large = Image.fromarray(np.random.default_rng(0).integers(0, 255, (150, 210, 3)).astype(np.uint8))
    mask = Image.new("L", large.size, 0)
    mask.paste(255, (100, 50, 130, 75))
    result = draw(emoji, image=large, mask=mask, padding_mask_crop=8)
    assert result.latents.shape == (1, 8, 8, 32)  # at the size of the model, whatever that of the image
    (image,) = result.images
    assert image.size == large.size
    changed = (array(image) != array(large)).any(axis=-1)
    assert changed[50:75, 100:130].mean() > 0.95
    changed[50:75, 100:130] = False
    assert not changed.any()


@pytest.mark.parametrize(
    ("masked", "padding", "size", "box"),
    [
        ((100, 50, 130, 75), 0, (64, 64), (100, 48, 130, 78)),  # grown to a square
        ((100, 50, 130, 75), 8, (64, 64), (92, 40, 138, 86)),
        ((0, 0, 30, 30), 10, (64, 64), (0, 0, 40, 40)),  # at an edge
        ((0, 0, 200, 50), 0, (64, 64), (0, 0, 200, 150)),  # more than there is
        ((100, 50, 120, 70), 0, (64, 128), (90, 50, 130, 70)),
        ((0, 0, 0, 0), 5, (64, 64), (0, 0, 210, 150)),  # nothing is masked
    ],
)
def test_boxes(masked: Any, padding: int, size: tuple[int, int], box: Any) -> None:
    mask = Image.new("L", (210, 150), 0)
    mask.paste(255, masked)
    got = box_of(mask, padding, *size)
    assert got == box


def test_fill(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    image = Image.new("RGB", (64, 64), (200, 30, 30))
    image.paste((0, 0, 255), (20, 20, 40, 40))
    mask = Image.new("L", image.size, 0)
    mask.paste(255, (20, 20, 40, 40))
    painted = array(painted_over(image, mask))
    assert np.abs(painted - [200, 30, 30]).max() <= 8  # no blue is left; the blurs have 8 bits
    everything = Image.new("L", image.size, 255)
    np.testing.assert_array_equal(array(painted_over(image, everything)), array(image))
    fills = ("original", "fill", "noise", "nothing")
    given = {"image": apple, "mask": half(), "strength": 0.5}
    found = [draw(emoji, **given, mask_fill=fill) for fill in fills]
    for i, one in enumerate(found):
        np.testing.assert_array_equal(array(one.images[0])[SIZE // 2 :], array(apple)[SIZE // 2 :])
        assert all(np.abs(one.latents - other.latents).mean() > 1e-3 for other in found[:i])
    assert found[-1].compilations == 0
    anew = [draw(emoji, image=apple, mask=half(), mask_fill=fill).latents for fill in fills[2:]]
    np.testing.assert_array_equal(*anew)  # from noise alone at strength 1


# Which steps


def test_rules_of_strength() -> None:
    """The published rules: 20 steps at 0.75 are 15 in diffusers, 16 in A1111, and 20 of 26 in ComfyUI."""
    assert steps_of_strength(0.75, 20, "diffusers", 1000) == (20, 5)
    assert steps_of_strength(0.75, 20, "a1111", 1000) == (20, 4)
    assert steps_of_strength(0.75, 20, "exact", 1000) == (26, 6)
    assert steps_of_strength(0.29, 100, "diffusers", 1000) == (100, 72)  # int() of 28.999...
    assert steps_of_strength(1.0, 20, "a1111", 1000) == (20, 0)
    assert steps_of_strength(1.0, 20, "exact", 1000) == (20, 0)
    with refused("strength"):
        steps_of_strength(0.01, 20, "diffusers", 1000)
    with refused("strength"):
        steps_of_strength(0.01, 20, "exact", 1000)


@pytest.mark.parametrize(
    ("sampler", "rows", "first"),
    [("ddim", (15, 10, 6), (701, 451, 251)), ("euler", (15, 10, 6), (701, 451, 251)), ("heun", (29, 19, 11), None),
     ("dpmpp_2m", (15, 10, 6), None), ("unipc", (15, 10, 6), None)],
)  # fmt: skip
def test_evaluations(sampler: str, rows: tuple[int, ...], first: tuple[int, ...] | None) -> None:
    """Counted in PyTorch diffusers 0.42 with 20 steps."""
    config = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    scheduler = from_scheduler_config({"_class_name": "DDIMScheduler", "clip_sample": False, **config})
    for i, strength in enumerate((0.75, 0.5, 0.3)):
        _, skip = steps_of_strength(strength, 20, "diffusers", 1000)
        table = build_table(scheduler, 20, sampler=sampler, spacing="leading", skip=skip)
        assert len(table) == rows[i]
        assert first is None or round(table.timestep[0]) == first[i]


def test_steps_asked_and_run_are_both_told(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    result = draw(emoji, image=apple, strength=0.5)
    told = {name: result.metadata[0][name] for name in ("num_inference_steps", "steps_run", "strength")}
    assert told == {"num_inference_steps": 4, "steps_run": 2, "strength": 0.5}


# What is read


def test_forms_of_an_image(tmp_path: Path, apple: Image.Image) -> None:
    pixels = np.asarray(apple)
    apple.convert("RGB").save(tmp_path / "a.png")
    for given in (apple, pixels, pixels[None], pixels.astype(np.float32) / 255, tmp_path / "a.png", [apple], (pixels,)):
        (image,) = read_images("image", given, 3)
        np.testing.assert_array_equal(np.asarray(image), pixels)
    assert len(read_images("image", np.stack([pixels] * 3), 3)) == 3
    assert read_images("mask", np.eye(8, dtype=bool), 1, grey=True)[0].getpixel((3, 3)) == 255


def test_rotation_and_transparency(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(tmp_path / "r.jpg", exif=exif)
    assert read_images("image", tmp_path / "r.jpg", 1)[0].size == (16, 24)
    (clear,) = read_images("image", Image.new("RGBA", (8, 8), (10, 20, 30, 0)), 1)
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    painted = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    painted.paste((0, 0, 0, 255), (0, 0, 4, 8))
    (mask,) = read_images("mask", painted, 1, grey=True)
    assert (mask.getpixel((0, 0)), mask.getpixel((7, 0))) == (255, 0)
    for colour in ((255, 255, 255), (226, 71, 122)):  # a soft brush on an empty layer
        strokes = np.zeros((8, 8, 4), np.uint8)
        strokes[:, 2:] = [(*colour, 0), (*colour, 60), (*colour, 130), (*(shade ^ 1 for shade in colour), 200),
                          (*colour, 255), (*colour, 255)]  # fmt: skip
        np.testing.assert_array_equal(read_images("mask", strokes, 1, grey=True)[0], strokes[..., 3])
    erased = np.dstack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3 + [np.full((16, 16), 255, np.uint8)])
    erased[:4, :, 3], erased[4, :, 3] = 0, 100
    (mask,) = read_images("mask", erased, 1, grey=True)
    np.testing.assert_array_equal(mask, 255 - erased[..., 3])
    palette = Image.fromarray(erased).quantize()
    assert read_images("mask", palette, 1, grey=True)[0].getpixel((0, 0)) == 255
    for level, white in ((255, 0), (0, 0)):  # black all over, and an empty layer
        (mask,) = read_images("mask", Image.new("RGBA", (8, 8), (0, 0, 0, level)), 1, grey=True)
        assert mask.getextrema() == (white, white)
    erased[..., 3] = 200  # all of it alike: the brightness
    assert np.ptp(read_images("mask", erased, 1, grey=True)[0]) > 100
    for mode in ("1", "L", "P", "I;16", "LA"):
        assert read_images("image", Image.new(mode, (8, 8)), 1)[0].mode == "RGB"


def test_several_processes_refuse_renoised_masks_before_anything_compiles(
    emoji: canvax.Pipeline, apple: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = canvax.Options(mask_blend="renoised", progress=False)
    request = make_request(emoji.model, Call("a cat", image=apple, mask=Image.new("L", (64, 64), 255), options=options))
    monkeypatch.setattr("canvax.parallel.multihost.is_spread", lambda mesh: True)
    monkeypatch.setattr(type(emoji.programs), "ready", lambda *_: pytest.fail("programs were made"))
    assert emoji.params is not None
    with counting() as counts, pytest.raises(canvax.InputError, match="mask_blend"):
        text_to_image(emoji.model, emoji.programs, emoji.params, request, str, counts)


def test_noise_of_an_encoding_is_not_the_initial_noise() -> None:
    """An encoder that says "zero, give or take one" shows the noise itself."""
    shape, seeds = (2, 8, 8, 4), [3, 2**64 - 1]
    options = SimpleNamespace(noise="philox")
    request: Any = SimpleNamespace(height=64, width=64, shape=shape, seeds=seeds, options=options)

    def features(*_: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.zeros((8, 8, 4), np.float32), np.ones((8, 8, 4), np.float32))]

    image = np.zeros((64, 64, 3), np.float32)
    programs: Any = SimpleNamespace(features=features)
    ready: Any = {"image encoder": None}
    found = encode_images(programs, ready, {}, request, [image], 0, sample=True)
    initial = initial_noise(seeds, shape[1:], "philox")
    for one, first in zip(found, initial, strict=True):
        assert 0.8 < one.std() < 1.2
        assert abs(np.corrcoef(one.reshape(-1), first.reshape(-1))[0, 1]) < 0.3


def test_kind_of_noise_has_no_effect_beside_latents(emoji: canvax.Pipeline, apple: Image.Image) -> None:
    call: dict[str, Any] = {"image": apple, "latents": np.ones((1, 8, 8, 32), np.float32), "strength": 0.5}
    with pytest.warns(canvax.HintWarning, match="latents"):
        found = draw(emoji, noise="torch", **call)
    with pytest.warns(canvax.HintWarning, match="latents"):  # which are no noise
        np.testing.assert_array_equal(found.latents, draw(emoji, **call).latents)


def test_images_that_ask_for_memory(tmp_path: Path, emoji: canvax.Pipeline) -> None:
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    with refused("image"):
        draw(emoji, image=tmp_path / "huge.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "huge.png").read_bytes()[:200])
    Image.new("RGB", (64, 64)).save(tmp_path / "a.gif")
    (tmp_path / "text.png").write_text("hello")
    frames = [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(2)]
    for name in ("two.png", "two.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
    Image.new("CMYK", (64, 64)).save(tmp_path / "print.jpg")
    for name in ("a.gif", "text.png", "two.png", "two.webp", "print.jpg", "cut.png"):
        with refused("image"):
            draw(emoji, image=tmp_path / name)


# The command line


def test_a_second_image_is_a_reference() -> None:
    for flag, names in (("--image", True), ("--mask", False)):
        with pytest.warns(canvax.HintWarning) as hinted:
            parse(["generate", "a cat", flag, "a.png", flag, "b.png"])
        assert ("--reference" in str(hinted[0].message)) == names


@pytest.mark.parametrize("bad", [{}, {0: None}, {1: None}, {0: (4, 4)}, {1: (4, 4)}, {2: (SIZE, SIZE)}])
def test_errors_of_references_are_about_their_argument(
    emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: dict[int, tuple[int, int] | None]
) -> None:
    """``image`` for the first and ``reference`` for the others; a third is too many here."""
    denoiser = emoji.model.networks.denoiser
    monkeypatch.setattr(type(denoiser), "facts", replace(denoiser.facts, edits=True, most_references=2))
    sizes, words = {0: (SIZE, SIZE), 1: (SIZE, SIZE)} | bad, ["generate", "a cat"]
    for i, size in sizes.items():
        words += ["--reference" if i else "--image", str(tmp_path / f"{i}.png")]
        if size:
            Image.new("RGB", size).save(words[-1])

    def run() -> None:
        calls, _ = gather(parse(words))
        assert sized(calls, emoji.model)

    for name in ["reference" if i else "image" for i in bad]:
        with pytest.raises(InputError) as caught:
            run()
        assert caught.value.argument == name
    if not bad:
        run()
    elif None not in bad.values():
        (first, *more) = [Image.new("RGB", size or (2, 2)) for size in sizes.values()]
        with pytest.raises(Rejected) as refused:
            check(JobRequest("a cat", image=first, references=tuple(more), seed=0), "emoji", emoji.model)
        assert refused.value.param == ("references" if max(bad) else "image")


@pytest.mark.parametrize("begins", [(), ("--strength", "0.5")])
def test_a_photo_whose_size_only_some_models_make(begins: tuple[str, ...], tmp_path: Path) -> None:
    """The error is about the photo, with a size near the model's in its proportions."""
    Image.new("RGB", (304, 200)).save(tmp_path / "odd.png")
    facts = SimpleNamespace(denoiser=SimpleNamespace(facts=SimpleNamespace(edits=False)), size_step=16)
    model: Any = SimpleNamespace(name="m", networks=facts, native_size=(512, 512))
    words = ["generate", "a cat", "--image", str(tmp_path / "odd.png"), *begins]
    calls, _ = gather(parse(words))
    with pytest.raises(InputError) as refusal:
        sized(calls, model)
    assert refusal.value.argument == "image"
    sides = [int(side) for side in re.findall(r"(?:width|height)=(\d+)", refusal.value.cure)]
    assert sides == [624, 416]
    model.networks.size_step = 8
    (call,) = sized(calls, model)
    assert (call.width, call.height) == (304, 200)


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emoji: canvax.Pipeline, apple: Image.Image,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """``test_again`` has what ``info`` and ``--from-image`` make of an image."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    apple.save("apple.png")
    half().save("mask.png")
    fast = ("--steps", "4", "-q")
    assert (
        main(["generate", "a cat", "--image", "apple.png", "--mask", "mask.png", "-s", "1", "-o", "one.png", *fast])
        == 0
    )
    want = draw(emoji, image=apple, mask=half()).images[0]
    with Image.open("one.png") as image:
        np.testing.assert_array_equal(array(image), array(want))
    assert main(["info", "one.png"]) == 0
    assert "not in the file" in capsys.readouterr().out
    lines = [{"prompt": "a cat", "image": "apple.png", "strength": 0.5}, {"prompt": "a dog"}]
    Path("prompts.txt").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", "--prompt-file", "prompts.txt", "-o", "many", *fast]) == 0
    assert len(os.listdir("many")) == 2
