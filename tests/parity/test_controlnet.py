"""ControlNet and T2I-Adapter against PyTorch diffusers: their features, one step, whole pipelines.

The last convolutions of a new ControlNet are zero; ``randomise`` gives all weights values, or nothing would be tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import canvax
from canvax.families.controls import adapter_config, controlnet_config
from canvax.models.controlnet import ControlNet
from canvax.models.presets import SD15_UNET, SDXL_UNET
from canvax.models.t2i_adapter import AdapterConfig, adapter, adapter_spec
from canvax.models.unet import Residuals, unet, unet_spec
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten
from canvax.weights.controlnet import open_control
from canvax.weights.location import Location
from tests.support.ldm_files import ldm_unet, write_folder
from tests.support.ldm_files import model as ldm_model
from tests.support.random_numbers import rng

from .reference import given_noise, nchw, nhwc, params_of, psnr, randomise, relative_error
from .test_image_to_image import mask, photo
from .test_pipeline import NEGATIVE, PROMPTS, SEEDS, build
from .test_sdxl import build as build_xl

SIZE, LATENTS = 128, (16, 16, 4)
SMALL: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "attention_head_dim": 4, "cross_attention_dim": 48,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "conditioning_embedding_out_channels": (16, 32, 48, 64),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bgr": {"controlnet_conditioning_channel_order": "bgr"},
    "pooled": {"global_pool_conditions": True},
    "no_attention_in_the_middle": {"mid_block_type": "UNetMidBlock2D"},
    "linear": {"use_linear_projection": True, "upcast_attention": True, "layers_per_block": 2},
    "xl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
        "transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24 + 6 * 8, "use_linear_projection": True,
    },
}  # fmt: skip


def tame(module: Any, factor: float = 0.3) -> Any:
    """Weaker outputs: residuals as strong as the features themselves drown the image, and with it what is compared."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.startswith(("controlnet_down_blocks", "controlnet_mid_block")):
                p.mul_(factor)
    return module


def net_of(seed: int = 5, **changes: Any) -> Any:
    return tame(randomise(diffusers.ControlNetModel(**SMALL | changes), seed))


@pytest.mark.parametrize("kind", KINDS)
def test_residuals(kind: str) -> None:
    """Every array that is added, for each guess mode."""
    reference = net_of(**KINDS[kind])
    net = ControlNet.from_dict(dict(reference.config))
    params = params_of(reference, net.spec)
    x, text = (rng.standard_normal(s, np.float32) for s in ((2, 18, 14, 4), (2, 77, 48)))
    images, t = rng.random((2, 144, 112, 3), np.float32), np.array([981.0, 3.25], np.float32)
    conditions: dict[str, Any] = {"text": text}
    added = None
    if kind == "xl":
        conditions |= {"pooled": rng.standard_normal((2, 24), np.float32)}
        conditions |= {"time_ids": np.array([[64, 48, 0, 13, 60, 2.5]] * 2, np.float32)}
        added = {"text_embeds": torch.from_numpy(conditions["pooled"])}
        added |= {"time_ids": torch.from_numpy(conditions["time_ids"])}
    for guess, weights in ((False, np.ones(net.layers)), (True, np.logspace(-1, 0, net.layers))):
        with torch.no_grad():
            down, middle = reference(
                nchw(x), torch.from_numpy(t), torch.from_numpy(text), nchw(images), 0.8, guess_mode=guess,
                added_cond_kwargs=added, return_dict=False,
            )  # fmt: skip
        features = jax.jit(net.encode)(params, images)
        assert tuple(one.shape for one in features) == net.features(x.shape)
        scales = np.tile(0.8 * (np.ones(net.layers) if net.pools else weights), (2, 1)).astype(np.float32)
        found = jax.jit(net.residuals)(params, x, t, net.prepare(params, conditions), features, scales)
        assert len(down) + 1 == net.layers == len(found.skips) + 1
        for got, want in zip([*found.skips, found.middle], [*down, middle], strict=True):
            assert relative_error(got, nhwc(want)) < 1e-5
        empty = net.nothing(x.shape, np.float32)
        assert jax.tree.map(np.shape, empty) == jax.tree.map(np.shape, found)


