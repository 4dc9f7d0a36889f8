"""Checkpoints: finding, reading and writing them.

``source`` says where a model comes from and ``open`` finds it, through ``hub`` if need be. What it gives is a
``files.ModelFiles``, today always a ``diffusers_folder``. ``safetensors`` and ``flax_msgpack`` open the two file
formats, ``names`` maps their names to the spec's, ``load`` puts everything on the device and ``save`` writes the same
layout back.
"""
