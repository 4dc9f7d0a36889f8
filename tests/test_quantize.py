"""Weights of 8 bits: what becomes of them, of the picture and of the memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import canvax
from canvax import nn
from canvax.cli import main
from canvax.families.known import PRESETS
from canvax.kernels.target import compiling_for
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import device_bytes
from canvax.params import Params, count, flatten
from canvax.pipelines.loaded import weight_bytes
from canvax.quantize import KINDS, compute_dtype, quantize, quantized_specs

WEIGHTS = ("int8", "float8")
"""Kinds that leave activations as they are."""

PROMPTS = ["a red apple", "a cat"]
QUIET = canvax.Options(progress=False)


def one_device() -> Any:
    """A mesh of one: on all eight, two prompts would be filled up to eight."""
    return make_mesh(jax.devices()[:1])


def draw(pipe: canvax.Pipeline) -> np.ndarray:
    return pipe(PROMPTS, seed=[1, 2], num_inference_steps=10, options=QUIET).pixels


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(-10 * np.log10(np.square(a - b).mean()))


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    return draw(canvax.load("emoji", mesh=one_device()))


@pytest.mark.parametrize("model", ["float32", "bfloat16", "float16"])
def test_the_dtype_that_is_computed_in(model: str) -> None:
    """Whatever the names and their order: some parameters are float32 always, and 8 bits are no dtype to compute in."""
    narrow, wide, table = jnp.zeros(2, model), jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.int32)
    layers = {"a_norm": {"weight": wide}, "kernel": narrow, "q": {"weight": table.astype(jnp.int8), "scale": wide}}
    for names in (list(layers), list(reversed(layers))):
        assert compute_dtype({"table": table, **{name: layers[name] for name in names}}) == model
    assert compute_dtype({}) == compute_dtype({"q": layers["q"]}) == jnp.float32


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", [(64, 32), (3, 3, 16, 8)], ids=str)
def test_nearest_weights(kind: str, shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.linspace(0.01, 10, shape[-1])
    weight[..., 3] = 0
    weight[..., 4] = 1e-42 * np.sign(weight[..., 4])  # a dead channel: its ratios would overflow
    weight = weight.astype(np.float32)
    narrow, scale = quantize(weight, KINDS[kind])
    assert (narrow.dtype, scale.dtype, scale.shape) == (jnp.dtype(KINDS[kind]), np.float32, shape[-1:])
    wide = narrow.astype(np.float32) * scale
    # Half a step of int8; of e4m3 half of the last of three bits, and half of the smallest number.
    bound = scale / 2 if kind == "int8" else np.abs(weight) / 16 + scale * 2**-10
    assert np.isfinite(wide).all()
    assert (np.abs(wide - weight) <= bound * 1.0001).all()
    np.testing.assert_allclose(
        np.abs(wide).max((*range(weight.ndim - 1),)), np.abs(weight).max((*range(weight.ndim - 1),)), atol=1e-41
    )


def test_which_weights() -> None:
    """Matrices and convolutions of blocks; nothing of the autoencoder, nor what is small and matters everywhere."""
    specs = PRESETS["sdxl"].specs()
    narrow = quantized_specs(specs, "int8")
    assert narrow["vae"] == specs["vae"]
    assert quantized_specs(specs, None) == specs
    names = {name for name, param in flatten(narrow["unet"]) if param.dtype == "int8"}
    assert "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj.weight" in names
    assert "up_blocks.0.resnets.0.conv1.weight" in names
    assert "mid_block.attentions.0.proj_in.weight" in names
    top = {name.split(".")[0] for name in names}
    assert top == {"down_blocks", "mid_block", "up_blocks"}
    assert not any("time_emb_proj" in name or "norm" in name for name in names)
    scales = {name for name, param in flatten(narrow["unet"]) if name.endswith(".scale")}
    assert scales == {name.removesuffix("weight") + "scale" for name in names}
    share = sum(param.size for name, param in flatten(specs["unet"]) if name in names) / count(specs["unet"])
    assert share > 0.97
    sizes = {"data": 1, "model": 1}
    bytes_of = {name: device_bytes(spec, jnp.bfloat16, sizes) for name, spec in narrow.items()}
    assert 2.57e9 < bytes_of["unet"] < 2.7e9  # 5.14 GB in bfloat16


@pytest.mark.parametrize(
    ("preset", "blocks", "whole"),
    [
        ("z-image", {"context_refiner", "layers", "noise_refiner"}, "adaLN_modulation"),
        ("flux2-klein-4b", {"single_transformer_blocks", "transformer_blocks"}, None),
        ("flux3-klein", {"single_transformer_blocks", "mode_blocks", "txt_mode_blocks"}, None),
        ("krea-2", {"text_fusion", "transformer_blocks"}, "projector"),
    ],
)
def test_which_weights_of_transformers(preset: str, blocks: set[str], whole: str | None) -> None:
    """Matrices of blocks without their modulation; what every token passes once stays whole."""
    spec = quantized_specs(PRESETS[preset].specs(), "int8")["transformer"]
    for name, param in flatten(spec):
        if name.endswith("weight") and len(param.shape) > 1:
            parts = name.split(".")
            assert (param.dtype == "int8") == (parts[0] in blocks and whole not in parts), name


def test_what_stays_whole_in_text_encoders() -> None:
    """The projection of pooled text and the embeddings, which every number of a prompt passes through."""
    specs = PRESETS["sdxl"].specs()
    narrow = quantized_specs(specs, "int8")
    for name in ("text_encoder", "text_encoder_2"):
        whole = {key for key, param in flatten(narrow[name]) if key.endswith(".weight") and param.dtype != "int8"}
        embeddings = {f"text_model.embeddings.{kind}_embedding.weight" for kind in ("token", "position")}
        projection = {"text_projection.weight"} if name == "text_encoder_2" else set()
        assert {key for key in whole if "norm" not in key} == embeddings | projection
        scales = {key for key, _ in flatten(narrow[name]) if key.endswith(".scale")}
        assert len(scales) == sum(param.dtype == "int8" for _, param in flatten(narrow[name])) > 12 * 6 - 1


def test_which_products() -> None:
    """Linear layers of the denoiser; convolutions and text encoders have 8-bit weights only."""
    specs = PRESETS["sdxl"].specs()
    plain, products = (quantized_specs(specs, kind) for kind in ("int8", "int8-w8a8"))
    assert products["text_encoder_2"] == plain["text_encoder_2"]
    declared, ours = dict(flatten(plain["unet"])), dict(flatten(products["unet"]))
    kinds = {name: len(declared[name.replace("scale", "weight")].shape) for name in declared if name.endswith(".scale")}
    assert set(kinds.values()) == {2, 4}
    expected = {name if kinds[name] == 4 else name.replace(".scale", ".product_scale") for name in kinds}
    assert {name for name in ours if name.endswith("scale")} == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["linear", "gated"])
def test_products_of_8_bits(name: str, kind: str, dtype: Any, platform: str) -> None:
    """Each token is rounded to 8 bits as a column of weights is, and the product is that of the rounded numbers."""
    function, p, whole, x = layer(kind, name)
    x *= np.geomspace(1e-3, 1e3, 64, dtype=np.float32)[:, None]  # tokens of all sizes
    x[0, 5], x[1, 6] = 0, 1e-42
    given = jnp.asarray(x, dtype)
    columns, scale = quantize(np.asarray(given, np.float32).reshape(-1, 320).T, KINDS[kind])
    rounded = (columns.astype(np.float32) * scale).T.reshape(x.shape)
    p["product_scale"] = p.pop("scale")
    with compiling_for(platform):
        got = function({**p, "bias": p["bias"].astype(dtype)}, given)
    assert got.dtype == dtype
    want = np.asarray(function(whole, jnp.asarray(rounded)))
    error = np.asarray(got, np.float32) - want
    sides = (0, 3) if name == "gated" else -1
    apart_by = np.linalg.norm(error, axis=sides) / (np.linalg.norm(want, axis=sides) + 1e-30)
    # A number halfway between two of 8 bits may be rounded to the other one; in bfloat16 many are.
    assert np.quantile(apart_by, 0.9) < (1e-5 if dtype == jnp.float32 else 6e-3)


@pytest.mark.parametrize("name", ["linear", "gated"])
def test_products_of_8_bits_on_two_devices(name: str) -> None:
    """A token has one scale, though each device has half of its numbers; sums of integers are exact."""
    function, p, _, x = layer("int8", name)
    p["product_scale"] = p.pop("scale")
    mesh = make_mesh(jax.devices()[:2], data=1, model=2)
    halves = {key: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec())) for key, leaf in p.items()}
    halves["weight"] = jax.device_put(p["weight"], NamedSharding(mesh, PartitionSpec("model")))
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "model")))
    with compiling_for("tpu"):
        got, want = (jax.jit(lambda p, x: function(p, x))(*each) for each in ((halves, split), (p, x)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * float(jnp.abs(want).max()))


def layer(kind: str, name: str) -> tuple[Callable[[Params, Any], Any], Params, Params, np.ndarray]:
    """A layer as a function, its parameters of 8 bits, the same ones widened, and what it is given."""
    rng = np.random.default_rng(0)
    shape, given = ((320, 256), (2, 64, 320)) if name in ("linear", "gated") else ((3, 3, 64, 96), (1, 12, 12, 64))
    narrow, scale = quantize(0.05 * rng.standard_normal(shape).astype(np.float32), KINDS[kind])
    parts = (320, 2, 128) if name == "gated" else shape
    wide = (narrow.astype(np.float32) * scale).reshape(parts)
    p = {
        "weight": jnp.asarray(narrow.reshape(parts)),
        "scale": jnp.asarray(scale.reshape(parts[1:] if name == "gated" else -1)),
    }
    bias = jnp.zeros(p["scale"].shape)
    functions = {
        "linear": nn.linear, "gated": lambda p, x: jnp.stack(nn.gated_linear(p, x)),
        "conv": nn.conv2d, "doubled": nn.conv2d_of_doubled,
    }  # fmt: skip
    whole = {"weight": jnp.asarray(wide), "bias": bias}
    return functions[name], {**p, "bias": bias}, whole, rng.standard_normal(given).astype(np.float32)


def apart(one: Any, other: Any) -> float:
    one, other = (np.asarray(array, np.float64) for array in (one, other))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["linear", "gated", "conv", "doubled"])
def test_nothing_of_the_weights_is_rounded(name: str, kind: str, dtype: Any) -> None:
    """What 16 bits lose is the rounding of the result: scales multiply it, and the weights of 8 bits are exact."""
    function, p, whole, x = layer(kind, name)
    given = jnp.asarray(x, dtype)
    want = function(whole, given.astype(jnp.float32))
    rounding = apart(want.astype(dtype), want)
    got = function({**p, "bias": p["bias"].astype(dtype)}, given)
    assert got.dtype == dtype
    assert apart(got, want) < max(1.05 * rounding, 1e-6)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("name", ["linear", "gated", "conv", "doubled"])
def test_float16_holds_results_of_large_weights(name: str, platform: str) -> None:
    """Where convolutions are not computed in float32: sums of weights up to 127 would be infinite there."""
    function, p, whole, x = layer("int8", name)
    with compiling_for(platform, kind="TPU v3"):
        got = function({**p, "bias": p["bias"].astype(jnp.float16)}, jnp.asarray(100 * x, jnp.float16))
    assert apart(got, function(whole, jnp.asarray(100 * x))) < 1e-3


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("int8", 40),
        pytest.param("int8-w8a8", 34, marks=pytest.mark.slow),
        *(pytest.param(kind, 28, marks=pytest.mark.weekly) for kind in ("float8", "float8-w8a8")),
    ],
)
def test_nearly_the_same_picture(kind: str, least: float, whole: np.ndarray) -> None:
    pipe = canvax.load("emoji", quantize=kind, mesh=one_device())
    assert pipe.params is not None
    unet = dict(flatten(pipe.params["unet"]))
    assert unet["mid_block.resnets.0.conv1.weight"].dtype == jnp.dtype(KINDS[kind])
    assert unet["conv_in.weight"].dtype == np.float32
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pipe.params))
    assert held == weight_bytes(pipe.model.components, np.float32, {"data": 1, "model": 1}) == pipe.memory().weights
    assert psnr(draw(pipe), whole) > least


@pytest.mark.slow
def test_halves_of_the_weights_on_two_devices(whole: np.ndarray) -> None:
    """Scales are split as the outputs that they belong to."""
    pipe = canvax.load("emoji", quantize="int8", mesh=make_mesh(jax.devices()[:2], data=1, model=2))
    params = pipe.params
    assert params is not None

    def halves(p: Params) -> list[bool]:
        return [leaf.addressable_shards[0].data.size < leaf.size for leaf in (p["weight"], p["scale"])]

    block = params["unet"]["mid_block"]["attentions"]["0"]["transformer_blocks"]["0"]
    assert halves(block["attn1"]["to_q"]) == halves(block["ff"]["net"]["0"]["proj"]) == [True, True]
    assert halves(block["attn1"]["to_out"]["0"]) == [True, False]
    one = draw(canvax.load("emoji", quantize="int8", mesh=one_device()))
    np.testing.assert_allclose(draw(pipe), one, atol=1e-3)
    assert psnr(one, whole) > 40


@pytest.mark.weekly
def test_half_precision_does_not_overflow(whole: np.ndarray) -> None:
    """Weights of up to 127 are widened by their scales before they are multiplied."""
    pipe = canvax.load("emoji", dtype="float16", quantize="int8", mesh=one_device())
    assert psnr(draw(pipe), whole) > 38


def test_what_cannot_be(tmp_path: Path) -> None:
    pipe = canvax.load("emoji", quantize="int8")
    with pytest.raises(canvax.InputError, match="quantised to int8 cannot be saved; load the model without"):
        pipe.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.weekly
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["info", "emoji", "--memory", "--quantize", "int8"]) == 0
    assert "float32 with int8 weights" in capsys.readouterr().out
    assert main(["info", "emoji", "--memory", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert max(memory["programs"].values()) + memory["components"]["vae"] < memory["streamed"] < memory["total"]
