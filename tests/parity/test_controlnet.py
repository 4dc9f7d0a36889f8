"""ControlNet and T2I-Adapter against PyTorch diffusers: what they add, their files. ``test_features`` has pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import canvax
from canvax.families.controls import adapter_config, controlnet_config
from canvax.models.controlnet import ControlNet
from canvax.models.controlnet_union import UnionNet
from canvax.models.presets import SD15_UNET, SDXL_UNET
from canvax.models.t2i_adapter import AdapterConfig, adapter, adapter_spec
from canvax.models.unet import Residuals, unet, unet_spec
from canvax.params import flatten
from canvax.weights.controlnet import open_control
from canvax.weights.location import Location
from tests.support.ldm_files import ldm_unet, write_folder
from tests.support.ldm_files import model as ldm_model
from tests.support.random_numbers import normal, rng

from .peer import SMALL_NET, UNION, XL_NET, controlnet, load, photo, tame, union
from .reference import nchw, nhwc, params_of, psnr, randomise, relative_error

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bgr": {"controlnet_conditioning_channel_order": "bgr"},
    "pooled": {"global_pool_conditions": True},
    "no_attention_in_the_middle": {"mid_block_type": "UNetMidBlock2D"},
    "linear": {"use_linear_projection": True, "upcast_attention": True, "layers_per_block": 2},
    "xl": XL_NET,
}
TIMES: Any = np.array([981.0, 3.25], np.float32)


def conditions_of(*, xl: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return text and what SDXL is told, for canvax and for diffusers."""
    ours: dict[str, Any] = {"text": normal(2, 77, 48)}
    if not xl:
        return ours, None
    ours |= {"pooled": normal(2, 24), "time_ids": np.array([[64, 48, 0, 13, 60, 2.5]] * 2, np.float32)}
    return ours, {"text_embeds": torch.from_numpy(ours["pooled"]), "time_ids": torch.from_numpy(ours["time_ids"])}


def check(
    reference: Any, net: Any, params: Any, features: Any, images: tuple[Any, ...], scales: np.ndarray, **told: Any
) -> None:
    """Demand that every array that is added is diffusers'."""
    x = normal(2, 18, 14, 4)
    conditions, added = conditions_of(xl=net.unet.addition_embed_type is not None)
    with torch.no_grad():
        down, middle = reference(
            nchw(x), torch.from_numpy(TIMES), torch.from_numpy(conditions["text"]), *images, added_cond_kwargs=added,
            return_dict=False, **told,
        )  # fmt: skip
    assert [one.shape for one in features] == [one.shape for one in net.features(x.shape, np.float32)]
    scales = np.tile(scales, (2, 1)).astype(np.float32)
    found = jax.jit(net.residuals)(params, x, TIMES, net.prepare(params, conditions, x.shape), features, scales)
    assert len(down) + 1 == net.layers == len(found.skips) + 1
    for got, want in zip([*found.skips, found.middle], [*down, middle], strict=True):
        assert relative_error(got, nhwc(want)) < 1e-5
    assert jax.tree.map(np.shape, net.nothing(x.shape, np.float32)) == jax.tree.map(np.shape, found)


