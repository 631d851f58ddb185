"""Tokens that are drawn before their grammar is asked come as often as if all others had been
banned from the start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.request import Request
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.sampling import grammar, grammar_cache
from piecework.runtime.sampling.grammar import Matcher
from piecework.runtime.sampling.grammar_vocabulary import Bytes
from piecework.runtime.sampling.logits_processors import ban_by_grammar, processors_for
from piecework.runtime.sampling.sampler import NO_TOKEN, sample

VOCAB = 512
TEXT = grammar.from_regex("[a-f]x|[c-z]y{3}")
COMPILED = grammar.compiled(grammar._bytes(8), TEXT)


def request(
    seed: int, output: list[int] | None = None, matcher: Matcher | None = None, **params: Any
) -> Request:
    message = GenerateRequest(
        rid="r",
        input_ids=[1],
        output_ids=output or [],
        params=SamplingParams(grammar=TEXT, **params),
    )
    matcher = matcher or Matcher(COMPILED.deep_copy())
    return Request(
        message,
        seed=seed,
        stop_ids=frozenset(),
        max_tokens=99,
        grammar=matcher,
        make_processors=processors_for,
    )


def masked(logits: torch.Tensor) -> torch.Tensor:
    allowed = logits[None].clone()
    ban_by_grammar(allowed, [request(0)])
    return allowed[0]


def test_each_token_comes_as_often_as_of_masked_logits() -> None:
    """The second draw by a number of its own: those that give the first the refused token would all
    give the second the "a".
    """
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    logits[ord("a")] = logits[ord("b")] = 5.0
    logits[ord("G")] = 6.0  # refused
    draws = 6000
    requests = [request(seed, temperature=0.8) for seed in range(draws)]
    found = torch.tensor([each.token for each in sample(logits.repeat(draws, 1), requests).read()])
    shares = torch.bincount(found, minlength=VOCAB) / draws
    assert torch.allclose(shares, (masked(logits) / 0.8).softmax(-1), atol=0.02)


def test_what_the_mask_allows_and_a_look_refuses_comes_as_often_as_of_masked_logits() -> None:
    """A token that is text and an end besides: a mask of long texts has it, where a look does
    not.
    """
    end, draws = ord("#"), 2000
    vocabulary = LLTokenizer(
        TokenizerWrapper(Bytes(VOCAB)),
        VOCAB,
        eos_token=[VOCAB - 1, end],
        slices=grammar_cache._SLICES,
    )
    matcher = Matcher(grammar.compiled(vocabulary, grammar.from_json_schema({"type": "string"})))
    matcher.accept([ord('"')])
    assert not matcher.takes([end])
    logits = torch.full((VOCAB,), -9.0)
    logits[end] = logits[ord("a")] = 1.0
    requests = [request(seed, matcher=matcher) for seed in range(draws)]
    found = [each.token for each in sample(logits.repeat(draws, 1), requests).read()]
    assert abs(found.count(end) / draws - 0.5) < 0.05


@settings(max_examples=examples(12, exploring=30))
@given(seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), hot=st.booleans())
def test_it_is_the_same_alone_and_in_a_crowd(seeds: list[int], hot: bool) -> None:
    logits = torch.randn(len(seeds), VOCAB, generator=torch.Generator().manual_seed(seeds[0] % 99))
    given = {"temperature": 1.5 if hot else 0.0}
    crowd = sample(logits.clone(), [request(seed, **given) for seed in seeds]).read()
    for row, seed in enumerate(seeds):
        (alone,) = sample(logits[row : row + 1].clone(), [request(seed, **given)]).read()
        assert alone == crowd[row]
        assert masked(logits[row])[alone.token] > -torch.inf
        if not hot:
            assert alone.token == int(masked(logits[row]).argmax())


def test_a_token_that_may_follow_takes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    fill = Matcher.fill
    monkeypatch.setattr(Matcher, "fill", lambda own, *bits: (masks.append(1), fill(own, *bits))[1])
    logits = torch.zeros(2, VOCAB)
    logits[:, ord("e")] = 50.0
    assert [each.token for each in sample(logits.clone(), [request(1), request(2)]).read()] == [
        ord("e")
    ] * 2
    assert not masks
    filtered = sample(logits.clone(), [request(1, top_p=0.5)]).read()
    assert filtered[0].token == ord("e") and masks, "filters look at what is allowed alone"


def test_who_is_allowed_nothing_gets_no_token() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, ord("G")] = 1.0
    assert sample(logits, [request(1)]).read()[0].token == NO_TOKEN


@settings(max_examples=examples(10, exploring=25))
@given(data=st.data())
def test_one_look_says_of_each_token_what_the_mask_says(data: st.DataObject) -> None:
    """Special tokens and the end of the text among them."""
    text = data.draw(
        st.sampled_from(
            [
                TEXT,
                grammar.from_json_schema({"type": "array", "items": {"enum": ["ab", 12, None]}}),
                grammar.from_json_schema({"type": "string", "maxLength": 3}),
                grammar.from_lark('start: "a"+ ("b" | "cc")?'),
            ]
        )
    )
    matcher = Matcher(grammar.compiled(grammar._bytes(8), text))
    bits = np.zeros(VOCAB // 32, np.int32)
    for _ in range(data.draw(st.integers(0, 8))):
        matcher.fill(bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        assert [matcher.takes([token]) for token in range(VOCAB)] == allowed.astype(bool).tolist()
        if matcher.is_finished or not allowed.any():
            break
        matcher.accept([data.draw(st.sampled_from(np.flatnonzero(allowed).tolist()))])
        if matcher.is_finished:
            break
