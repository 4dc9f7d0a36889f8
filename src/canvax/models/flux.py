"""FLUX.1 (Black Forest Labs 2024) and Chroma (Lodestone Rock 2025) as pure functions.

``FluxTransformer2DModel`` has double-stream blocks and then parallel ones. Each block computes its modulation from a
vector of the time, the guidance scale (dev) and the pooled text of CLIP. ``ChromaTransformer2DModel`` has the same
blocks; a small network, the approximator, computes all modulation from the time. The text of both is T5's. A latent
of 16 channels is packed, 2 x 2 to a token. Kontext reads the tokens of a reference image after those of the image. Fill
reads the masked image and the mask in further channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from canvax.errors import CheckpointError
from canvax.models.configs import Config, Count, Depth, Layers
from canvax.models.denoiser import (
    COLUMNS,
    PLAIN,
    REFERENCES,
    Extensible,
    Extras,
    Facts,
    Inputs,
    Packing,
    Row,
    Shapes,
    TransformerDenoiser,
)
from canvax.models.dit import (
    Modulation,
    Rope,
    axes_faults,
    chunks,
    double_block,
    double_block_spec,
    embedded_time,
    grid_ids,
    layer_norm,
    modulated,
    parallel_block,
    parallel_block_spec,
    rms_norm,
    rms_norm_spec,
    rotary_embedding,
    sinusoids,
)
from canvax.models.text import Conditions, TextEncoders
from canvax.nn import Ahead, linear, linear_spec
from canvax.params import Params, Spec, whole
from canvax.quantize import compute_dtype
from canvax.types import Array, DType

TIME_WIDTH, THETA, EPS = 256, 10000, 1e-6

MASK = 256
"""Channels of a token for the mask: 8 x 8 pixels of each of its four latents."""

REFERENCE_SIZES = tuple(
    (tall, wide)
    for one, other in ((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184),
                       (944, 1104), (1024, 1024))
    for tall, wide in dict.fromkeys(((one, other), (other, one)))
)  # fmt: skip
"""Heights and widths of references that Kontext was trained with."""


@dataclass(frozen=True)
class FluxConfig(Config):
    """``FluxTransformer2DModel``: names and defaults are those of the diffusers config."""

    CLASS: ClassVar[str] = "FluxTransformer2DModel"

    in_channels: Count = 64
    out_channels: Count | None = None
    num_layers: Depth = 19
    num_single_layers: Depth = 38
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 4096
    pooled_projection_dim: Count = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)

    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,)}

    def __post_init__(self) -> None:
        faults = axes_faults(self.axes_dims_rope, 3, self.attention_head_dim)
        if self.masked not in (0, self.features + MASK) or self.features % 4:
            faults.append(
                f"in_channels {self.in_channels} with out_channels {self.features} (models of depths and edges are "
                "not supported)"
            )
        if faults:
            raise CheckpointError(f"{type(self).__name__} does not support {'; '.join(faults)}")

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def features(self) -> int:
        """Numbers in a token of latents."""
        return self.out_channels or self.in_channels

    @property
    def masked(self) -> int:
        """Numbers in a token of the masked image and the mask; 0 for a model without these."""
        return self.in_channels - self.features


@dataclass(frozen=True)
class ChromaConfig(FluxConfig):
    """``ChromaTransformer2DModel``; it has neither guidance nor pooled text."""

    CLASS: ClassVar[str] = "ChromaTransformer2DModel"

    approximator_num_channels: Count = 64
    approximator_hidden_dim: Count = 5120
    approximator_layers: Layers = 5

    IGNORED: ClassVar[frozenset[str]] = frozenset({"approximator_in_factor"})  # diffusers does not read it

    @property
    def rows(self) -> int:
        """Vectors of modulation: 3 for each parallel block, 12 for each double block, and 2."""
        return 3 * self.num_single_layers + 12 * self.num_layers + 2


def flux_spec(cfg: FluxConfig) -> Spec:
    """Declare the transformer's parameters.

    Devices split attention and feed-forward of a parallel block separately: see ``STACKS`` in ``canvax.families.flux``.
    """
    width, heads = cfg.dim, cfg.num_attention_heads

    def dense(inputs: int, outputs: int) -> Spec:
        return whole(linear_spec(inputs, outputs))

    def embedder(inputs: int) -> Spec:
        return {"linear_1": dense(inputs, width), "linear_2": dense(width, width)}

    block = double_block_spec(width, heads, 4 * width, bias=True)
    single = parallel_block_spec(width, heads, 4 * width, bias=True)
    if isinstance(cfg, ChromaConfig):
        inner, layers = cfg.approximator_hidden_dim, range(cfg.approximator_layers)
        both = {"linear_1": linear_spec(inner, inner), "linear_2": linear_spec(inner, inner)}
        of_model: Spec = {"distilled_guidance_layer": {
            "in_proj": dense(cfg.approximator_num_channels, inner),
            "layers": {str(i): both for i in layers},
            "norms": {str(i): rms_norm_spec(inner) for i in layers},
            "out_proj": dense(inner, width),
        }}  # fmt: skip
    else:
        for name, of_block, count in (("norm1", block, 6), ("norm1_context", block, 6), ("norm", single, 3)):
            of_block[name] = {"linear": linear_spec(width, count * width)}
        guidance = {"guidance_embedder": embedder(TIME_WIDTH)} if cfg.guidance_embeds else {}
        of_model = {
            "time_text_embed": {
                "timestep_embedder": embedder(TIME_WIDTH),
                **guidance,
                "text_embedder": embedder(cfg.pooled_projection_dim),
            },
            "norm_out": {"linear": dense(width, 2 * width)},
        }
    return of_model | {
        "x_embedder": dense(cfg.in_channels, width),
        "context_embedder": dense(cfg.joint_attention_dim, width),
        "transformer_blocks": {str(i): block for i in range(cfg.num_layers)},
        "single_transformer_blocks": {str(i): single for i in range(cfg.num_single_layers)},
        "proj_out": dense(width, cfg.features),
    }


class FluxContext(NamedTuple):
    """Inputs of the transformer besides the image; they are the same in all steps.

    Attributes:
        text: embedded text [B, S, D].
        references: embedded reference images [B, R, D]; R may be 0.
        rope: positions of text, image and references.
        vector: embedded pooled text, and guidance scale [B, D]; None for Chroma.
        masked: tokens of the masked image and the mask [B, L, ``masked``]; None for other models.
        lengths: number of tokens of text, image and references to attend to [B], or which ones [B, T]; None for all.
    """

    text: Array
    references: Array
    rope: Rope
    vector: Array | None = None
    masked: Array | None = None
    lengths: Array | None = None


def flux_context(
    p: Params, conditions: Mapping[str, Any], dtype: DType, cfg: FluxConfig, *, tokens: int
) -> FluxContext:
    """Embed text, pooled text and references and compute all positions, once before the loop.

    Args:
        p: parameters as declared by ``flux_spec``.
        conditions: ``text`` [B, S, ``joint_attention_dim``], ``COLUMNS``; for FLUX.1 ``pooled`` [B, P], for dev
            ``guidance`` [B], for Kontext perhaps ``REFERENCES``, for Fill ``masked``; for Chroma ``length`` [B], the
            tokens of each text.
        dtype: dtype to compute in.
        cfg: the config.
        tokens: L, the number of tokens of an image.
    """
    text, vector, lengths = conditions["text"].astype(dtype), None, None
    batch, rows, _ = text.shape
    row, column = grid_ids(tokens, conditions[COLUMNS])
    ids = [jnp.zeros((batch, rows, 3), jnp.int32), jnp.stack([jnp.zeros_like(row), row, column], axis=-1)]
    references = jnp.zeros((batch, 0, cfg.dim), dtype)
    if REFERENCES in conditions:
        given = conditions[REFERENCES]
        references = linear(p["x_embedder"], given["tokens"].astype(dtype))
        ids.append(given["ids"])
        lengths = rows + tokens + given["count"]
    if isinstance(cfg, ChromaConfig):  # one token of padding is read
        read = jnp.arange(rows)[None] <= conditions["length"][:, None]
        lengths = jnp.concatenate([read, jnp.ones((batch, tokens), bool)], axis=1)
    else:
        embed = p["time_text_embed"]
        pooled = jax.nn.silu(linear(embed["text_embedder"]["linear_1"], conditions["pooled"].astype(dtype)))
        vector = linear(embed["text_embedder"]["linear_2"], pooled)
        if cfg.guidance_embeds:
            vector = vector + embedded_time(embed["guidance_embedder"], 1000 * conditions["guidance"], vector)
    masked = conditions["masked"][:, 0].astype(dtype) if cfg.masked else None
    rope = rotary_embedding(jnp.concatenate(ids, axis=1), cfg.axes_dims_rope, THETA)
    return FluxContext(linear(p["context_embedder"], text), references, rope, vector, masked, lengths)


class _Modulations(NamedTuple):
    """The modulation of each block, by its number and parameters: of the image and the text in double blocks, and of
    parallel blocks; and shift and scale of the output, if the network has one.
    """

    double: Callable[[int, Params], tuple[Modulation, Modulation]]
    single: Callable[[int, Params], Modulation]
    last: Modulation


def _of_blocks(p: Params, time: Array) -> _Modulations:
    """Return the modulation that each block computes from the activated vector [B, 1, D]."""
    last = chunks(p["norm_out"], time, 2)[::-1] if "norm_out" in p else ()  # scale before shift, only here
    return _Modulations(
        lambda i, block: (chunks(block["norm1"], time, 6), chunks(block["norm1_context"], time, 6)),
        lambda i, block: chunks(block["norm"], time, 3),
        last,
    )


def _approximated(p: Params, timestep: Array, x: Array, cfg: ChromaConfig) -> _Modulations:
    """Return the modulation that the approximator computes, a vector for each number of a row."""
    quarter = cfg.approximator_num_channels // 4
    times = jnp.concatenate([sinusoids(timestep, quarter), sinusoids(jnp.zeros_like(timestep), quarter)], axis=-1)
    rows = sinusoids(1000 * jnp.arange(cfg.rows, dtype=jnp.float32), 2 * quarter)
    shape = len(timestep), cfg.rows
    both = [
        jnp.broadcast_to(times[:, None], (*shape, times.shape[-1])),
        jnp.broadcast_to(rows[None], (*shape, rows.shape[-1])),
    ]
    h = linear(p["in_proj"], jnp.concatenate(both, axis=-1).astype(x.dtype))
    ahead = Ahead()
    for i in range(cfg.approximator_layers):
        inner = rms_norm(p["norms"][str(i)], h, eps=float(np.finfo(np.float32).eps))
        layer = ahead(p["layers"][str(i)], h)
        h = h + linear(layer["linear_2"], jax.nn.silu(linear(layer["linear_1"], inner)))
    vectors = jnp.split(linear(p["out_proj"], h), cfg.rows, axis=1)

    def run(begin: int, size: int, i: int) -> Modulation:
        return tuple(vectors[begin + size * i : begin + size * (i + 1)])

    image = 3 * cfg.num_single_layers
    text = image + 6 * cfg.num_layers
    return _Modulations(
        lambda i, block: (run(image, 6, i), run(text, 6, i)), lambda i, block: run(0, 3, i), tuple(vectors[-2:])
    )


AfterBlock = Callable[[int, Array, int], Array]
"""Called after each block with its index, its tokens [B, T, D], and the index of the first token of the image among
them; returns the tokens."""


def flux_blocks(
    p: Params, timestep: Array, image: Array, context: FluxContext, cfg: FluxConfig, after: AfterBlock
) -> tuple[Array, Modulation]:
    """Apply the blocks to embedded images, with references behind them [B, L + R, D].

    Returns:
        The images, and shift and scale of the output.
    """
    if isinstance(cfg, ChromaConfig):
        by = _approximated(p["distilled_guidance_layer"], timestep, image, cfg)
    else:
        assert context.vector is not None
        time = embedded_time(p["time_text_embed"]["timestep_embedder"], timestep, image) + context.vector
        by = _of_blocks(p, jax.nn.silu(time)[:, None])
    text, rest, ahead = context.text, dict[str, Any](eps=EPS), Ahead()
    for i in range(cfg.num_layers):
        block, rest["where"] = ahead(p["transformer_blocks"][str(i)], image), f"transformer_blocks.{i}"
        image, text = double_block(block, image, text, *by.double(i, block), context.rope, context.lengths, **rest)
        image = after(i, image, 0)
    h, rows = jnp.concatenate([text, image], axis=1), text.shape[1]
    for i in range(cfg.num_single_layers):
        block, rest["where"] = ahead(p["single_transformer_blocks"][str(i)], h), f"single_transformer_blocks.{i}"
        h = parallel_block(block, h, by.single(i, block), context.rope, context.lengths, **rest)
        h = after(cfg.num_layers + i, h, rows)
    return h[:, rows:], by.last


def flux(
    p: Params,
    x: Array,
    timestep: Array,
    context: FluxContext,
    cfg: FluxConfig,
    residuals: Sequence[Array | None] = (),
) -> Array:
    """Predict the velocity (noise minus image) of noisy latents.

    Args:
        p: parameters as declared by ``flux_spec``.
        x: latents as tokens [B, L, ``features``] in the dtype to compute in.
        timestep: [B], 1000 for noise and 0 for an image.
        context: result of ``flux_context``.
        cfg: the config.
        residuals: added to the tokens of the image after each block [B, L, D]; None for a block without.

    Returns:
        [B, L, ``features``].
    """
    tokens = x.shape[1]

    def added(i: int, h: Array, first: int) -> Array:
        residual = residuals[i] if residuals else None
        if residual is None:
            return h
        return h + jnp.pad(residual, ((0, 0), (first, h.shape[1] - first - tokens), (0, 0)))

    if context.masked is not None:
        x = jnp.concatenate([x, context.masked], axis=-1)
    image = jnp.concatenate([linear(p["x_embedder"], x), context.references], axis=1)
    image, last = flux_blocks(p, timestep, image, context, cfg, added)
    return linear(p["proj_out"], modulated(layer_norm(image[:, :tokens], eps=EPS), *last))


class FluxText(TextEncoders):
    """The pooled text of CLIP, and the text of T5."""

    def join(self, outputs: Sequence[Any]) -> Any:
        return {name: value for output in outputs for name, value in output.items()}


@dataclass(frozen=True)
class FluxDenoiser(TransformerDenoiser, Extensible):
    """The transformer in the loop; it predicts the velocity of a flow.

    Attributes:
        cfg: its config.
        edits: see ``Facts.edits``.
    """

    cfg: FluxConfig
    edits: bool = False

    @property
    def spec(self) -> Spec:
        return flux_spec(self.cfg)

    @property
    def facts(self) -> Facts:
        return Facts(
            native_size=(128, 128),
            packing=Packing(2, channels_first=True),
            embeds_guidance=self.cfg.guidance_embeds,
            inpaints=self.cfg.masked > 0,
            folded_mask=self.cfg.masked > 0,
            edits=self.edits,
            only_edits=self.edits,
            reference_sizes=REFERENCE_SIZES if self.edits else (),
            offers=() if isinstance(self.cfg, ChromaConfig) else ("residuals",),
        )

    def inputs(self, latents: Sequence[int], text: Shapes, dtype: Callable[[str], DType]) -> Inputs:
        del text, dtype
        shapes = {"guidance": latents[:1]} if self.cfg.guidance_embeds else {}
        shapes |= {"masked": (*latents[:3], self.cfg.masked)} if self.cfg.masked else {}
        return Inputs({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> FluxContext:
        return flux_context(p, conditions, compute_dtype(p), self.cfg, tokens=latents[2])

    def apply(
        self, p: Params, x: Array, row: Row, prepared: FluxContext, memory: Any, extras: Extras = PLAIN
    ) -> tuple[Array, Any]:
        residuals = extras.residuals.skips if extras.residuals else ()
        x = x[:, 0].astype(compute_dtype(p))
        return flux(p, x, row["timestep"], prepared, self.cfg, residuals)[:, None], memory
