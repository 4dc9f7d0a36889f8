"""Devices: how weights are split, that pictures stay the same, what devices say to each other, and their memory."""

from __future__ import annotations

import dataclasses
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

import canvax
from canvax.compile.inspect import collectives
from canvax.compile.kinds import Compiled
from canvax.compile.programs import Programs
from canvax.families.known import PRESETS
from canvax.models.clip import clip_encoders
from canvax.models.configs import UNetConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.presets import SD15_UNET, SDXL_UNET
from canvax.models.unet import unet_spec
from canvax.parallel import memory
from canvax.parallel.mesh import check_mesh, make_mesh, mesh_of
from canvax.parallel.place import local_rows, map_parts
from canvax.parallel.rules import abstract_params, check_split, device_bytes, place, placement
from canvax.params import Axis, Param, count, flatten
from tests.support.bundled import LATENTS
from tests.support.refusals import refused
from tests.support.small_checkpoint import TEXT, VAE, write_small_checkpoint

QUIET = canvax.Options(progress=False)
PROMPTS = ["a cat", "a dog", "a red apple"]
SD1 = UNetConfig(
    sample_size=32,
    block_out_channels=(64, 128),
    layers_per_block=1,
    attention_head_dim=8,
    cross_attention_dim=48,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
"""A small Stable Diffusion 1.x whose upper level has 1,024 tokens, enough for the CPU's kernel for long sequences."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_checkpoint(tmp_path_factory.mktemp("devices") / "model")


def draw(pipe: canvax.Pipeline, prompts: Any = PROMPTS, **changes: Any) -> canvax.Result:
    return pipe(prompts, **{"num_inference_steps": 3, "seed": 5, "sampler": "Euler a", "options": QUIET} | changes)


def same_latents(got: canvax.Result, want: canvax.Result) -> None:
    """Within 1e-4 for latents of unit variance; those of random weights have a larger one."""
    scale = float(want.latents.std())
    np.testing.assert_allclose(got.latents / scale, want.latents / scale, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> canvax.Result:
    return draw(canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:1])))


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((8, 1), marks=pytest.mark.slow)], ids=str)
def test_same_picture(checkpoint: Path, alone: canvax.Result, sizes: tuple[int, int]) -> None:
    """Three images, which neither 2 nor 4 nor 8 divides; and one image, with more devices than images."""
    data, model = sizes
    pipe = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[: data * model], data=data, model=model))
    got = draw(pipe)
    assert got.indices == [0, 1, 2]
    assert got.pixels.shape == alone.pixels.shape
    same_latents(got, alone)
    np.testing.assert_allclose(got.pixels, alone.pixels, atol=1e-4)
    if data == 8:
        one = draw(pipe, PROMPTS[1], seed=6)
        np.testing.assert_allclose(one.pixels, alone.pixels[1:2], atol=1e-4)


def test_each_device_receives_its_part_alone(checkpoint: Path, tmp_path: Path) -> None:
    pipe = canvax.load(checkpoint, mesh=make_mesh(data=4, model=2))
    params = pipe.params
    assert params is not None
    block = params["unet"]["down_blocks"]["0"]["attentions"]["0"]["transformer_blocks"]["0"]
    q, out = block["attn1"]["to_q"]["weight"], block["attn1"]["to_out"]["0"]["weight"]
    gated = block["ff"]["net"]["0"]["proj"]["weight"]
    assert (q.shape, q.addressable_shards[0].data.shape) == ((32, 32), (32, 16))
    assert (out.shape, out.addressable_shards[0].data.shape) == ((32, 32), (16, 32))
    assert (gated.shape, gated.addressable_shards[0].data.shape) == ((32, 2, 128), (32, 2, 64))
    sizes = {"data": 4, "model": 2}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert held == sum(device_bytes(part.spec, np.float32, sizes) for part in pipe.model.components)
    # Saving puts the weights together again.
    pipe.save(tmp_path / "saved")
    again = canvax.load(tmp_path / "saved", mesh=make_mesh(jax.devices()[:1])).params
    whole = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:1])).params
    assert again is not None
    jax.tree.map(np.testing.assert_array_equal, again, whole)


@pytest.mark.slow
def test_own_params(checkpoint: Path, alone: canvax.Result) -> None:
    """Parameters of the caller are put on the mesh, wherever they are; a fault of theirs is named."""
    _, params = canvax.Pipeline.from_pretrained(checkpoint, mesh=make_mesh(jax.devices()[:1]))
    pipe, _ = canvax.Pipeline.from_pretrained(checkpoint, mesh=make_mesh(data=2, model=4))
    on_host = jax.tree.map(np.asarray, params)
    for given in (params, on_host, pipe.place(on_host)):
        same_latents(draw(pipe, params=given), alone)
    placed = pipe.place(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(pipe.place(placed)), strict=True))
    on_host["unet"]["conv_in"]["bias"] = np.zeros(31, np.float32)
    del on_host["vae"]["decoder"]["conv_in"]
    with pytest.raises(canvax.InputError, match=r"unet.*conv_in\.bias is \(31,\), not \(32,\)"):
        draw(pipe, params=on_host)
    with pytest.raises(canvax.InputError, match=r"decoder\.conv_in\.weight is missing"):
        pipe.place(params | {"vae": on_host["vae"]})


# The rules.


def test_rules() -> None:
    heads = Param((64, 40), ("embed", Axis("heads", 10)))
    assert placement(heads, {"data": 4, "model": 2}).spec == PartitionSpec(None, "model")
    assert placement(heads, {"model": 5}).spec == PartitionSpec(None, "model")
    for sizes in ({"data": 8}, {"data": 2, "model": 1}, {"model": 4}):  # 4 divides the 40 channels, not the 10 heads
        assert placement(heads, sizes).spec == PartitionSpec()
    gated = Param((64, 512), ("embed", Axis("mlp", 256, parts=2)))
    assert placement(gated, {"model": 2}).shape == (64, 2, 256)
    assert placement(gated, {"model": 2}).spec == PartitionSpec(None, None, "model")
    assert placement(gated, {"data": 2}).shape == placement(gated, {"model": 3}).shape == (64, 512)


@pytest.mark.parametrize("model", [pytest.param(5, marks=pytest.mark.weekly), 8])
@pytest.mark.parametrize("cfg", [SD15_UNET, SDXL_UNET], ids=["sd15", "sdxl"])
@pytest.mark.slow
def test_rules_of_full_models(cfg: UNetConfig, model: int) -> None:
    """Every weight that is split is split evenly, and the layers of a pair alike."""
    spec = unet_spec(cfg)
    sizes = {"data": 1, "model": model}
    placed = {name: placement(param, sizes) for name, param in flatten(spec)}
    for name, one in placed.items():
        assert math.prod(one.shape) == dict(flatten(spec))[name].size
        for length, axis in zip(one.shape, one.spec, strict=False):
            assert axis is None or length % model == 0, name
    for pair in (("to_q", "to_out.0"), ("ff.net.0.proj", "ff.net.2"), ("conv1", "conv2"), ("conv1", "time_emb_proj")):
        firsts = {name for name in placed if name.endswith(f"{pair[0]}.weight")}
        for name in firsts:
            assert placed[name].whole == placed[name.replace(*pair)].whole, name
    # Hardly anything but what resizes, and the projections around transformers, is whole.
    if model == 2:
        share = device_bytes(spec, jnp.bfloat16, sizes) / (2 * count(spec))
        assert share < (0.57 if cfg is SD15_UNET else 0.52), share


def test_gate_stays_with_its_values() -> None:
    """Each device has the gates of its own values; a plain cut of the columns would give it one of the two."""
    mesh = make_mesh(jax.devices()[:2], model=2)
    param = Param((2, 8), (None, Axis("mlp", 4, parts=2)))
    host = np.arange(16, dtype=np.float32).reshape(2, 8)
    for shard in place(param, host, mesh).addressable_shards:
        values, gate = np.asarray(shard.data)[:, 0], np.asarray(shard.data)[:, 1]
        np.testing.assert_array_equal(gate, values + 4)


def test_shardings_have_the_nesting_of_the_spec() -> None:
    mesh = make_mesh(data=4, model=2)
    found = abstract_params(unet_spec(SD1), jnp.float32, mesh)
    assert found["conv_in"]["weight"].sharding == NamedSharding(mesh, PartitionSpec())
    attention = found["mid_block"]["attentions"]["0"]["transformer_blocks"]["0"]["attn1"]
    assert attention["to_out"]["0"]["weight"].sharding.spec == PartitionSpec("model", None)


# What devices say to each other.


def programs_of(data: int, model: int) -> tuple[Programs, dict[str, Any]]:
    mesh = make_mesh(jax.devices()[: data * model], data=data, model=model)
    networks = Networks(UNetDenoiser(SD1), VAE, clip_encoders(dataclasses.replace(TEXT, num_attention_heads=8)))
    params = {name: abstract_params(spec, jnp.float32, mesh) for name, spec in networks.specs().items()}
    return Programs(networks, mesh), params


def compiled_collectives(data: int, model: int, batch: int) -> dict[str, dict[str, int]]:
    programs, params = programs_of(data, model)
    ready: Any = programs.ready(params, (batch, 32, 32, 4))
    names = {"text": "text encoder", "denoise": "guided denoiser", "decode": "decoder"}
    return {name: collectives(ready[own].executable.as_text()) for name, own in names.items()}


@pytest.mark.slow
def test_no_collective_over_data() -> None:
    """Eight devices that share a batch never wait for each other, in the denoising loop or elsewhere."""
    assert compiled_collectives(8, 1, 8) == {"text": {}, "denoise": {}, "decode": {}}


@pytest.mark.slow
def test_one_sum_for_each_pair_of_layers_over_model() -> None:
    """Nothing but an all-reduce behind each residual block and behind each attention and feed-forward."""
    resnets, transformers = 8, 4
    got = compiled_collectives(2, 4, 2)
    assert got["denoise"] == {"all-reduce": resnets + 3 * transformers}
    assert got["text"] == {"all-reduce": 2 * TEXT.num_hidden_layers}
    assert got["decode"] == {"all-reduce": 2 + 2 * 4}


def test_collectives_are_counted() -> None:
    text = """
  %all-reduce.1 = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}
  %all-reduce-start = f32[8]{0} all-reduce-start(%y)
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %g = (f32[8]{0}, f32[16]{0}) all-gather-start(%all-reduce.1), metadata={op_name="all-to-all"}
  ROOT %p = f32[8]{0} collective-permute(%x)
