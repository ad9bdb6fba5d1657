"""From prompts to episodes: derive seeds, place requests on replicas, put the results into canonical order.

prompts --requests_for--> requests --routing.assign--> replicas --routing.gather--> generations --> episodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from configs.schema import RolloutConfig
from determinism.seeds import request_seed
from rollout.routing import assign, gather
from rollout.types import Episode, Generation, GenerationRequest, Prompt, SampleKey, Sampling
from workers.launch.group import WorkerGroup

Decode = Callable[[Sequence[int]], str]
OnFinished = Callable[[Sequence[Episode]], None]
SMALLEST_PORTION = 16
"""Requests that an engine finishes between two answers; fewer are not worth the way there and back."""


def seeds_are_derived(config: RolloutConfig) -> bool:
    """Whether each request gets a seed of its own (`rollout.deterministic_sampling`, which full determinism includes)."""
    return config.full_determinism or config.deterministic_sampling


def requests_for(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    n: int,
    run_seed: int,
    split: str,
    step: int,
    shared_seed: int | None = None,
    first_index: int = 0,
    derive_seeds: bool = True,
) -> list[GenerationRequest]:
    """One request a sample, in canonical order, each with a seed of its own.

    Args:
        n: samples per prompt.
        split: `train`, `validation` or `validation_sampled`; part of the seed.
        step: the PPO step; part of the seed.
        shared_seed: an explicit seed wins over the derived one and still consumes its request index.
        first_index: request index of the first request, where a step generates in several rounds.
        derive_seeds: False gives requests without a shared seed no seed at all.

    Returns:
        len(prompts) * n requests. Nothing about replicas or chunks enters the seeds.
    """
    requests: list[GenerationRequest] = []
    for task, prompt in enumerate(prompts):
        for sample in range(n):
            index = first_index + len(requests)
            derived = request_seed(
                run_seed=run_seed,
                split=split,
                step=step,
                prompt_id=prompt.id,
                sample=sample,
                turn=0,
                request_index=index,
            )
            requests.append(
                GenerationRequest(
                    key=SampleKey(task, sample),
                    prompt_token_ids=prompt.token_ids,
                    seed=shared_seed if shared_seed is not None or not derive_seeds else derived,
                    sampling=sampling,
                    priority=index,
                )
            )
    return requests


def episodes_from(
    prompts: Sequence[Prompt],
    requests: Sequence[GenerationRequest],
    generations: Sequence[Generation],
    decode: Decode,
) -> list[Episode]:
    """Single-turn episodes; `requests` and `generations` stand in the same (canonical) order.

    The sampled ids are what is trained on; the text is only for people and rewards.
    """
    return [
        Episode(
            key=generation.key,
            prompt=prompts[generation.key.task],
            seed=request.seed,
            response_ids=generation.token_ids,
            response_mask=(True,) * len(generation.token_ids),
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            text=decode(generation.token_ids),
            weight_version=generation.weight_version,
        )
        for request, generation in zip(requests, generations, strict=True)
    ]


class Rollout:
    """The rollout engines as the loop sees them.

    Args:
        group: one engine a worker (`rollout.sampling.RolloutEngine`).
        decode: sampled ids to text without special tokens.
        run_seed: `rollout.seed`.
        derive_seeds: see `seeds_are_derived`.
        keep_groups: `rollout.serialize_group_samples`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        decode: Decode,
        run_seed: int,
        *,
        derive_seeds: bool = True,
        keep_groups: bool = False,
    ) -> None:
        self.group = group
        self.decode = decode
        self.run_seed = run_seed
        self.derive_seeds = derive_seeds
        self.keep_groups = keep_groups

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        n: int,
        split: str,
        step: int,
        shared_seed: int | None = None,
        first_index: int = 0,
        on_finished: OnFinished | None = None,
    ) -> list[Episode]:
        """Sample `n` responses to each prompt; blocks until the exact set of requests is back.

        Args:
            on_finished: is given the episodes that have finished, some at a time, while the engines go on with the others.
                Together they are the result, in an order that means nothing.

        Returns:
            len(prompts) * n episodes in canonical order, whatever replica served them and whenever they finished.
        """
        requests = requests_for(
            prompts,
            sampling,
            n=n,
            run_seed=self.run_seed,
            split=split,
            step=step,
            shared_seed=shared_seed,
            first_index=first_index,
            derive_seeds=self.derive_seeds,
        )
        shares = assign(requests, self.group.size, keep_groups=self.keep_groups)
        if on_finished is None:
            per_replica = self.group.run("generate", shares)
            return episodes_from(prompts, requests, gather(requests, per_replica), self.decode)
        by_key = {request.key: request for request in requests}
        episodes: dict[SampleKey, Episode] = {}

        def tell(generations: Sequence[Generation]) -> None:
            asked = [by_key[generation.key] for generation in generations]
            finished = episodes_from(prompts, asked, generations, self.decode)
            episodes.update((episode.key, episode) for episode in finished)
            on_finished(finished)

        generations = gather(requests, self._in_portions(shares, tell))
        return [episodes[generation.key] for generation in generations]

    def _in_portions(
        self, shares: Sequence[Sequence[GenerationRequest]], tell: Callable[[Sequence[Generation]], None]
    ) -> list[list[Generation]]:
        """Each replica's generations, asked for as they finish; `tell` is given every portion."""
        self.group.run("begin", list(shares))
        found: list[list[Generation]] = [[] for _ in shares]
        while counts := _portions([len(share) - len(have) for share, have in zip(shares, found, strict=True)]):
            finished = self.group.run("finished", counts)
            for have, new in zip(found, finished, strict=True):
                have += new
            if [len(new) for new in finished] != counts:
                break  # an engine has none left although some are missing; `gather` says which
            tell([generation for new in finished for generation in new])
        return found

    def load_weights(self, handle: Any, version: int) -> None:
        """Give every engine the actor's weights after `version` training steps and clear what was cached under the old ones."""
        self.group.run("load_weights", tensors=handle, version=version)


def _portions(left: Sequence[int]) -> list[int]:
    """How many of its requests each replica finishes next: half of what is left. Empty when nothing is left.

    A function of counts alone, so all ranks ask alike, and the engines' pauses are the same in every run.
    """
    return [min(count, max(-(-count // 2), SMALLEST_PORTION)) for count in left] if any(left) else []
