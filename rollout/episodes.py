"""From prompts to episodes: derive seeds, place requests on replicas, put the results into canonical order.

prompts --requests_for--> requests --routing.assign--> replicas --routing.gather--> generations --> episodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from determinism.seeds import request_seed
from rollout.routing import assign, gather
from rollout.types import Episode, Generation, GenerationRequest, Prompt, SampleKey, Sampling
from workers.group import WorkerGroup

Decode = Callable[[Sequence[int]], str]


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
) -> list[GenerationRequest]:
    """One request a sample, in canonical order, each with a seed of its own.

    Args:
        n: samples per prompt.
        split: `train`, `validation` or `validation_sampled`; part of the seed.
        step: the PPO step; part of the seed.
        shared_seed: an explicit seed wins over the derived one and still consumes its request index.
        first_index: request index of the first request, where a step generates in several rounds.

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
                    seed=derived if shared_seed is None else shared_seed,
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
        group: one engine a worker (`rollout.engine.RolloutEngine`).
        decode: sampled ids to text without special tokens.
        run_seed: `rollout.seed`.
    """

    def __init__(self, group: WorkerGroup, decode: Decode, run_seed: int) -> None:
        self.group = group
        self.decode = decode
        self.run_seed = run_seed

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
    ) -> list[Episode]:
        """Sample `n` responses to each prompt; blocks until the exact set of requests is back.

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
        )
        per_replica = self.group.run("generate", assign(requests, self.group.size))
        return episodes_from(prompts, requests, gather(requests, per_replica), self.decode)

    def load_weights(self, handle: Any, version: int) -> None:
        """Give every engine the actor's weights after `version` training steps and clear what was cached under the old ones."""
        self.group.run("load_weights", tensors=handle, version=version)
