"""A model family that the package does not know, examples/new_family.py, and what its records must do."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import canvax
import canvax.extend
from canvax.cli import preview
from canvax.compile import key
from canvax.compile.aot import Build
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.engine import batch
from canvax.families import known
from canvax.families.base import Family, parsed
from canvax.families.known import PRESETS
from canvax.guidance import KINDS
from canvax.models.clip import ClipEncoder
from canvax.models.configs import ClipTextConfig, Config
from canvax.models.controlled import Controlled
from canvax.models.denoiser import (
    PERTURBED,
    PROMPT,
    Denoiser,
    DenoiserWrapper,
    Facts,
    Packing,
    Perturbed,
    Reusing,
    Row,
    UNetDenoiser,
)
from canvax.models.flux2 import Flux2Config, Flux2Denoiser
from canvax.models.networks import Networks
from canvax.models.text import Conditions, TextEncoder, TextEncoders
from canvax.nn import linear, linear_spec
from canvax.originals import foreign
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import place_all
from canvax.params import Params, init_params
from canvax.samplers import NoiseSchedule, SamplerOptions
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.work import check
from canvax.train import low_rank
from canvax.types import Array
from canvax.weights.files import ModelFiles
from canvax.weights.lora import adapter_info, read_adapter
from conftest import use_folder
from examples.new_family import CHANNELS, FACTOR, FAMILY, NETWORKS, WIDTH, Letters, Mlp, OneAfterAnother, Squares
from tests.support.adapter_files import Draw, write
from tests.support.refusals import refused
from tests.support.small_checkpoint import UNET


def pipeline_of(networks: Networks, family: Family = FAMILY, **more: Any) -> canvax.Pipeline:
    params = {name: init_params(spec, seed) for seed, (name, spec) in enumerate(networks.specs().items())}
    scheduler = "FlowMatchEulerDiscreteScheduler"
    return canvax.pipeline_of(networks, params, scheduler, family=family, mesh=make_mesh(jax.devices()[:1]), **more)


@pytest.fixture(scope="module")
def pipe() -> canvax.Pipeline:
    return pipeline_of(NETWORKS)


def draw(pipe: canvax.Pipeline, prompt: Any = "a fox", **keywords: Any) -> canvax.Result:
    return pipe(prompt, **{"seed": 1, "options": canvax.Options(progress=False)} | keywords)


def test_the_public_call_makes_an_image(pipe: canvax.Pipeline) -> None:
    result = draw(pipe)
    assert result.images[0].size == (8 * FACTOR, 8 * FACTOR)
    assert result.latents.shape == (1, 8, 8, CHANNELS)
    again = draw(pipe, ["a fox", "a hen"], seed=[1, 2], height=24, width=16, sampler="DPM++ 2M", num_inference_steps=6)
    assert again.pixels.shape == (2, 24, 16, 3)
    assert np.abs(again.pixels[0] - again.pixels[1]).max() > 0.01


class Leaps(Mlp):
    """The same network, as if distilled for the length of each step."""

    facts = Facts(native_size=(8, 8), distilled=True, flow_map=True)


@pytest.mark.parametrize("denoiser", [Mlp(), Leaps()])
def test_the_times_of_a_family(denoiser: Denoiser) -> None:
    """They are even by default, else those of the scheduler's class in diffusers."""
    networks = dataclasses.replace(NETWORKS, denoiser=denoiser)
    for family, times in ((FAMILY, [1000, 500]), (dataclasses.replace(FAMILY, even_times=False), [1000, 1])):
        pipe = pipeline_of(networks, family)
        tables = [pipe.start("a fox", num_inference_steps=2, sampler=name).table for name in (None, "Euler a")]
        np.testing.assert_allclose([table.timestep for table in tables], [times, times])


def test_a_model_takes_a_scheduler_object() -> None:
    config = canvax.load("emoji", progress=False).model.scheduler.config
    scheduler = canvax.extend.from_scheduler_config({**config, "beta_end": 0.01, "_class_name": "DDPMScheduler"})
    got = canvax.load("emoji", progress=False, scheduler=scheduler).model.scheduler
    assert got.config.items() >= scheduler.config.items()


def test_arguments_that_do_not_fit_are_refused(pipe: canvax.Pipeline) -> None:
    flow = dataclasses.replace(NETWORKS, prediction="flow_prediction")
    clip = dataclasses.replace(NETWORKS, text=canvax.load("emoji").model.networks.text)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("params", lambda: canvax.pipeline_of(NETWORKS, {}, "DDIMScheduler")),
        ("params", lambda: canvax.pipeline_of(NETWORKS, pipe.params | {"vae": {}}, "DDIMScheduler")),
        ("params", lambda: pipe.with_denoiser(pipe.model.networks.denoiser, {})),
        ("scheduler", lambda: canvax.pipeline_of(flow, pipe.params, "DDIMScheduler")),
        ("tokenizers", lambda: canvax.pipeline_of(clip, pipe.params, "DDIMScheduler")),
    ]
    for argument, call in calls:
        with pytest.raises(canvax.InputError) as caught:
            call()
        assert argument in (caught.value.argument, str(caught.value).split(".")[0])


def test_a_prediction_is_that_of_the_scheduler(pipe: canvax.Pipeline) -> None:
    """Or it is refused; without a declaration it is any."""
    velocity = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
    fits = {"epsilon": "DDIMScheduler", "v_prediction": velocity, "flow_prediction": "FlowMatchEulerDiscreteScheduler"}
    for declared in (None, *fits):
        for kind, scheduler in fits.items():
            networks = dataclasses.replace(NETWORKS, prediction=declared)
            with nullcontext() if declared in (None, kind) else refused("scheduler"):
                made = canvax.pipeline_of(networks, pipe.params, scheduler, mesh=pipe.mesh)
                assert made.model.scheduler.schedule.prediction_type == kind


def test_networks_that_cannot_be_one_model() -> None:
    reader, mlp, vae = (Letters(name, (5,)) for name in ("reader", "mlp", "vae"))
    alone: Any = reader
    for text in (alone, TextEncoders(alone)):
        with refused("text"):
            dataclasses.replace(NETWORKS, text=text)
    for encoders in ((reader, reader), (mlp,), (vae,)):
        with refused("component"):
            dataclasses.replace(NETWORKS, text=TextEncoders(encoders))
    with refused("prediction"):
        dataclasses.replace(NETWORKS, prediction="velocity")


def test_encoders_in_a_list_are_those_in_a_tuple() -> None:
    encoders: Any = [*NETWORKS.text.encoders]
    text = OneAfterAnother(encoders)
    assert (text, hash(text)) == (NETWORKS.text, hash(NETWORKS.text))


def test_the_error_of_a_missing_part_has_its_name() -> None:
    @dataclass(frozen=True)
    class Empty(TextEncoder):
        component: str = "empty"
        lengths: tuple[int, ...] = (5,)

    calls: dict[str, Callable[[], Any]] = {
        "spec": lambda: Empty().spec,
        "outputs": lambda: Empty().outputs(5, np.float32),
        "encode": lambda: Empty().encode({}),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"Empty.*{name}"):
            call()


class WiderText(Letters):
    def outputs(self, length: int, dtype: Any) -> Any:
        return {"text": jax.ShapeDtypeStruct((length, WIDTH + 1), dtype)}


