"""The ledger: for each step, a digest of what each phase made, in the order in which the phases happened.

    ledger.jsonl                    {"version": 2, "step": 3, "phases": {"prompts": "<32 hex>", "request_seeds": ..., ...}}
    ledger/step_000003.safetensors  with record=full: the raw tensors under their phase names
    ledger/step_000003.json         {"rows": [[prompt_id, task, sample], ...], "values": {phase: what is not a tensor}}

Two runs did the same exactly when their ledgers are equal; where they part, the first unequal phase says what to look at.
A step's line is one write, made durable before `commit` returns, and its raw files are in place before the line is: a kill at any
moment leaves whole lines and at most one torn one at the end, which has no newline and is cut when the next line is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determinism.files import (
    DamagedLineError,
    append_json_line,
    cut,
    json_lines,
    move_file,
    move_lines,
    number_in,
    numbered,
    write_atomically,
)

if TYPE_CHECKING:  # reading a ledger needs no torch, so comparing runs starts at once
    from torch import Tensor

LEDGER_VERSION = 2
"""Format of a line and meaning of its digests."""

RECORD_MODES = ("off", "digest", "full")
RAW_SUFFIXES = (".safetensors", ".json")
"""Of the raw files of a step."""
_HEX = frozenset("0123456789abcdef")


class LedgerError(ValueError):
    """A ledger can't be read or may not be written as asked."""


@dataclass(frozen=True)
class StepRecord:
    """One line of the ledger."""

    step: int
    """PPO step; 0 is what happened before the first one (validation)."""
    phases: Mapping[str, str]
    """Phase name -> 32-hex digest, in the order in which the phases happened."""


