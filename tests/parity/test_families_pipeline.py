"""Whole pipelines of the transformer families against diffusers, float32: same random checkpoint, noise, prompts.

A test goes over the models of ``families.RECORDS`` that it is for; what one family alone has follows.
"""

from __future__ import annotations

import io
import json
import math
import shlex
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import canvax
from canvax.adapters import change
from canvax.call import Call
from canvax.cli import main
from canvax.compile.monitor import counting
from canvax.compile.programs import load_or_compile
from canvax.images.inputs import fingerprint
from canvax.models.anima import CosmosConfig, cosmos, cosmos_spec, positions
from canvax.models.flux import REFERENCE_SIZES
from canvax.models.krea2 import DROPPED
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten, init_params
from canvax.pipelines.generate import sampler_table
from canvax.pipelines.hints import hints
from canvax.pipelines.request import make_request
from canvax.pipelines.shares import shares_of
from canvax.samplers import build_table
from canvax.server.adapter_cache import AdapterCache, AdapterSettings
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.group import Group
from canvax.server.jobs import JobRequest, State
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from canvax.server.work import check, sample
from canvax.weights.lora import read_adapter
from tests.support import serving
from tests.support.serving import held, until

from .families import (
    EDIT_PIXELS,
    HEIGHT,
    ONE,
    PROMPTS,
    QUIET,
    TWO,
    WIDTH,
    Arrays,
    Model,
    arrays_of,
    build_flux2,
    build_z_image,
    half_mask,
    load,
    one_family,
    over,
    packed,
    picture,
    write,
    write_factors,
)
from .reference import given_noise, nchw, nhwc, psnr, relative_error

SMALL = {"height": HEIGHT, "width": WIDTH}
WEEKLY, SLOW = pytest.mark.weekly, pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return one_family(lambda name: Model(name, tmp_path_factory.mktemp("model") / name))


