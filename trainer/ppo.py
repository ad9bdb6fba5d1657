"""The PPO loop. Read `PPO.step` first: one training step from top to bottom, one phase per line.

    prompts -> episodes -> experience -> log-probabilities, values -> advantages -> critic, actor -> weights out
                  └─> scores, in the background ─────────────────────┘

One driver runs the loop under every launcher (`workers/launch/launcher.py`).
Source: Schulman et al. 2017 (PPO); Ziegler et al. 2019 and Ouyang et al. 2022 (the language-model form).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from configs.algorithms import estimator_needs
from configs.checks import episode_cap
from configs.schema import Config
from determinism.ledger import Ledger
from reward.manager import RewardManager
from reward.pending import PendingRewards
from rollout.episodes import Generating, OnFinished, Rollout
from rollout.sampling import sampling_from_config
from rollout.types import Episode, Prompt, Score
from trainer.algorithms.advantages import AdvantageInputs, compute_advantages
from trainer.algorithms.kl import KlController, kl_estimate, penalised_rewards, sequence_kl
from trainer.algorithms.losses import policy_loss_from_config, value_loss_from_config
from trainer.algorithms.shaping import bootstrap_values, shape_scores, trained_mask
from trainer.async_ppo import RolloutsAhead
from trainer.checkpoint import CheckpointStore, write_checkpoint
from trainer.data.sampler import PromptSampler
from trainer.dynamic_sampling import RewardedBatch, fill_with_varied_groups
from trainer.experience import Experience, LeafPlan
from trainer.first_gap import check_first_gap
from trainer.metrics import batch_metrics, mean_metrics, mean_of
from trainer.record import Record
from trainer.remote_models import MiniBatchResult, RemoteModels
from trainer.timing import Timing
from trainer.validation import Validation
from workers.launch.group import WorkerGroup
from workers.launch.service import BUSY

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a loss or a gradient that is not finite."""


@dataclass
class Parts:
    """Everything the loop drives; built by `trainer/build.py`."""

    sampler: PromptSampler
    rollout: Rollout
    reward: RewardManager
    models: RemoteModels
    validation: Validation
    ledger: Ledger
    record: Record
    store: CheckpointStore
    kl: KlController
    pad_id: int
    eos_ids: tuple[int, ...]
    roles: Sequence[str]
    groups: Mapping[str, WorkerGroup]
    """Every worker group by name, for their clocks."""


