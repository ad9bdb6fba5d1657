"""A digest is equal exactly when the bits are, and a weight digest does not see how the weights are cut."""

import json
import math
import struct
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from determinism import digest
from determinism.digest import digest_tensor, digest_value, module_digest, module_digests, shard_digests
from determinism.seeds import torch_generator
from tests.determinism.gloo import on_ranks


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch_generator(seed))


def state(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """What a digest meets: odd shapes, mixed dtypes, an optimizer's scalar, an empty tensor."""
    return [
        ("weight", draw(7, 5, seed=seed)),
        ("bias", draw(3, seed=seed + 1).bfloat16()),
        ("head", draw(1, 9, seed=seed + 2)),
        ("counts", torch.arange(11) - 5),
        ("exact", draw(6, 2, 3, seed=seed + 3).double()),
        ("step", torch.tensor(4.0)),
        ("nothing", torch.zeros(0, 4)),
    ]


def shard_digest(piece: torch.Tensor, offset: int) -> torch.Tensor:
    return shard_digests([(piece, offset)])[0]


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    flipped = tensor.clone()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    width = 8 * tensor.element_size()
    mask = -(1 << bit) if bit == width - 1 else 1 << bit
    flipped.view(integer).view(-1)[index] ^= mask
    return flipped


def test_digest_tensor_sees_content_dtype_and_shape():
    value = draw(4, 6)
    base = digest_tensor(value)
    assert len(base) == 32
    assert digest_tensor(value.clone()) == base
    assert digest_tensor(value.t().contiguous().t()) == base  # strides are not content
    assert digest_tensor(value.view(6, 4)) != base
    assert digest_tensor(value.view(torch.int32)) != base
    assert digest_tensor(flip_bit(value, 23, 0)) != base


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.float64, torch.uint8])
def test_digest_tensor_takes_every_dtype_scalars_and_nothing(dtype):
    digests = {digest_tensor(torch.ones(shape).to(dtype)) for shape in [(), (1,), (0,), (0, 3), (2, 1)]}
    assert len(digests) == 5


def test_digests_are_of_bits():
    assert digest_tensor(torch.tensor(0.0)) != digest_tensor(torch.tensor(-0.0))
    assert digest_value(0.0) != digest_value(-0.0)
    assert digest_value(math.nan) == digest_value(math.nan)
    assert digest_value(0.1 + 0.2) != digest_value(0.3)


def test_digests_are_frozen():
    """A change here makes old ledgers incomparable: raise DIGEST_VERSION."""
    assert digest_tensor(torch.arange(6).reshape(2, 3)) == "fa6bb3426ebb48c396cd84e9e8f0c14e"
    assert digest_value({"a": [1, 2.5, None, True, "x"], "b": {}}) == "a83549415cf612410465bf4d3e0456e3"
    assert (
        module_digest([("w", torch.arange(6.0).reshape(2, 3)), ("step", torch.tensor(3.0))])
        == "ce5c45b58fe0f6c1ebe3081fc668a03c"
    )


def test_digest_value_tells_like_values_apart():
    values = [
        None,
        True,
        False,
        1,
        0,
        1.0,
        "1",
        b"1",
        [],
        {},
        "",
        b"",
        [1],
        [1.0],
        [True],
        [[1]],
        [1, 1],
        [[1], 1],
        [1, [1]],
    ]
    values += [
        ["ab", "c"],
        ["a", "bc"],
        ["abc"],
        {"a": 1},
        {"a": 1.0},
        {1: "a"},
        {"1": "a"},
        ["a", 1],
        2**70,
        -(2**70),
        [2**70],
    ]
    digests = [digest_value(value) for value in values]
    assert len(set(digests)) == len(values)


def test_digest_value_ignores_dict_order_and_the_kind_of_sequence():
    assert digest_value({"a": 1, "b": [2, 3]}) == digest_value({"b": (2, 3), "a": 1})
    value = {"ids": [[1, 2], []], "logprobs": [[-0.1, -1e-300]], "reason": "stop", "none": None}
    assert digest_value(json.loads(json.dumps(value))) == digest_value(value)


def test_digest_value_takes_tensors_as_leaves():
    assert digest_value([torch.ones(2), 1]) == digest_value([torch.ones(2), 1])
    assert digest_value([torch.ones(2), 1]) != digest_value([torch.ones(2).double(), 1])


def test_digest_value_names_what_it_cannot_take():
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a set"):
        digest_value({"a": [1, {2}]})
    with pytest.raises(TypeError, match=r"a key of value is 1.5"):
        digest_value({1.5: 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.uint8])
