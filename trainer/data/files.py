"""Rows of JSON and CSV files, as they are written.

Libraries that read such files into columns guess a type for each column and change what doesn't fit: text that looks like a
date becomes a time, 42 beside 4.5 becomes 42.0, 00501 becomes 501, NA becomes a missing value. Here a row is what its line says: JSON's
own types (whole numbers of any size), and text for every cell of a CSV file. Rows keep the columns that they have.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Suffix (before a `.gz`) -> how the file is read."""

PARAMS = {
    "json": ("encoding", "field"),
    "csv": ("encoding", "delimiter", "sep", "quotechar", "column_names"),
}
"""Settings of a reader, under the names that `datasets` uses; `sep` is another name of `delimiter`."""

_CHUNK = 1 << 20
"""Characters of a JSON array read at a time."""


class FileError(ValueError):
    """A file that can't be read as what its name says; the message names the file, the line or row, and the way out."""


def format_of(path: str | Path) -> str | None:
    """`json` or `csv`, by the file's suffix; None for anything else."""
    path = Path(path)
    return FORMATS.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)


def read_file(path: str | Path, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one file in its order, read as they are asked for (a JSON document with `field` is read whole).

    JSON: one object per line, or one array of objects. CSV: a header, then rows; an empty cell is None, every other cell is text.

    Args:
        path: ends in a suffix of `FORMATS`, or in such a suffix and `.gz`.
        params: `encoding` (UTF-8, with or without a byte order mark, when it is not given); JSON: `field`, the key under which a
            document keeps its rows; CSV: `delimiter`, `quotechar`, and `column_names` for a file without a header.

    Raises:
        FileError: a parameter that no reader knows; a row that can't be read as it was meant.
    """
    kind = format_of(path)
    if kind is None:
        raise FileError(f"{path} is neither JSON nor CSV")
    unknown = sorted(set(params) - set(PARAMS[kind]))
    if unknown:
        raise FileError(
            f"params.{unknown[0]} has no effect on {path}, which is read as it is written; "
            f"a {kind.upper()} file takes {', '.join(PARAMS[kind])}"
        )
    return _rows(Path(path), kind, dict(params))


def _rows(path: Path, kind: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    encoding = params.pop("encoding", None) or "utf-8-sig"
    count = 0
    try:
        # Text is split at line feeds only (JSON) or by the csv module: separators such as U+2028 are part of texts.
        newline = "\n" if kind == "json" else ""
        with cast(
            TextIO,
            gzip.open(path, "rt", encoding=encoding, newline=newline)
            if path.suffix == ".gz"
            else open(path, encoding=encoding, newline=newline),
        ) as stream:
            for row in _json_rows(stream, path, **params) if kind == "json" else _csv_rows(stream, path, **params):
                yield row
                count += 1
    except UnicodeError as error:
        raise FileError(
            f"{path}: after row {count}: the text is not {encoding.removesuffix('-sig')} ({error}); set params.encoding"
        ) from error
    except (OSError, EOFError, LookupError) as error:  # a broken gzip file, an unknown encoding
        raise FileError(f"{path}: after row {count}: {type(error).__name__}: {error}") from error


# --- JSON ----------------------------------------------------------------------------------------------------------


def _json_rows(stream: TextIO, path: Path, field: str | None = None) -> Iterator[dict[str, Any]]:
    if field is not None:
        document = _parse(stream.read(), str(path))
        rows = document.get(field) if isinstance(document, dict) else None
        if not isinstance(rows, list):
            raise FileError(f"{path}: params.field is {field!r}, and there is no list of rows under that key")
        for number, row in enumerate(rows):
            yield _row(row, f"{path}: row {number}")
        return
    number = 1
    first = stream.readline(_CHUNK)  # a whole array may be one line
    while first and not first.strip():
        number += first.endswith("\n")
        first = stream.readline(_CHUNK)
    if first.lstrip().startswith("["):
        yield from _array(stream, first.lstrip()[1:], path)
        return
    if not first.endswith("\n"):
        first += stream.readline()
    for line in itertools.chain([first], stream):
        if line.strip():
            yield _row(_parse(line, f"{path}: line {number}"), f"{path}: line {number}")
        number += 1


def _array(stream: TextIO, text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Elements of an array whose beginning comes before `text`; no more text is held than one element needs."""
    at = 0

    def peek() -> str:
        """The next character that is not white space; empty at the end of the file."""
        nonlocal text, at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text):
                return text[at]
            text, at = stream.read(_CHUNK), 0
            if not text:
                return ""

    for number in itertools.count():
        where = f"{path}: row {number}"
        if peek() == "]" and number == 0:
            at += 1
            break
        while True:
            try:
                row, end = _DECODER.raw_decode(text, at)
                break
            except json.JSONDecodeError as error:
                # The element may be longer than the text read so far; doubling that text reads a long element in linear time.
                more = stream.read(max(_CHUNK, len(text) - at))
                if not more:
                    raise FileError(f"{where} is not JSON: {error.msg}") from None
                text, at = text[at:] + more, 0
            except ValueError as error:
                raise FileError(f"{where}: {error}") from None
        at = end
        yield _row(row, where)
        after = peek()
        at += 1
        if after == "]":
            break
        if after != ",":
            raise FileError(f"{where}: the array goes on with {after or 'the end of the file'!r}, not with a comma")
    if peek():
        raise FileError(f"{path}: there is more text after the array's end")


def _parse(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where} is not JSON: {error.msg} at column {error.pos + 1}; a file has an object a line, or is one array of "
            "objects (one whose rows stand under a key of a document needs params.field)"
        ) from None
    except ValueError as error:
        raise FileError(f"{where}: {error}") from None


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{where} is {short(value)}; a row is a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. A key that occurs twice is refused: Python would silently keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise FileError(f"the key {_twice([key for key, _ in pairs])!r} is given twice")
    return found


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise FileError(f"the number {text} is beyond a float's range; write it as text")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float)


# --- CSV -----------------------------------------------------------------------------------------------------------


def _csv_rows(
    stream: TextIO,
    path: Path,
    delimiter: str | None = None,
    sep: str | None = None,
    quotechar: str = '"',
    column_names: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be longer than the module's 128 KiB
    try:
        # strict: otherwise a quote in the wrong place would silently move the borders of cells.
        reader = csv.reader(stream, strict=True, delimiter=delimiter or sep or ",", quotechar=quotechar)
    except TypeError as error:
        raise FileError(f"{path}: params: {error}") from error
    names = list(column_names) if column_names is not None else None
    while True:
        begins = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise FileError(f"{path}: line {begins}: {error}") from None
        if cells is None:
            return
        if not cells:  # an empty line
            continue
        if names is None:
            # Tables that were saved with their index have a first column without a name.
            names = [name or f"Unnamed: {number}" for number, name in enumerate(cells)]
            if len(set(names)) < len(names):
                raise FileError(f"{path}: the column {_twice(names)!r} is there twice; rename one")
            continue
        if len(cells) != len(names):
            raise FileError(
                f"{path}: line {begins} has {len(cells)} cells, and there are {len(names)} columns; quote cells that hold a "
                "delimiter or a line break"
            )
        yield {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _twice(names: Sequence[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


def short(value: Any) -> str:
    """A value in the form that messages show."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
