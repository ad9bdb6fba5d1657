"""Every process gets, proves and records the environment that its numbers depend on."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from determinism.environment import EnvironmentNotPinned, check_facts, pin_process, process_env

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys
with open(os.environ["STARTS"], "a") as file:
    file.write("x")
from determinism.environment import reexec_with_hashseed
assert "torch" not in sys.modules
reexec_with_hashseed(FULL, 2, "cpu")
print(sys.argv[1:], sys.flags.hash_randomization, os.environ.get("PYTHONHASHSEED"), os.environ["OMP_NUM_THREADS"])
print(sys.warnoptions, "EXACTRL_REEXECUTED" in os.environ)
"""


def start(arguments, tmp_path, extra=None, **options):
    """Run the interpreter as a user's shell would; how often the program started, and the finished process."""
    dropped = ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    starts = tmp_path / "starts"
    environment |= {"STARTS": str(starts), "PYTHONPATH": f"{tmp_path}:{ROOT}", **(extra or {})}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, **options
    )
    count = len(starts.read_text())
    starts.unlink()
    return count, done


@pytest.fixture
def program(tmp_path):
    """The program as a script, as a module of a package, and as text."""
    text = PROGRAM.replace("FULL", "True")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "module.py").write_text(text)
    (tmp_path / "script").write_text(text)  # without a suffix, like an installed console script
    return text


def test_reexecution_puts_the_variables_in_force_and_keeps_the_command_line(tmp_path, program):
    arguments = ["a b", "--c=1", "", "-m"]
    for way in (
        ["-m", "package.module"],
        [str(tmp_path / "script")],
        ["-c", program],
        ["-W", "ignore::UserWarning", "-m", "package.module"],
    ):
        count, done = start([*way, *arguments], tmp_path)
        assert done.returncode == 0, done.stderr
        seen, rest = done.stdout.splitlines()
        assert seen == f"{arguments} 0 0 2"
        assert rest.startswith("['ignore::UserWarning']" if "-W" in way else "[]")
        assert rest.endswith("False")  # the mark is gone: a child of this process may need its own re-execution
        assert count == 2


def test_a_process_with_the_environment_is_not_started_again(tmp_path, program):
    count, done = start(["-m", "package.module"], tmp_path, extra=process_env(True, 2, "cpu"))
    assert done.stdout.splitlines()[0] == "[] 0 0 2"
    assert count == 1


def test_without_full_determinism_threads_are_set_and_nothing_is_started_again(tmp_path):
    count, done = start(["-c", PROGRAM.replace("FULL", "False")], tmp_path)
    assert done.stdout.splitlines()[0] == "[] 1 None 2", done.stderr
    assert count == 1


def test_reexecution_never_loops(tmp_path, program):
    """A start-up file that undoes a variable, and an option that makes Python ignore the environment: an error, at the second start."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ.pop('OMP_DYNAMIC', None)")
    count, done = start(["-m", "package.module"], tmp_path)
    assert done.returncode == 1
    assert "started again with them: OMP_DYNAMIC='FALSE'" in done.stderr
    assert count == 2
    (tmp_path / "sitecustomize.py").unlink()
    text = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n" + program
    count, done = start(["-E", "-c", text], tmp_path)
    assert "started again with them: PYTHONHASHSEED='0'" in done.stderr
    assert count == 2


def test_a_program_from_standard_input_is_told_what_to_set(tmp_path, program):
    count, done = start(["-"], tmp_path, input=program)
    assert "can't be started again" in done.stderr
    assert "PYTHONHASHSEED='0'" in done.stderr
    assert count == 1


def test_process_env_says_what_full_determinism_adds(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    plain, full, cuda = (process_env(*a) for a in [(False, 3, "cpu"), (True, 3, "cpu"), (True, 3, "cuda")])
    assert plain["OMP_NUM_THREADS"] == plain["MKL_NUM_THREADS"] == "3"
    assert plain["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert plain["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert plain.items() <= full.items()
    assert plain.items() <= cuda.items()
    assert set(full) - set(plain) == {
        "PYTHONHASHSEED",
        "OMP_DYNAMIC",
        "MKL_DYNAMIC",
        "TORCHINDUCTOR_DETERMINISTIC",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "VLLM_CPU_ATTN_SPLIT_KV",
    }
    assert cuda["VLLM_BATCH_INVARIANT"] == "1"
    assert cuda["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not {"HF_HUB_OFFLINE", "VLLM_BATCH_INVARIANT", "CUDA_VISIBLE_DEVICES"} & set(full)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert process_env(True, 3, "cpu")["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_process_env_refuses_what_it_cannot_give():
    with pytest.raises(ValueError, match=r"determinism.threads is 0"):
        process_env(True, 0, "cpu")
    with pytest.raises(ValueError, match="device is 'auto'"):
        process_env(True, 1, "auto")


def facts_of(threads: int, full: bool, before: str = "", after: str = "") -> dict:
    """Facts read back in a process of its own."""
    program = textwrap.dedent(f"""
        import json, sys
        from determinism.environment import facts, pin_process
        {before}
        pin_process({full}, {threads})
        {after}
        print(json.dumps(facts()))
    """)
    environment = {**os.environ, **process_env(full, threads, "cpu"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


NONDETERMINISTIC = """
import torch, warnings
warnings.simplefilter("error")
try:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
except RuntimeError as error:
    assert "deterministic" in str(error), error
else:
    raise AssertionError("a nondeterministic operation passed")
""".strip()


def test_facts_are_read_back_and_s8_the_thread_count_is_among_them():
    noise = "import os; os.environ.update(RANK='3', MASTER_PORT='1234', VLLM_PORT='99', HOSTNAME='h', CUDA_VISIBLE_DEVICES='')"
    one = facts_of(1, True, before=noise, after="exec(" + repr(NONDETERMINISTIC) + ")")
    assert one["threads"] == 1
    assert one["torch_flags"]["deterministic_algorithms"] == "error"
    assert set(one["torch_flags"]["fp32_precision"].values()) == {"ieee"}
    assert one["hash_randomization"] is False
    assert one["environment"]["PYTHONHASHSEED"] == "0"
    assert one["versions"]["torch"] == __import__("torch").__version__
    check_facts("trainer/0", one, threads=1)
    noisy = {"RANK", "MASTER_PORT", "VLLM_PORT", "CUDA_VISIBLE_DEVICES", "HOSTNAME"}
    assert not noisy & set(one["environment"])  # equal runs must have equal facts

    two = facts_of(2, False)
    assert two["threads"] == 2
    differing = {name for name in one if one[name] != two[name]}
    assert differing == {"threads", "torch_flags", "hash_randomization", "environment"}
    with pytest.raises(EnvironmentNotPinned) as caught:
        check_facts("rollout/1", two, threads=1)
    for part in ("rollout/1", "threads is 2, must be 1", "is 'off', must be 'error'", "PYTHONHASHSEED"):
        assert part in str(caught.value)


def test_an_engine_that_freezes_the_thread_count_is_noticed(monkeypatch):
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # what a vLLM engine in this process does
    with pytest.raises(EnvironmentNotPinned, match=f"determinism.threads={threads + 1}, but torch keeps {threads}"):
        pin_process(True, threads + 1)
    assert torch.get_deterministic_debug_mode() == 0
