"""Whole pipelines of Stable Diffusion against PyTorch diffusers: the same weights, the same noise, the same image.

A row of ``CASES`` is a call of both. Samplers are compared coefficient by coefficient in ``test_samplers``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from PIL import Image
from safetensors.torch import load_file, save_file

import canvax
from canvax import ImagePrompt
from canvax.compile.additions import ReadsImage
from canvax.compile.kinds import Kinds
from canvax.flax_api import FlaxStableDiffusionImg2ImgPipeline, FlaxStableDiffusionPipeline
from canvax.flax_api.keys import encoding_noise, host_draw
from canvax.noise import initial_noise
from canvax.pipelines.image_prompts import bicubic
from tests.support.bundled import LATENTS as BUNDLED_LATENTS
from tests.support.ip_adapter_files import VISION

from .peer import NEGATIVE, PROMPTS, QUIET, SEEDS, SIZE, Case, Peers, disc, load, photo, square
from .reference import nchw, nhwc, psnr, relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array_wrap__:DeprecationWarning", "ignore:.*decode_latents:FutureWarning"
)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    return Peers(tmp_path_factory.mktemp("peers"))


TWO = [photo(1), photo(2)]
PAINTED: dict[str, Any] = {"theirs": {"mask_image": square()}, "ours": {"mask": square(), "mask_blend": "renoised"}}
SIZES: dict[str, Any] = {
    "original_size": (512, 300), "crops_coords_top_left": (16, 8), "target_size": (1024, 768),
    "negative_original_size": (100, 90), "negative_crops_coords_top_left": (3, 2), "negative_target_size": (640, 600),
}  # fmt: skip
SECOND = {"prompt_2": ["an oil painting", "a photo"], "negative_prompt_2": ["a drawing"] * 2}


def text(sampler: str | None = "DDIM", model: str = "sd", **changes: Any) -> Case:
    cls = "StableDiffusionXLPipeline" if model.startswith("xl") else "StableDiffusionPipeline"
    return Case(cls, model, sampler, **changes)


def image(task: str, sampler: str, strength: float, model: str = "sd", **changes: Any) -> Case:
    """From images; with a mask if the task is ``Inpaint``."""
    xl = model.startswith("xl")
    count = 1 if xl else 2
    pictures = {"image": TWO if count > 1 else TWO[0], "strength": strength}
    cls = f"StableDiffusion{'XL' if xl else ''}{task}Pipeline"
    told = {} if task == "Img2Img" else painted(count) if "inpainting" in model else PAINTED
    return Case(cls, model, sampler, both=pictures, count=count, **told | changes)


def painted(count: int) -> dict[str, Any]:
    masks = [disc(1), disc(3)][:count]
    return {"theirs": {"mask_image": masks}, "ours": {"mask": masks}}


def control(kind: str = "", sampler: str = "DDIM", model: str = "sd", *, to: Any = None, **changes: Any) -> Case:
    """With a control image."""
    xl, count = model.startswith("xl"), changes.pop("count", 1 if model.startswith("xl") else 2)
    image = to or ([photo(3), photo(4)] if count > 1 else photo(3))
    cls = f"StableDiffusion{'XL' if xl else ''}ControlNet{kind}Pipeline"
    theirs = {"control_image" if kind else "image": image} | changes.pop("theirs", {})
    own = {"control": image} | changes.pop("ours", {})
    nets = changes.pop("nets", ("net0",))
    return Case(cls, model, sampler, theirs=theirs, ours=own, nets=nets, count=count, **changes)


def on_image(kind: str, model: str = "sd", *, both: Any = None, theirs: Any = None, ours: Any = None) -> Any:
    """With a control image, from an image or within a mask of it. A strength of 1 is not diffusers' own from images."""
    count = 1 if model.startswith("xl") else 2
    given: dict[str, Any] = {"image": TWO if count > 1 else TWO[0], "strength": 0.5} | (both or {})
    more = PAINTED if kind == "Inpaint" else {"theirs": {}, "ours": {}}
    theirs = {"controlnet_conditioning_scale": 1.0} | more["theirs"] | (theirs or {})
    return control(kind, model=model, both=given, theirs=theirs, ours=more["ours"] | (ours or {}))


