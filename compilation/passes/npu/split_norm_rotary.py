"""Fuses splitting the product of queries, keys and values with the norm and rotation of heads."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ..context import PassContext
from ..rewrite import inline, op_name, our_op


@dataclass(frozen=True, slots=True)
class SplitNormRotary:
    """Replaces the ops by `op`. Runs after `norm_rotary`, which fuses norm and rotation.

    It is not a `Pattern`, because the results have other strides than the views that they replace.
    Attention takes any strides between tokens.
    """

    op: torch._ops.OpOverload
    name = key = "split_norm_rotary"

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        found = [match for node in graph.nodes if (match := _match(node)) is not None]
        for match in found:
            given = (match.product, *match.turn.args[2:], *match.heads)
            new = inline(graph, match.turn, self.op, given)
            for old, by in zip(match.results, new, strict=True):
                old.replace_all_uses_with(by)
            for node in sorted(match.dead, reverse=True):
                graph.erase_node(node)
        return len(found)


class _Match(NamedTuple):
    """One layer.

    Attributes:
        product: The rows of queries, keys and values.
        turn: The norm and rotation.
        results: q, k and v, which only attention reads.
        heads: The numbers of query heads and of key heads.
        dead: The nodes that nothing reads any more.
    """

    product: fx.Node
    turn: fx.Node
    results: tuple[fx.Node, fx.Node, fx.Node]
    heads: tuple[int, int]
    dead: frozenset[fx.Node]


def _match(turn: fx.Node) -> _Match | None:
    if our_op(turn) != "norm_rotary_embedding":
        return None
    q: Any = turn.args[0]
    k: Any = turn.args[1]
    size = turn.meta["example_value"].shape[-1]
    split: Any = q.args[0] if q.args else None
    after: Any = next(iter(turn.users), None)
    if len(turn.users) != 1 or not _is_split(split) or not _is_split(after):
        return None
    rows: Any = split.args[0]
    first, last = split.args[1][0], split.args[1][-1]
    before, made = _parts(split), _parts(after)
    if (
        op_name(rows) != "unflatten"
        or rows.args[1:] != (-1, (-1, size))
        or list(rows.users) != [split]
        or (len(split.args[1]), after.args[1]) != (2, [first])
        or sorted(before) != [0, 1, 2]
        or sorted(made) != [0, 1]
        or [before[0], before[1]] != [q, k]
        or list(q.users) != [turn]
        or list(k.users) != [turn]
    ):
        return None
    results = made[0], made[1], before[2]
    if not all(_reads_any_strides(user) for each in results for user in each.users):
        return None
    dead = frozenset((turn, after, split, rows, *before.values(), *made.values()))
    return _Match(rows.args[0], turn, results, (first, last - first), dead)


def _is_split(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and op_name(node) == "tensor_split"
        and (node.args[2:] or node.kwargs.get("dim")) in ((1,), 1)
    )


def _parts(split: fx.Node) -> dict[Any, fx.Node]:
    """Return the parts that are read, by number."""
    return {user.args[1]: user for user in split.users if user.target is operator.getitem}


def _reads_any_strides(user: fx.Node) -> bool:
    """Whether the layout of a user's result does not depend on that of its arguments."""
    return our_op(user) in ("attention", "attention_quantize") or op_name(user) == "new_empty"
