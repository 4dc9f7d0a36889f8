"""Fine-tuning of a real checkpoint, and the parts of any training.

``pictures`` reads captioned pictures, ``encoding`` turns them into latents, ``objectives`` and ``diffusion`` hold the
loss, ``loop`` runs compiled training that can be killed and resumed at any moment, ``finetune`` goes on from a
checkpoint. ``recipes/emoji`` makes the bundled model from the same parts. Needs ``pip install '.[train]'``.
"""

from __future__ import annotations

from typing import NoReturn

_TASKS = ("lora", "dreambooth", "finetune", "controlnet", "textual_inversion")


def __getattr__(name: str) -> NoReturn:
    """What to say of a task that is looked for here: its module is imported by its name."""
    if name not in _TASKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    flag = name.replace("_", "-")
    raise AttributeError(f"write import canvax.train.{name} (docs/training.md), or canvax train {flag} FOLDER -o OUT")
