"""Every kind of training end to end on tiny models: what it writes, that only its own parts move, and bad input."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from test_finetune import steps_without_training, write_pictures

import canvax
from canvax.call import ZERO_SNR, Load
from canvax.cli import main
from canvax.cli.arguments import parse
from canvax.cli.train import _made, _training
from canvax.errors import CanvaxError, CheckpointError, HintWarning, InputError, warn
from canvax.families.base import Family
from canvax.models.controlnet import ControlNet
from canvax.nn import LOW_RANK, conv2d, conv2d_of_doubled, linear, linear_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import flatten
from canvax.pipelines.loaded import open_model
from canvax.quantize import KINDS
from canvax.samplers.schedule import NoiseSchedule
from canvax.settings import declared
from canvax.train import diffusion, dreambooth, low_rank, task
from canvax.train.controlnet import CONTROL_PLAN, ControlNetTask, train_controlnet
from canvax.train.dreambooth import Instance, subject_of
from canvax.train.encoding import encode_pictures
from canvax.train.finetune import finetune
from canvax.train.log import TensorBoard
from canvax.train.loop import LOG, STATE, Plan, Session, fit, read_log
from canvax.train.lora import LORA_PLAN, Lora, train_lora
from canvax.train.low_rank import FORMATS, LAYERS
from canvax.train.pictures import read_pictures
from canvax.train.settings import LoraRecord, WordCaptions
from canvax.train.task import PLAN as PLAN_OF_MODELS
from canvax.train.task import InitialState, Subject, Training
from canvax.train.textual_inversion import CAPTIONS, Inversion, train_inversion
from canvax.weights.safetensors import open_safetensors, read_metadata
from tests.support.refusals import refused
from tests.support.small_checkpoint import SHALLOW_UNET, write_small_checkpoint
from tests.support.small_sdxl import build as build_xl

PLAN = Plan(steps=4, batch=2, chunk=2, warmup=0, final=1.0, average=0.0, learning_rate=1e-3)
QUIET = {"num_inference_steps": 2, "progress": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("model") / "sd", unet=SHALLOW_UNET)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "p")


def one() -> Any:
    return make_mesh(jax.devices()[:1])


def training(model: Path, pictures: Path, folder: Path, **more: Any) -> Training:
    return Training(model, pictures, folder, **{"plan": PLAN, "size": 64, **more})


# The leaf beside a weight


def test_a_low_rank_leaf_is_a_change_of_the_weight() -> None:
    """Of a matrix and of each kind of convolution; in float64 by hand."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pair = {"down": draw(5, 2), "up": draw(2, 7)}
    weight, bias, x = draw(5, 7), draw(7), draw(3, 5)
    got = linear({"weight": weight, "bias": bias, LOW_RANK: pair}, x)
    host = [np.asarray(array).astype(np.float64) for array in (x, weight, pair["down"], pair["up"], bias)]
    want = host[0] @ (host[1] + host[2] @ host[3]) + host[4]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    pair = {"down": draw(3, 3, 5, 2), "up": draw(2, 7)}
    weight, x = draw(3, 3, 5, 7), draw(1, 4, 6, 5)
    whole = {"weight": weight + jnp.einsum("hwir,ro->hwio", pair["down"], pair["up"]), "bias": bias}
    apart = {"weight": weight, "bias": bias, LOW_RANK: pair}
    for stride in (1, 2):
        np.testing.assert_allclose(
            conv2d(apart, x, stride=stride), conv2d(whole, x, stride=stride), rtol=1e-3, atol=1e-4
        )
    np.testing.assert_allclose(conv2d_of_doubled(apart, x), conv2d_of_doubled(whole, x), rtol=1e-3, atol=1e-4)


def test_a_kronecker_product_is_a_change_of_the_weight() -> None:
    """Of two whole factors and of one that is a product; of a matrix and of convolutions."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    for kernel in ((), (3, 3)):
        x = draw(2, *kernel, 6)
        layer = {"weight": draw(*kernel, 6, 8)}
        for second in ({"w2": draw(*kernel, 3, 4)}, {"down": draw(*kernel, 3, 2), "up": draw(2, 4)}):
            w1 = draw(2, 2)
            w2 = second["w2"] if "w2" in second else np.einsum("...ir,ro->...io", second["down"], second["up"])
            added = np.kron(w1, w2) if not kernel else np.stack([np.kron(w1, w) for w in np.reshape(w2, (9, 3, 4))])
            whole = {"weight": layer["weight"] + added.reshape(*kernel, 6, 8)}
            for apply in (conv2d, conv2d_of_doubled) if kernel else (linear,):
                got = apply({**layer, LOW_RANK: {"w1": w1, **second}}, x)
                np.testing.assert_allclose(got, apply(whole, x), rtol=1e-3, atol=1e-4)


def test_which_layers(model: Path) -> None:
    networks = canvax.load(model, mesh=one()).model.networks
    specs = {"unet": networks.denoiser.spec, **networks.text.specs}
    found = {layers: low_rank.targets(specs, layers) for layers in low_rank.LAYERS}
    assert all(name.endswith(("to_q", "to_k", "to_v", "to_out.0")) for name in found["attention"]["unet"])
    assert len(found["attention"]["text_encoder"]) == 2 * 4
    assert found["attention"]["unet"].keys() < found["transformer"]["unet"].keys() < found["all"]["unet"].keys()
    outside = ("conv_in", "conv_out", "time_embedding")
    assert not any(name.startswith(outside) for name in found["all"]["unet"])
    weights = {name for name, param in flatten(specs["unet"]) if name.endswith(".weight") and param.layout != "plain"}
    inside = {name.removesuffix(".weight") for name in weights if not name.startswith(outside)}
    assert found["all"]["unet"].keys() == inside
    with refused("layers"):
        low_rank.targets({"mlp": {"out": linear_spec(4, 4)}}, "all")
    numbered = {"mlp": {"blocks": {"0": {"out": linear_spec(4, 4)}}}}
    assert low_rank.targets(numbered, "all")["mlp"].keys() == {"blocks.0.out"}


@pytest.mark.parametrize("axis", [None, "mlp"])
def test_a_hint_of_no_more_than_attention(axis: str | None, model: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Of a denoiser whose feed-forward has no axis of that name."""
    block = {"to_q": linear_spec(4, 4, (None, "heads")), "up": linear_spec(4, 8, (None, axis))}
    denoiser = SimpleNamespace(component="mlp", spec={"blocks": {"0": block}})
    networks = SimpleNamespace(denoiser=denoiser, adapted={"mlp": denoiser.spec})
    described: Any = SimpleNamespace(networks=networks, text=SimpleNamespace(names=()), family=Family("new"))
    for layers in ("attention", "transformer", "all"):
        Lora(layers=layers).check(described, training(model, model, model))
    hints = [warning.message for warning in recwarn if isinstance(warning.message, HintWarning)]
    assert [hint.argument for hint in hints] == ([] if axis else ["layers"])