def typed(types: dict[str, int], kind: str = "", *, both: Any = None, **changes: Any) -> Case:
    """With control images by type."""
    shown = {name: photo(3 + i) for i, name in enumerate(types)}
    theirs = {"control_image": [*shown.values()], "control_mode": [*types.values()],
              "controlnet_conditioning_scale": 1.0} | changes.pop("theirs", {})  # fmt: skip
    own = {"control": shown} | changes.pop("ours", {})
    cls = f"StableDiffusionXLControlNetUnion{kind}Pipeline"
    return Case(cls, "xl", theirs=theirs, ours=own, both=both or {}, nets=("union",), count=1, **changes)


def seen(*eyes: str, model: str = "sd", their: Any, prompts: Any, both: Any = None, **theirs: Any) -> Case:
    """With image prompts."""
    cls, sampler = ("StableDiffusionXLPipeline", "Euler") if model == "xl" else ("StableDiffusionPipeline", "DDIM")
    theirs = {"ip_adapter_image": their} | theirs
    return Case(cls, model, sampler, both or {}, theirs, {"image_prompt": prompts}, eyes=eyes, count=1,
                without=("image_prompt",))  # fmt: skip


SHORT = {"num_inference_steps": 4}
LEFT, RIGHT = square(), square().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
MASKS = [IPAdapterMaskProcessor().preprocess([LEFT, RIGHT], height=SIZE, width=SIZE).reshape(1, 2, SIZE, SIZE)]
WIDE = photo(1).resize((200, 120))
"""Of which CLIP sees the middle."""
EMBEDS = {kind: np.random.default_rng(3).standard_normal(shape).astype(np.float32)
          for kind, shape in (("plain", (2, 1, 24)), ("plus", (2, 1, VISION.tokens, 64)))}  # fmt: skip
HALF = {"controlnet_conditioning_scale": 0.5}, {"control_scale": 0.5}
PAG: dict[str, Any] = {"cls": "StableDiffusionPAGPipeline", "parts": {"pag_applied_layers": ["mid"]}}

CASES: dict[str, Case] = {
    "DPM++ 2M Karras": text("DPM++ 2M Karras"),
    "image, DDIM": image("Img2Img", "DDIM", 0.75),
    "image, DPM++ 2M Karras": image("Img2Img", "DPM++ 2M Karras", 0.5),
    "image, Euler a": image("Img2Img", "Euler a", 0.3),
    "image, Heun": image("Img2Img", "Heun", 0.75),
    "image, all of it": image("Img2Img", "DDIM", 1.0),
    "mask, a generator": image("Inpaint", "DDIM", 0.75, generator=True),
    "mask, DDIM": image("Inpaint", "DDIM", 1.0),
    "mask, Euler": image("Inpaint", "Euler", 0.5),
    "mask, DPM++ 2M": image("Inpaint", "DPM++ 2M", 0.75),
    "mask, DEIS": image("Inpaint", "DEISMultistepScheduler", 0.5),
    "control": control(theirs={"controlnet_conditioning_scale": 0.7}, ours={"control_scale": 0.7},
                       without=("control", "control_scale")),
    "control, DPM++ 2M Karras": control(sampler="DPM++ 2M Karras"),
    "control, image": on_image("Img2Img", theirs={"control_guidance_end": 0.7}, ours={"control_end": 0.7}),
    "control, mask": on_image("Inpaint", theirs={"control_guidance_end": 0.7}, ours={"control_end": 0.7}),
    "image prompt": seen("plain", their=WIDE, prompts=ImagePrompt(WIDE, 0.7), scale=0.7),
}  # fmt: skip

