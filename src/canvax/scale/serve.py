"""Ray Serve: the server of ``canvax serve`` as replicas, each of which owns its devices.

    serve run canvax.scale.serve:app model=emoji

Routes and code are those of the server. A replica is ready when its programs are compiled, finishes its images before
it stops, and is replaced if its engine fails. Only the replica that accepted a job of ``/api/jobs`` knows it, so that
API and the page need a single replica (docs/scaling.md).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from canvax.call import Load
from canvax.errors import CanvaxError, InputError, nearest
from canvax.server import jobs_api
from canvax.server.answers import client_of, failure, settled, submitted
from canvax.server.app import Settings, create_app
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import Engine, JobRequest, Rejected, State, Status
from canvax.server.keys import Keys
from canvax.server.logs import log_to_stderr
from canvax.server.metrics import Metrics
from canvax.server.models import Warm, model_names
from canvax.server.paths import ApiPath, Operation
from canvax.settings import declared

MODEL_HEADER = "serve_multiplexed_model_id"
"""Header of Ray Serve: its proxy looks for a replica that has loaded the model."""


_QUIETLY = Load(progress=False)
_LOADING = {name: field for name, field in declared(Load).items() if name not in ("model", "progress")}


@dataclass(frozen=True)
class ServeArgs:
    """The arguments of ``serve run`` as ``name=value``, and of a Serve config as ``args``.

    Attributes:
        model: a name or a folder, or several with commas between; the first is the default.
        loading: further arguments of ``canvax.load`` by their names, such as ``quantize=int8``; several networks of
            ``controlnet`` with commas between.
        ip_adapter: IP-Adapters, with commas between several.
        warm: sizes and batches to compile first: ``512x512:1,4``, with spaces between several.
        compile_on_demand: also generate other sizes, after compiling.
        hosts: host names of the service, with commas between; * for any.
        no_keys: accept all clients. By default keys come from the variable CANVAX_KEYS; without keys only this machine
            is answered.
        imagine: add the route ``GET /imagine?prompt=`` of the samples of Ray and GKE.
        replicas: number of replicas; 0 to scale with the requests, between ``least`` and ``most``.
        least: minimum number of replicas.
        most: maximum number of replicas.
        load: target of requests in flight per replica, about its largest batch.
        idle: seconds of lower load after which a replica is stopped.
        cpus: CPUs of a replica.
        gpus: GPUs of a replica.
        tpus: TPU chips of a replica: those of a machine.
        drain: seconds in which a stopping replica finishes its work.
        stall: seconds without progress after which an engine with work fails its health check; 0 for never.
        holds: number of models that Serve expects in a replica's memory; 0 for all. Requests whose header
            serve_multiplexed_model_id names a model go to replicas that used it recently.
    """

    model: str = "emoji"
    loading: Load = _QUIETLY
    ip_adapter: str = ""
    warm: str = ""
    compile_on_demand: bool = False
    hosts: str = ""
    no_keys: bool = False
    imagine: bool = False
    replicas: int = 0
    least: int = 1
    most: int = 1
    load: float = 4.0
    idle: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    tpus: float = 0.0
    drain: float = 60.0
    stall: float = 600.0
    holds: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ServeArgs:
        """Parse arguments from texts or plain values.

        Raises:
            InputError: a name is unknown, or a value is invalid.
        """
        kinds = {field.name: type(field.default) for field in fields(cls) if field.name != "loading"}
        values, loading = dict[str, Any](), dict[str, Any]()
        for name, value in settings.items():
            if name not in (*kinds, *_LOADING):
                raise InputError(name, "is not known", cure=nearest(name, [*kinds, *_LOADING]), value=value)
            if kinds.get(name) is bool or (name in _LOADING and True in _LOADING[name].kind.choices):
                value = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), value)
            if name in _LOADING:  # "" is the default
                loading |= {name: _listed(str(value)) if name == "controlnet" else value} if value != "" else {}
                continue
            try:
                values[name] = value if isinstance(value, kinds[name]) else _number(kinds[name], value)
            except (TypeError, ValueError):
                raise InputError(name, f"is not {kinds[name].__name__}", value=value) from None
            if not isinstance(values[name], str) and not 0 <= values[name] < math.inf:
                raise InputError(name, "is not a finite number of at least 0", value=value)
        return cls(loading=Load(progress=False, **loading), **values)


Wanted = ServeArgs  # former name


class Images:
    """A replica: one engine, which owns the devices that Ray assigned to this process, and the application.

    Args:
        wanted: its arguments.
    """

    async def __init__(self, wanted: ServeArgs) -> None:
        self._wanted = wanted
        warm = tuple(Warm.parse(text) for text in wanted.warm.split()) or (Warm(),)
        metrics = Metrics() if (wanted.replicas or max(wanted.least, wanted.most)) == 1 else _OfOneReplica()
        log_to_stderr()
        settings = EngineSettings(
            warm=warm, compile_on_demand=wanted.compile_on_demand, stall_seconds=wanted.stall or math.inf
        )
        self._names = model_names(wanted.model.split(","))

        def load(name: str, **pinned: Any) -> Any:
            return self._load(self._names[name], **pinned)

        self._engine = ImageEngine(list(self._names), settings, metrics, load)
        keys = Keys.read(None)
        hosts = tuple(name for name in wanted.hosts.split(",") if name)
        if not hosts and (keys or wanted.no_keys):
            hosts = ("*",)
        web = Settings(keys=keys, host="", more_hosts=hosts)
        self._app = create_app(
            self._engine, web, state=lambda: self._engine.state, metrics=metrics,
            more=imagine if wanted.imagine else None,
        )  # fmt: skip
        self._engine.start()
        while self._engine.state is State.STARTING:  # Serve sends no requests before this
            await asyncio.sleep(0.1)
        self.check_health()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, for ``serve.ingress``."""
        names, header = self._names, MODEL_HEADER.encode()

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                name = dict(scope["headers"]).get(header, b"").decode("latin-1")
                if name in names:
                    await self.hold(name)
            await self._app(scope, receive, send)

        return application

    async def hold(self, name: str) -> str:
        """Declare a requested model, for ``serve.multiplexed``. The engine loads it with its first request."""
        return name

    def check_health(self) -> None:
        """Raise an error if the engine has failed; Serve then replaces the replica."""
        if self._engine.state is State.FAILED:
            raise CanvaxError(f"the engine is dead: {self._engine.failure or 'it makes no progress'}")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._engine.drain, self._wanted.drain)
        await asyncio.to_thread(self._engine.close)

    def _load(self, name: str, **pinned: Any) -> Any:
        import canvax

        wanted = self._wanted
        pipe = canvax.load(name, **wanted.loading.keywords() | pinned)
        return pipe.with_ip_adapter(_listed(wanted.ip_adapter)) if wanted.ip_adapter else pipe


