"""Comparisons with other projects are left out where these are missing, but with ``REFERENCE=yes``: then they fail.

The Makefile installs them all for ``REFERENCE=yes``. ``conftest.py`` of the project says the same of the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function for the folder and the single file of a kind of model. No test changes them."""

    @cache
    def make(kind: str) -> tuple[Path, Path]:
        from tests.support.ldm_files import model, write_folder, write_single

        root, parts = tmp_path_factory.mktemp(kind), model(kind)
        return write_folder(root / "model", kind, parts), write_single(root / "model.safetensors", kind, parts)

    return make
