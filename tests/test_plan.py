"""Planning for TPUs that are not there, all that needs no TPU compiler; test_plan_compiled.py has the rest."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.cli.plan import lines, parse_sides
from canvax.compile.inspect import collectives
from canvax.compile.programs import Programs
from canvax.errors import CanvaxError, CheckpointError
from canvax.families.known import PRESETS
from canvax.families.read import read_model
from canvax.families.sd import SD
from canvax.kernels.target import compiling_for
from canvax.models.clip import clip_encoders
from canvax.models.denoiser import UNetDenoiser
from canvax.models.flux2 import Flux2Config
from canvax.models.networks import Networks
from canvax.models.qwen_image import QwenImageConfig
from canvax.parallel.mesh import make_mesh, parse_mesh
from canvax.parallel.rules import abstract_params
from canvax.params import count
from canvax.planning import compiling
from canvax.planning import plan as planning
from canvax.planning.flops import count_flops, evaluation_flops
from canvax.planning.hlo import Module, hbm_bytes
from canvax.planning.job import PROGRAMS, Job
from canvax.planning.plan import Plan, architecture, check_axes
from canvax.planning.targets import CHIPS, GIB, GPUS, parse_target
from canvax.weights.location import Location
from canvax.weights.open import open_files
from tests.support.refusals import refused
from tests.support.small_checkpoint import TEXT, UNET, VAE, write_small_checkpoint
from tests.support.tiny_preset import TINY

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(SD.presets, "tiny", TINY)


@pytest.mark.parametrize(
    ("text", "name", "shape", "options"),
    [
        ("tpu-v5e:2x2", "v5e", (2, 2), {"topology_name": "v5e:2x2"}),
        ("V5P:2x2x1", "v5p", (2, 2, 1), {"topology_name": "v5p:2x2x1"}),
        ("tpu:v6e:1x1", "v6e", (1, 1), {"topology_name": "v6e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        ("v4:2x2x2", "v4", (2, 2, 2), {"topology_name": "v4:2x2x2", "chip_config_name": "megacore"}),
        ("gpu-h100", "h100", (1,), {"topology": "1x1x1", "target_config": GPUS["h100"].described}),
        ("A100-80GB:4", "a100-80gb", (4,), {"topology": "1x1x4", "target_config": GPUS["a100-80gb"].described}),
    ],
)
def test_targets(text: str, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    target = parse_target(text)
    platform = {"platform": "cuda" if "topology" in options else "tpu"}
    assert (target.chip.name, target.shape, target.topology) == (name, shape, options | platform)
    assert parse_target(str(target)) == target


def test_data_sheets_are_plausible() -> None:
    """The clock explains the peak: a whole number of units, each 128 x 128 multiply-adds a cycle."""
    for chip in CHIPS.values():
        units = chip.flops / (2 * 128 * 128 * chip.clock)
        assert units == pytest.approx(round(units), rel=0.02), chip
        assert 0.9 * chip.memory < chip.usable < chip.memory
    for gpu in GPUS.values():
        a_cycle = gpu.flops / (gpu.processors * gpu.clock)  # of a processor's tensor cores: 512, 1024, 2048, ...
        assert a_cycle == pytest.approx(2 ** round(math.log2(a_cycle)), rel=0.02), gpu
        assert f"core_count: {gpu.processors}\n" in gpu.described


def test_an_update_in_place_moves_the_update_alone() -> None:
    module = Module((DATA / "update.hlo").read_text(), CHIPS["v5e"])
    assert module.whole().bytes == 2 * 2 * (64 * 64 * 2)  # twice read and written


TILE = 64 * 64 * 2


def test_costs_from_text() -> None:
    text = (DATA / "step.hlo").read_text()
    module = Module(text, CHIPS["v5e"])
    setup, step = module.setup(), module.step()
    assert setup.seconds == pytest.approx(2e-6)
    assert setup.bytes == 2 * TILE  # fetched, and written at the end; what stays on the chip moves nothing
    # Ten layers of 1 us and a kernel of 1 ms; a layer reads its own slice of the stacked weights alone.
    assert step.seconds == pytest.approx(10e-6 + 1e-3)
    told = TILE + hbm_bytes("(s32[], bf16[64,64]{1,0:S(1)}, bf16[10,64,64]{2,1,0})")
    assert step.bytes == 10 * TILE + told + 2 * TILE + 2 * TILE
    assert sorted(step.unpriced) == ["silent", "sum"]
    assert setup.unpriced == ("gathered",)
    whole = module.whole()
    assert whole.seconds == pytest.approx(setup.seconds + step.seconds)
    assert "turns of the loop steps" in whole.unpriced
    assert collectives(text) == {"all-gather": 1, "all-reduce": 1}
    assert collectives(module.step_text()) == {"all-reduce": 1}


def test_flops() -> None:
    def f(x: Any, w: Any, image: Any, kernel: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), None

        y, _ = jax.lax.scan(layer, x, w)
        z = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y, jax.jit(lambda z: z * 2)(z)

    shape = jax.ShapeDtypeStruct
    arguments = [shape(s, jnp.float32) for s in ((4, 8), (3, 8, 8), (1, 5, 5, 2), (3, 3, 2, 7))]
    assert count_flops(f, *arguments) == 3 * 2 * 4 * 8 * 8 + 2 * 25 * 9 * 2 * 7


@pytest.mark.parametrize(("kind", "narrow"), [("int8", False), ("int8-w8a8", True)])
def test_flops_in_8_bits(kind: str, narrow: bool) -> None:
    """The linear layers of the denoiser multiply 8 bits where their inputs are rounded, too."""
    mesh = make_mesh(jax.devices()[:1])
    params = {name: abstract_params(spec, "bfloat16", mesh) for name, spec in TINY.specs(kind).items()}
    latents = TINY.latent_shape(1, 64, 64)
    with compiling_for("tpu"):
        every, eight = (
            evaluation_flops(Programs(TINY, mesh), params, latents, guided=True, narrow=only) for only in (False, True)
        )
    assert (0 < eight < every) if narrow else eight == 0


def test_presets_have_the_published_sizes() -> None:
    """Millions of parameters of the UNets, as their model cards have them."""
    sizes = {name: round(count(PRESETS[name].denoiser.spec) / 1e6) for name in ("sd14", "sd15", "sd21", "sdxl")}
    assert sizes == {"sd14": 860, "sd15": 860, "sd21": 866, "sdxl": 2567}


def test_job_survives_the_way_to_the_process() -> None:
    for preset in PRESETS.values():
        job = Job(preset, "tpu-v5e:2x2", (4, 1), 4, 64, 64, True, "bfloat16")
        assert Job.loads(job.dumps()) == job


def test_a_program_is_known_by_what_decides_it(tmp_path: Path) -> None:
    job, versions = Job(TINY, "tpu-v5e:2x2", (4, 1), 4, 16, 16, True, "bfloat16"), {"jax": "1"}

    def keys(job: Job, versions: dict[str, str] = versions) -> list[str]:
        return [compiling._key(job, name, versions) for name in PROGRAMS]

    first = keys(job)
    assert [a == b for a, b in zip(first, keys(replace(job, guided=False)), strict=True)] == [True, False, True]
    assert [a == b for a, b in zip(first, keys(replace(job, height=32)), strict=True)] == [True, False, False]
    for other in (replace(job, batch=8), replace(job, target="tpu-v5e:2x4"), replace(job, dtype="float32")):
        assert not set(first) & set(keys(other))
    assert not set(first) & set(keys(job, {"jax": "2"}))


def said_by_process(*messages: dict[str, Any]) -> Any:
    return lambda job, programs: iter(messages)


def figures(**changed: Any) -> dict[str, Any]:
    """What the process says about a program."""
    same = {
        "compile_seconds": 2.0, "seconds": 0.1, "setup_seconds": 0.01, "flops": 197e9, "hbm_bytes": 8.19e9,
        "collectives": {}, "collectives_in_loop": {}, "unpriced": [], "argument_bytes": 2 * GIB, "output_bytes": 0,
        "temporary_bytes": GIB, "code_bytes": 0, "cost_analysis": {},
    }  # fmt: skip
    return same | changed


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans "tiny" with figures in place of compiling: of each program, by its name."""
    monkeypatch.setattr(planning, "compiler_version", lambda target: {target.compiler: "0"})

    def call(**programs: dict[str, Any]) -> Plan:
        results = [{"program": name, "result": programs.get(name, figures())} for name in PROGRAMS]
        monkeypatch.setattr(compiling, "_messages", said_by_process(*results))
        return canvax.plan("tiny", "v5e:2x2", steps=100)

    return call


