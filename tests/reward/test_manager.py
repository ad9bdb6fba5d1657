import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RewardConfig, RewardFunctionConfig, RewardModelConfig
from reward.manager import RewardError, RewardManager
from reward.normalise import RunningNormaliser
from reward.pool import PoolError
from rollout.types import Episode, Prompt, SampleKey, Score
from tests.reward._functions import meet
from tests.trainer.data._tokenizers import word_tokenizer
from workers.launch.group import WorkerError

NAN, INF = float("nan"), float("inf")


def function(name: str, source: str = "f", **settings: Any) -> RewardFunctionConfig:
    settings = {"timeout_s": 10.0, **settings}
    return RewardFunctionConfig(name=source, function=f"tests.reward._functions:{name}", **settings)


def config(*functions: RewardFunctionConfig, **settings: Any) -> RewardConfig:
    return RewardConfig(full_determinism=settings.pop("full_determinism", False), functions=list(functions), **settings)


def episode(text: str, sample: int = 0, source: str = "rows") -> Episode:
    prompt = Prompt(f"{source}/4", source, (3,), "a", ({"role": "user", "content": "a"},), answer=2, extra={"level": 1})
    return Episode(SampleKey(0, sample), prompt, 1, (4,), (True,), (-1.0,), "stop", text)


def group(*texts: str) -> list[Episode]:
    return [episode(text, sample) for sample, text in enumerate(texts)]


Build = Callable[..., RewardManager]


@pytest.fixture
def build() -> Iterator[Build]:
    managers = []

    def make(reward: RewardConfig, **settings: Any) -> RewardManager:
        managers.append(RewardManager(reward, **settings))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


class Replicas:
    """A worker group in this process, of engines that score a conversation by what `value` says of its length.

    Each engine works in a thread of its own, a conversation at a time.
    """

    def __init__(self, size: int, value: Callable[[int], float] = float) -> None:
        self.size, self.value = size, value
        self.received: list[list[list[int]]] = [[] for _ in range(size)]
        self._engines = [ThreadPoolExecutor(1) for _ in range(size)]

    @property
    def scored(self) -> int:
        return sum(map(len, self.received))

    def submit(self, worker: int, requests: Sequence[list[int]]) -> list[Future[float]]:
        self.received[worker] += requests
        return [self._engines[worker].submit(self.value, len(ids)) for ids in requests]


MODEL = RewardModelConfig(path="model", weight=0.5, apply_chat_template=False)


def with_model(build: Build, replicas: Replicas, *functions: RewardFunctionConfig, **settings: Any) -> RewardManager:
    context = settings.pop("model_context", None)
    return build(
        config(*functions, model=MODEL, **settings),
        model_group=replicas,
        tokenizer=word_tokenizer(),
        model_context=context,
    )


