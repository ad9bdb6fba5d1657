"""A training run from a config to its last step.

    compose + validate -> pin the process -> check inputs and resources -> start workers and engines -> PPO.fit

Whatever is wrong with the config, the data, the models or the machine is reported in one line before an engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.checkpoint import Checkpoint
    from trainer.inputs import Inputs
    from trainer.ppo import PPO
    from trainer.run_dir import RunDirectory
    from workers.launch.launcher import Launcher

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
    """Ends what is entered here, in reverse order."""


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

    from workers.launch.service import without_collection
    from workers.launch.torchrun_launcher import follow, follows

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if follows():
        raise SystemExit(follow())  # rank 0 drives; the other ranks go no further than this
    with without_collection():
        pin_process(config.full_determinism, config.determinism.threads)

        from trainer.tracking import check_tracking
        from workers import vllm_process
        from workers.launch.launcher import make_launcher
        from workers.models import trainer_worker

        config, run_directory, inputs = _checked(config, training)
        if training:
            check_tracking(config.tracking)
    with ExitStack() as stack:
        stack.callback(run_directory.release)  # entered first, so released last
        preload = (*(trainer_worker.PRELOAD if training else ()), *vllm_process.PRELOAD)
        launcher = make_launcher(config, run_directory.path, preload)
        stack.callback(launcher.close)
        yield Session(config, launcher, run_directory, inputs, stack)


def _checked(config: Config, training: bool) -> tuple[Config, RunDirectory, Inputs]:
    """The config with its paths, the run directory and the inputs; everything has been checked."""
    from reward.judge import functions_of
    from reward.pool import check_functions
    from trainer.data.templates import earlier_date, settle_date
    from trainer.inputs import load_inputs, resolve_paths
    from trainer.run_dir import RunDirectory, check_temporary_folder

    config = resolve_paths(config)
    run_directory = RunDirectory(config.run.dir)
    check_temporary_folder()
    run_directory.check(config.run.resume)
    config = settle_date(config, earlier_date(run_directory.config) if config.run.resume != "never" else None)
    with ThreadPoolExecutor(1) as aside:
        # It runs in a process of its own anyway, so it need not wait for the data.
        functions = aside.submit(check_functions, functions_of(config.reward))
        inputs = load_inputs(config, training)
        functions.result()
    return config, run_directory, inputs


def start(config: Config, adjust: Callable[[PPO], None] | None = None, checkpoint: Checkpoint | None = None) -> PPO:
    """Pin, check, start everything, train, end everything.

    Args:
        adjust: changes the loop after it was restored (used by a replay).
        checkpoint: restore this one instead of looking in the run directory.
    """
    from trainer.claim import prepare_directory

    with session(config) as ready:
        from configs.checks import several_turns
        from trainer.data.sampler import log_first_prompt

        log_first_prompt(ready.inputs.train, several_turns(ready.config))
        found = prepare_directory(ready.config, ready.run, ready.inputs)
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
    logger.info("done: %d steps, everything is in %s", ppo.done, run.path)
    return ppo
