"""SDXL and its refiner against PyTorch diffusers: the parts, the whole pipeline, and the hand-over between the two."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import canvax
from canvax.compile.monitor import compilations
from canvax.models.clip import clip_configs, clip_encoders
from canvax.models.configs import ClipTextConfig, UNetConfig
from canvax.models.presets import SDXL_REFINER_UNET, SDXL_TEXT, SDXL_TEXT_2, SDXL_UNET
from canvax.models.text import encode_text
from canvax.models.unet import unet, unet_spec
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten
from canvax.weights.location import BUNDLED
from tests.support.bundled import VOCABULARY
from tests.support.random_numbers import rng

from .reference import given_noise, nchw, nhwc, params_of, psnr, randomise, relative_error

TOLERANCE = 1e-4
QUIET = canvax.Options(progress=False)
SEEDS = [11, 12]
PROMPTS = ["a red apple", "two cats & a dog"]
EULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
    "timestep_spacing": "leading", "interpolation_type": "linear", "prediction_type": "epsilon",
}  # fmt: skip


def unet_config(text: int, pooled: int, numbers: int) -> UNetConfig:
    """SDXL's shape made small: no attention above, deep transformers below."""
    return UNetConfig(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=(2, 4),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), cross_attention_dim=text, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=pooled + 8 * numbers,
    )  # fmt: skip


def given(config: object) -> dict[str, Any]:
    """Keyword arguments of the reference class from a canvax config."""
    return {k: v for k, v in dataclasses.asdict(config).items() if v is not None}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("numbers", [6, 5])
