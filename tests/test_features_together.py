"""Features that meet in one call: every pair of levels of every two features, in a pairwise covering array.

An image must depend on nothing but its arguments: not on the other images of its call, not on its place among them, not
on how many devices there are. And its metadata must be enough to generate it again. ``feature_cases`` has the features;
pairs that no call can have are refused with an error that names both.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import canvax
from canvax import ImagePrompt
from canvax.call import Call
from canvax.cli.adapters import split_weight
from canvax.cli.again import again
from canvax.cli.arguments import parse
from canvax.cli.images import gather
from canvax.cli.info import image_info
from canvax.images.convert import to_pil
from canvax.images.metadata import save_image
from canvax.pipelines.generate import metadata
from canvax.pipelines.request import Request
from canvax.samplers import build_table, solvers
from canvax.scale.work import joined
from tests.support.covering import Pair, Row, all_pairs, covering_array, pairs_of, with_rare
from tests.support.feature_cases import FACTORS, PLAIN, REFUSED, Studio, photo, reproducible

_SHARED = {name: levels for name, levels in FACTORS.items() if name != "devices"}
ROWS = with_rare(covering_array(_SHARED, REFUSED), "devices", "1", "8")


def named(row: Row) -> str:
    return ",".join(level if name == "model" else f"{name}={level}" for name, level in row.items()
                    if level != PLAIN[name] or name == "model")  # fmt: skip


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return Studio(tmp_path_factory.mktemp("studio"))


def test_every_pair_is_covered() -> None:
    met = set().union(*map(pairs_of, ROWS))
    assert met == all_pairs(FACTORS, REFUSED)


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """How far two images or latents are apart, where 1 is their standard deviation; at least that of noise."""
    return float(np.abs(got - want).max() / max(1.0, float(want.std())))


def tolerance(row: Row) -> float:
    """What rounding may do.

    In float32 sums in another order differ by 1e-7 of their terms, which a few evaluations of a random network bring to
    1e-5. A second pass begins from pixels of 8 bits, of which one may be rounded the other way: 1/255.
    """
    return 2e-2 if row["end"] == "pixel" else 1e-4


def ordinary(row: Row) -> bool:
    """Whether a row is in the ordinary run, which has few and of one model."""
    return (row["model"], row["weights"], row["devices"], row["end"]) == ("sd", "float32", "1", "whole")


SAMPLE = [row for row in ROWS if ordinary(row)][:1]


EVERY_ROW = pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=named(row), marks=[] if row in SAMPLE else pytest.mark.weekly if i % 24 else pytest.mark.slow
        )
        for i, row in enumerate(ROWS)
    ],
)


@pytest.mark.slow
@EVERY_ROW
def test_an_image_is_its_arguments_alone(
    row: Row, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studio.call(row, [0, 1], row["devices"]) as (pipe, call):
        first = pipe(**call)
    with studio.call(row, [2, 0], "1") as (pipe, call):
        second = pipe(**call)
        # Of a guidance of 1 the prompt's half is all there is: what one half alone is given must not change places.
        guided = pipe(**call | {"guidance_scale": 1.00001}) if row["guidance"] == "off" else second
    limit = max(tolerance(row), 1e-3)
    assert apart(guided.latents[1], second.latents[1]) <= limit
    limit = tolerance(row)
    assert np.isfinite(first.latents).all()
    assert apart(first.latents[0], second.latents[1]) <= limit
    assert apart(first.latents[1], second.latents[1]) > 1e-2  # its neighbour is another image
    if len(first.pixels):
        assert apart(first.pixels[0], second.pixels[1]) <= 10 * limit
    assert first.metadata[0] == second.metadata[1]
    if not reproducible(row):
        return
    monkeypatch.chdir(studio.root)  # files are recorded without their folders
    call = from_metadata(studio, row, second, tmp_path)
    with studio.call(row, [0], "1") as (pipe, _), as_recorded(pipe, row, second):
        repeated = pipe(**vars(joined([call, call], progress=False)))
    assert apart(repeated.latents[0], second.latents[1]) <= limit
    assert apart(repeated.pixels[0], second.pixels[1]) <= 10 * limit
    assert repeated.metadata[0] == second.metadata[1]


@EVERY_ROW
def test_calls_in_two_threads_are_as_alone(row: Row, studio: Studio) -> None:
    with studio.call(row, [0, 1], "1") as (pipe, call):
        calls = [call, studio.keywords(row, [2, 0], pipe)]
        alone = [pipe(**call) for call in calls]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda call: pipe(**call), calls * 2))
    for got, want in zip(together, alone * 2, strict=True):
        np.testing.assert_array_equal(got.latents, want.latents)
        assert got.metadata == want.metadata


def from_metadata(studio: Studio, row: Row, result: canvax.Result, folder: Path) -> Call:
    """The call for the second image of a result, as ``--from-image`` reads it from the image's file.

    The command that ``canvax info`` prints asks for the same.
    """
    record = result.metadata[1]
    assert record.get("quantize", "float32") == row["weights"]
    save_image(folder / "it.png", to_pil(result.pixels[1:])[0], record)
    words = ["generate", "--from-image", str(folder / "it.png"), *studio.flags(row, 0)]
    (call,), source = gather(given := parse(words))
    assert list(source.controlnet or ()) == list(map(str, record.get("controlnet", ())))
    (command,) = image_info(folder / "it.png")["commands"]
    names = studio.names(row, 0)
    printed = [re.sub("|".join(names), lambda name: names[name[0]], word) for word in shlex.split(command)[1:]]
    arguments = parse(printed)
    (same,), other = gather(arguments)
    assert vars(same) == vars(call)
    assert (other.dtype, other.quantize, Path(other.model)) == (source.dtype, source.quantize, Path(source.model))
    assert (arguments.ip_encoder is None) == (row["image_prompt"] == "none")
    for network in ("controlnet", "ip_adapter"):
        files = [[Path(file).resolve() for file in getattr(one, network) or ()] for one in (given, arguments)]
        assert files[0] == files[1]
    adapters = [(Path(entry["file"]), entry["weight"]) for entry in record.get("adapters", {}).values()]
    assert [split_weight(text) for text in arguments.lora] == [(f"./{file.name}", weight) for file, weight in adapters]
    return call


@contextmanager
def as_recorded(pipe: canvax.Pipeline, row: Row, result: canvax.Result) -> Iterator[None]:
    """With the adapters beside the weights that an image had, for which ``--from-image`` has no flag."""
    if row["adapters"] != "beside":
        yield
        return
    pipe.adapters.set({name: entry["weight"] for name, entry in result.metadata[1]["adapters"].items()})
    yield
    pipe.adapters.set({"clay": 0.0, "wool": 0.0})


def described(model: Any, programs: Any, params: Any, request: Request, *_: Any) -> canvax.Result:
    """The result of a request without its images."""
    blank = np.zeros((len(request.prompts), 8, 8, 3), np.float32)
    indices = list(range(len(blank)))
    return canvax.Result(to_pil(blank), blank, blank, metadata(model, request), {}, 0, indices)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=named(row), marks=pytest.mark.slow if i % 4 else []) for i, row in enumerate(ROWS)]
)
def test_info_prints_a_command_for_the_same_image(
    row: Row, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or says what the command does not repeat."""
    for name in ("text_to_image", "two_passes"):
        monkeypatch.setattr(f"canvax.pipelines.pipeline.{name}", described)
    row = row | {"watch": "none"}  # which needs the run itself
    with studio.call(row, [0, 1], "1") as (pipe, call):
        other = pipe(**call)
    with studio.call(row, [2, 0], "1") as (pipe, call):
        result = pipe(**call)
    assert other.metadata[0] == result.metadata[1]
    lost = row["adapters"] == "word"  # which its file calls otherwise
    assert bool(again(result.metadata[1]).losses) == (lost or not reproducible(row))
    if reproducible(row):
        monkeypatch.chdir(studio.root)
        from_metadata(studio, row, result, tmp_path)
        with studio.call(row, [0], "1") as (pipe, call):
            pipe.adapters.set({})
            images = {name: call[name] for name in ("image", "mask", "control", "image_prompt") if name in call}
            assert pipe.again(result.metadata[1], **images).metadata == result.metadata[1:]


