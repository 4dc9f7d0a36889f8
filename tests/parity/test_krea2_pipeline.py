"""Krea 2's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import PIL.Image  # noqa: E402

import canvax  # noqa: E402
from canvax.call import Call  # noqa: E402
from canvax.compile.programs import load_or_compile  # noqa: E402
from canvax.models.dit import pack  # noqa: E402
from canvax.models.krea2 import DROPPED, TEMPLATE  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.pipelines.generate import sampler_table  # noqa: E402
from canvax.pipelines.request import make_request  # noqa: E402
from canvax.server.engine import EngineSettings, ImageEngine  # noqa: E402
from canvax.server.group import Group  # noqa: E402
from canvax.server.jobs import JobRequest, State  # noqa: E402
from canvax.server.metrics import Metrics  # noqa: E402
from canvax.server.models import Warm  # noqa: E402
from tests.support.serving import held, until  # noqa: E402

from .reference import nchw, nhwc, psnr, randomise  # noqa: E402
from .test_z_image_pipeline import NEGATIVES, PROMPTS, QUIET, SEEDS, tokenizer, write_factors  # noqa: E402

HEIGHT, WIDTH = 48, 80


def build(folder: Path, *, released: bool = False, **index: Any) -> Path:
    """A small random checkpoint, written by diffusers itself; ``index`` are arguments of its pipeline.

    With ``released`` it has what no array tells, and as many layers, as the released models.
    """
    words = tokenizer()
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\n|[,:]", TEMPLATE.partition("{}")[0])
    assert len(pieces) == DROPPED  # as of the released tokenizer
    words.add_tokens(sorted({piece for piece in pieces if len(piece) > 1 and "|" not in piece}))
    lm = {"vocab_size": len(words) + 3, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 36 if released else 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}}  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    text = randomise(transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config=lm, vision_config=eyes)), 1)
    transformer: Any = randomise(
        diffusers.Krea2Transformer2DModel(
            in_channels=64 if released else 16, num_layers=2, attention_head_dim=16, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=96, text_hidden_dim=32, num_text_layers=12 if released else 3,
            text_num_attention_heads=4, text_num_key_value_heads=2, text_intermediate_size=48,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=2, axes_dims_rope=(4, 6, 6) if released else (8, 4, 4),
        ),
    )  # fmt: skip
    sizes: dict[str, Any] = {"z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.5, -0.2, 0.1, 0.7],
                             "latents_std": [2.0, 1.5, 0.7, 1.1]}  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True], **({} if released else sizes)
        ),
        2,
    )
    with torch.no_grad():
        transformer.txt_in.linear_2.weight.mul_(5)  # text must matter
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=10, max_image_seq_len=64
    )
    usual: dict[str, Any] = {} if released else {"text_encoder_select_layers": (1, 3, 5)}
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
        usual = {"latents": packed(latents), "height": height, "width": width, "output_type": "np"}
        with torch.no_grad():
            return self.theirs(list(prompts), **usual | keywords).images

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "options": QUIET}
        return self.ours(keywords.pop("prompt", PROMPTS), **usual | keywords)


def packed(latents: np.ndarray) -> Any:
    tokens = pack(jnp.asarray(latents, jnp.float32), channels_first=True)
    return torch.from_numpy(np.array(tokens.reshape(len(latents), -1, tokens.shape[-1])))


def noise(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return initial_noise(SEEDS, (height // 8, width // 8, 4))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "raw")


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model") / "turbo", is_distilled=True)


@pytest.mark.parametrize(("guidance", "height", "width"), [(0.0, 48, 80), (1.7, 64, 32)])
def test_same_picture(raw: Model, guidance: float, height: int, width: int) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens and of 8."""
    start, asked = noise(height, width), {"num_inference_steps": 5, "guidance_scale": guidance}
    want = raw.reference(PROMPTS, start, negative_prompt=list(NEGATIVES), **asked)
    negatives = NEGATIVES if guidance else None
    got = raw.draw(latents=start, negative_prompt=negatives, height=height, width=width, **asked)
    other = raw.reference(PROMPTS[::-1], start, negative_prompt=NEGATIVES[::-1], **asked)
    print("Raw, guidance", guidance, psnr(got.pixels, want), "other prompts", psnr(other, want))
    assert psnr(got.pixels, want) > 60
    assert psnr(other, want) < 40