"""
    assert collectives(text) == {"all-reduce": 2, "all-gather": 1, "collective-permute": 1}


# The mesh.


@pytest.mark.parametrize(
    "own",
    [
        Mesh(np.asarray(jax.devices()), ("data",)),
        jax.make_mesh((8,), ("data",)),
        jax.make_mesh((1, 8), ("model", "data")),
    ],
)
def test_meshes_of_other_forms(own: Mesh) -> None:
    mesh = check_mesh(own)
    assert mesh == make_mesh()


@pytest.mark.slow
def test_edited_parameters_compile_nothing(checkpoint: Path) -> None:
    """An operation on a split array leaves a sharding that is the same and not equal."""
    pipe = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:2], model=2), progress=False)
    draw(pipe)
    edited = {name: jax.tree.map(lambda leaf: 0.99 * leaf, part) for name, part in pipe.params.items()}
    assert draw(pipe, params=edited).compilations == 0


def test_mesh() -> None:
    assert make_mesh().shape == {"data": 8, "model": 1}
    assert make_mesh(model=2).shape == {"data": 4, "model": 2}
    assert make_mesh(jax.devices()[:6], data=3, model=2).devices.tolist()[1] == jax.devices()[2:4]
    assert mesh_of(None).shape == {"data": 8, "model": 1}
    assert mesh_of("model=4").shape == {"data": 2, "model": 4}
    assert mesh_of("data=2").devices.tolist() == [[jax.devices()[0]], [jax.devices()[1]]]
    with refused("devices"):
        make_mesh(jax.devices()[:1] * 2)
    with pytest.raises(canvax.InputError, match="'batch'"):
        check_mesh(Mesh(np.asarray(jax.devices()), ("batch",)))


def test_rows_of_a_batch() -> None:
    mesh = make_mesh(data=4, model=2)
    array = jax.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(mesh, PartitionSpec("data")))
    indices, rows = local_rows(array, 7)
    assert indices == list(range(7))
    np.testing.assert_array_equal(rows, np.arange(14.0).reshape(7, 2))
    doubled = map_parts(lambda part: 2 * part[:, :1], array)
    assert doubled.sharding == array.sharding
    np.testing.assert_array_equal(np.asarray(doubled), 4 * np.arange(8.0)[:, None])


# Memory.


@pytest.mark.slow
def test_memory_is_what_the_compiler_says(emoji: canvax.Pipeline) -> None:
    found = emoji.memory(batch=2)
    assert found.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(emoji.params))
    assert found.fits
    assert found.total == found.weights + max(found.programs.values())
    assert emoji.params is not None
    decoder: Any = emoji.programs.program("decoder", emoji.params, (2, *LATENTS))
    analysis = decoder.executable.memory_analysis()
    assert found.programs["decoder"] == analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert found.programs.keys() == {"text encoder", "denoiser", "decoder"}
    # The programs are ready, and the figures are of the size, the batch and the guidance asked for.
    assert emoji.compile(batch=2, progress=False) == ()
    eight, alone = emoji.memory(batch=8).programs, emoji.memory(batch=2, guidance=False).programs
    assert alone["denoiser"] < found.programs["denoiser"] < eight["denoiser"]
    without = canvax.Pipeline(emoji.model, emoji.programs).memory(batch=2)
    assert (without.weights, without.programs) == (found.weights, found.programs)


@pytest.mark.slow
def test_weights_on_each_device(checkpoint: Path) -> None:
    whole = canvax.load(checkpoint, mesh=make_mesh(data=8)).memory()
    halved = canvax.load(checkpoint, mesh=make_mesh(data=4, model=2)).memory()
    assert halved.weights < 0.75 * whole.weights


def test_weights_that_cannot_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 100_000)
    with pytest.raises(canvax.OutOfMemoryError, match=r"float32 need .* 0\.1 MB are free; load in bfloat16") as caught:
        canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:2], model=2))
    assert isinstance(caught.value, MemoryError)
    # Whole weights lie in the host's memory once, for however many CPU devices: here 8 times 100 kB is too little too.
    with pytest.raises(canvax.OutOfMemoryError, match=r"0\.8 MB are free"):
        canvax.load(checkpoint)


def test_program_that_cannot_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:2]))
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1_000_000)
    with pytest.raises(canvax.OutOfMemoryError) as caught:
        draw(pipe, PROMPTS * 2)
    said = ("1.0 MB are free", "fewer images at once (now 6", "bfloat16", "64 x 64", "model=2")
    for part in said:
        assert part in str(caught.value)


@pytest.mark.slow
def test_a_layer_that_cannot_fit_is_refused_before_compiling(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error waits for no other program. If the layer fits once, a warning comes. Figures are of any size."""
    pipe, compiled, ended = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:1])), Lowered.compile, Event()
    call: dict[str, Any] = {"height": 192, "width": 128}
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1_000_000)
    monkeypatch.setattr(Lowered, "compile", lambda *_: ended.wait() and pytest.fail("it is compiled"))
    for ask in (lambda: draw(pipe, **call), lambda: pipe.compile(**call, progress=False)):
        with pytest.raises(canvax.OutOfMemoryError, match=r"1\.0 MB are free.*128 x 192"):
            ask()
    ended.set()
    monkeypatch.setattr(Lowered, "compile", compiled)
    decoder = pipe.programs.wanted(pipe.params, pipe.model.networks.latent_shape(1, 192, 128))["decoder"]
    layer = memory.largest_layer_bytes(jax.make_jaxpr(decoder.function)(pipe.params["vae"], *decoder.inputs).jaxpr)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: int(1.5 * layer))
    with pytest.warns(canvax.HintWarning, match="decoder"):
        made = pipe.programs.compile(pipe.params, {"decoder": decoder})["decoder"]
    assert memory.program_bytes(made.executable) > 1.7 * layer
    described = list[bool]()
    monkeypatch.setattr(Programs, "ready", lambda programs, *_: described.append(programs.described) or {})
    pipe.memory(**call)
    assert all(described)


