"""Eight virtual CPU devices stand for eight TPU cores; set before JAX is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CANVAX_CACHE_DIR"] = "off"  # what a test compiles depends on no other run

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import canvax

AS_FOR_USERS = {"test_cli", "test_kernels", "test_less_work", "test_pipeline"}
"""Modules whose programs are compiled as users' are; so are those of the processes that tests start."""


@pytest.fixture(scope="module", autouse=True)
def quick_compiling(request: pytest.FixtureRequest) -> Iterator[None]:
    """Elsewhere XLA leaves most optimisations out: the suite is compiling for the most part, and takes two thirds."""
    import jax

    flag = "jax_disable_most_optimizations"
    jax.config.update(flag, request.module.__name__.rpartition(".")[2] not in AS_FOR_USERS)
    yield
    jax.config.update(flag, False)


@pytest.fixture(scope="session")
def emoji() -> canvax.StableDiffusion:
    """The bundled model on one device."""
    import jax

    import canvax
    from canvax.parallel.mesh import make_mesh

    return canvax.load("emoji", mesh=make_mesh(jax.devices()[:1]))
