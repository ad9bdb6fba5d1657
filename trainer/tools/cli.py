"""The `exactrl` command. Everything heavy is imported by the subcommand that needs it, so `--help` answers at once.

Exit codes: 0 done; 1 the run failed (or, for `compare`, the runs differ); 2 the command or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.tools.pipes import ending_with_the_reader

if TYPE_CHECKING:
    from configs.problems import Problem
    from configs.schema import Config, DataSourceConfig

DESCRIPTION = "PPO for language models whose runs can be repeated bit for bit."

TRAIN_EPILOG = """\
overrides:
  group=option            another option of a group:        model=smollm2 algorithm=grpo launcher=torchrun
  experiment=NAME         a set of overrides with a name:   experiment=tiny_grpo
  key=value               one value:                        seed=1 full_determinism=true rollout.sampling.n=8
  key.0.key=value         within a list:                    data.train.0.size=512

examples:
  exactrl train                                             the tiny default, on Ray
  exactrl train experiment=micro full_determinism=true      two steps on the smallest models, repeatable
  exactrl train my_experiment.yaml seed=3                   a YAML file of your own over the default
  torchrun --nproc-per-node=2 -m trainer.main_ppo seed=3    the same loop under torchrun

Every key: docs/configuration.md.
"""

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    summary: str
    """One line for the list."""
    module: str
    """The subcommand exists when this module does."""
    main: Callable[[Sequence[str]], int]
    """Arguments after the subcommand -> exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `exactrl ARGV...`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return ending_with_the_reader(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    commands = available_commands()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(commands))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"exactrl {version('exactrl')}")
        return 0
    name = arguments[0]
    if name not in commands:
        from configs.suggest import nearest

        near = nearest(name, commands)
        hint = f"did you mean `exactrl {near}`? " if near else ""
        return _fail([f"there is no command {name!r}; {hint}Commands: {', '.join(commands)}"])
    return _guarded(commands[name].main, arguments[1:])


def available_commands() -> dict[str, Command]:
    """Subcommands in the order of the help, those whose module is installed."""
    commands = {
        "train": Command("train as configured", "trainer.run", train),
        "compare": _forwarded("are runs the same, and if not, where do they part?", "determinism.compare"),
        "doctor": _forwarded("what can be promised on this machine with this model", "trainer.tools.doctor"),
        "replay": _forwarded(
            "run up to one step of a run again and check it against its ledger", "trainer.tools.replay"
        ),
        "eval": _forwarded("evaluate a model on the validation sources", "trainer.tools.evaluate"),
        "serve": _forwarded("a rollout server for runs that name it", "trainer.tools.serve"),
        "export": _forwarded("a trained model as a Hugging Face folder", "trainer.tools.export"),
        "build": Command("build the small models that recipes name", "trainer.tiny", build),
    }
    return {name: command for name, command in commands.items() if _exists(command.module)}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _forwarded(summary: str, module: str) -> Command:
    """A subcommand whose module has its own `main(argv)` and parser."""

    def forward(argv: Sequence[str]) -> int:
        return int(importlib.import_module(module).main(list(argv)))

    return Command(summary, module, forward)


def _usage(commands: dict[str, Command]) -> str:
    width = max(len(name) for name in commands)
    lines = [f"  {name:{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            "usage: exactrl COMMAND [arguments]",
            "",
            DESCRIPTION,
            "",
            "commands:",
            *lines,
            "",
            "`exactrl COMMAND --help` says more.",
        ]
    )


