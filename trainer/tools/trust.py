"""Code that a run's own `config.yaml` names: it runs only when a person says that the run can be trusted.

A run directory may come from somebody else. Its digests say that nothing was damaged on the way, not who wrote it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.problems import UserError
from configs.user_code import is_reference

CODE_IN_PARAMS = ("tools", "tries", "gymnasium")
"""Built-in environments whose `rollout.turns.params` may name code."""

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from configs.schema import Config


def add_option(parser: ArgumentParser) -> None:
    """`--trust-run`."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="run the code that the run's config.yaml names (reward functions, estimators, a model's own code)",
    )


def check_trust(config: Config, run: Path, trusted: bool, own: Config | None = None) -> None:
    """Refuse a configuration that would run code which only the run's `config.yaml` names.

    Args:
        config: what is about to be used.
        run: the run directory, for the message.
        trusted: whether `--trust-run` was given.
        own: the contents of the run's `config.yaml`, when `config` has values of this command over it; None means `config`.

    Raises:
        UserError: names each setting, and the way out.
    """
    from_run = set(code_named_by(own or config))
    named = [line for line in code_named_by(config) if line in from_run]
    if named and not trusted:
        raise UserError(
            f"{run / 'config.yaml'} names code that would run on this machine:\n"
            + "\n".join(f"  {line}" for line in named)
            + "\nRead it, and add --trust-run when you trust whoever made this run; or give values of your own for these keys."
        )


def code_named_by(config: Config) -> list[str]:
    """One line for each setting that lets code from outside this program run."""
    advantage, loss = config.algorithm.advantage.name, config.algorithm.policy_loss.name
    references = [("algorithm.advantage.name", advantage), ("algorithm.policy_loss.name", loss)]
    for i, function in enumerate(config.reward.functions):
        references.append((f"reward.functions.{i}.function", function.function))
    rollout = config.rollout
    references += [
        ("rollout.environment", rollout.environment or ""),
        ("reward.judge.parser", config.reward.judge.parser),
        ("rollout.turns.tool_parser", rollout.turns.tool_parser or ""),
    ]
    lines = [f"{key}={value}" for key, value in references if is_reference(value)]
    if rollout.agent is not None and rollout.agent != "remote":
        lines.append(f"rollout.agent={rollout.agent}")
    if rollout.environment in CODE_IN_PARAMS:
        lines.append(f"rollout.turns.params={dict(rollout.turns.params)}")
    if config.model.trust_remote_code:
        lines.append("model.trust_remote_code=true")
    for key, arguments in (
        ("rollout.engine_args", config.rollout.engine_args),
        ("reward.model.engine_args", config.reward.model.engine_args),
    ):
        if arguments:  # vLLM imports classes that are named in some of its arguments
            lines.append(f"{key}={arguments}")
    return lines
