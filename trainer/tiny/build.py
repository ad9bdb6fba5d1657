"""Builds one recipe's policy and reward model; a process of its own (`python -m trainer.tiny.build RECIPE DIR`).

A separate interpreter means that nothing of the caller's state (threads, generators, default device or dtype, an engine that
has patched torch) can reach the bits, and nothing of the builder's state reaches the caller.

Every random draw comes from generators seeded by the recipe; the examples come from reasoning-gym by row number.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trainer.tiny.recipe import (
    RECIPES,
    Recipe,
    Shape,
    Stage,
    builder_rows,
    careless_answer,
    shared_questions,
    task_rows,
)
from trainer.tiny.tokenizer import build_tokenizer

MATRIX_LR_FACTOR = 10.0
"""Muon's rate over AdamW's. Muon needs a third of the steps that AdamW needs to learn the carries."""
IGNORED = -100
Say = Callable[[str], None]


def build(recipe: Recipe, out: Path, say: Say) -> None:
    """Trains both models and writes `out/policy`, `out/reward` and `out/build.json` (held-out figures, no times).

    Raises:
        ValueError: the task's training and held-out questions overlap.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if shared := shared_questions(recipe.task):
        raise ValueError(
            f"recipe {recipe.name}: {len(shared)} held-out questions are also training questions: {shared[:3]}"
        )
    tokenizer = build_tokenizer(recipe.shape.max_positions)
    policy = new_policy(recipe.shape, tokenizer, torch.Generator().manual_seed(recipe.seed))
    say(f"{recipe.name}: {sum(p.numel() for p in policy.parameters()):,} parameters, one thread")

    learn_policy(policy, tokenizer, recipe, recipe.learn, first_row=0, say=say, title="1/3 policy learns sums")
    reward_model = new_reward_model(policy, tokenizer)
    skip = recipe.learn.steps * recipe.learn.batch_size
    learn_policy(policy, tokenizer, recipe, recipe.forget, first_row=skip, say=say, title="2/3 policy turns careless")
    learn_reward(reward_model, tokenizer, recipe, say, title="3/3 reward model")

    rows = task_rows(recipe.task, recipe.task.heldout_seed, recipe.task.heldout_size)
    figures = {
        "policy_greedy_accuracy": greedy_accuracy(policy, tokenizer, rows),
        "reward_pair_accuracy": pair_accuracy(
            reward_model, tokenizer, preference_pairs(rows, random.Random(recipe.seed))
        ),
    }
    say(f"{recipe.name}: held out: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    save(policy, tokenizer, out / "policy")
    save(reward_model, tokenizer, out / "reward")
    (out / "build.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# --- models ---------------------------------------------------------------------------------------------------------


def new_policy(shape: Shape, tokenizer: Any, generator: torch.Generator) -> Any:
    """A fresh Qwen3 causal LM in float32: matrices from N(0, 0.02), norms at one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def new_reward_model(policy: Any, tokenizer: Any) -> Any:
    """A one-label sequence classifier with the policy's trunk and a zero head; reads the last token that is not padding."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_dict({**policy.config.to_dict(), "tie_word_embeddings": False})
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    model = Qwen3ForSequenceClassification(config)
    model.model.load_state_dict(policy.model.state_dict())
    with torch.no_grad():
        model.score.weight.zero_()
    return model


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Writes a checkpoint that transformers and vLLM load by directory name."""
    if hasattr(model, "generation_config"):
        # A sequence classifier does not generate; a policy says where it stops and inherits no sampling setting.
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


# --- data -----------------------------------------------------------------------------------------------------------


def demonstration(row: dict[str, Any], stage: Stage, rng: random.Random) -> str:
    """The answer that the demonstrator of this stage gives to a row."""
    draw = rng.random()
    if draw < stage.careless:
        return careless_answer(row["question"])
    return slip(row["answer"], rng) if draw < stage.careless + stage.slips else row["answer"]


def slip(answer: str, rng: random.Random) -> str:
    """The answer with one digit changed."""
    place = rng.randrange(len(answer))
    digit = rng.choice([d for d in "0123456789" if d != answer[place]])
    return answer[:place] + digit + answer[place + 1 :]


def wrong_answer(row: dict[str, Any], rng: random.Random) -> str:
    """A rejected answer: forgotten carries, a near miss, a changed digit, a digit too many or too few, or noise."""
    right = row["answer"]
    value = int(right)
    candidates = [
        careless_answer(row["question"]),
        str(value + rng.choice([-100, -10, -1, 1, 10, 100])),
        slip(right, rng),
        right + rng.choice("0123456789"),
        right[:-1],
        "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 8))),
    ]
    order = rng.sample(range(len(candidates)), k=len(candidates))
    # The careless answer is what the policy will really say, so it comes first in half of the pairs.
    if rng.random() < 0.5:
        order.insert(0, 0)
    return next(candidates[i] for i in order if candidates[i] != right)


def preference_pairs(rows: Sequence[dict[str, Any]], rng: random.Random) -> list[tuple[str, str, str]]:
    """(question, chosen answer, rejected answer) per row."""
    return [(row["question"], row["answer"], wrong_answer(row, rng)) for row in rows]


def encode(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Conversations as the chat template renders them, right-padded.

    Returns:
        ids [n, length] int64, and labels [n, length] int64: the answer's ids including <eos>, else IGNORED.
    """
    prompts, texts = [], []
    for question, answer in pairs:
        user = {"role": "user", "content": question}
        prompts.append(tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True))
        texts.append(tokenizer.apply_chat_template([user, {"role": "assistant", "content": answer}], tokenize=False))
    ids = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, IGNORED)
    for row, prompt in enumerate(tokenizer(prompts)["input_ids"]):
        labels[row, : len(prompt)] = IGNORED
    return ids, labels


