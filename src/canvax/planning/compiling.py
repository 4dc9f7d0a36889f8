"""Runs the compiling process and stores its results."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from canvax.compile.cache import usual_path
from canvax.errors import CanvaxError, InputError
from canvax.planning.job import Job
from canvax.planning.targets import environment, parse_target

_PACKAGE = Path(__file__).parent.parent
_NO_PART = {"cli", "flax_api", "images", "pipelines", "tokenizers", "weights"}
"""Packages of canvax that do not affect compiled programs."""

NAMES = {"encode": "text encoder", "denoise": "denoiser", "decode": "decoder"}


def compile_programs(
    job: Job,
    versions: Mapping[str, str],
    names: Sequence[str],
    *,
    reuse: bool,
    announce: Callable[[str, float | None], None] | None,
) -> dict[str, dict[str, Any]]:
    """Return the figures of the programs with these names, from an earlier plan or by compiling them now.

    Raises:
        InputError: the compiler does not support the target.
        CanvaxError: the compiler failed.
    """
    files = {name: cache_folder() / f"{_key(job, name, versions)}.json" for name in names}
    results = {}
    for name, file in files.items():
        with suppress(OSError, ValueError):
            results[name] = {**json.loads(file.read_text(encoding="utf-8")), "reused": True} if reuse else {}
    results = {name: result for name, result in results.items() if result}
    missing = [name for name in names if name not in results]
    for message in _messages(job, missing) if missing else ():
        name, result = message["program"], message.get("result")
        if announce:
            with_copies = ", with streamed weights," if job.streamed else ""
            announce(f"{NAMES.get(name, name)}{with_copies} for {job.target}", result and result["compile_seconds"])
        if result is not None:
            results[name] = result
            with suppress(OSError):  # on a full disk the compiled result is still returned
                _keep(files[name], result)
    return results


def cache_folder() -> Path:
    """Return the folder of stored plans, inside the cache of programs (CANVAX_CACHE_DIR)."""
    return usual_path() / "plans"


def _key(job: Job, program: str, versions: Mapping[str, str]) -> str:
    """Return a hash of everything that determines a program: job, canvax's code, compiler and its flags."""
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    description = json.dumps([job.describe(program), dict(versions), flags], sort_keys=True)
    digest = hashlib.sha256(description.encode())
    for file in _sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterable[Path]:
    files = (file for file in sorted(_PACKAGE.rglob("*.py")))
    return (file for file in files if file.relative_to(_PACKAGE).parts[0] not in _NO_PART)


def _keep(file: Path, result: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
        json.dump(result, part)
    Path(part.name).replace(file)


def _messages(job: Job, programs: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of the compiling process as they arrive."""
    paths = (str(_PACKAGE.parent), os.environ.get("PYTHONPATH", ""))
    env = environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # -P: do not import modules such as a jax.py from the current folder.
    command = [sys.executable, "-P", "-m", "canvax.planning.worker", *programs]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": noise}
        process = subprocess.Popen(command, env=env, text=True, encoding="utf-8", **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(job.dumps() + "\n")  # left open, so that the process ends with this process
                process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "refused" in message:
                    compiler = parse_target(job.target).compiler
                    raise InputError("target", f"is refused by {compiler}: {message['refused']}", value=job.target)
                yield message
            if process.wait() != 0:
                noise.seek(0)
                last = (noise.read().strip().splitlines() or ["it said nothing"])[-1]
                raise CanvaxError(f"compiling for {job.target} failed ({process.returncode}): {last[:500]}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()
