"""Equal pieces share a key and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx
from toy_forward import ToyModel, step

from piecework.compilation.core.errors import TraceError
from piecework.compilation.piece_key import piece_key
from piecework.compilation.plan import Plan, make_plan
from piecework.compilation.shapes import Extent, TensorSpec
from piecework.compilation.split import split
from piecework.compilation.torch_private import trace

FLOATS = TensorSpec(
    shape=(Extent(1, 0), Extent(0, 8)),
    stride=(Extent(0, 8), Extent(0, 1)),
    dtype="float32",
    device="cpu",
    weight=False,
)


def plan_of(model: torch.nn.Module) -> Plan:
    inputs = list(step(6))
    return make_plan(split(trace(model.forward, inputs, 128), inputs), inputs, {}, {})[0]


def graph(
    *, op: object = torch.add, names: tuple[str, str] = ("a", "b"), argument: object = 1.0
) -> fx.Graph:
    made = fx.Graph()
    x = made.placeholder(names[0])
    y = made.create_node("call_function", op, (x, argument), name=names[1])
    made.output((y,))
    return made


@pytest.mark.parametrize("layers", [2, 5, 9])
def test_layers_that_are_alike_are_one_piece(layers: int) -> None:
    plan = plan_of(ToyModel(layers))
    assert len(plan.pieces) == 3
    assert sorted(plan.calls().values()) == sorted([1, layers - 1, 1])


def test_layers_with_other_constants_are_not_merged() -> None:
    # The middle pieces hold the norm of the next layer, so only the two with the same epsilon are
    # equal.
    assert len(plan_of(ToyModel(4, epsilons=[1e-5, 1e-5, 1e-3, 1e-5])).pieces) == 4


def test_pieces_with_other_names_and_weights_are_merged() -> None:
    one, other = plan_of(ToyModel(3, seed=1)), plan_of(ToyModel(6, seed=2))
    assert [piece.key for piece in one.pieces] == [piece.key for piece in other.pieces]


def test_names_of_nodes_do_not_matter() -> None:
    assert piece_key(graph(), [FLOATS]) == piece_key(graph(names=("weight", "sum")), [FLOATS])


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (Extent(1, 0), Extent(0, 16))},
        {"shape": (Extent(2, 0), Extent(0, 8))},
        {"shape": (Extent(1, 1), Extent(0, 8))},
        {"stride": (Extent(0, 16), Extent(0, 1))},
        {"dtype": "bfloat16"},
        {"device": "cuda:0"},
        {"weight": True},
    ],
    ids=str,
)
def test_inputs_of_another_kind_make_another_piece(changes: dict[str, object]) -> None:
    other = TensorSpec(
        **{name: getattr(FLOATS, name) for name in ("shape", "stride", "dtype", "device", "weight")}
        | changes
    )
    assert piece_key(graph(), [FLOATS]) != piece_key(graph(), [other])


@pytest.mark.parametrize(
    "argument", [1, True, 2.0, "1.0", None, torch.float32, (1.0,), slice(None, 1)], ids=str
)
def test_other_arguments_make_another_piece(argument: object) -> None:
    assert piece_key(graph(argument=argument), [FLOATS]) != piece_key(graph(), [FLOATS])


@pytest.mark.parametrize(
    "op",
    [torch.sub, torch.Tensor.add, torch.ops.aten.add.Tensor, torch.ops.aten.add],
    ids=["function", "method", "overload", "packet"],
)
def test_another_op_makes_another_piece(op: object) -> None:
    assert piece_key(graph(op=op), [FLOATS]) != piece_key(graph(), [FLOATS])


def test_an_argument_that_cannot_be_told_from_others_is_refused() -> None:
    with pytest.raises(TraceError, match="no canonical text"):
        piece_key(graph(argument=object), [FLOATS])


@pytest.mark.slow
def test_keys_are_the_same_in_every_process(tmp_path: Path) -> None:
    program = (
        f"import sys, json; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_piece_key import ToyModel, plan_of\n"
        "print(json.dumps([piece.key for piece in plan_of(ToyModel(3)).pieces]))"
    )
    environment = {"HOME": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    # Hashes of this process have a seed of their own.
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [piece.key for piece in plan_of(ToyModel(3)).pieces]


def test_a_plan_survives_json() -> None:
    plan = plan_of(ToyModel(3))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
