"""A setting is declared once: all that other places say of it follows from the record."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

import canvax
from canvax.call import IMAGE, Call, Enlarging, FromFiles, Load, LoadFlags, OptionRecord
from canvax.cli.again import again
from canvax.cli.images import ALIASES, SETTINGS
from canvax.familiar import CALL, HARMLESS, LOAD
from canvax.images.infotext import from_infotext
from canvax.pipelines import keywords, translate
from canvax.pipelines.checks import FITS_ALL, check_size
from canvax.pipelines.request import make_request
from canvax.scale.rows import NAMES
from canvax.scale.work import call_of
from canvax.server.jobs_api import NewJob, routes
from canvax.server.openapi import description
from canvax.settings import add_flags, aliases, as_flags, declared, idle, json_schema, markdown, offered, setting
from tests.support.server_stub import StubEngine

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Grained(canvax.Options):
    """The options with one more."""

    grain: float = setting(
        0.0, "film grain over the image", low=0, high=1, cure="0.1 is usual", also=("film_grain",), group=IMAGE,
        hint_without=("mask",), infotext="Grain",
    )  # fmt: skip


def test_a_new_setting_is_everywhere() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Grained)
    assert parser.parse_args(["--grain", "0.5"]).grain == 0.5
    assert "0..1, film grain over the image (0)" in " ".join(parser.format_help().split())
    assert as_flags(declared(Grained)["grain"], 0.5) == ["--grain", "0.5"]
    assert {"grain", *NAMES} <= {"grain", *offered(Call, "file"), *declared(FromFiles), *offered(Grained, "file")}
    assert json_schema(Grained, "server")["properties"]["grain"] == {
        "description": "film grain over the image", "type": "number", "minimum": 0, "maximum": 1, "default": 0.0,
    }  # fmt: skip
    assert "| `grain` | 0 | number, 0..1 | film grain over the image |" in markdown(Grained)
    assert aliases(Grained)["film_grain"] == "grain"
    there = dict.fromkeys({need for one in declared(Grained).values() for need in one.setting.hint_without}, True)
    assert list(idle(Grained(grain=0.5), there | {"mask": False})) == [("grain", "mask")]
    assert not list(idle(Grained(grain=0.5), there))
    with pytest.raises(canvax.InputError) as refused:
        Grained(grain=2)
    assert (refused.value.argument, refused.value.value, refused.value.cure) == ("grain", 2, "0.1 is usual")
    assert Grained(grain=0.5).changed() == {"grain": 0.5}


def test_every_entry_point_takes_the_record() -> None:
    options = {name for name, one in declared(OptionRecord).items() if not one.setting.closed.get("command")}
    assert options <= set(SETTINGS)
    assert options <= set(NAMES)
    assert set(ALIASES.values()) <= {"prompt", *SETTINGS}
    schema = description(routes(StubEngine()))["components"]["schemas"]["Options"]
    assert set(schema["properties"]) == set(offered(OptionRecord, "server"))
    assert "reuse" not in schema["properties"]


def test_load_takes_the_record() -> None:
    parameters = [one for one in signature(canvax.load).parameters.values() if one.kind is not one.VAR_KEYWORD]
    assert {one.name: one.default for one in parameters} == {name: one.default for name, one in declared(Load).items()}


def test_upscale_takes_the_record() -> None:
    parameters = signature(canvax.Pipeline.upscale).parameters
    assert {name: parameters[name].default for name in declared(Enlarging)} == vars(Enlarging())
    for name, value in (("scale", 17), ("strength", 0), ("overlap", 0), ("batch", 0.5), ("control", 1)):
        with pytest.raises(canvax.InputError) as refused:
            Enlarging(**{name: value})
        assert refused.value.argument == name


def test_a_mesh_is_text_as_well() -> None:
    assert dict(canvax.load(mesh="data=1,model=2").programs.mesh.shape) == {"data": 1, "model": 2}


@pytest.mark.slow
def test_precision_is_in_metadata(small_folder: Path) -> None:
    pipe = canvax.load(small_folder, mesh="data=1", precision="highest")
    result = pipe("a cat", num_inference_steps=1, progress=False)
    assert result.metadata[0]["precision"] == "highest"
    assert "--precision highest" in again(result.metadata[0]).command


def test_whole_numbers_as_text() -> None:
    assert canvax.Options(seed_size="64, 128").seed_size == (64, 128)  # type: ignore[arg-type]


def test_names_are_unambiguous() -> None:
    records = (Call, FromFiles, OptionRecord)
    names = [name for record in records for name in declared(record)]
    others = [also for record in records for one in declared(record).values() for also in one.setting.also]
    flags = [
        flag
        for record in (Load, LoadFlags, *records)
        for one in offered(record, "command").values()
        for flag in one.flags
    ]
    assert len(names) == len(set(names))
    assert len(others) == len(set(others))
    assert len(flags) == len(set(flags))
    conditions = {need for one in declared(OptionRecord).values() for need in one.setting.hint_without}
    required = {one.setting.error_without.partition("=")[0] for one in declared(OptionRecord).values()}
    assert required - {""} <= set(names)
    assert conditions & declared(OptionRecord).keys() == {"pag_scale", "reuse", "variation_strength"}


def test_keywords_for_type_checkers() -> None:
    """They are all keywords that a call and ``canvax.load`` take; docs/reference/generate.py writes them."""
    hints = get_type_hints(OptionRecord)
    assert get_type_hints(keywords.OptionFields) == {name: hints[name] for name in declared(OptionRecord)}
    own = {*signature(canvax.Pipeline.__call__).parameters} - {
        "self",
        "prompt",
        "negative_prompt",
        "output_type",
        "more",
    }
    foreign = {name for name, one in CALL.items() if one.becomes} | {*translate._SPECIAL}
    assert keywords.CallFields.__annotations__.keys() == own | foreign | declared(OptionRecord).keys()
    assert keywords.LoadFields.__annotations__.keys() == {n for n, one in LOAD.items() if one.becomes} | HARMLESS.keys()


USER = """
import numpy as np
import canvax
pipe = canvax.load("emoji", torch_dtype="float16", use_safetensors=True)
pipe("a cat", clip_skip=1, sigmas="karras", generator=None, callback_on_step_end=print, num_inference_steps=2)
one = pipe("a cat", steps=2).images[0].resize((8, 8))
array: np.ndarray = pipe("a cat", output_type="np").images
one = pipe("a cat", output_type="pil")[0].resize((8, 8))
one = pipe.again("a.png", steps=3).images[0].resize((8, 8))
pipe.upscale(one, "a cat", clip_skip=1, cfg_scale=3.0)
pipe.with_controlnet("x", local_files_only=True)
pipe("a cat", clip_skp=1)  # wrong
pipe("a cat", mask_mode="sofft")  # wrong
pipe("a cat", steps="x")  # wrong
pipe("a cat", output_type="foo")  # wrong
pipe("a cat", None, 64)  # wrong
canvax.load("emoji", torch_dtyp="float16")  # wrong
pipe.with_controlnet("x", foo=1)  # wrong
pipe("a cat", output_type="np").images.append(one)  # wrong
pipe.again("a.png", no_such=1)  # wrong
"""


@pytest.mark.slow
@pytest.mark.slow
def test_a_type_checker_knows_the_names(tmp_path: Path) -> None:
    """Also those of diffusers."""
    pytest.importorskip("pyright")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT / "src"}"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    wrong = [str(number) for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]
    assert list(dict.fromkeys(re.findall(r"user\.py:(\d+):\d+ - error", done.stdout))) == wrong, done.stdout


LIMITED = [name for name, field in declared(Call).items() if field.setting.low is not None]


@pytest.mark.parametrize("name", sorted({*LIMITED} - {"num_images_per_prompt"}))
def test_the_limits_of_an_argument_are_those_of_its_declaration(name: str, emoji: canvax.Pipeline) -> None:
    """In Python, for rows and lines of files, and for requests."""
    setting = declared(Call)[name].setting
    image = {"image": np.zeros((64, 64, 3), np.uint8)} if name == "strength" else {}
    assert setting.low is not None
    outside = [setting.low - (not setting.above), *([setting.high + 1] if setting.high is not None else [])]
    for value in outside:
        with pytest.raises(canvax.InputError) as refused:
            make_request(emoji.model, Call(**{"prompt": "a cat", name: value, **image}))
        assert refused.value.argument == name
        with pytest.raises(canvax.InputError) as refused:
            call_of({"prompt": "a cat", name: value}, 0)
        assert refused.value.argument == name
    of_job = {"num_inference_steps": "steps"}.get(name, name)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"prompt": "a cat", of_job: outside[0]}, NewJob)


def test_a_size_that_is_offered_is_one_of_every_model() -> None:
    """Before the model is known."""
    with pytest.raises(canvax.InputError) as refused:
        check_size("height", 100, 0)
    (low, high) = map(int, re.findall(r"\d+", refused.value.cure))
    assert (low % FITS_ALL, high % FITS_ALL) == (0, 0)
    assert low < 100 < high


def test_lists_of_texts_are_kept_as_they_were() -> None:
    for name in ("hires_prompt", "prompt_2", "negative_prompt_2"):
        texts = ["a", "b"]
        options = canvax.Options(**{"hires": 2, name: texts})
        texts[0] = "changed"
        assert list(getattr(options, name)) == ["a", "b"]
        assert hash(options) == hash(canvax.Options(**{"hires": 2, name: ["a", "b"]}))


def test_values_become_plain() -> None:
    values: dict[str, Any] = {
        "eta": np.float32(0.5), "clip_skip": np.int64(1), "control_scale": np.array([1.0, 0.5]),
        "original_size": np.array([8, 16]), "guidance_steps": range(2, 4), "sigmas": "14.6,2,0", "outpaint": "left=8",
        "progress": np.True_,
    }  # fmt: skip
    options = canvax.Options(**values)
    assert options.changed() == {
        "eta": 0.5, "clip_skip": 1, "control_scale": (1.0, 0.5), "original_size": (8, 16), "outpaint": (8, 0, 0, 0),
        "guidance_steps": (2.0, 3.0), "sigmas": (14.6, 2.0, 0.0),
    }  # fmt: skip
    assert type(options.eta) is float
    assert options.progress is True


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Variation seed: 3, Variation seed strength: 0.5", {"variation_seed": 3, "variation_strength": 0.5}),
        ("Variation seed: 3, Steps: 4", {}),
        ("Hires upscale: 2, Hires steps: 5", {"hires": 2.0, "hires_steps": 5, "hires_method": "pixel"}),
        ("Hires steps: 5, Clip skip: 2", {"clip_skip": 1}),
        ("RNG: CPU, Seed resize from: 64x32", {"noise": "torch", "seed_size": [32, 64]}),
    ],
)
def test_names_in_a_png(text: str, options: Mapping[str, Any]) -> None:
    found = from_infotext(f"a cat\nSteps: 20, Seed: 1, {text}, Version: canvax 1")
    assert found["options"] == options
