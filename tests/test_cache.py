"""Compiled programs between processes: used without tracing, never wrong, never in the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from PIL import Image

import canvax
from canvax.cli import BAD_INPUT, FAILED, main
from canvax.cli.arguments import parse
from canvax.cli.serve import run
from canvax.compile import aot, cache, key, programs
from canvax.compile.aot import Build, find_entry, load_or_compile
from canvax.compile.at_once import at_once
from canvax.compile.kinds import Kinds
from canvax.compile.monitor import compilations, counting
from canvax.compile.programs import Programs
from canvax.kernels import cpu
from canvax.kernels.target import compiling_for, jitted
from canvax.models import blocks, clip
from canvax.models.clip import clip_encoders, text_encoder_spec
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders
from canvax.originals import replaced
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.params import init_params
from canvax.pipelines import generate
from canvax.pipelines.request import Call, make_request
from canvax.server.engine import ImageEngine
from canvax.server.group import Group
from canvax.server.models import ServedModel
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.control_files import controlnet
from tests.support.ip_adapter_files import encoder, ip_adapter
from tests.support.serving import counted
from tests.support.small_checkpoint import TEXT, UNET, VAE, write_small_checkpoint

DRAW = """
import json, sys
import canvax
from canvax.compile.monitor import compilations, process_age, traces

quiet = canvax.Options(progress=False)
pipe = canvax.load(sys.argv[1], offload="layers" if sys.argv[2:] else False)
result = pipe("a cat", seed=3, num_inference_steps=2, guidance_scale=4, options=quiet)
assert 0 < result.timings["first_step"] < result.timings["total"] < process_age()
print(json.dumps([traces(), compilations()]))
"""


def process(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line.lower()]
    assert all("saves nothing" in line for line in warnings), warnings  # of offloading on a CPU
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("offload", [[], ["--offload-layers"]], ids=str)
def test_a_second_process_traces_and_compiles_nothing(tmp_path: Path, offload: list[str]) -> None:
    """After `canvax compile`, which reads no weights; on two devices."""
    model = str(write_small_checkpoint(tmp_path / "sd"))
    environment = {
        "CANVAX_CACHE_DIR": str(tmp_path / "cache"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    built = json.loads(process("-m", "canvax", "compile", model, "--batch", "2", "--json", "-q", *offload,
                               **environment))  # fmt: skip
    assert [(program["program"], program["cached"]) for program in built["programs"]] == [
        ("text encoder", False), ("denoiser", False), ("decoder", False)
    ]  # fmt: skip
    assert json.loads(process("-c", DRAW, model, *offload, **environment)) == [0, 0]


# One program in one process, where a new `Programs` stands for a new process.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(key, "edited", lambda: False)  # by whoever edits while the tests run
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


ONE = jax.devices()[:1]
NETWORKS = Networks(UNetDenoiser(UNET), VAE, clip_encoders(TEXT))


@pytest.fixture(scope="module")
def weights() -> Any:
    return {"text_encoder": jax.device_put(init_params(text_encoder_spec(TEXT), 0), replicated(make_mesh(ONE)))}


def test_kept_privately_and_used_again(folder: Path, weights: Any) -> None:
    def encode() -> tuple[np.ndarray, list[bool]]:
        ours, builds = Programs(NETWORKS, make_mesh(ONE)), []
        program = ours.program("text encoder", weights, (1, 8, 8, 4), Kinds(guided=()), builds.append)
        inputs = {"ids": np.arange(77, dtype=np.int32)[None], "skip": np.zeros(1, np.int32)}
        text = program(weights, {"text_encoder": jax.device_put(inputs, over_batch(ours.mesh))})[0]["text"]
        return np.asarray(text), [build.cached for build in builds if build.seconds is not None]

    (first, made), (second, loaded) = encode(), encode()
    assert (made, loaded) == ([False], [True])
    assert (first == second).all()
    (path,) = (folder / "programs").iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / "programs", path)] == [0o700, 0o700, 0o600]
    (stored,) = cache.stored_programs()
    assert stored.header["description"] == {
        "program": "text encoder", "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "dtype": "float32", "batch": 1,
    }  # fmt: skip


def double(x: jax.Array) -> dict[str, Any]:
    return {"double": 2 * x, "both": (x, x)}


class Doubling:
    """A program that compiles at once. ``builds``: for each attempt, whether it came from the cache."""

    def __init__(self, devices: Any = ONE) -> None:
        self.builds: list[bool] = []
        self.mesh = make_mesh(devices)
        self.x = jax.device_put(np.arange(8, dtype=np.float32), replicated(self.mesh))
        self.abstract = jax.ShapeDtypeStruct(self.x.shape, self.x.dtype, sharding=self.x.sharding)

    def compile(self) -> tuple[Any, bool]:
        return jax.jit(partial(double)).lower(self.abstract).compile(), True

    def get(self, compile: Any = None) -> Any:
        entry = find_entry(partial(double), (self.abstract,), self.mesh, {"program": "doubling"})
        return load_or_compile("doubling", compile or self.compile, entry, self.report)

    def report(self, build: Build) -> None:
        if build.seconds is not None:
            self.builds.append(build.cached)


def doubled(devices: Any = ONE) -> list[bool]:
    """Get the program, run it and say where it came from."""
    program = Doubling(devices)
    result = program.get()(program.x)
    assert (np.asarray(result["double"]) == 2 * np.arange(8)).all()
    assert isinstance(result["both"], tuple)
    return program.builds


def only(folder: Path) -> Path:
    (path,) = (folder / "programs").iterdir()
    return path


NOTE = "compiled programs"
"""In each warning of the cache."""


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped(position: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        at = int(position * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return flip


def whole(executable: bytes | None = None, **changes: Any) -> Callable[[Path], object]:
    """A file as the cache writes it, of another program."""

    def write(path: Path) -> None:
        header = cache.stored_programs()[0].header
        cache.write(path, header | changes, executable or cache.read(path, header["key"]) or b"")

    return write


def elsewhere(path: Path) -> None:
    """A link in its place."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # reading it would wait for ever


