"""Code that a run's own config names is named before it runs."""

from pathlib import Path

import pytest

from configs.compose import load_config
from configs.problems import UserError
from trainer.tools.trust import check_trust, code_named_by

TURNS = ("experiment=micro", "rollout.turns.max_tokens=64")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("rollout.environment=my_env.py:Guess",), "rollout.environment=my_env.py:Guess"),
        (("rollout.agent=my_agent.py:run",), "rollout.agent=my_agent.py:run"),
        (("rollout.agent='program:python3 x.py'",), "rollout.agent=program:python3 x.py"),
        (
            ("rollout.environment=tries", "rollout.turns.params.function=mine.py:f"),
            "rollout.turns.params={'function': 'mine.py:f'}",
        ),
        (
            ("rollout.agent=remote", "rollout.turns.tool_parser=mine.py:Parser"),
            "rollout.turns.tool_parser=mine.py:Parser",
        ),
    ],
)
def test_environments_agents_and_parsers_are_code(overrides: tuple[str, ...], named: str) -> None:
    config = load_config([*TURNS, *overrides])
    assert code_named_by(config) == [named]
    with pytest.raises(UserError, match="add --trust-run"):
        check_trust(config, Path("run"), trusted=False)
    check_trust(config, Path("run"), trusted=True)


def test_a_plain_run_names_none() -> None:
    assert code_named_by(load_config(["experiment=micro"])) == []
