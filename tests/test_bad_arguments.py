"""Arguments of another kind than a function takes: for each function, argument by argument, the same sentence."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import canvax
from canvax import samplers
from canvax.checked import checked, placed
from canvax.errors import refuse_tracers
from canvax.files import named_folder
from canvax.samplers import NoiseSchedule, SamplerOptions, build_table, from_scheduler_config
from canvax.train import dreambooth, finetune, loop, lora, pictures, task, textual_inversion
from canvax.weights.source import BUNDLED

pytestmark = pytest.mark.bad


def deleted() -> jax.Array:
    array = jnp.ones(3) + 1
    array.delete()
    return array


class Silent:
    """What raises whenever it is looked at."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("gone")

    __repr__ = __len__ = __iter__ = __array__ = __bool__ = _fail


STRANGE = (object(), b"x", {1, 2}, 1j, np.datetime64("2020"), np.array([None, "a"], object), Silent, Silent())
"""What none of the functions below takes for anything."""

CONFIG = {"_class_name": "DDIMScheduler", "beta_schedule": "linear", "num_train_timesteps": 1000}
SCHEDULER = from_scheduler_config(CONFIG)
TABLE = build_table(SCHEDULER, 2)
X = np.zeros((1, 2, 2, 1))
PLAN = loop.Plan(1, 1)
TRAINING = task.Training("./none", "./none", Path("none"), PLAN)


