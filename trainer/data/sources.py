"""Loads one configured source into rows: a generated reasoning-gym task, JSON or CSV files, or what the `datasets` library reads.

Local JSON and CSV files are read as they are written (`files.py`). Parquet files, saved datasets and those of the Hub are read by
`datasets`, with the types that they have there. A row keeps what verifiers need: the answer and, under `extra`, the remaining columns. Rows
keep their number in the source, so a prompt's identity does not change when others are filtered out.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import itertools
import json
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import DataSourceConfig
from determinism.seeds import derive_seed
from trainer.data.files import FORMATS, PARAMS, FileError, format_of, read_file, short

logger = logging.getLogger(__name__)

PARQUET = ".parquet"
READABLE = (PARQUET, *FORMATS)
"""Suffixes of local files."""

TASK_KEY = "reasoning_gym"
"""Where a generated row's `extra` keeps what the task's own `score_answer` needs."""

# Generated tasks seed row i with seed + i, some of them a numpy generator that takes 32 bits.
_TASK_SEED_BITS = 31

# Rows of a stream that are searched for columns; of a loaded source all rows are.
_LOOKED_THROUGH = 1000

# Some tasks iterate over sets while they make a row, so rows are not repeatable; generating the first ones twice finds such tasks.
_REPEATED_ROWS = 8


class SourceError(ValueError):
    """A data source cannot be used as configured; the message names it."""


@dataclass(frozen=True)
class SourceRow:
    """A row as its source gives it."""

    index: int
    """Number of the row in its source, from 0."""
    prompt: str | tuple[Mapping[str, Any], ...]
    """Text, or chat messages."""
    answer: Any = None
    """Reference answer; None when there is none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The remaining columns as plain values (None, bool, int, float, str, list, tuple, dict)."""


def load_rows(config: DataSourceConfig, data_seed: int, split: str) -> list[SourceRow]:
    """Every row of a source, in the source's own order.

    Args:
        config: the source.
        data_seed: `data.seed`; a generated task without a seed of its own derives one from it.
        split: `train` or `validation`; part of the seed, so that a task named in both does not hold out rows that it trains on.

    Raises:
        SourceError: an unknown kind or task, a path that cannot be read, a missing column, an empty or malformed prompt.
    """
    if config.kind == "reasoning_gym":
        return _generate(config, task_seed(config, data_seed, split))
    if config.kind == "dataset":
        rows = list(read_rows(config, _loaded(config)))
        if not rows:
            raise SourceError(f"data source {config.name!r}: {config.path} has no rows in split {config.split!r}")
        return rows
    raise SourceError(f"data source {config.name!r}: kind is {config.kind!r}; it must be reasoning_gym or dataset")


def task_seed(config: DataSourceConfig, data_seed: int, split: str) -> int:
    """Seed of a generated task: its own, or one derived from `data.seed`, the split and the source's name; below 2**31."""
    if config.seed is not None:
        return config.seed
    return derive_seed(data_seed, "data_task", split, config.name) % 2**_TASK_SEED_BITS


def _generate(config: DataSourceConfig, seed: int) -> list[SourceRow]:
    import reasoning_gym

    owned = sorted({"seed", "size"} & set(config.params))
    if owned:
        raise SourceError(
            f"data source {config.name!r}: params set {', '.join(owned)}, which the source's own fields decide; set them there"
        )
    try:
        task = reasoning_gym.create_dataset(config.path, seed=seed, size=config.size, **config.params)
    except (ValueError, TypeError, AssertionError) as error:
        raise SourceError(f"data source {config.name!r}: reasoning-gym task {config.path!r}: {error}") from error
    rows = []
    for index in range(config.size):
        entry = _task_row(task, config.path, seed, index)
        if index < _REPEATED_ROWS and entry != _task_row(task, config.path, seed, index):
            raise SourceError(
                f"data source {config.name!r}: reasoning-gym task {config.path!r} gave two different rows {index} for one seed, "
                "so ranks and runs would not share their data; choose another task, or save its rows to a file"
            )
        extra = {
            TASK_KEY: {
                "task": config.path,
                "params": plain(dict(config.params), f"data source {config.name!r}: params"),
                "question": entry["question"],
                "metadata": plain(entry["metadata"], f"data source {config.name!r}: row {index}, metadata"),
            }
        }
        rows.append(SourceRow(index, entry["question"], entry["answer"], extra))
    return rows


def _task_row(task: Any, name: str, seed: int, index: int) -> dict[str, Any]:
    with _own_generators(derive_seed(seed, "data_task_row", name, index)):
        return task[index]


