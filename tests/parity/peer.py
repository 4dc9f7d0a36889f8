"""Stable Diffusion in both libraries: small checkpoints that diffusers writes, and one way to draw a case with both."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import canvax
from canvax.denoise import step_noise
from canvax.models.configs import ClipTextConfig, UNetConfig
from canvax.noise import initial_noise, seed_keys
from canvax.weights.location import BUNDLED
from tests.support.bundled import VOCABULARY
from tests.support.drawing import one_device
from tests.support.ip_adapter_files import VISION, encoder, ip_adapter

from .reference import given_noise, nchw, nhwc, psnr, randomise, relative_error

SEEDS = [11, 12]
PROMPTS = ["a red apple", "two cats & a dog"]
NEGATIVE = "blurry"
SIZE, LATENTS = 128, (16, 16, 4)
QUIET = canvax.Options(progress=False)
WEIGHTS = "diffusion_pytorch_model.safetensors"

SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDIM": ("DDIMScheduler", {"clip_sample": False}),
    "DDPM": ("DDPMScheduler", {}),
    "PNDM": ("PNDMScheduler", {"skip_prk_steps": True}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler Karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DEISMultistepScheduler": ("DEISMultistepScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "LCM": ("LCMScheduler", {}),
}
EULER = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
    "timestep_spacing": "leading", "interpolation_type": "linear", "prediction_type": "epsilon",
}  # fmt: skip


def load(folder: Path, **changes: Any) -> canvax.Pipeline:
    """Return canvax's pipeline of a folder on one device."""
    return canvax.load(folder, dtype="float32", mesh=one_device(), progress=False, **changes)


def photo(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    """Something smooth with noise on it."""
    y, x = np.mgrid[: size[1], : size[0]] / 16
    pixels = np.stack([np.sin(x + seed), np.cos(y - seed), np.sin(x * y / 4)], axis=-1) * 0.4 + 0.5
    noisy = pixels + 0.05 * np.random.default_rng(seed).standard_normal(pixels.shape)
    return Image.fromarray(np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8))


def disc(seed: int) -> Image.Image:
    """A mask with grey at its edge."""
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2 + 4 * seed
    return Image.fromarray(np.uint8(np.clip(40 - np.hypot(x, y), 0, 1) * 255))


def square() -> Image.Image:
    """A mask of whole latents: diffusers takes every eighth pixel of it."""
    mask = Image.new("L", (SIZE, SIZE), 0)
    mask.paste(255, (32, 16, 96, 80))
    return mask


# Checkpoints


def given(config: Any) -> dict[str, Any]:
    """Keyword arguments of the reference class from a canvax config."""
    return {name: value for name, value in dataclasses.asdict(config).items() if value is not None}


def autoencoder(**changes: Any) -> Any:
    usual: dict[str, Any] = {
        "block_out_channels": (32, 32, 64, 64), "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 1, "norm_num_groups": 16,
    }  # fmt: skip
    return diffusers.AutoencoderKL(**usual | changes)


def build(folder: Path, prediction: str, **changes: Any) -> Path:
    """Write a small random Stable Diffusion in the real layout by diffusers itself."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=4, cross_attention_dim=48,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        use_linear_projection=prediction == "v_prediction", **changes,
    )  # fmt: skip
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1, pad_token_id=VOCABULARY - 1,
        )
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False,
        steps_offset=1, prediction_type=prediction,
    )  # fmt: skip
    diffusers.StableDiffusionPipeline(
        vae=randomise(autoencoder()), text_encoder=randomise(text), unet=randomise(unet), scheduler=scheduler,
        tokenizer=tokenizer(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def tokenizer(**changes: Any) -> Any:
    return transformers.CLIPTokenizer.from_pretrained(BUNDLED["emoji"] / "tokenizer", **changes)


def xl_unet(text: int, pooled: int, numbers: int) -> UNetConfig:
    """SDXL's shape made small: no attention above, deep transformers below."""
    return UNetConfig(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=(2, 4),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2), cross_attention_dim=text, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=pooled + 8 * numbers,
    )  # fmt: skip


def clip_config(act: str, eos: int) -> ClipTextConfig:
    return ClipTextConfig(
        vocab_size=VOCABULARY, hidden_size=40 if act == "gelu" else 32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, hidden_act=act, projection_dim=24 if act == "gelu" else 32, eos_token_id=eos,
    )  # fmt: skip


