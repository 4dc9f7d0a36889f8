"""The tiny decoder of previews against PyTorch's ``AutoencoderTiny``, through files that PyTorch wrote."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

import canvax
from canvax.models.tiny import tiny_decode
from tests.support.random_numbers import rng

from .reference import nchw, nhwc, randomise, relative_error

SHAPES = {
    "as released": {},
    "wide latents": {"latent_channels": 16},
    "small": {
        "encoder_block_out_channels": (32, 32),
        "decoder_block_out_channels": (32, 32),
        "num_encoder_blocks": (1, 2),
        "num_decoder_blocks": (2, 1),
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_tiny_decoder(name: str, tmp_path: Path) -> None:
    reference = randomise(diffusers.AutoencoderTiny(**SHAPES[name]))
    reference.save_pretrained(tmp_path / "tiny")
    preview = canvax.load_preview(tmp_path / "tiny")
    latents = 2 * rng.standard_normal((2, 5, 6, preview.cfg.latent_channels), dtype=np.float32)
    with torch.no_grad():
        want = nhwc(reference.decode(nchw(latents)).sample) / 2 + 0.5
    assert relative_error(tiny_decode(preview.params, latents, preview.cfg), want) <= 1e-5
    np.testing.assert_allclose(preview.pixels(latents), np.clip(want, 0, 1), atol=1e-4)
    factor = preview.cfg.factor
    assert [image.size for image in preview.images(latents)] == [(6 * factor, 5 * factor)] * 2


def test_what_cannot_be(tmp_path: Path) -> None:
    diffusers.AutoencoderTiny().save_pretrained(tmp_path / "tiny")
    preview = canvax.load_preview(tmp_path / "tiny")
    with pytest.raises(canvax.InputError, match=r"latents are \(1, 8, 8, 16\); this decoder takes \[B, h, w, 4\]"):
        preview.pixels(np.zeros((1, 8, 8, 16)))
    path = tmp_path / "tiny" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"act_fn": "silu"}))
    with pytest.raises(canvax.CheckpointError, match='act_fn = "silu"'):
        canvax.load_preview(tmp_path / "tiny")
    path.write_text(json.dumps(config | {"decoder_block_out_channels": [64, 64]}))
    with pytest.raises(canvax.CheckpointError, match="as many equal widths"):
        canvax.load_preview(tmp_path / "tiny")
    path.write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(canvax.CheckpointError, match="is 'AutoencoderKL'; a preview needs an 'AutoencoderTiny'"):
        canvax.load_preview(tmp_path / "tiny")
