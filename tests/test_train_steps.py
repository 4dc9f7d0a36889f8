"""``make_step`` and ``run``: any optimizer, any state, data from a function, FSDP, listeners."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from canvax.parallel.mesh import make_mesh, replicated
from canvax.train import Plan, Session, averaged, fit, make_step, run
from canvax.train import session as sessions
from canvax.train.log import WeightsAndBiases
from canvax.train.session import LOG, STATE, read_log
from canvax.train.state import load_state, read_facts, save_state
from canvax.weights.safetensors import open_safetensors
from tests.support.refusals import refused

X = np.random.default_rng(0).standard_normal((12, 3), np.float32)
START = {"w": np.zeros(3, np.float32)}


def one() -> Any:
    return make_mesh(jax.devices()[:1])


def distance(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    """A quadratic whose samples are noisy, so that a wrong key or sample shows in the loss."""
    wanted = samples + 0.1 * jax.random.normal(key, samples.shape)
    return jnp.square(p["w"][None] - wanted).mean(), {"first": p["w"][0]}


def contents(folder: Path) -> tuple[bytes, list[Any]]:
    """State and log of a run, without what a clock adds."""
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")}
             for line in read_log(folder / LOG)]  # fmt: skip
    return (folder / STATE).read_bytes(), lines


def killed(folder: Path, begin: Any) -> None:
    """Run ``begin(session)`` with and without a stop after each chunk; both must write the same."""
    state, finished = begin(Session(folder / "whole", mesh=one()))
    assert finished
    for _ in range(2):
        assert not begin(Session(folder / "parts", mesh=one(), deadline=time.monotonic()))[1]
    parts, finished = begin(Session(folder / "parts", mesh=one()))
    assert finished
    jax.tree.map(np.testing.assert_array_equal, state, parts)
    assert contents(folder / "whole") == contents(folder / "parts")


def test_a_step_is_what_optax_does() -> None:
    """Of one large batch, and of the same in parts; the average is the moving average of the parameters."""
    optimizer = optax.chain(optax.trace(0.9), optax.scale(-0.5))

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return shared * jnp.square(p["w"][None] - samples).mean(), {}

    step, parts = make_step(loss, optimizer, average=0.05), make_step(loss, optimizer, accumulate=3)
    state, other = step.init(START), parts.init(START)
    params, memory, average = START, optimizer.init(START), START["w"]
    key, half = jax.random.key(0), jnp.float32(0.5)
    for count in range(3):
        gradient = {"w": 0.5 * 2 * (params["w"] - X.mean(0)) / 3}
        changes, memory = optimizer.update(gradient, memory)
        params = optax.apply_updates(params, changes)
        average = average + (1 - min(0.05, (1 + count) / (10 + count))) * (params["w"] - average)
        state, values = jax.jit(step)(state, X, half, key)
        other, _ = parts(other, X.reshape(3, 4, 3), half, key)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)
    np.testing.assert_allclose(other.params["w"], params["w"], rtol=1e-5)
    np.testing.assert_allclose(averaged({"a": state})["a"]["w"], average, rtol=1e-5)
    assert values.keys() == {"loss"}


def test_an_optimizer_may_look_at_the_loss_and_the_step() -> None:
    seen: dict[str, Any] = {}

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
        seen.update(more)
        return updates, state

    step = make_step(distance, optax.GradientTransformationExtraArgs(lambda _: (), update))
    state, values = step(step.init(START), X, None, jax.random.key(0))
    step(state, X, None, jax.random.key(0))
    assert int(seen["step"]) == 1
    assert float(seen["value"]) != float(values["loss"])
    assert seen["grad"]["w"].shape == (3,)


def test_two_optimizers_take_turns(tmp_path: Path) -> None:
    """A toy adversarial loss: a shift learns to make noise look like the data to a critic, which learns as well."""

    def make(shift: Any, key: Any) -> Any:
        return shift["w"] + 0.3 * jax.random.normal(key, (32, 2))

    def critic_loss(critic: Any, samples: Any, shift: Any, key: Any) -> Any:
        apart = (make(shift, key) @ critic["a"]).mean() - (samples @ critic["a"]).mean()
        return apart + 0.5 * jnp.square(critic["a"]).sum(), {"apart": apart}

    def shift_loss(shift: Any, samples: Any, critic: Any, key: Any) -> Any:
        return -(make(shift, key) @ critic["a"]).mean(), {}

    critic, shift = make_step(critic_loss, optax.sgd(0.5)), make_step(shift_loss, optax.sgd(0.1), average=0.9)

    def step(state: Any, samples: Any, shared: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        judge, values = critic(state["critic"], samples, state["shift"].params, first)
        moved, more = shift(state["shift"], samples, judge.params, second)
        return {"critic": judge, "shift": moved}, {"apart": values["apart"], "shift_loss": more["loss"]}

    rng = np.random.default_rng(1)
    data = np.float32([1.0, -0.5]) + 0.3 * rng.standard_normal((256, 2)).astype(np.float32)

    def begin(session: Session) -> Any:
        state = {
            "critic": critic.init({"a": np.zeros(2, np.float32)}),
            "shift": shift.init({"w": np.zeros((1, 2), np.float32)}),
        }
        return run(step, state, data, 200, session, batch=32, chunk=50)

    killed(tmp_path, begin)
    state, _ = begin(Session(mesh=one()))
    np.testing.assert_allclose(averaged(state)["shift"]["w"][0], [1.0, -0.5], atol=0.1)
    assert read_log(tmp_path / "whole" / LOG)[-1].keys() >= {"apart", "shift_loss"}


def test_data_from_the_present_state(tmp_path: Path) -> None:
    """Rollouts between updates; samples may be arrays of the state, and of several shapes."""
    step, seen = make_step(distance, optax.sgd(0.1)), list[tuple[int, float]]()

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return jnp.square(p["w"] - samples["before"]["w"] - 1.0).mean() + 0 * samples["x"].sum(), {}

    step = make_step(loss, optax.sgd(1.5))

    def begin(session: Session) -> Any:
        def data(done: int, state: Any) -> Any:
            seen.append((done, float(state.params["w"][0])))
            return {"before": state.params, "x": X[: 1 + done % 2]}

        return run(step, step.init(START), data, 4, session)

    killed(tmp_path, begin)
    whole, parts = seen[:4], seen[4:]
    assert [done for done, _ in whole] == [0, 1, 2, 3]
    np.testing.assert_allclose([first for _, first in whole], range(4), rtol=1e-6)
    assert sorted(set(parts)) == whole


@pytest.mark.parametrize("first", [np.ones(3, np.float32), jnp.ones(3)], ids=["numpy", "jax"])
def test_data_that_hand_arrays_on_are_of_one_program(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX decides the sharding of what is handed on by that of the state: the first state's is as later ones'."""
    compiled, real = [], sessions._compile
    monkeypatch.setattr(sessions, "_compile", lambda *arguments: compiled.append(1) or real(*arguments))
    draw = jax.jit(lambda w, x, columns: {"x": x + w[None], "columns": columns})

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return distance(p, samples["x"], shared, key)

    step = make_step(loss, optax.sgd(0.1))
    placed, columns = jax.device_put(X, replicated(one())), np.zeros(3, np.float32)

    def data(done: int, state: Any) -> Any:
        return draw(state.params["w"], placed, columns)

    run(step, step.init({"w": first}), data, 3, Session(mesh=one()))
    assert len(compiled) == 1


