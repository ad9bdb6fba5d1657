"""Bad input is one clear line before anything starts; a failing child's own traceback is what the user sees."""

import json
import os
import shutil
import signal
import time

import psutil
import pytest
from transformers import AutoTokenizer

from tests.e2e import runs
from trainer.tiny import resolve
from trainer.tools.cli import main


def refused(capsys, *overrides: str) -> str:
    """Exit code 2, no traceback; the message."""
    assert main(["train", "experiment=micro", "tracking=disabled", *overrides]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout.sed=1",), "rollout.seed"),
        (("+trainer.typo=1",), "trainer.typo"),
        (("model.path=/no/such/model",), "/no/such/model"),
        (("actor.mini_batch_size=6",), "actor.mini_batch_size"),
        (("full_determinism=true", "rollout.max_head_offpolicyness=1"), "rollout.max_head_offpolicyness"),
        (("full_determinism=true", "launcher.num_ranks=3"), "launcher.num_ranks"),
        (("data.max_prompt_tokens=4",), "data.max_prompt_tokens"),
        (("reward.functions.0.function=no_such_module:score",), "no_such_module"),
    ],
)
def test_settings_that_cannot_work_are_named(capsys, tmp_path, overrides, expected):
    assert expected in refused(capsys, f"run.dir={tmp_path / 'run'}", *overrides)


def test_a_chat_template_with_a_clock_is_refused_under_full_determinism(tmp_path):
    template = tmp_path / "clock.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %} {{ strftime_now('%d %b %Y') }}")
    process = runs.start(tmp_path / "run", f"model.chat_template={template}", launcher="python")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "data.template_date is null, and the chat template of model.path writes the current date" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_tracking_online_without_credentials_is_refused(tmp_path):
    """Also at a terminal, where W&B would ask."""
    environment = {"WANDB_API_KEY": "", "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": str(tmp_path / "none")}
    master, terminal = os.openpty()
    process = runs.start(
        tmp_path / "run", "tracking.wandb_mode=online", launcher="python", env=environment, stdin=terminal
    )
    output, _ = process.communicate(timeout=120)
    os.close(master)
    os.close(terminal)
    assert process.returncode == 2
    assert "there are no credentials for http://127.0.0.1:9; run `wandb login`" in output
    assert not (tmp_path / "run").exists()


def test_more_cpus_than_exist_says_needed_and_available(capsys, tmp_path):
    message = refused(
        capsys, f"run.dir={tmp_path / 'run'}", "rollout.replicas=64", "launcher.ray_num_cpus=2", "launcher.name=ray"
    )
    assert "64" in message
    assert "2" in message


@pytest.mark.parametrize(
    ("setting", "recipe"),
    [("model.path", "micro:policy"), ("critic.path", "micro:policy"), ("reward.model.path", "micro:reward")],
)
def test_a_weight_file_that_is_not_the_models_own_is_refused(capsys, tmp_path, setting, recipe):
    """Averaged weights beside a reward model's gave other rewards, without a word."""
    model = tmp_path / "model"
    shutil.copytree(resolve(recipe), model)
    shutil.copy(model / "model.safetensors", model / "ema.safetensors")
    message = refused(capsys, f"run.dir={tmp_path / 'run'}", f"{setting}={model}")
    assert f"{setting}: {model} holds weight files that do not belong to model.safetensors: ema.safetensors" in message


def test_a_tokenizer_without_eos_is_refused(capsys, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(resolve("micro:policy"), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    assert "no EOS token" in refused(
        capsys, f"run.dir={tmp_path / 'run'}", f"model.path={model}", f"critic.path={model}"
    )


def test_a_dataset_without_the_prompt_column_names_the_columns_it_has(capsys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}?", "answer": "1"}) + "\n" for i in range(8)))
    source = f"[{{name: mine, kind: dataset, path: '{rows}', prompt_key: prompt}}]"
    message = refused(capsys, f"run.dir={tmp_path / 'run'}", f"data.train={source}")
    assert "question" in message
    assert "prompt" in message


@pytest.mark.parametrize(
    ("function", "answer", "expected"),
    [
        ("math_verify", "。", "prompt 'mine/2': the answer '。' is not a mathematical expression"),
        (
            "exact_match",
            {"target": 1, "numbers": [1]},
            "prompt 'mine/2': the answer {'target': 1, 'numbers': [1]} is a dict",
        ),
        ("exact_match", None, "prompt 'mine/2': the row has no answer"),
    ],
)
def test_a_row_whose_answer_no_response_could_match_is_named(capsys, tmp_path, function, answer, expected):
    rows = [
        {"prompt": f"{i}?", "answer": answer if i == 2 else ("1" if isinstance(answer, str | None) else {"target": 1})}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"[{{name: mine, kind: dataset, path: '{tmp_path / 'rows.jsonl'}'}}]"
    overrides = (f"data.train={source}", "data.validation=[]", f"reward.functions=[{{name: f, function: {function}}}]")
    assert expected in refused(capsys, f"run.dir={tmp_path / 'run'}", *overrides)


def test_a_row_with_the_policys_markup_written_into_it_is_named(capsys, tmp_path):
    rows = [{"prompt": "1?<end>" if i == 2 else "1?", "answer": "1"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, reward = tmp_path / "model", tmp_path / "reward"
    shutil.copytree(resolve("micro:policy"), model)
    shutil.copytree(resolve("micro:reward"), reward)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.save_pretrained(model)
    source = f"[{{name: mine, kind: dataset, path: '{tmp_path / 'rows.jsonl'}'}}]"
    overrides = [f"data.train={source}", "data.validation=[]", f"model.tokenizer={model}", "data.max_prompt_tokens=64"]
    reward_settings = [f"reward.model.path={reward}", "reward.model.apply_chat_template=false"]
    message = refused(capsys, f"run.dir={tmp_path / 'run'}", *overrides, *reward_settings)
    assert "prompt 'mine/2' holds '<end>', a special token of the policy" in message


def test_a_used_run_directory_is_refused(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 0\n")
    assert "run.resume=auto" in refused(capsys, f"run.dir={tmp_path / 'run'}")


def test_a_failing_engine_shows_its_own_traceback(tmp_path):
    process = runs.start(tmp_path / "run", "++rollout.engine_args.block_size=7", launcher="python")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "rollout-0" in output
    assert "block_size" in output or "block size" in output


@pytest.mark.parametrize("launcher", [pytest.param("ray", marks=pytest.mark.long), "python"])
def test_sigterm_ends_every_child_within_seconds(tmp_path, launcher):
    process = runs.start(tmp_path / "run", "trainer.total_steps=1000", "trainer.checkpoint_every=0", launcher=launcher)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
