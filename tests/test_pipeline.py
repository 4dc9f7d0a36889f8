"""The pipeline with the bundled model: nothing recompiles, the same picture anywhere, clear errors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.call import HIRES_STRENGTHS, Call
from canvax.cli.again import again
from canvax.compile.kinds import DENOISERS, Kinds
from canvax.compile.monitor import compilations
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.checks import default_dtype
from canvax.pipelines.hints import hints
from canvax.pipelines.request import make_request
from canvax.samplers import build_table, from_scheduler_config
from canvax.weights.location import BUNDLED
from tests.support.bundled import LATENTS
from tests.support.drawing import one_device
from tests.support.refusals import refused

QUIET = canvax.Options(progress=False)
STEPS = 4
PROMPTS = ["a cat", "a dog", "a red apple", "a tree"]
"""Batches of one and of four are all that most tests here need to have compiled."""


def draw(pipe: canvax.Pipeline, *arguments: Any, **changes: Any) -> canvax.Result:
    return pipe(*arguments, **{"num_inference_steps": STEPS, "options": QUIET} | changes)


def test_result(emoji: canvax.Pipeline) -> None:
    result = draw(emoji, ["a cat", "a pear"], seed=5, num_images_per_prompt=2)
    assert [image.size for image in result.images] == [(64, 64)] * 4
    assert result.pixels.shape == (4, 64, 64, 3)
    assert result.latents.shape == (4, *LATENTS)
    assert result.latents.dtype == np.float32
    assert result.grid().size == (128, 128)
    assert [meta["seed"] for meta in result.metadata] == [5, 6, 7, 8]
    assert [meta["prompt"] for meta in result.metadata] == ["a cat", "a cat", "a pear", "a pear"]
    assert result.timings.keys() == {"compile", "encode", "denoise", "decode", "step", "first_step", "total"}


def test_metadata_is_this_and_nothing_else(emoji: canvax.Pipeline) -> None:
    options = dataclasses.replace(QUIET, clip_skip=1)
    (got,) = draw(emoji, "a cat", "red", seed=5, guidance_scale=3, sampler="Euler a", options=options).metadata
    assert got == {
        "prompt": "a cat",
        "negative_prompt": "red",
        "seed": 5,
        "height": 64,
        "width": 64,
        "num_inference_steps": STEPS,
        "guidance_scale": 3.0,
        "sampler": "euler_a",
        "sampler_label": "Euler a",
        "model": "emoji",
        "revision": None,
        "dtype": "float32",
        "noise": "philox",
        "canvax": canvax.__version__,
        "options": {"clip_skip": 1},
    }


def test_metadata_names_the_weights(emoji: canvax.Pipeline) -> None:
    files = dataclasses.replace(emoji.model.files, variant="fp16", revision="0a1b")
    model = dataclasses.replace(emoji.model, files=files, dtype="bfloat16")
    (usual,) = draw(emoji, "a cat", seed=1).metadata
    (got,) = draw(dataclasses.replace(emoji, model=model), "a cat", seed=1).metadata
    weights = {"variant": "fp16", "revision": "0a1b", "dtype": "bfloat16"}
    assert got == usual | weights


def test_nothing_recompiles(emoji: canvax.Pipeline) -> None:
    draw(emoji, "a cat", seed=1)
    before = compilations()
    draw(emoji, "a dog", "yellow", seed=2)
    for steps in (3, 25):
        draw(emoji, "a dog", num_inference_steps=steps)
    samplers = ["DDIM", "DDPM", "PNDM", "Euler", "Euler a", "DPM++ 2M", "DPM++ 2M Karras", "Euler Karras"]
    for sampler in samplers:
        draw(emoji, "a dog", sampler=sampler, num_inference_steps=4)
    draw(emoji, "a dog", guidance_scale=9)
    every = canvax.Options(
        eta=0.5, spacing="linspace", guidance_rescale=0.7, clip_skip=1, noise="torch", progress=False
    )
    draw(emoji, "a dog", options=every, seed=2**63)
    draw(emoji, "a dog", latents=initial_noise([3], LATENTS))
    draw(emoji, "a dog", num_inference_steps=130, sampler="DDIM")  # more rows than a window
    assert compilations() == before
    assert draw(emoji, "a dog").compilations == 0


@pytest.mark.parametrize("sampler", ["Euler a", "DDPM", "DPM++ 2M Karras", "DPM++ SDE", "UniPC", "LMS", "PNDM"])
def test_same_picture_alone_and_in_a_batch(emoji: canvax.Pipeline, sampler: str) -> None:
    negatives = ["", "red", "blue", "a cat"]
    among = draw(emoji, PROMPTS, negatives, seed=40, sampler=sampler)
    for i in (0, 2, 3):
        alone = draw(emoji, PROMPTS[i], negatives[i], seed=40 + i, sampler=sampler)
        np.testing.assert_allclose(among.latents[i], alone.latents[0], atol=1e-4)


@pytest.mark.slow
def test_same_picture_on_many_devices(
    emoji: canvax.Pipeline,
) -> None:
    count = 3
    want = draw(emoji, PROMPTS, seed=40, sampler="Euler a")
    pipe = canvax.load("emoji", mesh=make_mesh(jax.devices()[:count]))
    got = draw(pipe, PROMPTS, seed=40, sampler="Euler a")
    assert len(got.images) == 4
    np.testing.assert_allclose(got.latents, want.latents, atol=1e-4)


def test_all_devices_by_default() -> None:
    assert canvax.load("emoji").programs.mesh.shape["data"] == len(jax.devices()) == 8


def test_seed_decides(emoji: canvax.Pipeline) -> None:
    first, again, other = (draw(emoji, "a cat", seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.latents, again.latents)
    assert np.abs(first.latents - other.latents).max() > 0.1
    free = draw(emoji, "a cat")
    np.testing.assert_array_equal(draw(emoji, "a cat", seed=free.metadata[0]["seed"]).latents, free.latents)
    listed = draw(emoji, ["a cat"] * 4, seed=[9, 7, 8, 7])
    np.testing.assert_allclose(listed.latents[1], first.latents[0], atol=1e-4)


def test_rows_one_by_one_draw_what_they_draw_in_one_go(emoji: canvax.Pipeline) -> None:
    """Also with noise in each row: a callback cuts the run into windows of one."""
    whole = draw(emoji, "a cat", seed=7, sampler="DDPM")
    steps = dataclasses.replace(QUIET, callback=lambda step: None)
    np.testing.assert_allclose(
        draw(emoji, "a cat", seed=7, sampler="DDPM", options=steps).latents, whole.latents, atol=1e-5
    )


@pytest.mark.slow
def test_guidance_off_does_half_the_work(emoji: canvax.Pipeline) -> None:
    mesh = emoji.programs.mesh
    assert mesh.size == 1
    flops = []
    for guided in (False, True):
        kinds = Kinds(guided=(guided,))
        program: Any = emoji.programs.program(DENOISERS[guided], emoji.params, (1, *LATENTS), kinds)  # pyright: ignore
        flops.append(program.executable.cost_analysis()["flops"])
    assert 0.45 < flops[0] / flops[1] < 0.55
    plain, negated = (draw(emoji, "a cat", n, seed=1, guidance_scale=1.0) for n in ("", "anything at all"))
    np.testing.assert_array_equal(plain.latents, negated.latents)


@pytest.mark.slow
def test_any_size(emoji: canvax.Pipeline) -> None:
    result = draw(emoji, "a cat", height=72, width=40, seed=1)
    assert result.images[0].size == (40, 72)
    factor = emoji.programs.networks.vae.factor
    assert result.latents.shape == (1, 72 // factor, 40 // factor, LATENTS[-1])


def test_latents_argument(emoji: canvax.Pipeline) -> None:
    want = draw(emoji, "a cat", seed=4)
    got = draw(emoji, "a cat", latents=initial_noise([4], LATENTS), seed=99)
    np.testing.assert_array_equal(got.latents, want.latents)
    assert got.metadata[0]["noise"] == "given"


@pytest.mark.parametrize("sampler", [None, "PLMS", "PNDMScheduler", "DPMSolverMultistepScheduler", "DPM++ 2M Karras"])
@pytest.mark.parametrize(
    "config",
    [
        {"_class_name": "PNDMScheduler"},  # with its Runge-Kutta start, which the plain name leaves out
        {"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3, "use_karras_sigmas": True},
        {"_class_name": "EulerDiscreteScheduler"},
    ],
)
def test_recorded_sampler_draws_the_same(emoji: canvax.Pipeline, config: dict[str, Any], sampler: str | None) -> None:
    checkpoint = dataclasses.replace(emoji.model, scheduler=from_scheduler_config(config))
    recorded, _ = checkpoint.sampler_names(sampler)
    used, again = (build_table(checkpoint.scheduler, 10, sampler=name) for name in (sampler, recorded))
    np.testing.assert_array_equal(used.M, again.M)
    np.testing.assert_array_equal(used.timestep, again.timestep)


def test_what_a_callback_changed_is_recorded(emoji: canvax.Pipeline) -> None:
    """No metadata generates such an image again."""
    for callback in (lambda step: None, lambda step: True, lambda step: {"latents": 0.9 * step.latents}):
        record = draw(emoji, "a cat", options=dataclasses.replace(QUIET, callback=callback)).metadata[0]
        assert bool(again(record).losses) == record.get("steered", False)
    assert record["steered"]


def test_callback_and_cancelling(emoji: canvax.Pipeline) -> None:
    steps: list[canvax.Step] = []

    def stop_after_three(step: canvax.Step) -> bool:
        steps.append(step)
        return len(steps) < 3

    options = dataclasses.replace(QUIET, callback=stop_after_three)
    with pytest.raises(canvax.Cancelled, match="evaluation 3 of 4"):
        draw(emoji, PROMPTS, options=options)
    assert [(step.index, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4)]
    with pytest.raises(canvax.Cancelled, match="evaluation 1 of 4"):
        draw(emoji, "a cat", options=dataclasses.replace(QUIET, callback=lambda step: step.denoised.max() > 1e9))
    assert steps[0].latents.shape == steps[0].denoised.shape == (4, *LATENTS)


def test_options_of_numpy_are_plain(emoji: canvax.Pipeline) -> None:
    options = canvax.Options(
        progress=False,
        clip_skip=np.int64(1),
        guidance_rescale=np.float32(0.5),
        sampler_settings={"timesteps": np.linspace(900, 100, 4)},
    )
    told = draw(emoji, "a cat", num_inference_steps=None, options=options).metadata[0]
    assert json.loads(json.dumps(told))["options"]["clip_skip"] == 1


def test_a_pipeline_is_a_line(emoji: canvax.Pipeline) -> None:
    assert repr(emoji) == "Pipeline('emoji', 64x64, DDIM, 11.7M parameters, float32)"


@pytest.mark.slow
def test_functional_style() -> None:
    pipe, params = canvax.Pipeline.from_pretrained("emoji", mesh=one_device())
    assert params.keys() == {"unet", "vae", "text_encoder"}
    with pytest.raises(canvax.InputError, match="params"):
        draw(pipe, "a cat")
    halved = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params)
    full, half = (draw(pipe, "a cat", seed=1, params=p) for p in (params, halved))
    assert 1e-4 < np.abs(full.pixels - half.pixels).mean() < 0.1


@pytest.mark.parametrize("watched", [True, False])
def test_progress_names_compiling(
    emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """A bar is for a terminal: in a log it is a line for each of its states."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    fresh = dataclasses.replace(emoji.programs, _compiled={}, _building={})
    dataclasses.replace(emoji, programs=fresh)("a cat", num_inference_steps=2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"compiling \(once for each size and batch\):.* denoiser \d+\.\d s", shown.err)
    assert ("2/2" in shown.err) == watched


