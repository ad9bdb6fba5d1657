"""The rollout engine: vLLM inside this process, tokens in and tokens out.

    GenerationRequest --(SamplingParams, all explicit)--> vLLM core --> Generation (ids, log-probabilities, finish reason)
    load_weights: check names and shapes -> reload in place -> pack the output head again -> clear the prefix cache

The log-probabilities are those of the distribution that was sampled: penalties, temperature and truncation applied.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.checks import MIN_TEMPERATURE
from rollout.generations import checked_generation
from rollout.sampling import check_request, seeds_are_derived
from rollout.types import Generation, GenerationRequest, Sampling
from rollout.weights import check_weights, checkpoint_shapes
from workers.vllm_process import RunningRequests, common_arguments, engine_facts, start_engine, stop_engine

if TYPE_CHECKING:
    from torch import Tensor

    from configs.schema import RolloutConfig


class VLLMEngine:
    """One rollout replica (see `rollout.engines.RolloutEngine`). Build it in a process of its own, with
    `determinism.environment.process_env` in place before that process started."""

    work = "generate"

    def __init__(
        self,
        model_path: str | Path,
        *,
        config: RolloutConfig,
        max_model_len: int,
        full_determinism: bool,
        threads: int,
        device: str,
        tokenizer: str | None = None,
        cpu_linear: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model and allocate the KV cache.

        Args:
            model_path: checkpoint directory; gives architecture, first weights and, unless `tokenizer` says otherwise, the
                tokenizer (used for `stop` texts only).
            max_model_len: prompt and response tokens together.
            threads: CPU threads of this process; part of the numerics environment.
            device: `cpu` or `cuda`.
            cpu_linear: `determinism.cpu_linear`.

        Raises:
            ValueError: `config.engine_args` holds an owned, unknown or forbidden key.
            determinism.cpu_kernels.BatchInvarianceError: level D3 cannot be kept here.
        """
        self._version = 0
        self._requests: dict[int, GenerationRequest] = {}
        self._makers: dict[Sampling, partial[Any]] = {}
        self._device = device
        self._dtype = config.dtype
        self._max_model_len = max_model_len
        self._shapes = checkpoint_shapes(model_path)
        self._has_tokenizer = has_tokenizer(tokenizer or model_path)
        arguments = common_arguments(
            model_path, config=config, max_model_len=max_model_len, full_determinism=full_determinism, device=device
        ) | rollout_arguments(config, device)
        arguments |= {
            "tokenizer": tokenizer,
            "skip_tokenizer_init": not self._has_tokenizer,
            "trust_remote_code": trust_remote_code,
        }
        if not seeds_are_derived(config):
            # Requests without seeds draw from vLLM's global stream; replicas and steps of one seed would be copies of each other.
            arguments["seed"] = secrets.randbits(31)
        self._engine = start_engine(
            arguments,
            config.engine_args,
            origin="rollout.engine_args",
            full_determinism=full_determinism,
            threads=threads,
            device=device,
            cpu_linear=cpu_linear,
        )

        self._running = RunningRequests(self._engine)

    def add(self, number: int, request: GenerationRequest) -> None:
        """Take a request; see `RolloutEngine.add`.

        A greedy request (temperature 0) reports log-probabilities at temperature 1.
        """
        check_request(request, self._max_model_len)
        params = self._params(request.sampling, request.seed)
        self._running.add(number, list(request.prompt_token_ids), params, request.priority)
        self._requests[number] = request

    def step(self) -> list[tuple[int, Generation]]:
        """Work for a moment; see `RolloutEngine.step`."""
        finished = self._running.step()
        return [(number, self._generation(self._requests.pop(number), output)) for number, output in finished]

    def take_counts(self) -> dict[str, int]:
        """`rollout/preemptions`; see `RolloutEngine.take_counts`."""
        count, self._running.preemptions = self._running.preemptions, 0
        return {"rollout/preemptions": count}

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place; see `RolloutEngine.load_weights`. No request may be running."""
        check_weights(tensors, self._shapes)
        self._reload(tensors)
        if self._device == "cpu":
            self._mend_output_head()
        self._clear_prefix_cache()
        self._version = version

    def facts(self) -> dict[str, Any]:
        """Versions, threads, kernels and limits in force in this process."""
        return engine_facts(self._engine.vllm_config, self._device, role="rollout", weight_version=self._version)

    def close(self) -> None:
        """Shut the core down; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            stop_engine(engine)

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        named = [(name, tensor.detach()) for name, tensor in tensors.items()]
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})

    def _mend_output_head(self) -> None:
        from determinism.cpu_kernels import remend_lm_head

        self._engine.apply_model(remend_lm_head)

    def _clear_prefix_cache(self) -> None:
        # Otherwise equal prompts would find blocks that were computed with the old weights.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache could not be cleared after a weight update; is a request still running?"
            )

    def _params(self, sampling: Sampling, seed: int | None) -> Any:
        from vllm import SamplingParams

        if sampling not in self._makers:
            own = {"flat_logprobs": True, "output_kind": _final_only(), "skip_clone": True}
            self._makers[sampling] = partial(SamplingParams, **vllm_sampling(sampling, self._has_tokenizer), **own)
        return self._makers[sampling](seed=seed)

    def _generation(self, request: GenerationRequest, output: Any) -> Generation:
        (completion,) = output.outputs
        # `logprobs=0` gives exactly the sampled token's entry at each position.
        return checked_generation(
            request,
            completion.token_ids,
            completion.logprobs.logprobs,
            completion.finish_reason,
            version=self._version,
            dtype=self._dtype,
        )


def vllm_sampling(sampling: Sampling, has_tokenizer: bool) -> dict[str, Any]:
    """vLLM's keyword arguments, every one with a value, so that no default of vLLM or of the model has an effect.

    Raises:
        ValueError: a temperature that vLLM would raise, or stop texts without a tokenizer.
    """
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature {sampling.temperature}: vLLM would sample at {MIN_TEMPERATURE}; use 0 (greedy) or at least that"
        )
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"stop texts {list(sampling.stop)} need a tokenizer, and the engine was started without one")
    return {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }


def rollout_arguments(config: RolloutConfig, device: str) -> dict[str, Any]:
    """vLLM's arguments of a rollout engine, beside those of every engine (`workers.vllm_process.common_arguments`)."""
    arguments = {
        "runner": "generate",
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
    }
    if config.tensor_parallel_size > 1:
        if device == "cpu":
            raise ValueError(
                f"rollout.tensor_parallel_size={config.tensor_parallel_size} needs GPUs; on CPU use rollout.replicas"
            )
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def has_tokenizer(directory: str | Path) -> bool:
    """Whether a directory holds a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return any((Path(directory) / name).is_file() for name in names)
