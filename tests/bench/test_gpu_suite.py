"""The GPU suite, run on a CPU with tiny shapes: every part reports, and one that fails holds up no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piecework.bench import gpu_suite
from piecework.bench.gpu_report import markdown


def suite(output: Path, *flags: str, timeout: float = 250.0) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON that was written, and the Markdown beside it."""
    command = [sys.executable, "-m", "piecework.bench.gpu_suite", "--device", "cpu", "--tiny", "--output", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (written,) = output.glob("*.json")
    return done.returncode, json.loads(written.read_text()), written.with_suffix(".md").read_text()


def test_parts_report_and_a_failing_one_holds_up_no_other(tmp_path: Path) -> None:
    """A CPU records no graphs between two points, so a breakable prefill cannot be there."""
    code, report, page = suite(tmp_path, "--parts", "attention,prefill_off,prefill_breakable,decode_full,load_off,load_no_overlap")
    parts = report["parts"]
    assert code == 1
    assert {name: part["ok"] for name, part in parts.items()} == {
        "attention": True,
        "prefill_off": True,
        "prefill_breakable": False,
        "decode_full": True,
        "load_off": True,
        "load_no_overlap": True,
    }
    assert "needs a device that records graphs" in parts["prefill_breakable"]["error"]
    measured = parts["attention"]["result"]["rows"]
    assert len(measured) == 5 and all(row["native"] > 0 and row["torch"] > 0 for row in measured.values())
    assert "## Attention of one layer (ms)" in page and "| step | native | torch |" in page
    assert [row["tokens"] for row in parts["prefill_off"]["result"]["rows"]] == [16, 32]
    assert all(row["ms"] > 0 and row["flops"] > 0 and not row["replayed"] for row in parts["prefill_off"]["result"]["rows"])
    assert all(row["replayed"] and row["bytes"] > 0 for row in parts["decode_full"]["result"]["rows"])
    assert parts["load_off"]["result"]["output_tokens_per_second"] > 0 and parts["load_off"]["result"]["cached_share"] > 0.5
    assert parts["load_no_overlap"]["result"]["overlapped_steps"] == 0
    assert "## prefill_breakable failed" in page and "| batch | full |" in page


def test_diffusion_is_measured(tmp_path: Path) -> None:
    code, report, page = suite(tmp_path, "--parts", "diffusion_eager")
    result = report["parts"]["diffusion_eager"]["result"]
    assert code == 0 and result["step_ms"] > 0 and result["first_ms"] > 0
    assert "## Diffusion" in page and "| eager |" in page


def test_ops_are_measured_beside_the_copy_rate(tmp_path: Path) -> None:
    code, report, page = suite(tmp_path, "--parts", "floors,ops")
    measured = report["parts"]["ops"]["result"]
    assert code == 0 and measured["errors"] == {} and {row["tokens"] for row in measured["rows"]} == {1, 16}
    assert all(row["microseconds"]["torch"] > 0 and row["bytes"] > 0 for row in measured["rows"])
    assert "| op | tokens | torch |" in page and page.count("| gated activation |") == 2 and "%" in page.partition("| norm | 1 |")[2]


def test_each_version_of_an_op_has_its_column_and_the_share_of_its_floor() -> None:
    row = {"op": "norm", "tokens": 16, "bytes": 2e6, "microseconds": {"torch": 8.0, "sgl-kernel": 4.0}}
    results = {
        "floors": {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12},
        "ops": {"rows": [row], "errors": {"norm, x": "why"}},
    }
    about = dict.fromkeys(("device", "date", "scale", "python", "torch", "cuda", "triton", "piecework"), "x")
    page = markdown({"about": about, "parts": {name: {"ok": True, "seconds": 1.0, "result": result} for name, result in results.items()}})
    assert "| op | tokens | torch | sgl-kernel |" in page and "| norm | 16 | 8.00 25% | 4.00 50% |" in page and "- norm, x: why" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part(tmp_path: Path) -> None:
    code, report, page = suite(tmp_path, timeout=580.0)
    failed = [name for name, part in report["parts"].items() if not part["ok"]]
    assert failed == ["prefill_breakable"] and code == 1, report
    assert list(report["parts"]) == gpu_suite._part_names()
    assert all(check["ok"] for check in report["parts"]["correctness"]["result"]["checks"])
    assert report["parts"]["startup_warm"]["result"]["distinct_pieces"] == report["parts"]["startup_cold"]["result"]["distinct_pieces"] > 0
    for heading in ("Floors", "Correctness", "Prefill", "Decode", "Load in the shape of GSM8K", "Start-up", "Diffusion"):
        assert f"## {heading}" in page


def test_a_part_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    _, report, _ = suite(tmp_path, "--parts", "load_off,floors", "--budget", "0.2")
    assert "not done within 0 s" in report["parts"]["load_off"]["error"]
    assert report["parts"]["floors"]["error"] == "no time was left"


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--parts", "floors,speed"]) == 2
    assert "there is no speed; choose from floors" in capsys.readouterr().err


def test_the_page_sets_figures_beside_their_floors() -> None:
    def mode(ms: float, replayed: bool, graphs: int = 0) -> dict[str, Any]:
        row = {"tokens": 64, "ms": ms, "flops": 1e9, "replayed": replayed}
        return {
            "rows": [row],
            "distinct_pieces": 4,
            "graphs": graphs,
            "graph_bytes": 2**21,
            "capture_seconds": 1.0,
            "failed_sizes": {"64": "why"},
        }

    results = {
        "floors": {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12},
        "prefill_off": mode(4.0, False),
        "prefill_piecewise_eager": mode(2.0, True, 5),
        "prefill_breakable": mode(8.0, False),
    }
    about = dict.fromkeys(("device", "date", "scale", "python", "torch", "cuda", "triton", "piecework"), "x")
    page = markdown({"about": about, "parts": {name: {"ok": True, "seconds": 1.0, "result": result} for name, result in results.items()}})
    assert "| 64 | 4.000 25% | 2.000 (2.00x) 50% | 8.000 (0.50x) 12% * |" in page
    assert "| piecewise_eager | 4 | 5 | 2 | 1.0 | 64: why |" in page
