"""Checkpoints: finding, reading and writing them.

``safetensors``, ``gguf`` and ``flax_msgpack`` open files as lists of ``entries``. ``rules``, ``formats`` and
``layouts`` map the names of files to those of specs; ``load`` puts the arrays on the device and ``save`` writes them in
the same layout. ``identify`` recognises kinds of files. ``location`` and ``open`` find a model, on the Hub if
necessary, as ``files.ModelFiles`` from a ``folder`` or a ``single_file``. ``canvax.families`` is built on these.
"""
