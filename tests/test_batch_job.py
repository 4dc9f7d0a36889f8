"""A file of prompts to a folder of images: the same ones whatever happens on the way, no row lost or made twice."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.cli import main
from canvax.compile.monitor import counting
from canvax.errors import CanvaxError, InputError, OutOfMemoryError
from canvax.images.formats import GeneratedImage
from canvax.images.metadata import read_metadata
from canvax.scale import work
from canvax.scale.batch import Plan, run, windows
from canvax.scale.output import Output, _locked, listed
from canvax.scale.rows import Row, digest_of, read_rows, seed_of, settings_of
from canvax.scale.work import Item, Made, Worker, image_file
from tests.support.refusals import refused

PROMPTS = ("a red apple", "a dog face", "a lemon", "a house", "a clock", "a fire engine")
SAMPLERS = ("Euler", "DPM++ 2M", "Euler a")


def some_rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows that differ in everything that a batch may differ in."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        row = {"id": f"row-{i}", "prompt": PROMPTS[i % 6], "steps": 2 + i % 3, "sampler": SAMPLERS[i % 3]}
        rows.append(row | {"guidance_scale": 2 + i % 4} | ({"seed": i} if i % 2 else {}))
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def worker(emoji: canvax.Pipeline) -> Worker:
    return Worker(emoji, batch=4)


class Stopped(Exception):
    """A kill, in a test."""


def job(
    file: Path, folder: Path, worker: Worker, *, stop_after: int | None = None, share: Any = (0, 1), **keywords: Any
) -> list[dict]:
    """Run a file into a folder, perhaps not to its end; returns the last line of each row."""
    plan = Plan.read(file, {}, share=share)
    output = Output(folder, {"model": "emoji"}, **keywords)

    def stopping(rows: Iterator[Row]) -> Iterator[tuple[int, list[Made]]]:
        for batches, one in enumerate(worker.run(rows)):
            if batches == stop_after:
                raise Stopped
            yield one

    generate: Callable[..., Any] = windows(worker.run) if stop_after is None else lambda rows, _: stopping(rows)
    done = False
    try:
        for _ in run(plan, plan.left(output.known), output, generate):
            pass
        done = True
    except Stopped:
        pass
    finally:
        output.close(done=done)
    return list(output.known.values())


def files_of(folder: Path) -> dict[str, bytes]:
    lines = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
    return {line["id"]: (folder / line["file"]).read_bytes() for line in lines if line["status"] == "done"}


def test_the_seed_of_a_row_without_one() -> None:
    """By every version, or a file that is half done would get other images: 6 bytes of SHA-256 of seed and id."""
    assert seed_of("a") == int.from_bytes(hashlib.sha256(b"0 a").digest()[:6], "big")
    assert settings_of(Row("7", {"prompt": "x"}), {}, seed=5)["seed"] == seed_of("7", 5)
    assert seed_of("7", 5) == int.from_bytes(hashlib.sha256(b"5 7").digest()[:6], "big")


def test_further_references_are_for_models_that_edit(worker: Worker, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
    both = {"image": str(tmp_path / "a.png"), "reference": str(tmp_path / "b.png")}
    rows = [{"id": "x", "prompt": "a cat", **both}, {"id": "y", "prompt": "a cat", "strength": 0.5, **both}]
    for line in job(write(tmp_path / "rows.jsonl", rows), tmp_path / "out", worker):
        assert (line["status"], line["error"].partition("=")[0]) == ("error", "reference")


@pytest.fixture(scope="module")
def whole(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The images of ``some_rows``, from one run in the order of the file."""
    folder = tmp_path_factory.mktemp("whole")
    job(write(folder / "rows.jsonl", some_rows()), folder / "out", worker)
    return files_of(folder / "out")


