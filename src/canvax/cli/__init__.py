"""The ``canvax`` command: results on stdout, everything else on stderr, one clear line for each error."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from canvax.cli.arguments import COMMANDS, parse
from canvax.cli.terminal import complain, emit_json, flush, hush_stdout, show_warning, tolerant_streams
from canvax.errors import CanvaxError, HintWarning, InputError, is_out_of_memory
from canvax.weights.data_folder import using

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes; 0 is success."""


_LISTING = (["samplers"], ["info"], ["cache"])
"""Commands that only list: a closed pipe is no failure."""

_OF_OTHERS = ("batch", "serve", "ui")
"""Commands whose hints are not written as flags: rows and requests have names of arguments."""

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""The vendor of TPUs, by which JAX looks for them."""

Command = Callable[[list[str], dict[str, Any]], None]
"""A function that runs arguments and fills a dict, the report, on the way, so that a failed command has one too."""


def main(argv: Sequence[str] | None = None, run: Command | None = None) -> int:
    """Run a command line and return the exit code: 0 done, 1 failed, 2 bad input, 130 stopped with Ctrl-C.

    Args:
        argv: the arguments, by default those of the process.
        run: the command, by default ``canvax`` with its subcommands.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in takewhile(lambda word: word != "--", arguments)  # what follows is prompts
    report: dict[str, Any] = {}
    tolerant_streams()
    with warnings.catch_warnings():
        warnings.showwarning = partial(show_warning, set(), partial(complain, label="warning: "))
        warnings.simplefilter("always", HintWarning)
        warnings.filterwarnings("ignore", r"Image size .* exceeds limit")  # of Pillow: the error that follows says it
        try:
            code, error = _guarded(run or _dispatch, arguments, report)
        except BrokenPipeError:  # the reader of stdout has gone: `canvax samplers | head -1`
            hush_stdout()
            return 0 if arguments[:1] in _LISTING else FAILED
        except SystemExit as done:  # --help and --version
            code, error, as_json = done.code if isinstance(done.code, int) else 0, None, False
    try:
        if error is not None:
            complain(error["message"], label="" if code == INTERRUPTED else "error: ")
        if as_json:
            emit_json({"error": error, **report} if error else report)
        flush()
    except BrokenPipeError:
        hush_stdout()
        return code or FAILED
    except CanvaxError as full:
        complain(str(full), label="error: ")
        return code or FAILED
    at_work = any(thread.name.startswith("canvax") for thread in threading.enumerate())
    if argv is None and (at_work or (code == INTERRUPTED and "jax" in sys.modules)):
        # A normal exit would wait minutes for the compiler, or free memory that it still uses.
        with suppress(OSError, AttributeError):
            sys.stderr.flush()  # type: ignore[union-attr]
        os._exit(code)
    return code


def _dispatch(arguments: list[str], report: dict[str, Any]) -> None:
    chosen = parse(arguments)
    without_missing_tpu()
    if chosen.command not in _OF_OTHERS:
        show = warnings.showwarning

        def in_flags(message: Warning | str, *others: Any) -> None:
            show(message.format(chosen.write) if isinstance(message, HintWarning) else message, *others)

        warnings.showwarning = in_flags
    try:
        with using(getattr(chosen, "data_dir", None)):
            import_module(f"canvax.cli.{COMMANDS[chosen.command]}").run(chosen, report)
    except InputError as error:
        error.args = (" ".join(error.format(chosen.write).split()),)
        raise


def without_missing_tpu() -> None:
    """Keep JAX from loading libtpu where there is no TPU: ``canvax plan`` needs it, but it writes errors to stderr."""
    if "JAX_PLATFORMS" in os.environ or find_spec("libtpu") is None:
        return
    if find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin"):
        return  # JAX_PLATFORMS with a GPU that is missing would be an error
    with suppress(OSError):
        if all(path.read_text().strip() != GOOGLE for path in PCI_DEVICES.glob("*/vendor")):
            os.environ["JAX_PLATFORMS"] = "cpu"


def _guarded(run: Command, arguments: list[str], report: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Run a command; return its exit code, and the error if there was one."""
    debug = debugging()
    try:
        run(arguments, report)
    except KeyboardInterrupt as stop:
        return INTERRUPTED, _error("Cancelled", str(stop) or "cancelled; finished images are kept")
    except BrokenPipeError:
        raise
    except InputError as error:
        if debug:
            raise
        return BAD_INPUT, _error(type(error).__name__, str(error))
    except CanvaxError as error:
        if debug:
            raise
        return FAILED, _error(type(error).__name__, str(error))
    except Exception as error:
        if debug:
            raise
        if wrong := _setting_of_jax(error):
            return BAD_INPUT, _error("InputError", f"{wrong} ({error}); set another value, or unset it")
        return FAILED, _error(type(error).__name__, _unexpected(error))
    return 0, None


def debugging() -> bool:
    """Return True if tracebacks are requested."""
    return os.environ.get("CANVAX_DEBUG", "") not in ("", "0")


def _setting_of_jax(error: Exception) -> str:
    """Return the variable of the environment that JAX refuses in its import, with its value; "" for other errors."""
    match = re.search(r"environment '(JAX_\w+)'|JAX flag (jax_\w+)", str(error))
    name = (match[1] or match[2]).upper() if match else ""
    return f"{name}={os.environ[name]!r:.80} cannot be used" if name in os.environ else ""


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": kind, "message": message}


def _unexpected(error: Exception) -> str:
    """Describe an unexpected error in one line, with advice."""
    first = (str(error).strip().splitlines() or [""])[0]
    if is_out_of_memory(error):
        return (
            f"not enough memory ({first[:200]}); use a smaller --batch-size, --width and --height, or --dtype bfloat16"
        )
    return f"{type(error).__name__}: {first[:500]} (set CANVAX_DEBUG=1 for the traceback)"