UNSAFE: dict[str, Callable[[Path], object]] = {
    "open to all": lambda path: path.chmod(0o777), "a link": elsewhere, "of another user": of_another_user,
}  # fmt: skip
SPOILT = UNSAFE | {
    "another first byte": rewritten(flipped(0.0)), "another byte": rewritten(flipped(0.5)),
    "empty": rewritten(lambda data: b""), "cut": rewritten(lambda data: data[:-1]), "a pipe": a_pipe,
    "renamed": whole(key="0" * 64), "no executable": whole(b"no executable"),
}  # fmt: skip


def refuse_executables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read from the cache fails the test."""
    monkeypatch.setattr(aot.pickle, "loads", lambda *_: pytest.fail("unpickled"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_file_is_made_again(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doubled()
    path = only(folder)
    SPOILT[kind](path)
    with monkeypatch.context() as patch:
        if kind != "no executable":
            refuse_executables(patch)
        assert doubled()[-1] is False
    assert path.is_file()
    assert not path.is_symlink()
    assert doubled() == [True]


def test_what_may_not_be_kept_is_not(folder: Path) -> None:
    """A program without cuDNN's attention, under the key of the one with it, would outlive the missing cuDNN.

    JAX cannot store again what came from its own cache.
    """

    def from_jax() -> Any:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return Doubling().compile()

    Doubling().get(lambda: (Doubling().compile()[0], False))
    Doubling().get(from_jax)
    assert cache.stored_programs() == []
    doubled()
    assert len(cache.stored_programs()) == 1


class Fails:
    """In place of a loaded program: raises ``error`` when it runs, all ``threads`` at once."""

    def __init__(self, error: str, threads: int = 1) -> None:
        self.error, self.barrier = error, threading.Barrier(threads)

    def __call__(self, *_: Any) -> Any:
        self.barrier.wait(10)
        raise jax.errors.JaxRuntimeError(self.error)


def test_a_first_run_that_fails_compiles_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fails in two threads at the same time."""
    doubled()
    monkeypatch.setattr(aot.CacheEntry, "load", lambda *_: Fails("NOT_FOUND: Function fusion not found", threads=2))
    program = Doubling()
    loaded, results = program.get(), []
    threads = [threading.Thread(target=lambda: results.append(loaded(program.x)["double"][3])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [6, 6]
    assert program.builds == [True, False]
    monkeypatch.undo()
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(folder))
    monkeypatch.setattr(key, "edited", lambda: False)
    assert doubled() == [True]


def test_running_out_of_memory_says_nothing_against_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doubled()
    error = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    program = Doubling()
    with monkeypatch.context() as patch:
        patch.setattr(serialize_executable, "deserialize_and_load", Fails(error))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
            program.get()
    with monkeypatch.context() as patch:
        patch.setattr(aot.CacheEntry, "load", lambda *_: Fails(error))
        loaded = program.get()
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
                loaded(program.x)
    assert program.builds == [True]
    assert doubled() == [True]


def test_a_jax_that_lacks_what_the_cache_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(serialize_executable, "serialize")
        assert doubled() == [False]
    with monkeypatch.context() as patch:
        patch.delattr(type(jax.config), "values")
        assert doubled() == [False]
    assert cache.stored_programs() == []


def test_compilations_of_other_threads_do_not_count() -> None:
    def compile_one() -> None:
        Doubling().compile()

    def compile_elsewhere() -> None:
        thread = threading.Thread(target=compile_one)
        thread.start()
        thread.join()

    before = compilations()
    with counting() as outer:
        compile_one()
        compile_elsewhere()
        with counting() as inner:
            at_once([compile_one] * 2)
    compile_one()
    assert (inner.compilations, outer.compilations, compilations() - before) == (2, 3, 5)
    assert inner.traces >= 2


def kept_programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Makes a program of the text encoder, which is only looked up and never run, and counts what is kept."""

    def make(weights: Any, devices: Any = ONE, text: TextEncoders = NETWORKS.text, **changes: Any) -> int:
        ours = Programs(dataclasses.replace(NETWORKS, text=text), make_mesh(devices), **changes)
        placed = jax.device_put(weights, replicated(ours.mesh))
        ours.program("text encoder", placed, (len(devices), 8, 8, 4), Kinds(guided=()))
        return len(cache.stored_programs())

    monkeypatch.setattr(Programs, "_compile", instant)
    monkeypatch.setattr(aot, "replaced", tuple)  # kept all the same
    return make


def test_what_makes_another_program(folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = kept_programs(monkeypatch)
    assert [make(weights), make(weights)] == [1, 1]
    assert make(weights, jax.devices()[1:2]) == 2
    assert make(weights, jax.devices()) == 3
    assert make(weights, precision="highest") == 4
    assert make(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)) == 5
    assert TEXT.hidden_act == "quick_gelu"
    assert make(weights, text=clip_encoders(dataclasses.replace(TEXT, hidden_act="gelu"))) == 6
    with jax.default_matmul_precision("high"):
        assert make(weights) == 7
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    assert make(weights) == 8
    for name, value in (("software", {**key.software(), "canvax": "0"}), ("_cpu", {**key._cpu(), "flags": "fpu"})):
        monkeypatch.setattr(key, name, lambda value=value: value)
        make(weights)
    assert make(weights) == 10


def test_what_is_in_a_key() -> None:
    """The software and the processor, against what is installed, read in another way."""
    package, total = Path(canvax.__file__).parent, hashlib.sha256()
    for path in sorted(key._files()):
        total.update(path.relative_to(package).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    described = key.environment(ONE)
    assert (
        described["software"].items()
        >= {
            "canvax": canvax.__version__,
            "sources": total.hexdigest(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
        }.items()
    )
    processor = described["devices"]["cpu"]
    assert processor["machine"] == platform.machine()
    if sys.platform == "linux":
        assert processor["cores"] == len(os.sched_getaffinity(0))
        assert processor.get("flags") or processor.get("Features")


def test_the_precision_of_a_context_holds_while_programs_are_made_by_threads() -> None:

    def seen() -> Any:
        return jax.config.jax_default_matmul_precision

    with jax.default_matmul_precision("high"):
        assert at_once([seen] * 2) == ["high"] * 2
    assert at_once([seen]) == [jax.config.jax_default_matmul_precision]


def test_a_process_ends_after_its_compilations_if_one_fails() -> None:
    code = (
        "import time; from canvax.compile.at_once import at_once\n"
        "at_once([lambda: 1 / 0, lambda: (time.sleep(0.3), print('compiled'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "compiled\n")
    assert "ZeroDivisionError" in done.stderr


def test_keys_do_not_depend_on_what_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key.environment(ONE)
    monkeypatch.setenv("CANVAX_DEBUG", "1")
    with jax.log_compiles(), jax.transfer_guard("log"):
        assert key.environment(ONE) == before
    assert json.loads(json.dumps(before)) == before


INSTALLED_LATER = """
import os, pathlib, sys, time
time.sleep(0.1)
package = pathlib.Path(sys.argv[1])
for path in package.rglob("*.py"):
    os.utime(path)
sys.path.insert(0, str(package.parent))
from canvax.compile import key
before = key.edited()
(package / "nn.py").write_text("")
print(pathlib.Path(key.__file__).is_relative_to(package), before, key.edited())
"""


def test_a_process_that_is_older_than_its_canvax(tmp_path: Path) -> None:
    """As a notebook's is, in which canvax is installed: its programs are kept, until the sources change once more."""
    package = tmp_path / "canvax"
    shutil.copytree(Path(canvax.__file__).parent, package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    assert process("-c", INSTALLED_LATER, str(package)).split() == ["True", "False", "True"]


def zeros(q: Any, k: Any, v: Any, **_: Any) -> Any:
    """What somebody puts in place of attention."""
    del k, v
    return jnp.zeros_like(q)


def test_replaced_code_is_run_and_not_kept(folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the original ran before, and the original again afterwards."""
    inputs = {"text_encoder": {"ids": np.arange(77)[None], "skip": np.zeros(1, np.int32)}}
    ours = Programs(NETWORKS, make_mesh(ONE))

    def text(programs: Programs) -> tuple[np.ndarray, list[bool]]:
        builds: list[Build] = []
        program = programs.program("text encoder", weights, (1, 8, 8, 4), Kinds(guided=()), builds.append)
        encoded = np.asarray(program(weights, inputs)[0]["text"])
        return encoded, [build.cached for build in builds[::2]]

    def files() -> set[Path]:
        return set((folder / "programs").iterdir())

    want, builds = text(ours)
    assert builds == [False]
    stored = files()
    with monkeypatch.context() as patch:
        patch.setattr(clip, "attention", zeros)
        replaced, builds = text(ours)
        assert builds == [False]
        assert np.abs(replaced - want).max() > 1e-3
        np.testing.assert_array_equal(text(Programs(NETWORKS, make_mesh(ONE)))[0], replaced)
        assert files() == stored
    np.testing.assert_array_equal(text(ours)[0], want)
    again, builds = text(Programs(NETWORKS, make_mesh(ONE)))
    np.testing.assert_array_equal(again, want)
    assert builds == [True]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_replaced_code_is_traced_in_loops_of_ones_own(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are jitted on a CPU; a trace of the original attention is not one of another, nor the other way round."""
    calls: list[Any] = []

    def counted(q: Any, k: Any, v: Any, **_: Any) -> Any:
        calls.append(q)
        return zeros(q, k, v)

    denoiser = NETWORKS.denoiser
    params = jax.eval_shape(lambda: init_params(denoiser.spec, 0))
    x, text = jnp.zeros((1, 8, 8, UNET.in_channels)), {"text": jnp.zeros((1, 77, UNET.cross_attention_dim))}

    def calls_of_a_trace() -> int:
        calls.clear()
        with compiling_for(platform):
            row = {"timestep": jnp.zeros(1)}
            jax.make_jaxpr(lambda p: denoiser.apply(p, x, row, denoiser.prepare(p, text, x.shape), None))(params)
        return len(calls)

    assert calls_of_a_trace() == 0
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "attention", counted)
        assert calls_of_a_trace() > 0
    assert calls_of_a_trace() == 0


def test_replaced_code_in_the_functions_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    function = jitted(lambda x, *, times: blocks.attention(x, x, x) * times, static_argnames="times")
    x = jnp.ones((1, 2, 3, 4))
    want = function(x, times=2)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "attention", zeros)
        assert not np.any(function(x, times=2))
    np.testing.assert_array_equal(function(x, times=2), want)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (blocks, "attention"), (UNetDenoiser, "prepare"), (cpu, "CHUNK_SCORES"), (programs, "denoise"),
    ],
)  # fmt: skip
def test_what_counts_as_replaced(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions, methods, constants; back in its place the original is the original."""
    assert replaced() == ()
    others = []
    for other in (lambda *_: None, np.zeros((2, 2))):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            others.append(replaced())
            assert others[-1] == replaced() != ()
        assert replaced() == ()
    assert others[0] != others[1]
    hash(tuple(others))


def test_what_is_replaced_before_the_first_call() -> None:
    code = """
import canvax.models.blocks
canvax.models.blocks.attention = print
canvax.kernels.cpu.CHUNK_SCORES = 5
from canvax.compile.aot import replaced
import canvax.models.unet
canvax.models.unet.UNetConfig = print
print(sorted(name[2] for name in replaced()))
"""
    assert process("-c", code).strip() == "['CHUNK_SCORES', 'UNetConfig', 'attention']"


def test_devices_that_are_only_described_are_left_alone() -> None:
    class Described:
        platform = "cpu"

    assert aot._own(jax.devices())
    assert not aot._own([Described()])


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert [doubled(), doubled()] == [[False], [False]]
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("CANVAX_CACHE_DIR", "")
    assert cache.cache_path() == tmp_path / "xdg" / "canvax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    if sys.platform == "linux":
        assert cache.cache_path() == tmp_path / ".cache" / "canvax"


def test_a_relative_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could be one that came with a download."""
    doubled()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("CANVAX_CACHE_DIR", "cache")
    with pytest.warns(UserWarning, match=NOTE):
        assert doubled() == [False]
    assert doubled() == [False]  # warned once
    for command in (["cache"], ["cache", "clear"], ["cache", "path"]):
        assert main(command) == BAD_INPUT
    assert only(folder).is_file()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
@pytest.mark.parametrize("spoil", UNSAFE.values(), ids=UNSAFE)
def test_an_unsafe_folder_is_refused(folder: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it is unpickled, listed or removed."""
    doubled()
    path = only(folder)
    refuse_executables(monkeypatch)
    spoil(folder / "programs")
    with pytest.warns(UserWarning, match=NOTE):
        assert doubled() == [False]
    assert [main(["cache"]), main(["cache", "clear"])] == [FAILED, FAILED]
    assert path.is_file()


def test_what_is_no_file_is_not_read(folder: Path) -> None:
    doubled()
    path = only(folder)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match=NOTE):
        assert doubled() == [False]


@pytest.mark.parametrize("full", [True, False])
def test_what_cannot_be_written_is_one_warning(full: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and a folder that cannot be made."""

    def no_space(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if full:
        monkeypatch.setattr(tempfile, "mkstemp", no_space)
    else:
        folder.write_text("")
    with pytest.warns(UserWarning, match=NOTE):
        doubled()
    assert doubled() == [False]


def test_least_recently_used_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "3.5kB")
    root = cache.open_cache()
    assert root == folder / "programs"
    paths = [root / f"{i}.program" for i in range(4)]
    for i, path in enumerate(paths[:3]):
        cache.write(path, {"key": str(i)}, bytes(1000))
        os.utime(path, (i + 1, i + 1))
    assert cache.read(paths[0], "0") is not None
    cache.write(paths[3], {"key": "3"}, bytes(1000))
    assert [path.exists() for path in paths] == [True, False, True, True]
    with pytest.warns(UserWarning, match="larger than"):
        assert cache.write(paths[1], {"key": "1"}, bytes(4000)) == 0
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "plenty")
    with pytest.raises(canvax.InputError, match="plenty"):
        cache.open_cache()


def test_what_goes_and_what_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed runs left goes. A folder of others' files keeps them, and links lead out of it."""
    doubled()
    outside, root = folder.parent / "outside", folder / "programs"
    killed, others = root / ".x.part", [root / "thesis.tex", root / "z.part", outside / "mine.program"]
    others += [root / "folder.program" / "x.program", root / ".running.part"]
    for path in (killed, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
    for path in (killed, *others[:-1]):
        os.utime(path, (1, 1))
    link = root / "link.program"
    link.symlink_to(outside / "mine.program")
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "100kB")
    assert [doubled(), doubled(jax.devices()[1:2])] == [[True], [False]]
    assert [program.path.suffix for program in cache.stored_programs()] == [".program"] * 2
    assert cache.clear(60) == (0, 0)
    assert not killed.exists()
    assert all(path.exists() for path in (*others, link))


@pytest.mark.parametrize(("text", "size"), [("500MB", 500_000_000), ("2 GB", 2 * 10**9), (".5k", 500)])
def test_sizes(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANVAX_CACHE_SIZE", text)
    assert cache.size_limit() == size


def test_writers_and_readers_at_once(folder: Path) -> None:
    cache.open_cache()
    path, wrong = folder / "programs" / "x.program", []
    cache.write(path, {"key": "x"}, bytes(100_000))

    def write(byte: int) -> None:
        for _ in range(30):
            cache.write(path, {"key": "x"}, bytes([byte]) * 100_000)

    def read() -> None:
        for _ in range(60):
            data = cache.read(path, "x")
            if data is None or len(set(data)) != 1:
                wrong.append(data)

    threads = [threading.Thread(target=write, args=[i]) for i in range(3)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [one.name for one in path.parent.iterdir()] == ["x.program"]


def announced(shown: str) -> dict[str, set[str]]:
    """What was done with which programs; those on their way at the same time share a line."""
    found: dict[str, set[str]] = {}
    for line in shown.splitlines():
        what, _, names = line.partition(":")
        found.setdefault(what, set()).update(re.findall(r" ([a-z ]+) \d+\.\d s", names))
    return found


def test_a_default_call_is_what_is_prepared(
    emoji: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guidance or without, as the model's default scale is, and with what an inpainting model reads."""
    asked: list[Kinds] = []
    monkeypatch.setattr(Programs, "ready", lambda self, params, latents, kinds, announce: asked.append(kinds) or {})
    folder = write_small_checkpoint(tmp_path / "inpainting", unet=dataclasses.replace(UNET, in_channels=9))
    from_zero = dataclasses.replace(emoji.model.family, guidance_off=0.0)
    turbo, guided = (
        dataclasses.replace(
            emoji.model, family=from_zero, defaults=dataclasses.replace(emoji.model.defaults, guidance_scale=scale)
        )
        for scale in (0.0, 1.0)
    )
    for pipe in (
        emoji,
        dataclasses.replace(emoji, model=turbo),
        dataclasses.replace(emoji, model=guided),
        canvax.load(folder, mesh=emoji.mesh),
    ):
        pipe.compile()
        pipe.memory()
        wanted = generate.work(pipe.model, make_request(pipe.model, Call("a cat")))[2]
        assert asked == [wanted, wanted]
        asked.clear()


def test_compile_returns_what_it_did(
    folder: Path, emoji: canvax.Pipeline, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Programs, "_compile", instant)
    monkeypatch.setattr(aot, "replaced", tuple)  # kept all the same
    pipe = dataclasses.replace(emoji, programs=dataclasses.replace(emoji.programs, _compiled={}))
    builds, three = pipe.compile(64, 72, 2), {"text encoder", "denoiser", "decoder"}
    assert [(build.program, build.cached) for build in builds] == [
        ("text encoder", False), ("denoiser", False), ("decoder", False)
    ]  # fmt: skip
    assert all(build.seconds and build.size for build in builds)
    assert announced(capsys.readouterr().err) == {"compiling (once for each size and batch)": three}
    assert pipe.compile(64, 72, 2) == ()
    assert [build.program for build in pipe.compile(64, 72, 2, guidance=False, progress=False)] == ["denoiser"]
    again = dataclasses.replace(emoji, programs=dataclasses.replace(emoji.programs, _compiled={}))
    assert all(build.cached for build in again.compile(64, 72, 2))
    assert announced(capsys.readouterr().err) == {"loading the programs": three}
    for batch in (0, True, 1.5):
        with pytest.raises(canvax.InputError, match="batch"):
            pipe.compile(batch=batch)  # type: ignore[arg-type]
    with pytest.raises(canvax.InputError, match="width"):
        pipe.compile(width=63)


def test_cache_command(
    folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = kept_programs(monkeypatch)
    make(weights)
    make(weights, jax.devices())
    newer, older = cache.stored_programs()
    (folder / "programs" / "junk.program").write_bytes(b"junk")
    os.utime(older.path, (time.time() - 3 * 86400,) * 2)
    capsys.readouterr()
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["program", "model", "size", "batch", "dtype", "device", "on", "disk", "used"]
    assert "unreadable" in lines[1]
    assert all(part in lines[2] for part in ("text encoder", "8 x cpu", "just now"))
    assert "3 days ago" in lines[3]
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["cache", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["stale"] for one in report["programs"]] == [True, False, False]
    assert report["bytes"] == sum(path.stat().st_size for path in (folder / "programs").iterdir())
    assert main(["cache", "clear", "--older-than", "2"]) == 0
    assert [one.path for one in cache.stored_programs() if one.header] == [newer.path]
    (folder / "notes.txt").write_text("mine")
    assert main(["cache", "clear"]) == 0
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]
    assert main(["cache", "nope"]) == main(["cache", "--older-than", "2"]) == BAD_INPUT
    assert main(["cache", "clear", "--older-than", "-1"]) == BAD_INPUT


def test_odd_headers_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.open_cache()
    header = {"description": {"parameters": 10**400}, "devices": {"kind": 1, "each": 5}, "software": 5}
    cache.write(folder / "programs" / "a.program", header, b"")
    (folder / "programs" / "b.program").write_bytes(b"[" * 200_000)
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.count("unreadable") == 2
    assert main(["cache", "--json"]) == 0


def instant(self: Programs, call: Any) -> Any:
    """In place of ``Programs._compile``."""
    return jax.jit(lambda *_: jnp.zeros(())).lower(*call.arguments).compile(), True


def test_the_command_knows_networks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``canvax compile`` stores for control images and image prompts is what their calls look for."""
    monkeypatch.setattr(Programs, "_compile", instant)
    monkeypatch.setattr(aot, "replaced", tuple)  # kept all the same
    model = write_small_checkpoint(tmp_path / "model")
    base = canvax.load(model)
    net = controlnet(tmp_path / "net", base)
    encoder(tmp_path / "image_encoder")
    prompts = ip_adapter(tmp_path / "ip.safetensors", "plus", UNET)
    words = ["compile", str(model), "--controlnet", str(net), "--ip-adapter", str(prompts), "-q", "--json"]
    assert main(words) == 0
    made = [one["program"] for one in json.loads(capsys.readouterr().out)["programs"]]
    assert sorted(set(made)) == ["control encoder", "decoder", "denoiser", "image prompt encoder", "text encoder"]
    pipe = base.with_controlnet(net).with_ip_adapter(prompts)
    image = Image.new("RGB", (64, 64))
    request = make_request(pipe.model, Call("a cat", seed=1, control=image, image_prompt=image))
    kinds = generate.work(pipe.model, request)[2]
    assert pipe.params is not None
    builds: list[Build] = []
    shape = (pipe.mesh.shape["data"], *request.shape[1:])
    pipe.programs.ready(pipe.params, shape, kinds, builds.append)
    assert all(build.cached for build in builds)
    assert {build.program for build in builds} == set(made)
    with pytest.raises(canvax.InputError, match="no IP-Adapter"):
        base.compile(image_prompt=True)


def test_a_start_after_compile_only_compiles_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``canvax serve --compile-only`` stores what the start of a server with the same flags looks for."""

    class Begun(Exception):
        pass

    def begin(engine: ImageEngine) -> None:
        engine._models.begin()
        counts = counted(engine._metrics, "canvax_programs_compiled_total")
        assert {"text encoder", "denoiser", "decoder"} <= {program for (program,) in counts}
        assert set(counts.values()) == {0}
        raise Begun

    draw, arrays = Draw(1), {}
    for (component, module), shape in layers(canvax.load("emoji").model.networks.specs()).items():
        if component != "vae" and "attn" in module:
            arrays |= {f"{component}.{module}{end}": array for end, array in lora(draw, shape).arrays.items()}
    write(tmp_path / "ink.safetensors", arrays)
    monkeypatch.setattr(aot, "replaced", tuple)  # kept all the same
    monkeypatch.setattr(Programs, "_compile", instant)
    monkeypatch.setattr(ServedModel, "time", lambda *_: None)  # these programs compute nothing
    monkeypatch.setattr(Group, "summary", lambda _: "")
    monkeypatch.setattr("canvax.server.logs.log_to_stderr", lambda quiet: None)
    monkeypatch.setattr(ImageEngine, "start", begin)
    flags = ["serve", "emoji", "--warm", "64x64:1,16", "--chunks", "1", "2", "--lora-dir", str(tmp_path), "-q"]
    assert main([*flags, "--compile-only"]) == 0
    with pytest.raises(Begun):
        run(parse([*flags, "--port", "0"]), {})
