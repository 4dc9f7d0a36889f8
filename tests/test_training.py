"""Training: exact resume, any mesh, gradients on every path, losses by their definitions."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from canvax.cli.terminal import stoppable
from canvax.errors import CanvaxError, CheckpointError, InputError
from canvax.kernels.attention import attention
from canvax.kernels.target import compiling_for
from canvax.models.clip import clip_encoders, text_encoder_spec
from canvax.models.unet import unet_spec
from canvax.models.vae import vae_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten, init_params
from canvax.samplers.schedule import NoiseSchedule, make_betas
from canvax.tokenizers.clip import ClipTokenizer
from canvax.train import diffusion
from canvax.train import session as sessions
from canvax.train.diffusion import denoising_data, denoising_loss, new_denoiser, training_times
from canvax.train.encoding import encode_pictures
from canvax.train.loop import LOG, STATE, Plan, Session, batch_indices, fit, learning_rate, read_log
from canvax.train.objectives import add_noise, loss_weights, target_of
from canvax.train.state import save_state
from canvax.weights.location import BUNDLED
from canvax.weights.safetensors import open_safetensors
from recipes.emoji.autoencoder import decode_latents
from tests.support.refusals import refused
from tests.support.small_checkpoint import TEXT, UNET, VAE

PLAN = Plan(steps=8, batch=4, chunk=2, warmup=2, average=0.9)
SCHEDULE = NoiseSchedule.from_betas(make_betas("scaled_linear", 0.00085, 0.012, 1000), "v_prediction")


def pixels(count: int = 12, size: int = 16) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, size, size, 3), np.uint8)


def one_device() -> Any:
    return make_mesh(jax.devices()[:1])


def toy_loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    """A quadratic whose samples are noisy, so that a wrong key or index shows in the loss."""
    wanted = samples["x"] + 0.1 * jax.random.normal(key, samples["x"].shape)
    apart = p["w"][None] - wanted
    return jnp.square(apart).mean(), {"distance": jnp.abs(apart).mean()}


def toy(folder: Path, plan: Plan = PLAN, mesh: Any = None, **more: Any) -> tuple[Any, bool]:
    data = {"x": np.random.default_rng(1).standard_normal((10, 3), np.float32)}
    where = Session(folder, "toy", mesh or one_device(), **{"save_every": 0, **more})
    return fit({"w": np.zeros(3, np.float32)}, toy_loss, data, 10, plan, where)


def logged(folder: Path) -> list[dict[str, float]]:
    """The lines of a log without what a clock adds."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")}
            for line in read_log(folder / LOG)]  # fmt: skip


# The loop


def test_training_finds_the_minimum(tmp_path: Path) -> None:
    trained, _ = toy(tmp_path, replace(PLAN, steps=400, chunk=20, learning_rate=0.05, weight_decay=0.0))
    wanted = np.random.default_rng(1).standard_normal((10, 3), np.float32).mean(0)
    np.testing.assert_allclose(trained["w"], wanted, atol=0.05)


def test_stop_and_resume_is_bitwise_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, finished = toy(tmp_path / "whole")
    assert finished
    for _ in range(3):
        _, finished = toy(tmp_path / "parts", deadline=time.monotonic())
        assert not finished
    assert capsys.readouterr().err.count("toy: going on from step") == 2
    parts, finished = toy(tmp_path / "parts")
    assert finished
    np.testing.assert_array_equal(whole["w"], parts["w"])
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
    assert (tmp_path / "whole" / STATE).read_bytes() == (tmp_path / "parts" / STATE).read_bytes()


def test_work_after_the_last_state_is_done_again(tmp_path: Path) -> None:
    """A kill between two states leaves a log that is ahead, and perhaps half a line."""
    toy(tmp_path / "whole")
    toy(tmp_path / "parts", deadline=time.monotonic())
    with (tmp_path / "parts" / LOG).open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 99.0}) + '\n{"step": 6, "lo')
    toy(tmp_path / "parts")
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")


