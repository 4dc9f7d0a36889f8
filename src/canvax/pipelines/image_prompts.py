"""Image prompts of a call: read them from files, check and encode them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from canvax.compile.additions import PromptKind
from canvax.compile.kinds import Ready
from canvax.compile.programs import Programs
from canvax.engine.batch import filled
from canvax.errors import InputError, conflict, shown
from canvax.families.base import Model
from canvax.images.inputs import clip_square, entry, fingerprint, read_images
from canvax.images.masks import resized, rounded
from canvax.models.clip_vision import MEAN
from canvax.models.ip_adapter import ImageKV, IPAdapter, attentions_to_text, masked_levels
from canvax.models.text import IMAGE_ENCODER
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put_all
from canvax.params import Params
from canvax.pipelines.options import Options
from canvax.types import HostArray

MOST = 16
"""Image prompts of one call."""


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """An image as a prompt, for a pipeline with an IP-Adapter (docs/ip-adapter.md).

    Attributes:
        image: a PIL image, a path or an array; or a list with one for each image of the call.
        scale: its strength, 1 as trained; or strengths by part of the UNet, such as
            ``{"up": {"block_0": [0, 1, 0]}}``, 0 in parts that are not named; or a list with one for each image.
        mask: the area where it acts, in white; an image, or a list with one for each image of the call. None for all.
        adapter: index of the pipeline's adapter that reads it.
        embeds: CLIP's output instead of an image: vectors [n, D] for a plain adapter, features [n, T, D]
            for the others; n is 1 or the number of images of the call.
        negative_embeds: the same for the negative prompt. By default a vector of zeros, or features of a grey image.
    """

    image: Any = None
    scale: Any = 1.0
    mask: Any = None
    adapter: int = 0
    embeds: Any = None
    negative_embeds: Any = None

    def __post_init__(self) -> None:
        if (self.image is None) == (self.embeds is None):
            raise InputError("image_prompt", "is neither image nor embeds, or both", cure="give one of them")
        if isinstance(self.adapter, bool) or not isinstance(self.adapter, int) or self.adapter < 0:
            raise InputError(
                "image_prompt", f"has adapter={shown(self.adapter)}, which is not 0, the first adapter, or a later one"
            )
        if not isinstance(self.scale, Mapping | list | tuple | np.ndarray):
            _number("scale", self.scale)


@dataclass(frozen=True, eq=False)
class Checked:
    """An image prompt, checked; lists are one for all images of the call or one for each.

    Attributes:
        component: name of its adapter.
        images: RGB, of any size; empty if there are ``embeds``.
        embeds: [n, ...] float32, or None.
        negative: [n, ...] float32, or None.
        scales: [n, L] float32.
        masks: grey, of any size; empty for none.
        raw_scales: scales as the caller passed them.
        marks: SHA-256 of each image or embedding.
        mask_marks: SHA-256 of each mask.
    """

    component: str
    images: list[Image.Image]
    embeds: HostArray | None
    negative: HostArray | None
    scales: HostArray
    masks: list[Image.Image]
    raw_scales: list[Any]
    marks: list[str]
    mask_marks: list[str]


class Reading(NamedTuple):
    """The image prompts of a run: for each half of guidance, by component."""

    positive: dict[str, ImageKV]
    negative: dict[str, ImageKV]


@dataclass(frozen=True, eq=False)
class ImagePrompts:
    """All image prompts of a call.

    Attributes:
        prompts: the image prompts, in the order of the call.
        adapters: the adapters of the pipeline, by component.
        tokens: number of CLIP's features; None without an image encoder.
    """

    prompts: list[Checked]
    adapters: Mapping[str, IPAdapter]
    tokens: int | None

    @cached_property
    def kinds(self) -> tuple[PromptKind, ...]:
        """Facts about the image prompts of each adapter that decide the programs."""
        kinds = []
        for name, net in self.adapters.items():
            prompts = [prompt for prompt in self.prompts if prompt.component == name]
            if prompts:
                shape = self._shape(net, prompts[0])
                kinds.append(PromptKind(name, len(prompts), any(prompt.masks for prompt in prompts), shape))
        return tuple(kinds)

    def _shape(self, net: IPAdapter, prompt: Checked) -> tuple[int, ...]:
        if prompt.embeds is not None:
            return prompt.embeds.shape[1:]
        return (net.reads,) if net.kind == "plain" else (self.tokens or 0, net.reads)

    def sees(self, *, guided: bool) -> bool:
        """Return True if CLIP's image encoder is needed."""
        return any(
            prompt.images or (guided and prompt.negative is None and self.adapters[prompt.component].kind != "plain")
            for prompt in self.prompts
        )

    def fingerprint(self) -> list[Any]:
        """Return the values that must be the same in processes that generate together."""
        return [[prompt.component, prompt.marks, prompt.mask_marks, prompt.scales.tolist()] for prompt in self.prompts]

    def record(self, index: int) -> list[dict[str, Any]]:
        """Return the metadata of one image's prompts."""
        names = list(self.adapters)
        records = []
        for prompt in self.prompts:
            record = {"adapter": names.index(prompt.component), "scale": entry(prompt.raw_scales, index)}
            record |= {"sha256": entry(prompt.marks, index)}
            record |= {"embeds": True} if prompt.embeds is not None or prompt.negative is not None else {}
            records.append(record | ({"mask_sha256": entry(prompt.mask_marks, index)} if prompt.mask_marks else {}))
        return records


