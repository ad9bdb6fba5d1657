"""One trainer rank: the roles it holds, and what leaves it (weights, digests, checkpoints).

Built by a worker group inside an initialised process group; `trainer/remote_models.py` calls its methods. Every public method is
collective unless it says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Config
from determinism import environment
from determinism.digest import module_digests
from workers.models.batch import LossTotals, MiniBatch, TokenBatch, UpdateResult
from workers.models.policy import BaseOfAdapters, PolicyModel
from workers.models.sharded_model import ShardedModel
from workers.models.sharding import rank_mesh
from workers.models.shards import load_shards, save_shards
from workers.models.value import ValueModel

ROLES = ("actor", "ref", "critic")
PRELOAD = ("workers.models.trainer_worker", "transformers.models.auto.modeling_auto")
"""What takes long to import and is the same for every rank."""


class TrainerWorker:
    """Holds the sharded models of one rank.

    Args:
        config: the experiment; `model.path`, `critic.path` and `ref.path` are checkpoint directories by now.
        roles: which of `actor`, `ref` and `critic` to build; the attributes of the others are None.

    Raises:
        ValueError: an unknown role.
        RuntimeError: the process group is missing or has another size than `launcher.num_ranks`.
        PretrainedError: a checkpoint does not fit its model.
    """

    def __init__(self, config: Config, roles: Sequence[str]) -> None:
        unknown = sorted(set(roles) - set(ROLES))
        if unknown:
            raise ValueError(f"unknown trainer roles {unknown}; there are {list(ROLES)}")
        environment.pin_process(config.full_determinism, config.determinism.threads)
        self.config = config
        self.device = rank_device(config.launcher.device)
        self.mesh = rank_mesh(config.launcher.num_ranks, self.device.type)
        self.actor = self._actor() if "actor" in roles else None
        self.ref = self._reference() if "ref" in roles else None
        self.critic = self._value() if "critic" in roles else None
        if self.actor is not None:
            self.actor.reference = self.ref
        self._columns: dict[str, Tensor] = {}

    def _actor(self) -> PolicyModel:
        config = self.config
        return PolicyModel(
            config.model.path,
            self.mesh,
            self.device,
            config.actor.fsdp,
            temperature=config.rollout.sampling.temperature,
            full_determinism=config.full_determinism,
            optim=config.actor.optim,
            total_steps=config.trainer.total_steps,
            lora=config.actor.lora,
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
        )

    def _reference(self) -> PolicyModel | BaseOfAdapters:
        config = self.config
        same = (config.ref.path, config.ref.fsdp) == (config.model.path, config.actor.fsdp)
        if self.actor is not None and self.actor.lora is not None and same:
            return BaseOfAdapters(self.actor)
        return PolicyModel(
            config.ref.path,
            self.mesh,
            self.device,
            config.ref.fsdp,
            temperature=config.rollout.sampling.temperature,
            full_determinism=config.full_determinism,
            trust_remote_code=config.model.trust_remote_code,
        )

    def _value(self) -> ValueModel:
        config = self.config
        return ValueModel(
            config.critic.path,
            self.mesh,
            self.device,
            config.critic.fsdp,
            seed=config.seed,
            full_determinism=config.full_determinism,
            optim=config.critic.optim,
            total_steps=config.trainer.total_steps,
            lora=config.critic.lora,
            trust_remote_code=config.model.trust_remote_code,
        )

    @property
    def trained(self) -> dict[str, ShardedModel]:
        """The roles that have an optimizer, critic first as in a step."""
        models = {"critic": self.critic, "actor": self.actor}
        return {name: model for name, model in models.items() if model is not None}

    def place(self, columns: Mapping[str, Tensor], fresh: bool) -> None:
        """Take over columns of the step's batch, by the names of `TokenBatch`'s fields. Not collective.

        Args:
            fresh: of another batch; otherwise the columns that were placed before stay.
        """
        self._columns = {**({} if fresh else self._columns), **columns}

    def logprobs(self, leaves: Sequence[Tensor], role: str, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies of `actor` or `ref`, per leaf [n, t] float32, 0 outside the mask.

        Args:
            leaves: this rank's leaves; of each the [n] int64 rows of the placed batch.
        """
        batch = self._batch()
        return getattr(self, role).logprobs([batch.select(rows) for rows in leaves], temperature)

    def values(self, leaves: Sequence[Tensor], with_end: bool) -> list[Tensor]:
        """The critic's values, per leaf [n, t] float32, 0 outside the mask.

        Args:
            leaves: as in `logprobs`.
            with_end: one column more, with the value after the last token too (`TokenBatch.with_end`).
        """
        assert self.critic is not None, "this trainer has no critic"
        batch = self._batch().with_end() if with_end else self._batch()
        return self.critic.values([batch.select(rows) for rows in leaves])

    def update(
        self, mini_batches: Sequence[tuple[Sequence[Tensor], LossTotals]], role: str, loss: Any
    ) -> list[UpdateResult]:
        """One optimizer step of `actor` or `critic` a mini-batch.

        Args:
            mini_batches: of each this rank's leaves as in `logprobs`, and the counts of the whole mini-batch.
        """
        batch = self._batch()
        chosen = [MiniBatch([batch.select(rows) for rows in leaves], totals) for leaves, totals in mini_batches]
        return self.trained[role].update(chosen, loss)

    def _batch(self) -> TokenBatch:
        return TokenBatch(**self._columns)

    def end_step(self) -> None:
        """Advance every learning-rate schedule, and forget the batch; once a training step."""
        self._columns = {}
        for model in self.trained.values():
            model.end_step()

    def export_weights(self) -> dict[str, Tensor] | None:
        """The actor's whole weights in float32 on the CPU, by their names in `model.path`'s files (tied ones once); None except on rank 0."""
        if self.actor is None:
            raise ValueError("export_weights: this trainer has no actor")
        return self._whole(self.actor)

    def whole_weights(self, role: str) -> dict[str, Tensor] | None:
        """Like `export_weights` for any role, on rank 0 only: the raw values of a full ledger."""
        return self._whole(self.trained[role])

    def digests(self) -> dict[str, str]:
        """Ledger phase -> digest of the trained weights and of the optimizer state; the same for any sharding."""
        parts = {
            f"{role}_{part}": named
            for role, model in self.trained.items()
            for part, named in model.named_state().items()
        }
        return module_digests(parts)

    def save(self, path: str) -> None:
        """Write trained weights, optimizer states and schedules into the directory `path`, each rank its shards.

        Raises:
            ShardsError: a rank could not write.
        """
        save_shards(self._state(), path)

    def saved_bytes(self) -> int:
        """Bytes that `save` writes on all ranks together, file headers aside. Not collective."""
        return sum(
            tensor.numel() * tensor.element_size() for named in self._state().values() for tensor in named.values()
        )

    def load(self, path: str) -> None:
        """Take over what `save` wrote at any number of ranks.

        Raises:
            ShardsError: it lacks a model or a tensor, or can't be read.
        """
        state = self._state()
        load_shards(state, path)
        for name, model in self.trained.items():
            model.restore(state[name])

    def export_hf(self, path: str, role: str = "actor") -> None:
        """Write `role` as a plain Hugging Face checkpoint (float32 safetensors, config, tokenizer) into `path`; rank 0 writes.

        A critic becomes a one-label sequence classifier.
        """
        if role not in self.trained:
            raise ValueError(f"export_hf: this trainer trains no {role!r}, only {sorted(self.trained)}")
        model = self.trained[role]
        weights = self._whole(model)
        if weights is not None:
            source = Path(self.config.critic.path if role == "critic" else self.config.model.path)
            write_hf(Path(path), source, model.hf_config, weights, self.config, classifier=role == "critic")
        dist.barrier()

    def facts(self) -> dict[str, Any]:
        """What is in force in this process, for the manifest. Not collective."""
        sizes = {name: sum(p.numel() for p in model.network.parameters()) for name, model in self.trained.items()}
        return {
            **environment.facts(),
            "rank": dist.get_rank(),
            "num_ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "device": str(self.device),
            "parameters": sizes,
        }

    def _state(self) -> dict[str, dict[str, Tensor]]:
        return {name: model.state() for name, model in self.trained.items()}

    def _whole(self, model: ShardedModel) -> dict[str, Tensor] | None:
        main = dist.get_rank() == 0
        weights = {}
        for name, tensor in model.export():
            if main:
                weights[name] = tensor
        return weights if main else None


def rank_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as this rank's device; the launcher has chosen the current CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def write_hf(
    path: Path, source: Path, hf_config: Any, weights: dict[str, Tensor], config: Config, classifier: bool
) -> None:
    """Weights, config, generation config and tokenizer, loadable with `from_pretrained`."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    path.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, str(path))
    values = hf_config.to_dict()
    if classifier:
        values["architectures"] = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[hf_config.model_type]]
        values.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    values.pop("num_labels", None)
    values["use_cache"] = True
    values["dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    generation = source / "generation_config.json"
    if generation.is_file() and not classifier:
        (path / "generation_config.json").write_bytes(generation.read_bytes())
    tokenizer = config.model.tokenizer or str(source)
    if any(
        (Path(tokenizer) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(path)
