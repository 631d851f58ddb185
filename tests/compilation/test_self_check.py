"""A piece that computes something else than what was traced is found out, and one that only rounds
elsewhere is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from toy_forward import HIDDEN, ToyModel, step

from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import CompiledPiece, EagerCompiler
from piecework.compilation.core.errors import CaptureError
from piecework.compilation.passes.config import PassConfig
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piecewise import PiecewiseForward
from piecework.compilation.plan import Plan
from piecework.compilation.self_check import _load, check_pieces, traced_piece
from piecework.kernels import ops
from piecework.kernels.cpu.platform import CpuPlatform

LARGEST = 100
MIDDLE = 1
Change = Callable[[fx.GraphModule, list[torch.Tensor]], Sequence[torch.Tensor]]


Make = Callable[[torch.dtype], PiecewiseForward]


@pytest.fixture(scope="module")
def forward_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The model's pieces in a dtype, which no test changes: traced once."""
    return cache(lambda dtype: made(tmp_path_factory.mktemp("cache"), dtype))


def made(folder: Path, dtype: torch.dtype) -> PiecewiseForward:
    model = ToyModel(4).to(dtype)
    for name, tensor in model.named_parameters():
        # As in the models that are served: what is added to a norm's square counts in small rows.
        tensor.mul_(not name.endswith("bias"))
    return pieces_of(folder, model)


def pieces_of(folder: Path, model: nn.Module) -> PiecewiseForward:
    # What is written over in place keeps its type, and the changes below choose others.
    maker = PieceMaker(
        platform=CpuPlatform(),
        compiler=EagerCompiler(),
        cache=CompileCache(folder),
        max_tokens=512,
        passes=PassConfig(in_place=False),
    )
    return maker.make(model, step(6)).forward


def checked(forward: PiecewiseForward, change: Change | None = None) -> int:
    """How many portions the check took, with the middle piece as `change` has it."""
    pieces = [traced_piece(piece) for piece in forward.plan.pieces]
    if change is not None:
        graph = _load(forward.plan.pieces[MIDDLE])
        pieces[MIDDLE] = CompiledPiece(partial(run_changed, change, graph))
    return len(
        list(
            check_pieces(
                forward.with_pieces(pieces),
                lambda tokens: step(tokens),
                LARGEST,
                lambda error: False,
            )
        )
    )


