"""References lead to a user's functions, each file is a module of its own, and what can't be loaded says where it broke."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.user_code import UserCodeError, absolute_reference, file_of, is_reference, load_reference


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """What a test imports is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_package_is_imported():
    assert load_reference("math:fsum")([0.1] * 10) == 1.0


def test_a_file_is_loaded_once_whoever_refers_to_it_and_however(tmp_path, monkeypatch):
    path = write(
        tmp_path / "a" / "mine.py", "loads = []\nloads.append(1)\ndef f(): return len(loads)\ndef g(): return f\n"
    )
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert load_reference(f"{path}:f")() == 1
    assert load_reference("a/mine.py:g")() is load_reference(f"{path}:f") is load_reference("link/mine.py:f")


def test_files_of_one_name_in_two_folders_are_two_modules_also_with_a_neighbour(tmp_path):
    first = write(tmp_path / "a" / "rewards.py", "from weights import WEIGHT\ndef f(): return WEIGHT\n")
    write(tmp_path / "a" / "weights.py", "WEIGHT = 3\n")
    second = write(tmp_path / "b" / "rewards.py", "def f(): return 4\n")
    assert (load_reference(f"{first}:f")(), load_reference(f"{second}:f")()) == (3, 4)


def test_a_neighbour_that_another_folder_has_taken_the_name_of_is_refused_not_mixed_up(tmp_path):
    for folder, weight in (("a", 3), ("b", 4)):
        write(tmp_path / folder / "rewards.py", "def f():\n    from weights import WEIGHT\n    return WEIGHT\n")
        write(tmp_path / folder / "weights.py", f"WEIGHT = {weight}\n")
    assert load_reference(f"{tmp_path}/a/rewards.py:f")() == 3
    with pytest.raises(UserCodeError, match=rf"'weights' .* already belongs to {tmp_path}/a/weights\.py; rename it"):
        load_reference(f"{tmp_path}/b/rewards.py:f")


def test_a_neighbour_of_a_neighbour_is_looked_at_too(tmp_path):
    path = write(tmp_path / "rewards.py", "import near\ndef f(): ...\n")
    write(tmp_path / "near.py", "import json\n")
    write(tmp_path / "json.py", "\n")
    with pytest.raises(UserCodeError, match=r"'json' .* already belongs to "):
        load_reference(f"{path}:f")


def test_a_file_called_like_a_package_of_ours_hides_nothing(tmp_path):
    path = write(
        tmp_path / "reward.py", "from reward.functions import final_answer\ndef f(): return final_answer('#1', '#')\n"
    )
    other = write(tmp_path / "other.py", "import reward\ndef f(): return reward.__name__, hasattr(reward, 'f')\n")
    assert load_reference(f"{path}:f")() == "1"
    assert load_reference(f"{other}:f")() == ("reward", False)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_package_xyz:f", "there is no module 'no_such_package_xyz'; it must be importable"),
        ("configs.no_such:f", r"there is no module 'configs\.no_such'"),
        ("math:no_such", "math has no function 'no_such'; it has .*fsum"),
        ("/nowhere/mine.py:f", r"there is no file /nowhere/mine\.py"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_broke(reference, message):
    with pytest.raises(UserCodeError, match=message):
        load_reference(reference)


def test_a_file_that_fails_is_not_left_half_loaded_and_its_line_is_named(tmp_path):
    path = write(tmp_path / "broken.py", "import math\nraise RuntimeError('boom')\n")
    for _ in range(2):
        with pytest.raises(
            UserCodeError, match=r"importing .*broken\.py failed: RuntimeError: boom \(.*broken\.py, line 2\)"
        ):
            load_reference(f"{path}:f")
    write(path, "def f(: ...\n")
    with pytest.raises(UserCodeError, match=r"failed: SyntaxError: .*broken\.py, line 1"):
        load_reference(f"{path}:f")


def test_a_module_whose_own_import_fails_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    write(tmp_path / "outer_module.py", "import no_such_package_xyz\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserCodeError, match=r"importing outer_module failed: ModuleNotFoundError.*outer_module\.py, line 1"
    ):
        load_reference("outer_module:f")


def test_the_form_of_a_reference():
    assert is_reference("a.b:c")
    assert is_reference("a/b.py:c")
    assert not any(is_reference(name) for name in ("ppo_clip", ":c", "a:"))
    assert file_of("a/b.py:c") == Path("a/b.py")
    assert file_of("a.b:c") is None


def test_file_references_become_absolute_and_the_others_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_reference("mine.py:f") == f"{tmp_path / 'mine.py'}:f"
    assert absolute_reference("a.b:f") == "a.b:f"
    assert absolute_reference("ppo_clip") == "ppo_clip"


def test_reading_the_configuration_imports_no_trainer():
    """One list of imports: configs stand above, so a process that only reads settings stays light."""
    program = "import sys, configs.compose, configs.checks; print([m for m in ('torch', 'trainer', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
