"""The tensors that hold the states of recurrent layers, one slot per request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.platform.memory import Memory
from ...kernels.staging import to_device
from ...kernels.state import StateLayout


def slot_bytes(layouts: Sequence[StateLayout]) -> int:
    """Bytes of one slot in all layers."""
    return sum(layout.num_bytes for layout in layouts)


class StatePool:
    """The states of all recurrent layers.

    `tensors[layer]` are the tensors [slots, *shape] of the layer's layout. Only recurrent layers
    are counted.
    """

    def __init__(self, layouts: Sequence[StateLayout], *, num_slots: int, platform: Memory) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes(layouts)
        self.device = platform.device()
        self.tensors = [
            [platform.zeros((num_slots, *shape), dtype) for shape, dtype in layout.tensors]
            for layout in layouts
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states between slots, pairs of (from, to), as if all at once.

        A request that begins copies the zeros of the reserved slot.
        """
        if not pairs:
            return
        (places,) = to_device([np.array(pairs, np.int64).T.copy()], self.device)
        for layer in self.tensors:
            for tensor in layer:
                tensor.index_copy_(0, places[1], tensor.index_select(0, places[0]))