def test_the_largest_layer_of_a_loop_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the body of a loop, in bytes of its dtypes; devices share it."""

    def looped(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: (y @ y).astype(jnp.bfloat16), x)

    jaxpr = jax.make_jaxpr(looped)(jnp.zeros((64, 64), jnp.bfloat16)).jaxpr
    assert memory.largest_layer_bytes(jaxpr) == 3 * 2 * 64 * 64
    for devices, free, fits in ((1, 24_000, False), (2, 13_000, True)):
        monkeypatch.setattr(memory, "free_bytes", lambda mesh, free=free: free)
        with nullcontext() if fits else pytest.raises(canvax.OutOfMemoryError):
            memory.check_layers("decoder", jaxpr, make_mesh(jax.devices()[:devices]), str)


@pytest.mark.parametrize(
    "words", ["RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.", "INTERNAL: YNNPACK operation failed"]
)
def test_running_out_is_explained(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    pipe = canvax.load(checkpoint, mesh=make_mesh(jax.devices()[:1]))

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError(f"{words}\n  a long dump")

    monkeypatch.setattr(Compiled, "__call__", fail)
    with pytest.raises(canvax.OutOfMemoryError) as caught:
        draw(pipe)
    assert words in str(caught.value)
    assert "dump" not in str(caught.value)


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  16000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert memory.free_bytes(make_mesh(jax.devices()[:4])) == 2000 * 1024
    monkeypatch.setattr(memory, "_CONTROL", tmp_path)
    stat = "anon 700\nactive_file 1024\ninactive_file 2048\nslab 9\n"
    version_2, version_1 = tmp_path / "memory.max", tmp_path / "memory" / "memory.limit_in_bytes"
    version_1.parent.mkdir()
    for limit, used in ((version_2, "memory.current"), (version_1, "memory.usage_in_bytes")):
        limit.write_text("5000000\n")
        (limit.parent / used).write_text("4000000\n")
        (limit.parent / "memory.stat").write_text(stat)
        assert memory.available_bytes() == 1000000 + 3 * 1024
        limit.write_text("max\n")  # none, or one beyond the host's memory
        assert memory.available_bytes() == 8000 * 1024
        limit.write_text("9223372036854771712\n")
        assert memory.available_bytes() == 8000 * 1024
    meminfo.unlink()
    version_1.unlink()
    version_2.unlink()
    assert memory.free_bytes(make_mesh()) is None


def test_memory_in_use_is_not_free() -> None:
    """The fullest of a process's devices counts."""

    def device(process: int, **stats: int) -> Any:
        return SimpleNamespace(platform="gpu", process_index=process, memory_stats=lambda: stats)

    def free(*devices: Any) -> int | None:
        mesh: Any = SimpleNamespace(devices=np.array(devices), shape={"data": len(devices)})
        return memory.free_bytes(mesh)

    full, empty = (device(0, bytes_limit=100, bytes_in_use=used) for used in (90, 20))
    assert free(empty) == 80
    assert free(empty, full, device(1, bytes_limit=100, bytes_in_use=99)) == 10
    assert free(device(0)) is None


def test_a_mesh_that_splits_heads_unevenly_is_named() -> None:
    """A partial split is a warning, which lists the sizes that split everything; no split at all is an error."""
    sdxl = PRESETS["sdxl"].denoiser.spec
    with pytest.warns(canvax.HintWarning, match=r"model=4 does not divide 10 .*: 1, 2$"):
        check_split(sdxl, {"data": 1, "model": 4}, "sdxl")
    with pytest.raises(canvax.InputError, match=r"model=3.*: 1, 2$"):
        check_split(sdxl, {"data": 1, "model": 3}, "sdxl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_split(sdxl, {"data": 4, "model": 2}, "sdxl")
        check_split(sdxl, {"data": 4}, "sdxl")