@contextlib.contextmanager
def _own_generators(seed: int) -> Iterator[None]:
    """Some tasks draw from, or seed, the global generators: seed these for the block, and restore the caller's state afterwards."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@dataclass(frozen=True)
class _Table:
    """What is read: rows, and the columns that they (or the first ones of a stream) have."""

    rows: Iterable[Mapping[str, Any]]
    columns: Sequence[str] | None
    """Columns in their order; None when they are not known because there is no row."""


def _loaded(config: DataSourceConfig) -> _Table:
    """A source as a whole."""
    files = _files(config)
    if files is None:
        dataset = _open_dataset(config)
        return _Table(dataset, dataset.column_names)
    rows = _split_of(config, {name: list(_read_files(config, paths)) for name, paths in files.items()})
    return _Table(rows, _columns(rows))


def open_stream(config: DataSourceConfig, start: int) -> Iterator[SourceRow]:
    """Rows of a streaming source from row `start` on.

    Raises:
        SourceError: as `load_rows`, at the row that is wrong.
    """
    if config.kind != "dataset":
        raise SourceError(f"data source {config.name!r}: streaming needs kind=dataset, not {config.kind}")
    files = _files(config)
    if files is None:
        dataset = _open_dataset(config, streaming=True)
        return read_rows(config, _Table(dataset.skip(start) if start else dataset, dataset.column_names), start)
    if set(files) != {config.split}:
        raise SourceError(f"data source {config.name!r}: split is {config.split!r}; a stream is one whole split")
    rows = _read_files(config, files[config.split])
    first = list(itertools.islice(rows, _LOOKED_THROUGH)) if start == 0 else []
    return read_rows(
        config, _Table(itertools.chain(first, itertools.islice(rows, start, None)), _columns(first)), start
    )


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """Every column that occurs, in the order of first occurrence; None without rows."""
    return list(dict.fromkeys(name for row in rows for name in row)) or None


def _files(config: DataSourceConfig) -> dict[str, list[str]] | None:
    """Split -> its files, for local JSON and CSV files; None for what `datasets` is to read.

    A single file is the split that the config names. In a folder, `datasets` finds out which files belong to which split.
    """
    path = Path(os.path.expanduser(config.path))
    names = list(dict.fromkeys(part.partition("[")[0].strip() for part in config.split.split("+")))
    if path.is_file():
        if format_of(path) is not None:
            return {name: [str(path)] for name in names}
        if path.suffix == PARQUET:
            return None
        raise SourceError(
            f"data source {config.name!r}: {config.path} ends in {path.suffix!r}; readable are {', '.join(READABLE)} "
            f"({', '.join(FORMATS)} also as .gz)"
        )
    if not path.is_dir():
        if path.suffix in READABLE or format_of(path) is not None or path.is_absolute() or config.path.startswith("."):
            raise SourceError(f"data source {config.name!r}: there is no file {config.path}")
        return None
    if _is_saved(path):
        return None
    import datasets

    with _named(config):
        own = {name for names in PARAMS.values() for name in names}
        rest = {name: value for name, value in config.params.items() if name not in own}
        builder = datasets.load_dataset_builder(str(path), **rest)
        found = {
            str(split): [str(file) for file in paths] for split, paths in (builder.config.data_files or {}).items()
        }
    if not any(format_of(file) for paths in found.values() for file in paths):
        return None
    if names == ["all"]:
        names = list(found)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise SourceError(
            f"data source {config.name!r}: {config.path} has no split {unknown[0]!r}; it has {', '.join(found)}"
        )
    return {name: found[name] for name in names}


def _read_files(config: DataSourceConfig, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    own = {name for names in PARAMS.values() for name in names}
    is_file = Path(os.path.expanduser(config.path)).is_file()
    # In a folder, the other settings have already served to find the files.
    params = {name: value for name, value in config.params.items() if is_file or name in own}
    try:
        for path in paths:
            yield from read_file(path, params)
    except FileError as error:
        raise SourceError(f"data source {config.name!r}: {error}") from error


def _split_of(config: DataSourceConfig, rows: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of `config.split`, which may name a slice (`train[:100]`, `train[:10%]`) or a sum of splits."""
    import datasets

    split = "+".join(rows) if config.split == "all" else config.split
    with _named(config):
        instruction = datasets.ReadInstruction.from_spec(split)
        parts = instruction.to_absolute({name: len(found) for name, found in rows.items()})
    return [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]


def _is_saved(path: Path) -> bool:
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


@contextlib.contextmanager
def _named(config: DataSourceConfig) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises errors of many kinds; each means that this source cannot be read
        raise SourceError(
            f"data source {config.name!r}: cannot load {config.path} (split {config.split!r}): {type(error).__name__}: {error}"
        ) from error


