"""``canvax train``: trains a checkpoint, or something small beside it, on the user's own images."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.call import MAX_SIDE, MOST_IMAGES
from canvax.cli.terminal import complain, say, stoppable
from canvax.errors import NO_VALUE, CanvaxError, InputError, check_count, check_number
from canvax.files import check_writable, named_path
from canvax.parallel.mesh import make_mesh

if TYPE_CHECKING:
    from canvax.train.loop import Plan
    from canvax.train.lora import Lora
    from canvax.train.task import Training


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Train; prints what was written."""
    tasks = {
        "finetune": _finetune,
        "lora": _lora,
        "dreambooth": _dreambooth,
        "textual-inversion": _textual_inversion,
        "controlnet": _controlnet,
    }
    named_path("pictures", arguments.pictures)
    for name in ("output", "tensorboard", "class_images"):
        if (value := getattr(arguments, name, None)) is not None:
            setattr(arguments, name, str(named_path(name, value)))
    check_numbers(arguments)
    check_writable("output", Path(arguments.output))
    finish(tasks[arguments.task], arguments, report)


def finish(task: Callable[[argparse.Namespace], Path | None], arguments: argparse.Namespace, report: Any) -> None:
    """Run a training task that may be stopped; prints the folder of the finished model."""
    try:
        with stoppable():
            result = task(arguments)
    except KeyboardInterrupt:
        from canvax.train.loop import STATE

        saved = any(Path(arguments.output).glob(f"*/{STATE}"))
        where = "resumes from the last saved state" if saved else "begins again: no state was saved yet"
        complain(f"stopped; the same command {where}")
        raise
    except OSError as error:
        if error.errno not in (ENOSPC, EFBIG, EDQUOT, EROFS):
            raise
        why = f"a file cannot be written ({error.strerror or error})"
        raise CanvaxError(f"{why}; make room in the folder of --output, and the same command goes on") from error
    report["output"] = None if result is None else str(result)
    report["finished"] = result is not None
    if result is None:
        complain("stopped after --stop-after; the same command resumes from here")
    elif not arguments.json:
        say(str(result))


_WHOLE = {"steps": 10**8, "batch": MOST_IMAGES, "accumulate": 10**6, "size": MAX_SIDE, "num_class_images": MOST_IMAGES,
          "save_steps": 10**8, "preview_steps": 10**8}  # fmt: skip
"""The largest of the numbers that are at least 1."""

_BELOW_1 = math.nextafter(1.0, 0.0)
_RANGES = {
    "learning_rate": (1e-12, 1e3, "1e-4 is usual"),
    "text_rate": (1e-12, 1e3, "1e-5 is usual"),
    "final": (0.0, 1.0, "a share of the learning rate; 1 keeps it constant"),
    "weight_decay": (0.0, 1e3, "0.01 is usual"),
    "alpha": (1e-6, 1e6, "the rank is usual"),
    "gamma": (1e-6, 1e6, "5 is usual"),
    "unmasked_weight": (0.0, 1.0, "0.1 is usual"),
    "prior_weight": (1e-6, 1e6, "1 is usual"),
    "average": (0.0, _BELOW_1, "below 1; 0.999 is usual"),
    "empty": (0.0, _BELOW_1, "below 1; 0.1 is usual"),
}
"""The least and the largest of other numbers, and a cure."""

