"""Remembers which prefixes of prompts were sent to an engine and are therefore likely cached there.

SGLang's router keeps a similar tree of texts for each server.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

BLOCK = 32  # Tokens of a block.


def block_hashes(tokens: Iterable[int], adapter: str = "") -> list[int]:
    """Return a hash for each full block of a prompt, over the block and all blocks before it, and
    over the identity of the adapter.

    Python's hash of bytes has a secret key, so clients cannot construct collisions.
    """
    data = array("q", tokens).tobytes()
    width = BLOCK * 8
    found, before = list[int](), hash(adapter)
    for end in range(width, len(data) + 1, width):
        before = hash((before, data[end - width : end]))
        found.append(before)
    return found


class PrefixIndex:
    """The blocks of one engine.

    >>> index = PrefixIndex(1000)
    >>> index.add(block_hashes(prompt))
    >>> index.matched(block_hashes(longer_prompt)) * BLOCK  # tokens that are likely cached

    The least recently used blocks are evicted first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are in the index."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """Add or touch blocks in reverse order, so that the end of a prompt is evicted first."""
        kept = blocks[: self._most]
        for block in reversed(kept):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for _ in range(len(self._blocks) - self._most):
            del self._blocks[next(iter(self._blocks))]

    def bound(self, most: int) -> None:
        """Set the maximum number of blocks. It takes effect at the next `add`."""
        self._most = most

    def clear(self) -> None:
        self._blocks.clear()
