"""``canvax samplers``: the catalogue as a table."""

from __future__ import annotations

import argparse
from typing import Any

from canvax.cli.terminal import say, table
from canvax.samplers import SAMPLERS


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """List the samplers."""
    report["samplers"] = [
        {
            "name": spec.name,
            "label": spec.label,
            "spellings": list(spec.spellings),
            "diffusers_class": spec.diffusers_class,
            "evaluations_per_step": spec.evaluations,
            "stochastic": spec.stochastic,
            "sigmas": spec.curves,
            "eta": spec.eta,
            "when": spec.when,
            "source": spec.source,
        }
        for spec in SAMPLERS
    ]
    if arguments.json:
        return
    rows = [("name", "label", "evaluations", "random", "karras", "when")]
    for spec in SAMPLERS:
        yes = ["yes" if flag else "" for flag in (spec.stochastic, spec.curves)]
        rows.append((spec.name, spec.label, spec.evaluations, yes[0], yes[1], spec.when))
    for line in table(rows):
        say(line)
    say("\nAny spelling works; add Karras or Exponential where the column says so: --sampler 'DPM++ 2M Karras'")
