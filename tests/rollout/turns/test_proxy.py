"""The OpenAI-compatible address, asked by the official client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from configs.schema import ProxyConfig
from rollout.turns.proxy.server import ProxyServer
from rollout.turns.runner import OpenSessions
from rollout.turns.session import SessionResult
from rollout.types import SampleKey
from tests.rollout.turns.scripted import spec_of, user
from tests.rollout.turns.served import ADD, PLAIN, TOOLS, Served, body_of, calls_then_answers, served

QUESTION = [user("2 + 3?")]


def with_client(use: Callable[[Any, Any, Served], Any], **settings: Any) -> Any:
    """Run `use(client, session, served)` against a real server."""

    async def go() -> Any:
        async with served(**settings) as here:
            session = here.new()
            async with here.client(session, max_retries=0) as client:
                return await use(client, session, here)

    return asyncio.run(go())


def test_an_answer_waits_for_no_acknowledgement() -> None:
    """Nagle's algorithm is off in the server's end of a connection."""

    async def go() -> None:
        async with served() as here:
            url = httpx2.URL(here.url)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            with own_socket_to(writer.get_extra_info("sockname")) as theirs:
                assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()

    asyncio.run(go())


def own_socket_to(address: Any) -> socket.socket:
    """A copy of this process's socket whose other end has this address."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or one without another end
            sock = socket.socket(fileno=os.dup(int(name)))
            if sock.getpeername() == address:
                return sock
            sock.close()
    raise AssertionError(f"no socket is connected to {address}")


