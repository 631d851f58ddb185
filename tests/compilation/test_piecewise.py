"""A forward in pieces is the forward, at any number of tokens."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_forward import Attention, ToyModel, attention, step

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import CompiledPiece, EagerCompiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import named_tensors
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.plan import Plan
from piecework.kernels.cpu.platform import CpuPlatform


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PieceMaker:
    cache = CompileCache(tmp_path_factory.mktemp("cache"))
    return PieceMaker(platform=CpuPlatform(), compiler=EagerCompiler(), cache=cache, max_tokens=512)


@pytest.fixture(scope="module", params=[False, True], ids=["into_buffer", "fresh"])
def pair(request: pytest.FixtureRequest, maker: PieceMaker) -> tuple[ToyModel, PiecewiseForward]:
    model = ToyModel(3, fresh=request.param)
    return model, maker.make(model, step(6))[0]


@given(num_tokens=st.integers(1, 200), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_equals_the_forward_at_any_number_of_tokens(
    pair: tuple[ToyModel, PiecewiseForward], num_tokens: int, seed: int
) -> None:
    model, pieces = pair
    inputs = step(num_tokens, seed)
    assert torch.equal(pieces(*inputs), model(*inputs))


def test_split_ops_read_what_is_set_when_they_run(pair: tuple[ToyModel, PiecewiseForward]) -> None:
    model, pieces = pair
    inputs = step(9)
    with attention(scale=3.0, layers=[]):
        assert torch.equal(pieces(*inputs), model(*inputs))
        assert Attention.layers == [0, 1, 2, 0, 1, 2]


def test_weights_changed_in_place_are_seen(maker: PieceMaker) -> None:
    model = ToyModel(2)
    pieces, _ = maker.make(model, step(6))
    model.layers[1].qkv.weight.mul_(1.5)
    assert torch.equal(pieces(*step(5)), model(*step(5)))


def test_equal_pieces_run_with_their_own_weights(maker: PieceMaker) -> None:
    model = ToyModel(5)
    pieces, _ = maker.make(model, step(6))
    assert len(pieces.plan.pieces) == 3
    assert torch.equal(pieces(*step(5)), model(*step(5)))


def test_memory_of_a_layer_is_free_two_layers_later(maker: PieceMaker) -> None:
    model = ToyModel(6)
    pieces, _ = maker.make(model, step(6))
    alive: list[int] = []
    outputs: list[weakref.ref[torch.Tensor]] = []

    def watch(results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        alive.append(sum(reference() is not None for reference in outputs))
        outputs.extend(weakref.ref(result) for result in results)
        return results

    watched = [
        CompiledPiece(lambda inputs, run=piece.run: watch(run(inputs))) for piece in pieces._pieces
    ]
    PiecewiseForward(pieces.plan, watched, named_tensors(model), torch.clone)(*step(6))
    made_by_a_piece = max(len(call.outputs) for call in pieces.plan.steps)
    assert max(alive) <= 2 * made_by_a_piece
    assert len(outputs) > 4 * made_by_a_piece


def test_compiled_pieces_do_not_hold_the_model(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    maker = PieceMaker(
        platform=CpuPlatform(), compiler=EagerCompiler(), cache=cache, max_tokens=512
    )
    maker.make(ToyModel(2), step(6), model_key="toy")
    sizes = {entry.about["kind"]: entry.num_bytes for entry in cache.entries()}
    assert sizes["piece"] < 10_000


def test_a_plan_is_needed_for_each_piece(maker: PieceMaker) -> None:
    plan: Plan = maker.make(ToyModel(2), step(6))[0].plan
    with pytest.raises(AssertionError):
        PiecewiseForward(plan, [], {}, torch.clone)
