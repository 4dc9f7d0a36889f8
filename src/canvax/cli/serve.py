"""``canvax serve`` and ``canvax ui``: the server, and the page in the browser."""

from __future__ import annotations

import argparse
import errno
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax._version import __version__
from canvax.call import LOCATION, PARTS
from canvax.cli import BAD_INPUT, FAILED, debugging
from canvax.cli.compile import check_kept
from canvax.cli.generate_arguments import OUTPUT
from canvax.cli.loading import check_ip_adapters, controls_of, load_of, load_with, overrides_of
from canvax.cli.terminal import complain, show_warning
from canvax.errors import CanvaxError, HintWarning, InputError, check_count, conflict, needs, warn
from canvax.files import check_writable, named_path
from canvax.images.formats import names_file
from canvax.images.metadata import read_metadata, unique_path
from canvax.weights.data_folder import data_folder, lora_folder, usual_syntax

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from canvax.call import Load
    from canvax.compile.aot import Build
    from canvax.server.adapter_cache import AdapterSettings
    from canvax.server.engine import EngineSettings, ImageEngine
    from canvax.server.keys import Keys

PORT = 7860
MOST = 1e9
"""The most seconds or images: threads cannot wait for much longer."""
_NEWEST = 8
"""The most files of the output folder that are read to find the model that was used last."""
_MOST_LINES = 5
"""The most lines about files that are left out, at the start."""
_LEAST_BODY = 1 << 10
"""The smallest limit for the bytes of a request."""

_PAUSE = 0.2
"""Seconds between two looks at the state of the server."""

