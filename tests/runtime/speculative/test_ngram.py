"""Answers that tenants share for lookup, and what they may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from piecework.runtime.speculative import ngrams
from piecework.runtime.speculative.ngram import _SHARED_TOKENS, Ngram
from piecework.runtime.speculative.prediction import PredictionLookup


def _request(namespace: str, answer: list[int]) -> Any:
    tokens = np.array([1, *answer], np.int64)
    return SimpleNamespace(namespace=namespace.encode(), tokens=tokens, output_tokens=tokens[1:])


def test_the_answers_of_many_tenants_are_bounded_and_counted() -> None:
    method = Ngram()
    held = [method.begin(_request("0", []))]
    for number in range(_SHARED_TOKENS // 4):
        method.end(_request(str(number), [5, 6, 7, 8]))
    assert method._num_tokens == _SHARED_TOKENS == sum(map(_length, method._answers.values()))
    held.append(method.begin(_request("1", [5, 6, 7])))
    held.append(method.begin(_request("0", [5, 6, 7])))
    method.end(_request("large", list(range(4096))))
    assert method._num_tokens == sum(map(_length, method._answers.values())) <= _SHARED_TOKENS
    # A running request keeps no answers that were dropped.
    assert all(each._shared is None or _length(each._shared) <= 4 for each in held)
    dropped = [method.begin(_request("large", [1])) for _ in range(2)]
    for _ in range(16):
        method.end(_request("large", list(range(4096))))
    shared = dropped[0]._shared
    assert shared is not None and shared is dropped[1]._shared
    assert shared is method._answers[b"large"]


def test_tenants_see_no_answers_of_one_another() -> None:
    method = Ngram()
    answer = [11, 12, 13, 14, 15, 16]
    method.end(_request("key a", answer))
    for tenant, expected in (("key a", [14, 15, 16]), ("key a\nsalt", None), ("", None)):
        guess = method.begin(_request(tenant, [11, 12, 13])).guess(8)
        assert (guess and guess.tokens) == expected


def test_a_text_that_differs_in_values_returns_to_the_earlier_one() -> None:
    method = Ngram()
    record = [31, 32, 33, 50, 34, 35, 36, 51, 52, 37, 38, 39]
    method.end(_request("", record))
    lookup = method.begin(_request("", [31, 32, 33]))
    lookup.append([60, 61, 62])
    assert lookup.guess(3) is None
    lookup.append([34])
    assert lookup.guess(3) == ([35, 36, 51], "near 1")
    lookup.append([35, 36])
    assert lookup.guess(2) == ([51, 52], "shared 2"), "three tokens agree"
    # One of the earlier values comes first, out of place.
    lookup.append([63, 52, 64, 37])
    assert lookup.guess(3) == ([38, 39], "near 1")


@pytest.mark.parametrize("text", [[7], [7, 8], [7, 7, 7, 8], [*range(40), 7]], ids=len)
def test_texts_made_to_be_slow_cost_a_few_comparisons_per_token(
    text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places of a text that repeats itself agree in their hashes."""
    compared, agreement = 0, ngrams._agreement

    def counted(*arguments: Any) -> int:
        nonlocal compared
        compared += 1
        return agreement(*arguments)

    monkeypatch.setattr(ngrams, "_agreement", counted)
    prompt = text * (30_000 // len(text))
    method = Ngram()
    for _ in range(3):
        method.end(_request("", prompt[:4000]))
    for follower in (method.begin(_request("", prompt)), PredictionLookup(prompt)):
        # The answer leaves the repetition again and again, so that each token is looked up.
        for number in range(300):
            follower.append([text[number % len(text)] if number % 4 else 60 + number % 2])
            guess = follower.guess(8)
            assert guess is None or len(guess.tokens) <= 8
    # Two texts of a few places each, for each token of two answers.
    assert 0 < compared <= 2 * 300 * 2 * (1 + ngrams._CANDIDATES)


def _length(answers: Any) -> int:
    return len(answers.tokens)
