"""What steps are expected to cost, from the times of earlier ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from piecework.runtime.speculative import step_costs
from piecework.runtime.speculative.step_costs import DecodeCosts, StepCosts


def test_a_line_is_found_again() -> None:
    costs = StepCosts()
    costs.add(9, 50.0)
    assert not costs.is_known, "the first step also compiles"
    for step in range(200):
        rows = 1 + step % 7
        costs.add(rows, 0.010 + 0.002 * rows)
    assert costs.seconds(4) == pytest.approx(0.018, rel=0.01)
    assert costs.seconds(20) == pytest.approx(0.050, rel=0.01)
    assert costs.seconds_of_row == pytest.approx(0.002, rel=0.01)
    costs.add(4, 3.0)
    assert costs.seconds(4) == pytest.approx(0.018, rel=0.01), "a pause of the process counts"
    costs.forget()
    assert not costs.is_known
    costs.add(4, 0.036)
    assert costs.seconds_of_row == pytest.approx(0.004, rel=0.02), "the share of a row was lost"


def step_of(
    rows: int,
    began: float,
    *,
    decode: bool = True,
    overlapped: bool = False,
    proposals: bool = False,
) -> Any:
    return SimpleNamespace(
        num_tokens=rows,
        began=began,
        is_decode=decode,
        has_given_rows=False,
        has_proposals=proposals,
        is_overlapped=overlapped,
    )


def test_time_without_requests_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is cached but for its last token looks like a decode."""
    clock = 0.0
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock)
    costs = DecodeCosts()
    for number in range(6):
        clock += 600.0 if number == 3 else 0.002
        costs.read(step_of(1, clock - 0.002))
    assert costs.plain(1) == pytest.approx(0.002)


def test_overlapped_steps_have_a_time_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: clock)
    costs = DecodeCosts()

    def read(seconds: float, *, overlapped: bool, rows: int = 4, decode: bool = True) -> None:
        nonlocal clock
        began = clock
        clock += seconds
        costs.read(step_of(rows, began, decode=decode, overlapped=overlapped))

    for _ in range(20):
        read(0.010, overlapped=True)
    assert costs.plain(4) == pytest.approx(costs.verifying(4)) == pytest.approx(0.010)
    for rows in (2, 10) * 10:
        costs.drafted(0.5)
        read(0.5 + 0.012 + 0.001 * rows, overlapped=False, rows=rows)
        read(7.0, overlapped=False, decode=False)
    assert costs.plain(4) == pytest.approx(0.010), "steps alone count as overlapped"
    assert costs.verifying(6) == pytest.approx(0.018, rel=0.02), "drafts or prompts count"
    assert costs.of_row == pytest.approx(0.001, rel=0.05)
    for _ in range(step_costs._STEPS_KNOWN):
        read(0.005, overlapped=True)
    assert costs.verifying(4) == costs.plain(4) == pytest.approx(0.005, rel=0.1), (
        "an old time is never measured again"
    )


def test_many_requests_make_a_row_no_dearer() -> None:
    costs = [StepCosts() for _ in range(2)]
    for rows, each in zip((1, 32), costs, strict=True):
        for _ in range(20):
            each.add(rows, 0.010 + 0.0008 * (rows - 1))
    one, many = (each.seconds_of_row for each in costs)
    assert many == pytest.approx(one) == pytest.approx(0.0008)


def test_steps_with_proposals_may_be_further_from_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows are one block of a kernel, and nine are two."""
    now = 0.0
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: now)
    costs = DecodeCosts()
    for number in range(300):
        rows = 8 if number % 2 else 9 + number % 9
        began, now = now, now + (0.010 if rows == 8 else 0.014 + 0.001 * (rows - 8))
        costs.read(step_of(rows, began, proposals=rows > 8))
    assert costs.plain(8) == pytest.approx(0.010, rel=0.1)
    assert costs.verifying(8) == pytest.approx(0.014, rel=0.1)
    assert costs.of_row == pytest.approx(0.001, rel=0.2)