def test_adding_up(told: Any) -> None:
    plan = told()
    assert plan.fits
    assert plan.resident_bytes == 6 * GIB
    assert plan.peak_bytes == 7 * GIB
    assert (plan.batch, plan.height, plan.width) == (4, 8, 8)
    # Two texts, 100 steps in two windows, one decoding.
    assert plan.seconds == pytest.approx(0.1 * (2 + 100 + 1) + 0.01 * 2 * 3)
    assert plan.bound_seconds == pytest.approx(0.01 * 103)  # bytes decide; FLOPs alone would take 1 ms
    text = "\n".join(lines(plan))
    assert "fits: 7.00 of 15.75 GiB on each chip" in text
    assert "no estimate" not in text


def test_bound_of_a_gpu() -> None:
    """What its cache may spare is no bound; weights are read in any case."""
    program = planning.ProgramPlan("denoise", 1, 1.0, flops=1e9, hbm_bytes=1e15, argument_bytes=3352 * 10**6)
    assert program.bound_seconds(GPUS["h100"]) == pytest.approx(1e-3)
    assert program.bound_seconds(CHIPS["v5e"]) > 1000


def test_bound_of_products_in_8_bits() -> None:
    program = planning.ProgramPlan("denoise", 1, 1.0, flops=197e9, narrow_flops=98.5e9)
    times = [program.bound_seconds(chip) * chip.flops / 197e9 for chip in (CHIPS["v5e"], CHIPS["v4"], GPUS["h100"])]
    assert times == pytest.approx([0.75, 1, 0.75])


