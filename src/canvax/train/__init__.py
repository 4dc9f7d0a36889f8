"""Training: pictures with captions, an autoencoder, a text encoder and UNet, and fine-tuning of a real checkpoint.

``pictures`` reads captioned pictures, ``objectives`` holds the losses, ``loop`` runs compiled training that can be
killed and resumed at any moment, ``autoencoder`` and ``diffusion`` are the two things trained, ``finetune`` goes on
from a checkpoint. ``emoji`` is the recipe of the model in the package. Needs ``pip install '.[train]'``.
"""
