"""The cheaper layers of the CPU engines: what they compute, that rows stand alone, and that the checks can fail."""

from __future__ import annotations

import os

import pytest
import torch

from determinism.cpu_layers import (
    fused_add_norm,
    fused_norm,
    norms_stand_alone,
    replace_norm,
    rows_stand_alone,
    silu_and_mul,
)

EPSILON = 1e-6


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """vLLM's compiled operators, which the functions under test call; what vLLM writes into the environment is taken back."""
    before = dict(os.environ)
    import vllm._custom_ops  # noqa: F401

    yield
    os.environ.clear()
    os.environ.update(before)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.double()


@pytest.mark.parametrize("width", [8, 32, 128, 576, 2560])
def test_the_fused_norm_is_exact_to_float32_rounding(width):
    x, residual, weight = numbers(7, width), numbers(7, width, seed=1), numbers(width, seed=2)
    torch.testing.assert_close(fused_norm(x, weight, EPSILON).double(), norm(x, weight), rtol=1e-6, atol=1e-7)
    total = x + residual
    normed, summed = fused_add_norm(x, residual, weight, EPSILON)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed.double(), norm(total, weight), rtol=1e-6, atol=1e-7)


def test_a_slice_of_a_wider_tensor_is_normed_as_if_it_were_alone():
    """Queries are a slice of the joint projection."""
    weight = numbers(32, seed=2)
    heads = numbers(5, 256)[:, :128].view(5, 4, 32)
    assert not heads.is_contiguous()
    assert torch.equal(fused_norm(heads, weight, EPSILON), fused_norm(heads.clone(), weight, EPSILON))
    unaware = torch.empty(5, 4, 32)
    torch.ops._C.rms_norm(unaware, heads, weight, EPSILON)
    if torch.equal(unaware, fused_norm(heads, weight, EPSILON)):
        pytest.skip("this build's kernel follows strides itself")


@pytest.mark.parametrize("width", [8, 32, 128, 576, 1000])
def test_rows_of_the_fused_norms_stand_alone(width):
    assert norms_stand_alone(width)


def scaled(x: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    """Rows divided by their length, whose squares are added one by one."""
    total = torch.zeros(x.shape[0])
    for term in (x * x).flip(-1 if backwards else ()).unbind(-1):
        total = total + term
    return x / total.sqrt()[:, None]


def sums_backwards_in_large_batches(x: torch.Tensor) -> torch.Tensor:
    return scaled(x, backwards=x.shape[0] > 8)


def moves_the_last_row(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[-1] += 1e-6 * (x.shape[0] > 1)
    return out


def mixes_rows(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@pytest.mark.parametrize("function", [sums_backwards_in_large_batches, moves_the_last_row, mixes_rows])
@pytest.mark.parametrize("width", [32, 576])
def test_the_self_test_catches_rows_that_depend_on_the_batch(function, width):
    assert rows_stand_alone(scaled, width)
    assert not rows_stand_alone(function, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_has_the_bits_of_vllms_own(dtype):
    x = numbers(9, 1280).to(dtype)
    before = x.clone()
    assert torch.equal(silu_and_mul(x), torch.nn.functional.silu(x[:, :640]) * x[:, 640:])
    assert torch.equal(x, before)
    assert torch.equal(silu_and_mul(x)[4:5], silu_and_mul(x[4:5]))


@pytest.fixture
def layers(monkeypatch):
    """RMSNorm with the fused kernels for the time of one test, and the widths they were tested at."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "__init__", RMSNorm.__init__)
    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)
    widths: dict[int, bool] = {}
    replace_norm(widths)
    with set_current_vllm_config(VllmConfig()):
        yield RMSNorm, widths


@pytest.mark.parametrize(
    ("width", "settings", "fused"),
    [
        (128, {}, True),
        (12, {}, False),  # not a multiple of eight
        (128, {"var_hidden_size": 64}, False),
        (128, {"has_weight": False}, False),
        (128, {"dtype": torch.bfloat16}, False),
    ],
)
def test_layers_that_do_not_fit_stay_stock(layers, width, settings, fused):
    make, widths = layers
    layer = make(width, EPSILON, **settings)
    assert layer.exactrl_fused == fused
    assert widths == ({128: True} if fused else {})
    x = numbers(5, width).to(settings.get("dtype", torch.float32))
    same = torch.equal(layer.forward_cpu(x), layer.forward_native(x))
    assert fused or same


def test_a_subclass_stays_stock(layers):
    make, widths = layers
    assert not type("Other", (make,), {})(128, EPSILON).exactrl_fused
    assert widths == {}


def test_a_bfloat16_input_of_a_float32_norm_stays_stock(layers):
    layer = layers[0](128, EPSILON)
    x = numbers(5, 128).bfloat16()
    assert torch.equal(layer.forward_cpu(x), layer.forward_native(x))


def test_a_width_whose_self_test_fails_stays_stock(layers, monkeypatch):
    monkeypatch.setattr("determinism.cpu_layers.norms_stand_alone", lambda width: False)
    make, widths = layers
    layer = make(128, EPSILON)
    assert widths == {128: False}
    x, residual = numbers(5, 128), numbers(5, 128, seed=1)
    expected = layer.forward_native(x.clone(), residual.clone())
    for found, wanted in zip(layer.forward_cpu(x, residual), expected, strict=True):
        assert torch.equal(found, wanted)
