"""Z-Image's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import tokenizers  # noqa: E402

import canvax  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402

from .reference import nchw, psnr, randomise  # noqa: E402

PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas"]
NEGATIVES = ["blurry", ""]
SEEDS = [11, 12]
HEIGHT, WIDTH = 48, 80
QUIET = canvax.Options(progress=False)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""What Qwen3's does with one message of the user."""


def tokenizer() -> Any:
    """A byte is a token, but for two merges."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "Ġa", "se"])}
    made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[("Ġ", "a"), ("s", "e")])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATE
    return made


def build(folder: Path, shift: float = 3.0) -> Path:
    """A small random checkpoint, written by diffusers itself."""
    words = tokenizer()
    transformer = randomise(
        diffusers.ZImageTransformer2DModel(
            dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[8, 4, 4],
            axes_lens=[1024, 32, 32],
        )
    )  # fmt: skip
    text = randomise(
        transformers.Qwen3Model(
            transformers.Qwen3Config(
                vocab_size=len(words) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            )
        ),
        1,
    )  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKL(
            block_out_channels=(16, 16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=1, norm_num_groups=8, latent_channels=16,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        ),
        2,
    )  # fmt: skip
    with torch.no_grad():
        transformer.cap_embedder[1].weight.mul_(5)  # text must matter
    diffusers.ZImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=shift), vae, text, words, transformer
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model") / "z-image")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    pipe = diffusers.ZImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def ours(folder: Path) -> canvax.StableDiffusion:
    return canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def noise(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return initial_noise(SEEDS, (height // 8, width // 8, 16))


def reference(pipe: Any, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
    height, width = (8 * side for side in latents.shape[1:3])
    with torch.no_grad():
        out = pipe(list(prompts), latents=nchw(latents), height=height, width=width, output_type="np", **keywords)
    return out.images


def draw(pipe: canvax.StableDiffusion, **keywords: Any) -> canvax.Result:
    usual = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "options": QUIET}
    return pipe(keywords.pop("prompt", PROMPTS), **usual | keywords)


@pytest.mark.parametrize(("height", "width"), [(48, 80), (64, 32)])
@pytest.mark.parametrize("guidance", [0.0, 0.7, 3.0])
def test_same_picture(theirs: Any, ours: canvax.StableDiffusion, guidance: float, height: int, width: int) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens and of 8."""
    start = noise(height, width)
    asked = {"num_inference_steps": 7, "guidance_scale": guidance}
    want = reference(theirs, PROMPTS, start, negative_prompt=list(NEGATIVES), **asked)
    negatives = NEGATIVES if guidance else None
    got = ours(PROMPTS, latents=start, negative_prompt=negatives, height=height, width=width, options=QUIET, **asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(reference(theirs, PROMPTS[::-1], start, negative_prompt=NEGATIVES[::-1], **asked), want) < 40
