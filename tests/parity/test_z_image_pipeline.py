"""Z-Image's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
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
import safetensors.numpy  # noqa: E402
import tokenizers  # noqa: E402

import canvax  # noqa: E402
from benchmarks.lab.layouts import CHAT_TEMPLATE  # noqa: E402
from canvax.compile.programs import load_or_compile  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.pipelines.shares import shares_of  # noqa: E402
from canvax.samplers import build_table  # noqa: E402
from canvax.server.adapter_cache import AdapterCache, AdapterSettings  # noqa: E402
from canvax.server.engine import EngineSettings, ImageEngine  # noqa: E402
from canvax.server.group import Group  # noqa: E402
from canvax.server.jobs import JobRequest, State  # noqa: E402
from canvax.server.metrics import Metrics  # noqa: E402
from canvax.server.models import Warm  # noqa: E402
from tests.support.serving import held, until  # noqa: E402

from .reference import nchw, nhwc, psnr, randomise, relative_error  # noqa: E402

PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas"]
NEGATIVES = ["blurry", ""]
SEEDS = [11, 12]
HEIGHT, WIDTH = 48, 80
QUIET = canvax.Options(progress=False)


def tokenizer() -> Any:
    """A byte is a token, but for two merges."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "Ġa", "se"])}
    made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[("Ġ", "a"), ("s", "e")])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


def build(
    folder: Path, shift: float = 3.0, axes: tuple[int, ...] = (8, 4, 4), theta: float = 1e4, groups: int = 8
) -> Path:
    """A small random checkpoint, written by diffusers itself."""
    words = tokenizer()
    transformer: Any = randomise(
        diffusers.ZImageTransformer2DModel(
            dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=[*axes],
            axes_lens=[1024, 32, 32],
        )
    )  # fmt: skip
    text = randomise(
        transformers.Qwen3Model(
            transformers.Qwen3Config(
                vocab_size=len(words) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                rope_parameters={"rope_type": "default", "rope_theta": theta},
            )
        ),
        1,
    )  # fmt: skip
    vae = randomise(
        diffusers.AutoencoderKL(
            block_out_channels=(2 * groups, 2 * groups, 4 * groups, 4 * groups), layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=groups, latent_channels=16,
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
def ours(folder: Path) -> canvax.Pipeline:
    return canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))


