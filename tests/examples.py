"""How many examples hypothesis looks at where a test says a number of its own."""

from __future__ import annotations

from hypothesis import settings

EXPLORING = "explore"


def examples(usual: int, *, exploring: int) -> int:
    """`usual`, or `exploring` in the long run, whose profile is loaded before tests are read."""
    return exploring if settings.default is settings.get_profile(EXPLORING) else usual
