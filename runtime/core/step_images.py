"""What the images of a step change in the first layers of a forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...kernels.span_attention import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages:
    """Rows of a step that are positions of images.

    Attributes:
        rows: [N] int64: the rows, in order.
        stages: Tensors [N, hidden]. The first one replaces the embeddings of the rows. The others
            are added to the hidden states of the rows after the first layers, one after each.
        turned_rows: [M] int64: the rows whose rotation is that of an image, or None.
        cos, signed_sin: [M, 1, R]: that rotation (`layers.rotary.Rotation`).
        spans: The images whose tokens see each other in both directions.
    """

    rows: torch.Tensor
    stages: list[torch.Tensor]
    turned_rows: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    signed_sin: torch.Tensor | None = None
    spans: list[Span] = field(default_factory=list)
