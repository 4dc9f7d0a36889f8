"""How many images a minute each key may have."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from canvax.server.jobs import AdapterCard, EmbeddingCard, Engine, Job, JobRequest, ModelCard, Rejected


class Rates:
    """A bucket for each key, which fills with time and holds one minute's worth.

    Args:
        per_minute: images of each.
    """

    def __init__(self, per_minute: float) -> None:
        self._per_second, self._most = per_minute / 60, max(1.0, per_minute)
        self._levels: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def wait(self, client: str, images: int = 1) -> float:
        """Take so many; 0, or the seconds after which there will be enough.

        More than a minute's worth waits for a full bucket, and leaves a debt.
        """
        now = time.monotonic()
        with self._lock:
            level, needed = self._level(client, now), min(images, self._most)
            if level < needed:
                return (needed - level) / self._per_second
            self._levels[client] = level - images, now
            return 0.0

    def add(self, client: str, images: int) -> None:
        """Give so many back; a negative number takes more, and may leave a debt."""
        now = time.monotonic()
        with self._lock:
            self._levels[client] = min(self._most, self._level(client, now) + images), now

    def _level(self, client: str, now: float) -> float:
        level, when = self._levels.get(client, (self._most, now))
        return min(self._most, level + (now - when) * self._per_second)


class Rated:
    """An engine that takes the images of a job from the bucket of its key. Without keys all share one.

    Args:
        engine: the engine.
        rates: the buckets.
    """

    def __init__(self, engine: Engine, rates: Rates) -> None:
        self._engine, self._rates = engine, rates

    @property
    def starting(self) -> str:
        """See ``Engine``."""
        return self._engine.starting

    def models(self) -> Sequence[ModelCard]:
        """See ``Engine``."""
        return self._engine.models()

    def adapters(self, model: str | None, *, refresh: bool = False) -> Sequence[AdapterCard]:
        """See ``Engine``."""
        return self._engine.adapters(model, refresh=refresh)

    def embeddings(self, model: str | None, *, refresh: bool = False) -> Sequence[EmbeddingCard]:
        """See ``Engine``."""
        return self._engine.embeddings(model, refresh=refresh)

    def submit(self, job_request: JobRequest) -> Job:
        """See ``Engine``."""
        if wait := self._rates.wait(job_request.client, job_request.n):
            raise Rejected(429, "rate_limit_exceeded", "too many images a minute; see Retry-After", retry_after=wait)
        accepted = None
        try:
            accepted = self._engine.submit(job_request)
            return accepted
        finally:
            if accepted is None or not accepted.is_of(job_request):  # refused, or the job of an earlier try
                self._rates.add(job_request.client, job_request.n)
            elif accepted.tiles:  # each costs as much as an image
                self._rates.add(job_request.client, job_request.n - accepted.tiles)

    def job(self, name: str, client: str) -> Job | None:
        """See ``Engine``."""
        return self._engine.job(name, client)

    def jobs(self, client: str | None = None) -> Sequence[Job]:
        """See ``Engine``."""
        return self._engine.jobs(client)
