import csv
import datetime
import decimal
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import DataSourceConfig
from determinism.digest import digest_value
from trainer.data.sources import TASK_KEY, SourceError, load_rows, open_stream, overlapping_tasks, plain, task_seed

RECORDS: list[dict[str, Any]] = [{"prompt": f"p{i}", "answer": f"{i}", "level": i} for i in range(5)]
VERL = [
    {
        "data_source": "gsm",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{i}"},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(3)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def dataset(path: Path, **settings: Any) -> DataSourceConfig:
    return DataSourceConfig(**{"name": "d", "kind": "dataset", "path": str(path), **settings})


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, records[0])
            writer.writeheader()
            writer.writerows(records)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records))
    return path


class TestFiles:
    @pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
    def test_every_format_gives_the_same_rows(self, tmp_path, suffix: str) -> None:
        rows = load_rows(dataset(write(tmp_path / f"rows{suffix}", RECORDS)), 0, "train")
        assert [row.prompt for row in rows] == [f"p{i}" for i in range(5)]
        assert [row.answer for row in rows] == [f"{i}" for i in range(5)]
        assert [row.extra for row in rows] == [{"level": i} for i in range(5)]
        assert [row.index for row in rows] == list(range(5))

    def test_csv_cells_are_text(self, tmp_path) -> None:
        rows = load_rows(dataset(write(tmp_path / "rows.csv", RECORDS)), 0, "train")
        assert [(row.prompt, row.answer, row.extra) for row in rows] == [
            (f"p{i}", f"{i}", {"level": f"{i}"}) for i in range(5)
        ]

    def test_parquet_values_keep_their_meaning(self, tmp_path) -> None:
        values = {
            "decimal": decimal.Decimal("1.50"),
            "date": datetime.date(2024, 1, 3),
            "time": datetime.datetime(2024, 1, 3, 10, 30),
            "text": "2024-01-03",
            "big": 2**63 - 1,
        }
        path = write(tmp_path / "rows.parquet", [{"prompt": "p", "answer": 42, **values}, {"prompt": "q"}])
        first, second = load_rows(dataset(path), 0, "train")
        assert (first.answer, second.answer) == (42, None)
        assert digest_value(first.answer) == digest_value(42)  # not 42.0, beside a gap
        assert first.extra == {
            "decimal": "1.50",
            "date": "2024-01-03",
            "time": "2024-01-03T10:30:00",
            "text": "2024-01-03",
            "big": 2**63 - 1,
        }

    def test_a_folder_is_read_by_split(self, tmp_path) -> None:
        write(tmp_path / "folder" / "train.jsonl", RECORDS)
        write(tmp_path / "folder" / "test.jsonl", RECORDS[:2])
        assert len(load_rows(dataset(tmp_path / "folder"), 0, "train")) == 5
        assert len(load_rows(dataset(tmp_path / "folder", split="test"), 0, "train")) == 2

    def test_a_saved_dataset_is_read(self, tmp_path) -> None:
        import datasets

        datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "saved")
        assert len(load_rows(dataset(tmp_path / "saved"), 0, "train")) == 5

    def test_a_slice_of_the_split_can_be_named(self, tmp_path) -> None:
        path = write(tmp_path / "rows.jsonl", RECORDS)
        assert [row.prompt for row in load_rows(dataset(path, split="train[1:3]"), 0, "train")] == ["p1", "p2"]

    def test_verl_rows_load_as_they_are(self, tmp_path) -> None:
        row = load_rows(dataset(write(tmp_path / "verl.parquet", VERL)), 0, "train")[2]
        assert row.prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "q2"})
        assert row.answer == "2"
        assert row.extra == {
            "data_source": "gsm",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 2, "split": "train"},
        }

    def test_fields_that_only_some_messages_have_do_not_come_back_as_none(self, tmp_path) -> None:
        chat = [{"role": "user", "content": "q", "name": "x"}, {"role": "user", "content": "r"}]
        (row,) = load_rows(dataset(write(tmp_path / "c.parquet", [{"prompt": chat, "answer": "1"}])), 0, "train")
        assert row.prompt == tuple(chat)

    def test_dots_reach_into_a_column(self, tmp_path) -> None:
        path = write(tmp_path / "verl.parquet", VERL)
        rows = load_rows(dataset(path, answer_key="extra_info.index"), 0, "train")
        assert [row.answer for row in rows] == [0, 1, 2]

    def test_rows_without_an_answer_column_load_when_none_is_wanted(self, tmp_path) -> None:
        path = write(tmp_path / "rows.jsonl", [{"prompt": "p"}])
        assert load_rows(dataset(path, answer_key=None), 0, "train")[0].answer is None


