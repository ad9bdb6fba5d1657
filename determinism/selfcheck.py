"""What a self-check says: bitwise comparison of answers to the same questions, verdicts per level, and their text.

    Trial (the same requests, asked in another way) --first_difference--> Difference --> Finding --> Report

Pure logic: who asks, and how, is in trainer/engine_check.py (at the start of a run) and trainer/tools/doctor.py (`exactrl doctor`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from determinism.values import ulps

LEVELS = {
    "D1": "repeat",
    "D2": "launcher",
    "D3": "rollout topology",
    "D4": "trainer topology",
    "D5": "interruption",
    "D6": "multi-turn",
    "D7": "train = infer",
}
"""Levels of the contract (docs/determinism.md), in their order."""

PROMISED = ("D1", "D2", "D3", "D4", "D5")
"""What `full_determinism` promises for every configuration that it accepts."""

KEPT, BROKEN, UNCHECKED = "kept", "broken", "not checked"


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one request."""

    token_ids: tuple[int, ...]
    """Sampled ids; empty for a score."""
    numbers: tuple[float, ...]
    """Log-probability of each id, or one score; values of float32."""


@dataclass(frozen=True)
class Trial:
    """The answers to one list of requests, asked in one way."""

    name: str
    """How they were asked: `one batch`, `reversed, one at a time, replica 1`."""
    answers: tuple[Answer, ...]
    """In the order of the list, however they were asked."""


@dataclass(frozen=True)
class Difference:
    """The first place where two trials part."""

    reference: str
    """Name of the trial that is compared with."""
    trial: str
    """Name of the other one."""
    request: int
    """Position of the request in the list."""
    token: int | None
    """Position among the new tokens; None for a score, or when only the lengths differ."""
    quantity: str
    """`token id`, `log-probability`, `score` or `number of tokens`."""
    a: float
    """In the reference."""
    b: float
    """In the other trial."""
    ulps: int | None
    """Number of float32 values from one to the other; None for integers and NaN."""
    count: int
    """Requests of the trial whose answers differ."""
    total: int
    """Requests of the trial."""

    def describe(self) -> str:
        """One line."""
        place = f"request {self.request}" + ("" if self.token is None else f", new token {self.token}")
        distance = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return (
            f"{place}: {self.quantity} {self.a!r} ({self.reference}) against {self.b!r} ({self.trial}){distance}; "
            f"{self.count} of {self.total} requests differ"
        )


def first_difference(trials: Sequence[Trial]) -> Difference | None:
    """Compare every trial with the first, bit by bit; the first difference, or None.

    Raises:
        ValueError: no trial, or trials of different lists of requests: there is nothing to compare.
    """
    if not trials:
        raise ValueError("no trial to compare")
    reference = trials[0]
    for trial in trials[1:]:
        if len(trial.answers) != len(reference.answers):
            raise ValueError(
                f"{trial.name} has {len(trial.answers)} answers and {reference.name} has {len(reference.answers)}; "
                "they were asked different things"
            )
        pairs = list(zip(reference.answers, trial.answers, strict=True))
        differing = [index for index, (a, b) in enumerate(pairs) if not _same(a, b)]
        if differing:
            return _locate(reference.name, trial.name, differing, pairs)
    return None


def _same(a: Answer, b: Answer) -> bool:
    return a.token_ids == b.token_ids and _bits(a.numbers) == _bits(b.numbers)


def _locate(reference: str, trial: str, differing: list[int], pairs: Sequence[tuple[Answer, Answer]]) -> Difference:
    request = differing[0]
    a, b = pairs[request]

    def difference(token: int | None, quantity: str, left: float, right: float, ulps: int | None) -> Difference:
        return Difference(reference, trial, request, token, quantity, left, right, ulps, len(differing), len(pairs))

    is_score = not a.token_ids and not b.token_ids
    for index in range(min(len(a.numbers), len(b.numbers))):
        if not is_score and a.token_ids[index] != b.token_ids[index]:
            return difference(index, "token id", a.token_ids[index], b.token_ids[index], None)
        left, right = a.numbers[index], b.numbers[index]
        if _bits((left,)) != _bits((right,)):
            quantity = "score" if is_score else "log-probability"
            return difference(None if is_score else index, quantity, left, right, float32_ulps(left, right))
    return difference(None, "number of tokens", len(a.numbers), len(b.numbers), None)


def float32_ulps(a: float, b: float) -> int | None:
    """Number of float32 values from `a` to `b`, counted across zero; None when one of them is no number or no float32.

    Example:
        >>> float32_ulps(1.0, 1.0 + 2**-23)
        1
    """
    pair = torch.tensor([a, b], dtype=torch.float64)
    rounded = pair.to(torch.float32)
    return ulps(rounded[0], rounded[1]) if torch.equal(rounded.double(), pair) else None


