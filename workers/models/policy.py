"""The policy (actor and reference): log-probabilities of the sampled tokens, and their training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import FsdpConfig, LoraConfig, OptimizerConfig
from workers.models.batch import MiniBatch, PolicyOutputs, TokenBatch, UpdateResult
from workers.models.head import ChosenRows, Compute, HeadInputs, in_place_of, linear_head, row_outputs
from workers.models.hf_config import load_config
from workers.models.lora import adapters_off, add_adapters, base_name
from workers.models.optim import Loss
from workers.models.pretrained import PretrainedFiles, bind, check_forward, empty_model
from workers.models.sharded_model import ShardedModel
from workers.models.sharding import decoder_layers, materialise, shard


class Reference(Protocol):
    """A frozen policy."""

    def scoring(self) -> AbstractContextManager[Network]:
        """The network to run, as long as the context is open."""
        ...

    def release(self) -> None:
        """Free gathered parameters."""
        ...


@dataclass(frozen=True)
class Network:
    """A causal language model, and how its logits come about."""

    model: nn.Module
    head: nn.Linear | None = None
    """The head, when its outputs are the logits (`workers.models.head.linear_head`): they are then computed for the trained tokens
    only, a chunk at a time. None: the model computes all logits of the columns that are asked for."""


@dataclass(frozen=True)
class Rows:
    """Which outputs of a forward pass are wanted."""

    columns: Tensor
    """[K] int64; columns in which some sequence has a trained token."""
    chosen: Tensor
    """[M] int64; the trained tokens among the N * K, row-major."""
    targets: Tensor
    """[M] int64; the tokens that were sampled there."""

    @classmethod
    def of(cls, leaf: TokenBatch) -> Rows:
        """The rows of a leaf.

        Raises:
            ValueError: the mask is True in column 0, which no token precedes.
        """
        if bool(leaf.mask[:, 0].any()):
            raise ValueError("the mask is True in column 0; a sequence's first token has no log-probability")
        columns = leaf.mask.any(dim=0).nonzero().squeeze(1)
        if columns.numel() == 0:
            # Nothing to train on, yet backward must still run this rank's collectives.
            columns = torch.ones(1, dtype=torch.int64, device=leaf.mask.device)
        chosen = leaf.mask[:, columns].flatten().nonzero().squeeze(1)
        return cls(columns, chosen, leaf.input_ids[:, columns].flatten()[chosen])


def token_logprobs(
    network: Network, leaf: TokenBatch, temperature: float, entropy: bool, reference: Reference | None = None
) -> PolicyOutputs:
    """Log-probabilities and entropies of the distribution that was sampled from: softmax(logits / temperature).

    The only place where the trainer computes them; scoring and training call it with the same leaf, so the first ratio
    is exactly 1.

    Args:
        leaf: N sequences, T columns, on the model's device.
        temperature: above 0.
        entropy: let gradients flow through the entropy.
        reference: also compute the KL to this model over the whole vocabulary.

    Returns:
        float32 in nats, [N, T], zeros outside the mask.

    Raises:
        ValueError: the mask is True in column 0, which no token precedes.
    """
    rows = Rows.of(leaf)
    other = None
    if reference is not None:
        with torch.no_grad(), reference.scoring() as frozen:
            other = _head_inputs(frozen, leaf, rows)

    def compute(inputs: HeadInputs) -> Tensor:
        return row_outputs(inputs, rows.targets, temperature, entropy_gradient=entropy, reference=other)

    outputs = _forward(network, leaf, rows, compute)
    logprobs, entropies, kl = (_place(values, leaf.mask) for values in outputs)
    return PolicyOutputs(logprobs, entropies if entropy else entropies.detach(), kl if reference is not None else None)


def _forward(network: Network, leaf: TokenBatch, rows: Rows, compute: Compute) -> Tensor:
    """One forward pass; `compute` is called inside it, where the parameters are whole, with what the head would get.

    No attention mask: sequences start at column 0 and attention is causal, so padding is never seen.
    """
    count, width = leaf.input_ids.shape
    positions = torch.arange(width, device=leaf.input_ids.device).expand(count, width)

    def run() -> Tensor:
        return network.model(
            input_ids=leaf.input_ids, position_ids=positions, use_cache=False, logits_to_keep=rows.columns - 1
        ).logits

    if network.head is not None:
        with in_place_of(network.head, ChosenRows(network.head, rows.chosen, compute)):
            return run()
    logits = run()  # [N, K, V]
    if logits.shape[1] != len(rows.columns):
        raise ValueError(
            f"{type(network.model).__name__} gave logits for {logits.shape[1]} columns instead of {len(rows.columns)}"
        )
    return compute(HeadInputs(logits.flatten(0, 1).index_select(0, rows.chosen)))


def _head_inputs(network: Network, leaf: TokenBatch, rows: Rows) -> HeadInputs:
    """What the head of a frozen model would get."""
    found: list[HeadInputs] = []

    def keep(inputs: HeadInputs) -> Tensor:
        found.append(inputs)
        return inputs.hidden[:0]

    _forward(network, leaf, rows, keep)
    return found[0]


def _place(values: Tensor, mask: Tensor) -> Tensor:
    """[M] values at the mask's True positions in row-major order, 0 elsewhere."""
    zeros = torch.zeros(mask.numel(), dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, mask.flatten().nonzero().squeeze(1), values).view(mask.shape)


