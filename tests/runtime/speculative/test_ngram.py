"""Answers that tenants share for lookup, and what they may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from piecework.runtime.speculative.ngram import _SHARED_TOKENS, Ngram


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


def _length(answers: Any) -> int:
    return len(answers.tokens)
