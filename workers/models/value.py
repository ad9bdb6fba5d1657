"""The value model (critic): a backbone with a linear head that gives one value a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import FsdpConfig, LoraConfig, OptimizerConfig
from determinism.seeds import derive_seed, torch_generator
from workers.models.batch import TokenBatch, ValueOutputs
from workers.models.lora import add_adapters, base_name
from workers.models.optim import Loss
from workers.models.pretrained import Checkpoint, CheckpointError, bind, empty_model, load_config
from workers.models.sharded_model import ShardedModel
from workers.models.sharding import materialise, shard

HEAD = "score.weight"
"""The head's name in transformers' sequence classifiers."""


class ValueNetwork(nn.Module):
    """Backbone and head, named as transformers' one-label sequence classifier names them."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.prefix: str = backbone.base_model_prefix  # type: ignore[assignment]
        self.add_module(self.prefix, backbone)
        self.score = nn.Linear(hidden_size, 1, bias=False, device="meta")

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[N, T] ids and positions -> [N, T, 1] float32: the head's output at each token."""
        backbone = getattr(self, self.prefix)
        hidden = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return self.score(hidden.float())


def token_values(network: nn.Module, leaf: TokenBatch) -> ValueOutputs:
    """The value of each state in which a trained token was chosen: the head's output one token earlier.

    Returns:
        float32, [N, T], zeros outside the mask. Sampling temperature plays no part.
    """
    count, width = leaf.input_ids.shape
    positions = torch.arange(width, device=leaf.input_ids.device).expand(count, width)
    heads = network(leaf.input_ids, positions).squeeze(-1)
    before = torch.cat([heads.new_zeros(count, 1), heads[:, :-1]], dim=1)
    return ValueOutputs(torch.where(leaf.mask, before, 0.0))


class ValueModel(ShardedModel):
    """A value model from a checkpoint directory, sharded over the mesh.

    A causal language model lends its backbone and gets a new head, drawn from `seed` and independent of the sharding; a
    one-label sequence classifier keeps its head.

    Args:
        path: Hugging Face checkpoint.
        seed: the run's.
        Others as for `PolicyModel`.

    Raises:
        CheckpointError: the checkpoint does not fit, or is a classifier of more than one label.
    """

    def __init__(
        self,
        path: str | Path,
        mesh: DeviceMesh,
        device: torch.device,
        fsdp: FsdpConfig,
        *,
        seed: int,
        full_determinism: bool,
        optim: OptimizerConfig,
        total_steps: int,
        lora: LoraConfig | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModel

        hf_config = load_config(path, fsdp.attention, trust_remote_code)
        backbone = empty_model(AutoModel, hf_config, trust_remote_code)
        network = ValueNetwork(backbone, hf_config.hidden_size)
        checkpoint = Checkpoint(path)
        initial = _new_head(checkpoint, hf_config, seed)
        adapted = lora is not None and lora.rank > 0
        if lora is not None and adapted:
            initial |= add_adapters(network, lora, seed, "critic")
            network.score.requires_grad_(True)  # a head is always trained, it may be new
        read = bind(checkpoint, network, initial=initial, ignore=[r"^lm_head\."], rename=base_name)
        shard(network, mesh, fsdp, full_determinism, fp32_modules=(network.score,))
        materialise(network, device, read)
        super().__init__(network, hf_config, device, optim, total_steps, lora if adapted else None)

    def forward(self, leaf: TokenBatch, loss: Loss | None) -> ValueOutputs:
        """Outputs for training and scoring."""
        return token_values(self.network, leaf)

    def values(self, leaves: Sequence[TokenBatch]) -> list[Tensor]:
        """Per leaf: values, [n, T] float32 on the CPU, 0 outside the mask."""
        return [outputs.values.cpu() for outputs in self.score(leaves)]


def _new_head(checkpoint: Checkpoint, config: Any, seed: int) -> dict[str, Tensor]:
    """The head of a checkpoint that has none: normal with standard deviation 1 / (hidden size + 1), so that first values are small."""
    if HEAD in checkpoint.names():
        labels = checkpoint.shape(HEAD)[0]
        if labels != 1:
            raise CheckpointError(f"{checkpoint.path} is a classifier of {labels} labels; a value model needs one")
        return {}
    generator = torch_generator(derive_seed(seed, "value_head"))
    size = config.hidden_size
    return {HEAD: torch.randn(1, size, generator=generator) / (size + 1)}