def check_image_prompts(model: Model, value: Any, count: int, options: Options) -> ImagePrompts | None:
    """Check the image prompts of a call; return None if there are none.

    Args:
        model: the model.
        value: an image or a list with one for each image of the call; an ``ImagePrompt`` or a list of these.
        count: number of images of the call.
        options: options of the call.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    if value is None or (isinstance(value, list | tuple) and not value):
        return None
    if not model.networks.ip_adapters:
        raise InputError(
            "image_prompt",
            f"does not go with {model.name}, which has no IP-Adapter",
            cure="pipe.with_ip_adapter(file) gives it one (docs/ip-adapter.md)",
        )
    values = list(value) if isinstance(value, list | tuple) else [value]
    records = [value for value in values if isinstance(value, ImagePrompt)]
    if any(isinstance(inner, ImagePrompt) for value in values if isinstance(value, list | tuple) for inner in value):
        raise InputError(
            "image_prompt",
            "has lists of ImagePrompts: one is for all images of the call, and "
            "canvax.ImagePrompt([first, second], scale=[0.5, 1]) gives each image its own",
        )
    if records and len(records) < len(values):
        raise InputError("image_prompt", "has images and ImagePrompts", cure="give canvax.ImagePrompt(image) for each")
    if not records and isinstance(value, list | tuple) and len(values) not in (1, count):
        raise InputError(
            "image_prompt",
            f"has {len(values)} images for {count} images of the call: a list of images is one for "
            "each. For several at once give a list of canvax.ImagePrompt(image)",
        )
    records = records or [ImagePrompt(value)]
    if len(records) > MOST:
        raise InputError("image_prompt", f"has {len(records)} entries", cure=f"a call takes {MOST}")
    adapters = dict(model.networks.ip_adapters)
    prompts = [_checked(model, record, count) for record in records]
    for name in adapters:
        shapes = {
            prompt.embeds.shape[1:] for prompt in prompts if prompt.component == name and prompt.embeds is not None
        }
        if len(shapes) > 1:
            raise InputError("image_prompt", f"has embeds of several shapes {sorted(shapes)}", cure="give all the same")
    if options.padding_mask_crop is not None and any(prompt.masks for prompt in prompts):
        raise conflict("image_prompt", "padding_mask_crop", why="its masks are of the whole image")
    encoder = model.networks.image_encoder
    image_prompts = ImagePrompts(prompts, adapters, encoder.cfg.tokens if encoder else None)
    if encoder is None and image_prompts.sees(guided=True):
        raise InputError(
            "image_prompt",
            "needs an image encoder, and this pipeline has none (image_encoder=False)",
            cure="give embeds, and negative_embeds where the adapter is not a plain one",
        )
    return image_prompts


def _checked(model: Model, prompt: ImagePrompt, count: int) -> Checked:
    nets = model.networks.ip_adapters
    at = prompt.adapter
    if at >= len(nets):
        raise InputError(
            "image_prompt", f"has adapter={at!r}, which is not one of 0..{len(nets) - 1}, those of this pipeline"
        )
    component, net = nets[at]
    images = [] if prompt.image is None else read_images("image_prompt", prompt.image, count)
    encoder = model.networks.image_encoder
    tokens = encoder.cfg.tokens if encoder else None
    embeds, negative = (
        None if value is None else _embeds(name, value, net, tokens, count)
        for name, value in (("embeds", prompt.embeds), ("negative_embeds", prompt.negative_embeds))
    )
    if embeds is not None and negative is not None and embeds.shape[1:] != negative.shape[1:]:
        raise InputError(
            "image_prompt",
            f"has embeds of shape {embeds.shape} and negative_embeds of shape {negative.shape}",
            cure="give the same",
        )
    masks = [] if prompt.mask is None else read_images("image_prompt's mask", prompt.mask, count, grey=True)
    raw_scales = list(prompt.scale) if isinstance(prompt.scale, list | tuple) else [prompt.scale]
    if len(raw_scales) not in (1, count):
        raise InputError(
            "image_prompt", f"has {len(raw_scales)} scales for {count} images", cure="give one, or one for each"
        )
    scales = np.stack([layer_scales(scale, net) for scale in raw_scales])
    marks = [fingerprint(image) for image in images]
    if embeds is not None:
        marks = [hashlib.sha256(embed.tobytes()).hexdigest() for embed in embeds]
    mask_marks = [fingerprint(mask) for mask in masks]
    return Checked(component, images, embeds, negative, scales, masks, raw_scales, marks, mask_marks)


def _embeds(name: str, value: Any, net: IPAdapter, tokens: int | None, count: int) -> HostArray:
    """Check embeds of the caller; return them as [n, ...] float32."""
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise InputError("image_prompt", f"has {name}={value!r:.80}, which is not an array of numbers") from None
    wanted = ("D",) if net.kind == "plain" else ("T", "D")
    if array.ndim == len(wanted):
        array = array[None]
    if array.ndim != 1 + len(wanted) or array.shape[-1] != net.reads or array.shape[0] not in (1, count):
        sizes = f"[n, {net.reads}]" if net.kind == "plain" else f"[n, {tokens or 'T'}, {net.reads}]"
        raise InputError(
            "image_prompt", f"has {name} of shape {np.shape(value)}", cure=f"this adapter reads {sizes}, n 1 or {count}"
        )
    most = tokens or 4096
    if net.kind != "plain" and (array.shape[1] != tokens if tokens else not 1 <= array.shape[1] <= most):
        raise InputError(
            "image_prompt",
            f"has {name} with {array.shape[1]} features of an image",
            cure=f"CLIP makes {tokens or 'fewer'}",
        )
    if not np.isfinite(array).all():
        raise InputError("image_prompt", f"has {name} with numbers that are not finite")
    return array


def layer_scales(scale: Any, net: IPAdapter) -> HostArray:
    """Return the strength of an image prompt in each attention [L] float32.

    Raises:
        InputError: a value is not a strength, or a name is not a part of the UNet.
    """
    layers = attentions_to_text(net.unet)
    if not isinstance(scale, Mapping):
        return np.full(len(layers), _number("scale", scale), np.float32)
    parts = {"down": "down_blocks", "mid": "mid_block", "up": "up_blocks"}
    depths: dict[tuple[str, int], int] = {}  # attentions of each block
    for layer in layers:
        if len(layer.path) == 4:
            part, block, at, _ = layer.path
            depths[part, int(block)] = max(depths.get((part, int(block)), 0), int(at) + 1)
    out = np.zeros(len(layers), np.float32)
    for name, value in scale.items():
        if name not in parts:
            raise InputError("image_prompt", f"has a scale for {name!r}", cure="parts of the UNet are down, mid and up")
        counts = {block: count for (part, block), count in depths.items() if part == parts[name]}
        blocks = value if isinstance(value, Mapping) else {f"block_{block}": value for block in counts}
        if name == "mid":
            out[[layer.path[0] == "mid_block" for layer in layers]] = _number("scale['mid']", value)
            continue
        for key, each in blocks.items():
            block = next((block for block in counts if key == f"block_{block}"), None)
            where = f"scale[{name!r}][{key!r}]"
            if block is None:
                names = ", ".join(f"block_{count}" for count in counts)
                raise InputError("image_prompt", f"has {where}, and {name} has attentions in {names or 'no block'}")
            numbers = list(each) if isinstance(each, list | tuple) else [each]
            if len(numbers) not in (1, counts[block]):
                raise InputError(
                    "image_prompt", f"has {where} with {len(numbers)} entries for {counts[block]} attentions"
                )
            numbers = numbers * counts[block] if len(numbers) == 1 else numbers
            for i, layer in enumerate(layers):
                if layer.path[:2] == (parts[name], str(block)):
                    out[i] = _number(where, numbers[int(layer.path[2])])
    return out


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not abs(value) < math.inf:
        raise InputError("image_prompt", f"has {name}={value!r:.80}, which is not a number", cure="1 is as trained")
    if not -10 <= value <= 10:
        raise InputError("image_prompt", f"has {name}={value!r}, which is not in -10..10", cure="1 is as trained")
    return float(value)


def encode_image_prompts(
    programs: Programs,
    ready: Ready,
    params: Params,
    image_prompts: ImagePrompts,
    size: tuple[int, int],
    latents: tuple[int, int, int, int],
    count: int,
    *,
    guided: bool,
) -> Reading:
    """Encode the image prompts of ``count`` images into conditions on the devices; each image is encoded once."""
    reader = _Reader(programs, ready, params)
    batch = padded_batch(count, programs.mesh)
    halves: tuple[dict[str, ImageKV], dict[str, ImageKV]] = ({}, {})
    for kind in image_prompts.kinds:
        net = image_prompts.adapters[kind.component]
        prompts = [prompt for prompt in image_prompts.prompts if prompt.component == kind.component]
        shared: dict[str, Any] = {
            "scale": filled(np.stack([_spread(prompt.scales, count) for prompt in prompts], axis=1), batch)
        }
        if kind.masked:
            shared["masks"] = tuple(
                filled(level, batch)
                for level in mask_levels([prompt.masks for prompt in prompts], net, size, latents, count)
            )
        for half, negative in ((0, False), *(((1, True),) if guided else ())):
            each = [reader.read(net, prompt, negative=negative) for prompt in prompts]
            kv = []
            for layer in range(len(net.attentions)):
                pair = (
                    np.stack([np.stack([entry(layers, i)[layer][at] for layers in each]) for i in range(count)])
                    for at in (0, 1)
                )
                kv.append(tuple(filled(array, batch) for array in pair))
            halves[half][kind.component] = put_all({"kv": tuple(kv), **shared}, over_batch(programs.mesh))
    return Reading(*halves)


@dataclass(eq=False)
class _Reader:
    """Runs the encoders of images and adapters."""

    programs: Programs
    ready: Ready
    params: Params

    def read(self, net: IPAdapter, prompt: Checked, *, negative: bool) -> list[list[tuple[HostArray, HostArray]]]:
        """Return keys and values [T, N, Dh] of each layer: one list for all images of the call, or one for each."""
        if negative:
            rows = prompt.negative if prompt.negative is not None else [self._nothing(net)]
        elif prompt.embeds is not None:
            rows = prompt.embeds
        else:
            rows = [self._vision(image)[net.kind != "plain"] for image in prompt.images]
        return [self._run(prompt.component, np.asarray(row)) for row in rows]

    def _nothing(self, net: IPAdapter) -> HostArray:
        """Return the embedding of "no image": a vector of zeros, or features of an image that CLIP sees as zeros."""
        if net.kind == "plain":
            return np.zeros(net.reads, np.float32)
        return self._vision(None)[1]

    def _vision(self, image: Image.Image | None) -> tuple[HostArray, HostArray]:
        encoder = self.programs.networks.image_encoder
        assert encoder is not None
        side = encoder.cfg.image_size
        plain = np.broadcast_to(np.asarray(MEAN, np.float32), (side, side, 3))
        return self._run(IMAGE_ENCODER, plain if image is None else clip_square(image, side))

    def _run(self, component: str, row: HostArray) -> Any:
        return self.programs.features(self.ready[component], self.params, row[None].astype(np.float32))[0]


def mask_levels(
    masks: Sequence[Sequence[Image.Image]],
    net: IPAdapter,
    size: tuple[int, int],
    latents: tuple[int, int, int, int],
    count: int,
) -> list[HostArray]:
    """Return the masks of I image prompts for each level of the UNet [count, h w, I] float32; 1 without a mask.

    Masks are resized as in PyTorch diffusers: black or white at the size of the image, then bicubic, not smoothed.
    """
    height, width = size
    ones = [Image.new("L", (width, height), 255)]
    pixels = [
        [np.asarray(rounded(resized(mask, height, width)), np.float32) / 255 for mask in (group or ones)]
        for group in masks
    ]
    levels = []
    for tall, wide in masked_levels(net.unet, latents):
        rows, columns = bicubic(height, tall), bicubic(width, wide)
        small = [[(rows @ mask @ columns.T).reshape(-1) for mask in group] for group in pixels]
        levels.append(np.stack([np.stack([entry(group, i) for group in small], -1) for i in range(count)]))
    return [level.astype(np.float32) for level in levels]


def bicubic(size: int, wanted: int) -> HostArray:
    """Return the weights [wanted, size] float64 of cubic convolution with a = -0.75 (Keys 1981), edges repeated."""
    at = (np.arange(wanted) + 0.5) * size / wanted - 0.5
    first, a = np.floor(at).astype(int), -0.75
    out = np.zeros((wanted, size))
    for tap in range(-1, 3):
        x = np.abs(at - (first + tap))
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        np.add.at(out, (np.arange(wanted), np.clip(first + tap, 0, size - 1)), np.where(x <= 1, near, far))
    return out


def _spread(rows: HostArray, count: int) -> HostArray:
    return np.broadcast_to(rows, (count, *rows.shape[1:])) if len(rows) == 1 else rows
