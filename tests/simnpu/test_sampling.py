"""Tokens are chosen on an NPU without float64 and without a wait, and they are those that a CPU
chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_sampler import request

from piecework.kernels import ops, reference
from piecework.kernels.npu import sampling
from piecework.runtime.sampling.sampler import NO_TOKEN, sample

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02, "top_k": 2000},
    {"temperature": 1.0, "top_p": 0.0},
    {
        "temperature": 2.0,
        "top_p": 0.999,
        "logprobs": 2,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {3: 2.0},
    },
    {"temperature": 1.0, "min_new_tokens": 3, "stop_token_ids": [1, 2]},
]


@pytest.fixture
def npu_ops(simnpu: Any) -> Iterator[Any]:
    ops.register("npu", sampling)
    yield simnpu
    ops._versions.pop("npu")


@pytest.mark.parametrize("vocab", [700, 5000, 49_152])
@pytest.mark.parametrize("flatness", [0.05, 3.0])
def test_tokens_are_the_cpus_and_the_launch_never_waits(
    npu_ops: Any, vocab: int, flatness: float
) -> None:
    requests = [
        request(seed=number, output=[5], **KINDS[number % len(KINDS)])
        for number in range(8 * len(KINDS))
    ]
    logits = (
        torch.randn(len(requests), vocab, generator=torch.Generator().manual_seed(vocab)) * flatness
    )
    on_device = logits.npu()
    torch.npu.synchronize()
    before = npu_ops.waits
    with npu_ops.no_waiting():
        samples = sample(on_device, requests)
    assert npu_ops.waits == before
    assert [result.token for result in samples.read()] == [
        result.token for result in sample(logits, requests).read()
    ]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_no_token_and_others_theirs(
    npu_ops: Any, broken: float
) -> None:
    requests = [request(seed=number, **kind) for number, kind in enumerate(KINDS)]
    logits = torch.randn(len(requests), 1500, generator=torch.Generator().manual_seed(1))
    expected = [result.token for result in sample(logits.clone(), requests).read()]
    for row in range(0, len(KINDS), 2):
        logits[row, 7] = broken
    samples = sample(logits.npu(), requests)
    tokens = [result.token for result in samples.read()]
    assert tokens == [expected[row] if row % 2 else NO_TOKEN for row in range(len(KINDS))]
    assert all(0 <= token < 1500 for token in samples.tokens.tolist())


@pytest.mark.parametrize(
    "filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (300, 0.8, 0.01)], ids=str
)
def test_every_number_of_a_grid_draws_a_share_as_its_definition_says(
    filters: tuple[int, float, float],
) -> None:
    """In plain torch: a few numbers of the grid that lie within rounding of a token's end may draw
    its neighbour, no others.
    """
    vocab, steps = 500, 4096
    probs = (
        (torch.randn(vocab, generator=torch.Generator().manual_seed(9)) * 3)
        .softmax(-1)
        .expand(steps, -1)
    )
    top_k, top_p, min_p = filters
    uniform = (torch.arange(steps, dtype=torch.float64) / steps * 2**24).floor() / 2**24
    columns = (
        torch.full((steps,), top_k or vocab),
        torch.full((steps,), top_p),
        torch.full((steps,), min_p),
    )
    drawn = sampling.sample_filtered(probs, *columns, uniform.float())
    expected = reference.sample_filtered(probs, *columns, uniform)
    assert (drawn != expected).sum() <= steps * 2.0**-12


def test_tokens_of_no_weight_are_never_drawn() -> None:
    probs = torch.zeros(3, 700)
    probs[0, 650], probs[1, 3], probs[2, :] = 1.0, 1e-38, 0.0
    columns = torch.full((3,), 700), torch.ones(3), torch.zeros(3)
    for number in (0.0, 0.5, 1 - 2.0**-24):
        drawn = sampling.sample_filtered(probs, *columns, torch.full((3,), number))
        assert drawn.tolist()[:2] == [650, 3] and 0 <= int(drawn[2]) < 700
