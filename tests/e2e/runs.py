"""Starts real training runs (vLLM, FSDP2, Ray, torchrun, offline W&B) as a person would, and reads what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from determinism.compare import Comparison, compare_runs
from determinism.runs import load_run
from tests.two_machines import ADDRESSES, Machine

MICRO = ("experiment=micro", "full_determinism=true", "trainer.validate_every=2", "trainer.validate_at_start=true")
LAUNCHERS = {
    "python": (sys.executable, "-m", "trainer.main_ppo"),  # one rank without Ray: the quickest start
    "ray": (sys.executable, "-m", "trainer.main_ppo"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node={ranks}", "-m", "trainer.main_ppo"),
    "accelerate": (
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes={ranks}", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "-m", "trainer.main_ppo"),
    ),
    **{
        f"torchrun, machine {i}": (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={i}", "--nproc-per-node=1"),
            *(f"--master-addr={ADDRESSES[0]}", "--master-port=29400", "-m", "trainer.main_ppo"),
        )
        for i in range(2)
    },
}


def command(run_dir: Path, overrides: Sequence[str], launcher: str, ranks: int) -> list[str]:
    """The command line of a run."""
    words = [word.format(ranks=ranks) for word in LAUNCHERS[launcher]]
    name = "ray" if launcher == "ray" else "torchrun"
    # W&B's start costs seconds; the reference run on Ray has it.
    tracker = () if launcher == "ray" else ("tracking.wandb_mode=disabled",)
    return [
        *words,
        *MICRO,
        *tracker,
        f"run.dir={run_dir}",
        f"launcher.name={name}",
        f"launcher.num_ranks={ranks}",
        *overrides,
    ]


def start(
    run_dir: Path,
    *overrides: str,
    launcher: str = "ray",
    ranks: int = 1,
    machine: Machine | None = None,
    **kwargs: Any,
) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, on this machine or another; the caller waits or kills."""
    words = command(run_dir, overrides, launcher, ranks)
    return subprocess.Popen(
        words if machine is None else machine.command(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **kwargs.pop("env", {})},
        **kwargs,
    )


def train(
    run_dir: Path, *overrides: str, launcher: str = "ray", ranks: int = 1, env: dict[str, str] | None = None
) -> Path:
    """Run to the end; its output is shown when it fails."""
    process = start(run_dir, *overrides, launcher=launcher, ranks=ranks, env=env or {})
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, f"exit code {process.returncode}\n{output[-8000:]}"
    assert "nanobind" not in output, f"libraries complain below the run's last lines:\n{output[-8000:]}"
    return run_dir


def ledger(run_dir: Path) -> list[dict[str, Any]]:
    """Ledger lines as they stand in the file."""
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Metric lines as they stand in the file."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def compared(a: Path, b: Path) -> Comparison:
    """What `exactrl compare` would say."""
    return compare_runs(load_run(str(a)), load_run(str(b)))


def assert_same(a: Path, b: Path) -> None:
    """Equal in every digest of every step."""
    result = compared(a, b)
    assert result.same, result.divergence
    assert ledger(a) == ledger(b)
