"""Reads what runs left behind, for comparing: run directories, W&B offline directories, W&B runs online.

A run directory has everything (manifest, ledger, metrics, maybe raw values); W&B runs have metrics only.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determinism.files import DamagedLineError, json_lines
from determinism.ledger import LedgerError, StepRecord, read_ledger
from determinism.manifest import UNCOMPARED_FIELDS

# Wall time and what is derived from it differ between equal runs; they are never compared.
UNCOMPARED_PREFIXES = ("timing_s/", "perf/", "_")


_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How a W&B server writes what JSON has no number for."""


class NotComparableError(ValueError):
    """A run can't be read, or two runs have nothing in common; exit code 2."""


@dataclass(frozen=True)
class Run:
    """One run as the comparison sees it."""

    name: str
    """As given on the command line."""
    path: Path | None
    """Run directory; None for a run read from W&B."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """The manifest's compared part."""
    ledger: tuple[StepRecord, ...] = ()
    """Digests by step; empty for W&B runs."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by step, without wall times."""


def load_run(source: str) -> Run:
    """Read a run from a directory or, as `entity/project/id`, from W&B.

    Raises:
        NotComparableError: nothing readable is there; says what was looked for.
    """
    path = Path(source)
    if path.is_dir():
        if (path / "ledger.jsonl").exists() or (path / "metrics.jsonl").exists():
            return _from_directory(source, path)
        logs = sorted(path.glob("*.wandb"))
        if logs:
            try:
                return Run(source, None, metrics=_metrics_of(_offline_rows(logs[0])))
            except Exception as error:  # what a parser makes of damaged bytes can be anything
                raise NotComparableError(f"{logs[0]} can't be read: {type(error).__name__}: {error}") from error
        raise NotComparableError(
            f"{source}: neither ledger.jsonl nor metrics.jsonl nor a .wandb file is in this directory"
        )
    if source.count("/") == 2 and not source.startswith((".", "/")):
        return Run(source, None, metrics=_metrics_of(_online_rows(source)))
    raise NotComparableError(f"{source}: no such directory (a W&B run is written entity/project/id)")


def _from_directory(source: str, path: Path) -> Run:
    try:
        compared = _compared_manifest(path / "manifest.json")
        metrics = _metrics_of(line.record for line in json_lines(path / "metrics.jsonl"))
        ledger = tuple(read_ledger(path))
    except (NotComparableError, LedgerError, DamagedLineError) as error:
        raise NotComparableError(f"{source} is damaged: {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise NotComparableError(f"{source} can't be read: {error}") from error
    if not ledger and metrics and (path / "ledger.jsonl").exists():
        raise NotComparableError(
            f"{path / 'ledger.jsonl'} is damaged: it holds no step, and metrics.jsonl holds {len(metrics)}"
        )
    return Run(source, path, compared, ledger, metrics)


def _compared_manifest(path: Path) -> dict[str, Any]:
    """What is compared of a manifest, of any version; empty when there is none."""
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotComparableError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict):
        raise NotComparableError(f"{path} is damaged: it is not a JSON object")
    return {name: value for name, value in manifest.items() if name not in UNCOMPARED_FIELDS}


def _metrics_of(rows: Iterator[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        step = row.get("step", row.get("_step"))
        if step is None:
            continue
        values = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and name != "step" and not name.startswith(UNCOMPARED_PREFIXES)
        }
        found.setdefault(int(step), {}).update(values)
    return found


def _offline_rows(path: Path) -> Iterator[dict[str, Any]]:
    """History rows of a W&B offline log."""
    from wandb.proto import wandb_internal_pb2

    for data in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {"_step": record.history.step.num}
            for item in record.history.item:
                row["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            yield row


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a `.wandb` file: a 7-byte file header, then LevelDB's log format.

    Blocks of 32 KiB hold chunks of (checksum 4, length 2, type 1, payload); a record is one chunk (type 1) or several (2, 3,
    ..., 4); a block's last bytes that can't hold a header are padding. W&B has no public reader in this version.
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        chunk = data[at + 7 : at + 7 + length]
        if kind == 0 or len(chunk) < length:
            return  # padding, or a file that is still being written
        parts = chunk if kind in (1, 2) else parts + chunk
        at += 7 + length
        if kind in (1, 4):
            yield parts


def _online_rows(source: str) -> Iterator[dict[str, Any]]:
    """History rows of a run on a W&B server."""
    import wandb

    try:
        for row in wandb.Api().run(source).scan_history():
            yield {name: _NAMED.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
    except Exception as error:
        raise NotComparableError(f"{source}: W&B could not be read: {error}") from error
