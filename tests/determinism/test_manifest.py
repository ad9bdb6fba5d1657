"""A manifest has what can make two runs differ, and nothing else that differs, outside its informative part."""

import json
import shutil
from pathlib import Path

import pytest

from determinism.environment import read_manifest, write_manifest
from determinism.manifest import ManifestError, code_digest, git_state

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"seed": 1, "run": {"dir": "a"}, "tracking": {"tags": []}, "actor": {"optim": {"lr": 1e-5}}}
FACTS = {"trainer/0": {"threads": 1}, "rollout/0": {"threads": 1, "vllm": "0.32.0"}}


def compared(path: Path) -> dict:
    manifest = read_manifest(path)
    assert set(manifest.pop("informative")) >= {"written", "host", "command"}
    return manifest


def test_equal_runs_in_different_places_have_equal_manifests(tmp_path):
    write_manifest(tmp_path / "a.json", CONFIG, FACTS, data={"data/train": "0" * 32})
    elsewhere = {**CONFIG, "run": {"dir": "b"}, "tracking": {"tags": ["x"]}}
    write_manifest(
        tmp_path / "b.json",
        elsewhere,
        dict(reversed(FACTS.items())),
        data={"data/train": "0" * 32},
        informative={"pid": 7},
    )
    assert compared(tmp_path / "a.json") == compared(tmp_path / "b.json")
    assert read_manifest(tmp_path / "b.json")["informative"]["pid"] == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize(
    ("config", "facts", "data", "field"),
    [
        ({**CONFIG, "seed": 2}, FACTS, {}, "config"),
        (CONFIG, {**FACTS, "trainer/0": {"threads": 2}}, {}, "processes"),
        (CONFIG, FACTS, {"data/train": "1" * 32}, "data"),
    ],
)
def test_what_can_change_bits_is_in_it(tmp_path, config, facts, data, field):
    write_manifest(tmp_path / "a.json", CONFIG, FACTS)
    write_manifest(tmp_path / "b.json", config, facts, data)
    a, b = compared(tmp_path / "a.json"), compared(tmp_path / "b.json")
    assert {name for name in a if a[name] != b[name]} - {"config_digest"} == {field}


def test_code_is_named_by_its_bytes(tmp_path):
    shutil.copytree(ROOT / "determinism", tmp_path / "determinism", ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(tmp_path)
    assert code_digest(tmp_path) == before
    (tmp_path / "determinism" / "__pycache__").mkdir()
    (tmp_path / "determinism" / "__pycache__" / "seeds.pyc").write_bytes(b"x")
    assert code_digest(tmp_path) == before
    (tmp_path / "determinism" / "seeds.py").rename(tmp_path / "determinism" / "seed.py")
    renamed = code_digest(tmp_path)
    (tmp_path / "determinism" / "seed.py").write_bytes(b"# empty\n")
    assert len({before, renamed, code_digest(tmp_path)}) == 3


def test_code_outside_a_repository_has_no_commit(tmp_path):
    assert git_state(tmp_path) == {"git_commit": None, "git_dirty": None}


def test_what_is_not_a_manifest_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    with pytest.raises(FileNotFoundError):
        read_manifest(path)
    for text, message in [
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        (json.dumps({"version": 9}), "version 9"),
    ]:
        path.write_text(text)
        with pytest.raises(ManifestError, match=message):
            read_manifest(path)
