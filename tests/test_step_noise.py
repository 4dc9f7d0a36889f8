"""The noise of ancestral and SDE samplers: its own for each seed and row, the same numbers on every machine."""

from __future__ import annotations

import numpy as np

from canvax.denoise import step_noise
from canvax.noise import seed_keys

SHAPE = (32, 32, 4)
ROWS = 64


def noise_of(seeds: list[int], rows: list[int]) -> np.ndarray:
    """Noise of each pair of seed and row, [N, 32, 32, 4]."""
    return np.asarray(step_noise(seed_keys(seeds), np.asarray(rows, np.int32), SHAPE))  # pyright: ignore


def test_every_row_and_seed_has_noise_of_its_own() -> None:
    noise = noise_of([7] * ROWS + [8] * ROWS, [*range(ROWS)] * 2).reshape(2 * ROWS, -1).astype(np.float64)
    size = noise.shape[1]
    assert np.abs(np.corrcoef(noise) - np.eye(2 * ROWS)).max() < 5 / size**0.5


def test_noise_is_standard_normal() -> None:
    noise = noise_of([7] * ROWS, [*range(ROWS)]).reshape(ROWS, -1).astype(np.float64)
    count = noise.size
    assert abs(noise.mean()) < 4 / count**0.5
    assert abs(noise.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((noise**4).mean() - 3) < 4 * (96 / count) ** 0.5
    assert np.abs(noise.mean(1)).max() < 5 / noise.shape[1] ** 0.5
    assert np.abs(noise.var(1) - 1).max() < 5 * (2 / noise.shape[1]) ** 0.5
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 4 / count**0.5


def test_noise_does_not_depend_on_the_batch() -> None:
    pairs = [(7, 0), (7, 63), (8, 0), (2**64 - 1, 1000)]
    together = noise_of(*map(list, zip(*pairs, strict=True)))
    for (seed, row), noise in zip(pairs, together, strict=True):
        np.testing.assert_array_equal(noise_of([seed], [row])[0], noise)


def test_step_noise_never_changes() -> None:
    """The numbers themselves, so that a release that changes everybody's pictures cannot go unnoticed.

    Within what machines may round differently: a few numbers, and a sum that depends on every one and its place.
    """
    noise = noise_of([0, 0, 1234, 2**64 - 1], [0, 1, 0, 63])
    np.testing.assert_allclose(noise[:, 5, 6, 2], SOME, atol=1e-5)
    weights = np.cos(np.arange(noise[0].size)).reshape(SHAPE)
    np.testing.assert_allclose((noise * weights).sum((1, 2, 3)), SUMS, atol=1e-3)


SOME = [-0.5893217, -0.3444468, -0.2300366, -2.0909085]
SUMS = [-12.58295, -140.97292, 87.01582, -52.0681]
