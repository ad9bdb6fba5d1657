"""`exactrl doctor [EXPERIMENT.yaml] [overrides]`: what can be promised on this machine with this model.

The arguments are those of `exactrl train`; full determinism is turned on for the checks. Short training runs are started as a
person would start them, in temporary directories, and compared bit by bit:

    base run, engines examined first   D3 batches, orders, caches, weights loaded again;  D7 gap engine - trainer
    the same again                     D1
    another number of ranks            D4
    other processes for the episodes   D6, with an environment or agent; some episodes are played twice
    with --full also: another rollout topology (D3), the other launcher (D2), stopped after a step and resumed (D5)

Exit code: 0 when nothing that full_determinism promises was broken, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from configs.checks import several_turns
from configs.problems import ConfigError, UserError
from configs.schema import Config
from determinism.selfcheck import BROKEN, KEPT, PROMISED, UNCHECKED, Finding, Report, describe

AUDITED = 4
"""Episodes of a step that are played twice for D6."""
SHARED_CPUS = 64
"""CPUs that Ray may use for a run with more ranks than the machine has CPUs: the ranks take turns, which moves no bits."""
GRACE_S = 15.0
TAIL_CHARACTERS = 1500


class RunFailed(RuntimeError):
    """A run of the doctor did not finish; the message holds the end of its output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl doctor`; returns the exit code.

    Raises:
        UserError: the configuration can't be run with or without full determinism, or torchrun started this process.
    """
    arguments = build_parser().parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    if "RANK" in os.environ:
        raise UserError(
            "exactrl doctor starts its own ranks; start it without torchrun (launcher.name=torchrun makes it use that)"
        )
    config, refused = claimed_config(arguments.overrides, arguments.config_dir)
    if config is None:
        report = Report(tuple(refused))
    else:
        with _directory(arguments.keep) as directory:
            report = Doctor(config, directory, arguments.full).examine()
    print(json.dumps(report.as_dict(), indent=1) if arguments.json else describe(report))
    return report.exit_code


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl doctor`."""
    parser = argparse.ArgumentParser(
        prog="exactrl doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="[EXPERIMENT.yaml] [OVERRIDE ...]", help="as for `exactrl train`"
    )
    parser.add_argument("--full", action="store_true", help="also launchers, rollout topology and a resume (more runs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run directories here, for `exactrl compare`")
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="as for `exactrl train`")
    return parser


def claimed_config(overrides: Sequence[str], config_dir: Sequence[str] = ()) -> tuple[Config | None, list[Finding]]:
    """The configuration with full determinism on, or the findings that refuse it.

    Returns:
        (config, []) or (None, findings).

    Raises:
        ConfigError: it can't be run without full determinism either.
    """
    from configs.checks import check
    from configs.compose import load_config
    from trainer.tools.cli import missing_files

    config = load_config(overrides, config_dir=list(config_dir))
    check(config)
    if problems := missing_files(config):
        raise ConfigError(problems)
    try:
        if not config.full_determinism:
            config = load_config([*overrides, "full_determinism=true"], config_dir=list(config_dir))
        return check(config)[0], []
    except ConfigError as error:
        return None, [
            Finding(
                problem.level or "D1",
                "the configuration",
                BROKEN,
                0.0,
                f"{problem.key}: {problem.text}",
                problem.way_out,
            )
            for problem in error.problems
        ]


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise UserError(f"--keep {keep}: the directory is not empty")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="exactrl-doctor-") as directory:
        yield Path(directory)


@dataclass(frozen=True)
class Variant:
    """A run that must have the base run's ledger."""

    name: str
    level: str
    checked: str
    config: Config


