import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RewardFunctionConfig
from reward.function_worker import LOG_LIMIT
from reward.pool import GIVE_UP_AFTER, CallFailure, FunctionPool, FunctionSample, PoolError, check_functions

LIMIT = 0.5


def function(name: str, source: str = "f", timeout_s: float = LIMIT, **settings: Any) -> RewardFunctionConfig:
    spec = name if ":" in name else f"tests.reward._functions:{name}"
    return RewardFunctionConfig(name=source, function=spec, timeout_s=timeout_s, **settings)


def samples(*responses: str) -> list[FunctionSample]:
    return [
        FunctionSample(f"row/{i}", "prompt", response, i, {"level": i}, [{"role": "user", "content": "x"}])
        for i, response in enumerate(responses)
    ]


def score(config: RewardFunctionConfig, *responses: str, workers: int = 1, **settings: Any) -> list[Any]:
    with FunctionPool([config], workers, **settings) as pool:
        return pool.score(samples(*responses))["f"]


def kinds(results: list[Any]) -> list[Any]:
    return [entry.kind if isinstance(entry, CallFailure) else entry for entry in results]


@pytest.fixture(scope="module")
def shared() -> Iterator[FunctionPool]:
    """One pool for the cases that each leave it as they found it: that it survives them is part of the test."""
    with FunctionPool([function("by_response")]) as pool:
        yield pool


