"""Going on with a checkpoint on captioned pictures: the whole UNet is trained, text encoder and VAE stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from canvax.errors import InputError
from canvax.families.base import Model
from canvax.families.read import SDXL
from canvax.images.grid import make_grid
from canvax.models.text import FIRST
from canvax.params import Params
from canvax.pipelines.checks import default_dtype, parse_dtype
from canvax.pipelines.open import open_model
from canvax.pipelines.options import Options
from canvax.pipelines.pipeline import StableDiffusion
from canvax.train.diffusion import caption_ids, denoising_data, denoising_loss
from canvax.train.encoding import encode_pictures
from canvax.train.loop import STATE, Plan, Session, check_same, fit
from canvax.train.objectives import check_trainable
from canvax.train.pictures import Pictures, read_pictures
from canvax.types import DType

PLAN = Plan(steps=1000, batch=1, learning_rate=1e-5, warmup=0, final=1.0, b2=0.999, average=0.0, chunk=10)
"""The rates that Stable Diffusion was fine-tuned with in the field: AdamW, 1e-5, constant."""


@dataclass(frozen=True)
class FineTuning:
    """What to train on what.

    Attributes:
        model: a folder in the diffusers layout, a bundled model or a Hub id; Stable Diffusion 1.x or 2.x.
        pictures: folder or zip file of captioned pictures.
        folder: where the run is kept; the finished model is in its ``model``.
        plan: how long and how.
        size: pixels of a side; by default the model's own.
        caption_column: column of ``metadata.jsonl`` or ``metadata.csv``.
        flip: show every picture mirrored as well.
        gamma: bound of the min-SNR weights, None for none.
        empty: share of empty captions.
        remat: trade time for memory in the gradient.
        dtype: dtype computed in; by default bfloat16 on GPU and TPU, float32 on the CPU.
        prompts: drawn along the way, into ``previews``.
    """

    model: str | Path
    pictures: str | Path
    folder: Path
    plan: Plan = PLAN
    size: int | None = None
    caption_column: str = "text"
    flip: bool = False
    gamma: float | None = None
    empty: float = 0.1
    remat: bool = False
    dtype: DType | None = None
    prompts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not 0 <= self.empty < 1:
            raise InputError(f"empty = {self.empty} is the share of empty captions; it must be in 0..1, 1 excluded")
        if self.gamma is not None and self.gamma <= 0:
            raise InputError(f"gamma = {self.gamma} must be more than 0, or None for no min-SNR weights")


def finetune(
    task: FineTuning,
    mesh: Mesh,
    *,
    deadline: float | None = None,
    save_dtype: DType = "float32",
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Train, or go on; the state of the run is in ``task.folder``.

    Args:
        task: what to train on what.
        mesh: the devices; the batch is split over ``data``.
        deadline: ``time.monotonic()`` at which to write the state and stop.
        save_dtype: dtype of the finished weights.
        say: told what is going on.

    Returns:
        The finished model's folder, or None if the deadline came first.

    Raises:
        InputError: an argument, the kind of model or a picture cannot be used, or the folder holds another run.
        CheckpointError: the model cannot be read.
    """
    target = task.folder / "model"
    if target.exists():
        raise InputError(f"{str(target)!r} exists already: this run is finished; choose another folder.")
    save_dtype = parse_dtype(save_dtype)
    model, programs, params = open_model(
        task.model,
        dtype="float32",
        mesh=mesh,
        accept=_refuse_xl,
        check=lambda model: check_trainable(model.scheduler.schedule),
    )
    size = task.size or model.native_size[0]
    if size % (2 * model.vae.factor):
        raise InputError(f"size = {size} must be divisible by {2 * model.vae.factor}")
    pictures = read_pictures(task.pictures, size, caption_column=task.caption_column).split("train")
    if not len(pictures):
        raise InputError(f"pictures = {str(task.pictures)!r}: none of its pictures is of the split 'train'")
    dtype = default_dtype(mesh) if task.dtype is None else task.dtype
    decisive = {name: getattr(task, name) for name in ("flip", "gamma", "empty")}
    decisive |= {"model": str(task.model), "size": size, "dtype": np.dtype(dtype).name, "pictures": pictures.digest()}
    if (state := task.folder / "unet" / STATE).is_file():
        check_same(state, task.plan, len(pictures), decisive)  # before anything is encoded
    say(f"{len(pictures)} pictures at {size} x {size}")
    data = _data(task, pictures, model, params, mesh)
    start = {"unet": jax.device_get(params.pop("unet"))}  # on the devices there is the copy that is trained, no other
    loss = denoising_loss(
        model.text.parts[FIRST],
        model.unet,
        model.scheduler.schedule,
        gamma=task.gamma,
        empty=task.empty,
        dtype=dtype,
        remat=task.remat,
    )
    pipe = StableDiffusion(model, programs)

    def preview(step: int, trained: Params) -> None:
        options = Options(progress=False)
        seeds = list(range(len(task.prompts)))
        images = pipe(list(task.prompts), seed=seeds, params={**params, **trained}, options=options).images
        (task.folder / "previews").mkdir(exist_ok=True)
        make_grid(images).save(task.folder / "previews" / f"{step:07d}.png")

    session = Session(
        task.folder / "unet",
        "fine-tuning",
        mesh,
        deadline=deadline,
        about=decisive,
        preview=preview if task.prompts else None,
    )
    trained, finished = fit(start, loss, data, len(pictures), task.plan, session)
    return model.save(target, {**params, **trained}, dtype=save_dtype) if finished else None


def _data(task: FineTuning, pictures: Pictures, model: Model, params: Params, mesh: Mesh) -> dict[str, Any]:
    """Latents of all pictures, encoded once, and the ids of their captions."""
    forms = [
        encode_pictures(params["vae"], pixels, model.vae, mesh, batch=4)
        for pixels in (pictures.pixels, pictures.pixels[:, :, ::-1])[: 1 + task.flip]
    ]
    text = model.text.parts[FIRST]
    tokenizer = model.tokenizers[FIRST]
    ids = caption_ids(tokenizer, pictures.captions, text.max_position_embeddings)
    data = denoising_data(tokenizer, np.stack(forms, axis=1), ids)
    return {**data, "frozen": {FIRST: params[FIRST]}}


def _refuse_xl(index: Mapping[str, Any]) -> None:
    if index.get("_class_name") in SDXL.pipelines:
        raise InputError("model is an SDXL checkpoint, which cannot be fine-tuned yet; use Stable Diffusion 1.x or 2.x")
