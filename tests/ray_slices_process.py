"""``canvax batch --ray --distributed`` on two slices of two machines, one of which loses a process; prints JSON.

Run by ``test_ray.py``. The machines have a resource "TPU" and the label of their slice, as Ray on TPUs gives them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.ray_batch import NODE, command, run, write_rows
from canvax.scale.output import listed
from canvax.scale.slices import SLICE

ROWS = 24


def kill_one(folder: Path) -> bool:
    """One process of a slice, when some images are there."""
    import psutil

    end = time.monotonic() + 300
    while len(listed(folder)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or []).startswith("ray::Member.run"):
            process.kill()
            return True
    return False


def pixels(folder: Path) -> dict[str, Any]:
    found = {name: folder / line["file"] for name, line in listed(folder).items()}
    return {name: np.asarray(Image.open(file)).astype(int) for name, file in found.items()}


def main() -> None:
    from ray.cluster_utils import Cluster

    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    there = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 1})
    more = {name: value for name, value in NODE.items() if name != "include_dashboard"}
    for name in "aabb":
        there.add_node(**more, resources={"TPU": 1}, labels={SLICE: name})
    there.wait_for_nodes()
    report: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            file, out, plain = (
                write_rows(Path(folder, "rows.jsonl"), ROWS, 6),
                Path(folder, "out"),
                Path(folder, "plain"),
            )
            killed: list[bool] = []
            killer = threading.Thread(target=lambda: killed.append(kill_one(out)))
            killer.start()
            code, told = run(command(file, out, 4, "--ray", there.address, "--distributed"))
            killer.join()
            report |= {"code": code, "killed": killed, "told": told, "known": len(listed(out))}
            report["errors"] = [line.get("error") for line in listed(out).values() if line.get("error")]
            again = run(command(file, out, 4, "--ray", there.address, "--distributed"))[1]
            report["again"] = [again["skipped"], again["done"]]
            run(command(file, plain, 4))
            ours, theirs = pixels(out), pixels(plain)
            report["off"] = max(int(abs(ours[name] - theirs[name]).max()) for name in theirs)
    finally:
        there.shutdown()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main())
