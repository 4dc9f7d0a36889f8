"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from canvax.compile import key

SRC = Path(__file__).parent.parent / "src" / "canvax"

# Each row may import only rows above it, and its own package. A file with its dotted name is in another row than the
# rest of its package: what a file is can be told only from the records of all families.
ROWS: list[set[str]] = [
    {"types", "errors", "_version", "originals"},
    {"settings"},
    {"call"},
    {"files", "familiar"},
    {"kernels"},
    {"params", "noise"},
    {"quantize", "adapters"},
    {"nn", "prompts"},
    {"models", "samplers", "tokenizers"},
    {"images"},
    {"guidance"},
    {"denoise"},
    {"rollouts"},
    {"weights"},
    {"families"},
    {"extend"},
    {
        f"weights.{name}"
        for name in (
            *("adapter_names", "controlnet", "data_folder", "embeddings", "hub", "identify", "ip_adapter"),
            *("language_model", "location", "lora", "open", "overrides", "single_file", "transformer_file"),
        )
    },
    {"families.controls", "families.convert", "families.ip_adapters", "families.local_models"},
    {"parallel"},
    {"compile"},
    {"engine"},
    {"pipelines"},
    {"planning"},
    {"flax_api", "train", "server"},
    {"scale"},
    {"cli"},
]
FOREIGN = {"torch", "diffusers", "transformers", "flax", "accelerate", "benchmarks", "recipes", "tests"}


def modules() -> list[Path]:
    return [path for path in sorted(SRC.rglob("*.py")) if "assets" not in path.parts]


def home(parts: tuple[str, ...]) -> str:
    name = ".".join(parts[:2]).removesuffix(".py")
    return name if any(name in row for row in ROWS) else parts[0].removesuffix(".py")


def row_of(name: str) -> int:
    return next(i for i, row in enumerate(ROWS) if name in row)


@cache
def is_module(name: str) -> bool:
    place = SRC.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@cache
def imports(path: Path) -> set[str]:
    """Modules a file imports, at its top, in its functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:  # a module of its own, or a name in one
                inner = f"{node.module}.{alias.name}"
                found.add(inner if is_module(inner) else node.module or "")
    return found


def test_import_direction() -> None:
    for path in modules():
        here = home(path.relative_to(SRC).parts)
        for name in imports(path):
            assert name.split(".")[0] not in FOREIGN, f"{path} imports {name}"
            if not name.startswith("canvax.") or here in ("__init__", "__main__"):
                continue
            there = home(tuple(name.split(".")[1:]))
            same = row_of(there) == row_of(here) and there.split(".")[0] == here.split(".")[0]
            assert same or row_of(there) < row_of(here), f"{path}: {here} may not import {there}"


def test_types_are_checked_without_the_references() -> None:
    """pyright ignores the files that import what `make lint REFERENCE=no` does not install."""
    root = SRC.parents[1]
    files = {path: {name.split(".")[0] for name in imports(path)} for path in root.glob("benchmarks/**/*.py")}
    import_more = {path for path, names in files.items() if names & {"torch", "diffusers", "transformers", "ray"}}
    ignored = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]["ignore"]
    assert {root / name for name in ignored} == {
        path for path in import_more if "tests" not in path.relative_to(root).parts
    }


def test_no_circle() -> None:
    """Files import each other in one direction, within a folder as well; the package's own name leads everywhere."""
    names = {path: ".".join(("canvax", *path.relative_to(SRC).with_suffix("").parts)) for path in modules()}
    known = {name.removesuffix(".__init__") for name in names.values()}
    graph = {
        name.removesuffix(".__init__"): {there for there in imports(path) & known if there != "canvax"}
        for path, name in names.items()
        if name != "canvax.__init__"
    }
    assert sum(map(len, graph.values())) > 300  # the graph is there
    while leaves := {name for name, there in graph.items() if not there & graph.keys()}:
        graph = {name: there for name, there in graph.items() if name not in leaves}
    assert not graph, f"files that import each other in a circle, or lead into one: {', '.join(sorted(graph))}"


def test_the_page_shows_these_rows_and_files_that_exist() -> None:
    """docs/design/README.md lists ROWS in order, the modules of the server, and no file that is gone."""
    page = (SRC.parent.parent / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    lines = page.partition("## Import rules")[2].partition("## The server")[0].splitlines()
    shown = [set(line[4:].partition("  ")[0].split()) for line in lines if line.startswith("    ")]
    names = [{re.sub(r"\..*", ".*", name) for name in row if not name.startswith("_")} for row in ROWS]
    assert shown == names
    table = re.findall(r"^\|.*?\|(.*?)\|", page.partition("## The server")[2].partition("##")[0], re.M)
    listed = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert listed >= {path.stem for path in (SRC / "server").glob("[!_]*.py")} - {"jobs"}
    files = {f"/{path.relative_to(SRC.parent.parent).as_posix()}" for path in (SRC.parent.parent).glob("[st]*/**/*.py")}
    for name in re.findall(r"`([a-z_\d/]+\.py)`", page):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_the_key_of_a_program_has_the_sources_that_it_is_traced_from() -> None:
    """Those that make programs, the networks, and what they import; of the tables of samplers it is independent."""
    paths = {".".join(("canvax", *path.relative_to(SRC).with_suffix("").parts)): path for path in modules()}
    todo = [name for name in paths if name.startswith(("canvax.compile.", "canvax.models.", "canvax.kernels."))]
    traced: set[str] = set()
    while todo:
        if (name := todo.pop()) not in traced:
            traced.add(name)
            todo += [there for there in imports(paths[name]) if there in paths]
    in_key = set(key._files())
    assert len(traced) > 50
    assert not [name for name in traced if paths[name] not in in_key]
    assert not [path for path in in_key if "solvers" in path.parts or path.name == "specs.py"]


def test_import_is_light() -> None:
    """Importing starts no backend, loads no reference library, and costs a tenth of the time of JAX at most."""
    code = """
import json, sys, time
started = time.process_time()
import jax, numpy
began = time.process_time()
import canvax
canvax.errors.HintWarning  # which a program may silence before it loads anything
share = (time.process_time() - began) / (began - started)
canvax.load
from jax._src import xla_bridge
print(json.dumps({"share": share, "backends": len(xla_bridge._backends), "modules": list(sys.modules)}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    run = json.loads(done.stdout)
    assert run["backends"] == 0
    assert not (FOREIGN | {"scipy", "huggingface_hub", "tokenizers", "starlette"}) & {
        name.split(".")[0] for name in run["modules"]
    }
    assert run["share"] < 0.1


def test_the_recipe_of_the_bundled_model_needs_what_trains_alone() -> None:
    """The extra ``train``, as its help says; charts are drawn by the task ``quality``."""
    code = "import sys, recipes.emoji.__main__; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=SRC.parents[1])
    assert not {"matplotlib", "pytest", "hypothesis", "simpy", "tensorboardX"} & set(run.stdout.split())
