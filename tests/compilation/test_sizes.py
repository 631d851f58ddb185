"""Capture sizes: the default list, the user's, and the best for what was seen."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.compilation.sizes import (
    SizesOption,
    best_sizes,
    choose_sizes,
    default_sizes,
    padding,
    padding_share,
    parse_sizes,
    thin,
    within_budget,
)

histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=9)


def test_default_list_is_sglangs() -> None:
    assert default_sizes(4096)[:8] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert default_sizes(4096)[8:10] == [48, 64]
    assert len(default_sizes(4096)) == 8 + 14 + 8 + 8 + 12
    assert default_sizes(5120)[-3:] == [4096, 4608, 5120]


@given(st.integers(1, 20000))
def test_default_list_ends_at_the_cap(cap: int) -> None:
    sizes = default_sizes(cap)
    assert sizes[-1] == cap
    assert sizes == sorted(set(sizes))


@given(histograms, st.integers(1, 5))
def test_best_sizes_waste_no_more_than_any_others(seen: dict[int, int], count: int) -> None:
    lengths = sorted(seen)
    subsets = (
        subset
        for size in range(1, count + 1)
        for subset in combinations(lengths, size)
        if subset[-1] == lengths[-1]
    )
    least = min(padding(subset, seen) for subset in subsets)
    sizes = best_sizes(seen, count)
    assert len(sizes) <= count
    assert sizes[-1] == lengths[-1]
    assert padding(sizes, seen) == least


@given(histograms)
def test_a_size_a_length_wastes_nothing(seen: dict[int, int]) -> None:
    assert padding(best_sizes(seen, len(seen)), seen) == 0


def test_thousands_of_lengths_are_quick() -> None:
    seen = {length: 1 + length * 7919 % 13 for length in range(1, 4097)}
    assert len(best_sizes(seen, 32)) == 32


@given(st.sets(st.integers(1, 500), min_size=1), st.integers(1, 40))
def test_thinning_keeps_the_largest_and_the_count(sizes: set[int], count: int) -> None:
    kept = thin(list(sizes), count)
    assert len(kept) == min(count, len(sizes))
    assert set(kept) <= sizes
    assert kept[-1] == max(sizes)


@given(st.sets(st.integers(1, 500), min_size=1), st.integers(1, 60), st.integers(100, 2000))
def test_graphs_stay_within_the_budget(sizes: set[int], graphs_per_size: int, budget: int) -> None:
    assert len(within_budget(list(sizes), graphs_per_size, budget)) * graphs_per_size <= budget


def test_no_budget_keeps_all() -> None:
    assert within_budget([4, 8], 1000, None) == [4, 8]


def test_padding_share() -> None:
    assert padding([16, 64], {10: 2, 64: 1, 100: 3}) == 12
    assert padding_share([16], {12: 1}) == 0.25
    assert padding_share([16], {}) == 0.0


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (None, SizesOption()),
        ("64,16, 16", SizesOption(given=(16, 64))),
        ("4 8", SizesOption(given=(4, 8))),
        ("auto:12", SizesOption(auto=12)),
    ],
)
def test_the_flag_says(text: str | None, option: SizesOption) -> None:
    assert parse_sizes(text) == option


@pytest.mark.parametrize("text", ["", "auto:", "auto:0", "auto:x", "0,4", "-4", "16;64", "1.5"])
def test_a_wrong_flag_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="takes numbers of tokens"):
        parse_sizes(text)


def test_given_sizes_are_cut_at_the_cap() -> None:
    assert choose_sizes(SizesOption(given=(16, 64, 4096)), 128, {}) == [16, 64]


def test_auto_without_history_spreads_over_the_default_list() -> None:
    sizes = choose_sizes(SizesOption(auto=5), 1024, {})
    assert len(sizes) == 5
    assert set(sizes) <= set(default_sizes(1024))


def test_auto_goes_by_what_was_seen_below_the_cap() -> None:
    assert choose_sizes(SizesOption(auto=2), 100, {30: 5, 31: 1, 90: 2, 5000: 9}) == [31, 90]
