"""A traced forward is cut at its split ops, in order, into pieces that exchange tensors only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from toy_forward import HIDDEN, ToyModel, step

from piecework.compilation.core.errors import TraceError
from piecework.compilation.core.split_ops import register_split_op, registered
from piecework.compilation.piece_key import op_names
from piecework.compilation.plan import make_plan
from piecework.compilation.split import Cut, OpCall, PieceCall, split
from piecework.compilation.torch_private import trace


def cut(forward: Callable[..., torch.Tensor], max_tokens: int = 128) -> Cut:
    inputs = list(step(6))
    return split(trace(forward, inputs, max_tokens), inputs)


def from_function(function: Callable[..., torch.Tensor]) -> nn.Module:
    module = nn.Module()
    module.forward = function
    return module


def refused(function: Callable[..., torch.Tensor], match: str) -> None:
    with pytest.raises(TraceError, match=match):
        cut(from_function(function).forward)


def test_pieces_and_split_ops_keep_their_order() -> None:
    calls = cut(ToyModel(3).forward).calls
    assert [type(call) for call in calls] == [
        PieceCall,
        OpCall,
        PieceCall,
        OpCall,
        PieceCall,
        OpCall,
        PieceCall,
    ]
    assert [call.name for call in calls if isinstance(call, OpCall)] == ["toy::attend"] * 3


def test_constants_of_split_ops_stay_outside_pieces() -> None:
    found = cut(ToyModel(3).forward)
    layers = [found.constants[call.inputs[-1]] for call in found.calls if isinstance(call, OpCall)]
    assert layers == [0, 1, 2]


def test_the_split_op_writes_into_a_buffer_that_a_piece_allocates() -> None:
    found = cut(ToyModel(2).forward)
    for before, op, after in zip(
        found.calls[0::2], found.calls[1::2], found.calls[2::2], strict=False
    ):
        assert op.inputs[3] in before.outputs
        assert op.inputs[3] in after.inputs
        assert "empty_like" in op_names(before.graph.nodes)


def test_weights_are_inputs_of_pieces() -> None:
    model = ToyModel(2)
    found = cut(model.forward)
    weights = {id(found.tensors[number]) for number in found.tensors if found.specs[number].weight}
    assert weights == {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}


def test_every_value_is_made_before_it_is_used() -> None:
    found = cut(ToyModel(3, fresh=True).forward)
    known = {*found.tensors, *found.constants}
    for call in found.calls:
        assert set(call.inputs) <= known
        known |= set(call.outputs)
    assert found.output in known


def test_pieces_and_ops_compute_the_forward() -> None:
    model, inputs = ToyModel(2), list(step(6))
    plan, graphs = make_plan(cut(model.forward), inputs, {}, {})
    assert len(graphs) == len(plan.pieces)
    assert sum(plan.calls().values()) == 3


def test_what_is_computed_from_the_number_of_tokens_is_computed_in_each_piece() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = input_ids.float()[:, None].expand(-1, HIDDEN).contiguous()
        rows = input_ids.shape[0] * HIDDEN
        y = torch.ops.toy.attend_fresh(x, x, x, 0)
        return y.reshape(rows).view(-1, HIDDEN) / rows

    found = cut(from_function(forward).forward)
    (_, _, after) = found.calls
    assert isinstance(after, PieceCall)
    assert all(found.specs[number].dtype == "float32" for number in after.inputs)
    assert "aten.sym_size.int" in [str(node.target) for node in after.graph.nodes]


def test_parts_of_a_tuple_are_cut_off_where_the_tuple_is_made() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, y = (input_ids.float()[:, None] * torch.ones(2 * HIDDEN)).chunk(2, -1)
        return torch.ops.toy.attend_fresh(x, x, x, 0) + y

    before, _, after = cut(from_function(forward).forward).calls
    assert "chunk" in op_names(before.graph.nodes)
    assert len(before.outputs) == 2
    assert op_names(after.graph.nodes) == ["add"]


def test_split_ops_in_a_row_have_no_piece_between() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = input_ids.float()[:, None] * torch.ones(HIDDEN)
        x = torch.ops.toy.attend_fresh(x, x, x, 0)
        return torch.ops.toy.attend_fresh(x, x, x, 1)

    assert [type(call) for call in cut(from_function(forward).forward).calls] == [
        PieceCall,
        OpCall,
        OpCall,
    ]


def test_any_op_can_be_registered_by_name() -> None:
    assert cut(ToyModel(1).forward).calls[1].name == "toy::attend"
    register_split_op("aten::rsqrt")
    try:
        assert "aten::rsqrt" in registered()

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.rsqrt(input_ids.float() + 1) * 2

        assert [type(call) for call in cut(from_function(forward).forward).calls] == [
            PieceCall,
            OpCall,
            PieceCall,
        ]
    finally:
        from piecework.compilation.core import split_ops

        del split_ops._implementations["aten::rsqrt"]


def test_a_way_that_depends_on_the_number_of_tokens_is_refused() -> None:
    refused(
        lambda ids, positions: ids.float() * 2 if ids.shape[0] > 100 else ids.float(),
        "branches on the number of tokens",
    )


def test_a_limit_beyond_the_largest_step_is_no_reason_to_refuse() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids.float() * 2 if input_ids.shape[0] > 100 else input_ids.float()

    assert len(cut(from_function(forward).forward, max_tokens=100).calls) == 1


def test_one_number_of_tokens_is_refused() -> None:
    refused(lambda ids, positions: ids + torch.ones(6), "fixed to one number of tokens")


def test_reading_a_tensor_is_refused() -> None:
    refused(lambda ids, positions: ids.float() * ids.max().item(), "depends on data")


def test_a_tuple_across_a_cut_is_refused() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, y = torch.ops.toy.pair(input_ids.float())
        return x + y

    refused(forward, "is not a tensor")


def test_keywords_of_a_split_op_are_refused() -> None:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = input_ids.float()[:, None]
        return torch.ops.toy.attend_fresh(x, x, x, layer=0)

    refused(forward, "by position")


def test_a_forward_must_return_one_new_tensor() -> None:
    refused(lambda ids, positions: (ids + 1, positions + 1), "must return one tensor")
    refused(lambda ids, positions: ids, "returns its input|computes nothing")
