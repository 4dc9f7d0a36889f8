"""The networks and tokenizers of a pipeline: ``pipeline.unet.apply({"params": params["unet"]}, ...)``.

Arrays are channels first, as in diffusers: samples [B, C, h, w], images [B, 3, H, W] in -1..1. All calls are pure
functions of their arrays, and can be used inside ``jax.jit`` and ``jax.grad``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from canvax.errors import InputError, check_count
from canvax.families.base import TOKENIZERS, Model
from canvax.flax_api.inputs import check_embedded, check_weights
from canvax.flax_api.output import by_name_or_index
from canvax.kernels.target import jitted
from canvax.models.clip import clip_configs, hidden_states, pooled_text, text_encoder
from canvax.models.text import SECOND
from canvax.models.vae import vae_decode, vae_encode
from canvax.params import Params
from canvax.pipelines import functions
from canvax.quantize import compute_dtype
from canvax.types import Array


class FlaxSampleOutput(NamedTuple):
    """Output of UNet and VAE: ``sample`` [B, C, h, w]."""

    sample: Array

    __getitem__ = by_name_or_index


class FlaxTextOutput(NamedTuple):
    """Output of the first text encoder: features [B, T, D], and with ``output_hidden_states`` those of each layer."""

    last_hidden_state: Array
    hidden_states: tuple[Array, ...] | None = None

    __getitem__ = by_name_or_index


class FlaxTextProjectionOutput(NamedTuple):
    """Output of SDXL's second text encoder; ``text_embeds`` [B, P] comes first."""

    text_embeds: Array
    last_hidden_state: Array
    hidden_states: tuple[Array, ...] | None = None

    __getitem__ = by_name_or_index


class FlaxTokenizerOutput(NamedTuple):
    """Output of a tokenizer: token ids int32 [B, T]."""

    input_ids: np.ndarray

    __getitem__ = by_name_or_index


class FlaxLatents(NamedTuple):
    """A normal distribution of latents [B, h, w, C], channels last as in diffusers."""

    mean: Array
    logvar: Array

    def mode(self) -> Array:
        """Return the most likely latents."""
        return self.mean

    def sample(self, key: Array) -> Array:
        """Draw latents with a key."""
        return self.mean + jnp.exp(self.logvar / 2) * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class FlaxLatentsOutput(NamedTuple):
    """Output of the VAE's encoder."""

    latent_dist: FlaxLatents

    __getitem__ = by_name_or_index


class Config(dict[str, Any]):
    """A config.json whose fields are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, eq=False)
class Part:
    """The component ``name`` of ``model``."""

    model: Model
    name: str


class Network(Part, ABC):
    """A component whose calls get its parameters."""

    @property
    def config(self) -> Config:
        """The config.json of the network, with defaults for missing fields."""
        model = self.model
        cfg = {"unet": model.unet, "vae": model.vae, **clip_configs(model.text)}[self.name]
        return Config(asdict(cfg) | model.files.config(self.name))

    @abstractmethod
    def __call__(self, *arguments: Any, params: Params, **keywords: Any) -> Any:
        """Run the network with ``params``."""

    def apply(
        self,
        variables: Mapping[str, Any],
        *arguments: Any,
        method: Callable[..., Any] | str | None = None,
        rngs: Any = None,
        train: bool = False,
        deterministic: bool = True,
        **keywords: Any,
    ) -> Any:
        """Run the network as in Flax, with ``variables`` ``{"params": params["unet"]}``.

        ``rngs``, ``train`` and ``deterministic`` have no effect, since there is no dropout.
        """
        del rngs, train, deterministic
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise InputError(f"variables: no 'params' in it; write {self.name}.apply({{'params': params[...]}}, ...)")
        call = getattr(self, method) if isinstance(method, str) else method or self
        return call(*arguments, params=variables["params"], **keywords)

    def _checked(self, params: Any) -> Params:
        check_weights({self.name: self.model.specs[self.name]}, {self.name: params})
        return params


class UNet(Network):
    """The denoiser."""

    def __call__(
        self,
        sample: Array,
        timesteps: Any,
        encoder_hidden_states: Array,
        added_cond_kwargs: Mapping[str, Array] | None = None,
        *,
        params: Params,
        return_dict: bool = True,
    ) -> FlaxSampleOutput | tuple[Array]:
        """Return the output [B, C, h, w] float32 for noisy latents [B, C, h, w] and text features [B, T, D].

        ``added_cond_kwargs`` contains SDXL's ``text_embeds`` [B, P] and ``time_ids`` [B, 6].
        """
        check_array("sample", sample, (None, self.model.unet.in_channels, None, None))
        check_array("encoder_hidden_states", encoder_hidden_states, (None, None, self.model.text.width))
        conditions, added = {"text": encoder_hidden_states}, added_cond_kwargs or {}
        if self.model.text.pooled_width:
            if missing := {"text_embeds", "time_ids"} - added.keys():
                raise InputError(f"added_cond_kwargs has no {' and '.join(sorted(missing))}, which this UNet reads")
            conditions |= {"pooled": added["text_embeds"], "time_ids": added["time_ids"]}
        latents, weights = jnp.moveaxis(jnp.asarray(sample), 1, -1), {"unet": self._checked(params)}
        output = jnp.moveaxis(functions.denoise(self.model, weights, latents, timesteps, conditions), -1, 1)
        return FlaxSampleOutput(output) if return_dict else (output,)


class Vae(Network):
    """The autoencoder. Its latents are not scaled: they are a pipeline's latents / ``config.scaling_factor``."""

    def __call__(self, sample: Array, *, params: Params) -> FlaxSampleOutput:
        """Encode images [B, 3, H, W] and decode the latents."""
        return self.decode(jnp.moveaxis(self.encode(sample, params=params).latent_dist.mode(), -1, 1), params=params)

    def decode(self, latents: Array, *, params: Params) -> FlaxSampleOutput:
        """Decode latents [B, C, h, w] to images [B, 3, H, W], approximately in -1..1."""
        check_array("latents", latents, (None, self.model.vae.latent_channels, None, None))
        weights, cfg = self._checked(params), self.model.vae
        scaled = (jnp.moveaxis(jnp.asarray(latents), 1, -1) - cfg.shift) / cfg.scale
        dtype = compute_dtype(weights)
        return FlaxSampleOutput(jnp.moveaxis(_decode(weights, scaled.astype(dtype), cfg=cfg), -1, 1))

    def encode(self, sample: Array, *, params: Params) -> FlaxLatentsOutput:
        """Encode images [B, 3, H, W] in -1..1 to a distribution of latents."""
        check_array("sample", sample, (None, 3, None, None))
        weights = self._checked(params)
        images = jnp.moveaxis(jnp.asarray(sample), 1, -1).astype(compute_dtype(weights))
        return FlaxLatentsOutput(FlaxLatents(*_encode(weights, images, cfg=self.model.vae)))


