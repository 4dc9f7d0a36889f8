"""``canvax cache``: list or clear the cache of compiled programs. It starts no JAX backend."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from canvax.cli.terminal import byte_size, complain, say, table
from canvax.compile import cache
from canvax.errors import InputError

DAY = 86400.0


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """List the cache, print its folder, or clear it."""
    days = arguments.older_than
    if days is not None and (arguments.action != "clear" or not 0 <= days < math.inf):
        raise InputError("older_than", "is a number of days from 0, for canvax cache clear", value=days)
    folder = cache.cache_path()
    report["folder"] = None if folder is None else str(folder)
    if folder is None:
        complain(f"{cache.FOLDER} is off: programs are not cached")
    elif folder.exists() and not folder.is_dir():
        raise InputError(f"{cache.FOLDER}={str(folder)!r} is not a folder; name another one, or off")
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

    current = software()
    programs: list[dict[str, Any]] = []
    for program in cache.stored_programs():
        header = program.header
        about = {name: header.get(name) for name in ("created", "description", "devices", "software", "settings")}
        about |= {"bytes": program.size, "used": program.used, "stale": about["software"] != current}
        programs.append({"file": str(program.path), **about})
    total = sum(program["bytes"] for program in programs)
    report |= {"programs": programs, "bytes": total, "limit": cache.size_limit()}
    if arguments.json:
        return
    if programs:
        rows = [("program", "model", "size", "batch", "dtype", "device", "on disk", "used", "")]
        rows += [_row(program, time.time()) for program in programs]
        for line in table(rows, right=(1, 3, 6)):
            say(line)
        say("")
    say(f"{len(programs)} programs, {byte_size(total)}; limit {byte_size(report['limit'])}")
    say(str(cache.cache_path()))


def _row(program: dict[str, Any], now: float) -> tuple[str, ...]:
    disk, ago = byte_size(program["bytes"]), _ago(now - program["used"])
    description, devices = program["description"], program["devices"]
    try:
        size = f"{description['width']}x{description['height']}" if "width" in description else "any"
        name = description["program"] + (" without guidance" if description.get("guided") is False else "")
        name += ", with reuse" if description.get("reuse") else ""
        device = devices["kind"] if len(devices["each"]) == 1 else f"{len(devices['each'])} x {devices['kind']}"
        count = f"{description['parameters'] / 1e6:.3g}M"
        stale = "for other software" if program["stale"] else ""
        shown = (name, count, size, description["batch"], description["dtype"], device)
        return (*(" ".join(str(cell).split())[:80] for cell in shown), disk, ago, stale)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # a malformed header
        return "?", "", "", "", "", "", disk, ago, "unreadable"


def _ago(age: float) -> str:
    for unit, length in (("day", DAY), ("hour", 3600.0), ("minute", 60.0)):
        if age >= length:
            count = int(age // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
