"""ALiBi's slopes: models of transformers are compared with ours in tests/runtime/models, but its
code of MPT does not read how steep they are.
"""

from __future__ import annotations

import pytest

from piecework.runtime.layers.alibi import alibi_slope


@pytest.mark.parametrize(
    ("heads", "steepest", "powers"),
    [(1, 8.0, [8]), (4, 6.0, [1.5, 3, 4.5, 6]), (5, 16.0, [4, 8, 12, 16, 2])],
)
def test_slopes_are_those_of_the_paper(heads: int, steepest: float, powers: list[float]) -> None:
    slopes = [alibi_slope(head, heads, steepest) for head in range(heads)]
    assert slopes == pytest.approx([2.0**-power for power in powers])
