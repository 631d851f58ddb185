"""The op that adds the low-rank updates of adapters (LoRA) to the output of a linear layer.

T tokens, S slots, P parts of a fused layer, R the largest rank of an adapter, C panels of W
columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

RANK_STEP = 16  # R is a multiple of it, because kernels compute so many numbers of a rank at once.


def columns_to_panels(b: torch.Tensor, width: int | None) -> torch.Tensor:
    """Return b [S, R, out] as panels [S, C, R, W] of `width` columns, or as one panel of all."""
    slots, rank, columns = b.shape
    width = width or columns
    padded = torch.nn.functional.pad(b, (0, -columns % width))
    return padded.view(slots, rank, -1, width).transpose(1, 2).contiguous()


def lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
    rows: Sequence[int],
) -> torch.Tensor:
    """Return y [T, out] plus each token's update (x a^T) b * scale, for x [T, in].

    All shapes are fixed, so that a graph can be replayed for any mixture of adapters.

    Args:
        a: [S, P, in, R]. Numbers from an adapter's rank on are 0.
        b: [S, C, R, W]: panels of [S, R, out], of which the last may be padded. `rows` are the
            numbers of columns of each part.
        scales: [S, P] float32. 0: the adapter does not change the part.
        ranks: [S, P] int32, for kernels that skip the zeros of `a` and `b`.
        slots: [T or more] int32: the slot of each token's adapter, or -1.
    """
    num_slots, rank = len(a), a.shape[-1]
    tokens = x.shape[0]
    own = slots[:tokens, None] == torch.arange(num_slots, device=x.device)
    wide = torch.einsum("ti,spir->tspr", x.float(), a.float())
    narrow = wide * scales[:, :, None]
    # Not a product: numbers of other slots may not be finite.
    narrow = torch.where(own[:, :, None, None], narrow, 0.0)
    columns = b.transpose(1, 2).reshape(num_slots, rank, -1).float()
    ups, begin = [], 0
    for part, count in enumerate(rows):
        up = columns[:, :, begin : begin + count].reshape(-1, count)
        ups.append(narrow[:, :, part].reshape(tokens, num_slots * rank) @ up)
        begin += count
    return (y.float() + torch.cat(ups, dim=1)).to(y.dtype)
