"""The experiment configuration: one dataclass per group, one docstring per field.

The composed Hydra tree is validated against `Config` by pydantic (see `configs/validate.py`): a field's type says which values
it takes. `docs/configuration.md` is generated from this file; a field's docstring is the string literal that follows it.

Sizes are counted in *sequences* unless a name says tokens. Paths may be a directory or a recipe (`tiny:policy`),
which is built once and cached (see `trainer/tiny`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from configs.algorithms import ESTIMATORS, POLICY_LOSSES
from configs.field_types import (
    Bool,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    OwnFunction,
    PositiveFloat,
    PositiveInt,
    Seed,
    Share,
    ShareAboveZero,
    StepNumber,
)

MISSING_PATH = "???"


@dataclass
class RunConfig:
    """Where a run lives and what happens when its directory is already in use."""

    name: str = "ppo"
    """Name of the run; also the default name in the tracker."""
    dir: str = "runs/${run.name}"
    """Run directory: config.yaml, manifest.json, ledger.jsonl, metrics.jsonl, episodes/, checkpoints/, logs/, wandb/."""
    resume: Literal["never", "auto"] | StepNumber = "never"
    """`never`: a used directory is refused. `auto`: continue from the newest complete checkpoint, or start when there is none. A number: continue from the checkpoint of that step."""
    resume_allow: list[str] = field(default_factory=list)
    """Dotted config keys that may differ from the run that is resumed, besides those that never change results. The contents of a data source or model under such a key may differ too."""


@dataclass
class DeterminismConfig:
    """What `full_determinism` pins. Recorded in the manifest with and without it."""

    threads: PositiveInt = 1
    """CPU threads of every process (trainer ranks and engines). Part of the numerics environment: it changes bits."""
    engine_check: Bool = True
    """Under full determinism, check on the real engines at start that batch composition and order do not move bits."""
    cpu_linear: Literal["auto", "pad1", "block16"] = "auto"
    """Batch-invariant linear of the CPU engines: `auto` (self-test decides), `pad1` or `block16`. Not used on CUDA."""


@dataclass
class LedgerConfig:
    """The per-step record of digests."""

    record: Literal["off", "digest", "full"] = "digest"
    """`off`, `digest` (one digest per phase) or `full` (also the raw values, so that `exactrl compare` can name the token that differs)."""


@dataclass
class LoraConfig:
    """Low-rank adapters through `peft`; rank 0 trains all weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 turns them off."""
    alpha: PositiveFloat = 16.0
    """Scaling numerator of the adapters."""
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """Names of the linear layers that get an adapter."""


@dataclass
class ModelConfig:
    """The policy that is trained; actor, reference and (by default) critic start from it."""

    path: str = MISSING_PATH
    """Hugging Face checkpoint directory, or a recipe such as `tiny:policy`."""
    tokenizer: str | None = None
    """Tokenizer directory; null takes the model's."""
    chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own; null keeps that."""
    trust_remote_code: Bool = False
    """Allow code from the checkpoint directory to run."""


@dataclass
class FsdpConfig:
    """How a model is sharded and computed."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """`fp32`, or `bf16` (parameters computed in bfloat16, reduced and stored in float32)."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of transformers (`sdpa`, `eager`, `flash_attention_2` on CUDA)."""
    gradient_checkpointing: Bool = False
    """Recompute activations in the backward pass: less memory, more time, the same bits."""
    reshard_after_forward: Bool = False
    """Free gathered parameters between forward and backward: less memory, more communication."""
    leaf_size: PositiveInt = 8
    """Sequences of one forward/backward. A leaf is the unit of the canonical gradient sum, so it belongs to the numerics environment."""
    leaf_tokens: PositiveInt | None = None
    """Dynamic leaves: as many sequences as fit this many padded tokens, in place of `leaf_size`; null for fixed leaves. Refused under full determinism."""


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""
    betas: Annotated[list[Annotated[Float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [0.9, 0.95]
    )
    """AdamW's two decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    fused: Bool = False
    """The fused kernel. Refused under full determinism: its bits depend on the shard's length (level D4)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """`constant`, `linear` or `cosine`, counted in training steps, after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: Share = 0.0
    """Learning rate at the end of `linear` and `cosine`, as a share of `lr`."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global L2 norm; 0 turns clipping off."""


@dataclass
class ActorConfig:
    """Policy training."""

    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Sharding and precision."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer and schedule."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's batch."""
    mini_batch_size: PositiveInt = 64
    """Sequences per optimizer step. Must divide prompts x samples and be a multiple of `fsdp.leaf_size`."""


@dataclass
class CriticConfig:
    """Value model training; built only when the advantage estimator needs it."""

    path: str = "${model.path}"
    """Checkpoint the value model starts from: a causal LM (new value head) or a one-label sequence classifier (head reused)."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Sharding and precision."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer and schedule."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's batch."""
    mini_batch_size: PositiveInt = 64
    """Sequences per optimizer step."""
    warmup_steps: NonNegativeInt = 0
    """Number of first training steps in which only the critic is updated."""


@dataclass
class RefConfig:
    """The frozen reference policy; built only when a KL coefficient is set."""

    path: str = "${model.path}"
    """Checkpoint of the reference."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Sharding and precision."""


@dataclass
class DataSourceConfig:
    """One source of prompts."""

    name: str = MISSING_PATH
    """Label in metrics and in prompt ids; unique among the sources."""
    kind: Literal["reasoning_gym", "dataset"] = "reasoning_gym"
    """`reasoning_gym` (a task generated by name) or `dataset` (anything the `datasets` library loads)."""
    path: str = MISSING_PATH
    """Task name, Hub name, or path of a file or folder (.parquet, .jsonl, .json, .csv; the last three also as .gz). Local JSON and CSV files are read as they are written: text stays text, whole numbers stay whole, and CSV cells are text (an empty one is no value)."""
    split: str = "train"
    """Split of a dataset."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task or of `datasets.load_dataset`. Local JSON files take `encoding` and `field`, CSV files `encoding`, `delimiter`, `quotechar` and `column_names`."""
    size: PositiveInt = 1024
    """Number of rows a reasoning-gym task generates."""
    seed: Seed | None = None
    """Seed of a generated task; null derives one from `data.seed` and the source's name."""
    weight: PositiveFloat = 1.0
    """Share of the rows drawn from this source when several are mixed."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Column with the reference answer for verifiers (dots reach into nested columns); null when there is none. A row without this column takes `reward_model.ground_truth` where it has one."""
    streaming: Bool = False
    """Read a dataset row by row instead of loading it: for sources larger than memory. Rows are shuffled within windows, and `trainer.total_epochs` must be null."""
    window: PositiveInt = 4096
    """Streaming: number of rows that are read and shuffled together. It is part of what decides the order."""


@dataclass
class DataConfig:
    """Prompts for training and validation."""

    train: list[DataSourceConfig] = field(default_factory=list)
    """Training sources."""
    validation: list[DataSourceConfig] = field(default_factory=list)
    """Held-out sources."""
    seed: Seed = "${seed}"  # type: ignore[assignment]
    """Seed of the order and of generated tasks."""
    prompts_per_step: PositiveInt = 64
    """Prompts of one PPO step."""
    shuffle: Bool = True
    """A new order in each epoch, a function of the seed and the epoch."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt after the chat template."""
    overlong_prompts: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """What happens to longer prompts: `error` (refuse), `filter` (leave out), `truncate_left` (keep the last tokens) or `truncate_right` (keep the first)."""
    apply_chat_template: Bool = True
    """Render prompts with the chat template; false feeds plain text."""
    system_prompt: str | None = None
    """A system message put before every conversation that does not bring its own."""
    template_date: str | None = None
    """The date (such as 2024-07-26) that chat templates get when they ask for today's date, the reward model's too. Null takes the date at the run's start, writes it into the run's config, and keeps it over a resume. Under full determinism null is refused when a template asks for the date."""


@dataclass
class SamplingConfig:
    """Sampling parameters; every one of them is sent with every request, so nothing is inherited from a model directory."""

    n: PositiveInt = 1
    """Samples per prompt."""
    max_new_tokens: PositiveInt = 64
    """Response cap."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy (validation only)."""
    top_p: ShareAboveZero = 1.0
    """Nucleus share; other than 1.0 is refused for training (the trained distribution would not be the sampled one)."""
    top_k: NonNegativeInt = 0
    """Number of most likely tokens kept; 0 keeps all; other values are refused for training."""
    min_p: Share = 0.0
    """Smallest share of the most likely token's probability; other than 0 is refused for training."""
    repetition_penalty: PositiveFloat = 1.0
    """1.0 is neutral; other values are refused for training."""
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    """0.0 is neutral; other values are refused for training."""
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    """0.0 is neutral; other values are refused for training."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Token ids that end a response, besides the tokenizer's EOS and the model's `generation_config.eos_token_id`."""
    ignore_eos: Bool = False
    """Continue past EOS to the cap (for benchmarks)."""
    seed: Seed | None = None
    """One seed shared by every request. Refused with n > 1 under full determinism: a group's samples would be copies."""


@dataclass
class TurnsConfig:
    """Episodes of several turns: `rollout.environment` or `rollout.agent` (docs/agents.md)."""

    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's class, or of the agent's function."""
    max_turns: PositiveInt = 8
    """Most answers of the policy along one path of an episode."""
    max_tokens: PositiveInt | None = None
    """Most tokens after the first prompt along one path, sampled and added ones together; null for what the engines' context holds. A turn has at most `rollout.sampling.max_new_tokens`."""
    max_requests: PositiveInt = 256
    """Most requests of one episode, on all paths together."""
    timeout_s: PositiveFloat = 600.0
    """Longest episode in seconds. One that takes longer has failed (`reward.on_error`); under full determinism it ends the run, because a time limit is no function of the inputs."""
    tool_parser: str | None = None
    """Reads tool calls out of an answer: a name of vLLM's parsers (`hermes`, `llama3_json`, ...), or `file.py:Class` of your own; null reads none."""
    reasoning_parser: str | None = None
    """Splits an answer into reasoning and content: a name of vLLM's reasoning parsers, or null."""
    discount: Share | None = None
    """A turn's reward also gets this share of the mean reward of the turns that continue it, along the tree; null leaves every reward at its turn."""
    rows: Literal["paths", "turns"] = "paths"
    """`paths`: one training row for each path through the turns; a turn that paths share is trained in the first. `turns`: one row for each turn."""
    audit_episodes: NonNegativeInt = 0
    """Episodes of each step that are run twice and compared: what differs under equal seeds is not a function of its inputs (a clock, a network). Under full determinism a difference ends the run."""


@dataclass
class ProxyConfig:
    """The OpenAI-compatible address that agents speak to."""

    processes: PositiveInt = 1
    """Processes; each serves its own share of the episodes, on a port of its own. Environments run in them too."""
    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach only what is not loopback, which needs `admin_key_env`."""
    port: Annotated[int, Field(ge=0, le=65535, strict=True)] = 0
    """Port of the first process (the next ones follow); 0 takes free ones."""
    admin_key_env: str | None = None
    """Environment variable with the key for starting and ending episodes by HTTP (`rollout.agent=remote`)."""


@dataclass
class RolloutConfig:
    """The rollout engines."""

    engine: Literal["vllm", "vllm_server", "sglang_server"] = "vllm"
    """The engine behind the rollouts: `vllm` (in the worker's own process), `vllm_server` (vLLM behind HTTP) or `sglang_server` (SGLang, running already); see docs/servers.md."""
    urls: list[str] = field(default_factory=list)
    """Addresses of running servers, one a replica; empty has the run start its own (of vLLM)."""
    weights_dir: str | None = None
    """Folder through which servers are given new weights; this run and the servers must see it. Null takes the folder for temporary files, which is enough on one machine."""
    seed: Seed = "${seed}"  # type: ignore[assignment]
    """Run seed from which each request's seed is derived (`determinism/seeds.py`)."""
    full_determinism: Bool = "${full_determinism}"  # type: ignore[assignment]
    """Follows the root switch."""
    replicas: PositiveInt = 1
    """Data-parallel engines, each a process of its own."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one replica."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Engine's compute type: float32 or bfloat16."""
    max_model_len: PositiveInt | None = None
    """Engine context; null takes `data.max_prompt_tokens` plus the largest `max_new_tokens` of training and validation."""
    max_num_seqs: PositiveInt = 64
    """Sequences an engine runs at once. Does not change bits under full determinism."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one engine step."""
    kv_cache_mib: PositiveInt = 64
    """KV cache on CPU, in MiB."""
    gpu_memory_utilization: ShareAboveZero = 0.4
    """Share of a GPU's memory for weights and KV cache."""
    enable_prefix_caching: Bool = True
    """Reuse the KV cache of shared prompt prefixes; cleared at each weight update."""
    enforce_eager: Bool = True
    """Run without CUDA graphs and torch.compile."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Training samples."""
    validation: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Validation samples (greedy unless set)."""
    validation_sampled: SamplingConfig | None = None
    """A second, sampled validation pass; null skips it."""
    max_head_offpolicyness: NonNegativeInt = 0
    """How many weight versions a sample may lag behind. Must be 0 under full determinism."""
    deterministic_sampling: Bool = False
    """Give each request a seed of its own, derived from its logical identity, without the rest of full determinism (which includes this). False draws from the engines' own streams, seeded by the system: nothing repeats, and on GPUs sampling is faster. True promises equal seeds and canonical order, not equal bits: kernels may still give other results in another batch."""
    serialize_group_samples: Bool = False
    """Keep a group's members on one replica and submit them one after the other in member order; false spreads them over the replicas. True promises only this order of submission: the members may run at the same time, and bits may differ."""
    environment: str | None = None
    """What the policy acts in, turn after turn: `tools`, `tries`, `gymnasium`, or `my_env.py:Name` of your own; null for single responses."""
    agent: str | None = None
    """A program that calls the policy through an OpenAI-compatible address: `my_agent.py:run` (an async function), `program:COMMAND` (started for each sample), or `remote` (runs elsewhere and asks for episodes); null for none."""
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    """Limits and rules of episodes with several turns."""
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    """The address for agents."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine; a key that a setting above owns is refused."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest engine start before the run fails with the engine's log."""


@dataclass
class RewardModelConfig:
    """The served reward model: a sequence classifier with one label; its raw logit is the reward."""

    path: str | None = None
    """Checkpoint directory or recipe (`tiny:reward`); null serves none."""
    tokenizer: str | None = None
    """The reward model's own tokenizer; null takes the checkpoint's."""
    weight: Float = 1.0
    """Factor in the sum of rewards."""
    replicas: PositiveInt = 1
    """Engines, each a process of its own."""
    max_num_seqs: PositiveInt = 1
    """Sequences scored at once; forced to 1 under full determinism."""
    max_model_len: PositiveInt | None = None
    """Context; null takes the rollout's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type: float32 or bfloat16."""
    kv_cache_mib: PositiveInt = 64
    """KV cache on CPU, in MiB."""
    gpu_memory_utilization: ShareAboveZero = 0.2
    """Share of a GPU's memory."""
    apply_chat_template: Bool = True
    """Rebuild the conversation with the reward model's own chat template; false scores plain text: the texts of the messages with a
    line break between them, and the response right after. The policy's template and special tokens are never used."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine; a key that a setting above owns is refused."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest engine start before the run fails with the engine's log."""


@dataclass
class JudgeConfig:
    """A judge: a generative model that is asked what an episode is worth. A function reads the score from what it writes."""

    path: str | None = None
    """Checkpoint directory or recipe; null asks nobody."""
    tokenizer: str | None = None
    """The judge's own tokenizer; null takes the checkpoint's. It needs a chat template."""
    weight: Float = 1.0
    """Factor in the sum of rewards."""
    prompt: str = (
        "Question:\n{prompt}\n\nAnswer:\n{response}\n\nHow good is the answer, from 0 to 10? End with: Score: N"
    )
    """What the judge is asked, as a user's message. It may name `{prompt}`, `{response}`, `{answer}` (the row's reference) and `{conversation}`
    (all messages with their roles, tool calls included)."""
    system_prompt: str | None = None
    """A system message before it."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """How the judge is sampled. `n` judgements are averaged."""
    parser: Literal["score_in_text"] | OwnFunction = "score_in_text"
    """Reads the score: `score_in_text`, or `path/to/file.py:function` of your own. It is called as a reward function is, with the judge's text as
    `response`. What it can't read is an error (`reward.on_error`)."""
    parser_params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call: `pattern`, `lowest` and `highest` of `score_in_text`."""
    parser_timeout_s: PositiveFloat = 10.0
    """Time limit of one call."""
    replicas: PositiveInt = 1
    """Engines, each a process of its own."""
    max_num_seqs: PositiveInt = 64
    """Judgements that run at once on an engine."""
    max_model_len: PositiveInt | None = None
    """Context; null takes the rollout's, and room for the prompt and for the answer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type: float32 or bfloat16."""
    kv_cache_mib: PositiveInt = 64
    """KV cache on CPU, in MiB."""
    gpu_memory_utilization: ShareAboveZero = 0.2
    """Share of a GPU's memory."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest engine start before the run fails with the engine's log."""


@dataclass
class RewardFunctionConfig:
    """One reward function."""

    name: str = MISSING_PATH
    """Label in metrics; unique among the reward sources (`model` is the label of the reward model)."""
    function: Literal["exact_match", "math_verify", "reasoning_gym", "http", "score_in_text"] | OwnFunction = (
        "exact_match"
    )
    """`exact_match`, `math_verify`, `reasoning_gym`, `http`, `score_in_text`, or `package.module:function` / `path/to/file.py:function`."""
    weight: Float = 1.0
    """Factor in the sum of rewards; 0 logs the score without training on it."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call."""
    timeout_s: PositiveFloat = 10.0
    """Time limit of one call; the process that overruns it is killed and replaced."""
    concurrency: PositiveInt = 16
    """Calls of an `async` function that run at the same time in one process; other functions run one at a time."""


@dataclass
class RewardConfig:
    """Where scores come from, and what happens when one fails."""

    full_determinism: Bool = "${full_determinism}"  # type: ignore[assignment]
    """Follows the root switch."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The served reward model."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """A generative reward model."""
    episode_weight: Float = 1.0
    """Factor of what an environment or agent gives (`rollout.environment`, `rollout.agent`) in the sum of rewards."""
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Verifiers and user functions; weighted and added to the reward model's score."""
    function_workers: PositiveInt = 1
    """Processes that run the functions."""
    on_error: Literal["fail", "drop", "penalise"] = "fail"
    """A reward that raises, hangs or is not finite: `fail` the run, `drop` the sample from its group, or `penalise` it."""
    penalty: Float = -1.0
    """The reward of a penalised sample."""
    audit_rows: NonNegativeInt = 0
    """Call each function twice on this many rows of each step. A difference is an error under full determinism, otherwise a warning."""
    normalise: Bool = False
    """Train on (reward - running mean) / running standard deviation over all rewards seen so far; saved and resumed."""


@dataclass
class AdvantageConfig:
    """The advantage estimator."""

    name: Literal[*ESTIMATORS] | OwnFunction = "gae"  # type: ignore[valid-type]
    """`gae`, `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `remax`, or `package.module:function`."""
    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 0.95
    """GAE's lambda."""
    whiten: Literal["none", "full", "scale"] = "none"
    """`none`, `full` (zero mean, unit variance over the batch's response tokens) or `scale` (unit variance, mean kept)."""
    group_std: Bool = True
    """GRPO: divide by the group's standard deviation."""


@dataclass
class PolicyLossConfig:
    """The policy loss."""

    name: Literal[*POLICY_LOSSES] | OwnFunction = "ppo_clip"  # type: ignore[valid-type]
    """`ppo_clip`, `gspo`, `cispo`, or `package.module:function`."""
    clip_low: ShareAboveZero = 0.2
    """Ratio's lower bound is 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Ratio's upper bound is 1 + clip_high."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Bound c > 1 on the loss of negative advantages (dual-clip PPO); null turns it off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""


@dataclass
class ValueLossConfig:
    """The value loss."""

    clip_range: NonNegativeFloat = 0.2
    """How far a value may move from the old one; 0 turns clipping off."""


@dataclass
class KlConfig:
    """The KL to the reference policy."""

    placement: Literal["reward", "loss", "none"] = "reward"
    """`reward` (a penalty per token), `loss` (a term of the policy loss) or `none`."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k1"
    """`k1`, `k2` or `k3` (Schulman, 'Approximating KL divergence'); `full` (over the vocabulary, `loss` only)."""
    coef: NonNegativeFloat = 0.0
    """The coefficient, or the adaptive controller's first value."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`fixed` or `adaptive` (Ziegler et al. 2019, section 2.2)."""
    target: PositiveFloat = 6.0
    """Adaptive: the target KL per sequence, in nats."""
    horizon: PositiveFloat = 10000.0
    """Adaptive: number of sequences over which the coefficient adapts; larger is slower."""


@dataclass
class RolloutCorrectionConfig:
    """What the policy loss does about the gap between the policy that sampled (engine) and the one that is trained."""

    tis_cap: PositiveFloat | None = None
    """Truncated importance sampling: each token's loss is weighted by min(trainer / rollout probability, this cap); null turns it off."""
    sequence_mask_low: Share | None = None
    """Leave out sequences whose geometric mean of trainer / rollout probability is below this bound (0 to 1); null for no bound."""
    sequence_mask_high: Annotated[Float, Field(ge=1)] | None = None
    """Leave out sequences whose geometric mean of trainer / rollout probability is above this bound (1 or more); null for no bound."""
    decoupled: Bool = False
    """Decoupled PPO for stale batches: the ratio is clipped around the trainer's old policy, and each token is weighted by old / rollout probability (uncapped unless `tis_cap` is set)."""


@dataclass
class DynamicSamplingConfig:
    """Groups whose samples all have the same reward teach nothing; groups of further prompts take their places (DAPO)."""

    enable: Bool = False
    """Generate again, for further prompts, until every group of the step has at least two different rewards."""
    max_rounds: PositiveInt = 4
    """Most rounds of generation in a step, the first included. Places that are still open afterwards keep groups of equal rewards."""


@dataclass
class AlgorithmConfig:
    """The arithmetic of a step."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages and returns."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Policy loss."""
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    """Value loss."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL to the reference."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """`token_mean`, `seq_mean_token_mean`, `seq_mean_token_sum` or `seq_mean_token_sum_norm`; global over a mini-batch."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """The gap between sampling and training."""
    truncated: Literal["keep", "mask", "penalise", "bootstrap"] = "keep"
    """Responses that hit the cap: `keep` (as any other), `mask` (no loss), `penalise` (`truncated_penalty` is added), `bootstrap` (the value after the last token continues the return; GAE only)."""
    truncated_penalty: Float = -1.0
    """Added to the score of a truncated response with `truncated=penalise`."""
    overlong_buffer: NonNegativeInt = 0
    """Soft overlong penalty (DAPO): over the last this many tokens below the cap, the score falls linearly, by up to `overlong_penalty`; 0 turns it off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Largest soft overlong penalty."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Groups without differing rewards are replaced."""


@dataclass
class LauncherConfig:
    """Processes and devices."""

    name: Literal["auto", "ray", "torchrun"] = "auto"
    """`auto` (torchrun when the process was started by it, otherwise Ray), `ray` or `torchrun`."""
    num_ranks: PositiveInt = 1
    """Number of FSDP ranks. Under torchrun it must equal --nproc-per-node x nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` (CUDA where there is a GPU), `cpu` or `cuda`."""
    ray_address: str | None = None
    """Address of a running Ray cluster; null starts a local one."""
    ray_num_cpus: PositiveInt | None = None
    """Number of CPUs that the local Ray may use; null takes the machine's. The needs of ranks and engines are compared with it before anything starts."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for one collective operation in seconds before the run fails."""
    silence_s: NonNegativeFloat = 60.0
    """Longest time in seconds without a worker's heartbeat. After it the run ends and names the worker; 0 waits for ever."""


@dataclass
class TrackingConfig:
    """Where metrics and samples are shown."""

    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """`offline`, `online` or `disabled`."""
    project: str = "exactrl"
    """W&B project."""
    entity: str | None = None
    """W&B entity."""
    group: str | None = None
    """W&B group."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    progress: Bool = True
    """A progress bar on the terminal with step time, reward and KL."""
    save_episodes: Bool = True
    """Write each step's episodes to `episodes/` as JSONL."""
    log_samples: NonNegativeInt = 4
    """Validation samples shown in the tracker's table."""


@dataclass
class TrainerConfig:
    """The loop."""

    total_steps: PositiveInt = 100
    """PPO steps. `total_epochs` may end the run earlier."""
    total_epochs: PositiveInt | None = None
    """Passes over the training data; with null only `total_steps` decides."""
    validate_every: NonNegativeInt = 10
    """Steps between validations; 0 turns them off."""
    validate_at_start: Bool = True
    """Validate before the first step."""
    eval_source: str | None = None
    """Reward source that decides whether a validation sample is right, for pass@k and maj@k: a function's name, `model` or `total`. Null takes the first function, or `total` when there is none."""
    eval_threshold: Float = 1.0
    """A validation sample is right when `eval_source` gives it at least this score."""
    bucket_by_length: Bool = False
    """Put sequences of similar length into one leaf, so that less padding is computed. Lengths then vary from leaf to leaf within a mini-batch. Moves bits."""
    checkpoint_every: NonNegativeInt = 50
    """Steps between checkpoints; 0 saves only at the end."""
    checkpoint_at_end: Bool = True
    """Save after the last step."""
    keep_last: NonNegativeInt = 2
    """How many of the newest checkpoints are kept; 0 keeps all."""
    keep_every: NonNegativeInt = 0
    """Checkpoints at multiples of this step are kept for good; 0 for none."""
    max_nonfinite_updates: PositiveInt = 3
    """The run stops after this many updates in a row were skipped because loss or gradient was not finite."""


@dataclass
class Config:
    """The whole experiment."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    seed: Seed = 0
    """The one seed: data order, sampling, mini-batch order and new weights are derived from it."""
    full_determinism: Bool = False
    """Make the run a pure function of code, config, data, model and seed, or refuse it before it starts (docs/determinism.md)."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run directory."""
    determinism: DeterminismConfig = field(default_factory=DeterminismConfig)
    """Numerics environment."""
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """Record of digests."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The loop."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Policy training."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value training."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scores."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Arithmetic."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Processes."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Metrics."""