@pytest.mark.slow
def test_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tokens of the denoiser, in its program and its work, and each of their sizes has an encoder."""
    monkeypatch.setattr(planning, "compiler_version", lambda target: {target.compiler: "0"})
    said = lambda job, names: iter([{"program": name, "result": figures()} for name in names])  # noqa: E731
    monkeypatch.setattr(compiling, "_messages", said)
    plans = {count: canvax.plan("flux2-klein-4b", "v6e:1x1", references=count) for count in (0, 2)}
    encoder = {program.name: program.evaluations for program in plans[2].programs if program.name not in PROGRAMS}
    assert encoder == {"image encoder 1024x1024": 2}
    assert [program.reused for program in plans[2].programs] == [True, False, True, False]
    assert plans[2].seconds > plans[0].seconds
    assert "from 2 references" in lines(plans[2])[0]
    for number, reused in ((0, [False] * 3), (1, [False, False, True, False])):  # its text encoder sees them
        programs = canvax.plan("qwen-image-2.1", "v6e:1x1", references=number).programs
        assert [program.reused for program in programs] == reused
    for references, reused in (1, False), ([(480, 640)], True), (2, False):  # it sees small copies
        programs = canvax.plan("qwen-image-edit-2511", "v6e:1x1", references=references).programs
        assert programs[0].reused == reused
    with refused("references"):
        canvax.plan("tiny", "v5e:2x2", references=1)
    cfg = Flux2Config(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
                      joint_attention_dim=7680, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)  # fmt: skip
    klein, mesh = PRESETS["flux2-klein-4b"], make_mesh(jax.devices()[:1])
    small = replace(klein, denoiser=replace(klein.denoiser, cfg=cfg))
    params = {name: abstract_params(spec, "float32", mesh) for name, spec in small.specs().items()}
    latents, size = small.latent_shape(1, 512, 512), (512, 512)
    work = [evaluation_flops(Programs(small, mesh), params, latents, guided=False, references=(size,) * n)
            for n in (0, 1, 2)]  # fmt: skip
    assert work[2] - work[1] > work[1] - work[0] > 0  # attention
    qwen = PRESETS["qwen-image-2.1"]
    small = replace(qwen, denoiser=replace(qwen.denoiser, cfg=QwenImageConfig(num_layers=1)))
    params = {name: abstract_params(spec, "float32", mesh) for name, spec in small.specs().items()}
    latents = small.latent_shape(1, 512, 512)
    work = [evaluation_flops(Programs(small, mesh), params, latents, guided=False, references=(size,) * n)
            for n in (0, 1)]  # fmt: skip
    assert work[1] < 1.5 * work[0]  # they pass through the network before the loop


def test_too_large(told: Any) -> None:
    plan = told(decode=figures(temporary_bytes=10 * GIB, unpriced=["all-reduce.3", "all-reduce.24", "kernel"]))
    assert not plan.fits
    assert plan.offloaded_bytes == 12 * GIB  # the decoder alone
    assert plan.to_dict()["why_not"] == "0.25 GiB too much on each chip"
    text = "\n".join(lines(plan))
    assert "does not fit: 0.25 GiB too much" in text
    assert "the estimate leaves these out: 2 all-reduce, 1 kernel" in text


def test_refused_by_the_compiler(told: Any) -> None:
    plan = told(decode={"compile_seconds": 3.0, "refused": "RESOURCE_EXHAUSTED: Ran out of memory on HBM"})
    said = plan.to_dict()
    assert not said["fits"]
    assert said["why_not"] == "decode: RESOURCE_EXHAUSTED: Ran out of memory on HBM"
    assert said["memory"] is said["estimated_seconds"] is said["bound_seconds"] is None
    assert lines(plan)[-1] == f"does not fit: {plan.why_not}"


def test_places_of_the_weights(told: Any) -> None:
    plan = told()
    modes = {(mode.place, mode.quantize): mode for mode in plan.modes}
    assert [*modes] == [(place, kind) for kind in (None, "int8") for place in ("resident", "offloaded", "streamed")]
    assert modes["resident", None].bytes == plan.peak_bytes
    assert modes["resident", None].seconds == pytest.approx(plan.seconds)
    small = sum(plan.weights.values()) - plan.in_8_bits
    assert modes["resident", "int8"].bytes == plan.peak_bytes - small
    once = plan.weights["unet"] + plan.weights["vae"] + 2 * plan.weights["text_encoder"]  # for either text
    assert modes["offloaded", None].seconds - plan.seconds == pytest.approx(once / plan.target.chip.host)
    assert plan.to_dict()["modes"][0]["fits"]
    rows = [line.split() for line in lines(plan) if line.startswith("streamed")]
    assert [row[1:-4] for row in rows] == [["--offload-layers"], ["--quantize", "int8", "--offload-layers"]]


def test_streamed_where_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it refuses with all weights is compiled with streamed ones; copies count where they take longer."""
    monkeypatch.setattr(planning, "compiler_version", lambda target: {target.compiler: "0"})
    asked = []

    def said(job: Job, names: list[str]) -> Any:
        asked.append((job.streamed, names))
        for name in names:
            whole = {"argument_bytes": GIB, "temporary_bytes": GIB}
            refused = {"compile_seconds": 1.0, "refused": "Ran out of memory"}
            small = {**figures(**whole), "seconds": 0.9} if job.streamed else refused
            yield {"program": name, "result": small if name == "denoise" else figures(**whole | {
                "argument_bytes": 10 * GIB if name == "encode" else GIB})}  # fmt: skip

    monkeypatch.setattr(compiling, "_messages", said)
    plan = canvax.plan("flux1-dev", "v5e:1x1", steps=4)
    assert asked == [(False, [*PROGRAMS]), (True, ["denoise"])]
    fits = {(mode.place, mode.quantize): mode.fits for mode in plan.modes}
    assert not plan.fits
    assert [key for key, fit in fits.items() if fit] == [
        ("streamed", None), ("offloaded", "int8"), ("streamed", "int8"),
    ]  # fmt: skip
    _, _, streamed, resident, _, small = plan.modes
    copies = plan.weights["transformer"] / plan.target.chip.host
    assert copies > 1.4
    assert streamed.seconds - resident.seconds == pytest.approx(4 * (copies - 0.9), rel=0.2)  # and the text's
    assert small.seconds - resident.seconds < 0.5  # half the bytes take less than computing
    assert streamed.bytes < 6 * GIB < resident.bytes
    asked.clear()
    again = canvax.plan("flux1-dev", "v5e:1x1", steps=4)
    assert (asked, again.modes) == ([], plan.modes)


