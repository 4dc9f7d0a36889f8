"""Compiling for NVIDIA GPUs that are not there; skipped where JAX's CUDA plugin is not installed (canvax[cuda])."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

import canvax
from canvax.cli.plan import lines
from canvax.compile.inspect import collectives
from canvax.compile.programs import Programs
from canvax.families.sd import SD
from canvax.kernels.target import compiled_on
from canvax.models.denoiser import UNetDenoiser
from canvax.nn import group_norm, layer_norm
from canvax.parallel.mesh import AXES, make_mesh, replicated
from canvax.parallel.rules import abstract_params
from canvax.planning.hlo import Module
from canvax.planning.targets import GPUS, parse_target
from canvax.train import make_step, task
from canvax.train.lora import Lora, train_lora
from canvax.train.task import Training
from tests.support.small_checkpoint import SHALLOW_UNET, UNET
from tests.support.small_sdxl import build as build_xl
from tests.support.tiny_preset import TINY
from tests.test_finetune import write_pictures

pytestmark = pytest.mark.skipif(
    not any(find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")),
    reason="JAX's CUDA plugin is not installed: canvax[cuda]",
)

CHIP = GPUS["h100"]


def gpus(count: int) -> list[Any]:
    return topologies.get_topology_desc(**parse_target(f"gpu-h100:{count}").topology).devices


def test_plan(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setitem(SD.presets, "tiny", TINY)
    plan = canvax.plan("tiny", "gpu-h100:2", height=16, width=16, steps=20)
    assert plan.fits
    assert (plan.batch, plan.seconds) == (2, None)
    for program in plan.programs:
        assert program.collectives == {}
        assert program.kernels > 10
        assert 0 < program.bound_seconds(plan.target.chip) < 1e-3
    text = "\n".join(lines(plan))
    assert re.search(r"bound ms +kernels", text)
    assert re.search(r"time: at least .* for the batch, at most .* images a second", text)
    assert plan.to_dict()["estimated_seconds"] is None


@pytest.fixture(scope="module")
def denoiser() -> str:
    """The text of a denoiser for two GPUs, whose heads are 8 wide."""
    unet = replace(SHALLOW_UNET, block_out_channels=(64,), attention_head_dim=8, norm_num_groups=4)
    model = replace(TINY, denoiser=UNetDenoiser(unet))
    mesh = Mesh(np.asarray(gpus(2), dtype=object).reshape(2, 1), AXES)
    params = {name: abstract_params(spec, jnp.dtype("bfloat16"), mesh) for name, spec in model.specs().items()}
    program: Any = Programs(model, mesh).program("guided denoiser", params, (2, 32, 32, 4))
    return program.executable.as_text()


def test_attention_is_cudnn_s(denoiser: str) -> None:
    """Both of a block, to the picture and to the prompt, with nothing turned around before or after."""
    step = Module(denoiser, CHIP).step_text()
    found = re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax"', step)
    assert len(found) == 2 * (2 * UNET.layers_per_block + 2)  # on the way down, in the middle, and one more up
    assert not re.search(r"f32\[\d+,\d+,1024,1024\]", step)
    assert not re.search(r'transpose\(.*op_name="[^"]*/transformer/', step)


def test_gpus_say_nothing_to_each_other(denoiser: str) -> None:
    assert collectives(denoiser) == {}


def compiled(function: Any, *shapes: tuple[int, ...]) -> Module:
    device = gpus(1)[0]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)) for shape in shapes]
    mesh = Mesh(np.asarray([[device]], dtype=object), AXES)
    return Module(compiled_on(mesh, function, *arguments).as_text(), CHIP)


@pytest.mark.slow
def test_a_step_of_a_lora_takes_no_memory_for_text_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are the frozen UNet, the factors with both moments, and a sample."""
    got: dict[str, Any] = {}

    def fit(start: Any, loss: Any, data: Any, samples: int, plan: Any, session: Any, shared: Any) -> Any:
        got.update(start=start, loss=loss, data=jax.tree.map(lambda leaf: leaf[:1], data), shared=shared)
        return {}, False

    monkeypatch.setattr(task, "fit", fit)
    model, pictures = build_xl(tmp_path / "xl"), write_pictures(tmp_path / "pictures")
    train_lora(Training(model, pictures, tmp_path / "run", size=64, dtype="bfloat16"), Lora(rank=2), make_mesh())
    mesh = Mesh(np.asarray(gpus(1), dtype=object).reshape(1, 1), AXES)

    def there(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh))

    step = make_step(got["loss"], optax.adamw(1e-4))
    state, samples, shared = jax.tree.map(there, (jax.eval_shape(step.init, got["start"]), got["data"], got["shared"]))
    program = compiled_on(mesh, step, state, samples, shared, jax.eval_shape(jax.random.key, 0), donate_argnums=0)
    used = {"state": state, "samples": samples, "empty": shared["empty"], "unet": shared["frozen"]["unet"]}
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(used))
    assert program.memory_analysis().argument_size_in_bytes < 1.02 * needed


def test_layer_norm_is_one_kernel() -> None:
    norm = compiled(lambda x, w, b: layer_norm({"weight": w, "bias": b}, x), (2, 4096, 640), (640,), (640,))
    assert norm.whole().kernels == 1


def test_group_norm_reads_twice_and_writes_once() -> None:
    """Once for its sums, a little of them in between, once to normalise; the activation is in the same kernel."""

    def norm(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.silu(group_norm({"weight": w, "bias": b}, x, groups=32, eps=1e-5))

    image = (1, 512, 512, 128)
    assert compiled(norm, image, (128,), (128,)).whole().bytes < 3.1 * 2 * np.prod(image)


def test_sums_of_a_small_picture_are_divided_among_multiprocessors() -> None:
    """64 x 64 pixels, of which XLA would give one multiprocessor 128 channels whole."""
    norm = compiled(
        lambda x, w, b: group_norm({"weight": w, "bias": b}, x, groups=32, eps=1e-5), (2, 64, 64, 320), (320,), (320,)
    )
    assert "(f32[2,16,320]{2,1,0}, f32[2,16,320]{2,1,0}) fusion(" in norm.text


def test_queries_keys_and_values_are_not_copied_out_of_one_matmul() -> None:
    def project(x: Any, q: Any, k: Any, v: Any) -> Any:
        return x @ q, x @ k, x @ v

    work = compiled(project, (4096, 640), *[(640, 640)] * 3).whole()
    assert work.kernels == 3
