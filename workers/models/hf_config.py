"""A checkpoint's config as training needs it: the model that the engine samples from, and nothing else.

Two things would make the trainer's model another one without a word: what is random in training mode (dropout, skipped layers, noise in
a router), and features of attention that an implementation leaves out because its function has no argument for them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.checkpoint_files import PretrainedError

logger = logging.getLogger(__name__)

_RANDOM = re.compile(
    r"dropout|pdrop$|layer_?drop$|drop_?path|(^|_)drop_rate$|drop_connect|drop_mlp_rate|jitter|stochastic_depth"
)
"""Settings that are a probability or a size of something random, in transformers 5.19's configs; numbers only."""

_SOFTCAP = re.compile(r"^attn_.*soft_?cap|^attn_logit_cap")
"""Settings of a bound on attention's logits. transformers passes it on, and `sdpa` has no argument that would take it."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def load_config(path: str | Path, attention: str, trust_remote_code: bool = False) -> Any:
    """The config, with nothing random, no KV cache, float32 master weights, and an attention that computes what the model needs.

    Args:
        attention: `fsdp.attention`; `sdpa` becomes `eager`, with a warning, for a model that needs more than `sdpa` computes.

    Raises:
        PretrainedError: no config.json; a mixture of experts.
    """
    from transformers import AutoConfig

    if not (Path(path) / "config.json").is_file():
        raise PretrainedError(f"{str(path)!r} has no config.json; give the path of a Hugging Face checkpoint")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    _refuse_experts(config, path)
    # The setter sets nested configs too.
    config._attn_implementation = attention_for(config, attention, path)
    for part in _parts(config):
        for name, value in sorted(vars(part).items()):
            if _RANDOM.search(name) and _is_positive(value):
                setattr(part, name, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    config.use_cache = False
    config.dtype = torch.float32
    return config


def attention_for(config: Any, asked: str, path: str | Path) -> str:
    """The implementation to use: `asked`, or `eager` where `sdpa` would leave something out (said in a warning)."""
    if asked != "sdpa":
        return asked
    missing = [
        f"{name}={value}"
        for part in _parts(config)
        for name, value in vars(part).items()
        if _SOFTCAP.search(name) and value
    ]
    if not missing and not _supports_sdpa(config):
        missing = ["attention sinks or another feature for which transformers has no sdpa"]
    if not missing:
        return asked
    logger.warning(
        "%s needs %s, which sdpa does not compute, so the trainer uses eager attention; set fsdp.attention=eager to silence this",
        path,
        " and ".join(missing),
    )
    return "eager"


def switch_off_randomness(model: nn.Module) -> None:
    """Evaluation mode for every module: what a model does in training only is off, wherever it came from. And dropouts have p = 0, for
    the layers that go back to training mode because transformers checkpoints activations only there."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def refuse_randomness(model: nn.Module) -> None:
    """Insist that no module still has a rate of dropping or a size of noise above 0.

    Raises:
        PretrainedError: names them; the model's own code did not take them from its config.
    """
    left = [
        f"{type(module).__name__} {where or '(root)'}: {name}={value}"
        for where, module in model.named_modules()
        for name, value in vars(module).items()
        if _RANDOM.search(name) and _is_positive(value)
    ]
    if left:
        raise PretrainedError(
            f"{type(model).__name__} draws random numbers in training, and they can't be switched off in its config: "
            f"{'; '.join(left[:5])}. Set them to 0 in the model's code"
        )


def _parts(config: Any) -> Iterator[Any]:
    """The config and those inside it."""
    from transformers import PretrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _refuse_experts(config: Any, path: str | Path) -> None:
    for part in _parts(config):
        for name in _EXPERTS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > 1:
                raise PretrainedError(
                    f"{path} is a mixture of experts ({part.model_type}, {name}={count}): transformers packs the experts' weights into "
                    "other tensors than the files and the engines have, and nothing here unpacks them. docs/models.md lists what works"
                )


def _supports_sdpa(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # the code comes with the checkpoint; transformers will ask it
        return True
    return bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", True))


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
