"""Several processes that run the same program: joins them, and checks that they agree.

Every process runs the same script. Only two things need communication: a random seed, which the first process chooses
for all, and a check that every process got the same arguments. If they differed, the processes would wait for each
other forever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from canvax.errors import CanvaxError, InputError
from canvax.parallel.mesh import processes


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Join the other processes: ``jax.distributed.initialize`` with clear errors. Call it before any other use of JAX.

    On Cloud TPU, Slurm and Open MPI JAX detects all three arguments. Elsewhere pass all three.

    Args:
        coordinator: "host:port" of process 0, reachable from all other processes.
        num_processes: number of processes.
        process_id: index of this process, from 0.

    Raises:
        InputError: only some of the arguments are given, or a value is invalid.
        CanvaxError: the other processes could not be reached, or the environment does not contain their addresses.
    """
    cluster = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in cluster.items() if value is None]
    if missing and len(missing) < 3:
        raise InputError(f"{', '.join(missing)} not given; a cluster made by hand needs {', '.join(cluster)}")
    if num_processes is not None and num_processes < 1:
        raise InputError("num_processes", "is not a number of processes of at least 1", value=num_processes)
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise InputError(
            "process_id", f"is not in 0..{num_processes - 1}, for num_processes={num_processes}", value=process_id
        )
    port = "" if coordinator is None else coordinator.rpartition(":")[2]
    if coordinator is not None and not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 1 << 16):
        raise InputError("coordinator", "is not host:port, such as 10.0.0.1:8476", value=coordinator)
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CanvaxError(
            f"the processes could not be joined ({first[:300]}); on Cloud TPU, Slurm and Open MPI nothing need be "
            "given, elsewhere coordinator, num_processes and process_id, in each process before it uses JAX"
        ) from error


def is_spread(mesh: Mesh) -> bool:
    """Return whether the mesh has devices of several processes."""
    return len(processes(mesh)) > 1


def is_main_process(mesh: Mesh) -> bool:
    """Return whether this is the main process of the mesh, the only one that shows progress."""
    return processes(mesh)[0] == jax.process_index()


def broadcast_seeds(seeds: Sequence[int], *call: Any) -> list[int]:
    """Return the seeds of process 0, after checking that all processes got the same arguments.

    Every process must call it. ``call`` are the arguments to compare, by their ``repr``.

    Raises:
        InputError: the arguments differ; raised in every process.
    """
    digest = np.frombuffer(hashlib.sha256(repr((len(seeds), *call)).encode()).digest(), np.uint32)
    if (np.asarray(multihost_utils.process_allgather(digest)) != digest).any():
        raise InputError(
            "the processes were given different arguments; call the pipeline with the same ones in each, every process "
            "generates its own part of the images"
        )
    words = np.array(seeds, np.uint64).view(np.uint32)  # JAX knows no 64-bit integers by default
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(words))
    return [int(seed) for seed in np.ascontiguousarray(agreed, np.uint32).view(np.uint64)]


@contextmanager
def fail_together(name: str) -> Iterator[None]:
    """Wait at the end of the block for all processes; if one of them failed in the block, all fail.

    Raises:
        CanvaxError: another process failed.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        failures = np.asarray(multihost_utils.process_allgather(np.asarray(failed)))
    if failures.any():
        raise CanvaxError(f"{name} failed in process {int(failures.argmax())}, whose own error says why")


def any_process(value: Any) -> Any:
    """Return, for each entry of an array, whether it is true in any process; every process must call it."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).any(axis=0)