class Ledger:
    """Collects the digests of a step and appends them as one line.

    Args:
        run_dir: the run directory; `ledger.jsonl` is continued when it exists.
        record: `off` (every call does nothing), `digest`, or `full` (raw values too).

    Raises:
        LedgerError: unknown `record`, or the existing ledger is damaged before its last line.

    Example:
        >>> ledger = Ledger(run_dir)                             # doctest: +SKIP
        >>> ledger.add("rollout_logprobs", logprobs)             # doctest: +SKIP
        >>> ledger.add_digest("actor_weights", module_digest(model.named_parameters()))  # doctest: +SKIP
        >>> ledger.commit(step=1)                                # doctest: +SKIP
    """

    _phases: dict[str, str]
    _tensors: dict[str, Tensor]
    _values: dict[str, Any]
    _rows: list[list[Any]]

    def __init__(self, run_dir: str | Path, record: str = "digest") -> None:
        if record not in RECORD_MODES:
            raise LedgerError(f"ledger.record is {record!r}; it must be one of {', '.join(RECORD_MODES)}")
        self.run_dir = Path(run_dir)
        self.record = record
        self.active = record != "off"
        self.last_step: int | None = None
        """Newest committed step; None before the first."""
        self._clear()
        if self.active:
            self._open()

    def add(self, phase: str, value: Any) -> None:
        """Record a phase of the current step by its value: a tensor, or plain data (see `digest_value`).

        Raises:
            LedgerError: the phase was recorded already in this step.
            TypeError: the value is of a type that has no digest.
        """
        if not self.active:
            return
        from torch import Tensor

        from determinism.digest import digest_tensor, digest_value

        self.claim(phase, digest_tensor(value) if isinstance(value, Tensor) else digest_value(value))
        if self.record == "full":
            tensor = _as_tensor(value)
            if tensor is None:
                self._values[phase] = value
            else:
                self._tensors[phase] = tensor

    def add_digest(self, phase: str, digest: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Record a phase by a digest made elsewhere (weights: `module_digest`).

        Args:
            digest: 32 lower-case hex characters.
            tensors: raw values to keep with record=full, under `phase/<name>`.

        Raises:
            LedgerError: not a digest, or the phase was recorded already in this step.
        """
        if len(digest) != 32 or not _HEX.issuperset(digest):
            raise LedgerError(f"ledger phase {phase!r}: {digest!r} is not a digest of 32 lower-case hex characters")
        if not self.active:
            return
        self.claim(phase, digest)
        if self.record == "full":
            for name, tensor in (tensors or {}).items():
                self._tensors[f"{phase}/{name}"] = _kept(tensor)

    def rows(self, rows: Sequence[tuple[str, int, int]]) -> None:
        """Say what dim 0 of the step's per-sample tensors is: (prompt_id, task, sample) of each row. Kept with record=full."""
        if self.active:
            self._rows = [list(row) for row in rows]

    def commit(self, step: int) -> None:
        """Append the step's line; when this returns, it survives a kill and a power cut.

        Raises:
            LedgerError: `step` is not after the newest line (a resumed run calls `truncate_after` first).
            NotWrittenError: the disk is full or the file may not grow; the ledger is as before.
        """
        if not self.active:
            return
        if self.last_step is not None and step <= self.last_step:
            raise LedgerError(
                f"{self._path}: step {step} is committed after step {self.last_step}; steps only grow "
                "(a resumed run cuts the ledger with truncate_after first)"
            )
        if self.record == "full":
            self._write_raw(step)
        append_json_line(self._path, {"version": LEDGER_VERSION, "step": step, "phases": self._phases})
        self.last_step = step
        self._clear()

    def truncate_after(self, step: int, aside: Path | None = None) -> None:
        """Forget every step after `step`, raw files and what was added but not committed included; for resuming.

        Args:
            aside: directory that gets what is cut (`ledger.jsonl` and `ledger/`); it is made when there is something. None removes it.
        """
        if not self.active:
            return
        keep = 0
        self.last_step = None
        for record, end in _lines(self._path):
            if record.step <= step:
                keep, self.last_step = end, record.step
        raw = [path for path in sorted(self._raw.glob("step_*")) if _is_after(path, step)]
        if aside is not None:
            move_lines(self._path, keep, aside / self._path.name)
            for path in raw:
                move_file(path, aside / self._raw.name / path.name)
        else:
            cut(self._path, keep)
            for path in raw:
                path.unlink()
        self._clear()

    @property
    def _path(self) -> Path:
        return self.run_dir / "ledger.jsonl"

    @property
    def _raw(self) -> Path:
        return self.run_dir / "ledger"

    def _open(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for record, _ in _lines(self._path):
            self.last_step = record.step

    def _clear(self) -> None:
        self._phases, self._tensors, self._values, self._rows = {}, {}, {}, []

    def claim(self, phase: str, digest: str) -> None:
        """Take note of a phase's digest. Every phase comes through here, so a subclass can check it (`trainer/tools/replay.py`)."""
        if phase in self._phases:
            raise LedgerError(f"ledger phase {phase!r} is recorded twice in one step; a phase has one digest a step")
        self._phases[phase] = digest

    def _write_raw(self, step: int) -> None:
        from safetensors.torch import save

        self._raw.mkdir(exist_ok=True)
        write_atomically(self._raw / numbered(step, suffix=RAW_SUFFIXES[0]), save(self._tensors))
        text = json.dumps({"rows": self._rows, "values": self._values})
        write_atomically(self._raw / numbered(step, suffix=RAW_SUFFIXES[1]), text)


def read_ledger(run_dir: str | Path) -> list[StepRecord]:
    """The committed steps of a run, in order; empty when it has no ledger. A torn last line is left out.

    Raises:
        LedgerError: a whole line is not a record, is of another version, or its step is not after the one before.
    """
    return [record for record, _ in _lines(Path(run_dir) / "ledger.jsonl")]


def _lines(path: Path) -> Iterator[tuple[StepRecord, int]]:
    """Each whole line's record and the byte offset after it."""
    before = None
    try:
        lines = json_lines(path)
    except DamagedLineError as error:
        raise LedgerError(str(error)) from error
    for line in lines:
        try:
            version, record = line.record["version"], StepRecord(line.record["step"], line.record["phases"])
            _check_types(record)
        except (KeyError, TypeError) as error:
            raise LedgerError(
                f"{path}, line {line.number}: not a ledger record ({error}); the file was edited or damaged"
            ) from error
        if version != LEDGER_VERSION:
            raise LedgerError(
                f"{path}, line {line.number}: version {version}; this code reads version {LEDGER_VERSION}"
            )
        if before is not None and record.step <= before:
            raise LedgerError(
                f"{path}, line {line.number}: step {record.step} follows step {before}; two runs wrote into one ledger"
            )
        before = record.step
        yield record, line.end


def _is_after(path: Path, step: int) -> bool:
    """Whether a raw file belongs to a later step; files that people put there do not."""
    found = number_in(path.name, suffixes=RAW_SUFFIXES)
    return found is not None and found > step


def _check_types(record: StepRecord) -> None:
    if type(record.step) is not int or not isinstance(record.phases, dict):
        raise TypeError("step must be an integer and phases an object")


def _as_tensor(value: Any) -> Tensor | None:
    """Raw values that a comparison can walk element by element; None for what only JSON can hold."""
    import torch

    if isinstance(value, torch.Tensor):
        return _kept(value)
    if isinstance(value, (list, tuple)) and value:
        kinds = set(map(type, value))
        if kinds == {float}:
            return torch.tensor(value, dtype=torch.float64)
        if kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63:
            return torch.tensor(value, dtype=torch.int64)
    return None


def _kept(tensor: Tensor) -> Tensor:
    """A copy that later updates in place don't reach."""
    return tensor.detach().to("cpu", copy=True).contiguous()
