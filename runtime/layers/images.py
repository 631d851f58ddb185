"""The op by which images enter a forward: `piecework::image_rows`.

It changes the rows of a step that are positions of images. Graphs are cut at it, so they replay for
any mixture of text and images. In a step without images it does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...compilation.core.split_ops import register_split_op
from ..core.forward_context import current_context
from .attention import register_attention
from .rotary import Rotation

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("image_rows(Tensor(a!) x, Tensor(b!)? cos, Tensor(c!)? sin, int stage) -> ()")  # type: ignore[no-untyped-call]


def _image_rows(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, stage: int
) -> None:
    images = current_context().images
    if images is None or stage >= len(images.stages):
        return
    values = images.stages[stage].to(x.dtype)
    if stage:
        x.index_add_(0, images.rows, values)
        return
    x.index_copy_(0, images.rows, values)
    if images.turned_rows is not None and cos is not None and sin is not None:
        assert images.cos is not None and images.signed_sin is not None
        cos.index_copy_(0, images.turned_rows, images.cos)
        sin.index_copy_(0, images.turned_rows, images.signed_sin)


_KERNEL = register_split_op("piecework::image_rows", _image_rows)
_LIBRARY.impl("image_rows", lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]
_registered: set[str] = set()


def register_ops(dispatch_key: str) -> None:
    """Register this op and those of attention for a platform's dispatch key. Repeated calls do
    nothing.
    """
    register_attention(dispatch_key)
    if dispatch_key not in _registered:
        _LIBRARY.impl("image_rows", _KERNEL, dispatch_key)  # type: ignore[no-untyped-call]
        _registered.add(dispatch_key)


def embed_images(x: torch.Tensor, rotations: Sequence[Rotation], *, turned: bool) -> None:
    """Replace the embeddings in x [T, hidden] of positions of images.

    If `turned`, the rows of the first of the `rotations` are replaced as well.
    """
    cos, sin = rotations[0] if turned else (None, None)
    torch.ops.piecework.image_rows(x, cos, sin, 0)


def add_to_images(x: torch.Tensor, stage: int) -> None:
    """Add `StepImages.stages[stage]` to the hidden states x [T, hidden] of positions of images."""
    torch.ops.piecework.image_rows(x, None, None, stage)
