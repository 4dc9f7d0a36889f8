"""The pages of docs/reference are those that the code gives, and the prose of the docs is plain."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from canvax.call import OptionRecord
from canvax.cli.arguments import COMMANDS, parse
from canvax.settings import declared

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", REFERENCE / "generate.py")
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def test_pages_are_up_to_date(pages: dict[str, str]) -> None:
    """``python docs/reference/generate.py`` writes them."""
    assert {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")} == pages


def test_pages_are_complete(pages: dict[str, str]) -> None:
    for command in COMMANDS:
        assert f"## canvax {command}" in pages["command-line.md"]
    for name in declared(OptionRecord):
        assert f"| `{name}` |" in pages["settings.md"]
    assert "| `GET /api/images` |" in pages["http-api.md"]


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks that run canvax."""
    blocks = re.findall(
        r"^```(?:sh|ini)\n(.*?)^```", page.read_text(encoding="utf-8").replace("\\\n", " "), re.M | re.S
    )
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    return [match[1] for line in lines if (match := re.search(r"(?:^|bin/|&& )canvax ([a-z]+ .*|[a-z]+)$", line))]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        parse(shlex.split(command.rstrip("'").partition(" | ")[0].partition(" > ")[0]))
