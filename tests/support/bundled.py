"""What tests know of the model in the package: the sizes that its own config says."""

from __future__ import annotations

import json

from canvax.weights.location import BUNDLED

PACKAGED = BUNDLED["emoji"]
"""Its folder in the package; see conftest.py for what ``BUNDLED`` has during the tests."""

UNET = json.loads((PACKAGED / "unet" / "config.json").read_text())
LATENTS = (UNET["sample_size"], UNET["sample_size"], UNET["in_channels"])
"""Shape of the latents of one picture."""

TEXT_WIDTH = UNET["cross_attention_dim"]

VOCABULARY = json.loads((PACKAGED / "text_encoder" / "config.json").read_text())["vocab_size"]
"""Entries of its tokenizer, which small models of the tests have too."""
