"""From a row's prompt to the tokens an engine sees: chat template or plain text, one BOS, and the length policy.

Also the way back: `PromptCodec.decode` turns sampled ids into the text that rewards read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.types import Prompt

logger = logging.getLogger(__name__)

LENGTH_POLICIES = ("error", "filter", "truncate_left", "truncate_right")
_NAMED_ROWS = 5


class PromptError(ValueError):
    """Prompts or a tokenizer that cannot be trained on; the message names the row or the file."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as the engine sees it."""

    text: str
    """The rendered text, its BOS included when the template writes one."""
    token_ids: tuple[int, ...]
    """Its tokens, with exactly one leading BOS when the template or the tokenizer puts one there; no padding."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation; plain text is one user message."""


def load_tokenizer(path: str, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint directory.

    Args:
        path: directory.
        chat_template: Jinja text, or the path of a .jinja file, that replaces the tokenizer's own; None keeps that.
        trust_remote_code: allow code from the directory to run.

    Raises:
        PromptError: it has no EOS token.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        is_file = chat_template.endswith(".jinja")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8") if is_file else chat_template
    require_eos(tokenizer)
    return tokenizer


def template_tree(tokenizer: Any) -> Any:
    """The syntax tree of the tokenizer's chat template (`jinja2.nodes.Template`).

    Raises:
        jinja2.TemplateError: it is not valid Jinja.
    """
    # The environment in which transformers renders: it adds tags and functions to Jinja's own.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = tokenizer.get_chat_template()
    return _compile_jinja_template(template).environment.parse(template)


def require_eos(tokenizer: Any) -> int:
    """The EOS id.

    Raises:
        PromptError: there is none, so no response could end before the cap.
    """
    if tokenizer.eos_token_id is None:
        raise PromptError(
            f"the tokenizer in {tokenizer.name_or_path or 'memory'} has no EOS token, so no response could ever end; "
            "set eos_token in its tokenizer_config.json, or model.tokenizer to one that has it"
        )
    return int(tokenizer.eos_token_id)


class PromptCodec:
    """Renders and tokenises prompts, and decodes responses.

    Args:
        tokenizer: a `transformers` tokenizer with an EOS.
        apply_chat_template: render conversations with the tokenizer's chat template; False feeds plain text.
        system_prompt: a system message put before conversations that bring none.

    Raises:
        PromptError: no EOS; a chat template is wanted and there is none; a system prompt without a chat template.
    """

    def __init__(self, tokenizer: Any, *, apply_chat_template: bool = True, system_prompt: str | None = None) -> None:
        require_eos(tokenizer)
        if apply_chat_template and not tokenizer.chat_template:
            raise PromptError(
                f"the tokenizer in {tokenizer.name_or_path or 'memory'} has no chat template; set model.chat_template, "
                "or data.apply_chat_template=false to feed plain text"
            )
        if system_prompt is not None and not apply_chat_template:
            raise PromptError(
                "data.system_prompt needs data.apply_chat_template=true: plain text has no system message"
            )
        self.tokenizer = tokenizer
        self.apply_chat_template = apply_chat_template
        self.system_prompt = system_prompt
        self.bos_id: int | None = tokenizer.bos_token_id
        self._adds_bos = self._tokenizer_adds_bos()

    def render(self, prompts: Sequence[tuple[str, str | Sequence[Mapping[str, Any]]]]) -> list[Rendered]:
        """Render (name, text or messages) pairs; the name stands in errors.

        Raises:
            PromptError: a conversation that the template refuses or that ends with the assistant, messages where plain text is
                fed, a prompt without tokens. The message names the row.
        """
        conversations = [self._messages(name, prompt) for name, prompt in prompts]
        texts = [self._text(name, messages) for (name, _), messages in zip(prompts, conversations, strict=True)]
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rendered = []
        for (name, _), messages, text, ids in zip(prompts, conversations, texts, encoded, strict=True):
            token_ids = self._one_bos(ids)
            if not token_ids:
                raise PromptError(f"prompt {name!r} has no tokens")
            rendered.append(Rendered(text, token_ids, messages))
        return rendered

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response without special tokens; spaces stay as sampled."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render_conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """A conversation as text, up to where the assistant speaks next. No system prompt is added: the first messages came from `render`.

        Args:
            tools: function tools in OpenAI's form.

        Raises:
            PromptError: the template refuses it, or tools are given and it has no place for them.
        """
        if tools and not self.takes_tools:
            raise PromptError(
                f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'} has no place for tools, and "
                f"{len(tools)} are given; set model.chat_template to one that shows them"
            )
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # as in `_text`
            raise PromptError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def encode_conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """`render_conversation` as tokens, with exactly one BOS when the tokenizer has one; raises the same errors."""
        return self._one_bos(self.encode_text(self.render_conversation(messages, tools)))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a piece of rendered text; special tokens written in it are found, and none is added."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template writes the tools that it is given."""
        from jinja2 import nodes

        return any(node.name == "tools" for node in template_tree(self.tokenizer).find_all(nodes.Name))

    def _messages(self, name: str, prompt: str | Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(dict(m) for m in prompt)
        if messages[-1]["role"] == "assistant":
            raise PromptError(
                f"prompt {name!r} ends with an assistant message; a prompt must end where the model is to speak"
            )
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        return messages

    def _text(self, name: str, messages: Sequence[Mapping[str, Any]]) -> str:
        if not self.apply_chat_template:
            content = messages[0].get("content")
            if len(messages) > 1 or not isinstance(content, str):
                raise PromptError(
                    f"prompt {name!r} is a conversation of {len(messages)} messages, and data.apply_chat_template=false feeds plain text; "
                    "set it to true, or give text"
                )
            return content
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise jinja's own errors, and KeyErrors for missing fields
            raise PromptError(f"prompt {name!r}: the chat template failed: {type(error).__name__}: {error}") from error

    def _tokenizer_adds_bos(self) -> bool:
        """Whether the tokenizer itself puts a BOS before plain text; tried out, because settings and post-processors disagree."""
        if self.bos_id is None:
            return False
        ids = self.tokenizer("a")["input_ids"]
        return ids[:1] == [self.bos_id] and self.tokenizer("a", add_special_tokens=False)["input_ids"][:1] != [
            self.bos_id
        ]

    def _one_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Template and tokenizer may each add a BOS: keep one, and add the tokenizer's where the template has none."""
        ids = tuple(ids)
        while self.bos_id is not None and ids[:2] == (self.bos_id, self.bos_id):
            ids = ids[1:]
        return (self.bos_id, *ids) if self._adds_bos and self.bos_id is not None and ids[:1] != (self.bos_id,) else ids


@dataclass(frozen=True)
class LengthReport:
    """What the length policy did to one source."""

    rows: int
    """Rows before it."""
    longest: int
    """Tokens of the longest row before it."""
    dropped: tuple[str, ...] = ()
    """Ids of filtered rows."""
    truncated: tuple[str, ...] = ()
    """Ids of truncated rows."""


def apply_length_policy(
    prompts: Sequence[Prompt], max_tokens: int, policy: str, codec: PromptCodec
) -> tuple[list[Prompt], LengthReport]:
    """Apply the limit `max_tokens` to prompts.

    `error` refuses; `filter` drops; `truncate_left` keeps the last tokens (and a leading BOS), `truncate_right` the first. A truncated
    prompt's `text` is that of its tokens; its `messages` stay whole.

    Raises:
        PromptError: policy `error` and a longer prompt (named, with its length); an unknown policy.
    """
    if policy not in LENGTH_POLICIES:
        raise PromptError(f"data.overlong_prompts is {policy!r}; it must be one of {', '.join(LENGTH_POLICIES)}")
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > max_tokens]
    names = tuple(prompt.id for prompt in overlong)
    if not overlong:
        return list(prompts), LengthReport(len(prompts), longest)
    if policy == "error":
        shown = ", ".join(f"{prompt.id} ({len(prompt.token_ids)} tokens)" for prompt in overlong[:_NAMED_ROWS])
        more = f" and {len(overlong) - _NAMED_ROWS} more" if len(overlong) > _NAMED_ROWS else ""
        raise PromptError(
            f"{len(overlong)} of {len(prompts)} prompts are longer than data.max_prompt_tokens={max_tokens}: {shown}{more}. "
            "Raise it, or set data.overlong_prompts to filter, truncate_left or truncate_right"
        )
    if policy == "filter":
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_tokens]
        return kept, LengthReport(len(prompts), longest, dropped=names)
    if policy == "truncate_right" and codec.apply_chat_template:
        logger.warning(
            "data.overlong_prompts=truncate_right cuts the end of %d chat prompts, where the template says that the assistant speaks next",
            len(overlong),
        )
    fitted = [_truncate(prompt, max_tokens, policy, codec) for prompt in prompts]
    return fitted, LengthReport(len(prompts), longest, truncated=names)


def _truncate(prompt: Prompt, max_tokens: int, policy: str, codec: PromptCodec) -> Prompt:
    ids = prompt.token_ids
    if len(ids) <= max_tokens:
        return prompt
    if policy == "truncate_right":
        ids = ids[:max_tokens]
    elif codec.bos_id is not None and ids[0] == codec.bos_id:
        ids = (ids[0], *ids[len(ids) - max_tokens + 1 :])
    else:
        ids = ids[-max_tokens:]
    return Prompt(prompt.id, prompt.source, ids, codec.decode_all(ids), prompt.messages, prompt.answer, prompt.extra)


def max_prompt_length(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt; 0 when there is none."""
    return max((len(prompt.token_ids) for prompt in prompts), default=0)
