"""FLUX.2 klein's whole pipeline against diffusers, float32: same random checkpoint, same noise, prompts that matter."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
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
import PIL.ImageOps  # noqa: E402
import safetensors.numpy  # noqa: E402

import canvax  # noqa: E402
from canvax.call import Call  # noqa: E402
from canvax.cli import main  # noqa: E402
from canvax.compile.programs import load_or_compile  # noqa: E402
from canvax.images.inputs import fingerprint  # noqa: E402
from canvax.noise import initial_noise  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.pipelines.request import make_request  # noqa: E402
from canvax.samplers import build_table  # noqa: E402
from canvax.server.engine import EngineSettings, ImageEngine  # noqa: E402
from canvax.server.group import Group  # noqa: E402
from canvax.server.jobs import JobRequest, State  # noqa: E402
from canvax.server.metrics import Metrics  # noqa: E402
from canvax.server.models import Warm  # noqa: E402
from canvax.server.work import check, sample  # noqa: E402
from tests.support.serving import held, until  # noqa: E402

from .reference import nchw, nhwc, psnr, randomise, relative_error  # noqa: E402
from .test_z_image_pipeline import tokenizer, write_factors  # noqa: E402

PROMPTS = ["a fox", "a lighthouse on a cliff above the sea, in the evening, painted with oil on canvas"]
SEEDS = [11, 12]
HEIGHT, WIDTH = 48, 80
QUIET = canvax.Options(progress=False)


@pytest.fixture(scope="module", autouse=True)
def little_room() -> Iterator[None]:
    """Less padding of references, which takes time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
        yield


def build(
    folder: Path, *, distilled: bool = True, layers: int = 28, theta: float = 1e4, groups: int = 4, **changes: Any
) -> Path:
    """A small random checkpoint, written by diffusers itself; ``changes`` are of the transformer."""
    words = tokenizer()
    words.pad_token = "Z"  # whose features matter
    text = randomise(
        transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=len(words) + 3, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": theta},
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
            block_out_channels=(2 * groups, 2 * groups, 4 * groups, 4 * groups),
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1, norm_num_groups=groups,
            latent_channels=transformer.config.in_channels // 4,
        ),
        2,
    )  # fmt: skip
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.3 * torch.randn(vae.bn.running_mean.shape, generator=random))
        vae.bn.running_var.copy_(0.5 + torch.rand(vae.bn.running_var.shape, generator=random))
        # Text and references must matter: attention is far from even, and the velocity large.
        transformer.context_embedder.weight.mul_(2)
        transformer.proj_out.weight.mul_(2)
        for name, weight in transformer.named_parameters():
            if name.endswith(("norm_q.weight", "norm_added_q.weight")):
                weight.mul_(4)
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

    def reference(self, prompts: list[str], latents: np.ndarray, pipe: Any = None, **keywords: Any) -> np.ndarray:
        height, width = (16 * side for side in latents.shape[1:3])
        with torch.no_grad():
            usual = {"height": height, "width": width, "output_type": "np", "latents": nchw(latents)}
            return (pipe or self.theirs)(prompt=list(prompts), **usual | keywords).images

    def draw(self, **keywords: Any) -> canvax.Result:
        usual = {"latents": self.noise(), "num_inference_steps": 2, "options": QUIET}
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


