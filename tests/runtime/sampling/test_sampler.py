"""The sampler: the right distribution, the same token alone and in a crowd, and every parameter as
its definition says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels.plain_sampling import pick
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.sampling.logits_processors import processors_for
from piecework.runtime.sampling.sampler import NO_TOKEN, _split, sample, uniform


def request(
    seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Request:
    message = GenerateRequest(
        rid="r",
        input_ids=prompt or [1, 2, 3],
        output_ids=output or [],
        params=SamplingParams(**params),
    )
    return Request(
        message,
        seed=seed,
        stop_ids=frozenset(message.params.stop_token_ids),
        max_tokens=10_000,
        make_processors=processors_for,
    )


def tokens(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return [result.token for result in sample(logits.clone(), requests).read()]


def frequencies(logits: torch.Tensor, draws: int = 10_000, **params: Any) -> torch.Tensor:
    """Share of each token over many seeds."""
    requests = [request(seed=seed, **params) for seed in range(draws)]
    drawn = torch.tensor(tokens(logits.expand(draws, -1), requests))
    return torch.bincount(drawn, minlength=logits.shape[0]) / draws


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def test_temperature_zero_takes_the_likeliest() -> None:
    assert tokens(LOGITS[None], [request(temperature=0.0)]) == [0]


@pytest.mark.parametrize(
    "others", [{}, {"top_k": 3}, {"min_p": 0.01}, {"temperature": 100.0}], ids=str
)
def test_top_p_zero_takes_the_likeliest(others: dict[str, Any]) -> None:
    drawn = tokens(
        LOGITS.expand(500, -1), [request(seed=seed, top_p=0.0, **others) for seed in range(500)]
    )
    assert set(drawn) == {0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_sampling_follows_the_softmax(temperature: float) -> None:
    assert torch.allclose(
        frequencies(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1), atol=0.017
    )


def test_top_k_keeps_k_and_their_proportions() -> None:
    expected = torch.zeros(6)
    expected[:3] = LOGITS[:3].softmax(-1)
    assert torch.allclose(frequencies(LOGITS, top_k=3), expected, atol=0.017)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probs = LOGITS.softmax(-1)
    p = float(probs[0] + probs[1] / 2)
    expected = torch.zeros(6)
    expected[:2] = LOGITS[:2].softmax(-1)
    assert torch.allclose(frequencies(LOGITS, top_p=p), expected, atol=0.017)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    expected = torch.zeros(6)
    expected[:3] = LOGITS[:3].softmax(-1)
    assert torch.allclose(frequencies(LOGITS, min_p=float(np.exp(-1.6))), expected, atol=0.017)


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() -> None:
    flat = torch.zeros(5000)
    drawn = [tokens(flat[None], [request(seed=seed, top_p=0.9)])[0] for seed in range(300)]
    assert max(drawn) > 1024 and len(set(drawn)) > 250


@settings(deadline=None, max_examples=examples(20, exploring=60))
@given(data=st.data())
def test_a_request_gets_the_same_token_alone_and_in_a_crowd(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([7, 1500]))
    settings_of = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.3]),
            "top_k": st.sampled_from([-1, 1, 5, 1200]),
            "top_p": st.sampled_from([1.0, 0.9, 0.3]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
        }
    )
    requests = [
        request(seed=i, output=[i % vocab], **data.draw(settings_of))
        for i in range(data.draw(st.integers(2, 6)))
    ]
    logits = (
        torch.randn(
            len(requests),
            vocab,
            generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))),
        )
        * 3
    )
    together = tokens(logits, requests)
    assert together == [tokens(logits[i : i + 1], [one])[0] for i, one in enumerate(requests)]


def test_another_position_draws_another_number() -> None:
    flat = torch.zeros(1, 1000)
    drawn = {tokens(flat, [request(seed=5, output=[0] * position)])[0] for position in range(50)}
    assert len(drawn) > 40


def test_uniform_numbers_are_uniform_over_seeds_and_positions() -> None:
    positions = np.arange(100_000, dtype=np.uint64)
    for numbers in (
        uniform(np.zeros_like(positions), positions),
        uniform(positions, np.zeros_like(positions)),
    ):
        assert abs(numbers.mean() - 0.5) < 0.005
        assert np.abs(np.histogram(numbers, 10, (0, 1))[0] / 100_000 - 0.1).max() < 0.005


def test_stop_tokens_cannot_be_sampled_before_min_new_tokens() -> None:
    early = request(min_new_tokens=2, stop_token_ids=[0], output=[1], temperature=0.0)
    late = request(min_new_tokens=2, stop_token_ids=[0], output=[1, 1], temperature=0.0)
    assert tokens(LOGITS.expand(2, -1), [early, late]) == [1, 0]


def test_logprobs_are_the_models_own_before_temperature_and_bias() -> None:
    (result,) = sample(
        LOGITS[None].clone(), [request(temperature=0.0, logit_bias={3: 100.0}, logprobs=2)]
    ).read()
    expected = LOGITS.log_softmax(-1)
    assert result.token == 3 and result.logprob is not None
    assert result.logprob.logprob == pytest.approx(float(expected[3]), abs=1e-6)
    assert [token for token, _ in result.logprob.top] == [0, 1]
    assert [value for _, value in result.logprob.top] == pytest.approx(
        expected[:2].tolist(), abs=1e-6
    )


def test_a_likely_token_is_never_lost_at_the_end_of_the_range() -> None:
    """The largest number below 1 still picks a token that has probability."""
    weights = torch.tensor([[0.3, 0.7, 0.0]])
    assert pick(weights, torch.from_numpy(_split(np.array([np.nextafter(1.0, 0.0)])))).tolist() == [
        1
    ]


@pytest.mark.parametrize("vocab", [1000, pytest.param(151_936, marks=pytest.mark.slow)])
def test_tokens_of_a_block_get_their_shares_of_it_however_small_it_is(vocab: int) -> None:
    weights = (torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 4).softmax(-1)
    weights[256:512] *= 2.0**-30
    blocks = F.pad(weights.double(), (0, -vocab % 256)).view(-1, 256)
    grid = (torch.arange(1024) + 0.5) / 1024
    for block in (0, 1, len(blocks) - 1):
        # What stands before a block gets nothing here, so that the first number cannot miss it.
        alone = torch.zeros(len(grid), vocab)
        alone[:, 256 * block : 256 * block + 256] = weights[256 * block : 256 * block + 256]
        drawn = pick(alone, torch.stack((torch.zeros_like(grid), grid), 1))
        share = torch.bincount(drawn - 256 * block, minlength=256) / len(grid)
        assert (share - blocks[block] / blocks[block].sum()).abs().max() <= 1.01 / len(grid)


def test_blocks_are_chosen_by_their_sums_to_a_few_steps_of_float32() -> None:
    weights = (torch.randn(151_936, generator=torch.Generator().manual_seed(5)) * 2).softmax(-1)
    ends = F.pad(weights.double(), (0, -weights.shape[0] % 256)).view(-1, 256).sum(-1).cumsum(0)
    ends = ends[:-1] / ends[-1]
    for shift, offset in ((-1, 0), (1, 1)):
        numbers = (ends + shift * 2.0**-22).float()
        block = (
            pick(
                weights.expand(len(numbers), -1),
                torch.stack((numbers, torch.full_like(numbers, 0.5)), 1),
            )
            // 256
        )
        assert torch.equal(block, torch.arange(len(ends)) + offset)


@settings(deadline=None, max_examples=examples(20, exploring=50))
@given(st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=5))
def test_a_number_is_split_into_bits_of_their_own(numbers: list[int]) -> None:
    halves = _split(np.array(numbers, np.float64) * 2.0**-53)
    assert halves.dtype == np.float32 and (halves < 1).all()
    assert [(int(a * 2**24), int(b * 2**24)) for a, b in halves] == [
        (n >> 29, (n >> 5) & (2**24 - 1)) for n in numbers
    ]


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5},
]


@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("vocab", [700, 1500])
def test_logits_that_are_not_finite_give_no_token_and_others_theirs(
    broken: float, vocab: int
) -> None:
    requests = [request(seed=i, logprobs=1, **kind) for i, kind in enumerate(KINDS * 2)]
    logits = torch.randn(len(requests), vocab, generator=torch.Generator().manual_seed(1))
    expected = tokens(logits, requests)
    logits[: len(KINDS), vocab - 1] = broken
    samples = sample(logits.clone(), requests)
    assert [result.token for result in samples.read()] == [NO_TOKEN] * len(KINDS) + expected[
        len(KINDS) :
    ]
    assert all(0 <= token < vocab for token in samples.tokens.tolist()), (
        "the next step reads a row of the embedding for each"
    )


tiny_numbers = st.sampled_from([5e-324, 1e-310, 1e-46, 1e-45, 1e-40, 1.2e-38, 1e-7, 1.1e-6])


def number(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(tiny_numbers, tiny_numbers.map(lambda x: high - x), st.floats(low, high))


@settings(deadline=None, max_examples=examples(120, exploring=300))
@given(
    params=st.fixed_dictionaries(
        {
            "temperature": number(0, 100),
            "top_p": number(0, 1),
            "min_p": number(0, 1),
            "repetition_penalty": number(0, 2),
            "presence_penalty": number(-2, 2),
            "frequency_penalty": number(-2, 2),
            "top_k": st.sampled_from([-1, 1, 3, 699, 700, 2**31 - 1]),
            "logit_bias": st.dictionaries(st.integers(0, 699), number(-100, 100), max_size=3),
        }
    ),
    scale=st.sampled_from([0.0, 1.0, 1e4, 1e30]),
    seed=st.integers(0, 99),
)
def test_parameters_are_refused_or_give_a_token_of_the_vocabulary(
    params: dict[str, Any], scale: float, seed: int
) -> None:
    """Checked in the format in which they are computed: what vanishes or overflows in float32
    cannot make a NaN.
    """
    try:
        one = request(seed=seed, output=[5, 5, 600], **params)
    except ValueError:
        return
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(seed)) * scale
    assert 0 <= tokens(logits, [one])[0] < 700


@pytest.mark.parametrize("temperature", [1e-310, 1e-46, 1e-40, 1e-38])
def test_a_temperature_that_float32_cannot_divide_by_takes_the_likeliest(
    temperature: float,
) -> None:
    assert tokens(LOGITS[None], [request(temperature=temperature)]) == [0]