class TestSum:
    def test_sources_are_weighted_and_added(self, build: Build) -> None:
        reward = config(function("length", "long", weight=0.1), function("by_response", "value", weight=-2.0))
        scores, _ = build(reward).score(group("give 1", "give 10"))
        assert scores[0].by_source == {"long": 6.0, "value": 1.0}
        assert [score.total for score in scores] == [0.1 * 6.0 + -2.0 * 1.0, 0.1 * 7.0 + -2.0 * 10.0]

    def test_a_function_sees_prompt_answer_columns_and_conversation(self, build: Build) -> None:
        scores, _ = build(config(function("sees"))).score(group("xx"))
        assert scores[0].total == 1 + 10 * 2 + 100 * 2 + 1000 * 1 + 10000 * 1

    @pytest.mark.parametrize("name", ["ends_with_eos", "all_end_with_eos"])
    def test_a_function_that_asks_for_special_tokens_sees_them(self, build: Build, name: str) -> None:
        tokenizer = word_tokenizer()
        episodes = [
            replace(episode("a", 0), response_ids=(3, 2), response_mask=(True,) * 2, logprobs=(-1.0,) * 2),
            replace(episode("a", 1), response_ids=(3,)),
        ]
        manager = build(config(function(name)), decode_all=lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids)))
        scores, _ = manager.score(episodes)
        assert [score.total for score in scores] == [1.0, 0.0]

    def test_nothing_is_decoded_for_functions_that_do_not_ask(self, build: Build) -> None:
        def never(ids: object) -> str:
            raise AssertionError

        scores, _ = build(config(function("length")), decode_all=never).score(group("abc"))
        assert scores[0].total == 3.0

    @pytest.mark.parametrize("replicas", [1, 2, 4])
    def test_the_reward_model_gives_the_same_scores_with_any_number_of_replicas(
        self, build: Build, replicas: int
    ) -> None:
        engines = Replicas(replicas)
        scores, _ = with_model(build, engines, function("length")).score(group(" b", " b b", " b b b"))
        assert [score.by_source for score in scores] == [
            {"model": 2.0, "f": 2.0},
            {"model": 3.0, "f": 4.0},
            {"model": 4.0, "f": 6.0},
        ]
        assert [score.total for score in scores] == [3.0, 5.5, 8.0]
        assert engines.received[0][0] == [3, 4]

    def test_functions_work_while_the_reward_model_does(self, build: Build, tmp_path: Path) -> None:
        function_began, model_began = tmp_path / "function", tmp_path / "model"

        def value(length: int) -> float:
            meet(model_began, function_began)
            return 2.5

        manager = with_model(build, Replicas(1, value), function("by_response", timeout_s=60.0))
        (score,), _ = manager.score(group(f"meet {function_began} {model_began}"))
        assert score.by_source == {"model": 2.5, "f": 1.0}

    def test_one_that_works_alone_meets_nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        with pytest.raises(TimeoutError, match="model has begun, but function has not"):
            meet(tmp_path / "model", tmp_path / "function")

    @pytest.mark.parametrize("early", [[], [2], [2, 0], [1, 2, 0]])
    def test_what_is_scored_ahead_is_scored_once_and_comes_in_order(self, build: Build, early: list[int]) -> None:
        engines = Replicas(1)
        manager = with_model(build, engines, function("length"))
        episodes = group(" b", " b b", " b b b")
        pending = manager.begin()
        for row in early:
            pending.add(episodes[row])
        pending.complete(episodes)
        assert manager.score(episodes, pending) == with_model(build, Replicas(1), function("length")).score(episodes)
        assert engines.scored == 3

    def test_a_conversation_that_several_samples_share_is_scored_once(self, build: Build) -> None:
        engines = Replicas(2)
        manager = with_model(build, engines)
        pending = manager.begin()
        episodes = group(" b", " b b", " b", " b b b", " b b")
        for episode in episodes[3:]:
            pending.add(episode)
        scores, _ = manager.score(episodes, pending)
        assert engines.scored == 3
        assert [score.total for score in scores] == [0.5 * engines.value(n) for n in (2, 3, 2, 4, 3)]

    def test_scoring_ahead_goes_on_while_the_caller_does_something_else(self, build: Build) -> None:
        begun, done = threading.Event(), threading.Event()

        def value(length: int) -> float:
            begun.set()
            assert done.wait(30)
            return 2.5

        manager = with_model(build, Replicas(1, value))
        pending = manager.begin()
        pending.complete(group("a"))  # would never return if it waited for the engine
        assert begun.wait(30)
        done.set()
        (score,), _ = manager.score(group("a"), pending)
        assert score.by_source["model"] == 2.5

    def test_an_engine_that_fails_ahead_is_reported_when_the_scores_are_asked_for(self, build: Build) -> None:
        def broken(length: int) -> float:
            raise WorkerError("reward-0 was killed by SIGKILL")

        manager = with_model(build, Replicas(1, broken))
        pending = manager.begin()
        pending.complete(group("a"))
        with pytest.raises(WorkerError, match="reward-0"):
            manager.score(group("a"), pending)

    def test_without_a_reward_model_what_finishes_early_waits_for_the_whole_batch(self, build: Build) -> None:
        manager = build(config(function("batch_rank")))
        pending = manager.begin()
        episodes = group("a", "bb", "ccc")
        pending.add(episodes[2])
        assert pending.functions is None
        assert manager.score(episodes, pending) == build(config(function("batch_rank"))).score(episodes)


