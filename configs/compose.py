"""From YAML groups and overrides to a `Config`, and from a `Config` to YAML and back.

    defaults list + group overrides --Hydra--> tree --defaults of the schema, value overrides--> tree --validate--> Config

Hydra only chooses and merges files. Value overrides are applied here, so that an unknown key is *our* error, whether it
came as `key=`, `+key=` or `++key=`, and so that all problems come together. Nothing changes the working directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.files import Selection, compose_files, group_options, unknown_option
from configs.problems import ConfigError, Problem
from configs.schema import Config
from configs.suggest import suggest_key
from configs.validate import Origin, dotted_keys, type_at, validate, with_defaults


def load_config(
    overrides: Sequence[str] = (), *, config_dir: str | Path | Sequence[str | Path] | None = None
) -> Config:
    """Compose the packaged configuration with `overrides` and validate it.

    Args:
        overrides: Hydra's syntax: `group=option`, `experiment=NAME`, `a.b=value`, `data.train.0.size=8`, `~a.b.free_key`.
            The first may instead be the path of an experiment's YAML file.
        config_dir: further folders with groups (`DIR/model/mine.yaml`, `DIR/experiment/mine.yaml`).

    Raises:
        ConfigError: with every problem found.
    """
    dirs = [config_dir] if isinstance(config_dir, str | Path) else list(config_dir or ())
    paths = [Path(directory).resolve() for directory in dirs]
    options = group_options(paths)
    experiment, lines = _split_experiment(list(overrides))
    parsed = _parse(lines, set(options))
    problems = parsed.problems
    for group, name in list(parsed.groups.items()):
        if name not in options[group]:
            problems.append(unknown_option(group, name, options[group]))
            del parsed.groups[group]
    files = compose_files(Selection(tuple(parsed.groups.items()), tuple(paths), experiment))
    tree = with_defaults(files.tree)
    return _finish(tree, parsed.values, problems, files.origin)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, lists and scalars, in the schema's order."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The configuration as YAML; `from_yaml` gives back an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_dict(config))))


def from_yaml(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A configuration from one complete file, such as a run directory's `config.yaml`; nothing is composed.

    Args:
        overrides: values (`key=value`) in place of the file's.

    Raises:
        ConfigError: not a YAML mapping, or one that does not validate.
        FileNotFoundError: there is no such file.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise
    except Exception as error:  # the YAML reader has no common base class with OmegaConf
        raise ConfigError([Problem(str(path), f"is not readable YAML: {error}")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "must be a mapping of settings")])
    parsed = _parse(overrides, set(group_options()))
    for group, option in parsed.groups.items():
        text = f"={option} chooses a file of a group, but {path} is complete as it is"
        parsed.problems.append(Problem(group, text, f"give values ({group}.KEY=VALUE)"))
    return _finish(with_defaults(tree), parsed.values, parsed.problems, lambda key: str(path))  # type: ignore[arg-type]


def _finish(tree: dict[str, Any], values: Sequence[_Value], problems: list[Problem], origin: Origin) -> Config:
    """Apply the value overrides and validate; every problem together."""
    applied: dict[str, _Value] = {}
    for item in values:
        problem = _apply(tree, item)
        if problem is None:
            applied.pop(item.key, None)
            applied[item.key] = item
        else:
            problems.append(problem)

    def origin_of(key: str) -> str:
        found = [item for item in applied.values() if key == item.key or key.startswith(f"{item.key}.")]
        return f"override '{found[-1].line}'" if found else origin(key)

    try:
        config = validate(tree, origin_of, {item.key: item.raw for item in applied.values() if item.raw is not None})
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation, written so that it is read as text."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return escape(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    """OmegaConf's spelling of literal text (a backslash before `${`, backslashes before that doubled)."""
    if "${" not in text:
        return text
    parts = text.split("${")
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts[:-1]]
    return "\\${".join([*doubled, parts[-1]])


# --- overrides -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Value:
    """One value override."""

    line: str
    """As typed."""
    key: str
    """Dotted key."""
    value: Any
    """Parsed."""
    delete: bool
    """`~key`."""
    raw: str | None
    """The text after `=` when the value is a bare scalar."""


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """What the command line said."""

    groups: dict[str, str]
    """Group -> option."""
    values: list[_Value]
    """In the order given."""
    problems: list[Problem]
    """Lines that can't be used."""


def _split_experiment(overrides: list[str]) -> tuple[Path | None, list[str]]:
    """The experiment file, when the first argument is one."""
    if overrides and "=" not in overrides[0] and overrides[0].endswith((".yaml", ".yml")):
        path = Path(overrides[0])
        if not path.is_file():
            raise ConfigError([Problem(overrides[0], "there is no such experiment file")])
        return path.resolve(), overrides[1:]
    return None, overrides


