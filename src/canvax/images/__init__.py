"""Images: arrays to PIL and back, grids, and the metadata that their files carry."""
