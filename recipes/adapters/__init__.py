"""Adapters for the emoji model, made from its own drawings: a LoRA, a textual inversion and a ControlNet."""
