"""A driver over toy workers, as a program that runs under any launcher: `python -m tests.workers.launch.toy_run RANKS RUN_DIR SCENARIO`.

Whether Ray or torchrun is the launcher follows from how it was started. What the driver saw is in `RUN_DIR/seen.json`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from configs.schema import Config
from tests.workers.launch.toy import Toy, ToyEngine
from workers.launch.group import deal, undeal
from workers.launch.launcher import Launcher, make_launcher
from workers.launch.ray_cluster import reserve
from workers.launch.ray_launcher import RayLauncher
from workers.launch.resources import Needs, ResourceError
from workers.launch.torchrun_launcher import follow, follows


def agree(launcher: Launcher, ranks: int) -> dict[str, object]:
    """Everything a loop does with its groups; the results must not depend on the launcher."""
    import torch

    engines = launcher.engine_group("engine", ToyEngine, 3)
    trainers = launcher.trainer_group(functools.partial(Toy, 100), ranks)
    trainers.ready()
    seen: dict[str, object] = {
        "sizes": [trainers.size, engines.size],
        "sharded": trainers.run("add", list(range(ranks)), factor=10),
        "dotted": engines.run("part.double", [1, 2, 3]),
        "dealt": undeal(engines.run("echo", deal(list(range(9)), 3))),
        "collective": trainers.run("all_reduce", value=10.0),
        "hash": engines.run("text_hash"),
        "forked": engines.run("imported", ["decimal"] * 3),
        "environment": engines.run("variable", ["PYTHONHASHSEED", "RANK", "WORLD_SIZE"]),
        "ranks": trainers.run("variable", ["RANK"] * ranks),
        "processes": len({os.getpid(), *trainers.run("pid"), *engines.run("pid")}),
        "weights": engines.run("load", weights=trainers.fetch("make_weights")),
        "again": [future.result().value() for future in engines.send("load", weights=trainers.fetch("make_weights"))],
        "requests": [engines.submit(i, [("echo", i)])[0].result() for i in range(3)],
    }
    large = engines.run("echo", [torch.full((1_000_000,), float(i)) for i in range(3)])
    seen["large"] = [float(tensor.sum()) for tensor in large]
    try:
        engines.run("fail_if", [False, False, True])
    except Exception as error:
        seen["failure"] = [type(error).__name__, "engine-2" in str(error), "ValueError: only one of us" in str(error)]
    if isinstance(launcher, RayLauncher):
        seen["refused"] = [
            refusal(lambda: launcher.engine_group("many", ToyEngine, 4)),
            refusal(lambda: reserve(Needs(64, 1, 0, "a test"))),
            refusal(lambda: reserve(Needs(1, 1, 1, "a test"))),
        ]
    return seen


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except ResourceError as error:
        return str(error)
    return "nothing was refused"


def stuck(launcher: Launcher, ranks: int) -> dict[str, object]:
    """Engines with children are up, and the driver waits: in a collective, or for an engine."""
    trainers = launcher.trainer_group(Toy, ranks)
    engines = launcher.engine_group("engine", Toy, 2)
    processes = {"ranks": trainers.run("pid"), "others": [*engines.run("pid"), *engines.run("spawn_sleeper")]}
    path = Path(sys.argv[2])
    (path / "pids.tmp").write_text(json.dumps(processes))
    (path / "pids.tmp").rename(path / "pids.json")
    if "FAIL" in os.environ:
        trainers.run("fail_on_rank", rank=int(os.environ["FAIL"]))
    trainers.run("wait_for_all") if "COLLECTIVE" in os.environ else engines.run("sleep", [100.0] * 2)
    return {}


def main() -> int:
    if follows():
        return follow()
    ranks, run_dir, scenario = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = Config(full_determinism=True)
    config.launcher.num_ranks = ranks
    config.launcher.ray_num_cpus = 4
    config.launcher.device = "cpu"
    config.launcher.timeout_s = 120.0
    config.launcher.silence_s = float(os.environ.get("SILENCE_S", "60"))
    config.rollout.replicas = 3
    launcher = make_launcher(config, run_dir, ["workers.launch.distributed", "decimal"])
    try:
        seen = globals()[scenario](launcher, ranks)
        (run_dir / "seen.json").write_text(json.dumps(seen))
    finally:
        launcher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