def test_without_stderr(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(emoji("a cat", num_inference_steps=2)) == 1


def test_a_bad_size_of_the_cache_comes_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "plenty")
    with pytest.raises(canvax.InputError, match="CANVAX_CACHE_SIZE='plenty'"):
        canvax.load("./there-is-no-such-folder")


@pytest.mark.parametrize("said", ['{"guidance_scale": "7"}', '{"hires_strength": 2}', '{"steps": 3}', "[]"])
def test_bad_defaults_of_a_model(said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED["emoji"], folder)
    (folder / "canvax.json").write_text(said)
    with pytest.raises(
        canvax.CheckpointError, match=r"canvax\.json: (not a list of defaults|is not a JSON object)"
    ) as caught:
        canvax.load(folder)
    assert "__init__" not in str(caught.value)


def test_a_second_pass_has_the_model_s_own_strength(emoji: canvax.Pipeline) -> None:
    """It is recorded, since another version of the model may have another."""

    def strength(**options: Any) -> float | None:
        call = Call("a fox", options=canvax.Options(**options))
        return make_request(emoji.model, call).options.hires_strength

    own = emoji.model.defaults.hires_strength
    assert own != HIRES_STRENGTHS["pixel"]
    assert strength(hires=2) == own
    assert strength(hires=2, hires_strength=0.3) == 0.3
    assert strength() is strength(hires=2, hires_method="latent") is None


