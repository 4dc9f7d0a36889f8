"""Ray Serve on a cluster of three nodes, asked by clients; prints one JSON object. Run by ``test_ray.py``.

``--models``: two models on two replicas, each of which is to hold one.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image

from benchmarks.ray_batch import cluster

URL = "http://127.0.0.1:8000"


def post(body: dict[str, Any], *, once: str | None = None, more: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of an answer of OpenAI's route; 0 where the connection broke."""
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": once} if once else {}) | (more or {})
    try:
        with urlopen(Request(f"{URL}/v1/images/generations", json.dumps(body).encode(), headers), timeout=120) as done:
            return done.status, done.read()
    except HTTPError as error:
        return error.code, error.read()
    except (URLError, OSError, ConnectionError):
        return 0, b""


def patient(i: int, log: list[int]) -> str:
    """What an ordinary client does: it asks again until it has its image, with one key."""
    key = uuid.uuid4().hex
    for _ in range(60):
        status, body = post({"prompt": "a red apple", "size": "64x64", "seed": i, "steps": 8}, once=key)
        log.append(status)
        if status == 200:
            return json.loads(body)["data"][0]["b64_json"]
        time.sleep(1)
    return ""


def pixels(image: str) -> Any:
    return np.asarray(Image.open(BytesIO(base64.b64decode(image)))).astype(int)


def load(count: int, at_once: int, log: list[int]) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda i: patient(i, log), range(count)))


def running() -> int:
    """Replicas that answer."""
    from ray import serve

    states = serve.status().applications["images"].deployments["canvax"].replica_states
    return sum(count for state, count in states.items() if str(state).endswith("RUNNING"))


def kill_one() -> None:
    """A replica's process, at once."""
    import psutil

    names = ((one, " ".join(one.info["cmdline"] or [])) for one in psutil.process_iter(["cmdline"]))
    next(one for one, name in names if name.startswith("ray::ServeReplica:images")).kill()


def wait_for(count: int, seconds: float = 180) -> int:
    """The number of replicas, once it is ``count`` or time is up."""
    end = time.monotonic() + seconds
    while running() != count and time.monotonic() < end:
        time.sleep(1)
    return running()


def answered() -> dict[str, int]:
    """Images that each replica has answered with, as Serve's own logs say."""
    logs = Path("/tmp/ray/session_latest/logs/serve").glob("replica_images_canvax_*.log")
    return {log.name: log.read_text().count("POST / 200") for log in logs}


def models() -> None:
    """Which replicas answer for each of two models in turn."""
    import ray
    from ray import serve

    import canvax
    from canvax.scale.serve import MODEL_HEADER, app

    report: dict[str, Any] = {"replicas": []}
    there = cluster()
    ray.init(address=there.address, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            canvax.load("emoji").save(f"{folder}/other")
            names = ["emoji", f"{folder}/other"]
            wanted = {"model": ",".join(names), "warm": "64x64:1", "replicas": "2", "holds": "1", "cpus": "0.5"}
            serve.run(app(wanted), name="images")
            for name in (*names, *names):
                before, statuses = answered(), []
                for seed in range(6):
                    body = {"prompt": "a red apple", "size": "64x64", "seed": seed, "steps": 2, "model": name}
                    statuses.append(post(body, more={MODEL_HEADER: name})[0])
                time.sleep(3)  # for the logs, and for what replicas tell of themselves
                after = answered()
                grown = sorted(log for log in after if after[log] > before.get(log, 0))
                report["replicas"].append([sorted(set(statuses)), grown])
    finally:
        serve.shutdown()
        ray.shutdown()
        there.shutdown()
        print(json.dumps(report), flush=True)


def main() -> None:
    import ray
    from ray import serve

    from canvax.scale.serve import app

    report: dict[str, Any] = {}
    there = cluster()
    ray.init(address=there.address, log_to_driver=False)
    try:
        wanted = {"model": "emoji", "warm": "64x64:1,4", "least": "1", "most": "3", "load": "2", "cpus": "0.5"}
        wanted |= {"imagine": "true", "drain": "20", "idle": "10"}
        serve.run(app(wanted), name="images")
        with urlopen(f"{URL}/ready", timeout=60) as ready:
            report["ready"] = json.loads(ready.read())["status"]
        with urlopen(f"{URL}/imagine?prompt=a+red+apple&img_size=64", timeout=60) as image:
            report["imagine"] = [image.headers["content-type"], image.read()[:4] == b"\x89PNG"]
        body = {"prompt": "a red apple", "size": "64x64", "stream": True, "partial_images": 2, "seed": 5}
        status, events = post(body)
        report["stream"] = [status, events.count(b"event: image_generation.partial_image"), b"completed" in events]
        log: list[int] = []
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                load(12, 12, log)

        keeping = threading.Thread(target=busy, daemon=True)
        keeping.start()
        report["up"] = wait_for(3)
        report["up_errors"] = sorted(status for status in log if status != 200)
        log.clear()
        kill_one()
        time.sleep(5)
        stop.set()
        keeping.join()
        report["kill_statuses"] = {str(status): log.count(status) for status in sorted(set(log))}
        log.clear()
        images = load(8, 4, log)
        again = load(8, 2, log)
        pairs = zip(map(pixels, images), map(pixels, again), strict=True)
        report["off"] = max(int(abs(one - two).max()) for one, two in pairs)
        report["after_statuses"] = sorted(set(log))
        log.clear()
        quiet = threading.Event()

        def seldom() -> None:
            while not quiet.is_set():
                patient(1, log)
                time.sleep(1)

        asking = threading.Thread(target=seldom, daemon=True)
        asking.start()
        report["down"] = wait_for(1)
        quiet.set()
        asking.join()
        report["down_statuses"] = sorted(set(log))
    finally:
        serve.shutdown()
        ray.shutdown()
        there.shutdown()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(models() if "--models" in sys.argv else main())
