"""Images: arrays to and from PIL, grids, and metadata in PNG files."""
