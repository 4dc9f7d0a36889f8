"""Checkpoints: finding, reading and writing them.

``hub`` turns a name into a folder, ``safetensors`` and ``flax_msgpack`` open the two file formats, ``names`` maps their
names to the spec's, ``load`` puts everything on the device and ``save`` writes the same layout back.
"""
