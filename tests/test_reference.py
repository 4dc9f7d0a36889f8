"""The pages of docs/reference are those that the code gives, and the prose of the docs is plain."""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from canvax.call import Load, OptionRecord
from canvax.cli.arguments import COMMANDS, parse
from canvax.settings import declared

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", REFERENCE / "generate.py")
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generate: ModuleType) -> dict[str, str]:
    return generate.pages()


def test_pages_are_up_to_date(pages: dict[str, str], generate: ModuleType) -> None:
    """``python docs/reference/generate.py`` writes them."""
    assert generate.KEYWORDS.read_text(encoding="utf-8") == generate.keywords()
    assert {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")} == pages


def test_pages_are_complete(pages: dict[str, str]) -> None:
    for command in COMMANDS:
        assert f"## canvax {command}" in pages["command-line.md"]
    for name in (*declared(Load), *declared(OptionRecord)):
        assert f"| `{name}` |" in pages["settings.md"]
    assert "| `GET /api/images` |" in pages["http-api.md"]


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, and of its indented ones, that run canvax."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^ *```(?:sh|ini)\n(.*?)^ *```", text, re.M | re.S)
    indented = re.findall(r"^    (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S), re.M)
    lines = [line.partition(" #")[0].strip() for line in "\n".join(fenced + indented).splitlines()]
    return [match[1] for line in lines if (match := re.search(r"(?:^|bin/|&& )canvax ([a-z]+ .*|[a-z]+)$", line))]


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_commands_are_understood(page: Path) -> None:
    assert page.stem not in ("README", "cli") or commands(page)
    for command in commands(page):
        parse(shlex.split(command.rstrip("'").partition(" | ")[0].partition(" > ")[0]))


BETTER = {
    r"\bin place of\b": "instead of",
    r"\blikewise\b": "the same",
    r"\bwhoever\b": "anyone who, users who",
    r"\b(?:is|are|was|were) told\b": "gets, is recognised, is reported",
    r"\bstands?\b(?!-)|\bstood\b": "is",
    r"\bof (?:its|their) own\b": "its own ..., separate",
    r"(?<!Files )\b(?:is|are) data\b": "never compiles",
    r"\bpassed over\b": "ignored",
    r"\bnobody\b": "no user, no process",
    r"\bthe very (?!first|last)": "the same, exactly the",
    r"\bcompany\b": "batch",
    r"\berrs\b": "is wrong",
    r"\bto be had\b|\bbe had\b": "available",
    r"\bwants\b": "needs",
    r" but for ": "except",
    r"\bgoes in the end\b": "is deleted at the end",
    r"\bWho (?!comes)\w+s\b": "You can",
    r"\bin words\b": "with the reason",
    r"\bbeside (?!the weights)": "next to, in addition to, compared with",
    r"[.:|] Of (?!course)": "subject first: For ..., With ..., or the noun",
    r"\bgoes on\b": "continues, resumes",
    r"\bgoes? (?:together )?with\b": "works with",
    r"\bfor want of\b": "without, because of",
    r"\bmakes of\b": "the output of",
    r"\bhad said\b": "estimated, reported",
    r"\bas there\b(?! (?:is|are))": "repeat the words",
    r"\bcompiles? nothing\b": "does not recompile",
    r"\bdecides? nothing\b": "has no effect",
    r"\bmay be left out\b": "you can omit",
    r"\bat hand\b": "available",
    r"\band the like\b": "name them, related",
    r"\bas everywhere\b": "as for other commands, as for all models",
}
"""Words of sentences that readers had to read twice, and what to write."""


PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("design/*.md")), DOCS.parent / "README.md"]


def not_plain(text: str, rules: dict[str, str]) -> list[str]:
    """Return the places in a text that match a rule, code spans left out, with what to write."""
    text = " ".join(re.sub(r"^```.*?^```|``.*?``|`[^`]*`", "", text, flags=re.M | re.S).split())
    return [
        f"...{text[max(0, match.start() - 40) : match.end() + 30]}...: {better}"
        for pattern, better in rules.items()
        for match in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_prose_is_plain(page: Path) -> None:
    found = not_plain(page.read_text(encoding="utf-8"), BETTER)
    assert not found, "\n".join(found)


PACKAGE = DOCS.parent / "src" / "canvax"
ROOMS = (
    *("engine", "server"),
    *("families", "flax_api", "images", "kernels", "models", "parallel", "planning", "prompts", "samplers", "scale"),
    *("tokenizers", "train", "weights", "denoise.py", "nn.py", "noise.py", "params.py", "quantize.py"),
)
"""Parts of the package whose docstrings and comments are checked."""

UNCHECKED = {"folder.py", "data_folder.py"}

OPENING = {
    r"^(?:As|How|It|Its|Likewise|Nothing|Of|That|Those|What|Where|Whether|Which|Who|Why)\b": "the noun that matters"
}
VERB = {
    r"^(?:A|All|An|For|From|One|The)\b": "a verb: Return the ...",
    r"^[A-Z][a-z]*[a-rt-z]s\b(?!')": "an imperative verb: Return, not Returns or plural nouns",
}
"""First words of docstrings of all kinds, and of functions, and what to begin with."""


def docstrings(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a function's, of each docstring and string after an attribute."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        decorators = [ast.unparse(name) for name in getattr(node, "decorator_list", ())]
        acts = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any("property" in d for d in decorators)
        for part in body:
            match part:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield part.lineno, text, acts


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_are_plain(room: str) -> None:
    """Docstrings and comments of the package follow the rules of the docs, and begin with a verb or a noun."""
    found = []
    paths = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    for path in (path for path in paths if path.name not in UNCHECKED):
        source = path.read_text(encoding="utf-8")
        texts = [(line, text, OPENING | (VERB if acts else {}) | BETTER) for line, text, acts in docstrings(source)]
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [(t.start[0], t.string, BETTER) for t in tokens if t.type == tokenize.COMMENT]
        found += [f"{path.name}:{line} {fault}" for line, text, rules in texts for fault in not_plain(text, rules)]
    assert not found, "\n".join(found)