def _bits(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


@dataclass(frozen=True)
class Gap:
    """Distance of two lists of log-probabilities of the same tokens."""

    tokens: int
    """Tokens compared."""
    exact: int
    """Tokens with equal bits."""
    largest: float
    """Largest absolute difference, nats."""
    mean: float
    """Mean absolute difference, nats."""

    def describe(self) -> str:
        """One line."""
        return f"{self.exact} of {self.tokens} tokens equal, largest gap {self.largest:.3g}, mean {self.mean:.3g}"


def gap_between(a: Sequence[float], b: Sequence[float]) -> Gap:
    """The gap of two lists.

    Raises:
        ValueError: other lengths, or nothing to compare.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} log-probabilities can't be compared")
    distances = [abs(x - y) for x, y in zip(a, b, strict=True)]
    exact = sum(_bits((x,)) == _bits((y,)) for x, y in zip(a, b, strict=True))
    return Gap(len(a), exact, max(distances), sum(distances) / len(distances))


@dataclass(frozen=True)
class Finding:
    """One check and its outcome."""

    level: str
    """`D1` to `D7`."""
    checked: str
    """What was compared with what."""
    verdict: str
    """`kept`, `broken` or `not checked`."""
    seconds: float = 0.0
    """Time that it took."""
    detail: str = ""
    """The first difference, a measured gap, or why it was not checked."""
    way_out: str = ""
    """What to do when it is not kept."""


@dataclass(frozen=True)
class Report:
    """Everything that was checked."""

    findings: tuple[Finding, ...]
    """In the order in which they are shown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Versions and settings in force, read back in the processes."""
    promised: tuple[str, ...] = PROMISED
    """Levels that the configuration promises."""

    def verdict(self, level: str) -> str:
        """Of a whole level: broken if anything of it broke, kept if something was checked and nothing broke."""
        verdicts = [finding.verdict for finding in self.findings if finding.level == level]
        return next((verdict for verdict in (BROKEN, KEPT) if verdict in verdicts), UNCHECKED)

    @property
    def reached(self) -> str | None:
        """The highest level up to which every one is kept; None when the first is not."""
        found = None
        for level in LEVELS:
            if self.verdict(level) != KEPT:
                break
            found = level
        return found

    @property
    def beyond(self) -> list[str]:
        """Levels that are kept although one below them is not shown to be."""
        levels = list(LEVELS)
        start = levels.index(self.reached) + 1 if self.reached else 0
        return [level for level in levels[start:] if self.verdict(level) == KEPT]

    @property
    def obstacle(self) -> str | None:
        """What stands in the way of the next level; None when all are reached."""
        level = next((level for level in LEVELS if self.verdict(level) != KEPT), None)
        if level is None:
            return None
        name = f"{level} ({LEVELS[level]})"
        rows = [f for f in self.findings if f.level == level and f.verdict == self.verdict(level)]
        if not rows:
            return f"{name}: nothing was checked"
        row = rows[0]
        reason = row.detail if row.detail and "\n" not in row.detail else row.checked  # output of a run is in the table
        return f"{name}: {row.verdict}: {reason}" + (f". {row.way_out}" if row.way_out else "")

    @property
    def exit_code(self) -> int:
        """0 when nothing of what is promised broke, 1 otherwise."""
        return 1 if any(self.verdict(level) == BROKEN for level in self.promised) else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for machines."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "levels": {level: self.verdict(level) for level in LEVELS},
            "reached": self.reached,
            "beyond": self.beyond,
            "obstacle": self.obstacle,
            "promised": list(self.promised),
            "facts": dict(self.facts),
            "exit_code": self.exit_code,
        }


def describe(report: Report) -> str:
    """The report as text for a terminal."""
    header = ("level", "what was checked", "verdict", "time")
    rows = [(f.level, f.checked, _shown(f, report.promised), f"{f.seconds:.1f} s") for f in report.findings]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip()]
    for row, finding in zip(rows, report.findings, strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if finding.detail:
            lines += [f"       {line}" for line in finding.detail.splitlines()]
        if finding.verdict != KEPT and finding.way_out:
            lines.append(f"       -> {finding.way_out}")
    lines.append("")
    lines += [f"{name}: {value}" for name, value in report.facts.items()]
    reached = f"{report.reached} ({LEVELS[report.reached]})" if report.reached else "none"
    beyond = f"; kept beyond it: {', '.join(report.beyond)}" if report.beyond else ""
    lines.append(f"level reached: {reached}{beyond}")
    lines.append(f"in the way of the next: {report.obstacle or 'nothing'}")
    broken = [level for level in report.promised if report.verdict(level) == BROKEN]
    if broken:
        lines.append(f"full_determinism can't be kept here: {', '.join(broken)} broken")
    else:
        lines.append("full_determinism: nothing that was checked broke it")
    return "\n".join(lines)


def _shown(finding: Finding, promised: Sequence[str]) -> str:
    if finding.verdict == BROKEN:
        return "BROKEN" if finding.level in promised else "not reached"
    return finding.verdict