def my_rule(negative: Any, conditional: Any, scale: Any) -> Any:
    return negative + scale * (conditional - negative)


LOST: dict[str, tuple[Row, dict[str, Any]]] = {
    "weights by part": ({}, {}),
    "weights by network": ({"adapters": "beside"}, {"adapters": {"clay": {"unet": 0.5, "text_encoder": 0.8}}}),
    "scale by part": ({"image_prompt": "plain"}, {"image_prompt": ImagePrompt(photo(1), {"up": 0.5})}),
    "order of adapters": (
        {"image_prompt": "masked"}, {"image_prompt": [ImagePrompt(photo(1), adapter=i) for i in (1, 0)]},
    ),
    "solver": ({}, {"sampler": lambda *arguments: solvers.euler(*arguments)}),
    "table": ({}, {}),
    "guidance": ({}, {"guidance_method": my_rule}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_info_says_what_its_command_does_not_repeat(
    name: str, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself can be read."""
    monkeypatch.setattr("canvax.pipelines.pipeline.text_to_image", described)
    levels, given = LOST[name]
    with studio.call(PLAIN | levels, [0], "1") as (pipe, _):
        pipe.adapters.set({"ink": {"unet": 0.5}} if name == "weights by part" else {})
        table: dict[str, Any] = (
            {"sampler": build_table(pipe.model.scheduler, 3, sampler="euler")} if name == "table" else {}
        )
        result = pipe("a cat", seed=1, progress=False, **given, **table)
        pipe.adapters.set({})
    save_image(tmp_path / "it.png", result.images[0], result.metadata[0])
    report = image_info(tmp_path / "it.png")
    assert [len(losses) for losses in report["losses"]] == [1]
    monkeypatch.chdir(studio.root)
    words = shlex.split(re.sub(r"PROMPT\d", studio.file("photo1", photo(1)), report["commands"][0]))
    (call,), _ = gather(parse(words[1:]))
    assert call.seed == 1


BASE: dict[tuple[str, str], Row] = {
    **{("control_form", level): {"control": "net"} for level in FACTORS["control_form"]},
    **{("texts", level): {"model": "xl"} for level in ("second", "sizes")},
    ("texts", "hires"): {"end": "pixel"}, ("control", "union"): {"model": "xl"},
}  # fmt: skip
"""What a level needs."""


def with_mark(place: int, pair: Pair) -> Any:
    of_sd = ("model", "xl") not in {item for level in pair for item in BASE.get(level, {}).items()}
    marks = [] if place % 8 == 0 and of_sd else pytest.mark.weekly
    return pytest.param(pair, id=" ".join(f"{name}={level}" for name, level in sorted(pair)), marks=marks)


@pytest.mark.parametrize("pair", [with_mark(*one) for one in enumerate(pair for pair in REFUSED if REFUSED[pair])])
def test_what_does_not_go_together(pair: Pair, studio: Studio) -> None:
    """One error that names both arguments, and before anything is compiled."""
    base = {name: level for item in pair for name, level in BASE.get(item, {}).items()}
    row = PLAIN | base | dict(pair)
    with pytest.raises(canvax.InputError) as caught, studio.call(row, [0, 1], "1") as (pipe, call):
        pipe(**call)
    for name in REFUSED[pair]:
        assert name in str(caught.value)


def test_a_strength_that_begins_after_the_end(studio: Studio) -> None:
    row = PLAIN | {"start": "filled", "end": "stopped"}
    with pytest.raises(canvax.InputError) as caught, studio.call(row, [0, 1], "1") as (pipe, call):
        pipe(**call | {"strength": 0.25})
    assert "strength" in str(caught.value)
    assert "denoising_end" in str(caught.value)
