"""Reads the configs of a checkpoint as a ``canvax.families.base.Model``; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from canvax.errors import CheckpointError, HintWarning, InputError, nearest, shown, warn
from canvax.families.base import Defaults, Family, Model, no_networks, read_defaults
from canvax.families.known import family_of
from canvax.models.denoiser import DenoiserWrapper
from canvax.models.networks import Networks
from canvax.samplers import Scheduler, from_scheduler_config
from canvax.samplers.config import KNOWN_CLASSES
from canvax.tokenizers.concepts import Concepts
from canvax.types import DType
from canvax.weights.files import ModelFiles

FLOW = "FlowMatchEulerDiscreteScheduler"
"""The usual scheduler of a flow model."""

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


def _scheduler_config(family: Family, files: ModelFiles) -> dict[str, Any]:
    """Return the scheduler's config, with the class that ``model_index.json`` names, as in diffusers."""
    config, name = files.config("scheduler"), files.components["scheduler"]
    known = {*KNOWN_CLASSES, *family.classes.get("scheduler", ())}
    if name not in known:
        raise InputError(f"model_index.json names the scheduler {name!r}; {nearest(name, sorted(known))}")
    class_name = str(config.get("_class_name", "")).removeprefix("Flax")
    return {**config, "_class_name": name} if class_name in {"", *KNOWN_CLASSES} - {name} else config


def read_networks(files: ModelFiles) -> Networks:
    """Return the networks of a checkpoint.

    Raises:
        CheckpointError: as ``read_parts``.
    """
    return _networks(family_of(files.index), files)


def _networks(family: Family, files: ModelFiles) -> Networks:
    """Return what ``Family.read`` returns for a checkpoint.

    Raises:
        CheckpointError: it refuses the checkpoint, or returns no networks.
    """
    try:
        networks: Any = family.read(files)
    except InputError as error:  # of a record
        raise CheckpointError(f"{files}: the family {family.name} cannot read it: {error}") from error
    if not isinstance(networks, Networks):
        raise CheckpointError(f"{files}: read of the family {family.name} returns {shown(networks)}, no Networks")
    return networks


def read_parts(files: ModelFiles) -> Parts:
    """Read the configs of a checkpoint.

    Raises:
        CheckpointError: a component is missing or its config is not supported.
    """
    family = family_of(files.index)
    networks = _networks(family, files)
    scheduler = _read_scheduler(family, files, networks)
    usual = family.defaults_of(networks, scheduler.schedule)
    return Parts(family, networks, scheduler, read_defaults(files.folder() / "canvax.json", usual))


def _read_scheduler(family: Family, files: ModelFiles, networks: Networks) -> Scheduler:
    try:
        config = _scheduler_config(family, files)
        scheduler: Any = family.scheduler(config, files) if family.scheduler else from_scheduler_config(config)
    except InputError as error:
        raise CheckpointError(f"{files}: {error}") from error
    if not isinstance(scheduler, Scheduler):
        raise CheckpointError(
            f"{files}: scheduler of the family {family.name} returns {shown(scheduler)}, no Scheduler"
        )
    _check_prediction(files, networks, replace(scheduler, config=config))
    return family.scheduled(scheduler)


def _check_prediction(files: ModelFiles, networks: Networks, scheduler: Scheduler) -> None:
    """Refuse a schedule that does not fit the prediction of the denoiser.

    Raises:
        InputError: an argument of the caller contradicts this.
        CheckpointError: the checkpoint contradicts this.
    """
    kind = networks.prediction
    if kind and files.overrides.get("prediction_type", kind) != kind:
        problem = f"does not go with {files.name}, whose prediction is {kind}"
        raise InputError("prediction_type", problem, cure="leave it out", value=files.overrides["prediction_type"])
    try:
        check_scheduler(networks, scheduler, files.name)
    except InputError as error:
        if "scheduler" in files.overrides:
            raise
        cure = f"scheduler={{'_class_name': {FLOW!r}}}" if kind == "flow_prediction" else f"prediction_type={kind!r}"
        raise CheckpointError(f"{files}: its scheduler, {error.value}, {error.problem}; load it with {cure}") from None