SLOW: dict[str, Case] = {
    "SDXL, no negative": text("Euler", "xl", negative=None),
    "SDXL, empty negative": text("Euler", "xl", negative=""),
    "SDXL, second prompts": text("Euler", "xl", both=SECOND),
    # One image: with more, diffusers hands the sizes of the negative side to the wrong ones.
    "SDXL, sizes": text("Euler", "xl", negative=None, count=1, both=SIZES, without=tuple(SIZES)),
    "SDXL, sizes, DPM++ 2M": text("DPM++ 2M", "xl", negative=None, count=1, both=SIZES),
    "SDXL, mask": image("Inpaint", "Euler", 1.0, "xl"),
    "PNDM": text("PNDM", both={"num_inference_steps": 10}),
    "Euler Karras, velocity": text("Euler Karras", "sd velocity"),
    "image, a generator": image("Img2Img", "DDIM", 0.75, generator=True),
    "control, a generator": dataclasses.replace(on_image("Img2Img"), generator=True),
    "SDXL, mask, DDIM": image("Inpaint", "DDIM", 0.5, "xl"),
    "SDXL, T2I": Case(
        "StableDiffusionXLAdapterPipeline", "xl", "Euler", count=1, nets=("t2i",),
        theirs={"image": photo(1), "adapter_conditioning_scale": 0.4, "adapter_conditioning_factor": 0.5},
        ours={"adapter_image": photo(1), "control_scale": 0.4, "adapter_conditioning_factor": 0.5},
        without=("adapter_image", "control_scale", "adapter_conditioning_factor"),
    ),
    "union, one": typed({"depth": 1}, theirs={"controlnet_conditioning_scale": 0.7}, ours={"control_scale": 0.7}),
    "union, two": typed({"openpose": 0, "canny": 3}, without=("control",)),
    "union, image": typed({"tile": 6, "depth": 1}, "Img2Img", both={"image": photo(1), "strength": 0.6}),
    "union, mask": typed({"repaint": 7}, "Inpaint", both={"image": photo(1), "strength": 0.6}, **PAINTED),
    "image prompt, plus": seen("plus", their=WIDE, prompts=ImagePrompt(WIDE, 0.7), scale=0.7),
    "image prompt, full": seen("full", their=WIDE, prompts=ImagePrompt(WIDE, 0.7), scale=0.7),
    "image prompt, no guidance": seen("plus", their=photo(2), prompts=photo(2), both={"guidance_scale": 1.0}),
    "image prompts of one adapter": seen(
        "plus", their=[TWO], prompts=[ImagePrompt(one, 0.8) for one in TWO], scale=0.8),
    "image prompts in masks": seen(
        "plus", their=[TWO], prompts=[ImagePrompt(TWO[0], 0.9, LEFT), ImagePrompt(TWO[1], 0.5, RIGHT)],
        scale=[[0.9, 0.5]], cross_attention_kwargs={"ip_adapter_masks": MASKS}),
    "image prompts of two adapters": seen(
        "plus", "plain", their=[[photo(1), photo(3)], photo(2)], scale=[0.7, 0.4],
        prompts=[ImagePrompt(photo(1), 0.7), ImagePrompt(photo(2), 0.4, adapter=1), ImagePrompt(photo(3), 0.7)]),
    **{f"image prompt, {scale}": seen("plain", their=photo(1), prompts=ImagePrompt(photo(1), scale), scale=scale)
       for scale in ({"down": {"block_0": 0.7}}, {"up": {"block_1": [0.0, 1.0]}, "mid": 0.4}, {"up": 0.6})},
    **{f"embeds, {kind}": Case(eyes=(kind,), count=1, theirs={"ip_adapter_image_embeds": [torch.from_numpy(one)]},
                               ours={"ip_adapter_image_embeds": [one]}) for kind, one in EMBEDS.items()},
    "DDIM": text("DDIM"),
    "Euler a": text("Euler a"),
    "DDPM, velocity": text("DDPM", "sd velocity"),
    "inpainting UNet": image("Inpaint", "Euler", 0.6, "sd inpainting"),
    "inpainting UNet, a generator": image("Inpaint", "DDIM", 0.6, "sd inpainting", generator=True),
    # At full strength the noise comes first, since the image is not encoded; the masked image is always last.
    "inpainting UNet, a generator, all": image("Inpaint", "DDIM", 1.0, "sd inpainting", generator=True),
    "control, guess": control(sampler="Euler", both={"guess_mode": True, "guidance_scale": 3.0}),
    "two controls": control(
        count=1, to=TWO, nets=("net0", "net1"),
        theirs={"controlnet_conditioning_scale": [0.9, 0.4], "control_guidance_start": [0.0, 0.3],
                "control_guidance_end": [0.8, 1.0]},
        ours={"control_scale": (0.9, 0.4), "control_start": (0.0, 0.3), "control_end": (0.8, 1.0)}),
    # Of 9 channels, of which the ControlNet sees the first four.
    "control, inpainting UNet": on_image(
        "Inpaint", "sd inpainting", both={"strength": 1.0}, theirs={"mask_image": [disc(1), disc(3)]},
        ours={"mask": [disc(1), disc(3)], "mask_blend": ...}),
    "T2I": Case(
        "StableDiffusionAdapterPipeline", count=1, nets=("t2i",), ours={"control": photo(1), "control_scale": 0.6},
        theirs={"image": photo(1), "adapter_conditioning_scale": 0.6}),
    "SDXL, control": control(
        model="xl", sampler="Euler", both={"num_inference_steps": 8, "guess_mode": True},
        theirs=HALF[0] | {"control_guidance_end": 0.6}, ours=HALF[1] | {"control_end": 0.6}),
    "SDXL, control, image": on_image("Img2Img", "xl", theirs=HALF[0], ours=HALF[1]),
    "SDXL, second negative alone": text(
        "Euler", "xl", negative=None, theirs={"negative_prompt": ["", ""]},
        both={"negative_prompt_2": ["a drawing", "blurry"]}),
    "SDXL, its text for an empty negative": text("Euler", "xl without zeros", negative=None),
    "SDXL Turbo": text(None, "xl turbo", negative=None, both={"num_inference_steps": 1, "guidance_scale": 0.0}),
    "SDXL, refiner": image("Img2Img", "Euler", 0.5, "xl refiner"),
    "SDXL, inpainting UNet": image("Inpaint", "Euler", 0.75, "xl inpainting"),
    "union, guess": typed({"tile": 6}, both={"guidance_scale": 1.0}, theirs={"guess_mode": True},
                          ours={"control_mode": "guess"}),
    "SDXL, image prompt": seen("plus", model="xl", their=photo(1), prompts=ImagePrompt(photo(1), 0.8), scale=0.8),
    "PAG": text(both={"pag_scale": 3.0, "pag_adaptive_scale": 0.002}, without=("pag_scale", "pag_adaptive_scale")),
}  # fmt: skip