def _parse(lines: Sequence[str], groups: set[str]) -> _Parsed:
    """Overrides told apart: options of groups, values, and lines that are neither (no override, a sweep, Hydra's own)."""
    parsed = _Parsed({}, [], [])
    for line in lines:
        item = _parse_one(line, groups)
        if isinstance(item, Problem):
            parsed.problems.append(item)
        elif isinstance(item, _Value):
            parsed.values.append(item)
        else:
            parsed.groups[item[0]] = item[1]
    return parsed


def _parse_one(line: str, groups: set[str]) -> _Value | tuple[str, str] | Problem:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in line and not line.startswith("~"):
        return Problem(
            line, "is not an override", "write key=value; only the first argument may be an experiment's YAML file"
        )
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        return Problem(line, f"can't be read: {str(error).splitlines()[0]}", "quote it: 'key=\"value\"'")
    key = override.key_or_group
    if override.is_sweep_override():
        return Problem(
            line,
            "is a sweep, but one command trains one run",
            "start a run for each value, or quote a text with commas: 'key=\"a,b\"'",
        )
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return Problem(
            line,
            "Hydra's own settings have no effect: only its composition is used",
            "run.dir decides where a run lives",
        )
    value = None if override.is_delete() else override.value()
    if key in groups or "/" in key or override.package is not None:
        if key in groups and isinstance(value, str) and override.package is None:
            return key, value
        if not (key in groups and isinstance(value, dict)):
            return Problem(
                line,
                "is not a choice of a group's option",
                f"write {key.partition('/')[0]}=OPTION; groups are {', '.join(sorted(groups))}",
            )
    scalar = isinstance(value, bool | int | float)
    return _Value(line, key, value, override.is_delete(), line.partition("=")[2].strip() if scalar else None)


def _apply(tree: dict[str, Any], item: _Value) -> Problem | None:
    """Set one value in the tree; unknown keys are set too, for the validation to name them."""
    origin = f"override '{item.line}'"
    *parents, last = item.key.split(".")
    if item.delete:
        return _delete(tree, item, origin)
    node: Any = tree
    for depth, part in enumerate(parents):
        inner = _child(node, part)
        if inner is None and isinstance(node, dict):
            inner = node[part] = {}
        if not isinstance(inner, dict | list):
            return _no_way(".".join(item.key.split(".")[: depth + 1]), inner, origin)
        node = inner
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            return _no_way(item.key, node, origin)
        node[int(last)] = item.value
    elif isinstance(item.value, dict) and isinstance(node.get(last), dict):
        _merge(node[last], item.value)
    else:
        node[last] = item.value
    return None


def _child(node: Any, part: str) -> Any:
    if isinstance(node, list):
        return node[int(part)] if part.isdigit() and int(part) < len(node) else _MISSING
    return node.get(part)


_MISSING = object()


def _no_way(key: str, value: Any, origin: str) -> Problem:
    if value is _MISSING or isinstance(value, list):
        return Problem(
            key,
            "there is no such element of the list",
            "elements are numbered from 0; give the whole list to make it longer",
            origin,
        )
    return Problem(key, f"is {value!r}, which has no settings below it", origin=origin)


def _merge(into: dict[str, Any], value: Mapping[str, Any]) -> None:
    for key, inner in value.items():
        if isinstance(inner, dict) and isinstance(into.get(key), dict):
            _merge(into[key], inner)
        else:
            into[key] = inner


def _delete(tree: dict[str, Any], item: _Value, origin: str) -> Problem | None:
    """`~a.b`: only what is not part of the schema (an entry of a free mapping) can be taken out."""
    *parents, last = item.key.split(".")
    if type_at(item.key) is None:
        near = suggest_key(item.key, dotted_keys())
        return Problem(item.key, "there is no such key", f"did you mean `{near}`?" if near else "", origin)
    node: Any = tree
    for part in parents:
        node = _child(node, part)
        if not isinstance(node, dict | list):
            return _no_way(item.key, node, origin)
    if type_at(".".join(parents) or "seed") is Any or _is_free(".".join(parents)):
        if node.pop(last, _MISSING) is _MISSING:
            return Problem(item.key, "there is no such entry to take out", origin=origin)
        return None
    return Problem(item.key, "a setting can't be taken out", f"set it: {item.key}=null or another value", origin)


def _is_free(path: str) -> bool:
    return bool(path) and getattr(type_at(path), "__origin__", None) is dict
