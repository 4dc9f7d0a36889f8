"""Every public default, compared with one file: a default that changes is a change of images, and must be meant.

Where a change is meant, ``CANVAX_WRITE_GOLDEN=1 pytest tests/test_defaults.py`` writes the file again.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import inspect
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

import canvax
from canvax.cli.arguments import build_parser
from canvax.families.base import Family
from canvax.families.known import FAMILIES
from canvax.pipelines.generate import second_pass
from canvax.pipelines.request import Call, make_request
from canvax.server.a1111 import ImageToImage, TextToImage, request_of
from canvax.server.engine import EngineSettings
from canvax.server.job_store import KEPT_BYTES
from canvax.server.jobs import JobRequest
from canvax.server.models import MOST_GROUPS
from canvax.train.loop import Plan
from canvax.train.settings import TASKS
from canvax.train.task import Training
from tests.support.server_stub import CARD

FILE = Path(__file__).parent / "golden" / "defaults.json"


def of_call(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.default is not inspect.Parameter.empty}


def of_fields(kind: Any) -> dict[str, Any]:
    missing = dataclasses.MISSING
    made = {one.name: one.default_factory() for one in dataclasses.fields(kind) if one.default_factory is not missing}
    return made | {one.name: one.default for one in dataclasses.fields(kind) if one.default is not missing}


def of_commands(parser: argparse.ArgumentParser, name: str = "canvax") -> Iterator[tuple[str, dict[str, Any]]]:
    own = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from of_commands(command, f"{name} {word}")
        elif action.default is not argparse.SUPPRESS:
            own[action.dest] = action.default
    yield name, own


def of_a1111() -> dict[str, Any]:
    """What the least bodies ask for, but for what is of the client and of the model."""
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "PNG")
    image = base64.b64encode(out.getvalue()).decode()
    bodies = {
        "txt2img": TextToImage(prompt="x"),
        "img2img": ImageToImage(prompt="x", init_images=[image]),
        "inpaint": ImageToImage(prompt="x", init_images=[image], mask=image),
    }
    asks = {name: request_of(body, CARD, "") for name, body in bodies.items()}
    left_out = ("prompt", "model", "image", "mask", "client")
    return {
        name: {one.name: getattr(ask, one.name) for one in dataclasses.fields(ask) if one.name not in left_out}
        for name, ask in asks.items()
    }


def of_family(family: Family) -> dict[str, Any]:
    both = {"base": family.defaults, "distilled": family.distilled}
    return {name: dataclasses.asdict(defaults) if defaults else None for name, defaults in both.items()}


def of_hires(model: Any, method: Any) -> float:
    given = second_pass(
        model, make_request(model, Call("x", options=canvax.Options(hires=2, hires_method=method)))
    ).init_images
    assert given is not None
    return given.strength


def test_defaults(emoji: canvax.Pipeline) -> None:
    found = {
        "canvax.load": of_call(canvax.load),
        "Pipeline": of_call(canvax.Pipeline.__call__),
        "Pipeline.upscale": of_call(canvax.Pipeline.upscale),
        "Options": of_fields(canvax.Options),
        "families": {family.name: of_family(family) for family in FAMILIES},
        "hires_strength": {method: of_hires(emoji.model, method) for method in ("pixel", "latent")},
        "A1111": of_a1111(),
        "JobRequest": of_fields(JobRequest),
        "EngineSettings": of_fields(EngineSettings),
        "server": {"sizes of a model": MOST_GROUPS, "bytes of finished files": KEPT_BYTES},
        "Plan": of_fields(Plan),
        "Training": of_fields(Training),
        "tasks": {name: task.usual for name, task in TASKS.items()},
        "command line": dict(of_commands(build_parser())),
    }
    text = json.dumps(msgspec.to_builtins(found, enc_hook=str, str_keys=True), indent=1, sort_keys=True) + "\n"
    if os.environ.get("CANVAX_WRITE_GOLDEN"):
        FILE.write_text(text)
    want, got = json.loads(FILE.read_text()), json.loads(text)
    again = "if it is meant: CANVAX_WRITE_GOLDEN=1 pytest tests/test_defaults.py"
    assert got.keys() == want.keys(), again
    for name, defaults in got.items():
        assert defaults == want[name], f"{name}; {again}"
