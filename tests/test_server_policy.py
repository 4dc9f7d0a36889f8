"""Who comes first: a clock of our own, no devices."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from canvax.server.policy import PATIENCE, Queue, best_batch

LOADED = {"small": None, "large": None}


@dataclass(eq=False)
class Work:
    name: str
    seconds: float
    deadline: float = 0.0
    client: str = ""
    group: str = "small"
    turn: float | None = None
    adapted: bool = False
    done: float = 0.0
    finished: float | None = None

    @property
    def left(self) -> float:
        return self.seconds - self.done


def arrive(queue: Queue, now: float, name: str, seconds: float, **more: str) -> Work:
    work = Work(name, seconds, now + PATIENCE * seconds, **more)
    queue.add(work)
    return work


def run(
    queue: Queue, until: float, now: float = 0.0, slice_: float = 0.5, groups: dict[str, float | None] | None = None
) -> float:
    """One image at a time, in slices; the time when there is nothing more to do, or ``until``."""
    while now < until and (work := queue.first(groups or LOADED, now)) is not None:
        if queue.waits(work):
            queue.begin(work, now)
        now += min(slice_, work.left)
        work.done += min(slice_, work.left)
        if work.left <= 0:
            work.finished = now
            queue.remove(work)
    return now


@pytest.mark.parametrize(
    ("seconds", "waiting", "best"),
    [
        ({1: 1.0, 4: 2.0}, 1, 1),
        ({1: 1.0, 4: 2.0}, 2, 1),  # 1 s for each image either way, and the first one sooner
        ({1: 1.0, 4: 2.0}, 3, 4),
        ({1: 1.0, 4: 2.0}, 9, 4),
        ({1: 1.0, 4: 3.9}, 9, 1),  # a gain of 2 % is not worth waiting for others
        ({1: 1.0, 2: 1.2, 4: 2.0, 8: 4.0}, 8, 4),
        ({1: 1.0, 2: 1.2, 4: 2.0, 8: 4.0}, 2, 2),
        ({8: 1.0}, 1, 8),
    ],
)
def test_the_batch_that_is_soonest_done(seconds: dict[int, float], waiting: int, best: int) -> None:
    assert best_batch(seconds, waiting) == best


def test_short_work_passes_long_work() -> None:
    queue = Queue()
    long = arrive(queue, 0.0, "long", 50.0)
    assert run(queue, 10.0) == 10.0
    short = arrive(queue, 10.0, "short", 2.0)
    run(queue, 100.0, 10.0)
    assert short.finished == 12.0
    assert long.finished == 52.0


def test_work_of_the_same_length_is_not_interrupted() -> None:
    queue = Queue()
    works = [arrive(queue, 0.1 * i, str(i), 10.0) for i in range(5)]
    run(queue, 100.0)
    assert [work.finished for work in works] == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_a_stream_of_short_work_does_not_starve_long_work() -> None:
    """0.8 s of short work arrive each second: the long image is done by its deadline and its own time."""
    queue, now = Queue(), 0.0
    long = arrive(queue, 0.0, "long", 20.0)
    for second in range(400):
        arrive(queue, now, f"short {second}", 0.8)
        now = max(run(queue, second + 1.0, now), second + 1.0)
        if long.finished:
            break
    assert long.finished is not None
    assert long.finished < PATIENCE * 20 + 2 * 20


def test_a_second_pass_does_not_starve() -> None:
    """Its first pass began after minutes of work, and the counts of them are gone: the queue was empty meanwhile."""
    queue, now = Queue(), 0.0

    def short_work(until: float) -> None:
        nonlocal now
        while now < until and not twice.finished:
            while queue.waiting("small") < 2:
                arrive(queue, now, "short", 2.0)
            now = run(queue, now + 1.0, now)

    twice = Work("twice", 4.0)
    short_work(600.0)
    twice.deadline = now + PATIENCE * 4.0
    queue.add(twice)
    now = run(queue, now + 100.0, now)
    twice.group, twice.done, twice.deadline, twice.finished = "large", 0.0, now + PATIENCE * 4.0, None
    queue.add(twice)
    short_work(now + PATIENCE * 4.0 + 2 * 4.0)
    assert twice.finished


def test_a_client_with_thousands_does_not_delay_another_one() -> None:
    queue = Queue()
    for i in range(2000):
        arrive(queue, 0.0, f"flood {i}", 1.0, client="flood")
    run(queue, 100.0)
    own = [arrive(queue, 100.0, f"own {i}", 1.0, client="quiet") for i in range(5)]
    run(queue, 130.0, 100.0)
    waits = [work.finished - 100.0 for work in own if work.finished]
    assert len(waits) == 5
    assert max(waits) <= 11.0  # every second one is its own


def test_an_image_from_the_end_of_a_long_queue_is_interrupted_too() -> None:
    queue = Queue()
    for i in range(100):
        arrive(queue, 0.0, f"flood {i}", 10.0, client="flood")
    run(queue, 502.0)  # all their deadlines are over
    short = arrive(queue, 502.0, "short", 1.0, client="quiet")
    run(queue, 530.0, 502.0)
    assert short.finished == 503.0


def test_turns_of_clients_are_of_the_same_length_in_seconds() -> None:
    queue = Queue()
    for i in range(100):
        arrive(queue, 0.0, f"a {i}", 4.0, client="a", group="large")
        arrive(queue, 0.0, f"b {i}", 1.0, client="b")
    works = list(queue)
    run(queue, 100.0)
    given = {client: sum(w.done for w in works if w.client == client) for client in "ab"}  # type: ignore[attr-defined]
    assert abs(given["a"] - given["b"]) <= 5.0


def test_time_without_work_is_no_credit() -> None:
    queue = Queue()
    for i in range(50):
        arrive(queue, 0.0, f"a {i}", 1.0, client="a")
    run(queue, 40.0)
    for i in range(50):
        arrive(queue, 40.0, f"b {i}", 1.0, client="b")
    rest = [work for work in queue if work.client == "a"]
    run(queue, 60.0, 40.0)
    assert 8 <= sum(work.finished is not None for work in rest) <= 12  # type: ignore[attr-defined]


def test_a_model_that_is_not_loaded_waits_for_those_that_are() -> None:
    queue, groups = Queue(), {"small": None, "large": 0.0}
    other = arrive(queue, 0.0, "other", 1.0, group="large")
    first = arrive(queue, 1.0, "first", 1.0)
    assert queue.first(groups, 2.0) is first
    queue.remove(first)
    assert queue.first(groups, 2.0) is other
    assert queue.first({"small": None}, 2.0) is None


def test_a_model_that_is_not_loaded_waits_until_its_deadline() -> None:
    """Then nothing else begins, and it is loaded when what has begun is done; but not so soon after another one."""
    queue, groups = Queue(), {"small": None, "large": 10.0}
    other = arrive(queue, 0.0, "other", 1.0, group="large")  # its deadline is 3
    begun, waits = (arrive(queue, 0.0, name, 5.0) for name in ("begun", "waits"))
    queue.begin(begun, 0.0)
    assert queue.next("small", groups, 10.0) is waits
    assert queue.first(groups, 11.0) is begun
    assert queue.next("small", groups, 11.0) is None
    queue.remove(begun)
    assert queue.first(groups, 11.0) is other
    assert queue.first({"small": 12.0, "large": None}, 11.0) is other  # it is loaded
    queue.remove(other)
    assert queue.first(groups, 11.0) is waits


def test_a_stream_does_not_starve_a_model_that_is_not_loaded() -> None:
    queue, now = Queue(), 0.0
    other = arrive(queue, 0.0, "other", 1.0, client="bob", group="large")
    arrive(queue, 0.0, "stream", 1.0, client="alice")
    while queue.first({"small": None, "large": 0.0}, now) is not other:
        assert now < PATIENCE + 2
        arrive(queue, now, "stream", 1.0, client="alice")
        now = run(queue, now + 1.0, now, groups={"small": None})


def test_a_batch_that_is_filled_again_and_again_does_not_starve_another_group() -> None:
    """Of one client: two images of a batch never end together, and others take their slots."""
    queue, now = Queue(), 0.0
    for i in range(100):
        arrive(queue, 0.0, f"stream {i}", 4.0 + i % 3)
    other = arrive(queue, 0.0, "other", 6.0, group="large")
    while (leader := queue.first(LOADED, now)) is not other:
        assert now < 4 * PATIENCE * other.seconds
        while len(queue.begun) < 2 and (work := queue.next("small", LOADED, now)) is not None:
            queue.begin(work, now)
        assert leader in queue.begun
        now += 1.0
        for work in list(queue.begun):
            work.done += 1.0
            if work.left <= 0:
                queue.remove(work)


def test_images_that_wait_for_places_are_passed_by_others() -> None:
    queue = Queue()
    waits = arrive(queue, 0.0, "waits", 1.0)
    waits.adapted = True
    queue = Queue()
    queue.add(waits)
    plain = arrive(queue, 1.0, "plain", 1.0)
    assert queue.first(LOADED, 1.0, lambda works: [work for work in works if not work.adapted]) is plain


def test_nothing_is_lost_whatever_happens() -> None:
    """Random arrivals, ends and removals: the queue holds what it should, and its count of seconds is right."""
    chance, queue, alive = random.Random(0), Queue(), []
    for i in range(3000):
        what = chance.random()
        if what < 0.5 or not alive:
            client, group = chance.choice("abc"), chance.choice(["small", "large"])
            alive.append(arrive(queue, i, str(i), chance.uniform(0.1, 9.0), client=client, group=group))
        elif what < 0.75:
            work = queue.first(LOADED, i)
            assert work in alive
            if queue.waits(work):
                queue.begin(work, i)
        else:
            work = alive.pop(chance.randrange(len(alive)))
            queue.remove(work)
            queue.remove(work)  # a second time does nothing
        assert len(queue) == len(alive)
        assert set(map(id, queue)) == set(map(id, alive))
        assert queue.seconds == pytest.approx(sum(work.left for work in alive), abs=1e-6)


def test_an_empty_queue_has_no_work() -> None:
    queue: Queue[Work] = Queue()
    works = [Work(str(i), seconds) for i, seconds in enumerate((0.1, 0.2, 0.3))]
    for work in works:
        queue.add(work)
    for work in works:
        queue.begin(work, 0.0)
        queue.remove(work)
    assert queue.seconds == 0.0  # 0.1 + 0.2 + 0.3 - 0.1 - 0.2 - 0.3 of floats is 1e-16
