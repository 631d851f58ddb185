"""Blocks beside the pages of the tree: a prefix is resumed where each group has the last ones, and
none is lost, whoever holds, keeps or takes it back.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.runtime.cache.block_pool import Block, BlockGroup, BlockPool
from piecework.runtime.cache.radix import Node, RadixCache
from piecework.runtime.cache.slabs import PageAllocator, Slabs


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=8),
    spans=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    room=st.integers(1, 12),
    data=st.data(),
)
def test_a_prefix_is_resumed_where_every_group_has_its_last_blocks(
    prompts: list[list[int]], spans: list[int], room: int, data: st.DataObject
) -> None:
    """Beside pages of one token each, of which some get blocks, which later ones may take."""
    allocator = PageAllocator(Slabs(200))
    groups = [BlockGroup(BlockPool(PageAllocator(Slabs(room + 1))), span) for span in spans]
    cache = RadixCache(allocator.free, 1, groups=groups)
    for prompt in prompts:
        tokens = np.array(prompt, np.int64)
        pages, node = cache.match(tokens)
        cache.lock(node)
        new = allocator.allocate(len(prompt) - len(pages))
        assert new is not None
        columns: list[dict[int, Block]] = []
        for group in groups:
            places = data.draw(st.sets(st.integers(0, len(prompt) - 1), max_size=room))
            blocks = group.blocks.allocate(len(places))
            assert blocks is not None, "what only the tree keeps is taken back"
            columns.append(dict(zip(sorted(places), blocks, strict=True)))
        cache.insert(tokens, pages + new, columns)
        cache.unlock(node)
        for number, group in enumerate(groups):
            kept = [block for each in cache.nodes() for block in each.columns[number]]
            group.blocks.check(list(columns[number].values()), kept)
            for block in columns[number].values():
                group.blocks.let_go(block)
            group.blocks.check([], kept)
    for prompt in prompts:
        pages, node = cache.match(np.array(prompt, np.int64))
        path: list[Node] = []
        part = node
        while part.parent is not None:
            path.insert(0, part)
            part = part.parent
        whole = [
            [block.number > 0 for each in path for block in each.columns[number]]
            for number in range(len(groups))
        ]
        usable = [
            end
            for end in range(len(pages) + 1)
            if all(
                all(column[max(0, end - span) : end])
                for column, span in zip(whole, spans, strict=True)
            )
        ]
        found, _, ends = cache.resume(pages, node)
        assert found == pages[: max(usable)]
        assert [[block.number > 0 for block in column] for column in ends] == [
            [True] * min(len(found), span) for span in spans
        ]
    cache.evict(1000)
    for group in groups:
        group.blocks.check([], [])
