"""Images that wait to be fetched: bounded in memory and in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.server.images.store import ImageStore

CAPACITY, LIFETIME = 100, 10.0


@given(st.lists(st.tuples(st.integers(1, CAPACITY), st.floats(0, 8)), max_size=30))
def test_the_newest_that_fit_and_have_not_expired_are_there(
    images: list[tuple[int, float]],
) -> None:
    now = 0.0
    store = ImageStore(CAPACITY, LIFETIME, lambda: now)
    put: list[tuple[str, bytes, float]] = []
    for number, (size, wait) in enumerate(images):
        content = bytes([number]) * size
        put.append((store.put(content, "png", "image/png"), content, now))
        now += wait
    room = CAPACITY
    for name, content, since in reversed(put):
        room -= len(content)
        stored = store.get(name)
        assert (stored.content if stored else None) == (
            content if room >= 0 and now < since + LIFETIME else None
        )
    assert store.size <= CAPACITY


def test_one_that_is_larger_than_the_store_is_refused() -> None:
    with pytest.raises(ValueError, match="101 bytes"):
        ImageStore(CAPACITY, LIFETIME).put(bytes(101), "png", "image/png")
