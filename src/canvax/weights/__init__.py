"""Checkpoints: finding, reading and writing them.

``safetensors``, ``gguf`` and ``flax_msgpack`` open the file formats into ``entries``. ``rules``, ``formats`` and
``layouts`` map their names to the spec's, ``load`` puts everything on the device and ``save`` writes the same layout
back. The records of ``canvax.families`` are built on these.

On these records are built ``identify``, which tells kinds of files apart, and ``location`` and ``open``, which find a
model, through ``hub`` if need be. The result is ``files.ModelFiles``, of a ``folder`` or a ``single_file``.
"""
