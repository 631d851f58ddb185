"""Attention whose result is only quantised to FP8, by a static scale, writes it in FP8: across the
cut, `piecework::attention` and the next piece's `quantize_static` become one split op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..context import PassContext
from ..rewrite import inline, replace

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}


class AttentionQuant:
    """No pattern: attention returns nothing, it fills a buffer, by which it is found."""

    name = key = "attention_quant"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        found = [match for node in graph.nodes if (match := _match(node)) is not None]
        for match in found:
            q, k, v, _, layer = match.attention.args
            scale, dtype = match.quantize.args[1:]
            (numbers,) = inline(graph, match.attention, _quantized, (q, k, v, scale, layer, dtype))
            replace(match.quantize, numbers)
            for node in (match.quantize, match.flat, match.attention, match.out):
                graph.erase_node(node)
        return len(found)


class _Match(NamedTuple):
    """`out`, the buffer; attention, which alone fills it; `flat`, its one view; and what alone
    reads that.
    """

    out: fx.Node
    attention: fx.Node
    flat: fx.Node
    quantize: fx.Node


def _match(attention: fx.Node) -> _Match | None:
    if str(attention.target).removesuffix(".default") != "piecework.attention":
        return None
    out: Any = attention.args[3]
    views = [user for user in out.users if user is not attention]
    if len(out.users) != 2 or views[0].target != "flatten" or views[0].args[1:] != (1,):
        return None
    readers = list(views[0].users)
    if len(readers) != 1 or str(readers[0].target) != "piecework.quantize_static.default":
        return None
    scale, dtype = readers[0].args[1:]
    known = isinstance(scale, fx.Node) and scale < attention and dtype in _FP8
    return _Match(out, attention, views[0], readers[0]) if known else None


def _quantized(q: Any, k: Any, v: Any, scale: Any, layer: int, dtype: torch.dtype) -> Any:
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    torch.ops.piecework.attention_quantize.default(q, k, v, out, scale, layer)
    return out.flatten(1)
