"""What counts as right, and what counts as the answer."""

from __future__ import annotations

import pytest

from configs.schema import RewardConfig, RewardFunctionConfig
from rollout.types import Episode, Prompt, SampleKey, Score
from trainer.grading import Grader, answer_text
from trainer.validation import pass_metrics

FUNCTIONS = RewardConfig(
    functions=[
        RewardFunctionConfig("correct", params={"marker": "A:", "end_marker": "."}),
        RewardFunctionConfig("short"),
    ]
)


def episode(task: int, sample: int, text: str = "", source: str = "sums", finish: str = "stop") -> Episode:
    prompt = Prompt(f"{source}/{task}", source, (1,), "", ())
    return Episode(SampleKey(task, sample), prompt, 0, (2, 3), (True, True), (-1.0, -1.0), finish, text)


def test_the_first_function_decides_unless_another_source_is_named():
    score = Score(0.9, {"model": 5.0, "correct": 1.0, "short": 0.5})
    assert Grader(FUNCTIONS).right(score) is True
    assert Grader(FUNCTIONS, "short").right(score) is False
    assert Grader(FUNCTIONS, "short", 0.5).right(score) is True
    assert Grader(FUNCTIONS, "model").right(score) is True
    assert Grader(FUNCTIONS, "total").right(score) is False
    assert Grader(RewardConfig()).right(Score(1.0, {"model": 1.0})) is True


def test_a_sample_that_was_not_scored_is_neither_right_nor_wrong():
    assert Grader(FUNCTIONS).right(Score(0.0, {"correct": 1.0}, dropped=True)) is None
    assert Grader(FUNCTIONS).right(Score(-1.0, {"short": 1.0}, error="correct hung")) is None


@pytest.mark.parametrize(
    ("response", "params", "answer"),
    [
        ("  3 \n 4 ", {}, "3 4"),
        ("", {}, None),
        ("I think A: 3. Or", {"marker": "A:", "end_marker": "."}, "3"),
        ("3", {"marker": "A:"}, None),
        ("Yes", {"ignore_case": True}, "yes"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", {}, r"\frac{1}{2}"),
        (r"open \boxed{1", {}, r"open \boxed{1"),
        (r"\boxed{}", {}, None),
    ],
)
def test_the_answer_is_what_verifiers_look_at(response, params, answer):
    assert answer_text(response, params) == answer


def test_metrics_by_source_of_prompts_leave_unscored_samples_out():
    episodes = [
        episode(0, 0, "A: 1"),
        episode(0, 1, "A: 2"),
        episode(1, 0, "A: 3", "other"),
        episode(1, 1, "", "other"),
    ]
    scores = [
        Score(0, {"correct": 0.0}),
        Score(1, {"correct": 1.0}),
        Score(1, {"correct": 1.0}),
        Score(0, {}, dropped=True),
    ]
    assert Grader(FUNCTIONS).metrics(episodes, scores, samples=2) == {
        "other/pass@1": 1.0,
        "sums/pass@1": 0.5,
        "sums/pass@2": 1.0,
        "sums/maj@2": 0.0,
    }


def test_lengths_and_truncation_by_source_of_prompts():
    episodes = [episode(0, 0), episode(1, 0, source="other", finish="length")]
    metrics = pass_metrics("val", episodes, [Score(1.0, {}), Score(0.0, {}, dropped=True)])
    assert metrics["val/sums/response_length/clip_ratio"] == 0.0
    assert metrics["val/other/response_length/clip_ratio"] == 1.0
    assert metrics["val/other/response_length/mean"] == 2.0
    assert metrics["val/response_length/clip_ratio"] == 0.5
    assert "val/other/score/mean" not in metrics
