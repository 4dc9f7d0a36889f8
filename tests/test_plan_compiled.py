"""Planning with the TPU's own compiler; skipped where libtpu is not installed (canvax[tpu])."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.families.known import PRESETS
from canvax.families.sd import SD
from canvax.models.networks import Networks
from canvax.params import count, flatten
from canvax.planning import compiling
from canvax.planning.job import PROGRAMS, Job
from canvax.planning.plan import Plan, ProgramPlan
from canvax.planning.targets import environment
from tests.support.tiny_preset import TINY

MIB = 2**20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: canvax[tpu]"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(SD.presets, "tiny", TINY)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, list[tuple[str, Any]]]]:
    """ "tiny" compiled for four chips, and what was announced."""
    heard: list[tuple[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("compiled")))
        patch.setitem(SD.presets, "tiny", TINY)
        yield (
            canvax.plan("tiny", "v5e:2x2", height=16, width=16, steps=20, announce=lambda *it: heard.append(it)),
            heard,
        )


def test_compiled_for_four_chips(compiled: tuple[Plan, list[tuple[str, Any]]]) -> None:
    plan, heard = compiled
    assert [what for what, seconds in heard if seconds is None] == [
        f"{name} for tpu-v5e:2x2" for name in ("text encoder", "denoiser", "decoder")
    ]
    assert plan.fits
    for program in plan.programs:
        assert program.collectives == {}, program
        assert program.unpriced == ()
        assert 0 < program.bound_seconds(plan.target.chip) <= program.seconds < 0.1
        # The compiler's own count has element-wise work and padding too.
        assert 0.5 < program.flops / program.cost_analysis["flops"] <= 1
    step = plan.programs[1]
    assert step.setup_seconds < step.seconds
    for program, parameters in zip(plan.programs, parameters_read(TINY), strict=True):
        assert 2 * parameters < program.argument_bytes, program.name  # and the inputs, in tiles


def parameters_read(model: Networks) -> list[int]:
    """Parameters of the text encoder, the UNet and the VAE's decoder."""
    from canvax.models.vae import vae_spec

    text, decoder = model.text.specs["text_encoder"], vae_spec(model.vae)["decoder"]
    return [count(spec) for spec in (text, model.denoiser.spec, decoder)]


def test_json_of_a_plan(compiled: tuple[Plan, Any]) -> None:
    said = json.loads(json.dumps(compiled[0].to_dict()))
    assert set(said) == {
        "model", "target", "mesh", "device", "batch", "height", "width", "steps", "guided", "dtype", "quantize", "fits",
        "modes", "references", "why_not", "memory", "weights", "estimated_seconds", "bound_seconds", "programs",
        "versions",
    }  # fmt: skip
    assert [program["name"] for program in said["programs"]] == list(PROGRAMS)
    assert set(said["programs"][0]) == set(ProgramPlan.__dataclass_fields__) | {"bound_seconds"}
    assert said["versions"]["libtpu"]


def test_eight_cores_say_nothing_to_each_other() -> None:
    """A v2-8 with the batch over its cores, as the old guide had it: no collective in the loop or before it."""
    job = Job(TINY, "tpu-v2:2x2", (8, 1), 8, 16, 16, True, "bfloat16")
    result = list(compiling._messages(job, ["denoise"]))[-1]["result"]
    assert result["collectives"] == result["collectives_in_loop"] == {}
    assert result["seconds"] > result["setup_seconds"] > 0


def test_more_than_a_chip_has() -> None:
    """A picture of 4096 x 4096 decoded at once; the compiler's own words are told."""
    job = Job(TINY, "tpu-v5e:2x2", (4, 1), 4, 4096, 4096, True, "bfloat16")
    result = list(compiling._messages(job, ["decode"]))[-1]["result"]
    assert "Ran out of memory" in result["refused"]
    assert "exceeds available HBM (15.75G)" in result["refused"]


def test_process_ends_with_its_caller() -> None:
    job = Job(TINY, "tpu-v5e:2x2", (4, 1), 4, 16, 16, True, "bfloat16")
    messages = compiling._messages(job, ["denoise"])
    assert next(messages) == {"program": "denoise"}
    began = time.perf_counter()
    messages.close()
    assert time.perf_counter() - began < 2
    command = [sys.executable, "-m", "canvax.planning.worker", "denoise"]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(job.dumps() + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"program": "denoise"}
        process.stdin.close()
        assert process.wait(timeout=20) == 1
        assert process.stdout.read() == ""


