"""What can be said of an engine before it is started."""

import pytest
import torch

from workers.vllm_process import check_dtype


@pytest.mark.parametrize("capable", [True, False])
def test_bfloat16_on_a_processor_without_it_is_refused_before_an_engine_starts(monkeypatch, capable):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: capable)
    check_dtype("float32", "cpu")
    check_dtype("bfloat16", "cuda")
    if capable:
        check_dtype("bfloat16", "cpu")
    else:
        with pytest.raises(ValueError, match=r"bfloat16 needs a processor with AVX-512.*use float32"):
            check_dtype("bfloat16", "cpu")
