"""The radix tree: it finds the longest cached prefix, never evicts what is locked, and evicts the
least recently used first.
"""

from __future__ import annotations

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.cache.radix import Node, RadixCache


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def put(cache: RadixCache, tokens: list[int], page_size: int = 1) -> Node:
    """Store the whole pages of `tokens`. Return the node where they end."""
    path = cache.extend(array(tokens[: len(tokens) // page_size * page_size]))
    return path[-1] if path else cache.root


@settings(deadline=None, max_examples=examples(100, exploring=200))
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3]))
def test_it_finds_what_a_list_of_prefixes_finds(data: st.DataObject, page_size: int) -> None:
    cache = RadixCache(page_size, [])
    known: list[list[int]] = []
    locked: list[Node] = []
    for tokens in data.draw(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)):
        expected = max((common_pages(tokens, other, page_size) for other in known), default=0)
        path, pages = cache.match(array(tokens))
        assert (pages, sum(node.num_pages for node in path)) == (expected, expected)
        node = put(cache, tokens, page_size)
        known.append(tokens)
        if data.draw(st.booleans()):
            cache.lock(node)
            locked.append(node)
        cache.check()
    distinct = {(*text[: end * page_size],) for text in known
                for end in range(1, len(text) // page_size + 1)}  # fmt: skip
    assert cache.total_pages == len(distinct)
    held = cache.total_pages - cache.evictable_pages
    assert cache.evict(10_000) == len(distinct) - held
    assert (cache.evictable_pages, cache.total_pages) == (0, held)
    for node in locked:
        cache.unlock(node)
    assert cache.evict(10_000) == held


def common_pages(a: list[int], b: list[int], page_size: int) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same // page_size


def test_the_least_recently_used_goes_first() -> None:
    cache = RadixCache(1, [])
    for start in (10, 20, 30):
        put(cache, [start, start + 1])
    cache.match(array([10, 11]))
    cache.evict(2)
    assert [cache.match(array([start, start + 1]))[1] for start in (10, 20, 30)] == [2, 0, 2]


def test_eviction_takes_no_more_than_asked_for_and_from_the_end() -> None:
    cache = RadixCache(2, [])
    put(cache, [1, 2, 3, 4, 5, 6], 2)
    assert cache.evict(1) == 1
    assert cache.match(array([1, 2, 3, 4, 5, 6]))[1] == 2


def test_many_uses_of_one_prefix_do_not_grow_the_heap() -> None:
    cache = RadixCache(1, [])
    put(cache, [1, 2, 3])
    for _ in range(1000):
        path, _ = cache.match(array([1, 2, 3]))
        cache.lock(path[-1])
        cache.unlock(path[-1])
    assert len(cache._idle) < 100
