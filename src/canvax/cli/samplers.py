"""``canvax samplers``: list samplers and sigma curves."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.terminal import columns, say, table
from canvax.errors import InputError, nearest
from canvax.samplers import CURVES, SAMPLERS

WORDS = ("list", "curves")


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """List the samplers or the sigma curves."""
    word, *rest = arguments.words or ["list"]
    if word not in WORDS:
        raise InputError(f"{word!r} is not a command of canvax samplers; {nearest(word, WORDS)}")
    if rest:
        raise InputError(f"{rest[0]!r} is not expected after canvax samplers {word}")
    if word == "curves":
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
    say("canvax samplers curves lists the curves; --json adds the papers.")


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