class PolicyModel(ShardedModel):
    """A causal language model from a checkpoint directory, sharded over the mesh.

    Args:
        path: Hugging Face checkpoint.
        mesh: all ranks.
        device: this rank's.
        fsdp: sharding and precision.
        temperature: of the rollouts that it trains on.
        full_determinism: canonical sums over ranks.
        optim: None for the frozen reference.
        total_steps: length of the learning-rate schedule.
        lora: adapters; rank 0 trains all weights.
        seed: the run's, for new adapters.

    Raises:
        PretrainedError: the checkpoint does not fit the model.
    """

    def __init__(
        self,
        path: str | Path,
        mesh: DeviceMesh,
        device: torch.device,
        fsdp: FsdpConfig,
        *,
        temperature: float,
        full_determinism: bool,
        optim: OptimizerConfig | None = None,
        total_steps: int = 1,
        lora: LoraConfig | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.temperature = temperature
        self.reference: Reference | None = None
        """Set by the owner when a loss may ask for the KL over the vocabulary."""
        hf_config = load_config(path, fsdp.attention, trust_remote_code)
        network = empty_model(AutoModelForCausalLM, hf_config, trust_remote_code)
        check_forward(network)
        adapters = add_adapters(network, lora, seed, "actor") if lora and lora.rank > 0 else {}
        bound = bind(PretrainedFiles(path), network, initial=adapters, rename=base_name)
        shard(network, mesh, fsdp, full_determinism)
        materialise(network, device, bound.read)
        super().__init__(network, hf_config, device, optim, total_steps, lora if adapters else None, bound.stored)
        if self.updater is None:
            # The head of a reference is needed once more in the actor's backward pass.
            network.set_reshard_after_forward(False, recurse=False)
        self.net = Network(network, linear_head(network))
        self.release()

    def forward(self, leaf: TokenBatch, loss: Loss | None) -> PolicyOutputs:
        """Outputs of one leaf. A loss says what else it needs: `needs_entropy_gradient`, `needs_full_kl`.

        Raises:
            ValueError: the loss needs the full KL and there is no reference.
        """
        entropy, full_kl = (bool(getattr(loss, name, False)) for name in ("needs_entropy_gradient", "needs_full_kl"))
        if full_kl and self.reference is None:
            raise ValueError("the loss needs the KL over the vocabulary, but this trainer has no reference")
        return token_logprobs(self.net, leaf, self.temperature, entropy, self.reference if full_kl else None)

    def update(self, mini_batches: Sequence[MiniBatch], loss: Loss) -> list[UpdateResult]:
        """As `ShardedModel.update`."""
        results = super().update(mini_batches, loss)
        if self.reference is not None:
            self.reference.release()
        return results

    def logprobs(self, leaves: Sequence[TokenBatch], temperature: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """Per leaf: log-probabilities and entropies, each [n, T] float32 on the CPU, 0 outside the mask.

        Raises:
            ValueError: `temperature` is given and is not the one that updates use; the first ratio would not be 1.
        """
        if temperature is not None and temperature != self.temperature:
            raise ValueError(f"temperature {temperature} was asked for, but the model trains at {self.temperature}")
        return [(outputs.logprobs.cpu(), outputs.entropy.cpu()) for outputs in self.score(leaves)]

    def scoring(self) -> AbstractContextManager[Network]:
        """The network, as a reference."""
        return nullcontext(self.net)


class BaseOfAdapters:
    """The reference of an actor with adapters: the same weights with the adapters switched off, so none are held twice."""

    def __init__(self, actor: PolicyModel) -> None:
        self.actor = actor

    def logprobs(self, leaves: Sequence[TokenBatch], temperature: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """As `PolicyModel.logprobs`."""
        with self.scoring():
            return self.actor.logprobs(leaves, temperature)

    @contextmanager
    def scoring(self) -> Iterator[Network]:
        """The network without adapters."""
        with adapters_off(self.actor.network):
            yield self.actor.net

    def release(self) -> None:
        """Free gathered parameters."""
        self.actor.release()


def check_policy(path: str | Path, attention: str, trust_remote_code: bool = False) -> Mapping[str, str]:
    """Everything that building a `PolicyModel` could refuse, from the config and the headers of the weight files; needs no process group.

    Returns:
        Parameter name -> its name in the files.

    Raises:
        PretrainedError: as `PolicyModel`.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path, attention, trust_remote_code)
    network = empty_model(AutoModelForCausalLM, config, trust_remote_code)
    check_forward(network)
    decoder_layers(network)
    return bind(PretrainedFiles(path), network).stored