def test_one_step() -> None:
    """Residuals in the UNet, and an adapter's features within its way down."""
    reference = randomise(diffusers.UNet2DConditionModel(
        sample_size=16, **{k: v for k, v in SMALL.items() if "conditioning" not in k},
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ))  # fmt: skip
    net = ControlNet.from_dict(dict(net_of().config))
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


# Pipelines


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two ControlNets, saved by diffusers."""
    folder = tmp_path_factory.mktemp("nets")
    found = []
    for i in range(2):
        net = net_of(5 + i)
        net.save_pretrained(folder / str(i))
        net.folder = folder / str(i)
        found.append(net)
    return found


@pytest.fixture(scope="module")
def pair(nets: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = build(tmp_path_factory.mktemp("model") / "base", "epsilon")
    base = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    theirs = diffusers.StableDiffusionControlNetPipeline(
        **base.components, controlnet=nets[0], requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    theirs.own_config = theirs.scheduler.config
    mesh = make_mesh(jax.devices()[:1])
    return theirs, canvax.load(folder, dtype="float32", mesh=mesh, controlnet=[net.folder for net in nets])


SAMPLERS = {
    "DDIM": ("DDIMScheduler", {}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "Heun": ("HeunDiscreteScheduler", {}),
}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("DDIM", 4, {"control_scale": 0.7}),
    ("DPM++ 2M Karras", 5, {}),
    ("Heun", 4, {"control_start": 0.2, "control_end": 0.7}),
    ("Euler", 4, {"guess_mode": True, "guidance_scale": 3.0}),
    ("DDIM", 4, {"guess_mode": True, "guidance_scale": 1.0}),
]
NAMES = {"control_scale": "controlnet_conditioning_scale", "control_start": "control_guidance_start"}
NAMES |= {"control_end": "control_guidance_end"}


def theirs_of(changes: dict[str, Any]) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in changes.items()}


@pytest.mark.parametrize(("sampler", "steps", "changes"), [
    pytest.param(*case, marks=(() if i < 2 else pytest.mark.slow if i == 3 else pytest.mark.weekly))
    for i, case in enumerate(CASES)
])  # fmt: skip
def test_same_image(sampler: str, steps: int, changes: dict[str, Any], pair: Any) -> None:
    theirs, ours = pair
    cls, config = SAMPLERS[sampler]
    theirs.scheduler = getattr(diffusers, cls).from_config(dict(theirs.own_config), **config)
    choice = {"num_inference_steps": steps, "guidance_scale": 5.0}
    with torch.no_grad():
        want = theirs(
            PROMPTS, image=[photo(1), photo(2)], negative_prompt=[NEGATIVE] * 2, output_type="np",
            latents=nchw(initial_noise(SEEDS, LATENTS)), **choice | theirs_of(changes),
        ).images  # fmt: skip
    # Under the names of diffusers, too: guess_mode, and the others every other time.
    told = theirs_of(changes) if steps % 2 else changes
    got = ours(
        PROMPTS, NEGATIVE, control=[[photo(1), photo(2)], None], seed=SEEDS, sampler=sampler, progress=False,
        **choice | told,
    )  # fmt: skip
    near = psnr(got.pixels, want)
    assert near >= 60
    without = ours(PROMPTS, NEGATIVE, seed=SEEDS, sampler=sampler, progress=False, height=SIZE, width=SIZE,
                   **choice | {k: v for k, v in changes.items() if k == "guidance_scale"})  # fmt: skip
    assert psnr(got.pixels, without.pixels) < near - 20


@pytest.mark.slow
def test_two_nets(pair: Any, nets: list[Any]) -> None:
    theirs, ours = pair
    theirs = diffusers.StableDiffusionControlNetPipeline(
        **theirs.components | {"controlnet": nets}, requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(theirs.scheduler.config)
    choice = {"num_inference_steps": 5, "guidance_scale": 5.0}
    with torch.no_grad():
        want = theirs(
            PROMPTS[0], image=[photo(1), photo(2)], negative_prompt=NEGATIVE, output_type="np",
            latents=nchw(initial_noise(SEEDS[:1], LATENTS)), controlnet_conditioning_scale=[0.9, 0.4],
            control_guidance_start=[0.0, 0.3], control_guidance_end=[0.8, 1.0], **choice,
        ).images  # fmt: skip
    got = ours(
        PROMPTS[0], NEGATIVE, control=[photo(1), photo(2)], seed=SEEDS[0], sampler="DDIM", progress=False,
        control_scale=(0.9, 0.4), control_start=(0.0, 0.3), control_end=(0.8, 1.0), **choice,
    )  # fmt: skip
    assert psnr(got.pixels, want) >= 60


@pytest.mark.parametrize("inpaint", [False, True])
def test_with_an_image(inpaint: bool, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    kind = "Inpaint" if inpaint else "Img2Img"
    cls = getattr(diffusers, f"StableDiffusionControlNet{kind}Pipeline")
    theirs = cls(**theirs.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(theirs.scheduler.config)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS, LATENTS))
    square = Image.new("L", (SIZE, SIZE), 0)
    square.paste(255, (32, 16, 96, 80))
    more: dict[str, Any] = {"mask_image": [square] * 2, "height": SIZE, "width": SIZE} if inpaint else {}
    choice = {"num_inference_steps": 6, "guidance_scale": 5.0, "strength": 0.5}
    seen: list[Any] = []
    with torch.no_grad():
        theirs(
            PROMPTS, image=[photo(1), photo(2)], control_image=[photo(3), photo(4)], negative_prompt=[NEGATIVE] * 2,
            controlnet_conditioning_scale=1.0, control_guidance_end=0.7, output_type="np", **choice, **more,
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    more = {"mask": square, "mask_blend": "renoised"} if inpaint else {}
    got = ours(
        PROMPTS, NEGATIVE, image=[photo(1), photo(2)], control=[[photo(3), photo(4)], None], seed=SEEDS, sampler="DDIM",
        control_end=0.7, progress=False, **choice, **more,
    )  # fmt: skip
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3


def test_a_generator_draws_as_there(pair: Any) -> None:
    """Image to image with control: the sample of the image, then the noise."""
    theirs, ours = pair
    theirs = diffusers.StableDiffusionControlNetImg2ImgPipeline(**theirs.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(theirs.scheduler.config)
    choice: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 5.0, "strength": 0.5, "image": photo(1)}
    seen: list[Any] = []
    with torch.no_grad():
        theirs(
            PROMPTS[0], control_image=photo(3), negative_prompt=NEGATIVE, controlnet_conditioning_scale=1.0,
            generator=torch.Generator().manual_seed(5), **choice,
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    got = ours(
        PROMPTS[0], NEGATIVE, control=[photo(3), None], seed=5, noise="torch", sampler="DDIM", progress=False, **choice
    )
    assert psnr(got.latents, nhwc(seen[-1]), peak=float(seen[-1].abs().max())) >= 80


@pytest.mark.slow
def test_inpainting_unet(nets: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A UNet of 9 channels, of which the ControlNet sees the first four."""
    folder = build(tmp_path / "model", "epsilon", in_channels=9)
    base = diffusers.StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
    base.save_pretrained(folder := tmp_path / "own")
    parts = {name: part for name, part in base.components.items() if name != "image_encoder"}
    theirs = diffusers.StableDiffusionControlNetInpaintPipeline(
        **parts, controlnet=nets[0], requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]), controlnet=nets[0].folder)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS, LATENTS))
    seen: list[Any] = []
    choice: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0, "strength": 1.0}
    with torch.no_grad():
        theirs(
            PROMPTS, image=[photo(1), photo(2)], mask_image=[mask(1), mask(3)], control_image=[photo(3), photo(4)],
            height=SIZE, width=SIZE, negative_prompt=[NEGATIVE] * 2, output_type="np", **choice,
            controlnet_conditioning_scale=1.0,
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    got = ours(PROMPTS, NEGATIVE, image=[photo(1), photo(2)], mask=[mask(1), mask(3)], control=[photo(3), photo(4)],
               seed=SEEDS, options=canvax.Options(progress=False), **choice)  # fmt: skip
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*decode_latents")
def test_adapter_in_a_pipeline(pair: Any, nets: list[Any], tmp_path: Path) -> None:
    """Alone, and with a ControlNet beside it, which diffusers has no pipeline for."""
    theirs, ours = pair
    reference: Any = randomise(diffusers.T2IAdapter(adapter_type="full_adapter", **ADAPTERS["full_adapter"]))
    reference.save_pretrained(tmp_path / "adapter")
    parts = {name: part for name, part in theirs.components.items() if name not in ("controlnet", "image_encoder")}
    pipeline = diffusers.StableDiffusionAdapterPipeline(**parts, adapter=reference, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config)
    choice = {"num_inference_steps": 5, "guidance_scale": 5.0}
    with torch.no_grad():
        want = pipeline(
            PROMPTS[0], image=photo(1), negative_prompt=NEGATIVE, latents=nchw(initial_noise(SEEDS[:1], LATENTS)),
            adapter_conditioning_scale=0.6, height=SIZE, width=SIZE, output_type="np", **choice,
        ).images  # fmt: skip
    adapted = ours.with_controlnet([tmp_path / "adapter", nets[0].folder])
    told: dict[str, Any] = {"seed": SEEDS[0], "sampler": "DDIM", "progress": False, **choice}
    got = adapted(PROMPTS[0], NEGATIVE, control=[photo(1), None], control_scale=0.6, **told)
    assert psnr(got.pixels, want) >= 60
    both = adapted(PROMPTS[0], NEGATIVE, control=[photo(1), photo(2)], control_scale=(0.6, 0.0), **told)
    assert psnr(both.pixels, want) >= 60
    assert adapted(PROMPTS[0], NEGATIVE, control=[photo(1), photo(2)], **told).compilations == 0


# SDXL


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = tmp_path_factory.mktemp("xl")
    build_xl(folder / "base")
    changes = KINDS["xl"] | {"cross_attention_dim": 72}
    net_of(7, **changes).save_pretrained(folder / "net")
    base = diffusers.StableDiffusionXLPipeline.from_pretrained(folder / "base")
    net = diffusers.ControlNetModel.from_pretrained(folder / "net")
    theirs: Any = diffusers.StableDiffusionXLControlNetPipeline(**base.components, controlnet=net)
    theirs.set_progress_bar_config(disable=True)
    mesh = make_mesh(jax.devices()[:1])
    return theirs, canvax.load(folder / "base", dtype="float32", mesh=mesh, controlnet=folder / "net")


@pytest.mark.slow
def test_xl(xl: Any) -> None:
    changes = {"control_scale": 0.5, "control_end": 0.6, "guess_mode": True}
    theirs, ours = xl
    choice = {"num_inference_steps": 8, "guidance_scale": 5.0}
    with torch.no_grad():
        want = theirs(
            PROMPTS[0], image=photo(1), negative_prompt=NEGATIVE, output_type="np", height=SIZE, width=SIZE,
            latents=nchw(initial_noise(SEEDS[:1], LATENTS)), **choice | theirs_of(changes),
        ).images  # fmt: skip
    got = ours(PROMPTS[0], NEGATIVE, control=photo(1), seed=SEEDS[0], progress=False, **choice | changes)
    assert psnr(got.pixels, want) >= 60


@pytest.mark.parametrize("inpaint", [False, pytest.param(True, marks=pytest.mark.weekly)])
@pytest.mark.slow
def test_xl_with_an_image(inpaint: bool, xl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = xl
    kind = "Inpaint" if inpaint else "Img2Img"
    theirs = getattr(diffusers, f"StableDiffusionXLControlNet{kind}Pipeline")(**theirs.components)
    theirs.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS[:1], LATENTS))
    square = Image.new("L", (SIZE, SIZE), 0)
    square.paste(255, (32, 16, 96, 80))
    more: dict[str, Any] = {"mask_image": square} if inpaint else {}
    choice = {"num_inference_steps": 6, "guidance_scale": 5.0, "strength": 0.5}
    seen: list[Any] = []
    with torch.no_grad():
        theirs(
            PROMPTS[0], image=photo(1), control_image=photo(3), negative_prompt=NEGATIVE, height=SIZE, width=SIZE,
            controlnet_conditioning_scale=0.7, output_type="np", **choice, **more,
            callback_on_step_end=lambda _, i, t, values: seen.append(values["latents"]) or values,
        )  # fmt: skip
    more = {"mask": square, "mask_blend": "renoised"} if inpaint else {}
    got = ours(PROMPTS[0], NEGATIVE, image=photo(1), control=photo(3), control_scale=0.7, seed=SEEDS[0],
               progress=False, **choice, **more)  # fmt: skip
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3


