"""A loop over toy workers that runs under any launcher: `python -m tests.workers.launch.toy_loop LAUNCHER RANKS RUN_DIR SCENARIO`.

Every process that runs the loop writes what it saw to `RUN_DIR/seen-{rank}.json`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

from configs.schema import Config
from tests.workers.launch.toy import Toy
from workers.launch.group import Launcher, Modules, deal, undeal
from workers.launch.launcher import make_launcher


def agree(launcher: Launcher, ranks: int) -> dict[str, object]:
    """Everything a loop does with its groups; the results must not depend on the launcher."""
    import torch

    trainers = launcher.trainer_group(functools.partial(Toy, 100), ranks)
    engines = launcher.engine_group("engine", Toy, 3, {"EXTRA": "yes"})
    alike = launcher.engine_group("alike", Toy, 2, {})
    seen: dict[str, object] = {
        "sharded": trainers.run("add", list(range(ranks)), factor=10),
        "dotted": engines.run("part.double", [1, 2, 3]),
        "dealt": undeal(engines.run("echo", deal(list(range(9)), 3))),
        "collective": trainers.run("all_reduce", value=10.0),
        "hash": engines.run("text_hash"),
        "forked": [*alike.run("imported", ["decimal"] * 2), *engines.run("imported", ["decimal"] * 3)],
        "environment": engines.run("variable", ["PYTHONHASHSEED", "EXTRA", "RANK"]),
        "weights": engines.run("load", weights=trainers.export("make_weights")),
        "main": launcher.on_main(lambda: "from the main process"),
    }
    large = engines.run("echo", [torch.full((1_000_000,), float(i)) for i in range(3)])
    seen["large"] = [float(tensor.sum()) for tensor in large]
    try:
        engines.run("fail_if", [False, False, True])
    except Exception as error:
        seen["failure"] = [type(error).__name__, "engine-2" in str(error), "ValueError: only one of us" in str(error)]
    try:
        launcher.on_main(lambda: int("not a number"))
    except ValueError as error:
        seen["main_failure"] = str(error)
    return seen


def gather(launcher: Launcher, ranks: int) -> dict[str, object]:
    """How long values take between ranks."""
    import torch
    import torch.distributed as dist

    trainers = launcher.trainer_group(Toy, ranks)
    seen: dict[str, object] = {}
    for megabytes in (0, 10, 100):
        tensor = torch.ones(megabytes * 250_000)
        for name, function in (
            ("group", functools.partial(trainers.run, "echo", [tensor] * ranks)),
            ("all_gather_object", functools.partial(dist.all_gather_object, [None] * ranks, tensor)),
        ):
            function()
            began = time.perf_counter()
            function()
            seen[f"{name} {megabytes} MB"] = round((time.perf_counter() - began) * 1e3, 1)
    return seen


def stuck(launcher: Launcher, ranks: int) -> dict[str, object]:
    """Engines and a grandchild are up, the loop waits in a call; the last rank may be told to fail."""
    trainers = launcher.trainer_group(Toy, ranks)
    engines = launcher.engine_group("engine", Toy, ranks, {})
    pids = [os.getpid(), *trainers.run("pid"), *engines.run("pid"), *engines.run("spawn_sleeper")]
    path = Path(sys.argv[3])
    if launcher.is_main:
        (path / "pids.tmp").write_text(json.dumps(pids))
        (path / "pids.tmp").rename(path / "pids.json")
    if "FAIL" in os.environ:
        trainers.run("fail_on_last_rank")
    trainers.run("wait_for_all") if "COLLECTIVE" in os.environ else engines.run("sleep", [100.0] * ranks)
    return {}


def main() -> None:
    name, ranks, run_dir, scenario = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    config = Config(full_determinism=True)
    config.launcher.name = name
    config.launcher.num_ranks = ranks
    config.launcher.ray_num_cpus = 4
    config.launcher.device = "cpu"
    config.launcher.timeout_s = 120.0
    config.rollout.replicas = 3
    launcher = make_launcher(config, run_dir, Modules(ranks=["workers.launch.distributed"], engines=["decimal"]))
    try:
        seen = globals()[scenario](launcher, ranks)
        (run_dir / f"seen-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
    finally:
        launcher.close()


if __name__ == "__main__":
    main()