def test_plans_are_kept(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = told()
    assert [program.reused for program in first.programs] == [False] * 3
    monkeypatch.setattr(compiling, "_messages", said_by_process())
    again = canvax.plan("tiny", "v5e:2x2", steps=7)
    assert [program.reused for program in again.programs] == [True] * 3
    for path in compiling.cache_folder().iterdir():
        path.write_text("{", encoding="utf-8")  # a damaged file is as good as none
    assert not told().programs[0].reused


def test_axes() -> None:
    target = parse_target("v5e:2x2")
    assert check_axes(None, 4, target) == {"data": 4, "model": 1}
    assert check_axes({"model": 1}, 4, target) == {"data": 4, "model": 1}


@pytest.mark.parametrize(
    ("target", "package"), [("v5e:2x2", "pip install 'libtpu'"), ("h100", r"pip install 'jax\[cuda13\]'")]
)
def test_without_the_compiler(target: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise planning.PackageNotFoundError(name)

    monkeypatch.setattr(planning, "version", lambda name: "1" if name == "jax" else missing(name))
    with pytest.raises(CanvaxError, match=package):
        canvax.plan("tiny", target)


def test_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning, "compiler_version", lambda target: {target.compiler: "0"})
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'F0000 out of luck' >&2\nexit 7\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(CanvaxError, match=r"compiling for tpu-v5e:2x2 failed \(7\): F0000 out of luck"):
        canvax.plan("tiny", "v5e:2x2")


def test_only_configs_of_a_folder_are_read(tmp_path: Path) -> None:
    folder = write_small_checkpoint(tmp_path / "model")
    for path in [*folder.rglob("*.safetensors"), *(folder / "tokenizer").iterdir()]:
        path.unlink()
    assert architecture(folder) == Networks(UNetDenoiser(UNET), VAE, clip_encoders(TEXT))
    (folder / "unet" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        architecture(folder)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without a compiler."""
    monkeypatch.setattr(planning, "compiler_version", lambda target: {target.compiler: "0"})
    monkeypatch.setattr(
        planning, "compile_programs", lambda job, *_, **__: dict.fromkeys(job.programs, figures(reused=False))
    )


@pytest.mark.parametrize(
    ("model", "steps", "guided"),
    [
        ("sd15", 50, True),
        ("z-image", 50, True),
        ("krea-2", 28, True),
        ("flux2-klein-4b", 4, False),
        ("flux3-klein", 16, False),
        ("flux3-klein-base", 50, True),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_steps_and_guidance_of_presets(model: str, steps: int, guided: bool) -> None:
    plan = canvax.plan(model, "v5e:1x1")
    assert (plan.steps, plan.guided) == (steps, guided)


@pytest.mark.usefixtures("compiled")
def test_steps_and_guidance_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of a call that names none, unless the plan names others."""
    folder = write_small_checkpoint(tmp_path / "model")
    (folder / "canvax.json").write_text('{"num_inference_steps": 8, "guidance_scale": 1}', encoding="utf-8")
    usual = read_model(open_files(Location(folder), weights=False), "float32").defaults
    plan = canvax.plan(folder, "v5e:1x1")
    assert (plan.steps, plan.guided) == (usual.num_inference_steps, False) == (8, False)
    plan = canvax.plan(folder, "v5e:1x1", steps=3, guided=True)
    assert (plan.steps, plan.guided) == (3, True)
    assert main(["plan", str(folder), "--target", "v5e:1x1", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["guided"]) == (8, False)


def test_sizes_and_axes_as_typed() -> None:
    assert parse_sides("size", "1024X768") == (1024, 768)
    assert parse_mesh("data=2, model=2") == {"data": 2, "model": 2}


def test_command_line_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sdxl", "--target", "v5f:2x2", "--json"]) == BAD_INPUT
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "InputError"
