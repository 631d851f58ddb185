"""The radix tree: finds the longest cached prefix, never frees what is locked, evicts the least
recently used first.
"""

from __future__ import annotations

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.cache.radix import Node, RadixCache
from piecework.runtime.cache.slabs import PageAllocator, Slabs


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def put(cache: RadixCache, allocator: PageAllocator, tokens: list[int], page_size: int) -> Node:
    """Insert as a request does: match, lock, allocate the rest, insert, unlock; returns the
    node.
    """
    known, held = cache.match(array(tokens))
    cache.lock(held)
    rest = allocator.allocate(len(tokens) // page_size - len(known))
    assert rest is not None
    _, node = cache.insert(array(tokens), known + rest)
    cache.unlock(held)
    return node


@settings(deadline=None, max_examples=examples(100, exploring=200))
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3]))
def test_it_finds_what_a_list_of_prefixes_finds(data: st.DataObject, page_size: int) -> None:
    allocator = PageAllocator(Slabs(400))
    cache = RadixCache(allocator.free, page_size)
    known: list[list[int]] = []
    locked: list[Node] = []
    for tokens in data.draw(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12)):
        expected = max((common_pages(tokens, other, page_size) for other in known), default=0)
        pages, _ = cache.match(array(tokens))
        assert len(pages) == expected
        node = put(cache, allocator, tokens, page_size)
        known.append(tokens)
        if data.draw(st.booleans()):
            cache.lock(node)
            locked.append(node)
        in_tree = [page for entry in cache.nodes() for page in entry.pages]
        assert sorted(in_tree) == sorted(allocator.owned())
        assert cache.total_pages == len(in_tree)
        assert cache.evictable_pages == sum(
            len(entry.pages) for entry in cache.nodes() if entry.lock_count == 0
        )
    held = cache.total_pages - cache.evictable_pages
    assert cache.evict(10_000) == len(allocator.owned()) - held or cache.evictable_pages == 0
    assert (cache.evictable_pages, cache.total_pages) == (0, held)
    for node in locked:
        cache.unlock(node)
    cache.evict(10_000)
    assert not allocator.owned() and allocator.free_pages == 399


def common_pages(a: list[int], b: list[int], page_size: int) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same // page_size


def test_the_least_recently_used_goes_first() -> None:
    allocator = PageAllocator(Slabs(10))
    cache = RadixCache(allocator.free, 1)
    for start in (10, 20, 30):
        put(cache, allocator, [start, start + 1], 1)
    cache.match(array([10, 11]))
    cache.evict(2)
    assert [len(cache.match(array([start, start + 1]))[0]) for start in (10, 20, 30)] == [2, 0, 2]


def test_eviction_takes_no_more_than_asked_for_and_from_the_end() -> None:
    allocator = PageAllocator(Slabs(10))
    cache = RadixCache(allocator.free, 2)
    put(cache, allocator, [1, 2, 3, 4, 5, 6], 2)
    assert cache.evict(1) == 1
    assert len(cache.match(array([1, 2, 3, 4, 5, 6]))[0]) == 2


def test_many_uses_of_one_prefix_do_not_grow_the_heap() -> None:
    allocator = PageAllocator(Slabs(10))
    cache = RadixCache(allocator.free, 1)
    put(cache, allocator, [1, 2, 3], 1)
    for _ in range(1000):
        _, node = cache.match(array([1, 2, 3]))
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._idle) < 100
