"""Prompts in a seeded order, with a position that survives a resume.

    DataConfig --sources.py--> rows --prompts.py--> Prompt --PromptSampler--> the prompts of step 1, 2, ...

A source is read in *passes*. Pass p visits its rows in an order that is a function of (seed, source name, p) only. Weights decide which
source gives the next prompt: always the source that is furthest behind its share. No random generator has a state, so the position is a few
integers.

Passes never end inside a batch: when a source has fewer rows left than the batch takes from it, these rows are left out of the pass
(and logged) and the next pass begins. So no prompt occurs twice in a batch, and with one source an epoch is a pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from configs.schema import DataConfig, DataSourceConfig
from determinism.digest import digest_value
from rollout.types import Prompt
from trainer.data.cursors import Cursor, RowCursor, Source, StreamCursor, too_few
from trainer.data.prompts import LengthReport, PromptCodec, PromptError, apply_length_policy
from trainer.data.sources import SourceError, SourceRow, load_rows, open_stream, overlapping_tasks

logger = logging.getLogger(__name__)

STATE_VERSION = 1
_CHECKED_BATCHES = 1000


class PromptData:
    """The prompts of a split: rendered, tokenised, and with the length limit applied.

    Args:
        config: the data group.
        tokenizer: the policy's tokenizer.
        split: `train` or `validation`.

    Raises:
        SourceError: a source that cannot be loaded, two with the same name, no training source.
        PromptError: a tokenizer or prompt that cannot be used (see `trainer/data/prompts.py`).
    """

    def __init__(self, config: DataConfig, tokenizer: Any, *, split: str) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}; it must be train or validation")
        self.split = split
        self.codec = PromptCodec(
            tokenizer, apply_chat_template=config.apply_chat_template, system_prompt=config.system_prompt
        )
        self.reports: dict[str, LengthReport] = {}
        self._config = config
        configs = list(config.train if split == "train" else config.validation)
        _check_sources(configs, split)
        if split == "validation":
            for sentence in overlapping_tasks(config.train, configs, config.seed):
                logger.warning("%s", sentence)
        self.sources = tuple(self._stream(source) if source.streaming else self._load(source) for source in configs)

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt of the loaded sources, source after source."""
        return [prompt for source in self.sources for prompt in source.prompts]

    def metrics(self) -> dict[str, float]:
        """`data/<source>/rows`, `dropped`, `truncated`, `longest_prompt` (tokens, before the length policy)."""
        values: dict[str, float] = {}
        for name, report in self.reports.items():
            values[f"data/{name}/rows"] = float(report.rows - len(report.dropped))
            values[f"data/{name}/dropped"] = float(len(report.dropped))
            values[f"data/{name}/truncated"] = float(len(report.truncated))
            values[f"data/{name}/longest_prompt"] = float(report.longest)
        return values

    def _load(self, source: DataSourceConfig) -> Source:
        rows = load_rows(source, self._config.seed, self.split)
        prompts, report = self._prepare(source, rows)
        self.reports[source.name] = report
        if report.dropped or report.truncated:
            logger.warning(
                "data source %r: %d of %d prompts were longer than %d tokens (the longest has %d): %d dropped, %d truncated",
                source.name,
                len(report.dropped) + len(report.truncated),
                report.rows,
                self._config.max_prompt_tokens,
                report.longest,
                len(report.dropped),
                len(report.truncated),
            )
        if not prompts:
            raise PromptError(
                f"data source {source.name!r}: all {report.rows} prompts are longer than data.max_prompt_tokens="
                f"{self._config.max_prompt_tokens}, so none is left"
            )
        return Source(source.name, source.weight, tuple(prompts))

    def _prepare(self, source: DataSourceConfig, rows: Sequence[SourceRow]) -> tuple[list[Prompt], LengthReport]:
        named = [(f"{source.name}/{row.index}", row.prompt) for row in rows]
        prompts = [
            Prompt(name, source.name, rendered.token_ids, rendered.text, rendered.messages, row.answer, row.extra)
            for (name, _), row, rendered in zip(named, rows, self.codec.render(named), strict=True)
        ]
        return apply_length_policy(prompts, self._config.max_prompt_tokens, self._config.overlong_prompts, self.codec)

    def _stream(self, source: DataSourceConfig) -> Source:
        if self.split != "train":
            raise SourceError(
                f"data source {source.name!r}: validation prompts are a fixed set, so streaming cannot be used"
            )
        if source.window < 1:
            raise SourceError(f"data source {source.name!r}: window is {source.window}; it must be at least 1")

        def prompts_from(start: int) -> Iterator[Prompt | None]:
            for row in open_stream(source, start):
                fitted, _ = self._prepare(source, [row])
                yield fitted[0] if fitted else None

        return Source(source.name, source.weight, stream=prompts_from, window=source.window)


def _check_sources(configs: Sequence[DataSourceConfig], split: str) -> None:
    names = [source.name for source in configs]
    if split == "train" and not names:
        raise SourceError("data.train names no source, so there is nothing to train on")
    for name in names:
        if names.count(name) > 1:
            raise SourceError(
                f"data.{split} has {names.count(name)} sources of the name {name!r}; prompt ids need a name each"
            )
    for source in configs:
        if not source.weight > 0:
            raise SourceError(
                f"data source {source.name!r}: weight is {source.weight}; it must be above 0, or leave the source out"
            )


