"""The contract of layers with a recurrent state: what they keep of a request of any length, and
which states a step reads and writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from .state_plan import StatePlan, plan_states


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What one layer keeps of a request: tensors of these shapes and dtypes, zeros at the
    beginning.

        StateLayout((((hidden, kernel - 1), torch.bfloat16), ((heads, 64, 128), torch.float32)))
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one request."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """The states that the tokens of one step continue.

    Tokens are laid out request after request. Request b has `query_lens[b]` new tokens (on the
    host). Its state lies in `slots[b]` ([B] int64, on the device) of every tensor [slots, *shape],
    is read there, and is written back with the new tokens. A request that begins finds zeros.

    Slot 0 belongs to padding, and several requests may have it. It holds zeros, and ops leave it
    so. Rows of x after the last request are padding too, and ops return finite numbers for them.
    """

    query_lens: list[int]
    slots: torch.Tensor

    @cached_property
    def plan(self) -> StatePlan:
        """The plan that the layers of the step share, made by the first of them."""
        return plan_states(self.query_lens, self.slots)
