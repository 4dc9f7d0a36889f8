"""``python -m canvax`` is the ``canvax`` command."""

import sys

from canvax.cli import main

if __name__ == "__main__":
    sys.exit(main())
