"""Products with weights in blocks that stay packed, in Triton (`packed_linear`).

A layout is the format's place in `FORMATS`, and in higher bits the dtype of activations, and the
columns of a scale if the kind names them. A weight whose runs of rows have several formats is one
row of bytes, and its layout has the format and the rows of each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import moe
from .launches import first_accepted
from .packed_formats import FORMATS, Format
from .packed_kernels import packed_experts_kernel, packed_linear_kernel, packed_rows_kernel

NAMES = list(FORMATS)
FORMAT_BITS, DTYPE_BITS = 5, 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIXED, MOST_RUNS, RUN_BITS, ROW_UNIT = 1 << 62, 3, 20, 16
_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "triton_linear(Tensor x, Tensor weight, Tensor? bias, int out_features, int layout) -> Tensor"
)  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "triton_embedding(Tensor ids, Tensor weight, int hidden, int rows, int layout) -> Tensor"
)  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "triton_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, "
    "Tensor? gate_up_bias, Tensor? gate_up_scale, Tensor down, Tensor? down_bias, "
    "Tensor? down_scale, int[] sizes, int[] layouts, int[] groups, float limit, "
    "bool weighs_input) -> Tensor"
)  # type: ignore[no-untyped-call]


class _Run(NamedTuple):
    form: Format
    rows: int


def form_of(layout: int) -> Format:
    form = FORMATS[NAMES[layout % (1 << FORMAT_BITS)]]
    group = layout >> FORMAT_BITS + DTYPE_BITS
    return replace(form, super_size=group) if group else form


def dtype_of(layout: int) -> torch.dtype:
    return DTYPES[(layout >> FORMAT_BITS) % (1 << DTYPE_BITS)]


def runs_of(layout: int, rows: int) -> list[_Run]:
    """Return the runs of a weight of `rows` rows."""
    if not layout & MIXED:
        return [_Run(form_of(layout), rows)]
    found, rest = [], layout & ~MIXED
    while rest:
        run = rest % (1 << RUN_BITS)
        found.append(_Run(form_of(run % (1 << FORMAT_BITS)), (run >> FORMAT_BITS) * ROW_UNIT))
        rest >>= RUN_BITS
    return found


class _Tiles(NamedTuple):
    tokens: int
    columns: int
    num_warps: int
    num_stages: int


def _tiles(tokens: int) -> list[_Tiles]:
    """Return tiles from the best to the smallest."""
    small = [_Tiles(16, 64, 4, 4), _Tiles(16, 32, 2, 2)]
    if tokens <= 16:
        return small
    middle = [_Tiles(64, 64, 4, 4), _Tiles(64, 64, 4, 2)]
    if tokens <= 64:
        return middle + small
    # Triton 3.6 makes a trap of tiles of 128 by 128 for compute capability 10.0.
    return [_Tiles(128, 64, 8, 3), *middle, *small]


def _constants(form: Format, columns: int) -> dict[str, Any]:
    units = 2 if columns % 128 == 0 else 1
    return {
        "WHOLE": columns % (64 * units) == 0,
        "UNITS": units,
        "BITS": form.bits,
        "HIGH": form.high,
        "NUMBER": form.number,
        "OFFSET": form.offset,
        "SCALE": form.scale,
        "MIN": form.minimum,
        "GROUP": form.group,
        "PLACES": form.super_size // 32,
    }


def _memory(packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the memory of rows as bytes, float16 and float32."""
    return packed, packed.view(torch.float16), packed.view(torch.float32)


def _places(form: Format, columns: int) -> tuple[int, ...]:
    planes = form.planes(columns)
    return planes.row_bytes, planes.high, planes.subs, planes.minima, planes.scales


