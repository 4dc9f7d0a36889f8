"""Classifier-free guidance against its formulas, written down once more in numpy."""

from __future__ import annotations

import numpy as np

from canvax.guidance import guide

rng = np.random.default_rng(0)
SPREADS = np.array([0.5, 4.0]).reshape(2, 1, 1, 1) * np.array([1.0, 0.2, 3.0])  # of images, and of channels
CONDITIONAL = (SPREADS * rng.standard_normal((2, 6, 5, 3)) + 0.7).astype(np.float32)
UNCONDITIONAL = (2.5 * rng.standard_normal((2, 6, 5, 3)) - 0.3).astype(np.float32)
SCALE, RESCALE = np.array([3.0, 9.0], np.float32), np.array([0.3, 0.8], np.float32)


def guided_and_rescaled(image: int) -> np.ndarray:
    """Lin et al. 2024, section 3.4: guidance, then equations 15 and 16, for one image alone."""
    positive, negative = (outputs[image].astype(np.float64) for outputs in (CONDITIONAL, UNCONDITIONAL))
    guided = negative + float(SCALE[image]) * (positive - negative)
    rescaled = guided * np.std(positive) / np.std(guided)
    part = float(RESCALE[image])
    return part * rescaled + (1 - part) * guided


def test_each_image_is_guided_and_rescaled_by_its_own_numbers() -> None:
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, SCALE, RESCALE))  # pyright: ignore[reportArgumentType]
    assert got.dtype == np.float32
    for image in range(2):
        np.testing.assert_allclose(got[image], guided_and_rescaled(image), rtol=1e-5, atol=1e-5)


def test_a_full_rescale_has_the_spread_of_the_conditional_output() -> None:
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, SCALE, np.ones(2, np.float32)))  # pyright: ignore
    np.testing.assert_allclose(got.std((1, 2, 3)), CONDITIONAL.std((1, 2, 3)), rtol=1e-5)


def test_scale_one_is_no_guidance_and_nothing_is_divided_by_zero() -> None:
    none = np.zeros(2, np.float32)
    got = np.asarray(guide(UNCONDITIONAL, CONDITIONAL, np.ones(2, np.float32), none))  # pyright: ignore
    np.testing.assert_allclose(got, CONDITIONAL, atol=2e-6)
    blank = np.zeros_like(CONDITIONAL)
    np.testing.assert_array_equal(guide(blank, blank, SCALE, RESCALE), blank)  # pyright: ignore[reportArgumentType]