def test_unet(numbers: int) -> None:
    cfg = unet_config(72, 40, numbers)
    assert cfg.time_ids(40) == numbers
    reference = randomise(diffusers.UNet2DConditionModel(**given(cfg)))
    params = params_of(reference, unet_spec(cfg))
    x, text, pooled = (rng.standard_normal(s, np.float32) for s in ((2, 18, 13, 4), (2, 77, 72), (2, 40)))
    time_ids = np.array([[1024, 768, 0, 13, 1000, 2.5], [512, 512, 7, 0, 1280, 6]], np.float32)[:, :numbers]
    t = np.array([981.0, 3.25], np.float32)
    added = {"text_embeds": torch.from_numpy(pooled), "time_ids": torch.from_numpy(time_ids)}
    with torch.no_grad():
        want = nhwc(reference(nchw(x), torch.from_numpy(t), torch.from_numpy(text), added_cond_kwargs=added).sample)
    got = jax.jit(unet, static_argnums=4)(params, x, t, text, cfg, pooled, time_ids)
    assert relative_error(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", ["base", "refiner", "text_encoder", "text_encoder_2"])
def test_full_size_parameters(name: str) -> None:
    """Names and shapes of the released models, without their memory."""
    text = clip_encoders(SDXL_TEXT, SDXL_TEXT_2)
    unets = {"base": SDXL_UNET, "refiner": SDXL_REFINER_UNET}
    with torch.device("meta"):
        if name in unets:
            module = diffusers.UNet2DConditionModel(**given(unets[name]))
        else:
            cls = "CLIPTextModelWithProjection" if name == "text_encoder_2" else "CLIPTextModel"
            module = getattr(transformers, cls)(transformers.CLIPTextConfig(**given(clip_configs(text)[name])))
    prefix = "text_model." if name == "text_encoder" else ""
    declared = dict(flatten(unet_spec(unets[name]) if name in unets else text.specs[name]))
    found = {prefix + key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert found == {key: param.checkpoint_shapes[0] for key, param in declared.items()}


def clip_config(act: str, eos: int, layers: int = 3) -> ClipTextConfig:
    return ClipTextConfig(
        vocab_size=VOCABULARY, hidden_size=40 if act == "gelu" else 32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, hidden_act=act, projection_dim=24 if act == "gelu" else 32, eos_token_id=eos,
    )  # fmt: skip


def clip(cfg: ClipTextConfig, cls: str, seed: int) -> Any:
    return randomise(
        getattr(transformers, cls)(transformers.CLIPTextConfig(**given(cfg), bos_token_id=VOCABULARY - 2)), seed
    )


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("eos", [2, VOCABULARY - 1], ids=["legacy", "named"])
def test_text_encoders(skip: int, eos: int) -> None:
    cfg = clip_encoders(clip_config("quick_gelu", 2), clip_config("gelu", eos))
    first, second = (
        clip(clip_configs(cfg)["text_encoder"], "CLIPTextModel", 1),
        clip(clip_configs(cfg)["text_encoder_2"], "CLIPTextModelWithProjection", 2),
    )
    params = {
        "text_encoder": params_of(first, cfg.specs["text_encoder"], prefix="text_model."),
        "text_encoder_2": params_of(second, cfg.specs["text_encoder_2"]),
    }
    ids = {name: rng.integers(3, VOCABULARY - 1, (3, 77)) for name in params}
    for i, end in enumerate((5, 40, 76)):
        ids["text_encoder_2"][i, end:] = VOCABULARY - 1
    with torch.no_grad():
        one = first(torch.from_numpy(ids["text_encoder"]), output_hidden_states=True)
        two = second(torch.from_numpy(ids["text_encoder_2"]), output_hidden_states=True)
    want = np.concatenate([out.hidden_states[-(skip + 2)].numpy() for out in (one, two)], axis=-1)
    inputs = {name: {"ids": each, "skip": np.full(3, skip, np.int32)} for name, each in ids.items()}
    got = jax.jit(encode_text, static_argnames="cfg")(params, inputs, cfg=cfg)
    assert relative_error(got["text"], want) <= TOLERANCE
    assert relative_error(got["pooled"], two.text_embeds.numpy()) <= TOLERANCE
    alone = clip_encoders(None, clip_configs(cfg)["text_encoder_2"])
    got = jax.jit(encode_text, static_argnames="cfg")(params, inputs, cfg=alone)
    assert relative_error(got["text"], want[..., 32:]) <= TOLERANCE


def tokenizer(pad: str | None = None) -> Any:
    keywords = {"pad_token": pad} if pad else {}
    return transformers.CLIPTokenizer.from_pretrained(BUNDLED["emoji"] / "tokenizer", **keywords)


def build(folder: Path, *, zeros: bool = True, refiner: bool = False, channels: int = 4) -> Path:
    """A small random checkpoint in the real layout, written by diffusers itself."""
    second = clip_config("gelu", 2)
    cfg = dataclasses.replace(unet_config(40 if refiner else 72, 24, 5 if refiner else 6), in_channels=channels)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, norm_num_groups=16, scaling_factor=0.13025,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "vae": randomise(vae, 1),
        "unet": randomise(diffusers.UNet2DConditionModel(**given(cfg)), 2 + refiner),
        "scheduler": diffusers.EulerDiscreteScheduler(**EULER),
        "text_encoder": None if refiner else clip(clip_config("quick_gelu", 2), "CLIPTextModel", 4),
        "text_encoder_2": clip(second, "CLIPTextModelWithProjection", 5),
        "tokenizer": None if refiner else tokenizer(),
        "tokenizer_2": tokenizer("!"),
        "force_zeros_for_empty_prompt": zeros,
    }
    if refiner:
        pipe = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True)
    else:
        pipe = diffusers.StableDiffusionXLPipeline(**parts)
    pipe.save_pretrained(folder)
    return folder


def load(folder: Path, cls: str) -> tuple[Any, canvax.Pipeline]:
    theirs = getattr(diffusers, cls).from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    return theirs, canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    return load(build(tmp_path_factory.mktemp("xl") / "base"), "StableDiffusionXLPipeline")


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    folder = build(tmp_path_factory.mktemp("xl") / "refiner", refiner=True, zeros=False)
    return load(folder, "StableDiffusionXLImg2ImgPipeline")


SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("EulerDiscreteScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
}


