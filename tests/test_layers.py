"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "canvax"

# Each row may import only rows above it, and its own package.
ROWS: list[set[str]] = [
    {"types", "errors", "files", "_version"},
    {"kernels"},
    {"params", "noise"},
    {"quantize"},
    {"nn"},
    {"models", "samplers", "tokenizers"},
    {"images"},
    {"guidance"},
    {"denoise"},
    {"weights"},
    {"parallel"},
    {"compile"},
    {"pipelines"},
    {"planning"},
    {"flax_api", "train"},
    {"bench"},
    {"cli"},
]
FOREIGN = {"torch", "diffusers", "transformers", "flax", "accelerate"}
PEERS = SRC / "bench" / "peers.py"
"""Runs in a process of its own, in the Python that has them; nothing may import it."""


def modules() -> list[Path]:
    return [path for path in sorted(SRC.rglob("*.py")) if "assets" not in path.parts]


def home(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def row_of(name: str) -> int:
    return next(i for i, row in enumerate(ROWS) if name in row)


def imports(path: Path) -> set[str]:
    """Modules a file imports, those for type checkers alone left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    inside = {id(child) for node in skipped for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_import_direction(path: Path) -> None:
    here = home(path.relative_to(SRC).parts)
    for name in imports(path):
        assert name.split(".")[0] not in FOREIGN or path == PEERS, f"{path} imports {name}"
        assert name != "canvax.bench.peers", f"{path} imports the peers of a benchmark"
        if not name.startswith("canvax.") or here in ("__init__", "__main__"):
            continue
        there = home(tuple(name.split(".")[1:]))
        assert there == here or row_of(there) < row_of(here), f"{here} may not import {there}"


def test_import_is_light() -> None:
    """Importing, the pipeline included, starts no backend, loads no reference library and is quick."""
    code = """
import json, sys, time
import jax, numpy
began = time.process_time()
import canvax
canvax.load
seconds = time.process_time() - began
from jax._src import xla_bridge
print(json.dumps({"seconds": seconds, "backends": len(xla_bridge._backends), "modules": list(sys.modules)}))
"""
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
        for _ in range(3)
    ]
    assert all(run["backends"] == 0 for run in runs)
    assert not FOREIGN & {name.split(".")[0] for name in runs[0]["modules"]}
    assert min(run["seconds"] for run in runs) < 0.3
