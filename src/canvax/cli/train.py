"""``canvax train``: train a checkpoint, or a small adapter of it, on the user's images."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from canvax.cli.terminal import complain, say, stoppable
from canvax.errors import CanvaxError, InputError, check_number, needs
from canvax.files import check_writable, named_path
from canvax.parallel.mesh import make_mesh
from canvax.settings import declared, offered
from canvax.train.settings import LOADING, PLAN, TASKS, Pairs, WordCaptions

if TYPE_CHECKING:
    from canvax.train.task import Training

Made = TypeVar("Made")


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Train, and print the path of the result."""
    tasks = {
        "finetune": _finetune,
        "lora": _lora,
        "dreambooth": _dreambooth,
        "textual-inversion": _textual_inversion,
        "controlnet": _controlnet,
    }
    named_path("pictures", arguments.pictures)
    for name in ("regularisation", "validation", "references"):
        if getattr(arguments, name, None) is not None:
            named_path(name, getattr(arguments, name))
    for name in ("output", "tensorboard", "class_pictures", "encoded"):
        if (value := getattr(arguments, name, None)) is not None:
            setattr(arguments, name, str(named_path(name, value)))
    if getattr(arguments, "class_pictures", None) and Path(arguments.class_pictures).is_file():
        raise InputError("class_pictures", "is a file", cure="name a folder", value=arguments.class_pictures)
    check_writable("output", Path(arguments.output))
    finish(tasks[arguments.task], arguments, report)


def finish(task: Callable[[argparse.Namespace], Path | None], arguments: argparse.Namespace, report: Any) -> None:
    """Run a training task that may be stopped; print the folder of the finished model."""
    try:
        with stoppable():
            result = task(arguments)
    except KeyboardInterrupt:
        from canvax.train.loop import STATE

        saved = any(Path(arguments.output).glob(f"*/{STATE}"))
        where = "resumes from the last saved state" if saved else "begins again: no state was saved yet"
        raise KeyboardInterrupt(f"stopped; the same command {where}") from None
    except OSError as error:
        if error.errno not in (ENOSPC, EFBIG, EDQUOT, EROFS):
            raise
        why = f"a file cannot be written ({error.strerror or error})"
        raise CanvaxError(f"{why}; make room in the folder of --output; the same command resumes") from error
    report["output"] = None if result is None else str(result)
    report["finished"] = result is not None
    if result is None:
        complain("stopped after --stop-after; the same command resumes from here")
    elif not arguments.json:
        say(str(result))


def _finetune(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.finetune import FullFinetune, finetune

    return finetune(_training(arguments), make_mesh(), **vars(_made(FullFinetune, arguments)), **_running(arguments))


def _lora(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.lora import Lora, train_lora

    return train_lora(_training(arguments), _made(Lora, arguments), make_mesh(), **_running(arguments))


def _dreambooth(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.dreambooth import Instance, subject_of
    from canvax.train.finetune import FullFinetune, finetune
    from canvax.train.lora import Lora, train_lora
    from canvax.train.task import check_folder

    instance, aim = _made(Instance, arguments), _made(Lora if arguments.lora else FullFinetune, arguments)
    changed = {name for name, field in declared(Lora).items() if getattr(arguments, name) not in (None, field.default)}
    idle = sorted(changed - declared(FullFinetune).keys() | ({"quantize"} if arguments.quantize else set()))
    if idle and not arguments.lora:
        raise needs(idle[0], "lora")
    of_lora = TASKS["lora"].plan if arguments.lora else {}
    training, mesh, running = _training(arguments, **of_lora), make_mesh(), _running(arguments)
    check_folder(training, aim)  # before class images are made
    subject = subject_of(instance, training, mesh, complain)
    if isinstance(aim, Lora):
        return train_lora(training, aim, mesh, subject=subject, **running)
    return finetune(training, mesh, subject=subject, **vars(aim), **running)


def _textual_inversion(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.textual_inversion import Inversion, train_inversion

    learn, inversion = _given(WordCaptions, arguments), _made(Inversion, arguments)
    return train_inversion(_training(arguments), inversion, make_mesh(), **learn, **_running(arguments))


def _controlnet(arguments: argparse.Namespace) -> Path | None:
    from canvax.train.controlnet import ControlNetTask, train_controlnet

    more = {**vars(_made(ControlNetTask, arguments)), **_given(Pairs, arguments)}
    return train_controlnet(_training(arguments), make_mesh(), **more, **_running(arguments))


def _given(record: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a record that flags give."""
    values = {name: getattr(arguments, name, None) for name in offered(record, "command")}
    return given(**values)


def _made(record: type[Made], arguments: argparse.Namespace, **usual: Any) -> Made:
    """Return a record with what flags give; ``usual`` are defaults."""
    return record(**{**usual, **_given(record, arguments)})


def _training(arguments: argparse.Namespace, **plan: Any) -> Training:
    """Return the model, the images and the plan; ``plan`` are defaults before those of the task."""
    from canvax.train.loop import Plan
    from canvax.train.task import Training
    from canvax.weights.cast import parse_dtype

    task, more = TASKS[arguments.task], _given(Training, arguments)
    made = _made(Plan, arguments, **{**PLAN, **task.plan, **plan})
    if made.warmup >= made.steps:
        cure = "give fewer, or more steps"
        raise InputError("warmup", f"leaves nothing of --steps {made.steps}", cure=cure, value=made.warmup)
    if "dtype" in more:
        more["dtype"] = parse_dtype(more["dtype"])
    return Training(
        arguments.model or "emoji",
        arguments.pictures,
        arguments.output,
        made,
        loading={name: value for name in LOADING if (value := getattr(arguments, name))},
        **{"empty": task.empty, **more},
    )


def _running(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"deadline": deadline(arguments), "say": complain}


def deadline(arguments: argparse.Namespace) -> float | None:
    """``time.monotonic()`` at which to stop."""
    if arguments.stop_after is None:
        return None
    if check_number("stop_after", arguments.stop_after) <= 0:
        raise InputError("stop_after", "must be more than 0 minutes", value=arguments.stop_after)
    return time.monotonic() + 60 * arguments.stop_after


def given(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}
