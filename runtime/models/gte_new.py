"""GTE under the name of the code that its first checkpoints bring."""

from __future__ import annotations

from .gte import Gte

ENCODER = "New"
MODEL_TYPE = "new"


class New(Gte):
    """The layers and names of tensors are the same."""
