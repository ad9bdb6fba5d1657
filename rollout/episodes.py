"""From prompts to episodes: derive seeds, ask the engines, put what they sampled into canonical order.

prompts --requests_for--> requests --RolloutEngines--> futures --as they finish--> episodes --Generating.result--> canonical order
        --sessions-->     SessionSpec --SessionHosts-->     (environments and agents: several turns)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from determinism.seeds import request_seed
from rollout.engines import RolloutEngines
from rollout.turns.rollouts import SessionHosts, episode_of
from rollout.turns.session import SessionSpec
from rollout.types import Episode, Generation, GenerationRequest, Prompt, SampleKey, Sampling

Decode = Callable[[Sequence[int]], str]
OnFinished = Callable[[Episode], None]


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
    """One request per sample, in canonical order, each with a seed of its own.

    Args:
        n: samples per prompt.
        split: `train`, `validation` or `validation_sampled`; part of the seed.
        step: the PPO step; part of the seed.
        shared_seed: an explicit seed replaces the derived one; the request index advances all the same.
        first_index: request index of the first request, where a step generates in several rounds.
        derive_seeds: False gives requests without a shared seed no seed at all.

    Returns:
        len(prompts) * n requests. The seeds do not depend on replicas or chunks.
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


def episode_from(prompt: Prompt, request: GenerationRequest, generation: Generation, decode: Decode) -> Episode:
    """A single-turn episode. The sampled ids are what is trained on; the text is only for people and rewards.

    Raises:
        RuntimeError: the engine answered another request.
    """
    if generation.key != request.key:
        raise RuntimeError(f"{request.key} was asked for, and the engine answered {generation.key}")
    return Episode(
        key=generation.key,
        prompt=prompt,
        seed=request.seed,
        response_ids=generation.token_ids,
        response_mask=(True,) * len(generation.token_ids),
        logprobs=generation.logprobs,
        finish_reason=generation.finish_reason,
        text=decode(generation.token_ids),
        weight_version=generation.weight_version,
    )


Asked = TypeVar("Asked")
Found = TypeVar("Found")


class Generating:
    """Episodes that are being sampled by the engines while this process goes on.

    Args:
        asked: what each episode was asked for with (`GenerationRequest`, `SessionSpec`), in canonical order.
        futures: one for each.
        finish: makes an episode of what was asked and what came; called for each as it finishes, in the thread of `aside`.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        futures: Sequence[Future[Found]],
        finish: Callable[[Asked, Found], Episode],
        aside: ThreadPoolExecutor,
    ) -> None:
        self._episodes: list[Future[Episode]] = [Future() for _ in asked]

        def work(episode: Future[Episode], request: Asked, found: Future[Found]) -> None:
            try:
                episode.set_result(finish(request, found.result()))
            except BaseException as error:
                episode.set_exception(error)

        for episode, request, future in zip(self._episodes, asked, futures, strict=True):
            # A callback runs in the thread that listens to all workers, so it only passes the work on.
            future.add_done_callback(
                lambda done, episode=episode, request=request: aside.submit(work, episode, request, done)  # type: ignore[misc]
            )

    def result(self) -> list[Episode]:
        """The episodes in canonical order; waits until all of them are there.

        Raises:
            WorkerError: an engine failed.
        """
        done, _ = wait(self._episodes, return_when=FIRST_EXCEPTION)
        for episode in self._episodes:
            if episode in done:
                episode.result()  # a failure is raised at once, without waiting for the rest
        return [episode.result() for episode in self._episodes]


class Rollout:
    """Generation as the loop sees it.

    Args:
        engines: all replicas.
        decode: sampled ids to text without special tokens.
        run_seed: `rollout.seed`.
        derive_seeds: see `rollout.sampling.seeds_are_derived`.
        hosts: what plays episodes of several turns; None for plain responses.
    """

    def __init__(
        self,
        engines: RolloutEngines,
        decode: Decode,
        run_seed: int,
        *,
        derive_seeds: bool = True,
        hosts: SessionHosts | None = None,
    ) -> None:
        self.engines = engines
        self.hosts = hosts
        self.decode = decode
        self.run_seed = run_seed
        self.derive_seeds = derive_seeds
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="episodes")

    def start(
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
    ) -> Generating:
        """Begin to sample `n` responses to each prompt.

        Args:
            on_finished: called with each episode as it finishes, in a thread of its own, while the engines go on with the others. What it
                raises is raised by `Generating.result`.
        """

        def finished(episode: Episode) -> Episode:
            if on_finished is not None:
                on_finished(episode)
            return episode

        if self.hosts is not None:
            specs = self._sessions_for(prompts, sampling, n, split, step, shared_seed, first_index)
            return Generating(
                specs, self.hosts.start(specs), lambda spec, result: finished(episode_of(spec, result)), self._aside
            )
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

        def finish(request: GenerationRequest, generation: Generation) -> Episode:
            return finished(episode_from(prompts[request.key.task], request, generation, self.decode))

        return Generating(requests, self.engines.submit(requests), finish, self._aside)

    def _sessions_for(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        n: int,
        split: str,
        step: int,
        shared_seed: int | None,
        first_index: int,
    ) -> list[SessionSpec]:
        """One session for each sample, in canonical order; seeds are derived in it, one for each request."""
        return [
            SessionSpec(
                key=SampleKey(task, sample),
                request_index=first_index + task * n + sample,
                prompt=prompt,
                split=split,
                step=step,
                sampling=sampling,
                run_seed=self.run_seed,
                shared_seed=shared_seed,
                derive_seeds=self.derive_seeds,
            )
            for task, prompt in enumerate(prompts)
            for sample in range(n)
        ]