def test_a_longer_run_is_as_if_it_had_been_longer_from_the_start(tmp_path: Path) -> None:
    """At a constant learning rate, also with steps that are no multiple of a chunk."""
    plan = replace(PLAN, final=1.0, chunk=3)
    whole, _ = toy(tmp_path / "whole", plan)
    toy(tmp_path / "parts", replace(plan, steps=4))
    parts, finished = toy(tmp_path / "parts", plan)
    assert finished
    np.testing.assert_array_equal(whole["w"], parts["w"])
    assert (tmp_path / "whole" / STATE).read_bytes() == (tmp_path / "parts" / STATE).read_bytes()
    with refused("steps"):
        toy(tmp_path / "parts", replace(plan, steps=7))


def test_weights_and_previews_every_few_steps(tmp_path: Path) -> None:
    """A run that is stopped between them saves the same ones, and its numbers stay the same."""
    saved: list[tuple[int, float]] = []
    previews: list[int] = []
    steps: dict[str, Any] = {
        "save": lambda step, params: saved.append((step, float(params["w"][0]))),
        "save_steps": 3,
        "preview": lambda step, _: previews.append(step),
        "preview_steps": 5,
    }
    plan = replace(PLAN, chunk=3)
    whole, _ = toy(tmp_path / "whole", plan, **steps)
    assert [step for step, _ in saved] == [3, 6]
    assert previews == [5, 8]
    plain, _ = toy(tmp_path / "plain", plan)
    np.testing.assert_array_equal(whole["w"], plain["w"])
    first, saved[:] = saved.copy(), []
    toy(tmp_path / "parts", plan, deadline=time.monotonic(), **steps)
    toy(tmp_path / "parts", plan, **steps)
    assert sorted(set(saved)) == first
    assert (tmp_path / "whole" / STATE).read_bytes() == (tmp_path / "parts" / STATE).read_bytes()