def check_scheduler(networks: Networks, scheduler: Scheduler, name: str) -> None:
    """Refuse a scheduler of another prediction type than the networks declare; those of UNets declare none.

    Raises:
        InputError: the scheduler does not fit the model ``name``.
    """
    declared, kind = networks.prediction, scheduler.schedule.prediction_type
    if declared not in (None, kind):
        problem = f"has the prediction type {kind}, and the prediction of {name} is {declared}"
        cure = f"give a config with 'prediction_type': {declared!r}"
        if "flow_prediction" in (declared, kind):
            cure = f"take {FLOW}" if kind != "flow_prediction" else f"take DDIMScheduler; {cure}"
        raise InputError("scheduler", problem, cure=cure, value=scheduler.config.get("_class_name"))


def unsaved(model: Model, folder: str | Path) -> list[str]:
    """Return what a model that was saved into a folder loses: sentences, of which there are none for most models.

    The configs are read as ``canvax.load`` reads them, and compared with the model. A family without files loses
    nothing, since ``canvax.load`` does not read its models.
    """
    family, files = model.family, model.files_to_save(folder)
    if family.read is no_networks:
        return []
    lost = []
    encoders = [] if model.files.index else model.text.encoders
    absent = [each for each in encoders if model.tokenizers.get(each.component) is not None]
    if absent := [each for each in absent if model.tokenizer_folder(each.tokenizer) is None]:
        entries = {each.tokenizer: files.index[each.tokenizer] for each in absent if each.tokenizer}
        entry = f", and {json.dumps(entries)[1:-1]} into its model_index.json" if entries else ""
        lost = [f"the tokenizer of {', '.join(each.component for each in absent)} is not saved; put its files into "
                f"{', '.join(map(repr, entries)) or 'the folder'}{entry}"]  # fmt: skip
    made = {name: files.configs[name] for name in files.configs.keys() - model.files.configs}
    several = [name for name in made if len(family.classes.get(name, ())) > 1 and "_class_name" not in made[name]]
    of_class = f"; {several[0]} has the first class of its family: set CLASS of its Config" if several else ""
    try:
        networks = _networks(family, files)
        scheduler = _read_scheduler(family, files, networks)
    except Exception as error:  # of the family's code
        return [*lost, f"canvax.load cannot read what is saved: {type(error).__name__}: {error}{of_class}"]
    if changed := [*_differences(_records(model.networks), _records(networks))]:
        cure = "put them into a canvax.extend.Config in the record that the family reads"
        lost.append(f"values of the networks are not saved; {cure}: {'; '.join(changed)}{of_class}")
    if changed := [*_differences(_settings(model.scheduler), _settings(scheduler))]:
        cure = "put them into its config, or return them from Family.scheduler"
        lost.append(f"values of the scheduler are not saved; {cure}: {'; '.join(changed)}")
    return lost


def _settings(scheduler: Scheduler) -> dict[str, Any]:
    """Return the values that a scheduler's config determines."""
    return {"schedule": scheduler.schedule, "options": scheduler.options, "sampler": scheduler.spec.name}


def _records(networks: Networks) -> dict[str, Any]:
    """Return the records of a model that its files describe."""
    denoiser: Any = networks.denoiser
    while isinstance(denoiser, DenoiserWrapper):  # of which a pipeline warns
        denoiser = denoiser.base
    encoders = {encoder.component: encoder for encoder in networks.text.encoders}
    return {**encoders, denoiser.component: denoiser, "vae": networks.vae, "prediction": networks.prediction}


def _differences(saved: Any, read: Any, name: str = "") -> Iterator[str]:
    """Yield the names of values that differ, with both."""
    if type(saved) is type(read) and not callable(saved) and (isinstance(saved, dict) or hasattr(saved, "__dict__")):
        one, other = (value if isinstance(value, dict) else vars(value) for value in (saved, read))
        for each in [field.name for field in fields(saved)] if is_dataclass(saved) else one:
            yield from _differences(one.get(each), other.get(each), f"{name}.{each}".strip("."))
    elif not np.array_equal(saved, read) if isinstance(saved, np.ndarray) else repr(saved) != repr(read):
        yield f"{name} is {shown(saved)}, and {shown(read)} is read"


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
