"""Defects made by hand, each with the tests that see it: what the tests can do, and may not lose.

    python -m tests.mutants [ID ...]     put each defect in, or all, and check that its tests fail

``defects.toml`` has a row for each. A test is deleted only if each defect that it kills has another test in its row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "canvax"

_OF_A_RUN = "PYTEST_", "JAX_DISABLE_MOST_OPTIMIZATIONS"
"""Variables that a run of pytest sets for its own modules."""


@dataclass(frozen=True)
class Defect:
    """A defect.

    Attributes:
        id: short name.
        file: path in the package.
        old: text of the file, which occurs once.
        new: what replaces it.
        breaks: what a user would see.
        tests: the cheapest tests that fail with it, as pytest names them under ``tests/``.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def defects() -> list[Defect]:
    """Return the rows of the table."""
    rows = tomllib.loads((Path(__file__).parent / "defects.toml").read_text())["defect"]
    return [Defect(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def put_in(defect: Defect, folder: Path) -> None:
    """Write the package with the defect into ``folder``; all other files are links."""
    shutil.copytree(SOURCE, folder / "canvax", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "canvax" / defect.file
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace(defect.old, defect.new))


def survives(defect: Defect) -> str:
    """Run the tests of a defect; return what went wrong, "" if each of them failed.

    A test that passes has missed the defect. Tests that cannot be collected are no failure.
    """
    with tempfile.TemporaryDirectory(prefix="canvax-mutant-") as folder:
        put_in(defect, Path(folder))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RUN)}
        environment["PYTHONPATH"] = folder
        for test in defect.tests:
            words = [
                sys.executable,
                "-m",
                "pytest",
                "-n",
                "0",
                "-x",
                "-m",
                "",
                "-p",
                "no:cacheprovider",
                f"tests/{test}",
            ]
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode != 1:
                report = "passes" if done.returncode == 0 else f"cannot be run (exit code {done.returncode})"
                again = f"python -m tests.mutants {defect.id}"
                return f"{test} {report} although {defect.breaks}; {again}\n{done.stdout[-2000:]}"
    return ""


def main(names: list[str], say: Callable[[str], None] = print) -> int:
    """Run the defects of these names, or all; return how many survive."""
    rows = defects()
    if {"-h", "--help"} & {*names}:
        say(str(__doc__))
        return 0
    if unknown := set(names) - {row.id for row in rows}:
        say(f"no such defects: {', '.join(sorted(unknown))}")
        return 2
    count = 0
    for row in rows:
        if not names or row.id in names:
            fault = survives(row)
            count += bool(fault)
            say(f"{row.id}: {f'SURVIVES: {fault}' if fault else 'killed'}")
    return count
