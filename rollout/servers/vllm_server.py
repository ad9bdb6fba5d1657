"""The rollout engine as a server of vLLM: started by the run, or by a person (`exactrl serve`) and named in `rollout.urls`.

    GenerationRequest --POST /inference/v1/generate--> tokens, log-probabilities, the name of the weights that made them
    load_weights: file -> /collective_rpc reload_weights -> /reset_prefix_cache -> /update_weight_version, checked by /weight_info

The same vLLM with the same arguments and the same kernels (`vllm_worker.py`) as in a worker's own process: the same bits.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.engine_args import engine_args_problems
from rollout.generations import checked_generation
from rollout.sampling import seeds_are_derived
from rollout.servers.http_engine import HTTPEngine, ServerError
from rollout.types import Generation, GenerationRequest
from rollout.vllm_engine import has_tokenizer, rollout_arguments, vllm_sampling
from rollout.weights import architecture_digest
from workers.launch.lifeline import exit_text
from workers.vllm_process import common_arguments

if TYPE_CHECKING:
    from configs.schema import RolloutConfig

WORKER = "rollout.servers.vllm_worker.ServerWorker"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Makes vLLM's server offer the calls for new weights."""
FLOOR = -9999.0
"""What vLLM's server writes for a log-probability that is not finite."""
POLL_S = 0.2
PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total\{[^}]*\} (\S+)$", re.MULTILINE)
COMPARED = {
    "dtype": "dtype",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "prefix_caching": "enable_prefix_caching",
}
"""Fact of a running server -> the setting of `rollout` that it must agree with."""


def server_command(
    model_path: str | Path,
    *,
    config: RolloutConfig,
    max_model_len: int,
    full_determinism: bool,
    threads: int,
    device: str,
    tokenizer: str | None,
    cpu_linear: str,
    trust_remote_code: bool,
    listen: Mapping[str, Any],
) -> list[str]:
    """The command line of a server. Its environment needs `determinism.environment.process_env` and `ENVIRONMENT`.

    Args:
        listen: vLLM's `host` and `port`, or `uds`.
        For the others see `rollout.vllm_engine.VLLMEngine`.

    Raises:
        ValueError: `config.engine_args` holds an owned or forbidden key.
    """
    for problem in engine_args_problems(config.engine_args, "rollout.engine_args", full_determinism):
        raise ValueError(str(problem))
    arguments = common_arguments(
        model_path, config=config, max_model_len=max_model_len, full_determinism=full_determinism, device=device
    ) | rollout_arguments(config, device)
    own = {"full_determinism": full_determinism, "threads": threads, "cpu_linear": cpu_linear}
    arguments |= {
        "tokenizer": tokenizer,
        "skip_tokenizer_init": not has_tokenizer(tokenizer or model_path),
        "trust_remote_code": trust_remote_code,
        "worker_cls": WORKER,
        "additional_config": {"exactrl": own},
        "enable_scale_out": True,  # tokens in, tokens out
        "disable_uvicorn_access_log": True,
    }
    del arguments["disable_log_stats"]  # the count of preemptions is among them
    if full_determinism:
        arguments["async_scheduling"] = False
    if not seeds_are_derived(config):
        arguments["seed"] = secrets.randbits(31)
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in {**arguments, **config.engine_args, **listen}.items():
        words += _flag(name, value)
    return words