@pytest.mark.slow
def test_same_bits_in_any_company(worker: Worker, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Another order, other rows beside them, a smaller remainder: the same bytes; and they are the pipeline's image."""
    rows = [row for row in some_rows(16) if row["id"] not in ("row-1", "row-6", "row-8")]
    random.Random(3).shuffle(rows)
    job(write(tmp_path / "rows.jsonl", rows), tmp_path / "out", worker)
    found = files_of(tmp_path / "out")
    assert sorted(found) == sorted(row["id"] for row in rows)
    assert all(found[name] == whole[name] for name in found.keys() & whole.keys())


def test_shares_of_a_file(worker: Worker, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Three jobs in one folder, at the same time or not: each row once, the same bytes, each with a list of its own."""
    file, out = write(tmp_path / "rows.jsonl", some_rows()), tmp_path / "out"
    for number in (2, 0, 1):
        job(file, out, worker, share=(number, 3), process=number, processes=3)
    assert sorted(path.name for path in out.glob("manifest*")) == [
        "manifest-0001.jsonl", "manifest-0002.jsonl", "manifest.jsonl"
    ]  # fmt: skip
    lines = [line for path in out.glob("manifest*") for line in map(json.loads, path.read_text().splitlines())]
    assert sorted(line["id"] for line in lines) == sorted(whole)
    assert {name: (out / line["file"]).read_bytes() for name, line in listed(out).items()} == whole


def test_image_of_the_pipeline(emoji: canvax.Pipeline, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The seed of the row, or that of its id; its metadata generates it again."""
    for i in (3, 4):
        row = some_rows()[i]
        seed = row.get("seed", seed_of(row["id"]))
        alone = emoji([row["prompt"]] * 4, num_inference_steps=row["steps"], sampler=row["sampler"],
                      guidance_scale=row["guidance_scale"], seed=[seed] * 4, progress=False)  # fmt: skip
        data = whole[row["id"]]
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), np.asarray(alone.images[0]))
        (tmp_path / "one.png").write_bytes(data)
        assert read_metadata(tmp_path / "one.png") == {**alone.metadata[0], "id": row["id"]}


