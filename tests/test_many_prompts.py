"""Many prompts through ``canvax generate``, ``sheet`` and ``batch``: names, order and exact bytes of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.cli import BAD_INPUT, INTERRUPTED, main
from canvax.images.formats import GeneratedImage
from canvax.images.grid import make_grid, make_sheet
from canvax.images.metadata import read_metadata, save_image
from canvax.scale.output import Output
from canvax.scale.rows import Row
from canvax.scale.work import Worker, image_file

Run = Callable[..., tuple[int, str, str]]
FAST = ("--steps", "2", "--quiet")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], emoji: canvax.Pipeline
) -> Run:
    """Runs a command in an empty folder with the bundled model loaded already: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def interrupted(run: Run, emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> canvax.Pipeline:
    """The model of commands, with Ctrl-C in its third batch."""

    class Interrupted(canvax.Pipeline):
        calls = 0

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            Interrupted.calls += 1
            if Interrupted.calls == 3:
                raise KeyboardInterrupt
            return super().__call__(*arguments, **keywords)

    pipe = Interrupted(emoji.model, emoji.programs, emoji.params)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: pipe)
    return pipe


def rows_file(rows: Sequence[dict[str, Any] | str], name: str = "rows.jsonl") -> str:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return name


def as_saved(image: Any, metadata: Any) -> bytes:
    """The bytes of the PNG file of an image."""
    path = save_image(Path("expected.png"), image, metadata)
    data = path.read_bytes()
    path.unlink()
    return data


def assert_files(names: Sequence[str], calls: Sequence[canvax.Result]) -> None:
    """The files hold the images of these results, in order, byte by byte."""
    expected = [pair for result in calls for pair in zip(result.images, result.metadata, strict=True)]
    assert [Path(name).read_bytes() for name in names] == [as_saved(*pair) for pair in expected[: len(names)]]


# generate


def test_a_batch_is_filled_up_and_files_are_exact(run: Run, emoji: canvax.Pipeline) -> None:
    """Prompts by seeds in one order; the last batch is filled up with its last image."""
    code, out, err = run("generate", "a cat", "a dog", "a fox", "-n", 2, "-s", 5, "-b", 4, "--grid", *FAST)
    names = [f"out/0000{i}-{5 + i}.png" for i in range(6)]
    assert (code, out, err) == (0, "".join(f"{name}\n" for name in (*names, "out/grid-00000-5.png")), "")
    prompts = ["a cat", "a cat", "a dog", "a dog", "a fox", "a fox"]
    batches = [(prompts[:4], [5, 6, 7, 8]), ([*prompts[4:], "a fox", "a fox"], [9, 10, 10, 10])]
    results = [emoji(words, num_inference_steps=2, seed=seeds, progress=False) for words, seeds in batches]
    assert_files(names, results)
    images = [image for result in results for image in result.images][:6]
    metadata = [record for result in results for record in result.metadata][:6]
    assert Path("out/grid-00000-5.png").read_bytes() == as_saved(make_grid(images), {"grid": metadata})


def test_few_images_are_one_batch_of_their_number(run: Run, emoji: canvax.Pipeline) -> None:
    out = run("generate", "a cat", "a dog", "-s", 3, "-b", 4, *FAST)[1]
    assert_files(out.split(), [emoji(["a cat", "a dog"], num_inference_steps=2, seed=[3, 4], progress=False)])


def test_images_of_the_same_settings_come_together(run: Run, emoji: canvax.Pipeline) -> None:
    """Batches hold images of the same settings; as many slots as the largest group needs."""
    lines: list[Any] = ["a cat", {"prompt": "a dog", "steps": 3}, "a fox", {"prompt": "a bee", "negative_prompt": ""}]
    code, out, _ = run("generate", "--prompt-file", rows_file(lines, "p.txt"), "-s", 1, *FAST)
    assert (code, out.split()) == (0, ["out/00000-1.png", "out/00001-3.png", "out/00002-2.png", "out/00003-4.png"])
    pair = emoji(["a cat", "a fox"], num_inference_steps=2, seed=[1, 3], progress=False)
    assert_files(out.split()[:2], [pair])
    dog = emoji(["a dog", "a dog"], num_inference_steps=3, seed=[2, 2], progress=False)
    bee = emoji(["a bee", "a bee"], negative_prompt="", num_inference_steps=2, seed=[4, 4], progress=False)
    assert_files(out.split()[2:3], [dog])
    assert_files(out.split()[3:], [bee])


