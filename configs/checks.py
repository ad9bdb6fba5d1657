"""Settings that don't fit together, found before anything starts; each problem names the setting and the way out."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from configs.algorithms import WITHOUT_DUAL_CLIP
from configs.contract import contract_check, contract_warnings, force
from configs.engine_args import engine_args_problems, vllm_arguments
from configs.problems import ConfigError, Problem
from configs.roles import fsdp_of_roles, needs, needs_reference, samplings
from configs.schema import Config, DataSourceConfig, JudgeConfig, SamplingConfig, TurnsConfig
from configs.user_code import UserCodeError, is_reference, load_reference

LABEL = re.compile(r"[A-Za-z0-9_.-]+")

DISTRIBUTION = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling settings that must keep their defaults in training: otherwise the sampled distribution isn't the trained one."""

ENVIRONMENTS = ("tools", "tries", "gymnasium")
"""The built-in environments (`rollout.environment`)."""

MIN_TEMPERATURE = 0.01
"""vLLM raises any smaller temperature above 0 to this."""


def check(config: Config) -> tuple[Config, list[Problem]]:
    """Everything that can be said before anything starts.

    Returns:
        The configuration as it will run (with what full determinism forces), and warnings.

    Raises:
        ConfigError: settings that don't fit together.
    """
    problems = cross_check(config)
    if problems:
        raise ConfigError(problems)
    warnings = warn(config)
    config, forced = force(config)
    return config, warnings + forced


def cross_check(config: Config) -> list[Problem]:
    """Every contradiction between settings; empty when the run can start."""
    unloadable = list(_functions(config))
    if unloadable:  # the other checks ask the estimator what it needs
        return unloadable
    checks = (_batch, _data, _sampling, _context, _turns, _servers, _algorithm, _reward, _engines, _devices)
    problems = [problem for check in checks for problem in check(config)]
    return problems + contract_check(config)


def warn(config: Config) -> list[Problem]:
    """What is allowed but probably not meant."""
    return [*_warnings(config), *contract_warnings(config)]


def rollout_context(config: Config) -> int:
    """Tokens of the rollout engines' context: `rollout.max_model_len`, or the longest prompt and response that may occur."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    longest = max(sampling.max_new_tokens for _, sampling in samplings(config))
    return config.data.max_prompt_tokens + (
        (config.rollout.turns.max_tokens if several_turns(config) else None) or longest
    )


def episode_cap(config: Config) -> int:
    """Most tokens that the policy samples in one training episode."""
    turns, cap = config.rollout.turns, config.rollout.sampling.max_new_tokens
    if not several_turns(config):
        return cap
    return min(turns.max_tokens or rollout_context(config), turns.max_turns * cap)


def several_turns(config: Config) -> bool:
    """Whether an environment or an agent plays the episodes."""
    return config.rollout.environment is not None or config.rollout.agent is not None


def _functions(config: Config) -> Iterator[Problem]:
    """A user's functions that run inside the trainer must be there; reward functions are loaded in processes of their own."""
    algorithm = config.algorithm
    for kind, name in (("advantage", algorithm.advantage.name), ("policy_loss", algorithm.policy_loss.name)):
        try:
            if is_reference(name):
                load_reference(name)
        except UserCodeError as error:
            yield Problem(f"algorithm.{kind}.name", f"{name}: {error}")


# --- sizes ---------------------------------------------------------------------------------------------------------


