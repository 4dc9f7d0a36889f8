"""Every sampler through the compiled programs of the bundled model."""

from __future__ import annotations

import numpy as np
import pytest
from bundled import LATENTS

import canvax
from canvax.errors import InputError
from canvax.samplers import SAMPLERS


def test_all_samplers_run_one_compiled_program(emoji: canvax.StableDiffusion) -> None:
    """One compilation of each denoiser in total: the first picture's, which makes the other two programs as well."""
    counts, drawn = [], []
    side = 40 // emoji.programs.networks.vae.factor
    picture = np.random.default_rng(0).standard_normal((1, side, side, LATENTS[-1])).astype(np.float32)
    for spec in SAMPLERS:
        latents = picture if spec.name == "ddim_inverse" else None
        options = canvax.Options(progress=False, guidance_interval=(0.0, 0.8), guidance_rescale=0.3)
        result = emoji(
            "a cat",
            seed=3,
            height=40,
            width=40,
            num_inference_steps=5,
            sampler=spec.name,
            options=options,
            latents=latents,
        )
        counts.append(result.compilations)
        drawn.append(result.pixels)
        assert np.isfinite(result.latents).all(), spec.name
    # Denoisers with guidance and without; another test may have compiled the text encoder, which knows no size.
    assert counts[0] in (3, 4)
    assert counts[1:] == [0] * (len(SAMPLERS) - 1)
    assert len({pixels.tobytes() for pixels in drawn}) > len(SAMPLERS) - 6  # a few are others' under another name


def test_inversion_wants_a_picture(emoji: canvax.StableDiffusion) -> None:
    with pytest.raises(InputError, match=r"result\.latents"):
        emoji("a cat", sampler="DDIM inversion", options=canvax.Options(progress=False))
