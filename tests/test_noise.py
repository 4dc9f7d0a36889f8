"""Seeds and initial noise: made on the host, the same bits on every machine, PyTorch's where asked for."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canvax.noise import MAX_SEED, check_seed, image_seeds, initial_noise, random_seed, seed_keys

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32 + 5, 2**63 - 1]
LATENTS = [(64, 64, 4), (128, 128, 4), (72, 104, 4), (9, 13, 4)]


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_noise_is_torchs(seed: int) -> None:
    torch = pytest.importorskip("torch")
    # Every size around the block of 16, on both sides of PyTorch's border between its two ways.
    for h, w, c in [*((1, n, 1) for n in range(1, 41)), *LATENTS]:
        generator = torch.Generator("cpu").manual_seed(seed)
        for draw in range(3):
            want = torch.randn((1, c, h, w), generator=generator).numpy()
            got = initial_noise([seed], (h, w, c), "torch", draw)
            np.testing.assert_allclose(np.moveaxis(got, -1, 1), want, rtol=0, atol=1e-6, err_msg=f"{(h, w, c)}")


def test_philox_bits_never_change() -> None:
    """The exact bits, so that a release that changes everybody's pictures cannot go unnoticed."""
    noise = initial_noise([0, 1234, MAX_SEED], (16, 16, 4))
    assert noise.dtype == np.float32
    assert hashlib.sha256(noise.tobytes()).hexdigest() == PHILOX_DIGEST
    np.testing.assert_array_equal(initial_noise([0], (1, 2, 2)).reshape(-1), np.array(PHILOX_FIRST, np.float32))


PHILOX_DIGEST = "d74fbb8bee966d31b2372785cacfc769f4c36276de25c52c45a57845e20c9f40"
PHILOX_FIRST = [0.15853384137153625, 2.982879400253296, -1.9256919622421265, -0.8249255418777466]


@pytest.mark.parametrize("kind", ["philox", "torch"])
def test_noise_is_standard_normal(kind: str) -> None:
    noise = initial_noise(range(64), (64, 64, 4), kind)  # pyright: ignore[reportArgumentType]
    values = noise.reshape(64, -1).astype(np.float64)
    count = values.size
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 4 * (96 / count) ** 0.5
    correlation = np.corrcoef(values)
    assert np.abs(correlation - np.eye(64)).max() < 5 / values.shape[1] ** 0.5
    neighbours = (values[:, :-1] * values[:, 1:]).mean()
    assert abs(neighbours) < 4 / count**0.5


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, MAX_SEED), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9))
def test_noise_knows_only_its_seed(seeds: list[int], h: int, w: int) -> None:
    together = initial_noise(seeds, (h, w, 4))
    for seed, image in zip(seeds, together, strict=True):
        np.testing.assert_array_equal(initial_noise([seed], (h, w, 4))[0], image)


def test_keys_are_jaxs() -> None:
    for seed in (0, 42, 2**32 - 1):
        np.testing.assert_array_equal(
            seed_keys([seed])[0], jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        )
    assert seed_keys([2**32 + 7]).tolist() == [[1, 7]]
    assert len({tuple(key) for key in seed_keys(SEEDS)}) == len(SEEDS)


def test_image_seeds() -> None:
    assert image_seeds(7, 3) == [7, 8, 9]
    assert image_seeds(MAX_SEED, 2) == [MAX_SEED, 0]
    first = image_seeds(None, 2)
    assert first[1] == first[0] + 1
    assert check_seed(np.int64(5)) == 5
    assert 0 <= check_seed(-1) < 2**32
    assert random_seed() != random_seed()
