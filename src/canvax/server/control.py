"""Control images and image prompts in a batch: every size has one set of programs, which know all of the networks.

An image that has none carries features of nothing, of strength 0, so that images with and without are in one batch.
Where no image of a batch needs a network in a row, it is not evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from canvax.compile.kinds import Kinds
from canvax.engine.batch import Carried, Prompts
from canvax.families.base import Model
from canvax.images.formats import written
from canvax.models.controlled import Control
from canvax.models.controlnet_union import TYPES, UnionNet
from canvax.models.t2i_adapter import T2IAdapter
from canvax.models.text import IMAGE_PROMPTS, Conditions
from canvax.pipelines.image_prompts import ImagePrompt
from canvax.pipelines.ip_adapters import usual_kinds
from canvax.server.jobs import Ask, ControlCard, PromptImage, invalid


def check_has_networks(ask: Ask, model: Model) -> None:
    """Refuse images that nothing here reads.

    Raises:
        Refused: naming the field, and how the server would have to be started.
    """
    if ask.control is not None and not model.networks.controls:
        raise invalid("control", "control: nothing here reads it; the server was started without --controlnet")
    if ask.control is True and ask.upscale is None:
        raise invalid("control", "control: true is for upscale, where each tile is its own; send the image itself")
    if ask.image_prompt and not model.networks.ip_adapters:
        raise invalid(
            "image_prompt", "image_prompt: nothing here reads it; the server was started without --ip-adapter"
        )


def prompts_of(ask: Ask) -> list[ImagePrompt] | None:
    """The image prompts of an ask as a call has them."""
    given = ask.image_prompt
    return [ImagePrompt(one.image, one.scale, one.mask, one.adapter) for one in given] if given else None


def with_networks(kinds: Kinds, model: Model) -> Kinds:
    """Programs that know every network, whichever an image has something for.

    Each IP-Adapter reads one image prompt, which may have a mask. Several for one adapter have programs of their own.
    """
    kinds = kinds._replace(controls=tuple(name for name, _ in model.networks.controls))
    usual = usual_kinds(model.networks, masked=True)
    several = {kind.component: kind for kind in kinds.image_prompts if kind.images > 1}
    found = tuple(several.get(kind.component, kind) for kind in usual)
    return kinds._replace(image_prompts=found, sees=bool(usual))


def examples(model: Model, width: int, height: int) -> dict[str, Any]:
    """Fields of an ask that has something for every network."""
    networks = model.networks
    black = Image.new("RGB", (width, height))
    control = [{"0": black} if isinstance(net, UnionNet) else black for _, net in networks.controls]
    told: dict[str, Any] = {"control": control if len(control) > 1 else control[0]} if control else {}
    if networks.image_encoder and networks.ip_adapters:
        told["image_prompt"] = [PromptImage(black, adapter=i) for i in range(len(networks.ip_adapters))]
    return told


class Idle:
    """What an image carries for networks that it has nothing for.

    Args:
        shapes: of all conditions that the programs are given.
        networks: those of the programs that read control images, in their order.
    """

    def __init__(self, shapes: Mapping[str, Any], networks: Sequence[tuple[str, Control]]) -> None:
        self._nets = tuple(networks)
        known = {IMAGE_PROMPTS, *(name for name, _ in self._nets)}
        self._nothing = {name: jax.tree.map(_zeros, shape) for name, shape in shapes.items() if name in known}
        for told in self._nothing.get(IMAGE_PROMPTS, {}).values():
            told["masks"] = tuple(np.ones_like(mask) for mask in told["masks"]) if "masks" in told else ()
            if not told["masks"]:
                del told["masks"]

    def beside(self, carried: Carried, own: Sequence[str]) -> Carried:
        """An image as the programs take it; ``own`` are the networks that it has a control image for."""
        if not self._nothing:
            return carried
        flight, run = carried
        run.later = {row: self._all(prompts) for row, prompts in run.later.items()}
        if (given := run.columns.get("control")) is not None:
            widest = max(net.layers for _, net in self._nets)
            control = np.zeros((len(given), len(self._nets), 2, widest), np.float32)
            places = [i for i, (name, _) in enumerate(self._nets) if name in own]
            control[:, places, :, : given.shape[-1]] = given
            run.columns = {**run.columns, "control": control}
        return Carried(flight._replace(prompts=self._all(flight.prompts)), run)

    def _all(self, prompts: Prompts) -> Prompts:
        return tuple(self._whole(prompt) for prompt in prompts)

    def _whole(self, half: Conditions) -> Conditions:
        whole: dict[str, Any] = {**self._nothing, **half}
        if IMAGE_PROMPTS in half:
            nothing, own = self._nothing[IMAGE_PROMPTS], whole[IMAGE_PROMPTS]
            whole[IMAGE_PROMPTS] = {name: {**told, **own.get(name, {})} for name, told in nothing.items()}
        return whole


def _zeros(shape: Any) -> np.ndarray:
    """Of one image."""
    return np.zeros((1, *shape.shape[1:]), shape.dtype)


def cards(model: Model) -> tuple[tuple[ControlCard, ...], tuple[str, ...]]:
    """What is told of a model's networks of control images, and of its IP-Adapters."""
    names = public_names([files.name for files in model.controls])
    nets = [net for _, net in model.networks.controls]
    told = tuple(ControlCard(name, *_kind_of(net)) for name, net in zip(names, nets, strict=True))
    seeing = model.ip_adapters if model.networks.image_encoder else ()
    return told, tuple(public_names([files.name for files in seeing]))


def _kind_of(net: Control) -> tuple[Any, tuple[str, ...]]:
    if isinstance(net, UnionNet):
        return "union", tuple(name for name, slot in TYPES.items() if slot < net.types)
    return ("t2i-adapter" if isinstance(net, T2IAdapter) else "controlnet"), ()


def public_names(sources: Sequence[str]) -> list[str]:
    """What files and folders are called here: the folders above them are the operator's business."""
    names: list[str] = []
    for source in sources:
        name = stem = Path(source).expanduser().name.removesuffix(".safetensors")
        count = 2
        while name in names:
            name, count = f"{stem}-{count}", count + 1
        names.append(name)
    return names


def publicly(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata of an image without the folders of local files; networks have the names of ``public_names``."""
    metadata = written(metadata)
    changed: dict[str, Any] = {}
    for name in ("controlnet", "ip_adapter", "vae"):
        if name in metadata:
            sources = metadata[name]
            changed[name] = public_names([sources])[0] if isinstance(sources, str) else public_names(sources)
    return metadata | changed
