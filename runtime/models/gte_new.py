"""GTE under the name that its first checkpoints use."""

from __future__ import annotations

from .gte import Gte

ENCODER = "New"
MODEL_TYPE = "new"


class New(Gte):
    """Layers and names of tensors are those of GTE."""
