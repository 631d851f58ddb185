"""Fuses attention with the static FP8 quantisation of its result into one split op.

The quantisation is in the piece after `piecework::attention`, so this pass works across a cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..context import PassContext
from ..rewrite import inline, replace

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}


class AttentionQuant:
    """The pass. It is not a `Pattern`, because attention returns nothing but fills a buffer."""

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
    """The buffer `out`, the attention that fills it, its only view `flat`, and the only reader of
    the view.
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
