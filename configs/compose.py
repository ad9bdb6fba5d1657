"""From YAML groups and overrides to a `Config`, and from a `Config` to YAML and back.

    defaults list + group overrides --Hydra--> tree --defaults of the schema, value overrides--> tree --validate--> Config

Hydra only chooses and merges files. Value overrides are applied here, so that an unknown key is *our* error, whether it
came as `key=`, `+key=` or `++key=`, and so that all problems come together. Nothing changes the working directory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.field_types import base, element
from configs.files import Selection, compose_files, group_options, unknown_option
from configs.problems import ConfigError, Problem
from configs.schema import Config
from configs.validate import Origin, type_at, unknown_key, validate, with_defaults

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


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
    chosen, values, problems = _parse(lines, set(options))
    for group, name in list(chosen.items()):
        if name not in options[group]:
            problems.append(unknown_option(group, name, options[group]))
            del chosen[group]
    files = compose_files(Selection(tuple(chosen.items()), tuple(paths), experiment))
    return _finish(files.tree, values, problems, files.origin)


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
    chosen, values, problems = _parse(overrides, set(group_options()))
    for group, option in chosen.items():
        text = f"={option} chooses a file of a group, but {path} is complete as it is"
        problems.append(Problem(group, text, f"give values ({group}.KEY=VALUE)"))
    return _finish(tree, values, problems, lambda key: str(path))  # type: ignore[arg-type]


def _finish(tree: dict[str, Any], overrides: Sequence[Override], problems: list[Problem], origin: Origin) -> Config:
    """Apply the value overrides and validate; every problem together."""
    node = OmegaConf.create(with_defaults(tree))
    applied: dict[str, str] = {}
    for override in overrides:
        key = override.key_or_group
        problem = _delete(node, key) if override.is_delete() else _set(node, key, override)
        if problem is not None:
            problems.append(dataclasses.replace(problem, origin=f"override '{override.input_line}'"))
        else:
            applied.pop(key, None)
            applied[key] = f"override '{override.input_line}'"

    def origin_of(key: str) -> str:
        """The last override of the key, of something it belongs to, or of something below it."""
        found = [line for given, line in applied.items() if f"{key}.".startswith(f"{given}.")]
        below = [line for given, line in applied.items() if given.startswith(f"{key}.")]
        return (found or below or [origin(key)])[-1]

    try:
        config = validate(OmegaConf.to_container(node, resolve=False), origin_of)  # type: ignore[arg-type]
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


def _split_experiment(overrides: list[str]) -> tuple[Path | None, list[str]]:
    """The experiment file, when the first argument is one."""
    if overrides and "=" not in overrides[0] and overrides[0].endswith((".yaml", ".yml")):
        path = Path(overrides[0])
        if not path.is_file():
            raise ConfigError([Problem(overrides[0], "there is no such experiment file")])
        return path.resolve(), overrides[1:]
    return None, overrides


def _parse(lines: Sequence[str], groups: set[str]) -> tuple[dict[str, str], list[Override], list[Problem]]:
    """Overrides told apart: options of groups, values, and what is neither (no override, a sweep, Hydra's own)."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    chosen: dict[str, str] = {}
    values: list[Override] = []
    problems: list[Problem] = []
    for line in lines:
        if "=" not in line and not line.startswith("~"):
            hint = "write key=value; only the first argument may be an experiment's YAML file"
            problems.append(Problem(line, "is not an override", hint))
            continue
        try:
            override = OverridesParser.create().parse_override(line)
        except HydraException as error:
            text = f"can't be read: {str(error).splitlines()[0]}"
            problems.append(Problem(line, text, "quote it: 'key=\"value\"'"))
            continue
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        plain = override.package is None and "/" not in key
        if override.is_sweep_override():
            hint = "start a run for each value, or quote a text with commas: 'key=\"a,b\"'"
            problems.append(Problem(line, "is a sweep, but one command trains one run", hint))
        elif key.partition(".")[0].partition("/")[0] == "hydra":
            text = "Hydra's own settings have no effect: only its composition is used"
            problems.append(Problem(line, text, "run.dir decides where a run lives"))
        elif key in groups and plain and isinstance(value, str):
            chosen[key] = value
        elif not plain or (key in groups and not isinstance(value, dict)):
            hint = f"write {key.partition('/')[0]}=OPTION; groups are {', '.join(sorted(groups))}"
            problems.append(Problem(line, "is not a choice of a group's option", hint))
        else:
            values.append(override)
    return chosen, values, problems


def _set(tree: DictConfig, key: str, override: Override) -> Problem | None:
    """Set one value; unknown keys are set too, for the validation to name them."""
    value, kind = override.value(), type_at(key)
    if isinstance(value, bool | int | float) and kind is not None and base(kind) is str:
        value = (override.input_line or "").partition("=")[2].strip()  # `run.name=1e3` is that text
    merge = isinstance(value, dict) and (kind is None or element(kind) is None)
    try:
        OmegaConf.update(tree, key, value, merge=merge)
    except (
        OmegaConfBaseException,
        TypeError,
        ValueError,
    ) as error:  # the last two: a list's position that is no number
        text = f"there is no such element of the list ({str(error).splitlines()[0]})"
        return Problem(key, text, "elements are numbered from 0; give the whole list to make it longer")
    return None


def _delete(tree: DictConfig, key: str) -> Problem | None:
    """`~a.b`: only what is not part of the schema (an entry of a free mapping) can be taken out."""
    kind = type_at(key)
    if kind is None:
        return unknown_key(key)
    if kind is not Any:
        return Problem(key, "a setting can't be taken out", f"set it: {key}=null or another value")
    above, _, last = key.rpartition(".")
    node = OmegaConf.select(tree, above)
    if not isinstance(node, DictConfig) or last not in node:
        return Problem(key, "there is no such entry to take out")
    del node[last]
    return None
