"""The networks of one model, and what follows from them together: parameters, latent shapes, what is conditioned on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from canvax.models.beside import Places
from canvax.models.configs import AutoencoderConfig
from canvax.models.controlled import Control, ControlledDenoiser
from canvax.models.decode import autoencoder_spec
from canvax.models.denoiser import UNetDenoiser
from canvax.models.text import IMAGE_ENCODER, TextEncoders
from canvax.params import Spec
from canvax.quantize import quantized_specs

if TYPE_CHECKING:
    from canvax.models.ip_adapter import ImageEncoder, IPAdapter


@dataclass(frozen=True)
class Networks:
    """What decides a model's compiled programs.

    Attributes:
        denoiser: the network inside the loop.
        vae: config of the autoencoder.
        text: configs of the text encoders.
        prediction: what the denoiser was trained to give, "epsilon" or "v_prediction"; a checkpoint's scheduler says it
            for itself.
        controls: networks that read control images, by the name of their component.
        ip_adapters: networks that read image prompts, likewise.
        image_encoder: what makes of an image prompt what they read; None without.
    """

    denoiser: UNetDenoiser
    vae: AutoencoderConfig
    text: TextEncoders
    prediction: str = "epsilon"
    controls: tuple[tuple[str, Control], ...] = ()
    ip_adapters: tuple[tuple[str, IPAdapter], ...] = ()
    image_encoder: ImageEncoder | None = None

    def specs(self, quantize: str | None = None) -> dict[str, Spec]:
        """Declared parameters of each component, large weights quantised to ``quantize``."""
        specs = {**self.text.specs, self.denoiser.component: self.denoiser.spec, "vae": autoencoder_spec(self.vae)}
        specs |= {name: net.spec for name, net in (*self.controls, *self.ip_adapters)}
        specs |= {IMAGE_ENCODER: self.image_encoder.spec} if self.image_encoder else {}
        return quantized_specs(specs, quantize)

    def controlled(self, names: Sequence[str], places: Places | None = None) -> UNetDenoiser | ControlledDenoiser:
        """The denoiser of a call with control images for some of ``controls``; the denoiser itself for none.

        With ``places`` it has adapters beside its weights.
        """
        denoiser = replace(self.denoiser, places=places) if places else self.denoiser
        nets = tuple((name, net) for name, net in self.controls if name in names)
        return ControlledDenoiser(denoiser, nets) if nets else denoiser

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
        """[B, h, w, C] for images of ``height`` x ``width`` pixels."""
        return batch, height // self.vae.factor, width // self.vae.factor, self.vae.latent_channels

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width of the images it was trained on, in pixels."""
        size = self.denoiser.cfg.sample_size or 64
        tall, wide = size if isinstance(size, tuple) else (size, size)
        return tall * self.vae.factor, wide * self.vae.factor

    @property
    def embeds_guidance(self) -> bool:
        """Whether the guidance scale is an input of the denoiser, which needs no negative prompt then."""
        return self.denoiser.cfg.time_cond_proj_dim is not None

    @property
    def inpaints(self) -> bool:
        """Whether the denoiser is an inpainting UNet, which sees a mask and the masked image beside the latents."""
        return self.denoiser.cfg.in_channels == 2 * self.vae.latent_channels + 1

    @property
    def size_numbers(self) -> int:
        """How many numbers about an image the denoiser is conditioned on, SDXL's ``time_ids``; 0 for none."""
        return self.denoiser.cfg.time_ids(self.text.pooled_width)
