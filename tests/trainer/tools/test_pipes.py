"""A command whose reader has ended says nothing; another broken pipe is an error as ever."""

import os
import subprocess
import sys

import pytest

from trainer.tools.pipes import READER_GONE, ending_with_the_reader


def run_unread(program: str, *arguments: str, merged: bool = False) -> tuple[int, str]:
    """Exit code and stderr of a Python program whose stdout nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            stdout=writing,
            stderr=writing if merged else subprocess.PIPE,
            # Unbuffered, argparse would meet the error itself, and swallow it.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    return done.returncode, "" if merged else done.stderr


COMMAND = "import sys; from trainer.tools.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("train", "--help"), ("train", "--cfg", "job", "experiment=micro"), ("compare", "--help")],
    ids=" ".join,
)
def test_commands_end_quietly_when_nobody_reads_their_output(arguments):
    assert run_unread(COMMAND, *arguments) == (READER_GONE, "")


def test_a_long_output_ends_where_the_reader_did():
    program = (
        "import sys; from trainer.tools.pipes import ending_with_the_reader\n"
        "def command():\n"
        "    for i in range(10**6): print(i)\n"
        "    print('went on', file=sys.stderr); return 0\n"
        "sys.exit(ending_with_the_reader(command))"
    )
    assert run_unread(program) == (READER_GONE, "")


def test_an_error_message_nobody_reads_is_no_error_either():
    assert run_unread(COMMAND, "no-such-command", merged=True) == (READER_GONE, "")


def test_a_command_that_is_read_keeps_its_exit_code(capsys):
    assert ending_with_the_reader(lambda: print("a line") or 3) == 3
    assert capsys.readouterr().out == "a line\n"


def test_another_broken_pipe_is_still_an_error(capfd):
    def command() -> int:
        raise BrokenPipeError("the pipe to a worker")

    with pytest.raises(BrokenPipeError, match="worker"):
        ending_with_the_reader(command)
