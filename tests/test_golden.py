"""Pictures of the bundled model as earlier releases made them, and how good 16 bits are.

``tests/golden`` holds a sheet for each dtype and sampler. Where pictures are meant to change, write the sheets anew
with ``GOLDEN=write pytest tests/test_golden.py -m ''``, look at them, and say in CHANGELOG.md that pictures change.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.images.convert import to_pil
from canvax.images.grid import make_grid
from canvax.models.unet import unet_context, unet_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params
from tests.support import small_sdxl
from tests.support.bundled import PACKAGED

pytestmark = pytest.mark.slow

QUIET = canvax.Options(progress=False)
FOLDER = Path(__file__).parent / "golden"
PROMPTS = ("a dog face", "a red apple", "a house", "a blue car")
SAMPLERS = ("ddim", "euler_a", "dpmpp_2m")
LIMITS = {"float32": 60.0, "bfloat16": 40.0}
"""PSNR in dB that each picture of 8 bits must have at least.

Processors with other instructions (AVX2 and SSE4.2) are at least 84 dB apart in float32: a few values of 12,288 are
rounded the other way. In bfloat16 they are 48 to 55 dB apart, as far as bfloat16 is from float32.
"""


@cache
def generated(dtype: str, sampler: str) -> np.ndarray:
    """Pixels [4, 256, 256, 3], a picture of each prompt."""
    settings = {"sampler": sampler, "num_inference_steps": 12, "guidance_scale": 2.0}
    return loaded(dtype)(PROMPTS, seed=range(1, 5), options=QUIET, **settings).pixels


@cache
def loaded(dtype: str) -> canvax.Pipeline:
    return canvax.load(PACKAGED, dtype=dtype, mesh=make_mesh(jax.devices()[:1]), progress=False)


def psnr(got: np.ndarray, want: np.ndarray) -> float:
    return float(-10 * np.log10(max(float(np.mean((got - want) ** 2)), 1e-12)))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_are_those_of_the_last_release(dtype: str, sampler: str) -> None:
    path, pictures = FOLDER / f"{dtype}-{sampler}.png", to_pil(generated(dtype, sampler))
    if os.environ.get("GOLDEN") == "write":
        make_grid(pictures, rows=2).save(path, optimize=True)
    with Image.open(path) as sheet:
        sides = (range(0, sheet.height, 256), range(0, sheet.width, 256))
        tiles = [sheet.crop((x, y, x + 256, y + 256)) for y in sides[0] for x in sides[1]]
    for i, pair in enumerate(zip(pictures, tiles, strict=True)):
        got, want = (np.asarray(one, np.float32) / 255 for one in pair)
        assert psnr(got, want) >= LIMITS[dtype], PROMPTS[i]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.weekly)])
def test_16_bits_are_nearly_32(dtype: str, sampler: str) -> None:
    for got, want in zip(generated(dtype, sampler), generated("float32", sampler), strict=True):
        assert 35 <= psnr(got, want) < 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_times_and_sizes_are_not_rounded_to_16_bits(dtype: str) -> None:
    """A bfloat16 knows no 257, a float16 no 4097: the sinusoids are of float32, and only they are rounded."""
    cfg = small_sdxl.UNET
    p = init_params(unet_spec(cfg), 0)
    times = np.array([257.0, 391.3, 700.7, 999.0], np.float32)
    sizes = np.array([[1081, 4097, 1083, 3, 5, 263]] * 4, np.float32)
    text, pooled = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((4, 77, 40), (4, 8)))

    def time(dtype: str) -> np.ndarray:
        own = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), p)
        x = jnp.zeros((4, 8, 8, 4), dtype)
        told = (jnp.asarray(text, dtype), cfg, jnp.asarray(pooled, dtype), jnp.asarray(sizes))
        return np.asarray(unet_context(own, x, jnp.asarray(times), *told).time, np.float32)

    want = time("float32")
    # Three products of 16-bit numbers, of 2^-9 each.
    assert np.abs(time(dtype) - want).max() < 0.02 * np.abs(want).max()
