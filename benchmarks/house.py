"""The house in figures: how large canvax is, how long its functions are, and how far it is from a call to the work.

    python benchmarks/house.py [SRC] [--json] [--wheel]

SRC is the folder of the package, `src/canvax` beside this file if not given; give another checkout's to compare. The
"road" is the files of canvax that run a function between the call of a loaded pipeline and its first matrix product,
while the programs are traced, in the order they are first touched. --wheel also builds the wheel, for its size.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG_FUNCTION, MANY_PARAMETERS, LONG_FILE = 80, 10, 450
PROCESSES = 3

IMPORTING = """
import time, jax
began = time.perf_counter()
import canvax
{more}
print(time.perf_counter() - began)
"""

ROAD = """
import json, os, sys, threading
import canvax

HOME = os.path.dirname(os.path.abspath(canvax.__file__)) + os.sep
FUNCTION = 0x1  # code of modules and class bodies has not this flag
touched, road = {}, []
sys.setswitchinterval(60)  # threads take turns where they wait, not by the clock: the road is always the same

def importing(frame):
    while frame:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(HOME):
            return True
        frame = frame.f_back
    return False

def look(frame, event, argument):
    code, thread = frame.f_code, threading.get_ident()
    if road or event != "call" or not code.co_flags & FUNCTION or not code.co_filename.startswith(HOME):
        return
    file = code.co_filename[len(HOME):]
    arrived = os.path.basename(file) == "matmul.py" and code.co_name == "matmul"
    if (thread, file) not in touched and not importing(frame):
        touched[thread, file] = True
    if arrived:  # not what other threads did meanwhile
        here = (thread, threading.main_thread().ident)
        road.extend(dict.fromkeys(file for one, file in touched if one in here))

pipe = canvax.load("emoji", progress=False)
options = canvax.Options(progress=False)
threading.setprofile(look)
sys.setprofile(look)
pipe("a red apple", num_inference_steps=2, options=options)
sys.setprofile(None)
if not road:
    sys.exit("matmul.matmul was not called")
print(json.dumps(road))
"""


@dataclass(frozen=True)
class Function:
    """One function or method, also one inside another."""

    name: str
    lines: int
    parameters: int


def python_files(source: Path) -> list[Path]:
    """All Python files but those of the assets."""
    return [file for file in sorted(source.rglob("*.py")) if file.relative_to(source).parts[0] != "assets"]


def functions(tree: ast.AST, file: str, owner: str = "", of_class: bool = False) -> Iterator[Function]:
    """The functions of a file, their lines without decorators, their parameters without self, cls, * and **."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, file, f"{owner}{node.name}.", of_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            own = 1 if of_class and names[:1] and names[0] in ("self", "cls") else 0
            count = len(names) + len(node.args.kwonlyargs) - own
            yield Function(f"{file}:{owner}{node.name}", (node.end_lineno or 0) - node.lineno + 1, count)
            yield from functions(node, file, f"{owner}{node.name}.")
        else:
            yield from functions(node, file, owner, of_class)


def sizes(source: Path) -> dict[str, Any]:
    """What the text of the package says."""
    texts = {str(file.relative_to(source)): file.read_text(encoding="utf-8") for file in python_files(source)}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    found = [one for name, text in texts.items() for one in functions(ast.parse(text), name)]
    lengths = sorted(one.lines for one in found)
    return {
        "lines": sum(lines.values()),
        "files": len(lines),
        "functions": len(found),
        "function_lines": {
            "median": statistics.median(lengths),
            "p90": lengths[int(0.9 * (len(lengths) - 1))],
            "max": lengths[-1],
        },
        "long_functions": {one.name: one.lines for one in _largest(found, "lines", LONG_FUNCTION)},
        "many_parameters": {one.name: one.parameters for one in _largest(found, "parameters", MANY_PARAMETERS)},
        "long_files": dict(sorted(_over(lines, LONG_FILE).items(), key=lambda pair: -pair[1])),
    }


def _largest(found: list[Function], what: str, limit: int) -> list[Function]:
    return sorted((one for one in found if getattr(one, what) > limit), key=lambda one: -getattr(one, what))


def _over(lines: dict[str, int], limit: int) -> dict[str, int]:
    return {name: count for name, count in lines.items() if count > limit}


def run_python(source: Path, script: str) -> str:
    """What ``script`` prints in a fresh process that imports canvax of ``source``."""
    more = {"PYTHONPATH": str(source.parent), "JAX_PLATFORMS": "cpu", "CANVAX_CACHE_DIR": "off"}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def import_seconds(source: Path, more: str = "") -> float:
    """Seconds of ``import canvax``, and ``more``, in a process that has JAX; the least of several processes."""
    return min(float(run_python(source, IMPORTING.format(more=more))) for _ in range(PROCESSES))


def wheel_bytes(source: Path) -> int:
    """Size of the wheel. pip fetches the build backend where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
        command += ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
        subprocess.run([*command, str(source.parent.parent)], check=True, cwd=folder)
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.stat().st_size


def show(house: dict[str, Any]) -> None:
    """The figures as text."""
    lengths = house["function_lines"]
    print(f"lines of Python          {house['lines']}")
    print(f"files                    {house['files']}")
    print(f"functions                {house['functions']}")
    print(f"lines of a function      median {lengths['median']:g}, p90 {lengths['p90']}, longest {lengths['max']}")
    for title, key in (
        (f"functions over {LONG_FUNCTION} lines", "long_functions"),
        (f"over {MANY_PARAMETERS} parameters", "many_parameters"),
        (f"files over {LONG_FILE} lines", "long_files"),
    ):
        print(f"{title:<24} {len(house[key])}")
        for name, count in house[key].items():
            print(f"  {count:>5}  {name}")
    print(f"import canvax            {house['import_seconds']:.4f} s beyond import jax")
    print(f"with canvax.load         {house['import_load_seconds']:.4f} s beyond import jax")
    if "wheel_bytes" in house:
        print(f"wheel                    {house['wheel_bytes'] / 1e6:.2f} MB")
    print(f"road to the first matmul {len(house['road'])} files")
    for name in house["road"]:
        print(f"  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "src" / "canvax"
    parser.add_argument("source", metavar="SRC", type=Path, nargs="?", default=default)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--wheel", action="store_true", help="build the wheel too")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    if not (source / "__init__.py").is_file():
        parser.error(f"{arguments.source} is not the folder of a package")
    house = sizes(source)
    house["import_seconds"] = import_seconds(source)
    house["import_load_seconds"] = import_seconds(source, "canvax.load")
    if arguments.wheel:
        house["wheel_bytes"] = wheel_bytes(source)
    house["road"] = json.loads(run_python(source, ROAD))
    if arguments.json:
        print(json.dumps(house, indent=2))
    else:
        show(house)


if __name__ == "__main__":
    main()
