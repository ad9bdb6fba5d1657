"""Rollout throughput against vLLM alone: the same requests, in turns, with nothing else at work.

    ours     the run's engines and placement, as in a step: Rollout.generate -> RolloutEngines -> VLLMEngine, back to episodes
    direct   stock vLLM in one process (stock_vllm.py)

All start from the same model with cold prefix caches. One works while the others idle, round after round, so that a slow moment
of the machine does not fall on one of them alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from determinism.environment import process_env

if TYPE_CHECKING:
    from configs.schema import Config
    from rollout.types import GenerationRequest, Prompt
    from trainer.inputs import Inputs

ROUNDS = 7
"""Rounds of each after a first one that warms caches."""


class Round(NamedTuple):
    """All requests, served once."""

    tokens: int
    seconds: float


def compare(run: Path, step: int, rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """Serve the requests of the run's step `step`, `rounds` times each: by vLLM alone, by the configured replicas, and by one.

    Returns:
        `direct`, `rollout` and, when more replicas are configured, `one replica`: `replicas`, `tokens_per_s` (the median),
        `share_of_direct` (the ratio of medians), and `rounds` as (tokens, seconds).
    """
    from configs.compose import from_yaml
    from trainer.inputs import load_inputs

    config = from_yaml(run / "config.yaml")
    inputs = load_inputs(config)
    work = Work(config, inputs, _prompts_of_step(run, step, inputs), step)
    replicas = config.rollout.replicas
    found: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        sides: dict[str, Any] = {"direct": stack.enter_context(StockVLLM(work, run))}
        sides["rollout"] = stack.enter_context(RunsEngines(work, replicas, run))
        if replicas > 1:
            sides["one replica"] = stack.enter_context(RunsEngines(work, 1, run))
        for _ in range(rounds + 1):
            for name, side in sides.items():
                found.setdefault(name, []).append(side.serve())
    speed = {name: median(one.tokens / one.seconds for one in served[1:]) for name, served in found.items()}
    return {
        name: {
            "replicas": replicas if name == "rollout" else 1,
            "tokens_per_s": speed[name],
            "share_of_direct": speed[name] / speed["direct"],
            "rounds": served[1:],
        }
        for name, served in found.items()
    }


class Work:
    """What every side is given: the requests of a step of the run."""

    def __init__(self, config: Config, inputs: Inputs, prompts: Sequence[Prompt], step: int) -> None:
        from rollout.sampling import sampling_from_config

        self.config, self.inputs, self.prompts, self.step = config, inputs, prompts, step
        self.sampling = sampling_from_config(config.rollout.sampling, inputs.eos_ids)
        self.env = process_env(config.full_determinism, config.determinism.threads, "cpu")
        self.asked: dict[str, Any] = {"n": config.rollout.sampling.n, "split": "train", "step": step}
        self.asked["shared_seed"] = config.rollout.sampling.seed

    def requests(self) -> list[GenerationRequest]:
        """As `Rollout.generate` makes them."""
        from rollout.episodes import requests_for
        from rollout.sampling import seeds_are_derived

        rollout = self.config.rollout
        derived = seeds_are_derived(rollout)
        return requests_for(self.prompts, self.sampling, run_seed=rollout.seed, derive_seeds=derived, **self.asked)


class RunsEngines:
    """The run's rollout engines, child processes of this one."""

    def __init__(self, work: Work, replicas: int, run: Path) -> None:
        from rollout.engines import RolloutEngines
        from rollout.episodes import Rollout
        from rollout.sampling import seeds_are_derived
        from trainer.build import rollout_engine
        from workers.launch.launcher import make_launcher
        from workers.models.pretrained import PretrainedFiles

        config = work.config
        self.work = work
        files = PretrainedFiles(config.model.path)
        self.weights = {name: files.tensor(name) for name in files.names()}
        alone = replace(config, launcher=replace(config.launcher, name="torchrun", num_ranks=1, device="cpu"))
        self.launcher = make_launcher(alone, run)
        group = self.launcher.engine_group(
            f"rollout-of-{replicas}", rollout_engine(config, work.inputs.context, "cpu"), replicas
        )
        group.ready()
        self.rollout = Rollout(
            RolloutEngines(group, keep_groups=config.rollout.serialize_group_samples),
            work.inputs.train.codec.decode,
            config.rollout.seed,
            derive_seeds=seeds_are_derived(config.rollout),
        )

    def serve(self) -> Round:
        """One round, from prompts to episodes."""
        work = self.work
        self.rollout.engines.load_weights(
            self.weights, work.step - 1
        )  # clears the prefix caches, as before each step of a run
        self.rollout.engines.wait_for_weights()
        start = time.perf_counter()
        episodes = self.rollout.start(work.prompts, work.sampling, **work.asked).result()
        seconds = time.perf_counter() - start
        return Round(sum(len(episode.response_ids) for episode in episodes), seconds)

    def __enter__(self) -> RunsEngines:
        return self

    def __exit__(self, *error: object) -> None:
        self.launcher.close()


class StockVLLM:
    """`stock_vllm.py` in a process of its own, with the requests of a step."""

    def __init__(self, work: Work, folder: Path) -> None:
        file = folder / "stock_vllm.json"
        file.write_text(json.dumps(_as_vllm_takes_it(work)))
        self.log = folder / "logs" / "stock_vllm.log"
        # Thread counts, and the engine's core in this one process; none of what full determinism sets.
        env = {**os.environ, **process_env(False, work.config.determinism.threads, "cpu")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                # -P: this folder's determinism.py must not hide the package of that name.
                [sys.executable, "-P", str(Path(__file__).with_name("stock_vllm.py")), str(file)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def serve(self) -> Round:
        """One round; the first also waits until the engine has started."""
        assert self.process.stdin is not None, "piped above"
        assert self.process.stdout is not None, "piped above"
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ROUND "):
                _, tokens, seconds = line.split()
                return Round(int(tokens), float(seconds))
        raise SystemExit(f"vLLM alone failed:\n{self.log.read_text()[-3000:]}")

    def __enter__(self) -> StockVLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def _prompts_of_step(run: Path, step: int, inputs: Inputs) -> list[Prompt]:
    by_id = {prompt.id: prompt for prompt in inputs.train.prompts}
    rows = [json.loads(line) for line in (run / "episodes" / f"step_{step:06d}.jsonl").read_text().splitlines()]
    return [by_id[prompt_id] for prompt_id in {row["task"]: row["prompt_id"] for row in rows}.values()]


def _as_vllm_takes_it(work: Work) -> dict[str, Any]:
    """The same model, limits and requests in vLLM's words; what is not named is vLLM's default."""
    rollout, sampling, requests = work.config.rollout, work.sampling, work.requests()
    return {
        "engine": {
            "model": work.config.model.path,
            "dtype": rollout.dtype,
            "max_model_len": work.inputs.context,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "kv_cache_memory_bytes": rollout.kv_cache_mib << 20,
            "enable_prefix_caching": rollout.enable_prefix_caching,
            "enforce_eager": rollout.enforce_eager,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
        },
        "sampling": {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "detokenize": False,
        },
        "prompts": [request.prompt_token_ids for request in requests],
        "seeds": [request.seed for request in requests],
    }
