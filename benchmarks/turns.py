"""What episodes of several turns cost beside what the engine does for them.

    python benchmarks/turns.py [--turns 128] [--sessions 64] [--out benchmarks/results/turns.json]

length       the project's own time for a turn (prompt, splice, seed, record), early and late in a long episode; the policy here answers at once
throughput   the same requests through sessions, and sent straight to the engine, each as soon as the one before it has its answer; rounds in turns, each
             with an empty prefix cache
proxy        agents' requests by HTTP, 256 sessions at once on one process, and one alone; the policy here answers at once. `cpu_ms` is the process's own
             time for a request: the sessions, and the exchange with the driver, included

The throughput part has a random model of about 20 million parameters on one vLLM engine.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

# A script's own folder comes first on the path, where a file of it could hide a package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import httpx2  # noqa: E402

from configs.compose import load_config  # noqa: E402
from configs.schema import RolloutConfig, TurnsConfig  # noqa: E402
from rollout.turns.answers import AnswerReader  # noqa: E402
from rollout.turns.host import SessionHost  # noqa: E402
from rollout.turns.players import make_runner  # noqa: E402
from rollout.turns.rollouts import SessionHosts  # noqa: E402
from rollout.turns.session import Session, SessionSpec  # noqa: E402
from rollout.types import Generation, GenerationRequest, Prompt, SampleKey, Sampling  # noqa: E402
from trainer.data.prompts import PromptCodec  # noqa: E402
from workers.launch.launcher import make_launcher  # noqa: E402

NO = {"role": "user", "content": "No. Try again."}
NEW_TOKENS = 8
CONTEXT = 4096


def codec() -> PromptCodec:
    """The small models' tokenizer."""
    from trainer.tiny.tokenizer import build_tokenizer

    return PromptCodec(build_tokenizer(CONTEXT))


def spec(sample: int = 0, question: str = "Calculate 57 + 65.") -> SessionSpec:
    """A session on one question."""
    (rendered,) = codec_here().render([("row", question)])
    prompt = Prompt("task/0", "task", rendered.token_ids, rendered.text, rendered.messages, "122")
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True)
    return SessionSpec(SampleKey(0, sample), sample, prompt, "train", 1, sampling, run_seed=0)


@functools.cache
def codec_here() -> PromptCodec:
    """This process's codec."""
    return codec()


def sevens(request: GenerationRequest) -> Generation:
    """The answer of a policy that costs nothing."""
    return Generation(request.key, answer_ids(), (-1.0,) * NEW_TOKENS, "length", 0)


@functools.cache
def answer_ids() -> tuple[int, ...]:
    """The tokens of that answer."""
    return tuple(codec_here().encode_text("7" * NEW_TOKENS))


class Insisting:
    """A runner that says no until the budget of turns is used up."""

    def __init__(self, config: RolloutConfig, *_: Any) -> None:
        self._turns = config.turns.max_turns

    async def start(self, sessions: Any, base_url: str | None) -> None:
        """Nothing to load."""

    async def admit(self, session: Any) -> None:
        """Nothing to wait for."""

    async def run(self, session: Session) -> None:
        """Play one episode."""
        (turn,) = await session.generate(session.spec.prompt.messages)
        for _ in range(self._turns - 1):
            (turn,) = await session.generate([NO], parent=turn)

    async def close(self) -> None:
        """Nothing to free."""


def length(turns: int, episodes: int) -> dict[str, float]:
    """Milliseconds a turn around turn 8 and at the end, with the parent named (environments) and found in the messages (chat completions)."""

    async def at_once(request: GenerationRequest) -> Generation:
        return sevens(request)

    async def play(named: bool) -> list[float]:
        limits = TurnsConfig(max_turns=turns)
        session = Session(spec(), limits, 1 << 20, codec_here(), AnswerReader(codec_here()), at_once)
        said, times = list(session.spec.prompt.messages), []
        turn = None
        for _ in range(turns):
            start = time.perf_counter()
            messages = said if turn is None or not named else [NO]
            (turn,) = await session.generate(messages, parent=turn if named else None)
            times.append(time.perf_counter() - start)
            said += [turn.message, NO]
        assert session.conversation.forks == 0, "each turn was to continue the last"
        return times

    found: dict[str, float] = {}
    for name, named in (("environment", True), ("chat", False)):
        runs = [asyncio.run(play(named)) for _ in range(episodes)]
        found[f"{name}_ms_turn_8"] = 1e3 * median(value for run in runs for value in run[4:12])
        found[f"{name}_ms_turn_{turns}"] = 1e3 * median(value for run in runs for value in run[-8:])
    return found


def throughput(sessions: int, turns: int, rounds: int, folder: Path) -> dict[str, float]:
    """Seconds for all episodes through sessions and straight, medians of rounds in turns."""
    from rollout.engines import RolloutEngines
    from rollout.episodes import Rollout

    launcher, engines, weights = start_engine(folder)
    try:
        config = RolloutConfig(environment="insisting", turns=TurnsConfig(max_turns=turns))
        host = functools.partial(SessionHost, config=config, context=CONTEXT, make_codec=codec, make_runner=Insisting)
        hosts = SessionHosts(launcher.local_group("sessions", host, 1), RolloutEngines(engines))
        hosts.open()
        rollout = Rollout(RolloutEngines(engines), codec_here().decode, 0, hosts=hosts)

        def forget() -> None:
            """Empty the prefix cache, as new weights do."""
            rollout.engines.load_weights(weights, 0)
            rollout.engines.wait_for_weights()

        times: dict[str, list[float]] = {"sessions": [], "straight": []}
        for number in range(rounds + 1):  # the first round warms up
            one = spec()
            forget()
            start = time.perf_counter()
            episodes = rollout.start([one.prompt], one.sampling, n=sessions, split="train", step=number + 1).result()
            times["sessions"].append(time.perf_counter() - start)
            chains = [
                [
                    GenerationRequest(e.key, t.prompt_ids, t.seed, one.sampling, e.key.sample * turns + i)
                    for i, t in enumerate(e.turns)
                ]
                for e in episodes
            ]
            forget()
            start = time.perf_counter()
            straight(rollout.engines, chains)
            times["straight"].append(time.perf_counter() - start)
    finally:
        launcher.close()
    through, alone = median(times["sessions"][1:]), median(times["straight"][1:])
    return {"sessions_s": through, "straight_s": alone, "share_of_engine": alone / through}


