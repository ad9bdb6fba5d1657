"""docs/configuration.md says what the schema says, and the schema says something about every field."""

from __future__ import annotations

import dataclasses

import pytest

from configs import docs, schema
from configs.field_types import choices
from configs.files import CONFIG_DIR
from configs.validate import hints

CLASSES = [value for value in vars(schema).values() if dataclasses.is_dataclass(value)]
FIELDS = [(owner.__name__, field.name) for owner in CLASSES for field in dataclasses.fields(owner)]


def test_the_page_is_up_to_date(capsys):
    assert docs.main(["--check"]) == 0, "run `python -m configs.docs`"


def test_a_page_that_differs_is_noticed(tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "configuration.md"
    monkeypatch.setattr(docs, "TARGET", page)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8") + "x", encoding="utf-8")
    assert docs.main(["--check"]) == 1
    assert "python -m configs.docs" in capsys.readouterr().err


@pytest.mark.parametrize(("owner", "field"), FIELDS)
def test_every_field_is_documented(owner, field):
    assert docs.field_docs()[owner, field]


def test_every_class_has_a_section_with_its_places():
    sections = {section.owner.__name__: section.places for section in docs.sections()}
    assert set(sections) == {owner.__name__ for owner in CLASSES}
    assert sections["FsdpConfig"] == ("actor.fsdp", "critic.fsdp", "ref.fsdp")
    assert sections["DataSourceConfig"] == ("data.train.N", "data.validation.N")


def test_a_default_that_depends_on_the_place_is_shown_for_each():
    assert "`1.0`; `0.0` for `rollout.validation`" in docs.render()


@pytest.mark.parametrize("owner", CLASSES)
def test_every_allowed_word_is_named_in_the_documentation(owner):
    for name, kind in hints(owner).items():
        text = docs.field_docs()[owner.__name__, name]
        assert all(word in text for word in choices(kind)), text


@pytest.mark.parametrize(
    "row",
    [
        "| `threads` | int, at least 1 | `1` |",
        "| `seed` | int, at least 0 and below 2^63 or null | `null` |",
        "| `top_p` | float, above 0 and at most 1 | `1.0` |",
        "| `betas` | list of float, at least 0 and below 1, of length 2 |",
        "| `stop_token_ids` | list of int, at least 0 | `[]` |",
        "| `whiten` | `none`, `full`, `scale` | `none` |",
        "`remax` or package.module:function or path/to/file.py:function | `gae` |",
        "| `functions` | list of groups | `[]` |",
        "| `engine_args` | mapping | `{}` |",
        "| `ignore_eos` | bool | `false` |",
        "| `tokenizer` | str or null | `null` |",
    ],
)
def test_types_choices_and_ranges_are_shown(row):
    assert row in docs.render()


def test_the_page_names_no_place_on_a_machine():
    assert str(CONFIG_DIR.parent) not in docs.render()
