"""Imports run as the table in docs/architecture.md says, and modules don't import each other in circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "determinism", "reward", "rollout", "trainer", "workers")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def table() -> dict[str, set[str]]:
    """Row -> rows that it may import, both as dotted names."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.partition("| may import |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, _, last = line.strip("|").split("|")
        names = [re.sub(r"/$|\.py$", "", name).replace("/", ".") for name in re.findall(r"`([^`]+)`", first + last)]
        rows[names[0]] = set(names[1:])
    return rows


TABLE = table()


def row_of(module: str) -> str:
    return max((row for row in TABLE if f"{module}.".startswith(f"{row}.")), key=len)


def imports(source: str, everywhere: bool) -> Iterator[str]:
    """Modules of ours that a file imports: all of them, or those that are imported when it is (`if TYPE_CHECKING` included)."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if everywhere or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child)

    for name in visit(ast.parse(source)):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name:
            yield name


def forbidden(module: str, source: str) -> list[str]:
    row = row_of(module)
    return sorted(
        f"{module} imports {target}"
        for target in set(imports(source, everywhere=True))
        if row_of(target) not in TABLE[row] | {row}
    )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of one circle, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        found = next(filter(None, (walk(target, [*path, module]) for target in sorted(graph[module]))), [])
        done.add(module)
        return found

    return next(filter(None, (walk(module, []) for module in sorted(graph))), [])


def test_the_table_speaks_of_what_exists():
    assert set(PACKAGES) <= set(TABLE)
    named = set(TABLE).union(*TABLE.values())
    assert named <= set(MODULES) | {".".join(path.relative_to(ROOT).parts) for path in ROOT.glob("*/*/")}
    assert named == set(TABLE), "every row that is named has a line"


@pytest.mark.parametrize("module", MODULES)
def test_no_import_runs_against_the_table(module):
    assert forbidden(module, MODULES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("configs.roles", "def f():\n    from trainer.algorithms.registry import Registry\n"),
        ("trainer.algorithms.kl", "import trainer.ppo\n"),
        ("workers.models.batch", "from workers.launch import group\n"),
        ("determinism.seeds", "if TYPE_CHECKING:\n    from rollout.types import Prompt\n"),
    ],
)
def test_an_import_upwards_is_noticed(module, source):
    assert len(forbidden(module, source)) == 1


def test_no_modules_import_each_other():
    graph = {
        module: set(imports(path.read_text(encoding="utf-8"), everywhere=False)) - {module}
        for module, path in MODULES.items()
    }
    assert circle(graph) == []


def test_a_circle_is_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
