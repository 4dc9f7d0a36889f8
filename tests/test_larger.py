"""Second passes, upscaling by tiles, variations between seeds, and sheets."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.call import OptionRecord
from canvax.cli import BAD_INPUT, main
from canvax.cli.arguments import parse
from canvax.compile.programs import Programs
from canvax.errors import InputError
from canvax.images.grid import make_sheet
from canvax.images.metadata import read_metadata
from canvax.models.configs import ClipVisionConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.noise import initial_noise, pasted_in_the_middle, slerp
from canvax.pipelines.generate import metadata, second_pass
from canvax.pipelines.prepare import noise_of
from canvax.pipelines.request import Call, make_request
from canvax.pipelines.safety import SafetyChecker
from canvax.pipelines.upscale import Tiles, fade, starts
from canvax.samplers import build_table
from canvax.scale.rows import NAMES
from canvax.settings import offered
from tests.support.refusals import refused


def draw(emoji: canvax.Pipeline, prompt: Any = "a fox", **changes: Any) -> canvax.Result:
    return emoji(prompt, **{"seed": 4, "num_inference_steps": 6, "progress": False} | changes)


def upscale(emoji: canvax.Pipeline, image: Any, **changes: Any) -> canvax.Result:
    usual = {"seed": 4, "num_inference_steps": 6, "options": canvax.Options(progress=False)}
    return emoji.upscale(image, "a fox", **usual | changes)


def array(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(float)


# A second pass


@pytest.mark.parametrize("method", ["pixel", pytest.param("latent", marks=pytest.mark.weekly)])
@pytest.mark.slow
def test_a_second_pass_keeps_the_composition(method: Any, emoji: canvax.Pipeline) -> None:
    base = draw(emoji)
    larger = draw(emoji, hires=2, hires_method=method, hires_strength=0.3)
    assert larger.images[0].size == (128, 128)
    small = larger.images[0].resize((64, 64), Image.Resampling.BOX)
    direct = draw(emoji, height=128, width=128).images[0].resize((64, 64), Image.Resampling.BOX)
    near, far = (np.abs(array(one) - array(base.images[0])).mean() for one in (small, direct))
    assert near < far / 2
    assert larger.metadata[0]["height"] == 64
    assert larger.metadata[0]["options"]["hires"] == 2
    again = draw(emoji, hires=2, hires_method=method, hires_strength=0.6, hires_steps=5, hires_sampler="euler",
                 hires_prompt="a red fox", prompt_syntax="a1111")  # fmt: skip
    assert again.compilations == 0
    assert np.abs(again.pixels - larger.pixels).mean() > 1e-3


@pytest.mark.slow
def test_each_image_is_recorded_with_its_second_prompt(emoji: canvax.Pipeline) -> None:
    settings: dict[str, Any] = {"hires": 2, "hires_steps": 2, "num_inference_steps": 2}
    both = draw(emoji, ["a fox", "a cat"], hires_prompt=["a red fox", "a red cat"], **settings)
    assert [one["options"]["hires_prompt"] for one in both.metadata] == ["a red fox", "a red cat"]
    told = both.metadata[1]
    alone = draw(
        emoji, told["prompt"], seed=told["seed"], num_inference_steps=2, options=canvax.Options(**told["options"])
    )
    # A batch of another size is another program, and the first step of this model enlarges its rounding.
    apart = np.linalg.norm(alone.latents[0] - both.latents[1]) / np.linalg.norm(both.latents[1])
    assert apart < 1e-3


def test_the_last_pass(emoji: canvax.Pipeline) -> None:
    image = Image.new("RGB", (64, 64))
    first, plain, again = (
        make_request(emoji.model, Call("a fox", options=canvax.Options(hires=hires), image=image))
        for hires, image in ((2, None), (1, None), (1, image))
    )
    last = second_pass(emoji.model, first)
    assert [request.is_last_pass for request in (first, last, plain, again)] == [False, True, True, True]


def test_second_prompts_for_several_images_of_each(emoji: canvax.Pipeline) -> None:
    options = canvax.Options(hires=2, hires_prompt=["a red fox", "a red cat"])
    request = make_request(emoji.model, Call(["a fox", "a cat"], num_images_per_prompt=2, options=options))
    recorded = [one["options"]["hires_prompt"] for one in metadata(emoji.model, request)]
    assert recorded == ["a red fox"] * 2 + ["a red cat"] * 2
    one, two, three, four = second_pass(emoji.model, request).texts.stages[0].parts[0]
    assert one == two != three == four


def test_a_second_prompt_after_an_encoded_one(emoji: canvax.Pipeline) -> None:
    settings: dict[str, Any] = {"hires": 2, "hires_steps": 2, "num_inference_steps": 2, "hires_prompt": "a red cat"}
    got, want = (draw(emoji, prompt, **settings).latents for prompt in (emoji.encode("a fox"), "a fox"))
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.slow
def test_the_second_pass_is_image_to_image(emoji: canvax.Pipeline) -> None:
    base = draw(emoji).images[0].resize((128, 128), Image.Resampling.LANCZOS)
    want = draw(emoji, image=base, strength=0.5, strength_rule="exact")
    got = draw(emoji, hires=2, hires_strength=0.5)
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


def test_a_table_needs_another_sampler_for_the_second_pass(emoji: canvax.Pipeline) -> None:
    call = Call("a fox", sampler=build_table(emoji.model.scheduler, 6, sampler="euler"))
    with refused("sampler"):
        second_pass(emoji.model, make_request(emoji.model, replace(call, options=canvax.Options(hires=2))))
    options = canvax.Options(hires=2, hires_sampler="ddim")
    assert second_pass(emoji.model, make_request(emoji.model, replace(call, options=options))).sampler == "ddim"


def test_an_inpainting_model_has_no_second_pass(emoji: canvax.Pipeline) -> None:
    """Without an image the error names the model."""
    config = emoji.model.networks.denoiser.cfg  # type: ignore[attr-defined]
    denoiser = UNetDenoiser(replace(config, in_channels=2 * config.out_channels + 1))
    model = replace(emoji.model, networks=replace(emoji.model.networks, denoiser=denoiser))
    with pytest.raises(canvax.InputError) as caught:
        second_pass(model, make_request(model, Call("a fox", options=canvax.Options(hires=2))))
    assert caught.value.argument == "hires"
    assert model.name in caught.value.problem


# Variations


def test_slerp_stays_noise() -> None:
    one, other = (initial_noise([seed, seed + 1], (16, 16, 4)) for seed in (1, 9))
    for part in (0.25, 0.5, 0.75):
        mixed = slerp(one, other, part)
        np.testing.assert_allclose(mixed.std(axis=(1, 2, 3)), 1, atol=0.05)  # a straight line would give 0.71
    np.testing.assert_allclose(slerp(one, other, 0.0), one, atol=1e-6)
    np.testing.assert_allclose(slerp(one, other, 1.0), other, atol=1e-6)
    np.testing.assert_array_equal(slerp(one, one, 0.5), one)


def test_variations(emoji: canvax.Pipeline) -> None:
    base, other = draw(emoji, seed=4), draw(emoji, seed=9)
    ends = [draw(emoji, variation_seed=9, variation_strength=part) for part in (0.0, 1.0)]
    np.testing.assert_array_equal(ends[0].latents, base.latents)
    np.testing.assert_allclose(ends[1].latents, other.latents, atol=1e-4)
    near, far = (draw(emoji, variation_seed=9, variation_strength=part).pixels for part in (0.1, 0.5))
    assert np.abs(near - base.pixels).mean() < np.abs(far - base.pixels).mean()
    assert ends[1].metadata[0]["options"] == {"variation_seed": 9, "variation_strength": 1.0}


@pytest.mark.slow
def test_a_variation_is_the_same_alone_and_in_any_call(emoji: canvax.Pipeline) -> None:
    """The place in a call changes nothing, and the metadata of each image generates it again."""
    vary: dict[str, Any] = {"variation_seed": 9, "variation_strength": 0.3}
    options = canvax.Options(**vary)
    calls = [Call("a fox", num_images_per_prompt=n, seed=seed, options=options) for n, seed in ((3, 4), (1, 6))]
    noise = [noise_of(emoji.model, emoji._request(call, None, as_set=True)) for call in calls]
    np.testing.assert_array_equal(noise[0][2:], noise[1])
    result = draw(emoji, num_images_per_prompt=2, **vary)
    told = result.metadata[1]
    alone = draw(emoji, seed=told["seed"], **told["options"])
    np.testing.assert_allclose(alone.latents[0], result.latents[1], atol=1e-4)


def test_seed_size(emoji: canvax.Pipeline) -> None:
    noise, own = np.zeros((1, 6, 4, 1), np.float32), np.ones((1, 2, 8, 1), np.float32)
    np.testing.assert_array_equal(pasted_in_the_middle(noise, own)[0, :, :, 0].sum(axis=1), [0, 0, 4, 4, 0, 0])
    same = draw(emoji, seed_size=(64, 64))
    np.testing.assert_array_equal(same.latents, draw(emoji).latents)


# Tiles


def test_tiles_cover_all_and_fade_into_each_other() -> None:
    for length, tile, overlap in ((64, 64, 16), (72, 64, 16), (128, 64, 16), (200, 64, 8), (1000, 512, 128)):
        places = starts(length, tile, overlap, 8)
        assert places[0] == 0
        assert places[-1] == length - tile
        assert all(b - a <= tile - overlap + 8 for a, b in pairwise(places))
        weight = np.zeros(length)
        for place in places:
            weight[place : place + tile] += fade(place, tile, length, overlap)
        assert weight.min() > 0


def lines(pixels: np.ndarray, smooth: np.ndarray, places: list[int], tile: int = 64) -> list[float]:
    """How sharply rows and columns bend where tiles begin and end, as against elsewhere: the lines of a grid.

    Of the means over whole rows and columns of what the tiles change. A line of a grid goes through all of a row, and
    the texture of an image does not.
    """
    changes = pixels - smooth
    edges = {edge + i for place in places for edge in (place, place + tile) for i in (-2, -1)}
    found = []
    for axis in (0, 1):
        bends = np.abs(np.diff(changes.mean(axis=(1 - axis, 2)), 2))
        there = sorted(edge for edge in edges if 6 <= edge < len(bends) - 6)
        found.append(bends[there].mean() / np.delete(bends, there)[6:-6].mean())
    return found


def test_what_borders_of_tiles_are_drawn_like_is_not_seen(emoji: canvax.Pipeline) -> None:
    """The bundled model, trained on drawings with white margins, whitens the borders of tiles: by so much in a run."""
    whitened = 0.19 * np.exp(-np.arange(32) / 2)
    border = np.maximum.outer(*[np.concatenate([whitened, whitened[::-1]])] * 2)[..., None]
    source = Image.new("RGB", (96, 96), (90, 90, 90))
    tiles = Tiles(emoji.model, source, scale=3, overlap=None, seed=4, noise="philox")
    rng, plain = np.random.default_rng(0), np.full((288, 288, 3), 90 / 255, np.float32)
    texture = rng.normal(0, 0.03, plain.shape).astype(np.float32)
    for i, (row, column) in enumerate(tiles.places):
        where = np.s_[row : row + 64, column : column + 64]
        tiles.add(i, (plain + texture)[where] + border)
    assert max(lines(tiles.pixels(), plain, sorted({row for row, _ in tiles.places}))) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [pytest.param("", marks=pytest.mark.weekly), "a fox"])
def test_no_grid(prompt: str, emoji: canvax.Pipeline) -> None:
    fox = draw(emoji, hires=2, num_inference_steps=20).images[0]
    result = emoji.upscale(fox, prompt, scale=3, strength=0.2, seed=4, options=canvax.Options(progress=False))
    overlap = result.metadata[0]["upscale"]["overlap"]
    smooth = np.asarray(fox.resize((384, 384), Image.Resampling.LANCZOS), np.float32) / 255
    assert max(lines(result.pixels[0], smooth, starts(384, 64, overlap, 8))) < 1.3


@pytest.mark.slow
def test_no_seam(emoji: canvax.Pipeline) -> None:
    """Steps between neighbouring pixels are as large where tiles meet as elsewhere."""
    image = draw(emoji, num_inference_steps=20).images[0]
    (pixels,) = upscale(emoji, image, scale=3, strength=0.3, num_inference_steps=20).pixels
    steps = np.abs(np.diff(pixels, axis=1)).mean(axis=(0, 2))
    borders = [edge for place in starts(192, 64, 24, 8) for edge in (place - 1, place + 63) if 0 < edge < 191]
    inside = np.delete(steps, borders)
    assert steps[borders].mean() < 1.3 * inside.mean()


@pytest.mark.slow
def test_upscale(emoji: canvax.Pipeline) -> None:
    image = draw(emoji).images[0].resize((50, 37))
    first = upscale(emoji, image, scale=2.5)
    assert first.images[0].size == (125, 92)
    assert first.metadata[0]["upscale"] == {"scale": 2.5, "overlap": 24}
    again = upscale(emoji, image, scale=4, strength=0.2, seed=1)
    assert again.images[0].size == (200, 148)
    assert again.compilations == 0  # another scale is more tiles of the same shape
    same = upscale(emoji, image, scale=2, strength=0.01, num_inference_steps=100)
    want = image.resize((100, 74), Image.Resampling.LANCZOS)
    assert np.abs(array(same.images[0]) - array(want)).mean() < 12  # hardly changed but by the autoencoder


def refusing(emoji: canvax.Pipeline, *places: int) -> canvax.Pipeline:
    """A pipeline with a safety checker that refuses these images, counted over all calls."""
    numbers = count()

    class Refuses(SafetyChecker):
        def flags(self, pixels: np.ndarray) -> list[bool]:
            return [next(numbers) in places for _ in pixels]

    return canvax.Pipeline(emoji.model, emoji.programs, emoji.params, Refuses(ClipVisionConfig(), {}))


@pytest.mark.parametrize(("places", "refused"), [((), False), ((0,), True), ((3,), True), ((5,), True)])
def test_an_upscaled_image_is_refused_with_any_of_its_tiles(
    places: tuple[int, ...], refused: bool, emoji: canvax.Pipeline
) -> None:
    result = upscale(refusing(emoji, *places), Image.new("RGB", (60, 30)), scale=3, batch=2)
    assert result.metadata[0]["nsfw"] is refused
    assert getattr(result.images[0], "metadata")["nsfw"] is refused  # noqa: B009


def test_a_stopped_run_has_nothing_to_refuse(emoji: canvax.Pipeline) -> None:
    checked = refusing(emoji, 0, 1)
    stopped = draw(checked, denoising_end=0.5, num_images_per_prompt=2)
    assert list(stopped.images) == []
    assert len(stopped.metadata) == 2
    assert np.abs(stopped.latents).max() > 0
    rest = draw(checked, denoising_start=0.5, num_images_per_prompt=2, latents=stopped.latents)
    assert [one["nsfw"] for one in rest.metadata] == [True, True]


@pytest.mark.parametrize(
    ("changes", "decoded"),
    [
        ({}, []), ({"denoising_end": 0.5}, []),
        pytest.param({"num_images_per_prompt": 3}, [], marks=pytest.mark.slow),
        pytest.param({"image": Image.new("RGB", (64, 64)), "mask": Image.new("L", (64, 64), 255)}, [],
                     marks=pytest.mark.slow),
        pytest.param({"hires": 1.5, "hires_method": "latent"}, [], marks=pytest.mark.slow),
        pytest.param({"hires": 1.5}, [True], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_latents_need_no_decoder(
    changes: Any, decoded: list[bool], emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the safety checker. Only a second pass reads the pixels of the first."""
    checked, want = refusing(emoji, 0, 1, 2), draw(emoji, **changes)
    wanted, programs = [], Programs.wanted

    def spied(*arguments: Any) -> Any:
        wanted.append(programs(*arguments))
        return wanted[-1]

    monkeypatch.setattr(Programs, "wanted", spied)
    emoji.programs._recent.clear()
    result = draw(checked, output_type="latent", **changes)
    assert wanted
    assert [True for each in wanted if "decoder" in each] == decoded
    assert len(result.pixels) == 0
    np.testing.assert_array_equal(result.images, want.latents)
    np.testing.assert_array_equal(result.latents, want.latents)
    assert result.metadata == want.metadata
    with refused("output_type"):
        result.grid()


