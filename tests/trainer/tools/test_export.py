"""An exported folder holds the trained weights bit for bit, loads with the libraries' own loaders, and says what it is."""

import json
from pathlib import Path

import pytest
import torch

from configs.compose import load_config, to_yaml
from configs.schema import LoraConfig
from determinism.digest import module_digest
from determinism.files import append_json_line
from determinism.ledger import Ledger
from determinism.manifest import write_manifest
from trainer.checkpoint import CheckpointStore
from trainer.input_digests import model_digest
from trainer.tiny import resolve
from trainer.tools.cli import main
from trainer.tools.model_card import curve
from workers.models.lora import merged
from workers.models.shards import save_shards

LORA = LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj", "v_proj"])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(scope="module")
def policy() -> Path:
    return Path(resolve("micro:policy"))


def base_weights(policy: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_run(folder: Path, policy: Path, *overrides: str, lora: LoraConfig | None = None) -> tuple[Path, dict]:
    """A run of three steps as training leaves it; with what was trained at step 3."""
    weights, generator = base_weights(policy), torch.Generator().manual_seed(0)
    if lora is None:
        trained = {
            name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in weights.items()
        }
    else:
        trained = {}
        for name, value in weights.items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in lora.target_modules:
                trained[f"{layer}.lora_A.default.weight"] = torch.randn(lora.rank, value.shape[1], generator=generator)
                trained[f"{layer}.lora_B.default.weight"] = torch.randn(value.shape[0], lora.rank, generator=generator)
    config = load_config(["experiment=micro", f"run.dir={folder}", f"model.path={policy}", *overrides])
    config.actor.lora = lora or LoraConfig()
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    write_manifest(
        folder / "manifest.json",
        {"model": {"path": str(policy)}},
        {},
        {"model/actor": model_digest(str(policy))},
        run_id="r",
    )
    store, ledger = CheckpointStore(folder / "checkpoints", 0, 0, "r"), Ledger(folder)
    for step in (1, 2, 3):
        ledger.add_digest("actor_weights", module_digest(trained.items()) if step == 3 else "0" * 32)
        ledger.commit(step)
        append_json_line(folder / "metrics.jsonl", {"step": step, "critic/score/mean": step / 3})
    temporary = store.begin(3)
    save_shards({"actor": {f"weights/{name}": value for name, value in trained.items()}}, temporary / "workers")
    store.finish(temporary, {"step": 3})
    return folder, trained


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_whole_model_comes_back_bit_for_bit_with_tokenizer_and_card(tmp_path, policy, capsys):
    from transformers import AutoTokenizer

    run, trained = make_run(tmp_path / "run", policy)
    out = tmp_path / "out"
    assert main(["export", str(run), "--to", str(out)]) == 0
    assert f"step 3 of {run} is in {out}" in capsys.readouterr().out
    loaded = dict(load(out).named_parameters())
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    assert not torch.equal(loaded["model.embed_tokens.weight"], base_weights(policy)["model.embed_tokens.weight"])
    old, new = AutoTokenizer.from_pretrained(policy), AutoTokenizer.from_pretrained(out)
    assert (new.chat_template, new.eos_token_id) == (old.chat_template, old.eos_token_id)
    assert new("2+3=").input_ids == old("2+3=").input_ids
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for text in (
        f"`{module_digest(trained.items())}`",
        "| 3 | 1 |",
        "gae advantages",
        "seed: 0",
    ):
        assert text in card
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_adapters_are_merged_or_stay_an_adapter_that_gives_the_same_model(tmp_path, policy):
    from peft import PeftModel

    run, trained = make_run(tmp_path / "run", policy, lora=LORA)
    assert main(["export", str(run), "--to", str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), "--step", "3", "--adapter", "--to", str(tmp_path / "adapter")]) == 0
    whole = {
        f"{name.removesuffix('.weight')}.base_layer.weight"
        if f"{name.removesuffix('.weight')}.lora_A.default.weight" in trained
        else name: value
        for name, value in base_weights(policy).items()
    }
    expected = dict(merged([*whole.items(), *trained.items()], LORA))
    loaded = dict(load(tmp_path / "merged").named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    ids = torch.arange(3, 11)[None]
    adapted = PeftModel.from_pretrained(load(policy), str(tmp_path / "adapter"))
    with torch.no_grad():
        one, two = load(tmp_path / "merged")(ids).logits, adapted(ids).logits
        plain = load(policy)(ids).logits
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    assert (one - plain).abs().max() > 0.1
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (2, 4, str(policy))
    assert (tmp_path / "adapter" / "README.md").read_text().startswith("---\nlibrary_name: peft\n")


def refused(capsys, *arguments: str) -> str:
    assert main(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_what_cannot_be_exported_is_said_in_a_line_and_leaves_nothing(tmp_path, policy, capsys):
    run, _ = make_run(tmp_path / "run", policy)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    out = str(tmp_path / "out")
    assert "is not empty" in refused(capsys, str(run), "--to", str(full))
    assert "checkpoint of step 2 (there are: 3)" in refused(capsys, str(run), "--step", "2", "--to", out)
    assert "holds whole weights, not adapters" in refused(capsys, str(run), "--adapter", "--to", out)
    assert "name its folder with --base" in refused(capsys, str(run), "--base", str(tmp_path / "no"), "--to", out)
    assert "there is no such directory" in refused(capsys, str(tmp_path / "no"), "--to", out)
    ledger = (run / "ledger.jsonl").read_text()
    (run / "ledger.jsonl").write_text(
        ledger.replace(json.loads(ledger.splitlines()[2])["phases"]["actor_weights"], "1" * 32)
    )
    assert "is not what this run had after step 3" in refused(capsys, str(run), "--to", out)
    shard = next((run / "checkpoints" / "step_000003" / "workers").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"workers/{shard.name} does not have its recorded digest" in refused(capsys, str(run), "--to", out)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "full"}


@pytest.mark.parametrize("option", ["export", "replay", "eval"])
def test_code_that_a_runs_config_names_is_not_run_without_trust(tmp_path, policy, capsys, option):
    bomb = tmp_path / "bomb.py"
    bomb.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'bang')!r}).mkdir()\ndef f(*a, **k): return 0\n")
    run, _ = make_run(
        tmp_path / "run",
        policy,
        f"algorithm.advantage.name={bomb}:f",
        f"reward.functions=[{{name: x, function: '{bomb}:f'}}]",
    )
    command = {
        "export": ["export", str(run), "--to", str(tmp_path / "out")],
        "replay": ["replay", str(run), "--step", "1"],
        "eval": ["eval", "--checkpoint", str(run)],
    }[option]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert f"algorithm.advantage.name={bomb}:f" in err
    assert f"reward.functions.0.function={bomb}:f" in err
    assert "--trust-run" in err
    assert not (tmp_path / "bang").exists()
    if option == "export":
        assert main([*command, "--trust-run"]) == 0


def test_a_curve_of_many_steps_shows_a_few_with_both_ends(tmp_path):
    for step in range(101):
        append_json_line(tmp_path / "m.jsonl", {"step": step, "critic/score/mean": 0.5})
    lines = curve(tmp_path / "m.jsonl", 90).splitlines()
    assert len(lines) == 2 + 12
    assert lines[0] == "| step | reward |"
    assert (lines[2], lines[-1]) == ("| 0 | 0.5 |", "| 90 | 0.5 |")
