"""Small random checkpoints, leaves and losses for the tests of the trainer's models; children import them from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    FsdpConfig,
    LauncherConfig,
    ModelConfig,
    OptimizerConfig,
    RefConfig,
    TrainerConfig,
)
from workers.launch.group import deal
from workers.models.batch import LossTotals, MiniBatch, PolicyOutputs, TokenBatch, ValueOutputs

VOCAB = 101
ODD = {
    "vocab_size": VOCAB,
    "hidden_size": 66,
    "intermediate_size": 91,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 22,
    "max_position_embeddings": 128,
}
"""Sizes that no power of two divides, so that shards are uneven and have tails."""


def save_checkpoint(path: Path, *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> str:
    """A random causal language model; weights are scaled up so that logits are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3Config(tie_word_embeddings=tied, **ODD)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)
    model.to(dtype).save_pretrained(path)
    return str(path)


def save_classifier(path: Path, *, labels: int = 1, seed: int = 3) -> str:
    """A random sequence classifier."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForSequenceClassification(Qwen3Config(num_labels=labels, pad_token_id=0, **ODD))
    model.save_pretrained(path)
    return str(path)


def batch(count: int, width: int, seed: int = 7) -> TokenBatch:
    """Ragged sequences whose trained part starts anywhere, with everything a loss reads."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(width // 3, width + 1, (count,), generator=generator)
    prompt = torch.randint(1, max(width // 4, 2), (count,), generator=generator)
    places = torch.arange(width)
    mask = (places >= prompt[:, None]) & (places < lengths[:, None])
    ids = torch.randint(1, VOCAB, (count, width), generator=generator)
    ids[places >= lengths[:, None]] = 0

    def noise(scale: float) -> Tensor:
        return torch.randn(count, width, generator=generator) * scale * mask

    return TokenBatch(
        ids, lengths, mask, old_logprobs=noise(0.3) - 4.6 * mask, advantages=noise(1.0), returns=noise(1.0)
    )


def leaves_of(tokens: TokenBatch, size: int) -> list[TokenBatch]:
    """Consecutive rows, `size` a leaf."""
    return [tokens.select(torch.arange(i, min(i + size, len(tokens)))) for i in range(0, len(tokens), size)]


def mini_batch(leaves: list[TokenBatch], rank: int, ranks: int) -> MiniBatch:
    """This rank's part of a mini-batch."""
    totals = LossTotals(sum(int(leaf.mask.sum()) for leaf in leaves), sum(len(leaf) for leaf in leaves), 64)
    return MiniBatch(deal(leaves, ranks)[rank], totals)


@dataclass(frozen=True)
class RatioLoss:
    """Importance-weighted policy gradient with an entropy bonus."""

    needs_entropy_gradient: bool = True
    needs_full_kl: bool = False

    def __call__(
        self, outputs: PolicyOutputs, leaf: TokenBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.where(leaf.mask, (outputs.logprobs - leaf.old_logprobs).exp(), 0.0)
        loss = -(ratio * leaf.advantages).double().sum() / totals.tokens
        metrics = {"ratio": ratio.detach().double().sum() / totals.tokens}
        loss = loss - 0.01 * outputs.entropy.double().sum() / totals.tokens
        if outputs.full_kl is not None:
            metrics["kl"] = outputs.full_kl.detach().double().sum() / totals.tokens
            loss = loss + 0.1 * outputs.full_kl.double().sum() / totals.tokens
        return loss, metrics


@dataclass(frozen=True)
class SquaredLoss:
    """Half the squared distance to the returns."""

    poison: bool = False

    def __call__(self, outputs: ValueOutputs, leaf: TokenBatch, totals: LossTotals) -> tuple[Tensor, dict[str, Tensor]]:
        error = torch.where(leaf.mask, outputs.values - leaf.returns, 0.0)
        loss = 0.5 * (error.double() ** 2).sum() / totals.tokens
        if self.poison:
            loss = loss * float("nan")
        return loss, {"error": error.detach().double().abs().sum() / totals.tokens}


def trainer_config(path: str, ranks: int, *, critic: str | None = None, fsdp: FsdpConfig | None = None) -> Config:
    """A whole experiment around one checkpoint, for `TrainerWorker`."""
    fsdp = fsdp or FsdpConfig(leaf_size=3)
    optim = OptimizerConfig(lr=1e-2, weight_decay=0.01, warmup_steps=1, schedule="cosine", max_grad_norm=0.5)
    return Config(
        seed=5,
        full_determinism=True,
        model=ModelConfig(path=path),
        actor=ActorConfig(fsdp=fsdp, optim=optim),
        critic=CriticConfig(path=critic or path, fsdp=fsdp, optim=optim),
        ref=RefConfig(path=path, fsdp=fsdp),
        launcher=LauncherConfig(num_ranks=ranks, device="cpu"),
        trainer=TrainerConfig(total_steps=5),
    )
