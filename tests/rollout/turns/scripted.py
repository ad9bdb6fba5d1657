"""What tests of several turns share: the small tokenizer with templates of several habits, and a policy whose answers are a function of its seed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from configs.schema import TurnsConfig
from rollout.turns.answers import AnswerReader
from rollout.turns.session import Session, SessionSpec
from rollout.types import Generation, GenerationRequest, Prompt, SampleKey, Sampling
from trainer.data.prompts import PromptCodec
from trainer.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer

TOOLS_TEMPLATE = (
    "{%- if tools %}{{ '<system>' + (tools | tojson) }}{% endif -%}"
    "{%- for message in messages -%}"
    "{{ '<' + message['role'] + '>' + (message['content'] or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<tool_call>' + '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments + '}' + '</tool_call>' }}"
    "{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<eos>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
"""Shows tools, and writes calls as they are sampled."""

THINKING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<' + message['role'] + '>' + message['content'] }}",
    "{%- set last = namespace(user=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{{ '<' + message['role'] + '>' }}"
    "{%- if message.role == 'assistant' and loop.index0 < last.user -%}{{ message.content.split(']')[-1] }}{%- else -%}{{ message.content }}{%- endif -%}",
)
"""Strips what stands before a bracket from answers once a user has spoken after them, as templates of reasoning models do."""

Policy = Callable[[GenerationRequest], Awaitable[Generation]]


def codec(template: str = CHAT_TEMPLATE) -> PromptCodec:
    """The small tokenizer with a chat template."""
    tokenizer = build_tokenizer(4096)
    tokenizer.chat_template = template
    return PromptCodec(tokenizer)


def policy_of(
    with_codec: PromptCodec, say: Callable[[GenerationRequest], str], delay: Callable[[int], float] | None = None
) -> Policy:
    """A policy that says `say(request)`, after `delay(count of calls)` seconds; an EOS ends each answer unless the cap does."""
    calls = 0

    async def send(request: GenerationRequest) -> Generation:
        nonlocal calls
        calls += 1
        if delay is not None:
            await asyncio.sleep(delay(calls))
        ids = (*with_codec.encode_text(say(request)), with_codec.tokenizer.eos_token_id)
        cut = ids[: request.sampling.max_new_tokens]
        logprobs = tuple(-float(i % 7) / 8 for i in range(len(cut)))
        return Generation(request.key, cut, logprobs, "stop" if cut == ids else "length", 3)

    return send


def digits(request: GenerationRequest) -> str:
    """An answer of three digits that depends on the prompt and the seed alone."""
    text = f"{request.prompt_token_ids}/{request.seed}"
    return str(int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) % 900 + 100)


def spec_of(with_codec: PromptCodec, question: str = "2 + 3?", **fields: Any) -> SessionSpec:
    """A session on one question."""
    (rendered,) = with_codec.render([("row", question)])
    prompt = Prompt("task/7", "task", rendered.token_ids, rendered.text, rendered.messages, "5")
    spec = SessionSpec(SampleKey(0, 0), 0, prompt, "train", 1, Sampling(max_new_tokens=16, temperature=1.0), run_seed=5)
    return replace(spec, **fields)


def session_of(
    with_codec: PromptCodec, send: Policy, spec: SessionSpec | None = None, context: int = 512, **limits: Any
) -> Session:
    """A session with a scripted policy."""
    return Session(
        spec or spec_of(with_codec), TurnsConfig(**limits), context, with_codec, AnswerReader(with_codec), send
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
