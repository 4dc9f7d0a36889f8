"""ControlNet-Union against PyTorch diffusers: what it adds, and whole SDXL pipelines with one and several images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import canvax
from canvax.compile.monitor import compilations
from canvax.families.controls import controlnet_config
from canvax.models.controlnet_union import UnionNet
from canvax.models.presets import SDXL_UNET
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten
from tests.support.random_numbers import rng

from .reference import given_noise, nchw, nhwc, params_of, psnr, randomise, relative_error
from .test_controlnet import KINDS, SMALL, tame
from .test_image_to_image import photo
from .test_sdxl import build

SIZE, LATENTS, SEEDS = 128, (16, 16, 4), [11]
TYPES = 8
UNION: dict[str, Any] = {
    "num_control_type": TYPES, "num_trans_channel": 32, "num_trans_head": 8, "num_trans_layer": 2,
    "num_proj_channel": 32, "conditioning_embedding_out_channels": (16, 32, 48, 64),
}  # fmt: skip


def net_of(seed: int = 5, **changes: Any) -> Any:
    config = SMALL | KINDS["xl"] | UNION | {"projection_class_embeddings_input_dim": 24 + 6 * 8} | changes
    return tame(randomise(diffusers.ControlNetUnionModel(**config), seed))


@pytest.mark.parametrize(("slots", "weights", "guess"), [
    ([1], [1.0], False),
    ([7, 0, 3], [1.0, 0.5, 1.5], False),
    ([2], [1.0], True),
    ([2, 5], [1.0, 1.0], True),
])  # fmt: skip
def test_residuals(slots: list[int], weights: list[float], guess: bool) -> None:
    """Every array that is added; of several images each has its own weight, which the model takes, no pipeline does."""
    reference = net_of()
    net = UnionNet.from_dict(dict(reference.config))
    params = params_of(reference, net.spec)
    x, text = (rng.standard_normal(s, np.float32) for s in ((2, 18, 14, 4), (2, 77, 48)))
    images = [np.repeat(rng.random((1, 144, 112, 3), np.float32), 2, 0) for _ in slots]
    t = np.array([981.0, 3.25], np.float32)
    conditions: dict[str, Any] = {"text": text, "pooled": rng.standard_normal((2, 24), np.float32)}
    conditions |= {"time_ids": np.array([[64, 48, 0, 13, 60, 2.5]] * 2, np.float32)}
    added = {"text_embeds": torch.from_numpy(conditions["pooled"])}
    added |= {"time_ids": torch.from_numpy(conditions["time_ids"])}
    kinds = torch.zeros(2, TYPES)
    kinds[:, slots] = 1
    with torch.no_grad():
        down, middle = reference(
            nchw(x), torch.from_numpy(t), torch.from_numpy(text), [nchw(one) for one in images], kinds, slots,
            conditioning_scale=weights, guess_mode=guess, added_cond_kwargs=added, return_dict=False,
        )  # fmt: skip
    read = [jax.jit(net.encode)(params, one) for one in images]
    kept = [net.together([(hint[i], mean[i]) for hint, mean in read], slots, weights) for i in range(2)]
    features = tuple(np.stack(parts) for parts in zip(*kept, strict=True))
    assert tuple(one.shape for one in features) == net.features(x.shape)
    levels = np.logspace(-1, 0, net.layers) if guess else np.ones(net.layers)
    scales = np.tile(levels, (2, 1)).astype(np.float32)
    found = jax.jit(net.residuals)(params, x, t, net.prepare(params, conditions), features, scales)
    for got, want in zip([*found.skips, found.middle], [*down, middle], strict=True):
        assert relative_error(got, nhwc(want)) < 1e-5
    assert jax.tree.map(np.shape, net.nothing(x.shape, np.float32)) == jax.tree.map(np.shape, found)


def test_images_of_a_batch_change_each_other_in_diffusers() -> None:
    """Its attention takes the batch for the tokens. Here each image is what it is alone, in any company."""
    reference = net_of()
    tokens = torch.from_numpy(rng.standard_normal((2, 3, 32), np.float32))
    with torch.no_grad():
        both, alone = (reference.transformer_layes[0](x) for x in (tokens, tokens[:1]))
        other_types = reference.transformer_layes[0](tokens[:1, :2])
    assert float((both[:1] - alone).abs().max()) > 1e-2
    torch.testing.assert_close(other_types, alone[:, :2])  # and of the other tokens it sees none


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    root = tmp_path_factory.mktemp("union")
    net = net_of(cross_attention_dim=72)
    net.save_pretrained(root / "net")
    base = diffusers.StableDiffusionXLPipeline.from_pretrained(build(root / "base"))
    parts = {name: part for name, part in base.components.items() if name != "image_encoder"}
    theirs = diffusers.StableDiffusionXLControlNetUnionPipeline(**parts, controlnet=net, add_watermarker=False)
    theirs.scheduler = diffusers.DDIMScheduler.from_config(theirs.scheduler.config, clip_sample=False)
    theirs.set_progress_bar_config(disable=True)
    mesh = make_mesh(jax.devices()[:1])
    return theirs, canvax.load(root / "base", dtype="float32", mesh=mesh, controlnet=root / "net")


CHOICE: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 5.0}
CASES: list[tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = [
    ({"depth": 1}, {"controlnet_conditioning_scale": 0.7}, {"control_scale": 0.7}),
    ({"openpose": 0, "canny": 3}, {}, {}),
    # With guidance, guess mode of diffusers ends in an error: it repeats the types for both halves and computes one.
    ({"tile": 6}, {"guess_mode": True, "guidance_scale": 1.0}, {"control_mode": "guess", "guidance_scale": 1.0}),
    ({"softedge": 2, "normal": 4, "segment": 5}, {}, {}),
    # Of one type: outside the window of several, diffusers runs the network on features that are scaled to 0.
    ({"repaint": 7}, {"control_guidance_start": 0.2, "control_guidance_end": 0.8},
     {"control_start": 0.2, "control_end": 0.8}),
]  # fmt: skip


@pytest.mark.parametrize(("types", "their_options", "own"), [
    pytest.param(*case, marks=(() if i < 2 else pytest.mark.slow if i == 2 else pytest.mark.weekly))
    for i, case in enumerate(CASES)
])  # fmt: skip
def test_same_image(types: dict[str, int], their_options: dict[str, Any], own: dict[str, Any], pair: Any) -> None:
    theirs, ours = pair
    images = [photo(i + 1) for i in range(len(types))]
    with torch.no_grad():
        want = theirs(
            "a red apple", control_image=images, control_mode=[*types.values()], negative_prompt="blue",
            height=SIZE, width=SIZE, latents=nchw(initial_noise(SEEDS, LATENTS)), output_type="np",
            **CHOICE | their_options,
        ).images  # fmt: skip
    call: dict[str, Any] = {"seed": SEEDS, "sampler": "DDIM", "progress": False, **CHOICE, **own}
    shown = dict(zip(types, images, strict=True))
    got = ours("a red apple", "blue", control=shown, **call)
    near = psnr(got.pixels, want)
    assert near >= 60
    before = compilations()
    for other in ({"depth": images[0]}, {"openpose": images[0], "segment:0.3": images[0], 7: images[0]}):
        apart = ours("a red apple", "blue", control=other, **call)
        assert other == shown or psnr(apart.pixels, want) < near - 20
    assert compilations() == before  # other types, and another number of them


@pytest.mark.parametrize("inpaint", [False, True])
def test_with_an_image(inpaint: bool, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair
    kind = "Inpaint" if inpaint else "Img2Img"
    cls = getattr(diffusers, f"StableDiffusionXLControlNetUnion{kind}Pipeline")
    parts = {name: part for name, part in theirs.components.items() if name not in ("image_encoder",)}
    theirs = cls(**parts, add_watermarker=False)
    theirs.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, theirs, initial_noise(SEEDS, LATENTS))
    seen: list[Any] = []
    choice = {"num_inference_steps": 5, "guidance_scale": 5.0, "strength": 0.6}
    names, slots = (("repaint",), [7]) if inpaint else (("tile", "depth"), [6, 1])
    shown = {name: photo(3 + i) for i, name in enumerate(names)}
    square = Image.new("L", (SIZE, SIZE), 0)
    square.paste(255, (32, 16, 96, 80))
    more: dict[str, Any] = {"mask_image": square, "height": SIZE, "width": SIZE} if inpaint else {}

    def keep(_: Any, i: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(values["latents"])
        return values

    with torch.no_grad():
        theirs(
            "a red apple", image=photo(1), control_image=[*shown.values()], control_mode=slots, negative_prompt="blue",
            controlnet_conditioning_scale=1.0, output_type="np", callback_on_step_end=keep, **choice, **more,
        )  # fmt: skip
    own = {"mask": square, "mask_blend": "renoised"} if inpaint else {}
    got = ours("a red apple", "blue", image=photo(1), control=shown, seed=SEEDS, sampler="DDIM", progress=False,
               **choice, **own)  # fmt: skip
    assert relative_error(got.latents, nhwc(seen[-1])) < 1e-3


def test_one_file(pair: Any, tmp_path: Path) -> None:
    """Sizes are read off its arrays; the first released files name the class of a plain ControlNet."""
    theirs, ours = pair
    save_file({k: v.contiguous() for k, v in theirs.controlnet.state_dict().items()}, tmp_path / "net.safetensors")
    single = ours.with_controlnet(tmp_path / "net.safetensors")
    assert single.model.networks.controls == ours.model.networks.controls


@pytest.mark.parametrize("types", [6, 8])
def test_full_size_parameters(types: int) -> None:
    """Names and shapes of the released networks, without their memory."""
    left_out = ("sample_size", "out_channels", "up_block_types")
    config = {name: value for name, value in vars(SDXL_UNET).items() if value is not None and name not in left_out}
    config.pop("time_cond_proj_dim", None)
    with torch.device("meta"):
        reference = diffusers.ControlNetUnionModel(**config, num_control_type=types)
    found = {name: tuple(array.shape) for name, array in reference.state_dict().items()}
    told = UnionNet.from_dict(dict(reference.config))
    guessed = UnionNet.from_dict(controlnet_config(found, SDXL_UNET))
    for net in (told, guessed):
        assert found == {name: param.checkpoint_shapes[0] for name, param in flatten(net.spec)}
    assert told.union == guessed.union
