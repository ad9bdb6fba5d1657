"""The command line says what is wrong in one line each, starts fast, and prints what it would do."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from configs.compose import load_config
from configs.problems import UserError
from trainer.tools import cli
from workers.launch.group import WorkerError

MICRO = "experiment=micro"


@pytest.fixture
def started(monkeypatch):
    """Configurations that would have been trained."""
    import trainer.run

    configs = []
    monkeypatch.setattr(trainer.run, "run", lambda config: configs.append(config) or 0)
    monkeypatch.setattr(cli, "pin_hash_seed", lambda config: None)
    return configs


def failing(monkeypatch, error):
    """A command `train` that raises."""

    def command(argv):
        raise error

    monkeypatch.setattr(cli, "train", command)


def test_help_lists_the_commands_that_exist(capsys):
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in cli.available_commands():
        assert f"\n  {name} " in listed


def test_no_command_is_a_mistake_and_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: exactrl COMMAND" in capsys.readouterr().out


def test_a_command_exists_only_when_its_module_does(monkeypatch):
    assert {"train", "build"} <= set(cli.available_commands())
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "trainer.tiny" else object())
    assert "build" not in cli.available_commands()


def test_help_and_composition_import_no_torch():
    program = "\n".join(
        [
            "import sys",
            "from trainer.tools import cli",
            "assert cli.main(['--help']) == 0",
            "assert cli.main(['train', 'experiment=micro', '--dry-run']) == 0",
            "heavy = {'torch', 'vllm', 'ray', 'transformers', 'wandb', 'datasets'} & set(sys.modules)",
            "sys.exit(f'imported {heavy}' if heavy else 0)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "trainer.tools.cli", "train"], [sys.executable, "-m", "trainer.main_ppo"]]
)
def test_a_wrong_configuration_ends_the_process_with_code_2_and_no_traceback(command, tmp_path):
    done = subprocess.run(
        [*command, MICRO, "rollout.sed=1", "seed=abc"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert "did you mean `rollout.seed`?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean `exactrl train`?" in capsys.readouterr().err


def test_train_hands_over_the_checked_configuration(started, capsys):
    assert cli.main(["train", MICRO, "seed=3", "full_determinism=true", "reward.model.max_num_seqs=4"]) == 0
    (config,) = started
    assert (config.seed, config.reward.model.max_num_seqs) == (3, 1)
    said = capsys.readouterr().err
    assert "exactrl: warning: reward.model.max_num_seqs: 4 is overridden to 1" in said
    assert "rollout.seed" in said


def test_options_may_stand_anywhere(started, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: micro:policy\n", encoding="utf-8")
    assert cli.main(["train", MICRO, "--config-dir", str(tmp_path), "model=mine", "seed=4"]) == 0
    assert started[0].seed == 4


def test_an_experiment_file_may_come_first(started, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\ndefaults:\n  - micro\nrun:\n  name: mine\n", encoding="utf-8")
    assert cli.main(["train", str(path), "seed=5"]) == 0
    assert (started[0].run.name, started[0].seed) == ("mine", 5)


def test_cfg_job_prints_a_configuration_that_can_be_read_back(started, capsys, tmp_path):
    from configs.compose import from_yaml

    assert cli.main(["train", MICRO, "--cfg", "job", "seed=6"]) == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert from_yaml(path) == load_config([MICRO, "seed=6"])
    assert started == []


def test_a_dry_run_prints_configuration_seeds_and_processes_and_starts_nothing(started, capsys, tmp_path):
    from configs.compose import from_yaml

    assert cli.main(["train", MICRO, "--dry-run", "seed=7"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "config.yaml"
    path.write_text(printed, encoding="utf-8")
    assert from_yaml(path).seed == 7
    for line in (
        "for actor, critic, ref",
        "rollout: 1 engine(s) of micro:policy",
        "8 prompts x 2 samples = 16 sequences",
    ):
        assert line in printed
    assert started == []


def test_a_dry_run_checks_everything(started, capsys):
    assert cli.main(["train", MICRO, "--dry-run", "actor.mini_batch_size=7", "rollout.sampling.top_p=0.5"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "actor.mini_batch_size",
        "actor.fsdp.leaf_size",
        "rollout.sampling.top_p",
    ]


def test_every_effective_seed_is_named():
    overrides = ["seed=1", "rollout.seed=2", "rollout.validation.seed=3", "data.train.0.seed=null"]
    text = "\n".join(cli.effective_seeds(load_config([MICRO, *overrides])))
    rows = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in text.splitlines()}
    assert rows["seed"].startswith("1 ")
    assert rows["data.seed"].startswith("1 ")
    assert rows["rollout.seed"].startswith("2 ")
    assert rows["rollout.validation.seed"].startswith("3 ")
    assert "derived from data.seed" in rows["data.train.0.seed"]
    assert "not used" in rows["rollout.seed"]
    assert rows["full_determinism"] == rows["rollout.full_determinism"] == rows["reward.full_determinism"] == "false"


@pytest.mark.parametrize("setting", ["full_determinism=true", "rollout.deterministic_sampling=true"])
def test_requests_have_derived_seeds_where_something_promises_them(setting):
    lines = cli.effective_seeds(load_config([MICRO, setting]))
    (line,) = [line for line in lines if line.startswith("rollout.seed ")]
    assert "each request's own seed is derived from it" in line


def test_under_torchrun_only_rank_0_speaks(started, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", MICRO, "rollout.seed=2"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.path=/no/such/model", "model.path"),
        ("model.path=tiny:polcy", "model.path"),
        ("ref.path=/no/such/model", "ref.path"),
        ("reward.model.path=/no/such/model", "reward.model.path"),
        ("data.train=[{name: a, kind: dataset, path: /no/such.parquet}]", "data.train.0.path"),
        ("reward.functions.0.function=/no/such.py:score", "reward.functions.0.function"),
    ],
)
def test_what_is_not_there_is_named_once_before_anything_starts(override, key, started, capsys):
    assert cli.main(["train", MICRO, override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"exactrl: {key}: there is no")
    assert started == []


def test_the_critics_path_does_not_matter_without_a_critic(started):
    assert cli.main(["train", MICRO, "critic.path=/no/such/model", "algorithm=grpo"]) == 0


def test_an_error_that_the_user_can_mend_has_no_traceback(monkeypatch, capsys):
    failing(monkeypatch, UserError("one\ntwo"))
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "exactrl: one\nexactrl: two\n"


def test_a_workers_failure_shows_the_workers_own_traceback(monkeypatch, capsys):
    failing(monkeypatch, WorkerError("rank 1 failed\nTraceback of rank 1"))
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "exactrl: rank 1 failed\nTraceback of rank 1\n"


def test_an_interrupt_is_code_130(monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    failing(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


def test_other_commands_get_their_arguments_and_give_their_exit_code(monkeypatch):
    got = []
    module = types.SimpleNamespace(main=lambda argv: got.append(argv) or 1)
    monkeypatch.setitem(sys.modules, "determinism.compare", module)
    monkeypatch.setattr(cli, "_exists", lambda name: True)
    assert cli.main(["compare", "a", "b", "--json"]) == 1
    assert got == [["a", "b", "--json"]]


def test_build_names_the_recipes_when_one_is_unknown(capsys):
    assert cli.main(["build", "nano"]) == 2
    assert "tiny:policy" in capsys.readouterr().err


def test_build_prints_the_folder_of_each_model(monkeypatch, capsys):
    import trainer.tiny

    monkeypatch.setattr(trainer.tiny, "resolve", lambda name, cache_dir, quiet: f"{cache_dir}/{name}")
    assert cli.main(["build", "micro", "tiny:reward", "--cache", "here"]) == 0
    assert capsys.readouterr().out.splitlines() == ["here/micro:policy", "here/micro:reward", "here/tiny:reward"]
