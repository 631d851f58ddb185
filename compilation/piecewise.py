"""A forward as pieces with split ops between them.

It runs at any number of tokens, or is recorded piece by piece for one number of tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .compiler import CompiledPiece
from .core import split_ops
from .plan import Plan, Step
from .recording import Recorder, Recording

_Take = Callable[[list[Any]], Sequence[Any]]


class _Call(NamedTuple):
    """Call `run` with the registers that `take` selects. Store the results in registers `put`."""

    run: Callable[[Sequence[Any]], Sequence[Any]]
    take: _Take
    put: tuple[int, ...]


class PiecewiseForward:
    """Calls pieces and split ops one after another, with as little Python between them as possible.

    Values are in a list of registers. Weights and constants keep theirs. A register of another
    value is reused after the last use of the value, which frees its memory during the forward.
    Weights may change in place, except those that `pack` has copied into another layout.
    """

    def __init__(
        self,
        plan: Plan,
        pieces: Sequence[CompiledPiece],
        tensors: Mapping[str, torch.Tensor],
        pack: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        assert len(pieces) == len(plan.pieces)
        self.plan = plan
        self._pieces = list(pieces)
        self._weights = {number: tensors[name] for number, name in plan.weights.items()}
        # A packed weight is a new value. `packed` maps numbers of weights to those of new values.
        packed: dict[int, int] = {}
        self._steps = []
        for step in plan.steps:
            inputs = list(step.inputs)
            for place in pieces[step.piece].packed if step.piece is not None else ():
                inputs[place] = packed.setdefault(inputs[place], plan.num_values + len(packed))
            self._steps.append(step._replace(inputs=tuple(inputs)))
        self._weights |= {number: pack(self._weights[source]) for source, number in packed.items()}
        self._last_uses = _last_uses(self._steps, plan.output)
        registers = _assign_registers(self._steps, self._last_uses, plan.num_values + len(packed))
        self._initial: list[Any] = [None] * (max(registers.values()) + 1)
        for number, value in [*self._weights.items(), *plan.constants.items()]:
            self._initial[registers[number]] = value
        self._inputs = [None if number is None else registers[number] for number in plan.inputs]
        self._output = registers[plan.output]
        self._calls = [
            _Call(
                self._run(step),
                _picker([registers[number] for number in step.inputs]),
                tuple(registers[n] for n in step.outputs),
            )
            for step in self._steps
        ]

    @property
    def parts(self) -> tuple[PiecewiseForward, ...]:
        """The forwards of all lengths: this one."""
        return (self,)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the forward without graphs, at the number of tokens of the inputs."""
        registers = self._initial.copy()
        for place, tensor in zip(self._inputs, inputs, strict=True):
            if place is not None:
                registers[place] = tensor
        for run, take, put in self._calls:
            for place, value in zip(put, run(take(registers)), strict=False):
                registers[place] = value
        output: torch.Tensor = registers[self._output]
        return output

    def arguments(
        self, piece: int, values: Mapping[int, torch.Tensor], *, packed: bool
    ) -> list[Any]:
        """Return the arguments of a distinct piece at its first call.

        They are `values` by number, and its weights, either as the model has them or `packed`.
        """
        step = self.plan.first_call(piece)
        if packed:
            step = self._steps[self.plan.steps.index(step)]
        known = {**self._weights, **self.plan.constants, **values}
        return [known[number] for number in step.inputs]

    def run_piece(self, piece: int, values: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run a distinct piece alone, on `values` and the weights of its first call."""
        return self._pieces[piece].run(self.arguments(piece, values, packed=True))

    def with_pieces(self, pieces: Sequence[CompiledPiece]) -> PiecewiseForward:
        """Return this forward with other pieces, which take no packed weights."""
        return PiecewiseForward(self.plan, pieces, self.weights, lambda weight: weight)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, without packed ones.

        Packed weights belong to this object and never move. Their layout may have no address.
        """
        return {name: self._weights[number] for number, name in self.plan.weights.items()}

    def record(self, inputs: Sequence[torch.Tensor], recorder: Recorder) -> Recording:
        """Record each piece as a graph on these `inputs`. Split ops stay calls between the graphs.

        A value is referenced until its last use. After that, only its address is known, so the pool
        can reuse its memory for later pieces. A view also references the value that it is a view
        of, because it is made from a weak reference.
        """
        held: dict[int, Any] = {}
        seen: dict[int, Any] = {**self._weights, **self.plan.constants}
        for number, tensor in zip(self.plan.inputs, inputs, strict=True):
            if number is not None:
                seen[number] = tensor
        recorder.watch(self.weights)
        for index, step in enumerate(self._steps):
            arguments = [seen[number] for number in step.inputs]
            if step.piece is None:
                results = recorder.call(split_ops.implementation(_op(step)), arguments)
            else:
                results = recorder.graph(
                    partial(self._pieces[step.piece].run, arguments), f"piece {index}"
                )
            for number, result in zip(step.outputs, results, strict=True):
                sources = [
                    held[n] for n in step.inputs if n in held and shares_memory(seen[n], result)
                ]
                held[number], seen[number] = (result, *sources), recorder.weak(result)
            for number in self._last_uses[index]:
                held.pop(number, None)
        return recorder.finish(seen[self.plan.output])

    def _run(self, step: Step) -> Callable[[Sequence[Any]], Sequence[Any]]:
        if step.piece is not None:
            return self._pieces[step.piece].run
        implementation = split_ops.implementation(_op(step))
        if not step.outputs:
            return lambda arguments: implementation(*arguments) or ()
        return lambda arguments: (implementation(*arguments),)


def shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap."""
    (start, end), (begin, finish) = _memory_range(first), _memory_range(second)
    return start < finish and begin < end


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _op(step: Step) -> str:
    assert step.op is not None
    return step.op


def _last_uses(steps: Sequence[Step], output: int) -> list[list[int]]:
    """Return for each step the computed values that no later step needs."""
    last = {
        number: index
        for index, step in enumerate(steps)
        for number in (*step.outputs, *step.inputs)
    }
    made = {number for step in steps for number in step.outputs} - {output}
    ending: list[list[int]] = [[] for _ in steps]
    for number in sorted(made):
        ending[last[number]].append(number)
    return ending


def _assign_registers(
    steps: Sequence[Step], last_uses: list[list[int]], num_values: int
) -> dict[int, int]:
    """Map values to registers. Computed values reuse the registers of values that have ended."""
    made = {number for step in steps for number in step.outputs}
    registers = {
        number: place for place, number in enumerate(n for n in range(num_values) if n not in made)
    }
    free: list[int] = []
    count = len(registers)
    for step, ending in zip(steps, last_uses, strict=True):
        for number in step.outputs:
            registers[number] = free.pop() if free else count
            count = max(count, registers[number] + 1)
        free += [registers[number] for number in ending]
    return registers


def _picker(places: list[int]) -> _Take:
    """Return a function that selects these registers. For several, it is implemented in C."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda registers: [registers[place] for place in places]