def reference_picture(theirs: Any, name: str, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """The reference's last latents, in its own frame, and images."""
    cls, changes = FURTHER[name]
    theirs.scheduler = getattr(diffusers, cls).from_config(EULER, **changes)
    seen = {}
    usual = {"prompt": PROMPTS, "num_inference_steps": 20, "guidance_scale": 5.0, "output_type": "np"}
    with torch.no_grad():
        out = theirs(
            **usual | arguments, callback_on_step_end=lambda pipe, i, t, k: seen.update(latents=k["latents"]) or {}
        )
    return nhwc(seen["latents"]), out.images


NOISE = initial_noise(SEEDS, (16, 16, 4))
PLAIN = {"latents": nchw(NOISE), "height": 128, "width": 128}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "no negative": ({}, {}, {}),
    "empty negative": ({"negative_prompt": ["", ""]}, {"negative_prompt": ""}, {}),
    "second prompts": (
        {
            "negative_prompt": ["blurry"] * 2,
            "prompt_2": ["an oil painting", "a photo"],
            "negative_prompt_2": ["a drawing"] * 2,
        },
        {"negative_prompt": "blurry"},
        {"prompt_2": ["an oil painting", "a photo"], "negative_prompt_2": "a drawing"},
    ),
    "sizes": (
        (sizes := {
            "original_size": (512, 300), "crops_coords_top_left": (16, 8), "target_size": (1024, 768),
            "negative_original_size": (100, 90), "negative_crops_coords_top_left": (3, 2),
            "negative_target_size": (640, 600),
        }),
        {},
        sizes,
    ),
}  # fmt: skip


def one(arguments: dict[str, Any], i: int) -> dict[str, Any]:
    """The arguments for image ``i`` alone."""
    return {name: value[i] if isinstance(value, list) else value for name, value in arguments.items()}


