"""The part of `rollout.engine: vllm_server` that runs inside vLLM's server: a worker with the project's kernels and environment.

vLLM is told its name (`--worker-cls`) and makes one in each process that computes. This module is imported nowhere else.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from determinism import cpu_kernels
from determinism.environment import pin_process
from rollout.weights import architecture_digest
from workers.vllm_process import engine_facts

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker


class ServerWorker(StockWorker):  # type: ignore[misc]  # vLLM chooses the base by platform
    """vLLM's worker, with what `workers.vllm_process.start_engine` does for an engine in this process."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        own = vllm_config.additional_config["exactrl"]
        self._exact_device = "cpu" if current_platform.is_cpu() else "cuda"
        pin_process(own["full_determinism"], own["threads"])
        if self._exact_device == "cpu":
            cpu_kernels.install(linear=own["cpu_linear"], full_determinism=own["full_determinism"])
            if own["full_determinism"]:
                cpu_kernels.check_model(vllm_config.model_config)
        # Before an update points vLLM to another folder.
        self._exact_model = architecture_digest(vllm_config.model_config.model)
        super().__init__(vllm_config, *args, **kwargs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Replace the weights, and pack the output head again (`determinism.cpu_kernels.remend_lm_head`)."""
        super().reload_weights(*args, **kwargs)
        if self._exact_device == "cpu":
            cpu_kernels.remend_lm_head(self.get_model())

    def exactrl_facts(self) -> dict[str, Any]:
        """What is in force in this process; asked by `rollout.servers.vllm_server`."""
        return engine_facts(self.vllm_config, self._exact_device, role="rollout", model=self._exact_model)