def test_xl_adapter(xl: Any, tmp_path: Path) -> None:
    theirs, ours = xl
    own = ADAPTERS["full_adapter_xl"] | {"channels": [32, 64]}  # of two levels; SDXL has three and a fourth feature
    reference: Any = randomise(diffusers.T2IAdapter(adapter_type="full_adapter_xl", **own))
    reference.save_pretrained(tmp_path / "adapter")
    parts = {name: part for name, part in theirs.components.items() if name != "controlnet"}
    pipeline: Any = diffusers.StableDiffusionXLAdapterPipeline(**parts, adapter=reference)
    pipeline.set_progress_bar_config(disable=True)
    choice = {"num_inference_steps": 6, "guidance_scale": 5.0}
    with torch.no_grad():
        want = pipeline(
            PROMPTS[0], image=photo(1), negative_prompt=NEGATIVE, latents=nchw(initial_noise(SEEDS[:1], LATENTS)),
            adapter_conditioning_scale=0.4, adapter_conditioning_factor=0.5, height=SIZE, width=SIZE,
            output_type="np", **choice,
        ).images  # fmt: skip
    got = ours.with_controlnet(tmp_path / "adapter")(
        PROMPTS[0], NEGATIVE, adapter_image=photo(1), control_scale=0.4, adapter_conditioning_factor=0.5, seed=SEEDS[0],
        progress=False, **choice,
    )  # fmt: skip
    assert psnr(got.pixels, want) >= 60


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
    pipe = canvax.load(base, dtype="float32", mesh=make_mesh(jax.devices()[:1]), controlnet=tmp_path / "folder")
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
    pipe = canvax.load(base, dtype="float32", mesh=make_mesh(jax.devices()[:1]), controlnet=tmp_path / "folder")
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
    pipe = canvax.load(base, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
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
    small = canvax.load(base, dtype="float32", mesh=make_mesh(jax.devices()[:1]), quantize="int8")
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


@pytest.mark.parametrize("kind", ["sd15", "sdxl", "sdxl-mid", "sdxl-small"])
def test_full_size_parameters(kind: str) -> None:
    """Names and shapes of the released networks, and a config that is made of them, without their memory."""
    base = SDXL_UNET if kind.startswith("sdxl") else SD15_UNET
    config = {name: value for name, value in vars(base).items() if value is not None}
    config = {
        name: value for name, value in config.items() if name not in ("sample_size", "out_channels", "up_block_types")
    }
    if kind == "sdxl-small":
        config |= {"down_block_types": ("DownBlock2D",) * 3, "mid_block_type": "UNetMidBlock2D"}
    if kind == "sdxl-mid":
        config |= {
            "down_block_types": ("DownBlock2D",) * 2 + ("CrossAttnDownBlock2D",),
            "transformer_layers_per_block": 1,
        }
    with torch.device("meta"):
        reference = diffusers.ControlNetModel(**config)
    found = {name: tuple(array.shape) for name, array in reference.state_dict().items()}
    told = ControlNet.from_dict(dict(reference.config))
    guessed = ControlNet.from_dict(controlnet_config(found, base))
    for net in (told, guessed):
        assert found == {name: param.checkpoint_shapes[0] for name, param in flatten(net.spec)}
    assert guessed.unet.heads == told.unet.heads
