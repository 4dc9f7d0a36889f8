"""FLUX.3 klein against diffusers with the same random weights, float32: the network, and the pipeline."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageOps

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import diffusers.modular_pipelines as modular  # noqa: E402

import canvax  # noqa: E402
from canvax.families.flux3 import STACKS  # noqa: E402
from canvax.models.flux3 import Flux3Config, flux3, flux3_context, flux3_spec, reference_ids  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.server.engine import EngineSettings, ImageEngine  # noqa: E402
from canvax.server.jobs import JobRequest, State  # noqa: E402
from canvax.server.metrics import Metrics  # noqa: E402
from canvax.server.models import Warm  # noqa: E402
from tests.support.random_numbers import normal  # noqa: E402
from tests.support.serving import until  # noqa: E402

from .reference import nchw, psnr, randomise, relative_error  # noqa: E402
from .test_flux2_pipeline import ONE, TWO  # noqa: E402
from .test_z_image_pipeline import tokenizer, write_factors  # noqa: E402
from .transformers_reference import TOLERANCE, params_of, stored, to_torch, unfused  # noqa: E402

SIZES: dict[str, Any] = {
    "in_channels": 16, "cond_in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 3, "joint_attention_dim": 96, "axes_dims_rope": (4, 4, 4, 4), "timestep_channels": 32,
}  # fmt: skip
TIMES, TARGETS = np.array([981.0, 303.25], np.float32), np.array([903.0, 0.0], np.float32)
LENGTHS = np.array([19, 90], np.int32)
"""Of two texts: one window, and two."""
WINDOWS, ROWS = (80, 160), 240
REFERENCES = [(4, 6), (5, 3)]


def network(flow_map: bool, **changes: Any) -> Any:
    module: Any = randomise(diffusers.Flux3Transformer2DModel(**SIZES | changes, flow_map=flow_map), 3)
    with torch.no_grad():  # attention is far from even
        for name, weight in module.named_parameters():
            if name.endswith("norm_q.weight"):
                weight.mul_(4)
    return module


def ids(height: int, width: int, index: int = 0) -> torch.Tensor:
    from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

    return _prepare_image_ids(height, width, 0.5, index)


@pytest.mark.parametrize("flow_map", [False, True], ids=["base", "distilled"])
@pytest.mark.parametrize("references", [0, 1, 2])
def test_network(flow_map: bool, references: int) -> None:
    """Two images of other sizes, other texts and another number of references, each as if it were alone."""
    theirs = network(flow_map)
    cfg = Flux3Config.from_dict(dict(theirs.config))
    params = params_of(unfused(stored(theirs), flux3_spec(cfg), STACKS), flux3_spec(cfg))
    sizes, x, text = [(3, 5), (5, 3)], normal(2, 15, 16), normal(2, ROWS, 96)
    counts = [references, max(references - 1, 0)]
    room = 48 if references else 0
    tokens = normal(2, 48, 16)
    places = [np.stack(np.meshgrid(k, range(h), range(w), indexing="ij"), axis=-1).reshape(-1, 3)
              for k, (h, w) in enumerate(REFERENCES, 1)]  # fmt: skip
    known = [np.concatenate([np.zeros((0, 3), int), *places[:count]]) for count in counts]
    given: dict[str, Any] = {}
    if references:
        padded = np.stack([np.pad(part, ((0, room - len(part)), (0, 0)), constant_values=7) for part in known])
        given = {
            "references": tokens,
            "ids": reference_ids(jnp.asarray(padded, jnp.int32)),
            "count": np.array([len(part) for part in known], np.int32),
        }

    @jax.jit
    def run(params: Any, given: Any) -> Any:
        width = jnp.array([w for _, w in sizes], jnp.int32)
        context = flux3_context(params, jnp.asarray(text), jnp.asarray(LENGTHS), width, cfg, tokens=15, **given)
        target = jnp.asarray(TARGETS) if flow_map else None
        return flux3(params, jnp.asarray(x), jnp.asarray(TIMES), context, cfg, target=target)

    got = run(params, given)
    for i, (count, window, size) in enumerate(zip(counts, WINDOWS, sizes, strict=True)):
        more: dict[str, Any] = {}
        if count:
            more["image_cond_hidden_states"] = to_torch(tokens[i : i + 1, : len(known[i])])
            more["image_cond_ids"] = torch.cat([ids(*REFERENCES[k], -1 - k) for k in range(count)])
        if flow_map:
            more["target_timestep"] = to_torch(TARGETS[i : i + 1] / 1000)
        with torch.no_grad():
            want = theirs(
                to_torch(x[i : i + 1]), to_torch(text[i : i + 1, :window]), to_torch(TIMES[i : i + 1] / 1000),
                ids(*size), torch.nn.functional.pad(torch.arange(window)[:, None], (3, 0)).float(), **more,
            ).sample.numpy()  # fmt: skip
        assert relative_error(got[i : i + 1], want) < TOLERANCE


PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas. " * 2]
"""One of one window and one of two: words are letters here."""

SEEDS, HEIGHT, WIDTH = [11, 12], 48, 80
QUIET = canvax.Options(progress=False)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor:
    """What the reference asks of the released processor, without the libraries for videos."""

    def __init__(self, words: Any) -> None:
        self.tokenizer, self.apply_chat_template = words, words.apply_chat_template


def build(folder: Path, *, distilled: bool, groups: int = 4, **changes: Any) -> Any:
    """A small random checkpoint in ``folder``, as the reference writes it, and the reference's pipeline."""
    words = tokenizer()
    words.pad_token, words.chat_template = "Z", TEMPLATE  # a token whose features matter
    lm = {"vocab_size": len(words) + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 9,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
          "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}}  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=lm, vision_config=eyes)
    text = randomise(transformers.Qwen3VLForConditionalGeneration(config), 1)
    transformer = network(distilled, joint_attention_dim=128, **changes)
    vae: Any = randomise(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(2 * groups, 2 * groups, 4 * groups, 4 * groups),
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1, norm_num_groups=groups, latent_channels=4,
        ),
        2,
    )  # fmt: skip
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.3 * torch.randn(vae.bn.running_mean.shape, generator=random))
        vae.bn.running_var.copy_(0.5 + torch.rand(vae.bn.running_var.shape, generator=random))
    blocks = modular.Flux3DistilledAutoBlocks() if distilled else modular.Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipe = blocks.init_pipeline()
    pipe.update_components(text_encoder=text, vae=vae, transformer=transformer)
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    words.save_pretrained(folder / "tokenizer")
    index = json.loads((folder / "modular_model_index.json").read_text())
    hint = {"pretrained_model_name_or_path": str(folder), "revision": None, "subfolder": "tokenizer", "variant": None}
    index["tokenizer"] = [None, None, hint | {"type_hint": ["transformers", "AutoProcessor"]}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    pipe.update_components(tokenizer=Processor(words))
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Model:
    """One checkpoint in both libraries."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder, self.theirs = folder, build(folder, **changes)
        self.ours = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))

    def noise(self, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
        return initial_noise(SEEDS, (height // 16, width // 16, 16))

    def reference(self, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
        """One image at a time: the reference takes one prompt."""
        height, width = (16 * side for side in latents.shape[1:3])
        guidance, images = keywords.pop("guidance_scale", None), []
        if guidance is not None:
            guider = diffusers.ClassifierFreeGuidance(guidance_scale=guidance)
            self.theirs.update_components(guider=guider)
        usual = {"height": height, "width": width, "output_type": "np",
                 "text_encoder_out_layers": tuple(range(1, 9))}  # fmt: skip
        negatives = keywords.pop("negative_prompt", None) or [None] * len(prompts)
        for prompt, negative, start in zip(prompts, negatives, latents, strict=True):
            more = {} if negative is None else {"negative_prompt": negative}
            result = self.theirs(prompt=prompt, latents=nchw(start[None]), **usual | more | keywords)
            images.append(result.images[0])
        return np.stack(images)

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": self.noise(), "num_inference_steps": 3, "options": QUIET}
        if keywords.get("image") is None:
            usual |= {"height": HEIGHT, "width": WIDTH}
        return self.ours(keywords.pop("prompt", PROMPTS), **usual | keywords)


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "klein", distilled=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "base", distilled=False)


@pytest.mark.parametrize(("height", "width"), [(48, 80), (64, 32)])
def test_same_picture(klein: Model, height: int, width: int) -> None:
    """Two prompts of different windows side by side, of an image of 15 tokens and of 8."""
    start = klein.noise(height, width)
    want = klein.reference(PROMPTS, start, num_inference_steps=4)
    got = klein.draw(latents=start, height=height, width=width, num_inference_steps=4)
    assert psnr(got.pixels, want) > 60
    assert psnr(klein.reference(PROMPTS[::-1], start, num_inference_steps=4), want) < 40


def test_same_guided_picture(base: Model) -> None:
    """The negative prompts have windows of their own."""
    negatives, asked = ["", PROMPTS[1]], {"num_inference_steps": 5, "guidance_scale": 3.0}
    prompts = PROMPTS[::-1]
    want = base.reference(prompts, base.noise(), negative_prompt=negatives, **asked)
    got = base.draw(prompt=prompts, negative_prompt=negatives, **asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(base.draw(prompt=prompts, **asked).pixels, want) < 40


@pytest.mark.parametrize("references", [ONE, TWO], ids=["one", "two"])
def test_editing(klein: Model, references: list[Any]) -> None:
    want = klein.reference(PROMPTS, klein.noise(), num_inference_steps=4, image=references)
    got = klein.draw(image=references, height=HEIGHT, width=WIDTH, num_inference_steps=4)
    assert psnr(got.pixels, want) > 60
    assert psnr(klein.draw(num_inference_steps=4).pixels, want) < 40


@pytest.mark.slow
def test_guided_editing(base: Model) -> None:
    asked = {"num_inference_steps": 3, "guidance_scale": 4.0, "image": TWO}
    want = base.reference(PROMPTS, base.noise(), **asked)
    got = base.draw(height=HEIGHT, width=WIDTH, **asked)
    assert psnr(got.pixels, want) > 60


def test_defaults(klein: Model, base: Model) -> None:
    """The shift of the schedule is in no file; the reference's is a default of its step."""
    for model, usual in ((klein, (16, 1.0)), (base, (50, 3.5))):
        assert (model.ours.model.defaults.num_inference_steps, model.ours.model.defaults.guidance_scale) == usual
        assert model.ours.model.scheduler.schedule.shift == 6.93


def test_samplers_of_a_flow_map(klein: Model, base: Model) -> None:
    """It is distilled for the steps of Euler: others are warned of, for that model alone."""
    asked: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 2, "options": QUIET}
    for model, sampler, count in ((klein, "heun", 1), (klein, "euler", 0), (klein, None, 0), (base, "heun", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.ours("a fox", sampler=sampler, guidance_scale=1.0, **asked)
        arguments = [one.message.argument for one in caught if isinstance(one.message, canvax.HintWarning)]
        assert arguments.count("sampler") == count


def test_a_run_in_two_parts(klein: Model) -> None:
    """The last step of the first part leads to the first time of the second."""
    whole = klein.draw(prompt="a fox", latents=klein.noise()[:1], num_inference_steps=4)
    parts: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "num_inference_steps": 4}
    first = klein.ours("a fox", latents=klein.noise()[:1], options=replace(QUIET, denoising_end=0.1), **parts)
    second = klein.ours("a fox", latents=first.latents, options=replace(QUIET, denoising_start=0.1), **parts)
    np.testing.assert_allclose(second.pixels, whole.pixels, atol=1e-4)


def test_from_an_image_and_inside_a_mask(klein: Model) -> None:
    """Where an image has a strength or a mask, the run begins from it."""
    image, mask = ONE[0].resize((WIDTH, HEIGHT)), np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, WIDTH // 2 :] = 255
    asked: dict[str, Any] = {"image": image, "num_inference_steps": 4, "seed": 1, "options": QUIET}
    near, far = (klein.ours("a fox", strength=strength, **asked).latents for strength in (0.3, 0.9))
    start = klein.ours("a fox", strength=0.3, **{**asked, "seed": 2}).latents
    assert np.abs(near - start).mean() < np.abs(far - start).mean()
    kept = klein.ours("a fox", strength=0.9, mask=Image.fromarray(mask), **asked).pixels[0]
    np.testing.assert_allclose(kept[:, : WIDTH // 2 - 16], np.asarray(image)[:, : WIDTH // 2 - 16] / 255, atol=0.01)


def changes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of some layers as diffusers has them: the change of the weight, of rank 2."""
    rng = np.random.default_rng(3)
    sizes = {f"single_transformer_blocks.1.attn.{name}": (48, 48) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes |= {"mode_blocks.image.0.ff.linear_in": (288, 48), "mode_blocks.image_cond.1.attn.to_v": (48, 48)}
    sizes |= {"txt_mode_blocks.0.ff.linear_out": (48, 144), "single_transformer_blocks.0.ff.linear_in": (288, 48)}
    return {
        name: (0.2 * rng.standard_normal((out, 2)).astype(np.float32), rng.standard_normal((2, inputs), np.float32))
        for name, (out, inputs) in sizes.items()
    }


AUTHORS = {
    "single_transformer_blocks": "single_blocks", "mode_blocks.image": "content_mode_blocks.image",
    "attn.to_out.0": "attn_out", "attn.to_q": "q_proj", "attn.to_k": "k_proj", "attn.to_v": "v_proj",
    "ff.linear_in": "mlp_in", "ff.linear_out": "mlp_out",
}  # fmt: skip
"""Names of diffusers, and of the authors."""


@pytest.mark.parametrize("spelling", ["peft", "comfy", pytest.param("kohya", marks=pytest.mark.slow)])
def test_lora(klein: Model, tmp_path: Path, spelling: str) -> None:
    """The layers that the reference's pipeline loads too, of all modes."""
    factors = changes()
    state = {name: weight.clone() for name, weight in klein.theirs.transformer.state_dict().items()}
    asked: dict[str, Any] = {"num_inference_steps": 2, "image": ONE}
    with torch.no_grad():
        for name, (up, down) in factors.items():
            klein.theirs.transformer.get_submodule(name).weight.add_(torch.from_numpy(up @ down))
    want = klein.reference(PROMPTS, klein.noise(), **asked)
    klein.theirs.transformer.load_state_dict(state)
    asked |= {"height": HEIGHT, "width": WIDTH}
    assert psnr(klein.draw(**asked).pixels, want) < 40
    if spelling != "peft":
        for ours, theirs in AUTHORS.items():
            factors = {name.replace(ours, theirs): pair for name, pair in factors.items()}
    klein.ours.adapters.load("style", write_factors(tmp_path / "style.safetensors", spelling, factors))
    got = klein.draw(**asked)
    klein.ours.adapters.remove("style")
    assert psnr(got.pixels, want) > 60


def test_requests_to_a_server(klein: Model) -> None:
    """One that edits and one that generates, with settings of their own, are the images of calls."""
    engine = ImageEngine(["klein"], EngineSettings(warm=(Warm((WIDTH, HEIGHT), (1,)),)), Metrics(),
                         lambda name, **_: klein.ours)  # fmt: skip
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        assert "editing" in engine.models()[0].tasks
        cut = ImageOps.fit(ONE[0], (WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        asks: list[tuple[dict[str, Any], dict[str, Any]]] = [({"image": ONE[0]}, {"image": cut}), ({}, {})]
        for more, given in asks:
            job = engine.submit(JobRequest(prompt="a fox", seed=5, steps=3, width=WIDTH, height=HEIGHT, **more))
            until(lambda job=job: job.status.over, 300)
            given |= {"height": HEIGHT, "width": WIDTH, "options": QUIET}
            want = klein.ours("a fox", seed=5, num_inference_steps=3, **given)
            got = np.asarray(Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert psnr(got, want.pixels[0]) > 45
    finally:
        engine.close()
