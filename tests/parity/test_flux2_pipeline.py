"""FLUX.2 klein's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import canvax  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402

from .reference import nchw, psnr, randomise  # noqa: E402
from .test_z_image_pipeline import tokenizer  # noqa: E402

PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas"]
SEEDS = [11, 12]
HEIGHT, WIDTH = 48, 80
QUIET = canvax.Options(progress=False)


def build(folder: Path, *, distilled: bool = True, layers: int = 28, **changes: Any) -> Path:
    """A small random checkpoint, written by diffusers itself; ``changes`` are of the transformer."""
    words = tokenizer()
    words.chat_template = words.chat_template.replace("is false", "is defined and enable_thinking is false")
    words.pad_token = "Z"  # whose features matter
    text = randomise(
        transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=len(words) + 3, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
            )
        ),
        1,
    )  # fmt: skip
    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
             "num_attention_heads": 2, "joint_attention_dim": 48, "axes_dims_rope": (4, 4, 4, 4),
             "guidance_embeds": False}  # fmt: skip
    transformer: Any = randomise(diffusers.Flux2Transformer2DModel(**{**sizes, **changes}))
    vae: Any = randomise(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, norm_num_groups=4,
            latent_channels=transformer.config.in_channels // 4,
        ),
        2,
    )  # fmt: skip
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.3 * torch.randn(vae.bn.running_mean.shape, generator=random))
        vae.bn.running_var.copy_(0.5 + torch.rand(vae.bn.running_var.shape, generator=random))
        transformer.context_embedder.weight.mul_(3)  # text must matter
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, shift=3.0
    )
    diffusers.Flux2KleinPipeline(scheduler, vae, text, words, transformer, is_distilled=distilled).save_pretrained(
        folder
    )
    return folder


class Model:
    """One checkpoint in both libraries."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = build(folder, **changes)
        self.theirs: Any = diffusers.Flux2KleinPipeline.from_pretrained(folder)
        self.theirs.set_progress_bar_config(disable=True)
        self.ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))

    def noise(self, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
        return initial_noise(SEEDS, (height // 16, width // 16, self.ours.model.vae.latent_channels))

    def reference(self, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
        height, width = (16 * side for side in latents.shape[1:3])
        with torch.no_grad():
            usual = {"height": height, "width": width, "output_type": "np", "latents": nchw(latents)}
            return self.theirs(prompt=list(prompts), **usual | keywords).images

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": self.noise(), "num_inference_steps": 3, "options": QUIET}
        if keywords.get("image") is None:
            usual |= {"height": HEIGHT, "width": WIDTH}
        return self.ours(keywords.pop("prompt", PROMPTS), **usual | keywords)


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "klein")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Undistilled, and of other sizes."""
    sizes = {"num_layers": 2, "num_single_layers": 1, "attention_head_dim": 24, "num_attention_heads": 3,
             "mlp_ratio": 2.5, "axes_dims_rope": (4, 6, 8, 6), "rope_theta": 500, "in_channels": 24}  # fmt: skip
    return Model(tmp_path_factory.mktemp("model") / "base", distilled=False, layers=30, **sizes)


@pytest.mark.parametrize(("height", "width"), [(48, 80), (64, 32)])
def test_same_picture(klein: Model, height: int, width: int) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens and of 8."""
    start = klein.noise(height, width)
    want = klein.reference(PROMPTS, start, num_inference_steps=4)
    got = klein.ours(PROMPTS, latents=start, height=height, width=width, options=QUIET)
    assert psnr(got.pixels, want) > 60
    assert psnr(klein.reference(PROMPTS[::-1], start, num_inference_steps=4), want) < 40


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_same_guided_picture(base: Model, guidance: float) -> None:
    asked = {"num_inference_steps": 7, "guidance_scale": guidance}
    want = base.reference(PROMPTS, base.noise(), **asked)
    got = base.draw(**asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(base.draw(**asked | {"guidance_scale": 5 - guidance}).pixels, want) < 40
