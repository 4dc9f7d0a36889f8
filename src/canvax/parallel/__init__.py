"""Device meshes, and the placement of arrays on them."""
