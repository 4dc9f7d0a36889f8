"""``python -m benchmarks PART``: canvax beside its peers on this machine, outputs compared first."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.cli.arguments import Parser, versions
from canvax.cli.plan import parse_size
from canvax.cli.terminal import complain, say, table
from canvax.errors import InputError, check_count, nearest

if TYPE_CHECKING:
    from benchmarks.lab.job import Job

BUSY = 0.25
"""Load average for each processor from which on other work is in the way."""

_NOT_COMPILED = ("load", "start")
"""Parts in which torch-compile does not take part: it would load and start as torch does, and compile for minutes."""


EXAMPLES = """
examples:
  python -m benchmarks unet --model sd15 --size 512x512 --against torch
  python -m benchmarks picture --model sdxl --steps 30 --dtype bfloat16 --against torch --against torch-compile
  python -m benchmarks picture --model z-image --dtype bfloat16 --against torch --against torch-compile-default
  python -m benchmarks vae --model sd15 --against torch --torch-python ./other/bin/python --json
  python -m benchmarks load --model sdxl --dtype bfloat16 --against torch --cold
"""


def run(words: Sequence[str], report: dict[str, Any]) -> None:
    """Parse the command line, measure a part, and print a table."""
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure a part of a model: same weights, same inputs, same work, outputs compared first. "
        "Contenders are processes that take turns; what they need is installed by you.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _flags(parser)
    _measure(parser.parse_args(words), report)


def _measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    from benchmarks.lab.job import PEERS
    from benchmarks.lab.measure import measure
    from benchmarks.lab.process import Contender, check_peer, probe
    from canvax.planning.chips import peak_flops

    width, height = parse_size(arguments.size) if arguments.size is not None else (None, None)
    check_count("--rounds", arguments.rounds)
    python = arguments.torch_python or sys.executable
    peers = [Contender(name, python) for name in dict.fromkeys(arguments.against)]
    for peer in peers:
        if peer.name != "torch" and arguments.part in _NOT_COMPILED:
            raise InputError(f"--against {peer.name}: it does not take part in {arguments.part}; use --against torch")
        check_peer(peer)
    platform, kind, memory = probe(arguments.device)
    if platform == "tpu" and peers:
        raise InputError("--against: peers run on CPU and GPU, and canvax would run on a TPU; add --device cpu")
    load = _load()[0]
    if load / (os.cpu_count() or 1) > BUSY:
        complain(f"other programs use this machine (load average {load:.1f}); trust ratios alone",
                 label="warning: ")  # fmt: skip
    tell = (lambda text: None) if arguments.quiet else complain
    with _tidy_when_ended(), _checkpoint(arguments.model, arguments.stored, tell) as folder:
        job = replace(_job(arguments, folder, width, height, platform), device_bytes=memory)
        report |= _circumstances(arguments, job, platform, kind)
        figures = measure(job, peers, arguments.rounds, cold=arguments.cold, programs=arguments.programs, tell=tell)
    ours = figures["canvax"]["median_s"]
    theirs = {name: row["median_s"] for name, row in figures.items() if name in PEERS}
    peer = min(theirs, key=lambda name: theirs[name]) if theirs else None
    peak = peak_flops(kind, job.dtype)
    for row in figures.values():
        row["ratio"] = ours / row["median_s"]
        row["ratio_of_fastest"] = figures["canvax"]["min_s"] / row["min_s"]
        if "flops" in figures["canvax"]:  # the same work, so the same count
            row["flops_per_s"] = figures["canvax"]["flops"] / row["median_s"]
            row["share_of_peak"] = peak and row["flops_per_s"] / peak
        if job.part == "picture":
            row["pictures_per_s"] = job.batch / row["median_s"]
    report |= {
        "unit": "s", "ours": ours, "theirs": theirs[peer] if peer else None, "peer": peer,
        "ratio": ours / theirs[peer] if peer else None, "peak_flops_per_s": peak, "contenders": figures,
    }  # fmt: skip
    if not arguments.json:
        for line in lines(report):
            say(line)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "part", metavar="PART", choices=["denoiser", "unet", "vae", "text", "picture", "load", "start"],
        help="denoiser or unet (one evaluation, of a UNet a guided one), vae (decoding), text (encoding), picture (all "
        "of it), load (a checkpoint from files), start (from the start of a process to a picture on disk)",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--model", default="emoji", metavar="MODEL",
        help="sd14, sd15, sd21, sdxl, z-image, flux2-klein-4b or krea-2: full size, random weights; z-image-small, "
        "flux2-klein-small, krea-2-small; emoji (the default) or a folder",
    )  # fmt: skip
    parser.add_argument(
        "--size",
        metavar="WIDTHxHEIGHT",
        help="size of an image in pixels; multiples of 8, or of 16 for transformers (default: that of the model)",
    )
    parser.add_argument("-b", "--batch", type=int, default=1, metavar="N", help="pictures at once (1)")
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="denoising steps (default: 20; 4 for start; the model's default for transformers)",
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16 (bfloat16 on TPU and GPU)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="for all contenders (JAX's)")
    parser.add_argument(
        "--against", action="append", default=[],
        choices=["torch", "torch-compile", "torch-compile-default", "openvino"],
        help="a peer: PyTorch diffusers, the same compiled to the utmost or in a minute, or OpenVINO; may be repeated",
    )  # fmt: skip
    parser.add_argument("--torch-python", metavar="PATH", help="the Python that has PyTorch (this one)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each contender (3)")
    parser.add_argument(
        "--stored", choices=["float16", "bfloat16", "float32"],
        help="how random weights are stored (float16; those of transformers bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--padding", choices=["equal", "default"], default="equal",
        help="of prompts that a language model reads: as many tokens for all contenders (equal), or short prompts, "
        "which each pads as it does by default",
    )  # fmt: skip
    parser.add_argument("--cold", action="store_true", help="with load: files not in memory before each run")
    parser.add_argument(
        "--programs", default="off", metavar="FOLDER",
        help="take canvax's compiled programs from there and keep them there (off: each run compiles)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


@contextmanager
def _tidy_when_ended() -> Iterator[None]:
    """Let SIGTERM stop this like Ctrl-C: else it would leave gigabytes of random weights behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _checkpoint(model: str, stored: str | None, tell: Any) -> Iterator[Path]:
    """The folder of a model; that of a preset lasts as long as it is needed."""
    from benchmarks.lab.models import KNOWN, write_random
    from canvax.weights.cast import parse_dtype
    from canvax.weights.location import BUNDLED, Location
    from canvax.weights.open import open_files

    preset = KNOWN.get(model)
    if preset is None:
        if "/" not in model and model not in BUNDLED and not Path(model).expanduser().exists():
            raise InputError(f"--model {model!r} is no preset and no folder; {nearest(model, [*KNOWN, *BUNDLED])}")
        yield open_files(Location(model)).folder()
        return
    with tempfile.TemporaryDirectory(prefix="canvax-model-") as scratch:
        tell(f"writing {model} with random weights to {scratch}")
        yield write_random(Path(scratch) / model, preset, dtype=parse_dtype(stored) if stored else None)


