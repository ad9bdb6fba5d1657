"""Low-rank adapters (Hu et al. 2021) through `peft`: added before sharding, merged for export, switched off for the reference.

A layer `q_proj` with an adapter has the parameters `q_proj.base_layer.weight` (frozen), `q_proj.lora_A.default.weight`
[rank, in] and `q_proj.lora_B.default.weight` [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from configs.schema import LoraConfig
from determinism.seeds import derive_seed, torch_generator

_BASE, _A, _B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(network: nn.Module, lora: LoraConfig, seed: int, role: str) -> dict[str, Tensor]:
    """Freeze `network` (on the meta device) and put adapters around its target layers.

    Args:
        seed: the run's; each adapter's A is drawn from (seed, role, name), whatever the sharding.

    Returns:
        The adapters' first values, whole, by parameter name: A is uniform in +-1/sqrt(in) as in `peft`, B is zero, so that
        training starts from the base model.

    Raises:
        ValueError: a target that names no layer, or a layer that is not linear or shares its weight.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    _check_targets(network, lora.target_modules)
    settings = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(settings, network, low_cpu_mem_usage=True)
    initial: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if name.endswith(_A):
            generator = torch_generator(derive_seed(seed, "lora", role, name))
            bound = 1 / math.sqrt(parameter.shape[1])
            initial[name] = (torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound
        elif name.endswith(_B):
            initial[name] = torch.zeros(parameter.shape)
    return initial


def base_name(name: str) -> str:
    """A parameter's name without the adapter's wrapping.

    Example:
        >>> base_name("model.layers.0.self_attn.q_proj.base_layer.weight")
        'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(".base_layer.", ".")


def merged(weights: Iterable[tuple[str, Tensor]], lora: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of a network with adapters -> those of the plain network: W + (alpha / rank) B A, in float32."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        part = next((part for part in (_BASE, _A, _B) if name.endswith(part)), None)
        if part is None:
            yield base_name(name), tensor
            continue
        layer = name.removesuffix(part)
        parts = waiting.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 3:
            del waiting[layer]
            yield f"{layer}.weight", parts[_BASE] + (parts[_B] @ parts[_A]) * (lora.alpha / lora.rank)
    assert not waiting, f"adapters without a counterpart: {sorted(waiting)}"


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[nn.Module]:
    """The base model, for the reference."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    # `enable_adapters(False)` would also stop the adapters' gradients, on parameters that FSDP2 has sharded.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield network
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _check_targets(network: nn.Module, targets: Iterable[str]) -> None:
    uses: dict[int, int] = {}
    for _, parameter in network.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for target in targets:
        layers = {name: m for name, m in network.named_modules() if name == target or name.endswith(f".{target}")}
        if not layers:
            raise ValueError(f"lora.target_modules: {target!r} names no layer of {type(network).__name__}")
        for name, layer in layers.items():
            if not isinstance(layer, nn.Linear):
                raise ValueError(f"lora.target_modules: {name} is a {type(layer).__name__}, not a linear layer")
            if uses[id(layer.weight)] > 1:
                raise ValueError(f"lora.target_modules: {name} shares its weight with another layer; leave it out")
