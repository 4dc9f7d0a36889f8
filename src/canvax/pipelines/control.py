"""Control images: read, check and encode them, and compute their strength at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from canvax.call import CONTROL, OptionRecord
from canvax.compile.kinds import Ready
from canvax.compile.programs import Programs
from canvax.errors import InputError, conflict, miscounted, nearest, needs
from canvax.families.base import Model
from canvax.images.inputs import fingerprint, read_images
from canvax.images.masks import as_floats, resized
from canvax.models.controlled import Control
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.checks import check_image_size
from canvax.pipelines.options import Options
from canvax.settings import grouped, is_number
from canvax.types import HostArray

OPTIONS = tuple(grouped(OptionRecord, CONTROL))
_SOFT, _SOFT_ADAPTER = 0.825, (0.25, 0.62, 0.825, 1.0)


@dataclass(frozen=True, eq=False)
class ControlImages:
    """The control images of a call.

    Attributes:
        images: the inputs of each network, by the name of its component: one entry for all images of the call, or one
            for each.
        fingerprints: hashes of the caller's images in the same order: a text, or a dict for images with types.
        places: indices of these networks among those of the pipeline.
    """

    images: Mapping[str, list[tuple[Shown, ...]]]
    fingerprints: Mapping[str, list[Any]]
    places: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Components of the networks."""
        return tuple(self.images)

    def size(self, asked: tuple[Any, Any], factor: int, native: tuple[int, int]) -> tuple[Any, Any]:
        """Return the requested height and width, or for None those of the control images.

        Raises:
            InputError: they have several sizes, or one that cannot be generated.
        """
        hints = (hint for images in self.images.values() for shown in images for hint in shown)
        return size_of((hint.image for hint in hints), asked, factor, native)


def size_of(
    images: Iterable[Image.Image], asked: tuple[Any, Any], factor: int, native: tuple[int, int] | None = None
) -> tuple[Any, Any]:
    """Return the same as ``ControlImages.size``."""
    if None not in asked:
        return asked
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise InputError(
            "control", "has images of several sizes", cure="give {height} and {width}, which they are resized to"
        )
    ((width, height),) = sizes
    check_image_size("control", (width, height), asked, factor, native)
    return asked[0] or height, asked[1] or width