def test_a_step_without_samples() -> None:
    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        assert samples is None
        return jnp.square(p["w"] - shared).mean(), {}

    step = make_step(loss, optax.sgd(1.5))
    state, _ = run(step, step.init(START), None, 1, Session(mesh=one()), shared=np.ones(3, np.float32))
    np.testing.assert_allclose(state.params["w"], 1.0, rtol=1e-6)


def test_a_loss_without_values_to_log() -> None:
    """It is a number, as for ``jax.grad``; a number of another kind or shape is refused."""
    trained = [
        run(step, step.init(START), X, 3, Session(mesh=one()), batch=4)[0].params["w"]
        for step in (make_step(returned, optax.sgd(0.1)) for returned in (distance, lambda *a: distance(*a)[0]))
    ]
    np.testing.assert_array_equal(*trained)
    wrongs: list[Any] = [lambda *a: distance(*a)[0][None], lambda *a: jnp.int32(1), lambda *a: 1.0]
    for wrong in wrongs:
        with refused("loss"):
            jax.eval_shape(
                make_step(wrong, optax.sgd(0.1)),
                make_step(wrong, optax.sgd(0.1)).init(START),
                X,
                None,
                jax.random.key(0),
            )


def test_another_run_is_refused_and_a_longer_one_is_not(tmp_path: Path) -> None:
    step = make_step(distance, optax.sgd(0.1))

    def begin(folder: str, steps: int = 4, samples: Any = X, **more: Any) -> Any:
        session = Session(tmp_path / folder, mesh=one(), about={"model": more.pop("model", "one")})
        return run(step, step.init(START), samples, steps, session, **{"batch": 4, "seed": 1, **more})

    begin("parts", 2)
    for argument, changes in {"seed": {"seed": 2}, "batch": {"batch": 2}, "model": {"model": "two"},
                              "samples": {"samples": X[:5]}}.items():  # fmt: skip
        with refused(argument):
            begin("parts", **changes)
    begin("parts")
    begin("whole")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_state_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """Its file does not say how many steps are done, but its state does."""
    step = make_step(distance, optax.sgd(0.1))
    data: dict[str, Any] = {"data": X, "batch": 4}
    for folder, steps in (("whole", 4), ("parts", 2)):
        run(step, step.init(START), steps=steps, session=Session(tmp_path / folder, mesh=one()), **data)
    path = tmp_path / "parts" / STATE
    facts = read_facts(path)
    assert facts.pop("done") == 2
    save_state(path, load_state(path, step.init(START)), facts)
    run(step, step.init(START), steps=4, session=Session(tmp_path / "parts", mesh=one()), **data)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("step", "argument"),
    [
        (lambda state, samples, shared: (state, {}), "step"),
        (lambda state, samples, shared, key: state, "step"),
        (lambda state, samples, shared, key: ({**state, "w": jnp.zeros(4)}, {}), "step"),
        (lambda state, samples, shared, key: ({"v": state["w"]}, {}), "step"),
        (lambda state, samples, shared, key: (state, {"loss": jnp.float32(1), "parts": jnp.zeros(1)}), "step"),
    ],
)
@pytest.mark.parametrize("data", [X, lambda done, state: X])
def test_a_step_is_looked_at_before_anything_is_written(step: Any, argument: str, data: Any, tmp_path: Path) -> None:
    with refused(argument):
        run(step, START, data, 4, Session(tmp_path / "run", mesh=one()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("loss", {"loss": lambda *arrays: (distance(*arrays)[0], {"loss": jnp.float32(1)})}),
        ("batch", {"accumulate": 3}),
        ("data", {"data": iter([X])}),
        ("data", {"data": {"x": X}.values()}),
    ],
)
def test_what_a_step_or_a_run_cannot_use(argument: str, change: dict[str, Any]) -> None:
    given = {"loss": distance, "accumulate": 1, "data": X, **change}
    step = make_step(given["loss"], optax.sgd(0.1), accumulate=given["accumulate"])
    with refused(argument):
        run(step, step.init(START), given["data"], 1, Session(mesh=one()), batch=4)


