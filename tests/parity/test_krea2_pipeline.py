"""Krea 2's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import canvax  # noqa: E402
from canvax.models.dit import pack  # noqa: E402
from canvax.models.krea2 import DROPPED, TEMPLATE  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402

from .reference import psnr, randomise  # noqa: E402
from .test_z_image_pipeline import NEGATIVES, PROMPTS, QUIET, SEEDS, tokenizer  # noqa: E402

HEIGHT, WIDTH = 48, 80


def build(folder: Path, **index: Any) -> Path:
    """A small random checkpoint, written by diffusers itself; ``index`` are arguments of its pipeline."""
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\n|[,:]", TEMPLATE.partition("{}")[0])
    assert len(pieces) == DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    lm: dict[str, Any] = dict(
        vocab_size=len(words) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    text = randomise(transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config=lm, vision_config=eyes)), 1)
    transformer: Any = randomise(
        diffusers.Krea2Transformer2DModel(
            in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=96, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=4,
            text_num_key_value_heads=2, text_intermediate_size=48, num_layerwise_text_blocks=1,
            num_refiner_text_blocks=2, axes_dims_rope=(8, 4, 4),
        ),
    )  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.5, -0.2, 0.1, 0.7], latents_std=[2.0, 1.5, 0.7, 1.1],
        ),
        2,
    )  # fmt: skip
    with torch.no_grad():
        transformer.txt_in.linear_2.weight.mul_(5)  # text must matter
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=10, max_image_seq_len=64
    )
    usual = {"text_encoder_select_layers": (1, 3, 5)}
    diffusers.Krea2Pipeline(scheduler, vae, text, words, transformer, **usual | index).save_pretrained(folder)
    return folder


class Model:
    """One checkpoint in both libraries."""

    def __init__(self, folder: Path, **index: Any) -> None:
        self.folder = build(folder, **index)
        self.theirs: Any = diffusers.Krea2Pipeline.from_pretrained(folder)
        self.theirs.set_progress_bar_config(disable=True)
        self.ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))

    def reference(self, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
        height, width = (8 * side for side in latents.shape[1:3])
        tokens = pack(jnp.asarray(latents), channels_first=True).reshape(len(latents), -1, 4 * latents.shape[-1])
        usual = {"latents": torch.from_numpy(np.array(tokens)), "height": height, "width": width, "output_type": "np"}
        with torch.no_grad():
            return self.theirs(list(prompts), **usual | keywords).images

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "options": QUIET}
        return self.ours(keywords.pop("prompt", PROMPTS), **usual | keywords)


def noise(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return initial_noise(SEEDS, (height // 8, width // 8, 4))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "raw")


@pytest.mark.parametrize(("guidance", "height", "width"), [(0.0, 48, 80), (1.7, 64, 32)])
def test_same_picture(raw: Model, guidance: float, height: int, width: int) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens and of 8."""
    start = noise(height, width)
    asked = {"num_inference_steps": 5, "guidance_scale": guidance}
    want = raw.reference(PROMPTS, start, negative_prompt=list(NEGATIVES), **asked)
    negatives = NEGATIVES if guidance else None
    got = raw.draw(latents=start, negative_prompt=negatives, height=height, width=width, **asked)
    other = raw.reference(PROMPTS[::-1], start, negative_prompt=NEGATIVES[::-1], **asked)
    print("dB", psnr(got.pixels, want), psnr(other, want), want.std())
    assert psnr(got.pixels, want) > 60
    assert psnr(other, want) < 40