@pytest.mark.parametrize(("sampler", "case"), [*(("Euler", case) for case in CASES), ("DPM++ 2M", "sizes")])
def test_same_picture(sampler: str, case: str, base: tuple[Any, canvax.Pipeline]) -> None:
    theirs, ours = base
    reference, arguments, options = CASES[case]
    # One picture at a time: with more, diffusers hands the sizes of the negative side to the wrong images.
    pictures = [
        reference_picture(
            theirs, sampler, **PLAIN | {"prompt": prompt, "latents": nchw(NOISE[i : i + 1])} | one(reference, i)
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    latents, images = (np.concatenate(parts) for parts in zip(*pictures, strict=True))
    got = ours(
        PROMPTS, num_inference_steps=20, seed=SEEDS[0], sampler=sampler,
        options=dataclasses.replace(QUIET, **options), **arguments,
    )  # fmt: skip
    assert got.metadata[0]["guidance_scale"] == 5.0
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60


@pytest.mark.slow
def test_second_negative_prompt_alone(base: tuple[Any, canvax.Pipeline]) -> None:
    """It is used, with an empty first one; diffusers takes zeros for both unless it is told the empty one."""
    theirs, ours = base
    negatives = {"negative_prompt": ["", ""], "negative_prompt_2": ["a drawing", "blurry"]}
    latents, images = reference_picture(theirs, "Euler", **PLAIN, **negatives)
    options = dataclasses.replace(QUIET, negative_prompt_2=["a drawing", "blurry"])
    got = ours(PROMPTS, num_inference_steps=20, seed=SEEDS[0], sampler="Euler", options=options)
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60


@pytest.mark.slow
def test_empty_negative_without_zeros(tmp_path: Path) -> None:
    theirs, ours = load(build(tmp_path / "base", zeros=False), "StableDiffusionXLPipeline")
    latents, images = reference_picture(theirs, "Euler", **PLAIN)
    got = ours(PROMPTS, num_inference_steps=20, seed=SEEDS[0], options=QUIET)
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60
    again = ours(PROMPTS, "", num_inference_steps=20, seed=SEEDS[0], options=QUIET)
    np.testing.assert_array_equal(again.latents, got.latents)


def exploding(latents: np.ndarray, sigma: float) -> np.ndarray:
    """From canvax's variance-preserving frame to the one that diffusers' Euler keeps latents in."""
    return latents * np.hypot(1, sigma)


@pytest.mark.parametrize(
    ("sampler", "end"),
    [("Euler", 0.8), *(pytest.param(*case, marks=pytest.mark.weekly) for case in (("Euler", 0.5), ("DPM++ 2M", 0.8)))],
)
@pytest.mark.slow
def test_hand_over(
    sampler: str, end: float, base: tuple[Any, canvax.Pipeline], refiner: tuple[Any, canvax.Pipeline]
) -> None:
    """The base draws the noisy part of the run, the refiner the rest."""
    noisy, _ = reference_picture(base[0], sampler, **PLAIN, denoising_end=end, output_type="latent")
    cls, changes = SCHEDULERS[sampler]
    refiner[0].scheduler = getattr(diffusers, cls).from_config(refiner[0].scheduler.config, **changes)
    latents, images = reference_picture(
        refiner[0], sampler, image=nchw(noisy), denoising_start=end, aesthetic_score=5.0, crops_coords_top_left=(0, 0)
    )

    first = base[1](
        PROMPTS, num_inference_steps=20, seed=SEEDS[0], sampler=sampler,
        options=dataclasses.replace(QUIET, denoising_end=end),
    )  # fmt: skip
    assert first.images == []
    sigma = 0.0
    if sampler == "Euler":
        scheduler = refiner[0].scheduler
        scheduler.set_timesteps(20)
        sigma = float(scheduler.sigmas[int((scheduler.timesteps >= round(1000 - end * 1000)).sum())])
    assert relative_error(exploding(first.latents, sigma), noisy) <= 1e-3
    got = refiner[1](
        PROMPTS, num_inference_steps=20, sampler=sampler, latents=first.latents,
        options=dataclasses.replace(QUIET, denoising_start=end, aesthetic_score=5.0),
    )  # fmt: skip
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60


FEW_STEPS: dict[str, tuple[str, int]] = {
    "turbo": ("EulerAncestralDiscreteScheduler", 1),
    "lightning": ("EulerDiscreteScheduler", 4),
}


@pytest.mark.parametrize("name", ["turbo", pytest.param("lightning", marks=pytest.mark.weekly)])
@pytest.mark.slow
def test_few_steps(name: str, base: tuple[Any, canvax.Pipeline], tmp_path: Path) -> None:
    """Guidance off and trailing timesteps, as the checkpoint's own scheduler says."""
    cls, steps = FEW_STEPS[name]
    build(tmp_path / name)
    changed = getattr(diffusers, cls)(**{k: v for k, v in EULER.items() if k != "interpolation_type"})
    changed.register_to_config(timestep_spacing="trailing")
    changed.save_pretrained(tmp_path / name / "scheduler")
    theirs, ours = load(tmp_path / name, "StableDiffusionXLPipeline")
    seen = {}
    with torch.no_grad():
        out = theirs(
            PROMPTS, num_inference_steps=steps, guidance_scale=0.0, output_type="np", **PLAIN,
            callback_on_step_end=lambda pipe, i, t, k: seen.update(latents=k["latents"]) or {},
        )  # fmt: skip
    got = ours(PROMPTS, num_inference_steps=steps, guidance_scale=0.0, seed=SEEDS[0], options=QUIET)
    assert relative_error(got.latents, nhwc(seen["latents"])) <= 1e-3
    assert psnr(got.pixels, out.images) >= 60


@pytest.mark.slow
def test_nothing_recompiles(base: tuple[Any, canvax.Pipeline]) -> None:
    _, ours = base
    ours("a cat", num_inference_steps=2, seed=1, options=QUIET)
    before = compilations()
    pictures = [
        ours("a cat", negative, num_inference_steps=3, seed=1, options=dataclasses.replace(QUIET, **options))
        for negative, options in (
            (None, {}),
            ("", {}),
            ("", {"original_size": (256, 256)}),
            ("", {"crops_coords_top_left": (64, 0)}),
            ("", {"target_size": (512, 1024)}),
            ("", {"negative_original_size": (64, 64)}),
            ("", {"negative_crops_coords_top_left": (64, 64)}),
            ("", {"negative_target_size": (64, 64)}),
            ("", {"prompt_2": "a dog"}),
            ("", {"negative_prompt_2": "a dog"}),
            ("", {"clip_skip": 1}),
        )
    ]
    assert compilations() == before
    for i, one in enumerate(pictures):
        for other in pictures[:i]:
            assert np.abs(one.latents - other.latents).max() > 1e-4


def test_saved_and_loaded(base: tuple[Any, canvax.Pipeline], tmp_path: Path) -> None:
    theirs, ours = base
    want = ours("a cat", num_inference_steps=2, seed=1, options=QUIET)
    saved, again = load(ours.save(tmp_path / "saved"), "StableDiffusionXLPipeline")
    np.testing.assert_array_equal(again("a cat", num_inference_steps=2, seed=1, options=QUIET).latents, want.latents)
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        state = getattr(saved, name).state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in getattr(theirs, name).state_dict().items())


def photo(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (128, 128, 3)).astype(np.uint8))


