"""Running servers of SGLang as rollout engines, against a small server that speaks its requests (`sglang_standin.py`)."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from typing import Any

import pytest

from configs.schema import RolloutConfig
from rollout.servers.http_engine import ServerError
from rollout.servers.sglang_server import SGLangServerEngine, backend_warnings, check_server
from rollout.types import Generation, GenerationRequest, SampleKey, Sampling
from tests.engine_lab import burst, make_policy
from tests.rollout.sglang_standin import standin

pytestmark = pytest.mark.timeout(300)
CONTEXT = 256


@contextlib.contextmanager
def joined(model: str, url: str, **settings: Any) -> Iterator[SGLangServerEngine]:
    """An engine on a server."""
    engine = SGLangServerEngine(
        model,
        config=RolloutConfig(seed=0, full_determinism=True, **settings),
        max_model_len=CONTEXT,
        full_determinism=False,  # flags of this process; the test's own stay as they are
        threads=1,
        url=url,
    )
    try:
        yield engine
    finally:
        engine.close()


def ask(engine: SGLangServerEngine, requests: list[GenerationRequest]) -> list[Generation]:
    """All answers, in the order of the requests."""
    for number, request in enumerate(requests):
        engine.add(number, request)
    found: dict[int, Generation] = {}
    while len(found) < len(requests):
        assert select.select([engine.wakes], [], [], 60)[0]
        found.update(engine.step())
    return [found[number] for number in range(len(requests))]


def one(**sampling: Any) -> list[GenerationRequest]:
    """A single request."""
    return [GenerationRequest(SampleKey(3, 1), (1, 2, 3), 5, Sampling(max_new_tokens=2, temperature=1.0, **sampling))]


@pytest.fixture(scope="module")
def server(policy) -> Iterator[str]:
    with standin(policy[0]) as (url, _):
        yield url


def test_requests_have_seeds_of_their_own_and_new_weights_their_name(server, policy, tmp_path):
    requests = burst(6)
    with joined(policy[0], server) as engine:
        first = ask(engine, requests)
        assert ask(engine, requests[::-1])[::-1] == first
        assert [len(generation.token_ids) for generation in first] == [r.sampling.max_new_tokens for r in requests]
        same = [
            GenerationRequest(SampleKey(0, i), (5, 6, 7), 100 + i, Sampling(max_new_tokens=16, temperature=1.0))
            for i in range(6)
        ]
        assert len({generation.token_ids for generation in ask(engine, same)}) == 6
        other = make_policy(tmp_path / "other", seed=2)
        engine.load_weights({name: value.detach() for name, value in other.named_parameters()}, 1)
        second = ask(engine, requests)
        assert second != first
        assert {generation.weight_version for generation in second} == {1}
        facts = engine.facts()["engine"]
        assert (facts["version"], facts["weight_version"], facts["warnings"]) == ("stand-in", 1, [])


def test_weights_of_another_run_are_noticed(server, policy):
    with joined(policy[0], server) as first, joined(policy[0], server) as second:
        ask(second, one())
        with pytest.raises(ServerError, match="does another run use it"):
            ask(first, one())


def test_stop_tokens_that_sglang_would_ignore_are_refused(server, policy):
    refused = pytest.raises(ValueError, match=r"stop token ids \[9\] with ignore_eos: SGLang would ignore them")
    with joined(policy[0], server) as engine, refused:
        engine.add(0, one(ignore_eos=True, stop_token_ids=(9,))[0])


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("abort", r"SampleKey\(task=3, sample=1.* ended the request with 'abort: out of memory'"),
        ("nan", "the log-probability nan"),
        ("stop", r"ended the response at token 12345, which is no stop token of the run"),
        ("version", "has the weights 'another' instead of"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_ends_the_run(policy, fault, error):
    with standin(policy[0], f'fault="{fault}"') as (url, _), joined(policy[0], url) as engine:
        engine.add(0, one()[0])
        select.select([engine.wakes], [], [], 60)
        with pytest.raises(Exception, match=error):
            engine.step()


@pytest.mark.parametrize(("fault", "error"), [("update", "did not take the weights"), ("flush", "answered 400")])
def test_weights_that_the_server_does_not_take_end_the_run(policy, fault, error):
    refused = pytest.raises(ServerError, match=error)
    with standin(policy[0], f'fault="{fault}"') as (url, _), refused, joined(policy[0], url):
        pass


def test_a_server_that_dies_at_work_is_named(policy):
    with standin(policy[0], 'fault="hang"') as (url, process), joined(policy[0], url) as engine:
        engine.add(0, one()[0])
        process.kill()
        with pytest.raises(ServerError, match=f"{url} POST /generate: .*the server is gone"):
            ask(engine, one())


def test_another_program_at_the_address_is_named(policy):
    with pytest.raises(ServerError, match="is gone"), joined(policy[0], "http://127.0.0.1:1"):
        pass


INFO = {"dtype": "float32", "enable_deterministic_inference": True, "disable_radix_cache": False}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dtype": "auto"}, "dtype=auto where rollout.dtype=float32"),
        ({"enable_deterministic_inference": False}, "--enable-deterministic-inference"),
        ({"disable_radix_cache": True}, "rollout.enable_prefix_caching=True"),
        ({"context_length": 64}, "a context of 64 tokens where the run needs 256"),
        ({"architectures": ["Other"]}, "another model"),
    ],
)
def test_a_server_with_other_settings_is_refused(policy, change, error):
    config = RolloutConfig(seed=0, full_determinism=True)
    check_server("http://a:1", INFO, config, policy[0], CONTEXT)
    with pytest.raises(ServerError, match=error):
        check_server("http://a:1", INFO | change, config, policy[0], CONTEXT)


def test_seeds_that_nobody_asked_for_need_no_deterministic_server(policy):
    config = RolloutConfig(seed=0, full_determinism=False, deterministic_sampling=False)
    check_server("http://a:1", INFO | {"enable_deterministic_inference": False}, config, policy[0], CONTEXT)


def test_an_attention_backend_that_is_not_documented_as_deterministic_is_a_warning():
    assert [backend_warnings("u", {"attention_backend": name}) for name in (None, "fa3", "triton", "flashinfer")] == [
        []
    ] * 4
    assert "attention_backend=torch_native" in backend_warnings("u", {"attention_backend": "torch_native"})[0]