def _job(arguments: argparse.Namespace, folder: Path, width: int | None, height: int | None, platform: str) -> Job:
    """What is to be done, checked."""
    import numpy as np

    from benchmarks.lab.job import GUIDANCE, PROMPTS, SAMPLER, Job, lengthened, text_rows
    from canvax.families.read import read_model
    from canvax.models.clip import clip_configs
    from canvax.pipelines.checks import check_size
    from canvax.weights.cast import parse_dtype
    from canvax.weights.location import Location
    from canvax.weights.open import open_files

    usual = "float32" if platform == "cpu" else "bfloat16"
    dtype = parse_dtype(arguments.dtype or usual).name
    model = read_model(open_files(Location(folder)), np.float32)
    side, step = model.native_size, model.networks.size_step
    if arguments.part == "vae" and dtype == "float16" and getattr(model.vae, "force_upcast", False):
        raise InputError("--dtype float16: this VAE overflows in it; use bfloat16 or float32")
    few_steps = not clip_configs(model.text)
    equal = few_steps and arguments.padding == "equal"
    usual_steps = model.defaults.num_inference_steps if few_steps else 4 if arguments.part == "start" else 20
    return Job(
        part=arguments.part,
        folder=folder,
        width=check_size("width", width, side[1], step),
        height=check_size("height", height, side[0], step),
        batch=check_count("--batch", arguments.batch),
        steps=check_count("--steps", arguments.steps or usual_steps),
        dtype=dtype,
        device=platform,
        family=model.family.name,
        guidance=model.defaults.guidance_scale if few_steps else GUIDANCE,
        sampler=None if few_steps else SAMPLER,
        texts=lengthened(model) if equal else PROMPTS,
        text_rows=text_rows(model) if equal else None,
    )


