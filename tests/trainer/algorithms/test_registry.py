"""Names lead to functions, and wrong names lead to a helpful sentence."""

import pickle
import subprocess
import sys

import pytest

from configs.schema import AlgorithmConfig, PolicyLossConfig
from trainer.algorithms.losses import PolicyLoss, policy_loss_from_config
from trainer.algorithms.registry import Registry

COLOURS = Registry("colour", "paint.colour", {"red": len, "green": max}, declared=["red", "green"])


def test_a_built_in_name_is_found():
    assert COLOURS.get("red") is len


def test_a_misspelt_name_is_refused_with_a_suggestion_and_the_setting():
    with pytest.raises(ValueError, match=r"paint\.colour=gren: no such colour; did you mean `green`\?"):
        COLOURS.get("gren")


def test_a_reference_into_a_package_is_imported():
    assert COLOURS.get("math:fsum")([0.1] * 10) == 1.0


def test_a_reference_that_leads_nowhere_names_the_setting():
    with pytest.raises(ValueError, match=r"paint\.colour=/nowhere/mine\.py:f: there is no file /nowhere/mine\.py"):
        COLOURS.get("/nowhere/mine.py:f")


def test_a_users_policy_loss_from_a_relative_file_works_in_a_process_that_started_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom trainer.algorithms.surrogates import Surrogate\n"
        "def plain(terms, clip):\n"
        "    none = torch.zeros_like(terms.mask)\n"
        "    return Surrogate(-terms.advantages * terms.log_ratio.exp(), terms.log_ratio.detach().exp(), none, none)\n"
    )
    monkeypatch.chdir(tmp_path)
    loss = policy_loss_from_config(AlgorithmConfig(policy_loss=PolicyLossConfig(name="mine.py:plain")), kl_coef=0.0)
    (tmp_path / "loss.pickle").write_bytes(pickle.dumps(loss))
    program = """
import pickle, sys, torch
from workers.models.batch import LossTotals, PolicyOutputs, TokenBatch
loss = pickle.load(open(sys.argv[1], "rb"))
one = torch.tensor([[0.0, 1.0]])
batch = TokenBatch(one.long(), torch.tensor([2]), one.bool(), old_logprobs=0 * one, advantages=2 * one)
print(float(loss(PolicyOutputs(0 * one, 0 * one), batch, LossTotals(1, 1, 1))[0]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "loss.pickle")], cwd="/", capture_output=True, text=True
    )
    assert done.stdout.strip() == "-2.0", done.stderr
    assert isinstance(loss, PolicyLoss)