class Doctor:
    """Starts the runs and judges their records.

    Args:
        config: with full determinism on.
        directory: for the runs; must be empty.
        full: all checks.
    """

    def __init__(self, config: Config, directory: Path, full: bool) -> None:
        self.directory = directory
        self.full = full
        self.config = short_run(config, steps=2 if full else 1)

    def examine(self) -> Report:
        """Every check; a run that fails is a finding."""
        start = time.perf_counter()
        try:
            findings = self.base()
        except RunFailed as error:
            spent = time.perf_counter() - start
            return Report((Finding("D1", "a short training run", BROKEN, spent, str(error), "mend the run first"),))
        for variant in self.variants():
            findings.append(self.against_base(variant))
        findings += self.resumed() if self.full else []
        findings += self.not_checked(findings)
        order = sorted(findings, key=lambda finding: finding.level)
        return Report(tuple(order), self.facts(), PROMISED)

    def base(self) -> list[Finding]:
        """The run that all others are compared with; the engines are examined before its first step.

        Raises:
            RunFailed: it did not finish.
        """
        found = self.directory / "findings.json"
        self.run("base", self.config, "--examine", str(found))
        return [Finding(**record) for record in json.loads(found.read_text(encoding="utf-8"))]

    def variants(self) -> list[Variant]:
        """The runs that each change one thing."""
        config, ranks = self.config, self.config.launcher.num_ranks
        steps = f"{config.trainer.total_steps} training step(s)"
        other = 2 if ranks == 1 else 1
        shared = config.launcher.ray_num_cpus
        if config.launcher.ray_address is None and config.launcher.device != "cuda":
            shared = max(SHARED_CPUS, shared or 0)
        found = [
            Variant("again", "D1", f"{steps} twice", config),
            Variant(
                "ranks",
                "D4",
                f"{steps} with {ranks} and {other} FSDP rank(s)",
                replace(config, launcher=replace(config.launcher, num_ranks=other, ray_num_cpus=shared)),
            ),
        ]
        rollout = config.rollout
        if several_turns(config):
            processes = 2 if rollout.proxy.processes == 1 else 1
            played = replace(
                rollout,
                proxy=replace(rollout.proxy, processes=processes),
                turns=replace(rollout.turns, audit_episodes=AUDITED),
            )
            what = f"{steps} with rollout.proxy.processes={processes}, {AUDITED} episodes played twice"
            found.append(Variant("turns", "D6", what, replace(config, rollout=played)))
        if not self.full:
            return found
        launcher: Literal["ray", "torchrun"] = "ray" if launcher_of(config) == "torchrun" else "torchrun"
        replicas = 2 if rollout.replicas == 1 else 1
        batch = max(1, rollout.max_num_seqs // 4)
        caching = not rollout.enable_prefix_caching
        topology = replace(rollout, replicas=replicas, max_num_seqs=batch, enable_prefix_caching=caching)
        return [
            *found,
            Variant(
                "launcher",
                "D2",
                f"{steps} under {launcher_of(config)} and {launcher}",
                replace(config, launcher=replace(config.launcher, name=launcher, ray_num_cpus=shared)),
            ),
            Variant(
                "topology",
                "D3",
                f"{steps} with rollout.replicas={replicas}, max_num_seqs={batch}, enable_prefix_caching={str(caching).lower()}",
                replace(config, rollout=topology, launcher=replace(config.launcher, ray_num_cpus=shared)),
            ),
        ]

    def against_base(self, variant: Variant) -> Finding:
        """Run a variant and compare its ledger with the base run's."""
        from configs.checks import check

        try:
            check(variant.config)
        except ConfigError as error:
            return Finding(variant.level, variant.checked, UNCHECKED, 0.0, str(error))
        return self._judged(
            variant.level, variant.checked, variant.name, lambda: self.run(variant.name, variant.config)
        )

    def resumed(self) -> list[Finding]:
        """A run that ends after its first step and one that goes on from its checkpoint."""
        config = self.config

        def interrupted() -> None:
            self.run("resumed", config, "--stop-after", "1")
            self.run("resumed", replace(config, run=replace(config.run, resume="auto")))

        return [self._judged("D5", "stopped after step 1 and resumed", "resumed", interrupted)]

    def not_checked(self, findings: Sequence[Finding]) -> list[Finding]:
        """One line for every level that was not checked."""
        present = {finding.level for finding in findings}
        why = {
            "D2": ("Ray against torchrun", "exactrl doctor --full starts both"),
            "D5": ("a resume", "exactrl doctor --full stops a run and resumes it"),
            "D6": ("multi-turn rollouts", "this configuration samples one turn"),
        }
        return [
            Finding(level, what, UNCHECKED, 0.0, text) for level, (what, text) in why.items() if level not in present
        ]

    def facts(self) -> dict[str, Any]:
        """Versions and settings in force, from the base run's manifest, as they were read back in its processes."""
        processes = json.loads((self.directory / "base" / "manifest.json").read_text(encoding="utf-8"))["processes"]
        return readable_facts(processes)

    def _judged(self, level: str, checked: str, name: str, run: Callable[[], None]) -> Finding:
        from determinism.compare import compare_runs
        from determinism.runs import load_run

        start = time.perf_counter()
        try:
            run()
        except RunFailed as error:
            return Finding(level, checked, BROKEN, time.perf_counter() - start, str(error))
        result = compare_runs(load_run(str(self.directory / "base")), load_run(str(self.directory / name)))
        seconds = time.perf_counter() - start
        parted = result.divergence
        if parted is None:
            count = sum(len(phases) for phases in result.grid.values())
            return Finding(level, checked, KEPT, seconds, f"{count} digests agree")
        detail = f"first difference at step {parted.step}, phase {parted.phase}"
        if parted.detail is not None:
            detail += f": {parted.detail.describe()}"
        return Finding(
            level, checked, BROKEN, seconds, detail, "exactrl doctor --keep DIR keeps the runs for exactrl compare"
        )

    def run(self, name: str, config: Config, *options: str) -> None:
        """One run in a process (or more) of its own; its output goes to `NAME.log`.

        Raises:
            RunFailed: it ended with a code other than 0.
        """
        from configs.compose import to_yaml

        print(f"doctor: {name}", file=sys.stderr, flush=True)
        config = replace(config, run=replace(config.run, name=name, dir=str(self.directory / name)))
        written, log = self.directory / f"{name}.yaml", self.directory / f"{name}.log"
        written.write_text(to_yaml(config), encoding="utf-8")
        code = _call([*command(config), str(written), *options], log)
        if code != 0:
            raise RunFailed(
                f"the run ended with exit code {code}:\n{log.read_text(encoding='utf-8')[-TAIL_CHARACTERS:]}"
            )


def short_run(config: Config, steps: int) -> Config:
    """The configuration cut down to a few steps, without validation, tracking or the check at start (the doctor has its own)."""
    return replace(
        config,
        trainer=replace(
            config.trainer,
            total_steps=steps,
            total_epochs=None,
            validate_every=0,
            validate_at_start=False,
            checkpoint_every=1 if steps > 1 else 0,
            checkpoint_at_end=False,
        ),
        critic=replace(config.critic, warmup_steps=0),  # so that the actor's update is checked too
        determinism=replace(config.determinism, engine_check=False),
        ledger=replace(config.ledger, record="full"),
        tracking=replace(config.tracking, wandb_mode="disabled", progress=False),
        run=replace(config.run, resume="never"),
    )


def launcher_of(config: Config) -> str:
    """`ray` or `torchrun`: the meaning of `launcher.name` in runs that the doctor starts."""
    return "torchrun" if config.launcher.name == "torchrun" else "ray"


def command(config: Config) -> list[str]:
    """How a run is started."""
    module = ["-m", "trainer.tools.doctor_run"]
    if launcher_of(config) == "ray":
        return [sys.executable, *module]
    # --standalone takes a free port, so that two doctors can work at once.
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.launcher.num_ranks}"]
    return [sys.executable, *launch, *module]


def readable_facts(processes: dict[str, Any]) -> dict[str, str]:
    """The facts of a manifest that a person looks for first."""
    trainer, rollout = processes.get("trainer/0", {}), processes.get("rollout/0", {})
    facts = {"python": trainer.get("python", "?")}
    facts |= {name: str(version) for name, version in trainer.get("versions", {}).items()}
    cpu = trainer.get("cpu", {})
    facts["processor"] = f"{cpu.get('model')} ({cpu.get('capability')})"
    facts["threads"] = str(trainer.get("threads"))
    if trainer.get("cuda"):
        facts["cuda"] = ", ".join(f"{name} {value}" for name, value in trainer["cuda"].items())
    engine = rollout.get("engine", {})
    facts["rollout engine"] = ", ".join(f"{name} {value}" for name, value in engine.items())
    return facts


def _call(words: Sequence[str], log: Path) -> int:
    """Exit code of a command whose output goes to `log`; it ends with this process when that is interrupted."""
    with open(log, "ab") as output, _sigterm_raises():
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