def _open_dataset(config: DataSourceConfig, *, streaming: bool = False) -> Any:
    """The `datasets` object of a source: a parquet file, a folder, or a Hub name."""
    import datasets

    path = Path(os.path.expanduser(config.path))
    params = dict(config.params)
    with _named(config):
        if path.is_file():
            # A slice such as train[:100] takes rows of the one split that the file becomes.
            files = {config.split.partition("[")[0]: str(path)}
            return datasets.load_dataset("parquet", data_files=files, split=config.split, streaming=streaming, **params)
        if path.is_dir() and _is_saved(path):
            loaded = datasets.load_from_disk(str(path), **params)
            loaded = loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
            return loaded.to_iterable_dataset() if streaming else loaded
        loaded = datasets.load_dataset(config.path, split=config.split, streaming=streaming, **params)
    if not path.is_dir() and loaded.info.builder_name in ("json", "csv"):
        logger.warning(
            "data source %r: %s holds %s files, whose columns get the types that `datasets` sees in them: numbers and dates may "
            "no longer be as they are written. Give the path of a local copy to have them unchanged",
            config.name,
            config.path,
            loaded.info.builder_name.upper(),
        )
    return loaded


def read_rows(config: DataSourceConfig, table: _Table, start: int = 0) -> Iterator[SourceRow]:
    """Turn rows of columns into `SourceRow`s, numbered from `start`; see `load_rows` for what is raised."""
    if start == 0 and table.columns is not None:
        _check_columns(config, table.columns)
    for index, values in enumerate(table.rows, start):
        if index == 0 and table.columns is None:
            _check_columns(config, list(values))
        where = f"data source {config.name!r}: row {index}"
        if config.prompt_key not in values:
            raise SourceError(
                f"{where}: has no {config.prompt_key!r} (prompt_key); it has {', '.join(values) or 'nothing'}"
            )
        values = {name: plain(value, f"{where}, column {name!r}") for name, value in values.items()}
        answer_key = _answer_key(config, list(values))
        answer = _reach(values, answer_key) if answer_key else None
        extra = {name: value for name, value in values.items() if name not in (config.prompt_key, answer_key)}
        yield SourceRow(index, _prompt(values[config.prompt_key], where, config.prompt_key), answer, extra)


def _check_columns(config: DataSourceConfig, names: Sequence[str]) -> None:
    have = ", ".join(names)
    if config.prompt_key not in names:
        raise SourceError(
            f"data source {config.name!r}: {config.path} has no column {config.prompt_key!r} (prompt_key); its columns are: {have}"
        )
    key = _answer_key(config, names)
    if key is not None and key.partition(".")[0] not in names and key not in names:
        raise SourceError(
            f"data source {config.name!r}: {config.path} has no column {config.answer_key!r} (answer_key); its columns are: {have}. "
            "Set answer_key to one of them, or to null when there is no reference answer"
        )


def _answer_key(config: DataSourceConfig, names: Sequence[str]) -> str | None:
    """The column of the answer; rows written for verl keep it in `reward_model.ground_truth`."""
    if config.answer_key == "answer" and "answer" not in names and "reward_model" in names:
        return "reward_model.ground_truth"
    return config.answer_key


def _reach(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return values[key]
    value: Any = values
    for part in key.split("."):
        # When this row has no answer, it is None, like an empty cell.
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _prompt(value: Any, where: str, key: str) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        if not value:
            raise SourceError(f"{where}: column {key!r} is empty")
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        # Columnar files give every message every field; fields that it never had come back as None.
        return tuple({name: part for name, part in message.items() if part is not None} for message in value)
    raise SourceError(
        f"{where}: column {key!r} holds {short(value)}; it must be text or a list of messages with role and content"
    )


def plain(value: Any, where: str) -> Any:
    """`value` made of None, bool, int, float, str, list, tuple and dict only, so that it can be digested, sent and written.

    Raises:
        SourceError: a value that has no such form; the message says where it is.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair
            raise SourceError(f"{where}: holds {error.object[error.start]!r}, which is no character") from error
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else json.dumps(plain(key, where)): plain(part, where)
            for key, part in value.items()
        }
    if isinstance(value, tuple):  # kept: some verifiers compare with tuples
        return tuple(plain(part, where) for part in value)
    if isinstance(value, list):
        return [plain(part, where) for part in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist(), where)
    if isinstance(value, set | frozenset):
        raise SourceError(f"{where}: holds a set, whose order is not defined")
    raise SourceError(f"{where}: holds a {type(value).__name__}, which cannot be kept; drop the column")


def overlapping_tasks(
    train: Sequence[DataSourceConfig], validation: Sequence[DataSourceConfig], data_seed: int
) -> list[str]:
    """Pairs of generated sources whose held-out rows are (partly) training rows; one sentence per pair.

    A task makes row i from seed + i, so two sources with near seeds share rows: with seeds 1 and 2 all but one.
    """
    found = []
    for left in train:
        for right in validation:
            if not left.kind == right.kind == "reasoning_gym" or left.path != right.path or left.params != right.params:
                continue
            first, second = task_seed(left, data_seed, "train"), task_seed(right, data_seed, "validation")
            if first < second + right.size and second < first + left.size:
                found.append(
                    f"data.validation {right.name!r} shares generated rows with data.train {left.name!r}: row i comes from seed + i, "
                    f"and the seeds are {abs(first - second)} apart; set them further apart than the sizes"
                )
    return found
