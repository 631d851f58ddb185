"""Compiled pieces against what was traced, on made-up values: the difference that rounding
explains, and no more.

Both compute the same function, and round at other places. One rounding moves a number by at most u
of its size, u = eps / 2 of the coarsest dtype that the piece has; n ops one after another move a
row, as independent errors add up, by about sqrt(n) * u of its length (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2.8). Sums are kept in 32 bits and taken in another order, which
moves them by about sqrt(K) * 2^-24 for K terms. Where a piece makes small differences larger, as it
does where numbers cancel, it does so with any difference: how much is measured, by the traced
function alone, on inputs that are off by one eps. So a row may differ by

    2 * growth * (sqrt(n) * u + sqrt(K) * 2^-24)

of its length. Where numbers are quantised, one that is u off becomes its neighbour, a step of the
8-bit type away, with probability u / step: that moves a row by about sqrt(u * step), and where it
happens to a single one of 64 numbers or more, by step / 3. For SmolLM2's pieces in bfloat16 the
bound is 0.03 to 0.13, and they are 0.005 to 0.015
off.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .compiler import CompiledPiece
from .core.errors import CaptureError
from .piecewise import PiecewiseForward
from .plan import DistinctPiece
from .shapes import TensorSpec

CHECKED_TOKENS = 24
"""Some, and no multiple of a page; `growth` is measured on them."""
_FEW = (1, 2)
_ROW_SIZES = (1.0, 1e-3)
"""By turns: in small rows it shows what a norm adds to their square."""
_FACTOR = 2.0
_MOST_GROWTH = 4.0
_SINGLE = 2.0**-24
_STEPS = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
"""From a number to its neighbour, as a share of the largest."""

Inputs = Callable[[int], Sequence[torch.Tensor]]
"""For a number of tokens, what the forward takes of so many."""


def check_pieces(
    forward: PiecewiseForward,
    inputs: Inputs,
    largest: int,
    is_out_of_memory: Callable[[BaseException], bool],
) -> Iterator[bool]:
    """One run of one piece for each turn, which says before whether it is of many tokens.

    Raises `CaptureError` where a piece gives other answers than what it was made of.

    `largest`: the longest step that may come. Where the memory does not do for so many tokens on
    top, they are left out.
    """
    for number, piece in enumerate(forward.plan.pieces):
        if not piece.traced:
            continue
        comparison, growth = _Comparison(forward, number, piece, inputs), 1.0
        some = forward.plan.good_for(CHECKED_TOKENS)
        for tokens in dict.fromkeys(map(forward.plan.good_for, (some, *_FEW, largest))):
            try:
                yield tokens > some
                expected = comparison.traced(tokens)
                if tokens == some:
                    yield False
                    growth = comparison.growth(tokens, expected)
                yield tokens > some
                comparison.check(tokens, expected, growth)
            except Exception as error:
                if not is_out_of_memory(error) or tokens <= some:
                    raise


class _Comparison:
    """A distinct piece at its first call, with that call's weights."""

    def __init__(
        self, forward: PiecewiseForward, number: int, piece: DistinctPiece, inputs: Inputs
    ) -> None:
        self._forward, self._number, self._piece, self._inputs = forward, number, piece, inputs
        self._module = _load(piece)
        self._computed = _computed(self._module.graph)

    @torch.no_grad()
    def traced(self, tokens: int, off_by: float = 0.0) -> list[torch.Tensor]:
        values = self._forward.arguments(self._number, self._values(tokens, off_by), packed=False)
        return [
            output
            for output, counts in zip(self._module(*values), self._computed, strict=True)
            if counts
        ]

    def growth(self, tokens: int, expected: Sequence[torch.Tensor]) -> float:
        """How many times as far off the outputs are as the inputs, where those are off by one eps;
        at least 1.
        """
        off = self.traced(tokens, off_by=self._eps)
        rows = self._rows(tokens)
        moved = [_distance(one, other, rows) for one, other in zip(off, expected, strict=True)]
        return min(max([1.0, *(distance / self._eps for distance in moved)]), _MOST_GROWTH)

    @torch.no_grad()
    def check(self, tokens: int, expected: Sequence[torch.Tensor], growth: float) -> None:
        outputs = self._forward.run_piece(self._number, self._values(tokens))
        bound = growth * self._bound()
        for output, wanted in zip(
            [o for o, counts in zip(outputs, self._computed, strict=True) if counts],
            expected,
            strict=True,
        ):
            distance = _distance(output, wanted, self._rows(tokens))
            if not distance <= bound:
                raise CaptureError(
                    f"piece {self._number} of {len(self._forward.plan.pieces)} differs from what "
                    f"was traced by {distance:.2g} "
                    f"at {tokens} tokens, rounding explains {bound:.2g}"
                )

    def _bound(self) -> float:
        ops = sum(node.op.startswith("call") for node in self._module.graph.nodes)
        terms = max(
            (extent.fixed for spec in self._piece.inputs for extent in spec.shape), default=1
        )
        arguments = [each for node in self._module.graph.nodes for each in node.args]
        steps = [
            _STEPS[each] for each in arguments if isinstance(each, torch.dtype) and each in _STEPS
        ]
        neighbours = math.sqrt(sum(steps) * self._eps / 2) + max(steps, default=0.0) / 3
        rounding = math.sqrt(ops) * self._eps / 2 + math.sqrt(max(terms, 1)) * _SINGLE
        return _FACTOR * (rounding + neighbours)

    @property
    def _eps(self) -> float:
        """Of numbers in 16 bits or more: those of 8 are what they are."""
        dtypes = {getattr(torch, spec.dtype) for spec in self._piece.inputs}
        return max(
            (
                torch.finfo(dtype).eps
                for dtype in dtypes
                if dtype.is_floating_point and dtype.itemsize > 1
            ),
            default=2 * _SINGLE,
        )

    def _rows(self, tokens: int) -> tuple[int, int]:
        """Of a step, and of one rank in it."""
        return tokens, tokens // self._forward.plan.unit

    def _values(self, tokens: int, off_by: float = 0.0) -> dict[int, torch.Tensor]:
        """Made-up values by their numbers, the same at each call, each float off by as much of
        itself, up or down.
        """
        step = self._forward.plan.first_call(self._number)
        given = dict(zip(self._forward.plan.inputs, self._inputs(tokens), strict=True))
        generator = torch.Generator().manual_seed(1000 * self._number + tokens)
        values = {}
        for number, spec in zip(step.inputs, self._piece.inputs, strict=True):
            if spec.weight:
                continue
            values[number] = (
                given[number].clone()
                if number in given
                else _made_up(spec, tokens, generator, off_by)
            )
        return values