def log_first_prompt(data: PromptData, several_turns: bool = False) -> None:
    """Log the first prompt as the engine sees it, once. Mistakes show in its template, its BOS and its ids.

    Args:
        several_turns: an environment or agent may begin otherwise, or add tools; the line says so.
    """
    source = data.sources[0]
    prompts: Iterable[Prompt | None] = source.prompts if source.stream is None else source.stream(0)
    first = next((prompt for prompt in prompts if prompt is not None), None)
    if first is not None:
        ids = " ".join(map(str, first.token_ids))
        what = "first prompt, before the environment or agent adds to it" if several_turns else "first prompt"
        logger.info("%s (%s): %r\nits %d token ids: %s", what, first.id, first.text, len(first.token_ids), ids)


def data_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of everything the rows hold (ids, tokens, conversation, answer, extra columns), in order; 32 hex characters."""
    return digest_value(
        [
            [p.id, p.source, list(p.token_ids), p.text, [dict(m) for m in p.messages], p.answer, dict(p.extra)]
            for p in prompts
        ]
    )


class PromptSampler:
    """Gives each step its prompts.

    Args:
        data: the training data.
        prompts_per_step: prompts of a batch.
        seed: `data.seed`.
        shuffle: a new order in each pass; False keeps the source's.

    Raises:
        SourceError: a source has fewer rows than a batch takes from it.
    """

    def __init__(self, data: PromptData, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        self._sources = data.sources
        self._batch = prompts_per_step
        self._step = 0
        self._drawn = [0] * len(self._sources)
        self._weights = _whole_weights([source.weight for source in self._sources])
        self._cursors: list[Cursor] = [
            RowCursor(source, seed, shuffle) if source.stream is None else StreamCursor(source, seed, shuffle)
            for source in self._sources
        ]
        self._check_rows()

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch: all rows of all sources divided by the batch size, rounded down.

        Raises:
            SourceError: a source streams, so its number of rows is not known.
        """
        streams = [source.name for source in self._sources if source.stream is not None]
        if streams:
            raise SourceError(
                f"data source {streams[0]!r} streams, so the length of an epoch is not known; "
                "set trainer.total_steps and leave trainer.total_epochs null"
            )
        return sum(len(source.prompts) for source in self._sources) // self._batch

    @property
    def step(self) -> int:
        """Batches given so far."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0. With one source it is the number of its pass."""
        return self._step // self.steps_per_epoch

    def total_steps(self, epochs: int) -> int:
        """Steps of `epochs` epochs."""
        return epochs * self.steps_per_epoch

    def next_batch(self) -> list[Prompt]:
        """The prompts of the next step, `prompts_per_step` of them, no two with the same id."""
        self._step += 1
        return self.more(self._batch)

    def more(self, count: int) -> list[Prompt]:
        """The next `count` prompts, no two with the same id, for a step that needs more than a batch. Moves the position, not the step."""
        slots = _next_slots(self._weights, self._drawn, count)
        counts = [slots.count(index) for index in range(len(self._sources))]
        taken = [iter(cursor.take(number)) for cursor, number in zip(self._cursors, counts, strict=True)]
        self._drawn = [drawn + new for drawn, new in zip(self._drawn, counts, strict=True)]
        return [next(taken[index]) for index in slots]

    def state_dict(self) -> dict[str, Any]:
        """The position: plain values, to be saved with the checkpoint of the step."""
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "prompts_per_step": self._batch,
            "sources": [
                {"name": source.name, "drawn": drawn, **cursor.state_dict()}
                for source, drawn, cursor in zip(self._sources, self._drawn, self._cursors, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ValueError: the state has another format version, batch size or set of sources.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the sampler's state has version {state['version']}; this code reads {STATE_VERSION}")
        if state["prompts_per_step"] != self._batch:
            raise ValueError(
                f"the sampler's state was saved with data.prompts_per_step={state['prompts_per_step']}, now it is {self._batch}"
            )
        names = [source.name for source in self._sources]
        saved = [source["name"] for source in state["sources"]]
        if saved != names:
            raise ValueError(f"the sampler's state is of the sources {saved}, the data has {names}")
        self._step = state["step"]
        self._drawn = [source["drawn"] for source in state["sources"]]
        for source, cursor in zip(state["sources"], self._cursors, strict=True):
            cursor.load_state_dict(source)

    def _check_rows(self) -> None:
        most = _most_per_batch(self._weights, self._batch)
        for source, cursor, count in zip(self._sources, self._cursors, most, strict=True):
            if isinstance(cursor, StreamCursor):
                cursor.check(count)
            elif len(source.prompts) < count:
                raise too_few(source.name, len(source.prompts), count)


def _whole_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the exact ratio of the weights as written: 0.1 and 0.3 give 1 and 3."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


def _next_slots(weights: Sequence[int], drawn: Sequence[int], count: int) -> list[int]:
    """Sources of the next `count` prompts, after `drawn` of each: always the one furthest behind its share, the first at a tie."""
    total = sum(weights)
    now = list(drawn)
    slots = []
    for draw in range(sum(drawn) + 1, sum(drawn) + 1 + count):
        deficits = [weight * draw - total * taken for weight, taken in zip(weights, now, strict=True)]
        chosen = deficits.index(max(deficits))
        now[chosen] += 1
        slots.append(chosen)
    return slots


def _most_per_batch(weights: Sequence[int], batch: int) -> list[int]:
    """The most prompts that each source gives to one batch, over a period of the schedule (or its first thousand batches)."""
    drawn = [0] * len(weights)
    most = [0] * len(weights)
    for _ in range(_CHECKED_BATCHES):
        slots = _next_slots(weights, drawn, batch)
        counts = [slots.count(index) for index in range(len(weights))]
        drawn = [old + new for old, new in zip(drawn, counts, strict=True)]
        most = [max(old, new) for old, new in zip(most, counts, strict=True)]
        if sum(drawn) % sum(weights) == 0:  # every source has exactly its share: from here on the schedule repeats
            break
    return most