class TestErrorPolicy:
    """Group rewards [1, NaN, 0, 1] and their kin."""

    BAD = pytest.mark.parametrize(
        ("bad", "kind"),
        [
            ("give nan", "not_finite"),
            ("none", "type"),
            ("give inf", "not_finite"),
            ("raise", "raised"),
            ("exit 3", "died"),
        ],
    )

    @BAD
    def test_fail_names_sample_and_source(self, build: Build, bad: str, kind: str) -> None:
        with pytest.raises(RewardError, match=rf"'f', sample rows/4 \(task 0, sample 1\): {kind}"):
            build(config(function("by_response"))).score(group("give 1", bad, "give 0", "give 1"))

    @BAD
    def test_drop_takes_the_sample_out(self, build: Build, bad: str, kind: str) -> None:
        manager = build(config(function("by_response"), on_error="drop"))
        scores, metrics = manager.score(group("give 1", bad, "give 0", "give 1"))
        assert [score.dropped for score in scores] == [False, True, False, False]
        assert [score.total for score in scores if not score.dropped] == [1.0, 0.0, 1.0]
        assert scores[1].error is not None
        assert kind in scores[1].error
        assert scores[1].by_source == {}
        assert math.isfinite(scores[1].total)
        assert (metrics["reward/errors"], metrics["reward/dropped"], metrics["reward/f/errors"]) == (1.0, 1.0, 1.0)
        assert metrics["reward/f/mean"] == 2.0 / 3.0

    @BAD
    def test_penalise_gives_the_penalty(self, build: Build, bad: str, kind: str) -> None:
        manager = build(config(function("by_response", weight=3.0), on_error="penalise", penalty=-0.5))
        scores, metrics = manager.score(group("give 1", bad, "give 0", "give 1"))
        assert [score.total for score in scores] == [3.0, -0.5, 0.0, 3.0]
        assert not any(score.dropped for score in scores)
        assert scores[2].error is None
        assert (metrics["reward/errors"], metrics["reward/penalised"], metrics["reward/dropped"]) == (1.0, 1.0, 0.0)

    def test_one_failing_source_of_two_fails_the_sample(self, build: Build) -> None:
        reward = config(function("by_response", "value"), function("length", "long"), on_error="drop")
        scores, _ = build(reward).score(group("raise", "give 1"))
        assert scores[0].dropped
        assert scores[0].by_source == {"long": 5.0}

    def test_a_source_of_weight_zero_is_only_watched(self, build: Build) -> None:
        reward = config(function("by_response", "watched", weight=0.0), function("length", "long"))
        scores, metrics = build(reward).score(group("raise", "give inf"))
        assert [score.total for score in scores] == [5.0, 8.0]
        assert [score.error for score in scores] == [None, None]
        assert metrics["reward/watched/errors"] == 2.0

    @pytest.mark.parametrize("value", [NAN, INF])
    def test_the_reward_model_is_held_to_the_same(self, build: Build, value: float) -> None:
        def logit(length: int) -> float:
            return value if length == 3 else float(length)

        manager = with_model(build, Replicas(2, logit), on_error="drop")
        scores, _ = manager.score(group(" b", " b b", " b b b"))
        assert [score.dropped for score in scores] == [False, True, False]
        assert "'model'" in (scores[1].error or "")

    def test_a_conversation_beyond_the_reward_models_context_fails_its_sample_alone(self, build: Build) -> None:
        engines = Replicas(2)
        manager = with_model(build, engines, on_error="penalise", model_context=3)
        scores, _ = manager.score(group(" b", " b b b", " b b"))
        assert [score.total for score in scores] == [1.0, -1.0, 1.5]
        assert "has 4 tokens" in (scores[1].error or "")
        assert engines.received == [[[3, 4]], [[3, 4, 4]]]

    def test_a_sum_that_overflows_is_an_error_too(self, build: Build) -> None:
        reward = config(function("by_response", weight=1e30), on_error="drop")
        scores, metrics = build(reward).score(group("give 1e30", "give 1e39", "give 1"))
        assert [score.dropped for score in scores] == [True, True, False]
        assert "weighted sum" in (scores[0].error or "")
        assert "infinite in the float32" in (scores[1].error or "")
        assert all(math.isfinite(value) for value in metrics.values())

    def test_nothing_left_to_train_on_ends_the_run(self, build: Build) -> None:
        manager = build(config(function("by_response"), on_error="drop"))
        with pytest.raises(RewardError, match="every sample was dropped"):
            manager.score(group("raise", "none"))

    def test_a_hanging_function_costs_its_limit(self, build: Build) -> None:
        manager = build(config(function("by_response", timeout_s=0.5), on_error="penalise"))
        scores, _ = manager.score(group("give 1", "sleep", "give 2"))
        assert [score.total for score in scores] == [1.0, -1.0, 2.0]


class TestAudit:
    def test_a_function_that_repeats_itself_passes(self, build: Build) -> None:
        manager = build(config(function("length"), function("batch_rank", "rank"), audit_rows=2, full_determinism=True))
        _, metrics = manager.score(group("a", "bb", "c"))
        assert metrics["reward/audit_mismatches"] == 0.0

    def test_one_that_does_not_is_an_error_under_full_determinism(self, build: Build) -> None:
        manager = build(config(function("changing"), audit_rows=2, full_determinism=True))
        with pytest.raises(RewardError, match=r"'f' gave sample rows/4 .* 4\.0, then 6\.0.*level D1"):
            manager.score(group("a", "b", "c"))

    def test_and_a_warning_without_it(self, build: Build, caplog: pytest.LogCaptureFixture) -> None:
        manager = build(config(function("changing"), audit_rows=2))
        with caplog.at_level(logging.WARNING):
            _, metrics = manager.score(group("a", "b", "c"))
        assert metrics["reward/audit_mismatches"] == 2.0
        assert "scored differently" in caplog.text

    def test_without_an_audit_nobody_notices(self, build: Build) -> None:
        scores, _ = build(config(function("changing"), full_determinism=True)).score(group("a", "b"))
        assert [score.total for score in scores] == [1.0, 2.0]


