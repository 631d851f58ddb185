"""The tensors that hold the states of recurrent layers, a slot a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.platform import Platform
from ...kernels.staging import to_device
from ...kernels.state import StateLayout


def slot_bytes(layouts: Sequence[StateLayout]) -> int:
    """Bytes that one slot takes over all layers."""
    return sum(layout.num_bytes for layout in layouts)


class StatePool:
    """`tensors[layer]`: those of its layout, each [slots, *shape]. Layers count recurrent ones
    alone, in order.
    """

    def __init__(
        self, layouts: Sequence[StateLayout], *, num_slots: int, platform: Platform
    ) -> None:
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
        """Copy the states of slots to others, each (from, to), as if all at once. Those that begin
        are copied from the reserved slot.
        """
        if not pairs:
            return
        (places,) = to_device([np.array(pairs, np.int64).T.copy()], self.device)
        for layer in self.tensors:
            for tensor in layer:
                tensor.index_copy_(0, places[1], tensor.index_select(0, places[0]))