def straight(engines: Any, chains: list[list[GenerationRequest]]) -> None:
    """Send every chain's requests one after the other, all chains at once, without anything between."""
    left = threading.Semaphore(0)

    def send(chain: list[GenerationRequest], at: int) -> None:
        if at == len(chain):
            left.release()
            return
        future: Future[Generation] = engines.ask(chain[at])
        future.add_done_callback(lambda _: aside.submit(send, chain, at + 1))

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as aside:
        for chain in chains:
            aside.submit(send, chain, 0)
        for _ in chains:
            left.acquire()


def start_engine(folder: Path) -> tuple[Any, Any, Any]:
    """A launcher, a group with one engine of a random model, and the model's weights."""
    import torch

    from trainer.build import rollout_engine
    from trainer.tiny.build import new_policy, save
    from trainer.tiny.recipe import Shape
    from workers import vllm_process

    shape = Shape(
        hidden_size=512,
        intermediate_size=1536,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        max_positions=CONTEXT,
    )
    tokenizer = codec_here().tokenizer
    policy = new_policy(shape, tokenizer, torch.Generator().manual_seed(0))
    save(policy, tokenizer, folder / "policy")
    config = load_config(
        [
            "experiment=micro",
            f"model.path={folder / 'policy'}",
            "launcher.name=torchrun",
            "rollout.kv_cache_mib=2048",
            "rollout.max_num_seqs=256",
        ]
    )
    launcher = make_launcher(config, folder, vllm_process.PRELOAD)
    engines = launcher.engine_group("rollout", rollout_engine(config, CONTEXT, "cpu"), 1)
    return launcher, engines, {name: value.detach() for name, value in policy.named_parameters()}


class AtOnce:
    """Answers in the place of `RolloutEngines`."""

    def ask(self, request: GenerationRequest) -> Future[Generation]:
        """See `RolloutEngines.ask`."""
        future: Future[Generation] = Future()
        future.set_result(sevens(request))
        return future


class MeasuredHost(SessionHost):
    """Tells its CPU time."""

    def cpu_s(self) -> float:
        """Of this process so far."""
        return time.process_time()


def proxy(sessions: int, turns: int) -> dict[str, float]:
    """Milliseconds a request, from a program elsewhere that asks for episodes and plays them by HTTP."""
    config = RolloutConfig(agent="remote", turns=TurnsConfig(max_turns=turns))
    host = functools.partial(MeasuredHost, config=config, context=CONTEXT, make_codec=codec, make_runner=make_runner)
    with tempfile.TemporaryDirectory() as folder:
        launcher = make_launcher(load_config(["experiment=micro", "launcher.name=torchrun"]), Path(folder))
        try:
            group = launcher.local_group("sessions", host, 1)
            hosts = SessionHosts(group, AtOnce())  # type: ignore[arg-type]
            hosts.open()
            assert hosts.addresses[0] is not None
            found: dict[str, float] = {}
            for name, count in (("warm_up", 8), ("alone", 1), ("many", sessions)):
                (before,) = group.run("cpu_s")  # a call waits for what was submitted, so none while sessions are open
                futures = hosts.start([spec(sample) for sample in range(count)])
                times = asyncio.run(play_by_http(hosts.addresses[0], count, turns))
                assert all(future.result().failure is None for future in futures)
                (after,) = group.run("cpu_s")
                found |= {f"{name}_cpu_ms": 1e3 * (after - before) / len(times), f"{name}_wait_ms": 1e3 * median(times)}
        finally:
            launcher.close()
    return {name: value for name, value in found.items() if not name.startswith("warm_up")}


async def play_by_http(url: str, sessions: int, turns: int) -> list[float]:
    """Play episodes at the same time; seconds from each request to its answer."""
    times: list[float] = []
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(trust_env=False, verify=False, limits=limits, timeout=None) as client:

        async def post(path: str, body: Any, key: str = "") -> Any:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await client.post(f"{url}/{path}", json=body, headers=headers)
            return answer.raise_for_status().json()

        async def play() -> None:
            episode = await post("episodes/start", {})
            messages = list(episode["row"]["messages"])
            for _ in range(turns):
                start = time.perf_counter()
                body = {"model": episode["model"], "messages": messages}
                reply = await post("chat/completions", body, episode["api_key"])
                times.append(time.perf_counter() - start)
                messages += [reply["choices"][0]["message"], NO]
            await post(f"episodes/{episode['id']}/end", {"reward": 1.0})

        await asyncio.gather(*(play() for _ in range(sessions)))
    return times


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=128, help="turns of the long episode (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=64, help="episodes at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the throughput part (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/turns.json"))
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {"length": length(args.turns, 20)}
    with tempfile.TemporaryDirectory() as folder:
        results["throughput"] = throughput(args.sessions, 8, args.rounds, Path(folder))
    results["proxy"] = proxy(256, 8)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    for part, found in results.items():
        print(part)
        for name, value in found.items():
            print(f"  {name:28}{value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
