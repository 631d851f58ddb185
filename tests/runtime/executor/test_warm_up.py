"""The steps before the first request: every kind of attention is among them, and they leave the
cache as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model

from piecework.kernels import ops, reference
from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.executor import model_runner
from piecework.runtime.executor.model_runner import ModelRunner


@pytest.mark.parametrize("context", [4, 300])
def test_it_runs_each_kind_of_step_and_stores_nothing_where_requests_will(
    context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[list[int], list[int]]] = []

    class Noting(TorchAttention):
        def plan(self, metadata: AttentionMetadata, page_size: int) -> Any:
            planned.append((metadata.query_lens, metadata.seq_lens))
            return super().plan(metadata, page_size)

    class Compiling(CpuPlatform):
        compiles_kernels = True

        def make_attention_backend(self, name: str) -> TorchAttention:
            return Noting()

    sampled: list[tuple[int, ...]] = []
    monkeypatch.setattr(ops, "_versions", {})
    draw = reference.sample_filtered
    monkeypatch.setattr(
        reference,
        "sample_filtered",
        lambda probs, *filters: sampled.append(probs.shape) or draw(probs, *filters),
    )
    monkeypatch.setattr(model_runner, "detect", lambda device: Compiling())
    folder = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    runner = ModelRunner(
        EngineConfig(
            model_path=str(folder), context_length=context, max_total_tokens=512, device="cpu"
        ),
        progress=False,
    )
    prefills = [seq for new, seq in planned if max(new) > 1]
    decodes = [seq for new, seq in planned if max(new) == 1]
    assert sampled == [(1, runner.model_config.vocab_size)]
    assert prefills == [[min(context, tokens)] for tokens in (256, 48, 8)]
    assert [context] in decodes and any(len(seq) > 64 for seq in decodes)
    assert all(layer[0].any() and not layer[1:].any() for layer in [*runner.pool.k, *runner.pool.v])
