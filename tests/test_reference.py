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
from canvax.cli.arguments import COMMANDS, build_parser, parse
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
    edits = pages["http-api.md"].partition("## Body of `/v1/images/edits`")[2].partition("##")[0]
    assert re.findall(r"^\| `(\S+)` \| .*\bfiles?\b", edits, re.M) == ["image", "image[]", "mask"]


def test_each_flag_is_with_its_command_or_in_a_group_that_the_command_names(
    pages: dict[str, str], generate: ModuleType
) -> None:
    text = pages["command-line.md"]
    groups = {
        title.splitlines()[0].lower(): title for title in text.partition("## Shared flags")[2].split("\n### ")[1:]
    }
    for name, _, parser in generate._commands(build_parser()):
        section = text.partition(f"## canvax {name}\n")[2].partition("\n## ")[0]
        named = [group for title, group in groups.items() if f"[{title}]".lower() in section.lower()]
        for row in [row for rows in generate._groups(parser).values() for row in rows] if name != "ui" else []:
            line = generate.table(("Flag", "Meaning"), [row]).splitlines()[-1]
            assert line in section or any(line in group for group in named), (name, row[0])


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


ROOT = DOCS.parent
SUFFIXES = (".md", ".py", ".ipynb", ".yaml", "")
EXAMPLES = [path for folder in ("deploy", "examples") for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *filter(Path.is_file, EXAMPLES)])


def not_plain(text: str, rules: dict[str, str]) -> list[str]:
    """Return the places in a text that match a rule, code spans left out, with what to write."""
    text = " ".join(re.sub(r"^```.*?^```|``.*?``|`[^`]*`", "", text, flags=re.M | re.S).split())
    return [
        f"...{text[max(0, match.start() - 40) : match.end() + 30]}...: {better}"
        for pattern, better in rules.items()
        for match in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_plain(page: Path) -> None:
    found = not_plain(page.read_text(encoding="utf-8"), BETTER)
    assert not found, "\n".join(found)


PACKAGE = ROOT / "src" / "canvax"
MODULES = sorted(PACKAGE.rglob("*.py"))

OPENING = {
    r"^(?:As|How|It|Its|Likewise|Nothing|Of|That|Those|What|Where|Whether|Which|Who|Why)\b": "the noun that matters"
}
VERB = {
    r"^(?:A|All|An|For|From|One|The)\b": "a verb: Return the ...",
    r"^[A-Z][a-z]*[a-rt-z]s\b(?!')": "an imperative verb: Return, not Returns or plural nouns",
}
"""First words of docstrings of all kinds, and of functions, and what to begin with."""


def docstrings(nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a function's, of each docstring and string after an attribute."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        decorators = [ast.unparse(name) for name in getattr(node, "decorator_list", ())]
        acts = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any("property" in d for d in decorators)
        for part in body:
            match part:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield part.lineno, text, acts


def sentences(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that has words, except docstrings; X stands for a value."""
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        match node:
            case _ if id(node) in skipped:
                continue
            case ast.Constant(value=str(text)):
                pass
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in values)
            case _:
                continue
        if re.search("[a-z]{2} [a-z]{2}", text):
            yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment of Python."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def test_the_package_is_plain() -> None:
    """Docstrings, comments, messages and help follow the rules of the docs; docstrings begin with a verb or a noun."""
    found = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
        texts = [(line, text, OPENING | (VERB if acts else {}) | BETTER) for line, text, acts in docstrings(nodes)]
        texts += [(line, text, BETTER) for line, text in (*comments(source), *sentences(nodes))]
        name = path.relative_to(PACKAGE)
        found += [f"{name}:{line} {fault}" for line, text, rules in texts for fault in not_plain(text, rules)]
    assert not found, "\n".join(found)


def test_help_begins_with_its_noun(pages: dict[str, str]) -> None:
    """Flags and settings are described by a noun or a verb, as docstrings are."""
    rows = [line for page in ("command-line.md", "settings.md") for line in pages[page].splitlines() if line[:1] == "|"]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split(" | ")]
    found = [fault for cell in cells for fault in not_plain(cell[:1].upper() + cell[1:], OPENING)]
    assert not found, "\n".join(found)