_STEPS = {"finetune": 1000, "lora": 1000, "dreambooth": 400, "textual-inversion": 5000, "controlnet": 5000}
"""Unless ``--steps`` says otherwise."""


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no run can have, before pictures are read, and those that would change nothing.

    Raises:
        InputError: naming the flag.
    """
    values = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in values.keys() & _WHOLE.keys():
        check_count(name, values[name], _WHOLE[name])
    for name in values.keys() & _RANGES.keys():
        low, high, cure = _RANGES[name]
        if not low <= check_number(name, values[name], cure) <= high:
            raise InputError(name, values[name], f"is not in {low:g}..{high:g}", cure)
    if not 0 <= values.get("seed", 0) < 2**32:  # JAX takes so many bits, and of more silently the lowest
        raise InputError("seed", arguments.seed, "is not in 0..2**32-1")
    steps = values.get("steps", _STEPS[arguments.task])
    if values.get("warmup", 0) >= steps:
        raise InputError("warmup", arguments.warmup, f"leaves nothing of --steps {steps}", "give fewer, or more steps")
    if "text_rate" in values and not arguments.text:
        raise InputError("text_rate", NO_VALUE, "has no effect where text encoders are not trained", "add {text}")
    usual = {"rank": 4, "layers": "attention", "names": "peft"}
    usual |= dict.fromkeys(("alpha", "trigger", "title", "start", "quantize"))
    idle = sorted(name for name in usual.keys() & values.keys() if values[name] != usual[name])
    if idle and arguments.task == "dreambooth" and not arguments.lora:
        raise InputError(idle[0], NO_VALUE, "has no effect without --lora", "add {lora}")
    usual = {"prior_weight": 1.0, "num_class_images": 100, "class_images": None}
    idle = sorted(name for name in usual.keys() & values.keys() if values[name] != usual[name])
    if idle and "class_prompt" not in values:
        raise InputError(
            idle[0],
            NO_VALUE,
            "has no effect without a prompt of the class",
            "say which class it is with {class_prompt}, such as 'a photo of a dog'",
        )
    if "class_images" in values and Path(arguments.class_images).is_file():
        raise InputError("class_images", arguments.class_images, "is a file", "name a folder")


def _finetune(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.finetune import finetune
    from canvax.train.task import PLAN

    return finetune(_training(arguments, PLAN), make_mesh(), **_whole(arguments), **_running(arguments))


def _lora(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.lora import LORA_PLAN, train_lora

    lora = _lora_of(arguments)
    return train_lora(_training(arguments, LORA_PLAN), lora, make_mesh(), **_running(arguments))


def _dreambooth(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.dreambooth import Instance, subject_of
    from canvax.train.finetune import Whole, finetune
    from canvax.train.lora import LORA_PLAN, train_lora
    from canvax.train.task import PLAN, check_folder

    instance = Instance(
        arguments.instance_prompt,
        arguments.class_prompt,
        None if arguments.class_images is None else Path(arguments.class_images),
        arguments.num_class_images,
        arguments.prior_weight,
    )
    lora = _lora_of(arguments) if arguments.lora else None
    usual = replace(LORA_PLAN if lora else PLAN, steps=400)
    training = _training(arguments, usual if lora else replace(usual, learning_rate=5e-6))
    mesh, running = make_mesh(), _running(arguments)
    check_folder(training, lora or Whole())  # before pictures of the class are made
    subject = subject_of(instance, training, mesh, complain)
    if lora:
        return train_lora(training, lora, mesh, subject=subject, **running)
    return finetune(training, mesh, subject=subject, **_whole(arguments), **running)


def _textual_inversion(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.textual_inversion import EMBEDDING_PLAN, Inversion, train_inversion

    inversion = Inversion(arguments.token, arguments.initializer, arguments.vectors)
    training = _training(arguments, EMBEDDING_PLAN)
    return train_inversion(training, inversion, make_mesh(), learn=arguments.learn, **_running(arguments))


def _controlnet(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.controlnet import CONTROL_PLAN, train_controlnet

    return train_controlnet(
        _training(arguments, CONTROL_PLAN),
        make_mesh(),
        widths=None if arguments.hint_channels is None else _channels(arguments.hint_channels),
        control_column=arguments.control_column,
        save_dtype=arguments.save_dtype,
        **_running(arguments),
    )


def _channels(text: str) -> tuple[int, ...]:
    try:
        return tuple(check_count("hint_channels", int(word), 4096) for word in text.split(","))
    except InputError:
        raise
    except ValueError:
        raise InputError("hint_channels", text, "is not a list of whole numbers, such as 16,32,96,256") from None


def _lora_of(arguments: argparse.Namespace) -> Lora:
    from canvax.train.lora import Lora

    return Lora(
        rank=arguments.rank,
        alpha=arguments.alpha,
        layers=arguments.layers,
        names=arguments.names,
        trigger=arguments.trigger or "",
        title=arguments.title or "",
        start=arguments.start,
        **_whole(arguments),
    )


def _whole(arguments: argparse.Namespace) -> dict[str, Any]:
    """Text encoders and the file's dtype, which LoRAs and whole networks have alike."""
    return {
        "text": arguments.text,
        "text_rate": arguments.text_rate,
        "save_dtype": arguments.save_dtype,
    }


def _training(arguments: argparse.Namespace, usual: Plan) -> Training:
    from canvax.train.task import Training
    from canvax.weights.cast import parse_dtype

    names = ("steps", "batch", "accumulate", "learning_rate", "warmup", "final", "weight_decay", "average", "seed")
    plan = replace(usual, **given(**{name: getattr(arguments, name) for name in names}))
    return Training(
        model=arguments.model,
        pictures=arguments.pictures,
        folder=Path(arguments.output),
        plan=plan,
        size=arguments.size,
        caption_column=getattr(arguments, "caption_column", "text"),
        flip=arguments.flip,
        gamma=arguments.gamma,
        empty=arguments.empty,
        unmasked_weight=arguments.unmasked_weight,
        remat=arguments.remat,
        dtype=None if arguments.dtype is None else parse_dtype(arguments.dtype),
        quantize=getattr(arguments, "quantize", None),
        prompts=tuple(getattr(arguments, "preview", ())),
        preview_steps=getattr(arguments, "preview_steps", None),
        save_steps=arguments.save_steps,
        tensorboard=None if arguments.tensorboard is None else Path(arguments.tensorboard),
    )


def _running(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"deadline": deadline(arguments), "say": complain}


def deadline(arguments: argparse.Namespace) -> float | None:
    """``time.monotonic()`` at which to stop."""
    if arguments.stop_after is None:
        return None
    if check_number("stop_after", arguments.stop_after) <= 0:
        raise InputError("stop_after", arguments.stop_after, "must be more than 0 minutes")
    return time.monotonic() + 60 * arguments.stop_after


def given(**values: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in values.items() if value is not None}
