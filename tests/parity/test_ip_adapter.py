"""IP-Adapter against PyTorch diffusers, which loads the same files: all kinds, several images, masks, strengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.image_processor import IPAdapterMaskProcessor
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPVisionModelWithProjection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import canvax
from canvax import ImagePrompt
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.image_prompts import bicubic
from tests.support.ip_adapter_files import VISION, encoder, ip_adapter

from .reference import nchw, psnr
from .test_image_to_image import photo
from .test_pipeline import NEGATIVE, PROMPTS, SEEDS, build
from .test_sdxl import build as build_xl

SIZE, LATENTS = 128, (16, 16, 4)
KINDS = ("plain", "plus", "full")
CHOICE: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}


class Pair:
    """A model of both programs, whose adapters are changed."""

    def __init__(self, folder: Path, root: Path, *, xl: bool = False) -> None:
        cls = diffusers.StableDiffusionXLPipeline if xl else diffusers.StableDiffusionPipeline
        self.root, self.xl = root, xl
        self.encoder = encoder(root / "image_encoder")
        own: dict[str, Any] = {"size": {"shortest_edge": VISION.image_size}}
        own |= {"crop_size": {"height": VISION.image_size, "width": VISION.image_size}}
        vision = CLIPVisionModelWithProjection.from_pretrained(self.encoder).eval()
        self.seeing = {"image_encoder": vision, "feature_extractor": CLIPImageProcessorPil(**own)}
        self.theirs = cls.from_pretrained(folder, **{} if xl else {"safety_checker": None})
        if not xl:
            self.theirs.scheduler = diffusers.DDIMScheduler.from_config(self.theirs.scheduler.config)
        self.theirs.set_progress_bar_config(disable=True)
        self.base = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))

    def load(self, *kinds: str) -> canvax.Pipeline:
        unet = self.base.model.unet
        paths = [ip_adapter(self.root / f"{i}-{kind}.safetensors", kind, unet, 7 + i) for i, kind in enumerate(kinds)]
        if getattr(self.theirs.unet, "encoder_hid_proj", None) is not None:
            self.theirs.unload_ip_adapter()  # which drops the encoder
        self.theirs.register_modules(**self.seeing)
        self.theirs.load_ip_adapter(
            [str(self.root)] * len(kinds), subfolder=[""] * len(kinds), weight_name=[path.name for path in paths],
            image_encoder_folder=None,
        )  # fmt: skip
        return self.base.with_ip_adapter(paths)

    def reference(self, prompt: str = PROMPTS[0], seed: int = SEEDS[0], **changes: Any) -> Any:
        with torch.no_grad():
            return self.theirs(
                prompt, negative_prompt=NEGATIVE, output_type="np", height=SIZE, width=SIZE,
                latents=nchw(initial_noise([seed], LATENTS)), **CHOICE | changes,
            ).images  # fmt: skip

    def draw(self, pipe: canvax.Pipeline, prompt: Any = PROMPTS[0], seed: Any = SEEDS[0], **changes: Any) -> Any:
        choice = {"height": SIZE, "width": SIZE, "sampler": None if self.xl else "DDIM", "progress": False}
        return pipe(prompt, NEGATIVE, seed=seed, **choice | CHOICE | changes)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("ip")
    return Pair(build(root / "model", "epsilon"), root)


def square() -> Image.Image:
    mask = Image.new("L", (SIZE, SIZE), 0)
    mask.paste(255, (20, 8, 84, 100))
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_same_image(kind: str, pair: Pair) -> None:
    """With guidance, and with one strength unlike 1."""
    pipe = pair.load(kind)
    pair.theirs.set_ip_adapter_scale(0.7)
    wide = photo(1).resize((200, 120))  # of which CLIP sees the middle
    want = pair.reference(ip_adapter_image=wide)
    got = pair.draw(pipe, image_prompt=ImagePrompt(wide, scale=0.7))
    near = psnr(got.pixels, want)
    assert near >= 60
    assert psnr(got.pixels, pair.draw(pair.base).pixels) < near - 20
    # The zeros of the negative prompt are not nothing.
    other = ImagePrompt(wide, 0.7, negative_embeds=np.ones(pipe.model.networks.ip_adapters[0][1].reads)
                        if kind == "plain" else np.ones((VISION.tokens, VISION.hidden_size)))  # fmt: skip
    assert psnr(pair.draw(pipe, image_prompt=other).pixels, want) < near - 10


def test_without_guidance(pair: Pair) -> None:
    pipe = pair.load("plus")
    want = pair.reference(ip_adapter_image=photo(2), guidance_scale=1.0)
    assert psnr(pair.draw(pipe, image_prompt=photo(2), guidance_scale=1.0).pixels, want) >= 60


@pytest.mark.parametrize("kind", ["plain", "plus"])
def test_two_images(kind: str, pair: Pair) -> None:
    """Of one adapter they share a softmax."""
    pipe = pair.load(kind)
    pair.theirs.set_ip_adapter_scale(0.8)
    want = pair.reference(ip_adapter_image=[[photo(1), photo(2)]])
    prompts = [ImagePrompt(photo(1), 0.8), ImagePrompt(photo(2), 0.8)]
    assert psnr(pair.draw(pipe, image_prompt=prompts).pixels, want) >= 60


def test_masks(pair: Pair) -> None:
    """Two images, each in its part of the image with a strength of its own."""
    pipe = pair.load("plus")
    left, right = square(), square().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    masks = IPAdapterMaskProcessor().preprocess([left, right], height=SIZE, width=SIZE)
    masks = [masks.reshape(1, 2, SIZE, SIZE)]
    pair.theirs.set_ip_adapter_scale([[0.9, 0.5]])
    want = pair.reference(ip_adapter_image=[[photo(1), photo(2)]], cross_attention_kwargs={"ip_adapter_masks": masks})
    prompts = [ImagePrompt(photo(1), 0.9, left), ImagePrompt(photo(2), 0.5, right)]
    got = pair.draw(pipe, image_prompt=prompts).pixels
    assert psnr(got, want) >= 60
    swapped = [ImagePrompt(photo(1), 0.9, right), ImagePrompt(photo(2), 0.5, left)]
    assert psnr(pair.draw(pipe, image_prompt=swapped).pixels, want) < 45


def test_masks_of_sizes_that_do_not_divide() -> None:
    """Bicubic as PyTorch's, without smoothing, whatever the sizes."""
    mask = np.random.default_rng(0).random((1, 1, 72, 104), np.float32)
    for size in ((9, 13), (5, 7), (3, 4), (80, 30)):
        want = torch.nn.functional.interpolate(torch.from_numpy(mask), size=size, mode="bicubic")[0, 0].numpy()
        got = bicubic(72, size[0]) @ mask[0, 0] @ bicubic(104, size[1]).T
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_two_adapters(pair: Pair) -> None:
    pipe = pair.load("plus", "plain")
    pair.theirs.set_ip_adapter_scale([0.7, 0.4])
    want = pair.reference(ip_adapter_image=[[photo(1), photo(3)], photo(2)])
    prompts = [ImagePrompt(photo(1), 0.7), ImagePrompt(photo(2), 0.4, adapter=1), ImagePrompt(photo(3), 0.7)]
    assert psnr(pair.draw(pipe, image_prompt=prompts).pixels, want) >= 60


