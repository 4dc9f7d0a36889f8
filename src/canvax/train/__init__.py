"""Fine-tuning of checkpoints, and building blocks for any training.

``pictures`` reads captioned images, ``encoding`` encodes them to latents, ``objectives`` and ``diffusion`` contain the
loss, ``loop`` runs compiled training that can be killed and resumed at any time, and ``task`` trains from a checkpoint.
``recipes/emoji`` trains the bundled model with the same parts. It needs ``pip install '.[train]'``.
"""

from __future__ import annotations

from typing import NoReturn

_TASKS = ("lora", "dreambooth", "finetune", "controlnet", "textual_inversion")


def __getattr__(name: str) -> NoReturn:
    """Explains, in the error, that the module of a task must be imported by its name."""
    if name not in _TASKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    flag = name.replace("_", "-")
    raise AttributeError(f"write import canvax.train.{name} (docs/training.md), or canvax train {flag} FOLDER -o OUT")
