"""One client of ``canvax serve``, beside calls of the same pipeline: what a request costs more than a call.

    python -m benchmarks.serve_one

Both in one process, with the same weights: of several processes of one program the first to be loaded may be a tenth
slower than the others for as long as it lives, whichever it is (docs/design/experiments.md). The client is a process of
its own, the least one that Python has.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import canvax
from benchmarks.lab.traffic import MIXES, requests
from canvax.cli.serve import answer, listen
from canvax.server.app import Settings, create_app
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.jobs import State
from canvax.server.metrics import Metrics
from canvax.server.models import Warm

TURN = 6
"""Requests that a side answers in a row. The first of each wakes what was asleep, which is nobody's overhead."""

CLIENT = """
import base64, json, sys, time
from http.client import HTTPConnection
connection = HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=600)
for line in sys.stdin:
    began = time.perf_counter()
    connection.request("POST", "/v1/images/generations", line, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    assert answer.status == 200, said
    assert base64.b64decode(json.loads(said)["data"][0]["b64_json"]).startswith(b"\\x89PNG")
    print(time.perf_counter() - began, flush=True)
"""


def measured(pipe: canvax.Pipeline, port: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The server's seconds over a call's: medians for each number of steps, of all, and the ratio of the sums."""
    mix, options = MIXES[arguments.mix], canvax.Options(progress=False)
    due = requests(1.0, 5000.0, clients=1, seed=arguments.seed, mix=mix)
    bodies = [one.body for one in due if (one.body["size"], one.body["n"]) == (mix.sizes[0][0], 1)][: arguments.count]
    command = [sys.executable, "-c", CLIENT, str(port)]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    sent, told = client.stdin, client.stdout

    def ask(body: dict[str, Any]) -> float:
        print(json.dumps(body), file=sent, flush=True)
        return float(told.readline())

    def call(body: dict[str, Any]) -> float:
        began = time.perf_counter()
        images = pipe(
            body["prompt"], seed=body["seed"], num_inference_steps=body["steps"], sampler=body["sampler"],
            guidance_scale=body["guidance_scale"], options=options,
        ).images  # fmt: skip
        images[0].save(io.BytesIO(), "PNG")  # what comes over the wire
        return time.perf_counter() - began

    sides: dict[str, Callable[[dict[str, Any]], float]] = {"server": ask, "call": call}
    took: dict[str, list[float]] = {name: [] for name in sides}
    for body in {(one["sampler"], one["steps"], one["guidance_scale"]): one for one in bodies}.values():
        for side in sides.values():  # whoever compiles anything does it here
            side(body)
    for turn in range(0, len(bodies), TURN):
        for name in ("server", "call") if turn // TURN % 2 else ("call", "server"):
            took[name] += [sides[name](body) for body in bodies[turn : turn + TURN]]
    client.kill()
    counted = [i for i in range(len(bodies)) if i % TURN]
    ratios = {i: took["server"][i] / took["call"][i] for i in counted}
    found = {}
    for steps, _ in mix.steps:
        if some := [ratios[i] for i in counted if bodies[i]["steps"] == steps]:
            found[f"{steps} steps"] = statistics.median(some)
    sums = [sum(took[name][i] for i in counted) for name in ("server", "call")]
    return found | {"median": statistics.median(ratios.values()), "sums": sums[0] / sums[1]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji")
    parser.add_argument("--mix", choices=list(MIXES), default="default")
    parser.add_argument("--count", type=int, default=60, help="requests")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pipe, metrics = canvax.load(arguments.model, progress=False), Metrics()
    warm = Warm.parse(f"{MIXES[arguments.mix].sizes[0][0]}:1,2,4,8")
    engine = ImageEngine([arguments.model], EngineSettings(warm=(warm,)), metrics, lambda _: pipe)

    def run() -> None:
        try:
            while engine.state is State.STARTING:
                time.sleep(0.1)
            print(json.dumps(measured(pipe, listener.getsockname()[1], arguments)))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with listen("127.0.0.1", 0) as listener:
        engine.start()
        threading.Thread(target=run, daemon=True).start()
        app = create_app(engine, Settings(keys=None), state=lambda: engine.state, metrics=metrics)
        answer(app, listener, engine, 10, lambda text: None)


if __name__ == "__main__":
    main()
