"""Real engines for tests, in a child process of their own; `tests/conftest.py` makes the fixtures.

Models are random: wide enough (576) that stock vLLM's bits depend on the batch, and small enough to start in a second.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rollout.types import Generation, GenerationRequest, SampleKey, Sampling

VOCAB = 100
ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTEST_CURRENT_TEST": "",  # changes with every test; forks have the environment of their server
}
CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


class EngineLab:
    """Builds engines on demand, keeps them, and runs what a test asks for."""

    def __init__(self, full_determinism: bool = True, cpu_linear: str = "auto") -> None:
        self.full_determinism = full_determinism
        self.cpu_linear = cpu_linear
        self.engines: dict[str, Any] = {}

    def generate(self, model: str, requests: list[GenerationRequest], **options: Any) -> list[Generation]:
        """Generations of the engine with these options (RolloutConfig's fields, `max_model_len`, `name`)."""
        return answers(self._rollout(model, options), requests)

    def while_at_work(
        self, model: str, first: list[GenerationRequest], later: list[GenerationRequest], steps: int, **options: Any
    ) -> list[Generation]:
        """Generations of `first` and `later`, which come when the engine has made so many steps at `first`."""
        return answers(self._rollout(model, options), first, later, steps)

    def preemptions(
        self, model: str, requests: list[GenerationRequest], **options: Any
    ) -> tuple[list[Generation], int]:
        """Generations, and how often the scheduler took a running request's memory away."""
        engine = self._rollout(model, options)
        engine.take_counts()
        return answers(engine, requests), engine.take_counts()["rollout/preemptions"]

    def load(self, model: str, tensors: dict[str, Any], version: int, skip: str = "", **options: Any) -> None:
        """`load_weights`, without the step named by `skip` (for negative tests)."""
        engine = self._rollout(model, options)
        if skip:
            setattr(engine, skip, lambda: None)
        try:
            engine.load_weights(tensors, version)
        finally:
            engine.__dict__.pop(skip, None)

    def score(self, model: str, token_ids: list[list[int]], **options: Any) -> list[float]:
        """Raw logits of the reward engine with these options (RewardModelConfig's fields)."""
        return answers(self._reward(model, options), token_ids)

    def facts(self, model: str, **options: Any) -> dict[str, Any]:
        """The rollout engine's facts."""
        return self._rollout(model, options).facts()

    def sample(self, logits: list[float], temperature: float, seeds: list[int]) -> list[tuple[int, float]]:
        """(token, log-probability) of vLLM's sampler for one row of logits, once for each seed."""
        import torch
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler

        from determinism.cpu_kernels import CounterGenerator, install

        install(self.cpu_linear, self.full_determinism)
        rows = len(seeds)
        generators = {}
        for row, seed in enumerate(seeds):
            generators[row] = CounterGenerator()
            generators[row].manual_seed(seed)
        neutral = torch.zeros(rows)
        metadata = SamplingMetadata(
            temperature=torch.full((rows,), temperature),
            all_greedy=False,
            all_random=True,
            top_p=None,
            top_k=None,
            generators=generators,
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=neutral,
            presence_penalties=neutral,
            repetition_penalties=neutral + 1,
            output_token_ids=[[] for _ in seeds],
            spec_token_ids=[[] for _ in seeds],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
            logprob_token_ids=None,
        )
        output = Sampler(logprobs_mode="processed_logprobs")(torch.tensor([logits] * rows), metadata)
        tokens = output.sampled_token_ids[:, 0].tolist()
        return list(zip(tokens, output.logprobs_tensors.logprobs[:, 0].tolist(), strict=True))

    def unseeded(self, model: str, **options: Any) -> None:
        """Send a sampled request without a seed straight to vLLM."""
        from vllm import SamplingParams

        from workers.vllm_process import RunningRequests

        running = RunningRequests(self._rollout(model, options)._engine)
        running.add(0, [1, 2, 3], SamplingParams(max_tokens=2))
        while not running.step():
            pass

    def install(self, **settings: Any) -> dict[str, Any]:
        """Install kernels with other settings beside the present ones."""
        from determinism.cpu_kernels import install

        return install(**settings).facts()

    def _rollout(self, model: str, options: dict[str, Any]) -> Any:
        from configs.schema import RolloutConfig
        from rollout.vllm_engine import VLLMEngine

        key = f"{model} {sorted(options.items())}"
        if key not in self.engines:
            settings = dict(options)
            settings.pop("name", None)
            self.engines[key] = VLLMEngine(
                model,
                max_model_len=settings.pop("max_model_len", 256),
                config=RolloutConfig(seed=0, full_determinism=self.full_determinism, **settings),
                **self._shared(),
            )
        return self.engines[key]

    def _reward(self, model: str, options: dict[str, Any]) -> Any:
        from configs.schema import RewardModelConfig
        from reward.model import RewardModelEngine

        key = f"reward {model} {sorted(options.items())}"
        if key not in self.engines:
            config = RewardModelConfig(path=model, **options)
            self.engines[key] = RewardModelEngine(model, max_model_len=256, config=config, **self._shared())
        return self.engines[key]

    def _shared(self) -> dict[str, Any]:
        return {
            "full_determinism": self.full_determinism,
            "threads": 1,
            "device": "cpu",
            "cpu_linear": self.cpu_linear,
        }


def answers(engine: Any, requests: list[Any], later: list[Any] | None = None, steps: int = 0) -> list[Any]:
    """What an engine gives for `requests`, and for those that come `later`, after so many steps; in their order."""
    found: dict[int, Any] = {}
    for number, request in enumerate(requests):
        engine.add(number, request)
    later = list(later or ())
    total, made = len(requests) + len(later), 0
    while len(found) < total:
        if later and made >= steps:
            for number, request in enumerate(later, len(requests)):
                engine.add(number, request)
            later = []
        found.update(engine.step())
        made += 1
    return [found[number] for number in range(total)]


def burst(count: int = 36, max_prompt: int = 110, seed: int = 0, **sampling: Any) -> list[GenerationRequest]:
    """Requests of mixed length: every third shares a prefix; some are greedy, some truncated to a nucleus or to top-k."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(max_prompt * 2 // 3)]
    requests = []
    for index in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(3, max_prompt))]
        prompt = (shared + own)[:max_prompt] if index % 3 == 0 else own
        kinds = {1: {"top_p": 0.9}, 2: {"top_k": 12}, 3: {"temperature": 0.0}, 4: {"temperature": 0.7}}
        settings = {"temperature": 1.0, "max_new_tokens": rng.randint(6, 20), **kinds.get(index % 7, {}), **sampling}
        key = SampleKey(index // 4, index % 4)
        requests.append(
            GenerationRequest(
                key, tuple(prompt), seed=rng.getrandbits(63), sampling=Sampling(**settings), priority=index
            )
        )
    return requests


def make_policy(path: Path, *, seed: int = 0, tie: bool = True, dtype: str = "float32", hidden: int = 576) -> Any:
    """A random Qwen3 policy with a character tokenizer, saved to `path`; returns the transformers model."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_config(hidden, tie_word_embeddings=tie)).to(getattr(torch, dtype)).eval()
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model


def make_reward(path: Path, *, labels: int = 1, seed: int = 3) -> Any:
    """A random one-label Qwen3 classifier with a tokenizer of its own; returns the transformers model."""
    import torch
    from transformers import Qwen3ForSequenceClassification

    torch.manual_seed(seed)
    model = Qwen3ForSequenceClassification(_config(576, num_labels=labels, pad_token_id=0)).eval()
    model.save_pretrained(path)
    make_tokenizer(shift=7).save_pretrained(path)
    return model


def make_tokenizer(shift: int = 0) -> Any:
    """Characters to ids: 0 `<pad>`, 1 `<eos>`, then printable ASCII, rotated by `shift` so that vocabularies differ."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)]
    letters = letters[shift:] + letters[:shift]
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _config(hidden: int, **settings: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.05,
        eos_token_id=1,
        **settings,
    )
