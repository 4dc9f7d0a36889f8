"""Networks and tokenizers of an old pipeline, one by one: ``pipeline.unet.apply({"params": params["unet"]}, ...)``.

Arrays are channels first, as they were: samples [B, C, h, w], images [B, 3, H, W] in -1..1. All are functions of their
arrays, and may stand inside ``jax.jit`` and ``jax.grad``.
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
from canvax.models.clip import hidden_states, pooled_text, text_encoder
from canvax.models.text import SECOND
from canvax.models.vae import vae_decode, vae_encode
from canvax.params import Params
from canvax.pipelines import functions
from canvax.quantize import compute_dtype
from canvax.types import Array


class FlaxSampleOutput(NamedTuple):
    """What UNet and VAE return: ``sample`` [B, C, h, w]."""

    sample: Array

    __getitem__ = by_name_or_index


class FlaxTextOutput(NamedTuple):
    """What the first text encoder returns: [B, T, D], and with ``output_hidden_states`` each layer's."""

    last_hidden_state: Array
    hidden_states: tuple[Array, ...] | None = None

    __getitem__ = by_name_or_index


class FlaxTextProjectionOutput(NamedTuple):
    """What SDXL's second text encoder returns: ``text_embeds`` [B, P] comes first."""

    text_embeds: Array
    last_hidden_state: Array
    hidden_states: tuple[Array, ...] | None = None

    __getitem__ = by_name_or_index


class FlaxTokenizerOutput(NamedTuple):
    """Token ids int32 [B, T]."""

    input_ids: np.ndarray

    __getitem__ = by_name_or_index


class FlaxLatents(NamedTuple):
    """A normal distribution of latents [B, h, w, C], channels last as it was."""

    mean: Array
    logvar: Array

    def mode(self) -> Array:
        """The most likely latents."""
        return self.mean

    def sample(self, key: Array) -> Array:
        """Latents drawn with a key."""
        return self.mean + jnp.exp(self.logvar / 2) * jax.random.normal(key, self.mean.shape, self.mean.dtype)


class FlaxLatentsOutput(NamedTuple):
    """What the VAE's encoder returns."""

    latent_dist: FlaxLatents

    __getitem__ = by_name_or_index


