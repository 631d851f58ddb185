"""Latent attention by torch_npu's fused kernel, for steps of decodes.

The kernel reads latent vectors and rotated keys as two tensors without gaps. Therefore a layer's
cache holds first all vectors, then all keys.

H query heads, R numbers of a latent vector, Q of a rotated key, P pages of S tokens.
"""

from __future__ import annotations

import torch

from ..attention import AttentionMetadata, KVLayout
from ..paged_attention import TorchAttention
from .graph import updatable

SIZES = (512, 64)
HEADS = (32, 64, 128)
PAGE_SIZE = 128  # R and Q, H, and S in the op documentation (`query_rope`, `key_rope`).


def parts(cache: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of latent vectors [P, S, 1, R] and rotated keys [P, S, 1, Q] in a cache [P, S,
    1, R + Q].
    """
    pages, page_size = cache.shape[:2]
    numbers = pages * page_size * layout.value_size
    vectors, keys = cache.flatten().tensor_split([numbers])
    return vectors.view(pages, page_size, 1, -1), keys.view(pages, page_size, 1, -1)


def store(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout) -> None:
    """Store k [T, 1, R + Q] at slots [T] int32."""
    vectors, keys = k.tensor_split([layout.value_size], dim=-1)
    torch.ops.atb._npu_reshape_and_cache(
        vectors.contiguous(), keys.contiguous(), *parts(cache, layout), slots
    )


def read(cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return some pages of the cache as [pages, S, 1, R + Q]."""
    return torch.cat([part.index_select(0, pages) for part in parts(cache, layout)], dim=-1)


def run_decodes(
    q: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, layout: KVLayout
) -> torch.Tensor:
    """Return attention of one new token per request, q [B, H, R + Q], as [B, H, R]."""
    q_latent, q_turned = (
        part.contiguous()[:, :, None] for part in q.tensor_split([layout.value_size], dim=-1)
    )
    vectors, keys = (part.transpose(1, 2) for part in parts(cache, layout))
    with updatable():
        result, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q_latent,
            vectors,
            vectors,
            query_rope=q_turned,
            key_rope=keys,
            actual_seq_lengths_kv=metadata.seq_lens,
            block_table=metadata.block_table,
            num_heads=layout.num_heads,
            num_key_value_heads=1,
            input_layout="BNSD",
            block_size=cache.shape[1],
            scale=layout.scale,
        )
    attended: torch.Tensor = result[:, :, 0]
    return attended


def run_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    layout: KVLayout,
) -> None:
    """Compute any step by plain torch with copies of its requests' pages, after `store`."""
    page_size, (count, width) = cache.shape[1], metadata.block_table.shape
    kept = read(cache, metadata.block_table.flatten().long(), layout)
    ends = [row * width * page_size + length for row, length in enumerate(metadata.seq_lens)]
    slots = [
        slot
        for end, new in zip(ends, metadata.query_lens, strict=True)
        for slot in range(end - new, end)
    ]
    device = cache.device
    copied = AttentionMetadata(
        query_lens=metadata.query_lens,
        seq_lens=metadata.seq_lens,
        block_table=torch.arange(count * width, device=device).view(count, width),
        slot_mapping=torch.tensor(slots, device=device),
    )
    latent, plain = kept[..., : layout.value_size], TorchAttention()
    new = sum(metadata.query_lens)
    v, plan = k[:new, :, : layout.value_size], plain.plan(copied, page_size)
    plain.run(q[:new], k[:new], v, out[:new], kept, latent, plan, layout)
