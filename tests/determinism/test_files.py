"""What is written is whole or an error; what is read back is what was written; names that people give are nobody's business."""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest

from determinism.files import (
    DamagedLineError,
    NotWrittenError,
    append_json_line,
    json_lines,
    move_lines,
    number_in,
    numbered,
    write_atomically,
)


@contextmanager
def files_of_at_most(size: int):
    """Python ignores SIGXFSZ, so a write beyond `size` is short, and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps(path) -> list[int]:
    return [line.record["step"] for line in json_lines(path)]


def test_a_short_write_is_an_error_and_the_next_line_is_not_glued_to_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1})
    before = path.read_bytes()
    with files_of_at_most(len(before) + 5), pytest.raises(NotWrittenError, match=r"only 5 of .*metrics\.jsonl"):
        append_json_line(path, {"step": 2, "x": "long enough"})
    assert path.read_bytes() == before
    append_json_line(path, {"step": 2})
    assert steps(path) == [1, 2]


def test_a_line_torn_by_a_kill_is_cut_and_said_before_the_next_one(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1})
    with open(path, "a") as file:
        file.write('{"step": 2, "x"')
    assert steps(path) == [1]
    assert "the last line is torn" in caplog.text
    append_json_line(path, {"step": 2})
    assert "was torn (a kill while it was written) and is cut: 15 bytes" in caplog.text
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("text", ["{]\n", "3\n", "\n"])
def test_damage_in_the_middle_is_not_taken_for_a_torn_line(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + text + '{"step": 3}\n')
    with pytest.raises(DamagedLineError, match=r"metrics\.jsonl, line 2: not "):
        json_lines(path)


def test_bytes_that_are_no_utf8_are_damage_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"x": "\xff\xfe"}\n')
    with pytest.raises(DamagedLineError, match="line 1"):
        json_lines(path)


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_rest(tmp_path):
    path = tmp_path / "manifest.json"
    write_atomically(path, "old")
    with files_of_at_most(100), pytest.raises(NotWrittenError, match=r"only 100 of 200 bytes.*manifest\.json"):
        write_atomically(path, "n" * 200)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["manifest.json"]


FULL = """
import sys
from pathlib import Path
from determinism.files import NotWrittenError, append_json_line, json_lines, write_atomically
root, written = Path(sys.argv[1]), 0
try:
    while True:
        append_json_line(root / "metrics.jsonl", {"step": written, "x": "x" * 1000})
        written += 1
except NotWrittenError as error:
    print(error)
lines = json_lines(root / "metrics.jsonl")
assert [line.record["step"] for line in lines] == list(range(written)) and written > 10, written
try:
    write_atomically(root / "config.yaml", b"x" * 4000)
except NotWrittenError as error:
    print(error)
assert not (root / "config.yaml").exists()
assert (root / "metrics.jsonl").read_bytes().endswith(b"\\n")
"""


def test_a_disk_that_fills_up_loses_no_line_and_is_named(tmp_path):
    """A real full disk: a tmpfs of 64 KiB in a mount namespace of its own."""
    mount = f"mount -t tmpfs -o size=64k none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device") == 2
    assert str(tmp_path / "metrics.jsonl") in done.stdout


def test_moved_lines_are_in_the_other_file(tmp_path):
    path, target = tmp_path / "a.jsonl", tmp_path / "aside" / "a.jsonl"
    for step in (1, 2, 3):
        append_json_line(path, {"step": step})
    move_lines(path, json_lines(path)[0].end, target)
    assert (steps(path), steps(target)) == ([1], [2, 3])
    move_lines(path, path.stat().st_size, tmp_path / "none" / "a.jsonl")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "name",
    [
        "step_000002_best",
        "step_000002 (copy)",
        "step_000002.bak",
        "step_2",
        "step_0000002",
        "step_",
        "step_00000２",
        "favourites",
    ],
)
def test_names_that_people_give_carry_no_step(name):
    assert number_in(name) is None


@pytest.mark.parametrize("step", [0, 2, 999999, 1234567])
def test_exact_names_do(step):
    assert number_in(numbered(step)) == step
    assert number_in(numbered(step, "validation", ".jsonl"), ("step", "validation"), (".jsonl",)) == step
    assert number_in(numbered(step, suffix=".jsonl")) is None


def test_a_float_keeps_every_bit(tmp_path):
    value = 0.1 + 0.2
    append_json_line(tmp_path / "m.jsonl", {"step": 1, "x": value})
    assert json.loads((tmp_path / "m.jsonl").read_text())["x"].hex() == value.hex()
