"""Whether the machine was ours while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Others:
    """Processors that other processes kept busy, from now on; on Linux.

    Args:
        server: the process that is measured; this one is the other that counts as ours.
    """

    def __init__(self, server: int) -> None:
        self._server, self._began = server, time.perf_counter()
        self._before = self._seconds()

    def processors(self) -> float:
        """On average."""
        return max(0.0, (self._seconds() - self._before) / (time.perf_counter() - self._began))

    def _seconds(self) -> float:
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, *irq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        of_server = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        server = int(of_server[11]) + int(of_server[12])
        return (user + nice + system + sum(irq) - server) / tick - time.process_time()
