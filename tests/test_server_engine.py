"""The server's engine with the model in the package: images of many clients in the same batches."""

from __future__ import annotations

import gc
import hashlib
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax.compile.monitor import compilations
from canvax.models.configs import ClipVisionConfig
from canvax.parallel import memory
from canvax.parallel.place import waits
from canvax.pipelines.hints import hints
from canvax.pipelines.safety import SafetyChecker
from canvax.samplers import build_table
from canvax.server import models, writing
from canvax.server.engine import EngineSettings, ImageEngine
from canvax.server.group import Group, Timings
from canvax.server.jobs import Job, JobRequest, Previewed, Rejected, State, Status, Stepped
from canvax.server.jobs_api import job_json
from canvax.server.journal import Journal
from canvax.server.metrics import Metrics
from canvax.server.models import Warm
from canvax.server.work import Item, Stage, byte_size, check, sample
from tests.support.drawing import small_emoji
from tests.support.serving import until

PIPE = small_emoji()
QUIET = canvax.Options(progress=False)


def load(name: str) -> Any:
    """One model for all engines, whose programs are compiled once."""
    del name
    return PIPE


def started(load: Any = load, **settings: Any) -> ImageEngine:
    own = EngineSettings(**{"warm": (Warm(None, (1, 4)),), **settings})
    engine = ImageEngine(["emoji"], own, Metrics(), load)
    engine.start()
    until(lambda: engine.state is not State.STARTING, 300)
    assert engine.failure is None
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[ImageEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canvax.server.policy.WORTH_IT", 100.0)  # on a busy machine a batch may seem to gain nothing
        engine = started(warm=(Warm(None, (1, 4)), Warm((96, 96), (1,))))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails does not make others wait."""
    yield
    if "engine" in request.fixturenames:
        for job in request.getfixturevalue("engine").jobs():
            job.cancel()


def finished(jobs: Sequence[Job], seconds: float = 60.0) -> None:
    until(lambda: all(job.status.over for job in jobs), seconds)
    assert {job.status for job in jobs} == {Status.DONE}, [job.error for job in jobs]


def pixels(data: bytes | None) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data or b"")).convert("RGB")).astype(int)


def same(job: Job, expected: Sequence[Image.Image]) -> None:
    """Up to rounding: another batch sums in another order."""
    for picture, image in zip(job.pictures, expected, strict=True):
        apart = np.abs(pixels(picture.data) - np.asarray(image).astype(int))
        assert apart.max() <= 3, (picture.index, apart.max())
        assert apart.mean() < 0.1


def apple() -> Image.Image:
    return PIPE("a red apple", seed=1, options=QUIET).images[0]


def half() -> Image.Image:
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 32, 64, 64))
    return mask


APPLE = Image.new("RGB", (64, 64), "red")
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "a red apple"}, {}),
    ({"prompt": "a dog face", "sampler": "Euler a", "steps": 9}, {}),
    ({"prompt": "a pizza", "sampler": "DPM++ 2M Karras", "steps": 13, "guidance_scale": 5.0}, {}),
    ({"prompt": "a cactus", "guidance_scale": 1.0, "steps": 7}, {}),
    ({"prompt": "an owl", "negative_prompt": "blue", "sampler": "UniPC", "n": 2}, {}),
    ({"prompt": "(red:1.3) car", "options": {"prompt_syntax": "a1111", "clip_skip": 0, "eta": 0.3}}, {}),
    ({"prompt": "a green apple", "strength": 0.6}, {"image": True}),
    ({"prompt": "a lemon"}, {"image": True, "mask": True}),
    ({"prompt": "a [cat:dog:0.5] face", "options": {"prompt_syntax": "a1111"}, "steps": 10}, {}),
    ({"prompt": "a sunflower", "options": {"variation_seed": 5, "variation_strength": 0.3}, "n": 2}, {}),
    ({"prompt": "a key", "options": {"guidance_interval": [0.2, 0.8]}}, {}),
    ({"prompt": "a hen", "options": {"guidance_method": "cfg_pp"}, "sampler": "DDIM"}, {}),
    ({"prompt": "a heart", "options": {"noise": "torch", "sigmas": "exponential"}, "sampler": "DPM++ 2M SDE"}, {}),
    ({"prompt": "a fish", "options": {"quality": "fast"}, "steps": 20}, {}),
]


def called(ask: dict[str, Any], given: dict[str, bool], seed: int) -> list[Image.Image]:
    """What the pipeline itself generates."""
    more = {"image": apple() if given.get("image") else None, "mask": half() if given.get("mask") else None}
    return PIPE(
        ask["prompt"], ask.get("negative_prompt"), num_images_per_prompt=ask.get("n", 1), seed=seed,
        sampler=ask.get("sampler"), num_inference_steps=ask.get("steps"), guidance_scale=ask.get("guidance_scale"),
        strength=ask.get("strength"), options=canvax.Options(**{**ask.get("options", {}), "progress": False}), **more,
    ).images  # fmt: skip


@pytest.mark.slow
def test_hints_of_a_job(engine: ImageEngine) -> None:
    """Who asks a server is told of what a call of a pipeline warns of."""
    job = engine.submit(JobRequest("a (red:1.5) elephantoid", seed=1, steps=2))
    finished([job])
    assert {"elephantoid", "red:1.5"} == {word for word in ("elephantoid", "red:1.5") if word in " ".join(job.hints)}
    assert engine.submit(JobRequest("a red apple", seed=1, steps=2)).hints == ()


def test_what_is_said_names_the_model_as_requests_do() -> None:
    """The folders above it are the operator's business."""
    served = models.ServedModel("apples", load)
    hint = next(hints(served.model, check(JobRequest("an elephantoid"), "apples", served.model).request))
    assert "apples" in str(hint)
    assert "emoji" not in str(hint)


@pytest.mark.parametrize("some", [(3, 4, 7, 8, 12), pytest.param(range(len(CALLS)), marks=pytest.mark.slow)])
def test_images_are_those_of_the_pipeline_in_any_company_and_nothing_compiles(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch, some: Sequence[int]
) -> None:
    """In batches of four, too."""
    calls, sizes, step = [CALLS[i] for i in some], set[int](), Group.step
    monkeypatch.setattr(Group, "step", lambda group: (sizes.add(group.size), step(group))[1])
    monkeypatch.setattr("canvax.server.policy.WORTH_IT", 100.0)  # on a busy machine a batch may seem to gain nothing
    expected = [called(ask, given, 100 + i) for i, (ask, given) in enumerate(calls)]
    before, jobs = compilations(), []
    for i, (ask, given) in enumerate(calls):
        more = {"image": apple() if given.get("image") else None, "mask": half() if given.get("mask") else None}
        jobs.append(engine.submit(JobRequest(**ask, **more, seed=100 + i, previews=2)))
        time.sleep(0.02)  # so that they join at several rows of others
    finished(jobs)
    assert compilations() == before
    assert max(sizes) >= 4
    for job, images in zip(jobs, expected, strict=True):
        same(job, images)


@pytest.mark.parametrize(("guided", "embedded", "part"), [(True, False, 1), (False, False, 0.5), (False, True, 1)])
def test_work_is_counted_in_rows_as_they_are_timed(*, guided: bool, embedded: bool, part: float) -> None:
    """With guidance, but of a model that is told its guidance each row as it is."""
    table = build_table(PIPE.model.scheduler, 8, guidance=3.0)
    request: Any = SimpleNamespace(guided=guided, embedded=embedded)
    group: Any = None
    assert Stage(request, table, group).rows == part * len(table)


@pytest.mark.parametrize("disturbed", [1, 4])
def test_a_measurement_that_was_disturbed_decides_nothing(monkeypatch: pytest.MonkeyPatch, disturbed: int) -> None:
    """The machine did something else during the first ones."""
    asked, noise = sample("emoji", PIPE.model, 64, 64), iter((1.0, 9.0, 9.0))
    group = Group(asked.group, PIPE.model, PIPE.programs, lambda *_, **__: PIPE.params or {}, (1, 4))
    group.compile(PIPE.params or {})
    monkeypatch.setattr(
        Group, "_timed",
        lambda group, images, carry, rows: 0.01 * images**0.5 * (next(noise, 1.0) if images == disturbed else 1.0),
    )  # fmt: skip
    carry: Any = SimpleNamespace(run=SimpleNamespace(table=range(9)))
    group.measure(carry)
    assert (group.batches, group.timings.row) == ([1, 4], {1: 0.01, 4: 0.02})


@pytest.mark.slow
def test_timings_are_kept_beside_the_programs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same flags give the same server; with other batches all is measured."""
    monkeypatch.setenv("CANVAX_CACHE_DIR", str(tmp_path))
    measured = list[tuple[int, ...]]()
    measure = Group.measure
    monkeypatch.setattr(
        Group, "measure", lambda group, carry: (measured.append(tuple(group.batches)), measure(group, carry))[1]
    )
    found = []
    for batches in ((1,), (1,), (1, 2)):
        served = models.ServedModel("emoji", load)
        asked = sample("emoji", served.model, 64, 64)
        group = served.build(asked.group, batches, lambda build: None)
        served.time(asked, group)
        assert served.colours.known
        found.append((group.batches, group.timings.row, group.timings.encode, group.timings.decode))
        assert all(seconds > 0 for seconds in (group.timings.encode, group.timings.decode))
    assert measured == [(1,), (1, 2)]
    assert found[0] == found[1]


def test_a_size_that_has_no_programs_is_refused() -> None:
    """Though it is among those that are to be made."""
    served = models.ServedModel("emoji", load)
    assert served.refusal(sample("emoji", served.model, 64, 64).group, (Warm(),)).code == "size_not_ready"


def test_metrics_tell_what_was_done_and_where_the_time_went(engine: ImageEngine) -> None:
    def counts() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in engine._metrics.text().decode().splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    before, began = counts(), time.perf_counter()
    job = engine.submit(JobRequest("a mauve apple", sampler="Euler", steps=6, n=3, seed=1))  # a prompt of no other test
    assert counts()["canvax_queue_images"] == 3
    finished([job])
    took, after = time.perf_counter() - began, counts()
    assert (after["canvax_queue_images"], after["canvax_queue_cost_seconds"]) == (0, 0)
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    size = 'size="64x64"'
    assert change['canvax_jobs_accepted_total{model="emoji"}'] == 1
    assert change['canvax_jobs_total{model="emoji",outcome="done"}'] == 1
    assert change[f"canvax_steps_total{{{size}}}"] == change[f'canvax_slot_steps_total{{{size},state="used"}}'] == 3 * 6
    assert (change[f"canvax_images_total{{{size}}}"], change["canvax_pixels_total"]) == (3, 3 * 64 * 64)
    hits, misses = (change[f'canvax_conditions_total{{cache="{cache}"}}'] for cache in ("hit", "miss"))
    assert (hits + misses, 1 <= misses <= 2) == (3 * 2, True)  # a prompt and a negative prompt
    encoded, decoded, files, turns = (
        change[f"canvax_{name}_seconds_count"] for name in ("encode", "decode", "file", "turn_overhead")
    )
    assert (encoded, files) == (3, 3)
    assert 1 <= decoded <= 3  # where batches run side by side several images are decoded at once
    assert turns >= 1
    steps = [name for name in change if name.startswith("canvax_step_seconds_count")]
    assert 6 <= sum(change[name] for name in steps) <= 18  # a step of a batch is one, however many images are in it
    spent = [change[f"canvax_{name}_seconds_sum"] for name in ("encode", "decode", "turn_overhead")]
    spent += [change[name.replace("count", "sum")] for name in steps]
    assert 0.3 * took < sum(spent) < took  # the rest is the first file's, and waiting


def test_metadata_generates_it_again(engine: ImageEngine) -> None:
    job = engine.submit(JobRequest("a pizza", seed=3, n=3, sampler="Euler a", steps=8))
    finished([job])
    told = dict(job.pictures[2].metadata)
    assert (told["seed"], told["num_inference_steps"], told["model"]) == (5, 8, "emoji")
    again = PIPE("a pizza", seed=5, sampler="Euler a", num_inference_steps=8, options=QUIET)
    assert told == again.metadata[0]
    assert Image.open(io.BytesIO(job.pictures[2].data or b"")).info["parameters"].startswith("a pizza")


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_a_file_without_metadata_holds_no_word_of_its_prompt(engine: ImageEngine, kind: Any) -> None:
    asks = [
        JobRequest("a zebra at midnight", seed=3, steps=1, format=kind, metadata=wanted) for wanted in (True, False)
    ]
    jobs = [engine.submit(ask) for ask in asks]
    finished(jobs)
    told, silent = (job.pictures[0].data or b"" for job in jobs)
    for word in ("zebra".encode(coding) for coding in ("utf-8", "utf-16-be")):
        assert word in told or kind == "png"
        assert word not in silent
    assert b"zebra" in told
    assert "zebra" in jobs[1].pictures[0].metadata["prompt"]  # which its client may ask for


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_the_quality_that_is_asked_for(engine: ImageEngine, kind: Any) -> None:
    jobs = [engine.submit(JobRequest("a pizza", seed=3, steps=4, format=kind, quality=quality)) for quality in (5, 90)]
    finished(jobs)
    low, high = (len(job.pictures[0].data or b"") for job in jobs)
    assert low < high


def watched(engine: ImageEngine) -> tuple[Job, list[Previewed]]:
    """A job with four previews, and the list that they come into."""
    seen: list[Previewed] = []
    job = engine.submit(JobRequest("a red apple", seed=7, previews=4, steps=20))
    noting(job, lambda event: seen.append(event) if isinstance(event, Previewed) else None)
    return job, seen


def noting(job: Job, note: Callable[[Any], None]) -> None:
    """Somebody looks at a job, and hears all events."""
    job.look(60)
    tell = job.tell
    job.tell = lambda event: (note(event), tell(event))[1]  # type: ignore[method-assign]


@pytest.mark.parametrize("decoded", [True, False])
def test_previews_become_the_image(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch, decoded: bool) -> None:
    """Decoded ones come nearer and nearer; colours alone, which never have details, are those of this image."""
    monkeypatch.setattr("canvax.server.engine.CHEAP_PREVIEWS", 1e9 if decoded else 0.0)
    others = [engine.submit(JobRequest(text, seed=1, steps=5)) for text in ("a dog face", "a lemon")]
    finished(others)
    job, seen = watched(engine)
    finished([job])
    until(lambda: len(seen) >= 3)
    steps = sorted(event.step for event in seen)
    assert steps == sorted(set(steps))
    first, last = (pixels(one(seen, key=lambda event: event.step).data) for one in (min, max))
    apart = [np.abs(last - pixels(each.pictures[0].data)).mean() for each in [job, *others]]
    assert apart[0] < 40
    if decoded:
        assert apart[0] < np.abs(first - pixels(job.pictures[0].data)).mean()
    else:
        assert apart[0] < min(apart[1:])


def test_what_a_safety_checker_refuses_is_black_and_has_no_previews(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(SafetyChecker):
        def flags(self, pixels: np.ndarray) -> list[bool]:
            return [True] * len(pixels)

    refuses = Refuses(ClipVisionConfig(), {})
    monkeypatch.setattr(engine._models.named("emoji"), "safety_checker", refuses)
    job, seen = watched(engine)
    finished([job])
    assert not pixels(job.pictures[0].data).any()
    assert job.pictures[0].metadata["nsfw"] is True
    assert not seen


def test_cancelling_takes_effect_between_steps(engine: ImageEngine) -> None:
    job = engine.submit(JobRequest("a dog face", seed=1, steps=200))
    until(lambda: job.pictures[0].step > 0)
    job.cancel()
    assert job.status is Status.CANCELLED
    assert job.pictures[0].status is Status.CANCELLED
    finished([engine.submit(JobRequest("a lemon", steps=1))])  # the call that was under way is over
    at = job.pictures[0].step
    finished([engine.submit(JobRequest("a lemon", steps=1))])
    assert job.pictures[0].step == at < 200
    job.cancel()
    assert job.status is Status.CANCELLED
    assert job not in engine.jobs()


def test_a_job_of_which_the_time_is_up_fails(engine: ImageEngine) -> None:
    job = engine.submit(JobRequest("a dog face", seed=1, steps=200, seconds=3600.0))
    job.created -= 7200.0
    until(lambda: job.status.over)
    assert (job.status, job.error and job.error[0]) == (Status.FAILED, "timeout")
    with pytest.raises(Rejected, match=r"seconds=0\.01: an image takes about"):
        engine.submit(JobRequest("a dog face", seconds=0.01))


def test_a_key_chooses_the_seed_for_another_server_too() -> None:
    """Which knows nothing of the first one's jobs: whoever asks again has the same image from it."""

    def seeds(**asked: Any) -> list[int]:
        return check(JobRequest("a cat", n=2, **asked), "emoji", PIPE.model).seeds

    once = seeds(once="order 66", client="alice")
    assert once == seeds(once="order 66", client="alice", seed=-1) != seeds(once="order 66", client="bob")
    assert once[1] == once[0] + 1
    assert seeds(once="order 66", seed=7) == [7, 8]
    # By every version: the first 4 bytes of SHA-256 of the client and the key.
    assert once[0] == int.from_bytes(hashlib.sha256(b"alice\norder 66").digest()[:4], "big")
    assert seeds() != seeds()


def larger(image: Image.Image, **changes: Any) -> canvax.Result:
    return PIPE.upscale(image, "a red apple", **{"scale": 2.5, "seed": 5, "num_inference_steps": 20, **changes})


def test_a_job_of_a_journal_keeps_the_seed_that_was_told(engine: ImageEngine) -> None:
    ask = JobRequest("a red apple", image=APPLE.copy(), upscale=1.5, strength=0.5, steps=2)
    job = check(ask, "emoji", PIPE.model).job(ask, lambda job: None)
    with engine._wake:
        engine._book.enter(job)
        engine._resume(job)
    finished([job])
    assert job.pictures[0].metadata["seed"] == job.pictures[0].seed


@pytest.mark.weekly
def test_an_image_made_larger_is_that_of_the_pipeline(engine: ImageEngine) -> None:
    """Its tiles are in batches with other people's images."""
    image = apple().resize((60, 50))
    expected = larger(image, options=QUIET)
    before, seen = compilations(), []
    company = [engine.submit(JobRequest("a dog face", seed=i, steps=9 + i, client="other")) for i in range(5)]
    job = engine.submit(JobRequest("a red apple", image=image, upscale=2.5, seed=5, steps=20, previews=3))
    noting(job, seen.append)
    finished([job, *company])
    assert compilations() == before
    same(job, expected.images)
    (picture,) = job.pictures
    assert dict(picture.metadata) == expected.metadata[0]
    tiles = 3 * 4
    assert (picture.width, picture.height) == (150, 125)
    assert picture.step == picture.steps == tiles * expected.metadata[0]["steps_run"]
    steps = [event.step for event in seen if isinstance(event, Stepped)]
    assert steps == sorted(steps)
    assert all(event.seconds_left for event in seen if isinstance(event, Stepped) and event.step < event.steps)
    until(lambda: sum(isinstance(event, Previewed) for event in seen) == 3)
    previews = [Image.open(io.BytesIO(event.data)) for event in seen if isinstance(event, Previewed)]
    assert {preview.size for preview in previews} == {(150, 125)}
    apart = [np.abs(np.asarray(one, int) - pixels(picture.data)).mean() for one in previews]
    assert 0 < min(apart) < max(apart)  # the whole fills up, tile by tile


@pytest.mark.slow
def test_a_second_pass_begins_from_the_image_of_the_first(engine: ImageEngine) -> None:
    """As if that image were sent again, larger; nothing compiles."""
    before, seen, asked = compilations(), [], {"prompt": "a red apple", "seed": 5, "steps": 8}
    options = {"hires": 1.5, "hires_strength": 0.5, "hires_steps": 6}
    small = engine.submit(JobRequest(**asked))
    both = engine.submit(JobRequest(**asked, n=2, previews=4, options=options))
    noting(both, seen.append)
    latent = engine.submit(JobRequest(**asked, options={**options, "hires_method": "latent"}))
    finished([small, both, latent])
    image = Image.open(io.BytesIO(small.pictures[0].data or b"")).resize((96, 96), Image.Resampling.LANCZOS)
    again = {"image": image, "width": 96, "height": 96, "strength": 0.5, "steps": 6}
    second = engine.submit(JobRequest(**{**asked, **again}, options={"strength_rule": "exact"}))
    finished([second])
    assert compilations() == before
    first, other = both.pictures
    same(second, [Image.open(io.BytesIO(first.data or b""))])
    for picture in (other, latent.pictures[0]):
        assert np.abs(pixels(first.data) - pixels(picture.data)).mean() > 3
    assert (first.width, first.height, first.step, first.steps) == (96, 96, 8 + 6, 8 + 6)
    assert (first.metadata["width"], first.metadata["options"]) == (64, options)
    steps = [event.step for event in seen if isinstance(event, Stepped) and event.index == 0]
    assert steps == sorted(set(steps))
    until(lambda: {one.number for one in seen if isinstance(one, Previewed) and one.index == 0} == {0, 1, 2, 3})


HIRES = {"hires": 1.5, "hires_strength": 0.5, "hires_steps": 4}
LATENT = {"prompt_syntax": "a1111", "hires_method": "latent", "eta": 0.3}
TWO_PASSES: list[dict[str, Any]] = [
    {"prompt": "a [cat:dog:0.5] face", "options": LATENT},
    {"prompt": "a red apple", "sampler": "Euler a", "negative_prompt": "blue", "n": 2},
    {"prompt": "a lemon", "guidance_scale": 1.0, "options": {"sigmas": "karras"}},
    {"prompt": "a pizza", "options": {"variation_seed": 5, "variation_strength": 0.3, "guidance_rescale": 0.7}},
]
"""Where a setting could be applied in both passes by one of them, and in one by the other."""


@pytest.mark.parametrize(
    "ask",
    [TWO_PASSES[1], *(pytest.param(ask, marks=pytest.mark.slow) for ask in TWO_PASSES[:1] + TWO_PASSES[2:])],
    ids=str,
)
def test_two_passes_are_those_of_the_pipeline(engine: ImageEngine, ask: dict[str, Any]) -> None:
    """What is done to an image is done once, or twice, in both."""
    ask = {"steps": 6, **ask, "options": HIRES | ask.get("options", {})}
    expected = called(ask, {}, 9)
    finished([job := engine.submit(JobRequest(**ask, seed=9))])
    same(job, expected)


@pytest.mark.slow
def test_an_image_made_larger_leaves_the_batch_when_it_is_cancelled(engine: ImageEngine) -> None:
    job = engine.submit(JobRequest("a red apple", image=apple(), upscale=4, seed=5, strength=1.0, steps=100))
    until(lambda: job.pictures[0].step > 30)
    assert job.pictures[0].status is Status.RUNNING
    job.cancel()
    assert job.pictures[0].status is Status.CANCELLED
    other = engine.submit(JobRequest("a dog face", seed=1, steps=3))
    finished([other], 10)
    assert len(engine._queue) == 0


@pytest.mark.parametrize(
    ("ask", "status", "code", "param"),
    [
        ({"model": "sdxl"}, 404, "model_not_found", "model"),
        ({"width": 128}, 400, "size_not_ready", "width"),
        ({"steps": 100_000}, 400, "invalid_value", "steps"),  # golden/errors.txt has others
        ({"options": {"hires": 2.0}}, 400, "size_not_ready", "options"),
        ({"options": {"guidance_method": "apg"}}, 400, "not_compiled", "options"),
        ({"prompt": "apple " * 100, "options": {"prompt_syntax": "a1111"}}, 400, "prompt_too_long", "prompt"),
        ({"prompt": "a cat AND a dog", "options": {"prompt_syntax": "a1111"}}, 400, "not_compiled", "prompt"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    engine: ImageEngine, ask: dict[str, Any], status: int, code: str, param: str
) -> None:
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest(**{"prompt": "a red apple", **ask}))
    told = refused.value
    assert (told.status, told.code, told.param) == (status, code, param), told.message


def test_tiles_without_programs_name_what_starts_a_server_with_them(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No size is proposed: a request that upscales has none."""
    served = engine._models.named(None)
    others = {key: group for key, group in served.groups.items() if key.size == "96x96"}
    monkeypatch.setattr(served, "groups", others)
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest("a red apple", image=APPLE.copy(), upscale=2.0))
    assert (refused.value.code, refused.value.param) == ("size_not_ready", "upscale")
    size = "x".join(map(str, served.model.native_size))
    assert f"--warm {size}" in refused.value.message


def test_a_full_queue_refuses(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_settings", EngineSettings(queue_images=5))
    jobs = [engine.submit(JobRequest("a dog face", seed=i, steps=50)) for i in range(5)]
    with pytest.raises(Rejected, match="5 images are waiting") as refused:
        engine.submit(JobRequest("a dog face"))
    assert refused.value.status == 429
    assert refused.value.retry_after
    with pytest.raises(Rejected, match="n: 6 images or tiles are more than the 5 that may wait") as refused:
        engine.submit(JobRequest("a dog face", n=6))
    assert (refused.value.status, refused.value.retry_after) == (400, None)
    jobs[0].cancel()
    jobs.append(engine.submit(JobRequest("a dog face", steps=2)))
    for job in jobs[1:-1]:
        job.cancel()
    finished(jobs[-1:])


def test_an_idle_server_forgets_its_jobs(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._book, "_keep", 0.05)
    finished([engine.submit(JobRequest("a pizza", seed=3, steps=2))])
    until(lambda: not engine._book._over)  # though nobody asks


def test_a_guess_of_a_row_gives_way_to_the_first_measurement() -> None:
    timings = Timings({1: 3.0}, guessed=True)
    timings.learn_row(1, 0.1)
    assert timings.row == {1: pytest.approx(0.1)}
    timings.learn_row(1, 1.1)
    assert 0.1 < timings.row[1] < 1.0


def test_waits_count_that_batches_do_several_images_at_a_time(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = next(iter(engine._models._served["emoji"].groups.values()))
    monkeypatch.setattr(group, "timings", Timings({1: 1.0, 4: 1.6}))
    monkeypatch.setattr(engine, "_leader", lambda: None)  # nothing begins
    alone = check(JobRequest("a dog face", steps=10), "emoji", PIPE.model).stages[0].rows
    shared = 0.4 * alone
    monkeypatch.setattr(engine, "_settings", EngineSettings(queue_seconds=9.5 * shared))
    first = engine.submit(JobRequest("a dog face", steps=10))
    assert first.seconds_left == pytest.approx(alone)  # a batch does not make it sooner
    second = engine.submit(JobRequest("a dog face", steps=10, n=8))
    assert engine._queue.seconds == pytest.approx(9 * shared)
    assert second.seconds_left == pytest.approx(9 * shared)
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest("a dog face", steps=10))
    assert refused.value.retry_after == pytest.approx(9 * shared / 4)
    engine._tells = 0.0
    second.seconds_left, second.ahead = None, 0
    engine._tell_queue()
    assert second.seconds_left == pytest.approx(9 * shared)
    for job in (first, second):
        job.cancel()


@pytest.mark.slow
def test_images_that_were_sent_are_let_go_when_they_were_read(engine: ImageEngine) -> None:
    def held(job: Job) -> int:
        return byte_size(image for item in engine._items[job.id] for image in item.inputs())

    def begun(**given: Any) -> Job:
        job = engine.submit(JobRequest("a lemon", steps=250, **given))
        until(lambda: job.pictures[0].step > 0, 60)
        return job

    image, mask = apple(), half()
    seen = [weakref.ref(image), weakref.ref(mask)]
    masked = begun(image=image, mask=mask)
    assert held(masked)  # they are pasted into the end
    masked.cancel()
    plain = begun(image=image, strength=0.99, once="k")
    assert not held(plain)
    del image, mask
    gc.collect()
    assert [one() for one in seen] == [None, None]
    assert not plain.status.over
    assert engine.submit(JobRequest("a lemon", image=apple(), strength=0.99, steps=250, once="k")) is plain
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest("a lemon", image=APPLE, strength=0.99, steps=250, once="k"))
    assert refused.value.code == "key_reused"
    plain.cancel()


def test_images_that_were_sent_are_bounded_in_all(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 * 64 * 3
    monkeypatch.setattr("canvax.server.engine.INPUT_BYTES", 2 * size)
    first = engine.submit(JobRequest("a dog face", image=APPLE.copy(), steps=200))
    until(lambda: first.pictures[0].step > 0, 60)  # what was read counts no more
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_leader", lambda: None)  # nothing else begins
        waiting = [engine.submit(JobRequest("a lemon", image=APPLE.copy(), steps=200, n=3)) for _ in range(2)]
        with pytest.raises(Rejected) as refused:
            engine.submit(JobRequest("a lemon", image=APPLE.copy()))
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.retry_after
        engine.submit(JobRequest("a lemon", seed=1)).cancel()
        waiting[0].cancel()
        waiting.append(engine.submit(JobRequest("a lemon", image=APPLE.copy(), steps=200)))
        for job in [first, *waiting]:
            job.cancel()
    with pytest.raises(Rejected) as refused:
        engine.submit(JobRequest("a lemon", image=APPLE.copy(), upscale=2.0))
    assert refused.value.status == 413


@pytest.mark.slow
def test_a_device_without_memory_costs_a_smaller_batch_and_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canvax.server.policy.WORTH_IT", 100.0)  # a busy machine may find that batches gain nothing
    engine, step, met = started(), Group.step, []

    def full(group: Group) -> Any:
        if group.size > 1:
            met.append(group.size)
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return step(group)

    try:
        monkeypatch.setattr(Group, "batch_for", lambda group, count: group.batches[-1])
        monkeypatch.setattr(Group, "step", full)
        jobs = [engine.submit(JobRequest("a red apple", seed=i, steps=4)) for i in range(6)]
        finished(jobs)
        assert met
        for i, job in enumerate(jobs):
            same(job, PIPE("a red apple", seed=i, num_inference_steps=4, options=QUIET).images)
    finally:
        engine.close()


def test_one_image_that_fails_does_not_harm_others(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writing.image_file

    def broken(pixels: Any, kind: Any, quality: Any, metadata: Any) -> bytes:
        if metadata["seed"] == 13:
            raise RuntimeError("secret words")
        return write(pixels, kind, quality, metadata)

    monkeypatch.setattr(writing, "image_file", broken)
    jobs = [engine.submit(JobRequest("a red apple", seed=10 + i, steps=3)) for i in range(6)]
    until(lambda: all(job.status.over for job in jobs))
    assert [job.status for job in jobs] == [Status.DONE] * 3 + [Status.FAILED] + [Status.DONE] * 2
    assert jobs[3].error == ("server_error", "the image could not be generated; the server's log says why")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.weekly)])
def test_several_devices_generate_the_same(devices: int) -> None:
    mesh = canvax.make_mesh(jax.devices()[:devices])
    batches = (devices,) if devices == 2 else (8, 16)
    engine = started(lambda name: canvax.load(name, progress=False, mesh=mesh), warm=(Warm(None, batches),))
    try:
        jobs = [engine.submit(JobRequest("a red apple", seed=i, steps=3 + i)) for i in range(devices + devices // 2)]
        finished(jobs)
        for i, job in enumerate(jobs):
            same(job, PIPE("a red apple", seed=i, num_inference_steps=3 + i, options=QUIET).images)
    finally:
        engine.close()


@pytest.mark.slow
def test_draining_finishes_what_was_accepted() -> None:
    engine = started(warm=(Warm(None, (1,)),))
    jobs = [engine.submit(JobRequest("a red apple", seed=i, steps=6)) for i in range(4)]
    assert engine.drain(60)
    finished(jobs)
    with pytest.raises(Rejected, match="shutting down") as refused:
        engine.submit(JobRequest("a red apple"))
    assert "programs" not in refused.value.message  # of the start
    engine.close()
    late = started(warm=(Warm(None, (1,)),))
    job = late.submit(JobRequest("a red apple", steps=200))
    assert not late.drain(0.2)
    assert (job.status, job.error and job.error[0]) == (Status.FAILED, "draining")
    late.close()


@pytest.mark.slow
def test_another_size_is_compiled_on_demand_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one size of requests is the most that may be kept, an earlier one is made ready again."""
    assert models.MOST_GROUPS == 32
    monkeypatch.setattr(models, "MOST_GROUPS", 1)
    made, make = list[str](), Group.compile

    def compiled(group: Group, *arguments: Any, **keywords: Any) -> None:
        made.append(group.key.size)
        make(group, *arguments, **keywords)

    monkeypatch.setattr(Group, "compile", compiled)
    engine = started(compile_on_demand=True)
    try:
        large = engine.submit(JobRequest("a red apple", seed=1, steps=3, width=96))
        small = engine.submit(JobRequest("a red apple", seed=1, steps=3))
        finished([small])
        assert not large.status.over
        finished([large], 120)
        same(large, PIPE("a red apple", seed=1, num_inference_steps=3, width=96, options=QUIET).images)
        for width in (96, 64, 72, 64, 96):
            finished([engine.submit(JobRequest("a red apple", seed=1, steps=3, width=width))], 120)
        assert made == ["64x64", "96x64", "72x64", "96x64"]
    finally:
        engine.close()


@pytest.mark.slow
def test_two_models_share_little_memory(tmp_path: Any) -> None:
    PIPE.save(tmp_path / "copy")
    metrics, names = Metrics(), {"emoji": "emoji", "copy": str(tmp_path / "copy")}
    said: list[str] = []
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(PIPE.params))
    settings = EngineSettings(warm=(Warm(None, (1,)),), memory=one * 3 // 2)
    engine = ImageEngine(list(names), settings, metrics, lambda name, **_: load(names[name]), say=said.append)
    engine.start()
    until(lambda: engine.state is State.READY, 300)
    try:
        for model in ("copy", "emoji", "copy"):
            job = engine.submit(JobRequest("a red apple", seed=1, steps=4, model=model))
            finished([job])
            same(job, PIPE("a red apple", seed=1, num_inference_steps=4, options=QUIET).images)
            assert engine._models.loaded() == 1
        assert any("taking copy off" in line for line in said)
    finally:
        engine.close()


@pytest.mark.slow
def test_weights_that_wait_in_the_hosts_memory() -> None:
    """The denoiser stays on the devices; of the others, one at a time counts. A model that is taken off comes back."""
    waiting = canvax.load("emoji", progress=False, mesh=PIPE.mesh, offload=True)
    served = models.ServedModel("emoji", lambda name: waiting)
    params = served.loaded_params()
    assert {name for name in params if waits(params[name])} == {"text_encoder", "vae"}
    plain = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for name, part in PIPE.params.items()}
    assert served.bytes == plain["unet"] + max(plain["text_encoder"], plain["vae"])
    served.take_off()
    assert served.bytes < sum(plain.values())
    served.put_on()
    assert not waits(served.loaded_params()["unet"])
    other = started(lambda name: waiting, warm=(Warm(None, (1,)),))
    try:
        jobs = [other.submit(JobRequest("a red apple", seed=seed, steps=4)) for seed in (1, 2)]
        finished(jobs)
        for seed, job in zip((1, 2), jobs, strict=True):
            same(job, PIPE("a red apple", seed=seed, num_inference_steps=4, options=QUIET).images)
    finally:
        other.close()


@pytest.mark.slow
def test_streamed_weights() -> None:
    """They are no bytes of the devices. A model that is taken off comes back streamed, whatever is there then."""
    pipe, asked = canvax.load("emoji", progress=False, mesh=PIPE.mesh, offload="layers"), []

    def again(name: str, **pinned: Any) -> Any:
        asked.append(pinned)
        return pipe

    served = models.ServedModel("emoji", again)
    assert served.bytes == pipe.memory().weights
    served.take_off()
    served.put_on()
    assert asked == [{}, {"offload": "layers"}]
    other = started(lambda name: pipe, warm=(Warm(None, (1,)),))
    try:
        job = other.submit(JobRequest("a red apple", seed=1, steps=4))
        finished([job])
        same(job, PIPE("a red apple", seed=1, num_inference_steps=4, options=QUIET).images)
    finally:
        other.close()


def test_compiling_on_demand_is_bounded(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size, by the room in the queue, and to one group at a time; what nobody waits for is not compiled."""
    built: list[tuple[str, int]] = []
    going, running = threading.Event(), threading.Semaphore(1)

    def build(key: Any, *, image: bool) -> Any:
        assert not image
        alone = running.acquire(blocking=False)
        built.append((key.size, alone))
        going.wait(60)
        running.release()
        raise canvax.CheckpointError("not today")

    monkeypatch.setattr(engine, "_settings", EngineSettings(compile_on_demand=True, queue_images=4))
    monkeypatch.setattr(engine._models, "_settings", engine._settings)
    monkeypatch.setattr(engine._models, "build", build)
    for too_much, code in ({"width": 2048}, "size_not_ready"), ({"width": 72, "n": 5}, "invalid_value"):
        with pytest.raises(Rejected) as refused:
            engine.submit(JobRequest("a red apple", **too_much))
        assert refused.value.code == code
    assert not built
    jobs = [engine.submit(JobRequest("a red apple", width=width)) for width in (72, 80, 88, 96)]
    with pytest.raises(Rejected, match="are waiting"):
        engine.submit(JobRequest("a red apple", width=104))
    jobs[1].cancel()
    going.set()
    until(lambda: all(job.status.over for job in jobs))
    assert built == [("72x64", True), ("88x64", True), ("96x64", True)]
    assert jobs[2].error == ("server_error", "not today")


def test_jobs_behind_the_compiler_of_another(engine: ImageEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the reason and no time, even if nobody waits for what is compiled; loading weights does not hide it."""
    going = threading.Semaphore(0)

    def build(key: Any, *, image: bool) -> Any:
        del key, image
        engine._announcer.expect(3)
        going.acquire(timeout=60)
        raise canvax.CheckpointError("not today")

    monkeypatch.setattr(engine, "_settings", EngineSettings(compile_on_demand=True))
    monkeypatch.setattr(engine._models, "_settings", engine._settings)
    monkeypatch.setattr(engine._models, "build", build)
    left = engine.submit(JobRequest("a red apple", width=72))
    until(lambda: left.waits_for == "compiling, 0 of 3 programs")
    left.cancel()
    later = engine.submit(JobRequest("a red apple", width=80))
    assert later.waits_for == "compiling for another job, 0 of 3 programs"
    assert job_json(later)["seconds_left"] is None
    with monkeypatch.context() as patch:
        patch.setattr(engine._models, "missing", lambda key: "emoji")
        (item,) = engine._items[later.id]
        engine._put_on(item.group)
    assert later.waits_for == "compiling for another job, 0 of 3 programs"
    going.release()
    until(lambda: later.waits_for == "compiling, 0 of 3 programs")
    going.release()
    until(lambda: later.status.over)


def test_an_image_too_large_for_the_memory_is_not_compiled(
    engine: ImageEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job fails with the figures."""
    monkeypatch.setattr(engine, "_settings", EngineSettings(compile_on_demand=True))
    monkeypatch.setattr(engine._models, "_settings", engine._settings)
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1_000_000)
    job = engine.submit(JobRequest("a red apple", width=128, height=128, steps=2))
    until(lambda: job.status.over)
    assert job.error
    assert job.error[0] == "out_of_memory"
    assert "1.0 MB are free" in job.error[1]


@pytest.mark.slow
def test_the_encoder_of_images_is_compiled_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On demand; another client does not wait for that, and a fault of the compiler fails it alone."""
    image, plain = Image.new("RGB", (64, 64), "red"), JobRequest("a red apple", steps=2, client="another")
    engine, compiled = started(compile_on_demand=True, warm=(Warm(None, (1,)),)), Group.compile_encoder
    going, faults = threading.Event(), [canvax.CheckpointError("not today")]

    def compile_encoder(group: Group, *arguments: Any) -> None:
        going.wait(60)
        if faults:
            raise faults.pop()
        compiled(group, *arguments)

    monkeypatch.setattr(Group, "compile_encoder", compile_encoder)
    (group,) = engine._models.groups()
    begins = JobRequest("a red apple", steps=4, image=image, strength=0.5, seed=1)
    assert engine._models.group(group).lacks(checked_item(engine, begins))
    waits = engine.submit(begins)
    until(lambda: "compiling" in waits.waits_for)
    other = engine.submit(plain)
    until(lambda: other.status is Status.DONE)
    assert (waits.status, other.waits_for) == (Status.QUEUED, "")
    going.set()
    until(lambda: waits.status.over)
    assert waits.error == ("server_error", "not today")
    done = engine.submit(begins)
    until(lambda: done.status is Status.DONE)
    want = PIPE("a red apple", num_inference_steps=4, image=image, strength=0.5, seed=1, options=QUIET).pixels[0]
    got = np.asarray(Image.open(io.BytesIO(done.pictures[0].data or b"")), np.float32) / 255
    assert np.abs(got - want).max() < 0.01
    assert len(engine._models.groups()) == 1
    engine.close()


def checked_item(engine: ImageEngine, job_request: JobRequest) -> Item:
    _, checked = engine._models.check(job_request)
    job = checked.job(job_request, lambda job: None)
    return checked.item(job, job.pictures[0])


def test_without_its_model_it_says_why() -> None:
    def fail(name: str) -> Any:
        raise canvax.CheckpointError(f"{name}: no such thing")

    engine = ImageEngine(["gone"], EngineSettings(), Metrics(), fail)
    engine.start()
    until(lambda: engine.state is State.FAILED)
    assert "gone: no such thing" in str(engine.failure)
    for refuses in (lambda: engine.submit(JobRequest("a red apple")), engine.models):
        with pytest.raises(Rejected) as refused:
            refuses()
        assert (refused.value.status, refused.value.code) == (503, "failed")
    engine.close()


def test_a_journal_that_cannot_be_written_is_a_metric(tmp_path: Any) -> None:
    journal, metrics = Journal(tmp_path / "jobs.db"), Metrics()
    engine = ImageEngine(["emoji"], EngineSettings(), metrics, load, journal=journal)
    assert b"canvax_journal_writable 1.0" in metrics.text()
    journal.broken = "the disk is full"
    assert b"canvax_journal_writable 0.0" in metrics.text()
    engine.close()


def test_closing_leaves_a_call_that_does_not_return() -> None:
    """Weights are being loaded when a server stops: the process must end soon after its drain."""
    engine, returned = ImageEngine(["emoji"], EngineSettings(), Metrics(), canvax.load), threading.Event()
    engine._state, engine._thread = State.READY, threading.Thread(target=returned.wait, daemon=True)
    engine._thread.start()
    closing = threading.Thread(target=engine.close, args=(0.1,))
    closing.start()
    closing.join(20)
    returned.set()
    assert not closing.is_alive()