@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.weekly), 4.0])
@pytest.mark.slow
def test_same_guided_picture(base: Model, guidance: float) -> None:
    asked = {"num_inference_steps": 7, "guidance_scale": guidance}
    want = base.reference(PROMPTS, base.noise(), **asked)
    got = base.draw(**asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(base.draw(**asked | {"guidance_scale": 5 - guidance}).pixels, want) < 40


def picture(height: int, width: int, phase: float = 0.0) -> Any:
    """An image in which every place differs from its neighbours."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 7 + phase), np.cos(y / 5 - phase), np.sin((x + 2 * y) / 11)]
    return PIL.Image.fromarray(np.uint8(127.5 + 127.5 * np.stack(waves, axis=-1)))


ONE, TWO = [picture(165, 215)], [picture(165, 215), picture(200, 130, 2.0)]


@pytest.mark.parametrize("references", [ONE, TWO], ids=["one", "two"])
def test_editing(klein: Model, references: list[Any]) -> None:
    """References of sizes that are no multiples, of an image of another size."""
    want = klein.reference(PROMPTS, klein.noise(), num_inference_steps=4, image=references)
    got = klein.draw(image=references, height=HEIGHT, width=WIDTH, num_inference_steps=4)
    assert psnr(got.pixels, want) > 60
    assert psnr(klein.draw(num_inference_steps=4).pixels, want) < 40
    if len(references) > 1:
        swapped = klein.draw(image=references[::-1], height=HEIGHT, width=WIDTH, num_inference_steps=4)
        assert psnr(swapped.pixels, want) < 50


@pytest.mark.slow
def test_guided_editing(base: Model) -> None:
    """At the size of the first reference."""
    start, asked = base.noise(160, 208), {"num_inference_steps": 3, "guidance_scale": 4.0, "image": TWO}
    want = base.reference(PROMPTS, start, **asked, height=None, width=None)
    got = base.draw(latents=start, **asked)
    assert psnr(got.pixels, want) > 60
    assert psnr(base.draw(latents=start, **asked | {"image": ONE}).pixels, want) < 40


def test_a_large_reference(klein: Model) -> None:
    """One of more than a million pixels is made smaller, and gives the size of the image."""
    large = picture(1210, 1010)
    request = make_request(klein.ours.model, Call("a fox", image=large))
    assert request.references is not None
    assert request.references.sizes == ((request.height, request.width),) == ((1120, 928),)
    processor = klein.theirs.image_processor
    small = processor._resize_and_crop(processor._resize_to_target_area(large), 928, 1120)
    np.testing.assert_array_equal(np.asarray(request.references.images[0][0]), np.asarray(small))
    assert request.references.fingerprints == [fingerprint(large)]  # which the user can compute, too


def test_the_shift_follows_the_size_and_the_steps(klein: Model) -> None:
    """With every sampler and curve, and as the reference computes it."""
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    model = klein.ours.model
    for tokens, steps in ((4096, 4), (4096, 50), (1024, 4), (8192, 4)):
        assert model.family.mu is not None
        mu = model.family.mu(tokens, steps)
        assert mu == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-9)
        want = np.exp(mu) / (np.exp(mu) + 1 / np.array([1, 0.75, 0.5, 0.25]) - 1)
        for sampler in (None, "euler", "DPM++ 2M", "unipc"):
            table = build_table(model.scheduler, 4, sampler=sampler, settings={"mu": mu})
            np.testing.assert_allclose(table.timestep, 1000 * want, atol=1)
    usual = klein.draw(sampler="euler").latents
    mu = compute_empirical_mu(HEIGHT * WIDTH // 256, 2)
    same = klein.draw(sampler="euler", options=None, sampler_settings=[f"mu={mu}"], progress=False)
    np.testing.assert_array_equal(same.latents, usual)
    other = klein.draw(sampler="euler", options=None, sampler_settings=["shift=1"], progress=False)
    assert psnr(other.pixels, klein.draw(sampler="euler").pixels) < 40


def test_defaults(klein: Model, base: Model) -> None:
    """A distilled model has no second evaluation at any scale, the other one the empty negative prompt."""
    defaults = klein.ours.model.defaults, base.ours.model.defaults
    assert [(one.num_inference_steps, one.guidance_scale) for one in defaults] == [(4, 1), (50, 4)]
    assert not make_request(klein.ours.model, Call("a fox", guidance_scale=4.0)).guided
    request = make_request(base.ours.model, Call("a fox"))
    assert (request.guided, request.negatives) == (True, [""])


def inpainting(monkeypatch: pytest.MonkeyPatch, model: Model) -> Any:
    """The reference's pipeline, which gets our noise."""
    kind = diffusers.Flux2KleinInpaintPipeline
    module = __import__(kind.__module__, fromlist=["randn_tensor"])
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: nchw(model.noise()))
    pipe: Any = kind(**model.theirs.components, is_distilled=model.theirs.config.is_distilled)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
