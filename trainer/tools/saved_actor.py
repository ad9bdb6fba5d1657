"""The actor's whole weights from a training checkpoint, as training gives them to the engines.

    RUN or RUN/checkpoints/step_000012 --find_checkpoint, verify--> Checkpoint --actor_weights--> tensors by Hugging Face name

No trainer rank is needed: the shards of any number of ranks are read and put together in this process.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.problems import UserError
from determinism.files import number_in
from trainer.checkpoint import COMPLETE, WORKERS, Checkpoint, CheckpointError, CheckpointStore
from trainer.claim import run_id

if TYPE_CHECKING:
    from torch import Tensor

    from configs.schema import LoraConfig

logger = logging.getLogger(__name__)

PREFIX = "actor.weights/"
"""Prefix of a parameter's name in the sharded state (`TrainerWorker.save`)."""


@dataclass(frozen=True)
class ActorWeights:
    """The actor in a checkpoint."""

    tensors: dict[str, Tensor]
    """Whole weights in float32 on the CPU by Hugging Face name, adapters merged; what `load_weights` of an engine takes."""
    digest: str
    """Digest of what was trained: the ledger's `actor_weights` of that step."""


def find_checkpoint(path: Path, step: int | None = None, option: str = "--checkpoint ") -> Checkpoint:
    """The checkpoint that `path` means; complete, its contents not verified yet.

    Args:
        path: a run directory (its newest complete checkpoint, or that of `step`), or a checkpoint's own directory.
        option: what stands before the path on the command line, for messages.

    Raises:
        UserError: `path` is neither, or is a checkpoint of another step than `step`.
        CheckpointError: the run has no complete checkpoint (of that step).
    """
    path = path.absolute()
    if not (path / "checkpoints").is_dir():
        return _own(path, step, option)
    complete = CheckpointStore(path / "checkpoints", 0, 0).all()
    found = [checkpoint for checkpoint in complete if step in (None, checkpoint.step)]
    if not found:
        have = ", ".join(str(checkpoint.step) for checkpoint in complete) or "none"
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{path} has no complete checkpoint{which} (there are: {have})")
    return found[-1]


def verify(checkpoint: Checkpoint) -> None:
    """Compare every file with its recorded digest.

    Raises:
        CheckpointError: a file is damaged, or they are from another run; the message names the file, and the next older intact checkpoint.
    """
    run = run_of(checkpoint)
    store = CheckpointStore(checkpoint.path.parent, 0, 0, run_id(run) if run else "")
    store.find(checkpoint.step, choose="--checkpoint of the run and --step {step}")


def run_of(checkpoint: Checkpoint) -> Path | None:
    """The run directory in which the checkpoint lies; None when it was copied away from its run's configuration."""
    run = checkpoint.path.parent.parent
    return run if (run / "config.yaml").is_file() else None


def actor_weights(checkpoint: Checkpoint, model_path: str | Path, lora: LoraConfig | None) -> ActorWeights:
    """Read the actor's weights and put its shards together.

    Args:
        model_path: directory of the model that was trained; it says which parameters there must be, and is the base of adapters.
        lora: settings under which the actor's adapters were trained, when it has some.

    Raises:
        CheckpointError: the weights do not fit the model (names the parameters), or are adapters of a model with other contents.
    """
    from determinism.digest import module_digest
    from rollout.weights import check_weights, checkpoint_shapes
    from workers.models.policy import check_policy

    stored = trained_tensors(checkpoint, model_path)
    digest = module_digest(stored.items())
    adapters = any(".lora_A." in name for name in stored)
    try:
        shapes = checkpoint_shapes(model_path)
        tensors = stored
        if adapters:
            tensors = dict(_merged(stored, shapes, model_path, lora))
        if not tensors.keys() <= shapes.keys():  # transformers' names of some parameters are not the files'
            names = check_policy(model_path, "eager")
            tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
        check_weights(tensors, shapes)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit the model {model_path}: {error}") from error
    return ActorWeights(tensors, digest)


def trained_tensors(checkpoint: Checkpoint, model_path: str | Path) -> dict[str, Tensor]:
    """The trained parameters of the actor as they are stored: whole weights, or adapters alone.

    Raises:
        CheckpointError: it can't be read, or holds adapters of a model with other contents than `model_path`.
    """
    stored = _read(checkpoint)
    if any(".lora_A." in name for name in stored):
        _check_base(checkpoint, model_path)
    return stored


