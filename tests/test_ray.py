"""Ray: the same images on a cluster as in one process, whatever is killed; and the server as replicas."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import canvax
from canvax.call import Load
from canvax.scale.data import blocks_of

ROOT = Path(__file__).parent.parent
needs_ray = pytest.mark.skipif(not find_spec("ray"), reason='needs Ray: pip install ".[ray]"')


def alone(words: list[str], folder: Path = ROOT) -> Any:
    """The JSON that a process with a cluster of its own, run in ``folder``, prints last.

    It runs in a network namespace with the loopback alone, where there can be one: on a machine with several addresses
    Ray's nodes may not find each other.
    """
    line = " ".join([sys.executable, *words])
    command = ["sh", "-c", line]
    if shutil.which("unshare") and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "-rn", "sh", "-c", f"ip link set lo up; {line}"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'src'}", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    out = "\n" + done.stdout
    return json.loads(out[out.rindex("\n{") :])


@pytest.mark.parametrize(
    ("rows", "actors", "blocks"),
    [(60, 2, 2), (60, 1, 1), (1, 8, 1), (5, 8, 5), (5, 4, 4), (130, 2, 3), (1000, 2, 16), (1_000_000, 8, 15625)],
)
def test_every_actor_has_a_block(rows: int, actors: int, blocks: int) -> None:
    """As many as there are rows for, and no block of more than 64 rows."""
    assert blocks_of(rows, actors) == blocks
    assert blocks >= min(rows, actors)
    assert blocks * 64 >= rows


@needs_ray
@pytest.mark.slow
def test_batch_job_with_kills() -> None:
    """A driver, a node and an actor killed: every id once, and the bytes of one plain process."""
    words = ["--rows", "300", "--steps", "4", "--actor-kills", "2", "--node-kills", "1", "--driver-kills", "1"]
    report = alone(["-m", "benchmarks.ray_batch", *words])
    run = report["runs"]["3"]
    assert run["equal"]
    assert (run["done"] + run["skipped"], run["errors"]) == (300, 0)
    assert {"driver", "actor", "node"} == set(run["killed"])


@needs_ray
@pytest.mark.slow
def test_image_prompts_by_row(tmp_path: Path) -> None:
    """The bytes of one plain process."""
    from PIL import Image

    from tests.support.ip_adapter_files import encoder, ip_adapter
    from tests.support.small_checkpoint import UNET, write_small_checkpoint

    write_small_checkpoint(tmp_path / "base")
    encoder(tmp_path / "image_encoder")
    ip_adapter(tmp_path / "plus.safetensors", "plus", UNET)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    rows = [{"id": "with", "prompt": "a cat", "ip_image": "red.png:0.5"}, {"id": "without", "prompt": "a cat"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"seed": 1, "steps": 2}) + "\n" for row in rows))
    words = ["-m", "canvax", "batch", "rows.jsonl", "-m", "base", "--ip-adapter", "plus.safetensors", "-b", "2"]
    for name, more in (("plain", []), ("ray", ["--ray", "local", "--actors", "1"])):
        report = alone([*words, "-o", name, "--json", "-q", *more], tmp_path)
        assert (report["done"], report["errors"]) == (2, 0)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).glob("*.png")} for name in ("plain", "ray")]
    assert files[0] == files[1]
    assert files[0]["with.png"] != files[0]["without.png"]


@needs_ray
@pytest.mark.slow
def test_serve() -> None:
    """OpenAI's stream, 1 to 3 to 1 replicas without errors, a replica killed under load: who retries is answered."""
    report = alone(["tests/support/ray_serve_process.py"])
    assert report["ready"] == "ready"
    assert report["imagine"] == ["image/png", True]
    assert report["stream"] == [200, 2, True]
    assert (report["up"], report["up_errors"]) == (3, [])
    assert set(report["kill_statuses"]) <= {"200", "500", "503", "0"}
    assert report["off"] <= 2  # replicas generate the same image, in other batches
    assert report["after_statuses"] == [200]
    assert (report["down"], report["down_statuses"]) == (1, [200])


