"""``canvax serve`` for half an hour while things go wrong: does every accepted job end, does memory stay flat?

    python -m benchmarks.serve_soak                  # 30 minutes
    python -m benchmarks.serve_soak --minutes 3

Two models of which ``--memory`` holds one, four API keys, LoRAs by request, previews, clients that cancel or vanish,
and one injected fault of the engine per minute, each time in another method. At the end the process gets SIGTERM while
jobs are queued. Exit code 1 if a job does not end, a status is unexpected, memory grows by more than 5 % between the
second and the last quarter, or the process outlives its drain time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
from PIL import Image

FAULTS = ("Group.step", "Group.seat", "Group.decode", "Group.begin", "Group.take")
DRAIN = 20.0
ENDED = ("done", "failed", "cancelled")


def server(every: float, arguments: list[str]) -> None:
    """``canvax serve`` in this process, with one fault every so many seconds."""
    from canvax.__main__ import main
    from canvax.server.group import Group

    armed: list[str] = []

    def failing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **keywords: Any) -> Any:
            if armed and armed[0] == name:
                armed.clear()
                print(f"SOAK injected {name}", file=sys.stderr, flush=True)
                raise RuntimeError(f"injected into {name}")
            return method(*positional, **keywords)

        return call

    names = [name for name in FAULTS if hasattr(Group, name.partition(".")[2])]
    for name in names:
        attribute = name.partition(".")[2]
        setattr(Group, attribute, failing(name, getattr(Group, attribute)))

    def arm() -> None:
        number = 0
        while True:
            time.sleep(every)
            armed[:] = [names[number % len(names)]]
            number += 1

    threading.Thread(target=arm, daemon=True).start()
    sys.argv = ["canvax", *arguments]
    sys.exit(main())  # ends as the command does: taking Python apart would take seconds


CLIENTS = ("alice", "bob", "carol", "dave")
NAMES = ("ink", "clay", "wool", "knit", "felt", "moss")


def prepare(folder: Path) -> int:
    """A second model and LoRAs in ``folder``; returns bytes of weights that one model fits in, but not two."""
    import canvax
    from canvax.params import flatten
    from tests.support.adapter_files import Draw, layers, lora, write

    pipe = canvax.load("emoji", progress=False)
    assert pipe.params is not None
    pipe.save(folder / "copy")
    (folder / "loras").mkdir()
    for number, name in enumerate(NAMES):
        draw, arrays = Draw(number), {}
        for (component, module), shape in layers(pipe.model.networks.specs()).items():
            if component != "vae" and "attn" in module:
                arrays |= {f"{component}.{module}{end}": a * 0.5 for end, a in lora(draw, shape).arrays.items()}
        write(folder / "loras" / f"{name}.safetensors", arrays)
    (folder / "keys.txt").write_text("".join(f"{name}:a-secret-of-{name}-0123456789\n" for name in CLIENTS))
    return int(1.5 * sum(leaf.nbytes for _, leaf in flatten(pipe.params)))


def body(rng: random.Random, models: Sequence[str], adapters: Sequence[str] = NAMES) -> dict[str, Any]:
    """A random job."""
    words = ("red", "blue", "cat", "dog", "apple", "house", "tree", "face", "small", "two")
    asked: dict[str, Any] = {
        "prompt": " ".join(rng.choice(words) for _ in range(rng.randrange(1, 9))),
        "model": rng.choice(models),
        "seed": rng.randrange(2**32),
        "steps": rng.randrange(4, 20),
        "n": rng.randrange(1, 4),
        "sampler": rng.choice(("Euler a", "UniPC", "DDIM", "DPM++ 2M Karras")),
        "guidance_scale": rng.choice((1.0, 3.0, 7.5)),
        "previews": rng.random() < 0.3,
        "format": rng.choice(("png", "jpeg", "webp")),
    }
    if adapters and rng.random() < 0.4:
        names = rng.sample(adapters, rng.randrange(1, 3))
        asked["adapters"] = {name: rng.choice((0.5, 1.0)) for name in names}
    if rng.random() < 0.3:
        file = io.BytesIO()
        Image.new("RGB", (rng.randrange(32, 96), 64), (rng.randrange(256), 128, 64)).save(file, "PNG")
        asked["image"] = base64.b64encode(file.getvalue()).decode()
        asked |= {"n": 1, "upscale": 1.5} if rng.random() < 0.3 else {"strength": 0.5}
    return asked


class Soak:
    """Clients of one server, and how their jobs ended.

    Args:
        base: the server's address.
        end: the monotonic time at which clients stop.
        models: names of the served models.
        adapters: names of LoRAs that the server has.
        keys: ids of the clients' API keys; one client in turn for each. Empty for a server without keys.
    """

    def __init__(
        self,
        base: str,
        end: float,
        *,
        models: Sequence[str] = ("emoji", "copy"),
        adapters: Sequence[str] = NAMES,
        keys: Sequence[str] = CLIENTS,
    ) -> None:
        self.base, self.end, self.models, self.adapters, self.keys = base, end, models, adapters, keys
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = 0.0

    def run(self, number: int) -> None:
        """One client: ask, watch, fetch, cancel or vanish until the time is over."""
        rng, client = random.Random(number), self.keys[number % len(self.keys)] if self.keys else ""
        headers = {"Authorization": f"Bearer a-secret-of-{client}-0123456789"} if client else {}
        with httpx.Client(base_url=self.base, timeout=120, headers=headers) as http:
            while time.monotonic() < self.end:
                try:
                    self._ask(http, rng)
                except Exception as error:
                    self.problems.append(f"{client}: {type(error).__name__}: {error}")

    def _ask(self, http: httpx.Client, rng: random.Random) -> None:
        answer = http.post("/api/jobs", json=body(rng, self.models, self.adapters))
        if answer.status_code in (429, 503):
            self.statuses[f"refused {answer.status_code}"] += 1
            time.sleep(0.5)
            return
        assert answer.status_code == 202, (answer.status_code, answer.text)
        began, where, kind = time.monotonic(), f"/api/jobs/{answer.json()['id']}", rng.random()
        if kind < 0.15:
            time.sleep(rng.random())
            http.delete(where)
        elif kind < 0.4:
            with http.stream("GET", f"{where}/events") as events:
                for line in events.iter_lines():
                    if kind < 0.3 and line.startswith("event: step"):
                        break  # a client that goes away
        while (job := http.get(where).json())["status"] not in ENDED:
            assert time.monotonic() - began < 180, f"{job['id']} is {job['status']} after 180 s"
            time.sleep(0.1)
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.statuses[job["status"]] += 1
        for image in job["images"]:
            if image["url"] is not None:
                assert http.get(image["url"]).status_code == 200


def ready(base: str) -> bool:
    """Whether the server can generate."""
    try:
        return httpx.get(f"{base}/ready", timeout=30).status_code == 200
    except httpx.ConnectError:
        return False


def resident(pid: int) -> float:
    """MB of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Serve, ask, stop, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--fault-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--server", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        server(options.fault_every, options.server)
    with tempfile.TemporaryDirectory() as name:
        sys.exit(soak(Path(name), options))