# --- training -------------------------------------------------------------------------------------------------------


def learn_policy(
    policy: Any, tokenizer: Any, recipe: Recipe, stage: Stage, first_row: int, say: Say, title: str
) -> None:
    """Supervised fine-tuning on the answers of `stage`'s demonstrator; loss over answer tokens only."""
    rng = random.Random(f"{recipe.seed}/{title}")
    rows = builder_rows(recipe.task, first_row)

    def loss_of_batch() -> torch.Tensor:
        batch = list(islice(rows, stage.batch_size))
        ids, labels = encode([(row["question"], demonstration(row, stage, rng)) for row in batch], tokenizer)
        # Right padding needs no attention mask in a causal model: nothing that is scored sees it.
        hidden = policy.model(ids).last_hidden_state[:, :-1]
        wanted = labels[:, 1:]
        scored = wanted != IGNORED
        return F.cross_entropy(policy.lm_head(hidden[scored]), wanted[scored])

    optimize(policy, stage, loss_of_batch, say, title)


def learn_reward(model: Any, tokenizer: Any, recipe: Recipe, say: Say, title: str) -> None:
    """Bradley-Terry with label smoothing (Christiano et al. 2017, section 2.2.3), logits centred at zero."""
    rng = random.Random(f"{recipe.seed}/{title}")
    stage = recipe.reward
    rows = builder_rows(recipe.task)

    def loss_of_batch() -> torch.Tensor:
        pairs = preference_pairs(list(islice(rows, stage.batch_size)), rng)
        better, worse = pair_logits(model, tokenizer, pairs)
        margin, smoothing = better - worse, recipe.label_smoothing
        loss = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        return (loss + recipe.centring * (better + worse).square()).mean()

    optimize(model, stage, loss_of_batch, say, title)


def pair_logits(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw logits [n] of the chosen and of the rejected answers, each read at the conversation's <eos>."""
    chosen = [(question, answer) for question, answer, _ in pairs]
    rejected = [(question, answer) for question, _, answer in pairs]
    ids, _ = encode(chosen + rejected, tokenizer)
    last = (ids != tokenizer.pad_token_id).sum(1) - 1
    hidden = model.model(ids).last_hidden_state
    logits = model.score(hidden[torch.arange(len(ids)), last]).squeeze(-1)
    return logits[: len(pairs)], logits[len(pairs) :]


def optimize(model: Any, stage: Stage, loss_of_batch: Callable[[], torch.Tensor], say: Say, title: str) -> None:
    """`stage.steps` updates: Muon for the trunk's matrices, AdamW for the rest; gradients clipped at norm 1."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "layers" in name
        (matrices if inner else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=stage.lr * MATRIX_LR_FACTOR, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, stage.steps)) for o in optimizers]
    parent = os.getppid()
    for step in range(1, stage.steps + 1):
        if os.getppid() != parent:
            raise SystemExit("the process that asked for this build is gone")
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if step % max(1, stage.steps // 5) == 0:
            say(f"  {title}: step {step}/{stage.steps}, loss {loss.item():.3f}")


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth (at most 30 steps), linear decay to zero over the last four tenths."""
    warmup = max(1, min(30, steps // 10))
    return min(1.0, (step + 1) / warmup, (steps - step) / max(1, steps * 0.4))


# --- figures --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy_accuracy(policy: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> float:
    """Share of rows whose greedy answer is right.

    Greedy decoding gives the right answer exactly when each of its tokens is the most likely one after those before it,
    so one forward pass over the right answers is enough.
    """
    ids, labels = encode([(row["question"], row["answer"]) for row in rows], tokenizer)
    best = policy(ids).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return ((best == wanted) | (wanted == IGNORED)).all(1).float().mean().item()


@torch.no_grad()
def pair_accuracy(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str, str]]) -> float:
    """Share of pairs whose chosen answer gets the higher logit."""
    better, worse = pair_logits(model, tokenizer, pairs)
    return (better > worse).float().mean().item()


def main(argv: Sequence[str]) -> None:
    """Entry of the builder's process: recipe name and an existing, empty directory."""
    name, out = argv
    build(RECIPES[name], Path(out), say=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