def _batch(config: Config) -> Iterator[Problem]:
    """Sequences -> mini-batches -> leaves -> ranks must divide without rest."""
    prompts, samples, ranks = config.data.prompts_per_step, config.rollout.sampling.n, config.launcher.num_ranks
    total = prompts * samples
    updated = [("actor", config.actor)] + ([("critic", config.critic)] if needs(config).critic else [])  # type: ignore[list-item]
    for role, part in updated:
        size, leaf = part.mini_batch_size, part.fsdp.leaf_size
        if total % size:
            yield Problem(
                f"{role}.mini_batch_size",
                f"{size} does not divide the {total} sequences of a step (data.prompts_per_step {prompts} x rollout.sampling.n {samples})",
                f"take a divisor of {total}, such as {_divisor(total, size)}",
            )
        if part.fsdp.leaf_tokens is not None:
            continue  # leaves of any number of sequences; ranks may hold unequal numbers of them
        if size % leaf:
            yield Problem(
                f"{role}.fsdp.leaf_size",
                f"{leaf} does not divide {role}.mini_batch_size {size}",
                f"take a divisor of {size}, such as {_divisor(size, leaf)}",
            )
        elif (size // leaf) % ranks:
            yield Problem(
                f"{role}.mini_batch_size",
                f"{size} has {size // leaf} leaves of {leaf} sequences, which launcher.num_ranks {ranks} ranks can't share equally",
                f"take a multiple of {leaf * ranks}, a smaller {role}.fsdp.leaf_size, or another number of ranks",
            )
    leaf = config.ref.fsdp.leaf_size
    # With the actor's leaf size the lines above have said it.
    fixed = config.ref.fsdp.leaf_tokens is None
    if needs_reference(config) and fixed and leaf != config.actor.fsdp.leaf_size and total % (leaf * ranks):
        yield Problem(
            "ref.fsdp.leaf_size",
            f"{leaf} x launcher.num_ranks {ranks} does not divide the {total} sequences of a step",
            f"leave it out to follow the actor's {config.actor.fsdp.leaf_size}",
        )


def _divisor(total: int, near: int) -> int:
    """The divisor of `total` nearest to `near`, the smaller of two."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - near), d))


def _context(config: Config) -> Iterator[Problem]:
    """Prompt and response must fit into the engine."""
    context, prompt = config.rollout.max_model_len, config.data.max_prompt_tokens
    for key, sampling in samplings(config):
        if context is not None and prompt + sampling.max_new_tokens > context:
            yield Problem(
                f"{key}.max_new_tokens",
                f"data.max_prompt_tokens {prompt} + {sampling.max_new_tokens} new tokens exceed rollout.max_model_len {context}",
                f"set rollout.max_model_len to at least {prompt + sampling.max_new_tokens}, or null",
            )
    if several_turns(config) and context is None and config.rollout.turns.max_tokens is None:
        yield Problem(
            "rollout.turns.max_tokens",
            "is null, and so is rollout.max_model_len: nothing says how long an episode of several turns may be",
            "set one of them",
        )


def _turns(config: Config) -> Iterator[Problem]:
    """Environments, agents, and the address for agents."""
    rollout, turns = config.rollout, config.rollout.turns
    if rollout.environment is not None and rollout.agent is not None:
        yield Problem(
            "rollout.agent",
            "rollout.environment is set too, and an episode is played by one of them",
            "set one to null",
        )
    if not several_turns(config):
        for name, default in vars(TurnsConfig()).items():
            if getattr(turns, name) != default:
                yield Problem(
                    f"rollout.turns.{name}",
                    "has no effect: no environment and no agent is set",
                    "set rollout.environment or rollout.agent, or leave it out",
                )
        return
    if not config.data.apply_chat_template:
        yield Problem("data.apply_chat_template", "is false, and several turns are a conversation", "set it to true")
    if rollout.environment == "tools" and turns.tool_parser is None:
        yield Problem(
            "rollout.turns.tool_parser",
            "is null, so no tool call would be read",
            "name the parser of the model's format, such as hermes",
        )
    if (
        rollout.environment is not None
        and rollout.environment not in ENVIRONMENTS
        and not is_reference(rollout.environment)
    ):
        yield Problem(
            "rollout.environment",
            f"{rollout.environment!r} is not known",
            f"take {', '.join(ENVIRONMENTS)}, or my_env.py:Name of your own",
        )
    if rollout.environment == "gymnasium" and importlib.util.find_spec("gymnasium") is None:
        yield Problem("rollout.environment", "gymnasium is not installed", "pip install 'exactrl[gymnasium]'")
    if turns.max_tokens is not None and turns.max_tokens < 2:
        yield Problem("rollout.turns.max_tokens", f"{turns.max_tokens} leave no room for a second turn", "raise it")
    if rollout.agent is not None:
        yield from _agent(config, rollout.agent)


def _agent(config: Config, agent: str) -> Iterator[Problem]:
    proxy = config.rollout.proxy
    if agent != "remote" and not agent.startswith("program:") and not is_reference(agent):
        yield Problem(
            "rollout.agent",
            f"{agent!r} names no agent",
            "give my_agent.py:run (an async function), program:COMMAND, or remote",
        )
    if agent.startswith("program:") and not agent.removeprefix("program:").strip():
        yield Problem("rollout.agent", f"{agent!r} has no command", "write program:COMMAND")
    if not is_reference(agent) or agent.startswith("program:"):
        for name in config.rollout.turns.params:
            yield Problem(
                f"rollout.turns.params.{name}",
                f"has no effect: rollout.agent={agent} takes no parameters",
                "leave it out; a program's arguments belong into its command",
            )
    if proxy.host not in LOOPBACK and proxy.admin_key_env is None:
        yield Problem(
            "rollout.proxy.host",
            f"{proxy.host} can be reached from other machines, and nothing keeps them from starting episodes",
            "take 127.0.0.1, or name an environment variable with a key in rollout.proxy.admin_key_env",
        )
    if proxy.admin_key_env is not None and not os.environ.get(proxy.admin_key_env):
        yield Problem(
            "rollout.proxy.admin_key_env",
            f"the environment variable {proxy.admin_key_env} is not set",
            "set it to a key, or leave the setting out",
        )
    if proxy.port + proxy.processes - 1 > 65535:
        yield Problem(
            "rollout.proxy.port",
            f"{proxy.processes} processes from port {proxy.port} on end beyond 65535",
            "take a lower one",
        )


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _servers(config: Config) -> Iterator[Problem]:
    """Rollout engines that are servers."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        for name in ("urls", "weights_dir"):
            if getattr(rollout, name):
                yield Problem(
                    f"rollout.{name}", "has no effect with rollout.engine=vllm", "set rollout.engine=vllm_server"
                )
        return
    if rollout.engine == "sglang_server":
        for key, sampling in samplings(config):
            if sampling.ignore_eos and sampling.stop_token_ids:
                yield Problem(
                    f"{key}.stop_token_ids",
                    f"is {list(sampling.stop_token_ids)}, which SGLang ignores with ignore_eos",
                    "leave one of the two out",
                )
    if not rollout.urls:
        if rollout.engine == "sglang_server":
            yield Problem(
                "rollout.urls",
                "is empty, and a run starts no server of SGLang",
                "start one (docs/servers.md) and name its address",
            )
        return
    if len(rollout.urls) != rollout.replicas:
        yield Problem(
            "rollout.urls",
            f"has {len(rollout.urls)} addresses for rollout.replicas={rollout.replicas}",
            f"each replica is one server: set rollout.replicas={len(rollout.urls)}",
        )
    for i, url in enumerate(rollout.urls):
        key = f"rollout.urls.{i}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            yield Problem(key, f"{url!r} is no server's address", "write it as http://127.0.0.1:8001")
        elif rollout.urls.index(url) != i:
            yield Problem(key, f"{url} is listed twice", "each replica needs a server of its own")
        elif parts.hostname not in LOOPBACK and rollout.weights_dir is None:
            yield Problem(
                "rollout.weights_dir",
                f"is null, and the server at {url} is on another machine, so it could not read new weights",
                "name a folder that this run and the servers see",
            )
    for name in ("engine_args", "tensor_parallel_size"):
        if getattr(rollout, name) not in ({}, 1):
            yield Problem(
                f"rollout.{name}",
                "has no effect on servers that are running already",
                "leave it out here and give it to the server (`exactrl serve` takes it)",
            )


# --- data and sampling ---------------------------------------------------------------------------------------------


def _data(config: Config) -> Iterator[Problem]:
    if not config.data.train:
        yield Problem("data.train", "is empty", "choose a data option (data=tiny) or list a source")
    for split in ("train", "validation"):
        sources: list[DataSourceConfig] = getattr(config.data, split)
        yield from _labels(f"data.{split}", [source.name for source in sources])
    generated = [source for source in config.data.train if source.kind == "reasoning_gym"]
    rows = sum(source.size for source in generated)
    if generated == config.data.train and 0 < rows < config.data.prompts_per_step:
        yield Problem(
            "data.prompts_per_step",
            f"{config.data.prompts_per_step} prompts a step, but the training sources generate only {rows}",
            "raise the sources' size",
        )
    trained = {_task(source) for source in generated}
    for i, source in enumerate(config.data.validation):
        if source.kind == "reasoning_gym" and _task(source) in trained:
            yield Problem(
                f"data.validation.{i}",
                f"source {source.name!r} generates the same rows as a training source, so nothing is held out",
                "give it another name or another seed",
            )
    if config.data.template_date is not None and not _is_date(config.data.template_date):
        yield Problem("data.template_date", f"{config.data.template_date!r} is no date", "write it as 2024-07-26")
    if any(source.streaming and source.kind != "dataset" for source in config.data.train + config.data.validation):
        yield Problem("data", "streaming is for sources of kind `dataset`", "set streaming=false for generated tasks")
    if config.trainer.total_epochs is not None and any(source.streaming for source in config.data.train):
        yield Problem("trainer.total_epochs", "a streamed source has no known epoch", "use trainer.total_steps")


def _is_date(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(text).isoformat() == text
    return False


def _task(source: DataSourceConfig) -> tuple[str, str, str]:
    seed = source.name if source.seed is None else str(source.seed)
    return source.path, repr(sorted(source.params.items())), seed


def _labels(key: str, names: list[str]) -> Iterator[Problem]:
    """Names that become parts of ids and of metrics."""
    for i, name in enumerate(names):
        if not LABEL.fullmatch(name):
            yield Problem(f"{key}.{i}.name", f"{name!r} may hold letters, digits, `_`, `.` and `-` only")
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(key, f"the name {name!r} is given {count} times", "names must be unique")


def _sampling(config: Config) -> Iterator[Problem]:
    training = config.rollout.sampling
    if training.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            "0 is greedy: every sample of a prompt is the same and its log-probability under the policy is undefined",
            "take a value above 0 (1.0 samples the policy itself)",
        )
    for key, sampling in samplings(config):
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            yield Problem(
                f"{key}.temperature",
                f"{sampling.temperature} is below {MIN_TEMPERATURE}, the smallest that vLLM samples at: it would raise it without a word",
                f"take at least {MIN_TEMPERATURE}{', or 0 (greedy)' if key == 'rollout.validation' else ''}",
            )
    for name in DISTRIBUTION:
        value, neutral = getattr(training, name), getattr(SamplingConfig, name)
        if value != neutral:
            yield Problem(
                f"rollout.sampling.{name}",
                f"{value} would sample from another distribution than the one that is trained",
                f"set it to {neutral}; rollout.validation may differ",
            )
    sampled = config.rollout.validation_sampled
    if sampled is not None and sampled.temperature == 0:
        yield Problem(
            "rollout.validation_sampled.temperature",
            "0 is greedy, as rollout.validation is for",
            "take a value above 0, or set rollout.validation_sampled to null",
        )


# --- arithmetic ----------------------------------------------------------------------------------------------------


def _algorithm(config: Config) -> Iterator[Problem]:
    algorithm, samples = config.algorithm, config.rollout.sampling.n
    name = algorithm.advantage.name
    if needs(config).groups and samples < 2:
        yield Problem(
            "rollout.sampling.n",
            f"{samples} sample a prompt, but {name} compares the samples of a prompt",
            "take 2 or more",
        )
    if algorithm.truncated == "bootstrap" and not needs(config).critic:
        yield Problem(
            "algorithm.truncated",
            f"bootstrap needs a critic's values, and {name} has none",
            "use keep, mask or penalise, or gae",
        )
    if config.critic.warmup_steps and not needs(config).critic:
        yield Problem(
            "critic.warmup_steps",
            f"{config.critic.warmup_steps} steps would train nothing: {name} has no critic",
            "set it to 0",
        )
    loss = algorithm.policy_loss
    if loss.dual_clip is not None and loss.name in WITHOUT_DUAL_CLIP:
        yield Problem(
            "algorithm.policy_loss.dual_clip", f"{loss.dual_clip} has no meaning for {loss.name}", "set it to null"
        )
    buffer, cap = algorithm.overlong_buffer, config.rollout.sampling.max_new_tokens
    if buffer > cap:
        yield Problem(
            "algorithm.overlong_buffer",
            f"{buffer} tokens are more than rollout.sampling.max_new_tokens {cap}",
            "take fewer",
        )
    low, high = algorithm.rollout_correction.sequence_mask_low, algorithm.rollout_correction.sequence_mask_high
    if low is not None and high is not None and low >= high:
        yield Problem(
            "algorithm.rollout_correction.sequence_mask_low", f"{low} leaves nothing below sequence_mask_high {high}"
        )
    yield from _dynamic_sampling(config)
    yield from _kl(config)


def _dynamic_sampling(config: Config) -> Iterator[Problem]:
    if not config.algorithm.dynamic_sampling.enable:
        return
    if config.rollout.sampling.n < 2:
        yield Problem(
            "algorithm.dynamic_sampling.enable",
            f"with rollout.sampling.n {config.rollout.sampling.n} no group can have two different rewards",
            "take 2 or more samples a prompt",
        )
    if config.rollout.max_head_offpolicyness > 0:
        yield Problem(
            "algorithm.dynamic_sampling.enable",
            f"rollout.max_head_offpolicyness is {config.rollout.max_head_offpolicyness}: generation runs ahead, before rewards "
            "say which groups have to be replaced",
            "set one of the two to its default",
        )


def _kl(config: Config) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.placement == "none" and (kl.coef > 0 or kl.controller == "adaptive"):
        what = f"coef {kl.coef}" if kl.coef > 0 else "the adaptive controller"
        yield Problem(
            "algorithm.kl.placement",
            f"none, so {what} would have no effect",
            "set it to reward or loss, or algorithm.kl.coef=0 and controller=fixed",
        )
    elif kl.controller == "adaptive" and kl.coef == 0:
        yield Problem(
            "algorithm.kl.coef",
            "the adaptive controller multiplies, so it can never leave 0",
            "give it a first value above 0",
        )
    if kl.estimator == "full" and kl.placement == "reward":
        yield Problem(
            "algorithm.kl.estimator",
            "full needs the whole vocabulary's logits, which only the loss has",
            "use algorithm.kl.placement=loss, or k1",
        )


def _reward(config: Config) -> Iterator[Problem]:
    reward = config.reward
    names = [function.name for function in reward.functions]
    yield from _labels("reward.functions", names)
    owners = {
        "model": "the reward model",
        "judge": "reward.judge",
        "environment": "rollout.environment",
        "agent": "rollout.agent",
    }
    for name in sorted(set(names) & owners.keys()):
        yield Problem("reward.functions", f"the name {name!r} belongs to {owners[name]}", "choose another name")
    weights = [function.weight for function in reward.functions] + ([reward.model.weight] if reward.model.path else [])
    weights += [reward.judge.weight] if reward.judge.path else []
    weights += [reward.episode_weight] if several_turns(config) else []
    if not weights:
        yield Problem(
            "reward",
            "there is no source of rewards",
            "set reward.model.path or reward.judge.path, list a function in reward.functions, or set rollout.environment or rollout.agent",
        )
    elif not any(weights):
        yield Problem("reward", "every source has weight 0, so there is nothing to learn", "give one a weight")
    if reward.normalise and needs(config).greedy:
        yield Problem(
            "reward.normalise",
            f"{config.algorithm.advantage.name} subtracts the greedy response's reward, which is not normalised",
            "set it to false",
        )
    yield from _judge(config)
    served = [name for name in ("model", "judge") if getattr(reward, name).path]
    sources = [*names, *served, "total"]
    if config.trainer.eval_source is not None and config.trainer.eval_source not in sources:
        yield Problem(
            "trainer.eval_source",
            f"{config.trainer.eval_source!r} is not a source of rewards",
            f"take {', '.join(sources)}, or null",
        )


def _judge(config: Config) -> Iterator[Problem]:
    judge = config.reward.judge
    if judge.path is None:
        for name, default in vars(JudgeConfig()).items():
            if getattr(judge, name) != default:
                yield Problem(f"reward.judge.{name}", "has no effect: there is no judge", "set reward.judge.path")
        return
    known = ("prompt", "response", "answer", "conversation")
    named = re.findall(r"{([A-Za-z_]+)}", judge.prompt)
    for name in sorted(set(named) - set(known)):
        yield Problem(
            "reward.judge.prompt", f"names {{{name}}}, which nothing fills", f"it may name {', '.join(known)}"
        )
    if not {"response", "conversation"} & set(named):
        yield Problem(
            "reward.judge.prompt",
            "names neither {response} nor {conversation}, so the judge would not see what it judges",
            "name one",
        )
    sampling = judge.sampling
    if sampling.temperature == 0 and sampling.n > 1:
        yield Problem(
            "reward.judge.sampling.n",
            f"{sampling.n} greedy judgements would be copies",
            "set a temperature above 0, or 1",
        )
    if sampling.seed is not None:
        yield Problem(
            "reward.judge.sampling.seed",
            "every judgement would have this seed",
            "leave it out: each gets one of its own",
        )
    if config.rollout.max_num_batched_tokens < judge.max_num_seqs:
        yield Problem(
            "reward.judge.max_num_seqs",
            f"{judge.max_num_seqs} is above rollout.max_num_batched_tokens {config.rollout.max_num_batched_tokens}",
            "every running sequence needs one token of an engine step",
        )


# --- engines and devices -------------------------------------------------------------------------------------------


def _engines(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield Problem(
            "rollout.max_num_batched_tokens",
            f"{rollout.max_num_batched_tokens} is below rollout.max_num_seqs {rollout.max_num_seqs}",
            "every running sequence needs one token of an engine step",
        )
    for key, arguments in (("rollout", rollout.engine_args), ("reward.model", config.reward.model.engine_args)):
        known = vllm_arguments() if arguments else None
        yield from engine_args_problems(arguments, f"{key}.engine_args", config.full_determinism, known)


def _devices(config: Config) -> Iterator[Problem]:
    if config.launcher.device != "cpu":
        return
    if config.rollout.tensor_parallel_size > 1:
        yield Problem(
            "rollout.tensor_parallel_size",
            f"{config.rollout.tensor_parallel_size} needs GPUs, but launcher.device is cpu",
            "set it to 1",
        )
    for role, fsdp in fsdp_of_roles(config):
        if fsdp.attention == "flash_attention_2":
            yield Problem(
                f"{role}.fsdp.attention", "flash_attention_2 needs a GPU, but launcher.device is cpu", "use sdpa"
            )


# --- warnings ------------------------------------------------------------------------------------------------------


def _warnings(config: Config) -> Iterator[Problem]:
    if not config.data.validation and (config.trainer.validate_every or config.trainer.validate_at_start):
        yield Problem("data.validation", "is empty, so no validation takes place")
    for key, sampling in samplings(config):
        if sampling.temperature == 0 and sampling.n > 1:
            yield Problem(
                f"{key}.n",
                f"{sampling.n} greedy samples of a prompt are copies; set a temperature above 0, or 1 sample",
            )
    kl = config.algorithm.kl
    if needs_reference(config) and kl.placement == "loss" and kl.estimator == "k1":
        yield Problem(
            "algorithm.kl.estimator",
            "k1 in the loss has a gradient that is zero on average, so it holds the policy to nothing; take k2, k3 or full",
        )
    longest = rollout_context(config)
    model = config.reward.model
    if model.path is not None and model.max_model_len is not None and model.max_model_len < longest:
        yield Problem(
            "reward.model.max_model_len",
            f"{model.max_model_len} is below the rollout's {longest}: long responses may not fit",
        )
    for role in ("rollout", "data"):
        seed = getattr(config, role).seed
        if seed != config.seed:
            yield Problem(
                f"{role}.seed", f"{seed} differs from seed {config.seed}; it does not follow when seed is changed"
            )
