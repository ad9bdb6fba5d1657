"""The turns of one episode: a tree, and how the prompt of a new turn is made.

    messages of a request --the longest recorded beginning--> parent turn
    prompt = the parent's prompt + what the parent sampled + tokens of the messages added since

What was sampled is never tokenised again. The chat template decides whether it may stay: where the template writes an earlier answer in another way than it
was sampled (it strips reasoning, trims spaces, formats a tool call anew), the turn's prompt is the whole conversation, rendered again, and
the turn begins a new training row: a *fork*, which is counted. The work for a turn grows with what it adds, not with the whole conversation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.types import Generation, Row, Turn

Message = Mapping[str, Any]
Tools = tuple[Mapping[str, Any], ...]

_PROBE: Message = {"role": "user", "content": "x"}
"""Stands in for the conversation before an answer when only the text after it is wanted."""
_REASONING = ("reasoning", "reasoning_content")


class Codec(Protocol):
    """The policy's tokenizer and chat template; the one that this project uses is `trainer.data.prompts.PromptCodec`."""

    tokenizer: Any
    """Of `transformers`; vLLM's parsers look special tokens up in it."""

    def render_conversation(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        """The conversation as text, up to where the assistant speaks next.

        Raises:
            ValueError: the template refuses it.
        """
        ...

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> tuple[int, ...]:
        """The same as tokens, with one BOS where the model has one; raises the same errors."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a piece of rendered text; special tokens written in it are found, and none is added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens."""
        ...


@dataclass(eq=False)
class RecordedTurn:
    """A turn within its session; `Conversation.turns` gives the finished ones as `Turn`."""

    id: str
    """Name in responses; a function of the turn's logical identity, so that it is the same in every run."""
    parent: RecordedTurn | None
    added: tuple[Message, ...]
    """Messages after the parent's answer (the whole conversation where there is no parent)."""
    tools: Tools
    prompt_ids: tuple[int, ...]
    forked: bool
    """The prompt does not begin with the tokens of the turns that it continues."""
    seed: int | None
    content: str
    """Digest of the request's own content."""
    own_seed: int | None
    """The seed that the request brought."""
    ordinal: int
    """Place among requests with the same parent and content."""
    number: int = 0
    """Count of the session's requests before it; by arrival, so no number may depend on it."""
    depth: int = 1
    """Turns of its path up to this one."""
    first_prompt: int = 0
    """Tokens of the prompt of its path's first turn."""
    reward: float = 0.0
    generation: Generation = field(init=False)
    message: Message = field(init=False)
    """The answer, as the agent gets it."""
    said: Said = field(init=False)
    """The conversation with this answer, as messages show it."""
    lineage: str = field(init=False)
    """Digest of this turn and those before it, sampled tokens included."""
    keeps_users: bool | None = field(default=None, repr=False)
    """Whether the row up to this answer stays as it was sampled when a user speaks later; None until it was needed."""

    @property
    def row_parent(self) -> RecordedTurn | None:
        """The turn whose training row this one continues."""
        return None if self.forked else self.parent


@dataclass(eq=False)
class Said:
    """A conversation as messages show it; the nodes of all recorded ones make a tree, so that finding a beginning takes one look-up for each message."""

    digest: str = ""
    turns: list[RecordedTurn] = field(default_factory=list)
    """The turns whose answer is the last message; of several all but the sampled tokens are the same."""
    _next: dict[Any, Said] = field(default_factory=dict)

    def after(self, message: Message) -> Said | None:
        """The recorded conversation with one message more."""
        return self._next.get(_key(message))

    def with_(self, messages: Sequence[Message]) -> Said:
        """The conversation with these messages more; recorded if it was not."""
        node = self
        for message in messages:
            key = _key(message)
            if key not in node._next:
                node._next[key] = Said(chain_digest(node.digest, [message]))
            node = node._next[key]
        return node


class Conversation:
    """The tree of one episode.

    Args:
        codec: the policy's.
        first: the messages and tokens of the prompt as the data source rendered it; a request with just these messages and without
            tools gets these tokens (which the length policy may have cut).
    """

    def __init__(self, codec: Codec, first: tuple[Sequence[Message], tuple[int, ...]] | None = None) -> None:
        self._codec = codec
        self._turns: list[RecordedTurn] = []
        self._said = Said()
        self._walked: tuple[list[Message], list[Said]] = [], []
        self._before: dict[str, str] = {}
        self._first = None if first is None else (chain_digest("", first[0]), first[1])
        self.forks = 0
        """Turns that could not continue their parent's tokens."""

    def find_parent(self, messages: Sequence[Message], tools: Tools) -> tuple[RecordedTurn | None, tuple[Message, ...]]:
        """The recorded turn that these messages continue, and the messages after it.

        Of identical siblings, which differ in nothing that a message shows, the first is taken.
        """
        path = self._walk(messages)
        for position in range(len(path), 0, -1):
            turns = path[position - 1].turns
            if turns and turns[0].tools == tools:
                return turns[0], tuple(messages[position:])
        return None, tuple(messages)

    def prompt(
        self, parent: RecordedTurn | None, added: Sequence[Message], tools: Tools
    ) -> tuple[tuple[int, ...], bool]:
        """Tokens of a request's prompt, and whether they are a fork.

        Raises:
            ValueError: the chat template refuses the conversation.
        """
        if parent is None:
            if self._first is not None and not tools and chain_digest("", added) == self._first[0]:
                return self._first[1], False
            return self._codec.encode_conversation(added, tools or None), self._edited(added)
        rest = self._text_after(parent, added, tools)
        if rest is None:
            whole = [*self.messages(parent), *added]
            return self._codec.encode_conversation(whole, tools or None), True
        return (*parent.prompt_ids, *parent.generation.token_ids, *self._codec.encode_text(rest)), False

    def record(self, turn: RecordedTurn) -> None:
        """Add a finished turn."""
        before = self._said if turn.parent is None else turn.parent.said
        turn.said = before.with_([*turn.added, turn.message])
        turn.said.turns.append(turn)
        turn.said.turns.sort(key=_place)
        self._turns.append(turn)
        self.forks += turn.forked

    def messages(self, turn: RecordedTurn) -> list[Message]:
        """The whole conversation up to and with this turn's answer."""
        path: list[RecordedTurn] = list(path_to(turn))
        return [message for one in path for message in (*one.added, one.message)]

    def by_id(self, turn_id: str) -> RecordedTurn | None:
        """The turn with this id; of several the first in canonical order."""
        return next((turn for turn in self.in_order() if turn.id == turn_id), None)

    def in_order(self) -> list[RecordedTurn]:
        """All turns in canonical order: parents first, siblings by their content and ordinal, never by arrival."""
        children: dict[RecordedTurn | None, list[RecordedTurn]] = {}
        for turn in self._turns:
            children.setdefault(turn.parent, []).append(turn)
        for siblings in children.values():
            siblings.sort(key=_place)
        ordered: list[RecordedTurn] = []
        waiting = list(reversed(children.get(None, [])))
        while waiting:
            turn = waiting.pop()
            ordered.append(turn)
            waiting += reversed(children.get(turn, []))
        return ordered

    def turns(self) -> tuple[Turn, ...]:
        """The finished turns, in canonical order."""
        ordered = self.in_order()
        place = {turn: i for i, turn in enumerate(ordered)}
        return tuple(
            Turn(
                parent=None if turn.parent is None else place[turn.parent],
                prompt_ids=turn.prompt_ids,
                token_ids=turn.generation.token_ids,
                logprobs=turn.generation.logprobs,
                finish_reason=turn.generation.finish_reason,
                seed=turn.seed,
                weight_version=turn.generation.weight_version,
                reward=turn.reward,
            )
            for turn in ordered
        )

    def rows(self, each_turn: bool = False) -> tuple[Row, ...]:
        """The training rows; see `rows_of`."""
        ordered = self.in_order()
        place = {turn: i for i, turn in enumerate(ordered)}
        continued = [None if turn.row_parent is None else place[turn.row_parent] for turn in ordered]
        return rows_of(self.turns(), [None] * len(ordered) if each_turn else continued)

    def _walk(self, messages: Sequence[Message]) -> list[Said]:
        """The recorded conversations that these messages begin with, one for each message, as far as there are any.

        Most requests repeat the one before and add to it, so its walk is gone on with where the messages are equal.
        """
        known, path = self._walked
        if list(messages[: len(known)]) != known:
            path = []
        node = path[-1] if path else self._said
        for message in messages[len(path) :]:
            after = node.after(message)
            if after is None:
                break
            path.append(after)
            node = after
        self._walked = list(messages[: len(path)]), path
        return path

    def _text_after(self, parent: RecordedTurn, added: Sequence[Message], tools: Tools) -> str | None:
        """What the template writes after the parent's sampled tokens; None where it does not keep them."""
        if tools != parent.tools:
            return None  # the list of tools stands at the beginning
        # Templates strip earlier reasoning once a user has spoken again. That may concern every answer of the row so far.
        users = any(message.get("role") == "user" for message in added)
        if users and parent.row_parent is not None and not self._keeps_users(parent.row_parent):
            return None
        return self._rest(parent, added, tools)

    def _keeps_users(self, turn: RecordedTurn) -> bool:
        """Whether this answer and those before it in the row stay as they were sampled when a user speaks later; found once for each turn."""
        open_turns = []
        at: RecordedTurn | None = turn
        while at is not None and at.keeps_users is None:
            open_turns.append(at)
            at = at.row_parent
        keeps = at is None or bool(at.keeps_users)
        for one in reversed(open_turns):
            keeps = keeps and self._rest(one, [_PROBE], one.tools) is not None
            one.keeps_users = keeps
        return keeps

    def _rest(self, turn: RecordedTurn, added: Sequence[Message], tools: Tools) -> str | None:
        key = canonical(tools)
        if key not in self._before:
            self._before[key] = self._codec.render_conversation([_PROBE], tools or None)
        begins = self._before[key] + self._codec.decode_all(turn.generation.token_ids)
        whole = self._codec.render_conversation([_PROBE, turn.message, *added], tools or None)
        return whole[len(begins) :] if whole.startswith(begins) else None

    def _edited(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation that continues no turn has answers in it although there are turns: the agent changed its history."""
        return bool(self._turns) and any(message.get("role") == "assistant" for message in messages)


def _place(turn: RecordedTurn) -> tuple[str, int, int]:
    """Place among the siblings; with seeds of their own their ordinals, which follow arrival, decide nothing."""
    own = -1 if turn.own_seed is None else turn.own_seed
    return turn.content, own, turn.ordinal


def path_to(turn: RecordedTurn) -> Iterator[RecordedTurn]:
    """The turns from the first of its path to this one."""
    path: list[RecordedTurn] = []
    at: RecordedTurn | None = turn
    while at is not None:
        path.append(at)
        at = at.parent
    yield from reversed(path)


def rows_of(turns: Sequence[Turn], continues: Sequence[int | None]) -> tuple[Row, ...]:
    """Cut a tree of turns into training rows: one for each path from a turn that continues no row to one that no turn continues.

    A turn that several paths share is trained in the first of them only; its tokens are there in the others, with the mask False.

    Args:
        turns: in canonical order.
        continues: for each turn the position of the turn whose tokens its prompt begins with; None where it begins a row.

    Returns:
        The rows in the order of their last turns.
    """
    followed = {parent for parent in continues if parent is not None}
    trained: set[int] = set()
    rows: list[Row] = []
    for leaf in (i for i in range(len(turns)) if i not in followed):
        path = [leaf]
        while (before := continues[path[-1]]) is not None:
            path.append(before)
        rows.append(_row(turns, path[::-1], trained))
    return tuple(rows)


def _row(turns: Sequence[Turn], path: Sequence[int], trained: set[int]) -> Row:
    prompt = turns[path[0]].prompt_ids
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    ends: list[tuple[int, int]] = []
    for number in path:
        turn = turns[number]
        between = turn.prompt_ids[len(prompt) + len(ids) :]
        ids += between
        mask += [False] * len(between)
        logprobs += [0.0] * len(between)
        mine = number not in trained
        trained.add(number)
        ids += turn.token_ids
        mask += [mine] * len(turn.token_ids)
        logprobs += turn.logprobs if mine else [0.0] * len(turn.token_ids)
        if mine:
            ends.append((number, len(ids) - 1))
    cut = turns[path[-1]].finish_reason == "length"
    return Row(prompt, tuple(ids), tuple(mask), tuple(logprobs), tuple(ends), cut)


def normalised(message: Message) -> dict[str, Any]:
    """A message as it is compared: without fields that are null or empty, and without reasoning, which many clients do not send back.

    Arguments of tool calls are compared as the values that they say: clients that parse them write them anew, with other spaces.
    """
    kept = {
        name: value for name, value in message.items() if value not in (None, "", [], {}) and name not in _REASONING
    }
    content = kept.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        kept["content"] = "".join(part["text"] for part in content)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_with_plain_arguments(call) for call in kept["tool_calls"]]
    return kept


def _with_plain_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    try:
        return {**call, "function": {**function, "arguments": canonical(json.loads(function["arguments"]))}}
    except (KeyError, TypeError, ValueError):
        return call  # no JSON: the text itself is compared


def _key(message: Message) -> Any:
    """What tells a message from others. Most have a role and a text and nothing else, and a request has many: those must be quick."""
    role, content = message.get("role"), message.get("content")
    if len(message) > 2 or not content or type(content) is not str:
        message = normalised(message)
        role, content = message.get("role"), message.get("content")
    return (role, content) if len(message) == 2 and type(content) is str else canonical(message)


def canonical(value: Any) -> str:
    """Plain values as one text: keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def chain_digest(before: str, messages: Sequence[Message]) -> str:
    """Digest of a conversation: that of the messages `before`, continued by these one after the other."""
    for message in messages:
        text = f"{before}\n{canonical(normalised(message))}"
        before = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return before
