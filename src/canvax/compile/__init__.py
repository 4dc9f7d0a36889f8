"""The compiled programs of a model: their inputs, their cache on disk, and what is measured of them."""