class VLLMServerEngine(HTTPEngine):
    """One server of vLLM as a rollout engine."""

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
        url: str | None = None,
    ) -> None:
        """Start a server and wait for it, or join a running one.

        Args:
            url: of a running server; None starts one.
            For the others see `rollout.vllm_engine.VLLMEngine`.

        Raises:
            ServerError: it did not start, or the running one is not what `config` says.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._own_folder: str | None = None
        self._has_tokenizer = has_tokenizer(tokenizer or model_path)
        self._preemptions = 0
        if url is None:
            self._own_folder = tempfile.mkdtemp(
                prefix="exactrl-"
            )  # only this user may enter: nobody else reaches the socket
            socket = f"{self._own_folder}/server"
            command = server_command(
                model_path,
                config=config,
                max_model_len=max_model_len,
                full_determinism=full_determinism,
                threads=threads,
                device=device,
                tokenizer=tokenizer,
                cpu_linear=cpu_linear,
                trust_remote_code=trust_remote_code,
                listen={"uds": socket},
            )
            self._process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL)
        super().__init__(
            url or f"unix:{socket}",
            model_path,
            max_model_len=max_model_len,
            dtype=config.dtype,
            weights_dir=config.weights_dir or self._own_folder,
        )
        self._wait_until_ready()
        facts = self._asked_facts()
        if url is None:
            self.send(self._name_weights(self.label(0)))
        else:
            check_server(url, facts, config, model_path, max_model_len)
            self.load_checkpoint()
        self.take_counts()  # those of other runs

    def body(self, request: GenerationRequest) -> dict[str, Any]:
        """See `HTTPEngine.body`."""
        sampling = vllm_sampling(request.sampling, self._has_tokenizer)
        return {
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": {**sampling, "seed": request.seed},
            "priority": request.priority,
        }

    async def generate(self, request: GenerationRequest, body: dict[str, Any]) -> Generation:
        """See `HTTPEngine.generate`."""
        answer = await self.connection.call("POST", "/inference/v1/generate", body, timeout_s=None)
        (choice,) = answer["choices"]
        for span in choice["weight_versions"] or [{"version": "none"}]:
            await self.check_label(span["version"])
        entries = choice["logprobs"]["content"]
        return checked_generation(
            request,
            choice["token_ids"],
            [entry["logprob"] if entry["logprob"] > FLOOR else float("nan") for entry in entries],
            choice["finish_reason"],
            version=self._version,
            dtype=self._dtype,
        )

    async def update(self, folder: Path, label: str) -> None:
        """See `HTTPEngine.update`."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.connection.call("POST", "/collective_rpc", reload)
        reset = await self.connection.call("POST", "/reset_prefix_cache")
        if not reset["success"]:
            raise ServerError(
                f"{self.connection.address}: the prefix cache could not be cleared after a weight update; has it requests of others?"
            )
        await self._name_weights(label)

    async def weights_label(self) -> str:
        """See `HTTPEngine.weights_label`."""
        return str((await self.connection.call("GET", "/weight_info"))["weight_version"])

    def take_counts(self) -> dict[str, int]:
        """`rollout/preemptions`, from the server's metrics; see `RolloutEngine.take_counts`."""
        text = self.send(self.connection.call("GET", "/metrics"))
        total = sum(int(float(value)) for value in PREEMPTIONS.findall(text))
        count, self._preemptions = total - self._preemptions, total
        return {"rollout/preemptions": count}

    def facts(self) -> dict[str, Any]:
        """What is in force in the server's process that computes."""
        found = self._asked_facts()
        more = {"weight_version": self._version, "server": "started by the run" if self._process else "running before"}
        return {**found, "engine": {**found["engine"], **more}}

    def epitaph(self) -> str:
        """See `HTTPEngine.epitaph`."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return ""
        return f"the server that the run had started {exit_text(code)}"

    def close(self) -> None:
        """End the connections, and the server when the run has started it."""
        super().close()
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        while True:
            try:
                self.send(self.connection.call("GET", "/health", timeout_s=10.0))
                return
            except ServerError:
                # One that the run has started is given time (`rollout.start_timeout_s` ends the wait) as long as it lives.
                if self._process is None or self._process.poll() is not None:
                    raise
            time.sleep(POLL_S)

    def _asked_facts(self) -> dict[str, Any]:
        try:
            answer = self.send(self.connection.call("POST", "/collective_rpc", {"method": "exactrl_facts"}))
        except ServerError as error:
            raise ServerError(
                f"{error}\nThe server does not know the calls that a run needs; start it with `exactrl serve`"
            ) from None
        facts: dict[str, Any] = answer["results"][0]
        return facts

    async def _name_weights(self, label: str) -> None:
        await self.connection.call("POST", "/update_weight_version", {"new_version": label})


def check_server(
    url: str, facts: Mapping[str, Any], config: RolloutConfig, model_path: str | Path, max_model_len: int
) -> None:
    """Refuse a running server that is not what the run's settings say.

    Raises:
        ServerError: names each difference.
    """
    engine = facts["engine"]
    problems = [
        f"{fact}={engine[fact]} where rollout.{name}={getattr(config, name)}"
        for fact, name in COMPARED.items()
        if engine[fact] != getattr(config, name)
    ]
    if engine["max_model_len"] < max_model_len:
        problems.append(f"a context of {engine['max_model_len']} tokens where the run needs {max_model_len}")
    if engine["model"] != architecture_digest(model_path):
        problems.append(f"another model (its config.json is not that of {model_path})")
    if problems:
        raise ServerError(
            f"the server at {url} has {'; '.join(problems)}. Start it with `exactrl serve` and the run's settings"
        )


def _flag(name: str, value: Any) -> list[str]:
    """One of vLLM's arguments as words of a command line."""
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, Mapping):
        return [f"--{option}", json.dumps(value)]
    if isinstance(value, list | tuple):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}", str(value)]
