"""FLUX.3 image klein, base and distilled (Black Forest Labs 2026)."""

from __future__ import annotations

from canvax.weights.rules import Rule

_BLOCKS = ("mode_blocks.image.*", "mode_blocks.image_cond.*", "txt_mode_blocks.*", "single_transformer_blocks.*")

STACKS = [
    rule
    for block in _BLOCKS
    for rule in (
        Rule(f"{block}.ff.linear_in", (f"{block}.ff.gate", f"{block}.ff.up")),
        Rule(f"{block}.ff.linear_out", f"{block}.ff.down"),
    )
]
"""Layers that diffusers stores as one."""