WEEKLY: dict[str, Case] = {
    "control, window": control(
        sampler="Heun", theirs={"control_guidance_start": 0.2, "control_guidance_end": 0.7},
        ours={"control_start": 0.2, "control_end": 0.7}),
    "control, guess, no guidance": control(both={"guess_mode": True, "guidance_scale": 1.0}),
    "inpainting UNet, DPM++ 2M Karras": image("Inpaint", "DPM++ 2M Karras", 1.0, "sd inpainting"),
    "SDXL, control, mask": on_image("Inpaint", "xl", theirs=HALF[0], ours=HALF[1]),
    "SDXL Lightning": text(None, "xl lightning", negative=None, both=SHORT | {"guidance_scale": 0.0}),
    "SDXL, refiner, DPM++ 2M": image("Img2Img", "DPM++ 2M", 0.5, "xl refiner"),
    "SDXL, image": image("Img2Img", "DPM++ 2M", 0.5, "xl"),
    "SDXL, inpainting UNet, DPM++ 2M": image("Inpaint", "DPM++ 2M", 1.0, "xl inpainting"),
    "union, three": typed({"softedge": 2, "normal": 4, "segment": 5}),
    # Of one type: outside the window of several, diffusers runs the network on features that are scaled to 0.
    "union, window": typed(
        {"repaint": 7}, theirs={"control_guidance_start": 0.2, "control_guidance_end": 0.8},
        ours={"control_start": 0.2, "control_end": 0.8}),
    "PAG, plain": text(both={"pag_scale": 3.0}),
    "PAG, no guidance": text(both={"pag_scale": 3.0, "guidance_scale": 1.0}),
}  # fmt: skip
for rows in (SLOW, WEEKLY):
    rows |= {name: dataclasses.replace(case, **PAG) for name, case in rows.items() if name.startswith("PAG")}

ROWS = [
    pytest.param(case, id=name, marks=marks)
    for cases, marks in ((CASES, ()), (SLOW, pytest.mark.slow), (WEEKLY, pytest.mark.weekly))
    for name, case in cases.items()
]


