"""Pictures: arrays to PIL and back, grids, and the text that a PNG carries."""