def test_the_first_state_comes_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is killed before it is said to begin again."""

    def kill(step: int, *_: Any) -> None:
        if step == 6:
            raise KeyboardInterrupt

    for seconds in (30.0, 0.0):
        monkeypatch.setattr(sessions, "FIRST_STATE", seconds)
        with pytest.raises(KeyboardInterrupt):
            toy(tmp_path / "run", save_every=300, log=kill)
        assert (tmp_path / "run" / STATE).exists() == (seconds == 0)
    assert capsys.readouterr().err.count("no state") == 1
    assert step_of(tmp_path / "run") == 2


def step_of(folder: Path) -> int:
    """The step of the state in a folder."""
    return next(int(entry.read()[0]) for entry in open_safetensors(folder / STATE) if entry.name == "step")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_effect_after_the_state_is_written(tmp_path: Path, number: int) -> None:
    def send(step: int, *_: Any) -> None:
        if step == 4:
            signal.raise_signal(number)

    with stoppable():
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
        with pytest.raises(KeyboardInterrupt):
            toy(tmp_path / "parts", save_every=300, log=send)
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert step_of(tmp_path / "parts") == 4
    toy(tmp_path / "parts")
    toy(tmp_path / "whole")
    assert (tmp_path / "whole" / STATE).read_bytes() == (tmp_path / "parts" / STATE).read_bytes()


def test_states_are_written_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, each as it was at its step; the last is there when the run ends, and an error is not lost."""
    written: list[int] = []
    running, overlapping, done = threading.Event(), [], threading.Event()

    def slowly(path: Path, state: Any, facts: Any) -> None:
        overlapping.append(running.is_set())
        running.set()
        assert done.wait(60) or int(state.step) < 8
        save_state(path, state, facts)
        written.append(int(state.step))
        assert step_of(tmp_path) == written[-1]
        running.clear()

    monkeypatch.setattr(sessions, "save_state", slowly)
    toy(tmp_path, log=lambda step, *_: done.set() if step == 6 else None)
    assert written == [2, 8]
    assert not any(overlapping)

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(sessions, "save_state", failing)
    with pytest.raises(OSError, match="full"):
        toy(tmp_path / "full")
    monkeypatch.setattr(sessions, "available_bytes", lambda: 0)
    monkeypatch.setattr(sessions, "on_host", lambda _: pytest.fail("there is no room for a copy"))
    monkeypatch.setattr(sessions, "save_state", save_state)
    toy(tmp_path / "small")


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL at random moments until the run is through; losses and state as if nothing had happened."""
    script = Path(__file__).parent / "support" / "training_process.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(script)]
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    rng = np.random.default_rng(2)
    for wait in (*rng.uniform(0, 0.4, 4), None):
        with subprocess.Popen(
            [*command, str(tmp_path / "parts")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            process.stdout.readline()  # the training has begun
            if wait is None:
                assert process.wait() == 0
            else:
                time.sleep(wait)
                process.send_signal(signal.SIGKILL)
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")
    assert (tmp_path / "whole" / STATE).read_bytes() == (tmp_path / "parts" / STATE).read_bytes()


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    toy(tmp_path, deadline=time.monotonic())
    before = (tmp_path / STATE).read_bytes()

    def broken(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return p["w"].sum() * jnp.nan, {"distance": jnp.zeros(())}

    with pytest.raises(CanvaxError, match="loss is nan at step 4"):
        fit({"w": np.zeros(3, np.float32)}, broken, {}, 10, PLAN, Session(tmp_path, "toy", one_device()))
    assert (tmp_path / STATE).read_bytes() == before


def test_parameters_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    """The last update before a state is written is in no loss."""

    def breaks(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        here = p["w"].sum()
        # At zero the slope of the root is infinite, and its value is not.
        return here + jnp.sqrt(0.0 * here), {"distance": jnp.zeros(())}

    session = Session(tmp_path, "toy", one_device(), deadline=time.monotonic())
    with pytest.raises(CanvaxError, match="a parameter is nan at step 1"):
        fit({"w": np.zeros(3, np.float32)}, breaks, {}, 10, replace(PLAN, chunk=1), session)
    assert not (tmp_path / STATE).exists()


def test_another_run_is_refused(tmp_path: Path) -> None:
    """Of another plan, other data, begun with something else, or with other parameters."""
    x = np.zeros((10, 3), np.float32)

    def run(params: Any = None, samples: int = 10, plan: Plan = PLAN, model: str = "one") -> None:
        start = params or {"w": np.zeros(3, np.float32)}
        session = Session(tmp_path, "toy", one_device(), deadline=time.monotonic(), about={"model": model})
        loss = (lambda p, *_: (p["v"].sum(), {})) if params else toy_loss
        fit(start, loss, {"x": x[:samples]}, samples, plan, session)

    run()
    for changes, told in (
        ({"plan": replace(PLAN, batch=2)}, r"batch was 4, now 2"),
        ({"plan": replace(PLAN, steps=10)}, r"steps was 8, now 10"),
        ({"samples": 7}, r"samples was 10, now 7"),
        ({"model": "two"}, "model was one, now two"),
    ):
        with pytest.raises(InputError, match=told):
            run(**changes)
    with pytest.raises(CheckpointError, match="another model"):
        run({"v": np.zeros(3, np.float32)})


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, alive = (tmp_path / f".canvax-{name}.partial" for name in ("left", "alive"))
    for path in (left, alive):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    toy(tmp_path, deadline=time.monotonic())
    assert not left.exists()
    assert alive.exists()  # another process may be writing it


def test_eight_devices_learn_what_one_does(tmp_path: Path) -> None:
    plan = replace(PLAN, batch=8)
    one, _ = toy(tmp_path / "1", plan)
    eight, _ = toy(tmp_path / "8", plan, make_mesh(jax.devices()))
    np.testing.assert_allclose(one["w"], eight["w"], rtol=1e-6)
    with refused("batch"):
        toy(tmp_path / "4", PLAN, make_mesh(jax.devices()))


def test_devices_hold_their_samples_of_a_chunk_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[Any] = []
    real = sessions._compile

    def compiled(*arguments: Any) -> Any:
        program = real(*arguments)
        return lambda state, samples, *more: chunks.append(samples) or program(state, samples, *more)

    monkeypatch.setattr(sessions, "_compile", compiled)
    monkeypatch.setattr(sessions, "RESIDENT", 0)
    plan = replace(PLAN, batch=16, accumulate=2)
    toy(tmp_path / "host", plan, make_mesh(jax.devices()))
    assert len(chunks) == 4
    for chunk in chunks:
        assert [shard.data.shape for shard in chunk["x"].addressable_shards] == [(2, 2, 2, 3)] * 8
    # Small data are on the devices: these get indices, and the numbers are the same.
    monkeypatch.undo()
    monkeypatch.setattr(sessions, "_compile", compiled)
    toy(tmp_path / "devices", plan, make_mesh(jax.devices()))
    for chunk in chunks[4:]:
        assert [shard.data.shape for shard in chunk.addressable_shards] == [(2, 2, 2)] * 8
    assert (tmp_path / "host" / STATE).read_bytes() == (tmp_path / "devices" / STATE).read_bytes()


def test_a_finished_run_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, _ = toy(tmp_path)
    monkeypatch.setattr(sessions, "_compile", lambda *_: pytest.fail("compiled"))
    again, finished = toy(tmp_path)
    assert finished
    np.testing.assert_array_equal(trained["w"], again["w"])


def test_the_log_has_the_speed_of_each_line(tmp_path: Path) -> None:
    toy(tmp_path, replace(PLAN, accumulate=3))
    for line in read_log(tmp_path / LOG):
        assert line["images_per_second"] * line["seconds"] == pytest.approx(PLAN.chunk * PLAN.batch * 3)


def test_a_chunk_of_steps_is_as_its_steps_one_by_one(tmp_path: Path) -> None:
    one, _ = toy(tmp_path / "steps", replace(PLAN, chunk=1))
    chunked, _ = toy(tmp_path / "chunks")
    np.testing.assert_allclose(one["w"], chunked["w"], rtol=1e-6)


def test_minutes_choose_the_steps_once(tmp_path: Path) -> None:
    plan = replace(PLAN, minutes=0.001)
    _, finished = toy(tmp_path, plan)
    assert finished
    steps = read_log(tmp_path / LOG)[-1]["step"]
    assert steps % PLAN.chunk == 0
    _, finished = toy(tmp_path, plan)
    assert finished
    assert read_log(tmp_path / LOG)[-1]["step"] == steps


def test_no_average_gives_the_parameters_themselves(tmp_path: Path) -> None:
    toy(tmp_path / "a", replace(PLAN, average=0.0))
    names = {entry.name for entry in open_safetensors(tmp_path / "a" / STATE)}
    assert "params.w" in names
    assert not any(name.startswith("average") for name in names)


def test_every_sample_once_an_epoch_wherever_one_begins() -> None:
    whole = batch_indices(3, 0, 30, 4, 10).reshape(-1)
    for epoch in range(12):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    np.testing.assert_array_equal(batch_indices(3, 7, 5, 4, 10).reshape(-1), whole[28:48])
    assert (batch_indices(4, 0, 30, 4, 10).reshape(-1) != whole).any()


def test_learning_rate_rises_and_falls() -> None:
    plan = Plan(steps=100, batch=1, learning_rate=2.0, warmup=10, final=0.1)
    rates = np.asarray(learning_rate(jnp.arange(101), jnp.int32(100), plan))
    assert rates[0] == pytest.approx(0.2)
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.1)  # the middle of the cosine
    assert rates[100] == pytest.approx(0.2)
    constant = learning_rate(jnp.arange(101), jnp.int32(100), replace(plan, warmup=0, final=1.0))
    np.testing.assert_allclose(constant, 2.0)


def test_the_warm_up_of_a_short_run_is_short() -> None:
    assert [Plan(steps, 1).warmup for steps in (1, 50, 4000, 5000, 90_000)] == [0, 5, 400, 500, 500]
    assert Plan(50, 1, warmup=20).warmup == 20


# Objectives


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_the_target_gives_back_the_picture(kind: str) -> None:
    """What the sampler makes of a perfect answer is x0: the two sides agree on what a prediction means."""
    from canvax.samplers import build_table, from_scheduler_config

    rng = np.random.default_rng(0)
    x0, noise = rng.standard_normal((2, 1, 4, 4, 3), np.float32)
    config = {"_class_name": "DDIMScheduler", "prediction_type": kind, "clip_sample": False}
    table = build_table(from_scheduler_config(config), 4)
    schedule = from_scheduler_config(config).schedule
    for row in range(4):
        a = np.float32([schedule.alphas_cumprod[int(table.timestep[row])]])
        x = add_noise(x0, noise, jnp.asarray(a))
        answer = target_of(x0, noise, jnp.asarray(a), kind)
        np.testing.assert_allclose(table.p[row] * x + table.q[row] * answer, x0, atol=2e-4)


def test_min_snr_weights_bound_the_weight_of_x0() -> None:
    """Hang et al. 2023, eq. 4: seen as a loss on x0, no timestep counts more than gamma."""
    a = SCHEDULE.alphas_cumprod
    snr = a / (1 - a)
    eps = NoiseSchedule(a, "epsilon")
    np.testing.assert_allclose(loss_weights(eps, 5.0) * snr, np.minimum(snr, 5), rtol=1e-4)
    np.testing.assert_allclose(loss_weights(SCHEDULE, 5.0) * (snr + 1), np.minimum(snr + 1, 5), rtol=1e-4)
    np.testing.assert_array_equal(loss_weights(eps, None), 1)
    zero = NoiseSchedule.from_betas(make_betas("scaled_linear", 0.00085, 0.012, 1000), "v_prediction",
                                    zero_terminal_snr=True)  # fmt: skip
    assert loss_weights(zero, 5.0)[-1] == 1.0  # pure noise is learnt from


def test_images_of_the_class_have_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network that is always 0: the mean over the images, and the weight times that over the class images."""
    monkeypatch.setattr(diffusion, "encode_text", lambda *_, **__: {})
    monkeypatch.setattr(diffusion, "unet", lambda p, x, *_, **__: jnp.zeros_like(x))
    tokenizer = {"text_encoder": ClipTokenizer.from_folder(BUNDLED["emoji"] / "tokenizer")}
    latents = np.random.default_rng(0).standard_normal((4, 1, 8, 8, 4), np.float32)
    samples, shared = denoising_data(tokenizer, latents, [["a"]] * 4, 77)
    samples, shared = jax.tree.map(jnp.asarray, (samples, shared))
    shared |= {"prior": jax.tree.map(lambda leaf: leaf[:3], samples)}

    def loss(weight: float) -> tuple[Any, Any]:
        found = denoising_loss(clip_encoders(TEXT), UNET, SCHEDULE, gamma=None, prior=weight)
        return found({"unet": {}}, samples, shared, jax.random.key(0))

    once, logged = loss(1.0)
    np.testing.assert_allclose(once, 2 * logged["mse"], rtol=1e-6)
    np.testing.assert_allclose(loss(3.0)[0] - once, 2 * (loss(2.0)[0] - once), rtol=1e-5)