@pytest.mark.slow
def test_lines_know_the_names_of_other_programs(run: Run) -> None:
    line = {"prompt": "a cat", "neg_prompt": "red", "sampling_steps": 3, "cfg": 2, "sampler_name": "Euler", "H": 72,
            "subseed": 3, "subseed_strength": 0.5, "seed": 8, "n": 2}  # fmt: skip
    report = json.loads(run("generate", "--prompt-file", rows_file([line]), "--json", *FAST)[1])
    names = ("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "sampler", "height", "seed")
    seen = [tuple(record[name] for name in names) for record in report["metadata"]]
    assert seen == [("a cat", "red", 3, 2.0, "euler", 72, seed) for seed in (8, 9)]
    assert report["metadata"][0]["options"] == {"variation_seed": 3, "variation_strength": 0.5}


REFUSED = (
    *({"prompt": "a", "batch_size": 2}, {"prompt": "a", "model": "emoji"}, {"prompt": "a", "id": "x"}, {"seed": 1}),
    *({"prompt": "a", "cfg": 1, "guidance": 2}, {"prompt": None}, {"prompt": "a", "steps": "4"}, "--steps 4", '["a"]'),
)


@pytest.mark.parametrize("line", REFUSED)
def test_lines_that_are_refused(line: Any, run: Run) -> None:
    code, out, err = run("generate", "--prompt-file", rows_file(["a cat", line]), *FAST)
    assert (code, out, os.listdir()) == (BAD_INPUT, "", ["rows.jsonl"])
    assert "rows.jsonl, line 2: " in err


def test_seeds_nobody_chose_count_up(run: Run) -> None:
    seeds = [json.loads(run("generate", "a cat", "a dog", "-n", 2, "-b", 4, "--json", *FAST)[1])["seeds"]
             for _ in range(2)]  # fmt: skip
    assert all(np.diff(np.array(some, object)).tolist() == [1, 1, 1] for some in seeds)
    assert seeds[0] != seeds[1]
    assert json.loads(run("generate", "a", "a", "-s", 2**64 - 1, "--json", *FAST)[1])["seeds"] == [2**64 - 1, 0]


def test_one_bad_line_stops_all_before_any_image(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvax, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    lines = [{"prompt": "a cat"}, {"prompt": "a dog", "sampler": "none such"}]
    assert run("generate", "--prompt-file", rows_file(lines), *FAST)[0] == BAD_INPUT
    assert run("generate", "a cat", "--clip-skip", 9, *FAST)[0] == BAD_INPUT  # known from the files of the model
    assert os.listdir() == ["rows.jsonl"]


def test_ctrl_c_keeps_whole_batches(run: Run, interrupted: canvax.Pipeline) -> None:
    code, out, err = run("generate", "a cat", "-n", 7, "-b", 2, "-s", 1, "--grid", *FAST)
    assert (code, out.split()) == (INTERRUPTED, [f"out/0000{i}-{i + 1}.png" for i in range(4)])
    assert err == "canvax: cancelled; finished images are kept\n"
    assert sorted(os.listdir("out")) == [f"0000{i}-{i + 1}.png" for i in range(4)]


# sheet


def test_cells_of_a_sheet(run: Run, emoji: canvax.Pipeline) -> None:
    """Cells of the same settings share a batch; every cell has the same seed; two prompts are two rows."""
    code, out, err = run("sheet", "--x", "steps=2,3", "--y", "prompt=a cat;a dog", "-s", 4, "-q")
    assert (code, out, err) == (0, "out/00000-4.png\n", "")
    results = [emoji(["a cat", "a dog"], num_inference_steps=steps, seed=[4, 4], progress=False) for steps in (2, 3)]
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    sheet = make_sheet([results[i].images[j] for i, j in order], ["steps 2", "steps 3"], ["a cat", "a dog"])
    metadata = {"grid": [results[i].metadata[j] for i, j in order], "seed": 4}
    assert Path("out/00000-4.png").read_bytes() == as_saved(sheet, metadata)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_the_cells_of_a_sheet(run: Run, emoji: canvax.Pipeline) -> None:
    code, out, _ = run("sheet", "a cat", "--x", "steps=2,3", "--y", "sampler=Euler,DPM++ 2M", "-s", 4, "-q")
    assert (code, out) == (INTERRUPTED, "out/00000-4.png\n")
    done = [emoji("a cat", num_inference_steps=steps, sampler="Euler", seed=4, progress=False) for steps in (2, 3)]
    cells = [*(result.images[0] for result in done), *[Image.new("RGB", (64, 64), "white")] * 2]
    sheet = make_sheet(cells, ["steps 2", "steps 3"], ["Euler", "DPM++ 2M"])
    metadata = {"grid": [result.metadata[0] for result in done], "seed": 4}
    assert Path("out/00000-4.png").read_bytes() == as_saved(sheet, metadata)


# batch


def image_bytes(folder: str) -> dict[str, bytes]:
    """The files of a batch job by the ids of their rows, of all processes that wrote there."""
    lists = sorted(Path(folder).glob("manifest*.jsonl"))
    lines = [json.loads(line) for path in lists for line in path.read_text().splitlines()]
    return {line["id"]: (Path(folder) / line["file"]).read_bytes() for line in lines if line["status"] == "done"}


ROWS = [
    {"id": f"r{i}", "prompt": f"a {'cat' if i % 2 else 'dog'}", "steps": 2 + i % 2, "guidance": 2 + i} for i in range(6)
]
BATCH = ("-b", "2", "-q")


def test_files_of_a_batch_are_exact(run: Run, emoji: canvax.Pipeline) -> None:
    """The command writes what a worker makes of the rows: each in its list, and a run again does nothing."""
    code, out, err = run("batch", rows_file(ROWS), "-o", "all", "-g", 3, "-s", 9, *BATCH)
    assert (code, out, err) == (0, "all\n", "")
    batches = Worker(emoji, batch=2, seed=9).run([Row(row["id"], row) for row in ROWS])
    images = [(made.row.id, made.image) for _, batch in batches for made in batch]
    assert image_bytes("all") == {
        name: image_file(image, "png") for name, image in images if isinstance(image, GeneratedImage)
    }
    report = json.loads(run("batch", "rows.jsonl", "-o", "all", "-g", 3, "-s", 9, *BATCH, "--json")[1])
    assert (report["rows"], report["skipped"], report["errors"]) == (6, 6, 0)


@pytest.mark.slow
def test_shares_of_a_batch_are_the_whole(run: Run) -> None:
    run("batch", rows_file(ROWS), "-o", "all", *BATCH)
    for share in ("1/2", "0/2"):
        assert run("batch", "rows.jsonl", "-o", "parts", "--share", share, *BATCH)[0] == 0
    assert len(image_bytes("all")) == 6
    assert image_bytes("parts") == image_bytes("all")


def test_rows_that_fail_are_listed_and_end_nothing(run: Run) -> None:
    bad = [{"id": "x", "prompt": "a cat", "sampler": "none such"}, {"id": "y"}, {"id": "z", "prompt": "a cat", "n": 2}]
    code, _, err = run("batch", rows_file([*ROWS[:1], *bad]), "-o", "some", *BATCH)
    assert code == 0
    assert "3 rows with an error" in err
    lines = {line["id"]: line for line in map(json.loads, Path("some/manifest.jsonl").read_text().splitlines())}
    assert {name for name, line in lines.items() if line["status"] == "error"} == {"x", "y", "z"}
    assert "none such" in lines["x"]["error"]
    assert len(image_bytes("some")) == 1
    rows_file([*ROWS[:1], {"id": "x", "prompt": "a cat", "steps": 2}, *bad[1:]])
    assert run("batch", "rows.jsonl", "-o", "some", "--retry-errors", *BATCH)[0] == 0
    assert sorted(image_bytes("some")) == ["r0", "x"]


def test_a_stopped_batch_goes_on_with_the_same_bytes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("batch", rows_file(ROWS), "-o", "all", *BATCH)
    add = Output.add

    def stop(self: Output, line: Any, *others: Any, **keywords: Any) -> None:
        add(self, line, *others, **keywords)
        if len(self.known) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "add", stop)
        assert run("batch", "rows.jsonl", "-o", "stopped", *BATCH)[0] == INTERRUPTED
    assert 2 <= len(image_bytes("stopped")) < 6
    assert run("batch", "rows.jsonl", "-o", "stopped", *BATCH)[0] == 0
    assert image_bytes("stopped") == image_bytes("all")
    metadata = read_metadata(next(Path("all").glob("r3.png")))
    assert (metadata["id"], metadata["num_inference_steps"]) == ("r3", 3)
    with Image.open("all/r3.png") as image:
        assert image.size == (64, 64)
