"""Triton's layers of experts against `kernels.reference`: on a GPU for real, elsewhere through its
interpreter.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.triton import moe
from piecework.kernels.triton.moe import choose_experts, fused_moe

pytestmark = pytest.mark.on_gpu


@pytest.mark.parametrize(
    ("tokens", "experts", "each", "limit", "weighs_input", "parts"),
    [
        (0, 4, 2, 0.0, False, 2),
        (1, 8, 3, 0.0, False, 2),
        (5, 3, 2, 1.5, False, 2),
        (40, 1, 1, 0.0, True, 2),
        (5, 3, 2, reference.GELU, False, 2),
        # Without gates.
        (5, 3, 2, 0.0, False, 1),
        # Several chunks of pairs, and more than one block of rows per expert.
        (70, 3, 2, 0.0, False, 2),
    ],
)
def test_it_is_the_reference(
    tokens: int,
    experts: int,
    each: int,
    limit: float,
    weighs_input: bool,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe, "_PLACES", 128)
    size, width = 40, 24
    make = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(DEVICE)

    # One more than there are: it is another rank's.
    weights, ids = torch.rand(tokens, experts + 1, generator=make).topk(each, dim=-1)
    given = (
        normal(tokens, size),
        ids.to(DEVICE),
        weights.to(DEVICE),
        normal(experts * parts * width, size),
        normal(experts * parts * width),
        normal(experts * size, width),
        normal(experts * size),
        limit,
        weighs_input,
    )
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("groups", "top_groups", "best"), [(1, 1, 1), (4, 2, 2), (3, 2, 1)])
@pytest.mark.parametrize("corrected", [False, True])
def test_experts_are_chosen_as_by_the_reference(
    sigmoid: bool, groups: int, top_groups: int, best: int, corrected: bool
) -> None:
    make = torch.Generator().manual_seed(groups)
    logits = torch.randn(7, 12, generator=make).to(DEVICE, torch.float16)
    correction = torch.randn(12, generator=make).to(DEVICE) if corrected else None
    renormalized, scale = (True, 2.5) if corrected else (False, 1.0)
    given = (logits, correction, 3, sigmoid, renormalized, groups, top_groups, best, scale, 1e-6)
    ids, weights = choose_experts(*given)
    wanted, wanted_weights = reference.choose_experts(*given)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, wanted_weights)


def test_rows_without_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((2, 6), float("nan"), device=DEVICE)
    ids, _ = choose_experts(logits, None, 2, False, True, 1, 1, 1, 1.0, 1e-20)
    assert int(ids.min()) >= 0 and int(ids.max()) < 6


_VIEWS = {"view", "_unsafe_view", "slice", "split", "split_with_sizes", "t", "empty", "new_empty"}


class _Operations(TorchDispatchMode):
    """Counts what a GPU would be asked to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := function.overloadpacket.__name__) not in _VIEWS:
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE != "cpu", reason="launches are counted in the interpreter")
def test_a_layer_is_at_most_twelve_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of SGLang is about eight; in torch's operations it was 54."""
    operations, kernels = _Operations(), []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: kernels.append(self.fn))
    x, router = torch.randn(4, 64), torch.randn(16, 64)
    gate_up, down = torch.randn(16 * 2 * 32, 64), torch.randn(16 * 64, 32)
    with operations:
        logits = torch.nn.functional.linear(x, router)
        ids, weights = choose_experts(logits, None, 4, False, True, 1, 1, 1, 1.0, 1e-20)
        fused_moe(x, ids, weights, gate_up, None, down, None, 0.0, False)
    assert len(kernels) == 8 and sum(operations.names.values()) + len(kernels) <= 12, operations