def test_a_denoiser_that_cannot_read_the_other_networks(pipe: canvax.Pipeline) -> None:
    wider = dataclasses.replace(NETWORKS, text=TextEncoders((WiderText("reader", (5,)),)))
    mine = Flat(CHANNELS + 1)
    with refused("denoiser"):
        pipeline_of(wider)
    with refused("denoiser"):
        pipe.with_denoiser(mine, init_params(mine.spec, 0))


def test_saved_parameters_are_loaded(pipe: canvax.Pipeline, tmp_path: Path) -> None:
    """The dtypes are those of the files. A file that does not fit is refused."""
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), pipe.params)
    for params, folder in ((pipe.params, tmp_path / "whole"), (low, tmp_path / "low")):
        loaded = canvax.extend.load_params(pipe.save(folder, params), NETWORKS.specs())
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
        assert jax.tree.map(lambda leaf: leaf.dtype, loaded) == jax.tree.map(lambda leaf: leaf.dtype, params)
    for folder, spec in ((tmp_path / "whole", {"embed": Mlp().spec["out"]}), (tmp_path / "none", Mlp().spec)):
        with pytest.raises(canvax.CheckpointError):
            canvax.extend.load_params(folder, {"mlp": spec})


def test_a_pipeline_with_another_denoiser_is_saved(tmp_path: Path) -> None:
    emoji = canvax.load("emoji", progress=False)
    mine = Flat(emoji.model.networks.vae.latent_channels)
    pipe = emoji.with_denoiser(mine, init_params(mine.spec, 0))
    pipe.save(tmp_path / "out")
    loaded = canvax.extend.load_params(tmp_path / "out", {"flat": mine.spec})
    np.testing.assert_array_equal(loaded["flat"]["out"]["weight"], pipe.params["flat"]["out"]["weight"])
    index = json.loads((tmp_path / "out/model_index.json").read_text("utf-8"))
    assert index["unet"] == [None, None]
    assert index["flat"][0] == "diffusers"


@dataclass(frozen=True)
class Flat(Denoiser):
    """A matrix for each latent."""

    channels: int
    component, facts = "flat", Facts(native_size=(8, 8))

    @property
    def spec(self) -> Any:
        return {"out": linear_spec(self.channels, self.channels)}

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        return linear(p["out"], x), memory


TEXT = TextEncoders((Letters("text_encoder", (5,)),))


@dataclass(frozen=True)
class GainConfig(Config):
    """A value that no shape shows."""

    gain: float = 1.0


@dataclass(frozen=True)
class Gained(Mlp):
    """The same network with a config."""

    config: GainConfig = GainConfig()


def read_gained(files: ModelFiles) -> Networks:
    config = parsed(GainConfig, files, "mlp")
    return Networks(Gained(config), Squares(), TEXT)


GAINED = dataclasses.replace(
    FAMILY, name="gained", pipelines=("GainedPipeline",), read=read_gained,
    classes={"mlp": ("Gained",), "text_encoder": ("Letters",), "vae": ("Squares",), "scheduler": ()},
)  # fmt: skip


def test_an_unknown_field_of_a_users_config() -> None:
    """The error has the name of the attribute that ignores fields; for configs of the package it has not."""
    for config, is_users in ((GainConfig, True), (type(UNET), False)):
        with pytest.raises(canvax.CheckpointError) as caught:
            config.from_dict({"gian": 1.0})
        assert (f"{config.__name__}.IGNORED" in str(caught.value)) is is_users


def saved(pipe: canvax.Pipeline, folder: Path, **model: Any) -> list[str]:
    """Save a pipeline with changes of its model; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataclasses.replace(pipe, model=dataclasses.replace(pipe.model, **model)).save(folder, pipe.params)
    return [str(each.message) for each in caught if isinstance(each.message, canvax.HintWarning)]


def test_values_that_a_folder_cannot_hold_are_in_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of a record is written; other values of networks, scheduler and tokenizers are in warnings."""
    monkeypatch.setattr(known, "_registered", {})
    networks = Networks(Gained(GainConfig(2.5)), Squares(), TEXT)
    pipe = pipeline_of(networks, canvax.extend.register(GAINED))
    assert not saved(pipe, tmp_path / "all")
    loaded = canvax.load(tmp_path / "all", mesh=pipe.mesh)
    assert loaded.model.networks == networks
    replace, scheduler, longer = dataclasses.replace, pipe.model.scheduler, (Letters("text_encoder", (7,)),)
    changes: dict[str, dict[str, Any]] = {
        "schedule.shift": {"scheduler": replace(scheduler, schedule=replace(scheduler.schedule, shift=2.0))},
        "options.rho": {"scheduler": replace(scheduler, options=replace(scheduler.options, rho=3.0))},
        "tokenizer": {"tokenizers": {"text_encoder": {}}},
        "text_encoder.lengths": {"networks": replace(networks, text=TextEncoders(longer))},
        "mlp is": {"networks": replace(networks, denoiser=Mlp())},
        "KeyError": {"family": replace(GAINED, read=lambda files: files.configs["lost"])},
    }
    for i, (name, change) in enumerate(changes.items()):
        (warning,) = saved(pipe, tmp_path / str(i), **change)
        assert name in warning
    (warning,) = saved(loaded.with_denoiser(Gained(GainConfig(4.0))), tmp_path / "again")  # its folder has a config
    assert "mlp.config.gain" in warning


@dataclass(frozen=True)
class SideConfig(Config):
    """The side of a square, which only one of two autoencoders has."""

    side: int = 2


@dataclass(frozen=True)
class Sided(Squares):
    """The same autoencoder with a config."""

    config: SideConfig = SideConfig()


def read_sided(files: ModelFiles, kind: type[SideConfig]) -> Networks:
    sided = files.components["vae"] == "Sided"
    return dataclasses.replace(read_gained(files), vae=Sided(parsed(kind, files, "vae")) if sided else Squares())