class _OfOneReplica(Metrics):
    """Metrics that a scrape cannot read: each would reach another replica, and the counters would go back."""

    def text(self) -> bytes:
        """Refuse.

        Raises:
            Rejected: always.
        """
        raise Rejected(404, "not_found", "/metrics is for one replica; with several, scrape Ray's metrics")


def app(args: Mapping[str, Any]) -> Any:
    """Return the application, for ``serve run canvax.scale.serve:app`` and for ``import_path`` of a Serve config.

    Raises:
        InputError: Ray Serve is not installed, or an argument is invalid.
    """
    try:
        from ray import serve as ray_serve  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        cure = 'install it from canvax\'s folder: pip install ".[ray]"'
        raise InputError(f"canvax.scale.serve needs {error.name}; {cure}") from None
    serve: Any = ray_serve  # Ray's types do not know inherited methods
    wanted = ServeArgs.of(args)
    resources: dict[str, Any] = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus}
    if wanted.tpus:
        resources["resources"] = {"TPU": wanted.tpus}
    if wanted.replicas:
        count: dict[str, Any] = {"num_replicas": wanted.replicas}
    else:
        scaling = {"min_replicas": wanted.least, "max_replicas": max(wanted.least, wanted.most)}
        count = {"autoscaling_config": {**scaling, "target_ongoing_requests": wanted.load}}
        count["autoscaling_config"]["downscale_delay_s"] = wanted.idle

    class Replica(Images):
        hold = serve.multiplexed(max_num_models_per_replica=wanted.holds or len(wanted.model.split(",")))(Images.hold)

    deployment = serve.deployment(
        name="canvax",
        ray_actor_options=resources,
        # More than a batch, so that a replica never waits for Serve while its batch has free slots.
        max_ongoing_requests=max(16, int(8 * wanted.load)),
        max_queued_requests=256,
        backpressure_config={"status_code": 429, "retry_after_s": 5},
        graceful_shutdown_timeout_s=wanted.drain + 10,
        health_check_period_s=5,
        **count,
    )
    return deployment(serve.ingress()(Replica)).bind(wanted)


def imagine(engine: Engine) -> list[ApiPath]:
    """Declare ``GET /imagine?prompt=&img_size=``, answered with a PNG, as the samples of KubeRay and GKE expect."""

    async def generate(request: Request) -> Response:
        if request.headers.get("sec-fetch-site") in (
            "cross-site",
            "same-site",
        ):  # an <img> of another page could start a generation
            raise Rejected(403, "wrong_origin", "pages of other sites may not ask for images")
        prompt, size = request.query_params.get("prompt", ""), request.query_params.get("img_size")
        if not prompt:
            raise Rejected(
                400, "invalid_value", "prompt: there is none; write /imagine?prompt=a+red+apple", param="prompt"
            )
        if size is not None and not size.isdecimal():
            raise Rejected(400, "invalid_value", f"img_size={size[:40]!r} is not a number of pixels", param="img_size")
        side = None if size is None else int(size[:6])
        job = await submitted(request, engine, JobRequest(prompt, width=side, height=side, client=client_of(request)))
        await settled(request, job)
        if job.status is not Status.DONE:
            raise failure(job)
        return Response(job.pictures[0].data, media_type="image/png", headers={"Cache-Control": "no-store"})

    return [ApiPath("/imagine", jobs_api.error, GET=Operation(generate))]


def _listed(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _number(kind: type, value: Any) -> Any:
    if kind is bool:
        raise ValueError(value)
    return kind(value)