@pytest.mark.parametrize(
    ("prompt", "things"),
    [
        ("a cat and a dog", 2), ("a cat with a hat", 2), ("🐱 on a 🍕", 2), ("two cats and three dogs", 2),
        ("a red car", 0), ("grinning cat with smiling eyes", 0), ("a face with symbols on mouth", 0),
        ("a snowman in the snow", 0), ("a fox in the style of noto", 0), ("a cat on a white table, fluent flat", 0),
    ],
)  # fmt: skip
def test_a_small_model_draws_one_thing(emoji: canvax.Pipeline, prompt: str, things: int) -> None:
    assert len(emoji.model.concepts.things(prompt)) == things
    told = [hint for hint in hints(emoji.model, make_request(emoji.model, Call(prompt))) if hint.argument == "prompt"]
    assert bool(told) == bool(things)


@pytest.mark.parametrize(("side", "poor"), [(40, True), (48, False), (88, False), (96, True)])
def test_sizes_far_from_those_of_the_training(emoji: canvax.Pipeline, side: int, poor: bool) -> None:
    request = make_request(emoji.model, Call("a cat", height=side, width=side))
    assert any(f"images of {side} x {side}" in str(hint) for hint in hints(emoji.model, request)) == poor


def test_nothing_to_save(emoji: canvax.Pipeline, tmp_path: Path) -> None:
    result = draw(emoji, "a cat", options=canvax.Options(progress=False, denoising_end=0.5))
    with pytest.raises(canvax.InputError, match=r"go on from result\.latents"):
        result.save(tmp_path / "out")
    assert result.images == list(result) == result[:1] == []
    assert result._repr_png_() is dataclasses.replace(result, images=result.latents)._repr_png_() is None  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_saving_over_a_folder(emoji: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert emoji.save(".") == Path(".")
    with pytest.raises(canvax.InputError, match="overwrite=True"):
        emoji.save(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    emoji.save(tmp_path, overwrite=True)
    assert "UNet2DConditionModel" in (tmp_path / "model_index.json").read_text()
    for leaf in ("unet", "vae"):
        assert list((tmp_path / leaf).glob("*.safetensors"))


@pytest.mark.slow
def test_precision_around_a_picture(emoji: canvax.Pipeline) -> None:
    """Another precision is another program, also in a pipeline that has one already."""
    draw(emoji, "a cat")
    with jax.default_matmul_precision("highest"):
        assert draw(emoji, "a cat").compilations > 0
        assert draw(emoji, "a cat").compilations == 0
    assert draw(emoji, "a cat").compilations == 0


def test_settings_for_finding_faults_are_for_the_code_of_the_user(emoji: canvax.Pipeline) -> None:
    want = draw(emoji, "a red apple", seed=1).pixels
    pipe = dataclasses.replace(emoji, programs=dataclasses.replace(emoji.programs, _compiled={}))
    settings = {"jax_disable_jit": True, "jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict",
                "jax_transfer_guard": "disallow"}  # fmt: skip
    before = {name: jax.config.values[name] for name in settings}
    seen: list[canvax.Step] = []
    try:
        for name, value in settings.items():
            jax.config.update(name, value)  # for threads too, where a context would not be
        got = draw(pipe, "a red apple", seed=1, options=dataclasses.replace(QUIET, callback=seen.append)).pixels
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert len(seen) == STEPS


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "training"),
    [
        ("cpu", None, "float32", "float32"),
        ("tpu", None, "bfloat16", "bfloat16"),
        ("gpu", "9.0", "bfloat16", "bfloat16"),
        ("gpu", "8.0", "bfloat16", "bfloat16"),
        ("gpu", "7.5", "float16", "bfloat16"),  # a T4
        ("gpu", "gfx942", "bfloat16", "bfloat16"),  # AMD's
    ],
)
def test_usual_dtype(platform: str, capability: str | None, dtype: str, training: str) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    mesh: Any = SimpleNamespace(devices=np.array([device], dtype=object))
    assert (default_dtype(mesh), default_dtype(mesh, training=True)) == (dtype, training)