@pytest.mark.slow
def test_upscale_with_a_table(emoji: canvax.Pipeline) -> None:
    """A table begins where it was built to, as the strength says for a name."""
    image = draw(emoji).images[0]
    named = upscale(emoji, image, scale=1.5, sampler="ddim", num_inference_steps=10, strength=0.3)
    table = build_table(emoji.model.scheduler, 10, sampler="ddim", skip=7)
    own = upscale(emoji, image, scale=1.5, sampler=table, num_inference_steps=None)
    np.testing.assert_array_equal(own.pixels, named.pixels)
    with refused("strength"):
        upscale(emoji, image, sampler=table, num_inference_steps=None, strength=0.5)


def test_a_wrong_argument_of_upscale_is_answered_with_its_own(emoji: canvax.Pipeline) -> None:
    form = inspect.signature(canvax.Pipeline.upscale).parameters
    own = {name for name in form if name not in ("self", "more")}
    with pytest.raises(InputError) as caught:
        emoji.upscale(Image.new("RGB", (64, 64)), zzzz=1)  # type: ignore[call-arg]
    listed = str(caught.value).partition("it takes ")[2].partition(" and the fields")[0]
    assert set(listed.split(", ")) == own


# The command line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emoji: canvax.Pipeline) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    return tmp_path


