"""The policy: its log-probabilities are transformers', its first ratio is 1, and padding is never seen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from configs.schema import FsdpConfig, OptimizerConfig
from tests.workers.models._models import RatioLoss, batch, leaves_of, mini_batch, save_checkpoint
from tests.workers.models._ranks import on_ranks
from workers.models.batch import TokenBatch
from workers.models.policy import Network, PolicyModel, token_logprobs
from workers.models.sharding import rank_mesh


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("policy"))


def policy(path: str, *, precision: str = "fp32", temperature: float = 1.0, trained: bool = True) -> PolicyModel:
    return PolicyModel(
        path,
        rank_mesh(dist.get_world_size(), "cpu"),
        torch.device("cpu"),
        FsdpConfig(precision=precision),
        temperature=temperature,
        full_determinism=True,
        optim=OptimizerConfig(lr=1e-2) if trained else None,
    )


class TwoTokens(nn.Module):
    """Always the logits [2, 0]."""

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=torch.tensor([2.0, 0.0]).expand(len(input_ids), len(logits_to_keep), 2))


def test_temperature_divides_the_logits():
    leaf = TokenBatch(torch.tensor([[1, 0]]), torch.tensor([2]), torch.tensor([[False, True]]))
    outputs = token_logprobs(Network(TwoTokens()), leaf, temperature=0.5, entropy=False)
    assert outputs.logprobs[0, 1].item() == pytest.approx(-0.018150, abs=1e-6)
    p = 1 / (1 + math.exp(-4))
    assert outputs.entropy[0, 1].item() == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-6)
    assert outputs.logprobs[0, 0].item() == outputs.entropy[0, 0].item() == 0.0


def test_a_first_token_has_no_logprob():
    leaf = TokenBatch(torch.tensor([[1, 0]]), torch.tensor([2]), torch.tensor([[True, True]]))
    with pytest.raises(ValueError, match="column 0"):
        token_logprobs(Network(TwoTokens()), leaf, temperature=1.0, entropy=False)


def score_at_temperature(path: str, leaf: TokenBatch) -> tuple:
    (scores,) = policy(path, temperature=0.7, trained=False).logprobs([leaf], 0.7)
    with pytest.raises(ValueError, match=r"temperature 1\.0"):
        policy(path, temperature=0.7, trained=False).logprobs([leaf], 1.0)
    return scores


def test_logprobs_are_those_of_transformers(path, tmp_path):
    from transformers import AutoModelForCausalLM

    leaf = leaves_of(batch(5, 21), 5)[0]
    ((logprobs, entropy),) = on_ranks(1, tmp_path, score_at_temperature, path, leaf)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for row in range(5):
            ids = leaf.input_ids[row, : leaf.lengths[row]]
            expected = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
            mask = leaf.mask[row, 1 : leaf.lengths[row]]
            chosen = expected.gather(1, ids[1:, None])[:, 0]
            torch.testing.assert_close(logprobs[row, 1 : len(ids)][mask], chosen[mask], atol=2e-5, rtol=0)
            plain = -(expected.exp() * expected).sum(-1)
            torch.testing.assert_close(entropy[row, 1 : len(ids)][mask], plain[mask], atol=2e-5, rtol=0)
    assert (logprobs[~leaf.mask] == 0).all()
    assert (entropy[~leaf.mask] == 0).all()


class Remember:
    """A loss of zero weight that keeps the log-probabilities it was shown."""

    needs_entropy_gradient = False

    def __init__(self, entropy: bool) -> None:
        self.needs_entropy_gradient = entropy
        self.seen: list[torch.Tensor] = []
        self.entropy_has_graph: list[bool] = []

    def __call__(self, outputs, leaf, totals):
        self.seen.append(outputs.logprobs.detach().clone())
        self.entropy_has_graph.append(outputs.entropy.requires_grad)
        return outputs.logprobs.sum() / totals.tokens, {}


def ratios(path: str, precision: str) -> bool:
    model = policy(path, precision=precision, temperature=0.9)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaves = leaves_of(batch(12, 17), 3)
    equal = []
    for entropy in (False, True):
        old = [logprobs for logprobs, _ in model.logprobs(leaves[rank::ranks])]
        loss = Remember(entropy)
        model.update([mini_batch(leaves, rank, ranks)], loss)
        equal += [bool(((new - before).exp() == 1.0).all()) for new, before in zip(loss.seen, old, strict=True)]
        assert loss.entropy_has_graph == [entropy] * len(old)
    # The update moved the weights, so the comparison can fail.
    after = [logprobs for logprobs, _ in model.logprobs(leaves[rank::ranks])]
    assert not any(map(torch.equal, after, loss.seen))
    return all(equal)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_ratio_is_exactly_one(path, tmp_path, precision):
    assert on_ranks(2, tmp_path, ratios, path, precision) == [True, True]


def padded(leaf: TokenBatch, columns: int, value: int) -> TokenBatch:
    """`leaf` with more padding on the right."""

    def grow(tensor, fill):
        return nn.functional.pad(tensor, (0, columns), value=fill)

    return TokenBatch(grow(leaf.input_ids, value), leaf.lengths, grow(leaf.mask, False))


def pad_and_trim(path: str) -> tuple:
    model = policy(path, trained=False)
    tokens = batch(6, 20)
    leaf = leaves_of(tokens, 6)[0]
    wide = padded(leaf, 13, value=5)
    trimmed = wide.select(torch.arange(6))
    (plain, _), (grown, _), (cut, _) = model.logprobs([leaf, wide, trimmed])
    return plain, grown, cut


def test_padding_is_never_seen_and_trimming_restores_the_bits(path, tmp_path):
    ((plain, grown, cut),) = on_ranks(1, tmp_path, pad_and_trim, path)
    torch.testing.assert_close(grown[:, : plain.shape[1]], plain, atol=1e-5, rtol=0)
    assert (grown[:, plain.shape[1] :] == 0).all()
    assert torch.equal(cut, plain)


def uneven(path: str) -> dict:
    """Five leaves on whatever ranks there are, one of them without trained tokens."""
    model = policy(path)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaves = leaves_of(batch(10, 15), 2)
    leaves[3] = leaves[3].with_(mask=torch.zeros_like(leaves[3].mask))
    scores = model.logprobs(leaves[rank::ranks])
    (result,) = model.update([mini_batch(leaves, rank, ranks)], RatioLoss())
    return {"scores": scores, "losses": result.losses, "norm": result.grad_norm, "digests": model.digests()}


def test_ranks_may_hold_different_numbers_of_leaves(path, tmp_path):
    (one,) = on_ranks(1, tmp_path, uneven, path)
    four = on_ranks(4, tmp_path, uneven, path)
    assert [len(rank["losses"]) for rank in four] == [2, 1, 1, 1]
    assert {rank["norm"] for rank in four} == {one["norm"]}
    assert all(rank["digests"] == one["digests"] for rank in four)
    for index, expected in enumerate(one["scores"]):
        assert all(map(torch.equal, four[index % 4]["scores"][index // 4], expected))


class PoisonedLeaf(RatioLoss):
    """Not a number for the leaf of one rank."""

    def __call__(self, outputs, leaf, totals):
        loss, metrics = super().__call__(outputs, leaf, totals)
        return (loss * float("nan") if dist.get_rank() == 1 else loss), metrics


def poisoned(path: str) -> tuple:
    model = policy(path)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before = model.digests()
    mini = mini_batch(leaves_of(batch(4, 15), 2), rank, ranks)
    (bad,) = model.update([mini], PoisonedLeaf())
    untouched = model.digests() == before
    (good,) = model.update([mini], RatioLoss())
    return bad.skipped, untouched, good.skipped, model.digests() != before


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(path, tmp_path):
    assert on_ranks(2, tmp_path, poisoned, path) == [(True, True, False, True)] * 2


PLAIN = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-6)


def two_updates(path: str) -> tuple:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = PolicyModel(
        path,
        rank_mesh(ranks, "cpu"),
        torch.device("cpu"),
        FsdpConfig(),
        temperature=0.9,
        full_determinism=True,
        optim=PLAIN,
    )
    minis = [mini_batch(leaves_of(batch(8, 17, seed=seed), 2), rank, ranks) for seed in (1, 2)]
    norms = [result.grad_norm for result in model.update(minis, RatioLoss())]
    return norms, dict(model.export())


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_those_of_unsharded_torch(path, tmp_path, ranks):
    from transformers import AutoModelForCausalLM

    norms, weights = on_ranks(ranks, tmp_path, two_updates, path)[0]
    plain = AutoModelForCausalLM.from_pretrained(path)
    start = {name: value.detach().clone() for name, value in plain.named_parameters()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for seed, norm in zip((1, 2), norms, strict=True):
        mini = mini_batch(leaves_of(batch(8, 17, seed=seed), 2), 0, 1)
        for leaf in mini.leaves:
            RatioLoss()(token_logprobs(Network(plain), leaf, 0.9, entropy=True), leaf, mini.totals)[0].backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm == pytest.approx(expected.item(), rel=1e-4)
        assert norm > 0.5  # clipping took part
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.named_parameters():
        # AdamW's first steps are about the sign of the gradient, so a tiny gradient may move a weight by less or more.
        moved = (value.detach() - start[name]).norm()
        assert (weights[name] - value.detach()).norm() < 1e-2 * moved, name


def full_kl(path: str, other: str) -> tuple:
    model, reference = policy(path, temperature=0.8), policy(other, temperature=0.8, trained=False)
    leaf = leaves_of(batch(4, 15), 4)[0]
    loss = RatioLoss(needs_full_kl=True)
    with pytest.raises(ValueError, match="has no reference"):
        model.update([mini_batch([leaf], 0, 1)], loss)
    model.reference = reference
    return leaf, model.forward(leaf, loss).full_kl.detach(), model.forward(leaf, RatioLoss()).full_kl


def test_the_full_kl_is_over_the_vocabulary(path, tmp_path):
    from transformers import AutoModelForCausalLM

    other = save_checkpoint(tmp_path / "other", seed=1)
    ((leaf, kl, none),) = on_ranks(1, tmp_path, full_kl, path, other)
    p, q = (
        (AutoModelForCausalLM.from_pretrained(name)(leaf.input_ids).logits.detach() / 0.8).log_softmax(-1)[:, :-1]
        for name in (path, other)
    )
    expected = nn.functional.pad((p.exp() * (p - q)).sum(-1), (1, 0)) * leaf.mask
    torch.testing.assert_close(kl, expected, atol=1e-4, rtol=1e-5)
    assert none is None
    assert kl[leaf.mask].min() > 0


def frozen(path: str) -> str:
    reference = policy(path, trained=False)
    with pytest.raises(RuntimeError, match="is frozen") as error:
        reference.end_step()
    assert not any(parameter.requires_grad for parameter in reference.network.parameters())
    return str(error.value)


def test_a_reference_cannot_be_trained(path, tmp_path):
    on_ranks(1, tmp_path, frozen, path)