def refusal(path: str = "chat", settings: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The error of a refused request, which must have left no turn."""

    async def use(client: Any, session: Any, here: Served) -> dict[str, Any]:
        create = client.chat.completions.create if path == "chat" else client.responses.create
        given = {"messages": QUESTION} if path == "chat" else {"input": "2 + 3?"}
        known = {name: fields[name] for name in ("model", "messages", "input") if name in fields}
        extra = {name: value for name, value in fields.items() if name not in known}
        with pytest.raises(openai.APIStatusError) as caught:
            await create(**{"model": "policy", **given, **known}, extra_body=extra)
        assert session.requests == 0
        error = body_of(caught.value)
        assert session.name in error["message"]
        return {**error, "status": caught.value.status_code}

    return with_client(use, **(settings or {}))


class TestChat:
    def test_an_answer_has_the_turn_s_text_name_and_usage(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            found = await client.chat.completions.create(model="policy", messages=QUESTION)
            (turn,) = session.conversation.in_order()
            assert found.id == turn.id
            assert found.choices[0].message.content == PLAIN.decode(turn.generation.token_ids)
            assert found.choices[0].finish_reason == "stop"
            assert found.usage.prompt_tokens == len(turn.prompt_ids)
            assert found.usage.completion_tokens == len(turn.generation.token_ids)
            assert turn.prompt_ids == session.spec.prompt.token_ids

        with_client(use)

    def test_a_conversation_continues_the_sampled_tokens(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> SessionResult:
            first = await client.chat.completions.create(model="policy", messages=QUESTION)
            answer = first.choices[0].message
            await client.chat.completions.create(model="policy", messages=[*QUESTION, answer, user("No.")])
            return await session.end()

        one, other = with_client(use).turns
        assert other.parent == 0
        assert other.prompt_ids[: len(one.prompt_ids + one.token_ids)] == one.prompt_ids + one.token_ids

    def test_tools_are_shown_called_and_answered(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> SessionResult:
            first = await client.chat.completions.create(model="policy", messages=QUESTION, tools=[ADD])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
            said = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
            second = await client.chat.completions.create(model="policy", messages=said, tools=[ADD])
            assert second.choices[0].message.content == "It is 5."
            return await session.end()

        settings = {"with_codec": TOOLS, "say": calls_then_answers, "parser": "hermes"}
        result = with_client(use, **settings)
        assert [turn.parent for turn in result.turns] == [None, 0]
        assert "add" in TOOLS.decode_all(result.turns[0].prompt_ids)

    def test_tool_choice_none_shows_no_tools(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            await client.chat.completions.create(model="policy", messages=QUESTION, tools=[ADD], tool_choice="none")
            (turn,) = session.conversation.in_order()
            assert turn.prompt_ids == session.spec.prompt.token_ids

        with_client(use, with_codec=TOOLS, parser="hermes")

    def test_n_answers_are_turns_of_their_own(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            found = await client.chat.completions.create(model="policy", messages=QUESTION, n=3)
            assert [choice.index for choice in found.choices] == [0, 1, 2]
            turns = session.conversation.in_order()
            assert [choice.turn_id for choice in found.choices] == [turn.id for turn in turns]
            assert len({turn.seed for turn in turns}) == 3

        with_client(use)

    def test_logprobs_are_the_recorded_ones(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            found = await client.chat.completions.create(model="policy", messages=QUESTION, logprobs=True)
            tokens = found.choices[0].logprobs.content
            (turn,) = session.conversation.in_order()
            assert tuple(token.logprob for token in tokens) == turn.generation.logprobs
            assert tokens[-1].token == "<eos>"
            assert "".join(token.token for token in tokens[:-1]) == found.choices[0].message.content

        with_client(use)

    def test_stop_and_the_cap_reach_the_engine(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            ask = client.chat.completions.create
            found = await ask(model="policy", messages=QUESTION, max_completion_tokens=2, stop="x")
            assert found.choices[0].finish_reason == "length"
            await ask(model="policy", messages=QUESTION, max_tokens=2, max_completion_tokens=2, stop=["x"])
            one, other = session.conversation.in_order()
            assert one.content == other.content  # the same request under two spellings

        with_client(use)

    def test_a_stream_says_the_same(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            chunks = []
            stream = await client.chat.completions.create(
                model="policy", messages=QUESTION, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                chunks.append(chunk)
            (turn,) = session.conversation.in_order()
            first, last, usage = chunks
            (call,) = first.choices[0].delta.tool_calls
            assert (call.index, call.id) == (0, turn.message["tool_calls"][0]["id"])
            assert last.choices[0].finish_reason == "tool_calls"
            assert usage.usage.completion_tokens == len(turn.generation.token_ids)

        with_client(use, with_codec=TOOLS, say=calls_then_answers, parser="hermes")

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": 0.5}, "temperature"),
            ({"top_p": 0.9}, "top_p"),
            ({"presence_penalty": 1}, "presence_penalty"),
            ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"logit_bias": {"5": 1}}, "logit_bias"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls"),
            ({"store": True}, "store"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"n": 0}, "n"),
            ({"n": True}, "n"),
            ({"n": 2, "seed": 1}, "seed"),
            ({"seed": -1}, "seed"),
            ({"seed": 1.5}, "seed"),
            ({"stop": [""]}, "stop"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": {}}, "stream_options"),
            ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
            ({"max_tokens": 5000}, "max_completion_tokens"),
            ({"tools": [ADD]}, "tools"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}]}, "tools.0.strict"),  # type: ignore[dict-item]
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
            ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": "x", "mood": "bad"}]}, "messages.0.mood"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields: dict[str, Any], param: str) -> None:
        found = refusal(**fields)
        assert (found["status"], found["param"]) == (400, param)

    def test_what_says_what_the_run_says_is_accepted(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "developer", "content": "Add."}, *QUESTION],
                temperature=1, top_p=1.0, presence_penalty=0, user="me", metadata={"a": "b"}, store=False,
                parallel_tool_calls=True, response_format={"type": "text"}, extra_body={"top_k": 0},
            )  # fmt: skip

        with_client(use)

    def test_another_model_is_refused(self) -> None:
        found = refusal(model="gpt-4o")
        assert (found["status"], found["code"]) == (404, "model_not_found")

    def test_a_prompt_longer_than_the_context_is_refused(self) -> None:
        found = refusal(messages=[user("x" * 3000)])
        assert (found["status"], found["code"]) == (400, "context_length_exceeded")

    def test_tools_without_a_place_in_the_template_are_refused(self) -> None:
        assert "chat template" in refusal(settings={"parser": "hermes"}, tools=[ADD])["message"]


class TestSeeds:
    def test_an_explicit_seed_wins_in_both_apis_and_consumes_its_ordinal(self) -> None:
        async def seeds(explicit: int | None, client: Any, session: Any) -> list[int]:
            more = {} if explicit is None else {"extra_body": {"seed": explicit}}
            await client.chat.completions.create(model="policy", messages=QUESTION, **more)
            await client.chat.completions.create(model="policy", messages=QUESTION)
            return [turn.seed for turn in sorted(session.conversation.in_order(), key=lambda turn: turn.ordinal)]

        with_one = with_client(lambda client, session, here: seeds(7, client, session))
        without = with_client(lambda client, session, here: seeds(None, client, session))
        assert with_one[0] == 7
        assert without[0] != 7
        assert with_one[1] == without[1]

        async def by_responses(client: Any, session: Any, here: Served) -> list[int]:
            await client.responses.create(model="policy", input="2 + 3?", extra_body={"seed": 7})
            return [turn.seed for turn in session.conversation.in_order()]

        assert with_client(by_responses) == [7]

    def test_siblings_have_their_seeds_in_whatever_order_they_arrive(self) -> None:
        def play(order: int) -> Any:
            waits = random.Random(order)

            async def use(client: Any, session: Any, here: Served) -> Any:
                async def branch(words: str) -> None:
                    await asyncio.sleep(waits.random() / 50)
                    said = [user(words)]
                    first = await client.chat.completions.create(model="policy", messages=said)
                    await asyncio.sleep(waits.random() / 50)
                    said += [first.choices[0].message, user("Again.")]
                    await client.chat.completions.create(model="policy", messages=said, n=2)

                await asyncio.gather(*(branch(f"Branch {number}") for number in (1, 2, 3, 3)))
                result = await session.end()
                return result.turns, result.rows

            return with_client(use, delay=lambda _: waits.random() / 50)

        assert play(1) == play(2) == play(3)

    def test_a_retry_is_answered_from_the_record(self) -> None:
        class Lossy(httpx2.AsyncHTTPTransport):
            """Drops the first answers after they were made."""

            lost = 0

            async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
                response = await super().handle_async_request(request)
                await response.aread()
                if self.lost < 2:
                    self.lost += 1
                    raise httpx2.ReadError("the answer was lost", request=request)
                return response

        async def go(transport: httpx2.AsyncHTTPTransport) -> tuple[str, SessionResult]:
            async with served() as here:
                session = here.new()
                http = httpx2.AsyncClient(transport=transport)
                async with here.client(session, max_retries=3, http_client=http) as client:
                    found = await client.chat.completions.create(model="policy", messages=QUESTION)
                return found.id, await session.end()

        name, lossy = asyncio.run(go(Lossy()))
        again, plain = asyncio.run(go(httpx2.AsyncHTTPTransport()))
        assert name == again
        assert lossy.turns == plain.turns
        assert len(lossy.turns) == 1
        assert (lossy.counts["rollout/retries"], plain.counts["rollout/retries"]) == (2, 0)

    def test_an_idempotency_key_names_a_request(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            ask = client.chat.completions.create
            headers = {"Idempotency-Key": "one"}
            first = await ask(model="policy", messages=QUESTION, extra_headers=headers)
            again = await ask(model="policy", messages=QUESTION, extra_headers=headers)
            other = await ask(model="policy", messages=QUESTION)
            assert first.id == again.id != other.id

        with_client(use)

    def test_a_client_that_goes_away_does_not_take_its_turn_with_it(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> int:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="policy", messages=QUESTION, timeout=0.1)
            return len((await session.end()).turns)

        assert with_client(use, delay=lambda _: 0.4) == 1


class TestResponses:
    def test_items_go_round_by_previous_response_id_and_by_input(self) -> None:
        def turns(by_id: bool) -> Any:
            async def use(client: Any, session: Any, here: Served) -> Any:
                tool = {"type": "function", **ADD["function"], "strict": False}  # type: ignore[dict-item]
                ask: dict[str, Any] = {"model": "policy", "tools": [tool], "instructions": "Add."}
                first = await client.responses.create(input="2 + 3?", **ask)
                (call,) = first.output
                assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 2, "b": 3})
                output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
                if by_id:
                    second = await client.responses.create(input=[output], previous_response_id=first.id, **ask)
                else:
                    said = [{"role": "user", "content": "2 + 3?"}, call.model_dump(), output]
                    second = await client.responses.create(input=said, **ask)
                assert second.output_text == "It is 5."
                return (await session.end()).turns

            return with_client(use, with_codec=TOOLS, say=calls_then_answers, parser="hermes")

        assert turns(True) == turns(False)
        assert [turn.parent for turn in turns(True)] == [None, 0]

    def test_both_apis_make_the_same_turn(self) -> None:
        async def chat(client: Any, session: Any, here: Served) -> Any:
            await client.chat.completions.create(model="policy", messages=QUESTION)
            return (await session.end()).turns

        async def responses(client: Any, session: Any, here: Served) -> Any:
            await client.responses.create(model="policy", input="2 + 3?")
            return (await session.end()).turns

        assert with_client(chat) == with_client(responses)

    def test_instructions_of_an_earlier_response_do_not_carry_over(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> str:
            first = await client.responses.create(model="policy", input="2 + 3?", instructions="Add.")
            await client.responses.create(model="policy", input="No.", previous_response_id=first.id)
            turns = session.conversation.in_order()
            (found,) = [turn for turn in turns if turn.id != first.id]
            assert found.forked
            return PLAIN.decode_all(found.prompt_ids)

        assert with_client(use).startswith("<user>2 + 3?<assistant>")

    def test_a_stream_ends_with_the_response(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            kinds, text = [], ""
            async with client.responses.stream(model="policy", input="2 + 3?") as stream:
                async for event in stream:
                    kinds.append(event.type)
                    text += event.delta if event.type == "response.output_text.delta" else ""
                final = await stream.get_final_response()
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            assert final.output_text == text == session.conversation.in_order()[0].message["content"]

        with_client(use)

    def test_a_cut_answer_is_incomplete(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            found = await client.responses.create(model="policy", input="2 + 3?", max_output_tokens=2)
            assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")

        with_client(use)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
            ({"temperature": 0.2}, "temperature"),
            ({"text": {"format": {"type": "json_object"}}}, "text"),
            ({"reasoning": {"effort": "high"}}, "reasoning"),
            ({"conversation": "c"}, "conversation"),
            ({"tools": [{"type": "web_search"}]}, "tools.0"),
            ({"previous_response_id": "turn-0"}, "previous_response_id"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields: dict[str, Any], param: str) -> None:
        assert refusal("responses", **fields)["param"] == param


class TestEnds:
    def test_requests_of_an_ended_episode_and_of_strangers_are_refused(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            await session.end()
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="policy", messages=QUESTION)
            assert (caught.value.status_code, body_of(caught.value)["code"]) == (410, "session_ended")
            here.sessions.remove(session)
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="policy", messages=QUESTION)
            assert (caught.value.status_code, session.name in str(caught.value)) == (410, True)
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="sk-none").models.list()

        with_client(use)

    def test_a_used_up_budget_has_a_code_of_its_own(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            first = await client.responses.create(model="policy", input="2 + 3?")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="policy", input="No.", previous_response_id=first.id)
            assert body_of(caught.value)["code"] == "episode_budget"
            assert session.budget_ended

        with_client(use, max_turns=1)

    def test_a_thousand_requests_are_too_many(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> list[int]:
            headers = {"Authorization": f"Bearer {here.sessions.key_of(session)}"}
            bodies = [{"model": "policy", "messages": [user(f"{i}")]} for i in range(1000)]
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(base_url=here.url, headers=headers, limits=limits, timeout=300) as http:
                found = await asyncio.gather(*(http.post("/chat/completions", json=body) for body in bodies))
            refused = [one for one in found if one.status_code == 429]
            assert session.name in refused[0].json()["error"]["message"]
            assert refused[0].headers["x-should-retry"] == "false"  # or the official client would ask again
            return [sum(one.status_code == 200 for one in found), len(refused)]

        assert with_client(use, max_requests=256) == [256, 744]

    def test_other_addresses_and_broken_json(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            with pytest.raises(openai.NotFoundError) as caught:
                await client.embeddings.create(model="policy", input="x")
            assert "embeddings" in body_of(caught.value)["message"]
            headers = {"Authorization": f"Bearer {here.sessions.key_of(session)}"}
            async with httpx2.AsyncClient(base_url=here.url, headers=headers) as http:
                found = await http.post("/chat/completions", content="{")
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")

        with_client(use)

    def test_a_failure_of_ours_is_an_error_in_openai_s_form(self) -> None:
        async def use(client: Any, session: Any, here: Served) -> None:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="policy", messages=QUESTION)
            assert body_of(caught.value)["type"] == "server_error"

        def broken(request: Any) -> str:
            raise RuntimeError("the engine is gone")

        with_client(use, say=broken)

    def test_two_hundred_sessions_at_once_leave_none_open(self) -> None:
        async def go() -> list[SessionResult]:
            async with served() as here:
                specs = [spec_of(PLAIN, key=SampleKey(0, i), request_index=i) for i in range(200)]
                sessions = [here.new(spec) for spec in specs]

                async def one(session: Any) -> SessionResult:
                    async with here.client(session) as client:
                        await client.chat.completions.create(model="policy", messages=QUESTION)
                    result = await session.end()
                    here.sessions.remove(session)
                    return result

                found = await asyncio.gather(*(one(session) for session in sessions))
                assert len(here.sessions) == 0
                return found

        assert len({result.turns[0].seed for result in asyncio.run(go())}) == 200


class TestListening:
    def test_a_port_in_use_is_named(self) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            server = ProxyServer(OpenSessions(), ProxyConfig(port=port - 1), 1)
            with pytest.raises(
                OSError, match=rf"rollout.proxy.port={port - 1}: port {port} of 127.0.0.1 \(process 1\) is in use"
            ):
                asyncio.run(server.start())

    def test_other_machines_need_an_admin_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="admin_key_env"):
            ProxyServer(OpenSessions(), ProxyConfig(host="0.0.0.0"), 0)
        with pytest.raises(ValueError, match="ADMIN_KEY"):
            ProxyServer(OpenSessions(), ProxyConfig(host="0.0.0.0", admin_key_env="ADMIN_KEY"), 0)
        monkeypatch.setenv("ADMIN_KEY", "secret")
        ProxyServer(OpenSessions(), ProxyConfig(host="0.0.0.0", admin_key_env="ADMIN_KEY"), 0)

    def test_validation_s_own_sampling_is_what_counts(self) -> None:
        async def go() -> None:
            async with served() as here:
                spec = spec_of(PLAIN)
                session = here.new(replace(spec, sampling=replace(spec.sampling, temperature=0.0)))
                async with here.client(session) as client:
                    await client.chat.completions.create(model="policy", messages=QUESTION, temperature=0)
                    with pytest.raises(openai.BadRequestError, match="temperature"):
                        await client.chat.completions.create(model="policy", messages=QUESTION, temperature=1)

        asyncio.run(go())
