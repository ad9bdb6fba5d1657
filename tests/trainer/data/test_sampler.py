import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from configs.schema import DataConfig, DataSourceConfig
from rollout.types import Prompt
from tests.trainer.data._tokenizers import word_tokenizer
from trainer.data.prompts import PromptError
from trainer.data.sampler import PromptData, PromptSampler, data_digest
from trainer.data.sources import SourceError

WORDS = "abcdefghi"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def source(tmp_path: Path):
    def make(name: str, rows: int, **settings: Any) -> DataSourceConfig:
        path = tmp_path / f"{name}.jsonl"
        records = [{"prompt": WORDS[i % 9], "answer": str(i)} for i in range(rows)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return DataSourceConfig(name=name, kind="dataset", path=str(path), **settings)

    return make


def load(*sources: DataSourceConfig, split: str = "train", **settings: Any) -> PromptData:
    config = DataConfig(train=list(sources), validation=list(sources), seed=0, **settings)
    return PromptData(config, word_tokenizer(), split=split)


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in batch]


def batches(sampler: PromptSampler, count: int) -> list[list[str]]:
    return [ids(sampler.next_batch()) for _ in range(count)]


def flat(batches: list[list[str]]) -> list[str]:
    return [name for batch in batches for name in batch]


class TestOrder:
    def test_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next_epochs_order(self, source) -> None:
        """6 prompts, batches of 2, 2 epochs, stopped exactly after step 3."""
        data = load(source("s", 6))
        straight = PromptSampler(data, 2, seed=5)
        assert straight.total_steps(2) == 6
        expected = batches(straight, 6)

        stopped = PromptSampler(data, 2, seed=5)
        first = batches(stopped, 3)
        resumed = PromptSampler(data, 2, seed=5)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert resumed.step == 3
        assert resumed.epoch == 1
        assert first + batches(resumed, 3) == expected
        assert sorted(flat(expected[:3])) == sorted(flat(expected[3:])) == [f"s/{i}" for i in range(6)]
        assert expected[:3] != expected[3:]

    def test_a_resume_at_any_step_gives_the_same_batches(self, source) -> None:
        data = load(source("s", 7), source("t", 5, weight=0.5))
        expected = batches(PromptSampler(data, 3, seed=1), 12)
        for step in range(12):
            stopped, resumed = PromptSampler(data, 3, seed=1), PromptSampler(data, 3, seed=1)
            batches(stopped, step)
            resumed.load_state_dict(stopped.state_dict())
            assert batches(resumed, 12 - step) == expected[step:]

    def test_the_order_is_the_seeds(self, source) -> None:
        data = load(source("s", 40))
        assert batches(PromptSampler(data, 4, seed=1), 10) == batches(PromptSampler(data, 4, seed=1), 10)
        assert batches(PromptSampler(data, 4, seed=1), 10) != batches(PromptSampler(data, 4, seed=2), 10)

    def test_without_shuffling_it_is_the_sources_order_every_time(self, source) -> None:
        sampler = PromptSampler(load(source("s", 4)), 2, seed=1, shuffle=False)
        assert batches(sampler, 4) == [["s/0", "s/1"], ["s/2", "s/3"]] * 2

    def test_an_epochs_remainder_is_left_out_and_logged(self, source, caplog) -> None:
        sampler = PromptSampler(load(source("s", 7)), 2, seed=3)
        assert sampler.total_steps(2) == 6
        with caplog.at_level(logging.INFO):
            given = batches(sampler, 6)
        assert max(Counter(flat(given[:3])).values()) == 1
        assert max(Counter(flat(given[3:])).values()) == 1
        assert "its last 1 rows" in caplog.text

    def test_rows_of_equal_text_have_ids_of_their_own(self, source) -> None:
        data = load(source("s", 18))
        assert len({prompt.text for prompt in data.prompts}) == 9
        assert len({prompt.id for prompt in data.prompts}) == 18


class TestMixing:
    def test_sources_share_by_weight_exactly(self, source) -> None:
        data = load(source("s", 40, weight=3), source("t", 40, weight=1))
        given = batches(PromptSampler(data, 4, seed=1), 20)
        for batch in given:
            assert Counter(name[0] for name in batch) == {"s": 3, "t": 1}

    def test_shares_that_do_not_divide_a_batch_are_met_over_the_steps(self, source) -> None:
        data = load(source("s", 30, weight=0.1), source("t", 30, weight=0.2))
        counts = Counter(name[0] for batch in batches(PromptSampler(data, 4, seed=1), 30) for name in batch)
        assert counts == {"s": 40, "t": 80}

    def test_a_small_source_goes_round_and_never_twice_in_a_batch(self, source) -> None:
        data = load(source("small", 5), source("large", 50))
        for batch in batches(PromptSampler(data, 8, seed=1), 40):
            assert len(set(batch)) == 8

    def test_a_source_with_fewer_rows_than_its_share_of_a_batch_is_refused(self, source) -> None:
        data = load(source("small", 3), source("large", 50))
        with pytest.raises(SourceError, match="'small' has 3 rows, and a step takes up to 4"):
            PromptSampler(data, 8, seed=1)
        PromptSampler(data, 6, seed=1)

    def test_an_epoch_is_as_long_as_all_sources_together(self, source) -> None:
        assert PromptSampler(load(source("s", 5), source("t", 6)), 2, seed=1).total_steps(3) == 15


