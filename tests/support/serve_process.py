"""``canvax serve`` in a process of its own, as an operator starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from tests.support.serving import until


@dataclass
class Served:
    """A process that serves.

    Attributes:
        process: itself.
        lines: of its stderr.
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        """All of its stderr until now."""
        return "".join(self.lines)

    @property
    def base(self) -> str:
        """Its address, as soon as it says it."""
        found: list[str] = []

        def heard() -> bool:
            found.extend(re.findall(r"starting on (http://[^\s\"]+)", self.said))
            assert found or self.process.poll() is None, self.said
            return bool(found)

        until(heard, 60)
        return found[0]

    def ready(self) -> httpx.Client:
        """A client, once it can generate."""
        base = self.base

        def answered() -> bool:
            assert self.process.poll() is None, self.said
            try:
                return httpx.get(f"{base}/ready").status_code == 200
            except httpx.ConnectError:
                return False

        until(answered, 300)
        return httpx.Client(base_url=base, timeout=60)

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self.process.send_signal(number)

    def ended(self, seconds: float = 60) -> int:
        """Its exit code."""
        return self.process.wait(seconds)


@contextmanager
def serving(*arguments: str, cwd: Path, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """``canvax serve`` on a free port with the model in the package; killed in the end if it still runs.

    Servers share their programs, as those of one machine do: each would take ten seconds to compile.
    """
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables["CANVAX_CACHE_DIR"] = os.environ["JAX_COMPILATION_CACHE_DIR"] + "-programs"
    variables |= environment or {}
    words = arguments if arguments[:1] == ("ui",) else ("serve", "--port", "0", *arguments)
    command = [sys.executable, "-m", "canvax", *words]
    process = subprocess.Popen(command, cwd=cwd, env=variables, stderr=subprocess.PIPE, text=True)
    served = Served(process)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield served
    finally:
        process.kill()
        process.wait(10)
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()
