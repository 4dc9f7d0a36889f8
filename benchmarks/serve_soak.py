"""``canvax serve`` for ten minutes while things go wrong: does every accepted job end once, does memory stay flat?

    python -m benchmarks.serve_soak                  # 10 minutes
    python -m benchmarks.serve_soak --minutes 1

Two models of which ``--memory`` holds one, two sizes, 20 clients with four API keys, LoRAs by request, previews, and
clients that cancel or vanish. One fault of the engine is injected per minute, each time in another method. After a
quarter of the time no file is made for 30 s, and jobs are sent until they are refused. Twice the process gets SIGKILL
and is started again; clients repeat what was not answered, by its Idempotency-Key. At the end it gets SIGTERM while
jobs are queued. With an empty cache of programs the first start compiles for minutes, which are not counted.

Exit code 1 if a job is lost, does not end or ends twice, a status is unexpected, memory grows by more than 5 % between
the second and the last quarter of a process's life or while files hang, nothing is refused then, or the process
outlives its drain time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from PIL import Image

FAULTS = ("Group.step", "Group.seat", "Group.decode", "Group.begin")
DRAIN = 20.0
ENDED = ("done", "failed", "cancelled")
SIZES = ((128, 128), (96, 64))
WARM = ("128x128:1,2,4", "96x64:1")
QUEUE = 150
"""Images that may wait."""

HANGS, LONGEST_HANG = 30.0, 120.0
PATIENCE = 300.0
"""Seconds in which a job ends and a request is answered, whatever happens meanwhile."""

START = 1200.0
"""Seconds in which a process begins, with an empty cache of programs."""

GROWTH, SLACK = 1.05, 30.0
"""Of a process's memory, as a part and in MB."""


def server(every: float, hang: Path, arguments: list[str]) -> None:
    """``canvax serve`` in this process, with a fault every so many seconds, and no files made while ``hang`` exists."""
    from canvax.__main__ import main
    from canvax.server import writing
    from canvax.server.engine import ImageEngine
    from canvax.server.group import Group

    armed, begin, begun = list[str](), ImageEngine._begin, threading.Event()
    ImageEngine._begin = lambda engine: (begin(engine), begun.set())[0]  # type: ignore[method-assign]

    def failing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **keywords: Any) -> Any:
            if armed and armed[0] == name:
                armed.clear()
                logging.getLogger("canvax.server").error("SOAK injected %s", name)
                raise RuntimeError(f"injected into {name}")
            return method(*positional, **keywords)

        return call

    for name in FAULTS:
        attribute = name.partition(".")[2]
        setattr(Group, attribute, failing(name, getattr(Group, attribute)))
    make = writing.image_file

    def hanging(*positional: Any, **keywords: Any) -> bytes:
        end = time.monotonic() + LONGEST_HANG
        while hang.exists() and time.monotonic() < end:
            time.sleep(0.1)
        return make(*positional, **keywords)

    writing.image_file = hanging

    def arm() -> None:
        number = 0
        begun.wait()
        while True:
            time.sleep(every)
            armed[:] = [FAULTS[number % len(FAULTS)]]
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