def test_pace_and_time_left_are_without_compiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a second program, as of a bucket: it is compiled between two steps."""
    real = sessions._compile
    monkeypatch.setattr(sessions, "_compile", lambda *arguments: time.sleep(2) or real(*arguments))
    monkeypatch.setattr("canvax.train.log.SELDOM", 0)
    seconds = []
    session = Session(mesh=one(), log=lambda step, values, images: seconds.append(values["seconds"]))
    run(make_step(distance, optax.sgd(0.1)), make_step(distance, optax.sgd(0.1)).init(START),
        lambda done, state: X[: 1 + done % 2], 4, session)  # fmt: skip
    assert max(seconds) < 1
    left = re.findall(r"step 2 of 4, .*, (\d+) s left", capsys.readouterr().err)
    assert left == ["0"]


def test_one_callback_gets_values_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of the log and Weights & Biases are listeners of it."""
    sent: list[tuple[dict[str, Any], int]] = []
    board = SimpleNamespace(log=lambda values, step: sent.append((values, step)), finish=lambda: sent.append(({}, -1)))
    fake = SimpleNamespace(init=lambda project: board, Image=lambda pixels: pixels.shape)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    listener, step = WeightsAndBiases("p"), make_step(distance, optax.sgd(0.1))
    image = np.zeros((4, 5, 3), np.uint8)
    preview = lambda step, params: {"w": image} if params["w"].shape == (3,) else None  # noqa: E731
    session = Session(tmp_path, mesh=one(), log=listener, preview=preview, preview_steps=2)
    run(step, step.init(START), X, 3, session, batch=4)
    listener.close()
    assert [step for _, step in sent] == [1, 2, 2, 3, 3, -1]
    assert [sent[i][0] for i in (2, 4)] == [{"w": (4, 5, 3)}] * 2
    assert "step 2 of 3, w\n" in capsys.readouterr().err
    written = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert written == [{"step": step, **values} for values, step in (sent[0], sent[1], sent[3])]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(""):
        WeightsAndBiases("p")


