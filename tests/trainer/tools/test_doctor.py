"""The engine check at start and `exactrl doctor`, on real engines and real runs; both can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.compose import load_config
from configs.problems import ConfigError, UserError
from configs.schema import Config
from determinism.selfcheck import BROKEN, KEPT, LEVELS, UNCHECKED
from rollout.types import GenerationRequest
from tests import engine_lab
from trainer.engine_check import (
    SHORT,
    THOROUGH,
    EngineCheckError,
    batch_plans,
    burst,
    check_engines,
    order_plans,
    short_plans,
)
from trainer.tools import doctor

CONTEXT = 256


class LabGroup:
    """Engines of the lab as a worker group of one."""

    size = 1

    def __init__(self, lab: Any, model: str, **options: Any) -> None:
        self.lab, self.model, self.options = lab, model, options

    def ready(self) -> None:
        """The lab's engines start when they are first asked."""

    def submit(self, worker: int, requests: list[Any]) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in requests]
        if isinstance(requests[0], GenerationRequest):
            found = self.lab.generate(model=self.model, requests=requests, **self.options)
        else:
            found = self.lab.score(model=self.model, token_ids=requests, **self.options)
        for future, result in zip(futures, found, strict=True):
            future.set_result(result)
        return futures


def config_for(policy: str, reward: str | None = None) -> Config:
    config = load_config(["experiment=micro", "full_determinism=true"])
    model = replace(config.reward.model, path=reward, max_model_len=None)
    return replace(config, model=replace(config.model, path=policy), reward=replace(config.reward, model=model))


# --- the check at start --------------------------------------------------------------------------------------------


def test_engines_under_full_determinism_pass(lab, policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("check_reward")
    engine_lab.make_reward(path)
    groups = {"rollout": LabGroup(lab, policy[0]), "reward": LabGroup(lab, str(path), max_num_seqs=1)}
    check = check_engines(config_for(policy[0], str(path)), groups, CONTEXT)
    assert (check.requests, check.scores) == (SHORT.requests, SHORT.scores)


def test_engines_with_vllms_own_linear_are_refused_and_the_first_difference_is_named(stock_lab, policy):
    try:
        check_engines(config_for(policy[0]), {"rollout": LabGroup(stock_lab, policy[0])}, CONTEXT)
    except EngineCheckError as error:
        refused = error
    else:
        pytest.skip(f"stock vLLM happens to be batch-invariant on {torch.backends.cpu.get_cpu_capability()}")
    text = str(refused)
    for part in (
        *(
            "level D3",
            "rollout engines",
            "rollout.dtype=float32",
            "determinism.cpu_linear=auto",
            "request ",
            "new token ",
        ),
        *("one batch", "ulp apart", "determinism.cpu_linear=block16", "determinism.engine_check=false"),
        "full_determinism=false",
    ):
        assert part in text
    assert isinstance(refused, UserError)  # one clear message, no traceback


@pytest.mark.parametrize("size", [SHORT, THOROUGH])
@pytest.mark.parametrize("context", [9, 40, 300, 4096])
def test_requests_fit_the_context_and_are_the_same_ones_each_time(size, context):
    requests = burst(100, context, size)
    assert requests == burst(100, context, size)
    assert len({request.seed for request in requests}) == size.requests
    for request in requests:
        assert len(request.prompt_token_ids) > 0
        assert len(request.prompt_token_ids) + request.sampling.max_new_tokens <= context
        assert all(0 <= token < 100 for token in request.prompt_token_ids)


def test_some_prompts_share_more_than_a_block_of_the_cache():
    prompts = [request.prompt_token_ids for request in burst(100, 300, SHORT)]
    shared = [prompt for prompt in prompts[1:] if prompt[:33] == prompts[0][:33]]
    assert len(shared) >= 2


@pytest.mark.parametrize("plans", [short_plans, batch_plans, order_plans])
@pytest.mark.parametrize("count", [1, 6, 12, 48])
def test_each_way_asks_every_request_once_and_the_first_is_the_plain_one(plans, count):
    made = plans(count)
    assert made[0].chunks == (tuple(range(count)),)
    for plan in made:
        assert sorted(position for chunk in plan.chunks for position in chunk) == list(range(count))


# --- exactrl doctor ------------------------------------------------------------------------------------------------


def test_a_setting_that_full_determinism_refuses_is_the_finding():
    config, findings = doctor.claimed_config(["experiment=micro", "actor.optim.fused=true"])
    assert config is None
    assert [(finding.level, finding.verdict) for finding in findings] == [("D4", BROKEN)]
    assert "actor.optim.fused" in findings[0].detail


def test_a_configuration_that_cannot_run_at_all_is_an_error_as_in_train():
    with pytest.raises(ConfigError):
        doctor.claimed_config(["experiment=micro", "launcher.num_rank=2"])


def test_full_determinism_is_turned_on_for_the_checks_whatever_was_asked_for():
    for overrides in (["experiment=micro"], ["experiment=micro", "full_determinism=false"]):
        config, findings = doctor.claimed_config(overrides)
        assert config is not None
        assert (config.full_determinism, config.rollout.full_determinism, findings) == (True, True, [])


def test_each_run_changes_one_thing(tmp_path):
    config, _ = doctor.claimed_config(["experiment=micro"])
    assert config is not None
    variants = {variant.level: variant.config for variant in doctor.Doctor(config, tmp_path, full=True).variants()}
    base = doctor.short_run(config, steps=2)
    assert variants["D1"] == base
    assert variants["D4"].launcher.num_ranks == 2
    assert replace(variants["D4"], launcher=base.launcher) == base
    assert doctor.command(variants["D2"])[2] == "torch.distributed.run"
    assert variants["D3"].rollout.replicas == 2


def test_a_run_that_fails_is_a_finding_with_the_end_of_its_output(tmp_path):
    config, _ = doctor.claimed_config(["experiment=micro"])
    assert config is not None
    missing = replace(config, model=replace(config.model, path=str(tmp_path / "nowhere")))
    report = doctor.Doctor(missing, tmp_path / "runs", full=False)
    report.directory.mkdir()
    result = report.examine()
    assert (result.exit_code, result.verdict("D1")) == (1, BROKEN)
    assert "nowhere" in result.findings[0].detail


@pytest.mark.long
@pytest.mark.timeout(580)
def test_the_doctor_says_which_levels_hold_here(tmp_path: Path):
    """Three short runs of the micro models."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer.tools.cli",
            "doctor",
            "experiment=micro",
            "--json",
            "--keep",
            str(tmp_path / "kept"),
        ],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert set(report["levels"]) == set(LEVELS)
    for level in ("D1", "D3", "D4"):
        assert report["levels"][level] == KEPT, report
    for level in ("D2", "D5", "D6"):
        assert report["levels"][level] == UNCHECKED
    assert report["levels"]["D7"] in (KEPT, BROKEN)
    (gap,) = [finding for finding in report["findings"] if finding["level"] == "D7"]
    assert "largest gap" in gap["detail"]
    assert sum(finding["level"] == "D3" for finding in report["findings"]) == 3  # rollout, reward, weights loaded again
    assert report["facts"]["torch"]
    assert (tmp_path / "kept" / "again" / "ledger.jsonl").is_file()
