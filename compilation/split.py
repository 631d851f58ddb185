"""Splits a traced forward at its split ops into pieces, which are independent of layer names and of
each other.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from .core.errors import TraceError
from .core.split_ops import split_op_name
from .piece_key import op_names
from .shapes import Extent, TensorSpec, TokenShapes
from .torch_private import Trace


class PieceCall(NamedTuple):
    """A call of a piece on values that computes values. Values are numbers, see `Cut`."""

    graph: fx.Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class OpCall(NamedTuple):
    """A call of a split op on values. `outputs` is empty or one value."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class Cut:
    """A forward as a list of calls. Each value has a number.

    Attributes:
        tensors: The inputs and weights.
        specs: The specs of inputs, weights and values between calls.
        constants: Arguments of split ops that are not tensors.
        output: The value that the forward returns.
    """

    calls: list[PieceCall | OpCall] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    output: int = -1


def split(trace: Trace, inputs: list[torch.Tensor]) -> Cut:
    """Split `trace` at every registered split op.

    Raise `TraceError` if a value between two calls is not a tensor.
    """
    return _Splitter(trace, inputs).run()


class _Splitter:
    """Walks once over the traced graph."""

    def __init__(self, trace: Trace, inputs: list[torch.Tensor]) -> None:
        self._trace = trace
        self._cut = Cut()
        self._numbers: dict[fx.Node, int] = {}
        self._token_inputs: list[fx.Node] = []
        for node in trace.graph.nodes:
            if _is_scalar(node):
                trace.shapes.expression(node.meta["example_value"])
        weights = set(trace.weights(inputs))
        for node, value in zip(trace.graph.find_nodes(op="placeholder"), trace.values, strict=True):
            if isinstance(value, torch.Tensor):
                self._cut.tensors[self._number(node, weight=node in weights)] = value
                self._token_inputs += [] if node in weights else [node]

    def run(self) -> Cut:
        output = self._trace.graph.output_node()
        for segment in _segments(self._trace.graph):
            if isinstance(segment, fx.Node):
                if segment.kwargs:
                    raise TraceError(f"pass the arguments of split op {segment.target} by position")
                name = split_op_name(segment.target)
                assert name is not None
                inputs = tuple(
                    self._number(arg) if isinstance(arg, fx.Node) else self._constant(arg)
                    for arg in segment.args
                )
                results = (self._number(segment),) if segment.users else ()
                self._cut.calls.append(OpCall(name, inputs, results))
            else:
                inside = set(segment)
                made = [node for node in segment if any(user not in inside for user in node.users)]
                shapes = self._trace.shapes
                graph, sources = _piece_graph(segment, made, self._token_inputs, shapes)
                numbers = tuple(map(self._number, sources)), tuple(map(self._number, made))
                self._cut.calls.append(PieceCall(graph, *numbers))
        returned = output.args[0]
        if not (
            isinstance(returned, tuple | list)
            and len(returned) == 1
            and isinstance(returned[0], fx.Node)
        ):
            raise TraceError("the forward must return one tensor")
        if returned[0].op == "placeholder":
            raise TraceError("the forward returns its input")
        self._cut.output = self._numbers[returned[0]]
        return self._cut

    def _number(self, node: fx.Node, *, weight: bool = False) -> int:
        if node not in self._numbers:
            fake = node.meta.get("example_value")
            if not isinstance(fake, torch.Tensor):
                raise TraceError(f"{node.name} crosses a cut and is not a tensor")
            self._numbers[node] = len(self._numbers) + len(self._cut.constants)
            self._cut.specs[self._numbers[node]] = self._trace.shapes.spec(fake, weight=weight)
        return self._numbers[node]

    def _constant(self, value: Any) -> int:
        if not isinstance(value, int | float | bool | str | None):
            raise TraceError(f"a split op takes {value!r}, which is neither tensor nor number")
        number = len(self._numbers) + len(self._cut.constants)
        self._cut.constants[number] = value
        return number


def _piece_graph(
    nodes: list[fx.Node], outputs: list[fx.Node], token_inputs: list[fx.Node], shapes: TokenShapes
) -> tuple[fx.Graph, list[fx.Node]]:
    """Return `nodes` as a new graph, and the nodes that are its inputs.

    No input is a scalar: the graph reads the number of tokens from the shape of an input, and
    computes other scalars again.
    """
    nodes = _with_scalars(nodes)
    inside = set(nodes)
    sources = list(
        dict.fromkeys(
            source for node in nodes for source in node.all_input_nodes if source not in inside
        )
    )
    tensors = [source for source in sources if not _is_scalar(source)]
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    if len(tensors) < len(sources):
        counted, axis = _token_axis([*tensors, *token_inputs], shapes)
        tensors = list(dict.fromkeys([*tensors, counted]))
    for number, source in enumerate(tensors):
        inner[source] = graph.placeholder(f"input_{number}")
        inner[source].meta = dict(source.meta)
    for source in sources:
        if _is_scalar(source):
            inner[source] = graph.call_function(torch.ops.aten.sym_size.int, (inner[counted], axis))
    for node in nodes:
        inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.output(tuple(inner[node] for node in outputs))
    return graph, tensors


def _with_scalars(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return `nodes`, each after the scalars that it needs."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if _is_scalar(source) and source.op != "placeholder":
                visit(source)
        found[node] = None

    for node in nodes:
        visit(node)
    return list(found)


def _token_axis(nodes: list[fx.Node], shapes: TokenShapes) -> tuple[fx.Node, int]:
    """Return the first node that has a dimension of one row per token, and that dimension."""
    for node in nodes:
        for axis, size in enumerate(node.meta["example_value"].shape):
            if shapes.extent(size) == Extent(shapes.unit, 0, shapes.unit):
                return node, axis
    raise AssertionError("a forward's inputs have one row per token")


def piece_ops(graph: fx.Graph) -> list[list[str]]:
    """Return the names of the ops of each piece of the graph, for people."""
    return [op_names(segment) for segment in _segments(graph) if isinstance(segment, list)]


def _segments(graph: fx.Graph) -> list[fx.Node | list[fx.Node]]:
    """Return split ops, and lists of the nodes between them.

    A `getitem` of a tuple is in the list where the tuple is computed.
    """
    segments: list[fx.Node | list[fx.Node]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    current: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or _is_scalar(node):
            continue
        if node.op in ("get_attr", "call_module"):
            raise TraceError(f"the traced graph has its own {node.target}")
        if split_op_name(node.target) is not None:
            segments += [current, node]
            current = []
        else:
            source = node.args[0] if node.target is operator.getitem else None
            home[node] = home.get(source, current) if isinstance(source, fx.Node) else current
            home[node].append(node)
    return [segment for segment in [*segments, current] if segment != []]


def _is_scalar(node: fx.Node) -> bool:
    """Whether a node is the number of tokens or a scalar computed from it."""
    return isinstance(
        node.meta.get("example_value"),
        torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool,
    )
