"""Eight virtual CPU devices stand for eight TPU cores; set before JAX is imported."""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch's threads wait by spinning: 15 times as long on busy processors
# Containers set it. Each process that a test starts would then compile all of canvax's Python anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["CANVAX_CACHE_DIR"] = "off"  # what a test compiles depends on no other run

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell began the run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup began it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# JAX keeps what it compiles in one folder for a run, its workers and the processes that tests start. The first of them
# makes it. A program that comes from it counts as compiled (canvax.compile.monitor): tests of recompiling see it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="canvax-compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{compiled.name}/jax"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault(
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0"
)  # where each operation was written: a twentieth of the time

import jax
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from canvax.weights.location import BUNDLED
from tests.support.bundled import PACKAGED
from tests.support.memory import forget_programs
from tests.support.random_numbers import begin_anew

gc.set_threshold(200_000, 20, 100)  # else a third of the time in which all modules are imported

# Numbers and shapes become others only where the code says so: a silent float32 in a 16-bit network is an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most tests of the bundled model decode its latents to 64 x 64 pixels, with the autoencoder that its larger one was
# made of, for a tenth of the work. Processes that tests start, and tests that ask for ``packaged``, have the model of
# users.
with_small_vae = tempfile.TemporaryDirectory(prefix="canvax-emoji-", ignore_cleanup_errors=True)
for part in PACKAGED.iterdir():
    source = Path(__file__).parent / "tests" / "data" / "small" / "vae" if part.name == "vae" else part
    Path(with_small_vae.name, part.name).symlink_to(source)
BUNDLED["emoji"] = Path(with_small_vae.name)

if os.environ.get("REFERENCE") == "yes":  # the Makefile has installed all that is compared with: missing is a failure
    pytest.importorskip = importlib.import_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import canvax

AS_FOR_USERS = {"test_cli_process", "test_golden"}
"""Modules, in tests/parity too, whose programs and those of the processes they start are compiled as users' are."""

AS_FOR_USERS_BEFORE_A_MERGE = {"test_kernels"}
"""Modules of which this holds in a run with slow tests."""

OWN_CACHES = {"test_bench", "test_cache"}
"""Modules about caches, where JAX's would answer before canvax's."""


def pytest_configure(config: pytest.Config) -> None:
    """The weekly run tries other random cases each week; hypothesis has the same ones in every other run of CI."""
    if config.option.markexpr == "weekly":
        from hypothesis import settings

        settings.register_profile("weekly", settings(), derandomize=False, print_blob=True)
        settings.load_profile("weekly")


FAMILIES = r"anima|chroma|flux-\w+|flux[23](?:-base)?|krea2(?:-turbo)?|qwen(?:-edit|-turbo|-1\b)?|z-image"
FAMILY = re.compile(rf"/test_families_\w+\.py::\w+\[({FAMILIES})")
ORDINARY = {"flux2", "z-image"}
"""Families that ``make test`` tries."""


def unit(nodeid: str) -> str:
    """Return what shares models and programs with a test: its file, and of files about all families its family."""
    family = FAMILY.search(nodeid)
    return f"{nodeid.partition('::')[0]} {family[1] if family else ''}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Units with the most slow tests come first: of two workers, none may be alone with a long one in the end.

    In the files about all families, tests of families other than ``ORDINARY`` are slow.
    """
    for item in items:
        family = FAMILY.search(item.nodeid)
        if family and family[1] not in ORDINARY and not item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.slow)
    units = {item: unit(item.nodeid) for item in items}
    slow = Counter(
        units[item] for item in items if item.get_closest_marker("slow") or item.get_closest_marker("weekly")
    )
    items.sort(key=lambda item: (-slow[units[item]], units[item]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, a process gets one unit after the other."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What all modules have imported, PyTorch among it, is looked through by no garbage collection; there are fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)


@pytest.fixture(scope="module", autouse=True)
def compiling(request: pytest.FixtureRequest) -> Iterator[None]:
    """How a module's programs are compiled.

    But for a few modules XLA leaves most optimisations out, since compiling is the most of the suite's work. What a
    module has compiled goes when it ends: a whole run would hold eight gigabytes of it.
    """
    module = request.module.__name__.rpartition(".")[2]
    with pytest.MonkeyPatch.context() as environment:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
        if module in OWN_CACHES:
            environment.delenv("JAX_COMPILATION_CACHE_DIR")
            use_folder(None)
        ordinary = "not slow" in request.config.option.markexpr
        if module not in AS_FOR_USERS | (set() if ordinary else AS_FOR_USERS_BEFORE_A_MERGE):
            jax.config.update("jax_disable_most_optimizations", True)
            environment.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
            # JAX has no public setting for options of all programs but XLA_FLAGS, which holds for all modules.
            environment.setattr(compiler, "get_compile_options", quick_options())
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    use_folder(folder)
    forget_programs()


@cache
def quick_options() -> Callable[..., Any]:
    """``get_compile_options`` of JAX with ways to less work, together half of a compilation's processor time.

    Those alone that this XLA has: JAX 0.12 has lost the first one.
    """
    quick, options = {}, compiler.get_compile_options
    for name, value in {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}.items():
        with suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
            quick[name] = value

    def quicker(*positional: Any, env_options_overrides: Any, **named: Any) -> Any:
        return options(*positional, env_options_overrides=quick | (env_options_overrides or {}), **named)

    return quicker


def use_folder(folder: str | None) -> None:
    """JAX looks for its cache once and remembers, hence the reset."""
    if jax.config.values["jax_compilation_cache_dir"] != folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        reset_cache()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test has the same random numbers alone, and after others."""
    begin_anew()


@pytest.fixture(scope="module")
def emoji(compiling: None) -> canvax.Pipeline:
    """The bundled model with its small autoencoder, shared by the modules whose programs are compiled alike."""
    return _loaded("emoji", jax.config.values["jax_disable_most_optimizations"])


@pytest.fixture(scope="module")
def packaged(compiling: None) -> canvax.Pipeline:
    """The bundled model as users have it, likewise."""
    return _loaded(PACKAGED, jax.config.values["jax_disable_most_optimizations"])


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint, which no test changes."""
    from tests.support.small_checkpoint import write_small_checkpoint

    return write_small_checkpoint(tmp_path_factory.mktemp("shared") / "small")


@pytest.fixture(scope="module")
def small(compiling: None, small_folder: Path) -> canvax.Pipeline:
    """``small_folder`` on one device. Each module has its own adapters and parameters; programs are shared."""
    import dataclasses

    shared = _loaded(small_folder, jax.config.values["jax_disable_most_optimizations"])
    pipe = dataclasses.replace(shared, params=jax.tree.map(lambda leaf: leaf, shared.params))
    pipe._made_by.update(shared._made_by)
    return pipe


@cache
def _loaded(model: str | Path, quick: bool) -> canvax.Pipeline:
    import canvax
    from canvax.parallel.mesh import make_mesh

    return canvax.load(model, mesh=make_mesh(jax.devices()[:1]), progress=False)
