"""Fine-tuning of checkpoints, and building blocks for any training.

``pictures`` reads captioned images, ``encoding`` encodes them to latents, ``objectives`` and ``diffusion`` contain the
loss, ``loop`` runs compiled training that can be killed and resumed at any time, and ``task`` trains from a checkpoint.
``recipes/emoji`` trains the bundled model with the same parts. It needs ``pip install '.[train]'``.
"""