def check_control(model: Model, control: Any, count: int, options: Options) -> ControlImages | None:
    """Check the control images of a call; return None if there are none.

    Args:
        model: the model.
        control: as in a call.
        count: number of images of the call.
        options: options of the call.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    nets = model.networks.controls
    if control is None or (isinstance(control, list | tuple) and control and all(kind is None for kind in control)):
        for name in sorted(options.changed().keys() & set(OPTIONS)):
            raise needs(name, "control")
        return None
    if not nets:
        raise InputError(
            "control",
            f"does not go with {model.name}, which has no ControlNet: canvax.load({model.name!r}, controlnet=...) "
            "gives it one (docs/controlnet.md)",
        )
    if options.reuse > 1:
        raise conflict("control", "reuse")
    if options.padding_mask_crop is not None:
        raise conflict("control", "padding_mask_crop", why="the control image is of the whole image")
    by_network: Sequence[Any] = [control] if len(nets) == 1 else control
    if len(nets) > 1 and (not isinstance(control, list | tuple) or len(control) != len(nets)):
        entries = len(control) if isinstance(control, list | tuple) else "one"
        raise InputError(
            "control", f"has {entries} for {len(nets)} networks", cure="give a list with an image for each, or None"
        )
    for name in OPTIONS:
        if isinstance(value := getattr(options, name), tuple) and len(value) != len(nets):
            raise miscounted(name, len(value), len(nets), "networks")
    modes = options.control_mode
    if model.networks.unet is None and set([modes] if isinstance(modes, str) else modes) - {"balanced"}:
        raise InputError(
            "control_mode",
            f"weights the layers of a UNet, which {model.name} does not have",
            cure="leave it out and change {control_scale}",
            value=modes,
        )
    images = {
        name: read_typed(net, value, count) if net.slots else read_shown(value, count)
        for (name, net), value in zip(nets, by_network, strict=True)
        if value is not None
    }
    marks = {name: [mark_of(shown) for shown in shown_images] for name, shown_images in images.items()}
    return ControlImages(images, marks, tuple(i for i, (name, _) in enumerate(nets) if name in images))


def strengths(
    model: Model, control: ControlImages, options: Options, rows: int, names: Sequence[str] = ()
) -> HostArray:
    """Return the strength of each layer of each network in each row [R, N, 2, L] float32.

    The axis of 2 is for the negative prompt and the others, as in ``canvax.engine.batch.Run``. A network is 0 outside
    of its window. ``names`` are the networks of the programs, by default those with an image. The mode decides the
    weights of layers: ``guess`` from 0.1 to 1 (Zhang et al. 2023, section 3.4, and PyTorch diffusers), the others as
    A1111's extension has them.
    """
    nets, names = dict(model.networks.controls), names or control.names
    out = np.zeros((rows, len(names), 2, max(nets[name].layers for name in names)), np.float32)
    for name, place in zip([name for name in nets if name in control.names], control.places, strict=True):
        n, net = names.index(name), nets[name]
        scale, start, end, mode = (_of_net(getattr(options, name), place) for name in OPTIONS)
        inside = np.array([not (i / rows < start or (i + 1) / rows > end) for i in range(rows)])
        weights = scale * layer_weights(net, mode)
        out[inside, n, 1, : net.layers] = weights
        if mode not in ("guess", "control") and not net.pools:
            out[inside, n, 0, : net.layers] = weights
    return out


def layer_weights(net: Control, mode: str) -> HostArray:
    """Return the relative strength of the layers of a network [L] float64, from the largest to the middle."""
    from canvax.models.t2i_adapter import T2IAdapter  # only calls with control images need it

    count = net.layers
    if mode in ("prompt", "control"):
        if isinstance(net, T2IAdapter):
            return np.array([*_SOFT_ADAPTER, *[1.0] * count][:count])
        return np.array([_SOFT ** max(0, 12 - i) for i in range(count)])
    if mode == "guess" and not net.pools and not isinstance(net, T2IAdapter):
        return np.logspace(-1, 0, count)
    return np.ones(count)


def _of_net(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, tuple) else value


def encode_controls(
    programs: Programs,
    ready: Ready,
    params: Params,
    control: ControlImages,
    size: tuple[int, int],
    count: int,
) -> dict[str, tuple[Any, ...]]:
    """Encode the control images of each image of the call for each network; each control image is encoded once."""
    split, batch = over_batch(programs.mesh), padded_batch(count, programs.mesh)
    nets = dict(programs.networks.controls)
    inputs: dict[str, tuple[Any, ...]] = {}
    for name, images in control.images.items():

        def read(image: Image.Image, name: str = name) -> tuple[HostArray, ...]:
            pixels = as_floats(resized(image, *size))
            return programs.features(ready[name], params, pixels[None])[0]

        kept: list[tuple[HostArray, ...]] = []
        for shown in images:
            parts = [read(hint.image) for hint in shown]
            net = nets[name]
            kept.append(net.together(parts, [hint.slot for hint in shown], [hint.weight for hint in shown]))
        whole = [np.stack([*parts, *[parts[-1]] * (batch - len(parts))]) for parts in zip(*kept, strict=True)]
        inputs[name] = tuple(put(part, split) for part in whole)
    return inputs


MOST_WEIGHT = 10


@dataclass(frozen=True, eq=False)
class Shown:
    """A control image as a network reads it.

    Attributes:
        image: RGB, of any size.
        label: its type as the caller wrote it, ``"depth"`` or ``"depth:0.5"``; empty for a network without types.
        slot: number of its type.
        weight: its strength relative to the others.
    """

    image: Image.Image
    label: str = ""
    slot: int = 0
    weight: float = 1.0


def read_shown(value: Any, count: int) -> list[tuple[Shown, ...]]:
    """Read the control images of a network without types: one for all of ``count``, or one for each.

    Raises:
        InputError: the value is not such images.
    """
    if isinstance(value, Mapping):
        raise InputError(
            "control",
            "names types of images, which a ControlNet-Union alone takes",
            cure="give the image itself",
            value=value,
        )
    return [(Shown(image),) for image in read_images("control", value, count)]


def read_typed(net: Control, value: Any, count: int) -> list[tuple[Shown, ...]]:
    """Read the control images of a ControlNet-Union by type: one entry for all of ``count`` images, or one for each.

    Args:
        net: the network.
        value: a dict of a type to an image, or to a list of one for each image of the call; or a list of these dicts. A
            type is a name or a number, and may have a weight after it, "depth:0.5".
        count: number of images of the call.

    Raises:
        InputError: a type is unknown or appears twice, or an image cannot be read.
    """
    if isinstance(value, Mapping):
        typed = {str(key): (_type_of(net, key), read_images("control", shown, count)) for key, shown in value.items()}
        if not typed:
            raise InputError("control", "names no type of control image", cure=_known(net), value=value)
        _check_once(typed)
        if len(typed) > 1 and not net.mixes:
            cure = "load the network once for each type, which shares its weights: controlnet=[name, name]"
            raise InputError("control", f"has {len(typed)} types for a network that reads one", cure=cure)
        several = max(len(images) for _, images in typed.values())
        return [
            tuple(Shown(images[i % len(images)], label, *kind) for label, (kind, images) in typed.items())
            for i in range(several)
        ]
    if isinstance(value, list | tuple) and value and all(isinstance(typed, Mapping) for typed in value):
        if len(value) not in (1, count):
            raise miscounted("control", len(value), count)
        return [shown for typed in value for shown in read_typed(net, typed, 1)]
    raise InputError(
        "control",
        "is not a table, as a ControlNet-Union needs: the type and the image, {'depth': image}",
        cure=_known(net),
    )


def mark_of(shown: Sequence[Shown]) -> Any:
    """Return the SHA-256 of an image, or a dict of these by type."""
    marks = {hint.label: fingerprint(hint.image) for hint in shown}
    return marks.get("", marks)


def _type_of(net: Control, key: Any) -> tuple[int, float]:
    """Return the number of a type and its weight."""
    if is_number(key) and key == int(key):
        name, weight = str(int(key)), ""
    else:
        name, colon, weight = str(key).partition(":")
        if not isinstance(key, str) or (colon and not weight):
            raise InputError("control", f"has {key!r}, which is no type of control image", cure=_known(net))
    name = name.strip().lower()
    slot = net.types.get(name, int(name) if name.isdecimal() else net.slots)
    if slot >= net.slots:
        close = "" if name.isdecimal() else f"{nearest(name, list(net.types))}; "
        raise InputError("control", f"has {key!r}, which is no type of this network", cure=f"{close}{_known(net)}")
    try:
        strength = float(weight or 1)
    except ValueError:
        strength = 0.0
    if not 0 < abs(strength) <= MOST_WEIGHT:
        raise InputError(
            "control", f"has {key!r}, where {weight!r} is no weight", cure=f"write {name}:0.5, or leave the type out"
        )
    return slot, strength


def _check_once(typed: Mapping[str, tuple[Any, ...]]) -> None:
    first: dict[int, str] = {}
    for label, ((slot, _), _) in typed.items():
        if slot in first:
            raise InputError(
                "control", f"has {first[slot]!r} and {label!r}, which are one type of the network", cure="give one"
            )
        first[slot] = label


def _known(net: Control) -> str:
    """Return the types of a network for errors."""
    slots = [" = ".join(name for name, at in net.types.items() if at == slot) or "-" for slot in range(net.slots)]
    return "its types are " + ", ".join(f"{slot} {names}" for slot, names in enumerate(slots))
