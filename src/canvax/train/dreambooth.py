"""DreamBooth (Ruiz et al. 2023): learns a subject from a few images and a rare word, with images of its class.

The model generates the class images, so that it does not forget the class while it learns the subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from canvax.errors import InputError, check_utf8, conflict
from canvax.files import check_writable, written
from canvax.pipelines.loaded import open_model
from canvax.pipelines.options import Options
from canvax.pipelines.pipeline import Pipeline
from canvax.settings import check_all
from canvax.train.pictures import SUFFIXES, check_apart
from canvax.train.settings import InstanceRecord
from canvax.train.task import Subject, Training, check_pictures, size_of


@dataclass(frozen=True)
class Instance(InstanceRecord):
    """The subject of the images, and the class images that keep the model from forgetting.

    Attributes:
        prompt: caption of every image, e.g. "a photo of sks dog".
        class_prompt: caption of the class images, e.g. "a photo of a dog"; None for no class images.
        class_pictures: folder of the class images; by default ``class`` in the folder of the run. If it has fewer than
            ``count`` images, the missing ones are generated.
        count: number of class images.
        weight: weight of the loss on class images.
        batch: class images generated at once.
    """

    def __post_init__(self) -> None:
        check_all(self)
        if not self.prompt.strip():
            raise InputError("prompt", "is empty", cure="say what the pictures show: 'a photo of sks dog'")
        check_utf8("class_prompt", self.class_prompt or "")
        if self.class_prompt is not None and not self.class_prompt.strip():
            cure = "name the class: 'a photo of a dog', or leave it out"
            raise InputError("class_prompt", "is empty", cure=cure)


def subject_of(
    instance: Instance, training: Training, mesh: Mesh, say: Callable[[str], None] = lambda _: None
) -> Subject:
    """Return the subject for ``finetune`` and ``train_lora``; generate missing class images.

    Raises:
        InputError: the images, the model or the size cannot be used.
    """
    check_pictures(training, Subject((instance.prompt,)))
    if instance.class_prompt is None:
        return Subject((instance.prompt,))
    if training.buckets:
        raise conflict("class_prompt", "buckets", why="images of the class are square")
    folder = instance.class_pictures or training.folder / "class"
    check_apart(training.pictures, folder)
    _generate_class(folder, instance.class_prompt, instance, training, mesh, say)
    return Subject((instance.prompt,), prior=folder, prior_caption=instance.class_prompt, prior_weight=instance.weight)


def _generate_class(
    folder: Path, prompt: str, instance: Instance, training: Training, mesh: Mesh, say: Callable[[str], None]
) -> None:
    """Generate class images, each with another seed, until the folder has ``count``."""
    existing = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES] if folder.is_dir() else []
    missing = instance.count - len(existing)
    if missing <= 0:
        return
    names = {path.name for path in existing}
    seeds = [seed for seed in range(instance.count + len(existing)) if f"class-{seed:05d}.png" not in names][:missing]
    check_writable("class_pictures", folder)
    check = partial(size_of, training)
    quantize = training.quantize
    model, programs, params = open_model(
        training.model, dtype=training.dtype, quantize=quantize, mesh=mesh, check=check, **training.source()
    )
    say(f"generating {missing} pictures of {prompt!r} into {folder}")
    pipe = Pipeline(model, programs, params)
    size = size_of(training, model)
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, missing, instance.batch):
        part = seeds[start : start + instance.batch]
        filled = part + part[-1:] * (instance.batch - len(part))  # the same batch size avoids a second program
        result = pipe([prompt] * len(filled), seed=filled, height=size, width=size, options=Options(progress=False))
        for seed, image in zip(part, result.images, strict=False):
            with written(folder / f"class-{seed:05d}.png") as draft:  # atomic, in case the process is killed
                image.save(draft, "PNG")
