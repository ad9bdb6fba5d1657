"""A tiny random checkpoint of each family of docs/models.md; layers that drop things in training are set to drop a lot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
WINDOW = 8

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {**GROUPED, "attention_dropout": 0.5},
    "Mistral": {**GROUPED, "sliding_window": WINDOW, "attention_dropout": 0.5},
    "Qwen2": {**GROUPED, "attention_dropout": 0.5},
    "Qwen3": {**HEADS, "attention_dropout": 0.5},
    "Gemma": {**HEADS, "attention_dropout": 0.5},
    "Gemma2": {
        **HEADS,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "attention_dropout": 0.5,
    },
    "Gemma3Text": {**HEADS, "sliding_window": WINDOW, "attention_dropout": 0.5},
    "Phi": {**GROUPED, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5},
    "Phi3": {**GROUPED, "resid_pdrop": 0.5, "attention_dropout": 0.5},
    "SmolLM3": {**GROUPED, "attention_dropout": 0.5},
    "Olmo2": {**GROUPED, "attention_dropout": 0.5},
    "Granite": {**GROUPED, "attention_dropout": 0.5},
    "Starcoder2": {**GROUPED, "residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5},
    "StableLm": {**GROUPED, "hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Cohere": {**GROUPED, "attention_dropout": 0.5},
    "GPTNeoX": {**SIZES, "hidden_dropout": 0.5, "attention_dropout": 0.5},
    "GPT2": {
        **{
            "vocab_size": 101,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        **{"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    },
    "OPT": {
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        **{"ffn_dim": 96, "word_embed_proj_dim": 64, "layerdrop": 0.5, "dropout": 0.5, "attention_dropout": 0.5},
    },
}


def save_family(path: Path, family: str, **changes: Any) -> str:
    """A random causal language model whose logits are far from uniform."""
    import transformers

    name = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, name)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)
    model.save_pretrained(path)
    return str(path)
