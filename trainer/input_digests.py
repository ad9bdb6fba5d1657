"""Digests of what a run reads, prompts and models, by content; for the manifest and for a resume.

A path says little: a model that was trained further, or a data file that grew, keeps its old name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.schema import Config
from determinism.digest import digest_value
from rollout.types import Prompt
from trainer.data.sampler import data_digest
from trainer.resume import ResumeError

MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".bin")
SETTINGS = {
    "data/train": "data.train",
    "data/validation": "data.validation",
    "model/actor": "model.path",
    "model/critic": "critic.path",
    "model/ref": "ref.path",
    "model/reward": "reward.model.path",
    "model/judge": "reward.judge.path",
}
"""Name of each digest -> the setting that chooses what is read."""


def input_digests(
    config: Config, roles: Sequence[str], train: Sequence[Prompt], validation: Sequence[Prompt]
) -> dict[str, str]:
    """Digests under the names of `SETTINGS`; critic and reference only where they start from a model of their own."""
    models = {"model/actor": config.model.path}
    for role, path in (("critic", config.critic.path), ("ref", config.ref.path)):
        if role in roles and path != config.model.path:
            models[f"model/{role}"] = path
    if config.reward.model.path is not None:
        models["model/reward"] = config.reward.model.path
    if config.reward.judge.path is not None:
        models["model/judge"] = config.reward.judge.path
    prompts = {"data/train": data_digest(train), "data/validation": data_digest(validation)}
    return prompts | {name: model_digest(path) for name, path in models.items()}


def model_digest(path: str) -> str:
    """Digest of what a checkpoint directory holds (weights, settings, tokenizer), by content."""
    files = sorted(file for file in Path(path).iterdir() if file.is_file() and file.suffix in MODEL_FILES)
    contents = []
    for file in files:
        with open(file, "rb") as opened:
            contents.append([file.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    return digest_value(contents)


def check_contents(recorded: Mapping[str, str], found: Mapping[str, str], allow: Sequence[str], where: str) -> None:
    """Refuse a resume whose data or models have other contents than the run recorded, although their settings agree.

    Args:
        recorded, found: as `input_digests` gives them.
        allow: `run.resume_allow`; a key that equals, contains or lies below a setting of `SETTINGS` lets its contents differ.
        where: the run's manifest, for the message.

    Raises:
        ResumeError: names what differs, both digests, and the way out.
    """
    differing = [
        name
        for name in sorted(recorded.keys() & found.keys())
        if recorded[name] != found[name] and not any(_related(key, SETTINGS[name]) for key in allow)
    ]
    if differing:
        lines = [f"  {SETTINGS[name]} ({name}): {recorded[name]} in the run, {found[name]} now" for name in differing]
        keys = ",".join(SETTINGS[name] for name in differing)
        raise ResumeError(
            f"what is read has changed since {where} was written, under the same name, so continuing the run would mix two "
            "experiments:\n"
            + "\n".join(lines)
            + f"\nRestore it, choose another run.dir, or allow it: 'run.resume_allow=[{keys}]'"
        )


def _related(first: str, second: str) -> bool:
    return first == second or first.startswith(second + ".") or second.startswith(first + ".")
