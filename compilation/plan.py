"""The plan of a split forward: its calls and their arguments, in order, without tensors.

A plan can be stored as JSON and loaded again.
"""

from __future__ import annotations

import base64
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from .compiler import bare_module
from .passes.cpu.pack_linear import unpacked
from .piece_key import op_names, piece_key
from .shapes import TensorSpec
from .split import Cut, PieceCall


class Step(NamedTuple):
    """One call, of piece number `piece` or of split op `op`. Values are numbers."""

    piece: int | None
    op: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Stretch(NamedTuple):
    """A run of `times` equal calls: `piece`, then `op`. Either may be missing."""

    piece: int | None
    op: str | None
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctPiece:
    """A piece that is called once or several times.

    Attributes:
        ops: Names of its ops, for people.
        before: Names of its ops before the passes.
        traced: Its pickled graph on unpacked weights, in base64. Compiled pieces are checked
            against it. Empty if the graph cannot be pickled.
    """

    key: str
    inputs: tuple[TensorSpec, ...]
    ops: tuple[str, ...]
    before: tuple[str, ...] = ()
    traced: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps over values numbered from 0 to `num_values` - 1.

    Attributes:
        inputs: The value of each argument of the forward, None if the argument is not used.
        weights: The names of values that are parameters or buffers of the model.
        weight_specs: The specs of these weights.
        constants: Values that are not tensors.
        passes: Number of matches of each pass that ran.
        passes_off: Why each other pass did not run.
        unit: The number of tokens must be a multiple of it, at least twice it if it is not 1.
        sent: `bytes_sent` before and after the passes.
    """

    steps: tuple[Step, ...]
    pieces: tuple[DistinctPiece, ...]
    inputs: tuple[int | None, ...]
    weights: dict[int, str]
    weight_specs: dict[int, TensorSpec]
    constants: dict[int, Any]
    output: int
    num_values: int
    passes: dict[str, int]
    passes_off: dict[str, str] = field(default_factory=dict)
    unit: int = 1
    sent: tuple[float, float] = (0.0, 0.0)

    def good_for(self, tokens: int) -> int:
        """Return the least number of tokens, at least `tokens`, that the plan supports."""
        return tokens if self.unit == 1 else self.unit * max(-(-tokens // self.unit), 2)

    def calls(self) -> Counter[int]:
        """Count the calls of each distinct piece."""
        return Counter(step.piece for step in self.steps if step.piece is not None)

    def stretches(self) -> list[Stretch]:
        """Return the calls in order, with equal neighbours joined.

        A model of 30 equal layers has three or four stretches.
        """
        pairs: list[tuple[int | None, str | None]] = []
        for step in self.steps:
            if step.op is not None and pairs and pairs[-1][1] is None:
                pairs[-1] = (pairs[-1][0], step.op)
            else:
                pairs.append((step.piece, step.op))
        return [Stretch(*pair, len(list(group))) for pair, group in groupby(pairs)]

    def first_call(self, piece: int) -> Step:
        """Return the first call of a distinct piece."""
        return next(step for step in self.steps if step.piece == piece)

    @property
    def is_portable(self) -> bool:
        """Whether all weights have names, by which another process can find them."""
        return not any(name.startswith("~") for name in self.weights.values())

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a model's tensors match the names and specs of the plan."""
        return all(
            name in tensors and self.weight_specs[number].describes(tensors[name])
            for number, name in self.weights.items()
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Read a plan from the JSON of `to_json`.

        Raise `KeyError`, `TypeError` or `ValueError` for other data.
        """
        return cls(
            steps=tuple(
                Step(piece, op, tuple(inputs), tuple(outputs))
                for piece, op, inputs, outputs in data["steps"]
            ),
            pieces=tuple(
                DistinctPiece(
                    key=piece["key"],
                    inputs=tuple(TensorSpec.from_json(spec) for spec in piece["inputs"]),
                    ops=tuple(piece["ops"]),
                    before=tuple(piece["before"]),
                    traced=piece["traced"],
                )
                for piece in data["pieces"]
            ),
            inputs=tuple(data["inputs"]),
            weights={int(number): name for number, name in data["weights"].items()},
            weight_specs={
                int(number): TensorSpec.from_json(spec)
                for number, spec in data["weight_specs"].items()
            },
            constants={int(number): value for number, value in data["constants"].items()},
            output=data["output"],
            num_values=data["num_values"],
            passes=dict(data["passes"]),
            passes_off=dict(data["passes_off"]),
            unit=data["unit"],
            sent=tuple(data["sent"]),
        )


def make_plan(
    cut: Cut,
    inputs: list[torch.Tensor],
    names: Mapping[int, str],
    passes: Mapping[str, int],
    passes_off: Mapping[str, str] = MappingProxyType({}),
    before: Sequence[Sequence[str]] = (),
    unit: int = 1,
    sent: tuple[float, float] = (0.0, 0.0),
) -> tuple[Plan, list[fx.Graph]]:
    """Return the plan of a split forward, and the graph of each distinct piece.

    `names` are those of the model's tensors, by `id`. `before` holds the ops of each call of a
    piece before the passes. `passes`, `passes_off`, `unit` and `sent` are those of `Plan`.

    A tensor that is neither an input nor named is called `~number`. A plan with such a tensor is
    valid in this process only.
    """
    numbers: dict[str, int] = {}
    pieces: list[DistinctPiece] = []
    graphs: list[fx.Graph] = []
    steps = []
    ops_before = iter(before)
    for call in cut.calls:
        if not isinstance(call, PieceCall):
            steps.append(Step(None, call.name, call.inputs, call.outputs))
            continue
        call_ops = tuple(next(ops_before, ()))
        specs = tuple(cut.specs[number] for number in call.inputs)
        key = piece_key(call.graph, specs)
        if key not in numbers:
            numbers[key] = len(pieces)
            plain, _ = unpacked(call.graph)
            try:
                traced = base64.b64encode(pickle.dumps(bare_module(plain))).decode()
            except Exception:  # Some graphs cannot be pickled.
                traced = ""
            pieces.append(
                DistinctPiece(
                    key=key,
                    inputs=specs,
                    ops=tuple(op_names(plain.nodes)),
                    before=call_ops,
                    traced=traced,
                )
            )
            graphs.append(call.graph)
        steps.append(Step(numbers[key], None, call.inputs, call.outputs))
    places = {id(tensor): number for number, tensor in cut.tensors.items()}
    arguments = tuple(places.get(id(tensor)) for tensor in inputs)
    weights = {
        number: names.get(id(tensor), f"~{number}")
        for number, tensor in cut.tensors.items()
        if number not in arguments
    }
    plan = Plan(
        steps=tuple(steps),
        pieces=tuple(pieces),
        inputs=arguments,
        weights=weights,
        weight_specs={number: cut.specs[number] for number in weights},
        constants=cut.constants,
        output=cut.output,
        num_values=len(cut.specs) + len(cut.constants),
        passes=dict(passes),
        passes_off=dict(passes_off),
        unit=unit,
        sent=sent,
    )
    return plan, graphs
