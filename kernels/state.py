"""The contract of layers with a recurrent state: what they keep of a request, whatever its length,
and whose state a step reads and writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .state_plan import StatePlan, plan_states


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What one layer keeps of a request: tensors of these shapes and dtypes, all zeros at its
    beginning.

        StateLayout((((hidden, kernel - 1), torch.bfloat16), ((heads, 64, 128), torch.float32)))
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def num_bytes(self) -> int:
        """Of one request."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """Whose states the tokens of one step continue.

    Tokens are laid out request after request; request b has `query_lens[b]` new ones (on the
    host), and its state lies in `slots[b]` ([B] int64, on the device) of every tensor [slots,
    *shape]: there it is read and, with the new tokens in it, written back. A request that begins
    finds zeros.

    Slot 0 is padding's, any number of requests may have it: it holds zeros, and an op leaves it so.
    Rows of x behind the last request's are padding too: what an op gives for them is finite.
    """

    query_lens: list[int]
    slots: torch.Tensor

    @cached_property
    def plan(self) -> StatePlan:
        """What the layers of the step share; made at the first of them."""
        return plan_states(self.query_lens, self.slots)
