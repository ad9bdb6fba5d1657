"""Where metrics go: `metrics.jsonl` (exact floats), Weights & Biases, and a progress bar. A failing tracker does not stop training,
but a metrics file that can't be written does: data must not be lost silently."""

from __future__ import annotations

import http.client
import logging
import math
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from configs.problems import UserError
from configs.schema import TrackingConfig
from determinism.files import append_json_line
from trainer.run_dir import RunDirectory

logger = logging.getLogger(__name__)


ANSWER_S = 5.0
"""Longest wait for the tracker's server before the run starts."""


class TrackingError(UserError, ValueError):
    """The run can't be tracked as asked."""


def check_tracking(config: TrackingConfig) -> None:
    """Before anything starts: when a run is tracked online, check that there are credentials and that the server answers.

    Otherwise W&B would ask at a terminal, or wait for a minute, with all engines running.

    Raises:
        TrackingError: what is missing, and the ways out.
    """
    if config.wandb_mode != "online":
        return
    from wandb.errors import AuthenticationError
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    host = wandb_setup.singleton().settings.base_url
    out = "or track later: tracking=offline keeps everything for `wandb sync`"
    try:
        found = wbauth.authenticate_session(host=host, source="exactrl", prompt=False, update_session=False)
    except AuthenticationError as error:
        raise TrackingError(
            f"tracking.wandb_mode=online: the credentials for {host} are not valid: {error}; {out}"
        ) from error
    if found is None:
        raise TrackingError(
            f"tracking.wandb_mode=online, and there are no credentials for {host}; run `wandb login`, or set WANDB_API_KEY, {out}"
        )
    try:
        urllib.request.urlopen(host, timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:  # an answer
        error.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            return  # the server answers; W&B itself decides which certificates it trusts
        raise TrackingError(
            f"tracking.wandb_mode=online, and {host} does not answer within {ANSWER_S:g} s ({error}); check the network, the proxy "
            f"and WANDB_BASE_URL, {out}"
        ) from error


class Tracker:
    """Receives each step's metrics.

    Args:
        config: the `tracking` group.
        run: the run directory.
        name: the run's name in the tracker.
        settings: the resolved config, shown in the tracker.
        total_steps: length of the progress bar.
        run_id: W&B id of the run that is resumed; None starts a new one.
        first_step: steps already done.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run: RunDirectory,
        name: str,
        settings: Mapping[str, Any],
        total_steps: int,
        run_id: str | None = None,
        first_step: int = 0,
    ) -> None:
        self.run = run
        self.run_id = run_id
        self._wandb = self._start_wandb(config, name, settings)
        self._bar = self._start_bar(config, name, total_steps, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step. Values are plain floats and ints."""
        append_json_line(self.run.metrics, {"step": step, **metrics})
        self._send({**metrics}, step)
        if self._bar is not None and "timing_s/step" in metrics:
            self._bar.set_postfix_str(progress_line(metrics))
            self._bar.update(1)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show rows of samples in the tracker."""
        if self._wandb is not None and rows:
            import wandb

            self._send({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step)

    def close(self, failed: bool) -> None:
        """Finish; a tracker that hangs or fails here only costs a warning."""
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=int(failed))
            except Exception as error:
                logger.warning("W&B did not finish: %s", error)
            self._wandb = None

    def _send(self, values: dict[str, Any], step: int) -> None:
        if self._wandb is None:
            return
        try:
            self._wandb.log(values, step=step)
        except Exception as error:  # a tracker must never cost a run; the same numbers are in metrics.jsonl
            logger.warning("W&B log failed at step %d, metrics.jsonl has the numbers: %s", step, error)

    def _start_wandb(self, config: TrackingConfig, name: str, settings: Mapping[str, Any]) -> Any:
        if config.wandb_mode == "disabled":
            return None
        try:
            import wandb

            session = wandb.init(
                dir=str(self.run.path),
                mode="offline" if config.wandb_mode == "offline" else "online",
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                name=name,
                id=self.run_id,
                resume="allow" if self.run_id else None,
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off", init_timeout=60),
            )
            self.run_id = session.id
            return session
        except Exception as error:
            logger.warning("W&B did not start, going on with metrics.jsonl alone: %s", error)
            return None

    @staticmethod
    def _start_bar(config: TrackingConfig, name: str, total_steps: int, first_step: int) -> Any:
        if not config.progress:
            return None
        from tqdm import tqdm

        return tqdm(total=total_steps, initial=first_step, desc=name, unit="step", dynamic_ncols=True)


def progress_line(metrics: Mapping[str, float]) -> str:
    """The numbers of a step for the progress bar: time, reward, KL, and the last validation."""
    parts = [f"{metrics['timing_s/step']:.1f}s"]
    for label, key in (("reward", "critic/score/mean"), ("kl", "actor/ppo_kl"), ("len", "response_length/mean")):
        value = metrics.get(key, math.nan)
        if not math.isnan(value):
            parts.append(f"{label} {value:.3g}")
    return ", ".join(parts)
