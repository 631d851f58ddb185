"""The updates of adapters: every implementation gives what the definition gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from native_variants import built, native_variants

from piecework.kernels import lora, ops
from piecework.kernels.cpu.native import lora as native

Op = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """Sizes of a layer, and of its adapters. `panel`: columns of a panel of `b`; None: all."""

    tokens: int
    columns: int
    rows: list[int]
    rank: int
    slots: int = 3
    panel: int | None = native.PANEL


CASES = [
    Case(1, 64, [64], 16),
    Case(5, 52, [26, 13, 13], 16),
    Case(70, 96, [96, 32, 32], 48),
    Case(33, 33, [40, 40], 32, slots=1),
    Case(9, 64, [30, 10], 7, panel=None),
]


def arguments(case: Case, dtype: torch.dtype) -> list[object]:
    """Return arguments of the op, with a and b [S, P, R, in] and [S, R, out] rearranged.

    Slots have parts of different ranks, and some parts have none.
    """
    generator = torch.Generator().manual_seed(case.tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    parts, out = len(case.rows), sum(case.rows)
    a, b = random(case.slots, parts, case.rank, case.columns), random(case.slots, case.rank, out)
    ranks = torch.randint(0, case.rank + 1, (case.slots, parts), generator=generator)
    scales = torch.rand(case.slots, parts, generator=generator) * (ranks > 0)
    for slot in range(case.slots):
        for part in range(parts):
            a[slot, part, ranks[slot, part] :] = 0
    a, b = a.transpose(2, 3).contiguous(), lora.columns_to_panels(b, case.panel)
    slots = torch.randint(-1, case.slots, (case.tokens + 9,), generator=generator)
    # Rows of others' tensors lie apart.
    x = random(case.tokens, case.columns + 3)[:, : case.columns]
    y = random(case.tokens, out)
    return [y, x, a, b, scales, ranks.int(), slots.int(), case.rows]


def wanted(arguments: list[object]) -> torch.Tensor:
    """Compute each token alone, in float64."""
    y, x, a, b, scales, _, slots, rows = arguments
    result = y.double()  # type: ignore[attr-defined]
    b = b.transpose(1, 2).flatten(2)  # type: ignore[attr-defined]
    for token, slot in enumerate(slots[: len(x)].tolist()):  # type: ignore[index, arg-type]
        begin = 0
        for part, count in enumerate(rows if slot >= 0 else []):  # type: ignore[arg-type]
            place = slice(begin, begin + count)
            narrow = x[token].double() @ a[slot, part].double() * scales[slot, part]  # type: ignore[index]
            result[token, place] += narrow @ b[slot, :, place].double()  # type: ignore[index]
            begin += count
    return result


@pytest.mark.parametrize("case", CASES)
def test_the_definition(case: Case) -> None:
    given = arguments(case, torch.float32)
    assert torch.allclose(lora.lora(*given).double(), wanted(given), atol=1e-4)  # type: ignore[arg-type]


def test_the_traced_op_has_the_form_that_it_promises() -> None:
    given = arguments(CASES[1], torch.float32)
    overload = torch.ops.piecework.lora.default
    found = overload(*given)
    on_meta = overload(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given))
    assert torch.equal(found, ops.lora(*given))
    assert torch.allclose(found.double(), wanted(given), atol=1e-4)
    one, two = ((each.shape, each.stride(), each.dtype) for each in (found, on_meta))
    assert one == two


@pytest.fixture(params=native_variants(), ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(request.param)
    monkeypatch.setattr(native, "load_kernels", lambda: library)


@pytest.mark.parametrize("case", CASES)
def test_native_kernels(case: Case, variant: None) -> None:
    given = arguments(case, torch.bfloat16)
    result = native.lora(*given)  # type: ignore[arg-type]
    assert torch.allclose(result.double(), wanted(given), rtol=2**-7, atol=2**-6)
    untouched = given[6][: case.tokens] < 0  # type: ignore[index, operator]
    assert torch.equal(result[untouched], given[0][untouched])  # type: ignore[index]
    # A token's result does not depend on the other tokens.
    y, x, *others, slots, rows = given
    for token in range(case.tokens):
        row = slice(token, token + 1)
        alone = native.lora(y[row], x[row], *others, slots[row], rows)  # type: ignore[index, arg-type]
        assert torch.equal(alone, result[row])


def test_numbers_that_are_not_finite_stay_in_their_row(variant: None) -> None:
    given = arguments(CASES[2], torch.bfloat16)
    given[1][3] = float("inf")  # type: ignore[index]
    given[6][3] = 0  # type: ignore[index]
    for op in (lora.lora, native.lora):
        result = op(*given)  # type: ignore[arg-type]
        assert result.isfinite().all(dim=1).logical_not().nonzero().tolist() == [[3]]
