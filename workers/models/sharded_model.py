"""What actor, reference and critic have in common: a sharded network, scoring leaf by leaf, and an optimizer when trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import LoraConfig, OptimizerConfig
from determinism.digest import module_digests
from workers.models.batch import MiniBatch, TokenBatch, UpdateResult
from workers.models.lora import base_name, merged
from workers.models.optim import Loss, Updater
from workers.models.sharding import filler_leaf, full_weights, most_across_ranks, release


class ShardedModel(ABC):
    """A sharded network with one way to compute a leaf (`forward`), for scoring and for training.

    Every method is collective: all ranks call it, with their own leaves.

    Args:
        network: sharded and materialised.
        hf_config: its transformers config.
        device: where leaves are computed.
        optim: optimizer settings; None for a frozen model.
        total_steps: training steps over which the learning-rate schedule runs.
        lora: the adapters that `network` has; None when it has none.
        stored: parameter name -> name in the checkpoint's files, for `export`.
    """

    def __init__(
        self,
        network: nn.Module,
        hf_config: Any,
        device: torch.device,
        optim: OptimizerConfig | None,
        total_steps: int,
        lora: LoraConfig | None = None,
        stored: Mapping[str, str] | None = None,
    ) -> None:
        self.network = network
        self.hf_config = hf_config
        self.lora = lora
        self.stored = {base_name(name): file_name for name, file_name in (stored or {}).items()}
        self.device = device
        self.updater: Updater | None = None
        if optim is None:
            network.requires_grad_(False)
        else:
            self.updater = Updater(network, optim, total_steps)

    @abstractmethod
    def forward(self, leaf: TokenBatch, loss: Any) -> Any:
        """Outputs of one leaf on `device`, as `loss` wants them (None: scoring)."""

    def update(self, mini_batches: Sequence[MiniBatch], loss: Loss) -> list[UpdateResult]:
        """One optimizer step a mini-batch, in order.

        Args:
            mini_batches: this rank's leaves; every rank passes the same number of mini-batches.
            loss: `loss(outputs, leaf, totals) -> (share, metrics)`; the share is the leaf's part of a global sum.
        """
        return self._trained.update(mini_batches, lambda leaf: self.forward(leaf, loss), loss)

    def end_step(self) -> None:
        """Advance the learning-rate schedule; once a training step."""
        self._trained.end_step()

    @torch.no_grad()
    def score(self, leaves: Sequence[TokenBatch]) -> list[Any]:
        """Outputs of each leaf, without gradients, on `device`. Ranks may hold different numbers of leaves."""
        results = []
        (most,) = most_across_ranks([len(leaves)], self.device)
        for slot in range(most):
            leaf = leaves[slot] if slot < len(leaves) else filler_leaf()
            outputs = self.forward(leaf.to(self.device), None)
            if slot < len(leaves):
                results.append(outputs)
        self.release()
        return results

    def release(self) -> None:
        """Free gathered parameters."""
        release(self.network)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights on the CPU by their names in the checkpoint's files, adapters merged. Every rank must exhaust it."""
        weights = full_weights(self.network)
        whole = weights if self.lora is None else merged(weights, self.lora)
        return ((self.stored.get(name, name), tensor) for name, tensor in whole)

    def named_state(self) -> dict[str, list[tuple[str, Tensor]]]:
        """Trained `weights` and `optimizer` state, sharing storage."""
        return {"weights": self._trained.named, "optimizer": list(self._trained.named_state().items())}

    def digests(self) -> dict[str, str]:
        """Digests of `weights` and `optimizer`; the same for any sharding."""
        return module_digests(self.named_state())

    def state(self) -> dict[str, Tensor]:
        """Everything training changes, sharing storage, for a checkpoint: trained weights and optimizer state."""
        weights = {f"weights/{name}": parameter.detach() for name, parameter in self._trained.named}
        return {**weights, **{f"optimizer/{name}": value for name, value in self._trained.named_state().items()}}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Finish loading a `state` whose tensors were filled in place."""
        self._trained.restore_counts(state["optimizer/counts"])

    @property
    def _trained(self) -> Updater:
        if self.updater is None:
            raise RuntimeError(f"{type(self).__name__} is frozen; it has no optimizer")
        return self.updater
