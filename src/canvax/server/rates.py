"""Limits of images a minute for each client."""

from __future__ import annotations

import threading
import time


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
