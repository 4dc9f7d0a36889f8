"""The facts of a training by the names of kohya's trainers and ModelSpec, which A1111 and managers of LoRAs show."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from canvax.families.base import Model
from canvax.models.denoiser import UNetDenoiser
from canvax.train.inputs import Item, by_size
from canvax.train.loop import Plan
from canvax.train.settings import TrainingRecord

MOST_TAGS = 1000
"""Tags that a file lists: the most frequent ones."""

_BASES = {
    768: ("sd_v1", "stable-diffusion-v1"),
    1024: ("sd_v2", "stable-diffusion-v2-512"),
    2048: ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base"),
}
"""Names of a base model by kohya and by ModelSpec, by the width of the text that its UNet reads."""


def facts_of_images(items: Sequence[Item], size: int, plan: Plan) -> dict[str, str]:
    """Return the metadata about the images of a run; ``size`` is the side of a square image.

    Folders and tags are those of the images to learn, without images of the class.
    """
    folders: dict[str, list[Item]] = {}
    for item in items:
        if item.folder is items[0].folder:
            folders.setdefault(_folder(item), []).append(item)
    tags = Counter((name, tag) for name, of_name in folders.items() for item in of_name for tag in _tags(item))
    frequency: dict[str, dict[str, int]] = {name: {} for name in folders}
    for (name, tag), count in tags.most_common(MOST_TAGS):
        frequency[name][tag] = count
    counts = {name: {"n_repeats": each[0].repeats, "img_count": len(each)} for name, each in folders.items()}
    buckets = [
        {"resolution": [width, height], "count": sum(item.repeats for item in each)}
        for (height, width), each in by_size(items).items()
    ]
    count, learned = (sum(item.repeats for item in each) for each in (items, [i for e in folders.values() for i in e]))
    return _texts({
        "ss_resolution": (size, size),
        "ss_num_train_images": learned,
        "ss_num_reg_images": count - learned,
        "ss_num_epochs": math.ceil(plan.steps * math.prod(plan.batches) / count),
        "ss_dataset_dirs": counts,
        "ss_bucket_info": {"buckets": dict(enumerate(buckets))},
        "ss_tag_frequency": frequency,
        "modelspec.resolution": f"{size}x{size}",
    })  # fmt: skip


def facts_of_settings(training: TrainingRecord, model: Model) -> dict[str, str]:
    """Return the metadata about the base model and the usual settings; the record ``canvax.training`` has all."""
    (version, architecture), schedule, plan = _base(model), model.scheduler.schedule, training.plan
    predicts_v = schedule.prediction_type == "v_prediction"
    if version == "sd_v2" and predicts_v:
        architecture = "stable-diffusion-v2-768-v"
    return _texts({
        "ss_base_model_version": version + "_v" * (predicts_v and version in ("sd_v1", "sd_v2")),
        "ss_v2": version == "sd_v2" if version else None,
        "ss_learning_rate": plan.learning_rate,
        "ss_lr_scheduler": "cosine" if plan.final < 1 else "constant_with_warmup" if plan.warmup else "constant",
        "ss_lr_warmup_steps": plan.warmup,
        "ss_max_train_steps": plan.steps,
        "ss_optimizer": plan.optimizer,
        "ss_seed": plan.seed,
        "ss_gradient_accumulation_steps": plan.accumulate,
        "ss_total_batch_size": math.prod(plan.batches),
        "ss_min_snr_gamma": training.gamma,
        "ss_noise_offset": training.noise_offset or None,
        "ss_caption_dropout_rate": training.empty,
        "ss_caption_tag_dropout_rate": training.tag_dropout,
        "ss_shuffle_caption": training.shuffle_captions,
        "ss_keep_tokens": training.keep_tokens,
        "ss_flip_aug": training.flip,
        "ss_enable_bucket": training.buckets,
        "modelspec.architecture": f"{architecture}/lora" if architecture else None,
        "modelspec.implementation": "diffusers",
        "modelspec.prediction_type": None if schedule.is_flow else "v" if predicts_v else "epsilon",
    })  # fmt: skip


def _base(model: Model) -> tuple[str, str]:
    """Return the names of a base model by kohya and by ModelSpec; "" for models without names there."""
    denoiser = model.networks.denoiser
    if isinstance(denoiser, UNetDenoiser):
        return _BASES.get(denoiser.cfg.cross_attention_dim, ("", ""))
    distilled = "dev" if model.networks.embeds_guidance else "schnell"
    return ("flux1", f"flux-1-{distilled}") if model.family.name == "flux" else ("", "")


def _folder(item: Item) -> str:
    """Return the name of an image's folder."""
    inside = PurePosixPath(item.folder.rows[item.index]["file_name"]).parent.name
    return inside or item.folder.source.resolve().name.removesuffix(".zip")


def _tags(item: Item) -> Iterator[str]:
    """Yield the comma-separated tags of an image's captions, each once."""
    tags = (tag.strip().lower() for caption in item.captions for tag in caption.split(","))
    yield from dict.fromkeys(filter(None, tags))


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that are there as kohya's trainers write them, tables as JSON."""
    return {
        name: json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in facts.items()
        if value not in (None, "")
    }
