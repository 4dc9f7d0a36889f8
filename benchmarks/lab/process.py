"""Contenders as processes: starting them, talking to them, and reporting what went wrong with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.lab.job import Job
from canvax.errors import CanvaxError, InputError

_NEEDS = ("torch", "diffusers", "transformers", "accelerate")
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu"}
_MISSING = """
import importlib.util as u, sys
print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])
"""
_TRACEBACK = re.compile(r"^Traceback .*\n(?:[ ]+.*\n)*", re.MULTILINE)
_PROBE = """
import json, os, jax
device = jax.devices()[0]
limit = (device.memory_stats() or {}).get("bytes_limit")
share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))  # of the GPU that JAX takes at most
print(json.dumps([device.platform, device.device_kind, limit and int(limit / share)]))
"""


@dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        name: "canvax", "torch", "torch-compile", "read" or "read and keep"; "canvax cold" for ``start``.
        python: its interpreter.
        environment: variables of its process beside those of this one.
    """

    name: str
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)

    def environ(self, device: str) -> dict[str, str]:
        """All variables of its process. Contenders share a GPU, so JAX may not take most of it beforehand."""
        settings = {"HF_HUB_OFFLINE": "1", "CANVAX_CACHE_DIR": "off", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if device in _PLATFORMS:
            settings["JAX_PLATFORMS"] = _PLATFORMS[device]
        inherited = dict(os.environ)
        if self.python != sys.executable:
            inherited.pop("PYTHONPATH", None)  # another Python has packages of its own
        return inherited | settings | self.environment


class Process:
    """A contender that runs: one line of JSON for each that it is sent, and one when it is ready.

    Raises:
        CanvaxError: from any method, if the process fails; with the end of its log.
    """

    def __init__(self, contender: Contender, job: Job, scratch: Path, **extra: Any) -> None:
        self.name = contender.name
        stem = contender.name.replace(" ", "-")
        self.outputs = scratch / f"{stem}.npz"
        job_file = job.write(scratch / f"{stem}.json", contender.name, outputs=self.outputs, **extra)
        self._log = scratch / f"{stem}.log"
        command = [contender.python, str(Path(__file__).with_name("worker.py")), str(job_file), repr(time.time())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=contender.environ(job.device),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def answer(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        if code == -9:
            raise CanvaxError(f"{self.name} was killed, probably for want of memory; use a smaller --batch or --size")
        log = self._log.read_text(errors="replace").rstrip()
        # The exception, of however many lines, follows a traceback, which is indented.
        error = _TRACEBACK.split(log)[-1] if _TRACEBACK.search(log) else log[-500:]
        raise CanvaxError(f"{self.name} failed: {error.strip() or f'exit code {code}'}")

    def turn(self) -> dict[str, Any]:
        """One turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() reports why
        return self.answer()


def check_peer(contender: Contender) -> None:
    """Refuse a peer that is not installed.

    Raises:
        InputError: naming what is missing, and the line for pip.
    """
    cure = f"{contender.python} -m pip install {' '.join(_NEEDS)}, or name another Python with --torch-python"
    environment = contender.environ("cpu")
    try:
        done = subprocess.run(
            [contender.python, "-c", _MISSING, *_NEEDS], capture_output=True, text=True, check=True, env=environment
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"--torch-python {contender.python} is not a Python that runs: {error}") from None
    missing = done.stdout.strip()
    if missing:
        raise InputError(f"--against {contender.name}: {contender.python} lacks {missing}; {cure}")


def probe(device: str) -> tuple[str, str, int | None]:
    """Returns platform, kind and memory in bytes of the device that canvax would use.

    A separate process asks JAX, so that this process allocates no GPU memory.

    Raises:
        InputError: there is no such device.
    """
    environment = Contender("canvax").environ(device)
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        cure = '; pip install ".[cuda]"' if device == "gpu" else ""
        raise InputError(f"--device {device}: JAX has no such device ({last[:200]}){cure}")
    platform, kind, memory = json.loads(done.stdout.splitlines()[-1])
    return platform, kind, memory
