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
from recording_platform import RecordingPlatform

from piecework.bench import gpu_ops
from piecework.bench.gpu_checks import _op_checks
from piecework.bench.gpu_engines import TINY
from piecework.kernels import reference


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
