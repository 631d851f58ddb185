"""Places of earlier occurrences, compared with a plain search."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.speculative.ngrams import LENGTH, Ngrams


@given(
    begin=st.lists(st.integers(0, 2), max_size=40),
    later=st.lists(st.integers(0, 2), max_size=40),
    tail=st.lists(st.integers(0, 2), max_size=8),
)
def test_found_places_end_with_the_tail(
    begin: list[int], later: list[int], tail: list[int]
) -> None:
    ngrams = Ngrams(np.array(begin, np.int64))
    for token in later:
        ngrams.append(token)
    text = begin + later
    place, length = ngrams.find(array("i", tail))
    ends = [end for end in range(LENGTH, len(text)) if text[end - LENGTH : end] == tail[-LENGTH:]]
    if len(tail) < LENGTH or not ends:
        assert (place, length) == (0, 0)
    else:
        assert place in ends or not place
        assert text[place - length : place] == tail[len(tail) - length :]