@pytest.mark.slow
def test_nothing_compiles_twice(worker: Worker, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Rows that differ in prompt, seed, steps, sampler and guidance share the programs; the last, smaller batch too."""
    del whole
    with counting() as counts:
        lines = job(write(tmp_path / "rows.jsonl", some_rows(7)), tmp_path / "out", worker)
    assert counts.compilations == 0
    assert len(lines) == 7


needs_pyarrow = pytest.mark.skipif(not find_spec("pyarrow"), reason='needs pyarrow: pip install ".[batch]"')


ODD = [
    {"prompt": "a cat", "guidance_interval": [0.0, 0.5]},
    {"prompt": "a dog", "guidance_interval": [0.5, 1.0]},
    {"prompt": "a (cat:1.3)", "prompt_syntax": "a1111"},
    {"prompt": "a [cat:dog:1]", "prompt_syntax": "a1111"},
    {"prompt": "a [lemon:pear:2]", "prompt_syntax": "a1111", "steps": 4},
    {"prompt": "a cat AND a dog", "prompt_syntax": "a1111"},
    {"prompt": "a cat", "variation_seed": 3, "variation_strength": 0.4},
    {"prompt": "a dog", "variation_seed": 9, "variation_strength": 0.6, "noise": "torch"},
    {"prompt": "a cat", "seed_size": [32, 32]},
    {"prompt": "a dog", "guidance_steps": [3, 1, 2], "guidance_scale": 1},
    {"prompt": "a dog", "guidance_scale": 1},
    {"prompt": "a cat", "reuse": 2},
    {"prompt": "a cat", "quality": "fast", "steps": 20},
    {"prompt": "a cat", "hires": 1.5, "hires_steps": 2},
    {"prompt": "a cat", "image": "in.png", "strength": 0.6},
    {"prompt": "a dog", "image": "in.png", "strength": 0.7, "image_encoding": "sample"},
    {"prompt": "a dog", "image": "in.png", "noise": "torch"},
    {"prompt": "a dog", "image": "in.png", "noise": "torch", "variation_seed": 9, "variation_strength": 0.6},
    {"prompt": "a dog", "eta": 0.5, "sampler": "DDIM", "sigmas": "karras", "clip_skip": 1},
    {"prompt": "a dog", "pag_scale": 2.0},
    {"prompt": "a pear", "pag_scale": 3.0},
    {"prompt": "a dog", "negative_prompt": "a cat", "guidance_rescale": 0.5},
]


def test_what_a_safety_checker_refuses_is_black(emoji: canvax.Pipeline) -> None:
    class Refuses:
        def __call__(self, result: canvax.Result) -> canvax.Result:
            told = [{**one, "nsfw": True} for one in result.metadata]
            return dataclasses.replace(result, images=[Image.new("RGB", (64, 64)) for _ in told], metadata=told)

    checked = canvax.Pipeline(emoji.model, emoji.programs, emoji.params, Refuses())  # type: ignore[arg-type]
    rows = [Row(one["id"], one) for one in some_rows(3)]
    for _, some in Worker(checked, batch=4).run(rows):
        for one in some:
            assert one.image is not None
            assert not np.asarray(one.image).any()
            assert one.record is not None
            assert one.record["nsfw"] is True


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", [OutOfMemoryError, CanvaxError])
def test_processes_stay_together(
    kind: type[CanvaxError], failing: int, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two processes, threads here, fails; both then generate the same batches, for the sake of collectives."""
    both, values = threading.Barrier(2, timeout=20), [np.zeros(0)] * 2
    ran: list[list[int]] = [[], []]
    results: list[list[Made]] = [[], []]

    def process() -> int:
        return int(threading.current_thread().name)

    def any_of(value: Any) -> Any:
        values[process()] = np.asarray(value)
        both.wait()
        result = np.stack(values).any(axis=0)
        both.wait()
        return result

    def generate(*_: Any, **__: Any) -> Any:
        if process() == failing and (kind is OutOfMemoryError or len(ran[failing]) < 3):
            raise kind("failed")
        return SimpleNamespace(compilations=0, indices=(), images=(), metadata=())

    def run(worker: Worker) -> None:
        worker._spread, worker._leads = True, process() == 0
        at_once = worker._at_once
        worker._at_once = lambda items: (ran[process()].append(len(items)), at_once(items))[1]
        results[process()] += [made for _, some in worker.run(rows) for made in some]

    monkeypatch.setattr(work.multihost, "any_process", any_of)
    monkeypatch.setattr(work, "text_to_image", generate)
    rows = [Row(str(i), {"prompt": "a cat", "width": 128, "height": 128}) for i in range(6)]
    threads = [threading.Thread(target=run, args=[Worker(emoji, batch=4)], name=str(i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ran[0] == ran[1] == ([4] if kind is OutOfMemoryError else [4, 1, 1, 1, 1, 2])
    wrong = rows if kind is OutOfMemoryError else rows[:1]
    assert [made.row.id for made in results[0] if made.error] == [row.id for row in wrong]
    assert not results[1]


def test_rows_that_are_guided_in_part_share_a_batch_with_their_like_alone(worker: Worker) -> None:
    """A batch goes from guided steps to others at once, so that its rows have one table."""
    row = {"prompt": "a cat", "steps": 4, "guidance_interval": [0.0, 0.5]}

    def key(**changes: Any) -> Any:
        item = worker.check(Row("a", row | changes))
        assert isinstance(item, Item)
        return item.key

    assert key(prompt="a dog", seed=3) == key()
    assert len({key(), key(steps=3), key(guidance_scale=5.0)}) == 3


@pytest.mark.weekly
def test_odd_rows(emoji: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a row may say means in a mixed job what it means to the pipeline."""
    monkeypatch.chdir(tmp_path)
    emoji("a lemon", seed=1, num_inference_steps=4, progress=False).images[0].save("in.png")
    rows = [{"id": f"r{i}", "seed": i, "steps": 3, **row} for i, row in enumerate(ODD)]
    rows += [{**row, "id": f"{row['id']}b", "seed": row["seed"] + 50} for row in rows]  # and in company of its like
    made = {one.row.id: one for _, some in Worker(emoji, batch=2).run(Row(r["id"], r) for r in rows) for one in some}
    for row in rows:
        one = made[row["id"]]
        assert not one.error, (row, one.error)
        want = emoji(**{name: value for name, value in row.items() if name != "id"}, progress=False).images[0]
        off = np.abs(np.asarray(want).astype(int) - np.asarray(one.image))
        assert off.max() <= 2, (row, off.max())


@pytest.mark.parametrize("kind", ["jsonl", "csv", pytest.param("parquet", marks=needs_pyarrow)])
def test_kinds_of_files(kind: str, tmp_path: Path) -> None:
    """The same settings from each; what a table leaves out is not there, and whole numbers are whole."""
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text('{"id": "a", "prompt": "1", "steps": 4, "cfg": null}\n\n{"prompt": "b, c", "cfg": 2.5}\n')
    elif kind == "csv":
        path.write_text("id;prompt;steps\na;1;4\n")
        with pytest.raises(InputError, match="part columns with commas, not with ';'"):
            list(read_rows(path))
        path.write_text('id,prompt,steps,cfg\na,1,4,\n,"b, c",,2.5\n')
    else:
        import pyarrow
        from pyarrow import parquet

        table = {"id": ["a", None], "prompt": ["1", "b, c"], "steps": [4.0, float("nan")], "cfg": [None, 2.5]}
        parquet.write_table(pyarrow.table(table), path)
    limit = csv.field_size_limit()
    first, second = read_rows(path)
    assert csv.field_size_limit() == limit  # a switch of the whole process
    assert (first.id, second.id) == ("a", "000003" if kind == "jsonl" else "000002")
    assert settings_of(first, {"sampler": "Euler"}) == {
        "prompt": "1", "num_inference_steps": 4, "sampler": "Euler", "seed": seed_of("a"),
    }  # fmt: skip
    assert settings_of(second, {})["guidance_scale"] == 2.5
    with pytest.raises(canvax.InputError, match=r"there is no prompt: .*is it in 'text'"):
        settings_of(Row("a", {"text": "a cat"}), {})


def test_prompts_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("# mine\na cat\n\n  a dog, 1.5  \n")
    lines = '{"prompt": "a"}', '[{"prompt": "a"}]', '--prompt "a cat"', "[cat:dog:3]", "{cat", "Steps: 20, Seed: 1"
    (tmp_path / "odd.txt").write_text("\n".join(lines))
    odd = [row.fault for row in read_rows(tmp_path / "odd.txt")]
    said = [fault and fault.partition(" is ")[2][:12] for fault in odd]
    assert said == ["a JSON objec", "not a prompt", "not a prompt", None, None, "not a prompt"]
    assert [(row.id, dict(row.values)) for row in read_rows(tmp_path / "p.txt")] == [
        ("000002", {"prompt": "a cat"}), ("000004", {"prompt": "a dog, 1.5"}),
    ]  # fmt: skip


BAD = {
    "not JSON": '{"prompt": ',
    "is not a JSON object": "[1]",
    "width=67": '{"prompt": "a", "width": 67}',
    "not finite": '{"prompt": "a", "steps": 2, "sampler": "Euler a", "sampler_settings": {"s_noise": 3e38}}',
}
"""Of each kind; ``golden/errors.txt`` has other rows."""


def test_bad_rows_become_errors(worker: Worker, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Each with its sentence, in one job with a good row, whose image is the same as ever; the next run is done."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(some_rows()[0]), *BAD.values()]))
    lines = {line["id"]: line for line in job(path, tmp_path / "out", worker)}
    assert files_of(tmp_path / "out") == {"row-0": whole["row-0"]}
    for number, said in enumerate(BAD, 2):
        line = lines[f"{number:06d}"]
        assert line["status"] == "error"
        assert said in line["error"], line
    output = Output(tmp_path / "out", {})
    plan = Plan.read(path, {})
    assert plan.left(output.known) == set()
    assert len(plan.left(output.known, retry=True)) == len(BAD)
    assert output.gone() == 0
    (tmp_path / "out" / "row-0.png").unlink()
    assert output.gone() == 1
    output.close(done=True)


@pytest.mark.parametrize("into", ["files", "tar"])
def test_no_two_files_differ_in_case_alone(into: Any, tmp_path: Path) -> None:
    """On macOS and Windows they would be one. Each process of several chooses the same names."""
    ids = ["cat", "Cat", "CAT", "dog"]
    names: dict[str, str] = {}
    for share in (None, (0, 2), (1, 2)):
        folder = tmp_path / f"{share}"
        folder.mkdir()
        plan = Plan.read(
            write(folder / "rows.jsonl", [{"id": i, "prompt": "a"} for i in ids]), {}, share=share or (0, 1)
        )
        output = Output(folder / "out", {}, into=into)
        for _ in run(plan, plan.left(output.known), output, windows(stub)):
            pass
        found = {line["id"]: line["file"] for line in output.known.values()}
        output.close(done=False)
        names = names or found
        assert found.items() <= names.items()
    assert len({name.casefold() for name in names.values()}) == 4
    assert [Path(names[i]).stem for i in ("cat", "dog")] == ["cat", "dog"]


@pytest.mark.slow
@pytest.mark.parametrize("into", ["files", "tar", pytest.param("parquet", marks=needs_pyarrow)])
def test_goes_on_where_it_was_stopped(into: Any, worker: Worker, whole: dict[str, bytes], tmp_path: Path) -> None:
    """A kill between any two steps: a file without its line, a line cut off, images that wait for their shard."""
    file, folder = write(tmp_path / "rows.jsonl", some_rows()), tmp_path / "out"
    lines = job(file, folder, worker, stop_after=1, into=into, shard_size=5)
    assert len(lines) == 4
    lines = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(lines[:-30])
    lines = job(file, folder, worker, stop_after=1, into=into, shard_size=5)
    assert len(lines) == 7  # three that had a whole line, and four more
    lines = job(file, folder, worker, into=into, shard_size=5)
    assert sorted(line["id"] for line in lines) == sorted(whole)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if into == "files":
        assert files_of(folder) == whole
        return
    assert names == [*(f"0000{i}.{into}" for i in range(3)), "batch.json", "manifest.jsonl"]
    assert packed(folder) == whole
    for line in lines:
        assert line["key"] in keys_of(folder / line["file"])


def packed(folder: Path) -> dict[str, bytes]:
    """Images by id in the shards; an id that is there twice is an error."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("0*.tar")):
        with tarfile.open(path) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name in (name for name in contents if name.endswith(".json")):
            told, key = json.loads(contents[name]), name.removesuffix(".json")
            assert contents[f"{key}.txt"].decode() == told["prompt"]
            assert told["id"] not in found
            found[told["id"]] = contents[f"{key}.png"]
    for path in sorted(folder.glob("0*.parquet")):
        import pyarrow.parquet

        for row in pyarrow.parquet.read_table(path).to_pylist():
            assert row["id"] not in found
            assert json.loads(row["metadata"])["seed"] == row["seed"]
            found[row["id"]] = row["image"]["bytes"]
    return found


def keys_of(path: Path) -> set[str]:
    if path.suffix == ".tar":
        with tarfile.open(path) as tar:
            return {name.partition(".")[0] for name in tar.getnames()}
    import pyarrow.parquet

    return {row["path"].partition(".")[0] for row in pyarrow.parquet.read_table(path)["image"].to_pylist()}


RECORD = {"prompt": "a", "negative_prompt": "", "sampler": "ddim", "model": "stub", "height": 8, "width": 8,
          "num_inference_steps": 1, "seed": 1, "guidance_scale": 1.0}  # fmt: skip


def stub(rows: Iterable[Row]) -> Iterator[tuple[int, list[Made]]]:
    """Eight images at a time that cost nothing."""
    rows = list(rows)
    for start in range(0, len(rows), 8):
        some = rows[start : start + 8]
        yield len(some), [Made(row, digest_of(settings_of(row, {})), RECORD, image_of(row.id)) for row in some]


def image_of(name: str) -> bytes:
    return image_file(GeneratedImage.of(Image.new("RGB", (8, 8)), RECORD | {"id": name}), "png")


def add(output: Output, name: str) -> None:
    """A row that was generated."""
    output.add({"id": name, "row": "", "status": "done", "seed": 1, "width": 8, "height": 8}, image_of(name))


def stub_job(folder: Path, ids: Sequence[str], **keywords: Any) -> Output:
    """A job of the stub, done to its end."""
    plan = Plan.read(write(folder / f"{ids[0]}.jsonl", [{"id": name, "prompt": "a"} for name in ids]), {})
    output = Output(folder / "out", {}, **keywords)
    for _ in run(plan, plan.left(output.known), output, windows(stub)):
        pass
    output.close(done=True)
    return output


LISTED: list[str] | None = None
"""Folders that were listed, while a test counts them."""


def note_lists(event: str, arguments: tuple[Any, ...]) -> None:
    if LISTED is not None and event in ("os.scandir", "os.listdir"):
        LISTED.append(str(arguments[0]))


sys.addaudithook(note_lists)


@pytest.mark.parametrize("into", ["files", "tar"])
def test_no_row_lists_a_folder(into: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing grows with the job; what killed processes left is looked for once."""
    counts = []
    for rows in (8, 160):
        folder = tmp_path / str(rows)
        folder.mkdir()
        monkeypatch.setattr(sys.modules[__name__], "LISTED", [])
        stub_job(folder, [f"r{i}" for i in range(rows)], into=into, shard_size=10)
        counts.append(len(LISTED or ()))
    assert counts[0] == counts[1] < 20


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """In the folder and where images wait for their shard; what is new may be another process's."""
    waiting = tmp_path / "out" / "waiting"
    waiting.mkdir(parents=True)
    (tmp_path / "out" / "batch.json").write_text("{}")
    for folder in (waiting, waiting.parent):
        for name in ("left", "alive"):
            (folder / f".canvax-{name}.partial").write_bytes(b"half")
        os.utime(folder / ".canvax-left.partial", (0.0, 0.0))
    Output(tmp_path / "out", {}, into="tar").close(done=False)
    assert [path.name for path in (tmp_path / "out").rglob("*.partial")] == [".canvax-alive.partial"] * 2


def test_last_shard_costs_what_the_first_did(tmp_path: Path) -> None:
    """Counted in lines of Python that are run."""

    def lines_run(name: str) -> int:
        count = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        line, data = {"id": name, "status": "done"}, image_of(name)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            output.add(line, data)
        finally:
            sys.settrace(before)
        return count

    output = Output(tmp_path / "out", {}, into="tar", shard_size=1)
    counts = [lines_run(f"r{i:03d}") for i in range(100)]
    output.close(done=True)
    assert counts[-1] <= counts[1] + 20


def together(folder: Path, processes: Sequence[tuple[int, int]], rows: int) -> None:
    """Jobs that run at the same time, each (process, processes), with rows of their own, one after the other."""
    outputs = [Output(folder, {}, into="tar", shard_size=2, process=k, processes=n) for k, n in processes]
    first = len(listed(folder))
    for i in range(rows):
        for number, output in enumerate(outputs):
            add(output, f"r{first + i * len(outputs) + number:03d}")
    for output in outputs:
        output.close(done=True)


def in_shards(folder: Path) -> None:
    """Each row of the manifests is in its shard under its key, and nowhere else; no number is left out."""
    lines = listed(folder)
    assert sorted(packed(folder)) == sorted(lines)
    keys = [key for path in folder.glob("*.tar") for key in keys_of(path)]
    assert len(keys) == len(set(keys))
    for line in lines.values():
        assert line["key"] in keys_of(folder / line["file"])
    numbers: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.tar")):
        numbers.setdefault(path.stem.partition("-")[2], []).append(int(path.stem.partition("-")[0]))
    assert all(found == list(range(len(found))) for found in numbers.values())
    assert not (folder / "waiting").exists()


@pytest.mark.parametrize(
    "runs",
    [
        [[(0, 2), (1, 2)]],
        [[(0, 2), (1, 2)], [(0, 2), (1, 2)]],
        [[(0, 2), (1, 2), (2, 3)]],  # a third one joins, and says that there are three
        [[(0, 2), (1, 2)], [(0, 3), (1, 3), (2, 3)], [(0, 1)], [(1, 2), (0, 2)]],
    ],
)
def test_processes_do_not_overwrite_shards(runs: list[list[tuple[int, int]]], tmp_path: Path) -> None:
    """Whatever number of them there is, at the same time and from run to run."""
    for processes in runs:
        together(tmp_path / "out", processes, 7)
    in_shards(tmp_path / "out")


def test_fewer_processes_finish_the_shards_of_more(tmp_path: Path) -> None:
    """Images that waited for the shard of a process that is not there any more."""
    outputs = [Output(tmp_path, {}, into="tar", shard_size=5, process=k, processes=3) for k in range(3)]
    for number, output in enumerate(outputs):
        add(output, f"r{number}")
        output.close(done=False)
    Output(tmp_path, {}, into="tar", shard_size=5).close(done=True)
    in_shards(tmp_path)


def test_a_job_that_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    Output(tmp_path / "out", {"model": "emoji"}).close(done=False)
    assert not (tmp_path / "out").exists()


def test_another_job_is_refused(worker: Worker, tmp_path: Path) -> None:
    """Changed rows, other flags, a folder of something else, and a second process in the same folder."""
    file, folder = write(tmp_path / "rows.jsonl", some_rows(2)), tmp_path / "out"
    job(file, folder, worker)
    output = Output(folder, {"model": "emoji"})
    with pytest.raises(InputError, match="'row-0' is done, but with other settings"):
        Plan.read(write(file, [{**some_rows()[0], "steps": 9}]), {}).left(output.known)
    flags = {"sampler": "Heun", "eta": 0.5}
    with pytest.raises(InputError, match=r"settings, eta=None and not 0\.5; .* changed in the flags"):
        Plan.read(write(file, [some_rows()[0]]), flags).left(output.known, begun={"sampler": "Heun"})
    if os.name == "posix":
        with refused("output"):
            Output(folder, {"model": "emoji"})
    output.close(done=False)
    with refused("output"):
        Output(folder, {"model": "other"})
    with refused("output"):
        _locked(tmp_path)  # as one that may not be written to
    (folder / "batch.json").write_text("{")
    with pytest.raises(InputError, match=r"batch\.json: is damaged.*choose another folder"):
        Output(folder, {"model": "emoji"}).agree({"model": "emoji"})
    with refused("output"):
        Output(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a", "colour": 1}\n', "'colour' is not a known column"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', "the id '1' is there twice"),
        ("\n", "holds no rows"),
    ],
)
def test_bad_files(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    assert main(["batch", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_pyarrow(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "rows.parquet").touch()
    file = write(tmp_path / "rows.jsonl", some_rows(1))
    for words in ([str(tmp_path / "rows.parquet")], [str(file), "--into", "parquet"]):
        assert main(["batch", *words, "-o", str(tmp_path / "out")]) == 2
        assert 'pip install ".[batch]"' in capsys.readouterr().err


def command(file: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "canvax", "batch", str(file), "-o", str(folder), "-b", "4", "--json"]


@pytest.mark.weekly
def test_process_is_stopped(tmp_path: Path) -> None:
    """A real process, stopped again and again in the middle; the images are those of one that was left alone."""
    one_device = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    file = write(tmp_path / "rows.jsonl", some_rows(60))  # on busy processors the list is seen late
    batch = partial(subprocess.run, capture_output=True, text=True, check=True, env=one_device)
    alone = batch(command(file, tmp_path / "alone"))
    assert json.loads(alone.stdout)["done"] == 60
    codes, counts = [], []
    for wanted, sign in ((4, signal.SIGKILL), (12, signal.SIGTERM), (20, signal.SIGINT)):
        child = subprocess.Popen(
            command(file, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=one_device
        )
        listed = tmp_path / "out" / "manifest.jsonl"
        while child.poll() is None and (not listed.exists() or listed.read_bytes().count(b"\n") < wanted):
            time.sleep(0.005)
        child.send_signal(sign)
        child.communicate()
        codes.append(child.returncode)
        counts.append(listed.read_bytes().count(b"\n"))
    assert codes == [-9, 130, 130]
    assert counts[-1] < 60
    rest = batch(command(file, tmp_path / "out"))
    assert json.loads(rest.stdout)["skipped"] >= 20
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")
