"""README.md of an exported model: what it was trained from, how, and what came of it, in the form that model hubs read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.checkpoint import Checkpoint

ROWS = 12
"""Most steps of the curve that are shown."""
COLUMNS = {
    "critic/score/mean": "reward",
    "val/score/mean": "validation reward",
    "response_length/mean": "response tokens",
    "actor/ppo_kl": "KL of the updates",
    "actor/ref_kl": "KL to the reference",
}
"""Metrics of the curve, with their headings."""

CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [exactrl, reinforcement-learning, {algorithm_tag}]
---

# {name}, step {step}

{what} trained with exactrl {version}.

| | |
|---|---|
| base model | {base} |
| algorithm | {algorithm} |
| rewards | {rewards} |
| training steps | {step} of {total}, {prompts} prompts x {samples} samples a step |
| full determinism | {determinism} |
| digest of the trained weights | `{digest}` (`actor_weights` of step {step} in the run's ledger) |
| code | {code} |

## Reward curve

{curve}

## How to load it

```python
{loading}
```

The weights are float32, as they were trained; another `dtype` rounds them.

## Configuration

```yaml
{config}```
"""

WHOLE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("this/folder", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("this/folder")

from vllm import LLM
engine = LLM("this/folder", dtype="float32")"""

ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained("the/base/model", dtype="float32")
model = PeftModel.from_pretrained(base, "this/folder")

from vllm import LLM
from vllm.lora.request import LoRARequest
engine = LLM("the/base/model", dtype="float32", enable_lora=True, max_lora_rank={rank})
engine.generate(prompts, lora_request=LoRARequest("trained", 1, "this/folder"))"""


def model_card(run: Path, checkpoint: Checkpoint, config: Config, digest: str, adapter: bool) -> str:
    """The card as Markdown.

    Args:
        run: the run directory; its metrics and its manifest are read.
        digest: digest of the trained weights.
        adapter: whether the folder holds an adapter and not a whole model.
    """
    from configs.compose import to_yaml

    algorithm, lora = config.algorithm, config.actor.lora
    kind = "LoRA adapter" if adapter else "Language model (LoRA adapters merged)" if lora.rank else "Language model"
    return CARD.format(
        library="peft" if adapter else "transformers",
        algorithm_tag=algorithm.advantage.name if algorithm.advantage.name.isidentifier() else "ppo",
        name=config.run.name,
        step=checkpoint.step,
        what=kind,
        version=_version(),
        base=_base(run, config),
        algorithm=f"{algorithm.advantage.name} advantages, {algorithm.policy_loss.name} loss, KL in the {algorithm.kl.placement}"
        + (f", LoRA of rank {lora.rank}" if lora.rank else ""),
        rewards=_rewards(config),
        total=config.trainer.total_steps,
        prompts=config.data.prompts_per_step,
        samples=config.rollout.sampling.n,
        determinism="on" if config.full_determinism else "off",
        digest=digest,
        code=_code(run),
        curve=curve(run / "metrics.jsonl", checkpoint.step),
        loading=ADAPTER.format(rank=lora.rank) if adapter else WHOLE,
        config=to_yaml(config),
    )


def curve(metrics: Path, last: int) -> str:
    """A table of the run's curve up to step `last`: the first and the last step, and evenly spaced ones between them."""
    from determinism.files import json_lines

    rows = [line.record for line in json_lines(metrics) if line.record.get("step", last + 1) <= last]
    if not rows:
        return "The run has no metrics."
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    chosen = (
        sorted({round(i * (len(rows) - 1) / max(ROWS - 1, 1)) for i in range(ROWS)})
        if len(rows) > ROWS
        else range(len(rows))
    )
    lines = [_row(["step", *(COLUMNS[name] for name in columns)]), _row(["---:"] * (len(columns) + 1))]
    lines += [_row([str(rows[i]["step"]), *(_number(rows[i].get(name)) for name in columns)]) for i in chosen]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: Any) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{value:.4g}"


def _base(run: Path, config: Config) -> str:
    digest = _manifest(run).get("data", {}).get("model/actor")
    return f"`{Path(config.model.path).name}`" + (f", content digest `{digest}`" if digest else "")


def _rewards(config: Config) -> str:
    names = [
        f"{function.name} (`{function.function}`, weight {function.weight:g})" for function in config.reward.functions
    ]
    if config.reward.model.path is not None:
        names.insert(0, f"reward model `{Path(config.reward.model.path).name}` (weight {config.reward.model.weight:g})")
    judge = config.reward.judge
    if judge.path is not None:
        names.append(f"judge `{Path(judge.path).name}` (weight {judge.weight:g})")
    return ", ".join(names)


def _code(run: Path) -> str:
    code = _manifest(run).get("code", {})
    commit = f", commit `{code['git_commit']}`" if code.get("git_commit") else ""
    return f"digest `{code['digest']}`{commit}" if "digest" in code else "not recorded"


def _manifest(run: Path) -> dict[str, Any]:
    from determinism.manifest import read_manifest

    path = run / "manifest.json"
    return read_manifest(path) if path.is_file() else {}


def _version() -> str:
    try:
        return version("exactrl")
    except PackageNotFoundError:
        return "(not installed)"
