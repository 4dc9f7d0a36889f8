"""Qwen-Image-2.1 against diffusers with the same random weights, float32: the network, and the pipeline."""

from __future__ import annotations

import json
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
from canvax.models.qwen_image import (  # noqa: E402
    DROPPED,
    SYSTEM,
    QwenImageConfig,
    qwen_image,
    qwen_image_context,
    qwen_image_spec,
)
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from tests.support.random_numbers import normal  # noqa: E402

from .reference import psnr, randomise, relative_error  # noqa: E402
from .families import PROMPTS, QUIET, SEEDS, tokenizer  # noqa: E402
from .transformers_reference import TOLERANCE, params_of, stored, to_torch  # noqa: E402

SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 3,
    "context_in_dim": 32, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
TIMES = np.array([981.0, 303.25], np.float32)
LENGTHS, ROWS = np.array([19, 33], np.int32), 64


def network(**changes: Any) -> Any:
    module: Any = randomise(diffusers.QwenImage21Transformer2DModel(**SIZES | changes), 3)
    with torch.no_grad():  # attention is far from even, and text matters
        for name, weight in module.named_parameters():
            if name.endswith("norm_q.weight"):
                weight.mul_(4)
    return module


def test_network() -> None:
    """Two images of other sizes and other texts, each as if it were alone."""
    theirs = network()
    cfg = QwenImageConfig.from_dict(dict(theirs.config))
    params = params_of(stored(theirs), qwen_image_spec(cfg))
    sizes, x, text = [(4, 6), (6, 4)], normal(2, 24, 16), normal(2, ROWS, 32)

    @jax.jit
    def run(params: Any) -> Any:
        width = jnp.array([w for _, w in sizes], jnp.int32)
        context = qwen_image_context(params, jnp.asarray(text), jnp.asarray(LENGTHS), width, cfg, tokens=24)
        return qwen_image(params, jnp.asarray(x), jnp.asarray(TIMES), context, cfg)

    got = run(params)
    for i, (length, size) in enumerate(zip(LENGTHS, sizes, strict=True)):
        slots = torch.arange(length + 24 // 4)[None] >= int(length)
        with torch.no_grad():
            want = theirs(
                to_torch(x[i : i + 1]), to_torch(text[i : i + 1, :length]), to_torch(TIMES[i : i + 1] / 1000),
                img_shapes=[[(1, *size)]], img_mask=slots,
            ).sample.numpy()[:, -24:]  # fmt: skip
        print("network", relative_error(got[i : i + 1], want))
        assert relative_error(got[i : i + 1], want) < TOLERANCE
        with torch.no_grad():
            other = theirs(
                to_torch(x[i : i + 1]), to_torch(-text[i : i + 1, :length]), to_torch(TIMES[i : i + 1] / 1000),
                img_shapes=[[(1, *size)]], img_mask=slots,
            ).sample.numpy()[:, -24:]  # fmt: skip
        assert relative_error(other, want) > 0.01


HEIGHT, WIDTH = 64, 96


class Processor:
    """What the reference asks of the released processor, without the libraries for videos."""

    def __init__(self, words: Any) -> None:
        self.tokenizer = words

    def apply_chat_template(self, messages: Any, **_: Any) -> list[list[int]]:
        (message,) = messages
        return [self.tokenizer(f"<|im_start|>system\n{message['content'][0]['text']}<|im_end|>\n").input_ids]

    def __call__(self, text: list[str], **keywords: Any) -> Any:
        return self.tokenizer(text, **keywords)


def build(folder: Path, **index: Any) -> Any:
    """A small random checkpoint in ``folder``, and the reference's pipeline."""
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>|Comp|re(?=h)|hend| ?\w+|\n|[.]", SYSTEM)
    assert len(pieces) == DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece} - {"re"}))
    words.add_tokens(["re"])
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|image_pad|>"]})
    lm = {"vocab_size": len(words) + 3, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}}  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=lm, vision_config=eyes)
    text: Any = randomise(transformers.Qwen3VLForConditionalGeneration(config), 1)
    transformer = network()
    vae = randomise(
        diffusers.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 4, 4], num_res_blocks=1,
            latents_mean=[0.1 * i - 0.7 for i in range(16)], latents_std=[1 + 0.1 * i for i in range(16)],
        ),
        2,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=10, max_image_seq_len=64
    )
    pipe = diffusers.QwenImage21Pipeline(scheduler, vae, text, Processor(words), transformer, **index)
    for name, part in (("transformer", transformer), ("vae", vae), ("text_encoder", text), ("scheduler", scheduler)):
        part.save_pretrained(folder / name)
    words.save_pretrained(folder / "processor")
    classes = {name: ["diffusers", type(part).__name__] for name, part in pipe.components.items()}
    classes |= {name: ["transformers", kind] for name, kind in
                (("text_encoder", "Qwen3VLForConditionalGeneration"), ("processor", "Qwen3VLProcessor"))}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "QwenImage21Pipeline", **classes, **index}))
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Model:
    """One checkpoint in both libraries."""

    def __init__(self, folder: Path, **index: Any) -> None:
        self.folder = folder
        self.theirs = build(folder, **index)
        self.ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))

    def noise(self, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
        return initial_noise(SEEDS, (height // 16, width // 16, 16))

    def reference(self, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
        """One image at a time: in the reference the padding of a shorter prompt moves its image."""
        height, width = (16 * side for side in latents.shape[1:3])
        negatives, images = keywords.pop("negative_prompt", None) or [None] * len(prompts), []
        for prompt, negative, start in zip(prompts, negatives, latents, strict=True):
            tokens = torch.from_numpy(np.ascontiguousarray(start.reshape(1, -1, 16)))
            more = {} if negative is None else {"negative_prompt": negative}
            with torch.no_grad():
                result = self.theirs(
                    prompt, latents=tokens, height=height, width=width, output_type="np", **more, **keywords
                )
            images.append(result.images[0])
        return np.stack(images)

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": self.noise(), "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "options": QUIET}
        return self.ours(keywords.pop("prompt", PROMPTS), **usual | keywords)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "qwen")


TURBO_TIMES = [1.0, 0.93, 0.7, 0.36]


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "turbo", sample_sigmas=TURBO_TIMES)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (128, 32)])
def test_same_picture(model: Model, height: int, width: int) -> None:
    """Two prompts of different lengths in one batch, with alpha."""
    start = model.noise(height, width)
    want = model.reference(PROMPTS, start, num_inference_steps=5)
    got = model.draw(latents=start, height=height, width=width, num_inference_steps=5)
    assert got.pixels.shape == (2, height, width, 4)
    assert got.images[0].mode == "RGBA"
    other = model.reference(PROMPTS[::-1], start, num_inference_steps=5)
    print("qwen", psnr(got.pixels, want), "other prompts", psnr(other, want))
    assert psnr(got.pixels, want) > 60
    assert psnr(other, want) < 40


def test_same_guided_picture(model: Model) -> None:
    """An empty negative prompt is a space."""
    want = model.reference(PROMPTS, model.noise(), negative_prompt=NEGATIVES, num_inference_steps=4, true_cfg_scale=3.0)
    got = model.draw(negative_prompt=NEGATIVES, num_inference_steps=4, guidance_scale=3.0)
    assert psnr(got.pixels, want) > 60
    assert psnr(model.draw(num_inference_steps=4).pixels, want) < 40


def test_times_of_turbo(model: Model, turbo: Model) -> None:
    """They are in ``model_index.json``; other numbers of steps have even times."""
    assert turbo.ours.model.defaults.num_inference_steps == 4
    assert model.ours.model.defaults.num_inference_steps == 40
    want = turbo.reference(PROMPTS, turbo.noise())
    got = turbo.draw(num_inference_steps=None)
    assert psnr(got.pixels, want) > 60
    even = turbo.reference(PROMPTS, turbo.noise(), sigmas=[1.0, 0.75, 0.5, 0.25])
    assert psnr(even, want) < 50
    np.testing.assert_allclose(turbo.draw().pixels, model.draw().pixels, atol=1e-5)
