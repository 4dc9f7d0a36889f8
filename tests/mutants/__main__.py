"""``python -m tests.mutants [ID...]``: put each defect in, and demand that its tests fail."""

import sys

from tests.mutants import main

sys.exit(min(main(sys.argv[1:]), 1))
