"""The start of a run in its directory, in two halves: checks before anything starts, and changes once everything has started.

    prepare_directory   lock, refuse what can't be resumed, choose the checkpoint      nothing in the directory is changed
    check_restored      what was loaded is what the ledger recorded for that step
    commit              set later records aside, write config.yaml                     the run continues from here

So a resume that fails (an engine that does not start, a checkpoint that does not fit) leaves the run as it was.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.compose import from_yaml, to_dict, to_yaml
from configs.roles import roles_needed
from determinism.files import move_file, write_atomically
from determinism.ledger import Ledger, LedgerError, read_ledger
from determinism.manifest import ManifestError, read_manifest
from trainer.checkpoint import Checkpoint, CheckpointError, CheckpointStore, megabytes, size_of
from trainer.input_digests import check_contents, input_digests
from trainer.resume import ResumeError, changed_keys, check_resume
from trainer.run_dir import RunDirectory

if TYPE_CHECKING:
    from configs.schema import Config
    from trainer.inputs import Inputs

logger = logging.getLogger(__name__)

TRAINED = ("actor", "critic")
"""Roles whose state is in a checkpoint."""


def prepare_directory(config: Config, run: RunDirectory, inputs: Inputs) -> Checkpoint | None:
    """Claim the run directory. Returns the checkpoint to continue from, or None for a run from the start. Changes no file of a run.

    Raises:
        RunDirectoryError: it can't be used, is in use, or holds a run although `run.resume` is `never`.
        ResumeError: the run was another experiment, or its records can't be read.
        CheckpointError: the checkpoint is damaged, of another run, or lacks a model.
    """
    run.claim(config.run.resume)
    manifest = _manifest(run.manifest)
    run.id = str(manifest.get("run_id") or secrets.token_hex(8))
    if config.run.resume == "never":
        return None
    if run.config.exists():
        check_resume(to_dict(from_yaml(run.config)), to_dict(config), config.run.resume_allow, str(run.path))
    if manifest:
        found = input_digests(config, roles_needed(config), inputs.train.prompts, inputs.validation.prompts)
        check_contents(manifest["data"], found, config.run.resume_allow, str(run.manifest))
    try:
        read_ledger(run.path)
    except LedgerError as error:
        raise ResumeError(f"the run can't be resumed: {error}") from error
    run.check_records()
    store = CheckpointStore(run.checkpoints, config.trainer.keep_last, config.trainer.keep_every, run.id)
    checkpoint = store.find(None if config.run.resume == "auto" else int(config.run.resume))
    if checkpoint is not None:
        _check_roles(checkpoint, [role for role in roles_needed(config) if role in TRAINED])
    return checkpoint


def check_restored(run: RunDirectory, checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """Refuse weights that are not those of this run at this step, whatever the checkpoint's name says.

    Args:
        digests: ledger phase -> digest of what was loaded.

    Raises:
        CheckpointError: a phase of the checkpoint's step has another digest in the ledger.
    """
    for record in read_ledger(run.path):
        if record.step != checkpoint.step:
            continue
        for phase, digest in digests.items():
            if record.phases.get(phase, digest) != digest:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path} is not what this run had after step {checkpoint.step}: {phase} has the "
                    f"digest {digest}, and {run.path / 'ledger.jsonl'} recorded {record.phases[phase]}. It was copied from "
                    "another run or renamed; put the run's own checkpoint back, or take another step with run.resume=STEP."
                )


def commit(config: Config, run: RunDirectory, checkpoint: Checkpoint | None, ledger: Ledger) -> None:
    """Everything has started and is restored: set aside what was recorded after the checkpoint, and write `config.yaml`.

    Newer checkpoints are moved first, the newest of them first, then the records. So after a kill at any moment, the run can be resumed from what is left.
    """
    done = checkpoint.step if checkpoint else -1
    aside = run.next_aside(done)
    if config.run.resume != "never":
        for later in reversed(CheckpointStore(run.checkpoints, 0, 0).all()):
            if later.step > done:
                move_file(later.path, aside / run.checkpoints.name / later.path.name)
        ledger.truncate_after(done, aside)
        run.take_out_after(done, aside)
        if run.config.exists() and changed_keys(to_dict(from_yaml(run.config)), to_dict(config)):
            aside.mkdir(parents=True, exist_ok=True)
            write_atomically(aside / run.config.name, run.config.read_bytes())
    if aside.exists():
        _say(aside, done)
    write_atomically(run.config, to_yaml(config))


def _check_roles(checkpoint: Checkpoint, roles: list[str]) -> None:
    """Refuse, before anything starts, a checkpoint that lacks a model which is trained now.

    Raises:
        CheckpointError: names the model, or the file that can't be read.
    """
    from workers.models.shards import ShardsError, check_roles, tensors_in

    try:
        check_roles(checkpoint.workers, tensors_in(checkpoint.workers), roles)
    except ShardsError as error:
        raise CheckpointError(str(error)) from error


def _say(aside: Path, done: int) -> None:
    names = ", ".join(sorted(path.name for path in aside.iterdir()))
    logger.warning(
        "the run goes on after step %d; what it had recorded later is set aside in %s (%s; %s), which may be removed",
        max(done, 0),
        aside,
        names,
        megabytes(size_of(aside)),
    )


def run_id(run: Path) -> str:
    """The id of the run in a directory; empty when it is not recorded.

    Raises:
        ResumeError: the manifest can't be read.
    """
    return str(_manifest(run / "manifest.json").get("run_id") or "")


def _manifest(path: Path) -> dict[str, Any]:
    """A run's manifest; empty when there is none.

    Raises:
        ResumeError: it can't be read.
    """
    if not path.exists():
        return {}
    try:
        return read_manifest(path)
    except (ManifestError, OSError) as error:
        raise ResumeError(f"the run can't be continued: {error}. Restore its manifest.json, or remove it") from error
