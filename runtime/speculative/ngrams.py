"""Finds where the last tokens of a text occurred before."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

LENGTH = 3  # Tokens that must agree at least.
LONGEST = 32  # Longest agreement that is measured.
_CANDIDATES = 4  # Latest places that are compared.
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_NO_PLACES = np.empty(0, np.uint64)
_POSITION = 32  # Bits of a position, which follow those of a hash.


class Ngrams:
    """The places of all runs of `LENGTH` tokens in a text that grows at its end.

    The text that is there at the beginning is sorted by numpy. It takes 12 bytes and 0.1 µs a
    token. Later tokens are entered into a dict, 1 µs a token.
    """

    def __init__(self, tokens: npt.NDArray[np.int64]) -> None:
        self.tokens = array("i", tokens.astype(np.int32).tobytes())
        self._later: dict[int, int] = {}
        last = max(0, len(tokens) - LENGTH + 1)
        hashes = np.zeros(last, np.uint64)
        for offset in range(LENGTH):
            hashes ^= tokens[offset : offset + last].astype(np.uint64)
            hashes *= np.uint64(_FACTOR)
        # The first half of a hash, and the position after the run.
        hashes >>= np.uint64(_POSITION)
        hashes <<= np.uint64(_POSITION)
        hashes |= np.arange(LENGTH, LENGTH + last, dtype=np.uint64)
        hashes.sort()
        self._places = hashes.data

    def append(self, token: int, key: int | None = None) -> None:
        """Append a token. `key` is that of the run which ends with the token, if it is known."""
        self.tokens.append(token)
        end = len(self.tokens)
        if end >= LENGTH:
            self._later[key_of(*self.tokens[-LENGTH:]) if key is None else key] = end

    def clear(self) -> None:
        """Drop the text."""
        self.tokens, self._later, self._places = array("i"), {}, _NO_PLACES.data

    def find(self, tail: array[int], key: int | None = None) -> tuple[int, int]:
        """Return the position after the longest of the latest occurrences of the end of `tail`, and
        the number of tokens that agree, at most `LONGEST`. (0, 0) if there is none.

        `key` is that of the last run of `tail`, if it is known. An occurrence at the end of the
        text itself does not count, because nothing follows it.
        """
        if len(tail) < LENGTH:
            return 0, 0
        if key is None:
            key = key_of(*tail[-LENGTH:])
        places = [self._later.get(key, 0)]
        begin = bisect_left(self._places, key << _POSITION)
        if begin < len(self._places) and self._places[begin] >> _POSITION == key:
            end = bisect_left(self._places, (key + 1) << _POSITION, begin)
            begin = max(begin, end - _CANDIDATES)
            places += [each & ((1 << _POSITION) - 1) for each in self._places[begin:end][::-1]]
        found = (0, 0)
        for place in places:
            if 0 < place < len(self.tokens) and found[1] < LONGEST:
                length = _agreement(self.tokens, place, tail)
                if length >= LENGTH and length > found[1]:
                    found = place, length
        return found


def _agreement(tokens: array[int], end: int, tail: array[int]) -> int:
    """Return how many last tokens of `tail` equal those before `end`."""
    most = min(LONGEST, end, len(tail))
    if tokens[end - most : end] == tail[-most:]:
        return most
    for count in range(most):
        if tokens[end - 1 - count] != tail[-1 - count]:
            return count
    return most


def key_of(one: int, two: int, three: int) -> int:
    """Return a hash of a run of `LENGTH` tokens."""
    return (
        ((one * _FACTOR & _MASK ^ two) * _FACTOR & _MASK ^ three) * _FACTOR & _MASK
    ) >> _POSITION