def _circumstances(arguments: argparse.Namespace, job: Job, platform: str, kind: str) -> dict[str, Any]:
    return {
        "part": job.part, "model": arguments.model, "stored": arguments.stored, "width": job.width,
        "height": job.height, "batch": job.batch, "steps": job.steps, "guidance": job.guidance,
        "padding": arguments.padding, "text_rows": job.text_rows, "dtype": job.dtype, "rounds": arguments.rounds,
        "cold": arguments.cold, "device": {"platform": platform, "kind": kind, "processors": os.cpu_count(),
        "processor": _processor()}, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": _load(), "versions": versions(),
    }  # fmt: skip


def _load() -> list[float]:
    """The load average of 1, 5 and 15 minutes; zeros where the system has none."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else [0.0] * 3


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else None


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    part, device, figures = report["part"], report["device"], report["contenders"]
    guided = "guided " if report["guidance"] > 1 else ""
    evaluation = f"one {guided}evaluation, {(2 if guided else 1) * report['batch']} samples"
    work = {
        "denoiser": evaluation,
        "unet": evaluation,
        "vae": f"decoding {report['batch']}",
        "text": f"{report['batch']} prompts",
        "picture": f"{report['batch']} at once, {report['steps']} {guided}steps",
        "load": "files out of the page cache" if report["cold"] else "files in the page cache",
        "start": f"from the start of the process to a picture on disk, {report['steps']} {guided}steps",
    }[part]
    size = "" if part in ("text", "load") else f" {report['width']} x {report['height']},"
    where = device["kind"] if device["platform"] != "cpu" else f"{device['processors']} x {device['processor']}"
    head = f"{report['model']} {part}:{size} {report['dtype']}, {work}; {where}; {report['date'][:10]}"
    columns = [column for column in _COLUMNS if any(column[1](row) for row in figures.values())]
    rows = [("", *(title for title, _ in columns))]
    rows += [(name, *(cell(row) for _, cell in columns)) for name, row in figures.items()]
    text = [head, "", *table(rows, right=range(1, len(columns) + 1)), ""]
    if part == "start":
        text += [*_moments(figures), ""]
    for name, row in figures.items():
        if "versions" in row:
            text.append(f"{name}: {', '.join(f'{what} {number}' for what, number in row['versions'].items())}")
    rounds = f"{report['rounds']} round{'s' * (report['rounds'] != 1)}, contenders taking turns"
    text.append(f"python {report['versions']['python']}; {rounds}; load average {report['load_average'][0]:.1f}")
    return text


def _moments(figures: dict[str, Any]) -> list[str]:
    """When each thing was done, in seconds since the start of the process."""
    names = list(figures["canvax"]["moments"])
    rows = [("", *(name.replace("_", " ") for name in names), "traces", "compilations")]
    for name, row in figures.items():
        cells = [_spread(row["moments"][moment]) if moment in row["moments"] else "" for moment in names]
        rows.append((name, *cells, str(row.get("traces", "")), str(row.get("compilations", ""))))
    return table(rows, right=range(1, len(rows[0])))


def _spread(row: dict[str, Any]) -> str:
    return f"{_time(row['median_s'])} ({_time(row['min_s'])}-{_time(row['max_s'])})"


def _time(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _gigabytes(row: dict[str, Any], name: str) -> str:
    return f"{row[name] / 1e9:.2f}" if row.get(name) else ""


def _number(row: dict[str, Any], name: str, form: str) -> str:
    return f"{row[name]:{form}}" if row.get(name) is not None else ""


_COLUMNS: list[tuple[str, Any]] = [
    ("median s (min-max)", _spread),
    ("canvax / it", lambda row: f"{row['ratio']:.2f}"),
    ("fastest", lambda row: f"{row['ratio_of_fastest']:.2f}"),
    ("it / reading", lambda row: _number(row, "over_reading", ".2f")),
    ("pictures/s", lambda row: _number(row, "pictures_per_s", ".3g")),
    ("GFLOP/s", lambda row: f"{row['flops_per_s'] / 1e9:.0f}" if "flops_per_s" in row else ""),
    ("of peak", lambda row: _number(row, "share_of_peak", ".0%")),
    ("compile s", lambda row: _number(row, "compile_s", ".1f")),
    ("first run s", lambda row: _number(row, "first_s", ".2f")),
    ("load s", lambda row: _number(row, "load_s", ".1f")),
    ("peak host GB", lambda row: _gigabytes(row, "host_peak_bytes")),
    ("/ weights", lambda row: _number(row, "peak_over_weights", ".2f")),
    ("peak device GB", lambda row: _gigabytes(row, "device_peak_bytes")),
    ("differs by", lambda row: _number(row, "differs_by", ".1e")),
]
