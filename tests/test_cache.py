"""Compiled programs between processes: used without tracing, never wrong, never in the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_checkpoint import TEXT, UNET, VAE, write_small_checkpoint
from test_sdxl import build as write_small_sdxl

import canvax
from canvax.cli import BAD_INPUT, main
from canvax.compile import aot, cache, flags, key
from canvax.compile.aot import Build
from canvax.compile.programs import Programs, at_once
from canvax.models.clip import text_encoder_spec
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.text import TextEncoders
from canvax.parallel.mesh import make_mesh, over_batch, replicated
from canvax.params import init_params

DRAW = """
import hashlib, json, sys
import jax
import canvax
from canvax.compile.monitor import compilations, process_age, traces

quiet, told = canvax.Options(progress=False), {}
for model in sys.argv[1:]:
    result = canvax.load(model)("a cat", seed=3, num_inference_steps=2, guidance_scale=4, options=quiet)
    told[model] = hashlib.sha256(result.pixels.tobytes()).hexdigest()
    assert 0 < result.timings["first_step"] < result.timings["total"] < process_age()
print(json.dumps([told, traces(), compilations(), jax.config.jax_compilation_cache_dir, len(jax.devices())]))
"""


def process(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    return done.stdout


def draw(*models: Path | str, **environment: str) -> list[Any]:
    return json.loads(process("-c", DRAW, *map(str, models), **environment))


def test_a_second_process_traces_and_compiles_nothing(tmp_path: Path) -> None:
    """SDXL on two devices, where JAX's own cache has the programs already, whose copies could not be stored again."""
    model = write_small_sdxl(tmp_path / "xl")
    jax_cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
    }
    plain = draw(model, **jax_cache)
    assert plain[1:] == [3, 3, str(tmp_path / "jax"), 2]
    kept = jax_cache | {"CANVAX_CACHE_DIR": str(tmp_path / "cache")}
    assert draw(model, **kept) == plain
    assert draw(model, **kept) == [plain[0], 0, 0, *plain[3:]]


def test_compiled_beforehand(tmp_path: Path, emoji: canvax.StableDiffusion) -> None:
    """`canvax compile` reads no weights; drawing then needs neither a trace nor a compilation."""
    models = "emoji", str(write_small_checkpoint(tmp_path / "sd"))
    environment = {"CANVAX_CACHE_DIR": str(tmp_path / "cache"), "XLA_FLAGS": ""}
    for model in models:
        built = json.loads(process("-m", "canvax", "compile", model, "--json", "-q", **environment))["programs"]
        assert [one["program"] for one in built] == ["text encoder", "denoiser", "decoder"]
        assert all(not one["cached"] and one["bytes"] > 10_000 for one in built)
    pictures, *counts, jax_cache, devices = draw(*models, **environment)
    assert (counts, devices) == ([0, 0], 1)
    assert jax_cache.startswith(str(tmp_path / "cache" / "xla"))
    quiet = canvax.Options(progress=False)
    here = emoji("a cat", seed=3, num_inference_steps=2, guidance_scale=4, options=quiet)
    assert pictures["emoji"] == hashlib.sha256(here.pixels.tobytes()).hexdigest()


# One program in one process, where a new `Programs` stands for a new process.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(aot, "_share_with_jax", lambda folder: None)
    monkeypatch.setattr(key, "edited", lambda: False)  # by whoever edits while the tests run
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def weights() -> Any:
    return {"text_encoder": jax.device_put(init_params(text_encoder_spec(TEXT), 0), replicated(make_mesh(ONE)))}


ONE = jax.devices()[:1]
NETWORKS = Networks(UNetDenoiser(UNET), VAE, TextEncoders(TEXT))