FURTHER = SCHEDULERS | {"DDIM": ("DDIMScheduler", {"clip_sample": False})}


@pytest.mark.parametrize(
    ("model", "strength", "sampler"),
    [
        ("refiner", 0.3, "Euler"),
        pytest.param("refiner", 0.5, "DPM++ 2M", marks=pytest.mark.weekly),
        pytest.param("base", 0.5, "DPM++ 2M", marks=pytest.mark.weekly),
    ],
)
@pytest.mark.slow
def test_image_to_image(
    model: str, strength: float, sampler: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base and the refiner, whose own task this is."""
    reference, ours = request.getfixturevalue(model)
    theirs = reference if model == "refiner" else diffusers.StableDiffusionXLImg2ImgPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, theirs, NOISE[:1])
    arguments = {"image": photo(1), "strength": strength, "negative_prompt": "blurry"}
    latents, images = reference_picture(theirs, sampler, **arguments | {"prompt": PROMPTS[0]})
    got = ours(PROMPTS[0], num_inference_steps=20, guidance_scale=5.0, seed=SEEDS[0], sampler=sampler, options=QUIET,
               **arguments)  # fmt: skip
    assert relative_error(got.latents, latents) <= 1e-3
    assert psnr(got.pixels, images) >= 60


@pytest.mark.parametrize(
    ("strength", "sampler"),
    [(1.0, "Euler"), (0.5, "DDIM")],
)
def test_inpainting(
    strength: float, sampler: str, base: tuple[Any, canvax.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, ours = base
    theirs = diffusers.StableDiffusionXLInpaintPipeline(**reference.components)
    theirs.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, theirs, NOISE[:1])
    square = Image.new("L", (128, 128), 0)
    square.paste(255, (32, 16, 96, 80))
    arguments = {"image": photo(1), "strength": strength, "negative_prompt": "blurry"}
    more = {"mask_image": square, "height": 128, "width": 128, "prompt": PROMPTS[0]}
    latents, _ = reference_picture(theirs, sampler, **arguments | more)
    got = ours(PROMPTS[0], num_inference_steps=20, guidance_scale=5.0, seed=SEEDS[0], sampler=sampler, mask=square,
               mask_blend="renoised", progress=False, **arguments)  # fmt: skip
    assert relative_error(got.latents, latents) <= 1e-3


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    """A UNet of 9 channels, which sees the mask and the masked image."""
    folder = build(tmp_path_factory.mktemp("xl") / "painter", channels=9)
    return load(folder, "StableDiffusionXLInpaintPipeline")


@pytest.mark.parametrize(
    ("strength", "sampler"), [(0.75, "Euler"), pytest.param(1.0, "DPM++ 2M", marks=pytest.mark.weekly)]
)
@pytest.mark.slow
def test_inpainting_unet(
    strength: float, sampler: str, painter: tuple[Any, canvax.Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = painter
    given_noise(monkeypatch, theirs, NOISE[:1])
    y, x = np.mgrid[:128, :128]
    disc = Image.fromarray(np.uint8(np.clip(40 - np.hypot(x - 60, y - 70), 0, 1) * 255))
    arguments = {"image": photo(1), "strength": strength, "negative_prompt": "blurry"}
    more = {"mask_image": disc, "height": 128, "width": 128, "prompt": PROMPTS[0]}
    latents, _ = reference_picture(theirs, sampler, **arguments | more)
    got = ours(PROMPTS[0], num_inference_steps=20, guidance_scale=5.0, seed=SEEDS[0], sampler=sampler, mask=disc,
               progress=False, **arguments)  # fmt: skip
    assert relative_error(got.latents, latents) <= 1e-3
    kept = np.asarray(disc) == 0
    np.testing.assert_array_equal(np.asarray(got.images[0])[kept], np.asarray(photo(1))[kept])
