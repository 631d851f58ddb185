"""The histogram of step lengths survives restarts and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecework.compilation.histogram import LengthHistogram


def seen(path: Path, *lengths: int) -> LengthHistogram:
    histogram = LengthHistogram(path)
    for length in lengths:
        histogram.add(length)
    histogram.save()
    return histogram


def test_a_restart_knows_earlier_lengths(tmp_path: Path) -> None:
    seen(tmp_path / "lengths.json", 7, 7, 7, 7, 100)
    assert LengthHistogram(tmp_path / "lengths.json").counts == {7: 2, 100: 1}


def test_what_is_seen_now_outweighs_what_was_seen_long_ago(tmp_path: Path) -> None:
    seen(tmp_path / "lengths.json", *[7] * 8)
    for _ in range(4):
        histogram = seen(tmp_path / "lengths.json", 9, 9)
    assert histogram.counts[9] > histogram.counts[7]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"7": "y"}', '{"7": null}', "7"])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths.json").write_text(text)
    assert seen(tmp_path / "lengths.json", 5).counts == {5: 1}