def test_a_component_of_several_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``CLASS`` is saved; without it the first, and the warning has the cure."""
    monkeypatch.setattr(known, "_registered", {})

    class Named(SideConfig):
        CLASS = "Sided"

    classes = {**GAINED.classes, "vae": ("Squares", "Sided")}
    for kind, is_named in ((Named, True), (SideConfig, False)):
        family = dataclasses.replace(GAINED, read=partial(read_sided, kind=kind), classes=classes)
        pipe = pipeline_of(Networks(Gained(), Sided(kind(3)), TEXT), canvax.extend.register(family))
        warned = saved(pipe, tmp_path / kind.__name__)
        assert not warned if is_named else "CLASS" in warned[0]
        assert (canvax.load(tmp_path / kind.__name__, mesh=pipe.mesh).model.vae == Sided(kind(3))) is is_named


def own_times(config: Any, files: ModelFiles) -> canvax.extend.Scheduler:
    fields = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": config["bend"]}
    return canvax.extend.from_scheduler_config(fields)


@pytest.fixture
def gained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., canvax.Pipeline]:
    """Load a folder of the family ``GAINED`` with changes of the family."""
    networks = Networks(Gained(), Squares(), TEXT)
    pipe = pipeline_of(networks, GAINED)
    pipe.save(tmp_path / "gained")

    def load(argument: dict[str, Any] | None = None, **changes: Any) -> canvax.Pipeline:
        monkeypatch.setattr(known, "_registered", {})
        canvax.extend.register(dataclasses.replace(GAINED, **changes))
        return canvax.load(tmp_path / "gained", mesh=pipe.mesh, progress=False, **(argument or {}))

    return load


def test_a_scheduler_with_a_class_of_its_own(gained: Callable[..., canvax.Pipeline], tmp_path: Path) -> None:
    """The family reads it. Without its function or the class it is refused."""
    index = json.loads((tmp_path / "gained/model_index.json").read_text("utf-8"))
    index["scheduler"] = ["gained", "BentScheduler"]
    (tmp_path / "gained/model_index.json").write_text(json.dumps(index), "utf-8")
    (tmp_path / "gained/scheduler/scheduler_config.json").write_text('{"bend": 2.5}', "utf-8")
    classes = {**GAINED.classes, "scheduler": ("BentScheduler",)}
    pipe = gained(scheduler=own_times, classes=classes)
    assert pipe.model.scheduler.schedule.shift == 2.5
    pipe.save(tmp_path / "again")
    assert canvax.load(tmp_path / "again", mesh=pipe.mesh).model.scheduler.schedule.shift == 2.5
    for changes in ({"classes": classes}, {"scheduler": own_times}):
        with pytest.raises(canvax.CheckpointError):
            gained(**changes)


def bent(config: Any, files: ModelFiles | None = None) -> canvax.extend.Scheduler:
    schedule = NoiseSchedule(np.linspace(0.999, 0.001, 100) ** config["bend"], "v_prediction")
    spec, _ = canvax.samplers.find("Heun")
    return canvax.extend.Scheduler(schedule, spec, SamplerOptions(spacing="trailing"), config)


def test_samplers_beside_a_scheduler_with_a_class_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its noise levels and the fields of its config that diffusers has; ``save`` writes all fields."""
    monkeypatch.setattr(known, "_registered", {})
    classes = {**GAINED.classes, "scheduler": ("BentScheduler",)}
    family = canvax.extend.register(dataclasses.replace(GAINED, scheduler=bent, classes=classes))
    fields = {"bend": 2.5, "beta_schedule": "bent", "prediction_type": "bent", "timestep_spacing": "leading"}
    scheduler = bent({"_class_name": "BentScheduler", **fields})
    networks = Networks(Gained(), Squares(), TEXT)
    params = {name: init_params(spec, 0) for name, spec in networks.specs().items()}
    made = canvax.pipeline_of(networks, params, scheduler, family=family, mesh=make_mesh(jax.devices()[:1]))
    assert not saved(made, tmp_path / "made")
    config = tmp_path / "made/scheduler/scheduler_config.json"
    assert json.loads(config.read_text("utf-8")) == scheduler.config
    config.write_text(json.dumps(fields), "utf-8")  # the index has the class
    loaded = canvax.load(tmp_path / "made", mesh=made.mesh)
    assert loaded.model.scheduler.config == scheduler.config
    np.testing.assert_array_equal(loaded.model.scheduler.schedule.alphas_cumprod, scheduler.schedule.alphas_cumprod)
    stock = canvax.extend.from_scheduler_config({"_class_name": "DDIMScheduler", "timestep_spacing": "leading"})
    stock = dataclasses.replace(stock, schedule=scheduler.schedule)
    for sampler in ("DPM++ 2M Karras", "Euler", "DDIM", "LCM", "DPMSolverMultistepScheduler"):
        got, want = (canvax.samplers.build_table(of, 4, sampler=sampler) for of in (loaded.model.scheduler, stock))
        np.testing.assert_array_equal(got.M, want.M)
        np.testing.assert_array_equal(got.timestep, want.timestep)
    with refused("config"):
        dataclasses.replace(scheduler, config=fields)
    limited = dataclasses.replace(scheduler, config=scheduler.config | {"thresholding": True})
    with pytest.raises(canvax.InputError, match="thresholding"):
        canvax.samplers.build_table(limited, 4, sampler="DDIM")


def test_the_name_of_a_default_sampler_of_ones_own(pipe: canvax.Pipeline) -> None:
    """A call and a job take it, and an image of it is repeated without a warning; other models refuse it."""
    heun = dataclasses.replace(canvax.samplers.find("Heun")[0], name="shuttle", label="Shuttle")
    scheduler = dataclasses.replace(pipe.model.scheduler, spec=heun)
    made = canvax.pipeline_of(NETWORKS, pipe.params, scheduler, family=FAMILY, mesh=pipe.mesh)
    want = draw(made)
    assert np.abs(want.pixels - draw(pipe).pixels).max() > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error", canvax.HintWarning)
        for got in (draw(made, sampler="Shuttle"), draw(made, sampler="shuttle"), made.again(want.metadata[0])):
            np.testing.assert_array_equal(got.pixels, want.pixels)
            assert got.metadata[0]["sampler_label"] == "Shuttle"
    job = JobRequest("a fox", seed=1, sampler="Shuttle")
    assert check(job, "mlp", made.model).stages[0].rows == len(canvax.samplers.build_table(scheduler, 4))
    for model, name in ((made.model, "Shuttl"), (pipe.model, "Shuttle")):
        with pytest.raises(Rejected):
            check(dataclasses.replace(job, sampler=name), "mlp", model)
        with refused("sampler"):
            draw(dataclasses.replace(made, model=model), sampler=name)
    euler = dataclasses.replace(heun, name="euler", label="Euler")
    assert not dataclasses.replace(scheduler, spec=euler).has_sampler("Euler")


def test_a_folder_with_another_prediction_than_the_networks(gained: Callable[..., canvax.Pipeline]) -> None:
    def read(files: ModelFiles, kind: str = "v_prediction") -> Networks:
        return dataclasses.replace(read_gained(files), prediction=kind)

    with pytest.raises(canvax.CheckpointError):
        gained(read=read)
    velocity = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
    assert gained({"scheduler": velocity}, read=read).model.scheduler.schedule.prediction_type == "v_prediction"
    with refused("scheduler"):
        gained({"scheduler": velocity | {"prediction_type": "epsilon"}}, read=read)
    with refused("prediction_type"):
        gained({"scheduler": velocity, "prediction_type": "v_prediction"}, read=partial(read, kind="epsilon"))