def _guarded(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Print an error that the user can fix as one line, a worker's failure with the worker's own traceback, and any other error as it is.

    A file or checkpoint that could not be written (a full disk) is also reported in one line, but the run has failed: exit code 1.
    """
    from configs.problems import UserError

    try:
        return command(argv)
    except UserError as error:
        return _fail(str(error).splitlines())
    except KeyboardInterrupt:
        print("exactrl: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:
        from determinism.files import NotWrittenError
        from trainer.checkpoint import SaveError
        from workers.launch.group import WorkerError

        if not isinstance(error, (WorkerError, SaveError, NotWrittenError)):
            raise
        print(f"exactrl: {error}", file=sys.stderr)
        return 1


def _fail(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"exactrl: {line}", file=sys.stderr)
    return 2


# --- train ---------------------------------------------------------------------------------------------------------


def train_parser() -> argparse.ArgumentParser:
    """The options of `exactrl train`."""
    parser = argparse.ArgumentParser(
        prog="exactrl train",
        description="Train as configured: the packaged default, changed by an experiment file and overrides.",
        epilog=TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="[EXPERIMENT.yaml] [OVERRIDE ...]", help="see below")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the configuration, the seeds and what would start, and stop",
    )
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with groups of your own (DIR/model/mine.yaml); repeatable",
    )
    return parser


def train(argv: Sequence[str]) -> int:
    """`exactrl train`.

    Raises:
        ConfigError: nothing was started.
    """
    arguments = train_parser().parse_intermixed_args(list(argv))

    from configs.checks import check
    from configs.compose import load_config, to_yaml
    from configs.problems import ConfigError

    config = load_config(arguments.overrides, config_dir=arguments.config_dir)
    if arguments.cfg:
        print(to_yaml(config), end="")
        return 0
    config, warnings = check(config)
    missing = missing_files(config)
    if missing:
        raise ConfigError(missing)
    if arguments.dry_run:
        print_warnings(warnings)
        print(to_yaml(config), end="")
        for line in effective_seeds(config) + what_would_start(config):
            print(f"# {line}")
        return 0
    pin_hash_seed(config)
    print_warnings(warnings)
    print_effective_seeds(config)

    from trainer.run import run

    return run(config)


def pin_hash_seed(config: Config) -> None:
    """Under full determinism the process starts itself again here, once, before anything is printed."""
    from determinism.environment import reexec_with_hashseed

    reexec_with_hashseed(config.full_determinism, config.determinism.threads)


def print_warnings(warnings: Sequence[Problem]) -> None:
    """Print one line each on stderr; under torchrun rank 0 alone prints."""
    _say([f"exactrl: warning: {warning}" for warning in warnings])


def print_effective_seeds(config: Config) -> None:
    """Print where every random number of the run comes from, one line each, on stderr; under torchrun rank 0 alone prints."""
    _say(effective_seeds(config))


def _say(lines: Sequence[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line, file=sys.stderr)


def effective_seeds(config: Config) -> list[str]:
    """Lines of text: every seed in force and what follows from it."""
    from rollout.sampling import seeds_are_derived

    unused = "not used: requests have no seed, since rollout.deterministic_sampling is false"
    requests = "each request's own seed is derived from it" if seeds_are_derived(config.rollout) else unused
    rows = [
        ("seed", f"{config.seed}", "new weights, mini-batch order"),
        ("data.seed", f"{config.data.seed}", "order of the prompts"),
        ("rollout.seed", f"{config.rollout.seed}", requests),
    ]
    for split, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for i, source in enumerate(sources):
            if source.kind == "reasoning_gym":
                rows.append((f"data.{split}.{i}.seed", _source_seed(source), f"rows of {source.name}"))
    for name in ("sampling", "validation", "validation_sampled"):
        sampling = getattr(config.rollout, name)
        if sampling is not None and sampling.seed is not None:
            rows.append(
                (f"rollout.{name}.seed", f"{sampling.seed}", "shared by every request, in place of derived seeds")
            )
    for key, value in (
        ("full_determinism", config.full_determinism),
        ("rollout.full_determinism", config.rollout.full_determinism),
        ("reward.full_determinism", config.reward.full_determinism),
    ):
        rows.append((key, str(value).lower(), ""))
    width = max(len(key) for key, _, _ in rows)
    return [f"{key:{width}} = {value}{f'  ({use})' if use else ''}" for key, value, use in rows]


def _source_seed(source: DataSourceConfig) -> str:
    return "derived from data.seed and the source's name" if source.seed is None else str(source.seed)


def what_would_start(config: Config) -> list[str]:
    """Lines of text: the processes of this run."""
    from configs.roles import roles_needed

    launcher, rollout, model = config.launcher, config.rollout, config.reward.model
    lines = [
        f"launcher {launcher.name}: {launcher.num_ranks} FSDP rank(s) on {launcher.device} for {', '.join(roles_needed(config))}",
        f"rollout: {rollout.replicas} engine(s) of {config.model.path}",
    ]
    if model.path is not None:
        lines.append(f"reward model: {model.replicas} engine(s) of {model.path}")
    judge = config.reward.judge
    if judge.path is not None:
        lines.append(f"judge: {judge.replicas} engine(s) of {judge.path}, {judge.sampling.n} judgement(s) a sample")
    if config.reward.functions:
        names = ", ".join(f"{function.name} ({function.function})" for function in config.reward.functions)
        lines.append(f"reward functions: {names} in {config.reward.function_workers} process(es)")
    player = rollout.environment or rollout.agent
    if player is not None:
        lines.append(f"episodes of several turns: {player} in {rollout.proxy.processes} process(es)")
    total = config.data.prompts_per_step * rollout.sampling.n
    lines.append(f"a step: {config.data.prompts_per_step} prompts x {rollout.sampling.n} samples = {total} sequences")
    return [*lines, f"run directory: {config.run.dir}"]


def missing_files(config: Config) -> list[Problem]:
    """Models, data files and functions that the configuration names but that do not exist."""
    from configs.problems import Problem
    from configs.roles import roles_needed
    from configs.user_code import file_of
    from trainer.tiny import names

    roles = roles_needed(config)
    paths: list[tuple[str, str | None]] = [
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer),
        ("critic.path", config.critic.path if "critic" in roles else None),
        ("ref.path", config.ref.path if "ref" in roles else None),
        ("reward.model.path", config.reward.model.path),
        ("reward.model.tokenizer", config.reward.model.tokenizer),
        ("reward.judge.path", config.reward.judge.path),
        ("reward.judge.tokenizer", config.reward.judge.tokenizer),
    ]
    problems = {}
    for key, path in paths:
        if path is not None and path not in names() and not Path(path).is_dir() and path not in problems:
            problems[path] = Problem(key, f"there is no folder {path!r}", f"recipes are {', '.join(names())}")
    for split in ("train", "validation"):
        for i, source in enumerate(getattr(config.data, split)):
            is_file = source.kind == "dataset" and Path(source.path).suffix in DATA_SUFFIXES
            if is_file and not Path(source.path).exists():
                problems[f"{split}{i}"] = Problem(f"data.{split}.{i}.path", f"there is no file {source.path!r}")
    for i, function in enumerate(config.reward.functions):
        file = file_of(function.function)
        if file is not None and not file.is_file():
            problems[f"function{i}"] = Problem(f"reward.functions.{i}.function", f"there is no file {str(file)!r}")
    parser = file_of(config.reward.judge.parser)
    if parser is not None and not parser.is_file():
        problems["parser"] = Problem("reward.judge.parser", f"there is no file {str(parser)!r}")
    return list(problems.values())


# --- build ---------------------------------------------------------------------------------------------------------


def build(argv: Sequence[str]) -> int:
    """`exactrl build`: the models behind recipe names, built once and cached."""
    from configs.problems import UserError
    from trainer.tiny import describe, names, resolve

    listing = "\n".join(f"  {name:15} {describe(name)}" for name in names())
    parser = argparse.ArgumentParser(
        prog="exactrl build",
        description="Build small models once and print the folder of each.",
        epilog=f"models:\n{listing}\n\nA name without a role (`tiny`) builds all of its models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="recipe or recipe:role")
    parser.add_argument(
        "--cache", metavar="DIR", help="where built models live (default: $EXACTRL_CACHE or ~/.cache/exactrl)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args(list(argv))
    wanted = [[known for known in names() if name in (known, known.partition(":")[0])] for name in arguments.names]
    unknown = [name for name, found in zip(arguments.names, wanted, strict=True) if not found]
    if unknown:
        raise UserError("\n".join(f"there is no recipe {name!r}; there are {', '.join(names())}" for name in unknown))
    for name in [name for found in wanted for name in found]:
        try:
            print(resolve(name, cache_dir=arguments.cache, quiet=arguments.quiet))
        except FileNotFoundError as error:
            raise UserError(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
