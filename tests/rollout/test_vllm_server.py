"""The rollout engine as a server: the bits of the engine in the worker's process, and a clear end when the server is lost."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from configs.schema import RolloutConfig
from rollout.engines import ask_each
from rollout.servers.vllm_server import ENVIRONMENT, VLLMServerEngine, server_command
from tests.engine_lab import ENV, burst, make_policy
from workers.launch.group import WorkerError, WorkerGroup

pytestmark = pytest.mark.timeout(300)
CONTEXT = 256
SHARED: dict[str, Any] = {"full_determinism": True, "threads": 1, "device": "cpu"}


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(seed=0, full_determinism=True, **settings)


def engine(model: str, url: str | None = None, **settings: Any) -> Any:
    return functools.partial(
        VLLMServerEngine, model, config=config(**settings), max_model_len=CONTEXT, url=url, **SHARED
    )


@pytest.fixture(scope="module")
def served(laboratory, policy) -> Iterator[WorkerGroup]:
    """An engine whose server the run has started."""
    group = laboratory.engine_group("served", engine(policy[0]), 1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> dict[str, Any]:
    model = make_policy(tmp_path_factory.mktemp("other"), seed=2)
    return {name: value.detach() for name, value in model.named_parameters()}


def test_a_server_has_the_bits_of_the_engine_in_process(served, lab, policy, other_weights):
    requests = burst(9)
    first = ask_each(served, requests)[0]
    assert first == lab.generate(model=policy[0], requests=requests, name="server")
    assert ask_each(served, requests[::-1])[0][::-1] == first

    served.run("load_weights", None, tensors=other_weights, version=1)
    lab.load(model=policy[0], tensors=other_weights, version=1, name="server")
    second = ask_each(served, requests)[0]
    assert second == lab.generate(model=policy[0], requests=requests, name="server")
    assert second != first
    assert {generation.weight_version for generation in second} == {1}

    (facts,) = served.run("facts")
    assert facts["engine"]["server"] == "started by the run"
    own = lab.facts(model=policy[0], name="server")
    assert {key: facts[key] for key in own if key not in ("engine", "environment")} == {
        key: own[key] for key in own if key not in ("engine", "environment")
    }
    assert served.run("take_counts") == [{"rollout/preemptions": 0}]


def test_weights_that_do_not_fit_are_refused_before_the_server_has_them(served, other_weights):
    fewer = dict(list(other_weights.items())[1:])
    with pytest.raises(WorkerError, match="missing"):
        served.run("load_weights", None, tensors=fewer, version=7)


@pytest.fixture(scope="module")
def url(policy) -> Iterator[str]:
    """A server that somebody has started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = server_command(
        policy[0],
        config=config(max_num_seqs=32),
        max_model_len=CONTEXT,
        tokenizer=None,
        cpu_linear="auto",
        trust_remote_code=False,
        listen={"host": "127.0.0.1", "port": port},
        **SHARED,
    )
    env = {**os.environ, **ENV, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def join(laboratory, url: str, model: str, name: str, **settings: Any) -> WorkerGroup:
    """An engine that joins the server; tried again while that is starting."""
    until = time.monotonic() + 120
    while True:
        group = laboratory.engine_group(name, engine(model, url, **settings), 1)
        try:
            group.ready()
            return group
        except WorkerError as error:
            group.close()
            if "is gone" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(2)


def test_a_running_server_is_joined_and_another_runs_weights_are_noticed(laboratory, url, policy, lab, other_weights):
    requests = burst(6)
    first = join(laboratory, url, policy[0], "joined", max_num_seqs=32)
    assert ask_each(first, requests)[0] == lab.generate(model=policy[0], requests=requests)
    first.run("load_weights", None, tensors=other_weights, version=3)

    second = join(laboratory, url, policy[0], "second", max_num_seqs=32)
    assert ask_each(second, requests)[0] == lab.generate(
        model=policy[0], requests=requests
    )  # its own weights, version 0
    with pytest.raises(WorkerError, match=r"has the weights .* does another run use it"):
        ask_each(first, requests)
    first.close()
    second.close()


def test_a_running_server_with_other_settings_or_another_model_is_refused(laboratory, url, policy, tmp_path):
    join(laboratory, url, policy[0], "waited", max_num_seqs=32).close()
    make_policy(tmp_path / "untied", tie=False)
    with pytest.raises(WorkerError, match=r"max_num_seqs=32 where rollout\.max_num_seqs=8; another model"):
        join(laboratory, url, str(tmp_path / "untied"), "refused", max_num_seqs=8)


def is_server(process: psutil.Process) -> bool:
    words = process.info["cmdline"] or []
    return "vllm.entrypoints.openai.api_server" in words and "--uds" in words


def test_a_server_that_dies_at_work_is_named_at_once(laboratory, policy):
    before = {process.pid for process in psutil.process_iter(["cmdline"]) if is_server(process)}
    group = laboratory.engine_group("dying", engine(policy[0]), 1)
    group.ready()
    (pid,) = {process.pid for process in psutil.process_iter(["cmdline"]) if is_server(process)} - before
    futures = group.submit(0, burst(40))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the server that the run had started was killed by SIGKILL"):
        futures[0].result(60)
    group.close()


def test_a_server_that_can_not_start_says_so(laboratory, policy):
    group = laboratory.engine_group("impossible", engine(policy[0], engine_args={"no_such_argument": 1}), 1)
    with pytest.raises(WorkerError, match="exited with code 2"):
        group.ready()
    group.close()