def defaults(record: Any) -> dict[str, Any]:
    return {one.name: one.default for one in dataclasses.fields(record) if one.init and not one.name.startswith("_")}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "SamplerOptions": (SamplerOptions, defaults(SamplerOptions)),
    "build_table": (build_table, {"scheduler": SCHEDULER, "steps": 4, "sampler": None, "eta": None, "spacing": None, "guidance": 1.0,
                                  "rescale": 0.0, "start": 0.0, "end": 1.0, "skip": 0, "guidance_interval": (0, 1), "settings": None}),
    "run": (samplers.run, {"table": TABLE, "denoise": lambda x, t, r: x, "x": X, "noises": None}),
    "find": (samplers.find, {"name": "euler"}), "curve_label": (samplers.curve_label, {"name": "karras"}), "curve_named": (samplers.curve_named, {"name": "karras"}),
    "from_scheduler_config": (from_scheduler_config, {"config": CONFIG, "sampler": None}),
    "NoiseSchedule": (NoiseSchedule, {"alphas_cumprod": [0.9, 0.1], "prediction_type": "epsilon", "sigma_data": None, "timestep_unit": "index", "shift": 1.0}),
    "edm": (NoiseSchedule.edm, {"sigma_min": 0.1, "sigma_max": 9.0, "sigma_data": 0.5, "prediction_type": "epsilon", "num_train_timesteps": 9}),
    "sigma_at": (SCHEDULER.schedule.sigma_at, {"timesteps": 5}), "window": (TABLE.window, {"lo": 0, "size": 1}),
    "take": (TABLE.take, {"lo": 0, "hi": None}), "noised": (TABLE.noised, {"x0": X, "eps": X, "row": 0}),
    "Memory": (canvax.Memory, {"weights": 1, "programs": {}, "limit": None}), "make_mesh": (canvax.make_mesh, {"data": None, "model": 1}),
    "convert": (canvax.convert, {"model": "none", "output": "m", "overwrite": False}), "load_preview": (canvax.load_preview, {"model": "none", "cache_dir": None}),
    "Plan": (loop.Plan, defaults(loop.Plan) | {"steps": 1, "batch": 1, "rates": {}}),
    "Session": (loop.Session, {"folder": Path("s"), "name": "n", "mesh": None, "deadline": None, "save_every": 300.0, "preview": None, "watch": None}),
    "batch_indices": (loop.batch_indices, {"seed": 0, "start": 0, "steps": 1, "batch": 1, "samples": 4}),
    "Training": (task.Training, {name: value for name, value in defaults(task.Training).items() if name != "dtype"} | {"model": "m", "pictures": "p", "folder": Path("f")}),
    "Subject": (task.Subject, defaults(task.Subject)), "train": (task.train, {"training": TRAINING, "aim": finetune.Whole(), "mesh": None, "deadline": None}),
    "Whole": (finetune.Whole, {"text": False, "text_rate": None}), "Lora": (lora.Lora, {"rank": 4, "alpha": None, "layers": "attention", "names": "peft", "trigger": ""}),
    "train_lora": (lora.train_lora, {"training": TRAINING, "lora": lora.Lora(), "mesh": None}), "Instance": (dreambooth.Instance, defaults(dreambooth.Instance) | {"prompt": "a"}),
    "Inversion": (textual_inversion.Inversion, {"token": "<a>", "initializer": "b", "vectors": 1}),
    "read_pictures": (pictures.read_pictures, {"source": "p", "size": 8, "caption_column": "text", "captions": (), "control_column": None, "limit": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_another_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, given = FUNCTIONS[name]
    good = {one: canvax.make_mesh() if one == "mesh" else value for one, value in given.items()}
    for argument in good:
        for value in (*STRANGE, deleted()):
            with pytest.raises(canvax.InputError, match=argument):
                function(**{**good, argument: value})
    with pytest.raises(canvax.InputError, match="has no argument 'nope'"):
        function(**good, nope=1)
    assert not list(tmp_path.iterdir())


RANGES: list[tuple[Callable[[], Any], str]] = [
    (partial(SamplerOptions, s_noise=-1), "s_noise=-1"), (partial(SamplerOptions, sigmas="nope"), "sigmas='nope'"), (partial(SamplerOptions, sigmas=(1, 2)), "does not fall"),
    (partial(SamplerOptions, disable_corrector=""), "disable_corrector"), (partial(TABLE.window, -1, 2), "lo=-1"), (partial(build_table, SCHEDULER, 4, skip=-1), "skip=-1"),
    (partial(NoiseSchedule, [0.9], timestep_unit="x"), "timestep_unit='x'"), (partial(NoiseSchedule.edm, 2, 1, 1, "epsilon", 9), "in order"), (partial(NoiseSchedule.flow, 0), "num_train_timesteps=0"),
    (partial(SCHEDULER.schedule.timestep_of, [-1.0]), "sigmas="), (partial(samplers.run, TABLE, lambda x, t: x, X), "denoise=.* cannot be called"), (partial(samplers.run, TABLE, lambda x, t, r: "a", X), "denoise returned"),
    (partial(samplers.run, TABLE, lambda x, t, r: x, X, X), "noises has shape"), (partial(samplers.run, build_table(SCHEDULER, 2, sampler="euler_a"), lambda x, t, r: x, X), "noises=None"),
    (partial(finetune.Whole, text_rate=1e-4), "without text"), (partial(task.Subject, prior_caption="a"), "their folder"), (partial(loop.batch_indices, 0, 0, 1, 1, 0), "samples=0"),
    (partial(textual_inversion.Inversion, "<a>", " "), "initializer"), (partial(canvax.Memory, -1), "weights=-1"), (partial(canvax.Options, spacing="nope"), "spacing='nope'"),
    (partial(canvax.Options, prompt_2=5), "prompt_2=5"), (partial(canvax.Options, sigmas={3, 2}), "sigmas="), (partial(canvax.Options, tiling=np.zeros(3)), "^tiling="), (partial(named_folder, "output", "x.txt"), "ends a file"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(RANGES)))
def test_values_that_mean_nothing(index: int) -> None:
    do, words = RANGES[index]
    with pytest.raises(canvax.InputError, match=words):
        do()


def test_what_an_annotation_takes() -> None:
    @checked
    def function(
        a: int, *more: str, b: float = 1.0, c: Literal["x", "y"] = "x", d: Sequence[int] = (), e: Any = None
    ) -> Any:
        return a, more, b, c, d, e

    given = function(np.int32(3), "a", b=jnp.float32(2), c="y", d=np.array([1, 2]), e=object)
    assert given[:3] == (3, ("a",), 2)
    for arguments, keywords, said in (
        ((), {}, "missing.*'a'"), ((True,), {}, "a=True is not a whole number"), ((1, 2), {}, r"more=\(2,\) is not text each"), ((1,), {"b": float("inf")}, "b=inf is not a finite number; the default is 1.0"),
        ((1,), {"c": "z"}, "c='z' is not 'x' or 'y'"), ((1,), {"d": "12"}, "d='12' is not a list"), ((1,), {"d": [1, "a"]}, "each a whole number"), ((1,), {"e": deleted()}, "e is an array of JAX that was deleted"), ((1,), {"a": 2}, "multiple values"),
        ((1,), {"B": 2}, "no argument 'B'; did you mean 'b'"),
    ):  # fmt: skip
        with pytest.raises(canvax.InputError, match=said):
            function(*arguments, **keywords)

    @checked
    def secret(token: str) -> None: ...

    with pytest.raises(canvax.InputError) as caught:
        secret(b"hf_abc")  # type: ignore[arg-type]
    assert "hf_abc" not in str(caught.value)

    @placed
    def lenient(a: int) -> Any:
        return a

    assert lenient("x") == "x"  # type: ignore[arg-type]
    with pytest.raises(canvax.InputError, match="no argument"):
        lenient(1, b=2)  # type: ignore[call-arg]


LOSSES: list[tuple[dict[str, Any], str]] = [
    ({"loss": lambda p, d, i, k: jnp.float32(0)}, "loss returned"), ({"loss": lambda p, d, i, k: (jnp.ones(3), {})}, "loss returned"), ({"loss": lambda p, d: 0}, "loss=.* cannot be called"),
    ({"params": {"w": "x"}}, r"params\['w'\]='x'"), ({"params": {"w": None}}, "params"), ({"params": {}}, "nothing to train"), ({"params": {"w": np.zeros(4, int)}}, "no gradient"), ({"data": {"x": "a"}}, r"data\['x'\]"), ({"data": {"x": np.zeros((3, 4))}}, r"data\['x'\].*samples=4"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(LOSSES)))
def test_what_is_trained_is_looked_at_before_it_is_compiled(index: int, tmp_path: Path) -> None:
    changes, words = LOSSES[index]
    session = loop.Session(tmp_path / "s", "n", canvax.make_mesh())
    given: dict[str, Any] = {
        "params": {"w": np.zeros(4, np.float32)},
        "data": {"x": np.eye(4, dtype=np.float32)},
        "samples": 4,
        "plan": PLAN,
    }
    given |= {"loss": lambda p, d, s, k: ((d["x"] @ p["w"]).mean(), {}), "session": session}
    with pytest.raises(canvax.InputError, match=words):
        loop.fit(**given | changes)
    assert not list(tmp_path.iterdir())


CALLS: dict[str, tuple[Callable[[canvax.StableDiffusion], Any], str]] = {
    "guidance": (lambda pipe: pipe.compile(guidance="no"), "guidance='no' is not True or False"),  # pyright: ignore[reportArgumentType]
    "encode": (lambda pipe: pipe.encode("a", "b"), "prompt_2"), "scale": (lambda pipe: pipe.encode("a", guidance_scale=3), "guidance_scale"),
    "timestep": (lambda pipe: pipe.denoiser(jnp.zeros((1, 8, 8, 32)), -1, pipe.encode("a")), "timestep=-1"), "remove": (lambda pipe: pipe.adapters.remove(["a"]), "names"),  # pyright: ignore[reportArgumentType]
    "get": (lambda pipe: pipe.adapters[["a"]], "adapter"), "places": (lambda pipe: pipe.adapters.beside(None, -1), "places=-1"), "no adapter": (lambda pipe: pipe.with_ip_adapter(None, "x"), "without ip_adapter"),  # pyright: ignore[reportArgumentType]
    "token": (lambda pipe: pipe.adapters.load("a", "b/c", token="x y"), "token"), "cache": (lambda pipe: pipe.adapters.load("a", "b/c", cache_dir=""), "cache_dir"),
    "save": (lambda pipe: pipe.save("m.txt"), "ends a file"), "path": (lambda pipe: pipe.save(None), "folder=None"),  # pyright: ignore[reportArgumentType]
    "dtype": (lambda pipe: pipe.save("m", dtype=jnp.ones(2)), "dtype="),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_methods(kind: str, emoji: canvax.StableDiffusion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    do, words = CALLS[kind]
    with pytest.raises(canvax.InputError, match=words):
        do(emoji)
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_its_shard_has_not(tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED["emoji"], tmp_path / "model")
    whole = model / "vae" / "diffusion_pytorch_model.safetensors"
    arrays, shard = load_file(whole), "diffusion_pytorch_model-00001-of-00001.safetensors"
    save_file(arrays, model / "vae" / shard)
    whole.unlink()
    index = model / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys([*arrays, "nope.weight"], shard)}))
    with pytest.raises(canvax.CheckpointError, match=r"'nope.weight' is in .*, which has none"):
        canvax.load(model, progress=False)


@pytest.mark.slow
def test_an_embedding_in_a_table_of_parameters(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    held = torch.nn.ParameterDict({"*": torch.nn.Parameter(torch.ones(2, 8))})
    for new in (True, False):
        torch.save({"string_to_param": held, "name": "a"}, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        with pytest.warns(UserWarning, match="left out"):
            canvax.convert(tmp_path / "a.pt", tmp_path / "a.safetensors", overwrite=True)
        assert [array.shape for array in load_file(tmp_path / "a.safetensors").values()] == [(2, 8)]


@pytest.mark.slow
def test_a_hint_for_what_changes_nothing(emoji: canvax.StableDiffusion) -> None:
    more: dict[str, Any] = {"num_inference_steps": 1, "progress": False, "seed": 1}
    with pytest.warns(canvax.errors.HintWarning, match="reads no negative prompt"):
        emoji("a", "b", guidance_scale=1, **more)
    with pytest.warns(canvax.errors.HintWarning, match="guidance_scale=5 beside guidance_steps"):
        emoji("a", guidance_scale=5, guidance_steps=[2.0], **more)
    with pytest.warns(canvax.errors.HintWarning, match="spacing without steps to place"):
        emoji("a", sampler="euler", sigmas=[5.0], spacing="trailing", progress=False)
    with pytest.warns(canvax.errors.HintWarning, match="the curve of sigmas does: changes nothing"):
        emoji("a", sigmas="karras", spacing="leading", **more)
    with pytest.warns(canvax.errors.HintWarning, match="clip_skip beside an encoded prompt"):
        emoji(emoji.encode("a"), clip_skip=1, **more)
    noise = np.random.default_rng(0).standard_normal((1, 8, 8, 32))
    for factor in (0, 14.6):
        with pytest.warns(canvax.errors.HintWarning, match=r"latents have a standard deviation of (0|14\.\d),"):
            emoji("a", latents=factor * noise, **more)
    for text in ("a <toy>", "a embedding:toy.pt"):
        with pytest.warns(canvax.errors.HintWarning, match=f"{text[2:]} is read as text: no textual inversion"):
            emoji("a", text, **more)
    image, mask = np.zeros((64, 64, 3)), np.ones((64, 64))
    with pytest.warns(canvax.errors.HintWarning, match="nothing of the image stays; give less"):
        emoji("a", image=image, strength=1, **more)
    with pytest.warns(canvax.errors.HintWarning, match="mask_fill without a strength below 1"):
        emoji("a", image=image, mask=mask, mask_fill="noise", **more)
    with warnings.catch_warnings():
        warnings.simplefilter("error", canvax.errors.HintWarning)
        for spacing in ("leading", "trailing"):  # the model's own, too: it gives the curve's ends
            emoji("a", sampler="euler", sigmas="karras", spacing=spacing, **more)
        emoji("a", sigmas="automatic", spacing="trailing", **more)
        emoji("a <3 b>c", latents=noise, **more)
        emoji("a", image=image, mask=mask, mask_fill="fill", **more)  # which is seen beside the mask's edge


def test_tracers_in_tables_whose_names_cannot_be_sorted() -> None:
    refuse_tracers("control", [{"depth": 1, 3: 2}])
    with pytest.raises(canvax.InputError, match="control is traced"):
        jax.jit(lambda x: refuse_tracers("control", [{"depth": x, 3: 2}]))(1.0)


def test_a_forked_process_is_told_so() -> None:
    """It has none of JAX's threads, and would wait for them for ever."""
    script = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
import canvax
pipe = canvax.load("emoji", progress=False)
def said(name):
    try:
        pipe("a cat") if name == "call" else pipe.encode("a cat") if name == "encode" else canvax.load("emoji")
    except canvax.InputError as error:
        return str(error)
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(*pool.map(said, ["call", "encode", "load"]), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("JAX does not survive that; start it with multiprocessing.get_context('spawn')") == 3