def test_functions_of_a_family_with_other_results(gained: Callable[..., canvax.Pipeline]) -> None:
    """The error names the family."""
    text: Any = Letters("text_encoder", (5,))
    wrong: list[dict[str, Any]] = [
        {"read": lambda files: None}, {"scheduler": lambda config, files: dict(config)},
        {"read": lambda files: Networks(Gained(), Squares(), text)},
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(canvax.CheckpointError, match="the family gained"):
            gained(**changes)


def test_a_class_that_a_family_lacks(gained: Callable[..., canvax.Pipeline], tmp_path: Path) -> None:
    """The error has those of the family. A forgotten comma is refused before."""
    index = json.loads((tmp_path / "gained/model_index.json").read_text("utf-8"))
    (tmp_path / "gained/model_index.json").write_text(json.dumps(index | {"mlp": ["gained", "Other"]}), "utf-8")
    with pytest.raises(canvax.CheckpointError, match="Gained"):
        gained()
    for changes in ({"pipelines": "GainedPipeline"}, {"classes": {**GAINED.classes, "mlp": ("Gained")}}):
        with refused("family"):
            gained(**changes)


def test_missing_arrays_have_the_names_of_files(gained: Callable[..., canvax.Pipeline], tmp_path: Path) -> None:
    (weights,) = (tmp_path / "gained/mlp").glob("*.safetensors")
    arrays = load_file(weights)
    del arrays["out.bias"], arrays["text.weight"]
    save_file(arrays, weights)
    names = (canvax.extend.Rule("net.last", "out"), canvax.extend.Rule("net.both", ("x", "text")))
    with pytest.raises(canvax.CheckpointError) as caught:
        gained(names=names)
    assert "net.last.bias" in str(caught.value)
    assert "net.both.weight" in str(caught.value)


def test_an_autoencoder_of_the_package_is_saved_with_its_config(tmp_path: Path) -> None:
    emoji = canvax.load("emoji", progress=False).model.networks
    pipeline_of(Networks(Flat(emoji.vae.latent_channels), emoji.vae, TEXT), Family("flat")).save(tmp_path / "out")
    config = json.loads((tmp_path / "out/vae/config.json").read_text("utf-8"))
    assert type(emoji.vae).from_dict(config) == emoji.vae


SPELLED = {
    "peft": "{component}.{layer}.lora_{role}.weight",
    "saved by peft": "base_model.model.{component}.{layer}.lora_{role}.weight",
    "kohya": "lora_{component}_{layer}.lora_{role}.weight",
}
CHANGED = {"mlp": "out", "reader": "embed", "speller": "embed"}


@pytest.mark.parametrize("spelling", SPELLED)
def test_loras_of_components_with_other_names(spelling: str, tmp_path: Path) -> None:
    """The names are those of the networks; the settings of PEFT are in a file next to it."""
    pipe, draw_numbers, arrays, want = pipeline_of(NETWORKS), Draw(1), {}, {}
    for component, layer in CHANGED.items():
        weight = pipe.params[component][layer]["weight"]
        down, up = draw_numbers(2, weight.shape[0]), draw_numbers(weight.shape[1], 2)
        for role, array in zip(("down", "up") if spelling == "kohya" else ("A", "B"), (down, up), strict=True):
            arrays[SPELLED[spelling].format(component=component, layer=layer, role=role)] = array
        want[component] = np.asarray(weight) + 3.0 * (up @ down).T
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    write(tmp_path / "adapter_model.safetensors", arrays)
    pipe.adapters.load("style", tmp_path)
    for component, layer in CHANGED.items():
        np.testing.assert_allclose(pipe.params[component][layer]["weight"], want[component], atol=1e-5)
    described = {"network: LoRA": 3} if spelling == "kohya" else {f"{component}: LoRA": 1 for component in CHANGED}
    assert adapter_info(tmp_path / "adapter_model.safetensors")["parts"] == described


def test_a_bare_name_is_of_the_denoiser(tmp_path: Path) -> None:
    """An encoder has a layer of this name, too."""

    class Alike(Mlp):
        @property
        def spec(self) -> Any:
            return super().spec | {"embed": super().spec["out"]}

    networks, draw_numbers = dataclasses.replace(NETWORKS, denoiser=Alike()), Draw(1)
    arrays = {"embed.lora_A.weight": draw_numbers(2, WIDTH), "embed.lora_B.weight": draw_numbers(CHANNELS, 2)}
    adapter = read_adapter(write(tmp_path / "bare.safetensors", arrays), networks.adapted)
    assert list(adapter.parts) == [("mlp", "embed.weight")]


def test_a_weight_for_a_network_that_a_lora_leaves(tmp_path: Path) -> None:
    pipe, draw_numbers = pipeline_of(NETWORKS), Draw(1)
    arrays = {"mlp.out.lora_A.weight": draw_numbers(2, WIDTH), "mlp.out.lora_B.weight": draw_numbers(CHANNELS, 2)}
    file = write(tmp_path / "a.safetensors", arrays)
    with pytest.warns(canvax.HintWarning, match="'reader'"):
        pipe.adapters.load("style", file, weight={"mlp": 0.5, "reader": 0.7})
    with pytest.warns(canvax.HintWarning, match="'speller'"):
        pipe.adapters.set({"style": {"mlp": 0.4, "speller": 0.7}})
    with refused("weight"):
        pipe.adapters.set({"style": {"reader": 0.7}})


@pytest.mark.parametrize("names", low_rank.FORMATS)
def test_a_lora_that_was_trained_is_loaded(pipe: canvax.Pipeline, names: str, tmp_path: Path) -> None:
    layers = {name: {layer: low_rank.Layer({layer: pipe.model.specs[name][layer]["weight"]})}
              for name, layer in CHANGED.items()}  # fmt: skip
    factors = jax.tree.map(lambda array: array + 0.5, low_rank.new_factors(layers, 2, seed=0))
    low_rank.write_factors(tmp_path / "style.safetensors", factors, layers, alpha=4, names=names, metadata={})
    other = pipeline_of(NETWORKS)
    other.adapters.load("style", tmp_path / "style.safetensors")
    want = low_rank.merged(factors, pipe.params, layers, scale=2.0)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), other.params, want)


@dataclass(frozen=True)
class Louder(DenoiserWrapper):
    """Twice the output of a denoiser."""

    base: Any

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        output, memory = self.base.apply(p, x, row, prepared, memory)
        return 2 * output, memory


@pytest.mark.slow
def test_another_denoiser_in_a_pipeline(pipe: canvax.Pipeline, tmp_path: Path) -> None:
    """A wrapper of its denoiser, which is not saved, and other parameters."""
    inner = pipe.model.networks.denoiser
    louder, doubled = pipe.with_denoiser(Louder(inner)), jax.tree.map(lambda leaf: 2 * leaf, pipe.params["mlp"]["out"])
    same = pipe.with_denoiser(inner, pipe.params["mlp"] | {"out": doubled})
    with pytest.warns(canvax.HintWarning, match="Louder"):
        louder.save(tmp_path / "out")
    before, after, by_params = (draw(each).latents for each in (pipe, louder, same))
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_allclose(by_params, after, atol=1e-5)
    emoji = canvax.load("emoji", progress=False)
    mine = emoji.with_denoiser(Louder(emoji.model.networks.denoiser))
    assert np.isfinite(draw(mine, num_inference_steps=2, height=64, width=64).latents).all()


def test_everything_a_user_changes_is_data(pipe: canvax.Pipeline) -> None:
    want = draw(pipe)
    changes: dict[str, Any]
    for changes in ({"guidance_scale": 5.0}, {"num_inference_steps": 6}, {"negative_prompt": "red"}, {"seed": 3}):
        got = draw(pipe, **changes)
        assert got.compilations == 0
        assert np.abs(got.latents - want.latents).max() > 1e-4


def test_encoders_have_lengths_of_their_own(pipe: canvax.Pipeline) -> None:
    """A longer prompt takes the longer length of one encoder; a prompt that one of them cannot read is refused."""
    short, long = (np.asarray(pipe.encode(text)["text"]) for text in ("a fox", "a foxes"))
    assert (short.shape, long.shape) == ((1, 5 + 7, WIDTH), (1, 20 + 7, WIDTH))
    np.testing.assert_allclose(short[:, :5], long[:, :5], atol=1e-6)
    assert np.abs(long[:, 6] - long[:, 7]).max() > 1e-3 > np.abs(long[:, 7] - long[:, 19]).max()  # behind 7 letters
    for prompt, syntax in {"a fox and a hen": "plain", "a (fox)": "a1111"}.items():
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, prompt, options=canvax.Options(progress=False, prompt_syntax=syntax))
        assert caught.value.argument == "prompt"


def test_conditions_in_place_of_prompts(pipe: canvax.Pipeline) -> None:
    """The other side is brought to their length; what was joined on its tokens cannot be brought to another."""
    short, long = map(pipe.encode, ("a fox", "a foxes"))
    for prompt, negative in ((short, "red"), (long, "red"), (long, short | {"text": long["text"]})):
        text = "a fox" if prompt is short else "a foxes"
        want = draw(pipe, text, negative_prompt=negative if isinstance(negative, str) else text)
        np.testing.assert_array_equal(draw(pipe, prompt, negative_prompt=negative).latents, want.latents)
    for prompt, negative in ((short, "a foxes"), (short | {"text": long["text"][:, :9]}, "red")):
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, prompt, negative_prompt=negative)
        assert caught.value.argument == "prompt"


