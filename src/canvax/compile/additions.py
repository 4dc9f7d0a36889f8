"""Additions of a call to its programs: each has its programs and conditions, and may change the denoiser."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from canvax.compile.kinds import Addition, ProgramSpec, Site, reference_encoder
from canvax.models.controlled import Controlled, encode_control
from canvax.models.decode import encode_images
from canvax.models.denoiser import REFERENCES, Denoiser, Reusing, Shapes
from canvax.models.networks import Networks
from canvax.models.text import IMAGE_ENCODER, IMAGE_PROMPTS, TextEncoders


@dataclass(frozen=True)
class DeepFeatures(Addition):
    """Deep features that some rows reuse.

    Attributes:
        layers: number of layers, as in ``canvax.models.denoiser.Reusing``.
    """

    layers: int

    def around(self, denoiser: Denoiser, networks: Networks) -> Denoiser:
        reusable: Any = denoiser
        return Reusing(reusable, self.layers)


@dataclass(frozen=True)
class Keeps(Addition):
    """Parts of images that are kept (``canvax.denoise.Known``)."""


@dataclass(frozen=True)
class ReadsImage(Addition):
    """Images to begin from, of the size to generate.

    Attributes:
        way: "whole" or "tiled".
    """

    way: str

    @property
    def names(self) -> tuple[str, ...]:
        return ("image encoder",)

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        read = partial(encode_images, cfg=site.networks.vae, **({"tiled": True} if self.way == "tiled" else {}))
        shape = *site.size.values(), site.networks.image_channels
        return {"image encoder": site.reader("image encoder", read, "vae", *shape, **site.size)}


@dataclass(frozen=True)
class ReadsReferences(Addition):
    """Reference images.

    Attributes:
        sizes: height and width of each in pixels.
    """

    sizes: tuple[tuple[int, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(reference_encoder, self.sizes)))

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        read, channels = partial(encode_images, cfg=site.networks.vae), site.networks.image_channels
        return {
            reference_encoder((height, width)): site.reader(
                "image encoder", read, "vae", height, width, channels, height=height, width=width
            )
            for height, width in self.sizes
        }

    def read_by(self, text: TextEncoders) -> TextEncoders:
        return text.seeing(self.sizes)

    def conditions(self, site: Site) -> Shapes:
        return {REFERENCES: site.networks.references(site.latents[0], self.sizes)}


@dataclass(frozen=True)
class ReadsControls(Addition):
    """Control images.

    Attributes:
        networks: the networks of ``Networks.controls`` with an image.
    """

    networks: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.networks

    @property
    def components(self) -> tuple[str, ...]:
        return self.networks

    def around(self, denoiser: Denoiser, networks: Networks) -> Denoiser:
        extensible: Any = denoiser
        return Controlled(extensible, tuple((name, net) for name, net in networks.controls if name in self.networks))

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        return {
            name: site.reader(
                "control encoder",
                partial(encode_control, net=net),
                net.encoder or name,
                *site.size.values(),
                3,
                **site.size,
            )
            for name, net in site.networks.controls
            if name in self.networks
        }


class PromptKind(NamedTuple):
    """Facts about one adapter's image prompts that decide their programs.

    Attributes:
        component: name of the adapter.
        images: image prompts of each image of the batch.
        masked: True if an image prompt has a mask.
        reads: shape of the adapter's input for an image.
    """

    component: str
    images: int
    masked: bool
    reads: tuple[int, ...]


@dataclass(frozen=True)
class ReadsImagePrompts(Addition):
    """Image prompts.

    Attributes:
        kinds: facts about each adapter that has image prompts.
        sees: True if CLIP's image encoder is needed.
    """

    kinds: tuple[PromptKind, ...]
    sees: bool

    @property
    def names(self) -> tuple[str, ...]:
        return *(kind.component for kind in self.kinds), *[IMAGE_ENCODER] * self.sees

    def programs(self, site: Site) -> dict[str, ProgramSpec]:
        from canvax.models.ip_adapter import encode_image_prompt, read_image_prompt  # which most calls never need

        name, nets, programs = "image prompt encoder", dict(site.networks.ip_adapters), {}
        for kind in self.kinds:
            read = partial(read_image_prompt, net=nets[kind.component])
            programs[kind.component] = site.reader(name, read, kind.component, *kind.reads)
        if self.sees:
            net = site.networks.image_encoder
            assert net is not None
            see, side = partial(encode_image_prompt, net=net), net.cfg.image_size
            programs[IMAGE_ENCODER] = site.reader(name, see, IMAGE_ENCODER, side, side, 3)
        return programs

    def conditions(self, site: Site) -> Shapes:
        return {IMAGE_PROMPTS: site.networks.image_prompts(self.kinds, site.loop, site.dtypes.__getitem__)}
