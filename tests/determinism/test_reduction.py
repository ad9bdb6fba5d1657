"""Canonical sums give one answer whatever the cut into ranks and slots, and other orders give another."""

import pytest
import torch
import torch.distributed as dist

from determinism.reduction import (
    BinaryCounter,
    TreeReduceScatter,
    halving_sum,
    pairwise_rows,
    row_square_sums,
    tree_sum,
)
from determinism.seeds import torch_generator
from tests.determinism.gloo import on_ranks

SHAPES = [(7, 5), (3,), (1, 9), (6, 2, 3)]  # odd rows: shards of unequal size, some of them empty


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, so that every order of additions shows."""
    generator = torch_generator(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(4 * torch.randn(*shape, generator=generator))


def definition(rows: list[torch.Tensor]) -> torch.Tensor:
    """The canonical tree, spelt out: the left subtree takes the largest power of two that leaves something on the right."""
    if len(rows) == 1:
        return rows[0]
    left = 1
    while left * 2 < len(rows):
        left *= 2
    return definition(rows[:left]) + definition(rows[left:])


def counted(leaves: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    counter = BinaryCounter()
    for leaf in leaves:
        counter.push([tensor.clone() for tensor in leaf])
    return counter.result()


@pytest.mark.parametrize("count", range(1, 21))
def test_tree_sum_and_binary_counter_are_the_definition(count):
    rows = draw(count, 11)
    expected = definition(list(rows))
    assert torch.equal(tree_sum(rows), expected)
    assert torch.equal(counted([[row] for row in rows])[0], expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_slot_across_ranks_and_then_the_counter_is_the_tree_over_leaves(count, ranks):
    leaves = draw(count, 33)
    slots = -(-count // ranks)
    filled = torch.cat([leaves, torch.zeros(slots * ranks - count, 33)])
    sums = [[pairwise_rows(slot)] for slot in filled.view(slots, ranks, 33)]
    assert torch.equal(counted(sums)[0], tree_sum(leaves))


def test_filling_the_last_slot_leaves_no_trace_in_the_sign_of_zero():
    leaves = torch.full((3, 1), -0.0)
    filled = counted([[pairwise_rows(leaves[:2])], [leaves[2] + torch.zeros(1)]])[0]
    for total in (tree_sum(leaves), filled, counted([[leaf] for leaf in leaves])[0]):
        assert not total.signbit().any()


def test_other_orders_give_other_bits():
    leaves = draw(8, 1000)
    sequential = leaves[0].clone()
    for leaf in leaves[1:]:
        sequential += leaf
    expected = tree_sum(leaves)
    assert not torch.equal(sequential, expected)
    assert not torch.equal(leaves.sum(0), expected)
    # dealing leaves to ranks in blocks instead of like cards keeps the tree only by luck of a power of two; with 6 it does not
    six = leaves[:6]
    blocks = pairwise_rows(torch.stack([tree_sum(six[:3]), tree_sum(six[3:])]))
    assert not torch.equal(blocks, tree_sum(six))
    assert not torch.equal(tree_sum(leaves[[1, 2, 0, 3, 4, 5, 6, 7]]), expected)


def test_one_number_shows_why_order_matters():
    values = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24])
    assert float(tree_sum(values)) == 1.0 + 2.0**-23  # (1 + tiny) + (tiny + tiny): the right pair survives
    assert float(((values[0] + values[1]) + values[2]) + values[3]) == 1.0


def test_empty_sums_are_zeros():
    assert torch.equal(tree_sum(torch.zeros(0, 3)), torch.zeros(3))
    assert torch.equal(tree_sum(torch.zeros(4, 0)), torch.zeros(0))
    assert torch.equal(halving_sum(torch.zeros(0)), torch.tensor(0.0))
    assert torch.equal(row_square_sums(torch.zeros(0, 5)), torch.zeros(0))
    assert torch.equal(row_square_sums(torch.zeros(5, 0)), torch.zeros(5))
    assert counted([[]]) == []


def test_sums_leave_their_arguments_alone():
    rows, vector = draw(5, 7), draw(9)
    copies = rows.clone(), vector.clone()
    tree_sum(rows), row_square_sums(rows), halving_sum(vector), pairwise_rows(rows[:4])
    assert torch.equal(rows, copies[0])
    assert torch.equal(vector, copies[1])
    one = torch.tensor([2.0])
    halving_sum(one).add_(1)
    tree_sum(one.reshape(1, 1)).add_(1)
    assert float(one) == 2.0


@pytest.mark.parametrize("shape", [(13, 7), (13, 1), (13,), (4, 3, 5), (1, 1025)])
def test_row_square_sums_do_not_see_the_shard(shape):
    value = draw(*shape)
    whole = row_square_sums(value)
    assert whole.shape == (shape[0],)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, value.reshape(shape[0], -1).double().square().sum(1).float())
    for ranks in (2, 4):
        chunk = -(-shape[0] // ranks)
        pieces = [row_square_sums(value[at : at + chunk]) for at in range(0, shape[0], chunk)]
        assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(row_square_sums(value.bfloat16()), row_square_sums(value.bfloat16().float()))


def test_a_librarys_row_sums_are_not_promised_to_ignore_the_shard():
    """The library's own norm of the whole against one from shards: it differs, which is why norms are built from rows."""
    value = draw(64, 513)
    whole = torch.linalg.vector_norm(value)
    halves = torch.stack([torch.linalg.vector_norm(half) for half in value.split(32)])
    ours = halving_sum(row_square_sums(value))
    assert torch.equal(ours, halving_sum(torch.cat([row_square_sums(half) for half in value.split(32)])))
    assert not torch.equal(whole, torch.linalg.vector_norm(halves))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 100])