@dataclass(frozen=True)
class Marked(Letters):
    """An encoder that also returns which rows are letters."""

    def outputs(self, length: int, dtype: Any) -> Any:
        return {**super().outputs(length, dtype), "mask": jax.ShapeDtypeStruct((length,), jnp.bool_)}

    def encode(self, p: Params, ids: Array, count: Array) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {**super().encode(p, ids, count), "mask": jnp.arange(ids.shape[1])[None] < count[:, None]}


@dataclass(frozen=True)
class ReadsMarks(Mlp):
    """The same network, which reads the sum of the letters."""

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        text = jnp.where(conditions["mask"][..., None], conditions["text"], 100.0)
        return super().prepare(p, {**conditions, "text": text}, latents)


def test_conditions_with_a_mask() -> None:
    """Of any length of the encoder, for the network alone and instead of prompts."""
    pipe = pipeline_of(dataclasses.replace(NETWORKS, denoiser=ReadsMarks(), text=TextEncoders((Marked("r", (5, 20)),))))
    latents, short, long = jnp.ones((1, 8, 8, CHANNELS)), pipe.encode("a fox"), pipe.encode("a red fox")
    assert np.isfinite(pipe.denoiser(latents, 500.0, short)).all()
    assert np.isfinite(pipe.denoiser(latents, 500.0, long)).all()
    want = draw(pipe, "a fox", negative_prompt="a red fox").latents
    np.testing.assert_array_equal(draw(pipe, short, negative_prompt="a red fox").latents, want)
    for mask in (long["mask"].astype(jnp.float32), long["mask"][:, None]):
        with refused("conditions", "conditions['mask']"):
            pipe.denoiser(latents, 500.0, long | {"mask": mask})
    with refused("prompt"):
        draw(pipe, long | {"mask": short["mask"]})


@dataclass(frozen=True)
class Scalar(Mlp):
    """The same network, which reads its number as a scalar."""

    def inputs(self, latents: Sequence[int], text: Any, dtype: Any) -> Any:
        return canvax.extend.Inputs({"hue": jax.ShapeDtypeStruct((latents[0],), jnp.float32)})

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        return super().prepare(p, {**conditions, "hue": conditions["hue"][:, None]}, latents)


def test_conditions_that_a_network_does_not_declare(pipe: canvax.Pipeline) -> None:
    """Another name, shape or kind of number is refused; so is a condition that the family does not have."""
    wrong: list[dict[str, Any]] = [
        {}, {"huge": np.ones(1, np.float32)}, {"hue": np.ones(2, np.float32)}, {"hue": np.ones(1, np.complex64)},
        {"hue": np.ones(1, np.float32), "size": np.ones(1, np.float32)},
    ]  # fmt: skip
    for side in wrong:
        families = [dataclasses.replace(FAMILY, size_conditions=lambda *_, s=side: (s, s))]
        families += [] if side else [Family("bare")]
        for family in families:
            changed = dataclasses.replace(pipe, model=dataclasses.replace(pipe.model, family=family))
            changed.params = pipe.params
            for call in (lambda changed=changed: draw(changed), lambda changed=changed: changed.encode("a fox")):
                with refused("size_conditions"):
                    call()
    number: Any = {"hue": np.float64(1)}, {"hue": np.float64(0)}
    scalar = dataclasses.replace(FAMILY, size_conditions=lambda *_: number)
    got = draw(pipeline_of(dataclasses.replace(NETWORKS, denoiser=Scalar()), scalar), num_inference_steps=2)
    np.testing.assert_allclose(got.latents, draw(pipe, num_inference_steps=2).latents, atol=1e-5)


@dataclass(frozen=True)
class Unweighted(Letters):
    """An encoder that passes weights over."""

    def words(self, tokenizer: Any, pieces: Sequence[Any], options: Any, images: Any = ()) -> Any:
        return super().words(tokenizer, [(text, 1.0) for text, _ in pieces], options, images)