class PPO:
    """Trains the actor until `total_steps`.

    Args:
        config: the validated experiment.
        parts: the workers, engines and records.
        total_steps: last step (the shorter of `trainer.total_steps` and `trainer.total_epochs`).
    """

    def __init__(self, config: Config, parts: Parts, total_steps: int) -> None:
        self.config = config
        self.parts = parts
        self.total_steps = total_steps
        self.done = 0
        self.skipped_in_a_row: dict[str, int] = {}
        self.best_validation = -math.inf
        self.sampling = sampling_from_config(config.rollout.sampling, parts.eos_ids)
        self.needs = estimator_needs(config.algorithm.advantage.name)
        self.new_timing: Callable[[], Timing] = Timing
        self.timing = self.new_timing()
        self.rollouts = RolloutsAhead(
            self.start_rollouts, parts.sampler, config.rollout.max_head_offpolicyness, total_steps
        )
        self.stop_after = total_steps
        """Last step of this process; a replay stops earlier than its run did."""

    def fit(self) -> None:
        """Train from the current state to the last step."""
        trainer = self.config.trainer
        self.sync_weights(self.done)
        if self.done == 0 and trainer.validate_at_start:
            self.validate(0, {})
            self.parts.ledger.commit(0)
        while self.done < self.stop_after:
            step = self.done + 1
            self.timing = self.new_timing()
            with self.timing("step"):
                metrics = self.step(step)
            if trainer.validate_every and (step % trainer.validate_every == 0 or step == self.total_steps):
                self.validate(step, metrics)
            # Ledger and metrics first: after a kill during the save the step has to be repeated, but its record is not lost.
            self.parts.ledger.commit(step)
            self.parts.record.metrics(step, {**metrics, **self.timing.metrics(metrics), **self.engine_counts()})
            self.done = step
            last = step == self.total_steps and trainer.checkpoint_at_end
            if last or (trainer.checkpoint_every and step % trainer.checkpoint_every == 0):
                self.save()

    def step(self, step: int) -> dict[str, float]:
        """One PPO step; returns its metrics."""
        with self.timing("gen"):
            prompts, episodes, pending = self.rollouts.next(step)
        pending.complete(episodes)
        batch = self.with_rewards(prompts, episodes, pending, step) if self.scores_choose else None
        if batch is not None:
            prompts, episodes = batch.prompts, batch.episodes
        experience = Experience.from_episodes(episodes, batch and batch.scores, self.parts.pad_id, self.rows_multiple)
        self.record_samples(experience)
        experience, entropy = self.add_logprobs(experience, step)
        experience, bootstrap = self.add_values(experience, step)
        # Up to here the rewards were computed in the background; where nothing depended on them, the wait for them is only here.
        batch = batch or self.with_rewards(prompts, episodes, pending, step)
        experience = experience.scored(batch.scores)
        self.record_scores(step, experience, batch.scores)
        greedy = self.greedy_scores(prompts, step)
        with self.timing("adv"):
            experience, metrics = self.add_advantages(experience, bootstrap, greedy)
        with self.timing("update_critic"):
            critic = self.update("critic", experience, step, value_loss_from_config(self.config.algorithm))
        with self.timing("update_actor"):
            actor = self.update(
                "actor", experience, step, policy_loss_from_config(self.config.algorithm, self.loss_kl_coef)
            )
        self.parts.models.end_step()
        with self.timing("sync_weights"):
            self.sync_weights(step)
        with self.timing("ledger"):
            self.record_weights()
        staleness = {"rollout/staleness_mean": mean_of([float(step - 1 - e.weight_version) for e in episodes])}
        return {**metrics, **entropy, **batch.metrics, **critic, **actor, **staleness}

    def start_rollouts(self, prompts: Sequence[Prompt], step: int) -> tuple[Generating, PendingRewards]:
        """Begin to sample the training episodes of `prompts`; each is scored as it finishes."""
        pending = self.parts.reward.begin()
        return self.sample(prompts, step, on_finished=pending.add), pending

    def sample(
        self, prompts: Sequence[Prompt], step: int, first_index: int = 0, on_finished: OnFinished | None = None
    ) -> Generating:
        """Ask for `rollout.sampling.n` samples of each prompt.

        Args:
            first_index: number of requests made in this step before.
            on_finished: see `Rollout.start`.
        """
        sampling = self.config.rollout.sampling
        return self.parts.rollout.start(
            prompts,
            self.sampling,
            n=sampling.n,
            split="train",
            step=step,
            shared_seed=sampling.seed,
            first_index=first_index,
            on_finished=on_finished,
        )

    @property
    def rows_multiple(self) -> int:
        """What the number of rows must be a multiple of, so that every role's mini-batches are full."""
        return math.lcm(
            *(getattr(self.config, role).mini_batch_size for role in ("actor", "critic") if role in self.parts.roles)
        )

    @property
    def scores_choose(self) -> bool:
        """Whether rewards decide which samples are trained on. Then they are needed before the trainer can work."""
        return self.config.algorithm.dynamic_sampling.enable or self.config.reward.on_error == "drop"

    def with_rewards(
        self, prompts: list[Prompt], episodes: list[Episode], pending: PendingRewards, step: int
    ) -> RewardedBatch:
        """The batch with its rewards. With dynamic sampling, other groups replace those that teach nothing."""
        with self.timing("reward"):
            scores, metrics = self.parts.reward.score(episodes, pending)
        return fill_with_varied_groups(
            RewardedBatch(prompts, episodes, scores, metrics),
            self.config.algorithm.dynamic_sampling,
            lambda count, requests: self.further_groups(step, count, requests),
        )

    def further_groups(self, step: int, count: int, requests: int) -> RewardedBatch:
        """`count` further prompts for this step, sampled and scored (`trainer/dynamic_sampling.py`)."""
        with self.timing("gen"):
            prompts = self.parts.sampler.more(count)
            episodes = self.sample(prompts, step, requests).result()
        with self.timing("reward"):
            scores, metrics = self.parts.reward.score(episodes, all_may_drop=True)
        return RewardedBatch(prompts, episodes, scores, metrics)

    def sync_weights(self, step: int) -> None:
        """Give the engines the actor's weights after `step` training steps. An engine that samples for a later step already finishes that first."""
        engines = self.parts.rollout.engines
        engines.load_weights(self.parts.models.weights(), step)
        if not self.rollouts.ahead:
            engines.wait_for_weights()

    def add_logprobs(self, experience: Experience, step: int) -> tuple[Experience, dict[str, float]]:
        """The actor's log-probabilities before any update, and the reference's."""
        width = experience.tokens.input_ids.shape[1]
        with self.timing("old_log_prob"):
            plan = self.plan("actor", experience, step)
            logprobs, entropy = self.parts.models.logprobs("actor", experience.tokens, plan)
            experience = experience.with_tokens(old_logprobs=plan.paste(logprobs, width))
            self.parts.ledger.add("old_logprobs", experience.tokens.old_logprobs)
        mean_entropy = plan.paste(entropy, width).double().sum() / max(int(experience.tokens.mask.sum()), 1)
        if "ref" in self.parts.roles:
            with self.timing("ref"):
                plan = self.plan("ref", experience, step)
                logprobs, _ = self.parts.models.logprobs("ref", experience.tokens, plan)
                experience = experience.with_tokens(ref_logprobs=plan.paste(logprobs, width))
                self.parts.ledger.add("ref_logprobs", experience.tokens.ref_logprobs)
        return experience, {"actor/entropy": float(mean_entropy)}

    def add_values(self, experience: Experience, step: int) -> tuple[Experience, Tensor | None]:
        """The critic's values before any update, and [N] the value after the last token of responses whose return continues there."""
        if "critic" not in self.parts.roles:
            return experience, None
        with self.timing("values"):
            plan = self.plan("critic", experience, step)
            # One more column asks for the value after the last token too; with causal attention the other values stay as they are.
            with_end = self.config.algorithm.truncated == "bootstrap"
            width = experience.tokens.input_ids.shape[1] + with_end
            values = plan.paste(self.parts.models.values(experience.tokens, plan, with_end), width)
            last = values.gather(1, experience.tokens.lengths.clamp(max=width - 1)[:, None])[:, 0]
            values = torch.where(experience.tokens.mask, values[:, : experience.tokens.input_ids.shape[1]], 0.0)
            self.parts.ledger.add("values", values)
        return experience.with_tokens(old_values=values), bootstrap_values(
            last, experience.truncated, self.config.algorithm
        )

    def greedy_scores(self, prompts: Sequence[Prompt], step: int) -> Tensor | None:
        """[number of prompts] score of each prompt's greedy response, for estimators that compare with it (ReMax).

        Penalties for length are applied as for the samples. NaN where the greedy response's reward failed and was dropped.
        """
        if not self.needs.greedy:
            return None
        with self.timing("gen_greedy"):
            sampling = replace(self.sampling, temperature=0.0)
            episodes = self.parts.rollout.start(prompts, sampling, n=1, split="greedy", step=step).result()
            scores = self.parts.reward.evaluate(episodes)
            self.parts.ledger.add("rewards/greedy", [score.total for score in scores])
        return shape_scores(
            torch.tensor([math.nan if score.dropped else score.total for score in scores], dtype=torch.float32),
            torch.tensor([episode.sampled_tokens for episode in episodes]),
            torch.tensor([episode.truncated for episode in episodes]),
            self.config.algorithm,
            episode_cap(self.config),
        )

    def add_advantages(
        self, experience: Experience, bootstrap: Tensor | None, greedy: Tensor | None
    ) -> tuple[Experience, dict[str, float]]:
        """Token rewards (score at the end, KL penalty along the way), then advantages and returns; and the batch's metrics."""
        algorithm, cap = self.config.algorithm, episode_cap(self.config)
        metrics: dict[str, float] = {}
        if greedy is not None:
            metrics["reward/greedy_dropped"] = float(greedy.isnan().sum())
            experience = experience.without(greedy.isnan()[experience.group])
        tokens, ledger = experience.tokens, self.parts.ledger
        # Length and end are the whole episode's, in each of its rows.
        lengths = experience.sum_rows(tokens.mask.sum(dim=1))
        cut = experience.per_row(torch.tensor([episode.truncated for episode in experience.episodes]))
        scores = shape_scores(experience.scores, lengths, cut, algorithm, cap)
        kl, coef = None, 0.0
        if tokens.ref_logprobs is not None and tokens.old_logprobs is not None:
            kl = kl_estimate(
                tokens.old_logprobs, tokens.ref_logprobs, tokens.mask, _reward_estimator(algorithm.kl.estimator)
            )
            coef = self.parts.kl.coef if algorithm.kl.placement == "reward" else 0.0
            per_sequence, count = sequence_kl(kl, tokens.mask)
            metrics |= {"actor/ref_kl": per_sequence, "actor/kl_coef": self.parts.kl.coef}
            ledger.add("kl_coef", [self.parts.kl.coef])
            self.parts.kl.update(per_sequence, count)
        at_end, placed = experience.token_scores(scores)
        rewards = penalised_rewards(at_end, kl, tokens.mask, coef, placed)
        per_row = greedy[experience.group] if greedy is not None else None
        # From here on only trained tokens count, in whitening too. A masked response has counted in its group with its score.
        experience = experience.with_tokens(mask=trained_mask(tokens.mask, experience.truncated, algorithm))
        inputs = AdvantageInputs.of(experience, rewards, scores, greedy_scores=per_row, bootstrap=bootstrap)
        outputs = compute_advantages(inputs, algorithm.advantage)
        experience = experience.with_tokens(advantages=outputs.advantages, returns=outputs.returns)
        ledger.add("token_rewards", rewards)
        ledger.add("advantages", outputs.advantages)
        ledger.add("returns", outputs.returns)
        return experience, {**batch_metrics(experience, cap, rewards), **metrics}

    def update(self, role: str, experience: Experience, step: int, loss: Callable[..., Any]) -> dict[str, float]:
        """`ppo_epochs` passes of shuffled mini-batches over the step's leaves."""
        if role not in self.parts.roles or (role == "actor" and step <= self.config.critic.warmup_steps):
            return {}
        settings = getattr(self.config, role)
        plan = self.plan(role, experience, step)
        results: list[MiniBatchResult] = []
        for epoch in range(settings.ppo_epochs):
            batches = plan.epoch(settings.mini_batch_size, self.config.seed, role, step, epoch)
            results += self.parts.models.update(role, experience.tokens, plan, batches, loss)
        for i, result in enumerate(results):
            self.parts.ledger.add(f"{role}_update/{i}/loss", [result.loss])
            self.parts.ledger.add(f"{role}_update/{i}/grad_norm", [result.grad_norm])
        check_first_gap(self.config, role, step, experience.tokens, results[0].metrics)
        self.count_skipped(role, step, results, experience)
        return update_metrics(role, results)

    def plan(self, role: str, experience: Experience, step: int) -> LeafPlan:
        """How the step's rows are cut into leaves for a role; all roles share one row order."""
        return LeafPlan.draw(
            experience.tokens.lengths,
            getattr(self.config, role).fsdp,
            self.config.seed,
            step,
            bucket_by_length=self.config.trainer.bucket_by_length,
        )

    @property
    def loss_kl_coef(self) -> float:
        """Coefficient of the KL term in the policy loss."""
        return self.parts.kl.coef if self.config.algorithm.kl.placement == "loss" else 0.0

    def count_skipped(self, role: str, step: int, results: Sequence[MiniBatchResult], experience: Experience) -> None:
        """Stop a run whose updates keep being skipped; the batch is saved first, whatever else is recorded.

        Raises:
            NonFiniteError: `trainer.max_nonfinite_updates` updates of this role in a row were not finite.
        """
        limit = self.config.trainer.max_nonfinite_updates
        for result in results:
            in_a_row = self.skipped_in_a_row.get(role, 0) + 1 if result.skipped else 0
            self.skipped_in_a_row[role] = in_a_row
            if result.skipped:
                logger.warning(
                    "step %d: %s update skipped (loss %s, gradient norm %s)", step, role, result.loss, result.grad_norm
                )
            if in_a_row >= limit:
                saved = self.parts.record.nonfinite_batch(step, experience)
                raise NonFiniteError(
                    f"step {step}: {in_a_row} updates of the {role} in a row had a loss or gradient that is not finite "
                    f"(the last: loss {result.loss}, gradient norm {result.grad_norm}). The batch is in {saved}; "
                    f"lower {role}.optim.lr or raise trainer.max_nonfinite_updates."
                )

    def engine_counts(self) -> dict[str, float]:
        """What workers have counted since the previous step: `rollout/preemptions`, and `timing_s/busy/<method>`, the time inside engines and
        models (of the slowest worker of each group).
        """
        busy = self.parts.rollout.engines.counts()
        for group in self.parts.groups.values():
            for worker in group.run(BUSY):
                for method, seconds in worker.items():
                    name = f"timing_s/busy/{method}"
                    busy[name] = max(busy.get(name, 0.0), seconds)
        return busy

    def validate(self, step: int, metrics: dict[str, float]) -> None:
        """Score held-out prompts and add the result to the step's metrics (or log it alone before the first step)."""
        with self.timing("validate"):
            result = self.parts.validation.run(step)
        for phase, value in result.digests.items():
            self.parts.ledger.add_digest(phase, value)
        self.best_validation = max(self.best_validation, result.metrics.get("val/score/mean", -math.inf))
        metrics.update(result.metrics)
        metrics["val/score/best"] = self.best_validation
        self.parts.record.validation(step, result)
        if step == 0:
            self.parts.record.metrics(0, metrics)

    def record_samples(self, experience: Experience) -> None:
        """Ledger entries of what the rollout engines returned."""
        ledger, episodes = self.parts.ledger, experience.row_episodes()
        ledger.rows(experience.names())
        ledger.add("prompts", [[e.prompt.id, list(e.prompt.token_ids)] for e in episodes])
        ledger.add("request_seeds", [e.seed for e in episodes])
        if any(e.turns for e in episodes):
            ledger.add("turns", experience.turns_by_row())
        ledger.add("token_ids", experience.tokens.input_ids)
        ledger.add("finish_reasons", [e.finish_reason for e in episodes])
        ledger.add("rollout_logprobs", experience.tokens.rollout_logprobs)

    def record_scores(self, step: int, experience: Experience, scores: Sequence[Score]) -> None:
        """Ledger entries of the rewards, and the episodes file."""
        ledger = self.parts.ledger
        for source in sorted({name for score in scores for name in score.by_source}):
            ledger.add(f"rewards/{source}", [score.by_source.get(source) for score in scores])
        ledger.add("rewards/total", experience.scores)
        self.parts.record.episodes(step, experience.episodes, scores)

    def record_weights(self) -> None:
        """Ledger entries of the updated weights; a full record keeps the weights themselves too."""
        if self.config.ledger.record == "off":
            return
        full = self.config.ledger.record == "full"
        tensors = self.parts.models.whole_weights(self.parts.roles) if full else {}
        for phase, digest in self.parts.models.digests().items():
            self.parts.ledger.add_digest(phase, digest, tensors.get(phase))

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on."""
        models = self.parts.models
        write_checkpoint(self.parts.store, self.done, self.state_dict(), models.save, size=models.saved_bytes())

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state; weights and optimizers are the workers'."""
        return {
            "step": self.done,
            "sampler": self.rollouts.sampler_state(),
            "kl": self.parts.kl.state_dict(),
            "reward": self.parts.reward.state_dict(),
            "skipped_in_a_row": dict(self.skipped_in_a_row),
            "best_validation": self.best_validation,
            "tracker_run_id": self.parts.record.tracker_run_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the checkpoint's step."""
        self.done = state["step"]
        self.parts.sampler.load_state_dict(state["sampler"])
        self.parts.kl.load_state_dict(state["kl"])
        self.parts.reward.load_state_dict(state["reward"])
        self.skipped_in_a_row = dict(state["skipped_in_a_row"])
        self.best_validation = state["best_validation"]


def update_metrics(role: str, results: Sequence[MiniBatchResult]) -> dict[str, float]:
    """A step's updates of one role: means over those that were made, and the number of those that were skipped.

    Skipped ones have no finite numbers; when all were skipped, the loss's metrics and the gradient norm are absent.
    """
    made = [result for result in results if not result.skipped]
    metrics = mean_metrics([result.metrics for result in made])
    if made:
        metrics[f"{role}/grad_norm"] = sum(result.grad_norm for result in made) / len(made)
    skipped = float(len(results) - len(made))
    return {**metrics, f"{role}/lr": results[-1].lr, f"{role}/skipped_updates": skipped}


def _reward_estimator(name: str) -> str:
    """The full-vocabulary KL exists in the loss only; what is logged beside it is the low-variance k3."""
    return "k3" if name == "full" else name
