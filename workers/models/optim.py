"""One optimizer step over leaves, the same bits at any number of ranks: forward, backward, canonical sum, norm, clip, AdamW.

Actor and critic share this; they differ only in how a leaf's outputs are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from configs.schema import OptimizerConfig
from determinism.reduction import BinaryCounter, halving_sum, row_square_sums
from workers.models.batch import MiniBatch, TokenBatch, UpdateResult
from workers.models.sharding import as_sharded, filler_leaf, local_rows, most_across_ranks, release, row_range

Outputs = Any
"""`PolicyOutputs` or `ValueOutputs`."""
Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""loss(outputs, leaf, totals) -> (the leaf's share of the mini-batch's loss, shares of metrics as float64 scalars)."""


def lr_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step `step` (counted from 0) as a share of `config.lr`.

    The warm-up's first step already has a rate above 0 (a step at rate 0 would be wasted): (step + 1) / (warmup + 1).
    `linear` and `cosine` then fall from 1 to `min_lr_ratio`, which they would reach at step `total_steps`.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    if config.schedule == "linear":
        share = 1.0 - progress
    elif config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"optim.schedule is {config.schedule!r}; it must be 'constant', 'linear' or 'cosine'")
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


class Updater:
    """Trains the parameters of a sharded model that require a gradient.

    Args:
        model: sharded and materialised.
        config: AdamW, schedule and clipping.
        total_steps: training steps over which the schedule runs.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        self.device = local_rows(self.parameters[0]).device
        self.step = 0
        """Training steps done; decides the learning rate."""
        self.applied = 0
        """Optimizer steps done; AdamW's bias correction."""
        # There from the start, so that a checkpoint or digest before the first step needs no made-up step.
        self.exp_avg = [torch.zeros_like(local_rows(p)) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(local_rows(p)) for p in self.parameters]
        self.moments: dict[str, Tensor] = {}
        """The same as DTensors that share storage, by name (`<parameter>/exp_avg`)."""
        for (name, parameter), average, square in zip(self.named, self.exp_avg, self.exp_avg_sq, strict=True):
            self.moments[f"{name}/exp_avg"] = as_sharded(average, parameter)
            self.moments[f"{name}/exp_avg_sq"] = as_sharded(square, parameter)

    @property
    def lr(self) -> float:
        """The current training step's learning rate."""
        return self.config.lr * lr_factor(self.config, self.step, self.total_steps)

    def end_step(self) -> None:
        """Advance the schedule; once a training step, however many mini-batches it had."""
        self.step += 1

    def update(
        self, mini_batches: Sequence[MiniBatch], forward: Callable[[TokenBatch], Outputs], loss: Loss
    ) -> list[UpdateResult]:
        """One optimizer step a mini-batch. Collective; ranks may hold different numbers of leaves."""
        slots = most_across_ranks([len(batch.leaves) for batch in mini_batches], self.device)
        return [self._update(batch, count, forward, loss) for batch, count in zip(mini_batches, slots, strict=True)]

    def _update(
        self, batch: MiniBatch, slots: int, forward: Callable[[TokenBatch], Outputs], loss: Loss
    ) -> UpdateResult:
        counter = BinaryCounter()
        losses: list[Tensor] = []
        metrics: list[Mapping[str, Tensor]] = []
        for slot in range(slots):
            if slot < len(batch.leaves):
                leaf = batch.leaves[slot].to(self.device)
                outputs = forward(leaf)
                share, leaf_metrics = loss(outputs, leaf, batch.totals)
                losses.append(share.detach())
                metrics.append(leaf_metrics)
                if not share.requires_grad:
                    # A loss that ignores the outputs of an all-masked leaf; the other ranks still wait in backward.
                    share = share + _zero(outputs)
            else:
                share = _zero(forward(filler_leaf().to(self.device)))
            share.backward()
            counter.push(self._take_gradients())
        release(self.model)
        gradients = counter.result()
        finite = torch.stack([value.isfinite().all() for value in losses]).all() if losses else None
        norm, all_finite = self._norm(gradients, finite)
        skipped = not (all_finite and math.isfinite(norm))
        lr = self.lr
        if not skipped:
            self._clip(gradients, norm)
            self._adamw(gradients, lr)
        return UpdateResult(
            losses=[float(value) for value in losses],
            metrics=[{name: float(value) for name, value in leaf.items()} for leaf in metrics],
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
        )

    def _take_gradients(self) -> list[Tensor]:
        """This rank's rows of the leaf's gradients, already summed over ranks; the parameters' own are cleared."""
        gradients = []
        for name, parameter in self.named:
            if parameter.grad is None:
                raise RuntimeError(
                    f"{name} got no gradient; every trained parameter must take part in the forward pass"
                )
            gradients.append(local_rows(parameter.grad))
            parameter.grad = None
        return gradients

    @torch.no_grad()
    def _norm(self, gradients: Sequence[Tensor], finite: Tensor | None) -> tuple[float, bool]:
        """Global L2 norm, and whether every rank's losses were finite.

        FSDP2 cuts between rows, never inside one. So each row's sum of squares is the same number at any world size;
        one all_gather brings them all here, and one fixed halving adds them in parameter order.
        """
        ranks = dist.get_world_size()
        chunks = [row_range(p.shape[0], 0, ranks)[1] for p in self.parameters]
        sums = _row_sums(gradients)
        flag = torch.zeros(1, device=self.device) if finite is None else (~finite).float().reshape(1)
        padded = [nn.functional.pad(s, (0, chunk - s.numel())) for s, chunk in zip(sums, chunks, strict=True)]
        mine = torch.cat([*padded, flag])
        everyone = mine.new_empty(ranks, mine.numel())
        dist.all_gather_single(everyone.view(-1), mine)
        whole = [
            piece.reshape(-1)[: p.shape[0]]
            for piece, p in zip(everyone[:, :-1].split(chunks, dim=1), self.parameters, strict=True)
        ]
        norm = halving_sum(torch.cat(whole)).sqrt()
        return float(norm), not bool(everyone[:, -1].any())

    def _clip(self, gradients: list[Tensor], norm: float) -> None:
        limit = self.config.max_grad_norm
        if limit > 0 and norm > limit:
            torch._foreach_mul_(gradients, limit / norm)

    @torch.no_grad()
    def _adamw(self, gradients: list[Tensor], lr: float) -> None:
        """Loshchilov and Hutter 2019. Elementwise, so the cut into shards does not matter; not so the fused kernel."""
        config = self.config
        steps = [torch.tensor(float(self.applied)) for _ in self.parameters]
        if config.fused:
            steps = [step.to(self.device) for step in steps]
        adamw(
            [local_rows(p) for p in self.parameters],
            gradients,
            self.exp_avg,
            self.exp_avg_sq,
            [],
            steps,
            foreach=not config.fused,
            fused=config.fused,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )
        self.applied += 1

    def named_state(self) -> dict[str, Tensor]:
        """AdamW's moments, sharing storage, by name (`<parameter>/exp_avg`), and the counts as a tensor."""
        return {**self.moments, "counts": torch.tensor([self.step, self.applied], dtype=torch.int64)}

    def restore_counts(self, counts: Tensor) -> None:
        """Take over the counts of a `named_state`; its other tensors are loaded in place."""
        self.step, self.applied = counts.tolist()


def _zero(outputs: Outputs) -> Tensor:
    """A zero that reaches every output, so that backward runs its collectives and leaves zero gradients."""
    total = torch.zeros(())
    for field in fields(outputs):
        value = getattr(outputs, field.name)
        if value is not None and value.requires_grad:
            total = total.to(value.device) + (value * 0.0).sum()
    return total


def _row_sums(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sum of squares of each row of each gradient; rows of equal length go through one call (fewer, larger kernels)."""
    by_width: dict[int, list[int]] = {}
    flat = [gradient.reshape(gradient.shape[0], math.prod(gradient.shape[1:])) for gradient in gradients]
    for index, gradient in enumerate(flat):
        by_width.setdefault(gradient.shape[1], []).append(index)
    sums: list[Tensor] = [torch.empty(0)] * len(flat)
    for indices in by_width.values():
        together = row_square_sums(torch.cat([flat[i] for i in indices]))
        for i, piece in zip(indices, together.split([flat[i].shape[0] for i in indices]), strict=True):
            sums[i] = piece
    return sums
