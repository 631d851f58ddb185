"""The GPU suite's ops with several versions of them: each is timed and checked at what it takes,
and one that fails is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import library_ops_standin
import pytest
import torch
from gpu_pages import page_of
from recording_platform import RecordingPlatform

from piecework.bench import gpu_ops, gpu_quantized
from piecework.bench.gpu_checks import _op_checks, _quantized_checks
from piecework.bench.gpu_engines import TINY
from piecework.kernels import reference


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of no interest here."""
    monkeypatch.setattr(gpu_ops, "_CALLS", 3)


def no_product(*given: Any) -> torch.Tensor:
    return reference.scaled_linear(*given) * 2


def fails(*given: Any) -> Any:
    raise RuntimeError("no kernel image")


class ManyVersions(RecordingPlatform):
    """Its graphs record what is launched."""

    def op_versions(self) -> Mapping[str, Any]:
        libraries = {
            "sgl-kernel": library_ops_standin.sgl_kernel(),
            "flashinfer": library_ops_standin.flashinfer(),
        }
        return {"torch": reference, **libraries, "broken": SimpleNamespace(silu_and_mul=fails)}


def test_each_version_is_timed_at_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = ManyVersions()
    monkeypatch.setattr(gpu_ops, "detect", lambda device: platform)
    measured = gpu_ops.op_times(replace(TINY, dtype="bfloat16"), Path(), "cpu")
    versions = {row["op"]: list(row["microseconds"]) for row in measured["rows"]}
    assert versions == {
        "norm": ["torch", "sgl-kernel", "flashinfer"],
        "add and norm": ["torch"],
        "norm of heads": ["torch", "flashinfer"],
        "gated activation": ["torch", "sgl-kernel", "flashinfer"],
        "rotation": ["torch"],
    }
    assert list(measured["errors"]) == [
        f"gated activation, {tokens} tokens, broken" for tokens in (1, 16)
    ]
    assert platform.captures > 0 and platform.replays > platform.captures
    (norm,) = (row for row in measured["rows"] if row["op"] == "norm" and row["tokens"] == 16)
    assert norm["bytes"] == 2 * 16 * 64 * 2


def test_each_version_is_checked_at_what_it_takes() -> None:
    checks = {check.name: check for check in _op_checks(ManyVersions())}
    assert {name for name, check in checks.items() if not check.ok} == {
        f"silu_and_mul, {tokens} tokens, torch.{dtype}, broken"
        for tokens in (1, 33)
        for dtype in ("float32", "bfloat16")
    }
    for name in ("rms_norm", "silu_and_mul"):
        assert f"{name}, 33 tokens, torch.bfloat16, sgl-kernel" in checks
        assert f"{name}, 33 tokens, torch.float32, sgl-kernel" not in checks
    assert "rms_norm of heads, 1 tokens, torch.bfloat16, flashinfer" in checks
    assert "rms_norm of heads, 1 tokens, torch.bfloat16, sgl-kernel" not in checks


def test_quantised_products_and_fusions_are_timed_beside_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = ManyVersions()
    versions = platform.op_versions() | {"own": reference}
    monkeypatch.setattr(platform, "op_versions", lambda: versions)
    monkeypatch.setattr(gpu_quantized, "detect", lambda device: platform)
    measured = gpu_quantized.quantized_times(replace(TINY, dtype="bfloat16"), Path(), "cpu")
    assert measured["errors"] == {}
    kinds = {row["kind"]: row for row in measured["products"] if row["layer"] == "down"}
    assert list(kinds) == [
        "bfloat16",
        "FP8, scales of rows",
        "FP8, scales of blocks",
        "INT8, scales of rows",
        "8-bit weights",
        "4-bit weights",
    ]
    assert list(kinds["bfloat16"]["times"]) == ["torch"]
    assert list(kinds["4-bit weights"]["times"]) == ["own"]
    assert kinds["4-bit weights"]["bytes"] * 4 == kinds["bfloat16"]["bytes"]
    assert len(measured["fusions"]) == 14
    floors = {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12}
    page = page_of({"quantized": measured, "floors": floors})
    assert "| layer | tokens | numbers | torch | own |" in page
    assert "| norm and rotation of heads | 16 |" in page


def test_quantised_products_and_fusions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = ManyVersions()
    versions = {"broken": SimpleNamespace(scaled_linear=no_product)}
    monkeypatch.setattr(platform, "op_versions", lambda: versions)
    checks = {check.name: check.ok for check in _quantized_checks(platform)}
    wrong = {name for name, ok in checks.items() if not ok}
    kinds = ("FP8, scales of rows", "FP8, scales of blocks", "INT8, scales of rows")
    assert wrong == {
        f"{kind}, {tokens} tokens, broken" for kind in kinds for tokens in (1, 33, 200)
    }
    assert checks["4-bit weights, 33 tokens"] and checks["gate, quantise groups, 200 tokens"]
