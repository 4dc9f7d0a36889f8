"""Configs of the networks, read from a checkpoint's ``config.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from canvax.errors import CheckpointError, HintWarning, warn


@dataclass(frozen=True)
class Range:
    """Limits of a number, or of a list's length."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


ACTIVATIONS = ("gelu", "quick_gelu")
"""CLIP's activations, by the names in configs."""

Count = Annotated[int, Range(1, 2**16)]
Ids = Annotated[int, Range(0, 2**24)]
Size = Annotated[int, Range(1, 2048)]
Layers = Annotated[int, Range(1, 256)]
Depth = Annotated[int, Range(0, 64)]
Depths = Annotated[tuple[Depth, ...], Range(1, 16)]
Levels = Annotated[tuple[Count, ...], Range(1, 16)]
Names = Annotated[tuple[str, ...], Range(1, 16)]
Number = Annotated[float, Range(-1e6, 1e6)]
Factor = Annotated[float, Range(1e-6, 1e6)]
Epsilon = Annotated[float, Range(1e-12, 0.1)]


def fault_of(value: Any, hint: Any) -> str:
    """Return why ``value`` is not of the type ``hint``, e.g. "not 1 to 256"; "" if it is."""
    if get_origin(hint) is Annotated:
        base, limits = get_args(hint)
        if fault := fault_of(value, base):
            return fault
        size = len(value) if isinstance(value, tuple) else value
        return "" if limits.least <= size <= limits.most else f"not {limits}" + " entries" * isinstance(value, tuple)
    if get_origin(hint) in (Union, UnionType):
        faults = [fault_of(value, choice) for choice in get_args(hint)]
        return "" if "" in faults else next((f for f in faults if not f.startswith("not a")), " or ".join(faults))
    if get_origin(hint) is tuple:
        each = get_args(hint)
        if not isinstance(value, tuple) or (each[-1] is not Ellipsis and len(each) != len(value)):
            return "not a list"
        return next(filter(None, (fault_of(v, each[0]) for v in value)), "")
    if hint is float:
        return "" if isinstance(value, int | float) and not isinstance(value, bool) else "not a number"
    if hint is NoneType:
        return "" if value is None else "not a null"
    words = {int: "not a whole number", str: "not a text", bool: "not a true or false"}
    return "" if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)) else words[hint]


_OF_TRAINING = frozenset({"decay", "inv_gamma", "min_decay", "optimization_step", "power", "update_after_step"})
"""Fields that diffusers' ``EMAModel`` leaves in a network's config."""


@dataclass(frozen=True)
class Config:
    """Base of the network configs: reads ``config.json`` strictly.

    Fields that canvax computes with are dataclass fields, whose types say which values are allowed. Fields with a
    single supported meaning are in ``FIXED``, with the values that have it. Fields without an effect on inference are
    in ``IGNORED``. Any other field is refused unless it is off (null, false or empty), so that no checkpoint silently
    gives wrong images; ``STRICT = False`` ignores it instead. Null means a field's default, and off for a flag.
    """

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    STRICT: ClassVar[bool] = True
    CLASS: ClassVar[str] = ""
    """The network's class in ``model_index.json``: diffusers', or one of a family's ``classes``; "" is the first there.

    A config of another class is refused, since it may have fields of the same names.
    """

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed ``config.json``.

        Raises:
            CheckpointError: naming every field whose value is not supported.
        """
        name = config.get("_class_name")
        if cls.CLASS and name is not None and str(name).removeprefix("Flax") != cls.CLASS:
            raise CheckpointError(f"{cls.__name__}: config.json is of the class {_shown(name)}, not {cls.CLASS}")
        known = {field.name for field in dataclasses.fields(cls)}
        types = get_type_hints(cls, include_extras=True)
        values: dict[str, Any] = {}
        faults = []
        for key, value in config.items():
            if isinstance(value, list):
                value = tuple(value)
            is_on = any(value) if isinstance(value, tuple) else bool(value) or type(value) in (int, float)
            shown = _shown(value)
            if key in known:
                if value is None and fault_of(None, types[key]):
                    if types[key] is bool:  # PyTorch reads null as false, whatever the default is
                        values[key] = False
                    continue
                values[key] = value
                if fault := fault_of(value, types[key]):
                    faults.append(f"{key} = {shown} ({fault})")
            elif key in cls.FIXED:
                if value is None and not isinstance(cls.FIXED[key][0], str):
                    continue
                if not any(value == fixed and type(value) is not bool for fixed in cls.FIXED[key]):
                    faults.append(f"{key} = {shown} (supported: {', '.join(map(repr, cls.FIXED[key]))})")
            elif cls.STRICT and not key.startswith("_") and key not in cls.IGNORED | _OF_TRAINING and is_on:
                cure = "" if cls.__module__.startswith("canvax.") else f"; {cls.__name__}.IGNORED has fields to ignore"
                faults.append(f"{key} = {shown} (unknown field{cure})")
        if left := sorted(_OF_TRAINING & config.keys()):
            of_training = f"{', '.join(left)}, which are of training and change no image"
            warn(f"{cls.__name__}: config.json has {of_training}", HintWarning)
        if faults:
            raise CheckpointError(f"{cls.__name__}: config.json asks for what is not supported: " + "; ".join(faults))
        try:
            return cls(**values)
        except TypeError as error:
            raise CheckpointError(f"{cls.__name__}: config.json is incomplete or malformed: {error}") from error


def _shown(value: Any) -> str:
    """Return a value as the file has it, shortened; Python refuses to print numbers of thousands of digits."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _per_level(value: Any, levels: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,) * levels


