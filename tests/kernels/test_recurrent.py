"""Layers with a recurrent state: however texts are cut into steps, and whoever is beside them, they
give what one token after another gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels.recurrent import causal_conv, gated_delta_net, mamba2, selective_scan
from piecework.kernels.recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States
from piecework.kernels.state_plan import CHUNK, StatePlan, plan_states

HEADS, SIZE, NUMBERS, GROUPS, WIDTH = 4, 6, 8, 2, 4
CHANNELS = HEADS * SIZE + 2 * GROUPS * NUMBERS
SLOTS = 5
LENGTHS = (1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


class Layer(NamedTuple):
    """`run(rows [T, ...], out, states, plan)`, and the shapes of its input and states."""

    run: Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor], StatePlan], None]
    inputs: int
    outputs: int
    states: list[tuple[int, ...]]


def layer(name: str) -> Layer:
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise)

    conv, tail = random(CHANNELS, WIDTH), (WIDTH - 1, CHANNELS)
    a, bias = -random(HEADS).exp(), random(HEADS)
    channels = [CHANNELS, HEADS, HEADS]
    if name == "conv":
        shift = random(CHANNELS)
        return Layer(
            lambda rows, out, states, plan: causal_conv(rows, conv, shift, out, states[0], plan),
            CHANNELS,
            CHANNELS,
            [tail],
        )
    if name == "mamba2":
        held = Mamba2Weights(conv, random(CHANNELS), a, random(HEADS), bias, (0.01, 2.0))

        def run_mamba(
            rows: torch.Tensor, out: torch.Tensor, states: list[torch.Tensor], plan: StatePlan
        ) -> None:
            x, dt, _ = rows.split(channels, dim=-1)
            mamba2(x, dt, held, out, States(*states), plan)

        return Layer(run_mamba, sum(channels), HEADS * SIZE, [tail, (HEADS, SIZE, NUMBERS)])
    if name == "selective_scan":
        inner, shared = HEADS * SIZE, GROUPS * NUMBERS
        scan = ScanWeights(-random(inner, NUMBERS).exp(), random(inner), random(inner))

        def run_scan(
            rows: torch.Tensor, out: torch.Tensor, states: list[torch.Tensor], plan: StatePlan
        ) -> None:
            x, dt, b, c = rows.split([inner, inner, shared, shared], dim=-1)
            selective_scan(x, dt, b, c, scan, out, states[0], plan)

        return Layer(run_scan, 2 * (inner + shared), inner, [(inner, NUMBERS)])
    if name == "delta by rows":
        # Each head has its own queries and keys.
        count = HEADS * SIZE + 2 * HEADS * NUMBERS
        conv, tail, bias = random(count, WIDTH), (WIDTH - 1, count), random(HEADS * NUMBERS)
        channels = [count, HEADS, HEADS * NUMBERS]
    weights = DeltaWeights(conv, a, bias, 1.5)

    def run_delta(
        rows: torch.Tensor, out: torch.Tensor, states: list[torch.Tensor], plan: StatePlan
    ) -> None:
        x, b, gate = rows.split(channels, dim=-1)
        gated_delta_net(x, b, gate, weights, out, States(*states), plan)

    return Layer(run_delta, sum(channels), HEADS * SIZE, [tail, (HEADS, NUMBERS, SIZE)])


def pools(layer: Layer, slots: list[int]) -> list[torch.Tensor]:
    """Slots of others hold no numbers, those of padding and of requests that begin zeros."""
    made = [torch.full((SLOTS, *shape), float("nan")) for shape in layer.states]
    for pool in made:
        pool[[0, *slots]] = 0.0
    return made


@pytest.mark.parametrize(
    "name", ["conv", "mamba2", "gated_delta", "delta by rows", "selective_scan"]
)
@settings(deadline=None, max_examples=examples(4, exploring=8))
@given(
    cuts=st.lists(
        st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_steps_of_any_length_give_what_single_tokens_give(
    name: str, cuts: list[list[int]], padding: int, seed: int
) -> None:
    tested = layer(name)
    noise = torch.Generator().manual_seed(seed)
    texts = [torch.randn(sum(cut), tested.inputs, generator=noise) for cut in cuts]
    slots = (1 + torch.randperm(SLOTS - 1, generator=noise)[: len(texts)]).tolist()
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    states = pools(tested, slots)
    done = [0] * len(texts)
    for step in range(max(map(len, cuts))):
        going = [i for i, cut in enumerate(cuts) if step < len(cut)]
        lens = [cuts[i][step] for i in going]
        # Padding may have requests of its own, which write nothing.
        whose = [*(slots[i] for i in going), *[0] * (padding > 1)]
        plan = plan_states([*lens, *[1] * (padding > 1)], torch.tensor(whose))
        rows = [texts[i][done[i] : done[i] + n] for i, n in zip(going, lens, strict=True)]
        given_rows = torch.cat((*rows, torch.full((padding, tested.inputs), float("nan"))))
        out = torch.empty(len(given_rows), tested.outputs)
        tested.run(given_rows, out, states, plan)
        assert all((pool[0] == 0).all() for pool in states)
        assert padding != 1 or (out[-1] == 0).all()
        for i, part in zip(going, out[: sum(lens)].split(lens), strict=True):
            found[i].append(part)
            done[i] += len(part)
    for i, text in enumerate(texts):
        alone, expected = pools(tested, [1]), torch.empty(len(text), tested.outputs)
        for at in range(len(text)):
            plan = plan_states([1], torch.tensor([1]))
            tested.run(text[at : at + 1], expected[at : at + 1], alone, plan)
        assert torch.allclose(torch.cat(found[i]), expected, atol=2e-5, rtol=1e-4)
        for pool, own in zip(states, alone, strict=True):
            assert torch.allclose(pool[slots[i]], own[1], atol=2e-5, rtol=1e-4)
