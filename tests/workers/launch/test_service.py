import subprocess
import sys

import pytest


def test_an_interpreter_that_ends_with_frozen_objects_says_nothing() -> None:
    """Triton's bindings print a page of leaks where what they made is never collected."""
    pytest.importorskip("triton")
    code = (
        "from workers.launch.service import without_collection\n"
        "with without_collection():\n"
        "    import torch._dynamo, sys\n"
        "assert 'triton._C.libtriton' in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
