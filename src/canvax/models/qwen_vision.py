"""The vision tower of Qwen3-VL (Qwen Team 2025), and language models that see the references of a call.

An image is cut into patches, in an order in which the four of a square follow one another; a square is a token of the
language model. Features of some layers of the tower are added to the first layers of the language model (DeepStack).
The tower of Qwen2.5-VL is ``canvax.models.qwen25_vision``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.kernels.attention import attention
from canvax.kernels.outline import outlined, scope
from canvax.models.configs import Config, Count, Depth, Layers
from canvax.models.decoder_lm import LanguageModel, Seen, decoder_lm
from canvax.models.denoiser import MOST_REFERENCES
from canvax.models.dit import Rope, rotary_embedding, rotate
from canvax.models.text import Conditions, Shapes
from canvax.nn import Ahead, gelu, layer_norm, linear, linear_spec, norm_spec
from canvax.params import Axis, Param, Params, Spec
from canvax.types import Array, DType, HostArray

IMAGE = "<image{}><|vision_start|><|image_pad|><|vision_end|>"
"""An image before the prompt, with its number."""

PAD = "<|image_pad|>"

MERGE = 2
"""Side of the square of patches that a token of the language model holds."""

BUCKET = 128
"""The tokens of an image are padded to a multiple, so that sizes share a program."""

THETA = 10000.0

FIXED_OF_TOWERS = {"in_channels": (3,), "spatial_merge_size": (MERGE,), "temporal_patch_size": (2,)}
"""Fields of all towers with a single supported value."""


@dataclass(frozen=True)
class TowerConfig(Config):
    """A vision tower: names are those of the transformers config.

    Attributes:
        mrope_section: channels of the language model's positions along time, rows and columns.
    """

    depth: Layers
    hidden_size: Count
    intermediate_size: Count
    num_heads: Count
    patch_size: Count
    out_hidden_size: Count
    mrope_section: tuple[Depth, ...]

    STRICT = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read the parsed ``config.json`` of a vision-language model."""
        text = config.get("text_config") or config
        positions = text.get("rope_parameters") or text.get("rope_scaling") or {}
        sections = {name: positions[name] for name in ("mrope_section",) if name in positions}
        return super().from_dict({**config["vision_config"], **sections})

    def _faults(self) -> list[str]:
        """Return what is not supported."""
        faults = []
        if self.hidden_size % (4 * self.num_heads):
            faults.append(f"{self.num_heads} heads of width {self.hidden_size}")
        if len(self.mrope_section) != 3:
            faults.append(f"mrope_section {self.mrope_section}")
        return faults

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise CheckpointError(f"{type(self).__name__} does not support " + "; ".join(faults))

    @property
    def spec(self) -> Spec:
        """Declared parameters."""
        raise NotImplementedError

    def features(self, p: Params, patches: Array, grids: Array) -> list[Array]:
        """Return the features of images, with arguments as ``vision_tower`` has them."""
        raise NotImplementedError

    def axes(self, width: int) -> HostArray:
        """Return the axis of positions, 0 to 2, of each frequency of the language model's heads [``width`` / 2]."""
        raise NotImplementedError

    def tokens(self, size: tuple[int, int]) -> int:
        """Return the most tokens of a reference of this height and width."""
        return math.prod(side // (MERGE * self.patch_size) for side in size)

    def view(self, image: Any, fitted: Any) -> Any:
        """Return a reference as the tower sees it; see ``TextEncoder.view``."""
        del image
        return fitted


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """``Qwen3VLVisionModel``."""

    depth: Layers = 27
    hidden_size: Count = 1152
    intermediate_size: Count = 4304
    num_heads: Count = 16
    patch_size: Count = 16
    out_hidden_size: Count = 4096
    mrope_section: tuple[Depth, ...] = (24, 20, 20)
    num_position_embeddings: Count = 2304
    deepstack_visual_indexes: tuple[Depth, ...] = (8, 16, 24)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("gelu_pytorch_tanh",), **FIXED_OF_TOWERS}

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if list(self.deepstack_visual_indexes) != sorted({*self.deepstack_visual_indexes} & {*range(self.depth)}):
            faults.append(f"deepstack_visual_indexes {self.deepstack_visual_indexes} with depth {self.depth}")
        if round(self.num_position_embeddings**0.5) ** 2 != self.num_position_embeddings:
            faults.append(f"num_position_embeddings {self.num_position_embeddings}")
        return faults

    @property
    def spec(self) -> Spec:
        return vision_tower_spec(self)

    def features(self, p: Params, patches: Array, grids: Array) -> list[Array]:
        return vision_tower(p, patches, grids, self)

    def axes(self, width: int) -> HostArray:
        axis = np.zeros(width // 2, np.int32)
        for i in (1, 2):  # frequencies take turns
            axis[i : 3 * self.mrope_section[i] : 3] = i
        return axis


def vision_tower_spec(cfg: VisionConfig) -> Spec:
    """Declare the tower's parameters, named as in released checkpoints."""
    width, heads, inner = cfg.hidden_size, Axis("heads", cfg.num_heads), cfg.intermediate_size

    def merger(channels: int) -> Spec:
        return {
            "norm": norm_spec(channels),
            "linear_fc1": linear_spec(MERGE**2 * width, MERGE**2 * width, ("embed", "mlp")),
            "linear_fc2": linear_spec(MERGE**2 * width, cfg.out_hidden_size, ("mlp", "embed")),
        }

    block: Spec = {
        "norm1": norm_spec(width),
        "norm2": norm_spec(width),
        "attn": {"qkv": linear_spec(width, 3 * width), "proj": linear_spec(width, width, (heads, "embed"))},
        "mlp": {
            "linear_fc1": linear_spec(width, inner, ("embed", "mlp")),
            "linear_fc2": linear_spec(inner, width, ("mlp", "embed")),
        },
    }
    patch = (width, 3, 2, cfg.patch_size, cfg.patch_size)
    return {
        "patch_embed": {"proj": {"weight": Param(patch, (None,) * 5), "bias": Param((width,), (None,), init="zeros")}},
        "pos_embed": {"weight": Param((cfg.num_position_embeddings, width), (None, None), init="normal")},
        "blocks": {str(i): block for i in range(cfg.depth)},
        "merger": merger(width),
        "deepstack_merger_list": {str(i): merger(MERGE**2 * width) for i in range(len(cfg.deepstack_visual_indexes))},
    }


def vision_tower(p: Params, patches: Array, grids: Array, cfg: VisionConfig) -> list[Array]:
    """Return the features of images.

    Args:
        p: parameters as declared by ``vision_tower_spec``.
        patches: of n images [B, n, P, 3 x side x side] uint8, padding after those of an image.
        grids: rows and columns of patches of each, int32 [B, n, 2].
        cfg: the config.

    Returns:
        Features for the language model's input, then those that are added after its first layers, [B, n, P / 4, D].
    """
    places, x = places_of(patches, grids), (patches.astype(jnp.float32) - 127.5) / 127.5
    h = embedded(p["patch_embed"]["proj"], x) + _positions(p["pos_embed"], places, grids)
    rope = rope_of(places, cfg)
    lengths, features = jnp.maximum(grids.prod(-1), 1).reshape(-1), []
    with scope("vision_tower"):
        ahead = Ahead()
        for i in range(cfg.depth):
            h = _block(ahead(p["blocks"][str(i)], h), h, rope, lengths, heads=cfg.num_heads, where=f"blocks.{i}")
            if i in cfg.deepstack_visual_indexes:
                merger = p["deepstack_merger_list"][str(len(features))]
                features.append(_merged(merger, layer_norm(merger["norm"], squares(h), eps=1e-6)))
        return [_merged(p["merger"], squares(layer_norm(p["merger"]["norm"], h, eps=1e-6))), *features]


def places_of(patches: Array, grids: Array) -> Array:
    """Return row and column of each patch, int32 [B, n, P, 2], of ``patches`` and ``grids`` as in ``vision_tower``."""
    index = jnp.arange(patches.shape[2])[None, None]
    columns = jnp.maximum(grids[..., 1:], MERGE)  # a slot of a batch without an image has none
    square, inside = index // MERGE**2, index % MERGE**2
    row = square // (columns // MERGE) * MERGE + inside // MERGE
    column = square % (columns // MERGE) * MERGE + inside % MERGE
    return jnp.stack([row, column], axis=-1)


def embedded(p: Params, x: Array) -> Array:
    """Embed normalised patches [B, n, P, 3 x side x side] float32: [B, n, P, D] in the dtype of the parameters."""
    stored = p["weight"]
    weight = stored.astype(jnp.float32).sum(2)  # of two frames that are the same
    h = jnp.einsum("bnpi,oi->bnpo", x.astype(stored.dtype), weight.reshape(len(weight), -1).astype(stored.dtype))
    return h + jax.lax.broadcast_to_rank(p["bias"], 4) if "bias" in p else h


def rope_of(places: Array, cfg: TowerConfig) -> Rope:
    """Return the rotary positions of patches, an image after the other."""
    width = cfg.hidden_size // cfg.num_heads
    return rotary_embedding(places.reshape(-1, *places.shape[2:]), (width // 2, width // 2), THETA)


def _positions(p: Params, places: Array, grids: Array) -> Array:
    """Return learned positions [B, n, P, D], interpolated from a square so that corners are corners."""
    side, total = round(p["weight"].shape[0] ** 0.5), jnp.zeros((), jnp.float32)
    last = jnp.maximum(grids[:, :, None] - 1, 1).astype(jnp.float32)
    at = places.astype(jnp.float32) * (side - 1) / last
    low = jnp.floor(at)
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        tap = low + jnp.array(corner, jnp.float32, ndmin=4)
        weight = jnp.maximum(1 - jnp.abs(at - tap), 0).prod(-1, keepdims=True)
        row, column = jnp.moveaxis(jnp.clip(tap, 0, side - 1).astype(jnp.int32), -1, 0)
        total = total + weight * p["weight"][row * side + column].astype(jnp.float32)
    return total.astype(p["weight"].dtype)


def squares(x: Array) -> Array:
    """Return patches [B, n, P, D] as squares [B, n, P / 4, 4 D]."""
    return x.reshape(*x.shape[:2], x.shape[2] // MERGE**2, -1)


def _merged(p: Params, x: Array) -> Array:
    return linear(p["linear_fc2"], gelu(linear(p["linear_fc1"], x)))


@outlined
def _block(p: Params, x: Array, rope: Rope, lengths: Array, *, heads: int) -> Array:
    """Apply one pre-norm layer to patches [B, n, P, D], each image by itself."""
    x = x + attended(p["attn"], layer_norm(p["norm1"], x, eps=1e-6), rope, lengths, heads=heads)
    h = linear(p["mlp"]["linear_fc1"], layer_norm(p["norm2"], x, eps=1e-6))
    return x + linear(p["mlp"]["linear_fc2"], jax.nn.gelu(h, approximate=True))


def attended(p: Params, x: Array, rope: Rope, lengths: Array, *, heads: int, bias: Array | None = None) -> Array:
    """Apply self-attention to patches [B, n, P, D], each image by itself; ``bias`` is that of ``attention``."""
    qkv = linear(p["qkv"], x).reshape(-1, x.shape[2], 3, heads, x.shape[3] // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    y = attention(rotate(q, rope), rotate(k, rope), v, lengths=lengths, bias=bias)
    return linear(p["proj"], y.reshape(x.shape))


def rope_along(positions: Array, axes: HostArray, theta: float) -> Rope:
    """Return rotary positions along time, rows and columns [B, T, 3], with the axis of each frequency [Dh / 2]."""
    frequencies = theta ** (-np.arange(len(axes), dtype=np.float64) / len(axes))
    angles = positions[..., axes].astype(jnp.float32) * jnp.array(frequencies, jnp.float32, ndmin=3)
    return Rope(jnp.cos(angles), jnp.sin(angles))


@dataclass(frozen=True)
class SeeingLanguageModel(LanguageModel):
    """A language model that sees the reference images of a call before its prompt.

    Attributes:
        eyes: config of the vision tower.
        picture: text of an image before the prompt, with its number.
        between: text between two images.
        whole: the result has the features of images, too, and not only those of the text.
        sees: number of images, and tokens that each may have.
    """

    eyes: TowerConfig = VisionConfig()
    picture: str = IMAGE
    between: str = " "
    whole: bool = False
    sees: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if len(self.eyes.axes(self.cfg.width_of_head)) != self.cfg.width_of_head // 2:
            sections = f"mrope_section {self.eyes.mrope_section} with heads of width {self.cfg.width_of_head}"
            raise CheckpointError(f"{type(self.eyes).__name__} does not support {sections}")

    @property
    def spec(self) -> Spec:
        return {**super().spec, "visual": self.eyes.spec}

    @property
    def _side(self) -> int:
        """Side of a token in pixels."""
        return MERGE * self.eyes.patch_size

    def seeing(self, sizes: Sequence[tuple[int, int]]) -> SeeingLanguageModel:
        most = max(map(self.eyes.tokens, sizes), default=0)
        return replace(self, sees=(len(sizes), -(-most // BUCKET) * BUCKET))

    def view(self, image: Any, fitted: Any) -> Any:
        return self.eyes.view(image, fitted)

    def inputs(self, length: int) -> Shapes:
        (count, room), shape = self.sees, jax.ShapeDtypeStruct
        if not count:
            return super().inputs(length)
        total, values = length + count * room, 3 * self.eyes.patch_size**2
        more = {"positions": (total, 3), "slots": (total,), "grids": (count, 2)}
        more |= {} if self.whole else {"rows": (length,), "starts": (MOST_REFERENCES,)}
        return {
            **super().inputs(total),
            **{name: shape(each, jnp.int32) for name, each in more.items()},
            "patches": shape((count, MERGE**2 * room, values), jnp.uint8),
        }

    def outputs(self, length: int, dtype: DType) -> Shapes:
        count, room = self.sees
        if self.whole:
            return super().outputs(length + count * room, dtype)
        starts = {"starts": jax.ShapeDtypeStruct((MOST_REFERENCES,), jnp.int32)} if count else {}
        return super().outputs(length, dtype) | starts

    def _ids(self, tokenizer: Any, text: str, count: int) -> list[int]:
        images = self.between.join(self.picture.format(number) for number in range(1, count + 1))
        return tokenizer.ids(images + (text or tokenizer.empty))

    def count(self, tokenizer: Any, text: str, images: Sequence[Any]) -> int:
        return len(self._ids(tokenizer, text, len(images))) - len(images)

    def read(
        self, tokenizer: Any, texts: Sequence[str], length: int, images: Sequence[Sequence[Any]] = ()
    ) -> dict[str, HostArray]:
        if not images or not images[0]:
            return super().read(tokenizer, texts, length)
        seeing = self.seeing([(image.height, image.width) for image in images[0]])
        each = zip(texts, images, strict=True)
        prompts = [seeing._prompt(tokenizer, text, seen, length) for text, seen in each]
        return {name: np.stack([prompt[name] for prompt in prompts]) for name in seeing.inputs(length)}

    def _prompt(self, tokenizer: Any, text: str, images: Sequence[Any], length: int) -> dict[str, HostArray]:
        """Return the inputs of a prompt."""
        pad, place, (_, room) = tokenizer.backend.token_to_id(PAD), 0, self.sees
        grids = [(image.height // self._side, image.width // self._side) for image in images]
        ids, positions, slots, rows, starts = list[int](), list[list[int]](), list[int](), list[int](), list[int]()
        for word in self._ids(tokenizer, text, len(images)):
            if word == pad and (image := len(starts)) < len(images):
                tokens, step = math.prod(grids[image]), max(grids[image])
                starts.append(len(rows))
                ids += [word] * tokens
                slots += range(image * room, image * room + tokens)
                positions += (place + np.indices((1, *grids[image])).reshape(3, -1).T).tolist()
            else:
                step = 1
                rows.append(len(ids))
                ids.append(word)
                slots.append(-1)
                positions.append([place] * 3)
            place += step
        grids = [(MERGE * height, MERGE * width) for height, width in grids]
        values: dict[str, Any] = {
            "ids": ids, "length": len(ids if self.whole else rows), "positions": positions, "slots": slots,
            "rows": rows, "starts": starts, "grids": grids,
        }  # fmt: skip
        patches = [_patches(image, self.eyes.patch_size) for image in images]
        values["patches"] = [np.pad(each, ((0, MERGE**2 * room - len(each)), (0, 0))) for each in patches]
        return {name: _filled(values[name], shape, -(name == "slots")) for name, shape in self.inputs(length).items()}

    def encode(self, p: Params, ids: Array, length: Array, **seen: Array) -> Conditions:
        """Encode prompts, and the images ``seen`` before them, as ``inputs`` has these."""
        if not seen:
            return super().encode(p, ids, length)
        features = [
            each.reshape(len(ids), -1, each.shape[-1])
            for each in self.eyes.features(p["visual"], seen["patches"], seen["grids"])
        ]
        rope = rope_along(seen["positions"], self.eyes.axes(self.cfg.width_of_head), self.cfg.rope_theta)
        taps = (*self.earlier, self.tap)
        text = decoder_lm(p, ids, length, self.cfg, taps=taps, seen=Seen(features, seen["slots"], rope))
        text = text.reshape(*ids.shape, self.width)
        if self.whole:
            return {"text": text, "length": length}
        text = jnp.take_along_axis(text, seen["rows"][:, :, None], axis=1)
        return {"text": text, "length": length, "starts": seen["starts"]}


def _filled(value: Any, shape: jax.ShapeDtypeStruct, padding: int) -> HostArray:
    """Return an array of a shape, padded along its first axis."""
    array = np.asarray(value, shape.dtype)
    missing = [(0, shape.shape[0] - len(array)), *[(0, 0)] * (array.ndim - 1)] if array.ndim else []
    return np.pad(array, missing, constant_values=padding) if missing else array


def _patches(image: Any, side: int) -> HostArray:
    """Return the patches of an image on white [P, 3 x side x side] uint8, the four of a square one after the other."""
    pixels = np.asarray(image.convert("RGBA"), np.int32)
    opacity, block = pixels[..., 3:], MERGE * side
    white = (pixels[..., :3] * opacity + 255 * (255 - opacity) + 127) // 255
    rows, columns = white.shape[0] // block, white.shape[1] // block
    squares = white.reshape(rows, MERGE, side, columns, MERGE, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return squares.reshape(-1, 3 * side**2).astype(np.uint8)
