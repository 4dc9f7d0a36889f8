"""The command line as a user starts it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

from canvax.cli import BAD_INPUT


def start(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "canvax", *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )


def test_from_a_shell(tmp_path: Path) -> None:
    done = start("generate", "a red apple", "-s", "1", "--steps", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out/00000-1.png\n"), done.stderr
    assert re.search(r"compiling \(once for each size and batch\):.* denoiser \d+\.\d s", done.stderr)
    assert "1 image; load" in done.stderr


def processor_seconds() -> float:
    """What the processes that have ended used; the clock would count the waiting for other tests as well."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_bad_input_is_found_at_once(tmp_path: Path) -> None:
    began = processor_seconds()
    done = start("generate", "x", "--sampler", "Eular", cwd=tmp_path)
    assert processor_seconds() - began < 2
    assert (done.returncode, done.stdout) == (BAD_INPUT, "")
    assert os.listdir(tmp_path) == []


def test_no_command_starts_a_backend_early(tmp_path: Path) -> None:
    code = (
        "import sys; from canvax.cli import main; main(['info', 'emoji']); "
        "import jax._src.xla_bridge as bridge; assert not bridge._backends; "
        "main(['samplers']); main(['--version']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "canvax", "samplers"], stdout=pipe, stderr=subprocess.PIPE, cwd=tmp_path
        )
    assert (done.returncode, done.stderr) == (0, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "canvax", "samplers"], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path
        )
    assert done.returncode == 1
    assert done.stderr == b"canvax: error: stdout cannot be written (No space left on device)\n"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for stderr in ("2>&-", "2>/dev/full"):  # what nobody can read is lost, and no more than that
        words = f"{shlex.quote(sys.executable)} -m canvax bench --rounds 0 {stderr}"
        done = subprocess.run(["sh", "-c", words], stdout=subprocess.PIPE, cwd=tmp_path, env=buffered)
        assert (done.returncode, done.stdout) == (2, b"")


def test_ctrl_c_while_modules_are_imported() -> None:
    """A shell without job control starts what it puts in the background with Ctrl-C ignored, and children inherit that.
    The process answers it whichever way the tests were started.
    """
    code = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import canvax.__main__
usual = builtins.__import__
def interrupted(name, *rest):
    if name.startswith("canvax.familiar"):
        os.kill(os.getpid(), signal.SIGINT)
    return usual(name, *rest)
builtins.__import__ = interrupted
sys.argv = ["canvax", "generate", "a cat"]
sys.exit(canvax.__main__.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "canvax: cancelled\n")
