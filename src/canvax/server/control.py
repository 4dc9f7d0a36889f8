"""Control images and image prompts in a batch: every size has one set of programs, which know all of the networks.

An image that has none carries features of nothing, of strength 0, so that images with and without are in one batch.
Where no image of a batch needs a network in a row, it is not evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from canvax.compile.additions import ReadsControls, ReadsImagePrompts
from canvax.compile.kinds import Kinds
from canvax.families.base import Model
from canvax.images.formats import written
from canvax.models.controlled import Control
from canvax.models.t2i_adapter import T2IAdapter
from canvax.pipelines.image_prompts import ImagePrompt
from canvax.pipelines.networks import usual_kinds
from canvax.server.jobs import ControlCard, JobRequest, PromptImage, invalid
from canvax.server.part_cache import PartCache


def check_has_networks(job_request: JobRequest, model: Model) -> None:
    """Refuse images that nothing here reads.

    Raises:
        Rejected: naming the field, and how the server would have to be started.
    """
    if job_request.control is not None and not model.networks.controls:
        raise invalid("control", "control: nothing here reads it; start the server with a --controlnet for this model")
    if job_request.control is True and job_request.upscale is None:
        raise invalid("control", "control: true is for upscale, where each tile is its own; send the image itself")
    if job_request.image_prompt and not model.networks.ip_adapters:
        raise invalid(
            "image_prompt", "image_prompt: nothing here reads it; the server was started without --ip-adapter"
        )


def prompts_of(job_request: JobRequest) -> list[ImagePrompt] | None:
    """Return the image prompts of a job request as those of a call."""
    prompts = job_request.image_prompt or ()
    return [ImagePrompt(prompt.image, prompt.scale, prompt.mask, prompt.adapter) for prompt in prompts] or None


def with_networks(kinds: Kinds, model: Model) -> Kinds:
    """Return kinds of programs that know every network, for images with and without control images or image prompts.

    Each IP-Adapter reads one image prompt, which may have a mask. Several image prompts for one adapter need separate
    programs.
    """
    controls = tuple(name for name, _ in model.networks.controls)
    usual, asked = usual_kinds(model.networks, masked=True), kinds.of(ReadsImagePrompts)
    several = {kind.component: kind for kind in (asked.kinds if asked else ()) if kind.images > 1}
    prompts = tuple(several.get(kind.component, kind) for kind in usual)
    return kinds.adding(controls and ReadsControls(controls), prompts and ReadsImagePrompts(prompts, sees=True))


def examples(model: Model, width: int, height: int) -> dict[str, Any]:
    """Return fields of a job request that uses every network."""
    networks = model.networks
    black = Image.new("RGB", (width, height))
    control = [{"0": black} if net.slots else black for _, net in networks.controls]
    fields: dict[str, Any] = {"control": control if len(control) > 1 else control[0]} if control else {}
    if networks.image_encoder and networks.ip_adapters:
        fields["image_prompt"] = [PromptImage(black, adapter=i) for i in range(len(networks.ip_adapters))]
    return fields


def cards(model: Model, unfit: Mapping[str, str]) -> tuple[tuple[ControlCard, ...], tuple[str, ...]]:
    """Return the cards of a model's control networks, and the names of its IP-Adapters.

    ``unfit``: further networks of the start, with the reason why they do not fit.
    """
    names = public_names([files.name for files in model.controls])
    nets = [net for _, net in model.networks.controls]
    listed = tuple(ControlCard(name, *_kind_of(net)) for name, net in zip(names, nets, strict=True))
    seeing = model.ip_adapters if model.networks.image_encoder else ()
    others = zip(public_names([*unfit]), unfit.items(), strict=True)
    listed += tuple(ControlCard(name, fault=fault.replace(source, name))
                    for name, (source, fault) in others if name not in names)  # fmt: skip
    return listed, tuple(public_names([files.name for files in seeing]))


def file_cards(files: PartCache) -> tuple[ControlCard, ...]:
    """Return the cards of the control networks in the folder of models."""
    usable = [ControlCard(name, *_kind_of(part.net)) for name, part in files.networks.items()]
    return (*usable, *(ControlCard(name, fault=fault) for name, fault in files.names.items() if fault))


def _kind_of(net: Control) -> tuple[Any, tuple[str, ...]]:
    if net.slots:
        return "union", tuple(net.types)
    return ("t2i-adapter" if isinstance(net, T2IAdapter) else "controlnet"), ()


def public_names(sources: Sequence[str]) -> list[str]:
    """Return public names of files and folders: without the folders above them, which are private to the operator."""
    names: list[str] = []
    for source in sources:
        name = stem = Path(source).expanduser().name.removesuffix(".safetensors")
        count = 2
        while name in names:
            name, count = f"{stem}-{count}", count + 1
        names.append(name)
    return names


def publicly(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of an image without the folders of local files; networks have the names of ``public_names``."""
    metadata = written(metadata)
    changed: dict[str, Any] = {}
    for name in ("controlnet", "ip_adapter", "vae", "text_encoder", "text_encoder_2", "tokenizer"):
        if name in metadata:
            sources = metadata[name]
            changed[name] = public_names([sources])[0] if isinstance(sources, str) else public_names(sources)
    return metadata | changed