@pytest.fixture
def model(request: pytest.FixtureRequest, models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model that a test asks for by ``over``."""
    made = models(request.param)
    if made.record.title.startswith(("FLUX.1", "FLUX.2", "Qwen")):  # less padding of references, which takes time
        monkeypatch.setattr("canvax.models.networks.REFERENCE_BUCKET", 64)
        monkeypatch.setattr("canvax.models.flux.REFERENCE_SIZES", ((HEIGHT, WIDTH), (64, 48)))
    for name in ("qwen_image", "qwen_image_1"):
        monkeypatch.setattr(f"canvax.models.{name}.REFERENCE_PIXELS", 128 * 128)
    monkeypatch.setattr("canvax.models.qwen25_vision.VIEWED_PIXELS", EDIT_PIXELS["CONDITION_IMAGE_SIZE"])
    return made


def assert_near(got: Any, want: Any, least: float = 60, *, of: object = "the reference") -> None:
    """Pictures are as near as they can be in float32."""
    assert (found := psnr(got, want)) > least, f"{found:.1f} dB from {of}, not {least}"


def assert_other(got: Any, want: Any, most: float = 40) -> None:
    """A picture is visibly another one, so that likeness says something."""
    assert (found := psnr(got, want)) < most, f"{found:.1f} dB: what was changed does not matter here"


@pytest.mark.parametrize(("model", "guidance", "height", "width", "steps", "more"), [
    ("z-image", 0.0, 48, 80, 7, {}),
    ("z-image", 0.7, 48, 80, 7, {}),
    ("z-image", 3.0, 64, 32, 7, {}),
    ("flux2", None, 48, 80, 4, {}),
    pytest.param("flux2-base", 1.0, 48, 80, 7, {"guidance_scale": 4.0}, marks=WEEKLY),
    pytest.param("flux2-base", 4.0, 48, 80, 7, {"guidance_scale": 1.0}, marks=SLOW),
    ("flux3", None, 48, 80, 4, {}),
    ("flux3-base", 3.0, 48, 80, 5, {"negative_prompt": None}),
    ("krea2", 0.0, 48, 80, 5, {}),
    ("krea2", 1.7, 48, 80, 5, {}),
    ("krea2-turbo", 0.0, 48, 80, 8, {}),
    ("qwen", None, 64, 96, 5, {}),
    ("qwen", 3.0, 64, 96, 4, {"guidance_scale": 1.0}),
    ("qwen-turbo", None, 64, 96, 4, {}),
    ("qwen-1", 3.0, 48, 80, 5, {"guidance_method": "cfg"}),
    ("qwen-1", 1.0, 48, 80, 4, {"guidance_scale": 2.0}),
    ("flux-schnell", None, 48, 80, 4, {}),
    ("flux-schnell", 2.0, 48, 80, 4, {"guidance_scale": 1.0}),
    ("flux-dev", 3.5, 48, 80, 5, {"guidance_scale": 1.0}),
    ("flux-kontext", 2.0, 64, 32, 4, {"guidance_scale": 3.5}),
    ("flux-fill", 30.0, 48, 80, 4, {"guidance_scale": 3.5}),
    ("chroma", 3.0, 48, 80, 5, {"guidance_scale": 1.0}),
    ("anima", 3.0, 48, 80, 5, {"guidance_scale": 1.0}),
    ("anima", 1.0, 48, 80, 4, {"guidance_scale": 2.0}),
], indirect=["model"])  # fmt: skip
def test_same_picture(
    model: Model, guidance: float | None, height: int, width: int, steps: int, more: dict[str, Any]
) -> None:
    """Two prompts of different lengths side by side, of an image of 15 tokens or of 8; ``more`` matters."""
    start, record = model.noise(height, width), model.record
    asked: dict[str, Any] = {"num_inference_steps": steps}
    asked |= {} if guidance is None else {"guidance_scale": guidance}
    asked |= {"negative_prompt": [*record.negatives]} if guidance and model.name != "flux2-base" else {}
    want = model.reference(record.prompts, start, **asked)
    drawn = {**asked, "latents": start, "height": height, "width": width}
    assert_near(model.draw(**drawn).pixels, want)
    turned = {"prompt": [*record.prompts[::-1]], "negative_prompt": asked.get("negative_prompt", [])[::-1] or None}
    assert_other(model.draw(**drawn | turned).pixels, want)
    if more:
        assert_other(model.draw(**drawn | more).pixels, want)


@over("flux-dev", "flux-kontext")
def test_true_guidance(model: Model) -> None:
    """The scale that the network reads and the one away from the negative prompt are two."""
    asked = {"num_inference_steps": 4, "guidance_scale": 2.0, "negative_prompt": [*model.record.negatives]}
    want = model.reference(model.record.prompts, **asked, true_cfg_scale=3.0)
    assert_near(model.draw(**asked, true_cfg_scale=3.0).pixels, want)
    for other in ({}, {"true_cfg_scale": 3.0, "guidance_scale": 6.0}, {"true_cfg_scale": 3.0, "negative_prompt": "a"}):
        assert_other(model.draw(**{**asked, **other}).pixels, want)


FLUX1 = ("flux-schnell", "flux-dev", "flux-kontext", "flux-fill")


@over("z-image", "flux2", "flux2-base", "flux3", "flux3-base", "krea2", "krea2-turbo", "qwen", "qwen-1", "qwen-turbo",
      "chroma", "anima", *FLUX1)  # fmt: skip
def test_defaults(model: Model) -> None:
    """A distilled model has no second evaluation, the other one is guided away from the empty prompt."""
    ours, distilled = model.ours.model, model.record.distilled
    assert (ours.defaults.num_inference_steps, ours.defaults.guidance_scale) == model.record.steps
    request = make_request(ours, Call("a fox"))
    assert (request.guided, request.negatives) == (not distilled and model.name not in ("qwen", *FLUX1), [""])
    if model.record.title == "FLUX.2":
        assert make_request(ours, Call("a fox", guidance_scale=4.0)).guided != distilled
    if model.record.title == "FLUX.3":  # in no file: the reference's is a default of its step
        assert ours.scheduler.schedule.shift == 6.93


def shift_of(model: Model, tokens: int, steps: int) -> float:
    """exp(mu) as the reference computes it."""
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
    from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift

    return {
        "z-image": lambda: 3.0, "flux2": lambda: np.exp(compute_empirical_mu(tokens, steps)), "flux3": lambda: 6.93,
        "krea2": lambda: np.exp(calculate_shift(tokens, 10, 64)), "krea2-turbo": lambda: np.exp(1.15),
        "qwen": lambda: np.exp(calculate_shift(tokens, 10, 64)), "flux-schnell": lambda: 1.0,
        "anima": lambda: 3.0, "qwen-1": lambda: np.exp(calculate_shift(tokens, 10, 64, 0.5, 0.9)),
        "flux-dev": lambda: np.exp(calculate_shift(tokens, 10, 64)),
    }[model.name]()  # fmt: skip


@over("z-image", "flux2", "flux3", "krea2", "krea2-turbo", "qwen", "qwen-1", "flux-schnell", "flux-dev", "anima")
def test_the_shift_belongs_to_the_model(model: Model) -> None:
    """Every sampler has it, and it follows the size where the reference's does."""
    for height, width in ((48, 80), (64, 32)):
        shift = shift_of(model, height * width // 256, 4)
        want = 1000 * shift / (shift + 1 / np.array([1, 0.75, 0.5, 0.25]) - 1)
        if model.name == "qwen-1":  # the last time is stretched to 20
            want = 1000 - (1000 - want) * 980 / (1000 - want[-1])
        for sampler in ("euler", "DPM++ 2M", "heun", "unipc", None):
            call = Call("a fox", height=height, width=width, num_inference_steps=4, sampler=sampler)
            table = sampler_table(model.ours.model, make_request(model.ours.model, call))
            np.testing.assert_allclose(sorted(set(table.timestep), reverse=True), want, atol=1, err_msg=f"{sampler}")


@over("z-image", "flux2-base", "krea2", "qwen", "qwen-1", "qwen-edit", "flux-dev", "chroma", "anima")
def test_nothing_compiles_twice(model: Model) -> None:
    """Whatever a user changes is data: prompts of another length, and the references of a model that edits."""
    usual = {"guidance_scale": 2.0, "options": None, "progress": False, **model.small}
    for image in (None, TWO) if model.ours.model.networks.denoiser.facts.edits else (None,):
        given: dict[str, Any] = {} if image is None else {"image": image}
        model.draw(**usual | given)
        for changes in (
            {"prompt": [PROMPTS[1], "a hen, " * 8]}, {"seed": 3, "latents": None}, {"num_inference_steps": 5},
            {"sampler": "DPM++ 2M"}, {"sampler": "euler_a", "sigmas": "karras"}, {"guidance_scale": 1.5},
            {"sampler_settings": ["shift=6"]}, {"negative_prompt": "blurry"},
            {"num_inference_steps": 20, "quality": "fast"},
            *([{"image": [picture(165, 215, 1.0), TWO[1]]}, {"image": TWO[::-1]}] if image else []),
            *([{"guidance_scale": 1.0}] if model.name == "z-image" else []),
        ):  # fmt: skip
            assert model.draw(**usual | given | changes).compilations == 0, changes
    with pytest.raises(canvax.InputError) as caught:
        model.draw(prompt=["a hen, " * 240] * 2)
    assert caught.value.argument == "prompt"


@over("krea2", "qwen", slow=["z-image", "flux2-base", "qwen-1", "anima"])
def test_sizes_of_as_many_tokens_share_the_denoiser(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as 48 x 80, 80 x 48 and 16 x 240 pixels; each size has a decoder of its own."""
    pipe, made = model.loaded(), list[str]()
    monkeypatch.setattr("canvax.compile.programs.load_or_compile", lambda name, *rest: (
        made.append(name) or load_or_compile(name, *rest)))  # fmt: skip
    asked = {"num_inference_steps": 2, "guidance_scale": 2.0, "negative_prompt": ["", ""]}
    (tall, wide), side = model.record.size, math.gcd(*model.record.size)
    for height, width in ((tall, wide), (wide, tall), (side, tall * wide // side)):
        start = model.noise(height, width)
        got = model.draw(pipe, latents=start, height=height, width=width, **asked)
        theirs = asked if model.name != "flux2-base" else {k: v for k, v in asked.items() if k != "negative_prompt"}
        assert_near(got.pixels, model.reference(latents=start, **theirs))
    assert sorted(made) == ["decoder"] * 3 + ["denoiser", "text encoder"]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sampler", {"sampler": "PLMS"}), ("sampler", {"sampler": "TCD"}), ("pag_scale", {"pag_scale": 3.0}),
    ("prompt_2", {"prompt_2": "a hen"}), ("height", {"height": 40}), ("clip_skip", {"clip_skip": 1}),
    ("prompt", {"prompt": "a (red:1.2) fox", "prompt_syntax": "a1111"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "refused"), [
    ("z-image", [*REFUSED, ("reuse", {"reuse": 2}), ("true_cfg_scale", {"true_cfg_scale": 4.0})]),
    ("flux2", [
        *REFUSED, ("guidance_interval", {"guidance_interval": (0.2, 0.8)}), ("image", {"image": []}),
        ("image", {"image": picture(8, 200)}), ("image", {"image": [picture(64, 64)] * 11}),
    ]),
    ("flux3", REFUSED),
    ("krea2", REFUSED),
    ("qwen", REFUSED),
    ("qwen-1", [*REFUSED, ("guidance_rescale", {"guidance_rescale": 0.5})]),
    ("chroma", REFUSED),
    ("anima", REFUSED),
    ("flux-dev", [
        *(entry for entry in REFUSED if entry[0] != "prompt_2"),
        ("guidance_interval", {"guidance_interval": (0.2, 0.8)}),
    ]),
], indirect=["model"])  # fmt: skip
def test_what_it_does_not_do(model: Model, refused: list[tuple[str, dict[str, Any]]]) -> None:
    for argument, changes in refused:
        with pytest.raises(canvax.InputError) as caught:
            model.draw(**{"options": None, "latents": None, **changes})
        assert caught.value.argument == argument, changes
    request = make_request(model.ours.model, Call("a (red:1.2) fox"))
    (hint,) = [hint for hint in hints(model.ours.model, request) if hint.argument == "prompt"]
    assert "prompt_syntax" not in hint.cure  # which would be refused


@pytest.fixture(scope="module")
def adapted(models: Callable[[str], Model]) -> Callable[[str], Any]:
    """The picture of diffusers with the adapter of the record."""

    @cache
    def drawn(name: str) -> Any:
        model = models(name)
        pipe = model.opened()
        with torch.no_grad():
            for layer, (up, down) in model.record.factors().items():
                pipe.transformer.get_submodule(layer).weight.add_(torch.from_numpy(up @ down))
        return model.reference(pipe=pipe, **unguided(model))

    return drawn


def unguided(model: Model) -> dict[str, Any]:
    """One evaluation a step; with a reference where there are layers for one."""
    asked: dict[str, Any] = {"num_inference_steps": 2}
    asked |= {"guidance_scale": 1.0 if model.name == "anima" else 0.0} if model.record.factor == 8 else {}
    return asked | ({"image": ONE} if model.name in ("flux3", "qwen", "qwen-edit") else {})


@pytest.mark.parametrize(("model", "spelling", "in_slots"), [
    pytest.param(name, spelling, in_slots, marks=[
        *[SLOW] * (spelling != "peft" and (name, spelling) != ("flux3", "comfy")),
        # Chroma shares FLUX.1's network, and another test has the text adapter of Anima.
        *[WEEKLY] * (in_slots and name in ("chroma", "anima")),
    ])
    for name in ("z-image", "flux2", "flux3", "krea2", "qwen", "qwen-1", "flux-dev", "chroma", "anima")
    for spelling, in_slots in (("peft", False), ("comfy", False), ("kohya", False), ("comfy", True))
    if (name, in_slots) != ("flux3", True)
], indirect=["model"])  # fmt: skip
def test_lora(model: Model, adapted: Callable[[str], Any], tmp_path: Path, spelling: str, in_slots: bool) -> None:
    """Merged and in slots; an array that no layer has is an error."""
    want, asked = adapted(model.name), {**unguided(model), **model.small}
    assert_other(model.draw(**asked).pixels, want)
    pipe, path = model.loaded() if in_slots else model.ours, tmp_path / "style.safetensors"
    if in_slots:
        pipe.adapters.beside(rank=4)
    pipe.adapters.load("style", model.lora(path, spelling), beside=in_slots)
    got = model.draw(pipe, **asked)
    pipe.adapters.remove("style")
    assert_near(got.pixels, want, of=f"the reference with the adapter as {spelling}")
    model.lora(path, spelling, **{"blocks.0.attn.wx": next(iter(model.record.factors().values()))})
    with pytest.raises(canvax.CheckpointError):
        pipe.adapters.load("style", path)


def with_original_names(model: Model, into: Path) -> Path:
    """The checkpoint with the authors' names; Z-Image's language model with its head."""
    shutil.copytree(model.folder, into)
    (path,) = (into / "transformer").glob("*.safetensors")
    write(path, model.record.original(arrays_of(model.folder, "transformer")))
    if model.name == "z-image":
        text: Arrays = model.record.text(arrays_of(model.folder, "text_encoder"))
        write(into / "text_encoder" / "model.safetensors", text | {"lm_head.weight": np.zeros((4, 4), np.float32)})
    return into


@over(slow=["z-image", "flux2"])
def test_original_names(model: Model, tmp_path: Path) -> None:
    pipe = model.loaded(with_original_names(model, tmp_path / "original"))
    np.testing.assert_array_equal(model.draw(pipe).pixels, model.draw().pixels)


@pytest.mark.parametrize(("model", "axes"), [
    *(pytest.param(name, {axis: 2}, marks=WEEKLY) for name in ("z-image", "flux2") for axis in ("data", "model")),
    ("krea2", {"data": 2, "model": 2}),
    *(pytest.param(name, {"data": 2, "model": 2}, marks=WEEKLY) for name in ("qwen", "qwen-1")),
    ("flux-dev", {"data": 2, "model": 2}), ("anima", {"data": 2, "model": 2}), ("qwen-edit", {"data": 2, "model": 2}),
], indirect=["model"])  # fmt: skip
@pytest.mark.slow
def test_several_devices(model: Model, axes: dict[str, int]) -> None:
    pipe = model.loaded(mesh=make_mesh(jax.devices()[: int(np.prod([*axes.values()]))], **axes))
    guided = {"guidance_scale": 2.0, **model.small}
    edits = {"flux2": SMALL, "qwen": guided, "qwen-edit": guided}
    asked = {"image": ONE, **edits[model.name]} if model.name in edits else {"guidance_scale": 2.0}
    assert_near(model.draw(pipe, **asked).pixels, model.draw(**asked).pixels, of="one device")


@pytest.mark.parametrize(("model", "dtype", "least"), [
    ("z-image", "float32", 40), ("flux2", "float32", 42), ("krea2", "bfloat16", 30), ("qwen", "float32", 40),
    ("flux-dev", "float32", 40), ("anima", "float32", 40),
    pytest.param("qwen-1", "float32", 40, marks=WEEKLY), pytest.param("qwen-edit", "bfloat16", 30, marks=WEEKLY),
], indirect=["model"])  # fmt: skip
@pytest.mark.slow
def test_eight_bits(model: Model, dtype: str, least: float) -> None:
    """FLUX.2 has 46 dB, and with 7 bits 38. Wrong scales are what ``test_quantize`` sees."""
    pipe, asked = model.loaded(dtype=dtype, quantize="int8"), {**unguided(model), **model.small}
    assert_near(model.draw(pipe, **asked).pixels, model.draw(**asked).pixels, least, of="all bits")
    if model.name == "flux2":
        whole = {name for name, one in pipe.params["transformer"].items() if "scale" not in str(one)}
        assert whole >= {"proj_out", "x_embedder", "norm_out", "single_stream_modulation"}


GUIDED = {"prompt": PROMPTS[0], "guidance_scale": 2.0, "negative_prompt": "blurry", "seed": 5, "steps": 60}
PLAIN = {"prompt": PROMPTS[1], "guidance_scale": 0.0, "seed": 6, "steps": 50}
FROM_IMAGE = {"image": picture(), "strength": 0.5}


@pytest.mark.parametrize(("model", "together", "asks", "shared"), [
    pytest.param("z-image", 2, [GUIDED, {**PLAIN, "mask": half_mask(WIDTH // 2)}], FROM_IMAGE, marks=WEEKLY),
    pytest.param("krea2", 2, [GUIDED, PLAIN], FROM_IMAGE, marks=WEEKLY),
    pytest.param("anima", 2, [GUIDED, {**PLAIN, "mask": half_mask(WIDTH // 2)}], FROM_IMAGE, marks=WEEKLY),
    pytest.param("qwen", 2, [{**GUIDED, "guidance_scale": 1.0}, PLAIN], FROM_IMAGE, marks=WEEKLY),
    pytest.param("qwen-1", 2, [GUIDED, {**PLAIN, "mask": half_mask(WIDTH // 2)}], FROM_IMAGE, marks=WEEKLY),
    pytest.param("flux2", 2, [
        {"prompt": PROMPTS[0], "seed": 5, "steps": 12, "image": picture(100, 64)},
        {"prompt": PROMPTS[1], "seed": 6, "steps": 10, "image": picture(48, 80, 2.0)},
    ], {}, marks=SLOW),
    pytest.param("flux-dev", 2, [
        {"prompt": PROMPTS[0], "seed": 5, "steps": 60, "guidance_scale": 2.0},
        {"prompt": PROMPTS[1], "seed": 6, "steps": 50, "guidance_scale": 5.0},
    ], FROM_IMAGE, marks=SLOW),
    pytest.param("flux-kontext", 2, [
        {"prompt": PROMPTS[0], "seed": 5, "steps": 12, "image": picture(100, 64)},
        {"prompt": PROMPTS[1], "seed": 6, "steps": 10, "image": picture(48, 80, 2.0)},
    ], {}, marks=WEEKLY),
    *(pytest.param(name, 2, [
        {"prompt": PROMPTS[0], "seed": 5, "steps": 6, "image": picture(100, 64)},
        {"prompt": "a hen on a hill", "seed": 6, "steps": 5, "image": picture(48, 80, 2.0)},
    ], {}, marks=mark) for name, mark in (("qwen", WEEKLY), ("qwen-edit", SLOW))),
    ("flux3", 1, [
        {"prompt": "a fox", "seed": 5, "steps": 3, "image": ONE[0]}, {"prompt": "a fox", "seed": 5, "steps": 3},
    ], {}),
], indirect=["model"])  # fmt: skip
def test_requests_to_a_server(
    model: Model, together: int, asks: list[dict[str, Any]], shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that wait side by side are the images of calls, and share a batch where their programs are the same.

    Prompts, steps, guidance, masks and images are each request's.
    """
    seated, step = list[int](), Group.step
    monkeypatch.setattr(Group, "step", lambda group: seated.append(len(group.seated)) or step(group))
    monkeypatch.setattr("canvax.server.group.best_batch", lambda row, waiting: together)
    batches = (1, 2)[:together]
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), batches),), compile_on_demand=bool(shared))
    engine = ImageEngine([model.name], settings, Metrics(), lambda name, **_: model.loaded())
    engine.start()
    try:
        until(lambda: engine.state is not State.STARTING, 300)
        assert engine.failure is None
        edits = "editing" in engine.models()[0].tasks
        assert edits == model.ours.model.networks.denoiser.facts.edits
        with held(engine):
            jobs = [engine.submit(JobRequest(**ask, width=WIDTH, height=HEIGHT, **shared)) for ask in asks]
        for ask, job in zip(asks, jobs, strict=True):
            until(lambda job=job: job.status.over, 300)
            keywords = {"num_inference_steps" if name == "steps" else name: value for name, value in ask.items()}
            if edits and "image" in ask:
                keywords["image"] = ImageOps.fit(ask["image"], (WIDTH, HEIGHT), Image.Resampling.LANCZOS)
            size = {} if shared else SMALL
            want = model.ours(**keywords, **shared, **size, options=QUIET)
            got = np.asarray(Image.open(io.BytesIO(job.pictures[0].data or b"")), np.float32) / 255
            assert_near(got, want.pixels[0], 45, of=f"the call {ask}")
        assert max(seated) == together
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore::canvax.tokenizers.clip.TruncationWarning")  # of FLUX.1's pooled text
@over(slow=["flux2", "qwen-edit"], weekly=["flux-kontext", "qwen"])
def test_edits_over_http(model: Model) -> None:
    """OpenAI's way and canvax's, of one image and of two, whose calls give the same; longer prompts than a chunk."""
    settings = EngineSettings(warm=(Warm((WIDTH, HEIGHT), (1,)),), references=2)
    fitted = [ImageOps.fit(image, (WIDTH, HEIGHT), Image.Resampling.LANCZOS) for image in TWO]
    encoder, words = model.ours.model.text.encoders[0], model.ours.tokenizer
    prompts = ("a fox " * i for i in range(1, 200))
    prompt = next(text for text in prompts if encoder.count(words, text, ONE) > 128 or len(text) > 600)
    asked = {"num_inference_steps": 2, "seed": 5, "options": QUIET, **SMALL}
    usual = {"prompt": prompt, "steps": 2, "seed": 5}
    with serving.asked(settings, load=lambda name, **_: model.loaded()) as (client, engine):
        for images in TWO[:1], TWO:
            want = model.ours(prompt, image=fitted[: len(images)], **asked).pixels[0]
            files = [("image[]", (f"{i}.png", serving.as_png(image))) for i, image in enumerate(images)]
            answer = client.post("/v1/images/edits", data={**usual, "size": f"{WIDTH}x{HEIGHT}"}, files=files)
            assert answer.status_code == 200, answer.text
            got = serving.opened(answer.json()["data"][0]["b64_json"])
            assert_near(np.asarray(got, np.float32) / 255, want, 45, of=f"the call with {len(images)} images")
            sent = [serving.b64(image) for image in images]
            body = {**usual, "width": WIDTH, "height": HEIGHT, "image": sent[0], "references": sent[1:]}
            assert_near(serving.by_job(client, body)[0] / 255, want, 45, of=f"the call with {len(images)} images")
        (card,) = engine.models()
        assert card.references == 2
        assert ("text-to-image" in card.tasks) is (model.name in ("flux2", "qwen", "flux3"))  # the others only edit