def encode(weights: Any, devices: Any = ONE, **changes: Any) -> tuple[np.ndarray, list[bool]]:
    """Features of some ids, and where the program came from: for each attempt, whether from the cache."""
    programs = Programs(NETWORKS, make_mesh(devices), **changes)
    weights = jax.device_put(weights, replicated(programs.mesh))
    builds: list[Build] = []
    program = programs.encode_text(weights, len(devices), builds.append)
    ids = np.arange(77, dtype=np.int32)[None].repeat(len(devices), 0)
    ids = jax.device_put(ids, over_batch(programs.mesh))
    text = program(weights, {"text_encoder": ids}, np.int32(0))["text"]
    return np.asarray(text), [build.cached for build in builds if build.seconds is not None]


def test_kept_privately_and_used_again(folder: Path, weights: Any) -> None:
    (first, made), (second, loaded) = encode(weights), encode(weights)
    assert (made, loaded) == ([False], [True])
    assert (first == second).all()
    (path,) = (folder / "programs").iterdir()
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder / "programs", folder / "xla", path)]
    assert modes == [0o700, 0o700, 0o700, 0o600]
    (stored,) = cache.programs()
    assert stored.header is not None
    assert stored.header["about"] == {
        "program": "text encoder", "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "dtype": "float32", "batch": 1,
    }  # fmt: skip


def flip(position: float) -> Callable[[bytes], bytes]:
    def flipped(data: bytes) -> bytes:
        at = int(position * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return flipped


@pytest.mark.parametrize(
    "spoil",
    [
        *(flip(position) for position in (0.0, 0.0001, 0.001, 0.5, 1.0)),
        lambda data: b"", lambda data: data[:30], lambda data: data[:-1], lambda data: data + b"x",
        lambda data: b"\x80\x04K\x01.", lambda data: os.urandom(5000),
    ],
)  # fmt: skip
def test_a_spoilt_file_is_made_again(folder: Path, weights: Any, spoil: Any) -> None:
    right, _ = encode(weights)
    (path,) = (folder / "programs").iterdir()
    path.write_bytes(spoil(path.read_bytes()))
    again, how = encode(weights)
    assert how == [False]
    assert (again == right).all()
    assert encode(weights)[1] == [True]


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], executable: bytes | None = None) -> None:
    """Change a stored program but leave its checksum right."""
    with path.open("rb") as file:
        file.seek(cache._START - cache._LENGTH)
        header = json.loads(file.read(int.from_bytes(file.read(cache._LENGTH), "little")))
        rest = file.read()
    cache.write(path, change(header), rest if executable is None else executable)


@pytest.mark.parametrize(
    ("change", "executable"),
    [
        (lambda header: header | {"key": "0" * 64}, None),  # renamed
        (lambda header: {name: value for name, value in header.items() if name != "key"}, None),
        (lambda header: {name: value for name, value in header.items() if name != "out"}, None),
        (lambda header: header, b"no executable"),
        (lambda header: header, b""),
    ],
)
def test_a_foreign_program_is_made_again(folder: Path, weights: Any, change: Any, executable: bytes | None) -> None:
    right, _ = encode(weights)
    (path,) = (folder / "programs").iterdir()
    rewrite(path, change, executable)
    again, how = encode(weights)
    assert how[-1] is False
    assert (again == right).all()
    assert encode(weights)[1] == [True]


