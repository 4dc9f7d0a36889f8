"""``canvax cache``: the compiled programs that are kept. Starts no JAX backend."""

from __future__ import annotations

import argparse
import time
from typing import Any

from canvax.cli.terminal import byte_size, complain, say, table
from canvax.compile import cache
from canvax.errors import CanvaxError, InputError

DAY = 86400.0


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """List the cache, say where it is, or clear it."""
    days = arguments.older_than
    if days is not None and (arguments.action != "clear" or not days >= 0):
        raise InputError(f"--older-than {days:g} goes with clear, and is a number of days; canvax cache clear --help")
    try:
        folder = cache.cache_path()
    except RuntimeError:
        raise CanvaxError(f"there is no home folder; set {cache.FOLDER} to a folder") from None
    report["folder"] = None if folder is None else str(folder)
    if folder is None:
        complain(f"{cache.FOLDER} is off: nothing is kept")
    elif arguments.action == "path":
        if not arguments.json:
            say(str(folder))
    elif arguments.action == "clear":
        report["files"], report["bytes"] = cache.clear((days or 0.0) * DAY)
        if not arguments.json:
            say(f"removed {report['files']} files, {byte_size(report['bytes'])}, from {folder}")
    else:
        _list(arguments, report)


def _list(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    from canvax.compile.key import software

    now, ours = time.time(), software()
    programs = []
    for one in cache.programs():
        header = one.header or {}
        programs.append({
            "file": str(one.path), "bytes": one.size, "used": one.used, "created": header.get("created"),
            "stale": header.get("software") != ours, "about": header.get("about"), "devices": header.get("devices"),
            "software": header.get("software"), "settings": header.get("settings"),
        })  # fmt: skip
    total = sum(one["bytes"] for one in programs)
    report |= {"programs": programs, "bytes": total, "jax_bytes": cache.shared_bytes(), "limit": cache.size_limit()}
    if arguments.json:
        return
    if programs:
        rows = [("program", "model", "size", "batch", "dtype", "device", "on disk", "used", "")]
        rows += [_row(one, now) for one in programs]
        for line in table(rows, right=(1, 3, 6)):
            say(line)
        say("")
    say(
        f"{len(programs)} programs, {byte_size(total)}, and {byte_size(report['jax_bytes'])} of JAX's own; "
        f"limit {byte_size(report['limit'])}"
    )
    say(str(cache.cache_path()))


def _row(one: dict[str, Any], now: float) -> tuple[str, ...]:
    about, devices = one["about"], one["devices"]
    ago, disk = _ago(now - one["used"]), byte_size(one["bytes"])
    try:
        size = f"{about['width']}x{about['height']}" if "width" in about else "any"
        name = about["program"] + (" without guidance" if about.get("guided") is False else "")
        name += ", reusing" if about.get("reuse") else ""
        device = devices["kind"] if len(devices["each"]) == 1 else f"{len(devices['each'])} x {devices['kind']}"
        count = f"{about['parameters'] / 1e6:.3g}M"
        stale = "for other software" if one["stale"] else ""
        return name, count, size, str(about["batch"]), about["dtype"], device, disk, ago, stale
    except (KeyError, TypeError):
        return "?", "", "", "", "", "", disk, ago, "unreadable"


def _ago(age: float) -> str:
    for unit, length in (("day", DAY), ("hour", 3600.0), ("minute", 60.0)):
        if age >= length:
            count = int(age // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
