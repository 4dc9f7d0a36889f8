"""The control images of a call, checked; and how strong each network is in each row of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from canvax.call import CONTROL, OptionRecord
from canvax.compile.kinds import Ready
from canvax.compile.programs import Programs
from canvax.errors import NO_VALUE, InputError
from canvax.families.base import Model
from canvax.images.masks import as_floats, resized
from canvax.models.controlled import Control
from canvax.models.controlnet_union import UnionNet
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.control_types import Shown, mark_of, read_shown, read_typed
from canvax.pipelines.options import Options
from canvax.settings import grouped
from canvax.types import HostArray

OPTIONS = tuple(grouped(OptionRecord, CONTROL))
_SOFT, _SOFT_ADAPTER = 0.825, (0.25, 0.62, 0.825, 1.0)


@dataclass(frozen=True, eq=False)
class ControlImages:
    """The control images of a call.

    Attributes:
        images: for each network that reads some, by the name of its component: what it is shown for all images of the
            call, or for each.
        fingerprints: likewise, of the images as they were given: a text, or of those with types a dict.
        places: which of the pipeline's networks these are.
    """

    images: Mapping[str, list[tuple[Shown, ...]]]
    fingerprints: Mapping[str, list[Any]]
    places: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Components of the networks."""
        return tuple(self.images)

    def size(self, asked: tuple[Any, Any], factor: int) -> tuple[Any, Any]:
        """Height and width that were asked for or, for None, those of the control images.

        Raises:
            InputError: they have several sizes, or one that cannot be generated.
        """
        return size_of(
            (one.image for images in self.images.values() for shown in images for one in shown), asked, factor
        )


def size_of(images: Iterable[Image.Image], asked: tuple[Any, Any], factor: int) -> tuple[Any, Any]:
    """As ``ControlImages.size``."""
    if None not in asked:
        return asked
    sizes = {one.size for one in images}
    if len(sizes) > 1:
        raise InputError(
            "control", NO_VALUE, "has images of several sizes", "give {height} and {width}, which they are resized to"
        )
    ((width, height),) = sizes
    for name, side, given in (("height", height, asked[0]), ("width", width, asked[1])):
        if given is None and side % factor:
            below = side // factor * factor
            raise InputError(
                "control",
                NO_VALUE,
                f"has a {name} of {side} pixels, which is not a multiple of {factor}",
                f"give {{{name}={below or factor}}} or {{{name}={below + factor}}}, which it is resized to",
            )
    return asked[0] or height, asked[1] or width


def check_control(model: Model, control: Any, count: int, options: Options) -> ControlImages | None:
    """The control images of a call; None if there are none.

    Args:
        model: with its networks.
        control: as in a call.
        count: images of the call.
        options: of the call.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    nets = model.networks.controls
    if control is None or (isinstance(control, list | tuple) and control and all(one is None for one in control)):
        for name in sorted(options.changed().keys() & set(OPTIONS)):
            raise InputError(name, NO_VALUE, "needs a control image", "give {control} as well")
        return None
    if not nets:
        raise InputError(
            "control",
            NO_VALUE,
            f"does not go with {model.name}, which has no ControlNet: canvax.load({model.name!r}, controlnet=...) "
            "gives it one (docs/controlnet.md)",
        )
    if options.reuse > 1:
        raise InputError("control", NO_VALUE, "cannot be combined with reuse", "leave one out")
    if options.padding_mask_crop is not None:
        raise InputError(
            "control",
            NO_VALUE,
            "cannot be combined with padding_mask_crop: the control image is of the whole image",
            "leave one out",
        )
    given: Sequence[Any] = [control] if len(nets) == 1 else control
    if len(nets) > 1 and (not isinstance(control, list | tuple) or len(control) != len(nets)):
        told = len(control) if isinstance(control, list | tuple) else "one"
        raise InputError(
            "control", NO_VALUE, f"has {told} for {len(nets)} networks", "give a list with an image for each, or None"
        )
    for name in OPTIONS:
        if isinstance(value := getattr(options, name), tuple) and len(value) != len(nets):
            raise InputError(
                name, NO_VALUE, f"has {len(value)} entries for {len(nets)} networks", "give one, or one for each"
            )
    images = {
        name: read_typed(net, value, count) if isinstance(net, UnionNet) else read_shown(value, count)
        for (name, net), value in zip(nets, given, strict=True)
        if value is not None
    }
    marks = {name: [mark_of(shown) for shown in found] for name, found in images.items()}
    return ControlImages(images, marks, tuple(i for i, (name, _) in enumerate(nets) if name in images))


def strengths(model: Model, control: ControlImages, options: Options, rows: int) -> HostArray:
    """How strong each network's layers are in each row, for the negative prompt and for the others.

    [R, N, 2, L] float32, as ``canvax.engine.batch.Run`` has them. Outside of its window a network is 0. Layers are
    weighed as the modes say: ``guess`` from 0.1 to 1 (Zhang et al. 2023, section 3.4, and PyTorch diffusers), the
    others as A1111's extension weighs them.
    """
    nets = [net for name, net in model.networks.controls if name in control.names]
    out = np.zeros((rows, len(nets), 2, max(net.layers for net in nets)), np.float32)
    for n, (place, net) in enumerate(zip(control.places, nets, strict=True)):
        scale, start, end, mode = (_of_net(getattr(options, name), place) for name in OPTIONS)
        inside = np.array([not (i / rows < start or (i + 1) / rows > end) for i in range(rows)])
        weights = scale * layer_weights(net, mode)
        out[inside, n, 1, : net.layers] = weights
        if mode not in ("guess", "control") and not net.pools:
            out[inside, n, 0, : net.layers] = weights
    return out


def layer_weights(net: Control, mode: str) -> HostArray:
    """How strong the layers of a network are beside each other [L] float64, from the largest to the middle."""
    from canvax.models.t2i_adapter import T2IAdapter  # where there are control images alone

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
    """What each network keeps of its image of each image of the call, on the devices; each image is read once."""
    split, alone = over_batch(programs.mesh), padded_batch(1, programs.mesh)
    batch = padded_batch(count, programs.mesh)
    nets = dict(programs.networks.controls)
    found: dict[str, tuple[Any, ...]] = {}
    for name, images in control.images.items():

        def read(image: Image.Image, name: str = name) -> tuple[HostArray, ...]:
            pixels = as_floats(resized(image, *size))
            # Every device reads the same, so that each of several processes has it.
            outputs = ready[name](params, put(np.broadcast_to(pixels, (alone, *pixels.shape)), split))
            return tuple(np.asarray(output.addressable_shards[0].data)[0] for output in outputs)

        kept: list[tuple[HostArray, ...]] = []
        for shown in images:
            parts = [read(one.image) for one in shown]
            net = nets[name]
            if isinstance(net, UnionNet):
                kept.append(net.together(parts, [one.slot for one in shown], [one.weight for one in shown]))
            else:
                kept.append(parts[0])
        whole = [np.stack([*parts, *[parts[-1]] * (batch - len(parts))]) for parts in zip(*kept, strict=True)]
        found[name] = tuple(put(part, split) for part in whole)
    return found
