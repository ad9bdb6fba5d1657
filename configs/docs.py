"""Writes docs/configuration.md from the schema and the YAML files: `python -m configs.docs [--check]`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import schema
from configs.field_types import base, bounds, choices, element, forms, members
from configs.files import CONFIG_DIR, group_options
from configs.schema import MISSING_PATH, Config
from configs.validate import hints

TARGET = CONFIG_DIR.parent / "docs" / "configuration.md"

INTRO = """\
# Configuration

<!-- Generated from configs/schema.py and configs/*/*.yaml by `python -m configs.docs`; a test compares. -->

A run is composed from one option of each *group* (a folder of `configs/`), the root keys of `configs/ppo.yaml`, an
*experiment* (a named set of overrides), and overrides on the command line; later ones win.

```
exactrl train                                        # the default of every group: PPO on the tiny models
exactrl train model=smollm2 algorithm=grpo           # other options of groups
exactrl train experiment=tiny_grpo seed=3            # an experiment, then a value
exactrl train data.train.0.size=512                  # a value within a list
exactrl train my_experiment.yaml                     # an experiment file of your own
exactrl train --config-dir my_configs model=mine     # a folder with options of your own (my_configs/model/mine.yaml)
exactrl train --cfg job                              # print the result and stop; --dry-run also checks it
```

An experiment file starts like this; everything it doesn't say stays as it was:

```yaml
# @package _global_
defaults:
  - override /algorithm: grpo
  - _self_

rollout:
  sampling:
    n: 8
```

Keys that don't exist are refused, also as `+key=value`, with the nearest one that does. Values must have the type of the
table; `true`, `yes`, `on` and `false`, `no`, `off` are booleans. All problems are reported together, before anything
starts. `${a.b}` takes the value of another key: `rollout.seed` and `data.seed` follow `seed`, and every role follows
`full_determinism`. Hydra only composes; the working directory and `outputs/` are left alone.
"""

KEYS = """\
## Keys

The defaults below are those of keys that no file sets; `exactrl train --cfg job` shows what a run gets.
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """One dataclass and every place where it is used."""

    owner: type
    """The dataclass."""
    places: tuple[str, ...]
    """Dotted keys; the root is an empty string; `N` is a position in a list."""
    defaults: tuple[dict[str, Any], ...]
    """Default values in each place."""


def render() -> str:
    """The whole page."""
    parts = [INTRO, _groups(), KEYS]
    parts += [_section(section) for section in sections()]
    return "\n".join(parts)


def sections() -> list[Section]:
    """Every dataclass of the schema in the order of its first use."""
    found: dict[type, list[tuple[str, dict[str, Any]]]] = {}

    def visit(owner: type, place: str, defaults: dict[str, Any]) -> None:
        found.setdefault(owner, []).append((place, defaults))
        for name, kind in hints(owner).items():
            below = f"{place}.{name}".strip(".") + ("" if element(kind) is None else ".N")
            value = defaults[name]
            inner = base(element(kind) or kind)
            if dataclasses.is_dataclass(inner):
                cls = typing.cast(type, inner)
                visit(cls, below, value if isinstance(value, dict) else dataclasses.asdict(cls()))

    visit(Config, "", dataclasses.asdict(Config()))
    return [Section(cls, tuple(p for p, _ in uses), tuple(d for _, d in uses)) for cls, uses in found.items()]


@functools.cache
def field_docs() -> dict[tuple[str, str], str]:
    """(dataclass, field) -> the string literal that follows the field; the dataclass's own under an empty field name."""
    docs = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs[node.name, ""] = inspect.cleandoc(ast.get_docstring(node) or "")
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not (
                isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
            ):
                continue
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                docs[node.name, field.target.id] = inspect.cleandoc(text.value.value)
    return docs


def _groups() -> str:
    lines = ["## Groups and experiments\n", "| group | option | what it is |", "|---|---|---|"]
    defaults = _default_options()
    for group, names in sorted(group_options().items(), key=lambda item: item[0] == "experiment"):
        for name in names:
            mark = " (default)" if defaults.get(group) == name else ""
            lines.append(
                f"| `{group}` | `{name}`{mark} | {_cell(_first_comment(CONFIG_DIR / group / f'{name}.yaml'))} |"
            )
    return "\n".join([*lines, ""])


def _default_options() -> dict[str, str]:
    from omegaconf import OmegaConf

    root: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / "ppo.yaml"), resolve=False)
    return {key: value for entry in root["defaults"] if isinstance(entry, dict) for key, value in entry.items()}


def _first_comment(path: Path) -> str:
    """The first line of the comment at the top, `# @package` aside."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _section(section: Section) -> str:
    docs = field_docs()
    name = section.owner.__name__
    title = ", ".join(f"`{place}`" for place in section.places if place) or "Root"
    lines = [f"### {title}\n", docs[name, ""], "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field, kind in hints(section.owner).items():
        if dataclasses.is_dataclass(base(kind)) and not section.places[0]:
            continue  # the groups have sections of their own right below
        lines.append(
            f"| `{field}` | {_cell(_type(kind))} | {_default(section, field)} | {_cell(docs.get((name, field), ''))} |"
        )
    return "\n".join([*lines, ""])


def _type(kind: Any) -> str:
    inner = base(kind)
    if element(kind) is not None:
        text = "list of groups" if dataclasses.is_dataclass(element(kind)) else f"list of {_type(element(kind))}"
    elif choices(kind):
        text = ", ".join(f"`{word}`" for word in choices(kind))
    else:
        text = (
            "group"
            if dataclasses.is_dataclass(inner)
            else "mapping"
            if typing.get_origin(inner) is dict
            else inner.__name__
        )
    text += f", {bounds(kind)}" if bounds(kind) else ""
    return " or ".join([text, *forms(kind), *(["null"] if type(None) in members(kind) else [])])


def _default(section: Section, field: str) -> str:
    shown = [_value(defaults[field]) for defaults in section.defaults]
    others = [f"{text} for `{place}`" for place, text in zip(section.places, shown, strict=True) if text != shown[0]]
    return _cell("; ".join([shown[0], *others]))


def _value(value: Any) -> str:
    if value == MISSING_PATH:
        return "required"
    if isinstance(value, dict) and value:
        return "see its section"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with `--check` say whether it is up to date (exit code 1 when not)."""
    parser = argparse.ArgumentParser(prog="python -m configs.docs", description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args(argv)
    page = render()
    if arguments.check:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page:
            return 0
        print(f"{TARGET} differs from the schema: run `python -m configs.docs`", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(page, encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
