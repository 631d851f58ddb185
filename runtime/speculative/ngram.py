"""Proposes what followed the last tokens before: in the request's own text, or in recent answers of
the same tenant and adapter. See "Prompt lookup decoding"
(https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

from ..core.request import Request
from .method import Guess
from .ngrams import LENGTH, LONGEST, Ngrams, key_of

_SHARED_TOKENS = 1 << 16  # Tokens of recent answers, of all namespaces. They take about 12 MB.
_LONGEST_ANSWER = 1 << 12  # Tokens of an answer that are kept.
# The kinds of guesses, by the digits of the number of tokens that agreed.
_OWN, _SHARED, _NEAR = (
    [f"{source} {digits}" for digits in range(8)] for source in ("own", "shared", "near")
)
_REACH = 32  # Tokens in which the end of a difference is searched for.


class Ngram:
    """Looks up the last tokens of a request."""

    name = "ngram"

    def __init__(self) -> None:
        # Recent answers by namespace, the least recently used first.
        self._answers: OrderedDict[bytes, Ngrams] = OrderedDict()
        self._num_tokens = 0  # Length of all answers.

    def begin(self, request: Request) -> TextLookup:
        shared = self._answers.get(request.namespace)
        if shared is not None:
            self._answers.move_to_end(request.namespace)
        return TextLookup(Ngrams(request.tokens), shared)

    def end(self, request: Request) -> None:
        answer = request.output_tokens[:_LONGEST_ANSWER]
        if len(answer) <= LENGTH:
            return
        known = self._answers.pop(request.namespace, None)
        if known is None:
            known = Ngrams(np.empty(0, np.int64))
        elif len(known.tokens) + len(answer) > _SHARED_TOKENS:
            self._forget(known)
        for token in answer.tolist():
            known.append(token)
        self._answers[request.namespace] = known
        self._num_tokens += len(answer)
        while self._num_tokens > _SHARED_TOKENS:
            self._forget(self._answers.popitem(last=False)[1])

    def _forget(self, answers: Ngrams) -> None:
        self._num_tokens -= len(answers.tokens)
        # Running requests may hold the object.
        answers.clear()


class TextLookup:
    """Follows an earlier place of a text as long as the text repeats it.

    Where the text differs, as in the values of records with the same fields, it often returns to
    the earlier text soon. Until a longer agreement is found elsewhere, the last token is therefore
    searched for in the tokens that followed where the text began to differ.
    """

    def __init__(self, own: Ngrams, shared: Ngrams | None) -> None:
        self._own, self._shared = own, shared
        self._source: Ngrams | None = None
        self._place = self._length = 0  # In the source; number of tokens that agreed before it.
        self._left: Ngrams | None = None  # The source that the text has left,
        self._left_at = 0  # and where.
        self._is_near = False  # Whether the place was found near there.
        tail = own.tokens[-LONGEST:]
        self._look(tail, key_of(*tail[-LENGTH:]) if len(tail) >= LENGTH else 0)

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            source = self._source
            expected = source.tokens[self._place : self._place + 1] if source is not None else ()
            if expected and expected[0] == token:
                self._place += 1
                self._length += 1
                self._own.append(token)
                continue
            if source is not None and self._length >= LENGTH:
                self._left, self._left_at = source, self._place
            tail = self._own.tokens[1 - LONGEST :]
            tail.append(token)
            key = key_of(*tail[-LENGTH:]) if len(tail) >= LENGTH else 0
            self._look(tail, key)
            if self._source is None and self._left is not None:
                self._look_near(self._left, token)
            self._own.append(token, key)

    def guess(self, most: int) -> Guess | None:
        if self._source is None:
            return None
        tokens = self._source.tokens[self._place : self._place + most].tolist()
        kinds = _OWN if self._source is self._own else _SHARED
        if self._is_near and self._length < LENGTH:
            kinds = _NEAR
        return Guess(tokens, kinds[min(self._length, 64).bit_length()]) if tokens else None

    def _look(self, tail: array[int], key: int) -> None:
        self._source, (self._place, self._length) = self._own, self._own.find(tail, key)
        self._is_near = False
        if self._shared is not None and self._length < LONGEST:
            place, length = self._shared.find(tail, key)
            if length > self._length:
                self._source, self._place, self._length = self._shared, place, length
        if not self._length:
            self._source = None

    def _look_near(self, source: Ngrams, token: int) -> None:
        near = source.tokens[self._left_at : self._left_at + _REACH]
        if token in near:
            place = self._left_at + near.index(token) + 1
            self._source, self._place, self._length = source, place, 1
            self._is_near = True
