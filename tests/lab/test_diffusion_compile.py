"""The measurement of compiled diffusion transformers, end to end with one tiny pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecework.lab.diffusion_compile import MODES, main, table


def test_the_table_has_a_line_for_each_mode() -> None:
    rows = [
        {
            "blocks": 12,
            "mode": mode,
            "first_s": 1.5,
            "step_ms": 20.0,
            "total_s": 1.88,
            "compile": None,
        }
        for mode in MODES
    ]
    lines = table(rows).splitlines()
    assert lines[2:] == [
        f"| 12 | {mode} | 1.50 s | 20.0 ms | 1.88 s |" for mode in ("eager", "full", "regional")
    ]


@pytest.mark.slow
def test_a_small_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert (
        main(
            [
                "--blocks",
                "1",
                "--heads",
                "1",
                "--head-dim",
                "8",
                "--side",
                "32",
                "--frames",
                "1",
                "--rounds",
                "2",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    rows = {row["mode"]: row for row in json.loads(file.read_text())}
    assert list(rows) == list(MODES)
    assert all(row["first_s"] > 0 and row["step_ms"] > 0 for row in rows.values())
    assert rows["eager"]["compile"] is None
    assert rows["regional"]["compile"]["regions"] == {"WanTransformerBlock": 2}
    assert rows["regional"]["compile"]["graphs_built"] == 1