# Gradients


@pytest.mark.weekly
def test_gradients_reach_every_parameter() -> None:
    """No path through text encoder and UNet is cut, and computing blocks again changes nothing."""
    params = {"text_encoder": init_params(text_encoder_spec(TEXT), 0), "unet": init_params(unet_spec(UNET), 1)}
    tokenizer = ClipTokenizer.from_folder(BUNDLED["emoji"] / "tokenizer")
    captions = [["a cat", "cat"], ["a dog"], ["a red apple"], ["a lemon"]]
    latents = np.random.default_rng(0).standard_normal((4, 1, 8, 8, 4), np.float32)
    samples, shared = jax.device_put(denoising_data({"text_encoder": tokenizer}, latents, captions, 77))
    plain = None
    for remat in (False, True):
        loss = denoising_loss(clip_encoders(TEXT), UNET, SCHEDULE, remat=remat, empty=0.0)
        gradient = jax.jit(jax.grad(lambda p, loss=loss: loss(p, samples, shared, jax.random.key(0))[0]))(params)
        still = [name for name, leaf in flatten(gradient) if not np.abs(leaf).max() > 0]
        # Keys are compared with queries, so a number added to all of them changes nothing.
        assert [name for name in still if not name.endswith("k_proj.bias")] == []
        if plain is not None:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), gradient, plain)
        plain = gradient


