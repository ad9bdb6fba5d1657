"""Where the time of a PPO step goes, on this machine: phases, share spent in the engines, rollout throughput, starts, memory.

    python benchmarks/step.py [--steps 6] [--out benchmarks/results/step.json] [overrides ...]

Runs the tiny default (64 prompts x 4 samples) under full determinism in a process of its own. Then the requests of its last step are served by the
rollout engines and by vLLM directly in one process, in turns (throughput.py). Every figure is a time or a ratio of times from this one
run; nothing here is a test. Starts count from when a process was asked for until it could work: what all of them import was begun before, while
Ray started.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

# A script's own folder comes first on the path, where `determinism.py` would hide the package of that name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.throughput import compare  # noqa: E402

# Work inside engines and models; the rest of a phase is transfer, waiting and bookkeeping. Of the scoring only what the step
# waits for counts: the rest happens during the others.
INSIDE = ("generate", "logprobs", "values", "update")


class PeakMemory:
    """Samples the proportional memory (PSS) of a process tree."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.peak = 0
        self.running = True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while self.running:
            total = 0
            try:
                root = psutil.Process(self.pid)
                for process in [root, *root.children(recursive=True)]:
                    try:
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
            except psutil.Error:
                break
            self.peak = max(self.peak, total)
            time.sleep(2.0)  # reading PSS costs CPU time, which would be measured too

    def stop(self) -> float:
        """GiB at the highest moment."""
        self.running = False
        self.thread.join()
        return self.peak / 2**30


def run_training(run: Path, steps: int, overrides: Sequence[str]) -> tuple[float, float]:
    """A run without validation, checkpoints and tracker: peak memory of all its processes in GiB, and seconds until it was ready."""
    command = [
        *(sys.executable, "-m", "trainer.main_ppo", *overrides, "tracking=disabled", f"run.dir={run}"),
        *(f"trainer.total_steps={steps}", "trainer.validate_every=0", "trainer.validate_at_start=false"),
        *("trainer.checkpoint_every=0", "trainer.checkpoint_at_end=false"),
    ]
    begin = time.time()
    process = subprocess.Popen(command)
    memory = PeakMemory(process.pid)
    if process.wait() != 0:
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    # The manifest is written when every rank and engine has answered.
    return memory.stop(), (run / "manifest.json").stat().st_mtime - begin


def start_alone(run: Path) -> float:
    """Seconds from starting a rollout engine's process until it could generate, with nothing else on the machine."""
    from configs.compose import from_yaml
    from trainer.build import rollout_engine
    from workers.launch.launcher import make_launcher

    config = from_yaml(run / "config.yaml")
    config.launcher.name, config.launcher.num_ranks, config.launcher.device = "torchrun", 1, "cpu"
    launcher = make_launcher(config, run)
    begin = time.perf_counter()
    launcher.engine_group("alone", rollout_engine(config, 64, "cpu"), 1).ready()
    seconds = time.perf_counter() - begin
    launcher.close()
    return seconds


def sampled_tokens(run: Path, step: int) -> int:
    """Tokens of the step's responses."""
    lines = (run / "episodes" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return sum(len(json.loads(line)["response_ids"]) for line in lines)


def summarise(run: Path, steps: int, memory: float, ready: float) -> dict[str, Any]:
    """Means over the steps after the first, which warms caches."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing_s/step" in row][1:]
    step = mean(row["timing_s/step"] for row in rows)
    inside = {name: mean(row.get(f"timing_s/busy/{name}", 0.0) for row in rows) for name in INSIDE}
    inside["reward inference, waited for"] = mean(row["timing_s/reward"] for row in rows)
    phases = sorted({key for row in rows for key in row if key.startswith("timing_s/") and "/busy/" not in key})
    manifest = json.loads((run / "manifest.json").read_text())
    starts = {f"{name}, all at once": times for name, times in manifest["informative"]["start_s"].items()}
    starts["an engine alone, imports included"] = [start_alone(run)]
    throughput = compare(run, steps)
    in_step = sum(sampled_tokens(run, row["step"]) for row in rows) / sum(row["timing_s/gen"] for row in rows)
    return {
        "step_s": step,
        "phases_s": {name.removeprefix("timing_s/"): mean(row.get(name, 0.0) for row in rows) for name in phases},
        "inside_s": inside,
        "inside_share": sum(inside.values()) / step,
        "throughput": throughput,
        "in_step_tokens_per_s": in_step,
        "in_step_share_of_direct": in_step / throughput["direct"]["tokens_per_s"],
        "engine_start_s": starts,
        "ready_s": ready,
        "peak_memory_gib": memory,
    }


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    print(f"\n{'phase':20} {'s':>8} {'share':>7}")
    for name, seconds in sorted(result["phases_s"].items(), key=lambda item: -item[1]):
        print(f"{name:20} {seconds:8.3f} {seconds / result['step_s']:7.1%}")
    print(f"\n{'inside':28} {'s':>8}")
    for name, seconds in result["inside_s"].items():
        print(f"{name:28} {seconds:8.3f}")
    speed = result["throughput"]
    goals = [
        ("share of a step inside engines and models", f"{result['inside_share']:.1%}", "at least 70%"),
        ("vLLM alone, one process, tokens/s", f"{speed['direct']['tokens_per_s']:.0f}", ""),
        (
            f"rollout, {speed['rollout']['replicas']} replica(s), tokens/s",
            f"{speed['rollout']['tokens_per_s']:.0f}",
            "",
        ),
        ("rollout / vLLM alone", f"{speed['rollout']['share_of_direct']:.1%}", "at least 80%"),
        *(
            [("rollout with one replica / vLLM alone", f"{speed['one replica']['share_of_direct']:.1%}", "")]
            if "one replica" in speed
            else []
        ),
        ("in the step, beside the scoring, tokens/s", f"{result['in_step_tokens_per_s']:.0f}", ""),
        ("in the step / vLLM alone", f"{result['in_step_share_of_direct']:.1%}", ""),
        *(
            (f"start of {name}, s", ", ".join(f"{one:.1f}" for one in seconds), "at most 10")
            for name, seconds in result["engine_start_s"].items()
        ),
        ("from the command until all are ready, s", f"{result['ready_s']:.1f}", ""),
        ("peak memory, GiB", f"{result['peak_memory_gib']:.2f}", "under 8"),
    ]
    print()
    for name, value, goal in goals:
        print(f"{name:44} {value:>8}   {goal}")


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the tiny default")
    parser.add_argument("--steps", type=int, default=6, help="PPO steps (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/step.json"), help="JSON file (default: %(default)s)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        memory, ready = run_training(run, args.steps, ["experiment=tiny_ppo", "full_determinism=true", *args.overrides])
        result = summarise(run, args.steps, memory, ready)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"\nwrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
