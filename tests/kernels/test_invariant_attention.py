"""With batch invariance a token's attention has the same bits whatever other tokens its step
holds; those of prompts are requests of their own.
"""

from __future__ import annotations

import pytest
import torch
from paged_steps import Step

from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.attention import NativeAttention

KEYS = 1400
PAGE = 16
NEIGHBOURS = {
    "decodes": [(1, 900), (1, 30), (1, 1399)] * 3,
    "a_prompt": [(1, past) for past in range(1336, 1399)],
}


def beside(alone: Step, neighbours: list[tuple[int, int]], share: bool) -> Step:
    """The request of `alone` behind others, which begin with its pages where they `share`."""
    step = Step([*neighbours, (1, KEYS - 1)], page_size=PAGE, heads=6, head_size=32, seed=5)
    step.keys[-1], step.values[-1] = alone.keys[0], alone.values[0]
    step.q[-1:] = alone.q
    table = step.metadata.block_table
    position = torch.arange(KEYS - 1)
    where = table[-1][position // PAGE] * PAGE + position % PAGE
    step.k_cache.flatten(0, 1)[where] = alone.keys[0][:-1]
    step.v_cache.flatten(0, 1)[where] = alone.values[0][:-1]
    for row, (_, past) in enumerate(neighbours if share else ()):
        table[row, : past // PAGE] = table[-1, : past // PAGE]
    return step


@pytest.mark.parametrize("share", [False, True], ids=["apart", "sharing"])
@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_a_token_gets_the_same_bits_beside_any_others(
    neighbours: list[tuple[int, int]], share: bool
) -> None:
    library = build.load_kernels()
    if library is None:
        pytest.skip("no kernels can be built here")
    backend = NativeAttention(library)
    alone = Step([(1, KEYS - 1)], page_size=PAGE, heads=6, head_size=32, seed=4)
    together = beside(alone, neighbours, share)

    def is_same() -> bool:
        return torch.equal(together.run(backend)[-1:], alone.run(backend))

    before = torch.get_num_threads()
    torch.set_num_threads(2)  # keys are cut for so many
    library.piecework_set_batch_invariant(1)
    try:
        assert is_same()
        library.piecework_set_batch_invariant(0)
        # Else this would show nothing.
        assert not is_same()
    finally:
        library.piecework_set_batch_invariant(0)
        torch.set_num_threads(before)