@pytest.mark.parametrize("scale", [
    {"down": {"block_0": 0.7}}, {"up": {"block_1": [0.0, 1.0]}, "mid": 0.4}, {"up": 0.6, "down": 0.3},
], ids=str)  # fmt: skip
def test_strength_by_parts(scale: dict[str, Any], pair: Pair) -> None:
    """That of InstantStyle."""
    pipe = pair.load("plain")
    pair.theirs.set_ip_adapter_scale(scale)
    want = pair.reference(ip_adapter_image=photo(1))
    got = pair.draw(pipe, image_prompt=ImagePrompt(photo(1), scale)).pixels
    assert psnr(got, want) >= 60
    assert psnr(pair.draw(pipe, image_prompt=photo(1)).pixels, want) < 50


@pytest.mark.parametrize("kind", ["plain", "plus"])
def test_embeds(kind: str, pair: Pair) -> None:
    """Under diffusers' name, negative and positive in one tensor."""
    pipe = pair.load(kind)
    pair.theirs.set_ip_adapter_scale(1.0)
    rng = np.random.default_rng(3)
    shape = (2, 1, 24) if kind == "plain" else (2, 1, VISION.tokens, 64)
    embeds = rng.standard_normal(shape).astype(np.float32)
    want = pair.reference(ip_adapter_image_embeds=[torch.from_numpy(embeds)])
    assert psnr(pair.draw(pipe, ip_adapter_image_embeds=[embeds]).pixels, want) >= 60
    own = ImagePrompt(embeds=embeds[1], negative_embeds=embeds[0])
    assert psnr(pair.draw(pipe, image_prompt=own).pixels, want) >= 60


def test_each_image_of_a_batch_has_its_own(pair: Pair) -> None:
    """Which diffusers cannot do in one call."""
    pipe = pair.load("plus")
    pair.theirs.set_ip_adapter_scale(1.0)
    want = [pair.reference(PROMPTS[i], SEEDS[i], ip_adapter_image=photo(i + 1))[0] for i in range(2)]
    got = pair.draw(pipe, PROMPTS, SEEDS, image_prompt=[photo(1), photo(2)]).pixels
    for one, other in zip(got, want, strict=True):
        assert psnr(one, other) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plus"])
def test_sdxl(kind: str, tmp_path: Path) -> None:
    both = Pair(build_xl(tmp_path / "model"), tmp_path, xl=True)
    pipe = both.load(kind)
    both.theirs.set_ip_adapter_scale(0.8)
    want = both.reference(ip_adapter_image=photo(1))
    got = both.draw(pipe, image_prompt=ImagePrompt(photo(1), 0.8))
    near = psnr(got.pixels, want)
    assert near >= 60
    assert psnr(got.pixels, both.draw(both.base).pixels) < near - 20


def test_pickles_are_converted_first(pair: Pair, tmp_path: Path) -> None:
    """The released .bin files are tables in a table, which ``canvax convert`` takes out without running them."""
    pair.load("plus")
    tables: dict[str, dict[str, Any]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in load_file(pair.root / "0-plus.safetensors").items():
        table, _, rest = name.partition(".")
        tables[table][rest] = tensor
    torch.save(tables, tmp_path / "ip-adapter.bin")
    canvax.convert(tmp_path / "ip-adapter.bin", tmp_path / "ip-adapter.safetensors")
    ours = pair.base.with_ip_adapter(tmp_path / "ip-adapter.safetensors", pair.encoder)
    want = pair.draw(pair.base.with_ip_adapter(pair.root / "0-plus.safetensors"), image_prompt=photo(1))
    np.testing.assert_array_equal(pair.draw(ours, image_prompt=photo(1)).pixels, want.pixels)
