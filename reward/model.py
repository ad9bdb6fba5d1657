"""The reward model: a one-label sequence classifier served by vLLM's pooling runner; its raw logit is the reward.

    Episode --reward_tokens (the reward model's own tokenizer and chat template)--> ids --RewardModelEngine.score--> logit

The reward model's vocabulary need not be the policy's, so the conversation is rebuilt from the row's messages and the response's text:
neither the policy's token ids nor its rendered prompt, with the policy's template and special tokens in it, are ever used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.types import Prompt, SampleKey
from workers.checkpoint_files import weight_files
from workers.vllm_process import RunningRequests, common_arguments, engine_facts, start_engine, stop_engine

if TYPE_CHECKING:
    from configs.schema import RewardModelConfig

logger = logging.getLogger(__name__)


class RewardInputTooLongError(ValueError):
    """A conversation does not fit the reward model's context; `key`, `length` and `limit` are in tokens."""

    def __init__(self, key: SampleKey, length: int, limit: int) -> None:
        super().__init__(
            f"task {key.task}, sample {key.sample}, turn {key.turn}: the conversation has {length} tokens in the reward model's "
            f"vocabulary, and its context (reward.model.max_model_len) is {limit}"
        )
        self.key, self.length, self.limit = key, length, limit


@dataclass(frozen=True)
class RewardInput:
    """One conversation in the reward model's vocabulary."""

    key: SampleKey
    """The sample that is scored."""
    token_ids: tuple[int, ...]
    """The whole conversation, the response included; the score is read at the last token."""

    def check(self, limit: int) -> None:
        """Raise `RewardInputTooLongError` beyond `limit` tokens, `ValueError` when there are none."""
        if not self.token_ids:
            raise ValueError(f"{self.key}: nothing to score; prompt and response are both empty")
        if len(self.token_ids) > limit:
            raise RewardInputTooLongError(self.key, len(self.token_ids), limit)


def reward_tokens(prompt: Prompt, response_text: str, tokenizer: Any, config: RewardModelConfig) -> list[int]:
    """Encode prompt and response for the reward model.

    Args:
        prompt: its messages are used, whole.
        response_text: decoded response, without special tokens.
        tokenizer: the *reward model's* tokenizer.
        config: `apply_chat_template` decides between its chat template and `plain_text`.

    Raises:
        ValueError: a chat template is asked for and the tokenizer has none; without one, a message that is not text.
    """
    if config.apply_chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"reward.model.apply_chat_template is true, but the tokenizer of {config.tokenizer or config.path} has no chat "
                "template; set it to false to score the messages' text followed by the response"
            )
        messages = [*map(dict, prompt.messages), {"role": "assistant", "content": response_text}]
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    text = plain_text(prompt) + response_text
    # A row may already begin with the BOS text; the tokenizer would put a second one before it.
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])


def plain_text(prompt: Prompt) -> str:
    """The texts of a prompt's messages, with a line break between them; no roles, no template, no special tokens.

    Raises:
        ValueError: a message holds something other than text; names the prompt.
    """
    texts = []
    for message in prompt.messages:
        content = message.get("content")
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(
                f"prompt {prompt.id!r}: a message of role {message.get('role')!r} holds {str(content)[:80]}, which is not text; "
                "reward.model.apply_chat_template=false scores plain text only"
            )
        texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def check_plain_text(prompts: Iterable[Prompt], policy_tokenizer: Any, reward_tokenizer: Any) -> None:
    """Refuse rows that a reward model without a chat template can't be given: no text, or the policy's markup written into it.

    A row that was rendered before it was saved holds special tokens as text. That is accepted where the reward model has the same special tokens.

    Raises:
        ValueError: names the row.
    """
    foreign = sorted(set(policy_tokenizer.all_special_tokens) - set(reward_tokenizer.all_special_tokens))
    for prompt in prompts:
        text = plain_text(prompt)
        for token in foreign:
            if token in text:
                raise ValueError(
                    f"prompt {prompt.id!r} holds {token!r}, a special token of the policy that the reward model's tokenizer does not have, "
                    "so the reward model would read the policy's markup as text (reward.model.apply_chat_template=false); save the row "
                    "as messages, or take the token out"
                )


