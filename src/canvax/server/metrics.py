"""Counters and timings of a server, for Prometheus. Labels have few values, and never prompts, clients or ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from canvax._version import __version__
from canvax.compile import monitor
from canvax.compile.aot import Build
from canvax.compile.kinds import PROGRAMS

CONTENT_TYPE = CONTENT_TYPE_LATEST

OUTCOMES = ("done", "failed", "expired", "cancelled", "parked")
REASONS = (
    "adapter_not_found", "adapter_unusable", "controlnet_not_found", "controlnet_unusable", "draining", "failed",
    "invalid_value", "key_reused", "model_not_found", "model_unavailable", "not_compiled", "not_recorded",
    "prompt_too_long", "queue_full", "rate_limit_exceeded", "size_not_ready", "starting", "too_large", "too_late",
    "vae_not_found", "vae_unusable",
)  # fmt: skip
"""Codes with which an engine refuses jobs."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


class Metrics:
    """The metrics of one server, in a separate registry.

    Counters, gauges and histograms that are counted in one place are attributes; the methods count several at once.
    Counters whose labels are known begin at 0: Prometheus sees no increase in a series that begins at 1.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        count, gauge, time = (
            _made(Counter, registry),
            _made(Gauge, registry),
            _made(Histogram, registry, buckets=_SECONDS),
        )
        gauge("canvax_build_info", "The version that runs.", ["version"]).labels(__version__).set(1)
        self.healthy = gauge("canvax_healthy", "0 while /health answers 503, else 1.")
        self.ready = gauge("canvax_ready", "0 while /ready answers 503, else 1.")
        self._requests = count("canvax_requests_total", "HTTP requests.", ["route", "status"])
        self._request_seconds = time("canvax_request_seconds", "From a request to the end of its answer.", ["route"])
        self.submitted = count("canvax_jobs_accepted_total", "Jobs that were accepted.", ["model"])
        self.refused = count("canvax_jobs_refused_total", "Jobs that were not.", ["reason"])
        for reason in REASONS:
            self.refused.labels(reason)
        self._over = count("canvax_jobs_total", "Jobs that are over; expired: by their deadline.", ["model", "outcome"])
        self._job_seconds = time("canvax_job_seconds", "From accepting a job to its end.", ["model", "outcome"])
        self.waited = time("canvax_queue_seconds", "From accepting an image to its first step.")
        self.first_preview = time("canvax_first_preview_seconds", "From accepting an image to its first preview.")
        self.queued = gauge("canvax_queue_images", "Images that are not done.")
        self.queue_cost = gauge("canvax_queue_cost_seconds", "Seconds of work in them.")
        self.journal = gauge("canvax_journal_writable", "0 while jobs are refused with not_recorded, else 1.")
        self._steps = count("canvax_steps_total", "Steps of images.", ["size"])
        self._slots = count("canvax_slot_steps_total", "Steps of slots, with an image or without.", ["size", "state"])
        self._step_seconds = time("canvax_step_seconds", "One step of a batch.", ["size", "batch"])
        self._images = count("canvax_images_total", "Images that are done.", ["size"])
        self._pixels = count("canvax_pixels_total", "Pixels of them.")
        self.encoded = time("canvax_encode_seconds", "Encoding the texts and images that an image was given.")
        self.conditions = count(
            "canvax_conditions_total", "Texts and images, by whether their features were held.", ["cache"]
        )
        self.decoded = time("canvax_decode_seconds", "Decoding latents.")
        self.turned = time("canvax_turn_overhead_seconds", "A turn of the engine without encoding, steps, decoding.")
        self.written = time("canvax_file_seconds", "Writing the file of an image.")
        self.not_kept = count("canvax_files_failed_total", "Images that could not be saved in the folder.")
        self.undecoded = gauge("canvax_undecoded_images", "Images behind their last step that are not decoded.")
        self.writing = gauge("canvax_writing_images", "Images that are decoded, whose files are not made.")
        self.oldest = gauge("canvax_writing_seconds", "The longest that the file of an image has taken until now.")
        self._compiled = count("canvax_programs_compiled_total", "Programs that canvax compiled.", ["program"])
        self._compile_seconds = count("canvax_compile_seconds_total", "Seconds of that.", ["program"])
        for program in PROGRAMS:
            self._compiled.labels(program)
        all_compiled = gauge("canvax_compilations", "All that JAX has compiled in this process.")
        all_compiled.set_function(monitor.compilations)
        self.memory = gauge("canvax_device_memory_bytes", "In use, for each device that tells.", ["device"])
        ProcessCollector(registry=registry)
        self.models = gauge("canvax_models_loaded", "Models whose weights are on the devices.")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def expect(self, models: Iterable[str] = (), routes: Iterable[str] = ()) -> None:
        """Begin to count the jobs of these models, and the server's own errors on these routes."""
        for route in routes:
            self._requests.labels(route, "500")
        for model in models:
            self.submitted.labels(model)
            for outcome in OUTCOMES:
                self._over.labels(model, outcome)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered; ``route`` is the beginning of its path."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def over(self, model: str, outcome: str, seconds: float) -> None:
        """Count a job that is over."""
        self._over.labels(model, outcome).inc()
        self._job_seconds.labels(model, outcome).observe(seconds)

    def stepped(self, size: str, slots: int, used: int, rows: int, seconds: float) -> None:
        """Count a call of the denoiser: ``rows`` steps of a batch of ``slots``, of which ``used`` hold an image."""
        self._steps.labels(size).inc(used * rows)
        self._slots.labels(size, "used").inc(used * rows)
        self._slots.labels(size, "padded").inc((slots - used) * rows)
        for _ in range(rows):
            self._step_seconds.labels(size, str(slots)).observe(seconds / rows)

    def image(self, size: str, pixels: int) -> None:
        """Count an image that is done."""
        self._images.labels(size).inc()
        self._pixels.inc(pixels)

    def built(self, build: Build) -> None:
        """Count a program that was compiled; one from the cache counts 0."""
        self._compiled.labels(build.program).inc(not build.cached)
        self._compile_seconds.labels(build.program).inc(0 if build.cached else build.seconds or 0)


def _made(kind: Any, registry: CollectorRegistry, **options: Any) -> Callable[..., Any]:
    """Return a constructor with the registry filled in."""

    def make(name: str, text: str, labels: Sequence[str] = ()) -> Any:
        return kind(name, text, labels, registry=registry, **options)

    return make


disable_created_metrics()  # the times at which counters were made: half the text, of no use