@needs_ray
@pytest.mark.slow
def test_models_stay_where_they_are_in_memory() -> None:
    """Of two replicas that hold one model each, the same one answers for a model each time."""
    (first, second, *again) = alone(["tests/support/ray_serve_process.py", "--models"])["replicas"]
    assert [statuses for statuses, _ in (first, second)] == [[200], [200]]
    assert [len(replicas) for _, replicas in (first, second)] == [1, 1]
    assert first[1] != second[1]
    assert again == [first, second]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("pyarrow"), reason='needs pyarrow: pip install ".[batch]"')
def test_generate_without_a_cluster(emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``map_batches`` calls: all columns come back with images; errors and gaps do not change the types."""
    import numpy as np
    import pyarrow

    from canvax.scale.data import Generate

    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    generate = Generate(batch_size=4, most=4, carried=["topic"], defaults={"num_inference_steps": 2})
    columns = {"id": ["a", "b", "c"], "prompt": ["a cat", "a dog", "a lemon"], "topic": ["x", "y", "z"]}
    columns |= {"seed": [1.0, np.nan, 3.0], "width": [64.0, np.nan, 63.0]}
    batch = {name: np.array(values) for name, values in columns.items()}
    first = generate(batch)
    assert [row["error"] for row in first.to_pylist()] == [None, None, "width=63 is not divisible by 8; use 56 or 64"]
    assert first["topic"].to_pylist() == ["x", "y", "z"]
    second = generate(pyarrow.table({name: list(reversed(values)) for name, values in columns.items()}))
    rows = {row["id"]: row for row in second.to_pylist()}
    assert {row["id"]: row["image"] for row in first.to_pylist()} == {name: row["image"] for name, row in rows.items()}
    assert json.loads(rows["a"]["metadata"])["seed"] == 1
    good = generate(pyarrow.table({name: values[:1] for name, values in columns.items()}))
    assert [good.schema.field(name).type for name in ("image", "error", "seed", "width", "metadata")] == [
        first.schema.field(name).type for name in ("image", "error", "seed", "width", "metadata")
    ]


@pytest.mark.skipif(not find_spec("starlette"), reason='needs the server: pip install ".[serve]"')
def test_arguments_of_serve() -> None:
    """Texts, as ``serve run`` gives them, and plain values."""
    from canvax.scale.serve import ServeArgs

    assert ServeArgs.of({"model": "a,b", "most": "3", "imagine": "true", "gpus": 1}) == ServeArgs(
        model="a,b", most=3, imagine=True, gpus=1.0
    )
    given = {"quantize": "int8", "controlnet": "a,b", "offload": "true", "vae": "", "revision": "v2"}
    loading = Load(quantize="int8", controlnet=["a", "b"], offload=True, revision="v2", progress=False)
    assert ServeArgs.of(given).loading == loading
    assert ServeArgs.of({"offload": "layers"}).loading.offload == "layers"


def test_a_dead_engine_fails_its_health_check() -> None:
    """Whether its thread ended or makes no progress; Serve replaces the replica then."""
    from types import SimpleNamespace

    from canvax.errors import CanvaxError
    from canvax.scale.serve import Images
    from canvax.server.jobs import State

    def replica(state: State) -> Any:
        return SimpleNamespace(_engine=SimpleNamespace(state=state, failure=None))

    for state in State:
        if state is State.FAILED:
            with pytest.raises(CanvaxError):
                Images.check_health(replica(state))
        else:
            Images.check_health(replica(state))


@pytest.mark.skipif(not find_spec("starlette"), reason='needs the server: pip install ".[serve]"')
@pytest.mark.parametrize(
    ("given", "held"),
    [({"tpus": "4"}, {"num_gpus": 0.0, "resources": {"TPU": 4.0}}), ({"gpus": "1"}, {"num_gpus": 1.0})],
)
def test_what_a_replica_holds(given: dict[str, str], held: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray knows chips by the name TPU alone, in capitals. A stand-in for Ray keeps what it was asked for."""
    from canvax.scale.serve import ServeArgs, app

    asked: dict[str, Any] = {}

    def deployment(**settings: Any) -> Any:
        asked.update(settings)
        return lambda replica: SimpleNamespace(bind=lambda wanted: wanted)

    ray: Any = ModuleType("ray")
    ray.serve = SimpleNamespace(
        deployment=deployment, multiplexed=lambda **_: lambda hold: hold, ingress=lambda: lambda replica: replica
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert app(given) == ServeArgs.of(given)
    assert asked["ray_actor_options"] == {"num_cpus": ServeArgs().cpus, **held}
    assert asked["max_queued_requests"] > 0  # without a limit nobody is refused, and all wait in vain


def test_imagine() -> None:
    """The route of the samples of KubeRay and GKE, behind the same guard and over the same engine as the others."""
    import httpx2 as httpx

    from canvax.scale.serve import imagine
    from canvax.server.app import Settings, create_app
    from canvax.server.jobs import State
    from canvax.server.metrics import Metrics
    from tests.support.server_stub import StubEngine
    from tests.support.serving import served

    app = create_app(StubEngine(), Settings(), state=lambda: State.READY, metrics=Metrics(), more=imagine)
    with served(app) as base, httpx.Client(base_url=base) as http:
        image = http.get("/imagine", params={"prompt": "a red apple", "img_size": 64})
        assert (image.status_code, image.headers["content-type"]) == (200, "image/png")
        assert image.content.startswith(b"\x89PNG")
        for wrong, said in (({}, "there is none"), ({"prompt": "x", "img_size": "big"}, "not a number of pixels")):
            refused = http.get("/imagine", params=wrong)
            assert refused.status_code == 400
            assert said in refused.text
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            assert http.get("/imagine?prompt=x", headers={"Sec-Fetch-Site": site}).status_code == status
        assert http.get("/imagine?prompt=x", headers={"Host": "evil.example"}).status_code in (403, 421)


@pytest.mark.parametrize(
    ("wanted", "status"), [({}, 200), ({"replicas": 1, "most": 9}, 200), ({"replicas": 2}, 404), ({"most": 2}, 404)]
)
def test_metrics_of_several_replicas(
    wanted: dict[str, int], status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scrape would reach another replica each time. Each replica writes the server's log."""
    import httpx2 as httpx

    from canvax.scale.serve import Images, ServeArgs
    from canvax.server.jobs import State
    from tests.support.server_stub import StubEngine
    from tests.support.serving import served

    class Replica(Images):
        def __del__(self) -> None:  # type: ignore[override]
            pass

    engine = StubEngine()
    engine.start, engine.state, engine.failure = lambda: None, State.READY, None  # type: ignore[attr-defined]
    monkeypatch.setattr("canvax.scale.serve.ImageEngine", lambda *_: engine)
    log = logging.getLogger("canvax.server")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    level = log.level
    replica = Replica.__new__(Replica)
    try:
        asyncio.run(replica.__init__(ServeArgs(**wanted)))  # type: ignore[misc]
        with served(replica.__serve_build_asgi_app__()) as base, httpx.Client(base_url=base) as http:
            assert http.get("/metrics").status_code == status
    finally:
        log.setLevel(level)
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert (line["path"], line["status"]) == ("/metrics", status)


def test_actors_load_as_the_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from canvax.cli import main

    given: dict[str, Any] = {}

    def on_ray(_: Any, arguments: dict[str, Any], **__: Any) -> Any:
        given.update(arguments)
        return lambda rows, count: iter(())

    monkeypatch.setattr("canvax.scale.data.ray_module", lambda: None)
    monkeypatch.setattr("canvax.scale.data.on_ray", on_ray)
    (tmp_path / "rows.txt").write_text("a cat\n")
    words = ["batch", str(tmp_path / "rows.txt"), "-o", str(tmp_path / "out"), "--ray", "--dtype", "float32"]
    for flags in ([], ["--offload"]):
        assert main([*words, *flags]) == 0
        assert (given["load"]["dtype"], given["load"]["offload"]) == ("float32", bool(flags))


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from canvax.cli import main

    (tmp_path / "rows.txt").write_text("a cat\n")
    assert main(["batch", str(tmp_path / "rows.txt"), "-o", str(tmp_path / "out"), "--ray"]) == 2
    assert 'pip install ".[ray]"' in capsys.readouterr().err
