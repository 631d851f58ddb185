"""Prefixes that clients want kept: they outlast other traffic for a time, and deny it nothing."""

from __future__ import annotations

from typing import Any

import pytest

from piecework.runtime.cache.kinds import make_cache
from piecework.runtime.cache.kv_cache import KVCache
from piecework.runtime.cache.slabs import SharedPages
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams

PAGE, PAGES = 4, 41  # One page is reserved.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 6, "window_pages": PAGES},
    "shared": {"window": 6, "shared": SharedPages.of(1, 1, 1), "num_slabs": 2 * PAGES},
    "states": {"state_slots": 9},
}


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> KVCache:
    sizes = KINDS[request.param]
    return make_cache(PAGES, PAGE, share_prefixes=True, snapshot_tokens=PAGE, **sizes)


def text(number: int, pages: int = 5) -> list[int]:
    return [number] * (PAGE * pages) + [0]


def asked(
    cache: KVCache,
    tokens: list[int],
    keep: list[tuple[int, float]] | None = None,
    client: str = "",
) -> int:
    """Compute a prompt. Return how many of its tokens were found."""
    params = SamplingParams(max_new_tokens=1)
    message = GenerateRequest(
        rid="r", input_ids=tokens, params=params, keep=keep or [], client=client
    )
    request = Request(message, seed=0, stop_ids=frozenset(), max_tokens=1000)
    cache.attach(request)
    found = request.num_computed
    while request.num_computed < request.num_tokens:
        num_new = cache.limit(request, request.num_tokens - request.num_computed)
        assert cache.reserve(request, num_new), "a request finds no memory"
        cache.advance(request, num_new)
    cache.release(request)
    cache.check([])
    return found


def others(cache: KVCache, first: int, count: int = 20) -> None:
    for number in range(first, first + count):
        asked(cache, text(number))


def test_a_pinned_prefix_outlasts_other_traffic_for_its_time(cache: KVCache) -> None:
    asked(cache, text(1), [(PAGE * 5, 300)])
    asked(cache, text(2))
    others(cache, 10)
    assert (asked(cache, text(1)), asked(cache, text(2))) == (PAGE * 5, 0)
    cache.pins_clock.now += 299
    others(cache, 40)
    assert asked(cache, text(1), [(PAGE * 5, 300)]) == PAGE * 5  # Pinned again.
    cache.pins_clock.now += 299
    others(cache, 70)
    assert asked(cache, text(1)) == PAGE * 5
    cache.pins_clock.now += 2
    others(cache, 100)
    assert asked(cache, text(1)) == 0


def test_only_the_part_that_was_asked_for_is_kept(cache: KVCache) -> None:
    system = [7] * (PAGE * 3)
    asked(cache, system + text(1), [(PAGE * 3 + 1, 300)])
    others(cache, 10)
    assert asked(cache, system + text(1)) == asked(cache, system + text(2)) == PAGE * 3


def test_two_ends_have_two_times(cache: KVCache) -> None:
    system = [7] * (PAGE * 2)
    asked(cache, system + text(1, 3), [(PAGE * 2, 3600), (PAGE * 5, 300)])
    others(cache, 10)
    assert asked(cache, system + text(1, 3)) == PAGE * 5
    cache.pins_clock.now += 301
    others(cache, 40)
    assert asked(cache, system + text(2, 3)) == PAGE * 2


def test_a_client_that_pins_everything_leaves_half_to_others(cache: KVCache) -> None:
    for number in range(100, 160):
        asked(cache, text(number), [(PAGE * 5, 86400)])
    for number in range(3):
        asked(cache, text(number))
    assert [asked(cache, text(number)) for number in range(3)] == [PAGE * 5] * 3
    # A later pin of another client is kept instead of the first ones.
    asked(cache, text(5), [(PAGE * 5, 300)])
    others(cache, 10)
    assert asked(cache, text(5)) == PAGE * 5


def test_a_client_displaces_its_own_pins_before_those_of_others(cache: KVCache) -> None:
    """Half of the cache holds four of these prefixes."""
    asked(cache, text(1), [(PAGE * 5, 300)], "small")
    for number in range(100, 160):
        asked(cache, text(number), [(PAGE * 5, 86400)], "large")
    others(cache, 10)
    assert asked(cache, text(1)) == PAGE * 5
    # It gets the share of the largest as it asks for more, and then displaces its own.
    for number in range(2, 5):
        asked(cache, text(number), [(PAGE * 5, 300)], "small")
    others(cache, 40)
    found = [asked(cache, text(number)) for number in (1, 2, 3, 4, 158, 159)]
    assert found[0] == 0 and found[-1] == PAGE * 5


def test_the_pages_of_windows_are_divided_among_clients_too() -> None:
    """Half of the windows' pages holds two of these prefixes, which have three pages each."""
    cache = make_cache(PAGES * 4, PAGE, share_prefixes=True, window=6, window_pages=17)
    asked(cache, text(1), [(PAGE * 5, 300)], "small")
    for number in range(100, 110):
        asked(cache, text(number), [(PAGE * 5, 300)], "large")
    others(cache, 10)
    assert asked(cache, text(1)) == PAGE * 5


def test_what_two_clients_pin_counts_for_the_longer_pin(cache: KVCache) -> None:
    """A short pin by the client that displaces its own pins displaces no other's."""
    asked(cache, text(1), [(PAGE * 5, 86400)], "small")
    asked(cache, text(1), [(PAGE * 5, 300)], "large")
    for number in range(100, 160):
        asked(cache, text(number), [(PAGE * 5, 300)], "large")
    others(cache, 10)
    assert asked(cache, text(1)) == PAGE * 5


def test_pins_in_small_steps_take_half_at_most(cache: KVCache) -> None:
    """A conversation that grows by a page has a node for each page."""
    for pages in range(1, 36):
        asked(cache, [8] * (PAGE * pages), [(PAGE * pages, 86400)])
    asked(cache, text(1))
    others(cache, 10, 2)
    assert asked(cache, text(1)) == PAGE * 5


def test_pinned_pages_are_evicted_if_no_others_are_left(cache: KVCache) -> None:
    for number in range(4):
        asked(cache, text(number), [(PAGE * 5, 86400)])
    asked(cache, text(9, pages=36))  # It fails if it finds no memory.


def test_a_flush_drops_pinned_pages_and_their_memory_is_free(cache: KVCache) -> None:
    asked(cache, text(1), [(PAGE * 5, 300)])
    assert cache.flush() == PAGE * 5
    cache.check([])
    assert all(manager.room.free == manager.room.total for manager in cache.managers)
    # The same text is not kept when it comes again.
    asked(cache, text(1))
    others(cache, 10)
    assert asked(cache, text(1)) == 0