class TestMetrics:
    def test_sources_and_totals(self, build: Build) -> None:
        reward = config(function("length", "long", weight=0.5), function("by_response", "value"))
        episodes = [episode("give 1", 0, "easy"), episode("give 3", 1, "hard"), episode("give 30", 2, "hard")]
        _, metrics = build(reward).score(episodes)
        assert metrics["reward/value/mean"] == 34.0 / 3.0
        assert (metrics["reward/long/min"], metrics["reward/long/max"]) == (6.0, 7.0)
        assert metrics["reward/total/mean"] == (4.0 + 6.0 + 33.5) / 3.0
        assert metrics["reward/long/std"] == pytest.approx(math.sqrt(2.0 / 9.0), abs=1e-15)
        assert (metrics["data/easy/reward"], metrics["data/hard/reward"]) == (4.0, 19.75)
        assert metrics["reward/errors"] == 0.0


class TestNormalisation:
    def test_the_running_moments_are_those_of_everything_seen(self) -> None:
        values = [0.5, -1.0, 3.0, 2.0, 7.25, 0.0, 1.5]
        normaliser = RunningNormaliser()
        for batch in (values[:3], values[3:4], [], values[4:]):
            normaliser.update(batch)
        mean = sum(values) / 7
        assert normaliser.count == 7
        assert normaliser.mean == pytest.approx(mean, abs=1e-15)
        assert normaliser.std == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / 7), abs=1e-15)

    def test_rewards_are_trained_in_standard_deviations(self, build: Build) -> None:
        manager = build(config(function("by_response"), normalise=True))
        scores, metrics = manager.score(group("give 1", "give 3"))
        assert [round(score.total, 6) for score in scores] == [-1.0, 1.0]
        assert scores[0].by_source == {"f": 1.0}
        assert (metrics["reward/total/mean"], metrics["reward/running_mean"], metrics["reward/running_std"]) == (
            2.0,
            2.0,
            1.0,
        )

    def test_a_saved_state_goes_on_exactly(self, build: Build) -> None:
        straight = build(config(function("by_response"), normalise=True))
        straight.score(group("give 1", "give 3"))
        resumed = build(config(function("by_response"), normalise=True))
        resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        episodes = group("give 0.1", "give 0.7")
        assert resumed.score(episodes) == straight.score(episodes)
        fresh = build(config(function("by_response"), normalise=True))
        assert fresh.score(episodes) != straight.score(episodes)

    def test_penalties_and_validation_are_left_out(self, build: Build) -> None:
        manager = build(config(function("by_response"), normalise=True, on_error="penalise"))
        scores, _ = manager.score(group("give 1", "raise", "give 3"))
        assert scores[1].total == -1.0
        state = manager.state_dict()
        assert state["normaliser"]["count"] == 2
        assert [score.total for score in manager.evaluate(group("give 5", "give 6"))] == [5.0, 6.0]
        assert manager.state_dict() == state

    def test_a_state_of_another_setting_is_refused(self, build: Build) -> None:
        state = build(config(function("length"), normalise=True)).state_dict()
        with pytest.raises(ValueError, match=r"reward\.normalise"):
            build(config(function("length"))).load_state_dict(state)


class TestRefusals:
    def test_no_source(self) -> None:
        with pytest.raises(RewardError, match="no reward"):
            RewardManager(config())

    def test_two_sources_of_one_name(self) -> None:
        with pytest.raises(RewardError, match="2 reward sources have the name 'f'"):
            RewardManager(config(function("length"), function("sees")))

    def test_an_unknown_policy(self) -> None:
        with pytest.raises(RewardError, match=r"'ignore'; it must be one of fail, drop, penalise"):
            RewardManager(config(function("length"), on_error="ignore"))

    def test_a_reward_model_without_engines(self) -> None:
        with pytest.raises(RewardError, match="no reward engines"):
            RewardManager(config(model=MODEL))

    def test_a_function_that_is_not_there_is_found_at_the_start(self, build: Build) -> None:
        with pytest.raises(PoolError, match="'f' cannot be used"):
            build(config(function("no_such_function"))).start()


def test_scores_are_plain_values(build: Build, tmp_path: Path) -> None:
    scores, _ = build(config(function("by_response")), log_dir=tmp_path).score(group("bool"))
    assert scores == [Score(1.0, {"f": 1.0})]
    assert type(scores[0].total) is float
    assert (tmp_path / "reward-functions-0.log").exists()
