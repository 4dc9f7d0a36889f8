"""Every flag of every command with values that it cannot have: one line that names it, the right code, nothing left."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from canvax.cli import BAD_INPUT, FAILED, arguments, main


class TooLateError(BaseException):
    """Work was begun."""


WORK = (
    "canvax.pipelines.loaded.load_components",
    *("canvax.families.base.Model.save", "canvax.families.convert.write_safetensors"),
    *("canvax.planning.plan.compile_programs", "canvax.compile.programs.Programs.ready"),
    *("canvax.server.engine.ImageEngine.start", "canvax.compile.cache.clear"),
    "jax.distributed.initialize",
)
"""Where checks are over."""

FAMILIES = {"sheet": "generate", "upscale": "generate", "batch": "generate", "ui": "serve"}
"""Commands whose flags are those of another one; each flag is tried once."""

LONG = "9" * 5000  # more digits than Python reads
NUMBERS = {int: ("-7", "9" * 40), float: ("nan", "1e400")}
FILES = {
    *("FILE", "FOLDER", "PATH", "IMAGE", "IMAGES", "PNG", "NET", "VAE", "OUTPUT", "NAME.png", "MODEL"),
    *("FILE[:WEIGHT]", "FILE[:X]", "MODEL|IMAGE.png"),
}
"""What stands for files and folders in help."""

FREE = {"TOKEN", "TEXT", "PROMPT", "WORDS", "WORD", "REV", "NAME=VALUE", "NAME=VALUES", "ADDRESS"}
"""What may be any text, or is looked at together with other flags."""

AT_WORK = {("serve", "variant"), ("serve", "controlnet"), ("serve", "allow_host")}
"""What a server finds while it loads, and what is a name of a machine all the same."""


def commands(tmp_path: Path) -> dict[str, list[str]]:
    """Each command with what it must have."""
    image, rows, pictures = tmp_path / "image.png", tmp_path / "rows.jsonl", tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (64, 64)).save(image)
    Image.new("RGB", (64, 64)).save(pictures / "a.png")
    (pictures / "a.txt").write_text("a cat")
    row = {"file_name": "a.png", "text": "a cat", "conditioning_image": "a.png"}
    (tmp_path / "pairs").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "pairs" / "a.png")
    (tmp_path / "pairs" / "metadata.jsonl").write_text(json.dumps(row))
    rows.write_text('{"prompt": "a cat"}\n')
    run = ["-o", "run"]
    found: dict[str, list[Any]] = {
        "generate": ["a cat"],
        "sheet": ["a cat", "--x", "steps=1,2"],
        "upscale": [image],
        "batch": [rows, *run],
        "control": ["canny", image, "o.png"],
        "serve": ["emoji", "--port", "0"],
        "compile": ["emoji"],
        "bench": ["emoji"],
        "convert": ["emoji", "model"],
        "info": ["emoji", "--memory"],
        "plan": ["emoji", "--target", "tpu-v5e:1x1"],
        "cache": ["clear"],
        "train finetune": [pictures, *run],
        "train lora": [pictures, *run],
        "train dreambooth": [pictures, *run, "-p", "a photo of sks cat", "--lora"],
        "train textual-inversion": [pictures, *run, "--token", "<x>", "--initializer", "cat"],
        "train controlnet": [tmp_path / "pairs", *run],
    }
    return {name: [*name.split(), *map(str, words)] for name, words in found.items()}


def flags(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Each flag with a command that has it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from flags(inner, f"{name} {word}".strip())
        elif action.nargs != 0 and not isinstance(action, argparse._HelpAction):
            yield name, action


def bad_values(action: argparse.Action, inside_a_file: str) -> tuple[str, ...]:
    """What no flag of this kind can be given."""
    name = str(action.metavar)
    if numbers := NUMBERS.get(action.type):  # type: ignore[arg-type]
        return numbers
    if action.choices or name not in FREE | FILES:
        return (f"{LONG}x8",)
    return (inside_a_file, "x" * 300) if name in FILES else ()


def test_no_flag_takes_what_it_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in WORK:
        monkeypatch.setattr(name, lambda *_, **__: (_ for _ in ()).throw(TooLateError))
    monkeypatch.setattr("canvax.planning.plan.compiler_version", lambda _: {})
    monkeypatch.setattr("canvax.server.logs.log_to_stderr", lambda quiet: None)
    parser = arguments.build_parser()
    monkeypatch.setattr(arguments, "build_parser", lambda: parser)
    given = commands(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    seen: set[Any] = set()
    faults: list[str] = []
    for command, action in flags(parser):
        family = FAMILIES.get(command, command.split()[0])
        written = max(action.option_strings, key=len, default="")
        if (family, action.dest) in seen | AT_WORK or command not in given or not written:
            continue
        seen.add((family, action.dest))
        for value in bad_values(action, f"{tmp_path}/rows.jsonl/x"):
            words = [*given[command], f"{written}={value}"]
            words += [value] if action.nargs == 2 and not value.startswith("-") else []
            try:
                code = main(words)
            except TooLateError:
                faults.append(f"{command} {written}={value[:40]}: found too late")
                continue
            told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("canvax: error: ")]
            names = {action.dest, action.dest.replace("_", "-"), *(flag.strip("-") for flag in action.option_strings)}
            named = value[:20] in told[-1] or any(name in told[-1] for name in names) if told else False
            allowed = (BAD_INPUT,) if action.type in NUMBERS else (BAD_INPUT, FAILED)
            if code not in allowed or len(told) != 1 or not named or len(told[0]) > 700 or "CANVAX_DEBUG" in told[0]:
                faults.append(f"{command} {written}={value[:40]}: {code}, {told}")
            if os.listdir():
                faults.append(f"{command} {written}={value[:40]}: left {os.listdir()}")
    assert len(seen) > 200
    assert not faults, "\n".join(faults)
