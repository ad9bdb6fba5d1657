"""Level D3 on CPU: a request's bits do not depend on the batch, and the checks that say so can fail."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch

from determinism.cpu_kernels import (
    BLOCK_ROWS,
    MAX_ROWS,
    BatchInvarianceError,
    CounterGenerator,
    _check_split_kv,
    _check_version,
    _token_by_token,
    blocked_linear,
    check_model,
    flat_rows,
    install,
    is_row_invariant,
    padded_linear,
)
from tests.engine_lab import burst, make_policy
from workers.launch.group import WorkerError


@pytest.fixture(scope="module")
def reference(lab, policy):
    """The burst at 64 sequences, no prefix cache: what every other way of running it must reproduce."""
    return lab.generate(model=policy[0], requests=burst(), max_num_seqs=64, enable_prefix_caching=False)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_the_number_of_running_sequences_does_not_move_bits(lab, policy, reference, max_num_seqs):
    assert lab.generate(model=policy[0], requests=burst(), max_num_seqs=max_num_seqs) == reference


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_requests_does_not_move_bits(lab, policy, reference, order):
    requests = burst()
    requests.reverse() if order == "reversed" else random.Random(5).shuffle(requests)
    # Priorities follow the new order, so that the schedule changes with it.
    requests = [dataclasses.replace(r, priority=i) for i, r in enumerate(requests)]
    generations = lab.generate(model=policy[0], requests=requests, max_num_seqs=8)
    assert [g.key for g in generations] == [r.key for r in requests]
    assert sorted(generations, key=lambda g: g.key) == reference


def test_a_request_alone_has_the_bits_it_has_in_a_batch(lab, policy, reference):
    alone = [
        lab.generate(model=policy[0], requests=[r], max_num_seqs=64, enable_prefix_caching=False)[0]
        for r in burst()[:8]
    ]
    assert alone == reference[:8]


def test_a_cold_and_a_warm_prefix_cache_give_the_same_bits(lab, policy, reference):
    cold = lab.generate(model=policy[0], requests=burst(), name="cached")
    warm = lab.generate(model=policy[0], requests=burst(), name="cached")
    assert cold == reference
    assert warm == reference


def test_a_prompt_computed_in_pieces_has_the_same_bits(lab, policy, reference):
    pieces = lab.generate(model=policy[0], requests=burst(), max_num_batched_tokens=64)
    assert pieces == reference


def test_preempted_requests_have_the_same_bits(lab, policy, reference):
    generations, preemptions = lab.preemptions(
        model=policy[0], requests=burst(), engine_args={"num_gpu_blocks_override": 14}, enable_prefix_caching=False
    )
    assert preemptions > 0
    assert generations == reference


def test_long_prompts_in_pieces_and_from_the_cache_have_the_same_bits(lab, policy):
    requests = burst(count=5, max_prompt=900, max_new_tokens=3)
    requests = [dataclasses.replace(r, prompt_token_ids=(r.prompt_token_ids * 300)[:900]) for r in requests]
    whole = lab.generate(model=policy[0], requests=requests, max_model_len=1024, enable_prefix_caching=False)
    options = {"max_model_len": 1024, "max_num_batched_tokens": 200, "max_num_seqs": 8}
    for _ in ("cold", "warm"):
        assert lab.generate(model=policy[0], requests=requests, **options) == whole


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor")
def test_bfloat16_holds_too(lab, tmp_path_factory):
    path = tmp_path_factory.mktemp("bf16")
    make_policy(path, dtype="bfloat16")
    options = {"model": str(path), "dtype": "bfloat16", "enable_prefix_caching": False}
    at_once = lab.generate(requests=burst(20), **options)
    assert lab.generate(requests=burst(20), max_num_seqs=3, **options) == at_once


def test_stock_vllm_moves_bits_with_the_batch(stock_lab, policy):
    """The negative control: without the kernels the same comparison fails."""
    options = {"model": policy[0], "enable_prefix_caching": False}
    many = stock_lab.generate(requests=burst(), max_num_seqs=64, **options)
    one = stock_lab.generate(requests=burst(), max_num_seqs=1, **options)
    if many == one:
        pytest.skip(f"stock vLLM happens to be batch-invariant on {torch.backends.cpu.get_cpu_capability()}")
    assert [g.key for g in many] == [g.key for g in one]


def test_seeds_work_without_full_determinism(stock_lab, policy):
    first = stock_lab.generate(model=policy[0], requests=burst(), max_num_batched_tokens=64)
    again = stock_lab.generate(model=policy[0], requests=burst(), max_num_batched_tokens=64, name="another engine")
    assert [g.token_ids for g in first] == [g.token_ids for g in again]


def test_another_seed_samples_other_tokens(lab, policy, reference):
    other = [dataclasses.replace(r, seed=r.seed ^ 1) for r in burst()]
    generations = lab.generate(model=policy[0], requests=other, max_num_seqs=64, enable_prefix_caching=False)
    changed = [a.token_ids != b.token_ids for a, b in zip(generations, reference, strict=True)]
    greedy = [r.sampling.temperature == 0 for r in other]
    assert changed == [not g for g in greedy]


def test_an_unseeded_request_is_refused(lab, policy):
    with pytest.raises(WorkerError, match="has no seed"):
        lab.unseeded(model=policy[0])


def test_kernels_are_installed_once_and_not_with_other_settings(lab):
    assert lab.install(linear="auto", full_determinism=True)["linear"] == "auto"
    with pytest.raises(WorkerError, match="processes of their own"):
        lab.install(linear="block16", full_determinism=True)


@pytest.mark.parametrize("value", [None, "1"])
def test_split_attention_is_refused(monkeypatch, value):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    _check_split_kv()
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV")
    if value is not None:
        monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", value)
    with pytest.raises(BatchInvarianceError, match="VLLM_CPU_ATTN_SPLIT_KV"):
        _check_split_kv()


@pytest.mark.parametrize(
    ("quantization", "use_mla", "reason"), [("awq", False, "awq"), (None, True, "latent attention")]
)
def test_models_beyond_the_replaced_layers_are_refused(quantization, use_mla, reason):
    check_model(SimpleNamespace(model="path", quantization=None, use_mla=False))
    with pytest.raises(BatchInvarianceError, match=reason):
        check_model(SimpleNamespace(model="path", quantization=quantization, use_mla=use_mla))


def test_another_vllm_is_refused_by_name():
    _check_version("0.32.0+cpu", full_determinism=True)
    _check_version("0.33.0", full_determinism=False)
    with pytest.raises(BatchInvarianceError, match=r"0\.32\.0.*0\.33\.0"):
        _check_version("0.33.0", full_determinism=True)


def test_an_unknown_linear_is_refused():
    with pytest.raises(ValueError, match="pad2"):
        install(linear="pad2")


@pytest.mark.parametrize("make", [padded_linear, blocked_linear])
def test_rows_in_a_batch_of_one_are_rows(make):
    """GPT-NeoX's, for one, which vLLM runs through transformers' code."""
    weight = torch.randn(5, 8)
    linear = flat_rows(make(lambda x, bias: torch.nn.functional.linear(x, weight, bias)))
    for shape in ((1, 7, 8), (1, 1, 8), (2, 3, 8), (4, 8)):
        x = torch.randn(shape)
        result = linear(x, weight, None)
        assert result.shape == (*shape[:-1], 5)
        assert torch.equal(
            result.reshape(-1, 5),
            make(lambda x, bias: torch.nn.functional.linear(x, weight, bias))(x.reshape(-1, 8), weight, None),
        )


def test_noise_is_a_function_of_seed_and_position_and_rewinds():
    generator = CounterGenerator()
    generator.manual_seed(2**63 - 5)
    first = [generator.next_seed() for _ in range(4)]
    generator.set_offset(generator.get_offset() - 4)
    assert generator.next_seed() == first[3]
    generator.set_offset(0)
    assert [generator.next_seed() for _ in range(4)] == first
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**62 for seed in first)


def test_neighbouring_seeds_share_no_noise():
    drawn = set()
    for seed in range(200):
        generator = CounterGenerator()
        generator.manual_seed(seed)
        drawn.update(generator.next_seed() for _ in range(50))
    assert len(drawn) == 200 * 50


def counting(weight: torch.Tensor, rows: list[int]):
    def matmul(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(x.shape[0])
        return torch.nn.functional.linear(x, weight, bias)

    return matmul


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS + 5])
def test_no_padded_call_has_one_row_and_every_blocked_call_has_sixteen(count):
    weight, bias = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x = torch.randn(count, 3, dtype=torch.float64)
    expected = torch.nn.functional.linear(x, weight, bias)
    padded_rows: list[int] = []
    torch.testing.assert_close(padded_linear(counting(weight, padded_rows))(x, weight, bias), expected)
    assert all(rows == 0 or 2 <= rows <= MAX_ROWS for rows in padded_rows)
    blocked_rows: list[int] = []
    torch.testing.assert_close(blocked_linear(counting(weight, blocked_rows))(x, weight, bias), expected)
    assert all(rows in (0, BLOCK_ROWS) for rows in blocked_rows)


def exact(weight: torch.Tensor):
    """A product that is computed row by row, so it can depend on nothing else."""
    return lambda x, bias: (x[:, None, :] * weight).sum(-1)


def moves_at_33_rows(weight: torch.Tensor):
    return lambda x, bias: exact(weight)(x, bias) + (1e-6 if x.shape[0] == 33 else 0)


def moves_the_last_row(weight: torch.Tensor):
    def matmul(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = exact(weight)(x, bias)
        out[-1:] += 1e-6
        return out

    return matmul


def sums_backwards_in_large_batches(weight: torch.Tensor):
    """Another order of summation in float32, rounded to the dtype at the end: what bfloat16 kernels do."""

    def matmul(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        terms = x[:, None, :].float() * weight.float()
        total = torch.zeros(terms.shape[:-1])
        for term in (terms.flip(-1) if x.shape[0] > 8 else terms).unbind(-1):
            total = total + term
        return total.to(x.dtype)

    return matmul


@pytest.mark.parametrize(
    ("matmul", "padded", "blocked"),
    [
        (exact, True, True),
        (moves_at_33_rows, False, True),
        (moves_the_last_row, False, False),
        (sums_backwards_in_large_batches, False, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_catches_a_product_that_depends_on_the_batch(matmul, padded, blocked, dtype):
    assert is_row_invariant(lambda weight: padded_linear(matmul(weight)), (8, 33), dtype) == padded
    assert is_row_invariant(lambda weight: blocked_linear(matmul(weight)), (8, 33), dtype) == blocked


@dataclasses.dataclass
class Metadata:
    num_reqs: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    max_query_len: int


def test_each_query_token_becomes_a_request_that_ends_there():
    """Two requests: three new tokens after a context of 4, and one new token after a context of 9."""
    metadata = Metadata(
        num_reqs=2,
        num_actual_tokens=4,
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([7, 10], dtype=torch.int32),
        block_table_tensor=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        max_query_len=3,
    )
    tokens = _token_by_token(metadata)
    assert tokens.seq_lens.tolist() == [5, 6, 7, 10]
    assert tokens.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert tokens.block_table_tensor.tolist() == [[1, 2], [1, 2], [1, 2], [3, 4]]
    assert (tokens.num_reqs, tokens.max_query_len) == (4, 1)
    assert tokens.seq_lens.dtype == torch.int32
