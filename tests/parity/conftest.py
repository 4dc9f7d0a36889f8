"""Comparisons with other projects are left out where these are missing, but with ``REFERENCE=yes``: then they fail.

The Makefile installs them all for ``REFERENCE=yes``. ``conftest.py`` of the project says the same of the other tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

NEEDED = {
    **dict.fromkeys(("torch", "diffusers", "transformers"), ("*",)),
    "peft": ("test_adapters.py", "test_train_benchmark.py", "test_training*.py"),
    "compel": ("test_prompts.py",), "lycoris": ("test_lycoris.py",), "k_diffusion": ("test_k_diffusion.py",),
}  # fmt: skip
"""Package -> the files that compare with it."""

MISSING = [name for name in NEEDED if os.environ.get("REFERENCE") != "yes" and find_spec(name) is None]

collect_ignore_glob = [file for name in MISSING for file in NEEDED[name]]


def pytest_report_header() -> list[str]:
    return [f"tests/parity: {', '.join(NEEDED[name])} left out, for {name} is missing" for name in MISSING]
