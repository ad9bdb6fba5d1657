"""`exactrl eval`: score a model, or the actor of a training checkpoint, on the validation sources. Starts the engines only.

What is sampled is what validation during training samples (`rollout.validation`, and `rollout.validation_sampled` when it is set),
with the seeds of the checkpoint's step, or of step 0 for a model. So under full determinism an evaluation
equals the run's validation at that step, or the one before its first step, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.problems import UserError
from trainer.tools.trust import add_option, check_trust

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.checkpoint import Checkpoint
    from trainer.run import Session
    from trainer.tools.saved_actor import ActorWeights
    from trainer.validation import ValidationResult

logger = logging.getLogger("exactrl.eval")

EPILOG = """\
overrides are those of `exactrl train`; these matter here:
  model.path=DIR                          the model to evaluate
  rollout.validation.n=16                 samples a prompt, for pass@k and maj@k
  rollout.validation.temperature=0.7      greedy unless set
  trainer.eval_source=correct             the reward source that says whether a sample is right
  trainer.eval_threshold=1.0              from which value on

The directory gets config.yaml, manifest.json, ledger.jsonl (so `exactrl compare A B` works on two evaluations), metrics.jsonl
and every sample in episodes/validation_000000.jsonl (the number is the checkpoint's step, 0 without one).

--checkpoint evaluates the actor as it was trained, adapters merged, after the checkpoint's digests were verified. The run's
config.yaml is the base then, with values (`key=value`) over it; an EXPERIMENT.yaml or experiment=NAME takes its place.

examples:
  exactrl eval my_experiment.yaml --out evals/base
  exactrl eval --checkpoint runs/a                              the newest checkpoint of the run
  exactrl eval --checkpoint runs/a --step 40 rollout.validation.n=16
  exactrl eval --checkpoint runs/a/checkpoints/step_000040 other_task.yaml
"""


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl eval`."""
    parser = argparse.ArgumentParser(
        prog="exactrl eval",
        description=(
            "Evaluate a model, or the actor of a training checkpoint, on the validation sources: "
            "pass@k, majority@k, rewards, lengths."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="[EXPERIMENT.yaml] [OVERRIDE ...]", help="see below")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a run's directory (its newest complete checkpoint), or a checkpoint's",
    )
    parser.add_argument("--step", type=int, metavar="K", help="with a run's directory: the checkpoint of this step")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where results go (default: eval/ in run.dir; for a run's checkpoint eval/step_<K>/ in the run)",
    )
    add_option(parser)
    parser.add_argument(
        "--config-dir", action="append", default=[], metavar="DIR", help="a folder with groups of your own; repeatable"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl eval`; returns the exit code.

    Raises:
        UserError: something about the configuration or the inputs is wrong; nothing was started.
        WorkerError: an engine failed.
    """
    arguments = build_parser().parse_intermixed_args(argv)
    if arguments.step is not None and arguments.checkpoint is None:
        raise UserError("--step chooses among the checkpoints of a run; give the run with --checkpoint")

    from configs.checks import check
    from configs.problems import ConfigError, Problem
    from trainer.tools.cli import missing_files, pin_hash_seed, print_effective_seeds, print_warnings
    from trainer.tools.saved_actor import find_checkpoint, run_of

    checkpoint = find_checkpoint(arguments.checkpoint, arguments.step) if arguments.checkpoint else None
    run = run_of(checkpoint) if checkpoint else None
    loaded = _load(arguments.overrides, arguments.config_dir, checkpoint, run, arguments.trust_run)
    config, warnings = check(loaded)
    problems = missing_files(config)
    if not config.data.validation:
        problems.append(Problem("data.validation", "is empty, so there is nothing to evaluate on", "list a source"))
    if problems:
        raise ConfigError(problems)
    pin_hash_seed(config)
    print_warnings(warnings)
    print_effective_seeds(config)
    default = run / "eval" / checkpoint.path.name if checkpoint and run else Path(config.run.dir) / "eval"
    evaluate(config, arguments.out or default, checkpoint)
    return 0


def _load(
    overrides: list[str], config_dir: list[str], checkpoint: Checkpoint | None, run: Path | None, trust_run: bool
) -> Config:
    """The configuration of the command line; the run's own when one of its checkpoints is evaluated and no experiment is named."""
    from configs.compose import from_yaml, load_config

    named = any(text.startswith("experiment=") for text in overrides) or bool(overrides and "=" not in overrides[0])
    if checkpoint is None or named:
        return load_config(overrides, config_dir=config_dir)
    if run is None:
        raise UserError(
            f"--checkpoint {checkpoint.path}: there is no config.yaml of its run two folders above; "
            "name the experiment that it was trained with (EXPERIMENT.yaml or experiment=NAME)"
        )
    if config_dir:
        raise UserError(f"--config-dir has no effect on {run / 'config.yaml'}, which is complete; name an experiment")
    # There is no trainer rank here, so any number of processes is enough, however many ranks the run had.
    ranks = os.environ.get("WORLD_SIZE", "1")
    config = from_yaml(run / "config.yaml", [f"launcher.num_ranks={ranks}", *overrides])
    check_trust(config, run, trust_run, own=from_yaml(run / "config.yaml"))
    return config


def evaluate(config: Config, out: Path, checkpoint: Checkpoint | None = None) -> ValidationResult:
    """Evaluate `model.path`, or the actor in `checkpoint` that was trained from it; write everything to `out`, print a table.

    Raises:
        RunDirectoryError: `out` holds results already.
        CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    from trainer.run import session
    from trainer.run_dir import RunDirectory, RunDirectoryError
    from trainer.tools.saved_actor import verify

    if RunDirectory(out).used:
        raise RunDirectoryError(f"{out} already holds results; choose another directory with --out")
    if checkpoint is not None:
        verify(checkpoint)
    config = replace(
        config,
        run=replace(config.run, dir=str(out), resume="never"),
        tracking=replace(config.tracking, progress=False),
    )
    with session(config, training=False) as ready:
        actor = _saved_actor(checkpoint, ready.config) if checkpoint else None
        return _evaluate(ready, checkpoint, actor)


def _saved_actor(checkpoint: Checkpoint, config: Config) -> ActorWeights:
    """The actor in a checkpoint, its adapters merged with the settings of its run, whatever the settings of this evaluation."""
    from configs.compose import from_yaml
    from trainer.tools.saved_actor import actor_weights, run_of

    run = run_of(checkpoint)
    lora = (from_yaml(run / "config.yaml") if run else config).actor.lora
    return actor_weights(checkpoint, config.model.path, lora)


def _evaluate(ready: Session, checkpoint: Checkpoint | None, actor: ActorWeights | None) -> ValidationResult:
    from configs.compose import to_dict
    from determinism.ledger import Ledger
    from trainer.build import check_processes, record_manifest, start_engines, validation_of
    from trainer.claim import commit, prepare_directory
    from trainer.record import Record
    from trainer.tracking import Tracker

    config, launcher, run, inputs, stack = ready
    step = checkpoint.step if checkpoint else 0
    prepare_directory(config, run, inputs)
    engines = start_engines(config, launcher, run, inputs, stack)
    checked = engines.check(config, inputs)
    ledger = Ledger(run.path, config.ledger.record)
    processes = check_processes(config, engines.groups)
    commit(config, run, None, ledger)
    record_manifest(config, run, inputs, engines.groups, processes, checked)
    tracker = Tracker(config.tracking, run, f"{config.run.name}-eval", to_dict(config), total_steps=0)
    stack.callback(lambda: tracker.close(failed=sys.exc_info()[0] is not None))
    record = Record(run, tracker, save_episodes=True, log_samples=config.tracking.log_samples)
    if actor is not None:
        engines.rollout.engines.load_weights(actor.tensors, step)
        engines.rollout.engines.wait_for_weights()
        ledger.add_digest("actor_weights", actor.digest)
    result = validation_of(config, engines, inputs).run(step=step)
    ledger.add("prompts", [[prompt.id, list(prompt.token_ids)] for prompt in inputs.validation.prompts])
    for phase, digest in result.digests.items():
        ledger.add_digest(phase, digest)
    ledger.commit(step)
    record.metrics(step, result.metrics)
    record.validation(step, result)
    if checkpoint is not None:
        print(f"actor of {checkpoint.path}", flush=True)
    print(table(result.metrics), flush=True)
    logger.info("everything is in %s", run.path)
    return result


def table(metrics: Mapping[str, float]) -> str:
    """Metrics as lines of text: a block for each pass and source, one name and value per line.

    Example:
        >>> print(table({"val/score/mean": 0.5, "val/sums/pass@1": 0.25}))
        val
          score/mean          0.5000
        val/sums
          pass@1              0.2500
    """
    blocks: dict[str, list[tuple[str, float]]] = {}
    sources = {name.rsplit("/", 1)[0] for name in metrics if name.endswith("/pass@1")}
    for name, value in metrics.items():
        split = name.split("/", 1)[0]
        block = next((source for source in sorted(sources) if name.startswith(f"{source}/")), split)
        blocks.setdefault(block, []).append((name.removeprefix(f"{block}/"), value))
    width = max((len(name) for rows in blocks.values() for name, _ in rows), default=0)
    width = max(width, 18)
    lines = []
    for block in sorted(blocks):
        lines.append(block)
        lines += [f"  {name:{width}}  {value:.4f}" for name, value in blocks[block]]
    return "\n".join(lines)


if __name__ == "__main__":
    from trainer.tools.cli import main as cli

    sys.exit(cli(["eval", *sys.argv[1:]]))