def test_sheet_of_labels() -> None:
    images = [Image.new("RGB", (40, 30), (i * 40, 0, 0)) for i in range(6)]
    sheet = make_sheet(images, ["a", "something long", "c"], ["x", "y"])
    assert sheet.width > 3 * 40
    found = {pixel for _, pixel in sheet.getcolors(100_000) or []}
    assert {(i * 40, 0, 0) for i in range(6)} <= found


def test_sheet(here: Path, emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sheet", "a fox", "--x", "steps=2,3", "--y", "sampler=Euler,DPM++ 2M", "-s", "4", "--json"]
    assert main([*words, "-o", "sheet.png"]) == 0
    report = json.loads(capsys.readouterr().out)
    told = [(one["num_inference_steps"], one["sampler"], one["seed"]) for one in report["metadata"]]
    assert told == [(2, "euler", 4), (3, "euler", 4), (2, "dpmpp_2m", 4), (3, "dpmpp_2m", 4)]
    assert main([*words, "-o", "again.png"]) == 0
    assert json.loads(capsys.readouterr().out)["compilations"] == 0
    want = draw(emoji, num_inference_steps=3, sampler="dpmpp_2m").images[0]
    with Image.open(here / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
        corner = pixels[sheet.height - 64 :]  # the last row
        cell = (sheet.width - (left := _left(pixels))) // 2
        found = corner[:, left + cell + (cell - 64) // 2 :][:, :64]
    np.testing.assert_array_equal(found, np.asarray(want))


def _left(pixels: np.ndarray) -> int:
    """Width of the labels: they were measured with the same font."""
    blank = make_sheet([Image.new("RGB", (64, 64))] * 4, ["steps 2", "steps 3"], ["Euler", "DPM++ 2M"])
    assert blank.size == (pixels.shape[1], pixels.shape[0])
    columns = (np.asarray(blank)[-64:] == 0).all(axis=(0, 2))
    cells = np.flatnonzero(columns)
    width = (cells[-1] - cells[0] + 1 - 64) if len(cells) > 64 else 0
    return int(cells[0]) - (width - 64) // 2


@pytest.mark.slow
def test_sizes_along_a_sheet(here: Path, emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells have the largest size, and smaller images are in their middle."""
    words = ["sheet", "a fox", "--x", "size=96x64,64x64", "--steps", "2", "-s", "4", "-q"]
    assert main([*words, "-o", "sheet.png", "--json"]) == 0
    metadata = json.loads(capsys.readouterr().out)["metadata"]
    assert [(one["width"], one["height"]) for one in metadata] == [(96, 64), (64, 64)]
    want = np.asarray(emoji("a fox", width=64, height=64, num_inference_steps=2, seed=4, progress=False).images[0])
    with Image.open("sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"))[-64:]
    cell = pixels.shape[1] // 2
    np.testing.assert_array_equal(pixels[:, cell + (cell - 64) // 2 :][:, :64], want)


def test_a_load_says_which_parts_were_chosen(
    here: Path, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How a single file is read is for ``canvax info``."""
    facts = {"kind": "an SD: it has its arrays", "vae": "orangemix, the first file that fits"}
    monkeypatch.setattr(type(emoji.model), "reasons", facts)
    assert main(["generate", "a fox", "--steps", "2"]) == 0
    shown = capsys.readouterr().err
    assert facts["vae"] in shown
    assert facts["kind"] not in shown


def test_models_along_a_sheet(here: Path, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model with each VAE is loaded once, whatever the other cells are."""
    loaded = []
    monkeypatch.setattr("canvax.cli.sheet.check_against_model", lambda *_: None)
    monkeypatch.setattr(canvax, "load", lambda model, **more: loaded.append((model, more.get("vae"))) or emoji)
    words = ["--steps", "2", "-s", "4", "-q"]
    assert main(["sheet", "a fox", "--x", "model=emoji,other", "--y", "vae=one,two", *words, "-o", "a.png"]) == 0
    assert loaded == [("emoji", "one"), ("other", "one"), ("emoji", "two"), ("other", "two")]
    loaded.clear()
    assert main(["sheet", "--x", "model=emoji,other", "--y", "prompt=a fox;a cat", *words, "-o", "b.png"]) == 0
    assert loaded == [("emoji", None), ("other", None)]


@pytest.mark.slow
def test_upscale_command(here: Path, emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    draw(emoji).images[0].save("fox.png")
    assert main(["upscale", "fox.png", "-p", "a fox", "-s", "4", "--steps", "6", "-o", "big.png", "-q"]) == 0
    with Image.open("big.png") as image, Image.open("fox.png") as small:
        np.testing.assert_array_equal(array(image), array(upscale(emoji, small).images[0]))
    capsys.readouterr()
    assert main(["upscale", "fox.png", "--steps", "6", "-o", "plain.png", "-q"]) == 0
    assert read_metadata("plain.png")["upscale"]["prompt"] == "a fox"  # that of the file, which no tile was given
    again = emoji.upscale(draw(emoji).images[0], num_inference_steps=6, options=canvax.Options(progress=False))
    assert again.metadata[0]["upscale"]["prompt"] == "a fox"


def test_what_upscale_takes_in_python_is_a_flag_of_its_command() -> None:
    """But for masks, and for what has no meaning for tiles."""
    flags = vars(parse(["upscale", "fox.png"]))
    missing = {name for name in offered(OptionRecord, "command") if name not in flags}
    assert {name for name in missing if not name.startswith(("hires", "mask"))} == {"outpaint", "padding_mask_crop"}


def test_what_rows_take_is_a_flag_of_a_batch() -> None:
    """For rows that do not say otherwise."""
    flags = vars(parse(["batch", "rows.jsonl", "-o", "out"]))
    assert set(NAMES) - flags.keys() == {"prompt"}


def test_variations_do_not_depend_on_the_batch_size(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are the same, and the command that info prints for the last one generates it again."""
    words = ["generate", "a fox", "-n", "3", "-s", "4", "--steps", "4", "--variation-seed", "9", "-q"]
    for size in ("1", "2"):
        assert main([*words, "--variation-strength", "0.6", "-b", size, "-o", f"by-{size}"]) == 0
    last = sorted(Path("by-2").iterdir())[-1]
    capsys.readouterr()
    assert main(["info", str(last)]) == 0
    again = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert main([*again[1:], "-q", "-o", "again.png"]) == 0
    assert main(["generate", "--from-image", str(last), "-q", "-o", "from.png"]) == 0
    alone = sorted(Path("by-1").iterdir())[-1]
    with Image.open(last) as one, Image.open(alone) as other:
        assert np.abs(array(one) - array(other)).max() <= 1
        assert (np.abs(array(one) - array(other)) > 0).mean() < 0.01
        for path in ("again.png", "from.png"):
            with Image.open(path) as image:
                np.testing.assert_array_equal(array(image), array(other))


def test_preview(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a grid of the images as they are seen on the way, and goes in the end."""
    seen: list[np.ndarray] = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        replace(source, target)
        with Image.open(target) as image:
            seen.append(array(image))

    monkeypatch.setattr("canvax.cli.preview.os.replace", watched)
    words = ["generate", "a fox", "a cat", "--steps", "8", "-s", "4", "-q", "--json"]
    assert main([*words, "-o", "out", "--preview", "now.png"]) == 0
    assert not Path("now.png").exists()
    assert {image.shape for image in seen} == {(64, 128, 3)}
    with Image.open("out/00000-4.png") as fox, Image.open("out/00001-5.png") as cat:
        final = np.concatenate([array(fox), array(cat)], axis=1)
    assert np.abs(seen[-1] - final).mean() < 3 < np.abs(seen[0] - final).mean()
    assert not list(here.glob(".canvax-*"))
    seen.clear()
    assert main(["sheet", "a fox", "--x", "seed=1,2", "--steps", "8", "-q", "-o", "out", "--preview", "now.png"]) == 0
    assert {image.shape for image in seen} == {(64, 128, 3)}
    Path("now.png").write_text("mine")
    assert main([*words, "-o", "more", "--preview", "now.png"]) == BAD_INPUT
    assert main([*words, "-o", "more", "--preview", "nowhere/now.png"]) == BAD_INPUT
    assert main([*words, "-o", "more", "--preview", "now.txt"]) == BAD_INPUT
    assert Path("now.png").read_text() == "mine"
