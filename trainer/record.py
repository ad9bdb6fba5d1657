"""What a run writes for people: metrics, episodes, validation samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determinism.files import numbered, write_atomically
from rollout.types import Episode, Score
from trainer.run_dir import RunDirectory
from trainer.tracking import Tracker

if TYPE_CHECKING:
    from trainer.experience import Experience
    from trainer.validation import ValidationResult


class Record:
    """The run's files and its tracker.

    Args:
        run: the run directory.
        tracker: receives metrics and samples; without one nothing is written.
        save_episodes: whether training episodes are written.
        log_samples: validation samples shown in the tracker.
    """

    def __init__(self, run: RunDirectory, tracker: Tracker | None, save_episodes: bool, log_samples: int) -> None:
        self.run = run
        self.tracker = tracker
        self.save_episodes = save_episodes
        self.log_samples = log_samples

    @property
    def tracker_run_id(self) -> str | None:
        """W&B's id, to be reused when the run is resumed."""
        return self.tracker.run_id if self.tracker else None

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics."""
        if self.tracker:
            self.tracker.log(step, metrics)

    def episodes(self, step: int, episodes: Sequence[Episode], scores: Sequence[Score]) -> None:
        """`episodes/step_000012.jsonl`: one episode per line, in canonical order."""
        if self.tracker and self.save_episodes:
            self._write(numbered(step, "step", ".jsonl"), episodes, scores)

    def validation(self, step: int, result: ValidationResult) -> None:
        """`episodes/validation_000012.jsonl` and a few rows in the tracker."""
        if not self.tracker:
            return
        self._write(numbered(step, "validation", ".jsonl"), result.episodes, result.scores)
        shown = list(zip(result.episodes, result.scores, strict=True))[: self.log_samples]
        rows = [[step, e.prompt.text, e.text, str(e.prompt.answer), s.total] for e, s in shown]
        self.tracker.table(step, "val/samples", ["step", "prompt", "response", "answer", "score"], rows)

    def nonfinite_batch(self, step: int, experience: Experience) -> Path:
        """`nonfinite_step_000012.safetensors`: every tensor of the step on which updates were not finite; returns its path.

        The file's metadata holds `rows`, JSON of [prompt_id, task, sample] for dim 0 of the tensors. It is written even when episodes
        are not (`tracking.save_episodes`).
        """
        path = self.run.path / numbered(step, "nonfinite_step", ".safetensors")
        if self.tracker:
            from safetensors.torch import save

            rows = json.dumps(experience.names())
            write_atomically(path, save(experience.tensors(), {"step": str(step), "rows": rows}))
        return path

    def _write(self, name: str, episodes: Sequence[Episode], scores: Sequence[Score]) -> None:
        lines = [json.dumps(episode_record(e, s), ensure_ascii=False) for e, s in zip(episodes, scores, strict=True)]
        write_atomically(self.run.episodes / name, "".join(line + "\n" for line in lines))


def episode_record(episode: Episode, score: Score) -> dict[str, Any]:
    """One episode as JSON values; token ids and log-probabilities are exact."""
    record = {
        "prompt_id": episode.prompt.id,
        "task": episode.key.task,
        "sample": episode.key.sample,
        "seed": episode.seed,
        "prompt": episode.prompt.text,
        "response": episode.text,
        "answer": _plain(episode.prompt.answer),
        "score": score.total,
        "rewards": dict(score.by_source),
        "dropped": score.dropped,
        "error": score.error,
        "finish_reason": episode.finish_reason,
        "response_ids": list(episode.response_ids),
        "logprobs": list(episode.logprobs),
        "weight_version": episode.weight_version,
    }
    if score.placed:
        record["placed_rewards"] = [list(part) for part in score.placed]
    if episode.turns or episode.failure:
        record |= {
            "messages": [dict(message) for message in episode.messages],
            "episode_reward": episode.reward,
            "failure": episode.failure,
            "turns": [dataclasses.asdict(turn) for turn in episode.turns],
        }
    return record


def _plain(value: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        return str(value)
    return value
