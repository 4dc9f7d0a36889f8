"""Requests to an image server that arrive at random, and what became of them; for ``benchmarks.serve_load``.

An open loop: each request is sent when it is due, whether or not earlier ones were answered, and its latency counts
from then. So a server that falls behind neither slows the load down nor hides how long people would have waited.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2 as httpx

SETTLING = 0.1
"""Part of a run that is not counted: the first ones find an empty server."""

_COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "brown", "pink")
_THINGS = ("apple", "dog", "car", "owl", "house", "flower", "rocket", "fish", "heart", "hat", "cup", "star")


@dataclass(frozen=True)
class Mix:
    """What people ask for: values, each with how often it is asked for.

    Attributes:
        sizes: image sizes as WIDTHxHEIGHT in pixels, such as "256x256".
        steps: of the sampler.
        samplers: names that canvax and diffusers both have (not DPM++ 2M Karras: diffusers 0.42 fails at 30 steps of it
            where the terminal SNR is zero); () for the model's own.
        guidance: guidance_scale; 1 switches it off.
        counts: images of a request.
    """

    sizes: tuple[tuple[str, float], ...]
    steps: tuple[tuple[int, float], ...]
    samplers: tuple[tuple[str, float], ...]
    guidance: tuple[tuple[float, float], ...]
    counts: tuple[tuple[int, float], ...]


_SAMPLERS = (("DPM++ 2M", 4.0), ("Euler a", 3.0), ("UniPC", 2.0), ("DDIM", 1.0))
MIXES = {
    "default": Mix(
        sizes=(("256x256", 4.0), ("384x256", 1.0)),
        steps=((4, 2.0), (10, 3.0), (20, 4.0), (30, 1.0)),
        samplers=_SAMPLERS,
        guidance=((4.0, 6.0), (2.0, 2.0), (1.0, 2.0)),
        counts=((1, 9.0), (2, 1.0)),
    ),
    "alike": Mix(
        sizes=(("256x256", 1.0),),
        steps=((20, 1.0),),
        samplers=_SAMPLERS[:1],
        guidance=((4.0, 1.0),),
        counts=((1, 1.0),),
    ),
}
MIXES["middling"] = replace(MIXES["default"], sizes=(("512x512", 1.0),), steps=((20, 1.0), (30, 1.0)))
MIXES["large"] = replace(MIXES["default"], sizes=(("1024x1024", 1.0),), steps=((20, 1.0), (30, 1.0)))
MIXES["few"] = replace(
    MIXES["alike"], sizes=(("512x512", 1.0),), steps=((4, 1.0),), samplers=(), guidance=((1.0, 1.0),)
)  # fmt: skip
MIXES["short and long"] = replace(
    MIXES["alike"], sizes=(("1024x1024", 1.0),), steps=((4, 1.0), (50, 1.0)), samplers=()
)  # fmt: skip
"""By name. In "alike" nobody differs, which is the best case of whole batches; "few" is for few-step models."""


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        at: seconds after the beginning at which it is due.
        client: whose it is, from 0.
        watched: whether its client watches the image grow, where the server can show that.
        body: in the form of OpenAI's API, with the fields that canvax adds.
    """

    at: float
    client: int
    watched: bool
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        request: it.
        status: of HTTP; 0 where there was no answer, or no image in it.
        seconds: from when it was due to the last byte of its images.
        preview: likewise to the first preview, where one was seen.
    """

    request: Request
    status: int
    seconds: float
    preview: float | None = None


def requests(
    rate: float, seconds: float, *, clients: int, seed: int, mix: Mix | None = None, previews: float = 0.0
) -> list[Request]:
    """Poisson arrivals, ``rate`` a second; the same ones for the same seed, closer together at a higher rate."""
    mix, chance, at, found = mix or MIXES["default"], random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(1.0) / rate) < seconds:
        body = {
            "prompt": f"a {chance.choice(_COLOURS)} {chance.choice(_THINGS)}",
            "size": _one_of(chance, mix.sizes),
            "steps": _one_of(chance, mix.steps),
            **({"sampler": _one_of(chance, mix.samplers)} if mix.samplers else {}),
            "guidance_scale": _one_of(chance, mix.guidance),
            "n": _one_of(chance, mix.counts),
            "seed": chance.randrange(2**32),
        }
        found.append(Request(at, chance.randrange(clients), chance.random() < previews, body))
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that so many percent do not exceed; infinite where there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.inf


async def open_loop(base: str, due: Sequence[Request], keys: Sequence[str] = (), *, jobs: bool = True) -> list[Answer]:
    """Send each request when it is due.

    Args:
        base: the server's address.
        due: the requests.
        keys: of the clients, if the server wants any.
        jobs: whether it has canvax's own API; watched requests go there.
    """
    async with _connected(base) as http:
        began = time.perf_counter()

        async def run(one: Request) -> Answer:
            await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
            return await _send(http, one, began + one.at, keys, watch=jobs and one.watched)

        return await asyncio.gather(*(run(one) for one in due))


async def closed_loop(
    base: str, due: Sequence[Request], clients: int, seconds: float, keys: Sequence[str] = ()
) -> list[Answer]:
    """``clients`` who each wait for their answer before they ask again: what a server can do at most."""
    answers: list[Answer] = []
    order = itertools.cycle(due)
    async with _connected(base) as http:
        start = time.perf_counter()

        async def run() -> None:
            while (began := time.perf_counter()) < start + seconds:
                one = replace(next(order), at=began - start)
                answers.append(await _send(http, one, began, keys, watch=False))

        await asyncio.gather(*(run() for _ in range(clients)))
    return answers


def summary(answers: Sequence[Answer], rate: float, seconds: float) -> dict[str, float]:
    """A run in figures.

    Args:
        answers: of an open loop.
        rate: requests a second.
        seconds: in which they arrived.
    """
    start = SETTLING * seconds
    counted = [one for one in answers if one.request.at >= start]
    good = [one for one in counted if one.status == 200]
    timely = [one for one in answers if one.status == 200 and start <= one.request.at + one.seconds < seconds]
    found = {
        "requests a second": rate,
        "images asked for a second": sum(one.request.body["n"] for one in counted) / (seconds - start),
        "images a second": sum(one.request.body["n"] for one in timely) / (seconds - start),
    }
    found |= {f"p{p}": percentile([one.seconds for one in good], p) for p in (50, 95, 99)}
    previews = [one.preview for one in good if one.preview is not None]
    if previews:
        found |= {f"preview p{p}": percentile(previews, p) for p in (50, 95)}
    refused = sum(one.status in (429, 503) for one in answers)
    return found | {"refused": refused, "failed": sum(one.status not in (200, 429, 503) for one in answers)}


def capacity(answers: Sequence[Answer], seconds: float) -> float:
    """Requests a second that a closed loop of so many seconds achieved; those answered later do not count."""
    return sum(one.status == 200 and one.request.at + one.seconds <= seconds for one in answers) / seconds


def _connected(base: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base, timeout=600, limits=limits)


async def _send(http: httpx.AsyncClient, one: Request, due: float, keys: Sequence[str], *, watch: bool) -> Answer:
    headers = {"Authorization": f"Bearer {keys[one.client % len(keys)]}"} if keys else {}
    try:
        status, preview = await (_watched if watch else _plain)(http, one, headers)
    except (httpx.HTTPError, OSError, ValueError, LookupError):
        status, preview = 0, None
    return Answer(one, status, time.perf_counter() - due, None if preview is None else preview - due)


async def _plain(http: httpx.AsyncClient, one: Request, headers: dict[str, str]) -> tuple[int, None]:
    answer = await http.post("/v1/images/generations", json=one.body, headers=headers)
    if answer.status_code != 200:
        return answer.status_code, None
    images = [image["b64_json"] for image in answer.json()["data"]]
    return (200 if len(images) == one.body["n"] and all(images) else 0), None


async def _watched(http: httpx.AsyncClient, one: Request, headers: dict[str, str]) -> tuple[int, float | None]:
    """As a page does it: a job, its events, its images."""
    width, height = map(int, one.body["size"].split("x"))
    body = {name: value for name, value in one.body.items() if name != "size"}
    accepted = await http.post(
        "/api/jobs", json={**body, "width": width, "height": height, "previews": True}, headers=headers
    )
    if accepted.status_code != 202:
        return accepted.status_code, None
    preview, images, event = None, 0, ""
    async with http.stream("GET", f"/api/jobs/{accepted.json()['id']}/events", headers=headers) as events:
        async for line in events.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            if line.startswith("data: ") and event == "preview" and preview is None:
                preview = time.perf_counter()
            if line.startswith("data: ") and event == "image":
                url = json.loads(line.removeprefix("data: "))["url"]
                images += (await http.get(url, headers=headers)).status_code == 200
    return (200 if event == "done" and images == one.body["n"] else 0), preview


def _one_of(chance: random.Random, values: Sequence[tuple[Any, float]]) -> Any:
    return chance.choices([value for value, _ in values], [weight for _, weight in values])[0]


def most_within(rows: Sequence[dict[str, float]], limit: float) -> float:
    """Images a second at the highest rate at which the 95th percentile is within the limit."""
    good = [row for row in rows if row["p95"] <= limit and not row["refused"] and not row["failed"]]
    return max((row["images a second"] for row in good), default=0.0)


def markdown(rows: Sequence[dict[str, float]]) -> Iterator[str]:
    """A table of runs."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(_figure(row.get(column)) for column in columns)} |"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}" if value < 100 else f"{value:.0f}"