# The loop


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """Without random choices of its own, four batches of 2 an update are one of 8."""

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        error = ((samples["x"] @ p["w"] - samples["y"]) ** 2).mean()
        return error, {}

    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((16, 3), np.float32), "y": rng.standard_normal(16, np.float32)}
    results = []
    for batch, accumulate in ((8, 1), (2, 4)):
        plan = Plan(steps=6, batch=batch, accumulate=accumulate, chunk=3, warmup=0, average=0.0)
        folder = tmp_path / str(accumulate)
        results.append(fit({"w": np.zeros(3, np.float32)}, loss, data, 16, plan, Session(folder, "toy", one()))[0]["w"])
        assert len(read_log(folder / LOG)) == 2
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_a_rate_of_its_own(tmp_path: Path) -> None:
    """Adam's first step is as long as the rate."""
    start = {"a": np.ones(2, np.float32), "b": {"c": np.ones(2, np.float32)}}
    plan = Plan(steps=1, batch=1, chunk=1, warmup=0, final=1.0, average=0.0, weight_decay=0.0, learning_rate=0.1,
                rates={"b": 0.02})  # fmt: skip
    trained, _ = fit(start, lambda p, *_: (p["a"].sum() + p["b"]["c"].sum(), {}), {}, 1, plan,
                     Session(tmp_path, "toy", one()))  # fmt: skip
    np.testing.assert_allclose(trained["a"], 0.9, rtol=1e-4)
    np.testing.assert_allclose(trained["b"]["c"], 0.98, rtol=1e-4)
    with pytest.raises(InputError, match="rates"):
        Plan(steps=1, batch=1, rates={"b": 0.0})