def levels(net: Any, *, guess: bool) -> np.ndarray:
    return np.logspace(-1, 0, net.layers) if guess else np.ones(net.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_residuals(kind: str) -> None:
    """For each guess mode."""
    reference = controlnet(**KINDS[kind])
    net = ControlNet.from_dict(dict(reference.config))
    params = params_of(reference, net.spec)
    images = rng.random((2, 144, 112, 3), np.float32)
    features = jax.jit(net.encode)(params, images)
    for guess in (False, True):
        scales = 0.8 * levels(net, guess=guess and not net.pools)
        check(reference, net, params, features, (nchw(images), 0.8), scales, guess_mode=guess)


@pytest.mark.parametrize(("slots", "weights", "guess"), [
    ([1], [1.0], False),
    ([7, 0, 3], [1.0, 0.5, 1.5], False),
    ([2], [1.0], True),
    ([2, 5], [1.0, 1.0], True),
])  # fmt: skip
def test_residuals_by_type(slots: list[int], weights: list[float], guess: bool) -> None:
    """Of several images each has its own weight, which the model takes, no pipeline does."""
    reference = union()
    net = UnionNet.from_dict(dict(reference.config))
    params = params_of(reference, net.spec)
    images = [np.repeat(rng.random((1, 144, 112, 3), np.float32), 2, 0) for _ in slots]
    kinds = torch.zeros(2, UNION["num_control_type"])
    kinds[:, slots] = 1
    read = [jax.jit(net.encode)(params, one) for one in images]
    kept = [net.together([(hint[i], mean[i]) for hint, mean in read], slots, weights) for i in range(2)]
    features = tuple(np.stack(parts) for parts in zip(*kept, strict=True))
    shown = ([nchw(one) for one in images], kinds, slots)
    check(reference, net, params, features, shown, levels(net, guess=guess), conditioning_scale=weights,
          guess_mode=guess)  # fmt: skip


def test_images_of_a_batch_change_each_other_in_diffusers() -> None:
    """Its attention takes the batch for the tokens. Here each image is what it is alone, in any company."""
    reference = union()
    tokens = torch.from_numpy(rng.standard_normal((2, 3, 32), np.float32))
    with torch.no_grad():
        both, alone = (reference.transformer_layes[0](x) for x in (tokens, tokens[:1]))
        other_types = reference.transformer_layes[0](tokens[:1, :2])
    assert float((both[:1] - alone).abs().max()) > 1e-2
    torch.testing.assert_close(other_types, alone[:, :2])  # and of the other tokens it sees none


@pytest.mark.slow
def test_one_step() -> None:
    """Residuals in the UNet, and an adapter's features within its way down."""
    reference = randomise(diffusers.UNet2DConditionModel(
        sample_size=16, **{k: v for k, v in SMALL_NET.items() if "conditioning" not in k},
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ))  # fmt: skip
    net = ControlNet.from_dict(dict(controlnet().config))
    cfg = net.unet
    cfg = type(cfg)(**{**vars(cfg), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")})
    params = params_of(reference, unet_spec(cfg))
    x: Any = rng.standard_normal((2, 16, 16, 4), np.float32)
    text: Any = rng.standard_normal((2, 77, 48), np.float32)
    t: Any = np.array([981.0, 3.25], np.float32)
    added: Any = net.nothing(x.shape, np.float32)
    added = Residuals(*jax.tree.map(lambda one: rng.standard_normal(one.shape, np.float32), added)[:2])
    within = [rng.standard_normal(shape, np.float32) for shape in ((2, 16, 16, 32), (2, 8, 8, 64))]
    with torch.no_grad():
        want = reference(
            nchw(x), torch.from_numpy(t), torch.from_numpy(text), mid_block_additional_residual=nchw(added.middle),
            down_block_additional_residuals=[nchw(one) for one in added.skips],
            down_intrablock_additional_residuals=[nchw(one) for one in within],
        ).sample  # fmt: skip
    residuals = added._replace(within={0: within[0], 2: within[1]})
    got = unet(params, x, t, text, cfg, residuals=residuals)
    assert relative_error(got, nhwc(want)) < 1e-5


# T2I-Adapter

ADAPTERS: dict[str, dict[str, Any]] = {
    "full_adapter": {"channels": [32, 64], "downscale_factor": 8},
    "full_adapter_xl": {"channels": [32, 64, 64], "downscale_factor": 16},
    "light_adapter": {"channels": [32], "downscale_factor": 8, "num_res_blocks": 4},
    "grey": {"channels": [32, 64], "downscale_factor": 8, "in_channels": 1},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter(kind: str) -> None:
    own = {"adapter_type": "full_adapter" if kind == "grey" else kind} | ADAPTERS[kind]
    reference: Any = randomise(diffusers.T2IAdapter(**own))
    cfg = AdapterConfig.from_dict(dict(reference.config))
    images = rng.random((2, 112, 144, 3), np.float32)  # of which one side is odd below
    with torch.no_grad():
        want = reference(nchw(images[..., : cfg.in_channels]))
    got = jax.jit(adapter, static_argnums=2)(params_of(reference, adapter_spec(cfg)), images, cfg)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, nhwc(other)) < 1e-5


# Files


def ldm_of(state: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a ControlNet under the names of the original code."""
    renamed = {}
    for name, array in ldm_unet(state).items():
        parts = name.split(".")
        if parts[0] == "controlnet_cond_embedding":
            ends = {"conv_in": 0, "conv_out": 14}
            at = ends[parts[1]] if parts[1] in ends else 2 * int(parts[2]) + 2
            name = f"input_hint_block.{at}.{parts[-1]}"
        elif parts[0] == "controlnet_down_blocks":
            name = f"zero_convs.{parts[1]}.0.{parts[2]}"
        elif parts[0] == "controlnet_mid_block":
            name = f"middle_block_out.0.{parts[1]}"
        renamed[f"control_model.{name}"] = array.clone().contiguous()
    return renamed


@pytest.mark.slow
def test_names_of_the_original_code(tmp_path: Path) -> None:
    """One file with other names, or with the difference to the UNet, is the same network as the folder."""
    parts = ldm_model("sd1")
    base = write_folder(tmp_path / "base", "sd1", parts)
    reference: Any = tame(randomise(diffusers.ControlNetModel.from_unet(parts["unet"]), 3))
    reference.save_pretrained(tmp_path / "folder")
    state = reference.state_dict()
    save_file(ldm_of(state), tmp_path / "ldm.safetensors")
    without = {name.removeprefix("control_model."): array for name, array in ldm_of(state).items()}
    save_file(without, tmp_path / "bare.safetensors")
    own = parts["unet"].state_dict()
    apart = {name: array - own[name] if name in own else array for name, array in state.items()}
    save_file(ldm_of(apart) | {"difference": torch.zeros(1)}, tmp_path / "difference.safetensors")
    (tmp_path / "no_config").mkdir()
    save_file(dict(state), tmp_path / "no_config" / "diffusion_pytorch_model.safetensors")
    pipe = load(base, controlnet=tmp_path / "folder")
    assert pipe.params is not None
    wanted = dict(flatten(pipe.params["controlnet"]))
    for name in ("ldm.safetensors", "bare.safetensors", "difference.safetensors", "no_config"):
        other = pipe.with_controlnet(tmp_path / name)
        assert other.params is not None
        assert other.model.networks.denoiser == pipe.model.networks.denoiser
        for key, leaf in flatten(other.params["controlnet"]):
            np.testing.assert_allclose(leaf, wanted.pop(key) if name == "no_config" else wanted[key], rtol=0, atol=1e-6)
        if name != "difference.safetensors":
            assert other.model.networks.controls == pipe.model.networks.controls
    assert not wanted


def as_control_lora(
    state: dict[str, Any], unet: dict[str, Any], rank: int = 3
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file as Stability AI's and, by the equation in float64, the whole network that it stands for.

    Matrices of the UNet's are in factors; of its biases and norms some are the UNet's, others in the file.
    """
    generator = torch.Generator().manual_seed(1)
    file: dict[str, Any] = {}
    whole = dict(state)
    for i, (name, array) in enumerate(state.items()):
        if name not in unet:
            file[name] = array
        elif array.ndim > 1:
            up, down = (torch.randn(size, generator=generator).double() / 8
                        for size in ((len(array), rank), (rank, *array.shape[1:])))  # fmt: skip
            product = (up @ down.flatten(1)).reshape(array.shape)
            whole[name] = (unet[name].double() + product).float()
            ups = up[:, :, None, None] if array.ndim == 4 else up
            file |= {
                f"{name.removesuffix('.weight')}.up": ups.float(),
                f"{name.removesuffix('.weight')}.down": down.float(),
            }
        elif i % 3:
            file[name] = array
        else:
            whole[name] = unet[name]
    return file, whole


def ldm_of_lora(file: dict[str, Any]) -> dict[str, Any]:
    """Under the names of the original code, which has no word for factors."""
    renamed = {}
    for end in (".up", ".down", ""):
        own = {name.removesuffix(end) + ".weight" * bool(end): array for name, array in file.items()
               if (name.endswith(end) if end else not name.endswith((".up", ".down")))}  # fmt: skip
        for name, array in ldm_of(own).items():
            name = name.removeprefix("control_model.")
            renamed[name.removesuffix(".weight") + end if end else name] = array
    return renamed | {"lora_controlnet": torch.zeros(1)}


@pytest.mark.slow
def test_control_lora(tmp_path: Path) -> None:
    """Every array, for every kind of it: factors of matrices and convolutions, whole ones, those of the UNet."""
    parts = ldm_model("sd1")
    base = write_folder(tmp_path / "base", "sd1", parts)
    reference: Any = tame(randomise(diffusers.ControlNetModel.from_unet(parts["unet"]), 3))
    unet = parts["unet"].state_dict()
    file, whole = as_control_lora(reference.state_dict(), unet)
    save_file({k: v.contiguous() for k, v in ldm_of_lora(file).items()}, tmp_path / "control-lora.safetensors")
    reference.load_state_dict(whole)
    reference.save_pretrained(tmp_path / "folder")
    pipe = load(base, controlnet=tmp_path / "folder")
    other = pipe.with_controlnet(tmp_path / "control-lora.safetensors")
    assert pipe.params is not None
    assert other.params is not None
    wanted = dict(flatten(pipe.params["controlnet"]))
    found = dict(flatten(other.params["controlnet"]))
    assert found.keys() == wanted.keys()
    for key, leaf in found.items():
        np.testing.assert_allclose(leaf, wanted[key], rtol=0, atol=1e-5, err_msg=key)
    assert other.model.networks.controls == pipe.model.networks.controls
    np.testing.assert_array_equal(other.params["unet"]["conv_in"]["weight"], pipe.params["unet"]["conv_in"]["weight"])
    told: dict[str, Any] = {"control": photo(1), "seed": 1, "num_inference_steps": 2, "progress": False}
    assert psnr(other("a cat", **told).pixels, pipe("a cat", **told).pixels) >= 60


def test_broken_control_loras(tmp_path: Path) -> None:
    parts = ldm_model("sd1")
    base = write_folder(tmp_path / "base", "sd1", parts)
    reference: Any = randomise(diffusers.ControlNetModel.from_unet(parts["unet"]), 3)
    file = ldm_of_lora(as_control_lora(reference.state_dict(), parts["unet"].state_dict())[0])
    pipe = load(base)
    some = next(name for name in file if name.endswith("to_q.up"))
    key = some.removesuffix(".up")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "one factor": ({f"{key}.down": None}, "has one of its two factors"),
        "no factors": ({name: None for name in file if name.endswith((".up", ".down"))}, "it has no factors"),
        "ranks": ({f"{key}.down": torch.zeros(5, file[f"{key}.down"].shape[1])}, "do not fit together"),
        "another shape": ({some: torch.zeros(7, 3)}, "factors of"),
        "a factor of nothing": ({"x.up": torch.zeros(2, 2), "x.down": torch.zeros(2, 2)}, "nothing has such a weight"),
        "missing": ({"zero_convs.0.0.weight": None}, "missing"),
        "strange": ({"x.weight": torch.zeros(2)}, "unused"),
        "not finite": ({some: torch.full_like(file[some], torch.nan)}, "not finite"),
        "whole numbers": ({some: torch.zeros_like(file[some], dtype=torch.int32)}, "no floating point"),
    }
    for name, (changes, said) in cases.items():
        arrays = {k: v.contiguous() for k, v in {**file, **changes}.items() if v is not None}
        save_file(arrays, tmp_path / f"{name}.safetensors")
        with pytest.raises(canvax.CheckpointError, match=said):
            pipe.with_controlnet(tmp_path / f"{name}.safetensors")
    save_file({k: v.contiguous() for k, v in file.items()}, tmp_path / "whole.safetensors")
    small = load(base, quantize="int8")
    with pytest.raises(canvax.InputError, match="without quantize"):
        small.with_controlnet(tmp_path / "whole.safetensors")


@pytest.mark.parametrize("kind", ["full_adapter", "light_adapter"])
def test_adapters_of_the_original_code(kind: str, tmp_path: Path) -> None:
    light = kind == "light_adapter"
    channels = [64] if light else [64, 128]
    reference: Any = randomise(diffusers.T2IAdapter(3, channels, 4 if light else 2, 8, kind))
    renamed = {}
    for name, array in reference.state_dict().items():
        head, *rest = name.removeprefix("adapter.").split(".")
        if head != "conv_in":
            block, part, *more = rest
            if light:
                rest = [block, "body", *more] if part == "resnets" else [block, part, *more]
            else:
                at = 2 * int(block) + (int(more[0]) if part == "resnets" else 0)
                rest = [str(at), *more[1:]] if part == "resnets" else [str(at), part, *more]
        renamed[".".join([head, *rest])] = array.clone()
    save_file(renamed, tmp_path / "own.safetensors")
    reference.save_pretrained(tmp_path / "folder")
    folder, own = (
        open_control(Location(tmp_path / name), accept=lambda *_: None) for name in ("folder", "own.safetensors")
    )
    assert folder.config is not None
    told, guessed = (AdapterConfig.from_dict(one) for one in (folder.config, adapter_config(own.shapes)))
    assert told == guessed
    arrays = {one.name: one.read() for one in own.arrays}
    assert own.shapes == folder.shapes
    for one in folder.arrays:
        np.testing.assert_array_equal(arrays[one.name], one.read())


def sizes_of(cls: Any, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a network of diffusers without its memory, and the shapes of its arrays."""
    with torch.device("meta"):
        made = cls(**config)
    return made, {name: tuple(array.shape) for name, array in made.state_dict().items()}


FULL_SIZES: dict[str, dict[str, Any]] = {
    "sd15": {}, "sdxl": {}, "sdxl-6-types": {"num_control_type": 6}, "sdxl-8-types": {"num_control_type": 8},
    "sdxl-small": {"down_block_types": ("DownBlock2D",) * 3, "mid_block_type": "UNetMidBlock2D"},
    "sdxl-mid": {
        "down_block_types": ("DownBlock2D",) * 2 + ("CrossAttnDownBlock2D",), "transformer_layers_per_block": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FULL_SIZES)
def test_full_size_parameters(kind: str) -> None:
    """Names and shapes of the released networks, and a config that is made of them."""
    base = SDXL_UNET if kind.startswith("sdxl") else SD15_UNET
    left_out = ("sample_size", "out_channels", "up_block_types", "time_cond_proj_dim")
    config = {name: value for name, value in vars(base).items() if value is not None and name not in left_out}
    typed = "num_control_type" in FULL_SIZES[kind]
    cls: Any = UnionNet if typed else ControlNet
    reference, found = sizes_of(
        diffusers.ControlNetUnionModel if typed else diffusers.ControlNetModel, config | FULL_SIZES[kind]
    )
    told, guessed = (cls.from_dict(one) for one in (dict(reference.config), controlnet_config(found, base)))
    for net in (told, guessed):
        assert found == {name: param.checkpoint_shapes[0] for name, param in flatten(net.spec)}
    assert guessed.unet.heads == told.unet.heads
    assert not typed or told.union == guessed.union
