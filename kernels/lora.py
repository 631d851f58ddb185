"""The op that adds the low-rank updates of adapters (LoRA) to the output of a linear layer.

T tokens, S slots, P parts of a fused layer, R the largest rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        a: [S, P, R, in]. Rows from an adapter's rank on are 0.
        b: [S, R, out]. `rows` are the numbers of columns of each part.
        scales: [S, P] float32. 0: the adapter does not change the part.
        ranks: [S, P] int32, for kernels that skip the zeros of `a` and `b`.
        slots: [T or more] int32: the slot of each token's adapter, or -1.
    """
    num_slots, num_parts, rank, columns = a.shape
    tokens = x.shape[0]
    own = slots[:tokens, None] == torch.arange(num_slots, device=x.device)
    wide = x.float() @ a.float().view(-1, columns).t()
    narrow = wide.view(tokens, num_slots, num_parts, rank) * scales[:, :, None]
    # Not a product: numbers of other slots may not be finite.
    narrow = torch.where(own[:, :, None, None], narrow, 0.0)
    ups, begin = [], 0
    for part, count in enumerate(rows):
        up = b[:, :, begin : begin + count].float().reshape(-1, count)
        ups.append(narrow[:, :, part].reshape(tokens, -1) @ up)
        begin += count
    return (y.float() + torch.cat(ups, dim=1)).to(y.dtype)