@pytest.mark.parametrize("case", ROWS)
def test_same_image(case: Case, peers: Peers) -> None:
    got, _ = peers[case.model].same(case)
    if "inpainting" in case.model and "ControlNet" not in case.cls:  # what the mask leaves is pasted
        (kept,) = (np.asarray(case.ours["mask"][0]) == 0,)
        np.testing.assert_array_equal(np.asarray(got.images[0])[kept], np.asarray(TWO[0])[kept])


# What is no row


@pytest.mark.parametrize("name", ["mask, DDIM", "mask, Euler", "mask, DEIS"])
def test_known_latents_in_place_of_their_noise(name: str, peers: Peers) -> None:
    """Without ``renoised`` only runs whose last level is not 0 differ: known latents leave the same noise in x."""
    case = CASES[name]
    want, got = (peers["sd"].draw(case, **changes).latents for changes in ({}, {"mask_blend": ...}))
    assert (relative_error(got, want) > 1e-3) == (name != "mask, Euler")


@pytest.mark.slow
def test_nothing_recompiles(peers: Peers) -> None:
    """Strength, sampler, sizes of inputs, types of control images and their number are data."""
    masked = {"mask": disc(1)}
    for name, changes in {
        "image, DDIM": [
            {"strength": 1.0, "sampler": "DPM++ 2M"}, {"image": np.asarray(photo(4))},
            {"strength_rule": "a1111", "strength": 0.1}, {"strength_rule": "exact", "strength": 0.4},
            {"image": photo(5, (200, 90)), "height": SIZE, "width": SIZE}, {"image_encoding": "sample"},
        ],
        "mask, DDIM": [masked, masked | {"mask_mode": "graded", "mask_blur": 3}],
        "inpainting UNet": [{"image": photo(5), "mask": disc(2)}],
        "union, two": [{"control": {"openpose": photo(1), "segment:0.3": photo(2), 7: photo(3)}}],
        "SDXL, no negative": [
            *({name: value} for name, value in (SIZES | SECOND).items()), {"negative_prompt": ""}, {"clip_skip": 1},
        ],
    }.items():  # fmt: skip
        case = (CASES | SLOW)[name]
        found = [peers[case.model].draw(case).latents]
        for change in changes:
            result = peers[case.model].draw(case, **change)
            assert result.compilations == 0, (name, change)
            assert all(relative_error(result.latents, other) > 1e-5 for other in found), (name, change)
            found.append(result.latents)


def exploding(latents: np.ndarray, sigma: float) -> np.ndarray:
    """From canvax's variance-preserving frame to the one that diffusers' Euler keeps latents in."""
    return latents * np.hypot(1, sigma)


@pytest.mark.parametrize(("sampler", "end"), [
    ("Euler", 0.8), *(pytest.param(*case, marks=pytest.mark.weekly) for case in (("Euler", 0.5), ("DPM++ 2M", 0.8))),
])  # fmt: skip
@pytest.mark.slow
def test_hand_over(sampler: str, end: float, peers: Peers) -> None:
    """The base draws the noisy part of the run, the refiner the rest."""
    base, refiner = peers["xl"], peers["xl refiner"]
    steps = {"num_inference_steps": 20}
    first = text(sampler, "xl", negative=None, both=steps | {"denoising_end": end})
    noisy, _ = base.reference(dataclasses.replace(first, theirs={"output_type": "latent"}))
    assert noisy is not None
    begun = base.draw(first)
    assert begun.images == []
    sigma = 0.0
    if sampler == "Euler":
        scheduler = base.pipeline(first).scheduler
        scheduler.set_timesteps(20)
        sigma = float(scheduler.sigmas[int((scheduler.timesteps >= round(1000 - end * 1000)).sum())])
    assert relative_error(exploding(begun.latents, sigma), noisy) <= 1e-3
    rest = Case(
        "StableDiffusionXLImg2ImgPipeline", "xl refiner", sampler, negative=None,
        both=steps | {"denoising_start": end, "aesthetic_score": 5.0}, ours={"latents": begun.latents},
        theirs={"image": nchw(noisy), "crops_coords_top_left": (0, 0)},
    )  # fmt: skip
    refiner.same(rest)