# What Z-Image alone has.


def patched(monkeypatch: pytest.MonkeyPatch, model: Model, name: str, **more: Any) -> Any:
    """Another pipeline of the same parts, which gets our noise and takes the mean of what the VAE encodes."""
    pipe = getattr(diffusers, name)(**model.theirs.components, **more)
    pipe.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, pipe, model.noise())
    return pipe


@over("z-image", "flux-dev", "chroma")
def test_image_to_image(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    image, asked = picture(), {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 1.5}
    names = {"z-image": "ZImageImg2ImgPipeline", "flux-dev": "FluxImg2ImgPipeline", "chroma": "ChromaImg2ImgPipeline"}
    pipe = patched(monkeypatch, model, names[model.name])
    if model.name == "chroma":
        mask_of = pipe._prepare_attention_mask
        monkeypatch.setattr(pipe, "_prepare_attention_mask", lambda **given: mask_of(**given).bool())
    with torch.no_grad():
        want = pipe(list(PROMPTS), image=image, output_type="np", **asked, **SMALL).images
    assert_near(model.draw(image=image, **asked).pixels, want)
    assert_other(model.draw(image=image, **asked | {"strength": None}).pixels, want)


@over(slow=["z-image", "flux2-base", "flux-dev"])
def test_inpainting(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """For FLUX.2 the image is a reference as well, as there."""
    image, mask, flux = picture(), half_mask(40 if model.name == "z-image" else 48), model.name != "z-image"
    asked = {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 4.0 if flux else 0.0, "image": image}
    kind = {"flux2-base": "Flux2KleinInpaintPipeline", "flux-dev": "FluxInpaintPipeline"}.get(
        model.name, "ZImageInpaintPipeline"
    )
    pipe = patched(monkeypatch, model, kind, **({"is_distilled": False} if model.name == "flux2-base" else {}))
    with torch.no_grad():
        want = pipe(
            prompt=list(PROMPTS), mask_image=mask, output_type="pt" if flux else "latent", **SMALL, **asked
        ).images
    got = model.draw(mask=mask, options=canvax.Options(progress=False, mask_blend="renoised"), **asked)
    if flux:
        assert_near(np.asarray(model.ours.decode(jnp.asarray(got.latents))), nhwc(want))
    else:
        assert relative_error(got.latents, nhwc(want)) < 1e-3


@over("z-image")
def test_longer_prompts(model: Model) -> None:
    """Up to 128 tokens, and up to 256, they are of one program; an image is the same whatever stands beside it."""
    usual = {"guidance_scale": 2.0}
    short = model.draw(**usual)
    longer = model.draw(prompt=[PROMPTS[0], "a hen, " * 30], **usual)
    assert longer.compilations > 0
    assert model.draw(prompt=[PROMPTS[0], "a dog, " * 20], **usual).compilations == 0
    assert_near(longer.pixels[0], short.pixels[0], of="the same image beside a shorter prompt")
    with pytest.raises(canvax.InputError) as caught:
        model.draw(prompt=["a hen, " * 90] * 2)
    assert caught.value.argument == "prompt"


@over("z-image", "krea2", "qwen")
def test_small_images_have_short_texts(model: Model) -> None:
    """They are the images of the usual length, which large images have; a program for each length is all there is."""
    ours = model.ours.model
    lengths = [make_request(ours, Call("a fox", height=side, width=side)).lengths for side in (128, 512, 768, 1024)]
    needed = {len(ours.tokenizers["text_encoder"].ids(prompt)) for prompt in ("a fox", "")}
    least = next(length for length in (32, 64) if length >= max(needed))
    assert lengths == [(least,), (least,), (128,), (128,)]
    text = ours.networks.text.without_short()
    usual = replace(ours, networks=replace(ours.networks, text=text))
    pipe = canvax.Pipeline(usual, replace(model.ours.programs, _compiled={}), model.ours.params)
    asked: dict[str, Any] = {"prompt": ["a fox", "hen"], "guidance_scale": 2.0, "negative_prompt": ["", "red"]}
    short, long = model.draw(**asked), model.draw(pipe, **asked)
    assert long.compilations > 0
    assert_near(short.pixels, long.pixels, of="the usual length")
    assert_other(model.draw(**asked | {"prompt": ["fox", "a hen"]}).pixels, long.pixels)


@over("z-image")
def test_short_programs_are_compiled_ahead(model: Model) -> None:
    pipe = canvax.Pipeline(model.ours.model, replace(model.ours.programs, _compiled={}), model.ours.params)
    built = pipe.compile(*model.record.size, 2, guidance=False, progress=False)
    assert sorted(build.program for build in built) == ["decoder"] + ["denoiser"] * 3 + ["text encoder"] * 3
    with counting() as counts:
        for words, length in {1: 32, 5: 64, 12: 128}.items():
            prompts = ["a hen, " * words, "a fox"]
            assert make_request(pipe.model, Call(prompts, **SMALL)).lengths == (length,)
            model.draw(pipe, prompt=prompts, guidance_scale=0.0)
    assert counts.compilations == 0


@over("z-image")
def test_every_curve_has_the_shift(model: Model, tmp_path: Path) -> None:
    """Another one is a setting of a call, and tells the base model."""
    scheduler = model.ours.model.scheduler
    for curve in ("simple", "karras", "beta"):
        assert build_table(scheduler, 4, sampler="euler", sigmas=curve).timestep[2] > 600
    table = build_table(scheduler, 4, sampler="euler", settings={"shift": 6})
    even = np.array([1, 0.75, 0.5, 0.25])
    np.testing.assert_allclose(table.timestep, 6000 * even / (1 + 5 * even))
    base = load(build_z_image(tmp_path / "base", shift=6.0)).model.defaults
    assert (base.num_inference_steps, base.guidance_scale) == (50, 4)


@over("z-image")
def test_the_networks_are_functions_of_arrays(model: Model) -> None:
    ours = model.ours
    conditions = ours.encode(PROMPTS)
    np.testing.assert_array_equal(conditions["length"], [len(ours.tokenizer.ids(prompt)) for prompt in PROMPTS])
    want = model.draw(guidance_scale=2.0, negative_prompt="blurry")
    negatives = ours.encode(["blurry"] * 2)
    got = model.draw(prompt=conditions, negative_prompt=negatives, guidance_scale=2.0)
    np.testing.assert_allclose(got.pixels, want.pixels, atol=1e-5)
    latents = jnp.asarray(model.noise())
    assert ours.denoiser(latents, 500.0, conditions).shape == latents.shape
    with pytest.raises(canvax.CheckpointError):
        _ = ours.model.unet


@over("z-image", "flux2", "flux3-base", "krea2", "qwen")
def test_the_loop_is_a_function_of_arrays(model: Model) -> None:
    """Packed latents, padded texts and the shift of the size are those of the pipeline."""
    asked = {"num_inference_steps": 3, "seed": 5, **SMALL}
    want = model.ours([*PROMPTS], **asked, progress=False)
    got = canvax.rollout(model.ours, model.ours.params, *model.ours.start([*PROMPTS], **asked))
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


@over("z-image")
def test_prompts_name_weights_of_the_transformer(model: Model, tmp_path: Path) -> None:
    """In place of those of a UNet: of merged adapters, of those beside the weights, and of a server's."""
    pipe = model.loaded()
    model.lora(tmp_path / "style.safetensors", "peft")
    pipe.adapters.folder = tmp_path
    for tag in ("<lora:style:1:0.5>", "<lora:style:unet=0.5>"):
        with pipe.adapters._named_in(tag):
            assert pipe.adapters["style"].weights == {"transformer": 0.5}
        cached = AdapterCache(pipe.model, pipe.mesh, AdapterSettings(tmp_path))
        assert [weights["transformer"] for weights in cached.wanted(tag, {})[1].values()] == [0.5]
    pipe.adapters.remove()
    pipe.adapters.beside(rank=4)
    _, shares = shares_of(pipe.adapters, tag, None, 1, as_set=True)
    assert shares is not None
    np.testing.assert_array_equal(shares.weights["transformer"], [[0.5, 0, 0, 0]])


# What FLUX.2 and FLUX.3 have: they edit.


@pytest.mark.parametrize("references", [ONE, TWO], ids=["one", "two"])
@over("flux2", "flux3", "qwen", "qwen-edit")
def test_editing(model: Model, references: list[Any]) -> None:
    """References of sizes that are no multiples, of an image of another size."""
    asked: dict[str, Any] = {"num_inference_steps": 4, **model.small}
    want = model.reference(num_inference_steps=4, image=references)
    assert_near(model.draw(image=references, **asked).pixels, want)
    assert_other(model.draw(**asked).pixels, want)
    if model.name != "flux3" and len(references) > 1:
        assert_other(model.draw(image=references[::-1], **asked).pixels, want, 50)
    if model.name in ("qwen", "qwen-edit"):
        assert_other(model.draw(image=references, prompt=[*model.record.prompts[::-1]], **asked).pixels, want)


@over(slow=["flux2-base", "flux3-base"])
def test_guided_editing(model: Model) -> None:
    """FLUX.2's at the size of the first reference."""
    first, asked = model.name == "flux2-base", {"num_inference_steps": 3, "guidance_scale": 4.0, "image": TWO}
    start = model.noise(160, 208) if first else model.noise()
    size: dict[str, Any] = {"height": None, "width": None} if first else SMALL
    want = model.reference(latents=start, **asked, **size)
    drawn = {**asked, "latents": start, **size}
    assert_near(model.draw(**drawn).pixels, want)
    assert_other(model.draw(**drawn | {"image": ONE}).pixels, want)


@over("qwen", "qwen-edit")
def test_edited_images_are_the_same_alone_and_in_a_batch(model: Model) -> None:
    """Also in a batch with a prompt of another length. References that are encoded ahead are used."""
    model.ours.compile(*model.record.size, 2, references=[(image.height, image.width) for image in TWO], progress=False)
    asked: dict[str, Any] = {"image": TWO, "num_inference_steps": 2, "options": QUIET, **model.small}
    prompts = ["a fox", "a hen on a hill"]
    both = model.ours(prompts, seed=[1, 2], **asked)
    assert both.compilations == 0
    for prompt, seed, got in zip(prompts, (1, 2), both.pixels, strict=True):
        assert_near(model.ours(prompt, seed=seed, **asked).pixels[0], got, 100, of=f"{prompt} alone")


@over("flux2")
def test_a_large_reference(model: Model) -> None:
    """One of more than a million pixels is made smaller, and gives the size of the image."""
    large = picture(1210, 1010)
    request = make_request(model.ours.model, Call("a fox", image=large))
    assert request.references is not None
    assert request.references.sizes == ((request.height, request.width),) == ((1120, 928),)
    processor = model.theirs.image_processor
    small = processor._resize_and_crop(processor._resize_to_target_area(large), 928, 1120)
    np.testing.assert_array_equal(np.asarray(request.references.images[0][0]), np.asarray(small))
    assert request.references.fingerprints == [fingerprint(large)]  # which the user can compute, too


@over("flux2")
def test_the_shift_follows_the_size_and_the_steps(model: Model) -> None:
    """Also of large images, and with every curve; ``mu`` and ``shift`` are settings of a call."""
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    ours = model.ours.model
    for tokens, steps in ((4096, 4), (4096, 50), (1024, 4), (8192, 4)):
        assert ours.family.mu is not None
        mu = ours.family.mu(tokens, steps)
        assert mu == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-9)
        want = np.exp(mu) / (np.exp(mu) + 1 / np.array([1, 0.75, 0.5, 0.25]) - 1)
        for sampler in (None, "euler", "DPM++ 2M", "unipc"):
            table = build_table(ours.scheduler, 4, sampler=sampler, settings={"mu": mu})
            np.testing.assert_allclose(table.timestep, 1000 * want, atol=1)
    usual = model.draw(sampler="euler")
    mu = compute_empirical_mu(HEIGHT * WIDTH // 256, 2)
    same = model.draw(sampler="euler", options=None, sampler_settings=[f"mu={mu}"], progress=False)
    np.testing.assert_array_equal(same.latents, usual.latents)
    assert_other(
        model.draw(sampler="euler", options=None, sampler_settings=["shift=1"], progress=False).pixels, usual.pixels
    )


@over("flux2")
def test_an_image_to_begin_from(model: Model) -> None:
    """As the loop of the reference, from a noisy image, without a reference."""
    image, start = picture(HEIGHT, WIDTH), model.noise()
    mean = model.ours.encode_image(image)
    got = model.draw(image=image, strength=0.5, num_inference_steps=4, sampler="euler")
    request = make_request(model.ours.model, Call("a fox", image=image, strength=0.5))
    assert request.references is None
    mu = model.ours.model.family.mu(HEIGHT * WIDTH // 256, 4)  # pyright: ignore[reportOptionalCall]
    table = build_table(model.ours.model.scheduler, 4, sampler="euler", settings={"mu": mu})
    x, conditions = (1 - table.std[2]) * np.asarray(mean) + table.std[2] * start, model.ours.encode(PROMPTS)
    for row in (2, 3):
        velocity = np.asarray(model.ours.denoiser(jnp.asarray(x, jnp.float32), table.timestep[row], conditions))
        x = x + ([*table.std, 0.0][row + 1] - table.std[row]) * velocity
    assert relative_error(got.latents, x) < 1e-4


@over(slow=["flux2"])
def test_programs_for_references_are_made_ahead(model: Model) -> None:
    """Of their sizes, before there are images; a server's sample has the programs of a request."""
    ours, images = model.ours, [picture(165, 215), picture(HEIGHT, WIDTH, 2.0)]
    sizes = [(165, 215), (HEIGHT, WIDTH)]
    ours.compile(HEIGHT, WIDTH, 2, references=sizes, progress=False)
    programs = ours.memory(HEIGHT, WIDTH, 2, references=sizes).programs
    assert programs["denoiser"] > ours.memory(HEIGHT, WIDTH, 2).programs["denoiser"]
    assert programs["image encoder"] > 0
    assert model.draw(image=images, **SMALL).compilations == 0
    asked = JobRequest("a hen", width=WIDTH, height=HEIGHT, image=images[0], references=(images[1],))
    made, checked = sample("klein", ours.model, WIDTH, HEIGHT, references=2).group, check(asked, "klein", ours.model)
    assert made == checked.group
    assert [hint.argument for hint in checked.hints] == ["image"]  # which is cut, unlike the other
    for pipe, wrong in ((ours, 11), (ours, [(8, 200)]), (ours, [(48,)]), (ours, -1), (canvax.load("emoji"), 1)):
        with pytest.raises(canvax.InputError) as caught:
            pipe.compile(HEIGHT, WIDTH, references=wrong)
        assert caught.value.argument == "references"


@pytest.mark.parametrize(("argument", "changes"), [
    ("scheduler", {"scheduler": {"_class_name": "EulerDiscreteScheduler"}}),
    ("scheduler", {"scheduler": {"_class_name": "UniPCMultistepScheduler", "prediction_type": "v_prediction"}}),
    ("prediction_type", {"prediction_type": "epsilon"}),
])  # fmt: skip
@over("flux2")
def test_a_flow_model_takes_no_other_schedule(model: Model, argument: str, changes: dict[str, Any]) -> None:
    with pytest.raises(canvax.InputError) as caught:
        canvax.load(model.folder, **changes)
    assert caught.value.argument == argument
    flow = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    assert canvax.load(model.folder, scheduler=flow).model.scheduler.schedule.is_flow


@pytest.mark.parametrize(("model", "changes"), [
    ("flux2", {
        "model_index.json": {"scheduler": ["diffusers", "EulerDiscreteScheduler"]},
        "scheduler/scheduler_config.json": {"_class_name": "EulerDiscreteScheduler"},
    }),
    ("krea2", {"model_index.json": {"text_encoder_select_layers": [1, 3, 6]}}),
    ("krea2", {"model_index.json": {"text_encoder_select_layers": [1, 3]}}),
    ("krea2", {"model_index.json": {"patch_size": 1}}),
    ("krea2", {"transformer/config.json": {"text_hidden_dim": 64}}),
    ("krea2", {"vae/config.json": {"z_dim": 8, "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8}}),
], indirect=["model"])  # fmt: skip
def test_what_does_not_fit(model: Model, tmp_path: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Parts for other parts, and the scheduler of a diffusion model."""
    folder = shutil.copytree(model.folder, tmp_path / "model")
    for name, changed in changes.items():
        config = json.loads((folder / name).read_text()) if name != "scheduler/scheduler_config.json" else {}
        (folder / name).write_text(json.dumps(config | changed))
    with pytest.raises(canvax.CheckpointError):
        canvax.load(folder, mesh=model.ours.mesh)


def test_a_checkpoint_that_reads_the_guidance_scale(tmp_path: Path) -> None:
    """As FLUX.2 dev does."""
    with pytest.raises(canvax.CheckpointError):
        canvax.load(build_flux2(tmp_path, guidance_embeds=True))


@over("flux2")
def test_a_lora_for_a_wider_stack_is_refused(model: Model, tmp_path: Path) -> None:
    factors = {"single_blocks.1.linear1": (np.ones((320, 2), np.float32), np.ones((2, 32), np.float32))}
    path = write_factors(tmp_path / "wide.safetensors", "comfy", factors)
    with pytest.raises(canvax.CheckpointError):
        model.ours.adapters.load("wide", path)


@over(slow=["flux2"])
def test_lines_of_a_prompt_file_read_their_images_alone(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lines with the same settings and other images, in ``generate`` and in ``batch``."""
    monkeypatch.chdir(tmp_path)
    for name, side in (("a.png", 48), ("b.png", 64)):
        picture(side, 48).save(name)
    lines = [{"prompt": PROMPTS[0], "image": name, "seed": 1} for name in ("a.png", "b.png")]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(canvax, "load", lambda *_, **__: model.ours)
    shared = ["--model", str(model.folder), "--steps", "2", "--height", "48", "--width", "48", "--quiet", "-b", "2"]
    assert main(["generate", "--prompt-file", "rows.jsonl", *shared, "-o", "drawn"]) == 0
    assert main(["batch", "rows.jsonl", *shared, "-o", "rows"]) == 0
    drawn, rows = ([Image.open(path) for path in sorted(Path(name).glob("*.png"))] for name in ("drawn", "rows"))
    for line, *images in zip(lines, drawn, rows, strict=True):
        (alone,) = model.ours(line["prompt"], image=line["image"], seed=1, num_inference_steps=2, height=48, width=48)
        for got in images:
            np.testing.assert_allclose(np.asarray(got, np.int16), np.asarray(alone, np.int16), atol=1)


@over(slow=["flux2", "qwen"])
def test_references_on_the_command_line(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two, whose sides are no multiples; ``info`` prints the command, which makes the image again."""
    monkeypatch.chdir(tmp_path)
    picture(53, 85).save("one.png")
    picture(49, 80, 2.0).save("two.png")
    monkeypatch.setattr(canvax, "load", lambda *_, **__: model.ours)
    shared = ["--model", str(model.folder), "-q"]
    words = ["generate", "a fox", "--image", "one.png", "--reference", "two.png", "-s", "3", "--steps", "1", *shared]
    assert main([*words, "-o", "made.png"]) == 0
    with Image.open("made.png") as image:
        made = np.asarray(image)
    assert made.shape == ((48, 80, 3) if model.name == "flux2" else (96, 160, 4))
    capsys.readouterr()
    assert main(["info", "made.png", "--json"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert "--image IMAGE1" in command
    assert "--reference IMAGE2" in command
    assert main(["generate", "--from-image", "made.png", "--image", "one.png", "-o", "x.png", *shared]) == 2
    again = shlex.split(command.replace("IMAGE1", "one.png").replace("IMAGE2", "two.png"))[1:]
    assert main([*again, *shared, "-o", "again.png"]) == 0
    with Image.open("again.png") as image:
        np.testing.assert_array_equal(np.asarray(image), made)
    assert main(["generate", "a fox", "--image", "one.png", "--reference", "two.png", "--model", "emoji", "-q"]) == 2


@pytest.mark.parametrize(("model", "sampler", "count"), [
    ("flux3", "heun", 1), ("flux3", "euler", 0), ("flux3", None, 0), ("flux3-base", "heun", 0),
], indirect=["model"])  # fmt: skip
def test_samplers_of_a_flow_map(model: Model, sampler: str | None, count: int) -> None:
    """It is distilled for the steps of Euler: others are warned of, for that model alone."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.draw(prompt="a fox", latents=None, sampler=sampler, guidance_scale=1.0)
    arguments = [one.message.argument for one in caught if isinstance(one.message, canvax.HintWarning)]
    assert arguments.count("sampler") == count


@over("flux3")
def test_a_run_in_two_parts(model: Model) -> None:
    """The last step of the first part leads to the first time of the second."""
    asked = {"prompt": "a fox", "latents": model.noise()[:1], "num_inference_steps": 4}
    whole = model.draw(**asked)
    first = model.draw(**asked, options=replace(QUIET, denoising_end=0.1))
    second = model.draw(**asked | {"latents": first.latents}, options=replace(QUIET, denoising_start=0.1))
    np.testing.assert_allclose(second.pixels, whole.pixels, atol=1e-4)


@over("flux3", "anima")
def test_from_an_image_and_inside_a_mask(model: Model) -> None:
    """Where an image has a strength or a mask, the run begins from it."""
    image, mask = ONE[0].resize((WIDTH, HEIGHT)), half_mask(WIDTH // 2)
    asked: dict[str, Any] = {"image": image, "num_inference_steps": 4, "seed": 1, "options": QUIET}
    near, far = (model.ours("a fox", strength=strength, **asked).latents for strength in (0.3, 0.9))
    start = model.ours("a fox", strength=0.3, **{**asked, "seed": 2}).latents
    assert np.abs(near - start).mean() < np.abs(far - start).mean()
    kept = model.ours("a fox", strength=0.9, mask=mask, **asked).pixels[0]
    np.testing.assert_allclose(kept[:, : WIDTH // 2 - 16], np.asarray(image)[:, : WIDTH // 2 - 16] / 255, atol=0.01)


def test_sums_of_anima_that_exceed_float16() -> None:
    """Its residual stream is float32 there."""
    cfg = CosmosConfig(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=3,
                       text_embed_dim=24, adaln_lora_dim=8)  # fmt: skip
    p, rng = init_params(cosmos_spec(cfg), 0), np.random.default_rng(0)
    x, text = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 16, 16), (1, 8, 24)))
    for block in p["transformer_blocks"].values():
        block["ff"]["net"]["2"]["weight"] *= 1e4
    p["patch_embed"]["proj"]["weight"] *= 6e4 / jnp.abs(x @ p["patch_embed"]["proj"]["weight"][:16]).max()
    rest = jnp.array([700.0]), positions(16, jnp.array([4]), cfg)
    wanted, got = (
        cosmos(jax.tree.map(lambda a, dtype=dtype: a.astype(dtype), p), x.astype(dtype), rest[0], text.astype(dtype),
               rest[1], cfg)
        for dtype in (jnp.float32, jnp.float16)
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=0.05)


@over("anima")
def test_image_to_image_of_anima(model: Model) -> None:
    """The reference's blocks, which take the mean of what the VAE encodes."""
    image, asked = picture(), {"strength": 0.5, "num_inference_steps": 6, "guidance_scale": 1.5}
    want = model.reference(image=image, **asked)
    assert_near(model.draw(image=image, **asked).pixels, want)
    assert_other(model.draw(image=image, **asked | {"strength": 0.9}).pixels, want)


@pytest.mark.parametrize(("down", "up"), [
    ("text_conditioner.{}.lora_A.weight", "text_conditioner.{}.lora_B.weight"),
    ("diffusion_model.llm_adapter.{}.lora_A.weight", "diffusion_model.llm_adapter.{}.lora_B.weight"),
    ("lora_unet_llm_adapter_{}.lora_down.weight", "lora_unet_llm_adapter_{}.lora_up.weight"),
])  # fmt: skip
@over("anima")
def test_lora_of_the_adapter_of_texts(model: Model, tmp_path: Path, down: str, up: str) -> None:
    """It is a part of the transformer in files of other programs."""
    changed, rng, arrays = model.loaded(), np.random.default_rng(5), Arrays()
    for layer in ("blocks.0.cross_attn.v_proj", "blocks.1.mlp.2", "out_proj"):
        *path, last = layer.split(".")
        place: Any = changed.params["text_conditioner"]
        for step in path:
            place = place[step]
        inner, outer = place[last]["weight"].shape
        pair = 0.3 * rng.standard_normal((2, inner), np.float32), rng.standard_normal((outer, 2), np.float32)
        place[last]["weight"] = place[last]["weight"] + (pair[1] @ pair[0]).T
        name = layer.replace(".", "_") if "lora_unet" in down else layer
        arrays |= {down.format(name): pair[0], up.format(name): pair[1]}
    want, asked = model.draw(changed, guidance_scale=1.0).pixels, {"guidance_scale": 1.0}
    assert_other(model.draw(**asked).pixels, want)
    pipe = model.loaded()
    if beside := "llm_adapter." in down:
        pipe.adapters.beside(rank=2)
    pipe.adapters.load("style", write(tmp_path / "style.safetensors", arrays), beside=beside)
    assert_near(model.draw(pipe, **asked).pixels, want)


@over("flux-dev")
def test_lora_of_xlabs(model: Model, tmp_path: Path) -> None:
    """Its layers are those of the attention of double blocks."""
    named = {"qkv_lora1": "img_attn.qkv", "qkv_lora2": "txt_attn.qkv", "proj_lora1": "img_attn.proj"}
    factors = model.record.authors(model.record.factors())
    comfy = {f"double_blocks.0.{name}": factors[f"double_blocks.0.{name}"] for name in named.values()}
    arrays = {
        f"double_blocks.0.processor.{ours}.{role}.weight": factors[f"double_blocks.0.{theirs}"][role == "down"]
        for ours, theirs in named.items() for role in ("up", "down")
    }  # fmt: skip
    specs = {"transformer": model.ours.model.networks.denoiser.spec}
    one, other = (
        read_adapter(path, specs).parts
        for path in (
            write(tmp_path / "x.safetensors", arrays),
            write_factors(tmp_path / "c.safetensors", "comfy", comfy),
        )
    )
    assert one.keys() == other.keys()
    assert len(one) == 7
    for key, part in one.items():
        weight = np.zeros(dict(flatten(specs["transformer"]))[key[1]].checkpoint_shapes[0], np.float32)
        np.testing.assert_array_equal(change(weight, part), change(weight, other[key]))


# What FLUX.1 has: an image that it edits, and one that it fills.


@over("flux-kontext")
def test_editing_by_kontext(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gets the size of the list with the nearest proportions, larger or smaller."""
    sizes = ((48, 96), (96, 48), (64, 80))
    monkeypatch.setattr("canvax.models.flux.REFERENCE_SIZES", sizes)
    theirs = "diffusers.pipelines.flux.pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS"
    monkeypatch.setattr(theirs, [size[::-1] for size in sizes])
    asked = {"num_inference_steps": 4, "guidance_scale": 2.0}
    for image in (picture(165, 215), picture(45, 20, 2.0)):
        want = model.reference(image=image, **asked)
        assert_near(model.draw(image=image, **SMALL, **asked).pixels, want)
        assert_other(model.draw(**asked).pixels, want)
    request = make_request(model.ours.model, Call("a fox", image=picture(165, 215)))
    assert (request.height, request.width) == (64, 80)


def test_sizes_of_references_of_kontext() -> None:
    """Those of diffusers, of which a square is one."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    assert sorted(REFERENCE_SIZES) == sorted((tall, wide) for wide, tall in PREFERRED_KONTEXT_RESOLUTIONS)


@over("flux-fill")
def test_filling(model: Model) -> None:
    """The masked image and all pixels of the mask, whose edges are inside of latents."""
    corner = np.zeros((HEIGHT, WIDTH), np.uint8)
    corner[19:, 43:] = 255
    image, mask = picture(), Image.fromarray(corner)
    asked = {"num_inference_steps": 4, "guidance_scale": 30.0, "image": image}
    want = model.reference(mask_image=mask, **asked)
    got = model.draw(mask=mask, **asked)
    assert_near(np.asarray(model.ours.decode(jnp.asarray(got.latents))), want)
    assert_other(np.asarray(model.ours.decode(jnp.asarray(model.draw(mask=half_mask(40), **asked).latents))), want, 50)
    np.testing.assert_allclose(got.pixels[0][:, :40], np.asarray(image)[:, :40] / 255, atol=0.01)
    pipe = model.loaded()
    pipe.compile(HEIGHT, WIDTH, 2, progress=False)
    assert (
        model.draw(pipe, mask=mask, **asked).compilations == model.draw(pipe, num_inference_steps=2).compilations == 0
    )


@over("chroma")
def test_padding_of_chroma(model: Model) -> None:
    """One token of it is read, whatever stands beside the prompt."""
    alone = model.draw(prompt="a fox", latents=model.noise()[:1], num_inference_steps=2)
    both = model.draw(num_inference_steps=2)
    assert_near(alone.pixels[0], both.pixels[0], of="the image beside a longer prompt")


# What Qwen-Image 1 has: a schedule with an end of its own, and its LoRAs for few steps.


@pytest.mark.parametrize("masked", [False, True])
@over("qwen-1")
def test_image_to_image_of_qwen_image_1(model: Model, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's pipelines, the second of which puts the noisy image back after each step."""
    kind = "QwenImageInpaintPipeline" if masked else "QwenImageImg2ImgPipeline"
    pipe, noise = getattr(diffusers, kind)(**model.theirs.components), model.noise()
    pipe.set_progress_bar_config(disable=True)
    given_noise(monkeypatch, pipe, np.moveaxis(noise, -1, 1)[..., None])  # with an axis of time
    asked = {"image": picture(), "strength": 0.5, "num_inference_steps": 6, "negative_prompt": ["blurry"] * 2}
    more: dict[str, Any] = {"mask_image": half_mask(48)} if masked else {}
    prompts, size = [*model.record.prompts], {"height": HEIGHT, "width": WIDTH}
    want = pipe(prompts, true_cfg_scale=2.0, output_type="np", **asked, **more, **size).images
    more = {"mask": half_mask(48), "options": canvax.Options(progress=False, mask_blend="renoised")} if masked else {}
    got = model.draw(guidance_scale=2.0, **asked, **more)
    assert_near(np.asarray(model.ours.decode(jnp.asarray(got.latents))), want)
    assert_other(model.draw(guidance_scale=2.0, **asked | {"strength": 0.9}, **more).pixels, want)


@over("qwen-1")
def test_made_ahead_with_its_guidance(model: Model) -> None:
    pipe = model.loaded()
    pipe.compile(HEIGHT, WIDTH, 2, progress=False)
    assert model.draw(pipe, guidance_scale=2.0).compilations == 0


@over("qwen-1")
def test_lora_for_few_steps(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LightX2V's, whose schedule is suggested: the same shift for all sizes, to the end. ``info`` has the flags."""
    path, arrays, theirs = tmp_path / "Qwen-Image-Lightning-4steps-V1.0-bf16.safetensors", Arrays(), model.opened()
    for layer, (up, down) in model.record.factors().items():
        arrays |= {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": down, f"{layer}.alpha": np.float32(1)}
        with torch.no_grad():
            theirs.transformer.get_submodule(layer).weight.add_(torch.from_numpy(up @ down / 2))
    pipe = model.loaded()
    suggested = pipe.adapters.load("fast", write(path, arrays)).suggested
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--set shift=3 --set shift_terminal=0 --steps 4" in shown
    assert "for           Qwen-Image 1" in shown
    config = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
    theirs.scheduler = type(theirs.scheduler).from_config(theirs.scheduler.config, **config)
    want = model.reference(pipe=theirs, num_inference_steps=4)
    assert_near(model.draw(pipe, **suggested).pixels, want)
    assert_other(model.draw(pipe, **suggested | {"sampler_settings": ()}).pixels, want)


# What Krea 2 alone has.


@pytest.mark.parametrize("masked", [False, True])
@over("krea2")
def test_from_half_noise(model: Model, masked: bool) -> None:
    """The reference's loop from half noise, and under a mask with the noisy image put back after each step."""
    vae, steps, sigmas = model.theirs.vae, 6, [0.5, 2 / 6, 1 / 6]
    mean, deviation = (np.float32(vae.config[name]) for name in ("latents_mean", "latents_std"))
    pixels = nchw(np.asarray(picture(), np.float32)[None] / 127.5 - 1)[:, :, None]
    with torch.no_grad():
        clean = (nhwc(vae.encode(pixels).latent_dist.mode()[:, :, 0]) - mean) / deviation
    mu, noise = model.ours.model.scheduler.schedule.mu_of(15), model.noise()
    times = [float(np.exp(mu) / (np.exp(mu) + 1 / sigma - 1)) for sigma in sigmas] + [0.0]
    keep = 1 - np.float32(np.asarray(half_mask(48))[::8, ::8, None] / 255)

    def mixed(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        known = packed((1 - times[step + 1]) * clean + times[step + 1] * noise)
        kept = packed(np.broadcast_to(keep, noise.shape))
        return {"latents": kept * known + (1 - kept) * values["latents"]}

    asked = {"guidance_scale": 1.7, "negative_prompt": [*model.record.negatives]}
    start, extra = (1 - times[0]) * clean + times[0] * noise, {"callback_on_step_end": mixed} if masked else {}
    want = model.reference(latents=start, sigmas=sigmas, **asked, **extra)
    more = {"mask": half_mask(48), "options": canvax.Options(progress=False, mask_blend="renoised")} if masked else {}
    got = model.draw(image=picture(), strength=0.5, num_inference_steps=steps, **SMALL, **asked, **more)
    assert_near(np.asarray(model.ours.decode(jnp.asarray(got.latents))), want)


@over(slow=["krea2"])
def test_long_prompts(model: Model) -> None:
    """As many tokens as in the reference; whatever its bucket, an image is the same."""
    long = "the fox and the hen, " * 60
    while len(model.ours.tokenizer.ids(long)) > DROPPED + 512:
        long = long[:-1]
    asked = {"num_inference_steps": 2, "guidance_scale": 0.0}
    assert_near(model.draw(prompt=[PROMPTS[0], long], **asked).pixels, model.reference([PROMPTS[0], long], **asked))
    with pytest.raises(canvax.InputError) as caught:
        model.draw(prompt=[PROMPTS[0], long + ", a dog"])
    assert caught.value.argument == "prompt"
