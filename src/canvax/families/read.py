"""Reads the configs of a checkpoint as a ``canvax.families.base.Model``; no weights are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from canvax.errors import CheckpointError, HintWarning, InputError, nearest, warn
from canvax.families.base import Defaults, Family, Model, read_defaults
from canvax.families.known import family_of
from canvax.models.networks import Networks
from canvax.samplers import Scheduler, from_scheduler_config
from canvax.samplers.config import KNOWN_CLASSES
from canvax.tokenizers.concepts import Concepts
from canvax.types import DType
from canvax.weights.files import ModelFiles

PASSED_OVER = ("safety_checker", "feature_extractor", "image_encoder")
"""Components of a checkpoint that do not affect images by default."""


class Parts(NamedTuple):
    """Facts about a checkpoint from its configs.

    Attributes:
        family: its family.
        networks: its networks.
        scheduler: noise schedule and default sampler.
        defaults: default steps and guidance scale.
    """

    family: Family
    networks: Networks
    scheduler: Scheduler
    defaults: Defaults


def _scheduler_config(files: ModelFiles) -> dict[str, Any]:
    """Return the scheduler's config, with the class that ``model_index.json`` names, as in diffusers."""
    config, name = files.config("scheduler"), files.components["scheduler"]
    if name not in KNOWN_CLASSES:
        raise InputError(f"model_index.json names the scheduler {name!r}; {nearest(name, sorted(KNOWN_CLASSES))}")
    class_name = str(config.get("_class_name")).removeprefix("Flax")
    return {**config, "_class_name": name} if class_name in KNOWN_CLASSES and class_name != name else config


def read_networks(files: ModelFiles) -> Networks:
    """Return the networks of a checkpoint.

    Raises:
        CheckpointError: as ``read_parts``.
    """
    return family_of(files.index).read(files)


def read_parts(files: ModelFiles) -> Parts:
    """Read the configs of a checkpoint.

    Raises:
        CheckpointError: a component is missing or its config is not supported.
    """
    family = family_of(files.index)
    networks = family.read(files)
    scheduler = _read_scheduler(family, files, networks)
    usual = family.defaults_of(networks, scheduler.schedule)
    return Parts(family, networks, scheduler, read_defaults(files.folder() / "canvax.json", usual))


def _read_scheduler(family: Family, files: ModelFiles, networks: Networks) -> Scheduler:
    try:
        config = _scheduler_config(files)
        scheduler = family.scheduler(config, files) if family.scheduler else from_scheduler_config(config)
    except InputError as error:
        raise CheckpointError(f"{files}: {error}") from error
    _check_prediction(files, networks, scheduler)
    return family.scheduled(scheduler)


def _check_prediction(files: ModelFiles, networks: Networks, scheduler: Scheduler) -> None:
    """Check that the schedule is that of a flow if the denoiser predicts the velocity of a flow.

    Raises:
        InputError: an argument of the caller contradicts this.
        CheckpointError: the checkpoint contradicts this.
    """
    kind, schedule = networks.prediction, scheduler.schedule
    if kind != "flow_prediction":  # only its scheduler names a UNet's prediction type
        return
    if files.overrides.get("prediction_type", kind) != kind:
        problem = f"does not go with {files.name}, a flow model"
        raise InputError("prediction_type", problem, cure="leave it out", value=files.overrides["prediction_type"])
    if not schedule.is_flow:
        name, flow = _scheduler_config(files)["_class_name"], "FlowMatchEulerDiscreteScheduler"
        problem = f"is for models that predict {schedule.prediction_type}, and {files.name} is a flow model"
        if "scheduler" in files.overrides:
            raise InputError("scheduler", problem, cure=f"leave it out, or take {flow}", value=name)
        raise CheckpointError(
            f"{files}: its scheduler, {name}, {problem}; load it with scheduler={{'_class_name': {flow!r}}}"
        )


def read_model(files: ModelFiles, dtype: DType, quantize: str | None = None) -> Model:
    """Read the configs, the tokenizers and the schedule of a checkpoint.

    Raises:
        CheckpointError: as ``read_parts``.
    """
    parts = read_parts(files)
    if extra := [f"{name} ({files.index[name][1]})" for name in files.unread if name not in PASSED_OVER]:
        warn(
            f"{files}: canvax does not use its {', '.join(extra)}; images may be others than it was made for",
            HintWarning,
        )
    for name, reason in files.reasons.items():
        if ", a guess" in reason:
            warn(f"{files}: {name}: {reason}", HintWarning)
    return Model(
        files=files,
        family=parts.family,
        networks=parts.networks,
        tokenizers={part.component: parts.family.tokenizer(files, part) for part in parts.networks.text.encoders},
        scheduler=parts.scheduler,
        defaults=parts.defaults,
        dtype=np.dtype(dtype).name,
        quantize=quantize,
        concepts=Concepts.of(files.folder()),
    )
