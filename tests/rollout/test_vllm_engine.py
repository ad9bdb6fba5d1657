"""The rollout engine: what it samples, what it reports, and that a weight update leaves nothing old behind."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema import SamplingConfig
from rollout.generations import NonFiniteLogprobError
from rollout.sampling import check_request, find_eos_token_ids, sampling_from_config
from rollout.types import GenerationRequest, SampleKey, Sampling
from rollout.vllm_engine import VLLMEngine
from rollout.weights import check_weights, checkpoint_shapes
from tests.engine_lab import burst, make_policy, make_tokenizer
from workers.launch.group import WorkerError
from workers.vllm_process import check_engine_args


def versions(tmp_path_factory, tie: bool):
    """A checkpoint, the same architecture with other weights, and those weights by name."""
    old, new = (tmp_path_factory.mktemp(name) for name in ("old", "new"))
    make_policy(old, tie=tie, seed=1)
    model = make_policy(new, tie=tie, seed=2)
    return str(old), str(new), {name: value.detach() for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return versions(tmp_path_factory, tie=True)


@pytest.fixture(scope="module", params=["tied", "untied"])
def two_versions(request, tmp_path_factory, tied):
    return tied if request.param == "tied" else versions(tmp_path_factory, tie=False)


def one(prompt: tuple[int, ...] = (5, 6, 7), seed: int = 11, **sampling) -> GenerationRequest:
    settings = {"max_new_tokens": 8, "temperature": 1.0, **sampling}
    return GenerationRequest(SampleKey(0, 0), prompt, seed=seed, sampling=Sampling(**settings))


def without_version(generations):
    return [dataclasses.replace(g, weight_version=0) for g in generations]


def test_results_come_in_the_order_of_the_requests(lab, policy):
    requests = burst(9)[::-1]
    assert [g.key for g in lab.generate(model=policy[0], requests=requests)] == [r.key for r in requests]


def test_an_empty_batch_gives_nothing(lab, policy):
    assert lab.generate(model=policy[0], requests=[]) == []


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_requests_that_come_while_others_are_at_work_have_the_same_bits(lab, policy, steps):
    requests = burst(9)
    whole = lab.generate(model=policy[0], requests=requests)
    assert lab.while_at_work(model=policy[0], first=requests[:5], later=requests[5:], steps=steps) == whole


def test_requests_without_a_seed_draw_anew_each_time(stock_lab, policy):
    requests = [dataclasses.replace(request, seed=None) for request in burst(4, temperature=1.0, max_new_tokens=20)]
    assert len({g.token_ids for g in stock_lab.generate(model=policy[0], requests=requests)}) > 1
    first, second = (stock_lab.generate(model=policy[0], requests=requests) for _ in range(2))
    assert first != second


def test_logprobs_are_those_of_the_sampling_distribution():
    """By hand: log softmax([2, 0] / 0.5) at token 0; neither the raw -0.126928 nor raw/T."""
    assert math.log(1 / (1 + math.exp(-4))) == pytest.approx(-0.018150, abs=1e-6)


def test_the_sampler_applies_the_temperature_to_the_logprob(lab):
    drawn = lab.sample(logits=[2.0, 0.0], temperature=0.5, seeds=list(range(400)))
    by_token = dict(drawn)
    assert by_token[0] == pytest.approx(-0.018150, abs=1e-6)
    assert by_token[1] == pytest.approx(-4.018150, abs=1e-5)
    share = sum(token == 0 for token, _ in drawn) / len(drawn)
    assert share == pytest.approx(math.exp(-0.018150), abs=0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_engine_logprobs_are_those_of_transformers(lab, policy, temperature):
    path, model = policy
    requests = burst(6, temperature=temperature, top_p=1.0, top_k=0)
    for request, generation in zip(requests, lab.generate(model=path, requests=requests), strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=5e-5, rtol=0)


def test_nothing_is_inherited_from_the_generation_config(lab, policy, tmp_path):
    """The same weights with a repetition penalty and a top-k in the model directory sample the same bits."""
    path = tmp_path / "opinionated"
    shutil.copytree(policy[0], path)
    settings = {"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.3, "eos_token_id": [1, 9]}
    (path / "generation_config.json").write_text(json.dumps(settings))
    requests = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, ignore_eos=True)) for r in burst(12)]
    assert lab.generate(model=str(path), requests=requests) == lab.generate(model=policy[0], requests=requests)


def test_every_eos_of_the_model_ends_a_response(lab, policy):
    """Each id that a free run samples somewhere ends the response there when it is listed."""
    free = lab.generate(model=policy[0], requests=[one(max_new_tokens=12, ignore_eos=True)])[0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 12
    for place in (2, 7):
        ends = (free.token_ids[place], 1)
        ended = lab.generate(model=policy[0], requests=[one(max_new_tokens=12, stop_token_ids=ends, ignore_eos=True)])[
            0
        ]
        first = min(free.token_ids.index(token) for token in ends if token in free.token_ids)
        assert ended.finish_reason == "stop"
        assert ended.token_ids == free.token_ids[: first + 1]
        assert ended.logprobs == free.logprobs[: first + 1]


def test_a_stop_text_ends_a_response_and_keeps_its_tokens(lab, policy):
    free = lab.generate(model=policy[0], requests=[one(max_new_tokens=12, ignore_eos=True)])[0]
    text = make_tokenizer().decode(free.token_ids[3:5])
    ended = lab.generate(model=policy[0], requests=[one(max_new_tokens=12, ignore_eos=True, stop=(text,))])[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[:5]
    assert ended.logprobs == free.logprobs[:5]


def test_a_greedy_response_takes_the_likeliest_tokens(lab, policy):
    path, model = policy
    generation = lab.generate(model=path, requests=[one(temperature=0.0, ignore_eos=True)])[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, *generation.token_ids]])).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == list(generation.token_ids)


def test_a_temperature_that_vllm_would_raise_is_refused(lab, policy):
    with pytest.raises(WorkerError, match=r"0\.001"):
        lab.generate(model=policy[0], requests=[one(temperature=0.001)])


def test_new_weights_sample_what_a_fresh_engine_samples(lab, two_versions):
    old, new, tensors = two_versions
    before = lab.generate(model=old, requests=burst(16))
    fresh = lab.generate(model=new, requests=burst(16))
    lab.load(model=old, tensors=tensors, version=1)
    after = lab.generate(model=old, requests=burst(16))
    assert {g.weight_version for g in before} == {0}
    assert {g.weight_version for g in after} == {1}
    assert without_version(after) == fresh
    assert fresh != before
    assert lab.facts(model=old)["engine"]["weight_version"] == 1


def test_the_old_weights_bring_the_old_bits_back(lab, tied):
    old, _, tensors = tied
    fresh = lab.generate(model=old, requests=burst(16), name="there and back")
    back = load(old)
    lab.load(model=old, tensors=tensors, version=7, name="there and back")
    lab.load(model=old, tensors=back, version=8, name="there and back")
    assert without_version(lab.generate(model=old, requests=burst(16), name="there and back")) == fresh


@pytest.mark.parametrize("skipped", ["_mend_output_head", "_clear_prefix_cache"])
def test_an_update_without_one_of_its_steps_is_caught(lab, tied, skipped):
    """Either step left out gives other bits than a fresh engine: the comparison above can fail."""
    old, new, tensors = tied
    fresh = lab.generate(model=new, requests=burst(16))
    lab.generate(model=old, requests=burst(16), name=skipped)
    lab.load(model=old, tensors=tensors, version=1, skip=skipped, name=skipped)
    assert without_version(lab.generate(model=old, requests=burst(16), name=skipped)) != fresh
    lab.load(model=old, tensors=tensors, version=2, name=skipped)
    assert without_version(lab.generate(model=old, requests=burst(16), name=skipped)) == fresh


def test_an_incomplete_update_is_refused(lab, tied):
    old, _, tensors = tied
    partial = {name: value for name, value in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(WorkerError, match=r"missing: model\.norm\.weight"):
        lab.load(model=old, tensors=partial, version=1)


def load(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in sorted(Path(path).glob("*.safetensors")) for name, value in load_file(file).items()}


def test_an_update_with_other_names_or_shapes_is_refused(tmp_path):
    make_policy(tmp_path, hidden=64)
    shapes = checkpoint_shapes(tmp_path)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    check_weights(tensors, shapes)
    check_weights({**tensors, "lm_head.weight": torch.empty(100, 64)}, shapes)
    with pytest.raises(ValueError, match=r"unknown: model\.extra"):
        check_weights({**tensors, "model.extra": torch.empty(1)}, shapes)
    with pytest.raises(ValueError, match=r"wrong shape: model\.norm\.weight \(65,\) instead of \(64,\)"):
        check_weights({**tensors, "model.norm.weight": torch.empty(65)}, shapes)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="safetensors"):
        checkpoint_shapes(tmp_path)


def test_every_sampling_parameter_is_explicit():
    config = SamplingConfig(
        max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=["x"], stop_token_ids=[8, 2]
    )
    sampling = sampling_from_config(config, (5, 2))
    assert sampling == Sampling(9, 0.5, 0.9, 3, 0.1, stop=("x",), stop_token_ids=(2, 5, 8))


def test_ignoring_eos_keeps_only_the_configured_stops():
    assert sampling_from_config(SamplingConfig(ignore_eos=True, stop_token_ids=[8]), (1, 2)).stop_token_ids == (8,)


def test_eos_ids_come_from_the_tokenizer_and_the_generation_config(tmp_path):
    assert find_eos_token_ids(tmp_path, 4) == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2], "top_k": 20}')
    assert find_eos_token_ids(tmp_path, 4) == (2, 4, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert find_eos_token_ids(tmp_path, None) == (7,)


def test_a_model_without_eos_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no response could end"):
        find_eos_token_ids(tmp_path, None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="eos_token_id must be an integer"):
        find_eos_token_ids(tmp_path, None)


def test_requests_that_cannot_be_served_are_refused():
    for request in burst(8):
        check_request(request, 256)
    with pytest.raises(ValueError, match=r"3 prompt tokens \+ 8 new tokens = 11.*is 10"):
        check_request(one(), 10)
    with pytest.raises(ValueError, match="no tokens"):
        check_request(one(prompt=()), 10)


def test_a_logprob_that_is_not_finite_names_its_request():
    """What the engine gave must not be trained on, whatever made it (a broken checkpoint, an overflow in bfloat16)."""
    engine = object.__new__(VLLMEngine)
    engine._version, engine._dtype = 3, "bfloat16"
    logprobs = SimpleNamespace(logprobs=[-0.5, math.nan])
    completion = SimpleNamespace(finish_reason="stop", token_ids=[5, 6], logprobs=logprobs)
    with pytest.raises(
        NonFiniteLogprobError, match=r"task=0.*token 1 of the response \(id 6\).*nan under weights 3.*bfloat16"
    ):
        engine._generation(one(), SimpleNamespace(outputs=[completion]))


@pytest.mark.parametrize("key", ["max_num_seqs", "logprobs_mode", "generation_config", "seed"])
def test_an_engine_argument_that_a_setting_owns_is_refused(key):
    with pytest.raises(ValueError, match=rf"rollout\.engine_args\.{key}"):
        check_engine_args({key: 1}, "rollout.engine_args", full_determinism=False)


def test_an_engine_argument_that_breaks_batch_invariance_is_refused_under_full_determinism():
    check_engine_args({"quantization": "fp8"}, "rollout.engine_args", full_determinism=False)
    with pytest.raises(ValueError, match="level D3"):
        check_engine_args({"quantization": "fp8"}, "rollout.engine_args", full_determinism=True)


def test_an_unknown_engine_argument_is_refused_with_a_suggestion(lab, policy):
    with pytest.raises(WorkerError, match=r"max_num_seq_.*did you mean"):
        lab.generate(model=policy[0], requests=[one()], engine_args={"max_num_seq_": 4})


def test_facts_say_what_is_in_force(lab, policy):
    facts = lab.facts(model=policy[0], max_num_seqs=8)
    assert facts["threads"] == 1
    assert facts["engine"]["max_num_seqs"] == 8
    assert facts["engine"]["scheduling_policy"] == "priority"
    assert facts["engine"]["cpu_kernels"]["full_determinism"] is True
    assert facts["engine"]["cpu_kernels"]["norm"] == "fused"
    assert (
        facts["engine"]["cpu_kernels"]["norm_widths"]["stock"]
        == 0
        < facts["engine"]["cpu_kernels"]["norm_widths"]["fused"]
    )
    assert json.loads(json.dumps(facts)) == facts
