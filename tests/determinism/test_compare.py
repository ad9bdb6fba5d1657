"""Where two runs part: manifest field, step, phase, sample, token, parameter; and the exit codes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from determinism.compare import FieldDifference, field_lines, main
from determinism.ledger import Ledger
from determinism.values import tensor_difference, ulps
from tests.determinism import wandb_server


@pytest.fixture
def make_run(tmp_path):
    def make(name: str, steps: int = 3, change=lambda step, phase, value: value, record: str = "digest", **manifest):
        path = tmp_path / name
        path.mkdir()
        ledger = Ledger(path, record)
        lines = []
        for step in range(1, steps + 1):
            ledger.rows([("rows/0", 0, 0), ("rows/0", 0, 1)])
            for phase in ("token_ids", "rollout_logprobs", "advantages"):
                value = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
                ledger.add(phase, change(step, phase, value))
            weights = {"layer.weight": torch.ones(2, 2) * change(step, "actor_weights", step)}
            ledger.add_digest("actor_weights", f"{hash_of(weights):032x}", tensors=weights)
            ledger.commit(step)
            lines.append(
                json.dumps({"step": step, "critic/score/mean": 0.1 * step, "timing_s/step": hash(name) % 7}) + "\n"
            )
        (path / "metrics.jsonl").write_text("".join(lines))
        (path / "manifest.json").write_text(json.dumps({"config": {"seed": 0, **manifest}}))
        return path

    return make


def hash_of(weights) -> int:
    return int(weights["layer.weight"].double().sum() * 1024)


def test_equal_runs_are_the_same_and_exit_with_zero(make_run, capsys):
    assert main([str(make_run("a")), str(make_run("b"))]) == 0
    out = capsys.readouterr().out
    assert "SAME: 3 steps, 12 digests" in out
    assert "no field differs" in out


def one_ulp(step, phase, value):
    if step == 2 and phase == "rollout_logprobs":
        value = value.clone()
        value[1, 2] = torch.nextafter(value[1, 2], torch.tensor(100.0))
    return value


def test_the_first_step_and_phase_are_named(make_run, capsys):
    assert main([str(make_run("a")), str(make_run("b", change=one_ulp))]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: 1 of 12 digests; first at step 2, phase rollout_logprobs" in out
    assert "ledger.record=full" in out


def test_raw_values_name_sample_and_token_with_the_distance_in_ulps(make_run, capsys):
    assert main([str(make_run("a", record="full")), str(make_run("b", record="full", change=one_ulp))]) == 1
    assert (
        "prompt rows/0, sample 1, token 2: 7.0 | 7.000000476837158, 1 ulp apart (1 element(s) differ)"
        in capsys.readouterr().out
    )


def test_raw_weights_name_the_parameter(make_run, capsys):
    def other(step, phase, value):
        return value * 2 if phase == "actor_weights" and step == 3 else value

    assert main([str(make_run("a", record="full")), str(make_run("b", record="full", change=other))]) == 1
    out = capsys.readouterr().out
    assert "first at step 3, phase actor_weights" in out
    assert "parameter layer.weight[0, 0]: 3.0 | 6.0" in out


def test_a_differing_environment_field_is_named_before_the_numbers(make_run, capsys):
    assert main([str(make_run("a", threads=1)), str(make_run("b", threads=2, change=one_ulp))]) == 1
    out = capsys.readouterr().out
    assert out.index("config.threads: 1 | 2") < out.index("DIFFERENT")


def test_a_run_that_stopped_earlier_is_not_the_same(make_run, capsys):
    assert main([str(make_run("a")), str(make_run("b", steps=2))]) == 1
    assert "first at step 3" in capsys.readouterr().out


def test_what_cannot_be_compared_exits_with_two(make_run, tmp_path, capsys):
    run = make_run("a")
    (tmp_path / "empty").mkdir()
    assert main([str(run), str(tmp_path / "empty")]) == 2
    assert main([str(run), str(tmp_path / "missing")]) == 2
    assert main([str(run)]) == 2
    assert "not comparable" in capsys.readouterr().err


def test_evaluations_of_two_checkpoints_are_not_comparable_and_their_steps_are_named(tmp_path, capsys):
    paths = {}
    for name, step in (("first", 1), ("second", 2), ("second_again", 2)):
        paths[name] = tmp_path / name
        paths[name].mkdir()
        ledger = Ledger(paths[name], "digest")
        ledger.add("validation/rewards", torch.ones(3))
        ledger.commit(step)
    assert main([str(paths["first"]), str(paths["second"])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{paths['first']} has step 1 and {paths['second']} has step 2: none in common" in err
    assert "an evaluation has the step of its checkpoint" in err
    assert main([str(paths["second"]), str(paths["second_again"])]) == 0


def test_runs_whose_steps_do_not_overlap_are_not_comparable(make_run, capsys):
    a, b = make_run("a"), make_run("b", steps=5)
    Ledger(a, "digest").truncate_after(2)
    lines = (b / "ledger.jsonl").read_text().splitlines(keepends=True)
    (b / "ledger.jsonl").write_text("".join(lines[2:]))
    assert main([str(a), str(b)]) == 2
    assert f"{a} has steps from 1 to 2 and {b} has steps from 3 to 5: none in common" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"step": 2}\n', b'{"step": "x"}\n'])
@pytest.mark.parametrize(
    "file",
    ["manifest.json", "ledger.jsonl", "metrics.jsonl", "ledger/step_000002.json", "ledger/step_000002.safetensors"],
)
def test_a_damaged_run_is_not_comparable_and_its_file_is_named(make_run, capsys, file, content):
    a, b = make_run("a", record="full"), make_run("b", record="full", change=one_ulp)
    path = a / file
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    harmless = {  # whole but for a torn last line, or a step that says nothing
        "metrics.jsonl": (b"", b"{", b"[]", b"\xff\xfe", b'{"step": 2}\n'),
        "manifest.json": (b'{"step": 2}\n', b'{"step": "x"}\n'),
    }
    code = main([str(a), str(b)])
    err = capsys.readouterr().err
    if content in harmless.get(file, ()):
        assert code == 1, err
    else:
        assert code == 2, err
        assert str(a) in err


def test_a_torn_last_line_is_left_out_and_said(make_run, caplog, capsys):
    a, b = make_run("a"), make_run("b")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with open(a / name, "a") as file:
            file.write('{"step": 4, "x"')
    assert main([str(a), str(b)]) == 0
    assert f"{a / 'metrics.jsonl'}: the last line is torn" in caplog.text
    assert f"{a / 'ledger.jsonl'}: the last line is torn" in caplog.text


def test_any_number_of_runs_is_compared_to_the_first(make_run, capsys):
    runs = [str(make_run(name)) for name in "ab"] + [str(make_run("c", change=one_ulp))]
    assert main(runs) == 1
    out = capsys.readouterr().out
    assert out.count("SAME") == 1
    assert out.count("DIFFERENT") == 1


def test_json_for_machines(make_run, capsys):
    assert main([str(make_run("a")), str(make_run("b", change=one_ulp)), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["divergence"]["phase"] == "rollout_logprobs"
    assert found["grid"]["2"]["advantages"] is True


def test_the_report_is_one_file_without_outside_references(make_run, tmp_path):
    page, picture = tmp_path / "out" / "report.html", tmp_path / "out" / "curves.png"
    main([str(make_run("a")), str(make_run("b", change=one_ulp)), "--html", str(page), "--png", str(picture)])
    text = page.read_text()
    assert "first at step 2, phase rollout_logprobs" in text
    assert text.count('class="d"') == 1
    assert text.count('class="m"') == 0
    assert "http" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_phase_that_one_run_alone_has_is_grey_in_the_report(make_run, tmp_path):
    page = tmp_path / "report.html"
    assert main([str(make_run("a")), str(make_run("b", steps=2)), "--html", str(page)]) == 1
    text = page.read_text()
    assert (text.count('class="e"'), text.count('class="m"'), text.count('class="d"')) == (8, 4, 0)
    assert 'title="step 3, advantages, in one run only"' in text


def test_runs_without_ledgers_are_compared_by_metrics_but_never_by_wall_time(make_run, capsys):
    a, b = make_run("a"), make_run("b")
    for run in (a, b):
        (run / "ledger.jsonl").unlink()
    assert main([str(a), str(b)]) == 0
    lines = (b / "metrics.jsonl").read_text().replace("0.1,", "0.1000001,")
    (b / "metrics.jsonl").write_text(lines)
    assert main([str(a), str(b)]) == 1
    assert "phase critic/score/mean" in capsys.readouterr().out


def test_an_offline_wandb_directory_is_read(tmp_path, capsys):
    import wandb

    paths = []
    for name in ("a", "b"):
        session = wandb.init(
            dir=str(tmp_path / name), mode="offline", settings=wandb.Settings(silent=True, console="off")
        )
        session.log({"critic/score/mean": 0.25}, step=1)
        paths.append(session.dir.removesuffix("/files"))
        session.finish()
    assert main(paths) == 0
    assert "SAME: 1 steps" in capsys.readouterr().out


ROW = '{"_step": %d, "critic/score/mean": %s, "timing_s/step": %s}'


def test_online_wandb_runs_are_read_by_the_real_client(tmp_path):
    """Against a server on this machine that answers the client's queries."""
    first, third = ROW % (1, "0.30000000000000004", "2.5"), ROW % (3, "0.7", "2.5")
    histories = {
        "a": [first, ROW % (2, '"NaN"', "2.5"), third],
        "same": [first, ROW % (2, '"NaN"', "9.5"), third],
        "other": [first, ROW % (2, "0.5", "2.5"), third],
        "near": [ROW % (1, "0.3", "2.5"), ROW % (2, '"NaN"', "2.5"), third],
    }

    def compare(*names: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trainer.tools.cli", "compare", *(f"me/project/{name}" for name in names)],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=120,
        )

    with wandb_server.serve(histories) as address:
        settings = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "WANDB_CACHE_DIR": str(tmp_path)}
        same, other, near, missing = (compare("a", name) for name in ("same", "other", "near", "nowhere"))
    assert same.returncode == 0, same.stderr
    assert "SAME: 3 steps" in same.stdout
    assert other.returncode == 1
    assert "step 2, phase critic/score/mean" in other.stdout
    assert near.returncode == 1
    assert "step 1, phase critic/score/mean" in near.stdout
    assert missing.returncode == 2
    assert "me/project/nowhere: W&B could not be read" in missing.stderr


