"""Adapters: read strictly, merged as the equations say, and taken out again to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import canvax
from canvax.params import flatten
from canvax.quantize import scale_of
from tests.support.adapter_files import (
    Draw,
    Made,
    dora,
    full,
    kohya,
    kohya_ldm,
    layers,
    ldm_name,
    loha,
    loha_tucker,
    lokr,
    lora,
    lora_tucker,
    replaced,
    stored,
    without_alpha,
    write,
)
from tests.support.checkpoints import BFLOAT16
from tests.support.drawing import one_device
from tests.support.small_checkpoint import write_small_checkpoint
from tests.support.small_sdxl import build

Make = Callable[[Draw, tuple[int, ...]], Made]
KERNEL = 4
"""Axes of the weight of a convolution."""


@pytest.fixture(scope="module")
def sd(small: canvax.Pipeline) -> canvax.Pipeline:
    return small


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    return canvax.load(build(tmp_path_factory.mktemp("xl")), mesh=one_device())


def leaves(pipe: canvax.Pipeline) -> dict[str, np.ndarray]:
    assert pipe.params is not None
    return {name: np.asarray(leaf) for name, leaf in flatten(pipe.params)}


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test loads, taking it out gives the very bits back."""
    pipes = [request.getfixturevalue(name) for name in ("sd", "xl") if name in request.fixturenames]
    before = [leaves(pipe) for pipe in pipes]
    yield
    for pipe, was in zip(pipes, before, strict=True):
        pipe.adapters.remove()
        now = leaves(pipe)
        assert now.keys() == was.keys()
        assert all(now[name].tobytes() == was[name].tobytes() for name in was)
        assert not pipe.model.merged
        assert not pipe.adapters._merging._kept  # nor is memory held
        assert not any(tokenizer.added for tokenizer in pipe.model.tokenizers.values())


def check_merged(pipe: canvax.Pipeline, deltas: dict[tuple[str, str], Any], load: Callable[[], Any]) -> None:
    """Merged weights are the base and the deltas, computed in float64: 1e-6 relative; all others are as they were."""
    before = leaves(pipe)
    params = {part.name: dict(flatten(part.spec)) for part in pipe.model.components}
    load()
    after = leaves(pipe)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {".".join(key) for key in deltas}
    for (component, name), delta in deltas.items():
        param, path = params[component][name], f"{component}.{name}"
        base = stored(param, before[path])
        wanted = base + delta(base)
        error = np.abs(stored(param, after[path]) - wanted).max() / np.abs(wanted).max()
        assert error < 1e-6, (path, error)


def only_convs(shape: tuple[int, ...]) -> bool:
    return len(shape) == KERNEL and shape[-1] == 3


FORMATS: dict[str, tuple[Make, Callable[[tuple[int, ...]], bool]]] = {
    "lora": (lora, lambda shape: True),
    "lora without alpha": (without_alpha, lambda shape: True),
    "lora with a core": (lora_tucker, only_convs),
    "dora by outputs": (dora(0), lambda shape: True),
    "dora by inputs": (dora(1), lambda shape: True),
    "loha": (loha, lambda shape: True),
    "loha with cores": (loha_tucker, only_convs),
    "lokr of wholes": (lokr("whole", "whole"), lambda shape: True),
    "lokr of a whole and a product": (lokr("whole", "product"), lambda shape: True),
    "lokr of products": (lokr("product", "product"), lambda shape: True),
    "lokr with a core": (lokr("whole", "tucker"), only_convs),
    "loha with dora": (dora(0, loha), lambda shape: True),
    "lokr with dora": (dora(0, lokr("whole", "product")), lambda shape: True),
    "full": (full, lambda shape: True),
    "replaced": (replaced, lambda shape: True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, sd: canvax.Pipeline, tmp_path: Path) -> None:
    """Every format, on every layer that it is for, with ranks unlike alpha that differ by layer."""
    make, suits = FORMATS[name]
    draw, arrays, deltas = Draw(), {}, {}
    for (component, module), shape in layers(sd.model.networks.specs()).items():
        if suits(shape):
            made = make(draw, shape)
            arrays |= {kohya(component, module) + end: array for end, array in made.arrays.items()}
            deltas[component, f"{module}.weight"] = made.delta
    assert len(deltas) > 10
    file = write(tmp_path / "a.safetensors", arrays)
    check_merged(sd, deltas, lambda: sd.adapters.load("a", file))


# Names


def peft(component: str, module: str) -> str:
    return f"{component}.{module}"


def without_text_model(component: str, module: str) -> str:
    return f"{component}.{module.removeprefix('text_model.')}"


def bare(component: str, module: str) -> str:
    return module


def lycoris(component: str, module: str) -> str:
    return f"lycoris_{module}".replace(".", "_") if component == "unet" else kohya(component, module)


def old_diffusers(component: str, module: str) -> str:
    names = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}
    attention, _, step = module.removesuffix(".0").rpartition(".")
    if component == "unet":
        return f"unet.{attention}.processor.{step}"
    return f"text_encoder.{attention}.{names[step]}"


