"""Engine and trainer compute one model, also for families with features or names of their own; also after a weight update."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.types import Generation, GenerationRequest, SampleKey, Sampling
from tests.workers.models._families import save_family
from trainer.first_gap import FLOAT32_GAP

HEADS = {"num_attention_heads": 2, "head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma2": {**HEADS, "num_key_value_heads": 1, "query_pre_attn_scalar": 32},
    "GPTNeoX": {"num_attention_heads": 2},
    "OPT": {"num_attention_heads": 2},
}
"""Head sizes that vLLM's CPU attention has."""

REQUESTS = [
    GenerationRequest(
        SampleKey(i, 0),
        tuple(range(3 + i, 9 + i)),
        seed=i,
        sampling=Sampling(max_new_tokens=16, temperature=1.0),
        priority=i,
    )
    for i in range(6)
]


def gap(path: str, generations: list[Generation], attention: str = "eager") -> float:
    """Mean |log pi_transformers - log pi_engine| over the sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
    differences = []
    for request, generation in zip(REQUESTS, generations, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *generation.token_ids]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        differences.append((chosen - torch.tensor(generation.logprobs)).abs())
    return float(torch.cat(differences).mean())


@pytest.mark.parametrize("family", SHAPES)
def test_the_engine_samples_from_the_model_that_is_trained(lab, tmp_path, family):
    path = save_family(tmp_path / "old", family, **SHAPES[family])
    assert gap(path, lab.generate(model=path, requests=REQUESTS, max_model_len=64)) < 1e-5
    # New weights, under the names that they have in the files.
    new = {name: value * 1.25 for name, value in load_file(Path(path) / "model.safetensors").items()}
    lab.load(model=path, tensors=new, version=1, max_model_len=64)
    updated = lab.generate(model=path, requests=REQUESTS, max_model_len=64)
    assert gap(path, updated) > FLOAT32_GAP
    shutil.copytree(path, tmp_path / "new")
    save_file(new, tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    assert gap(str(tmp_path / "new"), updated) < 1e-5


def test_a_bound_that_sdpa_leaves_out_is_more_than_the_first_update_allows(lab, tmp_path):
    path = save_family(tmp_path / "gemma", "Gemma2", **SHAPES["Gemma2"])
    generations = lab.generate(model=path, requests=REQUESTS, max_model_len=64)
    assert gap(path, generations, "sdpa") > FLOAT32_GAP
