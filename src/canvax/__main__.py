"""``python -m canvax`` and ``canvax``: the command line of this process."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    try:
        from canvax.cli import main as run

        return run()
    except KeyboardInterrupt:  # of an import; commands answer their own
        print("canvax: cancelled", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