def traced_piece(piece: DistinctPiece) -> CompiledPiece:
    """A piece as it was traced, to be run in place of the compiled one."""
    forward = _load(piece).forward
    return CompiledPiece(lambda inputs: forward(*inputs))


def _load(piece: DistinctPiece) -> fx.GraphModule:
    module: fx.GraphModule = pickle.loads(base64.b64decode(piece.traced))
    return module


def _made_up(
    spec: TensorSpec, tokens: int, generator: torch.Generator, off_by: float
) -> torch.Tensor:
    tensor = spec.empty(tokens).zero_()
    if not tensor.is_floating_point():
        return tensor
    values = torch.randn(tensor.shape, generator=generator)
    axis = next((axis for axis, extent in enumerate(spec.shape) if extent.is_rows), None)
    if axis is not None:
        sizes = torch.tensor(
            [_ROW_SIZES[row % len(_ROW_SIZES)] for row in range(values.shape[axis])]
        )
        values *= sizes.view([-1 if other == axis else 1 for other in range(values.dim())])
    values = values.to(tensor.dtype).float()
    if off_by:
        values *= 1 + off_by * (
            2.0 * torch.randint(2, values.shape, generator=torch.Generator().manual_seed(tokens))
            - 1
        )
    return tensor.copy_(values)


def _computed(graph: fx.Graph) -> list[bool]:
    """For each output, whether the piece computes it: one that it only makes room for holds
    anything.
    """
    garbage: set[fx.Node] = set()
    for node in graph.nodes:
        if "empty" in str(node.target) or any(source in garbage for source in node.all_input_nodes):
            garbage.add(node)
    outputs: Any = graph.output_node().args[0]
    return [node not in garbage for node in outputs]


def _distance(actual: torch.Tensor, expected: torch.Tensor, counts: Sequence[int]) -> float:
    """How far the worst row is from what it should be, as a share of its length; rows that should
    be no number do not count. `counts`: how many rows there may be.
    """
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    rows = expected.shape[0] if expected.dim() and expected.shape[0] in counts else 1
    actual, expected = actual.float().reshape(rows, -1), expected.float().reshape(rows, -1)
    lengths = expected.norm(dim=-1)
    distances = ((actual - expected).norm(dim=-1) / lengths.clamp_min(1e-30))[lengths.isfinite()]
    if distances.isnan().any():
        return math.inf
    return float(distances.max()) if len(distances) else 0.0