# Optimizers by name


@pytest.mark.parametrize(
    ("name", "rate"), [("adamw", 0.03), ("adafactor", 0.03), ("lion", 0.003), ("prodigy", 1.0), ("schedule-free", 0.03)]
)
def test_optimizers_by_name(name: Any, rate: float, tmp_path: Path) -> None:
    """Each finds the minimum, by steps that are its own, and resumes; another in the same folder is refused."""
    final = 1.0 if name == "schedule-free" else 0.01
    plan = Plan(750, 4, rate, chunk=250, average=0.0, weight_decay=0.0, final=final, optimizer=name)

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return jnp.square(p["w"] - 1.0).mean() + jnp.square(p["part"]["m"] + 1.0).mean() + 0 * samples.sum(), {}

    def begin(session: Session) -> Any:
        return fit(
            {"w": np.zeros(3, np.float32), "part": {"m": np.zeros((3, 4), np.float32)}}, loss, X, 12, plan, session
        )

    killed(tmp_path, begin)
    trained, _ = begin(Session(tmp_path / "whole", mesh=one()))
    np.testing.assert_allclose(trained["w"], 1.0, atol=0.1)
    np.testing.assert_allclose(trained["part"]["m"], -1.0, atol=0.1)
    names = {entry.name.rsplit(".", 1)[0] for entry in open_safetensors(tmp_path / "whole" / STATE)}
    kept = {"adamw": "optimizer.1.nu", "adafactor": "optimizer.1.v_row", "lion": "optimizer.1.mu",
            "prodigy": "optimizer.1.params0", "schedule-free": "optimizer.1.z"}  # fmt: skip
    assert any(entry.startswith(kept[name]) for entry in names)
    assert any(entry.startswith("optimizer.1.nu") for entry in names) == (name == "adamw")
    plan = replace(plan, optimizer="lion" if name == "adamw" else "adamw")
    with refused("optimizer"):
        begin(Session(tmp_path / "whole", mesh=one()))


@pytest.mark.slow
def test_schedule_free_gives_its_average(tmp_path: Path) -> None:
    """Its result, saved weights and previews are the parameters for evaluation of optax's optimizer."""
    plan = Plan(12, 4, 0.03, warmup=4, chunk=4, average=0.0, final=1.0, weight_decay=0.1, optimizer="schedule-free")
    found: dict[int, Any] = {}

    def keep(step: int, params: Any) -> None:
        found[step] = jax.tree.map(np.array, params)

    session = Session(tmp_path, mesh=one(), save=keep, save_steps=4, preview=keep, preview_steps=8)
    start = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    found[12], _ = fit(start, distance_of_matrix, X, 12, plan, session)
    rate = optax.linear_schedule(0.03 / 4, 0.03, 3)
    parts = optax.scale_by_rms(plan.b2, eps_in_sqrt=False, bias_correction=True), optax.add_decayed_weights(0.1)
    base = optax.chain(*parts, optax.scale_by_learning_rate(rate))
    free = optax.contrib.schedule_free(base, lambda count: rate(count - 1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), free)
    params = jax.tree.map(jnp.asarray, start)
    with jax.numpy_dtype_promotion("standard"):
        state: Any = optimizer.init(params)
        for step in range(1, 13):
            gradient = jax.grad(lambda p: distance_of_matrix(p, None, None, None)[0])(params)
            changes, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, changes)
            if step in found:
                wanted = optax.contrib.schedule_free_eval_params(state[1], params)["w"]
                np.testing.assert_allclose(found[step]["w"], wanted, rtol=1e-5)
                assert np.abs(wanted - params["w"]).max() > 1e-3
    assert found.keys() == {4, 8, 12}


