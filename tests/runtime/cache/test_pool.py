"""Keys and values in pages: layers of one model may differ in all that a layout says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_steps import defined

from piecework.kernels.attention import AttentionBackend, AttentionMetadata, KVLayout
from piecework.kernels.cpu.native.attention import native_or_torch
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.runtime.cache.pool import KVPool, page_bytes, shared_pages
from piecework.runtime.cache.slabs import PageAllocator, Slabs
from piecework.runtime.core.forward_context import PagedAttention
from piecework.runtime.layers.attention import attention, register_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = st.integers(1, 9)
LAYOUTS = st.builds(
    KVLayout,
    num_heads=SIZES,
    num_kv_heads=SIZES,
    key_size=SIZES,
    value_size=SIZES,
    scale=st.just(1.0),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, 4]),
)


@settings(deadline=None, max_examples=100)
@given(
    layouts=st.lists(LAYOUTS, min_size=1, max_size=5),
    num_pages=st.integers(2, 6),
    page_size=st.sampled_from([1, 3, 16]),
)
def test_a_page_has_the_bytes_of_all_layers_and_no_two_share_any(
    layouts: list[KVLayout], num_pages: int, page_size: int
) -> None:
    pool = KVPool(layouts, num_pages=num_pages, page_size=page_size, platform=CpuPlatform())
    tensors = [*pool.k, *pool.v]
    assert sum(tensor.nbytes for tensor in tensors) == pool.num_bytes
    assert pool.num_bytes == num_pages * page_bytes(layouts, page_size)
    for layout, k, v in zip(layouts, pool.k, pool.v, strict=True):
        assert k.shape == (num_pages, page_size, layout.num_kv_heads, layout.key_size)
        assert v.shape == (num_pages, page_size, layout.num_kv_heads, layout.value_size)
        assert k.dtype == v.dtype == layout.dtype and k.is_contiguous() and v.is_contiguous()
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors, 1))


@settings(deadline=None, max_examples=50)
@given(layouts=st.lists(LAYOUTS, max_size=5), page_size=st.integers(1, 64), window=SIZES)
def test_the_bytes_of_a_page_are_the_sum_over_its_layers(
    layouts: list[KVLayout], page_size: int, window: int
) -> None:
    alone = sum(page_bytes([layout], 1) for layout in layouts)
    assert page_bytes(layouts, page_size) == page_size * alone
    # A window bounds what is read, not yet what is kept; how many queries read it says nothing.
    others = [replace(layout, window=window, num_heads=window) for layout in layouts]
    assert page_bytes(others, page_size) == page_size * alone


@pytest.mark.parametrize("make", [TorchAttention, native_or_torch], ids=["torch", "native"])
def test_layers_of_different_windows_and_heads_in_one_model(
    make: Callable[[], AttentionBackend],
) -> None:
    """Two steps, of which the second reads what the first has stored, in every layer its own."""
    register_attention("CPU")
    kinds = [(4, 2, 8, 8, None), (6, 3, 16, 16, 5), (4, 1, 16, 8, 3), (2, 2, 8, 24, None)]
    layouts = [
        KVLayout(
            num_heads=num_heads, num_kv_heads=num_kv_heads, key_size=key_size,
            value_size=value_size, scale=key_size**-0.5, dtype=torch.float32, window=window,
        )
        for num_heads, num_kv_heads, key_size, value_size, window in kinds
    ]  # fmt: skip
    pool = KVPool(layouts, num_pages=20, page_size=4, platform=CpuPlatform())
    used = PagedAttention(backend=make(), pool=pool)
    table = torch.arange(19, 1, -1).view(3, 6)
    generator = torch.Generator().manual_seed(0)
    keys: dict[tuple[int, int], torch.Tensor] = {}
    values: dict[tuple[int, int], torch.Tensor] = {}
    past = [0, 0, 0]
    for new in ([9, 3, 1], [1, 6, 1], [1, 1, 1]):
        lens = [before + more for before, more in zip(past, new, strict=True)]
        positions = [torch.arange(low, high) for low, high in zip(past, lens, strict=True)]
        slots = [row[each // 4] * 4 + each % 4 for row, each in zip(table, positions, strict=True)]
        metadata = AttentionMetadata(
            query_lens=new, seq_lens=lens, block_table=table, slot_mapping=torch.cat(slots)
        )
        with used.step(metadata):
            for number, layout in enumerate(layouts):
                q, k, v = (
                    torch.randn(sum(new), heads, size, generator=generator)
                    for heads, size in (
                        (layout.num_heads, layout.key_size),
                        (layout.num_kv_heads, layout.key_size),
                        (layout.num_kv_heads, layout.value_size),
                    )
                )
                expected = []
                for request, parts in enumerate(
                    zip(q.split(new), k.split(new), v.split(new), strict=True)
                ):
                    queries, own = parts[0], (number, request)
                    keys[own] = torch.cat((keys.get(own, parts[1][:0]), parts[1]))
                    values[own] = torch.cat((values.get(own, parts[2][:0]), parts[2]))
                    expected.append(
                        defined(
                            queries, keys[own], values[own], past[request], layout.scale,
                            layout.window,
                        )
                    )  # fmt: skip
                actual = attention(q, k, v, number)
                torch.testing.assert_close(
                    actual, torch.cat(expected).flatten(1), atol=1e-5, rtol=1e-4
                )
        past = lens


@settings(deadline=None, max_examples=40)
@given(
    windowed=st.lists(st.booleans(), min_size=2, max_size=7).filter(
        lambda each: len(set(each)) == 2
    ),
    dtype=st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn]),
    slabs=st.integers(2, 4),
    data=st.data(),
)
def test_layers_share_memory_and_pages_share_none(
    windowed: list[bool], dtype: torch.dtype, slabs: int, data: st.DataObject
) -> None:
    """Whichever kind takes each slab, the reserved one apart."""
    layouts = [
        KVLayout(
            num_heads=2, num_kv_heads=2, key_size=4, value_size=4, scale=1.0, dtype=torch.float32,
            cache_dtype=dtype, window=4 if each else None,
        )
        for each in windowed
    ]  # fmt: skip
    shared = shared_pages(layouts, 4)
    assert shared is not None
    pool = KVPool(
        layouts, num_pages=2, page_size=2, platform=CpuPlatform(), window=4, shared=shared,
        num_slabs=slabs + 1,
    )  # fmt: skip
    memory = Slabs(slabs + 1)
    kinds = {True: PageAllocator(memory, shared.window), False: PageAllocator(memory, shared.full)}
    taken: dict[bool, list[int]] = {True: [], False: []}
    while memory.free:
        kind = data.draw(st.booleans())
        taken[kind] += kinds[kind].allocate(kinds[kind].kind.per_slab) or []
    bytes_of = [
        tensor[page].view(torch.uint8)
        for layer, each in enumerate(windowed)
        for page in taken[each]
        for tensor in (pool.k[layer], pool.v[layer])
    ]
    for number, page in enumerate(bytes_of, 1):
        page.fill_(number % 251)
    assert all(bool((page == number % 251).all()) for number, page in enumerate(bytes_of, 1))
    assert not any(bool(each[0].view(torch.uint8).any()) for each in (*pool.k, *pool.v))
    assert sum(page.nbytes for page in bytes_of) <= pool.num_bytes * slabs // (slabs + 1)


def test_layers_of_different_sizes_share_no_memory() -> None:
    layout = KVLayout.of_heads(2, 2, 8, torch.float32)
    windowed = replace(layout, window=4)
    assert shared_pages([layout, windowed], 4) is not None
    for other in (
        replace(windowed, num_kv_heads=1),
        replace(windowed, value_size=4),
        replace(windowed, cache_dtype=torch.int8),
    ):
        assert shared_pages([layout, other], 4) is None
    assert shared_pages([layout, layout], None) is None
    assert shared_pages([windowed, windowed], 4) is None, "there is one kind of pages"
