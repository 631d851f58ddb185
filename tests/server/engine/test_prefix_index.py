"""What is remembered of prompts is bounded, and never says of an engine what it was not given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecework.server.engine.prefix_index import BLOCK, PrefixIndex, block_hashes

PROMPTS = st.lists(
    st.lists(st.integers(0, 1), max_size=4).map(
        lambda blocks: [token for block in blocks for token in [block] * BLOCK]
    ),
    max_size=12,
)


@given(PROMPTS, st.integers(1, 6))
def test_what_it_says_was_there_and_it_holds_no_more_than_its_bound(
    prompts: list[list[int]], most: int
) -> None:
    index = PrefixIndex(most)
    for number, prompt in enumerate(prompts):
        told = index.matched(block_hashes(prompt)) * BLOCK
        assert any(prompt[:told] == before[:told] for before in [[], *prompts[:number]])
        index.add(block_hashes(prompt))
        assert len(index) <= most
        assert index.matched(block_hashes(prompt)) == min(most, len(prompt) // BLOCK)


def test_the_prompts_not_used_for_longest_are_forgotten_from_their_ends() -> None:
    first, second = [1] * BLOCK * 3, [2] * BLOCK * 2
    index = PrefixIndex(4)
    index.add(block_hashes(first))
    index.add(block_hashes(second))
    assert index.matched(block_hashes(first)) == index.matched(block_hashes(second)) == 2


def test_what_is_no_whole_block_is_not_looked_up() -> None:
    assert len(block_hashes([7] * (2 * BLOCK - 1))) == 1
    assert block_hashes([1] * BLOCK + [2] * BLOCK)[1] != block_hashes([2] * BLOCK * 2)[1]