@pytest.mark.parametrize("name", ["DDIM", "Euler", "Heun"])
def test_callbacks_of_diffusers(name: str, peers: Peers) -> None:
    """The same callback steers both: it gets the same tensors, and what it returns has the same effect."""
    seen: dict[str, list[Any]] = {"theirs": [], "ours": []}

    def steer(where: str) -> Any:
        def on_step_end(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen[where].append((index, float(timestep), np.array(tensors["latents"])))
            if index == 2:
                tensors["latents"][:, 0] *= 0.5  # a channel, in place
            return {"latents": 0.9 * tensors["latents"]} if index in (1, 4) else tensors

        return on_step_end

    calls = ({"callback_on_step_end": steer(where)} for where in seen)
    peers["sd"].same(text(name, count=1, theirs=next(calls), ours=next(calls)))
    for there, here in zip(seen["theirs"], seen["ours"], strict=True):
        assert there[0] == here[0]
        assert there[1] == pytest.approx(here[1], abs=1e-3)
        assert relative_error(here[2], there[2]) < 1e-3


@pytest.mark.slow
def test_guidance_as_an_input(peers: Peers) -> None:
    """A latent consistency model: the network takes the scale, and no negative prompt is evaluated."""
    peer, found = peers["sd lcm"], []
    for scale in (8.5, 1.0, 3.25):
        got, _ = peer.same(text(None, "sd lcm", negative=None, both=SHORT | {"guidance_scale": scale}))
        assert got.compilations == 0 or not found
        found.append(got.latents)
    assert relative_error(found[0], found[2]) > 1e-2
    default = peer.base(PROMPTS, seed=SEEDS, options=QUIET)
    assert default.metadata[0]["num_inference_steps"] == 4
    np.testing.assert_array_equal(default.latents, found[0])
    again = load(peer.base.save(peer.root / "saved"))
    np.testing.assert_array_equal(again(PROMPTS, seed=SEEDS, options=QUIET).latents, found[0])
    with pytest.raises(canvax.InputError) as caught:
        peer.base(PROMPTS, options=canvax.Options(guidance_steps=(1, 2, 3, 4)))
    assert caught.value.argument == "guidance_steps"
    with pytest.warns(canvax.errors.HintWarning, match="negative_prompt"):
        peer.base(PROMPTS, NEGATIVE, options=QUIET)
    with pytest.raises(canvax.CheckpointError):
        FlaxStableDiffusionPipeline.from_pretrained(peer.folder)
    conditions = peer.base.encode(PROMPTS, guidance_scale=3.25)
    assert np.all(np.asarray(conditions["guidance"]) == 3.25)


@pytest.mark.slow
def test_a_latent_consistency_model_against_its_own_pipeline(peers: Peers, tmp_path: Path) -> None:
    """One step of their sampler, which adds no noise."""
    both = {"num_inference_steps": 1, "guidance_scale": 8.5}
    case = Case("LatentConsistencyModelPipeline", "sd lcm", "LCM", negative=None, both=both)
    peer = peers[case.model]
    peer.pipeline(case).save_pretrained(tmp_path / "own")
    peer.same(dataclasses.replace(case, ours={"sampler": ...}), load(tmp_path / "own"))


@pytest.mark.slow
def test_what_we_save_diffusers_draws(tmp_path: Path, emoji: canvax.Pipeline) -> None:
    """The bundled model, saved by canvax and loaded by PyTorch diffusers: the same real picture."""
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(emoji.save(tmp_path / "saved"), safety_checker=None)
    choice = {"num_inference_steps": 10, "guidance_scale": 3.5}
    want = theirs(PROMPTS, output_type="np", latents=nchw(initial_noise(SEEDS, BUNDLED_LATENTS)), **choice).images
    assert psnr(emoji(PROMPTS, seed=SEEDS[0], options=QUIET, **choice).pixels, want) >= 60


@pytest.mark.parametrize("model", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_saved_and_loaded(model: str, peers: Peers, tmp_path: Path) -> None:
    """Diffusers reads the same weights."""
    peer = peers[model]
    saved = type(peer.theirs).from_pretrained(peer.base.save(tmp_path / "saved"))
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        if name in peer.theirs.components:
            state = getattr(saved, name).state_dict()
            assert all(torch.equal(one, state[key]) for key, one in getattr(peer.theirs, name).state_dict().items())


@pytest.mark.weekly
def test_old_class(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old Flax name, also with the noise of the encoding."""
    theirs = peers["sd"].pipeline(image("Img2Img", "DDIM", 0.75))
    pipeline, params = FlaxStableDiffusionImg2ImgPipeline.from_pretrained(peers["sd"].folder)
    key, shape = jax.random.key(7), (2, 4, 16, 16)
    noise, encoding = host_draw(key[None], shape)[0], encoding_noise(key[None], shape)
    moments = diffusers.models.autoencoders.vae.DiagonalGaussianDistribution
    monkeypatch.setattr(moments, "sample", lambda self, *_: self.mean + self.std * nchw(encoding))
    monkeypatch.setattr(f"{type(theirs).__module__}.randn_tensor", lambda *_, **__: nchw(noise))
    choice = {"strength": 0.75, "num_inference_steps": 10, "guidance_scale": 5.0}
    with torch.no_grad():
        want = theirs(PROMPTS, image=TWO, negative_prompt=[NEGATIVE] * 2, **choice, output_type="np").images
    (ids, pixels), (negative, _) = (pipeline.prepare_inputs(text, TWO) for text in (PROMPTS, [NEGATIVE] * 2))
    got = pipeline(ids, pixels, params, key, neg_prompt_ids=negative, **choice).images
    assert psnr(got, want) >= 60


def test_moments(peers: Peers) -> None:
    """What the encoder says of an image, and a sample of it, which is another for each seed."""
    peer = peers["sd"]
    vae, ours = peer.theirs.vae, peer.base
    pixels = np.asarray(photo(3), np.float32)[None] / 255
    with torch.no_grad():
        want = vae.encode(nchw(2 * pixels - 1)).latent_dist
    latents = ours.model.networks.latent_shape(1, SIZE, SIZE)
    program = ours.programs.program("image encoder", ours.params, latents, Kinds().adding(ReadsImage("whole")))
    for got, wanted in zip(program(ours.params, pixels), (want.mean, want.std), strict=True):
        assert relative_error(got, nhwc(wanted) * vae.config.scaling_factor) < 1e-5
    case = image("Img2Img", "DDIM", 0.2)
    mean, one, other, same = (
        peer.draw(case, image_encoding=how, seed=seed).latents[0]
        for how, seed in (("mean", 1), ("sample", 1), ("sample", 2), ("sample", 1))
    )
    assert relative_error(one, mean) > 1e-4
    assert relative_error(one, other) > 1e-4
    np.testing.assert_array_equal(one, same)


def test_masks_of_sizes_that_do_not_divide() -> None:
    """Bicubic as PyTorch's, without smoothing, whatever the sizes."""
    mask = np.random.default_rng(0).random((1, 1, 72, 104), np.float32)
    for size in ((9, 13), (5, 7), (3, 4), (80, 30)):
        want = torch.nn.functional.interpolate(torch.from_numpy(mask), size=size, mode="bicubic")[0, 0].numpy()
        got = bicubic(72, size[0]) @ mask[0, 0] @ bicubic(104, size[1]).T
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_pickled_image_prompts_are_converted_first(peers: Peers, tmp_path: Path) -> None:
    """The released .bin files are tables in a table, which ``canvax convert`` takes out without running them."""
    peer = peers["sd"]
    path = peer.eye(0, "plus")
    tables: dict[str, dict[str, Any]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in load_file(path).items():
        table, _, rest = name.partition(".")
        tables[table][rest] = tensor
    torch.save(tables, tmp_path / "ip-adapter.bin")
    canvax.convert(tmp_path / "ip-adapter.bin", tmp_path / "ip-adapter.safetensors")
    converted, own = load_file(tmp_path / "ip-adapter.safetensors"), load_file(path)
    assert converted.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in converted.items())
    peer.base.with_ip_adapter(tmp_path / "ip-adapter.safetensors", peer.root / "image_encoder")


def test_one_file_of_a_union(peers: Peers, tmp_path: Path) -> None:
    """Sizes are read off its arrays; the first released files name the class of a plain ControlNet."""
    peer = peers["xl"]
    arrays = {name: array.contiguous() for name, array in peer.net("union").state_dict().items()}
    save_file(arrays, tmp_path / "net.safetensors")
    single, folder = (peer.base.with_controlnet(one) for one in (tmp_path / "net.safetensors", peer.root / "union"))
    assert single.model.networks.controls == folder.model.networks.controls
