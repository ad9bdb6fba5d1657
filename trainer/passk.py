"""pass@k and majority@k: how often k tries at a prompt succeed. Pure arithmetic on one prompt's samples, then means over prompts.

Tries are in sample order. Both numbers are exact: an integer ratio is rounded once, and the mean does not depend on the order of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tries:
    """One prompt's scored samples, in sample order."""

    correct: tuple[bool, ...]
    """Whether each sample is right."""
    answers: tuple[str | None, ...]
    """The final answer that each sample gives; None where there is none to be found."""

    def __post_init__(self) -> None:
        if len(self.correct) != len(self.answers):
            raise ValueError(f"{len(self.correct)} verdicts but {len(self.answers)} answers")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples is right, when the k are drawn without replacement from those at hand.

        1 - C(samples - correct, k) / C(samples, k)

    which is an unbiased estimate of the probability for k fresh samples.

    Raises:
        ValueError: not 0 <= correct <= samples, or not 1 <= k <= samples.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {correct} right samples among {samples}: k and the right ones must fit into them"
        )
    every = math.comb(samples, k)
    return (every - math.comb(samples - correct, k)) / every


def majority(tries: Tries) -> bool:
    """Whether the most frequent answer is right; at a tie the answer that came first wins.

    A sample without an answer does not vote; without any vote the prompt counts as wrong. An answer is as right as the first
    sample that gives it.
    """
    votes: dict[str, int] = {}
    verdicts: dict[str, bool] = {}
    for answer, correct in zip(tries.answers, tries.correct, strict=True):
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
            verdicts.setdefault(answer, correct)
    if not votes:
        return False
    return verdicts[max(votes, key=votes.__getitem__)]  # the first of several with the most votes


def majority_at_k(tries: Tries, k: int) -> float:
    """Share of right majorities among the blocks of k consecutive samples; what is left over after the last whole block is not used.

    The blocks do not overlap, so the mean is an unbiased estimate for k fresh samples.

    Raises:
        ValueError: not 1 <= k <= samples.

    Source: Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", for the vote.
    """
    samples = len(tries.correct)
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} of {samples} samples: k must be 1 to {samples}")
    blocks = [
        Tries(tries.correct[at : at + k], tries.answers[at : at + k]) for at in range(0, samples - samples % k, k)
    ]
    return sum(majority(block) for block in blocks) / len(blocks)


def ks(samples: int) -> list[int]:
    """The values of k that are reported for this many samples per prompt: powers of two, and the number of samples.

    Example:
        >>> ks(6)
        [1, 2, 4, 6]
    """
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1:] == [samples] else [*powers, samples]


def accuracy(prompts: Sequence[Tries], samples: int) -> dict[str, float]:
    """`pass@k` for every k of `ks(samples)`, `maj@k` for those above 1: means over the prompts with at least k scored samples.

    Args:
        prompts: each prompt's samples; fewer than `samples` where some could not be scored.
        samples: number of samples of each prompt.

    Returns:
        A k that no prompt has enough samples for is absent.
    """
    found: dict[str, float] = {}
    for k in ks(samples):
        enough = [tries for tries in prompts if len(tries.correct) >= k]
        if enough:
            passes = [pass_at_k(len(tries.correct), sum(tries.correct), k) for tries in enough]
            found[f"pass@{k}"] = math.fsum(passes) / len(enough)
        if enough and k > 1:
            found[f"maj@{k}"] = math.fsum(majority_at_k(tries, k) for tries in enough) / len(enough)
    return found
