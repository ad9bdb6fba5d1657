"""What full determinism costs on this machine: the same step with it on and off, the reward model serialized and batched, the ledger on and off.

    python benchmarks/determinism.py [--steps 6] [--model tiny|smollm2] [--out benchmarks/results/determinism.json]

Each variant is a run of its own with the same leaf size; the variants take turns (--rounds), so that a slow moment of the machine does not fall on
one of them alone. The printed ratios are against the first line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

# A script's own folder comes first on the path, where this file would hide the package `determinism`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.step import run_training  # noqa: E402

VARIANTS: dict[str, tuple[str, ...]] = {
    "off": ("full_determinism=false", "ledger.record=off", "reward.model.max_num_seqs=64"),
    "on": ("full_determinism=true", "ledger.record=digest"),
    "on, ledger off": ("full_determinism=true", "ledger.record=off"),
    "off, reward serialized": ("full_determinism=false", "ledger.record=off", "reward.model.max_num_seqs=1"),
}
MODELS = {
    "tiny": ("experiment=tiny_ppo",),
    "smollm2": ("experiment=smollm2",),  # rewarded by a verifier: no reward model is served
}
COLUMNS = ("step", "gen", "reward", "old_log_prob", "values", "update_critic", "update_actor", "sync_weights", "ledger")


def seconds(run: Path) -> list[dict[str, float]]:
    """Phase times of every step after the first, which warms caches."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing_s/step" in row][1:]
    return [{name: row.get(f"timing_s/{name}", 0.0) for name in COLUMNS} for row in steps]


def measure(model: str, steps: int, rounds: int, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Median phase times of each variant, in seconds; variants of a reward model that the model doesn't have are left out."""
    variants = {name: settings for name, settings in VARIANTS.items() if model == "tiny" or "reward" not in name}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, settings in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                print(f"== round {number + 1}: {name}", flush=True)
                chosen = [item for item in settings if model == "tiny" or not item.startswith("reward.model")]
                run_training(run, steps, [*MODELS[model], *chosen, *overrides])
                found[name] += seconds(run)
    return {name: {column: median(row[column] for row in rows) for column in COLUMNS} for name, rows in found.items()}


def show(results: dict[str, dict[str, float]]) -> None:
    """A table: seconds a phase, and the step against the first variant."""
    base: Any = next(iter(results.values()))
    print(f"\n{'variant':24}" + "".join(f"{column:>14}" for column in COLUMNS) + f"{'ratio':>8}")
    for name, row in results.items():
        print(f"{name:24}" + "".join(f"{row[c]:14.3f}" for c in COLUMNS) + f"{row['step'] / base['step']:8.2f}")


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of every variant")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="PPO steps of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each variant runs (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/determinism.json"))
    args = parser.parse_args()
    results = measure(args.model, args.steps, args.rounds, args.overrides)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"model": args.model, "median_s": results}, indent=1) + "\n")
    show(results)
    print(f"\nwrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
