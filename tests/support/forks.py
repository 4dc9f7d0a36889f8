"""Runs programs as forks of a process that has imported canvax and JAX: each import would take a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# huggingface_hub reads HF_* when it is imported, so only forks import it.
PARENT = """
import json, os, sys, traceback
import canvax.weights.open, httpx2, yaml
assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    code, variables, folder = json.loads(line)
    if (child := os.fork()) == 0:
        exit_code = 1
        try:
            for number, name in enumerate(("in", "out", "err")):
                os.dup2(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT), number)
            sys.stdin = open(0)
            os.environ.clear()
            os.environ.update(variables)
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
            exit_code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(exit_code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_fork(code: str, calls: Any, variables: Mapping[str, str], folder: Path) -> tuple[Any, str]:
    """What ``code`` prints as JSON, with ``calls`` as JSON on its stdin; and its stderr. ``folder`` holds its files."""
    folder.mkdir(exist_ok=True)
    (folder / "in").write_text(json.dumps(calls))
    for name in ("out", "err"):
        (folder / name).write_text("")
    parent = _parent()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps([code, dict(variables), str(folder)]) + "\n")
    parent.stdin.flush()
    exit_code, errors = parent.stdout.readline().strip(), (folder / "err").read_text()
    assert exit_code == "0", errors
    return json.loads((folder / "out").read_text()), errors


@cache
def _parent() -> subprocess.Popen[str]:
    """Ends with its stdin, that is with the process that started it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    variables["TQDM_POSITION"] = "-1"  # progress bars even though stderr is not a terminal
    return subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    )
