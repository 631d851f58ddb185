"""`piecework bench graphs` on a tiny model: every part measures, and what it tells is what it
did.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from piecework.bench.graph_faults import FAULTS, WITHOUT, watch
from piecework.bench.graphs import Row
from piecework.cli.main import main

FLAGS = [
    "--compiler",
    "eager",
    "--num-threads",
    "1",
    "--dtype",
    "float32",
    "--repeats",
    "2",
    "--starts",
    "1",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def measure(path: Path, *flags: str) -> int:
    return main(["bench", "graphs", "--model-path", str(path), *FLAGS, *flags])


@pytest.mark.slow
def test_steps_and_compile_times(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--parts",
        "prefill,decode,compile",
        "--prefill",
        "5,9",
        "--batch-sizes",
        "2",
        "--context",
        "20",
        "--layers",
        "2,4",
    ]
    assert measure(path, *flags, "--json", str(tmp_path / "result.json")) == 0
    text = capsys.readouterr().out
    assert (
        "| prefill of 9 tokens | " in text
        and "| decode of 2 at 20 tokens each | " in text
        and "| 4 layers | " in text
    )
    result = json.loads((tmp_path / "result.json").read_text())
    rows = [row for table in result["tables"] for row in table["rows"]]
    assert len(rows) == 5
    assert all(row["first"] > 0 and row["second"] > 0 for row in rows)
    # A warm start neither traces nor compiles.
    assert all(row["ratio"] > 1 for row in rows[-2:])
    assert result["settings"]["layers"] == [2, 4]


@pytest.mark.slow
def test_seconds_until_ready(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(path, "--parts", "ready", "--json", "-") == 0
    printed = capsys.readouterr()
    (table,) = json.loads(printed.out)["tables"]
    assert [row["name"] for row in table["rows"]] == ["cold cache", "warm cache"]
    assert "| until ready | " in printed.err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="faults are seeded in g++")
@pytest.mark.parametrize(
    ("fault", "pieces"),
    [("one piece cannot be compiled", 3), ("no piece can be compiled", 0), ("little memory", 0)],
)
def test_a_stream_does_not_notice_that_pieces_cannot_be_compiled(
    path: Path, fault: str, pieces: int
) -> None:
    """A server that compiled, or waited for a compiler, would stand still for many seconds."""
    flags = ["--dtype", "float32", "--num-threads", "1"]
    stream = watch(str(path), FAULTS[fault], flags=flags)
    without = watch(str(path), WITHOUT, flags=flags, seconds=10.0)
    assert stream.pieces == pieces and without.pieces == 0
    assert stream.longest < max(2 * without.longest, 1.0)
    assert stream.compiled_for > 1.0


@pytest.mark.slow
def test_what_is_measured_leaves_no_trace_in_the_users_cache(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    assert measure(path, "--parts", "prefill", "--prefill", "4") == 0
    assert not (tmp_path / "cache").exists()


def test_the_ratio_is_of_the_least_times() -> None:
    assert Row(name="x", first=3.0, second=2.0, medians=(9.0, 1.0)).ratio == 1.5


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--parts", "prefil"], "is not a list of prefill,decode,compile,ready"),
        (["--prefill", "16,x"], "'x' is not a whole number"),
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--json", "/nowhere/x.json"], "there is no such folder"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bench", "graphs", *flags])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr().err
    assert code == 2 and printed.count("\n") == 1 and error in printed