@dataclass(frozen=True)
class UNetConfig(Config):
    """``UNet2DConditionModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "UNet2DConditionModel"

    sample_size: Size | tuple[Size, Size] | None = None
    in_channels: Count = 4
    out_channels: Count = 4
    down_block_types: Names = (
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    )
    up_block_types: Names = (
        "UpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
        "CrossAttnUpBlock2D",
    )
    block_out_channels: Levels = (320, 640, 1280, 1280)
    layers_per_block: Layers | Depths = 2
    # The number of heads, despite the name: released checkpoints depend on diffusers' old mistake.
    attention_head_dim: Count | Levels = 8
    num_attention_heads: Count | Levels | None = None
    cross_attention_dim: Count = 1280
    transformer_layers_per_block: Depth | Depths = 1
    use_linear_projection: bool = False
    upcast_attention: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: Number = 0
    norm_num_groups: Count = 32
    norm_eps: Epsilon = 1e-5
    # Latent consistency models: the guidance scale is added to the timestep, as an embedding of this width.
    time_cond_proj_dim: Annotated[int, Range(4, 2**16)] | None = None
    # SDXL: pooled text and size conditions are added to the timestep. The three fields belong together.
    addition_embed_type: str | None = None
    addition_time_embed_dim: Count | None = None
    projection_class_embeddings_input_dim: Count | None = None

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("silu", "swish"),
        "attention_type": ("default", None),
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
        # The last two are of the old Flax classes and have no effect here.
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
            if channels % self.norm_num_groups:
                faults.append(f"{channels} channels cannot be split into norm_num_groups={self.norm_num_groups} groups")
            if channels % heads:
                faults.append(f"{channels} channels cannot be split into {heads} heads (attention_head_dim)")
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
        """Return how many size conditions it reads besides pooled text of width ``pooled``: 6, 5 or 0.

        Raises:
            CheckpointError: the widths do not give a whole number.
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
        """Residual blocks of each level on the way down."""
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

    CLASS: ClassVar[str] = "AutoencoderKL"

    in_channels: Count = 3
    out_channels: Count = 3
    down_block_types: Names = ("DownEncoderBlock2D",)
    up_block_types: Names = ("UpDecoderBlock2D",)
    block_out_channels: Levels = (64,)
    layers_per_block: Layers = 1
    latent_channels: Count = 4
    norm_num_groups: Count = 32
    scaling_factor: Factor = 0.18215
    shift_factor: Number | None = None
    # Playground v2.5 normalises each channel of the latents by these, instead of scaling all by one factor.
    latents_mean: tuple[Number, ...] | None = None
    latents_std: tuple[Factor, ...] | None = None
    # It overflows in float16; models loaded in float16 compute it in float32.
    force_upcast: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("silu",),
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
        for name in ("latents_mean", "latents_std"):
            if (values := getattr(self, name)) is not None and len(values) != self.latent_channels:
                faults.append(f"{name} of {len(values)} channels with latent_channels {self.latent_channels}")
        if faults:
            raise CheckpointError(f"VaeConfig with {levels} levels does not support " + "; ".join(faults))

    @property
    def scale(self) -> float | np.ndarray:
        """Factor of the latents before decoding: one number, or one per channel."""
        return (1.0 if self.latents_std is None else np.asarray(self.latents_std, np.float32)) / self.scaling_factor

    @property
    def shift(self) -> float | np.ndarray:
        """Offset of the latents after scaling, before decoding."""
        mean = 0.0 if self.latents_mean is None else np.asarray(self.latents_mean, np.float32)
        return mean + (self.shift_factor or 0.0)

    @property
    def factor(self) -> int:
        """Pixels per latent along an axis: 8 for Stable Diffusion."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclass(frozen=True)
class TinyConfig(Config):
    """``AutoencoderTiny``: names and defaults are those of the diffusers config."""

    in_channels: Count = 3
    out_channels: Count = 3
    encoder_block_out_channels: Levels = (64, 64, 64, 64)
    decoder_block_out_channels: Levels = (64, 64, 64, 64)
    latent_channels: Count = 4
    num_encoder_blocks: Depths = (1, 3, 3, 3)
    num_decoder_blocks: Depths = (3, 3, 3, 1)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "act_fn": ("relu",),
        "upsample_fn": ("nearest",),
        "upsampling_scaling_factor": (2,),
        "scaling_factor": (1.0, 1),
        "shift_factor": (0.0, 0, None),
        # Used by callers that store the encoder's latents as images.
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

    @property
    def scale(self) -> float:
        """Always 1: its latents are those that the UNet sees."""
        return 1.0

    @property
    def shift(self) -> float:
        """Always 0."""
        return 0.0


AutoencoderConfig = VaeConfig | TinyConfig
"""Config of an autoencoder of latent diffusion."""


@dataclass(frozen=True)
class ClipTextConfig(Config):
    """``CLIPTextModel``: names and defaults are those of the transformers config."""

    vocab_size: Ids = 49408
    hidden_size: Count = 512
    intermediate_size: Count = 2048
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 8
    max_position_embeddings: Count = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    # Only used by an encoder with a projection, the second of SDXL.
    projection_dim: Count = 512
    eos_token_id: Ids = 49407

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"model_type": ("clip_text_model",)}
    # Other fields of a transformers config concern training and generation.
    STRICT = False

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise CheckpointError(f"ClipTextConfig: hidden_act {self.hidden_act!r}; supported: 'gelu', 'quick_gelu'")
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(
                f"ClipTextConfig: hidden_size {self.hidden_size} is not divisible by "
                f"num_attention_heads {self.num_attention_heads}"
            )


@dataclass(frozen=True)
class ClipVisionConfig(Config):
    """``CLIPVisionModel``: names and defaults are those of the transformers config."""

    hidden_size: Count = 768
    intermediate_size: Count = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    image_size: Size = 224
    patch_size: Count = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    projection_dim: Count = 512

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"model_type": ("clip_vision_model",), "num_channels": (3,)}
    STRICT = False

    def __post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise CheckpointError(f"ClipVisionConfig: hidden_act {self.hidden_act!r}; supported: 'gelu', 'quick_gelu'")
        if self.hidden_size % self.num_attention_heads or self.image_size % self.patch_size:
            raise CheckpointError(
                f"ClipVisionConfig: {self.num_attention_heads} heads do not divide hidden_size {self.hidden_size}, or "
                f"patches of {self.patch_size} an image of {self.image_size}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens: the class token and the patches."""
        return 1 + (self.image_size // self.patch_size) ** 2
