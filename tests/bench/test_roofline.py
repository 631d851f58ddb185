"""`piecework bench roofline`: floors are what a part has to do at least, and every part is in the
table.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from native_variants import needs_kernels
from tiny_models import make_tiny_model

from piecework.bench import roofline
from piecework.cli.main import main
from piecework.kernels.attention import AttentionMetadata, KVLayout
from piecework.kernels.cpu.native import peaks as native_peaks
from piecework.kernels.cpu.native.peaks import Peaks, measure_peaks

PEAKS = Peaks(triad=2e9, read=1e9, operations={"float32": 1e9, "int8": 4e9})


def metadata(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    nothing = torch.empty(0, dtype=torch.int64)
    return AttentionMetadata(
        query_lens=query_lens, seq_lens=seq_lens, block_table=nothing, slot_mapping=nothing
    )


def test_attention_reads_each_key_once_and_multiplies_the_causal_half() -> None:
    layout = KVLayout.of_heads(4, 2, 8, torch.bfloat16)
    work = roofline._of_attention(layout, metadata([3, 1], [3, 10]), PEAKS)
    assert work.bytes == (3 + 10) * layout.token_bytes == (3 + 10) * 2 * 2 * 8 * 2
    assert work.operations == 2 * 4 * (8 + 8) * ((1 + 2 + 3) + 10)


@pytest.mark.parametrize(
    ("new", "rate", "numbers"),
    [(3, 2e9, "bfloat16"), (3, 5e8, "float32"), (1, 2e9, "float32")],
)
def test_only_prompts_are_held_to_the_rate_of_dot_products(
    new: int, rate: float, numbers: str
) -> None:
    layout = KVLayout.of_heads(4, 2, 8, torch.bfloat16)
    peaks = PEAKS._replace(operations=PEAKS.operations | {"bfloat16": rate})
    assert roofline._of_attention(layout, metadata([new], [10]), peaks).numbers == numbers


def test_a_window_hides_what_is_before_it() -> None:
    layout = KVLayout.of_heads(4, 2, 8, torch.bfloat16, window=4)
    work = roofline._of_attention(layout, metadata([2], [10]), PEAKS)
    assert work.operations == 2 * 4 * (8 + 8) * (4 + 4)
    assert work.bytes == 6 * layout.token_bytes


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    row = roofline._row("part", "step", 2.0, roofline.Work(1e9, 6e9, "int8"), PEAKS)
    assert (row.of_bandwidth, row.of_peak, row.of_floor) == (0.25, 0.75, 0.75)


@needs_kernels
def test_peaks_are_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_peaks, "_STREAM_BYTES", 2**24)
    monkeypatch.setattr(native_peaks, "_SECONDS", 0.005)
    peaks = measure_peaks(rounds=2)
    assert peaks is not None and peaks.triad > 1e8 and peaks.read > 1e8
    # Slower than a thousand million a second is no loop of multiply-adds; faster than a thousand
    # times that, a core, is one that the compiler left out.
    most = 1e13 * torch.get_num_threads()
    assert all(1e9 < rate < most for rate in peaks.operations.values())


@pytest.mark.slow
@needs_kernels
def test_every_part_of_every_step_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_peaks, "_STREAM_BYTES", 2**20)
    monkeypatch.setattr(native_peaks, "_SECONDS", 0.001)
    path = make_tiny_model(tmp_path / "model")
    steps = ["--batch-sizes", "1,2", "--prompt", "20", "--context", "18", "--rounds", "1"]
    written = tmp_path / "roofline.json"
    flags = [
        *steps,
        "--compiler",
        "eager",
        "--plot",
        str(tmp_path / "roofline.png"),
        "--json",
        str(written),
    ]
    assert main(["bench", "roofline", "--model-path", str(path), *flags]) == 0
    rows = json.loads(written.read_text())["rows"]
    parts = {row["part"].partition(" ")[0] for row in rows}
    assert parts == {*("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")} | {
        *("attention,", "whole")
    }
    assert {row["step"] for row in rows} == {"decode of 1", "decode of 2", "prompt of 20"}
    assert all(row["seconds"] > 0 and row["of_floor"] > 0 for row in rows)
    assert "| decode of 2 | whole step | " in capsys.readouterr().out
    assert (tmp_path / "roofline.png").stat().st_size > 0
