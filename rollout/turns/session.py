"""One episode while it runs: it takes requests for turns, gives each its tokens and seed, and in the end says what happened.

    environment, agent, proxy --generate(messages)--> Session --GenerationRequest--> engines
                                                        └─ Conversation (the tree of turns)

A session is known by its logical identity (split, step, prompt, sample); its key and its address are not part of any seed. All of its methods run in one event
loop, so ordinals are taken one after the other.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.schema import TurnsConfig
from determinism.seeds import turn_seed
from rollout.turns.answers import AnswerReader
from rollout.turns.conversation import Codec, Conversation, Message, RecordedTurn, Tools, canonical, chain_digest
from rollout.types import Generation, GenerationRequest, Prompt, Row, SampleKey, Sampling, Turn

logger = logging.getLogger(__name__)

_Identity = tuple[str, str, int | None]
"""Lineage, content, and the seed of its own: what identical requests share."""
Send = Callable[[GenerationRequest], Awaitable[Generation]]


class RequestError(ValueError):
    """A request that is refused; it changes nothing in the session."""

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        """Args:
        status: for the answer by HTTP.
        code: a short name of the kind.
        param: the request's field that is wrong.
        """
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class BudgetError(RequestError):
    """The episode's budget of turns or tokens is used up. That is how an episode may end; it is no failure."""


@dataclass(frozen=True)
class SessionSpec:
    """What a session is told when it begins; travels from the driver to a session host."""

    key: SampleKey
    """Place of the sample in the step's batch."""
    request_index: int
    """As in `rollout.episodes.requests_for`."""
    prompt: Prompt
    split: str
    step: int
    sampling: Sampling
    """Of every turn; a turn's cap is `max_new_tokens`."""
    run_seed: int
    shared_seed: int | None = None
    """One seed for every request, where the config sets one."""
    derive_seeds: bool = True
    """See `rollout.sampling.seeds_are_derived`."""

    @property
    def name(self) -> str:
        """How messages name the sample."""
        return f"{self.prompt.id} (task {self.key.task}, sample {self.key.sample})"


@dataclass(frozen=True)
class SessionResult:
    """An episode that has ended; travels back to the driver."""

    turns: tuple[Turn, ...]
    rows: tuple[Row, ...]
    messages: tuple[Message, ...]
    """As in `Episode.messages`."""
    text: str
    """Text of the last turn."""
    truncated: bool
    """A cap or a budget ended it."""
    reward: float | None
    failure: str | None
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What a request may ask for itself."""

    max_new_tokens: int | None = None
    """Its cap; None for the configured one."""
    stop: tuple[str, ...] = ()
    """Further texts that end the answer."""
    seed: int | None = None
    """Its own seed."""
    n: int = 1
    """Answers."""
    retry: bool = False
    """The client has sent it before and knows no answer."""
    idempotency_key: str | None = None
    """The client's own name of the request: with the same one, the same answer."""