def noise(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    return initial_noise(SEEDS, (height // 8, width // 8, 16))


def reference(pipe: Any, prompts: list[str], latents: np.ndarray, **keywords: Any) -> np.ndarray:
    height, width = (8 * side for side in latents.shape[1:3])
    with torch.no_grad():
        out = pipe(list(prompts), latents=nchw(latents), height=height, width=width, output_type="np", **keywords)
    return out.images


def draw(pipe: canvax.Pipeline, **keywords: Any) -> canvax.Result:
    usual = {"latents": noise(), "height": HEIGHT, "width": WIDTH, "num_inference_steps": 3, "options": QUIET}
    return pipe(keywords.pop("prompt", PROMPTS), **usual | keywords)


@pytest.mark.parametrize(("guidance", "height", "width"), [(0.0, 48, 80), (0.7, 48, 80), (3.0, 64, 32)])
def test_same_picture(theirs: Any, ours: canvax.Pipeline, guidance: float, height: int, width: int) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens and of 8."""
    start = noise(height, width)
    asked = {"num_inference_steps": 7, "guidance_scale": guidance}
    want = reference(theirs, PROMPTS, start, negative_prompt=list(NEGATIVES), **asked)
    negatives = NEGATIVES if guidance else None
    got = ours(PROMPTS, latents=start, negative_prompt=negatives, height=height, width=width, options=QUIET, **asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(reference(theirs, PROMPTS[::-1], start, negative_prompt=NEGATIVES[::-1], **asked), want) < 40


def picture(height: int = HEIGHT, width: int = WIDTH) -> Any:
    smooth = np.linspace(0, 255, height * width * 3).reshape(height, width, 3)
    return PIL.Image.fromarray(smooth.astype(np.uint8))


def patched(monkeypatch: pytest.MonkeyPatch, theirs: Any, name: str, start: np.ndarray) -> Any:
    """Another pipeline of the same parts, which gets our noise and takes the mean of what the VAE encodes."""
    kind = getattr(diffusers, name)
    module = __import__(kind.__module__, fromlist=["randn_tensor"])
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: nchw(start))
    monkeypatch.setattr(module, "retrieve_latents", lambda output, **_: output.latent_dist.mode())
    pipe = kind(**theirs.components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_image_to_image(theirs: Any, ours: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    start, image, asked = noise(), picture(), {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 1.5}
    pipe = patched(monkeypatch, theirs, "ZImageImg2ImgPipeline", start)
    with torch.no_grad():
        want = pipe(list(PROMPTS), image=image, output_type="np", **asked).images
    got = draw(ours, image=image, height=None, width=None, **asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(draw(ours, **asked | {"strength": None}).pixels, want) < 40  # the image matters


@pytest.mark.slow
def test_inpainting(theirs: Any, ours: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    start, image, mask = noise(), picture(), np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, 40:] = 255
    asked = {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 0.0, "image": image}
    pipe = patched(monkeypatch, theirs, "ZImageInpaintPipeline", start)
    with torch.no_grad():
        want = pipe(
            list(PROMPTS), mask_image=PIL.Image.fromarray(mask), output_type="latent", height=HEIGHT, width=WIDTH,
            **asked,
        ).images  # fmt: skip
    options = canvax.Options(progress=False, mask_blend="renoised")
    got = draw(ours, mask=mask, options=options, **asked)
    assert relative_error(got.latents, nhwc(want)) < 1e-3


def test_nothing_compiles_twice(ours: canvax.Pipeline) -> None:
    """Whatever a user changes is data, a prompt of another length too, up to 128 tokens."""
    draw(ours, guidance_scale=2.0)
    for changes in (
        {"prompt": [PROMPTS[1], "a hen, " * 8]}, {"seed": 3, "latents": None}, {"num_inference_steps": 5},
        {"sampler": "DPM++ 2M"}, {"sampler": "euler_a", "sigmas": "karras"}, {"guidance_scale": 1.0},
        {"sampler_settings": ["shift=6"]}, {"negative_prompt": "blurry"},
    ):  # fmt: skip
        settings = {"options": None, "progress": False}
        got = draw(ours, **{"guidance_scale": 2.0, **settings, **changes})
        assert got.compilations == 0, changes
    longer = draw(ours, prompt=[PROMPTS[0], "a hen, " * 30], guidance_scale=2.0)
    assert longer.compilations > 0
    assert draw(ours, prompt=[PROMPTS[0], "a dog, " * 20], guidance_scale=2.0).compilations == 0
    assert psnr(longer.pixels[0], draw(ours, guidance_scale=2.0).pixels[0]) > 60  # whatever stands beside it
    with pytest.raises(canvax.InputError) as caught:
        draw(ours, prompt=["a hen, " * 90] * 2)
    assert caught.value.argument == "prompt"


@pytest.mark.slow
def test_sizes_of_as_many_tokens_share_the_denoiser(
    theirs: Any, ours: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 48 x 80, 80 x 48 and 16 x 240 pixels the denoiser is one program; each size has a decoder of its own."""
    pipe = canvax.load(ours.model.files.path, dtype="float32", mesh=ours.mesh)
    sizes, made = [(48, 80), (80, 48), (16, 240)], []
    monkeypatch.setattr("canvax.compile.programs.load_or_compile", lambda name, *rest: (
        made.append(name) or load_or_compile(name, *rest)))  # fmt: skip
    for height, width in sizes:
        start, asked = noise(height, width), {"num_inference_steps": 3, "guidance_scale": 0.7}
        got = draw(pipe, latents=start, height=height, width=width, negative_prompt=NEGATIVES, **asked)
        want = reference(theirs, PROMPTS, start, negative_prompt=list(NEGATIVES), **asked)
        assert psnr(got.pixels, want) > 60
    assert sorted(made) == ["decoder"] * 3 + ["denoiser", "text encoder"]


def test_the_shift_belongs_to_the_model(ours: canvax.Pipeline, tmp_path: Path) -> None:
    """Every sampler and curve has it, and another one is a setting of a call."""
    scheduler = ours.model.scheduler
    even = [1000, 900, 750, 500]
    for sampler in ("euler", "DPM++ 2M", "heun", "unipc", None):
        table = build_table(scheduler, 4, sampler=sampler)
        np.testing.assert_allclose(sorted(set(table.timestep), reverse=True), even, atol=1)
    for curve in ("simple", "karras", "beta"):
        assert build_table(scheduler, 4, sampler="euler", sigmas=curve).timestep[2] > 600
    table = build_table(scheduler, 4, sampler="euler", settings={"shift": 6})
    np.testing.assert_allclose(
        table.timestep, 6000 * np.array([1, 3 / 4, 2 / 4, 1 / 4]) / (1 + 5 * np.array([1, 0.75, 0.5, 0.25]))
    )


def test_defaults(ours: canvax.Pipeline, tmp_path: Path) -> None:
    """Turbo takes 8 steps without guidance, hence without a second evaluation; the base model is known by its shift."""
    assert (ours.model.defaults.num_inference_steps, ours.model.defaults.guidance_scale) == (8, 0)
    base = canvax.load(build(tmp_path / "base", shift=6.0), dtype="float32", mesh=ours.mesh)
    assert (base.model.defaults.num_inference_steps, base.model.defaults.guidance_scale) == (50, 4)


@pytest.mark.parametrize(("argument", "changes"), [
    ("sampler", {"sampler": "PLMS"}),
    ("sampler", {"sampler": "TCD"}),
    ("pag_scale", {"pag_scale": 3.0}),
    ("prompt_2", {"prompt_2": "a hen"}),
    ("clip_skip", {"clip_skip": 1}),
    ("reuse", {"reuse": 2}),
    ("height", {"height": 40}),
    ("prompt", {"prompt": "a (red:1.2) fox", "prompt_syntax": "a1111"}),
])  # fmt: skip
def test_what_it_does_not_do(ours: canvax.Pipeline, argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(canvax.InputError) as caught:
        draw(ours, **{"options": None, "latents": None, **changes})
    assert caught.value.argument == argument


def test_the_networks_are_functions_of_arrays(ours: canvax.Pipeline) -> None:
    conditions = ours.encode(PROMPTS)
    np.testing.assert_array_equal(conditions["length"], [len(ours.tokenizer.ids(prompt)) for prompt in PROMPTS])
    want = draw(ours, guidance_scale=2.0, negative_prompt="blurry")
    negatives = ours.encode(["blurry"] * 2)
    got = draw(ours, prompt=conditions, negative_prompt=negatives, guidance_scale=2.0)
    np.testing.assert_allclose(got.pixels, want.pixels, atol=1e-5)
    latents = jnp.asarray(noise())
    assert ours.denoiser(latents, 500.0, conditions).shape == latents.shape


@pytest.mark.weekly
def test_requests_share_a_batch_of_a_server(
    folder: Path, ours: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images to begin from, with prompts of their own, one guided and one with a mask."""

    def load(name: str, **_: Any) -> Any:
        return canvax.load(folder, dtype="float32", mesh=ours.mesh, progress=False)

    image, mask = (
        picture(),
        PIL.Image.fromarray(np.tile(np.repeat(np.array([0, 255], np.uint8), WIDTH // 2), (HEIGHT, 1))),
    )
    asks: list[dict[str, Any]] = [
        {"prompt": PROMPTS[0], "guidance_scale": 2.0, "negative_prompt": "blurry", "seed": 5, "steps": 60},
        {"prompt": PROMPTS[1], "guidance_scale": 0.0, "mask": mask, "seed": 6, "steps": 50},
    ]
    seated: list[int] = []
    step = Group.step
    monkeypatch.setattr(Group, "step", lambda group: seated.append(len(group.seated)) or step(group))
    monkeypatch.setattr("canvax.server.group.best_batch", lambda row, waiting: 2)
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), (1, 2)),), compile_on_demand=True)
    engine = ImageEngine(["z-image"], settings, Metrics(), load)
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        together = {"width": WIDTH, "height": HEIGHT, "image": image, "strength": 0.5}
        with held(engine):
            jobs = [engine.submit(JobRequest(**ask, **together)) for ask in asks]
        for ask, job in zip(asks, jobs, strict=True):
            until(lambda job=job: job.status.over, 300)
            keywords = {"num_inference_steps": ask["steps"], **{k: v for k, v in ask.items() if k != "steps"}}
            want = ours(image=image, strength=0.5, options=QUIET, **keywords)
            got = np.asarray(PIL.Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert psnr(got, want.pixels[0]) > 45
        assert max(seated) == 2
    finally:
        engine.close()


def changes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of some layers: the change of the weight, of rank 2."""
    rng = np.random.default_rng(3)
    sizes: dict[str, tuple[int, int]] = dict.fromkeys(
        ["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"], (64, 64)
    )
    sizes["feed_forward.w1"] = 170, 64
    down = rng.standard_normal((2, 64)).astype(np.float32)  # a stack of three has one for all
    return {
        f"layers.0.{name}": (0.2 * rng.standard_normal((out, 2)).astype(np.float32), down)
        for name, (out, _) in sizes.items()
    }


def write_factors(path: Path, spelling: str, factors: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """A LoRA file of a transformer's layers, whose factors are (up, down)."""
    arrays = {}
    for name, (up, down) in factors.items():
        flat = "lora_unet_" + name.replace(".", "_")
        names = {
            "peft": (f"transformer.{name}.lora_A.weight", f"transformer.{name}.lora_B.weight"),
            "comfy": (f"diffusion_model.{name}.lora_A.weight", f"diffusion_model.{name}.lora_B.weight"),
            "kohya": (f"{flat}.lora_down.weight", f"{flat}.lora_up.weight"),
        }[spelling]
        arrays |= dict(zip(names, (down, up), strict=True))
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


def lora(path: Path, spelling: str) -> Path:
    """A file as PEFT writes it for diffusers, as kohya's scripts do, or as trainers for ComfyUI do."""
    factors = changes()
    if spelling == "comfy":
        qkv = [factors.pop(f"layers.0.attention.to_{part}") for part in "qkv"]
        factors["layers.0.attention.qkv"] = np.concatenate([up for up, _ in qkv]), qkv[0][1]
        factors["layers.0.attention.out"] = factors.pop("layers.0.attention.to_out.0")
    return write_factors(path, spelling, factors)


@pytest.fixture(scope="module")
def changed(folder: Path, theirs: Any) -> tuple[np.ndarray, np.ndarray]:
    """The picture with and without the adapter."""
    pipe = diffusers.ZImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        for name, (up, down) in changes().items():
            pipe.transformer.get_submodule(name).weight.add_(torch.from_numpy(up @ down))
    asked = {"num_inference_steps": 3, "guidance_scale": 0.0}
    return reference(pipe, PROMPTS, noise(), **asked), reference(theirs, PROMPTS, noise(), **asked)


@pytest.mark.parametrize(
    "spelling", ["peft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("comfy", "kohya"))]
)
def test_lora(folder: Path, changed: Any, tmp_path: Path, spelling: str) -> None:
    want, without = changed
    assert psnr(want, without) < 40
    pipe = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    pipe.adapters.load("style", lora(tmp_path / "style.safetensors", spelling))
    assert psnr(draw(pipe, guidance_scale=0.0).pixels, want) > 60


@pytest.mark.slow
def test_lora_beside_the_weights(folder: Path, changed: Any, tmp_path: Path) -> None:
    pipe = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    pipe.adapters.beside(rank=4)
    pipe.adapters.load("style", lora(tmp_path / "style.safetensors", "comfy"), beside=True)
    assert psnr(draw(pipe, guidance_scale=0.0).pixels, changed[0]) > 60


def test_prompts_name_weights_of_the_transformer(folder: Path, tmp_path: Path) -> None:
    """In place of those of a UNet: of merged adapters, of those beside the weights, and of a server's."""
    pipe = canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:1]))
    lora(tmp_path / "style.safetensors", "peft")
    pipe.adapters.folder = tmp_path
    for tag in ("<lora:style:1:0.5>", "<lora:style:unet=0.5>"):
        with pipe.adapters._named_in(tag):
            assert pipe.adapters["style"].weights == {"transformer": 0.5}
        cache = AdapterCache(pipe.model, pipe.mesh, AdapterSettings(tmp_path))
        assert [weights["transformer"] for weights in cache.wanted(tag, {})[1].values()] == [0.5]
    pipe.adapters.remove()
    pipe.adapters.beside(rank=4)
    _, shares = shares_of(pipe.adapters, tag, None, 1, as_set=True)
    assert shares is not None
    np.testing.assert_array_equal(shares.weights["transformer"], [[0.5, 0, 0, 0]])


def original(folder: Path, into: Path) -> Path:
    """The checkpoint with the transformer's names and stacks of the authors, and the language model with its head."""
    shutil.copytree(folder, into)
    path = into / "transformer" / "diffusion_pytorch_model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    for name in [name for name in arrays if name.endswith("attention.to_q.weight")]:
        stem = name.removesuffix("to_q.weight")
        arrays[f"{stem}qkv.weight"] = np.concatenate([arrays.pop(f"{stem}to_{part}.weight") for part in "qkv"])
    spelled = {"to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm", "all_x_embedder.2-1": "x_embedder",
               "all_final_layer.2-1": "final_layer"}  # fmt: skip
    for ours, other in spelled.items():
        arrays = {name.replace(ours, other): array for name, array in arrays.items()}
    safetensors.numpy.save_file(arrays, path)
    path = into / "text_encoder" / "model.safetensors"
    arrays = {f"model.{name}": array for name, array in safetensors.numpy.load_file(path).items()}
    arrays["lm_head.weight"] = np.zeros((4, 4), np.float32)
    safetensors.numpy.save_file(arrays, path)
    return into


@pytest.mark.slow
def test_original_names(folder: Path, ours: canvax.Pipeline, tmp_path: Path) -> None:
    pipe = canvax.load(original(folder, tmp_path / "original"), dtype="float32", mesh=ours.mesh)
    np.testing.assert_array_equal(draw(pipe).pixels, draw(ours).pixels)


def test_networks_for_a_unet_are_refused(ours: canvax.Pipeline) -> None:
    with pytest.raises(canvax.CheckpointError):
        _ = ours.model.unet


@pytest.mark.parametrize("axes", [pytest.param({"data": 2}, marks=pytest.mark.weekly), {"model": 2}])
@pytest.mark.slow
def test_several_devices(folder: Path, ours: canvax.Pipeline, axes: dict[str, int]) -> None:
    mesh = make_mesh(jax.devices()[:2], **axes)
    pipe = canvax.load(folder, dtype="float32", mesh=mesh)
    assert psnr(draw(pipe, guidance_scale=2.0).pixels, draw(ours, guidance_scale=2.0).pixels) > 60


@pytest.mark.slow
def test_eight_bits(folder: Path, ours: canvax.Pipeline) -> None:
    pipe = canvax.load(folder, dtype="float32", quantize="int8", mesh=ours.mesh)
    assert psnr(draw(pipe).pixels, draw(ours).pixels) > 40
