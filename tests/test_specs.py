"""A spec and its forward are two neighbours: every declared leaf is read, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from canvax.kernels.target import compiling_for
from canvax.models.clip import clip_encoders
from canvax.models.configs import UNetConfig
from canvax.models.presets import (
    SD15_TEXT,
    SD15_UNET,
    SD21_TEXT,
    SD21_UNET,
    SD_VAE,
    SDXL_REFINER_UNET,
    SDXL_TEXT,
    SDXL_TEXT_2,
    SDXL_UNET,
)
from canvax.models.text import TextEncoders, encode_text
from canvax.models.unet import unet, unet_spec
from canvax.models.vae import vae_decode, vae_encode, vae_spec
from canvax.params import Params, Spec, count, flatten, map_spec


class Recorder(dict):
    """A nested dict that remembers which leaves were asked for."""

    def __init__(self, tree: dict[str, Any], seen: set[str], prefix: str = "") -> None:
        super().__init__()
        for key, value in tree.items():
            name = f"{prefix}{key}"
            self[key] = Recorder(value, seen, f"{name}.") if isinstance(value, dict) else value
        self._seen, self._prefix = seen, prefix

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if not isinstance(value, dict):
            self._seen.add(f"{self._prefix}{key}")
        return value


def leaves_read(spec: Spec, forward: Callable[..., Any], *inputs: Any) -> set[str]:
    """Names of the leaves that a forward reads, traced abstractly in bfloat16: no memory, no time."""
    seen: set[str] = set()
    with compiling_for("none"):  # else blocks may be functions of their own, which take plain dicts
        jax.eval_shape(
            lambda params, *rest: forward(Recorder(params, seen), *rest), abstract(spec, jnp.bfloat16), *inputs
        )
    return seen


def abstract(spec: Spec, dtype: Any) -> Params:
    """Shapes and dtypes without memory."""
    return map_spec(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype_in(dtype)), spec)


def floats(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# Millions of parameters as published with each model.
UNETS = {"sd15": (SD15_UNET, 859.5), "sd21": (SD21_UNET, 865.9), "sdxl": (SDXL_UNET, 2567.5),
         "refiner": (SDXL_REFINER_UNET, 2300.0)}  # fmt: skip


@pytest.mark.parametrize("name", UNETS)
def test_unet(name: str) -> None:
    cfg, millions = UNETS[name]
    spec = unet_spec(cfg)
    assert count(spec) / 1e6 == pytest.approx(millions, rel=0.02)

    def forward(p: Any, x: Any, t: Any, text: Any, *told: Any) -> Any:
        return unet(p, x, t, text, cfg, *told)

    told = _told(cfg)
    read = leaves_read(spec, forward, floats(2, 64, 64, 4), floats(2), floats(2, 77, cfg.cross_attention_dim), *told)
    assert read == {leaf for leaf, _ in flatten(spec)}


def _told(cfg: UNetConfig) -> list[jax.ShapeDtypeStruct]:
    """Pooled text and numbers about the picture, for SDXL."""
    if cfg.addition_embed_type is None:
        return []
    return [floats(2, 1280), floats(2, cfg.time_ids(1280), dtype=jnp.float32)]


def test_vae() -> None:
    spec = vae_spec(SD_VAE)
    assert count(spec) / 1e6 == pytest.approx(83.65, rel=0.001)
    encoder = leaves_read(spec, lambda p, x: vae_encode(p, x, SD_VAE), floats(1, 64, 64, 3))
    decoder = leaves_read(spec, lambda p, z: vae_decode(p, z, SD_VAE), floats(1, 8, 8, 4))
    assert encoder | decoder == {leaf for leaf, _ in flatten(spec)}
    assert not encoder & decoder


@pytest.mark.parametrize(
    ("cfg", "millions"),
    [
        (clip_encoders(SD15_TEXT), 123.1),
        (clip_encoders(SD21_TEXT), 340.4),
        (clip_encoders(SDXL_TEXT, SDXL_TEXT_2), 123.1 + 694.7),
        (clip_encoders(None, SDXL_TEXT_2), 694.7),
    ],
    ids=["sd15", "sd21", "sdxl", "refiner"],
)
def test_text_encoders(cfg: TextEncoders, millions: float) -> None:
    assert sum(count(spec) for spec in cfg.specs.values()) / 1e6 == pytest.approx(millions, rel=0.01)
    inputs = {name: {"ids": floats(2, 77, dtype=jnp.int32)} for name in cfg.names}
    read = leaves_read(cfg.specs, lambda p, inputs: encode_text(p, inputs, cfg=cfg), inputs)
    # SDXL reads its first encoder before the final norm, which the checkpoint stores all the same.
    last = "text_encoder.text_model.final_layer_norm"
    unread = {f"{last}.weight", f"{last}.bias"} if len(cfg.names) == 2 else set()
    assert read == {leaf for leaf, _ in flatten(cfg.specs)} - unread


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize(
    "text",
    [clip_encoders(SD15_TEXT), clip_encoders(SDXL_TEXT, SDXL_TEXT_2), clip_encoders(None, SDXL_TEXT_2)],
    ids=["sd", "sdxl", "refiner"],
)
def test_conditions_have_the_shapes_that_are_declared(text: TextEncoders, dtypes: tuple[str, ...]) -> None:
    mine = [jnp.dtype(dtype) for dtype in dtypes[: len(text.names)]]
    params = {name: abstract(spec, dtype) for (name, spec), dtype in zip(text.specs.items(), mine, strict=True)}
    inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((3, *leaf.shape), leaf.dtype), text.inputs())
    with jax.numpy_dtype_promotion("standard"):  # encoders of two dtypes are joined
        got = jax.eval_shape(lambda p, inputs: encode_text(p, inputs, cfg=text), params, inputs)
        assert got == text.conditions(3, mine)