@pytest.mark.slow
def test_weights_and_chunks_of_clip_beside_another_encoder() -> None:
    """What the host mixes for CLIP is joined as the family joins it, and leaves the other encoder alone."""
    tokenizers = canvax.load("emoji").model.tokenizers | {"reader": None}
    cfg = ClipTextConfig(2500, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    encoders, pipes = (ClipEncoder("text_encoder", cfg), Unweighted("reader", (700,))), []
    for some in (encoders, encoders[:1], encoders[1:]):
        networks = dataclasses.replace(NETWORKS, text=OneAfterAnother(some))
        pipes.append(pipe := pipeline_of(networks, tokenizers=tokenizers))
        pipe.params = pipes[0].params or pipe.params
    for prompt in ("a (red:1.3) apple", "apple " * 90 + "(red:0.5)"):
        both, *each = (np.asarray(pipe.encode(prompt, prompt_syntax="comfy")["text"]) for pipe in pipes)
        np.testing.assert_array_equal(both, np.concatenate(each, axis=1))
        options = canvax.Options(progress=False, prompt_syntax="comfy")
        want = draw(pipes[0], {"text": both}, negative_prompt={"text": both}, options=options).latents
        np.testing.assert_array_equal(draw(pipes[0], prompt, negative_prompt=prompt, options=options).latents, want)


@dataclass(frozen=True)
class Seeing(Letters):
    """An encoder that sees the reference images beside a prompt."""

    seen: ClassVar[list[Any]] = []

    def read(self, tokenizer: Any, texts: Sequence[str], length: int, images: Any = ()) -> dict[str, np.ndarray]:
        self.seen.append([[image.size for image in each] for each in images])
        return super().read(tokenizer, texts, length)


def test_an_encoder_sees_the_images_that_are_edited(transformer: canvax.Pipeline) -> None:
    networks = dataclasses.replace(transformer.model.networks, text=TextEncoders((Seeing("reader", (5,)),)))
    pipe = pipeline_of(networks, transformer.model.family)
    draw(pipe, ["a fox", "a hen"], image=[np.zeros((8, 12, 3), np.uint8)] * 2, height=8, width=8)
    assert [[(12, 8)] * 2] * 2 in Seeing.seen


def test_an_image_to_begin_from_and_a_mask(pipe: canvax.Pipeline) -> None:
    image, mask = np.full((16, 16, 3), 200, np.uint8), np.zeros((16, 16), np.uint8)
    mask[:, 8:] = 255
    result = draw(pipe, image=image, mask=mask, strength=0.5)
    assert np.isfinite(result.pixels).all()


def test_the_networks_are_functions_of_arrays(pipe: canvax.Pipeline) -> None:
    conditions = pipe.encode(["a fox", "a hen"])
    latents = jnp.ones((2, 8, 8, CHANNELS))
    assert pipe.denoiser(latents, 500.0, conditions).shape == latents.shape
    assert pipe.decode(latents).shape == (2, 16, 16, 3)
    with pytest.raises(canvax.InputError):
        pipe.denoiser(latents, 500.0, {"text": conditions["text"]})


def test_what_only_some_networks_can_do_is_refused(pipe: canvax.Pipeline) -> None:
    for name, value in {"reuse": 2, "pag_scale": 3.0, "pag_adaptive_scale": 0.01}.items():
        with pytest.raises(canvax.InputError) as caught:
            draw(pipe, options=canvax.Options(**{name: value}))
        assert caught.value.argument == name


@pytest.fixture(scope="module")
def transformer() -> canvax.Pipeline:
    """A pipeline around a small FLUX.2, whose loop has tokens."""
    cfg = Flux2Config(
        in_channels=CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    networks = dataclasses.replace(NETWORKS, denoiser=Flux2Denoiser(cfg))
    return pipeline_of(networks, Family("small", defaults=FAMILY.defaults))


def test_one_entry_of_conditions_is_for_all_latents(transformer: canvax.Pipeline) -> None:
    one = transformer.encode("a fox")
    latents = jax.random.normal(jax.random.key(0), (2, 4, 6, CHANNELS))
    both = {name: jnp.repeat(array, 2, axis=0) for name, array in one.items()}
    got, want = (transformer.denoiser(latents, 500.0, conditions) for conditions in (one, both))
    np.testing.assert_array_equal(got, want)


def test_latents_that_stay_on_the_devices(transformer: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"height": 8, "width": 16, "num_inference_steps": 2}
    want = draw(transformer, ["a fox", "a hen"], **size)
    monkeypatch.setattr(batch, "map_parts", None)  # by way of the host
    for output in ("pil", "jax"):
        got = draw(transformer, ["a fox", "a hen"], output_type=output, **size)
        np.testing.assert_array_equal(got.latents, want.latents)
    assert want.latents.shape == (2, 4, 8, CHANNELS)


@dataclass(frozen=True)
class TokenDenoiser(Mlp):
    """The same network for latents that the loop holds as tokens of 2 x 2."""

    channels_first: bool = False

    @property
    def facts(self) -> Facts:
        return Facts(native_size=(8, 8), packing=Packing(2, self.channels_first))

    def apply(self, p: Params, x: Array, row: Row, prepared: Array, memory: Any) -> tuple[Array, Any]:
        features = (CHANNELS, 4) if self.channels_first else (4, CHANNELS)
        latents = x.reshape(len(x), -1, *features)
        latents = latents.swapaxes(2, 3) if self.channels_first else latents
        out, memory = Mlp.apply(self, p, latents, row, prepared, memory)
        return (out.swapaxes(2, 3) if self.channels_first else out).reshape(x.shape), memory


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_loop_of_tokens_makes_the_same_images(pipe: canvax.Pipeline, channels_first: bool) -> None:
    """Latents go in, come out, are kept, seen and changed on the way as those of a loop that holds them as they are."""
    tokens = pipeline_of(dataclasses.replace(NETWORKS, denoiser=TokenDenoiser(channels_first)))
    image, mask = np.zeros((16, 24, 3), np.uint8), np.zeros((16, 24), np.uint8)
    image[:, ::3, 0], mask[4:, 8:], mask[:, 20:] = 255, 255, 128
    calls: list[dict[str, Any]] = [
        {}, {"height": 24, "width": 16}, {"output_type": "jax"}, {"image": image, "mask": mask, "strength": 0.7},
        {"image": image, "mask": mask, "strength": 0.7, "mask_blend": "renoised"},
        {"callback": lambda step: {"latents": step.latents[:, ::-1] + step.denoised}},
    ]  # fmt: skip
    for call in calls:
        want, got = (draw(one, ["a fox", "a hen"], **{"height": 16, "width": 24} | call) for one in (pipe, tokens))
        assert want.latents.std() > 0.1
        np.testing.assert_allclose(got.latents, want.latents, atol=1e-5)
        np.testing.assert_allclose(got.pixels, want.pixels, atol=1e-5)
        if "mask" not in call:
            np.testing.assert_allclose(preview._decoded(tokens, np.asarray(got.latents)), got.pixels, atol=1e-5)


def test_what_a_callback_returns_last_is_the_result(transformer: canvax.Pipeline) -> None:
    result = draw(transformer, height=8, width=16, callback=lambda step: {"latents": 0 * step.latents + 0.5})
    np.testing.assert_array_equal(result.latents, 0.5)


def test_tokens_are_squares_of_latents() -> None:
    latents = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    for packing in (Packing(2), Packing(2, channels_first=True), Packing(1), Packing()):
        packed = packing.pack(latents)
        assert packed.shape == packing.shape(latents.shape)
        np.testing.assert_array_equal(packing.unpack(packed, 4, 6), latents)
        np.testing.assert_array_equal(packing.pack(jnp.asarray(latents)), packed)
    square = latents[0, 2:, 2:4]  # row 1 and column 1 of 2 x 3 tokens
    np.testing.assert_array_equal(Packing(2).pack(latents)[0, 0, 4], square.reshape(-1))
    np.testing.assert_array_equal(
        Packing(2, channels_first=True).pack(latents)[0, 0, 4], np.moveaxis(square, -1, 0).reshape(-1)
    )


@dataclass(frozen=True)
class Plain(DenoiserWrapper):
    """A record around a denoiser, with nothing of its own."""

    base: Any


MEMBERS = [name for name in vars(Denoiser) if not name.startswith("_")]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_record_around_a_denoiser_has_all_that_it_has(name: str) -> None:
    inner: Any = SimpleNamespace(**{member: object() for member in MEMBERS}, cfg=object())
    inner.facts = Facts(offers=("residuals", "perturbed", "recall"))
    for around in (Plain(inner), Plain(Plain(inner)), Perturbed(inner), Controlled(Reusing(inner, 1), ())):
        assert around.cfg is inner.cfg
        if name not in {member for kind in (type(around), type(around.base)) for member in vars(kind)}:
            assert getattr(around, name) is getattr(inner, name)


@pytest.mark.parametrize("around", [Perturbed, lambda base: Reusing(base, 1), lambda base: Controlled(base, ())])
def test_what_a_denoiser_does_not_offer_is_refused(around: Any) -> None:
    unet = UNetDenoiser(UNET)
    assert around(Plain(unet)).cfg is UNET
    for base in (Mlp(), Plain(Mlp())):
        with pytest.raises(canvax.InputError) as caught:
            around(base)
        assert (caught.value.argument, caught.value.value) == ("denoiser", "mlp")


@pytest.mark.slow
def test_records_around_a_unet_in_any_order() -> None:
    """Each keeps what it prepares to itself, and hands on what those around it ask for."""
    unet = UNetDenoiser(UNET)
    p: Any = init_params(unet.spec, 0)
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, UNET.in_channels))
    text = jax.random.normal(jax.random.key(1), (2, 5, UNET.cross_attention_dim))
    conditions: Any = {"text": text, "role": jnp.array([PROMPT, PERTURBED], jnp.int32)}
    row: Any = {"timestep": jnp.full(2, 500.0), "recompute": jnp.bool_(True), "reuse": jnp.array([1.0, 0.0])}
    found = []
    for denoiser in (unet, Perturbed(unet), Reusing(Perturbed(Plain(unet)), 1), Perturbed(Reusing(unet, 1))):
        shape = denoiser.inputs(x.shape, {}, lambda _: jnp.float32).memory
        memory = shape and jnp.zeros((2, *shape.shape))

        def evaluate(x: Any, denoiser: Any = denoiser, memory: Any = memory) -> Any:
            return denoiser.apply(p, x, row, denoiser.prepare(p, conditions, x.shape), memory)[0]

        found.append(jax.jit(evaluate)(x))
    plain, *others = found
    for other in others:
        np.testing.assert_allclose(other[0], plain[0], atol=1e-5)
        np.testing.assert_allclose(other, others[0], atol=1e-5)
        assert np.abs(other[1] - plain[1]).max() > 1e-3


