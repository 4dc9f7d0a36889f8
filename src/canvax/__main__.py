"""``python -m canvax`` and ``canvax``: the command, with an answer to Ctrl-C from the first import on."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

_CANCELLED = b"canvax: cancelled\n"


def _stop(*_: Any) -> None:
    """Nothing has been begun: only modules are being imported, some of which turn an interrupt into other errors."""
    if sys.stderr is not None:
        os.write(2, _CANCELLED)
    os._exit(130)


def _again(unraisable: Any) -> None:
    """An interrupt in a callback of the garbage collector, where Python drops it, comes again a moment later."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def _end(code: int) -> NoReturn:
    """Leave without taking Python apart, where a thread of a library may still come back to it and crash.

    All has been written by then; what waits for the end of the process (JAX's processes among themselves) is called.
    """
    with suppress(Exception):
        atexit._run_exitfuncs()
    os._exit(code)


def main() -> int:
    """Run the command line of this process."""
    sys.unraisablehook = _again
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, _stop)
    from canvax.cli import COMMANDS
    from canvax.cli import main as run

    if command := COMMANDS.get("".join(sys.argv[1:2])):
        with suppress(Exception):  # which it says better itself
            import_module(f"canvax.cli.{command}")
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run()
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:  # it is full: Python would try once more, and exit with 120
        sys.stderr = None
    if "jax" in sys.modules:
        _end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
