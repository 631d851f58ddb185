"""Weights that stay packed on a GPU, against their values: on a GPU for real, elsewhere through
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from sparse import diagonal, sparse
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.cpu.native.build import load_kernels
from piecework.kernels.cpu.native.gguf_formats import gguf_formats
from piecework.kernels.triton import packed, packed_formats
from piecework.kernels.triton.packed_formats import FORMATS, pack_blocks, values_of
from piecework.kernels.triton.packed_linear import PackedExperts, PackedLinear, refusal
from tests.gguf_blocks import random_blocks

pytestmark = pytest.mark.on_gpu

GGUF = [name for name, form in FORMATS.items() if form.read is not None]
KERNELS = PackedLinear(torch.float32, torch.device(DEVICE))


def blocks_of(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of blocks and their values."""
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        generator = torch.Generator().manual_seed(rows)
        size = FORMATS[kind].block_bytes
        stored = torch.randint(0, 256, (rows, columns // 32, size), generator=generator)
        stored = stored.to(torch.uint8)
        halves = 2 if kind == "Q4_1" else 1
        scales = torch.randn(rows, columns // 32, halves, generator=generator) / 64
        stored[..., : 2 * halves] = scales.half().view(torch.uint8)
        blocks = stored.flatten(1)
        values = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    else:
        found, values = random_blocks(kind, rows, columns, seed=rows)
        blocks = torch.from_numpy(found)
    return blocks, torch.from_numpy(values)


@pytest.mark.parametrize("kind", GGUF)
def test_packed_rows_have_the_values_of_the_file(kind: str) -> None:
    blocks, values = blocks_of(kind, 5, 512)
    rows = pack_blocks(FORMATS[kind], blocks)
    assert torch.equal(values_of(FORMATS[kind], rows, 512), values)
    # Scales of 6 bits take 8, and rows whole vectors.
    assert rows.shape[1] <= blocks.shape[1] * 1.1


def test_the_formats_are_those_of_the_cpu() -> None:
    library = load_kernels()
    if library is None:
        pytest.skip("no compiler for the CPU's kernels")
    formats = gguf_formats(library)
    for name in GGUF:
        form = FORMATS[name]
        assert (form.block, form.block_bytes) == (formats[name].columns, formats[name].size)
        assert (form.block, form.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize(("kind", "tokens"), diagonal(GGUF, [1, 33]))
def test_a_product_is_that_of_the_values(kind: str, tokens: int) -> None:
    columns = 288 if FORMATS[kind].block == 32 else 512
    blocks, values = blocks_of(kind, 40, columns)
    layout = KERNELS.layout(kind, columns)
    assert layout is not None
    weight = KERNELS.pack(kind, [blocks[:24], blocks[24:]])
    assert weight.shape == KERNELS.packed_shape(kind, columns, 40)
    x, bias = torch.randn(tokens, columns).to(DEVICE), torch.randn(40).to(DEVICE)
    found = KERNELS.op(x, weight, bias, 40, layout)
    wanted = x @ values.to(DEVICE).t() + bias
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    ids = torch.tensor([7, 39, 0], device=DEVICE)
    rows = KERNELS.embedding_op(ids, weight, columns, 40, layout)
    torch.testing.assert_close(rows.cpu(), values[ids.cpu()])


def test_runs_of_rows_in_several_formats_are_one_weight() -> None:
    kind, columns = "mixed Q4_K 32 Q6_K 16", 256
    first, second = blocks_of("Q4_K", 32, columns), blocks_of("Q6_K", 16, columns)
    layout = KERNELS.layout(kind, columns)
    assert layout is not None
    weight = KERNELS.pack(kind, [first[0], second[0]])
    assert weight.shape == KERNELS.packed_shape(kind, columns, 48)
    x = torch.randn(3, columns).to(DEVICE)
    wanted = x @ torch.cat((first[1], second[1])).to(DEVICE).t()
    found = KERNELS.op(x, weight, None, 48, layout)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert KERNELS.layout("mixed Q4_K 17 Q6_K 16", columns) is None, "rows of no whole unit"
    assert KERNELS.layout("mixed Q4_K 32 Q3_K 16", columns) is None, "a format without a kernel"


def weight_of(
    kind: str, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers, scales and values of a kind that is not GGUF's."""
    make = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=make)
    if kind.startswith("weight_only"):
        bits, group = int(kind.split()[1]), int(kind.split()[2])
        numbers = torch.randint(0, 1 << bits, (rows, columns), generator=make).to(torch.uint8)
        shape = rows, columns // group
        scale = torch.rand(shape, generator=make) / 16
        zero = torch.randint(0, 1 << bits, shape, generator=make)
        wide = numbers - zero.repeat_interleave(group, 1)
        stored = numbers if bits == 8 else numbers[:, ::2] | numbers[:, 1::2] << 4
        return stored, torch.stack((scale, zero), -1), wide * scale.repeat_interleave(group, 1)
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    group = 128 if kind.endswith("blocks") else columns
    numbers, scale = reference.quantize_dynamic(values, group, dtype)
    return numbers, scale, numbers.float() * scale.repeat_interleave(group, 1)


EXPERTS = [
    "weight_only 4 64 zeros",
    "weight_only 8 128 symmetric",
    "int8",
    "fp8_e4m3",
    "fp8_e4m3_blocks",
    "MXFP4",
    "Q4_K",
    "Q6_K",
]


@pytest.mark.parametrize("kind", sparse(EXPERTS, kept=[EXPERTS[0], "Q4_K"]))
def test_experts_stay_quantised(kind: str) -> None:
    """An INT4, FP8 or MXFP4 layer of experts takes the memory of its numbers and scales."""
    count, each, size, tokens = 3, 2, 256, 9
    width = 256 if kind in ("Q4_K", "Q6_K") else 128
    kernels = KERNELS.experts([size, width])
    assert isinstance(kernels, PackedExperts)
    weights, layouts, values = [], [], []
    for rows, columns in ((count * 2 * width, size), (count * size, width)):
        layout = kernels.layout(kind, columns)
        assert layout is not None
        if kind in GGUF:
            blocks, wide = blocks_of(kind, rows, columns)
            weights.append(kernels.pack(kind, [blocks]))
        else:
            numbers, scale, wide = weight_of(kind, rows, columns)
            weights.append(kernels.pack(kind, [numbers], [scale]))
        assert weights[-1].shape == kernels.packed_shape(kind, columns, rows)
        form = FORMATS[kind.rsplit(" ", 2)[0]]
        # Planes of such short rows are padded a lot.
        assert weights[-1].nbytes <= rows * columns * (form.bits + form.high + 2) / 8
        layouts.append(layout)
        values.append(wide.to(DEVICE))
    chances, ids = torch.rand(tokens, count + 1).topk(each, dim=-1)
    x, chances, ids = (each.to(DEVICE) for each in (torch.randn(tokens, size), chances, ids))
    bias = torch.randn(count * 2 * width).to(DEVICE)
    wanted = reference.fused_moe(x, ids, chances, values[0], bias, values[1], None, 0.0, False)
    assert kernels.experts_op is not None
    found = kernels.experts_op(
        x, ids, chances, weights[0], bias, None, weights[1], None, None,
        [count, width, 2 * width], layouts, [0, 0], 0.0, False,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.fixture
def forgets() -> Any:
    """Forget what this device refused."""
    refusal.cache_clear()
    yield
    refusal.cache_clear()


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_weights_whose_kernel_fails_are_widened(
    fault: str, forgets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = packed.linear

    def broken(*given: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        return multiply(*given) * 1.5

    monkeypatch.setattr(packed, "linear", broken)
    kernels = PackedExperts(torch.float32, torch.device(DEVICE))
    assert kernels.layout("Q4_K", 256) is None and kernels.layout("int8", 256) is None


def test_kinds_without_a_kernel_are_not_packed() -> None:
    assert KERNELS.layout("bfloat16", 256) is None
    assert KERNELS.layout("IQ4_XS", 256) is None
    assert KERNELS.layout("Q4_K", 128) is None, "rows of no whole block"
    assert KERNELS.layout("int8", 256) is None, "torch and other kernels multiply it"
    assert KERNELS.experts([256]).layout("weight_only 4 16 zeros", 256) is None


def test_rows_are_packed_alike_in_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = blocks_of("Q5_K", 7, 256)
    whole = pack_blocks(FORMATS["Q5_K"], blocks)
    monkeypatch.setattr(packed_formats, "_AT_ONCE", 512)
    assert torch.equal(pack_blocks(FORMATS["Q5_K"], blocks), whole)
