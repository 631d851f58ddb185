"""Attention of some tokens of a sequence to all of its tokens, by the kernels of paged attention.

The sequence is one page. The queries of a head are the query heads of a single token, the last one,
which sees every key.
"""

from __future__ import annotations

import ctypes

import torch

from ... import reference
from .attention import FUNCTIONS, AttentionCall
from .build import load_kernels


def attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """See `kernels.reference.attend_all`."""
    library, (rows, heads, size), length = load_kernels(), q.shape, len(k)
    is_taken = q.dtype == torch.bfloat16 and k.shape == v.shape == (length, heads, size)
    is_taken = is_taken and rows > 0 and length > 0
    if library is None or not is_taken:
        return reference.attend_all(q, k, v, scale)
    q, k, v = q.transpose(0, 1).contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    numbers = torch.tensor([length - 1, 0])
    lens = torch.tensor([1, length], dtype=torch.int32)
    # The key and the value that the call stores are already in their place.
    call = AttentionCall(
        q=q.data_ptr(),
        k=k[-1].data_ptr(),
        v=v[-1].data_ptr(),
        out=out.data_ptr(),
        k_cache=k.data_ptr(),
        v_cache=v.data_ptr(),
        slots=numbers[:1].data_ptr(),
        table=numbers[1:].data_ptr(),
        query_lens=lens[:1].data_ptr(),
        seq_lens=lens[1:].data_ptr(),
        table_stride=1,
        requests=1,
        tokens=1,
        page_size=length,
        heads=heads * rows,
        kv_heads=heads,
        group=rows,
        head_size=size,
        value_size=size,
        scale=scale,
        k_scale=1.0,
        v_scale=1.0,
    )
    getattr(library, FUNCTIONS[q.dtype])(ctypes.byref(call), torch.get_num_threads())
    return out.transpose(0, 1)