def _multiply(
    x: torch.Tensor,
    form: Format,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply x [T, K] by packed rows [N, bytes] into out [T, N], with rows of any stride."""
    (tokens, size), columns = x.shape, out.shape[1]

    def launch(tiles: _Tiles) -> None:
        grid = -(-columns // tiles.columns), -(-tokens // tiles.tokens)
        packed_linear_kernel[grid](
            x,
            *_memory(packed),
            out if bias is None else bias,
            out,
            tokens,
            columns,
            size,
            x.stride(0),
            out.stride(0),
            *_places(form, size),
            HAS_BIAS=bias is not None,
            **_constants(form, size),
            BLOCK_M=tiles.tokens,
            BLOCK_N=tiles.columns,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )

    choices = _tiles(tokens)
    first_accepted(("packed", choices[0], form, x.dtype, x.device), choices, launch)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, layout: int
) -> torch.Tensor:
    """Multiply x [T, in] by a packed weight: [T, out_features]."""
    tokens, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(tokens, out_features)
    if tokens == 0:
        return out
    memory, row, offset = weight.view(-1), 0, 0
    for form, rows in runs_of(layout, out_features):
        row_bytes = form.planes(size).row_bytes
        packed = memory[offset : offset + rows * row_bytes].view(rows, row_bytes)
        columns = slice(row, row + rows)
        _multiply(x, form, packed, None if bias is None else bias[columns], out[:, columns])
        row, offset = row + rows, offset + rows * row_bytes
    return out


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, hidden: int, rows: int, layout: int
) -> torch.Tensor:
    """Return rows ids [T] int64 of a packed table: [T, hidden] in the layout's dtype."""
    form, units = form_of(layout), 4
    out = torch.empty(len(ids), hidden, dtype=dtype_of(layout), device=ids.device)
    if len(ids):
        constants = _constants(form, hidden) | {"UNITS": units}
        del constants["WHOLE"]
        packed_rows_kernel[(len(ids), -(-hidden // (64 * units)))](
            ids.contiguous(),
            *_memory(weight),
            out,
            hidden,
            rows,
            *_places(form, hidden),
            **constants,
            num_warps=4,
        )
    return out


def _experts_tiles(pairs: int, experts: int) -> list[_Tiles]:
    if pairs <= 16 * experts:
        return [_Tiles(16, 64, 4, 4), _Tiles(16, 32, 4, 2)]
    return [_Tiles(64, 64, 4, 4), _Tiles(64, 32, 4, 2)]


def experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    sizes: Sequence[int],
    layouts: Sequence[int],
    groups: Sequence[int],
    limit: float,
    weighs_input: bool,
) -> torch.Tensor:
    """Compute `reference.fused_moe` with packed weights (`LinearKernels.experts_op`).

    Activations are not quantised, whatever `groups` and the scales of inputs say: the weight is
    widened in registers, and products with 16 bits are more exact.
    """
    (tokens, each), (count, width, opened) = topk_ids.shape, sizes
    pairs, hidden = tokens * each, x.shape[1]
    if pairs == 0:
        return x.new_empty(x.shape)
    assert x.stride(1) == 1
    choices = _experts_tiles(pairs, count)
    blocks = moe.group_rows(topk_ids, count, choices[0].tokens)
    weights = topk_weights.contiguous()

    def multiply(
        rows: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        columns: int,
        form: Format,
        each: int,
        *,
        spreads: bool,
    ) -> torch.Tensor:
        """Multiply the rows of pairs by the weight of their experts: [P, columns]."""
        size, out = rows.shape[1], rows.new_empty(pairs, columns)

        def launch(tiles: _Tiles) -> None:
            packed_experts_kernel[len(blocks.experts), -(-columns // tiles.columns)](
                rows,
                blocks.order,
                weights,
                *_memory(packed),
                out if bias is None else bias,
                out,
                blocks.experts,
                blocks.firsts,
                blocks.ends,
                columns,
                size,
                rows.stride(0),
                *_places(form, size),
                EACH=each,
                WEIGHED=weighs_input and each > 0,
                SPREADS=spreads,
                HAS_BIAS=bias is not None,
                **_constants(form, size),
                BLOCK_M=tiles.tokens,
                BLOCK_N=tiles.columns,
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )

        first_accepted(("experts", choices[0], form, x.dtype, x.device), choices, launch)
        return out

    first, second = map(form_of, layouts)
    between = multiply(x, gate_up, gate_up_bias, opened, first, each, spreads=False)
    between = moe.activated(between, width, limit)
    results = multiply(between, down, down_bias, hidden, second, 0, spreads=True)
    return moe.combined(results, topk_ids, weights, count, is_weighed=not weighs_input)


for _name, _op, _meta in (
    ("triton_linear", linear, lambda x, weight, bias, rows, _: x.new_empty(x.shape[0], rows)),
    (
        "triton_embedding",
        embedding,
        lambda ids, weight, hidden, rows, layout: ids.new_empty(
            ids.shape[0], hidden, dtype=dtype_of(layout)
        ),
    ),
    ("triton_experts", experts, lambda x, *_: x.new_empty(x.shape)),
):
    _LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _meta, "Meta")  # type: ignore[no-untyped-call]