def test_a_network_around_that_of_a_checkpoint() -> None:
    """Facts, and what a call adds to the network."""
    networks = canvax.load("emoji").model.networks
    mine = dataclasses.replace(networks, denoiser=Plain(networks.denoiser))
    assert (mine.native_size, mine.size_numbers) == (networks.native_size, networks.size_numbers)
    assert mine.denoiser_of((PERTURBED,)).inputs((1, 8, 8, 32), {}, jnp.dtype) == networks.denoiser.inputs(
        (1, 8, 8, 32), {}, jnp.dtype
    )
    assert copy.copy(mine) == pickle.loads(pickle.dumps(mine)) == mine
    klein: Any = Networks(Plain(Flux2Denoiser(Flux2Config(), is_distilled=True)), Squares(), NETWORKS.text)
    assert klein.unguided


CELLS = {
    "helper": "def boosted(x): return {gain} * x",
    "denoiser": """
@dataclass(frozen=True)
class Mine(Mlp):
    def apply(self, p, x, row, prepared, memory):
        out, memory = Mlp.apply(self, p, x, row, prepared, memory)
        return {gain} * boosted(out), memory
""",
    "text": """
@dataclass(frozen=True)
class Mine(Letters):
    def encode(self, p, ids, count):
        return {{"text": {gain} * boosted(Letters.encode(self, p, ids, count)["text"])}}
""",
    "vae": """
import typing
class Mine(typing.NamedTuple):
    factor: int = FACTOR
    latent_channels: int = CHANNELS
    spec = property(lambda self: Squares().spec)

    def decode(self, p, latents, *, tiled=False):
        return Squares().decode(p, {gain} * boosted(latents))
""",
}
"""Cells of a notebook, with a number to edit."""


def run_cell(notebook: dict[str, Any], name: str, gain: float) -> None:
    exec(CELLS[name].format(gain=gain), notebook)


def networks_of(notebook: dict[str, Any], part: str) -> Networks:
    mine = notebook["Mine"](*(["reader", (5,)] if part == "text" else []))
    return dataclasses.replace(NETWORKS, **{part: TextEncoders((mine,)) if part == "text" else mine})


@pytest.mark.parametrize(("part", "method"), [("denoiser", "apply"), ("text", "encode"), ("vae", "decode")])
def test_an_edited_network_is_another_program(part: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defined again, and edited in place."""
    notebook = {**globals(), "__name__": "__main__"}
    run_cell(notebook, "helper", 1.0)
    run_cell(notebook, part, 1.0)
    first, pipe = notebook["Mine"], pipeline_of(networks_of(notebook, part))
    pixels = [draw(pipe).pixels]
    assert draw(pipe).compilations == 0

    def changed(pipe: canvax.Pipeline) -> bool:
        pixels.append(draw(pipe).pixels)
        return bool(np.abs(pixels[-1] - pixels[-2]).max() > 1e-3)

    run_cell(notebook, "helper", 2.0)
    assert changed(pipe)
    run_cell(notebook, part, 3.0)
    monkeypatch.setattr(first, method, vars(notebook["Mine"])[method])
    assert changed(pipe)
    run_cell(notebook, part, 5.0)
    assert changed(pipeline_of(networks_of(notebook, part)))


def test_a_network_is_stored_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its name and its ``repr`` stay the same. Code that calls Python is not stored."""
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(key, "edited", lambda: False)  # by whoever edits while the tests run
    request.addfinalizer(partial(use_folder, jax.config.values["jax_compilation_cache_dir"]))
    use_folder(None)  # JAX's programs are not stored again
    mesh = make_mesh(jax.devices()[:1])
    params = {"vae": place_all(Squares().spec, jax.tree.map(jnp.ones_like, init_params(Squares().spec, 0)), mesh)}
    builds: list[Build] = []
    decoded = []
    notebook = {**globals(), "__name__": "__main__"}
    doubled = "def boosted(x): return jax.pure_callback(lambda x: 2 * x, x, x)"
    for helper in ("def boosted(x): return x",) * 2 + ("def boosted(x): return 3 * x",) * 2 + (doubled,) * 2:
        exec(helper, notebook)
        run_cell(notebook, "vae", 1.0)
        programs = Programs(networks_of(notebook, "vae"), mesh)
        decoder = programs.program("decoder", params, (1, 8, 8, CHANNELS), Kinds(guided=()), builds.append)
        decoded.append(float(decoder(params, jnp.ones((1, 8, 8, CHANNELS)))[0, 0, 0, 0]))
    ended = [build for build in builds if build.seconds is not None]
    assert [build.cached for build in ended] == [False, True, False, True, False, False]
    assert [build.size > 0 for build in ended] == [True] * 4 + [False] * 2
    assert decoded[::2] == decoded[1::2]
    assert len({*decoded}) == 3


def test_an_edited_network_is_traced_again_in_loops_of_ones_own() -> None:
    notebook, latents, decoded = dict(globals()), jnp.ones((1, 8, 8, CHANNELS)), []
    run_cell(notebook, "helper", 1.0)
    run_cell(notebook, "vae", 1.0)
    pipe = pipeline_of(networks_of(notebook, "vae"))
    for gain in (1.0, 2.0):
        run_cell(notebook, "helper", gain)
        decoded.append(pipe.decode(latents))
    assert np.abs(decoded[0] - decoded[1]).max() > 1e-3


def test_what_a_function_leaves_behind_is_no_edit(pipe: canvax.Pipeline) -> None:
    """Nor is what a pipeline that it names has done since."""
    seen: ClassVar[list[Any]] = []

    def rule(negative: Array, prompt: Array, scale: Array) -> Array:
        seen.append((pipe, scale))
        return prompt

    images = [draw(pipe, guidance_method=rule) for _ in range(3)]
    assert [image.compilations > 0 for image in images] == [True, False, False]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_code_of_the_package_is_the_users(preset: str) -> None:
    assert foreign(PRESETS[preset], Kinds(), KINDS) == ()


def test_what_is_code_of_the_user() -> None:
    assert foreign(NETWORKS, Kinds()) == foreign(NETWORKS, Kinds()) != ()
    assert foreign(canvax.load("emoji").model.networks, Kinds(), KINDS) == ()
    wrapped = jax.jit(lambda *_: 0.0)
    for value in (draw, partial(draw), lambda: draw, {"a": [draw]}, Plain(Mlp()), np.zeros(2000), wrapped):
        assert foreign(value)


PROCESS = """
import sys
from tests.test_new_family import *
notebook = dict(globals())
run_cell(notebook, "helper", 1.0)
run_cell(notebook, "denoiser", float(sys.argv[1]))
print(draw(pipeline_of(networks_of(notebook, "denoiser"))).pixels.std())
"""


@pytest.mark.slow
def test_an_edited_network_in_a_second_process(tmp_path: Path) -> None:
    environment = os.environ | {"CANVAX_CACHE_DIR": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROCESS, gain], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for gain in ("1", "5")
    ]
    assert printed[0] != printed[1]


