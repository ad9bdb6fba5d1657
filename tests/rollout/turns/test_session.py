"""Turns of one episode: tokens, forks, rows, seeds, retries, budgets."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from rollout.turns.conversation import Conversation, chain_digest
from rollout.turns.session import BudgetError, Options, RequestError, SessionResult
from rollout.types import SampleKey
from tests.rollout.turns.scripted import (
    THINKING_TEMPLATE,
    TOOLS_TEMPLATE,
    codec,
    digits,
    policy_of,
    session_of,
    spec_of,
    user,
)
from trainer.data.prompts import PromptError

PLAIN = codec()
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def play(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def three_turns(session: Any, explicit: bool = True) -> SessionResult:
    """Three turns of one path, with the parent named or found in the messages."""
    first = session.spec.prompt.messages
    said = list(first)
    (turn,) = await session.generate(first)
    for words in ("No.", "Try again."):
        said += [turn.message, user(words)]
        if explicit:
            (turn,) = await session.generate([user(words)], parent=turn)
        else:
            (turn,) = await session.generate(said)
    return await session.end()


class TestTokens:
    def test_what_was_sampled_is_in_the_next_prompt_token_by_token(self) -> None:
        result = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits))))
        first, second, third = result.turns
        assert first.prompt_ids == spec_of(PLAIN).prompt.token_ids
        assert second.prompt_ids == first.prompt_ids + first.token_ids + PLAIN.encode_text("<user>No.<assistant>")
        assert third.prompt_ids == second.prompt_ids + second.token_ids + PLAIN.encode_text(
            "<user>Try again.<assistant>"
        )
        assert result.counts["rollout/forked_turns"] == 0

    def test_the_parent_is_found_in_the_messages(self) -> None:
        named = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits))))
        found = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits)), explicit=False))
        assert found.turns == named.turns
        assert found.rows == named.rows

    def test_a_parent_that_came_after_a_longer_request_is_found(self) -> None:
        async def go() -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            prompt = list(session.spec.prompt.messages)
            other = session_of(PLAIN, policy_of(PLAIN, digits))
            (foreseen,) = await other.generate(prompt)
            longer = [*prompt, dict(foreseen.message), user("No.")]
            (alone,) = await session.generate(longer)  # begins a path of its own: the answer in it was not sampled here
            (first,) = await session.generate(prompt)
            assert first.message == foreseen.message
            (second,) = await session.generate(longer)
            (third,) = await session.generate([*longer, alone.message, user("No.")])
            assert (alone.parent, second.parent, third.parent) == (None, first, alone)
            (elsewhere,) = await session.generate([*prompt, first.message, user("Yes."), alone.message, user("No.")])
            assert elsewhere.parent is first

        play(go())

    def test_an_answer_cut_by_the_cap_is_closed_by_the_template(self) -> None:
        spec = spec_of(PLAIN)
        spec = replace(spec, sampling=replace(spec.sampling, max_new_tokens=2))
        result = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits), spec)))
        first, second, _ = result.turns
        assert first.finish_reason == "length"
        assert second.prompt_ids == first.prompt_ids + first.token_ids + PLAIN.encode_text("<eos><user>No.<assistant>")
        assert result.counts["rollout/forked_turns"] == 0

    def test_another_tokenization_of_the_same_text_stays_as_it_was_sampled(self) -> None:
        # A policy may sample "12" as two tokens where the tokenizer would write one. With one token a character this can't happen, so
        # the unknown token stands in: its text is encoded to other ids.
        async def send(request: Any) -> Any:
            generation = await policy_of(PLAIN, digits)(request)
            return replace(generation, token_ids=(PLAIN.tokenizer.unk_token_id, *generation.token_ids[1:]))

        session = session_of(PLAIN, send)
        result = play(three_turns(session))
        assert all(turn.token_ids[0] == PLAIN.tokenizer.unk_token_id for turn in result.turns)

    def test_a_history_that_the_agent_changed_is_a_fork(self) -> None:
        async def edited() -> SessionResult:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            (turn,) = await session.generate(session.spec.prompt.messages)
            changed = {**turn.message, "content": "I do not know"}
            await session.generate([*session.spec.prompt.messages, changed, user("No.")])
            return await session.end()

        result = play(edited())
        assert result.counts["rollout/forked_turns"] == 1
        assert len(result.rows) == 2

    def test_fields_that_say_nothing_do_not_hide_the_parent(self) -> None:
        async def with_nulls() -> SessionResult:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            (turn,) = await session.generate(session.spec.prompt.messages)
            sent_back = {**turn.message, "refusal": None, "tool_calls": [], "annotations": None}
            await session.generate([*session.spec.prompt.messages, sent_back, user("No.")])
            return await session.end()

        assert sorted(turn.parent is None for turn in play(with_nulls()).turns) == [False, True]

    def test_arguments_written_anew_do_not_hide_the_parent(self) -> None:
        # Clients that parse them write them without spaces.
        def call(arguments: str) -> dict[str, Any]:
            function = {"name": "weather", "arguments": arguments}
            return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}

        def digest(arguments: str) -> str:
            return chain_digest("", [call(arguments)])

        assert digest('{"b": 1, "a": "x"}') == digest('{"a":"x","b":1}') != digest('{"a":"x","b":2}')
        assert digest("{broken") != digest("{ broken")

    def test_a_template_that_strips_reasoning_makes_forks_when_a_user_speaks(self) -> None:
        thinking = codec(THINKING_TEMPLATE)
        send = policy_of(thinking, lambda request: "[think]" + digits(request))
        result = play(three_turns(session_of(thinking, send)))
        assert result.counts["rollout/forked_turns"] == 2
        assert len(result.rows) == 3
        assert result.turns[1].prompt_ids == thinking.encode_text(
            "<user>2 + 3?<assistant>"
            + thinking.decode(result.turns[0].token_ids).split("]")[-1]
            + "<eos><user>No.<assistant>"
        )

    def test_only_earlier_reasoning_that_is_stripped_makes_a_fork(self) -> None:
        # The second answer has no reasoning, but a user's third message strips that of the first.
        thinking = codec(THINKING_TEMPLATE)
        said = iter(("[think]111", "222", "333"))

        async def with_tool() -> SessionResult:
            session = session_of(thinking, policy_of(thinking, lambda _: next(said)))
            (one,) = await session.generate(session.spec.prompt.messages)
            (two,) = await session.generate([{"role": "tool", "content": "ok"}], parent=one)
            (three,) = await session.generate([user("And?")], parent=two)
            assert (one.forked, two.forked, three.forked) == (False, False, True)
            return await session.end()

        result = play(with_tool())
        assert [len(row.turn_ends) for row in result.rows] == [2, 1]

    def test_work_grows_with_what_is_added(self) -> None:
        counted = 0
        encode = type(PLAIN).encode_text

        class Counting(type(PLAIN)):  # type: ignore[misc]
            def encode_text(self, text: str) -> Any:
                nonlocal counted
                counted += len(text)
                return encode(self, text)

        counting = Counting(PLAIN.tokenizer)

        async def many() -> list[int]:
            session = session_of(counting, policy_of(PLAIN, digits), context=4096, max_turns=64)
            (turn,) = await session.generate(session.spec.prompt.messages)
            costs = []
            for _ in range(40):
                before = counted
                (turn,) = await session.generate([user("No.")], parent=turn)
                costs.append(counted - before)
            return costs

        assert set(play(many())) == {len("<user>No.<assistant>")}

    def test_tools_without_a_place_in_the_template_are_refused(self) -> None:
        session = session_of(PLAIN, policy_of(PLAIN, digits))
        with pytest.raises(RequestError, match=r"task/7 \(task 0, sample 0\).*no place for tools"):
            play(session.generate(session.spec.prompt.messages, tools=[WEATHER]))
        with pytest.raises(PromptError, match="no place for tools"):
            PLAIN.render_conversation([user("x")], [WEATHER])

    def test_another_list_of_tools_makes_a_fork(self) -> None:
        tools = codec(TOOLS_TEMPLATE)

        async def changing() -> SessionResult:
            session = session_of(tools, policy_of(tools, digits))
            (turn,) = await session.generate(session.spec.prompt.messages, tools=[WEATHER])
            await session.generate([user("No.")], parent=turn, tools=[WEATHER])
            await session.generate([user("No.")], parent=turn)
            return await session.end()

        result = play(changing())
        assert result.counts["rollout/forked_turns"] == 1
        assert sum(len(row.turn_ends) for row in result.rows) == 3


class TestRows:
    def test_a_path_is_a_row_and_only_sampled_tokens_are_trained(self) -> None:
        result = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits))))
        (row,) = result.rows
        assert row.prompt_ids == result.turns[0].prompt_ids
        assert row.prompt_ids + row.response_ids == result.turns[2].prompt_ids + result.turns[2].token_ids
        trained = [token for token, mine in zip(row.response_ids, row.mask, strict=True) if mine]
        assert trained == [token for turn in result.turns for token in turn.token_ids]
        assert [row.response_ids[end] for _, end in row.turn_ends] == [PLAIN.tokenizer.eos_token_id] * 3
        assert all(value == 0.0 for value, mine in zip(row.logprobs, row.mask, strict=True) if not mine)

    async def branches(self, order: list[int], seed: int | None = None) -> SessionResult:
        """A first turn and three that continue it at the same time, begun in some order."""
        chance = random.Random(seed)
        send = policy_of(PLAIN, digits, None if seed is None else lambda _: chance.random() / 200)
        session = session_of(PLAIN, send)
        (turn,) = await session.generate(session.spec.prompt.messages)

        async def one(number: int) -> None:
            await session.generate([user(f"Try {number}.")], parent=turn)

        await asyncio.gather(*(one(number) for number in order))
        return await session.end()

    def test_a_shared_turn_is_trained_in_the_first_row_only(self) -> None:
        result = play(self.branches([0, 1, 2]))
        assert [len(row.turn_ends) for row in result.rows] == [2, 1, 1]
        shared = result.turns[0]
        for row in result.rows:
            assert row.response_ids[: len(shared.token_ids)] == shared.token_ids
        assert [any(row.mask[: len(shared.token_ids)]) for row in result.rows] == [True, False, False]
        assert sum(sum(row.mask) for row in result.rows) == sum(len(turn.token_ids) for turn in result.turns)

    @pytest.mark.parametrize("seed", range(5))
    def test_arrival_changes_nothing(self, seed: int) -> None:
        order = [0, 1, 2]
        random.Random(seed).shuffle(order)
        assert play(self.branches(order, seed)) == play(self.branches([0, 1, 2]))

    def test_seeds_by_arrival_would_be_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        count = iter(range(100))
        monkeypatch.setattr("rollout.turns.session.turn_seed", lambda **_: next(count))
        assert play(self.branches([2, 1, 0])) != play(self.branches([0, 1, 2]))

    def test_a_row_for_each_turn(self) -> None:
        result = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits), rows="turns")))
        assert [row.response_ids for row in result.rows] == [turn.token_ids for turn in result.turns]
        assert [row.prompt_ids for row in result.rows] == [turn.prompt_ids for turn in result.turns]

    def test_a_broken_splice_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits))))
        prompt = Conversation.prompt

        def rendered_again(self: Any, parent: Any, added: Any, tools: Any) -> Any:
            found, forked = prompt(self, parent, added, tools)
            return (found[:-1] + found[-2:], forked) if parent is not None else (found, forked)

        monkeypatch.setattr(Conversation, "prompt", rendered_again)
        assert play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits)))).turns != honest.turns


class TestSeeds:
    def test_all_seeds_of_a_run_differ(self) -> None:
        seeds: list[int | None] = []
        for step in (1, 2):
            for task in range(4):
                for sample in range(8):
                    spec = replace(
                        spec_of(PLAIN), step=step, key=SampleKey(task, sample), request_index=task * 8 + sample
                    )
                    spec = replace(spec, prompt=replace(spec.prompt, id=f"task/{task}"))
                    # An answer that never changes: the lineage alone must keep the turns apart.
                    result = play(three_turns(session_of(PLAIN, policy_of(PLAIN, lambda _: "5"), spec)))
                    seeds += [turn.seed for turn in result.turns]
        assert len(set(seeds)) == len(seeds) == 2 * 4 * 8 * 3

    def test_identical_siblings_have_seeds_of_their_own_and_n_takes_consecutive_ones(self) -> None:
        async def siblings(n: int) -> set[int | None]:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            first = session.spec.prompt.messages
            for _ in range(4 // n):
                await session.generate(first, options=Options(n=n))
            return {turn.seed for turn in (await session.end()).turns}

        assert len(play(siblings(1))) == 4
        assert play(siblings(4)) == play(siblings(2)) == play(siblings(1))

    def test_a_seed_of_its_own_wins_and_takes_its_ordinal(self) -> None:
        async def seeds(explicit: int | None) -> list[int | None]:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            first = session.spec.prompt.messages
            found = [await session.generate(first, options=Options(seed=seed)) for seed in (None, explicit, None)]
            return [turn.seed for (turn,) in found]

        with_seed, without = play(seeds(11)), play(seeds(None))
        assert with_seed == [without[0], 11, without[2]]

    def test_seeds_of_their_own_may_arrive_in_any_order(self) -> None:
        async def seeded(order: list[int]) -> SessionResult:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            for seed in order:
                await session.generate(session.spec.prompt.messages, options=Options(seed=seed))
            return await session.end()

        assert play(seeded([3, 1, 2])) == play(seeded([1, 2, 3]))

    def test_copies_are_refused(self) -> None:
        session = session_of(PLAIN, policy_of(PLAIN, digits))
        with pytest.raises(RequestError, match="n is 2 with the seed 3"):
            play(session.generate(session.spec.prompt.messages, options=Options(n=2, seed=3)))


class TestRetries:
    def test_a_retry_is_answered_from_the_record(self) -> None:
        async def retried() -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            first = session.spec.prompt.messages
            (turn,) = await session.generate(first)
            assert await session.generate(first, options=Options(retry=True)) == [turn]
            (named,) = await session.generate(first, options=Options(idempotency_key="a"))
            assert named is not turn
            assert await session.generate(first, options=Options(idempotency_key="a")) == [named]
            result = await session.end()
            assert len(result.turns) == 2
            assert result.counts["rollout/retries"] == 2

        play(retried())

    def test_a_retry_of_what_never_arrived_is_sampled(self) -> None:
        async def late() -> int:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            await session.generate(session.spec.prompt.messages, options=Options(retry=True))
            return len((await session.end()).turns)

        assert play(late()) == 1

    def test_a_client_that_goes_away_leaves_its_turn_for_the_retry(self) -> None:
        async def gone() -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits, lambda _: 0.02))
            first = session.spec.prompt.messages
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.generate(first), 0.001)
            (turn,) = await session.generate(first, options=Options(retry=True))
            assert [one.token_ids for one in (await session.end()).turns] == [turn.generation.token_ids]

        play(gone())


class TestLimits:
    def test_turns_and_tokens_of_a_path_are_limited(self) -> None:
        with pytest.raises(BudgetError, match=r"has had 2 turns.*max_turns"):
            play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits), max_turns=2)))
        with pytest.raises(BudgetError, match="used the 14 tokens"):
            play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits), max_tokens=14)))

    def test_the_last_turn_has_the_tokens_that_are_left(self) -> None:
        # 4 sampled, 15 of "<user>No.<assistant>" are 5 characters and 2 role tokens.
        added = len(PLAIN.encode_text("<user>No.<assistant>"))
        session = session_of(PLAIN, policy_of(PLAIN, digits), max_tokens=4 + added + 2)

        async def two() -> Any:
            (turn,) = await session.generate(session.spec.prompt.messages)
            (turn,) = await session.generate([user("No.")], parent=turn)
            return turn

        assert len(play(two()).generation.token_ids) == 2

    @pytest.mark.parametrize(
        ("options", "context", "message"),
        [
            (Options(max_new_tokens=1000), 512, "1000 new tokens were asked for"),
            (Options(), 4, "the prompt has 8 tokens, and the context"),
            (Options(n=0), 512, "n is 0"),
            (Options(max_new_tokens=0), 512, "0 new tokens"),
        ],
    )
    def test_what_cannot_be_served_is_refused_with_the_sample(
        self, options: Options, context: int, message: str
    ) -> None:
        session = session_of(PLAIN, policy_of(PLAIN, digits), context=context)
        with pytest.raises(RequestError, match=rf"task/7 \(task 0, sample 0\): .*{message}"):
            play(session.generate(session.spec.prompt.messages, options=options))
        assert session.requests == 0

    def test_requests_are_limited(self) -> None:
        session = session_of(PLAIN, policy_of(PLAIN, digits), max_requests=3)
        with pytest.raises(RequestError, match=r"made 3 requests.*max_requests"):
            play(session.generate(session.spec.prompt.messages, options=Options(n=5)))

    def test_an_ended_session_takes_nothing(self) -> None:
        async def late() -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            result = await session.end()
            assert result.failure == "the model was never called"
            for call in (session.generate([user("x")]),):
                with pytest.raises(RequestError, match="has ended"):
                    await call
            with pytest.raises(RequestError, match="has ended"):
                session.set_reward(1.0)

        play(late())


class TestRewards:
    def test_rewards_belong_to_turns(self) -> None:
        async def rewarded() -> SessionResult:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            (one,) = await session.generate(session.spec.prompt.messages)
            session.set_reward(0.25)
            await session.generate([user("No.")], parent=one)
            session.set_reward(1.0)
            session.set_reward(0.5, one.id)
            return await session.end()

        result = play(rewarded())
        assert [turn.reward for turn in result.turns] == [0.5, 1.0]
        assert result.reward == 1.5

    @pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), None])
    def test_what_is_no_finite_number_is_refused(self, value: Any) -> None:
        async def give() -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            await session.generate(session.spec.prompt.messages)
            session.set_reward(value)

        with pytest.raises(RequestError, match="finite number"):
            play(give())

    def test_a_reward_for_no_turn_is_refused(self) -> None:
        async def give(turn: str | None) -> None:
            session = session_of(PLAIN, policy_of(PLAIN, digits))
            if turn is not None:
                await session.generate(session.spec.prompt.messages)
            session.set_reward(1.0, turn)

        with pytest.raises(RequestError, match="no turn nowhere to reward; known: turn-"):
            play(give("nowhere"))
        with pytest.raises(RequestError, match="no turn yet to reward"):
            play(give(None))

    def test_an_episode_without_rewards_has_none(self) -> None:
        assert play(three_turns(session_of(PLAIN, policy_of(PLAIN, digits)))).reward is None
