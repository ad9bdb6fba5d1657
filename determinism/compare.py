"""`exactrl compare A B ...`: are the runs the same, and if not, where do they part?

The answer goes from the outside in: differing manifest fields, then the first step and phase whose digests differ, then, when
raw values were recorded (`ledger.record=full`), the sample, token or parameter with both values and their distance in ulps.
Exit code: 0 same, 1 different, 2 not comparable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from determinism.runs import NotComparableError, Run, load_run
from determinism.values import ValueDifference, first_value_difference

SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 2


@dataclass(frozen=True)
class FieldDifference:
    """A manifest field that differs."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Divergence:
    """Where two runs first part."""

    step: int
    """Training step; 0 is the validation before training."""
    phase: str
    """Ledger phase, or the metric's name when there are no ledgers."""
    a: str | float | None
    """Digest (or metric value) in the first run; None when it has none."""
    b: str | float | None
    """In the other run."""
    detail: ValueDifference | None = None
    """Sample, token or parameter, when raw values were recorded in both runs."""


@dataclass(frozen=True)
class Comparison:
    """Run B against run A."""

    a: str
    b: str
    fields: tuple[FieldDifference, ...] = ()
    """Differing manifest fields. They explain, they do not decide: equal bits from differing settings are the point."""
    divergence: Divergence | None = None
    """None: the same bits everywhere."""
    grid: Mapping[int, Mapping[str, bool | None]] = field(default_factory=dict)
    """step -> phase -> equal, or None where only one run has it; every step and phase that either run has."""

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return self.divergence is None


def compare_runs(a: Run, b: Run) -> Comparison:
    """Compare two runs by their ledgers, or by their metrics when one has no ledger.

    Raises:
        NotComparableError: they have no step in common.
    """
    fields = tuple(
        FieldDifference(name, left, right) for name, left, right in _differing(dict(a.manifest), dict(b.manifest))
    )
    if a.ledger and b.ledger:
        left: dict[int, Mapping[str, Any]] = {record.step: record.phases for record in a.ledger}
        right: dict[int, Mapping[str, Any]] = {record.step: record.phases for record in b.ledger}
    else:
        left, right = dict(a.metrics), dict(b.metrics)
    if not left.keys() & right.keys():
        raise NotComparableError(
            f"{a.name} has {_steps(left)} and {b.name} has {_steps(right)}: none in common, and bits are compared step by step "
            "(an evaluation has the step of its checkpoint, or 0)"
        )
    grid: dict[int, dict[str, bool | None]] = {}
    divergence = None
    for step in sorted(left.keys() | right.keys()):
        one, two = left.get(step, {}), right.get(step, {})
        grid[step] = {}
        for phase in [*one, *(name for name in two if name not in one)]:
            equal = _equal(one[phase], two[phase]) if phase in one and phase in two else None
            grid[step][phase] = equal
            if not equal and divergence is None:
                divergence = Divergence(
                    step, phase, one.get(phase), two.get(phase), first_value_difference(a, b, step, phase)
                )
    return Comparison(a.name, b.name, fields, divergence, grid)


def _steps(found: Collection[int]) -> str:
    """The steps in words, for a message."""
    if not found:
        return "no steps"
    first, last = min(found), max(found)
    return f"step {first}" if first == last else f"steps from {first} to {last}"


def _equal(a: Any, b: Any) -> bool:
    """Equal text, or floats with equal bits for what JSON can hold (NaN equals NaN, 0.0 differs from -0.0)."""
    return a == b if isinstance(a, str) else repr(a) == repr(b)


def _differing(a: Any, b: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in sorted(a.keys() | b.keys()):
            found += _differing(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return [] if a == b else [(prefix, a, b)]


def describe(comparison: Comparison) -> str:
    """The comparison as text for a terminal."""
    lines = [f"{comparison.a}  against  {comparison.b}"]
    if comparison.fields:
        lines.append(f"  {len(comparison.fields)} manifest field(s) differ:")
        shown = field_lines(comparison.fields)
        lines += [f"    {line}" for line in shown[:20]]
        if len(shown) > 20:
            lines.append(f"    ... and {len(shown) - 20} more (--json lists all)")
    else:
        lines.append("  manifests: no field differs")
    checked = sum(len(phases) for phases in comparison.grid.values())
    if comparison.divergence is None:
        lines.append(f"  SAME: {len(comparison.grid)} steps, {checked} digests, every bit agrees")
        return "\n".join(lines)
    where = comparison.divergence
    unequal = sum(not equal for phases in comparison.grid.values() for equal in phases.values())
    lines.append(f"  DIFFERENT: {unequal} of {checked} digests; first at step {where.step}, phase {where.phase}")
    lines.append(f"    {where.a} | {where.b}")
    if where.a is None or where.b is None:
        lines.append(
            f"    {comparison.a if where.a is None else comparison.b} has no such record (did it stop earlier?)"
        )
    elif where.detail is not None:
        lines.append(f"    {where.detail.describe()}")
    else:
        lines.append("    (record raw values with ledger.record=full in both runs to see the sample and token)")
    return "\n".join(lines)


def field_lines(fields: Sequence[FieldDifference]) -> list[str]:
    """A line a difference: processes that only one run has by name alone, a field that differs alike in several processes once."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for difference in fields:
        group, process, name = [*difference.field.split(".", 2), "", ""][:3]
        a, b = _short(difference.a), _short(difference.b)
        if group != "processes":
            lines[difference.field, a, b] = []
        elif not name:
            lines.setdefault(("processes", "only in A" if difference.b is None else "only in B", ""), []).append(
                process
            )
        else:
            lines.setdefault((name, a, b), []).append(process)
    found = []
    for (name, a, b), processes in lines.items():
        if name == "processes":
            found.append(f"processes {a}: {', '.join(processes)}")
        else:
            found.append(f"{name}: {a} | {b}" + (f"  (in {', '.join(processes)})" if processes else ""))
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl compare`."""
    parser = argparse.ArgumentParser(
        prog="exactrl compare",
        description="Compare any number of runs to the first, bit by bit. Exit code: 0 same, 1 different, 2 not comparable.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, W&B offline directory, or entity/project/id"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="overlay the runs' curves in a PNG")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a self-contained report: curves, grid, first divergence"
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="curve to plot (repeatable; default critic/score/mean and val/score/mean)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl compare`; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        if len(args.runs) < 2:
            raise NotComparableError("compare needs at least two runs")
        runs = [load_run(source) for source in args.runs]
        comparisons = [compare_runs(runs[0], other) for other in runs[1:]]
    except NotComparableError as error:
        print(f"not comparable: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    if args.json:
        print(json.dumps([{**asdict(c), "same": c.same} for c in comparisons], indent=1))
    else:
        print("\n".join(describe(comparison) for comparison in comparisons))
    _write_reports(args, runs, comparisons)
    return SAME if all(comparison.same for comparison in comparisons) else DIFFERENT


def _write_reports(args: argparse.Namespace, runs: Sequence[Run], comparisons: Sequence[Comparison]) -> None:
    if args.png is None and args.html is None:
        return
    from determinism.report import plot_curves, write_html

    metrics = args.metric or ["critic/score/mean", "val/score/mean"]
    if args.png is not None:
        plot_curves(runs, metrics, args.png)
    if args.html is not None:
        write_html(runs, comparisons, metrics, args.html)
    for path in (args.png, args.html):
        if path is not None and not args.json:
            print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
