"""FSDP2 around a model, so that the number of ranks changes no bit (level D4).

    empty model (meta) --fully_shard--> this rank's rows, read from the checkpoint --> forward/backward of one leaf
    gradients of a leaf --TreeReduceScatter--> summed over ranks as a balanced tree, rank order, in float32

The sum of a mini-batch over leaves is then the same balanced tree for 1, 2 or 4 ranks: its lowest levels are taken
across ranks here, the higher ones across slots by `workers/models/optim.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from configs.schema import FsdpConfig
from determinism.reduction import TreeReduceScatter, require_power_of_two
from workers.models.batch import TokenBatch
from workers.models.pretrained import shared_names

RowReader = Callable[[str, int, int], Tensor]
"""(parameter name, first row, end row) -> these rows of the full parameter."""


def rank_mesh(num_ranks: int, device_type: str) -> DeviceMesh:
    """A one-dimensional mesh over all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised, or its world size is not `num_ranks`. Sharding silently over
            another number of ranks would train independent copies.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; a trainer rank is built inside a process group")
    if dist.get_world_size() != num_ranks:
        raise RuntimeError(
            f"the process group has {dist.get_world_size()} ranks but launcher.num_ranks is {num_ranks}; "
            "start as many processes as launcher.num_ranks says"
        )
    return init_device_mesh(device_type, (num_ranks,))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, in order: what transformers says must not be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (`_no_split_modules`), so it cannot be sharded by layer"
        )
    return layers


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    fsdp: FsdpConfig,
    full_determinism: bool,
    fp32_modules: tuple[nn.Module, ...] = (),
) -> None:
    """Apply `fully_shard` to each decoder layer, to `fp32_modules` (computed in float32 whatever the precision) and to the root.

    Gradients are sums over ranks, never means: a leaf's loss is a share of the whole mini-batch already. Parameters stay
    gathered until `release` unless `fsdp.reshard_after_forward`.

    Raises:
        ValueError: an unknown precision, or under full determinism a number of ranks that is not a power of two.
    """
    if full_determinism:
        require_power_of_two(mesh.size(), "launcher.num_ranks")
    if fsdp.precision not in ("fp32", "bf16"):
        raise ValueError(f"fsdp.precision is {fsdp.precision!r}; it must be 'fp32' or 'bf16'")
    bf16 = fsdp.precision == "bf16"
    inner = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    outer = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        if bf16
        else MixedPrecisionPolicy()
    )
    if fsdp.gradient_checkpointing:
        _checkpoint_activations(model)
    resharding: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": fsdp.reshard_after_forward}
    for layer in decoder_layers(model):
        fully_shard(layer, mp_policy=inner, **resharding)
    if bf16:
        for module in fp32_modules:
            fully_shard(module, mp_policy=MixedPrecisionPolicy(), **resharding)
    fully_shard(model, mp_policy=outer, **resharding)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; without this the factor 1.0 is asked of it.
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(fsdp.reshard_after_forward, recurse=False)
        # Every rank must reduce the same parameters, also those that a leaf does not reach.
        module.set_reduce_scatter_unused_params(True)
        if full_determinism:
            module.set_custom_reduce_scatter(TreeReduceScatter())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that own a parameter group."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def release(model: nn.Module) -> None:
    """Free the gathered parameters; needed before the shards change."""
    for module in fsdp_modules(model):
        module.reshard()


def _checkpoint_activations(model: nn.Module) -> None:
    for module in model.modules():
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if enable is not None:
            # No layer draws random numbers, so there is no generator state to keep for the second forward.
            enable(gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False})
            for part in model.modules():
                # transformers checkpoints only in training mode. The flag of these modules alone: what is inside them stays in
                # evaluation mode, and their own dropouts are 0 (`hf_config`).
                if getattr(part, "gradient_checkpointing", False):
                    part.training = True
            return
    raise ValueError(f"{type(model).__name__} has no gradient checkpointing; set fsdp.gradient_checkpointing=false")


def row_range(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of dimension 0 that `rank` holds: equal chunks, rounded up, so the last ranks may hold fewer or none.

    Example:
        >>> [row_range(5, rank, 4) for rank in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    chunk = -(-rows // ranks)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def materialise(model: nn.Module, device: torch.device, read: RowReader) -> None:
    """Give each meta parameter of a sharded model its storage: this rank's rows from `read`, in float32.

    Buffers are computed already and only move to the device.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, nn.Parameter] = {}
    for names in shared_names(model):
        empty = parameters[names[0]]
        assert isinstance(empty, DTensor)
        mesh = empty.device_mesh
        start, stop = row_range(empty.shape[0], mesh.get_local_rank(), mesh.size())
        rows = read(names[0], start, stop).to(device=device, dtype=torch.float32, copy=True).contiguous()
        filled = nn.Parameter(as_sharded(rows, empty), requires_grad=empty.requires_grad)
        # One object for all names keeps tied parameters tied.
        state.update(dict.fromkeys(names, filled))
    result = model.load_state_dict(state, strict=False, assign=True)
    assert not result.unexpected_keys, result.unexpected_keys
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def as_sharded(local: Tensor, like: Tensor) -> DTensor:
    """A DTensor of this rank's rows, placed as `like` is."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows, sharing storage, without autograd."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter whole, on the CPU, under its name (tied ones once), in the model's order; copies, which training leaves alone.

    Collective: every rank must exhaust it.
    """
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, whole.to("cpu", copy=True, memory_format=torch.contiguous_format)


def most_across_ranks(counts: list[int], device: torch.device) -> list[int]:
    """Elementwise maximum over ranks; collective.

    A forward pass gathers parameters from all ranks, so all must make the same number of them.
    """
    result = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.tolist()


def filler_leaf() -> TokenBatch:
    """A leaf without trained tokens, for a rank that has fewer leaves than another; its gradient is zero."""
    return TokenBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        lengths=torch.tensor([2]),
        mask=torch.zeros(1, 2, dtype=torch.bool),
    )
