"""`exactrl replay RUN --step K`: run one step of a run again, exactly, and check every phase against its ledger.

The newest complete checkpoint before K is restored (or the run starts anew), training goes on to K, and each phase's
digest is compared with the recorded one as soon as it exists. The replay writes into a directory of its own
(`RUN/replays/step_000137`); the run itself is only read. With `--stop-before PHASE` it opens the debugger in the frame of
the step, with the batch at hand.
"""

from __future__ import annotations

import argparse
import bdb
import inspect
import logging
import os
import pdb
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from configs.problems import UserError
from determinism.ledger import Ledger, read_ledger
from trainer.timing import Timing
from trainer.tools.trust import add_option, check_trust

if TYPE_CHECKING:
    from trainer.ppo import PPO

logger = logging.getLogger("exactrl.replay")

# Phases of a step as they are timed (trainer/ppo.py), with the names that people know them by.
PHASES = {
    "gen": "generation",
    "reward": "scoring",
    "old_log_prob": "old log-probabilities",
    "ref": "reference log-probabilities",
    "values": "values",
    "adv": "advantages and returns",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "sync_weights": "weights to the engines",
}
ALIASES = {"critic_update": "update_critic", "actor_update": "update_actor", "advantages": "adv", "rewards": "reward"}


class DivergenceError(RuntimeError):
    """A phase of the replay differs from the run's ledger."""


class CheckedLedger(Ledger):
    """A ledger that compares each phase with the recorded one as it is added.

    Args:
        expected: step -> phase -> digest of the run that is replayed.
    """

    def __init__(self, *args: Any, expected: Mapping[int, Mapping[str, str]], first_step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.expected = expected
        self.current = first_step
        self.checked = 0

    def claim(self, phase: str, digest: str) -> None:
        """Record and compare.

        Raises:
            DivergenceError: the recorded digest is another, or the recorded step has no such phase.
        """
        super().claim(phase, digest)
        recorded = self.expected.get(self.current)
        if recorded is None:
            return
        if recorded.get(phase) != digest:
            raise DivergenceError(
                f"step {self.current}, phase {phase}: the run recorded {recorded.get(phase)}, the replay gave {digest}. "
                "Every earlier phase agrees, so the cause lies between the last one that agreed and this one."
            )
        self.checked += 1

    def commit(self, step: int) -> None:
        """The step is complete; the next phases belong to the next one."""
        super().commit(step)
        self.current = step + 1


class StoppingTiming(Timing):
    """Opens the debugger before a phase of a step, in the frame of the code that runs it."""

    def __init__(self, stop_before: str, here: bool) -> None:
        super().__init__()
        self.stop_before = stop_before
        self.here = here

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """As `Timing`, but opens the debugger first when it is the phase to stop before."""
        if self.here and phase == self.stop_before:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_name != "step":
                frame = frame.f_back
            print(f"stopped before {phase} ({PHASES[phase]}); `c` goes on, `q` ends the replay", flush=True)
            if frame is not None:
                debug(frame)
        with super().__call__(phase):
            yield


def debug(frame: FrameType) -> None:
    """Open the debugger in `frame`, with its variables at hand; stepping goes on from there.

    `Pdb.set_trace(frame)` would stop at the next traced event, which is deep in the frames of this function's callers.

    Raises:
        BdbQuit: the person quit.
    """
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    outer: FrameType | None = frame
    while outer is not None:
        outer.f_trace = debugger.trace_dispatch
        debugger.botframe = outer
        outer = outer.f_back
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.stoplineno != -1:  # after `step` or `next`; after `continue` there is nothing to trace
        sys.settrace(debugger.trace_dispatch)


def replay(run: Path, step: int, stop_before: str | None = None, trust_run: bool = False) -> int:
    """Replay `step` of `run`; exit code 0 when every phase agrees, 1 when one does not.

    Args:
        trust_run: whether code that the run's configuration names may run.

    Raises:
        UserError: the run or the step is not there, or its configuration names code and is not trusted.
    """
    from configs.compose import from_yaml
    from trainer.checkpoint import CheckpointStore
    from trainer.claim import run_id
    from trainer.run import start
    from trainer.run_dir import RunDirectory

    if not (run / "config.yaml").exists():
        raise UserError(f"{run} is not a run directory: it has no config.yaml")
    expected = {record.step: record.phases for record in read_ledger(run)}
    if step not in expected:
        known = f"{min(expected)} to {max(expected)}" if expected else "none"
        raise UserError(f"--step {step}: the ledger of {run} has no such step (recorded: {known})")
    config = from_yaml(run / "config.yaml")
    check_trust(config, run, trust_run)
    target = run / "replays" / f"step_{step:06d}"
    if os.environ.get("RANK", "0") == "0":
        RunDirectory(target).check("auto")  # another replay of the step may be running there
        shutil.rmtree(target, ignore_errors=True)
    before = CheckpointStore(run / "checkpoints", 0, 0, run_id(run)).newest_good(step)
    config = replace(
        config,
        run=replace(config.run, dir=str(target), resume="never"),
        trainer=replace(
            config.trainer,
            checkpoint_every=0,
            checkpoint_at_end=False,
            validate_at_start=config.trainer.validate_at_start,
        ),
        tracking=replace(config.tracking, wandb_mode="disabled"),
    )
    try:
        ppo = start(config, lambda ppo: _prepare(ppo, expected, step, stop_before), before)
    except bdb.BdbQuit:
        print("the replay was ended in the debugger")
        return 0
    except DivergenceError as error:
        print(f"DIFFERENT: {error}", file=sys.stderr)
        return 1
    ledger = ppo.parts.ledger
    if isinstance(ledger, CheckedLedger):
        source = f"from the checkpoint of step {before.step}" if before else "from the start"
        print(f"SAME: replayed to step {step} {source}; {ledger.checked} digests agree")
    return 0


def _prepare(ppo: PPO, expected: Mapping[int, Mapping[str, str]], step: int, stop_before: str | None) -> None:
    """Turn a restored loop into a replay."""
    plain = ppo.parts.ledger
    ppo.parts.ledger = CheckedLedger(
        plain.run_dir,
        plain.record,
        expected=expected,
        first_step=ppo.done if ppo.done == 0 else ppo.done + 1,
    )
    ppo.stop_after = step
    if stop_before is not None:
        ppo.new_timing = lambda: StoppingTiming(stop_before, here=ppo.done + 1 == step)


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl replay`."""
    phases = "\n".join(f"  {name:14} {text}" for name, text in PHASES.items())
    parser = argparse.ArgumentParser(
        prog="exactrl replay",
        description=(__doc__ or "").split("\n\n", 1)[1],
        epilog=f"phases:\n{phases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="the step to run again")
    parser.add_argument("--stop-before", metavar="PHASE", help="open the debugger before this phase of step K")
    add_option(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl replay`; returns the exit code."""
    args = build_parser().parse_args(argv)
    phase = ALIASES.get(args.stop_before, args.stop_before)
    if phase is not None and phase not in PHASES:
        raise UserError(f"--stop-before {args.stop_before}: known phases are {', '.join([*PHASES, *ALIASES])}")
    return replay(args.run, args.step, phase, args.trust_run)


if __name__ == "__main__":
    sys.exit(main())
