"""`exactrl eval`: score a model on the validation sources. Starts the engines only; no trainer rank.

What is sampled is what validation during training samples (`rollout.validation`, and `rollout.validation_sampled` when it is set),
with the seeds of step 0. So an evaluation equals the validation before the first training step, bit for bit under full determinism.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.main_ppo import Session
    from trainer.validation import ValidationResult

logger = logging.getLogger("exactrl.eval")

EPILOG = """\
overrides are those of `exactrl train`; these matter here:
  model.path=DIR                          the checkpoint to evaluate
  rollout.validation.n=16                 samples a prompt, for pass@k and maj@k
  rollout.validation.temperature=0.7      greedy unless set
  trainer.eval_source=correct             the reward source that says whether a sample is right
  trainer.eval_threshold=1.0              from which value on

The directory gets config.yaml, manifest.json, ledger.jsonl (so `exactrl compare A B` works on two evaluations), metrics.jsonl
and every sample in episodes/validation_000000.jsonl.
"""


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl eval`."""
    parser = argparse.ArgumentParser(
        prog="exactrl eval",
        description="Evaluate a model on the validation sources: pass@k, majority@k, rewards, lengths.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="[EXPERIMENT.yaml] [OVERRIDE ...]", help="see below")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: eval/ in run.dir)")
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

    from configs.compose import load_config
    from configs.problems import ConfigError, Problem
    from configs.validate import check
    from trainer.cli import missing_files, pin_hash_seed, print_effective_seeds, print_warnings

    config, warnings = check(load_config(arguments.overrides, config_dir=arguments.config_dir))
    problems = missing_files(config)
    if not config.data.validation:
        problems.append(Problem("data.validation", "is empty, so there is nothing to evaluate on", "list a source"))
    if problems:
        raise ConfigError(problems)
    pin_hash_seed(config)
    print_warnings(warnings)
    print_effective_seeds(config)
    evaluate(config, arguments.out or Path(config.run.dir) / "eval")
    return 0


def evaluate(config: Config, out: Path) -> ValidationResult:
    """Evaluate `model.path`, write everything to `out`, print a table.

    Raises:
        RunDirectoryError: `out` holds results already.
    """
    from trainer.main_ppo import session

    config = replace(
        config,
        run=replace(config.run, dir=str(out), resume="never"),
        tracking=replace(config.tracking, progress=False),
    )
    with session(config) as ready:
        return _evaluate(ready)


def _evaluate(ready: Session) -> ValidationResult:
    from configs.compose import to_dict
    from determinism.ledger import Ledger
    from trainer.build import record_manifest, start_engines, validation_of
    from trainer.main_ppo import prepare_directory
    from trainer.record import Record
    from trainer.tracking import Tracker

    config, launcher, run, inputs, stack = ready
    launcher.on_main(lambda: prepare_directory(config, run))
    engines = start_engines(config, launcher, run, inputs, stack)
    checked = engines.check(config, inputs)
    processes = {name: group.run("facts") for name, group in engines.groups.items()}
    launcher.on_main(lambda: record_manifest(config, run, inputs, processes, checked))
    tracker = None
    if launcher.is_main:
        tracker = Tracker(config.tracking, run, f"{config.run.name}-eval", to_dict(config), total_steps=0)
        stack.callback(lambda: tracker.close(failed=sys.exc_info()[0] is not None))
    record = Record(run, tracker, save_episodes=True, log_samples=config.tracking.log_samples)
    ledger = Ledger(run.path, config.ledger.record, is_main=launcher.is_main)
    result = validation_of(config, engines, inputs).run(step=0)
    ledger.add("prompts", [[prompt.id, list(prompt.token_ids)] for prompt in inputs.validation.prompts])
    for phase, digest in result.digests.items():
        ledger.add_digest(phase, digest)
    ledger.commit(0)
    record.metrics(0, result.metrics)
    record.validation(0, result)
    if launcher.is_main:
        print(table(result.metrics), flush=True)
        logger.info("everything is in %s", run.path)
    return result


def table(metrics: Mapping[str, float]) -> str:
    """Metrics as lines of text: a block for each pass and source, one name and value a line.

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
    from trainer.cli import main as cli

    sys.exit(cli(["eval", *sys.argv[1:]]))
