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
"""Muon's rate over AdamW's. After 300 steps of one trial AdamW alone had learned 13% of the held-out sums, Muon 98%."""
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
    reward_model = new_reward_model(policy, tokenizer, recipe.reward_layers)
    skip = recipe.learn.steps * recipe.learn.batch_size
    learn_policy(policy, tokenizer, recipe, recipe.forget, first_row=skip, say=say, title="2/3 policy turns careless")
    learn_reward(reward_model, tokenizer, recipe, say, title="3/3 reward model")

    rows = task_rows(recipe.task, recipe.task.heldout_seed, recipe.task.heldout_size)
    figures = {
        "policy_greedy_accuracy": greedy_accuracy(policy, tokenizer, rows),
        "reward_pair_accuracy": pair_accuracy(
            reward_model, tokenizer, preferences(rows, 3, random.Random(recipe.seed))
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
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    draw_weights(model, generator)
    return model


def new_reward_model(policy: Any, tokenizer: Any, extra_layers: int) -> Any:
    """A one-label sequence classifier: the policy's trunk, frozen, under `extra_layers` new layers and a zero head.

    To judge an answer, its tokens must be compared with the ones the trunk expected, and the trunk's expectation is complete
    only after its last layer: one new layer to compare, one for <eos> to collect.
    """
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    layers = policy.config.num_hidden_layers + extra_layers
    config = Qwen3Config.from_dict(
        {
            **policy.config.to_dict(),
            "tie_word_embeddings": False,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        }
    )
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    model = Qwen3ForSequenceClassification(config)
    draw_weights(model, torch.Generator().manual_seed(layers))
    trunk = policy.model.state_dict()
    model.model.load_state_dict(trunk, strict=False)
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(name not in trunk or name == "norm.weight")
    return model


def draw_weights(model: Any, generator: torch.Generator) -> None:
    """Matrices from N(0, 0.02), norms at one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)


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
    """A rejected answer: mostly what is hard to tell from the right one, and a few that are plainly no answer."""
    right = row["answer"]
    value = int(right)
    while True:
        kind = rng.choices(("careless", "near", "slip", "longer", "shorter", "noise"), weights=(4, 4, 5, 1, 1, 1))[0]
        answer = {
            "careless": lambda: careless_answer(row["question"]),
            "near": lambda: str(abs(value + rng.choice([-100, -10, -2, -1, 1, 2, 10, 100]))),
            "slip": lambda: slip(right, rng),
            "longer": lambda: right + rng.choice("0123456789"),
            "shorter": lambda: right[:-1],
            "noise": lambda: "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 8))),
        }[kind]()
        if answer != right:
            return answer


def preferences(rows: Sequence[dict[str, Any]], rejected: int, rng: random.Random) -> list[tuple[str, str, list[str]]]:
    """(question, chosen answer, `rejected` wrong answers) per row."""
    return [(row["question"], row["answer"], [wrong_answer(row, rng) for _ in range(rejected)]) for row in rows]


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
        hidden = trunk_states(policy.model, ids)[:, :-1]
        wanted = labels[:, 1:]
        scored = wanted != IGNORED
        return F.cross_entropy(policy.lm_head(hidden[scored]), wanted[scored])

    optimize(policy, stage, loss_of_batch, say, title)


def learn_reward(model: Any, tokenizer: Any, recipe: Recipe, say: Say, title: str) -> None:
    """Bradley-Terry on pairs (Christiano et al. 2017, section 2.2.3), beside a judgement of every answer token.

    The pair decides only at <eos>. To learn sooner which token was wrong, the logit after each answer token is also trained
    to say whether the answer is right so far; this fixes the logits' zero too, which pairs leave open. Both have smoothed
    labels, so that a reward stays within about three of zero.
    """
    rng = random.Random(f"{recipe.seed}/{title}")
    stage, smoothing = recipe.reward, recipe.label_smoothing
    rows = builder_rows(recipe.task)

    def loss_of_batch() -> torch.Tensor:
        batch = preferences(list(islice(rows, stage.batch_size)), recipe.rejected, rng)
        answers = [(question, answer) for question, chosen, rejected in batch for answer in (chosen, *rejected)]
        models = [(question, chosen) for question, chosen, rejected in batch for _ in (chosen, *rejected)]
        ids, labels = encode(answers, tokenizer)
        logits = model.score(trunk_states(model.model, ids)).squeeze(-1)

        at_end = logits[torch.arange(len(ids)), last_token(ids, tokenizer)].view(len(batch), -1)
        margin = at_end[:, :1] - at_end[:, 1:]
        pairs = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        right_so_far = agreement(labels, encode(models, tokenizer)[1]) * (1 - 2 * smoothing) + smoothing
        judged = labels != IGNORED
        return pairs.mean() + F.binary_cross_entropy_with_logits(logits[judged], right_so_far[judged])

    optimize(model, stage, loss_of_batch, say, title)


def agreement(labels: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """1.0 where a row of `labels` [n, length] has agreed with `wanted` up to and including this place, else 0.0."""
    missing = labels.shape[1] - wanted.shape[1]
    wanted = F.pad(wanted, (0, missing), value=IGNORED) if missing > 0 else wanted[:, : labels.shape[1]]
    return ((labels == wanted) | (labels == IGNORED)).float().cumprod(1)


def last_token(ids: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Index [n] of each row's last token that is not padding."""
    return (ids != tokenizer.pad_token_id).sum(1) - 1


def preference_logits(
    model: Any, tokenizer: Any, batch: Sequence[tuple[str, str, list[str]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw logits, each read at its conversation's <eos>: chosen [n, 1] and rejected [n, k] answers."""
    pairs = [(question, answer) for question, chosen, rejected in batch for answer in (chosen, *rejected)]
    logits = reward_logits(model, tokenizer, pairs).view(len(batch), -1)
    return logits[:, :1], logits[:, 1:]


def reward_logits(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Raw logit of each (question, answer), float32 [n]."""
    ids, _ = encode(pairs, tokenizer)
    hidden = trunk_states(model.model, ids)
    return model.score(hidden[torch.arange(len(ids)), last_token(ids, tokenizer)]).squeeze(-1)


def trunk_states(trunk: Any, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states [n, length, width] of right-padded ids; the rows' common beginning is computed once.

    Every question of a task begins with the same words, which are nearly half of a conversation here. Right padding needs
    no attention mask in a causal model: nothing that is scored sees it.
    """
    common = int((ids == ids[0]).all(0).long().cumprod(0).sum())
    common = min(common, ids.shape[1] - 1)
    if common == 0:
        return trunk(ids).last_hidden_state
    beginning = trunk(ids[:1, :common], use_cache=True)
    cache = beginning.past_key_values
    cache.batch_repeat_interleave(len(ids))
    rest = trunk(ids[:, common:], past_key_values=cache, use_cache=True).last_hidden_state
    return torch.cat([beginning.last_hidden_state.expand(len(ids), -1, -1), rest], dim=1)


def optimize(model: Any, stage: Stage, loss_of_batch: Callable[[], torch.Tensor], say: Say, title: str) -> None:
    """`stage.steps` updates: Muon for the trunk's matrices, AdamW for the rest; gradients clipped at norm 1."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
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
        torch.nn.utils.clip_grad_norm_([*matrices, *rest], 1.0)
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
def pair_accuracy(model: Any, tokenizer: Any, batch: Sequence[tuple[str, str, list[str]]]) -> float:
    """Share of (chosen, rejected) pairs whose chosen answer gets the higher logit."""
    better, worse = preference_logits(model, tokenizer, batch)
    return (better > worse).float().mean().item()


def main(argv: Sequence[str]) -> None:
    """Entry of the builder's process: recipe name and an existing, empty directory."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    name, out = argv
    build(RECIPES[name], Path(out), say=lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