class Session:
    """See the module.

    Args:
        spec: who it is.
        config: budgets.
        context: tokens of the engines' context.
        codec, reader: how to write prompts and read answers.
        send: asks an engine.
    """

    def __init__(
        self, spec: SessionSpec, config: TurnsConfig, context: int, codec: Codec, reader: AnswerReader, send: Send
    ) -> None:
        self.spec = spec
        self.reader = reader
        self.conversation = Conversation(codec, (spec.prompt.messages, spec.prompt.token_ids))
        self.ended = False
        self.budget_ended = False
        """A request was refused because the budget was used up."""
        self.rewarded = False
        self.requests = 0
        """Requests that were given an ordinal."""
        self._config, self._context, self._codec, self._send = config, context, codec, send
        self._ordinals: dict[tuple[str, str], int] = {}
        self._asked: dict[_Identity, list[asyncio.Task[RecordedTurn]]] = {}
        self._retried: dict[_Identity, int] = {}
        self._by_key: dict[str, list[asyncio.Task[RecordedTurn]]] = {}
        self.counts: dict[str, float] = {"rollout/retries": 0.0}

    @property
    def name(self) -> str:
        """How messages name the sample."""
        return self.spec.name

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        parent: RecordedTurn | None = None,
        tools: Sequence[Message] = (),
        options: Options | None = None,
    ) -> list[RecordedTurn]:
        """One turn, or `options.n` of them.

        Args:
            messages: the whole conversation; with `parent` only what came after that turn's answer.
            parent: the turn that is continued; None looks for it in the messages.
            tools: functions in OpenAI's form.

        Raises:
            BudgetError: the budget of turns or tokens is used up.
            RequestError: it can't be served as asked; nothing was sampled.
        """
        tasks = self._begin(messages, parent, tuple(tools), options or Options())
        # Shielded: a client that goes away must not take a turn with it that another copy of the request waits for.
        return [await asyncio.shield(task) for task in tasks]

    def set_reward(self, value: float, turn_id: str | None = None) -> None:
        """Give a turn its reward (the last turn in canonical order when none is named); a second call replaces the first.

        Raises:
            RequestError: no such turn, no turn at all, or a value that is no finite number.
        """
        self._check_open()
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise RequestError(f"{self.name}: a reward must be a finite number, got {value!r}", param="reward")
        turns = self.conversation.in_order()
        turn = self.conversation.by_id(turn_id) if turn_id is not None else (turns[-1] if turns else None)
        if turn is None:
            known = ", ".join(one.id for one in turns) or "none"
            raise RequestError(
                f"{self.name}: there is no turn {turn_id or 'yet'} to reward; known: {known}", param="turn"
            )
        turn.reward = float(value)
        self.rewarded = True

    async def end(self, failure: str | None = None) -> SessionResult:
        """End the session; later requests are refused. Waits for turns that are still being sampled: they are part of the episode."""
        self.ended = True
        open_tasks = [task for tasks in self._asked.values() for task in tasks]
        if open_tasks:
            await asyncio.wait(open_tasks)
        ordered = self.conversation.in_order()
        if not ordered and failure is None:
            failure = "the model was never called"
        last = ordered[-1] if ordered else None
        path = self.conversation.messages(last) if last is not None else []
        given = len(self.spec.prompt.messages)
        begins = chain_digest("", path[:given]) == chain_digest("", self.spec.prompt.messages)
        rewards = [turn.reward for turn in ordered]
        return SessionResult(
            turns=self.conversation.turns(),
            rows=self.conversation.rows(each_turn=self._config.rows == "turns"),
            messages=tuple(path[given:] if begins else path),
            text=self._codec.decode(last.generation.token_ids) if last is not None else "",
            truncated=self.budget_ended or (last is not None and last.generation.finish_reason == "length"),
            reward=float(sum(rewards)) if self.rewarded else None,
            failure=failure,
            counts={**self.counts, "rollout/forked_turns": float(self.conversation.forks)},
        )

    def _begin(
        self, messages: Sequence[Message], parent: RecordedTurn | None, tools: Tools, options: Options
    ) -> list[asyncio.Task[RecordedTurn]]:
        """Everything up to the engine, without a pause: what is decided here does not depend on other requests of the session."""
        self._check_open()
        self._check(messages, options)
        if options.idempotency_key is not None and options.idempotency_key in self._by_key:
            self.counts["rollout/retries"] += 1
            return self._by_key[options.idempotency_key]
        added = tuple(messages)
        if parent is None:
            parent, added = self.conversation.find_parent(messages, tools)
        lineage = "" if parent is None else parent.lineage
        content = _content_digest("" if parent is None else parent.said.digest, added, tools, options)
        identity = (lineage, content, options.seed)
        asked = self._asked.setdefault(identity, [])
        if options.retry and len(asked) >= options.n:
            # Identical siblings differ in nothing, so any answer that was made for one of them is a right one; each is given again in turn.
            self.counts["rollout/retries"] += 1
            start = self._retried.get(identity, 0)
            self._retried[identity] = start + options.n
            return [asked[(start + place) % len(asked)] for place in range(options.n)]
        prompt_ids, forked, sampling = self._tokens(parent, added, tools, options)
        tasks = []
        for _ in range(options.n):
            turn = self._new_turn(parent, added, tools, options, prompt_ids, forked, content, len(asked))
            self._ordinals[lineage, content] = turn.ordinal + 1
            asked.append(asyncio.ensure_future(self._sample(turn, sampling)))
            tasks.append(asked[-1])
        if options.idempotency_key is not None:
            self._by_key[options.idempotency_key] = tasks
        return tasks

    def _new_turn(
        self,
        parent: RecordedTurn | None,
        added: tuple[Message, ...],
        tools: Tools,
        options: Options,
        prompt_ids: tuple[int, ...],
        forked: bool,
        content: str,
        copies: int,
    ) -> RecordedTurn:
        if self.requests >= self._config.max_requests:
            raise RequestError(
                f"{self.name}: the episode has made {self.requests} requests, the most that rollout.turns.max_requests allows",
                status=429,
                code="too_many_requests",
            )
        number, self.requests = self.requests, self.requests + 1
        lineage = "" if parent is None else parent.lineage
        spec = self.spec
        # A request with a seed of its own takes an ordinal too, so that the seeds of its neighbours do not move when it is given one.
        ordinal = self._ordinals.get((lineage, content), 0)
        derive = functools.partial(
            turn_seed,
            run_seed=spec.run_seed,
            split=spec.split,
            step=spec.step,
            prompt_id=spec.prompt.id,
            sample=spec.key.sample,
            request_index=spec.request_index,
            lineage=lineage,
        )
        derived = derive(content=content, ordinal=ordinal)
        # Its name must not depend on whether its neighbours came before it.
        named = derived if options.seed is None else derive(content=f"{content}/{options.seed}", ordinal=copies)
        explicit = options.seed if options.seed is not None else spec.shared_seed
        return RecordedTurn(
            id=f"turn-{named:016x}",
            parent=parent,
            added=added,
            tools=tools,
            prompt_ids=prompt_ids,
            forked=forked,
            seed=explicit if explicit is not None or not spec.derive_seeds else derived,
            content=content,
            own_seed=options.seed,
            ordinal=ordinal,
            number=number,
            depth=1 if parent is None else parent.depth + 1,
            first_prompt=len(prompt_ids) if parent is None else parent.first_prompt,
        )

    async def _sample(self, turn: RecordedTurn, sampling: Sampling) -> RecordedTurn:
        spec = self.spec
        request = GenerationRequest(
            key=SampleKey(spec.key.task, spec.key.sample, turn.number),
            prompt_token_ids=turn.prompt_ids,
            seed=turn.seed,
            sampling=sampling,
            # Unique in the step: episodes in their order, and an episode's requests in theirs.
            priority=spec.request_index * self._config.max_requests + turn.number,
        )
        turn.generation = await self._send(request)
        turn.message = self.reader.read(turn.generation.token_ids, turn.tools, turn.id)
        sampled = ",".join(map(str, turn.generation.token_ids))
        parts = "" if turn.parent is None else turn.parent.lineage
        turn.lineage = hashlib.blake2b(f"{parts}/{turn.id}/{sampled}".encode(), digest_size=16).hexdigest()
        self.conversation.record(turn)
        return turn

    def _tokens(
        self, parent: RecordedTurn | None, added: Sequence[Message], tools: Tools, options: Options
    ) -> tuple[tuple[int, ...], bool, Sampling]:
        """Prompt, whether it is a fork, and sampling with the cap that the budgets leave."""
        limits, depth = self._config, 0 if parent is None else parent.depth
        if depth >= limits.max_turns:
            self._budget(f"it has had {depth} turns, the most that rollout.turns.max_turns allows")
        try:
            prompt_ids, forked = self.conversation.prompt(parent, added, tools)
        except ValueError as error:
            raise RequestError(f"{self.name}: {error}", param="messages") from error
        room = self._context - len(prompt_ids)
        if options.max_new_tokens is not None and options.max_new_tokens > self._context:
            raise RequestError(
                f"{self.name}: {options.max_new_tokens} new tokens were asked for, and the context (rollout.max_model_len) is "
                f"{self._context}",
                code="context_length_exceeded",
                param="max_completion_tokens",
            )
        if room < 1:
            if parent is not None:
                self._budget(f"its {len(prompt_ids)} tokens leave no room in the context of {self._context}")
            raise RequestError(
                f"{self.name}: the prompt has {len(prompt_ids)} tokens, and the context (rollout.max_model_len) is {self._context}",
                code="context_length_exceeded",
                param="messages",
            )
        if limits.max_tokens is not None and parent is not None:
            left = limits.max_tokens - (len(prompt_ids) - parent.first_prompt)
            if left < 1:
                self._budget(f"it has used the {limits.max_tokens} tokens of rollout.turns.max_tokens")
            room = min(room, left)
        elif limits.max_tokens is not None:
            room = min(room, limits.max_tokens)
        cap = min(options.max_new_tokens or room, self.spec.sampling.max_new_tokens, room)
        stop = (*self.spec.sampling.stop, *options.stop)
        return prompt_ids, forked, replace(self.spec.sampling, max_new_tokens=cap, stop=stop)

    def _budget(self, why: str) -> None:
        self.budget_ended = True
        raise BudgetError(f"{self.name}: the episode is over: {why}", code="episode_budget")

    def _check_open(self) -> None:
        if self.ended:
            raise RequestError(f"{self.name}: the episode has ended", status=410, code="session_ended")

    def _check(self, messages: Sequence[Message], options: Options) -> None:
        if not messages:
            raise RequestError(f"{self.name}: no messages", param="messages")
        if options.n < 1:
            raise RequestError(f"{self.name}: n is {options.n}; it must be at least 1", param="n")
        if options.n > 1 and options.seed is not None:
            raise RequestError(
                f"{self.name}: n is {options.n} with the seed {options.seed}: the answers would be copies. Leave one of them out",
                param="seed",
            )
        if options.max_new_tokens is not None and options.max_new_tokens < 1:
            raise RequestError(
                f"{self.name}: {options.max_new_tokens} new tokens; at least 1", param="max_completion_tokens"
            )


def _content_digest(chain: str, added: Sequence[Message], tools: Tools, options: Options) -> str:
    """Digest of what a request says; its seed, `n`, retries and the client's name of it are not part of that."""
    asked: dict[str, Any] = {
        "messages": chain_digest(chain, added),
        "tools": [dict(tool) for tool in tools],
        "max_new_tokens": options.max_new_tokens,
        "stop": list(options.stop),
    }
    return hashlib.blake2b(canonical(asked).encode(), digest_size=16).hexdigest()
