"""Finds where the last tokens of a text occurred before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LENGTH = 3  # Tokens that must agree at least.
LONGEST = 32  # Longest agreement that is measured.
_CANDIDATES = 4  # Latest places that are compared.
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


class Ngrams:
    """The places of all runs of `LENGTH` tokens in a text that grows at its end.

    The text that is there at the beginning is sorted by numpy, which takes 0.1 µs a token. Later
    tokens are entered into a dict, 1 µs a token.
    """

    def __init__(self, tokens: npt.NDArray[np.int64]) -> None:
        self.tokens: list[int] = tokens.tolist()
        self._later: dict[int, int] = {}
        last = len(tokens) - LENGTH + 1
        hashes = np.zeros(max(0, last), np.uint64)
        for offset in range(LENGTH if last > 0 else 0):
            hashes = (hashes ^ tokens[offset : offset + last].astype(np.uint64)) * np.uint64(
                _FACTOR
            )
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._ends = order + LENGTH

    def append(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        end = len(self.tokens)
        if end >= LENGTH:
            self._later[_hash(self.tokens[-LENGTH:])] = end

    def find(self, tail: list[int]) -> tuple[int, int]:
        """Return the position after the longest of the latest occurrences of the end of `tail`, and
        the number of tokens that agree, at most `LONGEST`. (0, 0) if there is none.

        An occurrence at the end of the text itself does not count, because nothing follows it.
        """
        if len(tail) < LENGTH:
            return 0, 0
        key = _hash(tail[-LENGTH:])
        later = self._later.get(key, 0)
        begin, end = np.searchsorted(self._hashes, np.uint64(key), "left"), 0
        if begin < len(self._hashes) and self._hashes[begin] == key:
            end = int(np.searchsorted(self._hashes, np.uint64(key), "right"))
        places = [later, *self._ends[max(begin, end - _CANDIDATES) : end][::-1].tolist()]
        found = (0, 0)
        for place in places:
            if 0 < place < len(self.tokens):
                length = _agreement(self.tokens, place, tail)
                if length >= LENGTH and length > found[1]:
                    found = place, length
        return found


def _agreement(tokens: list[int], end: int, tail: list[int]) -> int:
    """Return how many last tokens of `tail` equal those before `end`."""
    most = min(LONGEST, end, len(tail))
    for count in range(most):
        if tokens[end - 1 - count] != tail[-1 - count]:
            return count
    return most


def _hash(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = ((value ^ token) * _FACTOR) & _MASK
    return value