def test_a_program_that_fails_when_it_runs_is_made_again(
    folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, _ = encode(weights)

    def broken(*_: Any) -> Any:
        def run(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: Function fusion not found")

        return run

    with monkeypatch.context() as patch:
        patch.setattr(aot.Slot, "load", broken)
        again, how = encode(weights)
    assert how == [True, False]
    assert (again == right).all()
    assert encode(weights)[1] == [True]


def test_what_makes_another_program(folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> int:
        return len(cache.programs())

    encode(weights)
    assert encode(weights)[1] == [True]
    assert kept() == 1
    encode(weights, jax.devices()[1:2])
    encode(weights, jax.devices())
    encode(weights, precision="highest")
    encode(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights))
    with jax.default_matmul_precision("high"):
        encode(weights)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    encode(weights)
    for name, value in (("software", {**key.software(), "canvax": "0"}), ("_cpu", {**key._cpu(), "flags": "fpu"})):
        monkeypatch.setattr(key, name, lambda value=value: value)
        assert encode(weights)[1] == [False]
    assert kept() == 9


def test_the_flag_that_makes_compiling_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no other program, and does not replace what the user has set."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    before = key.environment(ONE)
    flags.compile_faster()
    flags.compile_faster()
    assert os.environ["XLA_FLAGS"].count(flags.LATE_FLATTENING) == 1
    assert key.environment(ONE) == before
    for mine, then in (("", flags.LATE_FLATTENING), (2 * ("--xla_backend_extra_options=xla_cpu_optimize_for_size",))):
        monkeypatch.setenv("XLA_FLAGS", mine)
        flags.compile_faster()
        assert os.environ["XLA_FLAGS"] == then


def test_the_precision_of_a_context_holds_while_programs_are_made_by_threads() -> None:
    with jax.default_matmul_precision("high"):
        assert at_once([lambda: jax.config.jax_default_matmul_precision] * 2) == ["high"] * 2
    assert at_once([lambda: jax.config.jax_default_matmul_precision]) == [jax.config.jax_default_matmul_precision]


def test_keys_do_not_depend_on_what_is_harmless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key.environment(ONE)
    monkeypatch.setenv("CANVAX_DEBUG", "1")
    before_dir = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        assert key.environment(ONE) == before
    finally:
        jax.config.update("jax_compilation_cache_dir", before_dir)
    assert json.loads(json.dumps(before)) == before


def test_an_edit_of_the_sources_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "canvax" / "compile" / "key.py"
    module.parent.mkdir(parents=True)
    module.write_text("a = 1")
    monkeypatch.setattr(key, "__file__", str(module))
    os.utime(module, (1, 1))
    before = key._sources()
    assert (key._sources(), key.edited()) == (before, False)
    module.write_text("a = 2")
    assert key._sources() != before
    assert key.edited()  # and may not be what this process runs


class Described:
    """A device of a topology: it knows a client that knows it, but cannot run anything."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.client = SimpleNamespace(devices=lambda: [self])


def test_devices_that_are_only_described_are_left_alone() -> None:
    assert aot._own(ONE)
    assert aot._own(jax.devices())
    assert not aot._own([Described("cpu")])
    assert not aot._own([Described("tpu")])


def test_off(tmp_path: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert [encode(weights)[1] for _ in range(2)] == [[False], [False]]
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("CANVAX_CACHE_DIR", "")
    assert cache.cache_path() == tmp_path / "xdg" / "canvax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    if sys.platform == "linux":
        assert cache.cache_path() == tmp_path / ".cache" / "canvax"


@pytest.mark.parametrize("part", ["", "programs", "xla"])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, weights: Any, part: str) -> None:
    encode(weights)
    (folder / part).chmod(0o777)
    with pytest.warns(UserWarning, match="can be written to by others"):
        assert encode(weights)[1] == [False]
    assert encode(weights)[1] == [False]  # warned once


def test_a_file_that_others_can_write_to_is_refused(folder: Path, weights: Any) -> None:
    encode(weights)
    (path,) = (folder / "programs").iterdir()
    path.chmod(0o666)
    assert encode(weights)[1] == [False]
    elsewhere = folder / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert encode(weights)[1] == [False]
    assert not path.is_symlink()
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="not kept"):
        assert encode(weights)[1] == [False]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
def test_owners() -> None:
    def fault(**changes: int) -> str:
        said = {"st_mode": stat.S_IFDIR | 0o755, "st_uid": os.geteuid()} | changes
        return cache._why_not(SimpleNamespace(**said), stat.S_ISDIR)  # type: ignore[arg-type]

    assert fault() == fault(st_uid=0) == ""
    assert "another user" in fault(st_uid=os.geteuid() + 1)
    assert "written to by others" in fault(st_mode=stat.S_IFDIR | 0o775)
    assert fault(st_mode=stat.S_IFREG | 0o600) == "not a folder"


def test_no_space_is_one_warning(folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.warns(UserWarning, match="No space left"):
        encode(weights)
    encode(weights)
    assert not list((folder / "programs").iterdir())


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, folder: Path, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="CANVAX_CACHE_DIR"):
        encode(weights)
    encode(weights)


def test_least_recently_used_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "3.5kB")
    root = cache.open_cache()
    assert root == folder
    paths = [root / "programs" / f"{i}.program" for i in range(4)]
    for i, path in enumerate(paths[:3]):
        cache.write(path, {"key": str(i)}, bytes(1000))
        os.utime(path, (i + 1, i + 1))
    assert cache.read(paths[0], "0") is not None
    leftover = root / "programs" / ".x.part"
    leftover.write_bytes(b"")
    os.utime(leftover, (1, 1))
    cache.write(paths[3], {"key": "3"}, bytes(1000))
    assert [path.exists() for path in paths] == [True, False, True, True]
    assert not leftover.exists()
    with pytest.warns(UserWarning, match="larger than"):
        assert cache.write(paths[1], {"key": "1"}, bytes(4000)) == 0
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "plenty")
    with pytest.raises(canvax.InputError, match="plenty"):
        cache.open_cache()


def test_what_is_not_the_caches_own_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others use too, and that happens to hold a programs or an xla."""
    strangers = [
        folder / "programs" / "project" / "thesis.tex", folder / "programs" / "notes.txt", folder / "xla" / "BUILD",
        folder / "xla" / "service" / "compiler.cc",
    ]  # fmt: skip
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (1, 1))
    (folder / "xla" / ("0" * 16)).mkdir()
    (folder / "xla" / ("0" * 16) / "jit_f-cache").write_bytes(bytes(10))
    monkeypatch.setenv("CANVAX_CACHE_SIZE", "2kB")
    cache.write(folder / "programs" / "a.program", {"key": "a"}, bytes(1000))
    assert cache.shared_bytes() == 10
    assert cache.clear()[0] == 2
    assert all(path.exists() for path in strangers)


@pytest.mark.parametrize(("text", "size"), [("500MB", 500_000_000), ("2 GB", 2 * 10**9), ("1.5k", 1500), ("7", 7)])
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
            found = cache.read(path, "x")
            if found is None or len(set(found[1])) != 1:
                wrong.append(found)

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


def test_compile_returns_what_it_did(
    folder: Path, emoji: canvax.StableDiffusion, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def instant(self: Programs, function: partial[Any], arguments: Any) -> Any:
        return jax.jit(lambda *_: jnp.zeros(())).lower(*arguments).compile()

    monkeypatch.setattr(Programs, "_compile", instant)
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


def test_cache_command(folder: Path, weights: Any, capsys: pytest.CaptureFixture[str]) -> None:
    encode(weights)
    encode(weights, jax.devices())
    newer, older = cache.programs()
    (folder / "programs" / "junk.program").write_bytes(b"junk")
    (folder / "xla" / ("0" * 16)).mkdir()
    (folder / "xla" / ("0" * 16) / "jit_f-cache").write_bytes(bytes(10))
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
    assert report["jax_bytes"] == 10
    assert main(["cache", "clear", "--older-than", "2"]) == 0
    assert [one.path for one in cache.programs() if one.header] == [newer.path]
    (folder / "notes.txt").write_text("mine")
    assert main(["cache", "clear"]) == 0
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]
    assert main(["cache", "--older-than", "2"]) == BAD_INPUT
    assert main(["cache", "clear", "--older-than", "-1"]) == BAD_INPUT


def test_cache_command_when_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert "off" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--size", "512"], ["--batch", "0"], ["--size", "63x64"], ["--dtype", "int8"], ["--token-merging", "0.9"]],
)
def test_compile_command_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "emoji", *arguments]) == BAD_INPUT
    assert arguments[1].split("x")[0] in capsys.readouterr().err