def test_inpainting(base: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is a reference as well, as there."""
    image, mask = picture(HEIGHT, WIDTH), np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, 48:] = 255
    asked = {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 4.0, "image": image}
    with torch.no_grad():
        want = inpainting(monkeypatch, base)(
            prompt=list(PROMPTS), mask_image=PIL.Image.fromarray(mask), output_type="pt", height=HEIGHT, width=WIDTH,
            **asked,
        ).images  # fmt: skip
    options = canvax.Options(progress=False, mask_blend="renoised")
    got = base.draw(mask=mask, options=options, **asked)
    assert psnr(np.asarray(base.ours.decode(jnp.asarray(got.latents))), nhwc(want)) > 60


def test_image_to_image(klein: Model) -> None:
    """As the loop of the reference, from a noisy image, without a reference."""
    image, start = picture(HEIGHT, WIDTH), klein.noise()
    mean = klein.ours.encode_image(image)
    asked = {"num_inference_steps": 4, "sampler": "euler"}
    got = klein.draw(image=image, strength=0.5, **asked)
    request = make_request(klein.ours.model, Call("a fox", image=image, strength=0.5))
    assert request.references is None
    mu = klein.ours.model.family.mu(HEIGHT * WIDTH // 256, 4)  # pyright: ignore[reportOptionalCall]
    table = build_table(klein.ours.model.scheduler, 4, sampler="euler", settings={"mu": mu})
    x, conditions = (1 - table.std[2]) * np.asarray(mean) + table.std[2] * start, klein.ours.encode(PROMPTS)
    for row in (2, 3):
        velocity = np.asarray(klein.ours.denoiser(jnp.asarray(x, jnp.float32), table.timestep[row], conditions))
        x = x + ([*table.std, 0.0][row + 1] - table.std[row]) * velocity
    assert relative_error(got.latents, x) < 1e-4


@pytest.mark.slow
def test_programs_for_references_are_made_ahead(klein: Model) -> None:
    """Of their sizes, before there are images; a server's sample has the programs of a request."""
    images = [picture(165, 215), picture(HEIGHT, WIDTH, 2.0)]
    sizes = [(165, 215), (HEIGHT, WIDTH)]
    klein.ours.compile(HEIGHT, WIDTH, 2, references=sizes, progress=False)
    programs = klein.ours.memory(HEIGHT, WIDTH, 2, references=sizes).programs
    assert programs["denoiser"] > klein.ours.memory(HEIGHT, WIDTH, 2).programs["denoiser"]
    assert programs["image encoder"] > 0
    assert klein.draw(image=images, height=HEIGHT, width=WIDTH).compilations == 0
    asked = JobRequest("a hen", width=WIDTH, height=HEIGHT, image=images[0], references=(images[1],))
    made = sample("klein", klein.ours.model, WIDTH, HEIGHT, references=2).group
    assert made == check(asked, "klein", klein.ours.model).group
    for wrong in (11, [(8, 200)], [(48,)], -1):
        with pytest.raises(canvax.InputError) as caught:
            klein.ours.compile(HEIGHT, WIDTH, references=wrong)
        assert caught.value.argument == "references"
    with pytest.raises(canvax.InputError) as caught:
        canvax.load("emoji").compile(references=1)
    assert caught.value.argument == "references"


def test_nothing_compiles_twice(base: Model) -> None:
    """Whatever a user changes is data, the references too."""
    draw: Any = base.draw
    for image in (None, TWO):
        draw(guidance_scale=2.0, image=image, height=HEIGHT, width=WIDTH)
        for changes in (
            {"prompt": [PROMPTS[1], "a hen, " * 8], "sampler": "euler_a", "sigmas": "karras"},
            {"sampler_settings": ["shift=6"], "num_inference_steps": 3, "guidance_scale": 1.5, "sampler": "DPM++ 2M"},
            {"negative_prompt": "blurry", "seed": 3, "latents": None},
            *([{"image": [picture(165, 215, 1.0), TWO[1]]}, {"image": TWO[::-1]}] if image else []),
        ):  # fmt: skip
            settings = {"options": None, "progress": False, "image": image, "height": HEIGHT, "width": WIDTH}
            assert draw(**{"guidance_scale": 2.0, **settings, **changes}).compilations == 0, changes
    with pytest.raises(canvax.InputError) as caught:
        draw(prompt=["a hen, " * 120] * 2)
    assert caught.value.argument == "prompt"


@pytest.mark.slow
def test_sizes_of_as_many_tokens_share_the_denoiser(base: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 x 80, 80 x 48 and 16 x 240 pixels the denoiser is one program; each size has a decoder of its own."""
    pipe = canvax.load(base.folder, dtype="float32", mesh=base.ours.mesh)
    made: list[str] = []
    monkeypatch.setattr("canvax.compile.programs.load_or_compile", lambda name, *rest: (
        made.append(name) or load_or_compile(name, *rest)))  # fmt: skip
    for height, width in ((48, 80), (80, 48), (16, 240)):
        start, asked = base.noise(height, width), {"num_inference_steps": 2, "guidance_scale": 2.0}
        got = pipe(PROMPTS, latents=start, height=height, width=width, options=QUIET, **asked)
        assert psnr(got.pixels, base.reference(PROMPTS, start, **asked)) > 60
    assert sorted(made) == ["decoder"] * 3 + ["denoiser", "text encoder"]


@pytest.mark.parametrize(("argument", "changes"), [
    ("sampler", {"sampler": "PLMS"}),
    ("sampler", {"sampler": "TCD"}),
    ("pag_scale", {"pag_scale": 3.0}),
    ("prompt_2", {"prompt_2": "a hen"}),
    ("guidance_interval", {"guidance_interval": (0.2, 0.8)}),
    ("height", {"height": 40}),
    ("image", {"image": []}),
    ("image", {"image": picture(8, 200)}),
    ("image", {"image": [picture(64, 64)] * 11}),
])  # fmt: skip
def test_what_it_does_not_do(klein: Model, argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(canvax.InputError) as caught:
        klein.draw(**{"options": None, "latents": None, **changes})
    assert caught.value.argument == argument


@pytest.mark.parametrize(("argument", "changes"), [
    ("scheduler", {"scheduler": {"_class_name": "EulerDiscreteScheduler"}}),
    ("scheduler", {"scheduler": {"_class_name": "UniPCMultistepScheduler", "prediction_type": "v_prediction"}}),
    ("prediction_type", {"prediction_type": "epsilon"}),
])  # fmt: skip
def test_a_flow_model_takes_no_other_schedule(klein: Model, argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(canvax.InputError) as caught:
        canvax.load(klein.folder, **changes)
    assert caught.value.argument == argument
    flow = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    assert canvax.load(klein.folder, scheduler=flow).model.scheduler.schedule.is_flow


def test_a_checkpoint_with_the_scheduler_of_a_diffusion_model(klein: Model, tmp_path: Path) -> None:
    folder, name = shutil.copytree(klein.folder, tmp_path / "other"), "EulerDiscreteScheduler"
    changes = {"model_index.json": {"scheduler": ["diffusers", name]}, "scheduler/scheduler_config.json": {}}
    for path, changed in changes.items():
        config = {**json.loads((folder / path).read_text()), **(changed or {"_class_name": name})}
        (folder / path).write_text(json.dumps(config))
    with pytest.raises(canvax.CheckpointError):
        canvax.load(folder)


def test_a_checkpoint_that_reads_the_guidance_scale(tmp_path: Path) -> None:
    """As FLUX.2 dev does."""
    with pytest.raises(canvax.CheckpointError):
        canvax.load(build(tmp_path, guidance_embeds=True))


Changes = Mapping[str, tuple[np.ndarray, np.ndarray]]


def changes() -> Changes:
    """Of some layers as diffusers has them: the change of the weight, of rank 2."""
    rng = np.random.default_rng(3)
    sizes = dict.fromkeys(["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj",
                           "attn.add_k_proj", "attn.add_v_proj"], (32, 32))  # fmt: skip
    sizes |= {"ff.linear_in": (192, 32), "ff_context.linear_out": (32, 96)}
    layers = {f"transformer_blocks.0.{name}": size for name, size in sizes.items()}
    layers |= {"single_transformer_blocks.1.attn.to_qkv_mlp_proj": (288, 32), "norm_out.linear": (64, 32)}
    layers |= {"single_transformer_blocks.1.attn.to_out": (32, 128), "context_embedder": (32, 48)}
    downs = {inputs: rng.standard_normal((2, inputs)).astype(np.float32) for inputs in (32, 48, 96, 128)}
    return {
        name: (0.2 * rng.standard_normal((out, 2)).astype(np.float32), downs[inputs])  # a stack has one down for all
        for name, (out, inputs) in layers.items()
    }


BFL = {
    "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
    "transformer_blocks.0.ff.linear_in": "double_blocks.0.img_mlp.0",
    "transformer_blocks.0.ff_context.linear_out": "double_blocks.0.txt_mlp.2",
    "single_transformer_blocks.1.attn.to_qkv_mlp_proj": "single_blocks.1.linear1",
    "single_transformer_blocks.1.attn.to_out": "single_blocks.1.linear2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "context_embedder": "txt_in",
}
"""Names of the authors."""


def lora(path: Path, spelling: str) -> Path:
    """A file as PEFT writes it for diffusers, as kohya's scripts do, or as trainers for ComfyUI do."""
    factors = dict(changes())
    if spelling != "peft":
        for stream, names in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"))):
            parts = [factors.pop(f"transformer_blocks.0.attn.{name}") for name in names]
            factors[f"double_blocks.0.{stream}_attn.qkv"] = np.concatenate([up for up, _ in parts]), parts[0][1]
        factors = {BFL.get(name, name): pair for name, pair in factors.items()}
        up, down = factors["final_layer.adaLN_modulation.1"]
        factors["final_layer.adaLN_modulation.1"] = np.roll(up, 32, axis=0), down
    return write_factors(path, "comfy" if spelling == "bfl" else spelling, factors)


@pytest.fixture(scope="module")
def changed(klein: Model) -> np.ndarray:
    """The picture with the adapter."""
    pipe: Any = diffusers.Flux2KleinPipeline.from_pretrained(klein.folder)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        for name, (up, down) in changes().items():
            pipe.transformer.get_submodule(name).weight.add_(torch.from_numpy(up @ down))
    return klein.reference(PROMPTS, klein.noise(), pipe, num_inference_steps=2)


@pytest.mark.parametrize(
    "spelling", ["peft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bfl", "kohya"))]
)
def test_lora(klein: Model, changed: np.ndarray, tmp_path: Path, spelling: str) -> None:
    assert psnr(klein.draw().pixels, changed) < 40
    pipe = klein.ours
    pipe.adapters.load("style", lora(tmp_path / "style.safetensors", spelling))
    got = klein.draw()
    pipe.adapters.remove("style")
    assert psnr(got.pixels, changed) > 60