def test_defaults(raw: Model, turbo: Model) -> None:
    """Turbo takes 8 steps without guidance and one shift for all sizes; Raw is guided away from the empty prompt."""
    for model, usual in ((turbo, (8, 0.0)), (raw, (28, 4.5))):
        defaults = model.ours.model.defaults
        assert (defaults.num_inference_steps, defaults.guidance_scale) == usual
    request = make_request(raw.ours.model, Call("a fox"))
    assert (request.guided, request.negatives) == (True, [""])
    assert not make_request(turbo.ours.model, Call("a fox")).guided
    want = turbo.reference(PROMPTS, noise(), num_inference_steps=8, guidance_scale=0.0)
    got = turbo.draw(num_inference_steps=8)
    print("Turbo", psnr(got.pixels, want))
    assert psnr(got.pixels, want) > 60


def test_the_shift_belongs_to_the_model(raw: Model, turbo: Model) -> None:
    """Every sampler and curve has it; that of Raw follows the size."""
    from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift

    even = np.array([1, 0.75, 0.5, 0.25])
    for model, mu in ((raw, calculate_shift(15, 10, 64)), (turbo, 1.15)):
        want = 1000 * np.exp(mu) / (np.exp(mu) + 1 / even - 1)
        for sampler in ("euler", "DPM++ 2M", "unipc", None):
            call = Call("a fox", height=HEIGHT, width=WIDTH, num_inference_steps=4, sampler=sampler)
            table = sampler_table(model.ours.model, make_request(model.ours.model, call))
            np.testing.assert_allclose(sorted(set(table.timestep), reverse=True), want, atol=1)