CONSTANTS = """
import jax.numpy as jnp
from tests.test_new_family import *
from canvax.kernels.target import code_of
many = jnp.arange(99.0)
print(code_of(make_mesh(jax.devices()[:1]), lambda x: x * many, jax.ShapeDtypeStruct((99,), jnp.float32)) is None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
def test_constants_that_are_not_in_the_code(outside: bool) -> None:
    """JAX passes them as arguments if this variable is set."""
    environment = os.environ | {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": str(outside)}
    process = subprocess.run(
        [sys.executable, "-c", CONSTANTS], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [str(outside)]


@dataclass(frozen=True)
class Forgetful(Mlp):
    """Its ``apply`` does not return the memory."""

    def apply(self, *arguments: Any) -> Any:
        return Mlp.apply(self, *arguments)[0]


def test_an_output_without_a_memory_is_refused() -> None:
    """With guidance it has two samples, which could be taken for an output and a memory."""
    pipe = pipeline_of(dataclasses.replace(NETWORKS, denoiser=Forgetful()))
    conditions = {"text": jnp.zeros((2, 5, WIDTH)), "hue": jnp.zeros((2, 1))}
    for call in (
        lambda: draw(pipe),
        lambda: canvax.rollout(pipe, pipe.params, *pipe.start("a fox")),
        lambda: pipe.denoiser(jnp.zeros((2, 8, 8, CHANNELS)), jnp.zeros(2), conditions),
    ):
        with pytest.raises(canvax.InputError) as caught:
            call()
        assert caught.value.argument == "denoiser"


class Half(Squares):
    """Its methods return another dtype."""

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        return super().decode(p, latents).astype(jnp.bfloat16)

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> Any:
        return tuple(moment.astype(jnp.bfloat16) for moment in super().encode(p, images))


def test_pixels_and_latents_are_float32(pipe: canvax.Pipeline) -> None:
    half = pipeline_of(dataclasses.replace(NETWORKS, vae=Half()))
    result = draw(half)
    assert (result.pixels.dtype, half.encode_image(PIXELS).dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(result.pixels, draw(pipe).pixels, atol=0.01)


class Halved(Squares):
    """Its ``decode`` returns half of the rows."""

    def decode(self, p: Params, latents: Array, *, tiled: bool = False) -> Array:
        return super().decode(p, latents)[:, ::2]


class Coarse(Squares):
    """Another factor than that of its ``decode``."""

    factor = 2 * FACTOR


class Certain(Squares):
    """Its ``encode`` returns no deviation."""

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> Any:
        return super().encode(p, images)[:1]


class Thin(Squares):
    """Its ``encode`` returns one channel."""

    def encode(self, p: Params, images: Array, *, tiled: bool = False) -> Any:
        return tuple(moment[..., :1] for moment in super().encode(p, images))


@dataclass(frozen=True)
class Wider(Letters):
    """Its ``outputs`` are wider than its text."""

    def outputs(self, length: int, dtype: Any) -> Any:
        return {"text": jax.ShapeDtypeStruct((length, WIDTH + 1), dtype)}


@dataclass(frozen=True)
class Bare(Letters):
    """Its ``encode`` returns the text alone."""

    def encode(self, p: Params, ids: Array, count: Array) -> Any:
        return super().encode(p, ids, count)["text"]


@dataclass(frozen=True)
class Reads(Letters):
    """Its ``read`` returns something else than ``inputs`` declares."""

    fault: str = ""

    def read(self, *arguments: Any, **keywords: Any) -> dict[str, np.ndarray]:
        arrays = super().read(*arguments, **keywords)
        ids, count = arrays["ids"], arrays["count"]
        faults = {"name": {"ids": ids}, "more": arrays | {"mask": ids}, "shape": arrays | {"ids": ids[:, :1]},
                  "dtype": arrays | {"count": count + 0.5}}  # fmt: skip
        return faults[self.fault]


@pytest.mark.parametrize("fault", ["name", "more", "shape", "dtype"])
def test_arrays_that_a_reader_does_not_declare_are_refused(fault: str) -> None:
    pipe = pipeline_of(dataclasses.replace(NETWORKS, text=TextEncoders((Reads("reader", (5,), fault),))))
    for call in (lambda: draw(pipe), lambda: pipe.encode("a fox")):
        with refused("text"):
            call()


@dataclass(frozen=True)
class Grey(Mlp):
    """Its ``apply`` returns one channel."""

    def apply(self, *arguments: Any) -> Any:
        output, memory = Mlp.apply(self, *arguments)
        return output[..., :1], memory


LATENTS, PIXELS = jnp.zeros((1, 8, 8, CHANNELS)), np.zeros((1, 16, 16, 3), np.float32)
FAULTY: dict[Any, Callable[[canvax.Pipeline], Any]] = {
    Halved(): lambda pipe: pipe.decode(LATENTS),
    Coarse(): lambda pipe: pipe.decode(LATENTS),
    Certain(): lambda pipe: pipe.encode_image(PIXELS),
    Thin(): lambda pipe: pipe.encode_image(PIXELS),
    Wider("reader", (5,)): lambda pipe: pipe.encode("a fox"),
    Bare("reader", (5,)): lambda pipe: pipe.encode("a fox"),
    Grey(): lambda pipe: jax.eval_shape(
        partial(pipe.denoiser, LATENTS, 500.0), {"text": jnp.zeros((1, 12, WIDTH)), "hue": jnp.zeros((1, 1))}
    ),
}


@pytest.mark.parametrize("record", FAULTY)
def test_shapes_that_a_record_does_not_declare_are_refused(record: Any) -> None:
    part = "vae" if isinstance(record, Squares) else "text" if isinstance(record, Letters) else "denoiser"
    networks = dataclasses.replace(NETWORKS, **{part: TextEncoders((record,)) if part == "text" else record})
    with refused(part, "denoiser"):  # which cannot read a text of another width than the declared one
        FAULTY[record](pipeline_of(networks))


def test_what_a_wrapper_does_not_hand_on_is_refused() -> None:
    """Its ``apply`` has no place for extras, so perturbed attention and reused features are not offered."""
    emoji = canvax.load("emoji", progress=False)
    louder = emoji.with_denoiser(Louder(emoji.model.networks.denoiser))
    for name, value in {"reuse": 2, "pag_scale": 3.0}.items():
        with pytest.raises(canvax.InputError) as caught:
            draw(louder, options=canvax.Options(**{name: value}), height=64, width=64)
        assert caught.value.argument in (name, "denoiser", "guidance_method")


@dataclass(frozen=True)
class OfRoles(Mlp):
    """A network that reads the role of a sample."""

    def apply(self, p: Params, x: Array, row: Row, prepared: Any, memory: Any) -> tuple[Array, Any]:
        hidden, role = prepared
        output, memory = Mlp.apply(self, p, x, row, hidden, memory)
        return output * role[:, None, None, None], memory

    def prepare(self, p: Params, conditions: Conditions, latents: Sequence[int]) -> Any:
        return Mlp.prepare(self, p, conditions, latents), conditions["role"].astype(jnp.float32)


def test_the_role_of_samples_in_loops_of_ones_own(pipe: canvax.Pipeline) -> None:
    """The prompt's, or what the conditions say."""
    mine, latents = pipe.with_denoiser(OfRoles()), jnp.ones((1, 8, 8, CHANNELS))
    conditions = mine.encode("a fox")
    plain = pipe.denoiser(latents, 500.0, conditions)
    np.testing.assert_allclose(mine.denoiser(latents, 500.0, conditions), PROMPT * plain, atol=1e-6)
    roles: Any = {**conditions, "role": jnp.full(1, 3, jnp.int32)}
    np.testing.assert_allclose(mine.denoiser(latents, 500.0, roles), 3 * plain, atol=1e-6)
