"""Which beginnings of prompts an engine has computed lately, as far as who sends it requests can
know: SGLang's router keeps such a tree of texts for each server.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

BLOCK = 32
"""Tokens that are looked up at once."""


def block_hashes(tokens: Iterable[int]) -> list[int]:
    """A number for each whole block of a prompt that stands for it and all before it.

    By Python's hash of bytes, whose key no client knows: nobody can make two prompts one.
    """
    data = array("q", tokens).tobytes()
    width = BLOCK * 8
    found, before = list[int](), 0
    for end in range(width, len(data) + 1, width):
        before = hash((before, data[end - width : end]))
        found.append(before)
    return found


class PrefixIndex:
    """The blocks of one engine, of which those that were not used for longest are forgotten first.

    >>> index = PrefixIndex(1000)
    >>> index.add(block_hashes(prompt))
    >>> index.matched(block_hashes(longer_prompt)) * BLOCK  # tokens that are likely cached
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are known."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        """These are used now. The first of them last: an end is forgotten before its beginning."""
        kept = blocks[: self._most]
        for block in reversed(kept):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for _ in range(len(self._blocks) - self._most):
            del self._blocks[next(iter(self._blocks))]

    def bound(self, most: int) -> None:
        """Keep so many from the next time on that something is added."""
        self._most = most

    def clear(self) -> None:
        self._blocks.clear()
