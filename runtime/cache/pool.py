"""The tensors that hold keys and values, in pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...kernels.attention import KVLayout
from ...kernels.cache_format import CACHE_DTYPES, pages_shape
from ...kernels.platform.memory import Memory
from .slabs import SharedPages


def window_of(layouts: Sequence[KVLayout], context_length: int) -> int | None:
    """Return the window, in tokens, of the layers whose pages beyond the window are freed.

    It is the longest window that is at most half of the context. None if no layer has one.
    """
    windows = [each.window for each in layouts if each.window is not None and not each.latent]
    return max((each for each in windows if 2 * each <= context_length), default=None)


def is_windowed(layout: KVLayout, window: int | None) -> bool:
    """Whether a layer frees the pages beyond `window`, the value of `window_of`."""
    return (
        window is not None
        and layout.window is not None
        and layout.window <= window
        and not layout.latent
    )


def page_bytes(layouts: Sequence[KVLayout], page_size: int) -> int:
    """Return the bytes of one page in all layers."""
    return page_size * sum(layout.token_bytes for layout in layouts)


def shared_pages(layouts: Sequence[KVLayout], window: int | None) -> SharedPages | None:
    """Return how full and windowed layers share memory.

    None if there is only one kind, or if keys and values differ in size or format.
    """
    layouts = [layout for layout in layouts if layout.shares is None]
    windowed = sum(is_windowed(layout, window) for layout in layouts)
    formats = {
        (each.num_kv_heads, each.key_size, each.cache_dtype or each.dtype) for each in layouts
    }
    alike = len(formats) == 1 and all(
        each.key_size == each.value_size and not each.latent for each in layouts
    )
    if not alike or windowed in (0, len(layouts)):
        return None
    return SharedPages.of(len(layouts) - windowed, windowed)


def in_cache_dtype(
    layouts: Sequence[KVLayout], name: str, scales: Sequence[tuple[float, float]]
) -> list[KVLayout]:
    """Return the layouts with `--kv-cache-dtype` `name`.

    `scales` are the float8 scales of each layer's keys and values. Raises `ValueError` if int8 is
    asked for and heads have no place for their scales.
    """
    if name == "auto":
        return list(layouts)
    if name == "int8" and any(each.key_size % 2 or each.value_size % 2 for each in layouts):
        raise ValueError("--kv-cache-dtype int8 needs heads of an even size: take fp8_e4m3 or auto")
    dtype = CACHE_DTYPES[name]
    if dtype == torch.int8 and any(each.latent for each in layouts):
        raise ValueError(
            "--kv-cache-dtype int8 does not support latent attention, whose vectors have no scale: "
            "take fp8_e4m3 or auto"
        )
    if not dtype.is_floating_point:
        return [replace(each, cache_dtype=dtype) for each in layouts]
    return [
        replace(
            each, cache_dtype=dtype, k_scale=k_scale, v_scale=k_scale if each.latent else v_scale
        )
        for number, each in enumerate(layouts)
        for k_scale, v_scale in (scales[number if each.shares is None else each.shares],)
    ]


def _tensors(
    layout: KVLayout, pages: int, page_size: int
) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Yield dtype and shape of a layer's keys, its values, and the keys of its index."""
    if layout.shares is not None:
        return
    dtype = layout.cache_dtype or layout.dtype
    for size in (layout.key_size,) if layout.latent else (layout.key_size, layout.value_size):
        yield dtype, pages_shape(pages, page_size, layout.num_kv_heads, size, dtype)
    if layout.index_size:
        yield layout.dtype, (pages, page_size, layout.index_size)


class KVPool:
    """The keys and values of every layer.

    Attributes:
        k: By layer, [pages, page size, key/value heads, key size]. int8 has the shape of
            `kernels.cache_format`. A layer that shares another layer's cache has its tensors.
        v: By layer, the same with the value size. In latent layers it is the beginning of `k`.
        index: By layer, [pages, page size, index size]: the keys of an index, if there is one.
        window, window_pages: Layers with at most this window have so many pages of their own.
        shared, num_slabs: If set, full and windowed pages share so many slabs. The tensors of
            layers then overlap, and page numbers keep them apart.
        second: By layer, whether it reads the second of a step's two page tables.
        only_windows: Whether all layers have a window; then there is only one page table.

    The memory is zeroed, because attention multiplies padding by 0, and 0 * NaN is NaN. Raises
    `ValueError` if chunks of attention are not whole pages.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        *,
        num_pages: int,
        page_size: int,
        platform: Memory,
        window: int | None = None,
        window_pages: int = 0,
        shared: SharedPages | None = None,
        num_slabs: int = 0,
    ) -> None:
        for layout in layouts:
            if layout.chunked and (layout.window or 0) % page_size:
                raise ValueError(
                    f"--page-size {page_size}: the model attends in chunks of {layout.window} "
                    "tokens, which must be whole pages; take a divisor of the chunk size"
                )
        self.layouts = list(layouts)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.index: dict[int, torch.Tensor] = {}
        self.num_pages, self.page_size = num_pages, page_size
        self.window, self.window_pages = window, window_pages
        windowed = [is_windowed(layout, window) for layout in layouts]
        self.only_windows = bool(windowed) and all(windowed)
        self.second = [each and not self.only_windows for each in windowed]
        self.shared, self.num_slabs = shared, num_slabs
        if shared is not None:
            self._share(shared, windowed, platform)
            return
        pages = [window_pages if each else num_pages for each in windowed]
        self.num_bytes = sum(
            count * page_bytes([layout], page_size)
            for count, layout in zip(pages, layouts, strict=True)
        )
        shapes = [
            each
            for count, layout in zip(pages, layouts, strict=True)
            for each in _tensors(layout, count, page_size)
        ]
        # One allocation per dtype, because an allocator may round up each of many.
        rest = {
            dtype: platform.zeros((sum(math.prod(s) for d, s in shapes if d == dtype),), dtype)
            for dtype in {dtype for dtype, _ in shapes}
        }
        made = []
        for dtype, shape in shapes:
            part, rest[dtype] = rest[dtype].tensor_split([math.prod(shape)])
            made.append(part.view(shape))
        tensors = iter(made)
        for number, layout in enumerate(layouts):
            if layout.shares is not None:
                self.k.append(self.k[layout.shares])
                self.v.append(self.v[layout.shares])
                continue
            self.k.append(keys := next(tensors))
            self.v.append(keys[..., : layout.value_size] if layout.latent else next(tensors))
            if layout.index_size:
                self.index[number] = next(tensors)

    def _share(self, shared: SharedPages, windowed: list[bool], platform: Memory) -> None:
        """Lay out shared slabs: keys of a layer, its values, then the next layer of the kind."""
        layout, tensors = self.layouts[0], self.num_slabs * shared.tensors
        dtype = layout.cache_dtype or layout.dtype
        shape = pages_shape(tensors, self.page_size, layout.num_kv_heads, layout.key_size, dtype)
        whole = platform.zeros(shape, dtype)
        self.num_bytes = whole.nbytes
        ends = {True: 0, False: 0}
        for layout, each in zip(self.layouts, windowed, strict=True):
            if layout.shares is not None:
                self.k.append(self.k[layout.shares])
                self.v.append(self.v[layout.shares])
                continue
            pages = (shared.window if each else shared.full).per_slab
            self.k.append(whole[ends[each] :])
            self.v.append(whole[ends[each] + pages :])
            ends[each] += 2 * pages