def run_changed(
    change: Change, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    return change(graph, list(inputs))


def edited(graph: fx.GraphModule, old: object, new: object) -> fx.GraphModule:
    """The piece with another number in place of one of its constants."""
    for node in graph.graph.nodes:
        node.args = tuple(
            new if isinstance(argument, float) and argument in (old, new) else argument
            for argument in node.args
        )
    graph.recompile()
    assert str(new) in graph.code
    return graph


def only(tokens: int, change: Change) -> Change:
    """Wrong at one number of tokens alone."""
    return lambda graph, inputs: (
        change(graph, inputs) if _tokens(inputs) == tokens else graph(*inputs)
    )


def _tokens(inputs: Sequence[torch.Tensor]) -> int:
    return next(
        len(tensor)
        for tensor in inputs
        if tensor.dim() == 2 and tensor.shape[1] == HIDDEN and not isinstance(tensor, nn.Parameter)
    )


def shifted(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last row is the one before it."""
    return [
        torch.cat([out[:-1], out[-2:-1] if len(out) > 1 else 2 * out]) if out.dim() > 1 else out
        for out in graph(*inputs)
    ]


def of_another_layer(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    weights = [
        place
        for place, tensor in enumerate(inputs)
        if isinstance(tensor, nn.Parameter) and tensor.shape == (HIDDEN, HIDDEN)
    ]
    for place in weights:
        inputs[place] = inputs[place].flip(0)
    assert weights
    return graph(*inputs)


def operands_swapped(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Two values of one shape change places."""
    alike = [
        place
        for place, tensor in enumerate(inputs)
        if not isinstance(tensor, nn.Parameter) and tensor.shape[1:] == (HIDDEN,)
    ]
    inputs[alike[0]], inputs[alike[1]] = inputs[alike[1]], inputs[alike[0]]
    return graph(*inputs)


WRONG: dict[str, Change] = {
    "a factor": lambda graph, inputs: [1.3 * out for out in graph(*inputs)],
    "an epsilon": lambda graph, inputs: edited(graph, 1e-5, 1e-6)(*inputs),
    "swapped operands": operands_swapped,
    "weights of another layer": of_another_layer,
    "one row off": shifted,
    "one row off at 1 token": only(1, shifted),
    "one row off at 2 tokens": only(2, shifted),
    "one row off at the most tokens": only(LARGEST, shifted),
    "no number": lambda graph, inputs: [out * float("nan") for out in graph(*inputs)],
    "zeros": lambda graph, inputs: [torch.zeros_like(out) for out in graph(*inputs)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_piece_is_found_out(forward_of: Make, wrong: str, dtype: torch.dtype) -> None:
    with pytest.raises(CaptureError, match="piece 1 of 3 differs from what was traced by"):
        checked(forward_of(dtype), WRONG[wrong])


def in_single(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Rounds at its end alone, as a compiler may."""
    wide = [tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs]
    return [out.to(inputs[0].dtype) for out in graph(*wide)]


def rounds_more(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Off by half an eps, up or down, in each number that goes in."""
    generator = torch.Generator().manual_seed(5)
    noise = [2 * torch.randint(2, tensor.shape, generator=generator) - 1 for tensor in inputs]
    return graph(
        *(
            t + t * n * torch.finfo(t.dtype).eps / 2 if t.is_floating_point() else t
            for t, n in zip(inputs, noise, strict=True)
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change", [None, in_single, rounds_more], ids=["as it is", "in 32 bits", "rounded more"]
)
def test_other_roundings_are_not_wrong(
    forward_of: Make, change: Change | None, dtype: torch.dtype
) -> None:
    forward = forward_of(dtype)
    assert checked(forward, change) == len(forward.plan.pieces) * (2 * 4 + 1), (
        "a run each: two at each of four sizes, one for growth"
    )


def test_what_was_traced_is_kept_with_the_plan(forward_of: Make) -> None:
    plan = forward_of(torch.float32).plan
    assert Plan.from_json(plan.to_json()).pieces == plan.pieces
    assert all(piece.traced for piece in plan.pieces)


def test_where_the_memory_does_not_do_the_largest_size_is_left_out(forward_of: Make) -> None:
    forward = forward_of(torch.float32)

    def too_large(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(inputs[0]) == LARGEST:
            raise MemoryError
        return pieces[0].run(inputs)

    pieces = [traced_piece(piece) for piece in forward.plan.pieces]
    too_small = forward.with_pieces([CompiledPiece(too_large), *pieces[1:]])
    list(
        check_pieces(
            too_small,
            lambda tokens: step(tokens),
            LARGEST,
            lambda error: isinstance(error, MemoryError),
        )
    )


class QuantisedModel(nn.Module):
    """Its second piece quantises rows of 64 numbers to `dtype` and multiplies them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.embedding, self.out = nn.Embedding(32, 64), nn.Linear(64, 64, bias=False)
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        mixed = torch.empty_like(x)
        torch.ops.toy.attend(x, x, x, mixed, 0)
        numbers, scale = ops.quantize_dynamic(mixed, 64, self.dtype)
        return self.out(numbers.float() * scale)


class _Moved(fx.Interpreter):
    """The `count` largest numbers of each quantised row are their neighbours."""

    def __init__(self, graph: fx.GraphModule, count: int) -> None:
        super().__init__(graph)
        self.count, self.moved = count, False

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if self.moved or not isinstance(made, torch.Tensor) or made.dtype.itemsize > 1:
            return made
        self.moved = True
        bits = made.clone().view(torch.uint8)
        places = made.float().abs().topk(self.count).indices
        bits.scatter_add_(-1, places, torch.full_like(places, 255, dtype=torch.uint8))
        return bits.view(made.dtype)


def moved(count: int) -> Change:
    def change(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        interpreter = _Moved(graph, count)
        outputs: Sequence[torch.Tensor] = interpreter.run(*inputs)
        assert interpreter.moved
        return outputs

    return change


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantised_number_may_become_its_neighbour(tmp_path: Path, dtype: torch.dtype) -> None:
    forward = pieces_of(tmp_path, QuantisedModel(dtype))
    checked(forward, moved(1))
    with pytest.raises(CaptureError, match="differs from what was traced"):
        checked(forward, WRONG["a factor"])


def test_all_numbers_of_a_row_may_not(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="differs from what was traced"):
        checked(pieces_of(tmp_path, QuantisedModel(torch.int8)), moved(64))