def is_gone(pid: int) -> bool:
    """Ended, or about to be reaped by whoever adopted it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


class TestScores:
    @pytest.mark.parametrize("workers", [1, 3])
    def test_results_are_in_input_order_whatever_the_order_in_which_they_come(self, workers: int) -> None:
        responses = [f"sleep {s}" for s in (0.15, 0.0, 0.1, 0.0, 0.05, 0.0)]
        assert score(function("by_response"), *responses, workers=workers) == [0.15, 0.0, 0.1, 0.0, 0.05, 0.0]

    def test_several_sources_score_every_sample(self) -> None:
        functions = [function("length", "long"), function("batch_rank", "rank"), function("sees", "sees")]
        with FunctionPool(functions, 2) as pool:
            results = pool.score(samples("bbb", "a", "cc"))
            assert list(results) == ["long", "rank", "sees"]
            assert results["long"] == [3.0, 1.0, 2.0]
            assert results["rank"] == [1.0, 0.0, 2.0]
            assert results["sees"] == [10036.0, 11116.0, 12226.0]
            assert pool.score([]) == {"long": [], "rank": [], "sees": []}

    def test_async_calls_wait_at_the_same_time(self) -> None:
        config = function("slow_length", concurrency=8, timeout_s=5.0)
        with FunctionPool([config]) as pool:
            pool.start()
            begin = time.monotonic()
            results = pool.score(samples(*["x"] * 16))["f"]
            assert time.monotonic() - begin < 5  # 16 x 0.5 s one after the other would be 8 s
        assert results == [1.0] * 16

    def test_numbers_of_other_types_are_numbers(self) -> None:
        assert score(function("by_response", timeout_s=10.0), "numpy", "numpy-bool", "bool", "give 3") == [
            0.5,
            1.0,
            1.0,
            3.0,
        ]
        assert score(function("batch_of", timeout_s=10.0, params={"what": "numpy"}), "a", "b") == [1.0, 1.0]

    def test_the_callers_thread_is_free_meanwhile(self) -> None:
        with FunctionPool([function("by_response")]) as pool:
            pool.start()
            pending = pool.submit(samples("sleep 0.2"))
            assert not pending.done()
            assert pending.result() == {"f": [0.2]}

    def test_a_call_is_cheap(self) -> None:
        """256 calls of a trivial function: tens of microseconds each when measured, here with room for a busy machine."""
        with FunctionPool([function("length", timeout_s=5.0)]) as pool:
            pool.score(samples("x"))
            begin = time.monotonic()
            assert pool.score(samples(*["xy"] * 256))["f"] == [2.0] * 256
            assert time.monotonic() - begin < 1.0


class TestFailures:
    """Each is told apart from a reward of 0, names sample and source, and leaves the other samples' scores alone."""

    @pytest.mark.parametrize(
        ("response", "kind", "message"),
        [
            ("sleep", "timeout", "no result within 0.5 s"),
            ("spin", "timeout", "no result within 0.5 s"),
            ("raise", "raised", "KeyError: 'broken on purpose'"),
            ("sys.exit", "raised", "SystemExit: 0"),
            ("thread", "raised", "a thread that it started failed"),
            ("exit 7", "died", "exited with code 7"),
            ("string", "type", r"returned '1\.0' \(str\)"),
            ("none", "type", r"returned None \(NoneType\)"),
            ("list", "type", r"returned \[1\.0\] \(list\)"),
            ("give nan", "not_finite", "returned nan"),
            ("give inf", "not_finite", "returned inf"),
            ("give -inf", "not_finite", "returned -inf"),
            ("odd large", "not_finite", r"returned 1000.*\(int\), which is infinite as a float"),
            ("odd larger", "not_finite", r"a value whose repr raises ValueError \(int\)"),
            ("odd float", "type", r"(?s)whose repr raises RuntimeError \(_Odd\), which can't be read .* no float"),
            ("odd repr", "type", r"a value whose repr raises RuntimeError \(list\); it must return a number"),
            ("odd class", "type", r"(?s)half a pair: \\ud800 \(_OddClass\), which can't be read .* no class"),
            ("odd error", "raised", "_OddError"),
            ("odd surrogate", "raised", r"half a pair: \\ud800"),
            ("connection close", "died", "its process"),
            ("connection text", "died", "wrote something that is no outcome into its connection"),
            ("connection pickle", "died", "wrote something that is no outcome into its connection"),
        ],
    )
    def test_a_function_that_misbehaves(self, shared: FunctionPool, response: str, kind: str, message: str) -> None:
        results = shared.score(samples("give 0", response, "give 2"))["f"]
        assert kinds(results) == [0.0, kind, 2.0]
        assert (results[1].source, results[1].sample) == ("f", "row/1")
        assert re.search(message, results[1].message)
        assert "reward source 'f', sample row/1" in str(results[1])

    @pytest.mark.parametrize(
        ("what", "expected"),
        [
            ("short", ["length"] * 3),
            ("number", ["type"] * 3),
            ("one none", ["type", 1.0, 1.0]),
            ("sleep", ["timeout"] * 3),
        ],
    )
    def test_a_batched_function_that_misbehaves(self, what: str, expected: list[Any]) -> None:
        assert kinds(score(function("batch_of", params={"what": what}), "a", "b", "c")) == expected

    def test_a_wrong_length_says_both_numbers(self) -> None:
        results = score(function("batch_of", params={"what": "short"}), "a", "b", "c")
        assert results[0].message == "returned 2 values for 3 samples"

    def test_an_async_function_that_misbehaves(self) -> None:
        responses = ["await 0", "raise", "await 60", "none", "await 0.1"]
        assert kinds(score(function("async_by_response"), *responses)) == [1.0, "raised", "timeout", "type", 1.0]

    @pytest.mark.parametrize("response", ["sleep", "exit 1"])
    def test_an_async_function_that_blocks_its_loop_fails_alone(self, response: str) -> None:
        results = score(function("async_by_response"), "await 0.2", response, "await 0.1")
        assert kinds(results) == [1.0, "timeout" if response == "sleep" else "died", 1.0]

    def test_the_limit_counts_one_call_and_not_its_chunk(self, shared: FunctionPool) -> None:
        assert shared.score(samples(*["sleep 0.15"] * 6))["f"] == [0.15] * 6

    def test_a_slow_import_is_outside_of_the_limit(self, tmp_path) -> None:
        (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\ndef one(response): return 1\n")
        assert score(function(f"{tmp_path / 'slow.py'}:one", timeout_s=0.3), "a") == [1.0]

    def test_after_many_overruns_in_a_row_the_rest_is_not_called(self) -> None:
        begin = time.monotonic()
        results = score(function("by_response", timeout_s=0.1), *["sleep"] * 100)
        assert kinds(results) == ["timeout"] * 100
        assert "not called" in results[-1].message
        assert "not called" not in results[GIVE_UP_AFTER - 1].message
        assert time.monotonic() - begin < 15

    def test_the_first_failure_can_end_the_scoring(self) -> None:
        with FunctionPool([function("by_response", timeout_s=5.0)], 2) as pool:
            begin = time.monotonic()
            results = pool.score(samples(*["raise"] * 4, *["sleep"] * 20), stop_at_failure=True)["f"]
            assert time.monotonic() - begin < 4
            assert {"raised", "skipped"} == set(kinds(results))
            assert pool.score(samples("give 1"))["f"] == [1.0]

    def test_bytes_written_into_the_pools_connection_are_not_unpickled(self, tmp_path) -> None:
        trap = tmp_path / "trap"
        results = score(function("by_response"), f"connection pickle {trap}", "give 2")
        assert kinds(results) == ["died", 2.0]
        assert not trap.exists()

    def test_a_forged_answer_is_not_taken_for_the_next_calls(self) -> None:
        with FunctionPool([function("by_response")]) as pool:
            pool.score(samples("connection forged"))
            for number in (2.0, 3.0, 4.0):
                assert pool.score(samples(f"give {number}"))["f"] == [number]

    @pytest.mark.parametrize("what", ["float", "repr", "class", "large"])
    def test_a_list_with_something_odd_in_it(self, what: str) -> None:
        results = score(function("batch_of", params={"what": f"odd {what}"}), "a", "b")
        assert kinds(results) == ["not_finite" if what == "large" else "type", 1.0]

    def test_a_worker_that_died_between_steps_is_replaced(self) -> None:
        with FunctionPool([function("by_response")]) as pool:
            assert pool.score(samples("give 1"))["f"] == [1.0]
            pid = pool.pids()[0]
            os.kill(pid, signal.SIGKILL)
            assert is_gone(pid)
            assert pool.score(samples("give 2"))["f"] == [2.0]


class TestProcesses:
    @pytest.mark.parametrize("how", ["fork", "spawn"])
    def test_a_hung_or_dead_worker_takes_its_children_along(self, tmp_path, how: str) -> None:
        file = tmp_path / "pids"
        assert kinds(score(function("by_response"), f"{how} {file}")) == ["timeout" if how == "fork" else "died"]
        worker, child = map(int, file.read_text().split())
        assert is_gone(worker)
        assert is_gone(child)

    @pytest.mark.parametrize("then", ["exit 0", "sleep", "give 1"])
    def test_a_double_fork_in_sessions_of_its_own_ends_with_its_worker(self, tmp_path, then: str) -> None:
        file = tmp_path / "pid"
        results = score(function("by_response", timeout_s=3.0), f"double-fork {file}", then)
        assert kinds(results) == [1.0, {"exit 0": "died", "sleep": "timeout", "give 1": 1.0}[then]]
        assert is_gone(int(file.read_text()))

    def test_a_killed_owner_leaves_no_double_fork_behind(self, tmp_path) -> None:
        file = tmp_path / "pid"
        program = (
            "from tests.reward.test_pool import *\n"
            f"FunctionPool([function('by_response', timeout_s=60.0)]).score(samples('double-fork {file}', 'sleep'))\n"
        )
        owner = subprocess.Popen([sys.executable, "-c", program])
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert is_gone(int(file.read_text()))

    def test_a_forked_child_that_returns_does_not_answer_for_the_function(self, tmp_path) -> None:
        file = tmp_path / "pid"
        assert score(function("by_response"), f"fork-and-return {file}", "give 3") == [1.0, 3.0]
        assert is_gone(int(file.read_text()))

    def test_close_ends_every_process_also_in_the_middle_of_a_call(self) -> None:
        pool = FunctionPool([function("by_response", timeout_s=60.0)], 2)
        pending = pool.submit(samples("sleep", "sleep"))
        while len(pool.pids()) < 2:
            time.sleep(0.02)
        time.sleep(0.5)
        pids = pool.pids()
        begin = time.monotonic()
        pool.close()
        pool.close()
        assert time.monotonic() - begin < 3
        assert all(is_gone(pid) for pid in pids)
        with pytest.raises(PoolError, match="closed"):
            pending.result()

    def test_a_killed_owner_leaves_nothing_behind(self, tmp_path) -> None:
        file = tmp_path / "pids"
        program = (
            "from tests.reward.test_pool import *\n"
            f"FunctionPool([function('by_response', timeout_s=60.0)]).score(samples('fork {file}'))\n"
        )
        owner = subprocess.Popen([sys.executable, "-c", program])
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        worker, child = map(int, file.read_text().split())
        assert is_gone(worker)
        assert is_gone(child)

    def test_what_a_function_prints_goes_to_its_log_and_into_the_message(self, tmp_path, capfd) -> None:
        with FunctionPool([function("by_response", timeout_s=2.0)], log_dir=tmp_path) as pool:
            results = pool.score(samples("print 5000", "exit 2"))["f"]
        assert kinds(results) == [1.0, "died"]
        log = (tmp_path / "reward-functions-0.log").read_text()
        assert log.count("noise") == 10000
        assert "noise 4999" in results[1].message
        assert "noise" not in "".join(capfd.readouterr())

    def test_a_log_has_a_limit_and_keeps_its_beginning_and_its_end(self, tmp_path) -> None:
        config = function("by_response", timeout_s=60.0)
        assert score(config, "print 1", "flood 40", "flood 40", log_dir=tmp_path) == [1.0] * 3
        log = (tmp_path / "reward-functions-0.log").read_bytes()
        assert LOG_LIMIT // 2 < len(log) <= LOG_LIMIT + (1 << 16)
        assert log.startswith(b"noise 0")
        assert b"the first line" in log
        assert b"output is missing here: a log takes 8 MiB" in log
        assert log.endswith(b"the last line\n")

    def test_strings_hash_alike_in_every_worker(self, tmp_path) -> None:
        (tmp_path / "hashes.py").write_text("def h(response): return hash(response) % 1000\n")
        config = function(f"{tmp_path / 'hashes.py'}:h")
        assert score(config, "a", "b") == score(config, "a", "b")


class TestLoading:
    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("import no_such_module", "No module named 'no_such_module'"),
            ("def other(response): return 1", "has no function 'f'"),
            ("raise SystemExit", "SystemExit"),
            ("import os; os._exit(4)", "exited with code 4"),
        ],
    )
    def test_a_function_that_cannot_be_loaded_is_found_before_anything_starts(
        self, tmp_path, code: str, message: str
    ) -> None:
        (tmp_path / "mine.py").write_text(code)
        with pytest.raises(PoolError, match=message):
            check_functions([function(f"{tmp_path / 'mine.py'}:f", "mine")])

    def test_functions_that_can_be_loaded_pass(self) -> None:
        check_functions([function("length"), function("by_response", "g")])
        check_functions([])

    def test_no_workers(self) -> None:
        with pytest.raises(ValueError, match="function_workers is 0"):
            FunctionPool([function("length")], 0)
