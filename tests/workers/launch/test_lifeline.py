"""What messages say of a process's end and of its log."""

from __future__ import annotations

import signal

import pytest

from workers.launch.lifeline import TAIL_LINES, exit_text, log_size, log_tail


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGTERM, "was killed by SIGTERM"),
        (-signal.SIGKILL, "was killed by SIGKILL (by someone, or by the kernel when memory ran out: see dmesg)"),
        (-signal.SIGSEGV, "was killed by SIGSEGV (a crash in native code)"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_exit_code_in_words(code, text):
    assert exit_text(code) == text


def test_the_end_of_a_log_without_what_another_process_wrote_before(tmp_path):
    path = tmp_path / "toy-0.log"
    assert log_tail(path) == f"(no log at {path})"
    assert log_size(path) == 0
    path.write_text("before\n")
    start = log_size(path)
    assert log_tail(path, start) == f"(nothing was written to {path})"
    with path.open("a") as stream:
        stream.writelines(f"line {i}\n" for i in range(100))
    lines = log_tail(path, start).splitlines()
    assert lines[0] == f"--- the end of {path}"
    assert lines[1:-1] == [f"line {i}" for i in range(100 - TAIL_LINES, 100)]


def test_a_log_that_is_no_text_and_has_one_endless_line(tmp_path):
    path = tmp_path / "toy-0.log"
    path.write_bytes(b"\xff\xfe" * 1_000_000)
    assert len(log_tail(path)) < 20_000
