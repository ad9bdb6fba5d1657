"""Hydra's part: which YAML files make up a run, merged in order. Its global state is left as it was found."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
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
class ComposedFiles:
    """The merged tree, interpolations unresolved, and the files behind it."""

    tree: dict[str, Any]
    """Nested dicts and lists."""
    sources: tuple[tuple[Path, str], ...]
    """(file, dotted key that its content goes under) in the order of merging."""

    def origin(self, key: str) -> str:
        """The last file that sets `key` itself, or the whole of something that it belongs to; empty when none does."""
        for path, package in reversed(self.sources):
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


def compose_files(
    groups: Mapping[str, str], dirs: Sequence[Path] = (), experiment: Path | None = None
) -> ComposedFiles:
    """Merge the root, the chosen option of each group, and the experiment.

    Args:
        groups: group -> option.
        dirs: further folders to search, after the packaged one.
        experiment: a file that takes the place of `experiment=NAME`.

    Raises:
        ConfigError: an option or file that doesn't exist or can't be read.
    """
    if experiment is not None and "experiment" in groups:
        text = f"{groups['experiment']} and the file {experiment} are both given"
        raise ConfigError([Problem("experiment", text, "choose one")])
    chosen = tuple(groups.items())
    files = _compose_packaged(chosen) if not dirs and experiment is None else _compose(chosen, tuple(dirs), experiment)
    return ComposedFiles(copy.deepcopy(files.tree), files.sources)


@functools.cache
def _compose_packaged(groups: tuple[tuple[str, str], ...]) -> ComposedFiles:
    """Packaged files don't change while a process lives."""
    return _compose(groups, (), None)


def _compose(groups: tuple[tuple[str, str], ...], dirs: Sequence[Path], experiment: Path | None) -> ComposedFiles:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    lines = [f"{group}={name}" for group, name in groups]
    if dirs:
        lines.append("hydra.searchpath=[" + ",".join(f"'file://{_quoted(directory)}'" for directory in dirs) + "]")
    try:
        with _stored(experiment) as option, initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
            lines += option
            tree = OmegaConf.to_container(compose(ROOT, lines), resolve=False)
            loader = GlobalHydra.instance().config_loader()
            merged = loader.compute_defaults_list(ROOT, lines, RunMode.RUN).defaults
    except HydraException as error:
        reason = " ".join(str(error).split())
        raise ConfigError([Problem(str(experiment or "config"), f"can't be composed: {reason}")]) from error
    sources = []
    for default in merged:
        path = _find(default.config_path or "", dirs, experiment)
        if path is not None:
            sources.append((path, (default.package or "").replace("_global_", "")))
    return ComposedFiles(tree, tuple(sources))  # type: ignore[arg-type]


def unknown_option(group: str, name: str, options: Sequence[str]) -> Problem:
    """The problem of an option that no folder has."""
    near = nearest(name, options)
    hint = f"did you mean {group}={near}? " if near else ""
    return Problem(group, f"there is no option {name!r}", f"{hint}Options: {', '.join(options)}")


def _quoted(directory: Path) -> str:
    return str(directory).replace("\\", "\\\\").replace("'", "\\'")


def _find(config_path: str, dirs: Sequence[Path], experiment: Path | None) -> Path | None:
    if config_path == f"experiment/{FILE_OPTION}":
        return experiment
    for directory in [CONFIG_DIR, *dirs]:
        path = directory / f"{config_path}.yaml"
        if path.is_file():
            return path
    return None


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