@pytest.mark.parametrize(
    ("a", "b", "distance"), [(1.0, 1.0, 0), (0.0, -0.0, 0), (1.0, 1.0000001192092896, 1), (1e-45, -1e-45, 2)]
)
def test_ulps_count_representable_values_across_zero(a, b, distance):
    assert ulps(torch.tensor(a), torch.tensor(b)) == distance


def test_signed_zeros_differ_in_bits_and_are_reported():
    found = tensor_difference(torch.tensor([0.0]), torch.tensor([-0.0]), "advantages", "advantages", [])
    assert found is not None
    assert (found.ulps, found.count) == (0, 1)


def test_shapes_are_reported_before_values():
    found = tensor_difference(torch.zeros(2), torch.zeros(3), "values", "values", [])
    assert found is not None
    assert "shape" in found.where


def test_manifest_differences_read_as_a_person_would_say_them():
    fields = [
        FieldDifference("config.seed", 0, 1),
        FieldDifference("processes.rollout/1", None, {"threads": 1}),
        FieldDifference("processes.rollout/0.threads", 1, 2),
        FieldDifference("processes.trainer/0.threads", 1, 2),
    ]
    assert field_lines(fields) == [
        "config.seed: 0 | 1",
        "processes only in B: rollout/1",
        "threads: 1 | 2  (in rollout/0, trainer/0)",
    ]
