"""Hydra's part: which YAML files make up a run, merged in order. Its global state is left as it was found."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.problems import ConfigError, Problem
from configs.suggest import nearest

CONFIG_DIR = Path(__file__).resolve().parent
ROOT = "ppo"
FILE_OPTION = "_file_"


@dataclass(frozen=True)
class Selection:
    """What is to be composed."""

    groups: tuple[tuple[str, str], ...] = ()
    """(group, option)."""
    dirs: tuple[Path, ...] = ()
    """Folders to search after the packaged one."""
    experiment: Path | None = None
    """A file that takes the place of `experiment=NAME`."""


@dataclass(frozen=True)
class ComposedFiles:
    """The merged tree, interpolations unresolved, and the way back to the files."""

    tree: dict[str, Any]
    """Nested dicts and lists."""
    selection: Selection
    """What it was composed from."""

    def origin(self, key: str) -> str:
        """The last file that sets `key` itself, or the whole of something that it belongs to; empty when none does."""
        for path, package in reversed(_sources(self.selection)):
            if package and key != package and not key.startswith(f"{package}."):
                continue
            node: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            if _holds(node, key[len(package) :].strip(".").split(".")):
                return str(path)
        return ""


def _holds(node: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if isinstance(node, list):
            return True
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def group_options(dirs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Group -> names of its options, in the packaged folder and in `dirs`, sorted.

    Raises:
        ConfigError: a folder is missing, or holds a file that the packaged one has too (Hydra would leave one out silently).
    """
    options: dict[str, list[str]] = {}
    problems = []
    seen: dict[str, Path] = {}
    for directory in [CONFIG_DIR, *dirs]:
        if not directory.is_dir():
            problems.append(Problem("--config-dir", f"{directory} is not a folder"))
            continue
        for path in sorted(directory.glob("*.yaml")) + sorted(directory.glob("*/*.yaml")):
            name = path.relative_to(directory).as_posix()
            if name in seen:
                problems.append(
                    Problem("--config-dir", f"{path} has the name of {seen[name]}", "rename it: only one could be used")
                )
            seen.setdefault(name, path)
            if path.parent != directory:
                options.setdefault(path.parent.name, []).append(path.stem)
    if problems:
        raise ConfigError(problems)
    return {group: sorted(names) for group, names in sorted(options.items())}


def compose_files(selection: Selection) -> ComposedFiles:
    """Merge the root, the chosen option of each group, and the experiment.

    Raises:
        ConfigError: a file that can't be read, or that asks for an option that doesn't exist.
    """
    chosen = dict(selection.groups).get("experiment")
    if selection.experiment is not None and chosen is not None:
        text = f"{chosen} and the file {selection.experiment} are both given"
        raise ConfigError([Problem("experiment", text, "choose one")])
    packaged = not selection.dirs and selection.experiment is None
    tree = _compose_packaged(selection) if packaged else _compose(selection)
    return ComposedFiles(copy.deepcopy(tree), selection)


@functools.cache
def _compose_packaged(selection: Selection) -> dict[str, Any]:
    """Packaged files don't change while a process lives."""
    return _compose(selection)


def _compose(selection: Selection) -> dict[str, Any]:
    from hydra import compose
    from hydra.errors import HydraException

    try:
        with _hydra(selection) as lines:
            return OmegaConf.to_container(compose(ROOT, lines), resolve=False)  # type: ignore[return-value]
    except HydraException as error:
        reason = " ".join(str(error).split())
        raise ConfigError([Problem(str(selection.experiment or "config"), f"can't be composed: {reason}")]) from error


@functools.cache
def _sources(selection: Selection) -> list[tuple[Path, str]]:
    """(file, dotted key that its content goes under) in the order of merging."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with _hydra(selection) as lines:
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(ROOT, lines, RunMode.RUN).defaults
    found = [(_find(default.config_path or "", selection), default.package or "") for default in merged]
    return [(path, package.replace("_global_", "")) for path, package in found if path is not None]


@contextlib.contextmanager
def _hydra(selection: Selection) -> Iterator[list[str]]:
    """Hydra with its search path set, for as long as it is needed; yields its overrides."""
    from hydra import initialize_config_dir

    lines = [f"{group}={name}" for group, name in selection.groups]
    if selection.dirs:
        folders = ",".join(f"'file://{_quoted(directory)}'" for directory in selection.dirs)
        lines.append(f"hydra.searchpath=[{folders}]")
    with (
        _stored(selection.experiment) as option,
        initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"),
    ):
        yield lines + option


def unknown_option(group: str, name: str, options: Sequence[str]) -> Problem:
    """The problem of an option that no folder has."""
    near = nearest(name, options)
    hint = f"did you mean {group}={near}? " if near else ""
    return Problem(group, f"there is no option {name!r}", f"{hint}Options: {', '.join(options)}")


def _quoted(directory: Path) -> str:
    return str(directory).replace("\\", "\\\\").replace("'", "\\'")


def _find(config_path: str, selection: Selection) -> Path | None:
    if config_path == f"experiment/{FILE_OPTION}":
        return selection.experiment
    candidates = [directory / f"{config_path}.yaml" for directory in (CONFIG_DIR, *selection.dirs)]
    return next((path for path in candidates if path.is_file()), None)


@contextlib.contextmanager
def _stored(experiment: Path | None) -> Iterator[list[str]]:
    """The experiment file as an option of the group, for as long as it is needed; yields the override that selects it."""
    from hydra.core.config_store import ConfigStore

    if experiment is None:
        yield []
        return
    _check_header(experiment)
    try:
        node = OmegaConf.load(experiment)
    except Exception as error:  # the YAML reader has no common base class with OmegaConf
        raise ConfigError([Problem(str(experiment), f"is not readable YAML: {error}")]) from error
    store = ConfigStore.instance()
    store.store(name=FILE_OPTION, group="experiment", package="_global_", node=node)
    try:
        yield [f"experiment={FILE_OPTION}"]
    finally:
        store.repo["experiment"].pop(f"{FILE_OPTION}.yaml")


def _check_header(experiment: Path) -> None:
    """An experiment's content goes to the root; another package would be left out silently."""
    for line in experiment.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:2] == ["#", "@package"] and words[2:] != ["_global_"]:
            raise ConfigError(
                [Problem(str(experiment), f"has the header {line.strip()!r}", "write `# @package _global_`")]
            )
