"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ...runtime.messages import TokenLogprob
from ...runtime.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself, U+FFFD where it is part of a character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
    return {**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {"token": token_bytes.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(token_bytes)}


class CompletionLogprobs:
    """Writes `logprobs` of one completion choice, piece by piece: `text_offset` counts characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The lists for these tokens; a token without an entry, the first of a prompt, has null."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._silent:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one where it is not among them."""
        texts: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            # Parts of characters may look alike; the likeliest stands for them.
            texts.setdefault(token_text(self._tokenizer, token_id), finite(logprob))
        return texts