def ldm_dotted(component: str, module: str) -> str:
    return f"diffusion_model.{ldm_name(module, 2)}"


PEFT_ENDS = {".lora_down.weight": ".lora_A.weight", ".lora_up.weight": ".lora_B.weight"}
NAMES: dict[str, tuple[Callable[[str, str], str], dict[str, str], Callable[[str, str], bool]]] = {
    "kohya": (kohya, {}, lambda component, module: True),
    "peft": (peft, PEFT_ENDS, lambda component, module: True),
    "peft without text_model": (without_text_model, PEFT_ENDS, lambda component, module: True),
    "peft with a name": (
        peft, {".lora_down.weight": ".lora_A.default.weight", ".lora_up.weight": ".lora_B.default.weight"},
        lambda component, module: component == "unet",
    ),
    "peft without a prefix": (bare, PEFT_ENDS, lambda component, module: component == "unet"),
    "diffusers of 2023": (
        old_diffusers, {".lora_down.weight": "_lora.down.weight", ".lora_up.weight": "_lora.up.weight"},
        lambda component, module: ".attn" in module or "self_attn" in module,
    ),
    "diffusers of late 2023": (
        peft, {".lora_down.weight": ".lora.down.weight", ".lora_up.weight": ".lora.up.weight"},
        lambda component, module: component == "unet",
    ),
    "diffusers of the text encoder": (
        peft,
        {".lora_down.weight": ".lora_linear_layer.down.weight", ".lora_up.weight": ".lora_linear_layer.up.weight"},
        lambda component, module: component == "text_encoder",
    ),
    "lycoris": (lycoris, {}, lambda component, module: True),
    "ldm with dots": (ldm_dotted, {}, lambda component, module: component == "unet"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, sd: canvax.Pipeline, tmp_path: Path) -> None:
    """Whatever trainers call a module, it is found."""
    rename, ends, suits = NAMES[name]
    draw, arrays, deltas = Draw(), {}, {}
    for (component, module), shape in layers(sd.model.networks.specs()).items():
        if suits(component, module):
            made = lora(draw, shape)
            arrays |= {rename(component, module) + ends.get(end, end): array for end, array in made.arrays.items()}
            deltas[component, f"{module}.weight"] = made.delta
    check_merged(sd, deltas, lambda: sd.adapters.load("a", write(tmp_path / "a.safetensors", arrays)))


def test_two_ways_of_naming_in_one_file(xl: canvax.Pipeline, tmp_path: Path) -> None:
    """SDXL: names of ldm and of diffusers, by turns, and both text encoders."""
    draw, arrays, deltas = Draw(), {}, {}
    for i, ((component, module), shape) in enumerate(layers(xl.model.networks.specs()).items()):
        made = lora(draw, shape)
        name = kohya(component, module, xl=True) if i % 2 else kohya_ldm(component, module, each=2)
        arrays |= {name + end: array for end, array in made.arrays.items()}
        deltas[component, f"{module}.weight"] = made.delta
    assert any("input_blocks" in name for name in arrays)
    assert any("down_blocks" in name for name in arrays)
    check_merged(xl, deltas, lambda: xl.adapters.load("a", write(tmp_path / "a.safetensors", arrays)))


def linear_layers(pipe: canvax.Pipeline, count: int = 4) -> list[tuple[tuple[str, str], tuple[int, ...]]]:
    found = [pair for pair in layers(pipe.model.networks.specs()).items() if pair[0][1].endswith("to_q")]
    return found[:count]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("where", ["header", "file"])
def test_settings_of_peft(where: str, rslora: bool, sd: canvax.Pipeline, tmp_path: Path) -> None:
    """alpha and its exceptions from the header or from adapter_config.json; rank-stabilised."""
    draw, arrays, deltas = Draw(), {}, {}
    config: dict[str, Any] = {"r": 3, "lora_alpha": 5, "alpha_pattern": {}, "use_rslora": rslora}
    for i, ((component, module), shape) in enumerate(linear_layers(sd)):
        made, alpha = without_alpha(draw, shape), 5
        if i % 2:
            alpha = config["alpha_pattern"][module] = 7
        prefix = "unet." if where == "header" else "base_model.model."
        arrays |= {prefix + module + PEFT_ENDS[end]: array for end, array in made.arrays.items()}
        rank = made.arrays[".lora_down.weight"].shape[0]
        scale = alpha / (rank**0.5 if rslora else rank)
        deltas[component, f"{module}.weight"] = lambda w, made=made, scale=scale: scale * made.delta(w)
    if where == "header":
        told = {"lora_adapter_metadata": json.dumps({f"unet.{name}": value for name, value in config.items()})}
        source = write(tmp_path / "pytorch_lora_weights.safetensors", arrays, told).parent
    else:
        source = write(tmp_path / "adapter_model.safetensors", arrays).parent
        (source / "adapter_config.json").write_text(json.dumps(config))
    check_merged(sd, deltas, lambda: sd.adapters.load("a", source))


def test_magnitudes_of_peft(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """PEFT's DoRA is by outputs, whatever the shape: (out) of linear maps, (1, out, 1, 1) of convolutions."""
    draw, arrays, deltas = Draw(), {}, {}
    for (component, module), shape in layers(sd.model.networks.specs()).items():
        if component == "unet" and ".resnets." in module:
            made = dora(0)(draw, shape)
            made.arrays.pop(".alpha")
            rank = made.arrays[".lora_down.weight"].shape[0]
            magnitude = made.arrays.pop(".dora_scale")
            plain = without_alpha_of(made, rank)
            arrays |= {f"unet.{module}{PEFT_ENDS[end]}": array for end, array in made.arrays.items()}
            peft_form = magnitude.reshape(1, -1, 1, 1) if len(shape) == KERNEL else magnitude.reshape(-1)
            arrays[f"unet.{module}.lora_magnitude_vector"] = peft_form
            deltas[component, f"{module}.weight"] = normed(plain, magnitude)
    check_merged(sd, deltas, lambda: sd.adapters.load("a", write(tmp_path / "a.safetensors", arrays)))


def without_alpha_of(made: Made, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    up, down = (made.arrays[f".lora_{name}.weight"].astype(np.float64) for name in ("up", "down"))
    return lambda w: (up.reshape(-1, rank) @ down.reshape(rank, -1)).reshape(w.shape)


def normed(delta: Callable[[np.ndarray], np.ndarray], magnitude: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    def whole(w: np.ndarray) -> np.ndarray:
        merged = w + delta(w)
        length = np.sqrt((merged**2).reshape(len(w), -1).sum(1)).reshape(-1, *[1] * (w.ndim - 1))
        return magnitude.astype(np.float64) * merged / length - w

    return whole


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_dtypes_and_ways_to_store_a_1x1_convolution(dtype: Any, sd: canvax.Pipeline, tmp_path: Path) -> None:
    draw, arrays, deltas = Draw(), {}, {}
    names = [pair for pair in layers(sd.model.networks.specs()).items() if pair[0][1].endswith(("proj_in", "proj_out"))]
    for i, ((component, module), (out, into, *_)) in enumerate(names):
        down, up = draw(3, into).astype(dtype), draw(out, 3).astype(dtype)
        if i % 2:
            down, up = down[..., None, None], up[..., None, None]
        arrays |= {
            kohya(component, module) + ".lora_down.weight": down,
            kohya(component, module) + ".lora_up.weight": up,
        }
        product = up.astype(np.float64).reshape(out, 3) @ down.astype(np.float64).reshape(3, into)
        deltas[component, f"{module}.weight"] = lambda w, product=product: product.reshape(w.shape)
    check_merged(sd, deltas, lambda: sd.adapters.load("a", write(tmp_path / "a.safetensors", arrays)))


def test_biases_and_normalisations(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """diff_b, LoRA's own bias, w_norm and b_norm."""
    draw = Draw()
    unet, alpha = dict(flatten(sd.model.networks.specs()["unet"])), np.float32(6).reshape(())
    (norm,), (conv,) = unet["conv_norm_out.weight"].shape, unet["conv_out.bias"].shape
    made = lora(draw, unet["conv_in.weight"].checkpoint_shapes[0])
    rank = made.arrays[".lora_down.weight"].shape[0]
    arrays = {
        "lora_unet_conv_norm_out.w_norm": draw(norm), "lora_unet_conv_norm_out.b_norm": draw(norm),
        "lora_unet_conv_out.diff_b": draw(conv), **{f"lora_unet_conv_in{end}": a for end, a in made.arrays.items()},
        "lora_unet_conv_in.alpha": alpha, "lora_unet_conv_in.lora_up.bias": draw(*unet["conv_in.bias"].shape),
    }  # fmt: skip

    def added(name: str, scale: float = 1.0) -> Callable[[np.ndarray], np.ndarray]:
        return lambda w: scale * arrays[name].astype(np.float64)

    plain = without_alpha_of(made, rank)
    deltas = {
        ("unet", "conv_norm_out.weight"): added("lora_unet_conv_norm_out.w_norm"),
        ("unet", "conv_norm_out.bias"): added("lora_unet_conv_norm_out.b_norm"),
        ("unet", "conv_out.bias"): added("lora_unet_conv_out.diff_b"),
        ("unet", "conv_in.weight"): lambda w: 6 / rank * plain(w),
        ("unet", "conv_in.bias"): added("lora_unet_conv_in.lora_up.bias", 6 / rank),
    }
    check_merged(sd, deltas, lambda: sd.adapters.load("a", write(tmp_path / "a.safetensors", arrays)))


# Weights


def small(pipe: canvax.Pipeline, path: Path, seed: int = 0, **more: Any) -> tuple[Path, dict[Any, Any]]:
    """A LoRA of the attention of the UNet and of a text encoder, and what it does."""
    draw, arrays, deltas = Draw(seed), {}, {}
    for (component, module), shape in layers(pipe.model.networks.specs()).items():
        if module.endswith(("to_q", "to_v", "self_attn.q_proj")):
            made = lora(draw, shape)
            arrays |= {f"{component}.{module}{end}": array for end, array in made.arrays.items()}
            deltas[component, f"{module}.weight"] = made.delta
    return write(path, arrays, **more), deltas


def test_several_with_weights(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """Changes are added up with their weights; neither order nor what was before matters."""
    one, of_one = small(sd, tmp_path / "one.safetensors")
    two, of_two = small(sd, tmp_path / "two.safetensors", 1)

    def load() -> None:
        sd.adapters.load("two", two, weight=0.3)
        sd.adapters.load("one", one)
        sd.adapters.set({"one": 0.5, "two": -1.25})

    both = {key: lambda w, key=key: 0.5 * of_one[key](w) - 1.25 * of_two[key](w) for key in of_one}
    check_merged(sd, both, load)
    before = leaves(sd)
    sd.adapters.set({"two": 1})
    assert {name: one.weight for name, one in sd.adapters.items()} == {"two": 1, "one": 0.0}
    sd.adapters.set({"one": 0.5, "two": -1.25})
    after = leaves(sd)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert len(sd.adapters) == 2
    assert "one" in sd.adapters
    sd.adapters.remove("two")
    assert list(sd.adapters) == ["one"]


def test_weights_by_block(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """A table as diffusers takes it, and one of beginnings of names."""
    file, deltas = small(sd, tmp_path / "a.safetensors")
    weights = {"text_encoder": 0.25, "unet": {"down": 0.5, "up": {"block_1": [0.75, -1.0]}}}

    def factor(path: str) -> float:
        if path.startswith("text_encoder"):
            return 0.25
        if path.startswith("unet.up_blocks.1.attentions."):
            return [0.75, -1.0][int(path.split(".")[4])]
        return 0.5 if path.startswith("unet.down_blocks") else 1.0

    wanted = {key: lambda w, key=key: factor(".".join(key)) * deltas[key](w) for key in deltas}
    check_merged(sd, wanted, lambda: sd.adapters.load("a", file, weight=weights))
    first = leaves(sd)
    same = {"text_encoder": 0.25, "unet.down_blocks": 0.5, "unet.up_blocks.1.attentions.0": 0.75,
            "unet.up_blocks.1.attentions.1": -1.0}  # fmt: skip
    sd.adapters.set({"a": 1})
    sd.adapters.set({"a": same})
    assert all(first[name].tobytes() == array.tobytes() for name, array in leaves(sd).items())


def test_parameters_of_the_users_own_are_the_new_base(sd: canvax.Pipeline, tmp_path: Path) -> None:
    file, deltas = small(sd, tmp_path / "a.safetensors")

    def layer() -> Any:
        assert sd.params is not None
        return sd.params["unet"]["mid_block"]["attentions"]["0"]["transformer_blocks"]["0"]["attn1"]["to_q"]

    before = layer()["weight"]
    sd.adapters.load("a", file)
    layer()["weight"] = before * 2
    sd.adapters.set({"a": 0.0})
    np.testing.assert_array_equal(layer()["weight"], np.asarray(before) * 2)
    layer()["weight"] = before
    assert deltas


def test_an_overflow_changes_nothing(tmp_path: Path) -> None:
    pipe = canvax.load(write_small_checkpoint(tmp_path / "m"), dtype="float16", mesh=one_device())
    before = leaves(pipe)
    file, _ = small(pipe, tmp_path / "a.safetensors")
    arrays = {name: np.full_like(array, 300) for name, array in load_file(file).items()}
    write(file, arrays)
    with pytest.raises(canvax.CanvaxError, match="overflows in float16"):
        pipe.adapters.load("a", file)
    assert all(before[name].tobytes() == array.tobytes() for name, array in leaves(pipe).items())
    assert not pipe.adapters
    assert not pipe.model.merged


@pytest.mark.parametrize("kind", ["int8", "float8", "int8-w8a8"])
def test_weights_of_8_bits(kind: str, tmp_path: Path) -> None:
    """They are rounded once more, from what they stand for; without adapters the very bits are back."""
    pipe = canvax.load(write_small_checkpoint(tmp_path / "m"), quantize=kind, mesh=one_device())
    before = leaves(pipe)
    file, deltas = small(pipe, tmp_path / "a.safetensors")
    pipe.adapters.load("a", file)
    after = leaves(pipe)
    for (component, name), delta in deltas.items():
        path = f"{component}.{name}"
        scale = scale_of(path, before)
        assert scale
        base, now = (one[path].astype(np.float64) * one[scale] for one in (before, after))
        wanted = base + delta(base.T).T
        step = after[scale] * (0.51 if kind != "float8" else 17.0)  # half a unit; of float8, of its largest numbers
        assert (np.abs(now - wanted) <= step).all()
    pipe.adapters.remove("a")
    assert all(before[name].tobytes() == array.tobytes() for name, array in leaves(pipe).items())
