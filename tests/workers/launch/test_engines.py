"""Engines: requests at any time, a future for each, calls in their turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.workers.launch.toy import ToyEngine
from workers.launch.group import WorkerError
from workers.launch.service import BUSY


@pytest.fixture
def gate(tmp_path):
    """A request that is in work until the test opens its gate."""

    class Gate:
        path = tmp_path / "open"
        request = ("until", str(path))
        open = path.touch

    yield Gate
    Gate.open()


def test_each_request_has_its_own_future_and_the_later_one_may_finish_first(engines, gate):
    first, second = engines.submit(0, [gate.request, ("count", 1)])
    assert second.result(30)[0] == "count"
    (third,) = engines.submit(0, [("count", 3)])
    assert third.result(30)[0] == "count"
    assert not first.done()
    gate.open()
    assert first.result(30)[0] == str(gate.path)


def test_nothing_to_do_is_done(engines):
    assert engines.submit(0, []) == []


def test_no_replica_waits_for_another(engines, gate):
    (waiting,) = engines.submit(0, [gate.request])
    for _ in range(3):
        done = engines.submit(1, [("count", n) for n in (3, 1, 2)])
        assert [future.result(30)[0] for future in done] == ["count"] * 3
    assert not waiting.done()


def test_a_call_comes_after_the_requests_before_it_and_before_those_after_it(start, gate):
    group = start("loading", ToyEngine)
    before = group.submit(0, [gate.request, ("count", 2)])
    (loading,) = group.send("load_weights", version=7)
    (after,) = group.submit(0, [("echo", "late")])
    assert before[1].result(30) == ("count", 0)
    assert not loading.done()
    assert not after.done()
    gate.open()
    assert before[0].result(30) == (str(gate.path), 0)
    assert loading.result(30).value() == []
    assert after.result(30) == ("late", 7)


def test_a_request_that_is_refused_fails_alone_with_the_engines_words(engines):
    good, bad, other = engines.submit(0, [("count", 2), ("refused", "this prompt"), ("count", 1)])
    with pytest.raises(
        WorkerError, match=r"(?s)engine-0 .*raised in its requests.*ValueError: this prompt is too long"
    ):
        bad.result(30)
    assert good.result(30)[0] == other.result(30)[0] == "count"


def test_a_step_that_raises_fails_every_open_request_and_the_engine_goes_on(engines, gate):
    futures = engines.submit(1, [gate.request, ("count", 10**6), ("spoil", None)])
    for future in futures:
        with pytest.raises(WorkerError, match=r"(?s)engine-1 .*RuntimeError: the step fails"):
            future.result(30)
    assert engines.submit(1, [("count", 1)])[0].result(30)[0] == "count"


def test_an_engine_that_dies_fails_every_request_and_call_and_leaves_the_other_alone(start, gate):
    group = start("mortal", ToyEngine, 2)
    (other,) = group.submit(1, [gate.request])
    futures = group.submit(0, [gate.request, ("crash", None)])
    futures += group.send("load_weights", version=1)[:1]
    for future in futures:
        with pytest.raises(WorkerError, match=r"mortal-0 \(pid \d+\) was killed by SIGSEGV"):
            future.result(30)
    gate.open()
    assert other.result(30)[0] == str(gate.path)


def test_a_result_that_cannot_be_read_ends_its_engine_by_name_and_nobody_elses(start, engines):
    (future,) = start("garbled", ToyEngine).submit(0, [("unreadable", None)])
    with pytest.raises(WorkerError, match=r"garbled-0 .*sent what can't be read here \(LookupError: not here\)"):
        future.result(30)
    assert engines.submit(0, [("count", 1)])[0].result(30)[0] == "count"


def test_how_busy_it_is_an_engine_says_at_once_while_requests_are_in_work(engines, gate):
    (future,) = engines.submit(0, [gate.request])
    busy, _ = engines.run(BUSY)
    assert set(busy) <= {"generate", "load", "load_weights"}
    assert not future.done()


def test_many_threads_may_submit(engines):
    def ask(thread: int) -> list[bool]:
        words = [f"{thread}.{i}" for i in range(40)]
        futures = [engines.submit(i % 2, [("echo", word), ("count", 2)])[0] for i, word in enumerate(words)]
        wait(futures, 60)
        return [future.result()[0] == word for future, word in zip(futures, words, strict=True)]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(found) for found in pool.map(ask, range(8)))


def test_many_large_requests_do_not_stop_the_traffic(engines):
    words = [str(i) * 200_000 for i in range(10)]
    futures = [engines.submit(0, [("echo", word)])[0] for word in words]
    assert [future.result(60)[0] for future in futures] == words


def test_requests_to_a_worker_that_takes_none_are_an_error(start):
    (future,) = start("deaf").submit(0, [("count", 1)])
    with pytest.raises(WorkerError, match=r"(?s)deaf-0 .*requests came for a worker that takes none"):
        future.result(30)
