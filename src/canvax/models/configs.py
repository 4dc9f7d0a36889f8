"""Configs of the networks, read from a checkpoint's own ``config.json``, and presets as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from canvax.errors import CheckpointError


@dataclass(frozen=True)
class Config:
    """Base of the network configs: reads ``config.json`` strictly.

    A field that canvax computes with is a dataclass field. A field that only has one supported meaning is in
    ``FIXED`` with the values that mean it. A field that changes nothing at inference is in ``IGNORED``. Anything else
    is refused unless it is off (null or false), so that no checkpoint is silently drawn wrong; ``STRICT = False``
    ignores it instead.
    """

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    STRICT: ClassVar[bool] = True

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Config from a parsed ``config.json``.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        values, faults = {}, []
        for key, value in config.items():
            if isinstance(value, list):
                value = tuple(value)
            said = any(value) if isinstance(value, tuple) else value not in (None, False)
            if key in known:
                values[key] = value
            elif key in cls.FIXED:
                if value not in cls.FIXED[key]:
                    faults.append(f"{key} = {value!r} (supported: {', '.join(map(repr, cls.FIXED[key]))})")
            elif cls.STRICT and not key.startswith("_") and key not in cls.IGNORED and said:
                faults.append(f"{key} = {value!r} (unknown field)")
        if faults:
            raise CheckpointError(f"{cls.__name__}: config.json asks for what is not supported: " + "; ".join(faults))
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{cls.__name__}: config.json is incomplete or malformed: {error}") from error


def _per_level(value: Any, levels: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,) * levels


@dataclass(frozen=True)
class UNetConfig(Config):
    """``UNet2DConditionModel``: names and defaults are those of the diffusers config."""

    sample_size: int | None = None
    in_channels: int = 4
    out_channels: int = 4
    down_block_types: tuple[str, ...] = (
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    )
    up_block_types: tuple[str, ...] = (
        "UpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
    )
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    # The number of heads, in spite of its name: released checkpoints depend on the old mistake.
    attention_head_dim: int | tuple[int, ...] = 8
    num_attention_heads: int | tuple[int, ...] | None = None
    cross_attention_dim: int = 1280
    transformer_layers_per_block: int | tuple[int, ...] = 1
    use_linear_projection: bool = False
    upcast_attention: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: float = 0
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    # SDXL: pooled text and numbers about the picture join the timestep. The three go together.
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("silu", "swish"),
        "attention_type": ("default",),
        "conv_in_kernel": (3,),
        "conv_out_kernel": (3,),
        "downsample_padding": (1,),
        "mid_block_scale_factor": (1, 1.0),
        "mid_block_type": ("UNetMidBlock2DCrossAttn",),
        "resnet_out_scale_factor": (1, 1.0),
        "resnet_time_scale_shift": ("default",),
        "time_embedding_type": ("positional",),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        # The last two are of the old Flax classes, and decide nothing here.
        {"dropout", "addition_embed_type_num_heads", "split_head_dim", "use_memory_efficient_attention"}
    )

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        checks = {
            "down_block_types": len(self.down_block_types),
            "up_block_types": len(self.up_block_types),
            "layers_per_block": len(self.layers),
            "attention_head_dim": len(self.heads),
            "transformer_layers_per_block": len(self.depths),
        }
        faults = [f"{name} has {got} entries" for name, got in checks.items() if got != levels]
        known = ("CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
        faults += [f"block type {t!r} unknown" for t in self.down_block_types + self.up_block_types if t not in known]
        for channels, heads in zip(self.block_out_channels, self.heads, strict=False):
            if channels % self.norm_num_groups or channels % heads:
                faults.append(f"{channels} channels cannot be split into {self.norm_num_groups} groups, {heads} heads")
        faults += self._addition_faults()
        if faults:
            raise CheckpointError(f"UNetConfig with {levels} levels: " + "; ".join(faults))

    def _addition_faults(self) -> list[str]:
        if self.addition_embed_type not in (None, "text_time"):
            return [f"addition_embed_type {self.addition_embed_type!r} unknown (supported: 'text_time')"]
        wanted = self.addition_embed_type is not None
        return [
            f"{name} is {'missing' if wanted else 'set'} with addition_embed_type {self.addition_embed_type!r}"
            for name in ("addition_time_embed_dim", "projection_class_embeddings_input_dim")
            if (getattr(self, name) is not None) != wanted
        ]

    def time_ids(self, pooled: int) -> int:
        """How many numbers about the picture it is told, beside pooled text of width ``pooled``: 6, 5 in a refiner.

        0 if it is told none.

        Raises:
            CheckpointError: the widths leave no whole number of them.
        """
        total, width = self.projection_class_embeddings_input_dim, self.addition_time_embed_dim
        if total is None or width is None:
            return 0
        count, rest = divmod(total - pooled, width)
        if rest or count < 1:
            raise CheckpointError(
                f"UNetConfig: projection_class_embeddings_input_dim {total} is not pooled text of width {pooled} and "
                f"numbers of width {width}"
            )
        return count

    @property
    def layers(self) -> tuple[int, ...]:
        """Resnets of each level on the way down."""
        return _per_level(self.layers_per_block, len(self.block_out_channels))

    @property
    def heads(self) -> tuple[int, ...]:
        """Attention heads of each level."""
        return _per_level(self.num_attention_heads or self.attention_head_dim, len(self.block_out_channels))

    @property
    def depths(self) -> tuple[int, ...]:
        """Transformer blocks in each attention of each level."""
        return _per_level(self.transformer_layers_per_block, len(self.block_out_channels))


@dataclass(frozen=True)
class VaeConfig(Config):
    """``AutoencoderKL``: names and defaults are those of the diffusers config."""

    in_channels: int = 3
    out_channels: int = 3
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
    # It overflows in float16, and is computed in float32 where float16 was asked for.
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("silu",),
        "latents_mean": (None,),
        "latents_std": (None,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"sample_size"})

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        faults = []
        if self.down_block_types != ("DownEncoderBlock2D",) * levels:
            faults.append(f"down_block_types {self.down_block_types}")
        if self.up_block_types != ("UpDecoderBlock2D",) * levels:
            faults.append(f"up_block_types {self.up_block_types}")
        faults += [f"{c} channels in {self.norm_num_groups} groups" for c in self.block_out_channels
                   if c % self.norm_num_groups]  # fmt: skip
        if faults:
            raise CheckpointError(f"VaeConfig with {levels} levels does not support " + "; ".join(faults))

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis: 8 for Stable Diffusion."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclass(frozen=True)
class TinyConfig(Config):
    """``AutoencoderTiny``: names and defaults are those of the diffusers config."""

    in_channels: int = 3
    out_channels: int = 3
    encoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    decoder_block_out_channels: tuple[int, ...] = (64, 64, 64, 64)
    latent_channels: int = 4
    num_encoder_blocks: tuple[int, ...] = (1, 3, 3, 3)
    num_decoder_blocks: tuple[int, ...] = (3, 3, 3, 1)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("relu",),
        "upsample_fn": ("nearest",),
        "upsampling_scaling_factor": (2,),
        "scaling_factor": (1.0, 1),
        "shift_factor": (0.0, 0, None),
        # Of the encoder, for callers that store its latents as pictures.
        "latent_magnitude": (3, 3.0),
        "latent_shift": (0.5,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"force_upcast", "block_out_channels"})

    def __post_init__(self) -> None:
        both = (self.encoder_block_out_channels, self.num_encoder_blocks), (
            self.decoder_block_out_channels, self.num_decoder_blocks
        )  # fmt: skip
        if any(len(widths) != len(blocks) or len(set(widths)) != 1 for widths, blocks in both):
            raise CheckpointError(f"TinyConfig needs as many equal widths as numbers of blocks, not {both}")

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis: 8 for TAESD."""
        return 2 ** (len(self.num_decoder_blocks) - 1)


