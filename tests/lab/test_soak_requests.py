"""The requests of a soak: each a function of the seed and its number, of every shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import VOCAB_SIZE

from piecework.bench.target import Api
from piecework.lab.soak.requests import Fate, Mix

CALM = Mix(
    apis=tuple(Api), disconnect_rate=0.0, abort_rate=0.0, max_prompt_words=30, max_new_tokens=8
)
STORMY = replace(CALM, disconnect_rate=0.3, abort_rate=0.3)


@given(seed=st.integers(), number=st.integers(0, 10**6))
def test_a_request_is_a_function_of_seed_and_number(seed: int, number: int) -> None:
    mix = replace(STORMY, seed=seed, vocab_size=VOCAB_SIZE)
    request = mix.request(number)
    assert request == mix.request(number)
    assert 1 <= request.call.max_tokens <= mix.max_new_tokens
    prompt = request.call.prompt
    assert 1 <= len(prompt.split() if isinstance(prompt, str) else prompt) <= mix.max_prompt_words
    assert request.api is not Api.CHAT or isinstance(prompt, str)
    assert request.fate is not Fate.ABORT or request.call.stream or request.api is Api.GENERATE


def test_the_mix_has_every_shape_at_its_rate() -> None:
    requests = [
        replace(CALM, disconnect_rate=0.2, abort_rate=0.1, vocab_size=VOCAB_SIZE).request(number)
        for number in range(2000)
    ]
    fates = [
        sum(request.fate is fate for request in requests) / 2000
        for fate in (Fate.DISCONNECT, Fate.ABORT)
    ]
    assert fates == pytest.approx([0.2, 0.1], abs=0.03)
    calls = [request.call for request in requests]
    for shape in (
        lambda call: call.stream,
        lambda call: call.n > 1,
        lambda call: call.logprobs is not None,
        lambda call: bool(call.stop),
        lambda call: call.seed is not None and call.temperature > 0,
        lambda call: call.temperature == 0,
        lambda call: call.ignore_eos,
        lambda call: isinstance(call.prompt, list),
        lambda call: isinstance(call.prompt, str) and len(call.prompt.split()) > 20,
        lambda call: isinstance(call.prompt, str) and len(call.prompt.split()) == 1,
    ):
        assert 0.02 < sum(map(shape, calls)) / 2000 < 0.98
    beginnings = [
        call.prompt.split()[0]
        for call in calls
        if isinstance(call.prompt, str) and len(call.prompt.split()) > 4
    ]
    assert max(map(beginnings.count, set(beginnings))) > len(beginnings) / 20
    assert {request.api for request in requests} == set(Api)