def _own(path: Path, step: int | None, option: str) -> Checkpoint:
    """`path` as a checkpoint's directory."""
    if not (path / COMPLETE).is_file():
        raise UserError(f"{option}{path}: {_why_not(path)}")
    if number_in(path.name) is None:
        raise UserError(f"{option}{path}: a checkpoint's directory is named after its step; call it step_000012 again")
    if step not in (None, number_in(path.name)):
        raise UserError(f"--step {step}: {path} is a single checkpoint; give the run directory to choose a step")
    return Checkpoint(path)


def _why_not(path: Path) -> str:
    """Says what `path` is, when it is neither a run nor a checkpoint."""
    if not path.exists():
        return "there is no such directory"
    if (path / WORKERS).is_dir():
        return "is not complete: its save was cut short. Take another checkpoint of the run"
    if (path / "config.json").is_file():
        return "is a model, not a training checkpoint; evaluate it with model.path=DIR instead of --checkpoint"
    if any((child / COMPLETE).is_file() for child in path.glob("step_*")):
        return "holds several checkpoints; give the run directory above it, or one step_... below it"
    return "is neither a run directory (with checkpoints/) nor a checkpoint (with COMPLETE)"


def _read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The trained parameters of the actor by name, whole."""
    from workers.models.shards import ShardsError, read_tensors

    # Not collective: under torchrun every rank reads the whole, since each feeds its own engines.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # a single process is intended
        try:
            stored = read_tensors(checkpoint.workers, PREFIX)
        except ShardsError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} can't be read: {error}") from error
    if not stored:
        raise CheckpointError(f"{checkpoint.path} holds no weights of an actor")
    return stored


def _check_base(checkpoint: Checkpoint, model_path: str | Path) -> None:
    """Refuse a base of adapters that is not, by content, the model that the run recorded in its manifest."""
    from determinism.manifest import read_manifest
    from trainer.input_digests import model_digest

    run = run_of(checkpoint)
    if run is None or not (run / "manifest.json").is_file():
        logger.warning(
            "%s holds adapters and lies in no run with a manifest.json, so it can't be checked that %s is the model they "
            "were trained on",
            checkpoint.path,
            model_path,
        )
        return
    manifest = read_manifest(run / "manifest.json")
    recorded, found = manifest["data"]["model/actor"], model_digest(str(model_path))
    if found != recorded:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters of the model {manifest['config']['model']['path']} with the digest {recorded} "
            f"(manifest.json of the run), but {model_path} has the digest {found}: merged into it they would be a model that "
            "was never trained. Restore its files (weights, configuration, tokenizer), or name a directory that holds "
            "them as they were with model.path=DIR"
        )


def _merged(
    stored: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], model_path: str | Path, lora: LoraConfig | None
) -> Iterator[tuple[str, Tensor]]:
    """The base model's weights with the stored adapters in them, by the same sum as in training."""
    from workers.models.lora import merged

    if lora is None:
        raise ValueError("it holds adapters, but actor.lora is not set; name the experiment that trained them")
    layers = sorted({name.partition(".lora_")[0] for name in stored})
    for layer in layers:
        a, b = (stored.get(f"{layer}.lora_{part}.default.weight") for part in "AB")
        if a is None or b is None or len(stored) != 2 * len(layers):
            raise ValueError(f"it holds more than pairs of adapters (see {layer}), so it can't be merged")
        wanted = shapes.get(f"{layer}.weight")
        if wanted != (b.shape[0], a.shape[1]) or a.shape[0] != lora.rank:
            raise ValueError(
                f"the adapter of {layer} has rank {a.shape[0]} and makes {(b.shape[0], a.shape[1])}; "
                f"actor.lora.rank is {lora.rank} and the layer is {wanted}"
            )
    return merged(_with_base(stored, set(layers), shapes, model_path), lora)


def _with_base(
    stored: Mapping[str, Tensor], layers: set[str], shapes: Mapping[str, tuple[int, ...]], model_path: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """Parameters as a network with adapters names them: the base's in float32, and the stored ones."""
    import torch

    from workers.models.pretrained import PretrainedFiles

    files = PretrainedFiles(model_path)
    for name in shapes:
        layer = name.removesuffix(".weight")
        tensor = files.tensor(name).to(torch.float32)
        yield (f"{layer}.base_layer.weight" if layer in layers else name), tensor
    yield from stored.items()