def effective_max_num_seqs(config: RewardModelConfig, full_determinism: bool) -> int:
    """Sequences scored at once: 1 under full determinism, whatever is configured, with a warning when that differs.

    A pooled logit comes out of matrix products over all sequences of a batch, and which sequences share a batch depends on
    when they arrive. One at a time, a score can depend only on its own tokens.
    """
    if full_determinism and config.max_num_seqs != 1:
        logger.warning(
            "reward.model.max_num_seqs=%d is overridden to 1: with full_determinism a score may not depend on which other "
            "sequences happen to share its batch. Set reward.model.max_num_seqs=1 to silence this, or full_determinism=false to "
            "score in batches; more reward.model.replicas score in parallel without changing bits",
            config.max_num_seqs,
        )
        return 1
    return config.max_num_seqs


def check_reward_model(path: str | Path) -> None:
    """Refuse a checkpoint that does not give one logit, or whose weight files are not its own; reads `config.json` and names only.

    Raises:
        ValueError: no `config.json`, not a sequence classifier, or a number of labels other than one (named);
            weight files as in `workers.checkpoint_files.weight_files`.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"reward.model.path: {path} has no config.json, so it is no checkpoint directory")
    settings = json.loads(file.read_text(encoding="utf-8"))
    architectures = settings.get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ValueError(
            f"reward.model.path: {path} is {', '.join(architectures) or 'of unknown architecture'}; a reward model is a "
            "...ForSequenceClassification checkpoint with one label"
        )
    labels = _num_labels(settings)
    if labels != 1:
        raise ValueError(
            f"reward.model.path: {path} has num_labels={labels}; a reward is one logit, so the model needs num_labels=1"
        )
    try:
        weight_files(path)
    except ValueError as error:
        raise ValueError(f"reward.model.path: {error}") from error


class RewardModelEngine:
    """One replica of the reward model. Build it in a process of its own, with `determinism.environment.process_env` in place
    before that process started."""

    work = "score"

    def __init__(
        self,
        path: str | Path,
        *,
        config: RewardModelConfig,
        max_model_len: int,
        full_determinism: bool,
        threads: int,
        device: str,
        cpu_linear: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model.

        Args:
            path: checkpoint directory of a one-label sequence classifier.
            max_model_len: longest conversation in tokens.
            threads: CPU threads of this process; part of the numerics environment.
            device: `cpu` or `cuda`.
            cpu_linear: `determinism.cpu_linear`.

        Raises:
            ValueError: the checkpoint gives no single logit, or `config.engine_args` holds an owned or unknown key.
        """
        check_reward_model(path)
        self._device = device
        self._max_model_len = max_model_len
        arguments = common_arguments(
            path, config=config, max_model_len=max_model_len, full_determinism=full_determinism, device=device
        ) | {
            "runner": "pooling",
            "pooler_config": {"use_activation": False},
            "max_num_seqs": effective_max_num_seqs(config, full_determinism),
            # A whole conversation must fit one step: vLLM requires that when chunked prefill is off.
            "max_num_batched_tokens": max(max_model_len, 8192),
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "trust_remote_code": trust_remote_code,
        }
        self._engine = start_engine(
            arguments,
            config.engine_args,
            origin="reward.model.engine_args",
            full_determinism=full_determinism,
            threads=threads,
            device=device,
            cpu_linear=cpu_linear,
        )

        self._running = RunningRequests(self._engine)

    def add(self, number: int, token_ids: list[int]) -> None:
        """Take a conversation in the reward model's vocabulary (`reward_tokens`); `step` returns its result under `number`.

        Raises:
            ValueError: it is empty or over-long (`RewardInput.check` names samples).
        """
        from vllm import PoolingParams

        if not 0 < len(token_ids) <= self._max_model_len:
            raise ValueError(
                f"a conversation of {len(token_ids)} tokens; the reward model takes 1 to {self._max_model_len}"
            )
        self._running.add(number, list(token_ids), PoolingParams(task="classify", use_activation=False))

    def step(self) -> list[tuple[int, float]]:
        """Work for a moment; number and raw logit (no sigmoid, no softmax) of the conversations that are scored."""
        return [(number, float(output.outputs.data.reshape(()).item())) for number, output in self._running.step()]

    def facts(self) -> dict[str, Any]:
        """Versions, threads, kernels and limits in force in this process."""
        return engine_facts(self._engine.vllm_config, self._device, role="reward")

    def close(self) -> None:
        """Shut the core down; safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            stop_engine(engine)


def _num_labels(settings: Mapping[str, Any]) -> int:
    """Number of labels, as transformers counts them: those of `id2label`, which a checkpoint stores; without it there are two."""
    if "id2label" in settings:
        return len(settings["id2label"])
    return int(settings.get("num_labels", 2))
