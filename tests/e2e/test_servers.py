"""Runs on servers of SGLang that run already (a stand-in speaks for them): repeatable, on one server or two."""

from pathlib import Path

import pytest

from configs.compose import load_config
from tests.e2e import runs
from tests.rollout.sglang_standin import standin
from trainer.inputs import resolve_paths

pytestmark = pytest.mark.timeout(580)


def test_a_run_on_one_server_repeats_itself_on_two(tmp_path: Path) -> None:
    model = resolve_paths(load_config(["experiment=micro"])).model.path
    with standin(model) as (first, _), standin(model, 'attention_backend="torch_native"') as (second, _):
        settings = ("rollout.engine=sglang_server",)
        one = runs.train(tmp_path / "one", *settings, f"rollout.urls=[{first}]", launcher="python")
        servers = ("rollout.replicas=2", f"rollout.urls=[{second},{first}]")
        process = runs.start(tmp_path / "two", *settings, *servers, launcher="python")
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    runs.assert_same(one, tmp_path / "two")
    assert "rollout/0: the server at" in output
    assert output.count("attention_backend=torch_native; SGLang documents") == 1