def clip(cfg: ClipTextConfig, cls: str, seed: int) -> Any:
    return randomise(
        getattr(transformers, cls)(transformers.CLIPTextConfig(**given(cfg), bos_token_id=VOCABULARY - 2)), seed
    )


def build_xl(
    folder: Path, *, zeros: bool = True, refiner: bool = False, channels: int = 4, scheduler: Any = None
) -> Path:
    """Write a small SDXL or its refiner likewise."""
    cfg = dataclasses.replace(xl_unet(40 if refiner else 72, 24, 5 if refiner else 6), in_channels=channels)
    parts: dict[str, Any] = {
        "vae": randomise(autoencoder(scaling_factor=0.13025), 1),
        "unet": randomise(diffusers.UNet2DConditionModel(**given(cfg)), 2 + refiner),
        "scheduler": scheduler or diffusers.EulerDiscreteScheduler(**EULER),
        "text_encoder": None if refiner else clip(clip_config("quick_gelu", 2), "CLIPTextModel", 4),
        "text_encoder_2": clip(clip_config("gelu", 2), "CLIPTextModelWithProjection", 5),
        "tokenizer": None if refiner else tokenizer(),
        "tokenizer_2": tokenizer(pad_token="!"),
        "force_zeros_for_empty_prompt": zeros,
    }
    if refiner:
        pipe = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True)
    else:
        pipe = diffusers.StableDiffusionXLPipeline(**parts)
    pipe.save_pretrained(folder)
    return folder


def few_steps(cls: str) -> Any:
    """The scheduler of a distilled SDXL, with trailing timesteps."""
    made = getattr(diffusers, cls)(**{k: v for k, v in EULER.items() if k != "interpolation_type"})
    made.register_to_config(timestep_spacing="trailing")
    return made


# Networks beside the UNet

SMALL_NET: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "attention_head_dim": 4, "cross_attention_dim": 48,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "conditioning_embedding_out_channels": (16, 32, 48, 64),
}  # fmt: skip
XL_NET: dict[str, Any] = SMALL_NET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24 + 6 * 8, "use_linear_projection": True,
}  # fmt: skip
UNION: dict[str, Any] = XL_NET | {
    "num_control_type": 8, "num_trans_channel": 32, "num_trans_head": 8, "num_trans_layer": 2, "num_proj_channel": 32,
}  # fmt: skip