@dataclass(frozen=True)
class ClipTextConfig(Config):
    """``CLIPTextModel``: names and defaults are those of the transformers config."""

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    # Only read by an encoder with a projection, the second of SDXL.
    projection_dim: int = 512
    eos_token_id: int = 49407

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"model_type": ("clip_text_model",)}
    # What else a transformers config holds concerns training and generation.
    STRICT = False

    def __post_init__(self) -> None:
        if self.hidden_act not in ("gelu", "quick_gelu"):
            raise CheckpointError(f"ClipTextConfig: hidden_act {self.hidden_act!r}; supported: 'gelu', 'quick_gelu'")
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(
                f"ClipTextConfig: hidden_size {self.hidden_size} is not divisible by "
                f"num_attention_heads {self.num_attention_heads}"
            )


SD_VAE = VaeConfig(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
)
SD15_UNET = UNetConfig(sample_size=64, cross_attention_dim=768)
SD15_TEXT = ClipTextConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, hidden_act="quick_gelu"
)
SD21_UNET = UNetConfig(
    sample_size=96,
    cross_attention_dim=1024,
    attention_head_dim=(5, 10, 20, 20),
    use_linear_projection=True,
    upcast_attention=True,
)
SD21_TEXT = ClipTextConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu"
)
SDXL_VAE = dataclasses.replace(SD_VAE, scaling_factor=0.13025)
SDXL_UNET = UNetConfig(
    sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(320, 640, 1280),
    attention_head_dim=(5, 10, 20),
    transformer_layers_per_block=(1, 2, 10),
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
SDXL_REFINER_UNET = UNetConfig(
    sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(384, 768, 1536, 1536),
    attention_head_dim=(6, 12, 24, 24),
    transformer_layers_per_block=4,
    cross_attention_dim=1280,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2560,
)
SDXL_TEXT = dataclasses.replace(SD15_TEXT, projection_dim=768, eos_token_id=2)
SDXL_TEXT_2 = ClipTextConfig(
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
    projection_dim=1280,
    eos_token_id=2,
)
