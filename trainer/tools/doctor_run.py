"""One run of `exactrl doctor`: a short training run, with the engines examined first when asked for.

    python -m trainer.tools.doctor_run CONFIG.yaml [--examine FINDINGS.json] [--stop-after K]

The examination happens in the run whose ledger the other runs are compared with, so it is shown to leave no trace too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.problems import UserError
from determinism.selfcheck import BROKEN, KEPT, UNCHECKED, Finding, first_difference, gap_between

if TYPE_CHECKING:
    from configs.schema import Config
    from determinism.selfcheck import Trial
    from rollout.types import GenerationRequest
    from trainer.ppo import PPO

GAP_SEQUENCES = 16
"""Least number of sequences for the gap between engine and trainer."""
GAP_TOKENS = 64
"""Most new tokens of each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run as told; 0 when the run finished, 2 when it was refused, 1 when it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tools.doctor_run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("config", type=Path, help="a complete configuration, as in a run directory")
    parser.add_argument("--examine", type=Path, metavar="FILE", help="examine the engines; findings go there as JSON")
    parser.add_argument("--stop-after", type=int, metavar="K", help="end after step K, as an interrupted run would")
    arguments = parser.parse_args(argv)

    from configs.compose import from_yaml
    from trainer.run import start
    from workers.launch.group import WorkerError

    def adjust(ppo: PPO) -> None:
        if arguments.stop_after is not None:
            ppo.stop_after = min(ppo.stop_after, arguments.stop_after)
        if arguments.examine is not None:
            findings = examine(ppo)
            arguments.examine.write_text(json.dumps([asdict(f) for f in findings]), encoding="utf-8")

    try:
        start(from_yaml(arguments.config), adjust)
    except (UserError, WorkerError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def examine(ppo: PPO) -> list[Finding]:
    """Check weights that are loaded again, batch invariance, and the gap between engine and trainer."""
    # First of all, while the engines still have the weights that they read themselves.
    findings = [_timed(lambda: weights_round_trip(ppo)), _timed(lambda: rollout_batches(ppo))]
    if ppo.config.reward.model.path is not None:
        findings.append(_timed(lambda: reward_batches(ppo)))
    if ppo.config.reward.judge.path is not None:
        findings.append(_timed(lambda: judge_batches(ppo)))
    findings.append(_timed(lambda: train_infer_gap(ppo)))
    return findings


def rollout_batches(ppo: PPO) -> Finding:
    """The burst in other batches and orders; then with the prefix cache emptied, and warm again."""
    from trainer import engine_check as check

    config = ppo.config
    requests = _burst(ppo)
    plans = check.batch_plans(len(requests))
    group = ppo.parts.rollout.engines.group
    trials = check.rollout_trials(group, requests, plans)
    ppo.sync_weights(0)  # empties the cache
    trials += check.rollout_trials(group, requests, [check.Plan("cache emptied", plans[1].chunks), plans[0]])
    what = f"{len(requests)} requests, {len(trials)} ways on {group.size} rollout engine(s)"
    return _compared(
        "D3", f"{what}: batches of 1 to {len(requests)}, orders, cache cold and warm", trials, config, "rollout"
    )


def reward_batches(ppo: PPO) -> Finding:
    """The reward model's scores in other orders and on every replica."""
    from trainer import engine_check as check

    group = ppo.parts.reward.model_group
    assert group is not None
    inputs = check.conversations(ppo.config, _context(ppo), check.THOROUGH)
    trials = check.reward_trials(group, inputs, check.order_plans(len(inputs)))
    what = f"{len(inputs)} conversations, {len(trials)} ways on {group.size} reward engine(s): orders, one at a time"
    return _compared("D3", what, trials, ppo.config, "reward")


def judge_batches(ppo: PPO) -> Finding:
    """The burst in other batches and orders on the judge's engines."""
    from trainer import engine_check as check

    group, judge = ppo.parts.groups["judge"], ppo.config.reward.judge
    context = min(_context(ppo), judge.max_model_len or _context(ppo))
    requests = check.burst(check.vocabulary(str(judge.path)), context, check.THOROUGH)
    trials = check.rollout_trials(group, requests, check.batch_plans(len(requests)))
    what = f"{len(requests)} requests, {len(trials)} ways on {group.size} engine(s) of the judge: batches, orders"
    return _compared("D3", what, trials, ppo.config, "judge")


def weights_round_trip(ppo: PPO) -> Finding:
    """The trainer's weights, equal to the checkpoint's, given to the engines again: the answers keep their bits."""
    from trainer import engine_check as check

    requests = _burst(ppo)[: check.SHORT.requests]
    group = ppo.parts.rollout.engines.group
    before = check.rollout_trials(group, requests, [check.Plan("before", (tuple(range(len(requests))),))])
    ppo.sync_weights(0)
    after = check.rollout_trials(group, requests, [check.Plan("weights loaded again", (tuple(range(len(requests))),))])
    return _compared(
        "D3", "the trainer's own weights loaded again into the engines", before + after, ppo.config, "rollout"
    )


def train_infer_gap(ppo: PPO) -> Finding:
    """Log-probabilities of sampled tokens: the engine's against the trainer's, before any update."""
    from rollout.types import Sampling, Score
    from trainer.engine_check import DOMAIN
    from trainer.experience import Experience

    config = ppo.config
    what = "log-probability of sampled tokens, engine against trainer"
    sampling = ppo.sampling
    plain = Sampling(sampling.max_new_tokens, sampling.temperature)
    if replace(sampling, stop=(), stop_token_ids=(), ignore_eos=False) != plain:
        return Finding(
            "D7",
            what,
            UNCHECKED,
            0.0,
            "rollout.sampling changes the distribution (a cut or a penalty), and the trainer's is whole",
        )
    # Whole leaves, the same number on every rank.
    unit = config.actor.fsdp.leaf_size * config.launcher.num_ranks
    count = -(-GAP_SEQUENCES // unit) * unit
    position = ppo.parts.sampler.state_dict()
    prompts = ppo.parts.sampler.next_batch()
    ppo.parts.sampler.load_state_dict(position)
    # No stop condition: more tokens to compare.
    whole = replace(
        sampling, max_new_tokens=min(sampling.max_new_tokens, GAP_TOKENS), ignore_eos=True, stop_token_ids=(), stop=()
    )
    episodes = ppo.parts.rollout.start(
        [prompts[i % len(prompts)] for i in range(count)], whole, n=1, split=DOMAIN, step=0
    ).result()
    experience = Experience.from_episodes(episodes, [Score(0.0, {})] * count, ppo.parts.pad_id)
    plan = ppo.plan("actor", experience, 0)
    logprobs, _ = ppo.parts.models.logprobs("actor", experience.tokens, plan)
    tokens = experience.tokens
    assert tokens.rollout_logprobs is not None
    trained = plan.paste(logprobs, tokens.input_ids.shape[1])
    gap = gap_between(tokens.rollout_logprobs[tokens.mask].tolist(), trained[tokens.mask].tolist())
    exact = gap.exact == gap.tokens
    way_out = "the engine's and the trainer's kernels round differently; rollout corrections can weigh the gap"
    return Finding("D7", what, KEPT if exact else BROKEN, 0.0, gap.describe(), "" if exact else way_out)


def _burst(ppo: PPO) -> list[GenerationRequest]:
    from trainer import engine_check as check

    return check.burst(check.vocabulary(ppo.config.model.path), _context(ppo), check.THOROUGH)


def _context(ppo: PPO) -> int:
    from configs.checks import rollout_context

    return rollout_context(ppo.config)


def _compared(level: str, what: str, trials: Sequence[Trial], config: Config, role: str) -> Finding:
    from trainer.engine_check import WAY_OUT, engine_settings

    found = first_difference(trials)
    if found is None:
        return Finding(level, what, KEPT)
    return Finding(level, what, BROKEN, 0.0, f"{engine_settings(config, role)}: {found.describe()}", WAY_OUT)


def _timed(check: Callable[[], Finding]) -> Finding:
    start = time.perf_counter()
    finding = check()
    return replace(finding, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
