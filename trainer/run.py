"""A training run from a config to its last step.

    compose + validate -> pin the process -> check inputs and resources -> start workers and engines -> PPO.fit

Everything that can be wrong with the config, the data, the models or the machine is said in one line before an engine starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.build import Inputs
    from trainer.checkpoint import Checkpoint
    from trainer.ppo import PPO
    from trainer.run_dir import RunDirectory
    from workers.launch.group import Launcher

logger = logging.getLogger("exactrl")


def run(config: Config) -> int:
    """Train as configured; returns the exit code.

    Raises:
        UserError: something about the inputs is wrong; nothing was started.
        WorkerError: a worker failed; carries its traceback.
    """
    start(config)
    return 0


class Session(NamedTuple):
    """A pinned process with a launcher and checked inputs; no worker is started yet."""

    config: Config
    """Recipes replaced by directories."""
    launcher: Launcher
    run: RunDirectory
    inputs: Inputs
    stack: ExitStack
    """Ends what is entered here, the last first."""


@contextmanager
def session(config: Config, training: bool = True) -> Iterator[Session]:
    """Pin the process, check config, inputs and machine, and make the launcher; everything ends with the block.

    Args:
        training: whether there will be trainer ranks.

    Raises:
        UserError: something is wrong; nothing was started.
    """
    from determinism.environment import pin_process, reexec_with_hashseed

    reexec_with_hashseed(config.full_determinism, config.determinism.threads)

    from workers.launch.calls import without_collection

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with without_collection():
        pin_process(config.full_determinism, config.determinism.threads)

        from workers import vllm_process
        from workers.launch.group import Modules
        from workers.launch.launcher import make_launcher
        from workers.models import trainer_worker

        config, run_directory, inputs, functions = _checked(config)
    with ExitStack() as stack:
        stack.callback(run_directory.release)  # entered first, given back last
        modules = Modules(ranks=trainer_worker.PRELOAD if training else (), engines=vllm_process.PRELOAD)
        launcher = make_launcher(config, run_directory.path, modules)
        stack.callback(launcher.close)
        launcher.on_main(functions.result)
        yield Session(config, launcher, run_directory, inputs, stack)


def _checked(config: Config) -> tuple[Config, RunDirectory, Inputs, Future[None]]:
    """The config with its paths, the run directory, the inputs, and the check of the reward functions: done, its result for the main process."""
    from reward.pool import check_functions
    from trainer.build import load_inputs, resolve_paths
    from trainer.run_dir import RunDirectory
    from workers.launch.launcher import launched_by_torchrun

    config = resolve_paths(config)
    run_directory = RunDirectory(config.run.dir)
    if not launched_by_torchrun():  # under torchrun the first rank to get here would make the directory look used
        run_directory.check(config.run.resume)
    first = os.environ.get("RANK", "0") == "0"
    with ThreadPoolExecutor(1) as aside:
        # In a process of its own anyway, so it need not wait for the data.
        functions = aside.submit(check_functions, config.reward.functions if first else [])
        inputs = load_inputs(config)
    return config, run_directory, inputs, functions


def start(config: Config, adjust: Callable[[PPO], None] | None = None, checkpoint: Checkpoint | None = None) -> PPO:
    """Pin, check, start everything, train, end everything.

    Args:
        adjust: changes the loop after it was restored (a replay does).
        checkpoint: restore this one instead of looking in the run directory.
    """
    from trainer.claim import prepare_directory

    with session(config) as ready:
        found = ready.launcher.on_main(lambda: prepare_directory(ready.config, ready.run, ready.inputs))
        return train(ready.config, ready.launcher, ready.run, checkpoint or found, ready.inputs, ready.stack, adjust)


def train(
    config: Config,
    launcher: Launcher,
    run: RunDirectory,
    checkpoint: Checkpoint | None,
    inputs: Inputs,
    stack: ExitStack,
    adjust: Callable[[PPO], None] | None,
) -> PPO:
    """Start everything, restore, and run the loop."""
    from trainer.build import assemble

    ppo = assemble(config, launcher, run, checkpoint, inputs, stack)
    if adjust is not None:
        adjust(ppo)
    failed = True
    try:
        ppo.fit()
        failed = False
    finally:
        if ppo.parts.record.tracker is not None:
            ppo.parts.record.tracker.close(failed)
    if launcher.is_main:
        logger.info("done: %d steps, everything is in %s", ppo.done, run.path)
    return ppo
