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
from workers.models.hf_config import load_config
from workers.models.lora import add_adapters, base_name
from workers.models.optim import Loss
from workers.models.pretrained import PretrainedError, PretrainedFiles, bind, empty_model
from workers.models.sharded_model import ShardedModel
from workers.models.sharding import decoder_layers, materialise, shard

HEAD = "score.weight"
"""The head's name in transformers' sequence classifiers."""
CAUSAL_HEADS = (r"^(lm_head|embed_out)\.",)
"""What a critic leaves aside of a causal language model, as a regular expression."""


class ValueNetwork(nn.Module):
    """Backbone and head, named as transformers' one-label sequence classifier names them."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.base_model_prefix: str = backbone.base_model_prefix  # type: ignore[assignment]
        self.add_module(self.base_model_prefix, backbone)
        self.score = nn.Linear(hidden_size, 1, bias=False, device="meta")

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[N, T] ids and positions -> [N, T, 1] float32: the head's output at each token."""
        backbone = getattr(self, self.base_model_prefix)
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
        PretrainedError: the checkpoint does not fit, or is a classifier of more than one label.
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
        files = PretrainedFiles(path)
        initial = _new_head(files, hf_config, seed)
        adapted = lora is not None and lora.rank > 0
        if lora is not None and adapted:
            initial |= add_adapters(network, lora, seed, "critic")
            network.score.requires_grad_(True)  # a head is always trained, it may be new
        bound = bind(files, network, initial=initial, ignore=CAUSAL_HEADS, rename=base_name)
        shard(network, mesh, fsdp, full_determinism, fp32_modules=(network.score,))
        materialise(network, device, bound.read)
        super().__init__(network, hf_config, device, optim, total_steps, lora if adapted else None, bound.stored)

    def forward(self, leaf: TokenBatch, loss: Loss | None) -> ValueOutputs:
        """Outputs for training and scoring."""
        return token_values(self.network, leaf)

    def values(self, leaves: Sequence[TokenBatch]) -> list[Tensor]:
        """Per leaf: values, [n, T] float32 on the CPU, 0 outside the mask."""
        return [outputs.values.cpu() for outputs in self.score(leaves)]


def _new_head(files: PretrainedFiles, config: Any, seed: int) -> dict[str, Tensor]:
    """The head of a checkpoint that has none: normal with standard deviation 1 / (hidden size + 1), so that first values are small."""
    if HEAD in files.names():
        labels = files.shape(HEAD)[0]
        if labels != 1:
            raise PretrainedError(f"{files.path} is a classifier of {labels} labels; a value model needs one")
        return {}
    generator = torch_generator(derive_seed(seed, "value_head"))
    size = config.hidden_size
    return {HEAD: torch.randn(1, size, generator=generator) / (size + 1)}


def check_value(path: str | Path, attention: str, trust_remote_code: bool = False) -> None:
    """As `workers.models.policy.check_policy`, for a critic.

    Raises:
        PretrainedError: as `ValueModel`.
    """
    from transformers import AutoModel

    config = load_config(path, attention, trust_remote_code)
    network = ValueNetwork(empty_model(AutoModel, config, trust_remote_code), config.hidden_size)
    decoder_layers(network)
    files = PretrainedFiles(path)
    bind(files, network, initial=_new_head(files, config, seed=0), ignore=CAUSAL_HEADS)
