"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...runtime.engine.messages import TokenLogprob
from ...runtime.tokenizer.detokenizer import Detokenizer
from ...runtime.tokenizer.tokenizer import Tokenizer

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
    return {
        "token": token_bytes.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(token_bytes),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None] | None, count: int | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: at each position of the prompt its token and the `count` likeliest,
    by their ids; null at the first. None where `count` is.
    """
    if count is None or entries is None:
        return None
    return [None if entry is None else _by_id(tokenizer, entry, count) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob, count: int) -> dict[str, Any]:
    tokens = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[:count], 1):
        tokens.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, (logprob, rank) in tokens.items()
    }


class CompletionLogprobs:
    """Writes `logprobs` of one completion choice, piece by piece: `text_offset` counts characters
    of the choice's text.

    That text begins with `echoed`, which stands for the prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        echoed: str,
        *,
        count: int,
        skip_special_tokens: bool,
    ) -> None:
        """`count`: of alternatives."""
        self._tokenizer, self._count = tokenizer, count
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._text = Detokenizer(
            tokenizer,
            prompt_ids,
            stop=(),
            include_stop=False,
            skip_special_tokens=skip_special_tokens,
        )
        self._offset = len(echoed)

    def write(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob],
        prompt_entries: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """The lists for these tokens, behind those of the prompt where it has entries."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._text.push([token_id]).text)
        if prompt_entries is None:
            return self._lists(token_ids, entries, offsets)
        return self._lists(
            [*self._prompt_ids, *token_ids],
            [*prompt_entries, *entries],
            [*self._prompt_offsets(), *offsets],
        )

    def _prompt_offsets(self) -> list[int]:
        """Where each token of the prompt begins in `echoed`, which lacks what the tokenizer puts
        around a text.
        """
        text = Detokenizer(
            self._tokenizer, (), stop=(), include_stop=False, skip_special_tokens=False
        )
        pieces = [text.push([token_id]).text for token_id in self._prompt_ids]
        added = max(0, "".join(pieces).rfind(self._echoed))
        begins = accumulate(map(len, pieces), initial=-added)
        return [
            min(max(begin, 0), len(self._echoed)) for begin, _ in zip(begins, pieces, strict=False)
        ]

    def _lists(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int]
    ) -> dict[str, Any]:
        """A token without an entry, the first of a prompt, has null."""
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [
                None if entry is None else finite(entry.logprob) for entry in entries
            ],
            "top_logprobs": [
                None if entry is None else self._alternatives(entry) for entry in entries
            ],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the chosen one where it is not among them."""
        texts: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._count], (entry.token_id, entry.logprob)]:
            # Parts of characters may look alike; the likeliest stands for them.
            texts.setdefault(token_text(self._tokenizer, token_id), finite(logprob))
        return texts
