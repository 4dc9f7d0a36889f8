"""``python -m canvax`` and ``canvax``: the command line of canvax."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line; return its exit code."""
    code = 1

    def leave() -> None:
        """Exit without Python's teardown: a thread of JAX that still runs then can crash the process."""
        if "jax" in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(code)

    atexit.register(leave)  # registered first, so it runs last
    try:
        from canvax.cli import main as run

        code = run()
    except KeyboardInterrupt:  # during an import; commands handle their own
        print("canvax: cancelled", file=sys.stderr)
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(main())