class Config(dict[str, Any]):
    """A config.json, whose fields are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, eq=False)
class Part:
    """A component of ``model``, called ``name`` there."""

    model: Model
    name: str


class Network(Part, ABC):
    """A component with parameters, which its calls are given."""

    @property
    def config(self) -> Config:
        """Its config.json, with the defaults of what that leaves out."""
        model = self.model
        cfg = {"unet": model.unet, "vae": model.vae, **model.text.parts}[self.name]
        return Config(asdict(cfg) | model.files.config(self.name))

    @abstractmethod
    def __call__(self, *arguments: Any, params: Params, **keywords: Any) -> Any:
        """The network with ``params``."""

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
        """Flax's way of calling: ``variables`` are ``{"params": params["unet"]}``.

        ``rngs``, ``train`` and ``deterministic`` decide nothing: there is no dropout.
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
        """Network output [B, C, h, w] float32 for noisy latents [B, C, h, w] and text features [B, T, D].

        ``added_cond_kwargs``: SDXL's ``text_embeds`` [B, P] and ``time_ids`` [B, 6].
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
    """The autoencoder. Its latents are as the encoder gives them: those of a pipeline / ``config.scaling_factor``."""

    def __call__(self, sample: Array, *, params: Params) -> FlaxSampleOutput:
        """Images [B, 3, H, W] to latents and back."""
        return self.decode(jnp.moveaxis(self.encode(sample, params=params).latent_dist.mode(), -1, 1), params=params)

    def decode(self, latents: Array, *, params: Params) -> FlaxSampleOutput:
        """Images [B, 3, H, W] in about -1..1 of latents [B, C, h, w]."""
        check_array("latents", latents, (None, self.model.vae.latent_channels, None, None))
        weights, cfg = self._checked(params), self.model.vae
        scaled = (jnp.moveaxis(jnp.asarray(latents), 1, -1) - cfg.shift) / cfg.scale
        dtype = compute_dtype(weights)
        return FlaxSampleOutput(jnp.moveaxis(_decode(weights, scaled.astype(dtype), cfg=cfg), -1, 1))

    def encode(self, sample: Array, *, params: Params) -> FlaxLatentsOutput:
        """The distribution of the latents of images [B, 3, H, W] in -1..1."""
        check_array("sample", sample, (None, 3, None, None))
        weights = self._checked(params)
        images = jnp.moveaxis(jnp.asarray(sample), 1, -1).astype(compute_dtype(weights))
        return FlaxLatentsOutput(FlaxLatents(*_encode(weights, images, cfg=self.model.vae)))


class TextEncoder(Network):
    """A text encoder."""

    def __call__(
        self, input_ids: Any, *, params: Params, output_hidden_states: bool = False, train: bool = False
    ) -> FlaxTextOutput | FlaxTextProjectionOutput:
        """Features [B, T, D] of token ids [B, T]; of SDXL's second encoder also the pooled ones [B, P]."""
        del train
        cfg = self.model.text.parts[self.name]
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
    """A tokenizer, which fills up and cuts prompts to one length."""

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: str | bool = "max_length",
        max_length: int | None = None,
        truncation: bool = True,
        return_tensors: str = "np",
    ) -> FlaxTokenizerOutput:
        """Ids [B, T] of one prompt or several, T being ``max_length`` or what the text encoder reads."""
        for name, value, only in (
            ("padding", padding, ("max_length", True)),
            ("truncation", truncation, (True,)),
            ("return_tensors", return_tensors, ("np", "jax")),
        ):
            if value not in only:
                raise InputError(f"{name}={value!r}: ids are NumPy arrays of one length; write {name}={only[0]!r}")
        most = self.model.text.tokens
        length = most if max_length is None else check_count("max_length", max_length, most)
        if not isinstance(text, str | list | tuple) or (not len(text) and not isinstance(text, str)):
            raise InputError(f"text={text!r:.80} is neither a string nor a list of strings")
        prompts = [text] if isinstance(text, str) else list(text)
        return FlaxTokenizerOutput(self._own(prompts, length=max(2, length)))

    @property
    def model_max_length(self) -> int:
        """Tokens of a prompt, 77."""
        return self.model.text.tokens

    @property
    def bos_token_id(self) -> int:
        """The id that begins a prompt."""
        return self._own.bos

    @property
    def eos_token_id(self) -> int:
        """The id that ends it."""
        return self._own.eos

    @property
    def pad_token_id(self) -> int:
        """The id that fills up the rest."""
        return self._own.pad

    @property
    def _own(self) -> Any:
        return {TOKENIZERS[name]: own for name, own in self.model.tokenizers.items()}[self.name]


_decode = jitted(vae_decode, static_argnames="cfg")
_encode = jitted(vae_encode, static_argnames="cfg")
_encode_text = jitted(text_encoder, static_argnames="cfg")


@partial(jitted, static_argnames="cfg")
def _all_layers(params: Params, ids: Array, *, cfg: Any) -> Array:
    """The output of the embeddings and of each layer, [1 + layers, B, T, D]; each layer is computed once."""
    skips = jnp.arange(cfg.num_hidden_layers, -1, -1)
    return jax.vmap(lambda skip: hidden_states(params, ids, cfg, skip=skip)[0])(skips)


def check_array(name: str, array: Any, wanted: tuple[int | None, ...]) -> None:
    """Refuse what is no array of real numbers of this shape, traced or not; None is any length."""
    shape = functions.numbers(name, array).shape
    if len(shape) != len(wanted) or any(size not in (None, got) for got, size in zip(shape, wanted, strict=True)):
        axes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise InputError(f"{name} has shape {shape}; this needs [{axes}], channels first as in the old classes")