class TestRefusals:
    def test_fewer_rows_than_a_batch(self, source) -> None:
        with pytest.raises(SourceError, match="'s' has 6 rows, and a step takes up to 7"):
            PromptSampler(load(source("s", 6)), 7, seed=1)

    def test_two_sources_of_one_name(self, source) -> None:
        with pytest.raises(SourceError, match="2 sources of the name 's'"):
            load(source("s", 6), source("s", 6))

    def test_no_training_source(self) -> None:
        with pytest.raises(SourceError, match=r"data\.train names no source"):
            load()
        assert load(split="validation").prompts == []

    def test_a_weight_of_zero(self, source) -> None:
        with pytest.raises(SourceError, match="weight is 0"):
            load(source("s", 6, weight=0.0))

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"version": 0}, "version 0"), ({"prompts_per_step": 4}, "prompts_per_step=4"), ({"sources": []}, "sources")],
    )
    def test_a_state_of_another_run(self, source, change: dict[str, Any], message: str) -> None:
        sampler = PromptSampler(load(source("s", 6)), 2, seed=1)
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict({**sampler.state_dict(), **change})


class TestLength:
    """`<bos> user : <word> assistant :` has 6 tokens."""

    def test_the_row_that_is_too_long_is_named(self, source) -> None:
        with pytest.raises(PromptError, match=r"max_prompt_tokens=5: s/0 \(6 tokens\)"):
            load(source("s", 2), max_prompt_tokens=5)

    def test_the_dropped_count_is_logged_and_reported(self, source, tmp_path, caplog) -> None:
        config = source("s", 3)
        Path(config.path).write_text(Path(config.path).read_text() + '{"prompt": "a b c", "answer": "x"}\n')
        with caplog.at_level(logging.WARNING):
            data = load(config, max_prompt_tokens=6, overlong_prompts="filter")
        assert [prompt.id for prompt in data.prompts] == ["s/0", "s/1", "s/2"]
        assert data.metrics() == {
            "data/s/rows": 3.0,
            "data/s/dropped": 1.0,
            "data/s/truncated": 0.0,
            "data/s/longest_prompt": 8.0,
        }
        assert "1 of 4 prompts were longer than 6 tokens" in caplog.text

    def test_a_source_that_is_dropped_whole_is_refused(self, source) -> None:
        with pytest.raises(PromptError, match="all 2 prompts are longer"):
            load(source("s", 2), max_prompt_tokens=5, overlong_prompts="filter")

    def test_a_rows_id_does_not_move_when_others_are_dropped(self, source) -> None:
        config = source("s", 3)
        lines = ['{"prompt": "a b c", "answer": "x"}', *Path(config.path).read_text().splitlines()]
        Path(config.path).write_text("\n".join(lines))
        data = load(config, max_prompt_tokens=6, overlong_prompts="filter")
        assert [prompt.id for prompt in data.prompts] == ["s/1", "s/2", "s/3"]


class TestStreaming:
    def test_a_stream_gives_every_row_once_a_pass_and_resumes_anywhere(self, source) -> None:
        config = source("s", 12, streaming=True, window=5)
        expected = batches(PromptSampler(load(config), 2, seed=1), 12)
        for half in (expected[:6], expected[6:]):
            assert sorted(flat(half)) == sorted(f"s/{i}" for i in range(12))
        for step in (0, 1, 2, 3, 5, 6, 7, 11):
            stopped, resumed = PromptSampler(load(config), 2, seed=1), PromptSampler(load(config), 2, seed=1)
            batches(stopped, step)
            resumed.load_state_dict(stopped.state_dict())
            assert batches(resumed, 12 - step) == expected[step:]

    def test_rows_that_the_length_policy_drops_leave_the_position_exact(self, source) -> None:
        config = source("s", 11, streaming=True, window=4)
        lines = Path(config.path).read_text().splitlines()
        lines[2:2] = ['{"prompt": "a b c", "answer": "x"}']
        Path(config.path).write_text("\n".join(lines))

        def sampler() -> PromptSampler:
            return PromptSampler(load(config, max_prompt_tokens=6, overlong_prompts="filter"), 3, seed=1)

        expected = batches(sampler(), 6)
        assert "s/2" not in flat(expected)
        stopped, resumed = sampler(), sampler()
        batches(stopped, 2)
        resumed.load_state_dict(stopped.state_dict())
        assert batches(resumed, 4) == expected[2:]

    def test_a_window_is_shuffled_and_another_seed_shuffles_otherwise(self, source) -> None:
        config = source("s", 12, streaming=True, window=12)
        one, other = (batches(PromptSampler(load(config), 4, seed=seed), 3) for seed in (1, 2))
        assert one != other
        assert flat(batches(PromptSampler(load(config), 4, seed=1, shuffle=False), 3)) == [f"s/{i}" for i in range(12)]

    def test_the_length_of_an_epoch_is_not_known(self, source) -> None:
        sampler = PromptSampler(load(source("s", 12, streaming=True)), 2, seed=1)
        with pytest.raises(SourceError, match=r"set trainer\.total_steps"):
            sampler.total_steps(1)

    def test_validation_cannot_stream(self, source) -> None:
        with pytest.raises(SourceError, match="fixed set"):
            load(source("s", 12, streaming=True), split="validation")

    def test_a_stream_shorter_than_a_batch_is_refused(self, source) -> None:
        with pytest.raises(SourceError, match="'s' has 2 rows, and a step takes up to 3"):
            PromptSampler(load(source("s", 2, streaming=True)), 3, seed=1)


def test_the_digest_names_the_rows_content(source, tmp_path) -> None:
    config = source("s", 3)
    before = data_digest(load(config).prompts)
    assert before == data_digest(load(config).prompts)
    Path(config.path).write_text(Path(config.path).read_text().replace('"answer": "2"', '"answer": "3"'))
    assert before != data_digest(load(config).prompts)