def test_training_times() -> None:
    """One from each part of the distribution, in random order; a focus is a logit-normal distribution."""
    keys = jax.random.split(jax.random.key(3))
    alike = np.asarray(training_times(*keys, 512, 1000))
    assert (np.diff(alike) < 0).any()
    assert np.abs(np.sort(alike) - np.arange(512) / 0.512).max() < 1000 / 512 + 1
    focused = np.asarray(training_times(*keys, 512, 1000, (0.8, 0.9)))
    assert 0 <= focused.min() < focused.max() < 1000
    for deviations, share in ((-2, 0.023), (-1, 0.159), (0, 0.5), (1, 0.841), (2, 0.977)):
        time = 1000 / (1 + math.exp(-(0.8 + 0.9 * deviations)))
        assert abs((focused < time).mean() - share) < 0.005, deviations


def test_gradient_of_attention_in_chunks() -> None:
    """The CPU kernel for long sequences differentiates like the plain one."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1200, 2, 8), np.float32)

    def total(q: Any, k: Any, v: Any) -> Any:
        return jnp.square(attention(q, k, v)).sum()

    with compiling_for("cpu"):
        got = jax.grad(total, (0, 1, 2))(q, k, v)
    with compiling_for("gpu"):  # the plain one
        want = jax.grad(total, (0, 1, 2))(q, k, v)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_gradient_of_attention_in_chunks_keeps_no_score_matrix() -> None:
    """4,096 tokens and 8 heads: the scores alone would be 512 MiB."""
    x = jax.ShapeDtypeStruct((1, 4096, 8, 40), jnp.float32)
    with compiling_for("cpu"):
        compiled = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))).lower(x, x, x).compile()
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < 200 * 2**20


def test_a_new_denoiser_begins_as_a_short_one() -> None:
    """Its residual branches and its output are zero, and training can leave that."""
    params = new_denoiser(TEXT, UNET, 0)
    zeros = {name for name, leaf in flatten(params["unet"]) if name.endswith("weight") and not leaf.any()}
    assert {"conv_out.weight", "mid_block.resnets.0.conv2.weight", "mid_block.attentions.0.proj_out.weight"} <= zeros
    assert all(name.rsplit(".", 2)[-2] in ("conv2", "proj_out", "conv_out") for name in zeros)


@pytest.mark.slow
def test_encoding_fills_up_batches() -> None:
    params = init_params(vae_spec(VAE), 0)
    pictures = pixels(3, 32)
    mesh = make_mesh(jax.devices())
    whole = encode_pictures(params, pictures, VAE, mesh, batch=2)
    assert whole.shape == (3, 4, 4, 4)
    np.testing.assert_allclose(whole[:1], encode_pictures(params, pictures[:1], VAE, mesh), rtol=1e-4, atol=1e-5)
    assert decode_latents(params, whole, VAE, mesh).shape == pictures.shape