def test_only_matrices_decay(tmp_path: Path) -> None:
    """Where the gradient is zero, decay is all that moves a parameter."""
    start = {"matrix": np.ones((2, 2), np.float32), "vector": np.ones(2, np.float32)}
    plan = Plan(steps=2, batch=1, chunk=1, warmup=0, final=1.0, average=0.0, weight_decay=0.1, learning_rate=0.5)
    still = lambda p, *_: (0.0 * (p["matrix"].sum() + p["vector"].sum()), {})  # noqa: E731
    trained, _ = fit(start, still, {}, 1, plan, Session(tmp_path, "toy", one()))
    np.testing.assert_allclose(trained["matrix"], (1 - 0.5 * 0.1) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(trained["vector"], 1.0)


@pytest.mark.parametrize("decay", [0.999, 0.3])
def test_the_average_forgets_where_a_run_began(tmp_path: Path, decay: float) -> None:
    """Under a constant gradient Adam's steps are as long as the rate, so that the average is known."""
    steps, rate = 40, 0.01
    plan = Plan(steps=steps, batch=1, chunk=steps, warmup=0, final=1.0, average=decay, weight_decay=0.0,
                learning_rate=rate)  # fmt: skip
    start = {"w": np.full(3, 1.0, np.float32)}
    trained, _ = fit(start, lambda p, *_: (p["w"].sum(), {}), {}, 1, plan, Session(tmp_path, "toy", one()))
    average = 1.0
    for step in range(steps):
        average += (1 - min(decay, (1 + step) / (10 + step))) * (1.0 - rate * (step + 1) - average)
    np.testing.assert_allclose(trained["w"], average, rtol=1e-4)
    assert average < 1.0 - rate * steps / 2


# LoRA


@pytest.mark.slow
def test_a_lora_and_nothing_else(model: Path, pictures: Path, tmp_path: Path) -> None:
    """Adam's state is of the factors alone; stopped and resumed it is the same file; the file tells of itself."""
    lora = Lora(rank=2, alpha=4.0, text=True, trigger="red", save_dtype="float16")
    whole = train_lora(training(model, pictures, tmp_path / "whole"), lora, one())
    state = {entry.name: entry for entry in open_safetensors(tmp_path / "whole" / "lora" / "state.safetensors")}
    names = [name for name in state if name.startswith("params.")]
    assert names
    assert all(name.endswith((".down", ".up")) for name in names)
    assert len(state) == 3 * len(names) + 2  # both moments, the step and Adam's count
    parts = training(model, pictures, tmp_path / "parts")
    assert train_lora(parts, lora, one(), deadline=0.0) is None
    again = train_lora(parts, lora, one())
    first, second = ({e.name: e.read() for e in open_safetensors(path)} for path in (whole, again))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
    with pytest.raises(InputError, match="this run is finished"):
        train_lora(parts, lora, one())
    told = read_metadata(whole)
    assert told["modelspec.trigger_phrase"] == "red"
    assert told["ss_sd_model_name"] == "./sd"  # the folders above are the owner's business
    assert told | {"ss_steps": "4", "ss_network_dim": "2", "ss_resolution": "(64, 64)"} == told
    assert next(iter(json.loads(told["ss_tag_frequency"]))) == pictures.name
    assert json.loads(told["lora_adapter_metadata"])["unet.lora_alpha"] == 4.0
    pipe = canvax.load(model, mesh=one())
    before = pipe("a red picture", seed=1, **QUIET).pixels
    loaded = pipe.adapters.load("mine", whole)
    assert loaded.trigger_words[0] == "red"
    assert len(loaded.trigger_words) > 1
    assert (pipe("a red picture", seed=1, **QUIET).pixels != before).any()


@pytest.mark.slow
def test_a_lora_is_sampled_as_it_was_trained(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the schedule that its training replaced, while it acts; what the caller says wins."""
    steps_without_training(monkeypatch)
    loading = {"prediction_type": "v_prediction", "scheduler": ZERO_SNR}
    asked = training(model, pictures, tmp_path / "run", loading=loading, times="logit-normal", gamma=5.0)
    path = train_lora(asked, Lora(rank=2), one())
    stated = json.loads(read_metadata(path)["canvax.training"])
    assert stated | {"scheduler": {"prediction_type": "v_prediction", **ZERO_SNR}, "times": "logit-normal",
                     "gamma": 5.0, "size": 64, "steps": 4} == stated  # fmt: skip
    pipe, explicit = canvax.load(model, mesh=one()), canvax.load(model, mesh=one(), **loading)
    before = pipe.model.scheduler
    with pytest.warns(HintWarning, match="v_prediction"):
        pipe.adapters.load("mine", path)
    explicit.adapters.load("mine", path)  # and no warning
    images = [each("a red picture", seed=1, **QUIET) for each in (pipe, explicit)]
    np.testing.assert_array_equal(images[0].latents, images[1].latents)
    assert pipe.start("a", seed=1).table.sha256 == explicit.start("a", seed=1).table.sha256
    pipe.adapters.set({"mine": 0.0})
    assert pipe.model.scheduler is before
    pipe.adapters.set({"mine": 0.5})
    assert pipe.model.scheduler.schedule.prediction_type == "v_prediction"
    pipe.adapters.remove("mine")
    assert pipe.model.scheduler is before
    other = canvax.load(model, mesh=one(), prediction_type="epsilon")
    with pytest.warns(HintWarning, match="zero_snr"):
        other.adapters.load("mine", path)
    assert other.model.scheduler.schedule.prediction_type == "epsilon"
    assert other.model.scheduler.schedule.alphas_cumprod[-1] == 0
    with pytest.warns(HintWarning, match="beside"):
        pipe.adapters.load("mine", path, beside=True)
    assert pipe.model.scheduler is before
    for text in ("[]", "{", '{"scheduler": []}', '{"scheduler": {"prediction_type": "x"}}'):
        arrays = {entry.name: entry.read() for entry in open_safetensors(path)}
        save_file(arrays, tmp_path / "bad.safetensors", {**read_metadata(path), "canvax.training": text})
        with pytest.raises(CheckpointError):
            canvax.load(model, mesh=one()).adapters.load("bad", tmp_path / "bad.safetensors")


def test_a_model_is_sampled_as_it_was_trained(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_without_training(monkeypatch)
    loading = {"prediction_type": "v_prediction", "scheduler": ZERO_SNR}
    path = finetune(training(model, pictures, tmp_path / "run", loading=loading), one())
    assert path is not None
    want, got = (each.start("a", seed=1).table for each in (canvax.load(model, **loading), canvax.load(path)))
    assert want.sha256 == got.sha256 != canvax.load(model).start("a", seed=1).table.sha256


@pytest.mark.slow
def test_a_process_that_is_stopped_writes_its_state(model: Path, pictures: Path, tmp_path: Path) -> None:
    words = ["lora", str(pictures), "-m", str(model), "-o", str(tmp_path), "--size", "64", "--steps", "1000000"]
    log, codes = tmp_path / "lora" / LOG, []
    for number in (signal.SIGTERM, signal.SIGINT):
        begun = len(read_log(log))
        command = [sys.executable, "-m", "canvax", "train", *words]
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"XLA_FLAGS": ""})
        while child.poll() is None and len(read_log(log)) < begun + 3:
            time.sleep(0.05)
        child.send_signal(number)
        codes.append(child.wait(120))
        (step,) = (entry.read() for entry in open_safetensors(tmp_path / "lora" / STATE) if entry.name == "step")
        assert step == read_log(log)[-1]["step"]
    assert codes == [130, 130]


@pytest.mark.weekly
def test_a_lora_over_a_unet_of_8_bits(model: Path, pictures: Path, tmp_path: Path) -> None:
    found = {}
    for kind in (None, "int8"):
        run = training(model, pictures, tmp_path / str(kind), quantize=kind, prompts=("red",) if kind else ())
        file = train_lora(run, Lora(rank=2, layers="all"), one())
        assert file is not None
        found[kind] = [line["loss"] for line in read_log(tmp_path / str(kind) / "lora" / LOG)]
    # A weight's error is up to 1/254 of the largest weight of its output channel.
    np.testing.assert_allclose(found["int8"], found[None], rtol=0.02)
    assert found["int8"] != found[None]
    assert list((tmp_path / "int8" / "previews").iterdir())


KINDS_OF_FACTORS: list[dict[str, Any]] = [
    {"dora": True, "layers": "all", "conv_rank": 3, "ranks": {"mid_block": 1, "encoder.layers.0": 5}},
    {"dora": True, "names": "kohya", "alpha": 1.0, "conv_rank": 3, "layers": "all"},
    {"lokr": 4, "names": "kohya", "rank": 3, "layers": "all", "conv_rank": 1, "alpha": 1.0, "ranks": {"mid_block": 64}},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS_OF_FACTORS)
def test_files_are_what_was_trained(model: Path, pictures: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    """New factors change nothing; trained ones in their file are the weights that training and its previews had."""
    loaded, run = canvax.load(model, mesh=one()), training(model, pictures, tmp_path / "run")
    lora = Lora(**{"rank": 2, "text": True, **kind})
    lora.check(loaded.model, run)
    params = dict(loaded.params)
    before = lora.begin(loaded.model, dict(params), run, jnp.float32)
    rng = np.random.default_rng(0)
    factors = jax.tree.map(lambda leaf: (leaf + rng.uniform(0.1, 0.2, leaf.shape)).astype(np.float32), before.trained)
    changed = lora.shown(loaded.model, params, factors)
    file = lora.save(tmp_path / "file.safetensors", loaded.model, {}, factors, run)
    assert json.loads(read_metadata(file)["canvax.training"]).items() >= lora.changed.items()
    loaded.adapters.load("mine", file)
    for component in factors:
        unchanged = dict(flatten(lora.shown(loaded.model, params, before.trained)[component]))
        old, new, got = (dict(flatten(tree[component])) for tree in (params, changed, loaded.params))
        for name, wanted in new.items():
            np.testing.assert_allclose(unchanged[name], old[name], atol=1e-6)
            np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-5)
        names = [f"{name}.weight" for name in factors[component]]
        assert all((np.abs(new[name] - old[name]) > 1e-3).any() for name in names)
        layer = next(name for name in names if new[name].ndim == 2)
        part, x = layer.removesuffix(".weight"), jnp.asarray(rng.standard_normal((2, len(new[layer]))), jnp.float32)
        beside: Any = before.assemble(factors, params)[component]
        for step in part.split("."):
            beside = beside[step]
        np.testing.assert_allclose(
            linear({**beside, "bias": jnp.zeros(())}, x), x @ jnp.asarray(new[layer]), rtol=1e-3, atol=1e-4
        )
    sizes = {len(pair["up"]) for pair in factors["unet"].values() if "up" in pair}
    assert sizes == {3, 1} if "lokr" in kind else sizes >= {2, 3}
    assert any("w2" in pair for pair in factors["unet"].values()) == ("lokr" in kind)
    if "lokr" not in kind:
        again = replace(lora, start=file)
        again.check(loaded.model, run)
        jax.tree.map(
            np.testing.assert_array_equal, again.begin(loaded.model, dict(params), run, jnp.float32).trained, factors
        )
        with refused("start"):
            replace(again, dora=False).check(loaded.model, run)
        with refused("rank"):
            replace(again, conv_rank=2).check(loaded.model, run)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", [KINDS_OF_FACTORS[0], KINDS_OF_FACTORS[2]])
def test_a_killed_run_of_each_kind_resumes(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    lora, real = Lora(**{"rank": 2, **kind, "ranks": ()}), task.Session

    def go(folder: str, stop: int = 0) -> Any:
        def die(step: int, values: Any, images: Any) -> None:
            if step == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(task, "Session", lambda *a, **more: real(*a, **more | {"log": die, "save_every": 0.0}))
        return train_lora(training(model, pictures, tmp_path / folder), lora, one())

    whole = go("whole")
    with pytest.raises(KeyboardInterrupt):
        go("parts", 4)
    first, second = (list(open_safetensors(path)) for path in (whole, go("parts")))
    assert [(e.name, e.read().tobytes()) for e in first] == [(e.name, e.read().tobytes()) for e in second]
    assert (
        read_log(tmp_path / "whole" / "lora" / LOG)[-1]["loss"]
        == read_log(tmp_path / "parts" / "lora" / LOG)[-1]["loss"]
    )
    assert any(e.read().any() for e in first if e.name.endswith(("lora_B.weight", "lora_up.weight", "w2", "w2_b")))


@pytest.mark.parametrize(
    ("remat", "ladder", "before", "after"),
    [(True, True, True, None), (None, True, False, True), (None, False, False, None), (False, True, False, None)],
    ids=["asked", "not said", "on a CPU", "refused"],
)
def test_activations_are_recomputed_where_a_step_does_not_fit(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    *, remat: bool | None, ladder: bool, before: bool, after: bool | None,
) -> None:  # fmt: skip
    """When the loop asks for it (``test_train_steps``): never on a CPU, nor if the caller says no."""
    given: list[Any] = []
    monkeypatch.setattr(task, "fit", lambda *arguments: (given.extend(arguments), ({}, False))[1])
    monkeypatch.setattr(task, "_has_ladder", lambda _: ladder)
    assert train_lora(training(model, pictures, tmp_path, remat=remat), Lora(rank=2), one()) is None
    start, loss, data, *_, session, shared = given

    def recomputes() -> bool:
        return "remat" in str(jax.make_jaxpr(lambda p: loss(p, data, shared, jax.random.key(0))[0])(start))

    assert (recomputes(), bool(session.lighter)) == (before, after is not None)
    if session.lighter:
        session.lighter()
        assert recomputes() == after


def test_without_optax_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(InputError, match=r"\.\[train\]"):
        train_lora(training(tmp_path / "no model", tmp_path / "no images", tmp_path / "lora"), Lora(), one())


def test_folders_that_cannot_be(model: Path, pictures: Path, tmp_path: Path) -> None:
    """Told before anything compiles."""
    (tmp_path / "file").write_text("")
    for folder, message in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "run", "cannot be made")):
        with pytest.raises(CanvaxError, match=message):
            train_lora(training(model, pictures, folder), Lora(rank=2), one())


def test_weights_on_the_way_and_a_longer_run(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was written is replaced or lost."""
    steps_without_training(monkeypatch)
    words: list[str] = []

    def go(steps: int, **changes: Any) -> None:
        run = training(model, pictures, tmp_path, save_steps=2, plan=replace(PLAN, steps=steps, **changes))
        train_lora(run, Lora(rank=2, title="Red"), one(), say=words.append)

    def files() -> list[str]:
        return sorted(path.name.removeprefix("pytorch_lora_weights") for path in tmp_path.glob("*.safetensors"))

    go(5)
    assert "4 of them cropped by up to 33%" in words[0]
    assert files() == ["-000002.safetensors", "-000004.safetensors", ".safetensors"]
    first = tmp_path / "pytorch_lora_weights-000002.safetensors"
    assert read_metadata(first)["modelspec.title"] == read_metadata(first)["ss_output_name"] == "Red"
    written = first.stat().st_ino
    with pytest.raises(InputError, match="this run is finished"):
        go(5)
    with refused("steps"):
        go(7, final=0.5)
    run = training(model, pictures, tmp_path, plan=replace(PLAN, steps=7))
    for name, value in {"rank": 3, "layers": "all", "dora": True, "ranks": {"mid_block": 1}}.items():
        with pytest.raises(InputError, match=f"{name} was"):
            train_lora(run, replace(Lora(rank=2, title="Red"), **{name: value}), one())
    go(7)
    assert files() == [f"-{step:06d}.safetensors" for step in (2, 4, 5, 6)] + [".safetensors"]
    assert first.stat().st_ino == written
    (tmp_path / "lora" / STATE).unlink()
    (tmp_path / "pytorch_lora_weights.safetensors").unlink()
    with pytest.raises(InputError, match="another run"):
        go(7)


@pytest.mark.slow
def test_what_is_frozen_is_read_in_the_dtype_of_the_computation(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the largest models leave no room for gradients; the numbers are those of a cast afterwards."""
    model = build_xl(tmp_path / "xl")
    read: dict[str, set[str]] = {}
    starts: list[InitialState] = []
    steps: list[Any] = []

    def opened(*arguments: Any, **keywords: Any) -> Any:
        *others, params = open_model(*arguments, **keywords)
        for component, tree in params.items():
            dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
            read[component] = read.get(component, set()) | dtypes
        return *others, params

    def begin(self: Lora, *arguments: Any) -> InitialState:
        starts.append(real_begin(self, *arguments))
        return starts[-1]

    real_begin = Lora.begin
    monkeypatch.setattr(task, "open_model", opened)
    monkeypatch.setattr(Lora, "begin", begin)
    monkeypatch.setattr(task, "fit", lambda *arguments: (steps.append(arguments[-1]) or {}, False))
    train_lora(training(model, pictures, tmp_path / "run", dtype=jnp.bfloat16), Lora(rank=2), one())
    assert steps[0]["frozen"].keys() == {"unet"}  # captions are encoded before
    texts = ("text_encoder", "text_encoder_2")
    assert read == {"vae": {"float32"}} | {name: {"bfloat16"} for name in (*texts, "unet")}
    whole = canvax.load(model, mesh=one(), dtype="float32").params
    wanted = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), {name: whole[name] for name in (*texts, "unet")})
    jax.tree.map(np.testing.assert_array_equal, starts[0].frozen, wanted)


def test_a_lora_from_a_file(model: Path, pictures: Path, tmp_path: Path) -> None:
    """Its factors, to the bit; those of convolutions and of both names as well."""
    loaded = canvax.load(model, mesh=one())
    rng = np.random.default_rng(0)
    run = training(model, pictures, tmp_path / "run")
    again = Lora()
    for names in low_rank.FORMATS:
        lora = Lora(rank=2, alpha=3.0, layers="all", text=True, names=names)
        chosen = low_rank.targets(loaded.model.networks.specs(), "all")
        del chosen["vae"]
        factors = jax.tree.map(
            lambda leaf: rng.standard_normal(leaf.shape, np.float32), low_rank.new_factors(chosen, 2, 0)
        )
        file = lora.save(tmp_path / f"{names}.safetensors", loaded.model, {}, factors, run)
        again = replace(lora, start=file)
        again.check(loaded.model, run)
        got = again.begin(loaded.model, dict(loaded.params), run, jnp.float32).trained
        jax.tree.map(np.testing.assert_array_equal, got, factors)
        weaker = replace(again, alpha=1.0).begin(loaded.model, dict(loaded.params), run, jnp.float32).trained
        some = next(iter(factors["unet"]))
        np.testing.assert_allclose(weaker["unet"][some]["up"], 3 * factors["unet"][some]["up"], rtol=1e-6)
    for name, value in {"rank": 3, "layers": "attention", "text": False, "start": tmp_path / "none"}.items():
        with refused("rank" if name == "rank" else "start"):
            replace(again, **{name: value}).check(loaded.model, run)


def test_previews_are_quiet(model: Path, pictures: Path, tmp_path: Path) -> None:
    """About the words that the training teaches."""

    class Pipe:
        mesh, model = one(), None

        def __call__(self, prompt: Any, **_: Any) -> Any:
            warn(HintWarning("never seen: zorp"))
            return SimpleNamespace(images=[Image.new("RGB", (8, 8))] * len(prompt))

    run = training(model, pictures, tmp_path, prompts=("a zorp robot",))
    pipe: Any = Pipe()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        images = task._preview(run, ControlNetTask(), pipe, {}, {"prompt": run.prompts})(3, {})
    assert not seen
    assert images["previews"].shape == (8, 8, 3)
    assert (tmp_path / "previews" / "0000003.png").is_file()


def test_training_times_by_name(model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LossMade(Exception):
        pass

    def made(*_: Any, focus: Any, **__: Any) -> None:
        raise LossMade(focus)

    monkeypatch.setattr(task, "denoising_loss", made)
    for times, focus in {None: None, "uniform": None, "logit-normal": (0.0, 1.0)}.items():
        with pytest.raises(LossMade) as caught:
            train_lora(training(model, pictures, tmp_path / str(times), times=times), Lora(rank=2), one())
        assert caught.value.args == (focus,)
    with refused("times"):
        train_lora(training(model, pictures, tmp_path / "shifted", times="shifted"), Lora(rank=2), one())


def test_shifted_times_are_those_of_a_run_of_the_size() -> None:
    schedule = NoiseSchedule.flow(10, size_shift="exponential")
    networks = SimpleNamespace(tokens=lambda sizes: sizes[0][0] * sizes[0][1] // 256)
    made: Any = SimpleNamespace(
        scheduler=SimpleNamespace(schedule=schedule), networks=networks, family=SimpleNamespace(mu=None),
        defaults=SimpleNamespace(num_inference_steps=50),
    )  # fmt: skip
    t = np.arange(1, 11) / 10
    np.testing.assert_allclose(task._schedule(made, 1024, "uniform").sigmas, t)
    shift = np.exp(schedule.mu_of(4096))
    np.testing.assert_allclose(task._schedule(made, 1024, "shifted").sigmas, shift * t / (1 + (shift - 1) * t))
    made.family.mu = lambda tokens, steps: tokens / steps / 100
    shift = np.exp(4096 / 50 / 100)
    np.testing.assert_allclose(task._schedule(made, 1024, "shifted").sigmas, shift * t / (1 + (shift - 1) * t))


# Textual inversion


@pytest.mark.weekly
def test_a_word(model: Path, pictures: Path, tmp_path: Path) -> None:
    inversion = Inversion("<red-thing>", "picture", vectors=2)
    run = training(model, pictures, tmp_path, prompts=("a <red-thing>",))
    file = train_inversion(run, inversion, one())
    (entry,) = open_safetensors(file, plain_names=False)
    assert (entry.name, entry.shape) == ("<red-thing>", (2, 48))
    assert (tmp_path / "previews" / "0000004.png").is_file()
    pipe = canvax.load(model, mesh=one())
    assert pipe.adapters.load_embedding(file) == ("<red-thing>",)
    state = {entry.name for entry in open_safetensors(tmp_path / "embedding" / "state.safetensors")}
    assert {name for name in state if name.startswith("params.")} == {"params.text_encoder.rows"}


def test_files_of_a_word_on_the_way(tmp_path: Path) -> None:
    rows = {part: {"rows": np.ones((1, 4), np.float32)} for part in ("text_encoder", "text_encoder_2")}
    inversion = Inversion("<a>", "toy")
    model: Any = SimpleNamespace(overrides={})
    run = training(tmp_path, tmp_path, tmp_path)
    inversion.save(task.numbered(inversion.files(tmp_path)[0], 500), model, {}, rows, run)
    names = {"learned_embeds-000500.safetensors", "learned_embeds_2-000500.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_longer_run_keeps_both_files_of_a_word(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_without_training(monkeypatch)
    for steps in (5, 7):
        run = training(model, pictures, tmp_path, plan=replace(PLAN, steps=steps))
        train_inversion(run, Inversion("<red-thing>", "picture"), one())
        (tmp_path / "learned_embeds_2.safetensors").write_text(f"of a second encoder, {steps} steps")
    assert (tmp_path / "learned_embeds-000005.safetensors").is_file()
    assert (tmp_path / "learned_embeds_2-000005.safetensors").read_text() == "of a second encoder, 5 steps"


def test_words_that_cannot_be(model: Path, pictures: Path, tmp_path: Path) -> None:
    run = training(model, pictures, tmp_path / "run")
    with pytest.raises(InputError, match="common word"):
        train_inversion(run, Inversion("cat", "dog"), one())
    with pytest.raises(InputError, match="learn"):
        train_inversion(run, Inversion("<a>", "dog"), one(), learn="thing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no pictures"):
        train_inversion(training(model, empty, tmp_path / "run"), Inversion("<a>", "dog"), one())
    assert not (tmp_path / "run").exists()


# DreamBooth


@pytest.mark.weekly
def test_images_of_the_class_are_generated_once(model: Path, pictures: Path, tmp_path: Path) -> None:
    run = training(model, pictures, tmp_path / "run")
    folder = tmp_path / "class"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "mine.png")
    told: list[str] = []
    instance = Instance("a photo of sks", "a photo", folder, count=3, batch=2)
    subject = subject_of(instance, run, one(), told.append)
    names = {path.name for path in folder.iterdir()}
    assert names == {"mine.png", "class-00000.png", "class-00001.png"}
    assert "generating 2 pictures" in told[0]
    first = (folder / "class-00001.png").read_bytes()
    (folder / "class-00000.png").unlink()
    subject_of(instance, run, one())
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "class-00001.png").read_bytes() == first
    assert train_lora(run, Lora(rank=2), one(), subject=subject)


# ControlNet


def write_pairs(folder: Path) -> Path:
    write_pictures(folder)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for row in rows:
        name = f"edges-{row['file_name']}"
        Image.new("RGB", (40, 40), (255, 0, 9)).save(folder / name)
        row["conditioning_image"] = name
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.weekly
def test_a_controlnet(model: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    run = training(model, pairs, tmp_path / "run")
    folder = train_controlnet(run, one(), widths=(4, 4, 8, 8), save_dtype="float16")
    assert json.loads((folder / "config.json").read_text())["conditioning_embedding_out_channels"] == [4, 4, 8, 8]
    pipe = canvax.load(model, mesh=one(), controlnet=folder)
    assert pipe("a red picture", seed=1, control=Image.new("RGB", (64, 64)), **QUIET).pixels.shape == (1, 64, 64, 3)
    with pytest.raises(InputError, match="preview"):
        train_controlnet(training(model, pairs, tmp_path / "b", prompts=("a",)), one())


class Watching(ControlNetTask):
    """A ControlNet of one number, which nothing moves."""

    def begin(self, model: Any, params: Any, training: Training, dtype: Any) -> InitialState:
        start = super().begin(model, params, training, dtype)
        return replace(start, trained={"controlnet": {"w": np.zeros(1, np.float32)}})

    def save(self, target: Path, model: Any, params: Any, trained: Any, training: Training) -> Path:
        return target


@pytest.mark.slow
def test_flipped_pictures_keep_their_control_image_and_use_every_caption(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the networks get in training. The control image of a picture is the picture itself, so they must agree."""
    pairs, rng = tmp_path / "pairs", np.random.default_rng(0)
    pairs.mkdir()
    files = [rng.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(3)]
    for number, pixels in enumerate(files):
        Image.fromarray(pixels).save(pairs / f"{number}.png")
    captions = ["a red picture", "a green picture", "a blue picture"]
    names = [f"{number}.png" for number in range(3)]
    rows = [{"file_name": name, "conditioning_image": name, "text": captions} for name in names]
    (pairs / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[tuple[np.ndarray, ...]] = []

    def unet(p: Any, x: Any, times: Any, *, text: Any, residuals: Any, **_: Any) -> Any:
        jax.debug.callback(lambda *arrays: seen.append(tuple(map(np.asarray, arrays))), x, residuals, text)
        return jnp.zeros_like(x)

    monkeypatch.setattr(diffusion, "add_noise", lambda x0, noise, alphas: x0)
    monkeypatch.setattr(task, "encode_captions", lambda p, inputs, *_: {"text": inputs["text_encoder"]["ids"]})
    monkeypatch.setattr(diffusion, "unet", unet)
    monkeypatch.setattr(ControlNet, "encode", lambda self, p, images: (images,))
    monkeypatch.setattr(ControlNet, "prepare", lambda self, p, conditions, latents: {})
    monkeypatch.setattr(ControlNet, "residuals", lambda self, p, x, times, prepared, features, scales: features[0])
    plan = replace(PLAN, steps=8, chunk=8, batch=8)
    run = training(model, pairs, tmp_path / "run", plan=plan, flip=True, empty=0.0)
    assert task.train(run, Watching(), one(), subject=Subject(control_column="conditioning_image"))
    jax.effects_barrier()
    x0, hints, ids = (np.concatenate(arrays) for arrays in zip(*seen, strict=True))
    hints = np.rint(hints * 255).astype(np.uint8)
    forms = {form.tobytes(): number for number, form in enumerate([*files, *(pixels[:, ::-1] for pixels in files)])}
    assert {forms.get(hint.tobytes()) for hint in hints} == set(range(6))
    pipe = canvax.load(model, mesh=one())
    np.testing.assert_allclose(encode_pictures(pipe.params["vae"], hints, pipe.model.vae, one()), x0, atol=1e-3)
    used = {pipe.model.tokenizers["text_encoder"]([text], length=ids.shape[1]).tobytes() for text in captions}
    assert {row.astype(np.int32).tobytes() for row in ids} == used


def test_pairs_that_cannot_be_read(pictures: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    found = read_pictures(pairs, 32, control_column="conditioning_image")
    assert found.control is not None
    assert (found.control == (255, 0, 9)).all()
    assert found.digest() != read_pictures(pairs, 32).digest()
    with pytest.raises(InputError, match="has no control image 'depth'; its columns are conditioning_image, file_name"):
        read_pictures(pairs, 32, control_column="depth")
    (pairs / "edges-red.png").unlink()
    with pytest.raises(InputError, match="edges-red"):
        read_pictures(pairs, 32, control_column="conditioning_image")


def test_pictures_under_one_caption(pictures: Path) -> None:
    found = read_pictures(pictures, 32, captions=("a", "b"))
    assert len(found) == 4
    assert found.captions[0] == ["a", "b"]
    np.testing.assert_array_equal(found.frames[0], [32, 48, 0, 8])


# The command


@pytest.mark.weekly
def test_the_commands(model: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    shared = ["-m", str(model), "--size", "64", "--steps", "2", "-b", "8", "--json"]
    for words, target in (
        (["lora", str(pictures), "--rank", "2", "--format", "kohya", "--layers", "all"], ["0", "0.safetensors"][1]),
        (["textual-inversion", str(pictures), "--token", "<x>", "--initializer", "red"], "learned_embeds.safetensors"),
        (["dreambooth", str(pictures), "-p", "sks", "--lora"], "pytorch_lora_weights.safetensors"),
        (["dreambooth", str(pictures), "-p", "sks", "--text-encoder"], "model"),
        (["controlnet", str(pairs), "--hint-channels", "4,4,4,8"], "controlnet"),
    ):
        folder = tmp_path / "runs" / "0"
        shutil.rmtree(folder, ignore_errors=True)
        assert main(["train", *words, *shared, "-o", str(folder)]) == 0
        assert json.loads(capsys.readouterr().out) == {"output": str(folder / target), "finished": True}


def test_pictures_are_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is fetched, and before images of a class are generated."""
    for module in (task, dreambooth):
        monkeypatch.setattr(module, "open_model", lambda *_, **__: pytest.fail("the model was opened"))
    run = training(Path("owner/name"), tmp_path / "nothing", tmp_path / "run")
    with refused("pictures"):
        train_lora(run, Lora(), one())
    with refused("pictures"):
        subject_of(Instance("sks", "a dog"), run, one())
    assert not (tmp_path / "run").exists()


def test_flags_make_the_records() -> None:
    words = ["-m", "m", "--steps", "7", "-b", "2", "--lr", "1e-3", "--warmup", "3", "--final-lr", "0.5", "--ema", "0.9"]
    words += ["--weight-decay", "0", "--accumulate", "4", "-s", "9", "--size", "64", "--caption-column", "words"]
    words += ["--flip", "--min-snr", "5", "--empty-captions", "0.2", "--unmasked-weight", "1", "--remat", "--dtype"]
    words += ["float32", "--preview", "a", "--preview", "b", "--preview-every", "2", "--save-every", "3"]
    words += ["--enable-bucket", "--bucket-reso-steps", "32", "--min-bucket-reso", "48", "--bucket-max", "96"]
    words += ["--shuffle-caption", "--keep-tokens", "2", "--noise-offset", "0.05", "--times", "logit-normal"]
    words += ["--encoded", "e", "--validation", "0.1", "--reg-data-dir", "c", "--prior-loss-weight", "0.5"]
    words += ["--references", "r", "--caption-tag-dropout-rate", "0.1"]
    lora = ["--rank", "8", "--alpha", "2", "--layers", "all", "--text-encoder", "--text-lr", "1e-5", "--format"]
    lora += ["kohya", "--trigger", "w", "--title", "t", "--from", "f", "--save-dtype", "float16"]
    lora += ["--dora", "--conv-dim", "3", "--ranks", "a=1", "--ranks", "b=2"]
    arguments = parse(["train", "lora", "images", "-o", "run", *words, *lora, "--quantize", "int8"])
    plan = replace(
        LORA_PLAN, steps=7, batch=2, learning_rate=1e-3, warmup=3, final=0.5, average=0.9, weight_decay=0.0,
        accumulate=4, seed=9,
    )  # fmt: skip
    assert _training(arguments) == Training(
        "m", "images", Path("run"), plan, size=64, caption_column="words", flip=True, gamma=5.0, empty=0.2,
        unmasked_weight=1.0, remat=True, dtype=np.dtype("float32"), quantize="int8", prompts=("a", "b"),
        preview_steps=2, save_steps=3, buckets=True, bucket_step=32, bucket_min=48, bucket_max=96, encoded="e",
        shuffle_captions=True, keep_tokens=2, noise_offset=0.05, times="logit-normal",
        validation=0.1, regularisation="c", regularisation_weight=0.5, references="r", tag_dropout=0.1,
    )  # fmt: skip
    assert _made(Lora, arguments) == Lora(
        8, 2.0, "all", True, 1e-5, "kohya", "w", "t", "f", "float16", True, 3, {"a": 1, "b": 2}
    )
    assert _made(Lora, parse(["train", "lora", "i", "-o", "r", "--factor", "8", "--format", "kohya"])).lokr == 8
    for name, usual in (("lora", LORA_PLAN), ("controlnet", CONTROL_PLAN), ("finetune", PLAN_OF_MODELS)):
        made = _training(parse(["train", name, "images", "-o", "run"]))
        assert (made.plan, made.empty) == (usual, 0.1 if name == "finetune" else 0.0)


def test_training_loads_as_flags_say(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def opened(name: str, **keywords: Any) -> Any:
        given.update(keywords, name=name)
        raise CanvaxError("far enough")

    monkeypatch.setattr(task, "open_model", opened)
    words = ["--revision", "v2", "--variant", "fp16", "--prediction-type", "v_prediction", "--zero-snr"]
    words += ["--cache-dir", str(tmp_path), "--local-files-only", "-m", "o/model"]
    for name in ("lora", "finetune"):
        given.clear()
        assert main(["train", name, str(pictures), "-o", str(tmp_path / "run"), *words]) == 1
        wanted = {"name": "o/model", "revision": "v2", "variant": "fp16", "local_files_only": True}
        assert given | wanted == given
        overrides = given["overrides"]
        assert (overrides.prediction, overrides.scheduler) == ("v_prediction", ZERO_SNR)
    with refused("loading"):
        Training("m", "p", tmp_path, loading={"offload": True})


def test_records_have_the_choices_there_are() -> None:
    places = {"layers": LoraRecord, "names": LoraRecord, "learn": WordCaptions, "quantize": Load}
    choices = {name: declared(record)[name].kind.choices for name, record in places.items()}
    assert choices == {
        "layers": tuple(LAYERS), "names": FORMATS, "learn": tuple(CAPTIONS), "quantize": tuple(KINDS),
    }  # fmt: skip


def test_all_is_looked_at_before_weights_are_read(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvax.pipelines.loaded.load_components", lambda *_, **__: pytest.fail("weights were read"))
    for argument, more in {
        "size": {"size": 63},
        "prompts": {"prompts": ("x" * 100_001,)},
        "unmasked_weight": {"unmasked_weight": 0.5},
    }.items():
        with refused(argument):
            train_lora(training(model, pictures, tmp_path / "run", **more), Lora(), one())
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")  # without a table
    with refused("folder"):
        subject_of(Instance("sks", "a dog"), training(model, tmp_path, tmp_path / "run"), one())
    assert not (tmp_path / "run").exists()


def test_a_subject_without_a_prior(pictures: Path) -> None:
    found = subject_of(Instance("a photo of sks dog"), training(Path(), pictures, Path()), one())
    assert found == Subject(("a photo of sks dog",))


# TensorBoard

with_board = pytest.mark.skipif(find_spec("tensorboardX") is None, reason="needs tensorboardX")


def events(folder: Path) -> list[Any]:
    """What is in the files of a folder: records of a length, the event, and checksums around them."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]

    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return found


@with_board
def test_the_board(tmp_path: Path) -> None:
    """Curves of a run that was stopped and gone on with, and a picture."""
    plan = Plan(steps=6, batch=2, chunk=2, warmup=0, final=0.5, average=0.0, learning_rate=0.01, accumulate=2)

    def loss(p: Any, samples: Any, shared: Any, key: Any) -> Any:
        return jnp.square(p["w"]).sum() + 0 * samples["x"].sum(), {"mse": p["w"].sum()}

    def go_on(deadline: float | None) -> None:
        board = TensorBoard(tmp_path / "board")
        images = {"previews": np.full((4, 5, 3), 200, np.uint8)}
        session = Session(tmp_path / "run", "toy", one(), deadline=deadline, preview=lambda *_: images, log=board)
        fit({"w": np.ones(2, np.float32)}, loss, {"x": np.zeros(4, np.float32)}, 4, plan, session)
        board.close()

    go_on(0.0)
    go_on(None)
    found = events(tmp_path / "board")
    scalars: dict[str, list[tuple[int, float]]] = {}
    for event in found:
        for value in event.summary.value:
            if value.HasField("image"):
                assert np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string))).shape == (4, 5, 3)
            else:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    logged = [(line["step"], line["loss"]) for line in read_log(tmp_path / "run" / LOG)]
    assert [step for step, _ in logged] == [2, 4, 6]
    np.testing.assert_allclose(scalars["loss"], logged, rtol=1e-6)
    assert scalars.keys() == {"loss", "mse", "learning_rate", "images_per_second", "seconds"}
    rates = [0.01 * (0.5 + 0.25 * (1 + np.cos(np.pi * step / 6))) for step in (1, 3, 5)]
    np.testing.assert_allclose([rate for _, rate in scalars["learning_rate"]], rates, rtol=1e-5)
    assert all(pace > 0 for _, pace in scalars["images_per_second"])
    # The second file says from which step on older ones do not count.
    assert [event.step for event in found if event.HasField("session_log")] == [2, 4]


def test_tensorboard_is_looked_for_first(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is fetched; the message names what to install."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(task, "open_model", lambda *_, **__: pytest.fail("the model was opened"))
    monkeypatch.setattr(dreambooth, "open_model", lambda *_, **__: pytest.fail("the model was opened"))
    for words in (["lora"], ["dreambooth", "-p", "sks", "--class-prompt", "a"]):
        folders = ["--tensorboard", str(tmp_path / "board"), "-o", str(tmp_path / "run")]
        assert main(["train", words[0], str(pictures), *words[1:], *folders]) == 2
        assert 'pip install ".[tensorboard]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@with_board
@pytest.mark.weekly
def test_one_process_writes_for_tensorboard(
    model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    made = training(model, pictures, tmp_path / "1", prompts=("a red picture",), tensorboard=first)
    assert train_lora(made, Lora(rank=2), one())
    found = [value for event in events(first) for value in event.summary.value]
    assert [value.tag for value in found if value.HasField("image")] == ["previews"]
    assert sum(value.tag == "loss" for value in found) == 2
    monkeypatch.setattr(task, "is_main_process", lambda mesh: False)
    assert train_lora(training(model, pictures, tmp_path / "2", tensorboard=second), Lora(rank=2), one())
    assert not second.exists()