def soak(folder: Path, options: argparse.Namespace) -> int:
    """Run the whole test in ``folder``; returns the exit code."""
    memory = prepare(folder)
    flags = ["serve", "emoji", str(folder / "copy"), "--port", "0", "--memory", f"{memory // 1000}KB"]
    flags += ["--keys", str(folder / "keys.txt"), "--lora-dir", str(folder / "loras"), "--warm", "256x256:1,2,4"]
    flags += ["--journal", str(folder / "jobs.db"), "--keep-seconds", "20", "--drain-seconds", str(DRAIN)]
    command = [sys.executable, "-m", "benchmarks.serve_soak", "--fault-every", str(options.fault_every), "--server"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert process.stderr is not None
    threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True).start()
    while not (match := re.search(r"starting on (http://[^\s\"]+)", "".join(lines))):
        assert process.poll() is None, "".join(lines)
        time.sleep(0.1)
    base = match[1]
    while not ready(base):
        assert process.poll() is None, "".join(lines)
        time.sleep(0.5)
    began = time.monotonic()
    test = Soak(base, began + 60 * options.minutes)
    threads = [threading.Thread(target=test.run, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    samples: list[float] = []
    while any(thread.is_alive() for thread in threads):
        samples.append(resident(process.pid))
        if httpx.get(f"{base}/health", timeout=30).status_code != 200:
            test.problems.append(f"/health failed after {time.monotonic() - began:.0f} s")
        minutes, problems = (time.monotonic() - began) / 60, len(test.problems)
        print(f"{minutes:.1f} min, {samples[-1]:.0f} MB, {dict(test.statuses)}, {problems} problems", flush=True)
        time.sleep(options.minutes * 60 / 200)
    # SIGTERM with a full queue.
    key = {"Authorization": f"Bearer a-secret-of-{CLIENTS[0]}-0123456789"}
    rng = random.Random(99)
    for _ in range(10):
        httpx.post(f"{base}/api/jobs", json=body(rng, ["emoji", "copy"]) | {"steps": 20, "n": 3}, headers=key)
    stopped = time.monotonic()
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(DRAIN + 10)
    except subprocess.TimeoutExpired:
        process.kill()
        code = -9
    ending = time.monotonic() - stopped
    quarter = len(samples) // 4
    early, late = max(samples[quarter : 2 * quarter]), max(samples[-quarter:])
    faults = Counter(line.split()[-1] for line in lines if "SOAK injected" in line)
    if late > 1.05 * early:
        test.problems.append(f"memory grew from {early:.0f} to {late:.0f} MB")
    if code != 0 or ending > DRAIN + 2:
        test.problems.append(f"exit code {code} after {ending:.1f} s of {DRAIN:g}")
    memory_mb = [round(sample) for sample in samples[:: max(1, quarter // 3)]]
    report = {
        "minutes": options.minutes, "jobs": dict(test.statuses), "faults": dict(faults),
        "slowest_seconds": round(test.slowest, 1), "memory_mb": memory_mb,
        "drain_seconds": round(ending, 1), "exit_code": code, "problems": test.problems[:20],
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if test.problems:
        (Path.cwd() / "soak.log").write_text("".join(lines))
    return 1 if test.problems else 0


if __name__ == "__main__":
    main()
