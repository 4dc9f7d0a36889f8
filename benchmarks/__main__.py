"""The laboratory; see :mod:`benchmarks.command`."""

import sys

from benchmarks.command import run
from canvax.cli import main

if __name__ == "__main__":
    sys.exit(main(run=run))