def picture() -> Any:
    """An image in which every place differs from its neighbours."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(x / 7), np.cos(y / 5), np.sin((x + 2 * y) / 11)]
    return PIL.Image.fromarray(np.uint8(127.5 + 127.5 * np.stack(waves, axis=-1)))


@pytest.mark.parametrize("masked", [False, True])
def test_an_image_to_begin_from(raw: Model, masked: bool) -> None:
    """The reference's loop from half noise, and under a mask with the noisy image put back after each step."""
    vae, steps, sigmas = raw.theirs.vae, 6, [0.5, 2 / 6, 1 / 6]
    mean, deviation = (np.float32(vae.config[name]) for name in ("latents_mean", "latents_std"))
    pixels = nchw(np.asarray(picture(), np.float32)[None] / 127.5 - 1)[:, :, None]
    with torch.no_grad():
        clean = (nhwc(vae.encode(pixels).latent_dist.mode()[:, :, 0]) - mean) / deviation
    mu = raw.ours.model.scheduler.schedule.mu_of(15)
    times = [float(np.exp(mu) / (np.exp(mu) + 1 / sigma - 1)) for sigma in sigmas] + [0.0]
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, 48:] = 255
    keep = 1 - np.float32(mask[::8, ::8, None] / 255)

    def mixed(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        known = packed((1 - times[step + 1]) * clean + times[step + 1] * noise())
        kept = packed(np.broadcast_to(keep, noise().shape))
        return {"latents": kept * known + (1 - kept) * values["latents"]}

    asked = {"guidance_scale": 1.7, "negative_prompt": list(NEGATIVES)}
    start, extra = (1 - times[0]) * clean + times[0] * noise(), {"callback_on_step_end": mixed} if masked else {}
    want = raw.reference(PROMPTS, start, sigmas=sigmas, **asked, **extra)
    options = canvax.Options(progress=False, mask_blend="renoised")
    more = {"mask": PIL.Image.fromarray(mask), "options": options} if masked else {}
    got = raw.draw(image=picture(), strength=0.5, num_inference_steps=steps, **asked, **more)
    print("image", masked, psnr(np.asarray(raw.ours.decode(jnp.asarray(got.latents))), want))
    assert psnr(np.asarray(raw.ours.decode(jnp.asarray(got.latents))), want) > 60


def test_nothing_compiles_twice(raw: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a user changes is data, and of sizes of as many tokens the denoiser is one program."""
    made: list[str] = []
    monkeypatch.setattr("canvax.compile.programs.load_or_compile", lambda name, *rest: (
        made.append(name) or load_or_compile(name, *rest)))  # fmt: skip
    pipe = canvax.load(raw.folder, dtype="float32", mesh=raw.ours.mesh)
    usual: dict[str, Any] = {
        "guidance_scale": 2.0,
        "num_inference_steps": 2,
        "progress": False,
        "height": HEIGHT,
        "width": WIDTH,
    }
    calls: list[dict[str, Any]] = [
        {}, {"prompt": [PROMPTS[1], "a hen, " * 8], "sampler": "euler_a", "sigmas": "karras", "seed": 3},
        {"num_inference_steps": 3, "guidance_scale": 1.5, "sampler": "DPM++ 2M", "negative_prompt": "blurry"},
        {"height": 80, "width": 48, "latents": noise(80, 48)}, {"height": 16, "width": 240},
    ]  # fmt: skip
    for changes in calls:
        pipe(changes.pop("prompt", PROMPTS), **usual | changes)
    assert sorted(made) == ["decoder"] * 3 + ["denoiser", "text encoder"]
    asked = {"num_inference_steps": 2, "guidance_scale": 2.0}
    got = pipe(PROMPTS, latents=noise(80, 48), height=80, width=48, options=QUIET, **asked)
    want = raw.reference(PROMPTS, noise(80, 48), **asked)
    assert psnr(got.pixels, want) > 60


@pytest.mark.slow
def test_long_prompts(raw: Model) -> None:
    """As many tokens as in the reference; whatever its bucket, an image is the same."""
    long = "the fox and the hen, " * 60
    while len(raw.ours.tokenizer.ids(long)) > DROPPED + 512:
        long = long[:-1]
    want = raw.reference([PROMPTS[0], long], noise(), num_inference_steps=2, guidance_scale=0.0)
    got = raw.draw(prompt=[PROMPTS[0], long], num_inference_steps=2, guidance_scale=0.0)
    print("long", psnr(got.pixels, want))
    assert psnr(got.pixels, want) > 60
    with pytest.raises(canvax.InputError) as caught:
        raw.draw(prompt=[PROMPTS[0], long + ", a dog"])
    assert caught.value.argument == "prompt"


@pytest.mark.parametrize(("part", "changes"), [
    ("model_index.json", {"text_encoder_select_layers": [1, 3, 6]}),
    ("model_index.json", {"text_encoder_select_layers": [1, 3]}),
    ("model_index.json", {"patch_size": 1}),
    ("transformer/config.json", {"text_hidden_dim": 64}),
    ("vae/config.json", {"z_dim": 8, "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8}),
])  # fmt: skip
def test_what_does_not_fit(raw: Model, tmp_path: Path, part: str, changes: dict[str, Any]) -> None:
    shutil.copytree(raw.folder, tmp_path / "model")
    path = tmp_path / "model" / part
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(canvax.CheckpointError):
        canvax.load(tmp_path / "model", mesh=raw.ours.mesh)


@pytest.mark.parametrize(("axes", "changes", "least"), [
    ({"data": 2, "model": 2}, {"dtype": "float32"}, 60), ({}, {"dtype": "bfloat16", "quantize": "int8"}, 30),
])  # fmt: skip
@pytest.mark.slow
def test_devices_and_dtypes(raw: Model, axes: dict[str, int], changes: dict[str, Any], least: float) -> None:
    pipe = canvax.load(raw.folder, mesh=make_mesh(jax.devices()[: 4 if axes else 1], **axes), **changes)
    start = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "options": QUIET}
    asked = {"num_inference_steps": 3, "guidance_scale": 0.0}
    got, want = pipe(PROMPTS, **start, **asked).pixels, raw.draw(**asked).pixels
    print(axes, changes, psnr(got, want))
    assert psnr(got, want) > least


def changes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of some layers as the authors call them: the factors of their change, of rank 2."""
    rng = np.random.default_rng(3)
    sizes = {"blocks.0.attn.wq": (64, 64), "blocks.1.attn.wk": (32, 64), "blocks.0.attn.wo": (64, 64),
             "blocks.1.attn.gate": (64, 64), "blocks.0.mlp.gate": (96, 64), "blocks.1.mlp.down": (64, 96),
             "txtfusion.layerwise_blocks.0.attn.wv": (16, 32), "txtfusion.refiner_blocks.1.mlp.up": (48, 32),
             "first": (64, 16), "tproj.1": (384, 64), "txtmlp.3": (64, 64), "last.linear": (16, 64)}  # fmt: skip
    return {
        name: (0.1 * rng.standard_normal((out, 2)).astype(np.float32), rng.standard_normal((2, into), np.float32))
        for name, (out, into) in sizes.items()
    }


@pytest.fixture(scope="module")
def changed(raw: Model) -> tuple[np.ndarray, dict[str, str]]:
    """The picture with the adapter, and what diffusers calls its layers."""
    convert = diffusers.loaders.lora_conversion_utils._convert_non_diffusers_krea2_lora_to_diffusers
    names = {f"diffusion_model.{name}.lora_A.weight": i for i, name in enumerate(changes())}
    theirs = {i: name.split(".", 1)[1].removesuffix(".lora_A.weight") for name, i in convert(names).items()}
    pipe, originals = raw.theirs, {}
    with torch.no_grad():
        for i, (up, down) in enumerate(changes().values()):
            weight = pipe.transformer.get_submodule(theirs[i]).weight
            originals[weight] = weight.clone()
            weight.add_(torch.from_numpy(up @ down))
        want = raw.reference(PROMPTS, noise(), num_inference_steps=3, guidance_scale=0.0)
        for weight, original in originals.items():
            weight.copy_(original)
    return want, {name: theirs[i] for i, name in enumerate(changes())}


@pytest.mark.parametrize(
    "spelling", ["peft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("comfy", "kohya"))]
)
def test_lora(raw: Model, changed: Any, tmp_path: Path, spelling: str) -> None:
    """Merged, and with names of the authors beside the weights; an array that is not used is an error."""
    want, names = changed
    factors = {names[name] if spelling == "peft" else name: pair for name, pair in changes().items()}
    pipe, path = raw.ours, write_factors(tmp_path / "style.safetensors", spelling, factors)
    if spelling == "comfy":
        pipe = canvax.load(raw.folder, dtype="float32", mesh=raw.ours.mesh)
        pipe.adapters.beside(rank=4)
    pipe.adapters.load("style", path, beside=spelling == "comfy")
    usual = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "options": QUIET}
    got = pipe(PROMPTS, num_inference_steps=3, guidance_scale=0.0, **usual)
    pipe.adapters.remove("style")
    print("lora", spelling, psnr(got.pixels, want))
    assert psnr(got.pixels, want) > 60
    assert psnr(raw.draw(guidance_scale=0.0).pixels, want) < 40
    up, down = next(iter(factors.values()))
    write_factors(path, spelling, {**factors, "blocks.0.attn.wx": (up, down)})
    with pytest.raises(canvax.CheckpointError):
        pipe.adapters.load("style", path)


@pytest.mark.weekly
def test_requests_share_a_batch_of_a_server(raw: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, steps, guidance and images to begin from are each request's."""
    asks: list[dict[str, Any]] = [
        {"prompt": PROMPTS[0], "guidance_scale": 2.0, "negative_prompt": "blurry", "seed": 5, "steps": 60},
        {"prompt": PROMPTS[1], "guidance_scale": 0.0, "seed": 6, "steps": 50},
    ]
    seated: list[int] = []
    step = Group.step
    monkeypatch.setattr(Group, "step", lambda group: seated.append(len(group.seated)) or step(group))
    monkeypatch.setattr("canvax.server.group.best_batch", lambda row, waiting: 2)
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), (2,)),), compile_on_demand=True)
    engine = ImageEngine(["krea-2"], settings, Metrics(), lambda name, **_: raw.ours)
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        together = {"width": WIDTH, "height": HEIGHT, "image": picture(), "strength": 0.5}
        with held(engine):
            jobs = [engine.submit(JobRequest(**ask, **together)) for ask in asks]
        for ask, job in zip(asks, jobs, strict=True):
            until(lambda job=job: job.status.over, 300)
            keywords = {"num_inference_steps": ask["steps"], **{k: v for k, v in ask.items() if k != "steps"}}
            want = raw.ours(image=picture(), strength=0.5, options=QUIET, **keywords)
            got = np.asarray(PIL.Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert psnr(got, want.pixels[0]) > 45
        assert max(seated) == 2
    finally:
        engine.close()
