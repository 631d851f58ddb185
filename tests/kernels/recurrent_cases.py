"""Layers with a recurrent state by a platform's kernels, beside plain torch."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from piecework.kernels import recurrent_prompts, recurrent_steps
from piecework.kernels.recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States
from piecework.kernels.state_plan import plan_states

SLOTS = 4
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "heads": st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    "sizes": st.tuples(st.integers(1, 40), st.integers(1, 40)),
    "columns": st.integers(1, 5),
    "apart": st.sampled_from([1, 2]),
    "slots": st.permutations(range(SLOTS)).map(lambda slots: slots[:3]),
    "seed": st.integers(0, 99),
}
"""Of `assert_same_steps`."""


def assert_same_steps(
    kernels: Any,
    dtype: torch.dtype,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    columns: int,
    apart: int,
    slots: list[int],
    seed: int,
    device: str = "cpu",
) -> None:
    """`kernels`: a module with the functions of `recurrent_steps`; `apart`: how far from another
    the numbers of dt, b and a lie.
    """
    (count, groups), (size, numbers) = heads, sizes
    channels = count * size + 2 * groups * numbers
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(device)

    rows = random(3, channels + 2 * apart * count + 5).to(dtype)
    x, first, second = (
        rows[:, :channels],
        rows[:, channels : channels + apart * count : apart],
        rows[:, channels + apart * count : channels + 2 * apart * count : apart],
    )
    conv, bias, at = random(channels, columns), random(channels), torch.tensor(slots, device=device)
    a, d, dt_bias = -random(count).exp(), random(count), random(count)
    of_mamba = Mamba2Weights(conv, bias, a, d, dt_bias, (0.01, 1.5))
    of_rows, row_bias = random(3, count * numbers).to(dtype), random(count * numbers)
    kept = random(SLOTS, columns - 1, channels).to(dtype)
    kept[0] = 0.0

    def states(*shape: int) -> States:
        made = random(SLOTS, count, *shape)
        made[0] = 0.0
        return States(kept.clone(), made)

    steps = (
        (
            "conv_step",
            lambda module, held: module.conv_step(x, conv, bias, held.conv, at),
            states(1),
        ),
        (
            "mamba2_step",
            lambda module, held: module.mamba2_step(x, first, of_mamba, held, at),
            states(size, numbers),
        ),
        (
            "gated_delta_step",
            lambda module, held: module.gated_delta_step(
                x, first, second, DeltaWeights(conv, a, dt_bias, 1.5), held, at
            ),
            states(numbers, size),
        ),
        (
            "gated_delta_step by rows",
            lambda module, held: module.gated_delta_step(
                x, first, of_rows, DeltaWeights(conv, a, row_bias), held, at
            ),
            states(numbers, size),
        ),
    )
    for name, run, held in steps:
        plain = States(*(each.clone() for each in held))
        expected, found = run(recurrent_steps, plain), run(kernels, held)
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), name
        for own, other in zip(held, plain, strict=True):
            assert (own[0] == 0).all(), name
            assert torch.allclose(own[1:].float(), other[1:].float(), atol=1e-4, rtol=1e-4), name


def assert_same_prompts(
    kernels: Any,
    dtype: torch.dtype,
    lens: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    columns: int,
    apart: int,
    slots: list[int],
    seed: int,
) -> None:
    """`kernels`: a module with the functions of `recurrent_prompts`; `lens` of three requests, of
    which those of one token are no prompts; what padding's gives is anything.
    """
    (count, groups), (size, numbers) = heads, sizes
    channels, tokens = count * size + 2 * groups * numbers, sum(lens)
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    rows = random(tokens, channels + 2 * apart * count + 5).to(dtype)
    x, first, second = (
        rows[:, :channels],
        rows[:, channels : channels + apart * count : apart],
        rows[:, channels + apart * count : channels + 2 * apart * count : apart],
    )
    conv, bias = random(channels, columns), random(channels)
    a, d, dt_bias = -random(count).exp(), random(count), random(count)
    of_mamba = Mamba2Weights(conv, bias, a, d, dt_bias, (0.01, 1.5))
    of_delta = DeltaWeights(conv, a, dt_bias, 1.5)
    prompts = plan_states(lens, torch.tensor(slots)).prompts
    assert prompts is not None
    is_compared = torch.tensor(slots).repeat_interleave(torch.tensor(lens)) != 0
    of_rows, row_bias = random(tokens, count * numbers).to(dtype), random(count * numbers)
    kept = random(SLOTS, columns - 1, channels).to(dtype)
    cases = (
        (
            "conv_prompts",
            (channels, 1, 1),
            lambda module, out, held: module.conv_prompts(x, conv, bias, out, held.conv, prompts),
        ),
        (
            "mamba2_prompts",
            (count * size, size, numbers),
            lambda module, out, held: module.mamba2_prompts(x, first, of_mamba, out, held, prompts),
        ),
        (
            "gated_delta_prompts",
            (count * size, numbers, size),
            lambda module, out, held: module.gated_delta_prompts(
                x, first, second, of_delta, out, held, prompts
            ),
        ),
        (
            "gated_delta_prompts by rows",
            (count * size, numbers, size),
            lambda module, out, held: module.gated_delta_prompts(
                x, first, of_rows, DeltaWeights(conv, a, row_bias), out, held, prompts
            ),
        ),
    )
    for name, (width, *of_head), run in cases:
        held = States(kept.clone(), random(SLOTS, count, *of_head))
        for each in held:
            each[0] = 0.0
        plain = States(*(each.clone() for each in held))
        found, expected = (torch.full((tokens, width), 7.0, dtype=dtype) for _ in range(2))
        run(kernels, found, held)
        run(recurrent_prompts, expected, plain)
        found, expected = found[is_compared], expected[is_compared]
        most = max(1.0, expected.abs().max().item())
        allowed = (1e-4 if dtype == torch.float32 else 2**-7) * most
        torch.testing.assert_close(found, expected, atol=allowed, rtol=0.0, msg=name)
        for own, other in zip(held, plain, strict=True):
            most = 1e-4 * max([1.0, *other.abs().flatten().tolist()])
            torch.testing.assert_close(own, other, atol=most, rtol=0.0, msg=name)


def assert_same_scan(
    kernels: Any,
    dtype: torch.dtype,
    lens: list[int],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    slots: list[int],
    seed: int,
) -> None:
    """`kernels`: a module with the selective scan's functions of `recurrent_steps` and
    `recurrent_prompts`; `lens`: of three requests, one token each are decodes.
    """
    (count, groups), (size, numbers) = heads, sizes
    inner, tokens, at = count * size, sum(lens), torch.tensor(slots)
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    x, dt = random(tokens, 2 * inner + 5).to(dtype)[:, : 2 * inner].chunk(2, dim=1)
    b, c = random(tokens, 2 * groups * numbers).to(dtype).chunk(2, dim=1)
    weights = ScanWeights(-random(inner, numbers).exp(), random(inner), random(inner))
    states = random(SLOTS, inner, numbers)
    states[0] = 0.0
    prompts = plan_states(lens, at).prompts
    is_compared = (at != 0).repeat_interleave(torch.tensor(lens))
    found, kept = [], []
    for steps, of_prompts in ((recurrent_steps, recurrent_prompts), (kernels, kernels)):
        held, out = states.clone(), torch.full((tokens, inner), 7.0, dtype=dtype)
        if prompts is None:
            out = steps.selective_scan_step(x, dt, b, c, weights, held, at)
        else:
            of_prompts.selective_scan_prompts(x, dt, b, c, weights, out, held, prompts)
        found.append(out[is_compared])
        kept.append(held)
    allowed = 2**-7 if found[0].dtype == torch.bfloat16 else 1e-4
    for own, plain in ((found[1], found[0]), (kept[1], kept[0])):
        most = allowed * max(1.0, plain.abs().max().item() if plain.numel() else 0.0)
        torch.testing.assert_close(own, plain, atol=most, rtol=0.0)


def assert_spoils_what_follows_alone(kernels: Any, kind: str, number: float) -> None:
    """`kernels`: as of `assert_same_prompts`; `kind`: the layer, as its function is called;
    `number`: one that is not finite, in what a token of the second of three prompts gives: tokens
    before it, and other prompts, are as without it, what follows is lost, and so is the state.
    """
    lens, heads, size = [20, 150, 45], 2, 16
    is_delta, decays = "delta" in kind, size if kind == "delta by rows" else 1
    noise = torch.Generator().manual_seed(0)
    tokens, slots = sum(lens), torch.tensor([1, 2, 3])
    prompts = plan_states(lens, slots).prompts
    assert prompts is not None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    # Of a delta rule by rows, all heads have queries and keys of their own, others one group.
    inner, channels = heads * size, (6 if decays > 1 else 4) * size
    # Of a scan: x with b and c, and the lengths of steps.
    wide = inner if kind == "selective_scan" else heads
    inputs = random(tokens, channels), random(tokens, wide), random(tokens, wide * decays)
    conv, bias, a = random(channels, 4), random(channels), -random(heads).exp()
    scan = ScanWeights(-random(inner, size).exp(), random(inner), random(inner))

    def run(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty(tokens, heads * size)
        states = States(torch.zeros(4, 3, channels), torch.zeros(4, heads, size, size))
        if kind == "selective_scan":
            x, b, c = x.split([inner, size, size], dim=-1)
            held = states.recurrent.view(4, inner, size)
            kernels.selective_scan_prompts(x, first, b, c, scan, out, held, prompts)
        elif is_delta:
            weights = DeltaWeights(conv, a, bias[: heads * decays])
            kernels.gated_delta_prompts(x, first, second, weights, out, states, prompts)
        else:
            limits = (0.0, float("inf"))
            of_mamba = Mamba2Weights(conv, bias, a, bias[:heads], bias[:heads], limits)
            kernels.mamba2_prompts(x, first, of_mamba, out, states, prompts)
        first_prompt, second_prompt, third_prompt = out.split(lens)
        return [second_prompt, first_prompt, third_prompt, *states.recurrent[[2, 1, 3]]]

    expected, *others, _, state, another = run(*inputs)
    # An infinite b writes all of a token, as a large one does.
    count = 1 if is_delta and number == float("inf") else 2 + is_delta
    for which, each in enumerate(inputs[:count]):
        for place in (0, 1, 5, 31, 40, 64, 149):
            broken = list(inputs)
            broken[which] = each.clone()
            broken[which][lens[0] + place] = number
            found, *found_others, spoilt, found_state, found_another = run(*broken)
            assert torch.equal(found[:place], expected[:place]), (which, place)
            for own, other in zip(
                (*found_others, found_state, found_another),
                (*others, state, another),
                strict=True,
            ):
                assert torch.equal(own, other), (which, place)
            assert not found[place:].isfinite().any(), (which, place)
            assert not spoilt.isfinite().any(), (which, place)
