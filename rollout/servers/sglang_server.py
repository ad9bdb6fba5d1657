"""The rollout engine as a running server of SGLang, named in `rollout.urls`. Unverified: no SGLang was at hand, only its sources and documentation.

    GenerationRequest --POST /generate--> tokens, log-probabilities, the name of the weights that made them
    load_weights: file -> /update_weights_from_disk (clears the prefix cache) -> /flush_cache, checked by /model_info

Sources (sgl-project/sglang): `srt/entrypoints/http_server.py`, `srt/sampling/sampling_params.py`, `srt/managers/schedule_batch.py`, and
docs.sglang.io, "Deterministic Inference".
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determinism.environment import facts as process_facts
from determinism.environment import pin_process
from rollout.generations import checked_generation
from rollout.sampling import seeds_are_derived
from rollout.servers.http_engine import HTTPEngine, ServerError
from rollout.types import Generation, GenerationRequest

if TYPE_CHECKING:
    from configs.schema import RolloutConfig

DETERMINISTIC_BACKENDS = ("flashinfer", "fa3", "triton")
"""The attention backends for which SGLang's documentation has deterministic inference."""
RECORDED = (
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "tp_size",
    "dp_size",
    "attention_backend",
    "sampling_backend",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "disable_cuda_graph",
    "chunked_prefill_size",
    "max_running_requests",
)
"""Arguments of the server that go into the manifest."""


class SGLangServerEngine(HTTPEngine):
    """One running server of SGLang as a rollout engine."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        config: RolloutConfig,
        max_model_len: int,
        full_determinism: bool,
        threads: int,
        url: str,
        **_: Any,
    ) -> None:
        """Join a running server.

        Args:
            url: the server's address.
            For the others see `rollout.vllm_engine.VLLMEngine`; those that are not named here decide nothing at a running server.

        Raises:
            ServerError: it is not reached, or is not what `config` says.
        """
        pin_process(full_determinism, threads)
        super().__init__(
            url, model_path, max_model_len=max_model_len, dtype=config.dtype, weights_dir=config.weights_dir
        )
        self.send(self.connection.call("GET", "/health"))
        server, model = self._asked("/server_info"), self._asked("/model_info")
        check_server(url, {**server, **model}, config, model_path, max_model_len)
        self._warnings = backend_warnings(url, server) if seeds_are_derived(config) else []
        self.load_checkpoint()

    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """See `HTTPEngine.body`."""
        sampling = request.sampling
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise ValueError(
                f"{request.key}: stop token ids {list(sampling.stop_token_ids)} with ignore_eos: SGLang would ignore them too"
            )
        return {
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "min_new_tokens": 0,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                # A deterministic server gives every request without a seed the same one.
                "sampling_seed": secrets.randbits(63) if request.seed is None else request.seed,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
        }

    async def generate(self, request: GenerationRequest, body: dict[str, Any]) -> Generation:
        """See `HTTPEngine.generate`."""
        answer = await self.connection.call("POST", "/generate", body, timeout_s=None)
        meta = answer["meta_info"]
        await self.check_label(str(meta["weight_version"]))
        entries = meta["output_token_logprobs"]
        finish = meta["finish_reason"]
        matched = finish.get("matched")
        if finish["type"] == "stop" and isinstance(matched, int) and matched not in request.sampling.stop_token_ids:
            raise ServerError(
                f"{request.key}: {self.connection.address} ended the response at token {matched}, which is no stop token of the run "
                f"({list(request.sampling.stop_token_ids)}); add it to rollout.sampling.stop_token_ids, or mend eos_token_id in the "
                "server's model"
            )
        return checked_generation(
            request,
            [entry[1] for entry in entries],
            [float("nan") if entry[0] is None else entry[0] for entry in entries],
            finish["type"] if finish["type"] != "abort" else f"abort: {finish.get('message')}",
            version=self._version,
            dtype=self._dtype,
        )

    async def update(self, folder: Path, label: str) -> None:
        """See `HTTPEngine.update`."""
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True, "abort_all_requests": False}
        answer = await self.connection.call("POST", "/update_weights_from_disk", body)
        if not answer["success"]:
            raise ServerError(f"{self.connection.address} did not take the weights in {folder}: {answer['message']}")
        await self.connection.call("POST", "/flush_cache")

    async def weights_label(self) -> str:
        """See `HTTPEngine.weights_label`."""
        return str((await self.connection.call("GET", "/model_info"))["weight_version"])

    def take_counts(self) -> dict[str, int]:
        """Nothing: SGLang's server gives no count of preemptions without its metrics."""
        return {}

    def facts(self) -> dict[str, Any]:
        """This process, and under `engine` the server's arguments."""
        server = self._asked("/server_info")
        engine = {"engine": "sglang_server", "weight_version": self._version, "warnings": self._warnings}
        return {**process_facts(), "engine": {**engine, **{name: server.get(name) for name in RECORDED}}}

    def _asked(self, path: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self.send(self.connection.call("GET", path))
        except ServerError as error:
            raise ServerError(f"{error}\nIs it a server of SGLang, and a recent one?") from None
        return answer


def check_server(
    url: str, server: Mapping[str, Any], config: RolloutConfig, model_path: str | Path, max_model_len: int
) -> None:
    """Refuse a running server that is not what the run's settings say.

    Args:
        server: its answers to `/server_info` and `/model_info`.

    Raises:
        ServerError: names each difference, and the flag of SGLang that mends it.
    """
    model = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    context = server.get("context_length") or model.get("max_position_embeddings") or 0
    problems = []
    if server.get("dtype") != config.dtype:
        problems.append(
            f"dtype={server.get('dtype')} where rollout.dtype={config.dtype} (start it with --dtype {config.dtype})"
        )
    if bool(server.get("disable_radix_cache")) == config.enable_prefix_caching:
        problems.append(
            f"disable_radix_cache={server.get('disable_radix_cache')} where "
            f"rollout.enable_prefix_caching={config.enable_prefix_caching}"
        )
    if context < max_model_len:
        problems.append(f"a context of {context} tokens where the run needs {max_model_len} (--context-length)")
    found = server.get("architectures")
    if found is not None and found != model.get("architectures"):
        problems.append(f"another model ({found} where {model_path} is {model.get('architectures')})")
    if seeds_are_derived(config) and not server.get("enable_deterministic_inference"):
        problems.append(
            "no deterministic inference, without which it ignores the requests' seeds (--enable-deterministic-inference)"
        )
    if problems:
        raise ServerError(f"the server at {url} has {'; '.join(problems)}")


def backend_warnings(url: str, server: Mapping[str, Any]) -> list[str]:
    """What a person should know of the server's attention backend; none set is fine."""
    backend = server.get("attention_backend")
    if backend is None or backend in DETERMINISTIC_BACKENDS:
        return []
    return [
        f"the server at {url} runs attention_backend={backend}; SGLang documents deterministic inference for "
        f"{', '.join(DETERMINISTIC_BACKENDS)} only. The engine check decides"
    ]
