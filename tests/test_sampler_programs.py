"""Every sampler through the compiled programs of the bundled model."""

from __future__ import annotations

import numpy as np
import pytest
from bundled import LATENTS

import canvax
from canvax.denoise import WINDOW, initial_state
from canvax.errors import InputError
from canvax.noise import initial_noise, seed_keys
from canvax.samplers import SAMPLERS, SamplerTable, batched_window, build_table
from canvax.samplers.table import NOISE


def test_all_samplers_run_one_compiled_program(emoji: canvax.StableDiffusion) -> None:
    """One compilation of each denoiser in total: the first picture's, which makes the other two programs as well."""
    counts, drawn = [], []
    side = 40 // emoji.programs.vae.factor
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


def rows_of(emoji: canvax.StableDiffusion, tables: list[SamplerTable], at: list[int], count: int) -> np.ndarray:
    """x of each image after `count` rows, each image at its own row of its own table."""
    shape = (len(tables), *LATENTS)
    noise = initial_noise(list(range(len(tables))), shape[1:])
    program = emoji.programs.denoise(emoji.params, shape, guided=False)  # type: ignore[arg-type]
    text = emoji.programs.text_params(emoji.params)  # type: ignore[arg-type]
    ids = emoji._tokenize(["a cat"] * len(tables), ["a cat"] * len(tables))
    conditions = emoji.programs.encode_text(emoji.params, len(tables), print)(text, ids, np.int32(0))  # type: ignore
    rows = batched_window(tables, at, WINDOW)
    noisy = rows["M"][:, :, :, NOISE].any(axis=(0, 2))
    state = initial_state(noise, np.array([table.init_scale for table in tables]))
    keys = seed_keys(list(range(len(tables))))
    state, *_ = program(emoji.params["unet"], state, conditions, None, rows, keys, noisy, np.int32(count), None)  # type: ignore
    return np.asarray(state)[:, 0]


def test_images_of_one_batch_follow_their_own_tables(emoji: canvax.StableDiffusion) -> None:
    tables = [
        build_table(emoji.checkpoint.scheduler, steps, sampler=name)
        for name, steps in (("euler", 12), ("dpmpp_sde", 7), ("unipc", 9))
    ]
    at = [4, 0, 2]
    together = rows_of(emoji, tables, at, 5)
    for i, (table, lo) in enumerate(zip(tables, at, strict=True)):
        alone = rows_of(emoji, [table] * 3, [lo] * 3, 5)
        np.testing.assert_allclose(together[i], alone[i], atol=1e-4)