def tame(module: Any, factor: float = 0.3) -> Any:
    """Weaken outputs: residuals as strong as the features themselves drown the image, and with it what is compared."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.startswith(("controlnet_down_blocks", "controlnet_mid_block")):
                p.mul_(factor)
    return module


def controlnet(seed: int = 5, **changes: Any) -> Any:
    """The last convolutions of a new one are zero; all weights get values, or nothing would be tested."""
    return tame(randomise(diffusers.ControlNetModel(**SMALL_NET | changes), seed))


def union(**changes: Any) -> Any:
    return tame(randomise(diffusers.ControlNetUnionModel(**UNION | changes), 5))


# Both libraries


@dataclass(frozen=True)
class Case:
    """A call of both libraries.

    Attributes:
        cls: the class of diffusers.
        model: name of the checkpoint (``CHECKPOINTS``).
        sampler: a key of ``SAMPLERS``, or None for the checkpoint's own.
        both: arguments of one name and meaning.
        theirs: further arguments of diffusers; ``scale`` is the strength of its image prompts.
        ours: further arguments of canvax.
        nets: networks that read control images (``Peer.net``).
        eyes: kinds of IP-Adapters.
        parts: further arguments of diffusers' class.
        count: number of images.
        negative: the negative prompt.
        without: arguments of canvax that are the feature: an image without them is another.
        generator: whether diffusers draws its noise itself, in PyTorch.
    """

    cls: str = "StableDiffusionPipeline"
    model: str = "sd"
    sampler: str | None = "DDIM"
    both: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    nets: tuple[str, ...] = ()
    eyes: tuple[str, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    count: int = 2
    negative: str | None = NEGATIVE
    without: tuple[str, ...] = ()
    generator: bool = False


USUAL: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 5.0}


def generators(count: int = 2) -> list[Any]:
    return [torch.Generator().manual_seed(seed) for seed in SEEDS[:count]]


class Peer:
    """A checkpoint in both libraries.

    Attributes:
        theirs: diffusers' plain pipeline, of whose parts its other pipelines are made.
        base: canvax's, without other networks.
    """

    def __init__(self, root: Path, cls: str) -> None:
        self.root, self.folder = root, root / "model"
        self.theirs: Any = getattr(diffusers, cls).from_pretrained(self.folder)
        self.config = dict(self.theirs.scheduler.config)  # a config made of another scheduler's keeps its fields
        self.base = load(self.folder)
        self._nets: dict[str, Any] = {}
        self._ours: dict[Any, canvax.Pipeline] = {}

    def net(self, name: str) -> Any:
        """A network of diffusers that reads control images; its folder has its name."""
        if name not in self._nets:
            xl, width = "XL" in type(self.theirs).__name__, self.theirs.unet.config.cross_attention_dim
            if name == "union":
                made = union(cross_attention_dim=width)
            elif name == "t2i":
                kind, factor = ("full_adapter_xl", 16) if xl else ("full_adapter", 8)
                made = randomise(diffusers.T2IAdapter(3, [32, 64], 2, factor, kind))
            else:
                made = controlnet(5 + int(name[3:]), **(XL_NET if xl else SMALL_NET) | {"cross_attention_dim": width})
            made.save_pretrained(self.root / name)
            self._nets[name] = made
        return self._nets[name]

    def eye(self, place: int, kind: str) -> Path:
        """The file of an IP-Adapter, beside that of its image encoder."""
        if not (self.root / "image_encoder").exists():
            encoder(self.root / "image_encoder")
        path = self.root / f"{place}-{kind}.safetensors"
        return path if path.exists() else ip_adapter(path, kind, self.base.model.unet, 7 + place)

    def ours(self, case: Case) -> canvax.Pipeline:
        """canvax's pipeline with the networks of a case."""
        key = case.nets, case.eyes
        if key not in self._ours:
            pipe, folders = self.base, [self.root / name for name in case.nets if self.net(name)]
            pipe = pipe.with_controlnet(folders) if folders else pipe
            files = [self.eye(*one) for one in enumerate(case.eyes)]
            self._ours[key] = pipe.with_ip_adapter(files) if files else pipe
        return self._ours[key]

    def pipeline(self, case: Case) -> Any:
        """diffusers' pipeline of a case."""
        cls = getattr(diffusers, case.cls)
        takes = inspect.signature(cls).parameters
        nets = [self.net(name) for name in case.nets]
        parts = self.theirs.components | {"requires_safety_checker": False, "add_watermarker": False} | case.parts
        if nets:
            parts["adapter" if "Adapter" in case.cls else "controlnet"] = nets if len(nets) > 1 else nets[0]
        for name in ("force_zeros_for_empty_prompt", "requires_aesthetics_score"):
            parts[name] = self.theirs.config.get(name)
        pipe: Any = cls(**{name: part for name, part in parts.items() if name in takes})
        pipe.set_progress_bar_config(disable=True)
        if case.sampler is not None:
            scheduler, changes = SAMPLERS[case.sampler]
            pipe.scheduler = getattr(diffusers, scheduler).from_config(dict(self.config), **changes)
        if case.eyes:
            self._see(pipe, case)
        return pipe

    def _see(self, pipe: Any, case: Case) -> None:
        files = [self.eye(*one) for one in enumerate(case.eyes)]
        side = VISION.image_size
        sizes: dict[str, Any] = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        vision = transformers.CLIPVisionModelWithProjection.from_pretrained(self.root / "image_encoder").eval()
        pipe.register_modules(image_encoder=vision, feature_extractor=CLIPImageProcessorPil(**sizes))
        names, blank = [file.name for file in files], [""] * len(files)
        pipe.load_ip_adapter(
            [str(self.root)] * len(files), subfolder=blank, weight_name=names, image_encoder_folder=None
        )
        pipe.set_ip_adapter_scale(case.theirs.get("scale", 1.0))

    def reference(self, case: Case) -> tuple[np.ndarray | None, np.ndarray]:
        """Draw a case with diffusers; return the latents after the last step [B, h, w, C] and the images.

        Unless the case has a ``generator``, its noise is canvax's: generators differ, the law does not.
        """
        pipe = self.pipeline(case)
        takes, seen = inspect.signature(pipe.__call__).parameters, {}
        wanted: dict[str, Any] = {
            "height": SIZE, "width": SIZE, "output_type": "np",
            "callback_on_step_end": lambda _, i, t, values: seen.update(latents=values["latents"]) or {},
        }  # fmt: skip
        call = {name: value for name, value in wanted.items() if name in takes} | USUAL | case.both
        call |= {name: value for name, value in case.theirs.items() if name != "scale"}
        if case.negative is not None:
            call.setdefault("negative_prompt", [case.negative] * case.count)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if case.generator:
                call["generator"] = generators(case.count)
            elif "latents" not in call and "denoising_start" not in call:
                noise = initial_noise(SEEDS[: case.count], LATENTS)
                if "strength" in takes:
                    given_noise(patch, pipe, noise)
                else:
                    call["latents"] = nchw(noise)
                self._same_step_noise(pipe, case, call, patch)
            images = pipe(PROMPTS[: case.count], **call).images
        if case.eyes:
            pipe.unload_ip_adapter()
        return (nhwc(seen["latents"]) if seen else None), images

    def _same_step_noise(self, pipe: Any, case: Case, call: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
        steps = call["num_inference_steps"]
        first = (steps - int(steps * call.get("strength", 1.0))) * (2 if case.sampler == "Heun" else 1)
        rows, count = iter(range(first, 1000)), case.count

        def of_step(*_: Any, **__: Any) -> Any:
            return nchw(np.asarray(step_noise(seed_keys(SEEDS[:count]), np.full(count, next(rows), np.int32), LATENTS)))

        module = import_module(type(pipe.scheduler).__module__)
        if hasattr(module, "randn_tensor"):
            patch.setattr(module, "randn_tensor", of_step)

    def draw(self, case: Case, pipe: canvax.Pipeline | None = None, **changes: Any) -> canvax.Result:
        """Draw a case with canvax."""
        size = {} if "image" in case.both | case.ours else {"height": SIZE, "width": SIZE}
        call = {"sampler": case.sampler, "progress": False, **size, **USUAL, **case.both, **case.ours, **changes}
        if case.negative is not None:
            call.setdefault("negative_prompt", case.negative)
        if case.generator:
            call["generator"] = generators(case.count)
        elif "latents" not in call:
            call.setdefault("seed", SEEDS[: case.count])
        call = {name: value for name, value in call.items() if value is not ...}  # left out
        return (pipe or self.ours(case))(PROMPTS[: case.count], **call)

    def same(self, case: Case, pipe: canvax.Pipeline | None = None) -> tuple[canvax.Result, np.ndarray]:
        """Draw a case with both and demand the same latents and images; return canvax's result and their images.

        Inpainted images differ by what canvax pastes. What a case leaves out must have changed the image.
        """
        latents, images = self.reference(case)
        got = self.draw(case, pipe)
        if latents is not None:
            assert relative_error(got.latents, latents) <= 1e-3
        if "Inpaint" not in case.cls:
            near = psnr(got.pixels, images)
            assert near >= 60
            if case.without:
                plain = self.draw(case, pipe, **dict.fromkeys(case.without, ...))
                assert psnr(plain.pixels, images) < near - 20
        return got, images


def checkpoints(root: Path, name: str) -> Peer:
    """Build a checkpoint by its name."""
    cls = "StableDiffusionXLPipeline" if name.startswith("xl") else "StableDiffusionPipeline"
    builders: dict[str, Any] = {
        "sd": lambda folder: build(folder, "epsilon"),
        "sd velocity": lambda folder: build(folder, "v_prediction"),
        "sd inpainting": lambda folder: build(folder, "epsilon", in_channels=9),
        "sd lcm": lambda folder: build(folder, "epsilon", time_cond_proj_dim=24),
        "xl": build_xl,
        "xl without zeros": lambda folder: build_xl(folder, zeros=False),
        "xl refiner": lambda folder: build_xl(folder, refiner=True, zeros=False),
        "xl inpainting": lambda folder: build_xl(folder, channels=9),
        "xl turbo": lambda folder: build_xl(folder, scheduler=few_steps("EulerAncestralDiscreteScheduler")),
        "xl lightning": lambda folder: build_xl(folder, scheduler=few_steps("EulerDiscreteScheduler")),
    }
    builders[name](root / "model")
    return Peer(root, "StableDiffusionXLImg2ImgPipeline" if "refiner" in name else cls)


class Peers(dict[str, Peer]):
    """Checkpoints by their names, each built when it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Peer:
        self[name] = checkpoints(self.root / name.replace(" ", "-"), name)
        return self[name]