def test_halving_sum_is_spelt_out(length):
    vector = draw(length)
    x = vector.tolist()
    while len(x) > 1:
        half = (len(x) + 1) // 2
        x = [float(torch.tensor(x[i]) + torch.tensor(x[i + half])) if i + half < len(x) else x[i] for i in range(half)]
    assert float(halving_sum(vector)) == x[0]


def test_wrong_counts_and_shapes_are_named():
    with pytest.raises(ValueError, match="number of rows is 3, not a power of two"):
        pairwise_rows(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="nothing was pushed"):
        BinaryCounter().result()
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        halving_sum(torch.zeros(2, 2))
    counter = BinaryCounter()
    counter.push([torch.zeros(2)])
    with pytest.raises(ValueError, match=r"\[\(3,\)\] after one of \[\(2,\)\]"):
        counter.push([torch.zeros(3)])


def test_the_counter_keeps_few_lists_alive():
    counter = BinaryCounter()
    for leaf in draw(100, 2):
        counter.push([leaf.clone()])
    assert len(counter._waiting) == bin(100).count("1")


def gradients_of_leaf(leaf: int) -> list[torch.Tensor]:
    return [draw(*shape, seed=100 * leaf + at) for at, shape in enumerate(SHAPES)]


def fsdp_layout(gradients: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """FSDP2's reduce-scatter input: for each rank, its rows of every parameter, padded to equal size."""
    pieces = []
    for rank in range(ranks):
        for gradient in gradients:
            chunk = -(-gradient.shape[0] // ranks)
            rows = gradient[rank * chunk : (rank + 1) * chunk]
            padding = rows.new_zeros(chunk - rows.shape[0], *gradient.shape[1:])
            pieces.append(torch.cat([rows, padding]).reshape(-1))
    return torch.cat(pieces)


def reduce_leaves(group: dist.ProcessGroup, leaves: int) -> torch.Tensor:
    """What a training step does: deal leaves to ranks, reduce-scatter each slot, count; this rank's share of the sum."""
    rank, ranks = dist.get_rank(group), group.size()
    counter, reduce_scatter = BinaryCounter(), TreeReduceScatter()
    for slot in range(leaves // ranks):
        buffer = fsdp_layout(gradients_of_leaf(slot * ranks + rank), ranks)
        output = reduce_scatter.allocate((buffer.numel() // ranks,), dtype=buffer.dtype, device=buffer.device)
        reduce_scatter(output, buffer, group, dist.ReduceOp.SUM)
        counter.push([output])
    return counter.result()[0]


def check_on_ranks(expected: list[torch.Tensor], leaves: int) -> None:
    """Runs on each of four ranks; also as two pairs, and once as a group of three, which must refuse."""
    pair = dist.new_group([0, 1])
    dist.new_group([2, 3])
    three = dist.new_group([0, 1, 2])
    groups = [dist.group.WORLD] + ([pair] if dist.get_rank() < 2 else [])
    for group in groups:
        rank, ranks = dist.get_rank(group), group.size()
        mine = reduce_leaves(group, leaves)
        assert torch.equal(mine, fsdp_layout(expected, ranks).view(ranks, -1)[rank])
    buffer = torch.ones(12)
    if dist.get_rank() < 3:
        with pytest.raises(ValueError, match="FSDP ranks is 3, not a power of two"):
            TreeReduceScatter()(torch.empty(4), buffer, three, dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="must be SUM"):
        TreeReduceScatter()(torch.empty(3), buffer, dist.group.WORLD, dist.ReduceOp.AVG)
    check_that_gloo_orders_differently()


def check_that_gloo_orders_differently() -> None:
    """gloo's own reduce-scatter of four ranks' values is another sum than the pairwise one in some element."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = [draw(4000, seed=rank) for rank in range(ranks)]
    own = torch.empty(4000 // ranks)
    dist.reduce_scatter_single(own, everyone[rank].clone())
    tree = pairwise_rows(torch.stack(everyone)).view(ranks, -1)[rank]
    torch.testing.assert_close(own, tree)
    equal = torch.tensor([int(torch.equal(own, tree))])
    dist.all_reduce(equal)
    assert int(equal) < ranks


def test_tree_reduce_scatter_on_two_and_four_ranks_gives_the_one_rank_sums():
    leaves = 12
    expected = counted([gradients_of_leaf(leaf) for leaf in range(leaves)])
    on_ranks(4, check_on_ranks, expected, leaves)
