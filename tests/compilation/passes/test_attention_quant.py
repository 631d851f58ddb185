"""Attention writes FP8 where nothing else reads its result, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from quantized_models import ARCHITECTURES, CONTEXT, LAYERS, ours, run, traced_model

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.common.attention_quant import AttentionQuant
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.split import split
from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.reference import quantize_static
from piecework.runtime.cache.pool import KVPool
from piecework.runtime.core.forward_context import PagedAttention

ATTENTION_QUANT = AttentionQuant()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_attention_takes_its_quantisation_in(architecture: str) -> None:
    found = traced_model(architecture, "static fp8")
    before = {tokens: run(found, tokens) for tokens in (1, 4, 17)}
    quantised = ours(found.graph)["quantize_static"]
    assert ATTENTION_QUANT(found.graph, CONTEXT) == LAYERS
    found.graph.lint()
    found.shapes.check_guards()
    after = ours(found.graph)
    assert after["attention"] == 0 and after["attention_quantize"] == LAYERS
    assert after["quantize_static"] == quantised - LAYERS
    for tokens, expected in before.items():
        assert torch.equal(run(found, tokens), expected)
    assert ATTENTION_QUANT(found.graph, CONTEXT) == 0


@pytest.mark.parametrize("scheme", [None, "static int8", "per token int8", "blocks fp8"])
def test_what_attention_cannot_write_stays(scheme: str | None) -> None:
    graph = traced_model("llama", scheme).graph
    assert ATTENTION_QUANT(graph, CONTEXT) == 0


def test_the_forward_is_cut_at_it() -> None:
    found = traced_model("llama", "static fp8")
    ATTENTION_QUANT(found.graph, CONTEXT)
    cut = split(found, [value for value in found.values if _is_input(value)])
    names = [call.name for call in cut.calls if hasattr(call, "name")]
    assert names == ["piecework::attention_quantize"] * LAYERS
    assert "float8_e4m3fn" in {spec.dtype for spec in cut.specs.values() if not spec.weight}


def _is_input(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_op_is_attention_and_then_quantisation(dtype: torch.dtype) -> None:
    tokens, layout = 5, KVLayout.of_heads(4, 2, 16, torch.bfloat16)
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 16).bfloat16() for heads in (4, 2, 2))
    scale = torch.tensor([0.01])
    results = []
    for op in ("attention", "attention_quantize"):
        pool = KVPool([layout], num_pages=3, page_size=4, platform=CpuPlatform())
        metadata = AttentionMetadata(
            query_lens=[tokens],
            seq_lens=[tokens],
            block_table=torch.tensor([[1, 2]]),
            slot_mapping=torch.arange(4, 4 + tokens),
        )
        out = torch.empty(tokens, 4, 16, dtype=torch.bfloat16 if op == "attention" else dtype)
        extra = () if op == "attention" else (scale,)
        with PagedAttention(backend=TorchAttention(), pool=pool).step(metadata):
            getattr(torch.ops.piecework, op)(q, k, v, out, *extra, 0)
        results.append(out)
    expected = quantize_static(results[0].flatten(1), scale, dtype)
    assert results[0].isfinite().all()
    assert torch.equal(results[1].flatten(1).float(), expected.float())


class PlainTorch(CpuPlatform):
    """A CPU for which no kernels can be compiled."""

    def quantized_attention_obstacle(self) -> str | None:
        return "attention in plain torch writes 16 bits"


def test_it_is_off_with_a_reason_unless_it_is_asked_for() -> None:
    manager = PassManager(PassConfig(), PlainTorch(), fuses=True)
    assert manager.off["attention_quant"] == "attention in plain torch writes 16 bits"
    asked = PassManager(PassConfig(attention_quant=True), PlainTorch(), fuses=True)
    assert "attention_quant" in asked.key and "attention_quant" not in asked.off
