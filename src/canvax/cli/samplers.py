"""``canvax samplers``: lists samplers and sigma curves, and plots sigma schedules."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from canvax.cli.terminal import columns, say, table
from canvax.errors import InputError, nearest
from canvax.files import MAX_JSON, named_path, open_regular
from canvax.samplers import CURVES, SAMPLERS, Scheduler, build_table, curve_named, find, from_scheduler_config
from canvax.samplers.options import SPACINGS

WORDS = ("list", "curves", "plot")
STABLE_DIFFUSION = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
"""The noise schedule of Stable Diffusion 1.x, 2.x and XL."""


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """List the samplers or the curves, or plot curves."""
    word, *curves = arguments.words or ["list"]
    if word not in WORDS:
        raise InputError(f"{word!r} is not a command of canvax samplers; {nearest(word, WORDS)}")
    if word != "plot" and curves:
        raise InputError(f"{curves[0]!r} is not expected after canvax samplers {word}")
    usual = {"steps": 20, "sampler": "euler", "scheduler_config": None, "output": "schedules.png"}
    for name, value in usual.items():
        if word != "plot" and getattr(arguments, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with canvax samplers plot; leave it out")
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if word == "plot":
        _plot(arguments, curves, report)
    elif word == "curves":
        _list_curves(arguments, report)
    else:
        _list_samplers(arguments, report)


def _list_samplers(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    report["samplers"] = [
        {
            "name": spec.name,
            "label": spec.label,
            "spellings": list(spec.spellings),
            "diffusers_class": spec.diffusers_class,
            "order": spec.order,
            "evaluations": spec.evaluations,
            "stochastic": spec.stochastic,
            "sigmas": spec.curves,
            "eta": spec.eta,
            "settings": list(spec.settings),
            "when": spec.when,
            "source": spec.source,
        }
        for spec in SAMPLERS
    ]
    if arguments.json:
        return
    rows = [("name", "label", "order", "evaluations", "random", "when")]
    for spec in SAMPLERS:
        random = "yes" if spec.stochastic else ""
        rows.append((spec.name, spec.label, spec.order, spec.evaluations, random, spec.when))
    for line in table(rows, fold=columns()):
        say(line)
    say(
        "\nEvaluations are for n steps. Names and labels both work, and a curve may follow: --sampler 'DPM++ 2M "
        "Karras'."
    )
    say("canvax samplers curves lists the curves, canvax samplers plot plots them; --json adds the papers.")


def _list_curves(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    report["curves"] = [
        {"name": curve.name, "spellings": list(curve.also), "when": curve.when, "source": curve.source}
        for curve in CURVES
    ]
    if arguments.json:
        return
    rows = [("name", "also", "what")]
    rows += [(curve.name, ", ".join(curve.also), curve.when) for curve in CURVES]
    for line in table(rows, fold=columns()):
        say(line)


def _plot(arguments: argparse.Namespace, curves: Sequence[str], report: dict[str, Any]) -> None:
    from canvax.images.formats import new_image
    from canvax.images.metadata import save_image

    path = named_path("--output", arguments.output)
    if path.suffix.lower() != ".png":
        raise InputError(f"--output {arguments.output!r} is not a PNG; give a name that ends in .png")
    new_image("--output", path)
    try:
        scheduler = from_scheduler_config(_config(arguments.scheduler_config), sampler=arguments.sampler)
    except InputError as error:
        told = arguments.scheduler_config is None or arguments.scheduler_config in str(error)
        raise InputError(str(error) if told else f"--scheduler-config {arguments.scheduler_config}: {error}") from None
    image = plot_curves(scheduler, curves or _default_curves(arguments.sampler), arguments.steps)
    report["file"] = str(save_image(path, image, {}))
    if not arguments.json:
        say(report["file"])


def _default_curves(sampler: str) -> list[str]:
    """What is plotted by default: all curves that the sampler takes, and the spacings."""
    if not find(sampler)[0].curves:
        return ["leading", "trailing"]
    return [*SPACINGS, *(curve.name for curve in CURVES if curve.name not in ("automatic", "exponential", "lu"))]


def _config(file: str | None) -> dict[str, Any]:
    if file is None:
        return STABLE_DIFFUSION
    try:
        with open_regular(named_path("--scheduler-config", file)) as opened:
            config = json.loads(opened.read(MAX_JSON))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--scheduler-config {file!r} cannot be read ({reason})") from None
    if not isinstance(config, dict):
        raise InputError(f"--scheduler-config {file!r} is not a JSON object; give a model's scheduler_config.json")
    return config


def plot_curves(scheduler: Scheduler, curves: Sequence[str], steps: int) -> Any:
    """Two charts side by side: sigma and timestep of each step. `curves` are names of curves or of spacings."""
    from PIL import Image

    from canvax.images.chart import line_chart

    sigmas: dict[str, list[tuple[float, float]]] = {}
    timesteps: dict[str, list[tuple[float, float]]] = {}
    for name in curves:
        chosen: dict[str, Any] = (
            {"spacing": name, "sigmas": "automatic"} if name in SPACINGS else {"sigmas": curve_named(name)}
        )
        built = build_table(scheduler, steps, **chosen)
        begins = np.searchsorted(built.step, np.arange(built.step[-1] + 1))
        label = name if name in SPACINGS else curve_named(name)
        sigmas[label] = list(enumerate(built.sigma[begins]))
        timesteps[label] = list(enumerate(built.timestep[begins]))
    title = f"{steps} steps of {scheduler.spec.label}"
    charts = [
        line_chart(sigmas, title=title, x_label="step", y_label="sigma", log_y=True),
        line_chart(timesteps, title=title, x_label="step", y_label="timestep"),
    ]
    image = Image.new("RGB", (sum(chart.width for chart in charts), charts[0].height), "white")
    for i, chart in enumerate(charts):
        image.paste(chart, (i * charts[0].width, 0))
    return image
