"""The Chinese pages say what the English ones say: the same headings, code, settings, links and tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "README.zh.md", "docs/determinism.md": "docs/determinism.zh.md"}
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def skeleton(page: str) -> dict[str, object]:
    """What must not differ between two languages: levels of headings, code, inline code, targets of links, shapes of tables.

    Links between the languages count as links to the page itself, and comments in code may be translated.
    """
    blocks = BLOCK.findall(page)
    prose = BLOCK.sub("", page)
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"^\[(中文|English)\].*$", "", prose, flags=re.MULTILINE))
    rows = [line.count("|") for line in prose.splitlines() if line.startswith("|")]
    return {
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)],
        "code": [[re.sub(r"\s+#.*", "", line) for line in block.splitlines()] for block in blocks],
        "settings": sorted(set(re.findall(r"`([^`\n]+)`", prose))),
        "links": sorted(link.replace(".zh.md", ".md") for link in links),
        "tables": rows,
        "list items": len(re.findall(r"^- ", prose, re.MULTILINE)),
    }


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("english", PAGES)
def test_both_languages_have_the_same_skeleton(english):
    ours, theirs = skeleton(read(english)), skeleton(read(PAGES[english]))
    for part in ours:
        assert theirs[part] == ours[part], part


@pytest.mark.parametrize("english", PAGES)
def test_the_languages_point_to_each_other(english):
    chinese = PAGES[english]
    assert f"[中文]({Path(chinese).name})" in read(english)
    assert f"[English]({Path(english).name})" in read(chinese)


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("headings", "## 种子\n", ""),
        ("settings", "`rollout.sampling.seed`", "`rollout.sampling.sed`"),
        ("links", "(my-two-runs-differ.md)", "(other.md)"),
        ("tables", "| 开启 | 3.48 | 0.45 ", "| 开启 | 3.48 "),
    ],
)
def test_a_page_that_fell_behind_is_caught(part, old, new):
    page = read("docs/determinism.zh.md")
    assert old in page
    assert skeleton(page.replace(old, new))[part] != skeleton(read("docs/determinism.md"))[part]