@pytest.mark.parametrize(("rows", "width"), [(13, 7), (13, 4099)])
def test_shard_lanes_add_up_whatever_the_cut(dtype, rows, width, monkeypatch):
    value = (draw(rows, width) * 3).to(dtype)
    whole = shard_digest(value, 0)
    for cuts in ([0, 13], [0, 7, 13], [0, 4, 8, 12, 13], [0, 13, 13], list(range(14))):
        pieces = [shard_digest(value[a:b], a * width) for a, b in pairwise(cuts)]
        assert torch.equal(torch.stack(pieces).sum(0), whole)
    flat = value.view(-1)
    pieces = [shard_digest(flat[a:b], a) for a, b in pairwise([0, 1, 2, 41, 90, len(flat)])]
    assert torch.equal(torch.stack(pieces).sum(0), whole)
    for products_of, run_of in ((40, 2048), (40, 40)):
        monkeypatch.setattr(digest, "_AT_ONCE", products_of)
        monkeypatch.setattr(digest, "_RUN", run_of)
        assert torch.equal(shard_digest(value, 0), whole)


def exact_lanes(value: torch.Tensor, offset: int) -> torch.Tensor:
    """The definition, byte by byte in exact Python integers."""
    mask = (1 << 64) - 1
    drawn = digest.hashlib.shake_128(b"exactrl2/shard keys").digest(digest.PAGE * digest.LANES)
    lanes = [0] * digest.LANES
    for at, byte in enumerate(
        value.contiguous().view(-1).view(torch.int8).tolist(), start=offset * value.element_size()
    ):
        page, i = divmod(at, digest.PAGE)
        for lane in range(digest.LANES):
            x = (page * 4 + lane // 8) * 0x9E3779B97F4A7C15 & mask
            for factor in (0xB7E151628AED2A6B, 0x6A09E667F3BCC909):
                x = (x ^ x >> 32) * factor & mask
            weight = (x ^ x >> 32) | 1
            lanes[lane] += weight * byte * (2 * (drawn[i * digest.LANES + lane] % 64) - 63)
    return torch.tensor([struct.unpack("<q", struct.pack("<Q", lane & mask))[0] for lane in lanes])


@pytest.mark.parametrize("offset", [0, 100, 1020, 2**33])
def test_shard_digest_equals_its_definition_in_plain_integers(offset):
    """The tensor code against exact Python integers: no overflow, sign or shift is lost on the way."""
    value = draw(11)
    assert torch.equal(shard_digest(value, offset), exact_lanes(value, offset))


@pytest.mark.parametrize("byte", [-128, 127])
def test_the_largest_sums_are_exact(byte):
    """A page where every product has the greatest size; int8 products add pairs in 16 bits on some processors."""
    keys = digest._keys(torch.device("cpu"))
    assert keys.abs().max() == 63
    for signs in (1, keys[:, :1].sign(), -keys[:, 5:6].sign()):
        page = (torch.full((digest.PAGE, 1), byte) * signs).clamp(-128, 127).to(torch.int8)
        pages = page.view(1, -1).repeat(40, 1)
        assert torch.equal(torch._int_mm(pages, keys).long(), pages.long() @ keys.long())


def test_every_lane_sees_every_single_bit():
    for value in (draw(3), draw(3).bfloat16(), draw(3).double(), torch.arange(3)):
        base = shard_digest(value, 0)
        for bit in range(8 * value.element_size()):
            assert bool((shard_digest(flip_bit(value, 1, bit), 0) != base).all()), (value.dtype, bit)


def test_no_change_within_one_element_goes_unseen():
    """The keys of an element's bytes are linearly independent over the lanes, up to elements of 16 bytes."""
    keys = digest._keys(torch.device("cpu")).double().view(-1, 16, digest.LANES)
    assert bool((torch.linalg.matrix_rank(keys) == 16).all())


def test_no_two_bytes_of_a_page_have_keys_alike():
    """Else swapping them, or flipping both their signs, would go unseen."""
    keys = digest._keys(torch.device("cpu"))
    for group in keys.view(digest.PAGE, 4, 8).unbind(1):
        assert len({tuple(row) for row in torch.cat([group, -group]).tolist()}) == 2 * digest.PAGE


def test_page_weights_are_odd_and_differ_in_every_group():
    weights = digest._weights(torch.arange(20_000))
    assert bool((weights % 2 != 0).all())
    assert len(weights.unique()) == weights.numel()
    assert torch.equal(digest._run_of_weights(19_990, 10, torch.device("cpu")), weights[19_990:])


def test_swapped_pages_are_seen_in_every_lane():
    value = draw(64, 1024)
    swapped = value.clone()
    swapped[[3, 40]] = value[[40, 3]]
    assert bool((shard_digest(value, 0) != shard_digest(swapped, 0)).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_same_lanes():
    for value in (draw(5), draw(300, 1000), draw(300, 1001).bfloat16(), draw(4099, 4099)):
        for offset in (0, 7):
            assert torch.equal(shard_digest(value.cuda(), offset).cpu(), shard_digest(value, offset))


def test_changes_that_a_plain_sum_would_miss_are_seen():
    value = draw(8, 16)
    base = module_digest([("w", value)])
    swapped = value.clone()
    swapped[[0, 1]] = value[[1, 0]]
    negated = -value
    two_signs = flip_bit(flip_bit(value.double(), 3, 63), 90, 63)
    moved = value.roll(1)
    assert module_digest([("w", value.double())]) != module_digest([("w", two_signs)])
    assert len({base, *(module_digest([("w", other)]) for other in (swapped, negated, moved, value.view(16, 8)))}) == 5


def test_names_matter_and_their_order_does_not():
    tensors = state()
    assert module_digest(tensors) == module_digest(tensors[::-1])
    (a, first), (b, second) = ("a", draw(4, seed=1)), ("b", draw(4, seed=2))
    assert module_digest([(a, first), (b, second)]) != module_digest([(b, first), (a, second)])
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        module_digest([(a, first), (a, second)])


def test_several_modules_at_once_have_the_digests_they_have_alone():
    modules = {"weights": state(), "optimizer": state(seed=5), "nothing": []}
    assert module_digests(modules) == {name: module_digest(tensors) for name, tensors in modules.items()}


def test_many_small_tensors_share_products_and_do_not_mix():
    """More than one product's worth, of all sizes up to some pages; each has the lanes it has alone."""
    pieces = [(draw(37 * i, seed=i), 13 * i) for i in range(150)]
    together = shard_digests(pieces)
    assert torch.equal(together, torch.cat([shard_digests([piece]) for piece in pieces]))
    assert len({tuple(row) for row in together.tolist()}) == 150


def test_gradients_and_parameters_are_not_disturbed():
    weight = torch.nn.Parameter(draw(3, 3))
    before = weight.detach().clone()
    assert module_digest([("w", weight)]) == module_digest([("w", before)])
    assert torch.equal(weight.detach(), before)


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: list) -> torch.Tensor:
    """A DTensor cut the way FSDP2 cuts: chunks of ceil(rows / ranks), the last ones shorter or empty."""
    local = tensor
    for placement, size, at in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True):
        if isinstance(placement, Shard):
            rows = -(-tensor.shape[placement.dim] // size)
            local = local.split(rows, placement.dim)[at] if at * rows < len(tensor) else local[:0]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def check_on_ranks(expected: str, changed: str) -> None:
    """Runs on each of four ranks: shards over 4 and over 2 ranks, a replica, and a 2 x 2 mesh give the plain answer."""
    everyone = DeviceMesh("cpu", list(range(4)))
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    pair = DeviceMesh("cpu", [0, 1])

    def shards(mesh, placements, seed=0):
        return [(n, t if t.dim() == 0 else spread(t, mesh, placements)) for n, t in state(seed)]

    assert module_digest(shards(everyone, [Shard(0)])) == expected
    assert module_digest(shards(everyone, [Shard(0)], seed=9)) == changed
    assert module_digest(shards(everyone, [Replicate()])) == expected
    assert module_digest(shards(square, [Replicate(), Shard(0)])) == expected
    if dist.get_rank() < 2:
        assert module_digest(shards(pair, [Shard(0)]), group=pair.get_group()) == expected
    with pytest.raises(ValueError, match=r"weight: placements .*Shard"):
        module_digest([("weight", spread(draw(4, 4), everyone, [Shard(1)]))])
    with pytest.raises(TypeError, match="DTensor"):
        digest_tensor(spread(draw(4), everyone, [Shard(0)]))


def test_shards_on_two_and_four_ranks_give_the_digest_of_the_whole():
    expected, changed = module_digest(state()), module_digest(state(seed=9))
    assert expected != changed
    on_ranks(4, check_on_ranks, expected, changed)
