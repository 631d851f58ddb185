"""A cut forward without its tensors: what is called with what, in order. It can be written down and
loaded again.
"""

from __future__ import annotations

import base64
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import fx

from .compiler import bare_module
from .passes.cpu.pack_linear import unpacked
from .piece_key import op_names, piece_key
from .shapes import TensorSpec
from .split import Cut, PieceCall


class Step(NamedTuple):
    """One call: of piece number `piece`, or of split op `op`. Values are numbers."""

    piece: int | None
    op: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Stretch(NamedTuple):
    """`piece`, then `op`, `times` times in a row; either may be missing."""

    piece: int | None
    op: str | None
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctPiece:
    """A piece that is called once or often. `ops`: what it does, for people, and `before`: what it
    did before the passes; `traced`: its graph, on weights as the model has them, in base64, to
    check others against.
    """

    key: str
    inputs: tuple[TensorSpec, ...]
    ops: tuple[str, ...]
    before: tuple[str, ...] = ()
    traced: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps over values numbered from 0 to `num_values` - 1.

    `inputs`: the value of each argument of the forward, None where it is not used. `weights`:
    values that are parameters or buffers, by their names in the model. `weight_specs`: what they
    must look like. `constants`: plain values. `passes`: how often each pass matched. `unit`: it is
    good for twice so many tokens and other multiples of it. `sent`: `bytes_sent` before the passes
    and behind them.
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
    unit: int = 1
    sent: tuple[float, float] = (0.0, 0.0)

    def good_for(self, tokens: int) -> int:
        """The least number of tokens, from `tokens` on, that the plan is good for."""
        return tokens if self.unit == 1 else self.unit * max(-(-tokens // self.unit), 2)

    def calls(self) -> Counter[int]:
        """How often each distinct piece is called."""
        return Counter(step.piece for step in self.steps if step.piece is not None)

    def stretches(self) -> list[Stretch]:
        """The calls in order, equal neighbours told once: a model of 30 like layers has three or
        four.
        """
        pairs: list[tuple[int | None, str | None]] = []
        for step in self.steps:
            if step.op is not None and pairs and pairs[-1][1] is None:
                pairs[-1] = (pairs[-1][0], step.op)
            else:
                pairs.append((step.piece, step.op))
        return [Stretch(*pair, len(list(group))) for pair, group in groupby(pairs)]

    def first_call(self, piece: int) -> Step:
        """The first call of a distinct piece."""
        return next(step for step in self.steps if step.piece == piece)

    @property
    def is_portable(self) -> bool:
        """Whether all its tensors have names, so that another process can find them."""
        return not any(name.startswith("~") for name in self.weights.values())

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a model's tensors are those that the plan was made for, by name and kind."""
        return all(
            name in tensors and self.weight_specs[number].describes(tensors[name])
            for number, name in self.weights.items()
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_json`, after a way through JSON. Raises `KeyError`, `TypeError` or
        `ValueError` on other data.
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
            unit=data["unit"],
            sent=tuple(data["sent"]),
        )


def make_plan(
    cut: Cut,
    inputs: list[torch.Tensor],
    names: Mapping[int, str],
    passes: Mapping[str, int],
    before: Sequence[Sequence[str]] = (),
    unit: int = 1,
    sent: tuple[float, float] = (0.0, 0.0),
) -> tuple[Plan, list[fx.Graph]]:
    """The plan of a cut forward, and the graph of each distinct piece. `names`: of the model's
    tensors, by `id`; `passes`: how often each matched; `before`: the ops of each
    call of a piece before them; `unit`, `sent`: see `Plan`.

    A tensor that is neither input nor named is called `~number`; a plan with such a one is good for
    this process only.
    """
    numbers: dict[str, int] = {}
    pieces: list[DistinctPiece] = []
    graphs: list[fx.Graph] = []
    steps = []
    was = iter(before)
    for call in cut.calls:
        if not isinstance(call, PieceCall):
            steps.append(Step(None, call.name, call.inputs, call.outputs))
            continue
        did = tuple(next(was, ()))
        specs = tuple(cut.specs[number] for number in call.inputs)
        key = piece_key(call.graph, specs)
        if key not in numbers:
            numbers[key] = len(pieces)
            plain, _ = unpacked(call.graph)
            pieces.append(
                DistinctPiece(
                    key=key,
                    inputs=specs,
                    ops=tuple(op_names(plain.nodes)),
                    before=did,
                    traced=_written(plain),
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
        unit=unit,
        sent=sent,
    )
    return plan, graphs


def _written(graph: fx.Graph) -> str:
    """A piece's graph in base64; empty where it calls what cannot be written down."""
    try:
        return base64.b64encode(pickle.dumps(bare_module(graph))).decode()
    except Exception:
        return ""