class TextEncoder(Network):
    """A text encoder."""

    def __call__(
        self, input_ids: Any, *, params: Params, output_hidden_states: bool = False, train: bool = False
    ) -> FlaxTextOutput | FlaxTextProjectionOutput:
        """Return the features [B, T, D] of token ids [B, T]; SDXL's second encoder adds pooled features [B, P]."""
        del train
        cfg = clip_configs(self.model.text)[self.name]
        ids: Any = input_ids if isinstance(input_ids, Tracer) else np.asarray(input_ids)
        if ids.ndim != 2 or ids.shape[1] > cfg.max_position_embeddings or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(
                f"input_ids has shape {ids.shape} and dtype {ids.dtype}; {self.name} takes whole numbers [B, T] with T "
                f"up to {cfg.max_position_embeddings}"
            )
        if not isinstance(ids, Tracer):
            check_embedded("input_ids", ids, self.name, cfg.vocab_size)
        weights, layers = self._checked(params), cfg.num_hidden_layers
        last = _encode_text(weights, ids, cfg=cfg)
        hidden = tuple(_all_layers(weights, ids, cfg=cfg)) if output_hidden_states else None
        if self.name != SECOND:
            return FlaxTextOutput(last, hidden)
        final = hidden[layers] if hidden else hidden_states(weights, ids, cfg)[1]
        return FlaxTextProjectionOutput(pooled_text(weights, final, ids, cfg), last, hidden)


class Tokenizer(Part):
    """A tokenizer that pads and truncates prompts to the same length."""

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: str | bool = "max_length",
        max_length: int | None = None,
        truncation: bool = True,
        return_tensors: str = "np",
    ) -> FlaxTokenizerOutput:
        """Return the ids [B, T] of prompts; T is ``max_length``, by default the text encoder's length."""
        for name, value, only in (
            ("padding", padding, ("max_length", True)),
            ("truncation", truncation, (True,)),
            ("return_tensors", return_tensors, ("np", "jax")),
        ):
            if value not in only:
                raise InputError(f"{name}={value!r}: ids are NumPy arrays of one length; write {name}={only[0]!r}")
        most = self.model_max_length
        length = most if max_length is None else check_count("max_length", max_length, most)
        if not isinstance(text, str | list | tuple) or (not len(text) and not isinstance(text, str)):
            raise InputError(f"text={text!r:.80} is neither a string nor a list of strings")
        prompts = [text] if isinstance(text, str) else list(text)
        return FlaxTokenizerOutput(self._tokenizer(prompts, length=max(2, length)))

    @property
    def model_max_length(self) -> int:
        """Number of tokens of a prompt, 77."""
        return min(self.model.text.shortest)

    @property
    def bos_token_id(self) -> int:
        """The id that begins a prompt."""
        return self._tokenizer.bos

    @property
    def eos_token_id(self) -> int:
        """The id that ends a prompt."""
        return self._tokenizer.eos

    @property
    def pad_token_id(self) -> int:
        """The id of the padding."""
        return self._tokenizer.pad

    @property
    def _tokenizer(self) -> Any:
        return {TOKENIZERS[name]: tokenizer for name, tokenizer in self.model.tokenizers.items()}[self.name]


_decode = jitted(vae_decode, static_argnames="cfg")
_encode = jitted(vae_encode, static_argnames="cfg")
_encode_text = jitted(text_encoder, static_argnames="cfg")


@partial(jitted, static_argnames="cfg")
def _all_layers(params: Params, ids: Array, *, cfg: Any) -> Array:
    """Return the output of the embeddings and of each layer, [1 + layers, B, T, D]; each layer is computed once."""
    skips = jnp.arange(cfg.num_hidden_layers, -1, -1)
    return jax.vmap(lambda skip: hidden_states(params, ids, cfg, skip=skip)[0])(skips)


def check_array(name: str, array: Any, wanted: tuple[int | None, ...]) -> None:
    """Refuse values that are not arrays of real numbers of this shape, traced or not; None is any length."""
    shape = functions.numbers(name, array).shape
    if len(shape) != len(wanted) or any(size not in (None, got) for got, size in zip(shape, wanted, strict=True)):
        axes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise InputError(f"{name} has shape {shape}; this needs [{axes}], channels first as in the old classes")