def test_topology_that_libtpu_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--target", "v5e:3x5"]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert "--target" in err
    assert "Traceback" not in out + err


KERNELS = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=SingleDeviceSharding(devices[0]))

def kernel(x, out):
    out[...] = x[...] * 2

def scaled(x, cost):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x)

cost = pl.CostEstimate(flops=197_000_000_000, bytes_accessed=8, transcendentals=0)
told = jax.jit(lambda x: scaled(x, cost)).lower(x).compile()
silent = jax.jit(lambda x: scaled(x, None)).lower(x).compile()
mesh = Mesh(np.asarray(devices), ("data",))
split = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
summed = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec())).lower(split).compile()

from canvax.compile.inspect import collectives
from canvax.planning.hlo import Module
from canvax.planning.targets import CHIPS
chip = CHIPS["v5e"]
print(Module(told.as_text(), chip).whole().seconds, len(Module(silent.as_text(), chip).whole().unpriced))
print(sum(collectives(summed.as_text()).values()), sum(collectives(told.as_text()).values()))
"""


def test_kernels_and_collectives_in_real_text() -> None:
    """What a custom kernel says it costs is counted, one that says nothing is named, and collectives are seen."""
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernel, numbers = done.stdout.strip().splitlines()
    assert float(kernel.split()[0]) == pytest.approx(1e-3, rel=0.05)
    assert kernel.split()[1] == "1"
    assert [int(number) > 0 for number in numbers.split()] == [True, False]


def test_weights_split_over_the_chips(compiled: tuple[Plan, Any]) -> None:
    """Half of what is split on each chip, and the price: an all-reduce for each pair of layers, in the loop."""
    plan = canvax.plan("tiny", "v5e:2x2", height=16, width=16, batch=2, mesh={"data": 2, "model": 2})
    whole, split = compiled[0].programs[1], plan.programs[1]
    assert split.argument_bytes < whole.argument_bytes
    assert split.collectives_in_loop["all-reduce"] > 0


def test_streamed_weights_are_on_the_chip_for_some_layers_alone() -> None:
    """The compiler holds the weights of a few layers, however deep the network is, and begins copies ahead."""
    flux = PRESETS["flux1-dev"]
    cfg = replace(flux.denoiser.cfg, num_layers=0, num_single_layers=8, num_attention_heads=8)  # type: ignore[attr-defined]
    networks = replace(flux, denoiser=replace(flux.denoiser, cfg=cfg))  # type: ignore[type-var]
    job = Job(networks, "tpu-v5e:1x1", (1, 1), 1, 256, 256, False, "bfloat16", streamed=True)
    figures = compiling.compile_programs(job, {}, ["denoise"], reuse=False, announce=None)["denoise"]
    params = dict(flatten(networks.denoiser.spec))
    large, small = ([2 * param.size for param in params.values() if param.large is it] for it in (True, False))
    assert sum(small) <= figures["argument_bytes"] < sum(small) + 8 * MIB  # and text and image
    assert figures["temporary_bytes"] < 2 * sum(large) / 8 + 32 * MIB < sum(large) / 2  # two of eight layers
    assert figures["unpriced"] == []
    assert figures["hbm_bytes"] > 2 * sum(large)  # what is copied is written there, and read


@pytest.mark.parametrize("name", ["encode", "denoise"])
def test_streamed_weights_of_8_bits_compile(name: str) -> None:
    """The compiler refuses copies of whole matrices of 8 bits outside of a loop."""
    qwen: Any = PRESETS["qwen-image"]
    encoder = qwen.text.encoders[0]
    width = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    cfg = replace(encoder.cfg, **width, num_hidden_layers=1, vocab_size=1024)
    small = {"num_layers": 1, "num_attention_heads": 4, "joint_attention_dim": 512}
    networks = replace(
        qwen,
        text=replace(qwen.text, encoders=(replace(encoder, cfg=cfg),)),
        denoiser=replace(qwen.denoiser, cfg=replace(qwen.denoiser.cfg, **small)),
    )
    job = Job(networks, "tpu-v5e:1x1", (1, 1), 1, 256, 256, False, "bfloat16", "int8", streamed=True)
    figures = compiling.compile_programs(job, {}, [name], reuse=False, announce=None)[name]
    assert "refused" not in figures