_GPU = Path("/dev/nvidia0")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NAME = re.compile(r"\*|[\w.-]+|\[[0-9a-f:.]+\]", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[\w.-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?", re.ASCII)
_USUAL = {"allow_host": "draw.example.org, without a port", "allow_origin": "https://shop.example.org"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    del report
    _check_extra(arguments.command)
    from canvax.families.local_models import local_models
    from canvax.parallel.mesh import mesh_of
    from canvax.pipelines.checks import check_precision
    from canvax.server.app import Settings, create_app
    from canvax.server.engine import ImageEngine
    from canvax.server.journal import Journal
    from canvax.server.keys import Keys
    from canvax.server.logs import log_to_stderr
    from canvax.server.metrics import Metrics
    from canvax.weights.cast import parse_dtype

    opens_page = arguments.command == "ui"
    if opens_page and arguments.no_page:
        raise InputError(
            "no_page", "does not go with canvax ui, which opens the page", cure="leave it out, or use canvax serve"
        )
    keys = Keys.read(named_path("keys", arguments.keys) if arguments.keys else None)
    if keys is not None and arguments.no_keys:
        raise conflict("no_keys", "keys", cure="leave out {keys} and CANVAX_KEYS, or this")
    if arguments.host not in _LOOPBACK and keys is None and not arguments.no_keys:
        raise InputError(
            "host",
            "can be reached by others, who could use this machine",
            cure="give {keys=FILE}, or {no_keys} if that is meant",
            value=arguments.host,
        )
    offered, left_out = local_models()
    output = _output(arguments)
    named = [*arguments.models, *arguments.model]
    first, why = ([], "") if named else first_model(offered, output if opens_page else None)
    usual = load_of(arguments, model="emoji")
    names = _names(named or first or ["emoji"], usual.keywords(LOCATION))
    _check_parts(usual, names)
    on_request = tuple(name for name in offered if name not in (*names, *names.values()))
    if usual.dtype is not None:
        parse_dtype(usual.dtype, quantizes=True)
    check_precision(usual.precision)
    mesh = mesh_of(usual.mesh)
    check_ip_adapters(arguments)
    controlnets, usual = tuple(controls_of(usual)), replace(usual, controlnet=None)
    settings = replace(_engine_settings(arguments, output), on_request=on_request, controlnets=controlnets)
    web = Settings(
        keys=keys,
        host=arguments.host,
        more_hosts=_checked("allow_host", arguments.allow_host, _NAME)
        or (("*",) if arguments.host in ("0.0.0.0", "::") and keys else ()),
        origins=_checked("allow_origin", [text.rstrip("/") for text in arguments.allow_origin], _ORIGIN),
        max_body=_check_body(arguments.max_body),
        page=not arguments.no_page,
        history=output if opens_page else None,
        syntax=usual_syntax(),
        left_out=left_out if opens_page else {},  # the names of an operator's files are not for clients
    )

    def load(name: str, *, weights: bool = True, **pinned: Any) -> Any:
        parts = {} if name in names else dict.fromkeys(PARTS)
        asked = replace(usual, model=names.get(name, name), **parts, **pinned)
        return load_with(arguments, asked, weights=weights)

    if arguments.compile_only:
        return _compile(list(names), settings, load, _devices(mesh), quiet=arguments.quiet)
    with listen(arguments.host, arguments.port, spare=opens_page) as listener, _errors_logged(arguments):
        log_to_stderr(quiet=arguments.quiet or opens_page)
        say: Callable[[str], None] = (lambda text: None) if arguments.quiet else complain
        if not opens_page and not sys.stderr.isatty():  # for programs every line is JSON
            log = logging.getLogger("canvax.server")  # with --quiet, warnings and errors only
            say, warnings.showwarning = log.info, partial(show_warning, set(), log.warning)
        journal = Journal(named_path("journal", arguments.journal)) if arguments.journal else None
        metrics = Metrics()

        engine = ImageEngine(list(names), settings, metrics, load, journal=journal, say=say)
        app = create_app(engine, web, state=engine.readiness, metrics=metrics)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if opens_page and arguments.port is None and port != PORT:
            say(f"port {PORT} is taken, perhaps by another canvax ui; the images kept in its page are not on this one")
        say(f"version {__version__}, starting on {url}")
        say(_devices(mesh))
        if output is not None:
            say(f"images are saved in {output.absolute()}")
        for line in [*([why] if first else []), *_left_out_lines(left_out)]:
            say(line)
        engine.start()
        if opens_page:
            threading.Thread(target=_open_page, args=((host, port), url, say), daemon=True).start()
        answer(app, listener, engine, arguments.drain_seconds, say, keys)


def _compile(
    names: list[str], settings: EngineSettings, load: Callable[..., Any], devices: str, *, quiet: bool
) -> None:
    """Compile the programs of a start, or load them from the cache."""
    from canvax.server.models import Announcer, ModelSet

    say: Callable[[str], None] = (lambda text: None) if quiet else complain
    say(devices)
    builds: list[Build] = []
    ModelSet(names, load, settings, say, Announcer(say, builds.append, lambda: None)).compile()
    check_kept(builds)
    say(f"{len(builds)} programs are ready; {sum(build.cached for build in builds)} were in the cache")


def _devices(mesh: Mesh) -> str:
    """Return a line about the devices; warn if they are CPUs next to an NVIDIA GPU."""
    kinds = Counter(device.device_kind for device in mesh.devices.flat)
    if mesh.devices.flat[0].platform == "cpu" and (_GPU.exists() or shutil.which("nvidia-smi")):
        warn("this machine has an NVIDIA GPU, and JAX uses the CPU; check pip install \".[cuda]\", the driver "
             "(nvidia-smi) and the variable JAX_PLATFORMS")  # fmt: skip
    return f"devices: {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}"


def first_model(offered: Mapping[str, Path], output: Path | None) -> tuple[list[str], str]:
    """Return the model of the folder of models to begin with, if there is one, and a line about it.

    It is that of the newest image in ``output`` whose model is offered, else the smallest, which starts soonest and is
    most likely to fit.
    """
    name, why = "", "the model that was used last"
    images = output.iterdir() if output is not None and output.is_dir() else ()
    for path in sorted(images, key=lambda path: -path.lstat().st_mtime)[:_NEWEST]:
        with suppress(InputError):
            recent = read_metadata(path).get("model")
            name = name or (recent if recent in offered else "")
    if offered and not name:
        from canvax.families.local_models import byte_count

        name, why = min(offered, key=lambda name: (byte_count(offered[name]) or math.inf, name)), "the smallest model"
    others = f", {why} of {len(offered)} in {data_folder()}; name another to start with it" if len(offered) > 1 else ""
    return [name] if name else [], f"starting with {name}{others}"


def _left_out_lines(left_out: Mapping[str, str]) -> Iterator[str]:
    for name, why in list(left_out.items())[:_MOST_LINES]:
        yield f"{name} is left out: {why}"
    if len(left_out) > _MOST_LINES:
        yield f"{len(left_out) - _MOST_LINES} more files are left out; canvax info {data_folder()} lists all"


def _check_body(text: str) -> int:
    """Return the bytes of ``--max-body``; raise an error if no request fits into them."""
    count = byte_count("max_body", text)
    if count < _LEAST_BODY:
        warn(HintWarning("max_body", f"is {count} bytes, too few for most requests", cure="32MB is usual", value=text))
    return count


def byte_count(argument: str, text: str) -> int:
    """Return the number of bytes of a size, for example 20GB.

    Raises:
        InputError: the text is not a size.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*([kmg]?)i?b?", text.strip().lower(), re.ASCII)
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise InputError(argument, "is not a size", cure="write 20GB or 500MB", value=text)
    return count


def _checked(argument: str, values: list[str], form: re.Pattern[str]) -> tuple[str, ...]:
    """Return the values in lower case, as browsers send them."""
    for value in values:
        if not form.fullmatch(value.lower()):
            raise InputError(argument, "is not a name of this kind", cure=f"write {_USUAL[argument]}", value=value)
    return tuple(value.lower() for value in values)


def _check_extra(command: str) -> None:
    try:
        import msgspec
        import prometheus_client
        import python_multipart
        import starlette
        import uvicorn
    except ImportError as error:
        cure = 'install it from canvax\'s folder: pip install ".[serve]"'
        raise InputError(f"canvax {command} needs {error.name}; {cure}") from None
    del msgspec, prometheus_client, python_multipart, starlette, uvicorn


def _names(models: list[str], keywords: Mapping[str, Any]) -> dict[str, str]:
    """Check the served models and return their names, as by ``model_names``.

    Raises:
        InputError, CheckpointError: a model, or one of the other ``keywords`` of its source, cannot be used.
    """
    from canvax.server.models import model_names
    from canvax.weights.location import Location

    Location(**keywords)
    names = model_names(models)
    for model in names.values():
        Location(model).local()  # refuse a name that is neither a model nor an id before the start
    return names


def _check_parts(load: Load, names: Mapping[str, str]) -> None:
    """Check the flags that correct a model or name a part of it, which are for one served model.

    Raises:
        InputError, CheckpointError: a part cannot be used.
    """
    from canvax.weights.location import Location

    for name, part in overrides_of(load).parts.items():
        Location(part, argument=name).local()
    for name in PARTS:
        if getattr(load, name) is not None and len(names) > 1:
            raise InputError(name, "is for one model, and several are served", cure="convert it to a folder")


def _output(arguments: argparse.Namespace) -> Path | None:
    """Return the folder in which finished images are saved, or None. It is not created yet.

    Raises:
        InputError: the images cannot be written there.
    """
    if arguments.no_output and arguments.output is not None:
        raise conflict("no_output", "output")
    name = OUTPUT if arguments.output is None and arguments.command == "ui" else arguments.output
    if name is None or arguments.no_output:
        return None
    folder = named_path("output", name)
    if names_file(folder):
        raise InputError("output", "is one file", cure="name a folder", value=folder)
    check_writable("output", folder)
    unique_path(folder, 0)  # it reads the folder, as saving will
    return folder


def _engine_settings(arguments: argparse.Namespace, output: Path | None) -> EngineSettings:
    from canvax.models.denoiser import MOST_REFERENCES
    from canvax.prompts.chunks import MOST_CHUNKS
    from canvax.server.engine import EngineSettings
    from canvax.server.models import Warm

    for flag in ("queue_seconds", "queue_images", "keep_seconds", "drain_seconds", "stall_seconds", "rate"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value <= MOST:
            raise InputError(flag, f"is not a number above 0 and of at most {MOST:g}", value=value)
    chunks = arguments.chunks or ()
    if not all(1 <= count <= MOST_CHUNKS for count in chunks):
        raise InputError("chunks", f"are not whole numbers in 1..{MOST_CHUNKS}", value=" ".join(map(str, chunks)))
    if not 0 <= arguments.references <= MOST_REFERENCES:
        raise InputError("references", f"is not a whole number in 0..{MOST_REFERENCES}", value=arguments.references)
    if arguments.batching == "none" and any(":" in text and not text.endswith(":1") for text in arguments.warm or ()):
        why = "it has one image at a time"
        raise conflict("warm", "batching=none", why=why, cure="write 512x512:1", value=" ".join(arguments.warm))
    on_demand = arguments.compile_on_demand
    return EngineSettings(
        warm=tuple(Warm.parse(text) for text in arguments.warm) if arguments.warm else (Warm(),),
        chunks=tuple(dict.fromkeys(chunks)),
        references=arguments.references,
        compile_on_demand=arguments.command == "ui" if on_demand is None else on_demand,
        queue_seconds=arguments.queue_seconds,
        queue_images=arguments.queue_images,
        rate=arguments.rate,
        keep_seconds=arguments.keep_seconds,
        stall_seconds=arguments.stall_seconds,
        memory=byte_count("memory", arguments.memory) if arguments.memory else None,
        batching=arguments.batching,
        log_prompts=arguments.log_prompts,
        adapters=_adapter_settings(arguments),
        output=output,
    )


def _adapter_settings(arguments: argparse.Namespace) -> AdapterSettings | None:
    """Return the settings of the adapters that requests may name.

    Raises:
        InputError: a folder or file does not exist, or a number cannot be used.
    """
    folder = named_path("lora_dir", arguments.lora_dir) if arguments.lora_dir else lora_folder()
    if not (folder or arguments.lora):
        for name in ("lora_rank", "lora_places", "lora_layers"):
            if getattr(arguments, name) is not None:
                raise needs(name, "lora_dir", "lora")
        return None
    from canvax.pipelines.slots import COUNT, check_places
    from canvax.server.adapter_cache import AdapterSettings
    from canvax.weights.safetensors import open_safetensors

    if folder is not None and not folder.is_dir():
        raise InputError("lora_dir", "is not a folder", value=arguments.lora_dir)
    files = tuple(named_path("lora", file) for file in arguments.lora)
    for file in files:
        if not (file.is_file() and file.suffix == ".safetensors"):
            raise InputError("lora", "is not a safetensors file", value=file)
        open_safetensors(file, plain_names=False)  # a damaged one is found before a model is fetched
    if twice := [name for name, count in Counter(file.stem for file in dict.fromkeys(files)).items() if count > 1]:
        raise InputError(
            "lora", f"has two files called {twice[0]}", cure="rename one, or give their folder as {lora_dir}"
        )
    places = COUNT if arguments.lora_places is None else check_count("lora_places", arguments.lora_places)
    check_places(1 if arguments.lora_rank is None else arguments.lora_rank, places, "all")
    return AdapterSettings(folder, files, arguments.lora_rank, places, arguments.lora_layers)


def listen(host: str, port: int | None, *, spare: bool = False) -> socket.socket:
    """Return a bound socket, so that a port in use is noticed before a model is loaded.

    Without a port it has ``PORT``; with ``spare``, a free port if that is taken.
    """
    spare = spare and port is None
    port = PORT if port is None else port
    if not 0 <= port < 1 << 16:  # some C libraries would use another port
        raise InputError("port", "is not in 0..65535", cure="choose another port, such as --port 0", value=port)
    listener = None
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # By its name, or asyncio leaves Nagle's algorithm on, and each answer waits 40 ms for an acknowledgement.
        listener = socket.socket(address[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address[4])
        except OSError as error:
            if not spare or error.errno != errno.EADDRINUSE:
                raise
            listener.bind((address[4][0], 0, *address[4][2:]))
    except (OSError, UnicodeError) as error:
        if listener:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        known = listener is not None and getattr(error, "errno", None) != errno.EADDRNOTAVAIL
        if known:
            raise InputError(
                "port", f"cannot be used: {reason}", cure="choose another, such as {port=0}", value=port
            ) from None
        cure = "name an address of this machine, such as 127.0.0.1"
        raise InputError("host", f"cannot be listened on: {reason}", cure=cure, value=host) from None
    return listener


@contextmanager
def _errors_logged(arguments: argparse.Namespace) -> Iterator[None]:
    """Log an error that ends the server as JSON, if a program reads the log."""
    try:
        yield
    except CanvaxError as error:
        log = logging.getLogger("canvax.server")
        if arguments.command == "ui" or sys.stderr.isatty() or not log.handlers or debugging():
            raise
        log.error(" ".join(error.format(arguments.write).split()) if isinstance(error, InputError) else str(error))
        raise SystemExit(BAD_INPUT if isinstance(error, InputError) else FAILED) from None


def answer(
    app: Any,
    listener: socket.socket,
    engine: ImageEngine,
    drain: float,
    say: Callable[[str], None],
    keys: Keys | None = None,
) -> None:
    """Answer until a signal, then finish what was accepted; a second signal ends at once. With keys SIGHUP reads them
    again instead."""
    import uvicorn

    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="off",
        timeout_keep_alive=75,  # longer than a load balancer's usual 60 s, or it sends to a connection that closes
        timeout_graceful_shutdown=5, http="h11", ws="none",  # whatever else is installed: it is what the tests attack
    )  # fmt: skip
    server = uvicorn.Server(config)
    signals: list[int] = []

    def heard(number: int, _: Any) -> None:
        signals.append(number)
        if len(signals) > 1:
            server.force_exit = server.should_exit = True

    def hung_up(number: int, frame: Any) -> None:
        if keys is None:
            return heard(number, frame)
        try:
            keys.reread()
            say("SIGHUP: the keys were read again")
        except InputError as error:
            logging.getLogger("canvax.server").error("SIGHUP: the former keys stay: %s", error)

    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    # Not on Windows, and not where nohup has it ignored.
    if hasattr(signal, "SIGHUP") and (keys or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN):
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hung_up)
    # In a separate thread, where uvicorn leaves signals alone.
    web = threading.Thread(target=server.run, args=([listener],), name="canvax web", daemon=True)
    web.start()
    while web.is_alive() and not signals and engine.failure is None:
        web.join(_PAUSE)
        tell_watchdog(engine.state)
    if signals:
        say(f"{signal.Signals(signals[0]).name}: finishing what was accepted; again to stop at once")
        began = time.monotonic()

        def finish() -> None:
            if engine.drain(drain):
                engine.await_fetches(began + drain - time.monotonic())

        draining = threading.Thread(target=finish, daemon=True)
        draining.start()
        while draining.is_alive() and len(signals) < 2:
            draining.join(_PAUSE)
            tell_watchdog(engine.state)
        # Answers may still be on their way to slow readers: for 5 s, or 1 s after the end of the drain.
        config.timeout_graceful_shutdown = max(1, min(5, int(began + drain - time.monotonic())))
    server.should_exit = True
    while web.is_alive() and len(signals) < 2:
        web.join(_PAUSE)
    engine.close(1.0)
    for number, handler in before.items():
        signal.signal(number, handler)
    if engine.failure is not None:
        known = isinstance(engine.failure, CanvaxError)
        raise engine.failure if known else CanvaxError(f"the server failed: {engine.failure}")


def tell_watchdog(state: str) -> None:
    """Tell systemd, if it runs the server with WatchdogSec, that ``/health`` answers 200, as sd_notify does."""
    if (path := os.environ.get("NOTIFY_SOCKET")) and state != "failed":
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(b"WATCHDOG=1", path.replace("@", "\0", 1) if path.startswith("@") else path)


def _open_page(address: tuple[str, int], url: str, say: Callable[[str], None]) -> None:
    """Open the page as soon as the server listens; the page shows the progress of loading."""
    for _ in range(100):
        try:
            socket.create_connection(address, 1).close()
            break
        except OSError:
            threading.Event().wait(0.1)
    if not webbrowser.open(url):
        say(f"open {url} in a browser")
