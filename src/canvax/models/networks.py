"""The networks of one model, and the properties that follow from them: parameters, latent shapes, conditions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp

from canvax.call import PredictionType
from canvax.errors import InputError, nearest
from canvax.models.configs import UNetConfig
from canvax.models.controlled import Control
from canvax.models.decode import Autoencoder, autoencoder_of, channels_of
from canvax.models.denoiser import PERTURBED, ROLES, Denoiser, Packing, Perturbed, Shapes
from canvax.models.text import IMAGE_ENCODER, TextEncoders
from canvax.params import Spec, on_host
from canvax.quantize import quantized_specs
from canvax.types import DType

if TYPE_CHECKING:
    from canvax.models.ip_adapter import ImageEncoder, IPAdapter

REFERENCE_BUCKET = 1024
"""The number of reference tokens is padded to a multiple of those of a square of 512 pixels."""


@dataclass(frozen=True)
class Networks:
    """All networks of a model; they determine its compiled programs.

    Attributes:
        denoiser: the network inside the loop.
        vae: the autoencoder, a ``canvax.models.decode.Autoencoder``, or its config.
        text: the text encoders.
        prediction: "flow_prediction", "epsilon", "v_prediction" or "sample": schedulers of another prediction type are
            refused. None: that of the scheduler.
        controls: networks that read control images, by component.
        ip_adapters: networks that read image prompts, by component.
        image_encoder: the encoder of image prompts; None without IP-Adapters.

    Raises:
        InputError: ``prediction`` or ``text`` is something else, or two networks have the same component.
    """

    denoiser: Denoiser
    vae: Any
    text: TextEncoders
    prediction: str | None = None
    controls: tuple[tuple[str, Control], ...] = ()
    ip_adapters: tuple[tuple[str, IPAdapter], ...] = ()
    image_encoder: ImageEncoder | None = None

    def __post_init__(self) -> None:
        if self.prediction not in (None, *(known := get_args(PredictionType))):
            cure = nearest(str(self.prediction), known)
            raise InputError("prediction", "is not known", cure=cure, value=self.prediction)
        if not isinstance(self.text, TextEncoders) or not isinstance(self.text.encoders, tuple | list):
            raise InputError("text", "has no tuple of encoders", cure="give TextEncoders((encoder,))", value=self.text)
        names = [*self.text.names, self.denoiser.component, "vae", *dict(self.controls), *dict(self.ip_adapters)]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            problem = f"of two networks is {twice[0]!r}, which is the key of parameters"
            raise InputError("component", problem, cure="give each another")

    def specs(self, quantize: str | None = None, *, streamed: bool = False) -> dict[str, Spec]:
        """Return the declared parameters of each component, with large weights quantised to ``quantize``.

        With ``streamed`` the large weights, except those of the autoencoder, stay in the host's memory.
        """
        specs = {**self.text.specs, self.denoiser.component: self.denoiser.spec, "vae": self.autoencoder.spec}
        specs |= {name: net.spec for name, net in (*self.controls, *self.ip_adapters)}
        specs |= {IMAGE_ENCODER: self.image_encoder.spec} if self.image_encoder else {}
        specs = quantized_specs(specs, quantize)
        return {name: on_host(spec) if streamed and name != "vae" else spec for name, spec in specs.items()}

    @property
    def adapted(self) -> dict[str, Spec]:
        """The declared parameters of the components that adapters can change: the denoiser, then the text encoders."""
        return {self.denoiser.component: self.denoiser.spec, **self.text.specs}

    def denoiser_of(self, roles: Collection[int]) -> Denoiser:
        """Return the denoiser for samples of these roles.

        Raises:
            InputError: it does not know one of them.
        """
        denoiser: Any = self.denoiser
        denoiser = Perturbed(denoiser) if PERTURBED in {*roles} - {*denoiser.facts.roles} else denoiser
        self.check_roles(roles)
        return denoiser

    @property
    def roles(self) -> tuple[int, ...]:
        """The roles of samples that the denoiser can be evaluated for."""
        facts = self.denoiser.facts
        return (*facts.roles, PERTURBED) if "perturbed" in facts.offers else facts.roles

    def check_roles(self, roles: Collection[int]) -> None:
        """Refuse roles that the denoiser does not know.

        Raises:
            InputError: naming the first of them.
        """
        if unknown := [role for role in roles if role not in self.roles]:
            names = [ROLES[role] if role < len(ROLES) else str(role) for role in (unknown[0], *self.roles)]
            problem = f"asks for samples of the role {names[0]}, and the denoiser knows {', '.join(names[1:])}"
            raise InputError("guidance_method", problem, cure="use another rule")

    @property
    def components(self) -> set[str]:
        """Names of all components that have parameters."""
        names = {*self.text.names, self.denoiser.component, "vae", *dict(self.controls), *dict(self.ip_adapters)}
        return names | ({IMAGE_ENCODER} if self.image_encoder else set())

    def image_prompts(
        self, kinds: Sequence[Any], latents: Sequence[int], dtype: Callable[[str], DType]
    ) -> dict[str, Any]:
        """Return the shapes of each adapter's ``canvax.models.ip_adapter.ImageKV`` for latents [B, h, w, C].

        ``kinds`` are ``canvax.compile.additions.PromptKind``.
        """
        from canvax.models.ip_adapter import masked_levels

        shapes_of: dict[str, Any] = {}
        for kind in kinds:
            net, each = dict(self.ip_adapters)[kind.component], (latents[0], kind.images)
            tokens = kind.reads[0] if net.kind == "full" else net.tokens
            shapes = [(*each, tokens, layer.heads, layer.channels // layer.heads) for layer in net.attentions]
            shapes_of[kind.component] = entry = {
                "kv": tuple((jax.ShapeDtypeStruct(shape, dtype(kind.component)),) * 2 for shape in shapes),
                "scale": jax.ShapeDtypeStruct((*each, len(shapes)), jnp.float32),
            }
            if kind.masked:
                levels = masked_levels(net.unet, latents)
                entry["masks"] = tuple(
                    jax.ShapeDtypeStruct((latents[0], h * w, kind.images), jnp.float32) for h, w in levels
                )
        return shapes_of

    def references(self, batch: int, sizes: Sequence[tuple[int, int]]) -> Shapes:
        """Return the shapes of the condition ``canvax.models.denoiser.REFERENCES`` for images of these sizes."""
        room, channels = self.room(sizes), self.vae.latent_channels * self.packing.step**2
        return {
            "tokens": jax.ShapeDtypeStruct((batch, room, channels), jnp.float32),
            "ids": jax.ShapeDtypeStruct((batch, room, 3), jnp.int32),
            "count": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }

    def conditions(self, latents: Sequence[int]) -> Shapes:
        """Return the shapes of the conditions for latents in the loop [B, h, w, C], as if all parts were float32."""
        text = self.text.conditions(latents[0], [jnp.float32] * len(self.text.encoders))
        return {**text, **self.denoiser.inputs(latents, text, lambda _: jnp.dtype(jnp.float32)).conditions}

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return [B, h, w, C] for images of ``height`` x ``width`` pixels."""
        return batch, height // self.vae.factor, width // self.vae.factor, self.vae.latent_channels

    @property
    def image_channels(self) -> int:
        """Channels of the images: 3, or 4 with alpha."""
        return channels_of(self.autoencoder)

    @property
    def image_mode(self) -> str:
        """PIL's mode of the images: RGB, or RGBA if the autoencoder has alpha."""
        return "RGBA" if self.image_channels == 4 else "RGB"

    @property
    def packing(self) -> Packing:
        """Layout of latents in the loop."""
        return self.denoiser.facts.packing

    @property
    def size_step(self) -> int:
        """Height and width in pixels must be multiples of this."""
        return self.vae.factor * self.packing.step

    @property
    def autoencoder(self) -> Autoencoder:
        """The autoencoder."""
        return autoencoder_of(self.vae)

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width of the images it was trained on, in pixels."""
        tall, wide = self.denoiser.facts.native_size
        return tall * self.vae.factor, wide * self.vae.factor

    @property
    def embeds_guidance(self) -> bool:
        """True if the guidance scale is an input of the denoiser, which then needs no negative prompt."""
        return self.denoiser.facts.embeds_guidance

    @property
    def unguided(self) -> bool:
        """True if no guidance scale needs the negative prompt."""
        return self.denoiser.facts.embeds_guidance or self.denoiser.facts.distilled

    def tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the total number of tokens of images of these heights and widths in pixels."""
        return sum((height // self.size_step) * (width // self.size_step) for height, width in sizes)

    def room(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the number of reference tokens for images of these sizes, padded so that sizes share a program."""
        return -(-self.tokens(sizes) // REFERENCE_BUCKET) * REFERENCE_BUCKET

    @property
    def inpaints(self) -> bool:
        """True if the denoiser also reads a mask and the masked image."""
        return self.denoiser.facts.inpaints

    @property
    def size_numbers(self) -> int:
        """Number of size conditions that the denoiser reads, SDXL's ``time_ids``; 0 for none."""
        return self.unet.time_ids(self.text.pooled_width) if self.unet else 0

    @property
    def unet(self) -> UNetConfig | None:
        """Config of the UNet; None for another kind of denoiser."""
        return self.config if isinstance(self.config, UNetConfig) else None

    @property
    def config(self) -> Any:
        """Config of the denoiser; None for a denoiser without a config."""
        return getattr(self.denoiser, "cfg", None)

    @property
    def most_layers(self) -> int:
        """Largest ``layers`` of ``Reusing``; 0 for a denoiser without features to reuse."""
        denoiser: Any = self.denoiser
        return denoiser.most_layers if "recall" in self.denoiser.facts.offers else 0