class TestRefusals:
    def test_a_missing_prompt_column_names_the_columns_there_are(self, tmp_path) -> None:
        path = write(tmp_path / "rows.jsonl", RECORDS)
        with pytest.raises(
            SourceError, match=r"no column 'question' \(prompt_key\); its columns are: prompt, answer, level"
        ):
            load_rows(dataset(path, prompt_key="question"), 0, "train")

    def test_a_missing_answer_column_names_the_columns_there_are(self, tmp_path) -> None:
        path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "solution": "1"}])
        with pytest.raises(SourceError, match=r"no column 'answer' .*prompt, solution"):
            load_rows(dataset(path), 0, "train")

    def test_a_missing_file_is_not_looked_up_elsewhere(self, tmp_path) -> None:
        with pytest.raises(SourceError, match=r"there is no file .*gone\.parquet"):
            load_rows(dataset(tmp_path / "gone.parquet"), 0, "train")

    def test_an_unreadable_format(self, tmp_path) -> None:
        (tmp_path / "rows.xml").write_text("<x/>")
        with pytest.raises(SourceError, match=r"'\.xml'; readable are \.parquet"):
            load_rows(dataset(tmp_path / "rows.xml"), 0, "train")

    @pytest.mark.parametrize("prompt", ["", None, 5, [], ["text"], [{"content": "no role"}]])
    def test_a_prompt_that_is_neither_text_nor_messages_names_the_row(self, tmp_path, prompt: Any) -> None:
        path = write(tmp_path / "rows.parquet", [{"prompt": prompt, "answer": "1"}])
        with pytest.raises(SourceError, match="row 0: column 'prompt'"):
            load_rows(dataset(path), 0, "train")

    def test_an_empty_source(self, tmp_path) -> None:
        path = write(tmp_path / "rows.jsonl", RECORDS)
        with pytest.raises(SourceError, match="no rows"):
            load_rows(dataset(path, split="train[0:0]"), 0, "train")

    def test_an_unknown_kind(self) -> None:
        with pytest.raises(SourceError, match="kind is 'hub'"):
            load_rows(DataSourceConfig(name="d", kind="hub", path="x"), 0, "train")

    def test_a_value_that_cannot_be_kept_names_its_column(self) -> None:
        with pytest.raises(SourceError, match="column 'x': holds a object"):
            plain(object(), "column 'x'")


class TestTasks:
    def test_a_task_keeps_what_its_own_verifier_needs(self) -> None:
        import reasoning_gym

        config = DataSourceConfig(
            name="sums", path="chain_sum", size=4, seed=3, params={"min_terms": 2, "max_terms": 2}
        )
        rows = load_rows(config, 0, "train")
        task = reasoning_gym.create_dataset("chain_sum", seed=3, size=4, min_terms=2, max_terms=2)
        for row, entry in zip(rows, task, strict=True):
            assert (row.prompt, row.answer) == (entry["question"], entry["answer"])
            kept = row.extra[TASK_KEY]
            again = {"question": kept["question"], "answer": row.answer, "metadata": kept["metadata"]}
            assert task.score_answer(answer=entry["answer"], entry=again) == 1.0
        digest_value(dict(rows[0].extra))  # plain enough to be recorded

    def test_training_and_validation_rows_of_one_name_differ(self) -> None:
        config = DataSourceConfig(name="sums", path="chain_sum", size=8)
        train, held_out = load_rows(config, 0, "train"), load_rows(config, 0, "validation")
        assert {row.prompt for row in train}.isdisjoint(row.prompt for row in held_out)
        assert train == load_rows(config, 0, "train")
        assert train != load_rows(config, 1, "train")

    @pytest.mark.parametrize("name", ["pool_matrix", "rearc"])
    def test_global_generators_neither_matter_nor_move(self, name: str) -> None:
        config = DataSourceConfig(name="t", path=name, size=2)
        random.seed(1)
        np.random.seed(1)
        first = load_rows(config, 0, "train")
        drawn = random.random(), np.random.random()
        random.seed(1)
        np.random.seed(1)
        assert drawn == (random.random(), np.random.random())
        assert load_rows(config, 0, "train") == first

    def test_a_task_that_does_not_repeat_is_refused(self, monkeypatch) -> None:
        import reasoning_gym

        class Unsteady:
            def __init__(self) -> None:
                self.calls = 0

            def __getitem__(self, index: int) -> dict[str, Any]:
                self.calls += 1
                return {"question": f"q{self.calls}", "answer": "1", "metadata": {}}

        monkeypatch.setattr(reasoning_gym, "create_dataset", lambda *args, **kwargs: Unsteady())
        with pytest.raises(SourceError, match="two different rows 0 for one seed"):
            load_rows(DataSourceConfig(name="t", path="unsteady", size=2), 0, "train")

    def test_an_unknown_task_and_an_unknown_parameter(self) -> None:
        with pytest.raises(SourceError, match="'no_such_task' not registered"):
            load_rows(DataSourceConfig(name="t", path="no_such_task"), 0, "train")
        with pytest.raises(SourceError, match="no_such_parameter"):
            load_rows(DataSourceConfig(name="t", path="chain_sum", params={"no_such_parameter": 1}), 0, "train")

    def test_params_may_not_set_what_the_source_decides(self) -> None:
        with pytest.raises(SourceError, match="params set seed"):
            load_rows(DataSourceConfig(name="t", path="chain_sum", params={"seed": 1}), 0, "train")

    def test_near_seeds_of_training_and_validation_are_found_to_share_rows(self) -> None:
        def source(seed: int | None) -> DataSourceConfig:
            return DataSourceConfig(name="t", path="chain_sum", size=100, seed=seed)

        assert "99 apart" in overlapping_tasks([source(1)], [source(100)], 0)[0]
        assert overlapping_tasks([source(1)], [source(101)], 0) == []
        assert overlapping_tasks([source(None)], [source(None)], 0) == []

    def test_a_derived_seed_fits_every_generator(self) -> None:
        seeds = {task_seed(DataSourceConfig(name=f"{i}", path="chain_sum"), 0, "train") for i in range(50)}
        assert len(seeds) == 50
        assert max(seeds) < 2**31


def test_a_stream_starts_at_any_row(tmp_path) -> None:
    config = dataset(write(tmp_path / "rows.jsonl", RECORDS), streaming=True)
    assert [row.index for row in open_stream(config, 3)] == [3, 4]
    assert list(open_stream(config, 0)) == load_rows(config, 0, "train")
