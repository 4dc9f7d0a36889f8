"""From the files of a checkpoint to a ``canvax.families.base.Model``; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from canvax.errors import CheckpointError, HintWarning, InputError, nearest, warn
from canvax.families.base import Defaults, Family, Model, read_defaults
from canvax.families.flux2 import FLUX2
from canvax.families.krea2 import KREA2
from canvax.families.sd import SD
from canvax.families.sdxl import SDXL
from canvax.families.z_image import Z_IMAGE
from canvax.models.networks import Networks
from canvax.samplers import Scheduler, from_scheduler_config
from canvax.samplers.config import KNOWN_CLASSES
from canvax.tokenizers.concepts import Concepts
from canvax.types import DType
from canvax.weights.files import ModelFiles

FAMILIES: tuple[Family, ...] = (SD, SDXL, Z_IMAGE, FLUX2, KREA2)

PASSED_OVER = ("safety_checker", "feature_extractor", "image_encoder")
"""Components of a checkpoint that change no image unless they are asked for."""


def family_of(index: Mapping[str, Any]) -> Family:
    """The family of a ``model_index.json``.

    Raises:
        CheckpointError: it is of another kind of model.
    """
    name = index.get("_class_name")
    for family in FAMILIES:
        if name in family.pipelines:
            return family
    known = [repr(pipeline) for family in FAMILIES for pipeline in family.pipelines]
    raise CheckpointError(
        f"model_index.json names the pipeline {name!r}; supported: {', '.join(known)} (Stable Diffusion 1.x, 2.x and "
        "XL, Z-Image, FLUX.2 klein, Krea 2)"
    )


def _scheduler_config(files: ModelFiles) -> dict[str, Any]:
    """The scheduler's config, of the class that ``model_index.json`` names, which is the one that diffusers makes."""
    config, name = files.config("scheduler"), files.components["scheduler"]
    if name not in KNOWN_CLASSES:
        raise InputError(f"model_index.json names the scheduler {name!r}; {nearest(name, sorted(KNOWN_CLASSES))}")
    class_name = str(config.get("_class_name")).removeprefix("Flax")
    return {**config, "_class_name": name} if class_name in KNOWN_CLASSES and class_name != name else config


def read_networks(files: ModelFiles) -> Networks:
    """The networks of a checkpoint, from its configs alone.

    Raises:
        CheckpointError: as ``read_model``.
    """
    return family_of(files.index).read(files)


def family_of_preset(name: str) -> Family:
    """Returns the family of a preset of ``canvax.models.presets``."""
    others = {"sdxl": SDXL, "sdxl-refiner": SDXL, "z-image": Z_IMAGE, "flux2-klein-4b": FLUX2, "krea-2": KREA2}
    return others.get(name, SD)


def _read_scheduler(files: ModelFiles, networks: Networks) -> Scheduler:
    family = family_of(files.index)
    try:
        scheduler = from_scheduler_config(family.scheduler_config(_scheduler_config(files)))
    except InputError as error:
        raise CheckpointError(f"{files}: {error}") from error
    _check_prediction(files, networks, scheduler)
    return replace(
        scheduler, schedule=replace(family.schedule(files, scheduler.schedule), even_times=family.even_times)
    )


def _check_prediction(files: ModelFiles, networks: Networks, scheduler: Scheduler) -> None:
    """Check that the schedule is that of a flow, if the denoiser gives the velocity of one.

    Raises:
        InputError: an argument of the caller says otherwise.
        CheckpointError: the checkpoint does.
    """
    kind, schedule = networks.prediction, scheduler.schedule
    if kind != "flow_prediction":  # what a UNet predicts its scheduler alone says
        return
    if files.overrides.get("prediction_type", kind) != kind:
        problem = f"does not go with {files.name}, a flow model"
        raise InputError("prediction_type", files.overrides["prediction_type"], problem, "leave it out")
    if not schedule.is_flow:
        name, flow = _scheduler_config(files)["_class_name"], "FlowMatchEulerDiscreteScheduler"
        problem = f"is for models that predict {schedule.prediction_type}, and {files.name} is a flow model"
        if "scheduler" in files.overrides:
            raise InputError("scheduler", name, problem, f"leave it out, or take {flow}")
        raise CheckpointError(
            f"{files}: its scheduler, {name}, {problem}; load it with scheduler={{'_class_name': {flow!r}}}"
        )


def _defaults_of(files: ModelFiles, networks: Networks, scheduler: Scheduler) -> Defaults:
    family = family_of(files.index)
    usual = family.defaults_of(networks, scheduler.schedule) or family.defaults
    return read_defaults(files.folder() / "canvax.json", usual)


def read_usual(files: ModelFiles, networks: Networks) -> Defaults:
    """The steps and the guidance scale of a call that names none.

    Raises:
        CheckpointError: as ``read_model``.
    """
    return _defaults_of(files, networks, _read_scheduler(files, networks))


def read_model(files: ModelFiles, dtype: DType, quantize: str | None = None) -> Model:
    """Configs, tokenizers and schedule of a checkpoint.

    Raises:
        CheckpointError: a component is missing or its config asks for what is not supported.
    """
    family = family_of(files.index)
    networks = read_networks(files)
    if extra := [f"{name} ({files.index[name][1]})" for name in files.unread if name not in PASSED_OVER]:
        warn(
            f"{files}: canvax does not use its {', '.join(extra)}; images may be others than it was made for",
            HintWarning,
        )
    for name, reason in files.reasons.items():
        if ", a guess" in reason:
            warn(f"{files}: {name}: {reason}", HintWarning)
    scheduler = _read_scheduler(files, networks)
    return Model(
        files=files,
        family=family,
        networks=networks,
        tokenizers={encoder.component: family.tokenizer(files, encoder) for encoder in networks.text.encoders},
        scheduler=scheduler,
        defaults=_defaults_of(files, networks, scheduler),
        dtype=np.dtype(dtype).name,
        quantize=quantize,
        concepts=Concepts.of(files.folder()),
    )
