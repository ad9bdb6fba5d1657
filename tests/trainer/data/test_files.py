"""JSON and CSV files come out as they were written."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataSourceConfig
from determinism.digest import digest_value
from trainer.data import files
from trainer.data.files import FileError, read_file
from trainer.data.sources import SourceError, load_rows, open_stream


def source(path: Path, **settings: Any) -> DataSourceConfig:
    return DataSourceConfig(**{"name": "d", "kind": "dataset", "path": str(path), **settings})


def jsonl(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def answers(path: Path, **settings: Any) -> list[Any]:
    """As loaded; a stream of the same file must give the same."""
    config = source(path, **settings)
    rows = load_rows(config, 0, "train")
    assert list(open_stream(config, 0)) == rows
    return [row.answer for row in rows]


JSON_ANSWERS = [
    "2024-01-03",
    "2024-01-03T10:00:00Z",
    "10:30",
    "00501",
    "1.50",
    "42",
    "true",
    "True",
    "null",
    "NA",
    "None",
    "",
    " 7 ",
    "1\u20282\u2029\x0b\x85",
    42,
    4.5,
    None,
    True,
    2**53 + 1,
    2**63,
    -(10**30),
    [1, "1", 1.0, None],
    ["a"],
    {"target": [1, "2", None], "n": 3},
    {"target": ["only"]},
]


class TestJson:
    @pytest.mark.parametrize("suffix", [".jsonl", ".json"])
    def test_every_answer_of_a_mixed_column_is_what_was_written(self, tmp_path, suffix: str) -> None:
        path = tmp_path / f"rows{suffix}"
        jsonl(path, *(json.dumps({"prompt": "p", "answer": answer}, ensure_ascii=False) for answer in JSON_ANSWERS))
        assert digest_value(answers(path)) == digest_value(JSON_ANSWERS)  # tells 42, 42.0, "42" and True apart

    @pytest.mark.parametrize("indent", [None, 2])
    def test_one_array_is_read_alike(self, tmp_path, indent: int | None, monkeypatch) -> None:
        monkeypatch.setattr(files, "_CHUNK", 7)  # every value lies across the border of a chunk somewhere
        path = tmp_path / "rows.json"
        rows = [{"prompt": "p", "answer": answer} for answer in JSON_ANSWERS]
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=indent), encoding="utf-8")
        assert digest_value(answers(path)) == digest_value(JSON_ANSWERS)

    def test_a_long_line_is_read_whole(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(files, "_CHUNK", 7)
        assert answers(jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "answer": 12345678901234567890}')) == [
            12345678901234567890
        ]

    def test_prompts_that_look_like_something_else_stay_text(self, tmp_path) -> None:
        prompts = ["2024-01-03", "42", "1.50", "NA", "null", "true"]
        path = jsonl(tmp_path / "rows.jsonl", *(json.dumps({"prompt": text, "answer": 1}) for text in prompts))
        assert [row.prompt for row in load_rows(source(path), 0, "train")] == prompts

    def test_rows_keep_the_columns_that_they_have(self, tmp_path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "x": 1}', '{"prompt": "q", "answer": "2", "y": null}')
        rows = load_rows(source(path), 0, "train")
        assert [(row.answer, row.extra) for row in rows] == [(None, {"x": 1}), ("2", {"y": None})]
        assert list(open_stream(source(path), 0)) == rows
        assert list(open_stream(source(path), 1)) == rows[1:]

    def test_nested_answers_stay_what_they_are(self, tmp_path) -> None:
        rows: list[dict[str, Any]] = [
            {"prompt": "p", "reward_model": {"ground_truth": 42}},
            {"prompt": "p", "reward_model": {"ground_truth": "0042"}},
            {"prompt": "p", "reward_model": {"ground_truth": {"target": ["a", 1]}}},
            {"prompt": "p", "reward_model": {"style": "rule"}},
        ]
        path = jsonl(tmp_path / "rows.jsonl", *map(json.dumps, rows))
        expected = [42, "0042", {"target": ["a", 1]}, None]
        assert digest_value(answers(path)) == digest_value(expected)
        assert digest_value(answers(path, answer_key="reward_model.ground_truth")) == digest_value(expected)

    def test_a_column_with_a_dot_in_its_name_goes_before_a_nested_one(self, tmp_path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "a": {"b": 1}, "a.b": "2"}')
        assert answers(path, answer_key="a.b") == ["2"]

    def test_a_byte_order_mark_blank_lines_and_line_ends_of_windows(self, tmp_path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "p", "answer": "1"}\r\n\r\n{"prompt": "q", "answer": "2"}')
        assert answers(path) == ["1", "2"]

    def test_a_compressed_file(self, tmp_path) -> None:
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"prompt": "p", "answer": "00501"}\n'))
        assert answers(path) == ["00501"]

    def test_rows_under_a_key_of_a_document(self, tmp_path) -> None:
        path = tmp_path / "rows.json"
        path.write_text('{"version": 1,\n "data": [{"prompt": "p", "answer": "1.50"}]}')
        assert answers(path, params={"field": "data"}) == ["1.50"]
        with pytest.raises(SourceError, match=r"rows\.json: line 1 is not JSON.*params\.field"):
            load_rows(source(path), 0, "train")

    def test_another_encoding(self, tmp_path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"prompt": "p", "answer": "é"}\n', encoding="utf-16")
        assert answers(path, params={"encoding": "utf-16"}) == ["é"]
        with pytest.raises(SourceError, match=r"is not utf-8.*set params\.encoding"):
            load_rows(source(path), 0, "train")

    def test_a_folders_files_are_read_the_same_way_in_order(self, tmp_path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        for number in range(2):
            jsonl(folder / f"train-{number:05}-of-00002.jsonl", f'{{"prompt": "p", "answer": "2024-01-0{number + 1}"}}')
        jsonl(folder / "test.jsonl", '{"prompt": "p", "answer": 42}', '{"prompt": "p", "answer": 4.5}')
        assert answers(folder) == ["2024-01-01", "2024-01-02"]
        assert digest_value(answers(folder, split="test")) == digest_value([42, 4.5])
        rows = load_rows(source(folder, split="train[1:]+test[:50%]"), 0, "train")
        assert [(row.index, row.answer) for row in rows] == [(0, "2024-01-02"), (1, 42)]
        with pytest.raises(SourceError, match=r"no split 'dev'; it has"):
            load_rows(source(folder, split="dev"), 0, "train")

    def test_a_slice_of_a_stream_is_refused(self, tmp_path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "answer": "1"}')
        with pytest.raises(SourceError, match="one whole split"):
            open_stream(source(path, split="train[:1]"), 0)

    def test_a_stream_reads_no_further_than_it_is_asked(self, tmp_path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", *['{"prompt": "p", "answer": "1"}'] * 2000, "no JSON")
        stream = open_stream(source(path), 0)
        assert [next(stream).index for _ in range(2000)] == list(range(2000))
        with pytest.raises(SourceError, match="line 2001 is not JSON"):
            next(stream)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"prompt": "p", "answer": 1, "answer": 2}', "line 2: the key 'answer' is given twice"),
            ('{"prompt": "p", "answer": 1e999}', "line 2: the number 1e999 is beyond a float's range"),
            ('{"prompt": "p", "answer": "1"', "line 2 is not JSON"),
            ('{"prompt": "p"} {"prompt": "q"}', "line 2 is not JSON: Extra data"),
            ('["p", "1"]', "line 2 is \\['p', '1'\\]; a row is a JSON object"),
            ('{"prompt": "p", "answer": "\\ud800"}', "row 1, column 'answer': holds .* no character"),
            ('{"question": "p"}', "row 1: has no 'prompt' \\(prompt_key\\); it has question"),
            (f'{{"prompt": "p", "answer": {"9" * 5000}}}', "line 2: Exceeds the limit"),
        ],
    )
    def test_a_line_that_cannot_be_read_as_it_was_meant_is_named(self, tmp_path, line: str, message: str) -> None:
        path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "answer": "1"}', line)
        with pytest.raises(SourceError, match=message):
            load_rows(source(path), 0, "train")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('[{"prompt": "p"} {"prompt": "q"}]', "row 0: the array goes on with '{'"),
            ('[{"prompt": "p"}', "row 0: the array goes on with 'the end of the file'"),
            ('[{"prompt": "p"},', "row 1 is not JSON"),
            ('[{"prompt": "p"},]', "row 1 is not JSON"),
            ('[{"prompt": "p"}] x', "more text after the array's end"),
            ("[1]", "row 0 is 1; a row is a JSON object"),
            ('[{"prompt": "p"}, {"a": 1, "a": 2}]', "row 1: the key 'a' is given twice"),
        ],
    )
    def test_an_array_that_is_damaged_is_refused(self, tmp_path, text: str, message: str) -> None:
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(FileError, match=message):
            list(read_file(path, {}))

    @pytest.mark.parametrize("text", ["", "\n \n", "[]", " [ ] "])
    def test_a_file_without_rows(self, tmp_path, text: str) -> None:
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(SourceError, match="has no rows"):
            load_rows(source(path), 0, "train")


def csv_file(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


class TestCsv:
    def test_every_cell_is_text(self, tmp_path) -> None:
        cells = ["00501", "1.50", "NA", "None", "null", "nan", "True", "2024-01-03", "1e5", " 7 ", "42", "9" * 40]
        path = csv_file(tmp_path / "rows.csv", "prompt,answer\n" + "".join(f"{cell},{cell}\n" for cell in cells))
        assert answers(path) == cells
        assert [row.prompt for row in load_rows(source(path), 0, "train")] == cells

    def test_an_empty_cell_is_no_answer_and_no_prompt(self, tmp_path) -> None:
        path = csv_file(tmp_path / "rows.csv", "prompt,answer\np,\n,1\n")
        with pytest.raises(SourceError, match="row 1: column 'prompt'"):
            load_rows(source(path), 0, "train")
        assert answers(csv_file(path, "prompt,answer\np,\nq,1\n")) == [None, "1"]

    def test_quotes_line_breaks_separators_and_a_byte_order_mark(self, tmp_path) -> None:
        text = '\ufeffprompt,answer\r\n"a, ""b""\nc","1\u20282"\r\n\r\nq,2\r\n'
        path = csv_file(tmp_path / "rows.csv", text)
        rows = load_rows(source(path), 0, "train")
        assert [(row.index, row.prompt, row.answer) for row in rows] == [(0, 'a, "b"\nc', "1\u20282"), (1, "q", "2")]

    def test_a_long_cell(self, tmp_path) -> None:
        path = csv_file(tmp_path / "rows.csv", f"prompt,answer\np,{'x' * 200_000}\n")
        assert answers(path) == ["x" * 200_000]

    def test_another_delimiter_names_from_the_config_and_a_nameless_index(self, tmp_path) -> None:
        path = csv_file(tmp_path / "rows.csv.gz", "")
        path.write_bytes(gzip.compress(b"p;1\nq;2\n"))
        assert answers(path, params={"sep": ";", "column_names": ["prompt", "answer"]}) == ["1", "2"]
        path = csv_file(tmp_path / "rows.csv", ",prompt,answer\n0,p,1\n")
        assert load_rows(source(path), 0, "train")[0].extra == {"Unnamed: 0": "0"}

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("prompt,answer,answer\np,1,2\n", "the column 'answer' is there twice"),
            ("prompt,answer\np,1\np,1,2\n", "line 3 has 3 cells, and there are 2 columns"),
            ("prompt,answer\np\n", "line 2 has 1 cells"),
            ('prompt,answer\np,"1" 2\n', "line 2: .*expected after"),
            ('prompt,answer\np,"1\n', "line 2: unexpected end of data"),
        ],
    )
    def test_a_row_that_cannot_be_read_as_it_was_meant_is_named(self, tmp_path, text: str, message: str) -> None:
        with pytest.raises(SourceError, match=message):
            load_rows(source(csv_file(tmp_path / "rows.csv", text)), 0, "train")


def test_a_parameter_that_nothing_reads_is_refused(tmp_path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", '{"prompt": "p", "answer": "1"}')
    with pytest.raises(SourceError, match=r"params\.delimiter has no effect.*takes encoding, field"):
        load_rows(source(path, params={"delimiter": ";"}), 0, "train")
