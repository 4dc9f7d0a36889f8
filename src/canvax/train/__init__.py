"""Fine-tuning of a real checkpoint, and the parts of any training.

``pictures`` reads captioned pictures, ``encoding`` turns them into latents, ``objectives`` and ``diffusion`` hold the
loss, ``loop`` runs compiled training that can be killed and resumed at any moment, ``finetune`` goes on from a
checkpoint. ``recipes/emoji`` makes the bundled model from the same parts. Needs ``pip install '.[train]'``.
"""
