"""Sampling by the C++ kernels. Functions of `kernels.reference` have the same results; those of
`kernels.plain_sampling` differ in the rounding of e^x and of sums.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .build import load_kernels


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.argmax`."""
    library = load_kernels()
    assert library is not None
    return likeliest(library, logits)


def sample_filtered(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.reference.sample_filtered`."""
    library = load_kernels()
    assert library is not None
    return draw(library, probs, top_k.long(), top_p.float(), min_p.float(), uniform.double())


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """See `kernels.plain_sampling.softmax`. Overwrites `logits`."""
    library = load_kernels()
    assert library is not None
    return soften(library, logits, temperature)


def sample_plain(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """See `kernels.plain_sampling.sample_plain`."""
    library = load_kernels()
    assert library is not None
    return draw_plain(library, logits, temperature, uniform)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """See `kernels.reference.mask_logits`."""
    library = load_kernels()
    assert library is not None
    mask(library, logits, rows, bits)


def mask(
    library: ctypes.CDLL, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor
) -> None:
    """Compute `mask_logits` by the given kernels."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert rows.dtype == torch.int64 and bits.dtype == torch.int32 and bits.is_contiguous()
    library.piecework_mask_logits(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(bits.data_ptr()),
        len(rows),
        logits.shape[1],
    )


def soften(library: ctypes.CDLL, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Compute `softmax` by the given kernels."""
    assert logits.dtype == temperature.dtype == torch.float32 and logits.stride(1) == 1
    library.piecework_softmax(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        *logits.shape,
        ctypes.c_void_p(temperature.data_ptr()),
        torch.get_num_threads(),
    )
    return logits


def draw_plain(
    library: ctypes.CDLL, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Compute `sample_plain` by the given kernels."""
    assert temperature.dtype == uniform.dtype == torch.float32
    return _tokens(library.piecework_sample_plain, logits, temperature, uniform.contiguous())


def likeliest(library: ctypes.CDLL, logits: torch.Tensor) -> torch.Tensor:
    """Compute `argmax` by the given kernels."""
    return _tokens(library.piecework_argmax, logits)


def draw(library: ctypes.CDLL, probs: torch.Tensor, *filters: torch.Tensor) -> torch.Tensor:
    """Compute `sample_filtered` by the given kernels. `filters` have the reference's dtypes."""
    return _tokens(
        library.piecework_sample_filtered, probs, *(column.contiguous() for column in filters)
    )


def _tokens(function: Any, rows: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    assert rows.dtype == torch.float32 and rows.stride(1) == 1
    tokens = torch.empty(len(rows), dtype=torch.int64)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*columns, tokens)]
    function(
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(rows.stride(0)),
        *rows.shape,
        *pointers,
        torch.get_num_threads(),
    )
    return tokens
