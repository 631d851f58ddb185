"""GTE under the name that its first checkpoints use."""

from __future__ import annotations

from .gte import Gte

ENCODER = "New"
MODEL_TYPE = "new"


class New(Gte):
    """The layers and names of tensors are the same."""
