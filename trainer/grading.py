"""Which validation samples are right, and what each of them answers. pass@k and majority@k count these.

A sample is right when one chosen reward source gives it at least a threshold. Its answer is the text that verifiers look at: the text
after the configured marker, or in the last \\boxed{...}, or the whole response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.schema import RewardConfig
from reward.functions import final_answer
from rollout.types import Episode, Score
from trainer.passk import Tries, accuracy

TOTAL = "total"
"""Name of the weighted sum among the sources that may decide."""
_BOX = "\\boxed{"


class Grader:
    """Says which samples are right, by the scores that they have.

    Args:
        reward: the reward group.
        source: `trainer.eval_source`; null takes the first function, or the total when there is none.
        threshold: `trainer.eval_threshold`.
    """

    def __init__(self, reward: RewardConfig, source: str | None = None, threshold: float = 1.0) -> None:
        functions = {function.name: function for function in reward.functions}
        self.source = source if source is not None else next(iter(functions), TOTAL)
        self.threshold = threshold
        self._params = functions[self.source].params if self.source in functions else {}

    def right(self, score: Score) -> bool | None:
        """Whether a sample is right; None where the source has no score for it."""
        if score.dropped:
            return None
        value = score.total if self.source == TOTAL else score.by_source.get(self.source)
        return None if value is None else value >= self.threshold

    def answer(self, response: str) -> str | None:
        """The final answer in a response, with runs of white space made one space; None when it gives none."""
        return answer_text(response, self._params)

    def metrics(self, episodes: Sequence[Episode], scores: Sequence[Score], samples: int) -> dict[str, float]:
        """`<source of prompts>/pass@k` and `<source of prompts>/maj@k`; samples that could not be scored do not count as tries.

        Args:
            samples: number of samples of each prompt.
        """
        found: dict[str, dict[int, list[tuple[bool, str | None]]]] = {}
        for episode, score in zip(episodes, scores, strict=True):
            of_prompt = found.setdefault(episode.prompt.source, {}).setdefault(episode.key.task, [])
            right = self.right(score)
            if right is not None:
                of_prompt.append((right, self.answer(episode.text)))
        metrics: dict[str, float] = {}
        for source in sorted(found):
            prompts = [
                Tries(tuple(right for right, _ in tries), tuple(answer for _, answer in tries))
                for tries in found[source].values()
            ]
            metrics |= {f"{source}/{name}": value for name, value in accuracy(prompts, samples).items()}
        return metrics


def answer_text(response: str, params: dict[str, Any]) -> str | None:
    """The final answer in a response.

    Args:
        params: of the reward function that judges; `marker`, `end_marker` and `ignore_case` are used (`reward/functions.py`).

    Example:
        >>> answer_text("so the answer is \\\\boxed{ 3 }.", {})
        '3'
    """
    found = final_answer(response, params.get("marker"), params.get("end_marker"))
    if found is None:
        return None
    text = " ".join(_last_box(found).split())
    if params.get("ignore_case"):
        text = text.casefold()
    return text or None


def _last_box(text: str) -> str:
    """The contents of the last \\boxed{...}, with nested braces; the whole text when there is none or it never ends."""
    start = text.rfind(_BOX)
    if start < 0:
        return text
    depth = 1
    for at in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(_BOX) : at]
    return text
