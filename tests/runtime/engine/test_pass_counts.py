"""How often each pass matches with the default flags: the table of docs/graphs.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_models import Kind, write_gguf
from quantized_checkpoints import make_fp8
from tiny_models import make_tiny_model

from piecework.cli.explain import lines
from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.engine.explain import explain

pytestmark = pytest.mark.skipif(native_linear() is None, reason="no CPU kernels")
LAYERS = 2
SIZES = {"num_hidden_layers": LAYERS, "intermediate_size": 128}
QUANTISED = {"norm_quant": 2 * LAYERS, "silu_quant": LAYERS}
# Passes of every forward, which have no kernel of their own.
PLAIN = {"noop", "lower", "in_place"}


def llama(path: Path) -> Path:
    return make_tiny_model(path / "model", **SIZES)


def qwen3(path: Path) -> Path:
    return make_tiny_model(path / "model", "qwen3", **SIZES)


def gguf(path: Path) -> Path:
    write_gguf(llama(path), path / "model.gguf", "llama", Kind.Q8_0)
    return path / "model.gguf"


def static_fp8(path: Path) -> Path:
    return make_fp8(path, block=False, static=True, num_hidden_layers=LAYERS)


@pytest.mark.parametrize(
    ("make", "settings", "matches"),
    [
        pytest.param(llama, {}, {}, marks=pytest.mark.slow),
        (gguf, {}, {}),
        (qwen3, {}, {"norm_rotary": LAYERS}),
        (llama, {"quantization": "int8"}, QUANTISED),
        pytest.param(llama, {"quantization": "fp8"}, QUANTISED, marks=pytest.mark.slow),
        (static_fp8, {}, QUANTISED | {"attention_quant": LAYERS}),
        (llama, {"tp_size": 2}, {"allreduce_norm": 2 * LAYERS}),
        pytest.param(
            llama,
            {"tp_size": 2, "quantization": "int8"},
            QUANTISED | {"allreduce_norm": 2 * LAYERS},
            marks=pytest.mark.slow,
        ),
        (
            llama,
            {"tp_size": 2, "passes": "+sequence_parallel,+async_tp,sequence_parallel_tokens=32"},
            {"sequence_parallel": 2 * LAYERS + 1, "async_tp": 4 * LAYERS},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_matches(
    make: Callable[[Path], Path],
    settings: dict[str, Any],
    matches: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    config = EngineConfig(
        model_path=str(make(tmp_path)),
        dtype="bfloat16",
        piecewise_cuda_graph_compiler="eager",
        max_total_tokens=512,
        num_threads=1,
        **settings,
    )
    told = explain(config)
    found = told.forwards[-1].passes
    assert {name: n for name, n in found.items() if n and name not in PLAIN} == matches
    text = "\n".join(lines(told))
    assert all(f"{name} matched {count} times" in text for name, count in matches.items())
    fuses = any(row.passes.get("allreduce_norm") for row in told.forwards)
    assert ("allreduce_norm is computed by shared memory" in text) == fuses
