"""Train the tiny model with PPO twice under full determinism, compare the runs bit by bit, and plot the reward.

    python examples/quickstart.py [--steps 12] [--out runs/quickstart] [--launcher ray]

Each run is a process of its own (`exactrl train ...`), exactly what you would type yourself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ACCURACY = "val/sums_heldout/pass@1"
SCORE = "critic/score/mean"


def train(out: Path, name: str, steps: int, launcher: str) -> Path:
    """One training run; its output goes to the terminal."""
    run = out / name
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", "experiment=tiny_ppo", "full_determinism=true"),
        *(f"run.name={name}", f"run.dir={run}", f"trainer.total_steps={steps}", f"launcher.name={launcher}"),
        "trainer.validate_every=4",
    ]
    print(f"== run {name}: exactrl train {' '.join(command[3:])}", flush=True)
    start = time.monotonic()
    subprocess.run(command, check=True)
    print(f"== run {name} took {time.monotonic() - start:.0f} s", flush=True)
    return run


def report(run: Path) -> None:
    """Where the reward and the held-out accuracy went."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [row[SCORE] for row in rows if SCORE in row]
    accuracy = [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]
    print(f"   mean training score: {scores[0]:.3f} in step 1, {scores[-1]:.3f} in step {len(scores)}")
    for step, value in accuracy:
        print(f"   held-out accuracy after step {step:3d}: {value:6.1%}  {'#' * round(40 * value)}")


def main() -> int:
    """Build, train twice, compare, plot; exit code 0 when the two runs agree in every bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="PPO steps of each run (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), help="where the runs go (default: %(default)s)"
    )
    parser.add_argument("--launcher", default="ray", help="ray or auto (default: %(default)s)")
    args = parser.parse_args()

    if args.out.exists():
        print(f"== removing the earlier {args.out}")
        shutil.rmtree(args.out)
    print("== building the tiny models (cached after the first time)", flush=True)
    subprocess.run([sys.executable, "-m", "trainer.tiny", "tiny"], check=True)
    runs = [train(args.out, name, args.steps, args.launcher) for name in ("first", "second")]

    print("\n== where the reward went")
    report(runs[0])
    picture, page = args.out / "reward.png", args.out / "report.html"
    print("\n== do the two runs agree?", flush=True)
    compare = [
        sys.executable,
        "-m",
        "trainer.tools.cli",
        "compare",
        *map(str, runs),
        "--png",
        str(picture),
        "--html",
        str(page),
    ]
    code = subprocess.run([*compare, "--metric", SCORE, "--metric", ACCURACY], check=False).returncode
    print(f"\nThe runs are in {args.out}: reward curves in {picture.name}, the full comparison in {page.name}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
