"""A batch job on a Ray cluster whose machines hold a model together: the hosts of a TPU slice, a group for each slice.

Each machine of a slice has an actor, and these are the processes of one ``canvax batch --distributed``: if one of them
is lost all of them are, and are started again. Slices do not know each other: each does its share of the rows.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from canvax.errors import CanvaxError, InputError
from canvax.scale.data import connected
from canvax.scale.output import Listing

SLICE = "ray.io/tpu-slice-name"
"""Ray's label of the machines of one slice."""

MOST_STARTS = 4
"""Of a slice whose machines are lost, before the job ends."""

MOST_WAIT = 900.0
"""Seconds until the machines of a lost slice must be there again."""

Job = Callable[[argparse.Namespace, dict[str, Any]], None]
"""Flags, and a report that is filled in."""

_TOLD = 30.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Host:
    """A machine of a cluster.

    Attributes:
        node: Ray's name of it.
        resources: what the process that generates there holds.
    """

    node: str
    resources: dict[str, Any]


def slices_of(nodes: Sequence[Mapping[str, Any]]) -> dict[str, list[Host]]:
    """The machines of each slice, as ``ray.nodes()`` tells of them; those without a label are one slice together.

    Where some have TPUs or GPUs, the others only see to the cluster.
    """
    alive = [node for node in nodes if node["Alive"]]
    kind = next((kind for kind in ("TPU", "GPU") if any(node["Resources"].get(kind) for node in alive)), "")
    found: dict[str, list[Host]] = defaultdict(list)
    for node in alive:
        count = node["Resources"].get(kind, 0)
        if kind and not count:
            continue
        held = {"num_gpus": count} if kind == "GPU" else {"resources": {"TPU": count}} if kind else {}
        found[node.get("Labels", {}).get(SLICE, "")].append(Host(node["NodeID"], {"num_cpus": 0, **held}))
    return dict(sorted(found.items()))


class Member:
    """An actor: one of the processes that generate together."""

    def address(self) -> str:
        """Where the others can reach this process."""
        import ray  # pyright: ignore[reportMissingImports]

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, job: Job, arguments: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Do its part of the job, in the folder where it was asked for; the report of ``canvax batch``."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise InputError(f"{folder}: not there on a machine of the cluster ({error.strerror})") from None
        report: dict[str, Any] = {}
        job(argparse.Namespace(**arguments), report)
        return report


def run_on_slices(
    job: Job, arguments: Mapping[str, Any], rows: int, say: Callable[[str], None] | None
) -> dict[str, Any]:
    """Do a job of ``canvax batch --ray --distributed``; the file and the output are on a disk that all machines share.

    Args:
        job: what ``canvax batch`` does.
        arguments: of the command.
        rows: of the file.
        say: shows a line of progress.

    Returns:
        A report as the command has it.

    Raises:
        InputError: Ray is not installed, there is no such cluster, or a machine cannot do what was asked.
        CanvaxError: machines were lost again and again.
    """
    ray = connected(arguments["ray"])
    began = time.monotonic()
    lists = Listing(arguments["output"])
    before = dict(lists.read())
    try:
        found = slices_of(ray.nodes())
        # Ray tells of machines that it has lost on stdout, where results go.
        with redirect_stdout(sys.stderr), ThreadPoolExecutor(len(found)) as pool:
            shares = [f"{number}/{len(found)}" for number in range(len(found))]
            parts = [
                pool.submit(_kept_going, ray, name, len(hosts), job, {**arguments, "share": share})
                for (name, hosts), share in zip(found.items(), shares, strict=True)
            ]
            while wait(parts, _TOLD).not_done and not any(part.done() and part.exception() for part in parts):
                done = len(lists.read())
                if say:
                    say(f"{done} of {rows} rows, {(done - len(before)) / (time.monotonic() - began):.3g} a second")
            reports = [report for part in parts for report in part.result()]
    finally:
        ray.shutdown()
    seconds, after = time.monotonic() - began, lists.read()
    done = len(_done(after) - _done(before))
    return reports[0] | {
        "rows": rows, "done": done, "skipped": len(_done(before) if arguments["retry_errors"] else before),
        "errors": len(after) - len(_done(after)), "seconds": seconds, "images_per_second": done / seconds,
        "slices": len(found), "hosts": len(reports),
    }  # fmt: skip


def _done(lines: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {name for name, line in lines.items() if line.get("status") == "done"}


def _kept_going(ray: Any, name: str, count: int, job: Job, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The share of one slice, begun again where it was when machines are lost."""
    for start in range(MOST_STARTS):
        hosts = _hosts(ray, name, count)
        try:
            # Rows that failed when a machine went were no fault of theirs.
            return _together(ray, hosts, job, arguments if start == 0 else {**arguments, "retry_errors": True})
        except InputError:
            raise
        except (ray.exceptions.RayError, CanvaxError) as error:  # one that is lost takes the others along
            if start == MOST_STARTS - 1:
                why = str(error).strip().splitlines()[-1][:300]
                raise CanvaxError(
                    f"the job ended on the cluster ({why}), after {MOST_STARTS} starts of slice {name!r}; the same "
                    "command goes on"
                ) from error
    raise AssertionError


def _hosts(ray: Any, name: str, count: int) -> list[Host]:
    """The machines of a slice, when all of them are there."""
    end = time.monotonic() + MOST_WAIT
    while len(hosts := slices_of(ray.nodes()).get(name, [])) < count:
        if time.monotonic() > end:
            raise InputError(
                f"slice {name!r}: {len(hosts)} of {count} machines are there after {MOST_WAIT:.0f} s; the same command "
                "goes on when the others are back"
            )
        time.sleep(1)
    return hosts[:count]


def _together(ray: Any, hosts: Sequence[Host], job: Job, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the processes of one slice report."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

    members = [
        ray.remote(Member)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(host.node, soft=False), **host.resources)
        .remote()
        for host in hosts
    ]
    try:
        coordinator = ray.get(members[0].address.remote())
        told = {**arguments, "ray": None, "json": True, "quiet": True}
        told |= {"coordinator": coordinator, "num_processes": len(hosts)}
        left = [member.run.remote(job, {**told, "process_id": i}, os.getcwd()) for i, member in enumerate(members)]
        reports: list[dict[str, Any]] = []
        while left:
            (over, *_), left = ray.wait(left, num_returns=1)
            reports.append(ray.get(over))
        return reports
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, CanvaxError) else error from None
    finally:
        for member in members:
            ray.kill(member)
