"""The time that saving evicted blocks may take."""

from __future__ import annotations

import pytest

from piecework.runtime.tiers.saving_budget import SavingBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def saved(budget: SavingBudget, clock: Clock, seconds: int) -> float:
    """Return the seconds that saving took, if each second of traffic evicts blocks of 0.1 s."""
    taken = 0.0
    for _ in range(seconds):
        clock.now += 1
        if budget.may_save:
            budget.spend(0.1)
            taken += 0.1
    return taken


def test_traffic_that_never_repeats_pays_a_share_of_the_time_after_the_initial_credit() -> None:
    budget = SavingBudget(clock := Clock())
    assert saved(budget, clock, 1000) == pytest.approx(2 + 10, abs=0.4)
    assert saved(budget, clock, 10_000) == pytest.approx(100, abs=0.4)


def test_saving_that_stopped_begins_again_with_enough_for_many_blocks() -> None:
    budget = SavingBudget(clock := Clock())
    budget.spend(3)
    assert not budget.may_save
    clock.now += 120
    assert not budget.may_save
    clock.now += 10
    assert budget.may_save
    budget.spend(0.2)
    assert budget.may_save


def test_loads_that_gain_time_pay_for_saving() -> None:
    budget = SavingBudget(clock := Clock())
    taken = 0.0
    for _ in range(100):
        taken += saved(budget, clock, 10)
        budget.gain(1.0)
    assert taken == pytest.approx(100)


def test_credit_is_limited_however_long_the_engine_was_idle_and_however_much_loads_gained() -> None:
    budget = SavingBudget(clock := Clock())
    clock.now += 1e6
    assert saved(budget, clock, 30) == pytest.approx(2.2, abs=0.11)
    budget.gain(1e6)
    assert saved(budget, clock, 100) == pytest.approx(10)
    assert saved(budget, clock, 100) < 1.5