def test_parameters_that_do_not_fit(emoji: canvax.Pipeline) -> None:
    """Found before anything is compiled, also where they lie on the devices already."""
    params = emoji.params
    assert params is not None
    unet = dict(params["unet"])
    other = {"weight": unet["conv_in"]["weight"][..., :2], "bias": 1}
    with refused("params"):
        draw(emoji, "a cat", params={**params, "unet": {**unet, "conv_in": other}})
    bias = jax.device_put(np.asarray(unet["conv_in"]["bias"]), unet["conv_in"]["bias"].sharding)
    params = {**params, "unet": {**unet, "conv_in": {**unet["conv_in"], "bias": bias}}}
    draw(emoji, "a cat", params=params)
    bias.delete()  # arrays that have been looked at before
    with pytest.raises((canvax.InputError, RuntimeError), match="deleted"):
        draw(emoji, "a cat", params=params)


def test_numbers_of_numpy(emoji: canvax.Pipeline, tmp_path: Path) -> None:
    result = draw(emoji, "a cat", num_images_per_prompt=np.int64(4), seed=np.array([3, 9, 1, 2]), height=np.int32(64))
    assert [meta["seed"] for meta in result.metadata] == [3, 9, 1, 2]
    assert draw(emoji, "a cat", seed=np.int64(3)).metadata[0]["seed"] == 3
    (tmp_path / "file").write_text("")
    with refused("path"):
        result.save(tmp_path / "file")
