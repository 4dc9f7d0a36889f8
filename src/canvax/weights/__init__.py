"""Checkpoints: finding, reading and writing them.

``location`` says where a model is and ``open`` finds it, through ``hub`` if need be. The result is
``files.ModelFiles``, of a ``folder`` or a ``single_file``. ``identify`` tells kinds of files apart. ``safetensors`` and
``flax_msgpack`` open the two file formats into ``entries``, ``rules`` and ``formats`` map their names to the spec's,
``load`` puts everything on the device and ``save`` writes the same layout back.
"""
