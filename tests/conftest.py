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
    import canvax


@pytest.fixture(scope="session")
def emoji() -> canvax.StableDiffusion:
    """The bundled model on one device."""
    import jax

    import canvax
    from canvax.parallel.mesh import make_mesh

    return canvax.load("emoji", mesh=make_mesh(jax.devices()[:1]))
