"""The families of docs/models.md: what the trainer computes and trains is what transformers does with the same files, and nothing random."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from configs.schema import FsdpConfig, OptimizerConfig
from rollout.weights import check_weights, checkpoint_shapes
from tests.workers.models._families import FAMILIES, GROUPED, HEADS, SIZES, WINDOW, save_family
from tests.workers.models._models import RatioLoss, SquaredLoss, batch, leaves_of, mini_batch
from tests.workers.models._ranks import on_ranks
from workers.checkpoint_files import PretrainedError
from workers.models.hf_config import load_config, refuse_randomness, switch_off_randomness
from workers.models.policy import PolicyModel, check_policy
from workers.models.pretrained import empty_model
from workers.models.sharding import rank_mesh
from workers.models.value import ValueModel, check_value

FSDP = FsdpConfig(leaf_size=4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {family: save_family(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def plain(saved, tmp_path_factory) -> dict[str, dict]:
    """One update of each, on one rank."""
    (results,) = on_ranks(1, tmp_path_factory.mktemp("plain"), trained, saved, FSDP)
    return results


def policy(path: str, fsdp: FsdpConfig = FSDP) -> PolicyModel:
    mesh = rank_mesh(dist.get_world_size(), "cpu")
    optim = OptimizerConfig(lr=1e-2)
    return PolicyModel(path, mesh, torch.device("cpu"), fsdp, temperature=1.0, full_determinism=True, optim=optim)


class Ratios(RatioLoss):
    """Remembers the first pass of training."""

    seen: list[torch.Tensor]

    def __call__(self, outputs, leaf, totals):
        self.seen.append(outputs.logprobs.detach().clone())
        return super().__call__(outputs, leaf, totals)


def trained(paths: dict[str, str], fsdp: FsdpConfig) -> dict[str, dict]:
    """Of each family: log-probabilities, those of the first pass in training, and the weights that leave after an update."""
    results = {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for family, path in paths.items():
        model = policy(path, fsdp)
        leaves = leaves_of(batch(8, 21), 4)
        logprobs = [pair[0] for pair in model.logprobs(leaves[rank::ranks])]
        loss = Ratios()
        object.__setattr__(loss, "seen", [])
        model.update([mini_batch(leaves, rank, ranks)], loss)
        results[family] = {"logprobs": logprobs, "first": loss.seen, "weights": dict(model.export())}
    return results


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_computes_what_transformers_computes_and_nothing_is_random(saved, plain, tmp_path, checkpointing):
    from transformers import AutoModelForCausalLM

    results = plain
    if checkpointing:
        (results,) = on_ranks(1, tmp_path, trained, saved, FsdpConfig(leaf_size=4, gradient_checkpointing=True))
    for family, result in results.items():
        model = AutoModelForCausalLM.from_pretrained(saved[family], attn_implementation="eager").eval()
        for leaf, logprobs, first in zip(leaves_of(batch(8, 21), 4), result["logprobs"], result["first"], strict=True):
            with torch.no_grad():
                rows = model(leaf.input_ids).logits.log_softmax(-1)[:, :-1]
            expected = rows.gather(2, leaf.input_ids[:, 1:, None])[:, :, 0]
            mask = leaf.mask[:, 1:]
            torch.testing.assert_close(logprobs[:, 1:][mask], expected[mask], atol=2e-5, rtol=0, msg=family)
            assert torch.equal(first, logprobs), f"{family}: the first ratio is not 1"


def test_two_ranks_do_the_same(saved, plain, tmp_path):
    """A layer that only one of them skipped would leave the other one waiting."""
    chosen = {family: saved[family] for family in ("OPT", "GPTNeoX", "Gemma2")}
    one, two = plain, on_ranks(2, tmp_path, trained, chosen, FSDP)
    for family in chosen:
        for rank in (0, 1):
            assert torch.equal(two[rank][family]["logprobs"][0], one[family]["logprobs"][rank])
        assert all(torch.equal(two[0][family]["weights"][n], w) for n, w in one[family]["weights"].items())


def test_weights_leave_under_the_names_of_the_files(saved, plain, tmp_path):
    """What the engines insist on, and what transformers reads back."""
    from transformers import AutoModelForCausalLM

    for family, result in plain.items():
        weights = result["weights"]
        check_weights(weights, checkpoint_shapes(saved[family]))
        stored = load_file(Path(saved[family]) / "model.safetensors")
        assert weights.keys() <= stored.keys(), family
        again = tmp_path / family
        shutil.copytree(saved[family], again)
        save_file({**stored, **weights}, again / "model.safetensors", metadata={"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
        assert not report["missing_keys"], family
        assert not report["unexpected_keys"], family
        assert all(
            not torch.equal(stored[name].float(), weights[name]) for name in weights if weights[name].dim() == 2
        ), family
        loaded = {weight.data_ptr(): weight for weight in model.parameters()}
        assert sum(map(torch.numel, loaded.values())) == sum(map(torch.numel, weights.values())), family


def values(paths: dict[str, str]) -> dict[str, bool]:
    finite = {}
    for family, path in paths.items():
        model = ValueModel(
            path,
            rank_mesh(1, "cpu"),
            torch.device("cpu"),
            FSDP,
            seed=1,
            full_determinism=True,
            optim=OptimizerConfig(),
            total_steps=1,
        )
        leaves = leaves_of(batch(4, 15), 4)
        before = model.values(leaves)[0]
        model.update([mini_batch(leaves, 0, 1)], SquaredLoss())
        finite[family] = bool(before.isfinite().all()) and not torch.equal(model.values(leaves)[0], before)
    return finite


def test_every_family_lends_its_backbone_to_a_critic(saved, tmp_path):
    (found,) = on_ranks(1, tmp_path, values, saved)
    assert found == dict.fromkeys(FAMILIES, True)
    for path in saved.values():
        check_value(path, "sdpa")


def test_softcapping_chooses_eager_and_says_so(saved, caplog):
    assert load_config(saved["Gemma2"], "sdpa")._attn_implementation == "eager"
    assert "Gemma2 needs attn_logit_softcapping=2.0, which sdpa does not compute" in caplog.text
    assert "fsdp.attention=eager" in caplog.text
    caplog.clear()
    assert load_config(saved["Gemma2"], "eager")._attn_implementation == "eager"
    assert load_config(saved["Llama"], "sdpa")._attn_implementation == "sdpa"
    assert not caplog.text


def test_a_model_for_which_transformers_has_no_sdpa_chooses_eager(tmp_path, caplog):
    from transformers import GraniteSWAConfig

    GraniteSWAConfig(**GROUPED).save_pretrained(tmp_path)
    assert load_config(tmp_path, "sdpa")._attn_implementation == "eager"
    assert "sinks" in caplog.text


def test_the_bound_matters_to_these_weights(saved, tmp_path):
    """Or the tests above would not notice that it is left out."""
    from transformers import AutoModelForCausalLM

    leaf = leaves_of(batch(4, 21), 4)[0]
    logits = [
        AutoModelForCausalLM.from_pretrained(saved["Gemma2"], attn_implementation=name)(leaf.input_ids).logits
        for name in ("eager", "sdpa")
    ]
    assert (logits[0] - logits[1]).abs().max() > 0.01


def test_random_settings_are_off_in_nested_configs_and_of_every_kind(tmp_path):
    from transformers import Gemma3Config

    text = {**HEADS, "sliding_window": WINDOW, "attention_dropout": 0.5}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attention_dropout": 0.25,
    }
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    named = (
        "router_jitter_noise",
        "drop_path_rate",
        "encoder_layerdrop",
        "activation_dropout",
        "stochastic_depth_prob",
        "moe_jitter_eps",
    )
    settings |= dict.fromkeys(named, 0.5)
    settings["text_config"]["input_jitter_noise"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = load_config(tmp_path, "sdpa")
    assert [getattr(config, name) for name in named] == [0.0] * len(named)
    assert config.text_config.input_jitter_noise == config.text_config.attention_dropout == 0.0
    assert config.vision_config.attention_dropout == 0.0


def test_what_a_models_own_code_drops_is_off_or_refused():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.regular = nn.Dropout2d(0.3)
            self.layer_drop = 0.25

    model = Own()
    switch_off_randomness(model)
    assert model.regular.p == 0.0
    assert not any(module.training for module in model.modules())
    with pytest.raises(PretrainedError, match=r"Own \(root\): layer_drop=0\.25"):
        refuse_randomness(model)


def test_old_files_with_rotary_frequencies_are_read(saved, tmp_path):
    shutil.copytree(saved["Llama"], tmp_path / "old")
    tensors = load_file(Path(saved["Llama"]) / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in (0, 1)}
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    check_policy(tmp_path / "old", "sdpa")
    check_value(tmp_path / "old", "sdpa")
    assert checkpoint_shapes(tmp_path / "old") == checkpoint_shapes(saved["Llama"])


def test_files_without_the_models_prefix_are_read(saved, tmp_path):
    """As the first GPT-2 files are; they hold their causal masks, too."""
    shutil.copytree(saved["GPT2"], tmp_path / "old")
    tensors = load_file(Path(saved["GPT2"]) / "model.safetensors")
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    short |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128) for i in (0, 1)}
    save_file(short, tmp_path / "old" / "model.safetensors")
    names = check_policy(tmp_path / "old", "sdpa")
    assert names["transformer.h.0.ln_1.weight"] == "h.0.ln_1.weight"
    assert set(names.values()) == checkpoint_shapes(tmp_path / "old").keys()


def test_renamed_tensors_are_found(saved):
    assert check_policy(saved["GPTNeoX"], "sdpa")["lm_head.weight"] == "embed_out.weight"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Mixtral", {**GROUPED, "num_local_experts": 4}),
        ("Qwen3Moe", {**HEADS, "num_experts": 4, "moe_intermediate_size": 32}),
        ("GptOss", {**HEADS, "num_local_experts": 4}),
    ],
)
def test_mixtures_of_experts_are_refused_by_name(tmp_path, family, settings):
    import transformers

    getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).save_pretrained(
        tmp_path
    )
    for check in (check_policy, check_value):
        with pytest.raises(PretrainedError, match=r"is a mixture of experts \(\w+, num_\w+=4\)"):
            check(tmp_path, "sdpa")


def test_models_without_positions_are_refused_by_name(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match="BloomForCausalLM takes no position_ids"):
        check_policy(tmp_path, "sdpa")


def test_tensors_that_transformers_would_join_are_refused(tmp_path, saved, monkeypatch):
    """None of the families has such; the table may grow."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, WeightConverter

    joined = WeightConverter(
        source_patterns=["mlp.gate_half.weight", "mlp.up_half.weight"],
        target_patterns="mlp.gate_proj.weight",
        operations=[Concatenate(dim=0)],
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [joined])
    shutil.copytree(saved["Llama"], tmp_path / "halves")
    tensors = load_file(Path(saved["Llama"]) / "model.safetensors")
    for name in [name for name in tensors if "gate_proj" in name]:
        whole = tensors.pop(name)
        tensors[name.replace("gate_proj", "gate_half")] = whole[:48].clone()
        tensors[name.replace("gate_proj", "up_half")] = whole[48:].clone()
    save_file(tensors, tmp_path / "halves" / "model.safetensors")
    with pytest.raises(PretrainedError, match=r"LlamaForCausalLM: transformers makes model\.layers\.0\.mlp\.gate_proj"):
        check_policy(tmp_path / "halves", "sdpa")


def test_the_documented_families_are_those_that_are_tested():
    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| .*?\| `(\w+?)(?:ForCausalLM|LMHeadModel)` ", table, re.MULTILINE))
    assert documented == {"Gemma3" if family == "Gemma3Text" else family for family in FAMILIES}


def test_sizes_leave_room_for_the_window():
    assert WINDOW < 21 <= SIZES["max_position_embeddings"]


def test_an_empty_model_is_in_evaluation_mode(saved):
    from transformers import AutoModelForCausalLM

    model = empty_model(AutoModelForCausalLM, load_config(saved["OPT"], "sdpa"))
    assert not any(module.training for module in model.modules())
    assert model.config.layerdrop == 0.0