@pytest.mark.slow
def test_lora_beside_the_weights(klein: Model, changed: np.ndarray, tmp_path: Path) -> None:
    pipe = canvax.load(klein.folder, dtype="float32", mesh=klein.ours.mesh)
    pipe.adapters.beside(rank=4)
    pipe.adapters.load("style", lora(tmp_path / "style.safetensors", "bfl"), beside=True)
    got = pipe(PROMPTS, latents=klein.noise(), height=HEIGHT, width=WIDTH, num_inference_steps=2, options=QUIET)
    assert psnr(got.pixels, changed) > 60


def test_a_lora_for_a_wider_stack_is_refused(klein: Model, tmp_path: Path) -> None:
    path = tmp_path / "wide.safetensors"
    arrays = {"lora_A": np.ones((2, 32), np.float32), "lora_B": np.ones((320, 2), np.float32)}
    safetensors.numpy.save_file(
        {f"diffusion_model.single_blocks.1.linear1.{part}.weight": array for part, array in arrays.items()}, path
    )
    with pytest.raises(canvax.CheckpointError):
        klein.ours.adapters.load("wide", path)


def original(folder: Path, into: Path) -> Path:
    """The checkpoint with the transformer's names and stacks of the authors."""
    import shutil

    shutil.copytree(folder, into)
    path = into / "transformer" / "diffusion_pytorch_model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    arrays["norm_out.linear.weight"] = np.roll(arrays["norm_out.linear.weight"], 32, axis=0)
    for name in [name for name in arrays if name.endswith((".to_q.weight", ".add_q_proj.weight"))]:
        stem, q = name.removesuffix(".weight").rsplit(".", 1)
        names = [f"{stem}.{q.replace('_q', f'_{part}')}.weight" for part in "qkv"]
        stream = "img" if q == "to_q" else "txt"
        arrays[f"{stem.removesuffix('attn')}{stream}_attn.qkv.weight"] = np.concatenate([arrays.pop(n) for n in names])
    spelled = {
        "single_transformer_blocks.": "single_blocks.", "transformer_blocks.": "double_blocks.",
        "attn.to_qkv_mlp_proj": "linear1", "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
        "attn.to_out": "linear2", "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale", "modulation_img.linear": "modulation_img.lin",
        "modulation_txt.linear": "modulation_txt.lin", "stream_modulation.linear": "stream_modulation.lin",
        "norm_out.linear": "final_layer.adaLN_modulation.1", "x_embedder": "img_in", "context_embedder": "txt_in",
        "proj_out": "final_layer.linear", "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    }  # fmt: skip
    for ours, other in spelled.items():
        arrays = {name.replace(ours, other): array for name, array in arrays.items()}
    for part in ("query", "key"):
        ours = f"attn.norm_{part[0]}.weight"
        arrays = {
            name.replace(ours, f"{'norm' if 'single' in name else 'img_attn.norm'}.{part}_norm.scale"): array
            for name, array in arrays.items()
        }
    safetensors.numpy.save_file(arrays, path)
    return into


@pytest.mark.slow
def test_original_names(klein: Model, tmp_path: Path) -> None:
    pipe = canvax.load(original(klein.folder, tmp_path / "original"), dtype="float32", mesh=klein.ours.mesh)
    got = pipe(PROMPTS, latents=klein.noise(), height=HEIGHT, width=WIDTH, num_inference_steps=2, options=QUIET)
    np.testing.assert_array_equal(got.pixels, klein.draw().pixels)


@pytest.mark.parametrize("axes", [pytest.param({"data": 2}, marks=pytest.mark.weekly), {"model": 2}])
@pytest.mark.slow
def test_several_devices(klein: Model, axes: dict[str, int]) -> None:
    pipe = canvax.load(klein.folder, dtype="float32", mesh=make_mesh(jax.devices()[:2], **axes))
    asked: dict[str, Any] = {"image": ONE, "height": HEIGHT, "width": WIDTH}
    got = pipe(PROMPTS, latents=klein.noise(), num_inference_steps=2, options=QUIET, **asked)
    assert psnr(got.pixels, klein.draw(**asked).pixels) > 60


@pytest.mark.slow
def test_eight_bits(klein: Model) -> None:
    """46 dB; weights of 7 bits have 38. Wrong scales are what ``test_quantize`` sees."""
    pipe = canvax.load(klein.folder, dtype="float32", quantize="int8", mesh=klein.ours.mesh)
    got = pipe(PROMPTS, latents=klein.noise(), height=HEIGHT, width=WIDTH, num_inference_steps=2, options=QUIET)
    assert psnr(got.pixels, klein.draw().pixels) > 42
    whole = {name for name, one in pipe.params["transformer"].items() if "scale" not in str(one)}
    assert whole >= {"proj_out", "x_embedder", "norm_out", "single_stream_modulation"}


@pytest.mark.slow
def test_requests_share_a_batch_of_a_server(klein: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that edit, of other proportions than the size that is ready, with prompts and seeds of their own."""

    def load(name: str, **_: Any) -> Any:
        return canvax.load(klein.folder, dtype="float32", mesh=klein.ours.mesh, progress=False)

    asks: list[dict[str, Any]] = [
        {"prompt": PROMPTS[0], "seed": 5, "steps": 12, "image": picture(100, 64)},
        {"prompt": PROMPTS[1], "seed": 6, "steps": 10, "image": picture(48, 80, 2.0)},
    ]
    seated: list[int] = []
    step = Group.step
    monkeypatch.setattr(Group, "step", lambda group: seated.append(len(group.seated)) or step(group))
    monkeypatch.setattr("canvax.server.group.best_batch", lambda row, waiting: 2)
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), (1, 2)),))
    engine = ImageEngine(["klein"], settings, Metrics(), load)
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        assert "editing" in engine.models()[0].tasks
        with held(engine):
            jobs = [engine.submit(JobRequest(**ask, width=WIDTH, height=HEIGHT)) for ask in asks]
        for ask, job in zip(asks, jobs, strict=True):
            until(lambda job=job: job.status.over, 300)
            cut = PIL.ImageOps.fit(ask["image"], (WIDTH, HEIGHT), PIL.Image.Resampling.LANCZOS)
            want = klein.ours(ask["prompt"], image=cut, seed=ask["seed"], num_inference_steps=ask["steps"],
                              options=QUIET)  # fmt: skip
            got = np.asarray(PIL.Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert psnr(got, want.pixels[0]) > 45
        assert max(seated) == 2
    finally:
        engine.close()


@pytest.mark.slow
def test_lines_of_a_prompt_file_read_their_images_alone(
    klein: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines with the same settings and other images, in ``generate`` and in ``batch``."""
    monkeypatch.chdir(tmp_path)
    for name, side in (("a.png", 48), ("b.png", 64)):
        picture(side, 48).save(name)
    lines = [{"prompt": PROMPTS[0], "image": name, "seed": 1} for name in ("a.png", "b.png")]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(canvax, "load", lambda *_, **__: klein.ours)
    shared = ["--model", str(klein.folder), "--steps", "2", "--height", "48", "--width", "48", "--quiet", "-b", "2"]
    assert main(["generate", "--prompt-file", "rows.jsonl", *shared, "-o", "drawn"]) == 0
    assert main(["batch", "rows.jsonl", *shared, "-o", "rows"]) == 0
    drawn = [PIL.Image.open(path) for path in sorted(Path("drawn").glob("*.png"))]
    rows = [PIL.Image.open(path) for path in sorted(Path("rows").glob("*.png"))]
    for line, *images in zip(lines, drawn, rows, strict=True):
        (alone,) = klein.ours(line["prompt"], image=line["image"], seed=1, num_inference_steps=2, height=48, width=48)
        for got in images:
            np.testing.assert_allclose(np.asarray(got, np.int16), np.asarray(alone, np.int16), atol=1)


@pytest.mark.slow
def test_references_on_the_command_line(
    klein: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two, whose sides are no multiples; ``info`` prints the command, which makes the image again."""
    monkeypatch.chdir(tmp_path)
    picture(53, 85).save("one.png")
    picture(49, 80, 2.0).save("two.png")
    monkeypatch.setattr(canvax, "load", lambda *_, **__: klein.ours)
    shared = ["--model", str(klein.folder), "-q"]
    words = ["generate", "a fox", "--image", "one.png", "--reference", "two.png", "-s", "3", "--steps", "1", *shared]
    assert main([*words, "-o", "made.png"]) == 0
    with PIL.Image.open("made.png") as image:
        made = np.asarray(image)
    assert made.shape == (48, 80, 3)
    capsys.readouterr()
    assert main(["info", "made.png", "--json"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert "--image IMAGE1" in command
    assert "--reference IMAGE2" in command
    assert main(["generate", "--from-image", "made.png", "--image", "one.png", "-o", "x.png", *shared]) == 2
    again = shlex.split(command.replace("IMAGE1", "one.png").replace("IMAGE2", "two.png"))[1:]
    assert main([*again, *shared, "-o", "again.png"]) == 0
    with PIL.Image.open("again.png") as image:
        np.testing.assert_array_equal(np.asarray(image), made)
    assert main(["generate", "a fox", "--image", "one.png", "--reference", "two.png", "--model", "emoji", "-q"]) == 2