def body(
    rng: random.Random,
    models: Sequence[str],
    adapters: Sequence[str] = NAMES,
    sizes: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """A random job, of the model's size where there are no ``sizes``."""
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
    if sizes:
        asked |= zip(("width", "height"), rng.choice(sizes), strict=True)
    if adapters and rng.random() < 0.4:
        names = rng.sample(adapters, rng.randrange(1, 3))
        asked["adapters"] = {name: rng.choice((0.5, 1.0)) for name in names}
    if rng.random() < 0.3:
        file = io.BytesIO()
        Image.new("RGB", (rng.randrange(32, 96), 64), (rng.randrange(256), 128, 64)).save(file, "PNG")
        asked["image"] = base64.b64encode(file.getvalue()).decode()
        # Tiles have the model's size.
        asked |= {"n": 1, "upscale": 1.5} if not sizes and rng.random() < 0.3 else {"strength": 0.5}
    return asked


class Soak:
    """Clients of one server, and how their jobs ended.

    Args:
        base: the server's address.
        end: the monotonic time at which clients stop.
        models: names of the served models.
        adapters: names of LoRAs that the server has.
        keys: ids of the clients' API keys; one client in turn for each. Empty for a server without keys.
        sizes: of images; empty for the model's.
        killed: whether the server may be killed: clients wait for the next one, and repeat what was not answered.
    """

    def __init__(
        self,
        base: str,
        end: float,
        *,
        models: Sequence[str] = ("emoji", "copy"),
        adapters: Sequence[str] = NAMES,
        keys: Sequence[str] = CLIENTS,
        sizes: Sequence[tuple[int, int]] = (),
        killed: bool = False,
    ) -> None:
        self.base, self.end, self.killed = base, end, killed
        self.models, self.adapters, self.keys, self.sizes = models, adapters, keys, sizes
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = 0.0

    def run(self, number: int) -> None:
        """One client: ask, watch, fetch, cancel or vanish until the time is over."""
        rng = random.Random(number)
        with self.client(number) as http:
            while time.monotonic() < self.end:
                try:
                    self._ask(http, rng)
                except Exception as error:
                    self.problems.append(f"client {number}: {type(error).__name__}: {error}")

    def flood(self, until: float) -> None:
        """A client that sends jobs without waiting for them, until they are refused, and so on until a time."""
        rng, jobs = random.Random(-1), list[str]()
        with self.client(0) as http:
            while time.monotonic() < until:
                asked: dict[str, Any] = {"prompt": "a red apple", "seed": rng.randrange(2**32), "n": 8, "steps": 1}
                asked |= zip(("width", "height"), self.sizes[0], strict=True)
                answer = self._sent(http, "POST", "/api/jobs", json=asked)
                if answer.status_code == 202:
                    jobs.append(answer.json()["id"])
                    self.statuses["flood"] += 1
                else:
                    self.statuses[f"flood refused {answer.status_code}"] += 1
                    time.sleep(0.2)
            for job in jobs:
                try:
                    self._ended(http, job)
                except Exception as error:
                    self.problems.append(f"flood: {type(error).__name__}: {error}")

    def client(self, number: int) -> httpx.Client:
        """With the key of a client."""
        name = self.keys[number % len(self.keys)] if self.keys else ""
        headers = {"Authorization": f"Bearer a-secret-of-{name}-0123456789"} if name else {}
        return httpx.Client(base_url=self.base, timeout=120, headers=headers)

    def _sent(self, http: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to a request, which is repeated while there is no server that has begun."""
        headers, end = {"Idempotency-Key": uuid.uuid4().hex}, time.monotonic() + PATIENCE
        while True:
            try:
                answer = http.request(method, path, headers=headers, **options)
                starting = answer.status_code == 404 and not ready(self.base)  # the journal is still to be read
                starting |= answer.status_code == 503 and '"starting"' in answer.text
                if not starting or not self.killed or time.monotonic() > end:
                    return answer
            except httpx.TransportError:
                if not self.killed or time.monotonic() > end:
                    raise
            time.sleep(0.5)

    def _ask(self, http: httpx.Client, rng: random.Random) -> None:
        answer = self._sent(http, "POST", "/api/jobs", json=body(rng, self.models, self.adapters, self.sizes))
        if answer.status_code in (429, 503):
            self.statuses[f"refused {answer.status_code}"] += 1
            time.sleep(0.5)
            return
        assert answer.status_code == 202, (answer.status_code, answer.text)
        name, kind = answer.json()["id"], rng.random()
        if kind < 0.15:
            time.sleep(rng.random())
            answer = self._sent(http, "DELETE", f"/api/jobs/{name}")
            if self.killed and answer.status_code == 404:
                return  # the server that deleted it was killed before it answered
            if (status := answer.json().get("status")) in ENDED:
                self.statuses[status] += 1
                return  # a second DELETE, or one of a job that was over, has deleted it
        elif kind < 0.4:
            try:
                with http.stream("GET", f"/api/jobs/{name}/events") as events:
                    for line in events.iter_lines():
                        if kind < 0.3 and line.startswith("event: step"):
                            break  # a client that goes away
            except httpx.TransportError:
                if not self.killed:
                    raise
        self._ended(http, name)

    def _ended(self, http: httpx.Client, name: str) -> None:
        """Wait for the end of a job, and fetch what it has."""
        began, where = time.monotonic(), f"/api/jobs/{name}"
        while True:
            answer = self._sent(http, "GET", where)
            if answer.status_code == 404 and self.killed:  # the server became ready in between
                answer = self._sent(http, "GET", where)
            assert answer.status_code == 200, f"{name} is lost: {answer.status_code}"
            job = answer.json()
            if job["status"] in ENDED:
                break
            assert time.monotonic() - began < PATIENCE, f"{name} is {job['status']} after {PATIENCE:g} s"
            time.sleep(0.2)
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.statuses[job["status"]] += 1
        fetched = [self._sent(http, "GET", image["url"]) for image in job["images"] if image["url"] is not None]
        assert {image.status_code for image in fetched} <= {200}, name
        assert job["status"] != "done" or len(fetched) == len(job["images"]), f"{name} is done without all its images"


def ready(base: str) -> bool:
    """Whether the server can generate."""
    try:
        return httpx.get(f"{base}/ready", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def resident(pid: int) -> float:
    """MB of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Life:
    """A process that serves, from its start to its end.

    Attributes:
        lines: of its stderr.
        begun: whether it was ready.
        samples: seconds since the start of the test, and MB, from then on.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines, self.begun, self.samples = list[str](), False, list[tuple[float, float]]()
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()

    def wait_until_ready(self, base: str) -> None:
        end = time.monotonic() + START
        while not ready(base):
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit("the server does not start:\n" + "".join(self.lines[-50:]))
            time.sleep(0.5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)

    def growth(self) -> str | None:
        """How memory grew between the second and the last quarter, if it did."""
        quarter, memory = len(self.samples) // 4, [size for _, size in self.samples]
        early, late = max(memory[quarter : 2 * quarter], default=0.0), max(memory[-quarter:], default=0.0)
        if quarter > 1 and late > GROWTH * early + SLACK:
            return f"memory grew from {early:.0f} to {late:.0f} MB"
        return None


@contextmanager
def stopping(lives: list[Life]) -> Iterator[None]:
    """The last process does not outlive this."""
    try:
        yield
    finally:
        lives[-1].kill()


def main() -> None:
    """Serve, ask, kill, stop, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--hang", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        server(options.fault_every, options.hang, options.server)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server goes as well
    with tempfile.TemporaryDirectory() as name:
        sys.exit(soak(Path(name), options))


def soak(folder: Path, options: argparse.Namespace) -> int:
    """Run the whole test in ``folder``; returns the exit code."""
    memory, hang, seconds = prepare(folder), folder / "hang", 60 * options.minutes
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base, every = f"http://127.0.0.1:{port}", min(options.fault_every, seconds / 4)
    flags = ["serve", "emoji", str(folder / "copy"), "--port", str(port), "--memory", f"{memory // 1000}KB"]
    flags += ["--keys", str(folder / "keys.txt"), "--lora-dir", str(folder / "loras"), "--warm", *WARM]
    flags += ["--journal", str(folder / "jobs.db"), "--keep-seconds", "60", "--drain-seconds", str(DRAIN)]
    flags += ["--queue-images", str(QUEUE), "--output", str(folder / "out")]
    command = [sys.executable, "-m", "benchmarks.serve_soak", "--fault-every", str(every), "--hang", str(hang)]
    lives = [Life([*command, "--server", *flags])]
    with stopping(lives):
        lives[0].wait_until_ready(base)
        began = time.monotonic()
        test = Soak(base, began + seconds, sizes=SIZES, killed=True)
        threads = [threading.Thread(target=test.run, args=(number,)) for number in range(options.clients)]
        for thread in threads:
            thread.start()
        hangs = seconds / 4, seconds / 4 + min(HANGS, seconds / 8)
        reported = 0
        kills, flooded = [seconds * 0.45, seconds * 0.75], False
        while any(thread.is_alive() for thread in threads):
            now, life = time.monotonic() - began, lives[-1]
            if kills and now > kills[0]:
                life.kill()
                lives.append(Life([*command, "--server", *flags]))
                kills.pop(0)
                continue
            if hangs[0] < now < hangs[1] and not flooded:
                hang.touch()
                flooded = True
                threads.append(threading.Thread(target=test.flood, args=(began + hangs[1],)))
                threads[-1].start()
            if now > hangs[1]:
                hang.unlink(missing_ok=True)
            if life.begun or ready(base):  # loading and compiling take more memory for a while
                life.begun = True
                life.samples.append((now, resident(life.process.pid)))
            try:
                if (code := httpx.get(f"{base}/health", timeout=30).status_code) != 200:
                    test.problems.append(f"/health is {code} after {now:.0f} s")
            except httpx.TransportError as error:
                if ready(base):
                    test.problems.append(f"/health: {type(error).__name__} after {now:.0f} s")
            if life.process.poll() is not None:
                test.problems.append(f"the process ended by itself after {now:.0f} s: {life.process.returncode}")
                break
            counts, problems = dict(test.statuses), len(test.problems)
            line = f"{now:.0f} s, {resident(life.process.pid):.0f} MB, {counts}, {problems} problems"
            print(line, *test.problems[reported:], flush=True)
            reported = problems
            time.sleep(seconds / 300)
        lives[-1].wait_until_ready(base)
        left = [line for line in metrics(test) if line.startswith(("canvax_queue_images", "canvax_undecoded_images"))]
        if any(float(line.split()[-1]) for line in left):
            test.problems.append(f"all jobs are over, but {left}")
        code, ending = stopped(test, lives[-1])
    if code != 0 or ending > DRAIN + 2:
        test.problems.append(f"exit code {code} after {ending:.1f} s of {DRAIN:g}")
    test.problems += [f"life {i}: {grown}" for i, life in enumerate(lives, 1) if (grown := life.growth())]
    test.problems += memory_while_hanging(lives[0], hangs)
    if not test.statuses["flood refused 429"]:
        test.problems.append("nothing was refused while no file was made")
    test.problems += [f"{name} ended as {' and '.join(ends)}" for name, ends in twice(lives).items()]
    faults = Counter(name for life in lives for name in re.findall(r"SOAK injected ([\w.]+)", "".join(life.lines)))
    report = {
        "minutes": options.minutes, "jobs": dict(test.statuses), "faults": dict(faults),
        "slowest_seconds": round(test.slowest, 1),
        "memory_mb": [[round(size) for _, size in life.samples[:: 1 + len(life.samples) // 10]] for life in lives],
        "drain_seconds": round(ending, 1), "exit_code": code, "problems": test.problems[:20],
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if test.problems:
        (Path.cwd() / "soak.log").write_text("".join(line for life in lives for line in life.lines))
    return 1 if test.problems else 0


def metrics(test: Soak) -> list[str]:
    """The lines of /metrics."""
    with test.client(0) as http:
        return http.get("/metrics").text.splitlines()


def stopped(test: Soak, life: Life) -> tuple[int, float]:
    """The exit code and the seconds of a SIGTERM with a full queue."""
    rng = random.Random(99)
    with test.client(0) as http:
        for _ in range(10):
            http.post("/api/jobs", json=body(rng, test.models, test.adapters, SIZES[:1]) | {"steps": 20})
    began = time.monotonic()
    life.process.send_signal(signal.SIGTERM)
    try:
        code = life.process.wait(DRAIN + 10)
    except subprocess.TimeoutExpired:
        code = -9
    return code, time.monotonic() - began


def memory_while_hanging(life: Life, hangs: tuple[float, float]) -> Iterator[str]:
    """How memory grew while no files were made, if it did."""
    before = max((size for now, size in life.samples if now <= hangs[0]), default=0.0)
    while_ = max((size for now, size in life.samples if hangs[0] < now <= hangs[1]), default=0.0)
    if before and while_ > GROWTH * before + SLACK:
        yield f"memory grew from {before:.0f} to {while_:.0f} MB while no files were made"


def twice(lives: Sequence[Life]) -> dict[str, list[str]]:
    """The jobs that ended several times, by the logs of all processes."""
    ends: dict[str, list[str]] = defaultdict(list)
    for line in (line for life in lives for line in life.lines if line.startswith('{"time"')):
        try:
            entry = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if entry.get("outcome") in ENDED:
            ends[entry["job"]].append(entry["outcome"])
    return {name: outcomes for name, outcomes in ends.items() if len(outcomes) > 1}


if __name__ == "__main__":
    main()
