"""The formats of keys and values in 8 bits, in plain torch. Every attention backend must agree with
them.

T tokens, K key/value heads, N numbers of a key or value, P pages, S tokens in a page.

- float8 (e4m3fn and e5m2, arXiv:2209.05433): numbers divided by one scale of the layer, which comes
  from the checkpoint or is 1. Pages are [P, S, K, N].
- int8: numbers divided by a scale of their token and head, so that the largest is 127. With one
  scale for all tokens, most tokens would use only a few of the 255 steps. Pages are [P, S * K * (N
  + 2)]: first the numbers [S, K, N], whose rows are therefore aligned, then the scales [K, S].
  Scales are bfloat16, which no key overflows. Numbers are rounded after division by the scale as
  stored.

A number out of range becomes the largest number of its sign.
"""

from __future__ import annotations

import torch

# By the values of `--kv-cache-dtype`.
CACHE_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_SCALE_BYTES = 2
_LARGEST = 127
_LEAST_SCALE = 2.0**-126


def row_bytes(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a key or value of `size` numbers, including its scale."""
    return size * dtype.itemsize + _SCALE_BYTES * (dtype == torch.int8)


def pages_shape(
    num_pages: int, page_size: int, heads: int, size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the shape of the keys or values of one layer."""
    if dtype == torch.int8:
        return (num_pages, page_size * heads * row_bytes(size, dtype))
    return (num_pages, page_size, heads, size)


def page_size_of(cache: torch.Tensor, heads: int, size: int) -> int:
    """Return the number of tokens in a page of keys or values."""
    if cache.dtype == torch.int8:
        return cache.shape[1] // (heads * row_bytes(size, torch.int8))
    return cache.shape[1]


def open_int8(cache: torch.Tensor, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of int8 pages: numbers [P, S, K, N] int8 and scales [P, K, S] bfloat16."""
    page_size = page_size_of(cache, heads, size)
    numbers, scales = cache.tensor_split([page_size * heads * size], 1)
    return (
        numbers.view(-1, page_size, heads, size),
        scales.view(torch.bfloat16).view(-1, heads, page_size),
    )


def store(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """Write x [T, K, N] to the slots [T] of 8-bit pages. Return x as it will be read.

    `scale` is the layer's scale for float8.
    """
    if cache.dtype == torch.int8:
        numbers, scales = open_int8(cache, *x.shape[1:])
        # The scale must not be 0, because numbers are divided by it.
        kept = (x.float().abs().amax(-1) / _LARGEST).clamp(min=_LEAST_SCALE).bfloat16()
        rounded = (x.float() / kept.float()[..., None]).round().clamp(-_LARGEST, _LARGEST)
        pages, offsets = slots // numbers.shape[1], slots % numbers.shape[1]
        numbers[pages, offsets] = rounded.to(torch.int8)
        scales[pages, :, offsets] = kept
        return (rounded * kept.float()[..., None]).to(x.dtype)
    largest = torch.finfo(cache.dtype).max
    quantized = (x.float() / scale).clamp(-largest, largest).to(cache.dtype)
    # Not every device can copy rows of float8.
    cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slots, quantized.view(torch.uint8))
    return (quantized.float() * scale).to(x.dtype)


def load(
    cache: torch.Tensor,
    pages: torch.Tensor,
    heads: int,
    size: int,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the contents of 8-bit pages: [pages, S, K, N] in `dtype`."""
    if cache.dtype == torch.int8:
        numbers, scales = open_int8(cache, heads, size)
        found = scales.index_select(0, pages).transpose(1, 2).float()[..., None]
        return (numbers.index_select(0, pages).float() * found).to(dtype)
    found = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype)
    return (found.float() * scale).to(dtype)