def distance_of_matrix(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    return jnp.square(p["w"] + 1.0).mean(), {}


def test_a_step_that_does_not_fit_is_made_lighter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before the first step; a resumed run begins with it; one that fits stays."""
    calls: list[str] = []

    def step(state: Any, samples: Any, shared: Any, key: Any) -> Any:
        return {"n": state["n"] + (1.0 if calls else 100.0)}, {}

    def go(folder: str, free: int, steps: int) -> Any:
        monkeypatch.setattr(sessions, "free_bytes", lambda _: free)
        session = Session(tmp_path / folder, mesh=one(), lighter=lambda: calls.append(folder))
        return float(run(step, {"n": jnp.float32(0)}, X, steps, session, batch=4)[0]["n"])

    assert go("large", 10**12, 3) == 300
    assert not calls
    assert go("small", -1, 3) == 3
    assert calls == ["small"]
    calls.clear()
    assert go("small", 10**12, 5) == 5
    assert calls == ["small"]


# FSDP


def network(p: Any, samples: Any, shared: Any, key: Any) -> Any:
    hidden = samples + 0.1 * jax.random.normal(key, samples.shape)
    for layer in p.values():
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"][None])
    return jnp.square(hidden - 0.5).mean(), {}


def layers(width: int) -> Any:
    rng = np.random.default_rng(0)
    return {str(i): {"w": (rng.standard_normal((width, width)) / width**0.5).astype(np.float32),
                     "b": np.zeros(width, np.float32)} for i in range(4)}  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_devices_that_share_the_parameters_learn_what_one_does(tmp_path: Path, accumulate: int) -> None:
    """Through ``fit``, of 8 devices with a stop and a resume."""
    data = np.random.default_rng(1).standard_normal((32, 64), np.float32)
    plan = Plan(6, 8, chunk=2, accumulate=accumulate, average=0.9)
    found = {}
    for count in (1, 2, 8):
        session = Session(tmp_path / str(count), mesh=make_mesh(jax.devices()[:count]), fsdp=True)
        if count == 8:
            fit(layers(64), network, data, 32, plan, replace(session, deadline=time.monotonic()))
        params, finished = fit(layers(64), network, data, 32, plan, session)
        assert finished
        assert params["0"]["w"].sharding.shard_shape((64, 64)) == (64 // count, 64)
        assert params["0"]["b"].sharding.is_fully_replicated
        losses = [line["loss"] for line in read_log(tmp_path / str(count) / LOG)]
        found[count] = [*losses, *jax.tree.leaves(jax.tree.map(np.asarray, params))]
    for count in (2, 8):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found[1], found[count])


def test_sharing_the_parameters_takes_less_memory_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler: an eighth of parameters, average and moments; and no more for a step than they were before."""
    seen, real = [], sessions._compile

    def compiled(*arguments: Any) -> Any:
        seen.append(real(*arguments))
        return seen[-1]

    monkeypatch.setattr(sessions, "_compile", compiled)
    mesh, data = make_mesh(jax.devices()), np.zeros((8, 256), np.float32)
    for shared in (None, mesh):
        step = make_step(network, optax.adam(1e-3), average=0.9, mesh=shared)
        run(step, step.init(layers(256)), data, 1, Session(mesh=mesh), batch=8)
    whole, split = (program.memory_analysis() for program in seen)
    size = 4 * 4 * 256 * 256  # bytes of the matrices
    assert whole.argument_size_in_bytes > 4 * size
    assert split.argument_size_in_bytes < 4 * size / 8 * 1.1
    assert split.temp_size_in_bytes < whole.temp_size_in_bytes + 1.1 * size
