"""Compares compiled pieces with their traced code on random values.

The difference must not exceed what rounding explains. Both compute the same function, but round at
different places. One rounding changes a number by at most a share u of its size, where u = eps / 2
of the coarsest dtype of the piece. Independent errors of n ops change a row by about sqrt(n) * u of
its length (N. Higham, Accuracy and Stability of Numerical Algorithms, 2.8). Sums are in 32 bits and
in another order, which changes them by about sqrt(K) * 2^-24 for K terms. A piece may amplify small
differences, for example where numbers cancel. This growth is measured with the traced function, on
inputs that differ by one eps. So a row may differ by

    2 * growth * (sqrt(n) * u + sqrt(K) * 2^-24)

of its length. If a number that is off by u is quantised, it becomes its neighbour with probability
u / step, where step is the distance of two 8-bit numbers. That changes a row by about sqrt(u *
step). If it happens to a single number of 64 or more, it changes the row by step / 3. For SmolLM2's
pieces in bfloat16, the bound is 0.03 to 0.13, and the differences are 0.005 to 0.015.
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

CHECKED_TOKENS = 24  # Not a multiple of a page. `growth` is measured with them.
_SMALL_SIZES = (1, 2)
# Rows alternate between these sizes. Small rows show the epsilon that a norm adds.
_ROW_SIZES = (1.0, 1e-3)
_FACTOR = 2.0
_MOST_GROWTH = 4.0
_SINGLE = 2.0**-24
# Distance of two neighbouring numbers, as a share of the largest.
_STEPS = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}

# Maps a number of tokens to example inputs of the forward.
Inputs = Callable[[int], Sequence[torch.Tensor]]


def check_pieces(
    forward: PiecewiseForward,
    inputs: Inputs,
    largest: int,
    is_out_of_memory: Callable[[BaseException], bool],
) -> Iterator[bool]:
    """Compare each piece with its traced code. Yield before each run whether it has many tokens.

    `largest` is the number of tokens of the longest step. If the memory is too small for it, it is
    not compared. Raise `CaptureError` if a piece differs from its traced code.
    """
    for number, piece in enumerate(forward.plan.pieces):
        if not piece.traced:
            continue
        comparison, growth = _Comparison(forward, number, piece, inputs), 1.0
        some = forward.plan.good_for(CHECKED_TOKENS)
        for tokens in dict.fromkeys(map(forward.plan.good_for, (some, *_SMALL_SIZES, largest))):
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
    """Compares a distinct piece at its first call, with the weights of that call."""

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
        """Return the ratio of the change of the outputs to that of the inputs, if these change by
        one eps. It is at least 1.
        """
        off = self.traced(tokens, off_by=self._eps)
        rows = self._rows(tokens)
        moved = [
            _distance(actual, wanted, rows) for actual, wanted in zip(off, expected, strict=True)
        ]
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
                    f"was traced by {distance:.2g} at {tokens} tokens, rounding explains "
                    f"{bound:.2g}"
                )

    def _bound(self) -> float:
        ops = sum(node.op.startswith("call") for node in self._module.graph.nodes)
        terms = max(
            (extent.fixed for spec in self._piece.inputs for extent in spec.shape), default=1
        )
        arguments = [argument for node in self._module.graph.nodes for argument in node.args]
        steps = [
            _STEPS[found]
            for found in arguments
            if isinstance(found, torch.dtype) and found in _STEPS
        ]
        neighbours = math.sqrt(sum(steps) * self._eps / 2) + max(steps, default=0.0) / 3
        rounding = math.sqrt(ops) * self._eps / 2 + math.sqrt(max(terms, 1)) * _SINGLE
        return _FACTOR * (rounding + neighbours)

    @property
    def _eps(self) -> float:
        """The largest eps of the inputs' dtypes, except those of 8 bits, which are exact."""
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
        """Return the number of rows of a step, and of one rank's part of it."""
        return tokens, tokens // self._forward.plan.unit

    def _values(self, tokens: int, off_by: float = 0.0) -> dict[int, torch.Tensor]:
        """Return random values by their numbers, the same at each call.

        Each float is changed by the share `off_by`, up or down.
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
                else _random_values(spec, tokens, generator, off_by)
            )
        return values


def traced_piece(piece: DistinctPiece) -> CompiledPiece:
    """Return the piece as it was traced, to run instead of the compiled one."""
    forward = _load(piece).forward
    return CompiledPiece(lambda inputs: forward(*inputs))


def _load(piece: DistinctPiece) -> fx.GraphModule:
    module: fx.GraphModule = pickle.loads(base64.b64decode(piece.traced))
    return module


def _random_values(
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
    """Return for each output whether the piece computes it. Some outputs are only allocated."""
    uninitialised: set[fx.Node] = set()
    for node in graph.nodes:
        if "empty" in str(node.target) or any(
            source in uninitialised for source in node.all_input_nodes
        ):
            uninitialised.add(node)
    outputs: Any = graph.output_node().args[0]
    return [node not in uninitialised for node in outputs]


def _distance(actual: torch.Tensor, expected: torch.Tensor, counts: Sequence[int]) -> float:
    """Return the largest distance of a row from the expected row, relative to its length.

    Rows whose expected values are not finite do not count. `counts` are the possible numbers of
    rows.
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
