"""Log-probabilities in the two formats of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.core.generation import TokenLogprob
from ...runtime.tokenizer.detokenizer import Detokenizer
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import Answer
from ..parsing.events import Event, Text

FLOOR = -9999.0  # Replaces minus infinity, which JSON does not have.
_KEPT = 4096  # Pieces that are kept for the next search if a text is not found in them.


class TokenLogprobAnswer(Answer):
    """`token` has U+FFFD for a part of a character. `bytes` are the exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprobAnswer):
    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Answer):
    content: Sequence[ChosenLogprob | msgspec.Raw]
    refusal: None = None


class PromptLogprob(Answer):
    """`rank` 1 is the most likely token."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id, at each position of the prompt.
PromptLogprobs = Sequence[dict[str, PromptLogprob] | None]


class CompletionLogprobsAnswer(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: Sequence[dict[str, float] | msgspec.Raw | None]
    text_offset: list[int]


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token, with U+FFFD for a part of a character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> msgspec.Raw:
    """Return one token as JSON, which takes a fifth of the memory of Python objects."""

    def token(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        token_bytes = tokenizer.token_bytes(token_id)
        return token_bytes.decode("utf-8", "replace"), finite(logprob), list(token_bytes)

    top = [TokenLogprobAnswer(*token(token_id, logprob)) for token_id, logprob in entry.top]
    chosen = ChosenLogprob(*token(entry.token_id, entry.logprob), top)
    return _encoded(chosen)


def _encoded(content: Answer | dict[str, float]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(content))


class TokenTrail:
    """Finds the tokens of the visible text of one sequence.

    >>> trail = TokenTrail(tokenizer, request)
    >>> trail.push(output.logprobs)
    >>> [trail.read(event) for event in reader.push(output)]

    Thoughts, marks, markup of calls and end tokens are not part of that text.
    """

    def __init__(self, tokenizer: Tokenizer, request: RequestState) -> None:
        options = request.text
        self._tokenizer = tokenizer
        self._hidden = (
            tokenizer.special_token_ids - options.visible
            if options.skip_special_tokens
            else frozenset()
        )
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_ids,
            stop=(),
            include_stop=False,
            skip_special_tokens=options.skip_special_tokens,
            visible=options.visible,
        )
        # Pieces of text that were not read yet, each with its tokens. A character may take several
        # tokens.
        self._pieces: list[tuple[str, list[TokenLogprob]]] = []
        self._incomplete: list[TokenLogprob] = []  # Tokens of an incomplete character.
        self._in_text = True  # Whether the last event was visible text.

    def push(self, entries: Sequence[TokenLogprob]) -> None:
        """Add the next tokens."""
        for entry in entries:
            if entry.token_id in self._hidden:
                continue
            self._incomplete.append(entry)
            if piece := self._detokenizer.push([entry.token_id]).text:
                self._pieces.append((piece, self._incomplete))
                self._incomplete = []

    def read(self, event: Event) -> list[msgspec.Raw]:
        """Return the log-probabilities of the tokens that begin in the text of `event`.

        Return an empty list if the text is not visible.
        """
        self._in_text = isinstance(event, Text)
        taken = self._take(event[0])
        return [_chat_entry(self._tokenizer, entry) for entry in taken] if self._in_text else []

    def rest(self) -> list[msgspec.Raw]:
        """Return the log-probabilities of the tokens of an incomplete character at the end of the
        text.
        """
        cut = self._incomplete if self._in_text else []
        return [_chat_entry(self._tokenizer, entry) for entry in cut]

    def _take(self, text: str) -> list[TokenLogprob]:
        """Remove and return the tokens of the next occurrence of `text`. Drop the text before
        it.
        """
        begin = "".join([piece for piece, _ in self._pieces]).find(text)
        if begin < 0:  # The arguments of a call may be written differently from the model's text.
            del self._pieces[:-_KEPT]
            return []
        end, place, count = begin + len(text), 0, 0
        taken: list[TokenLogprob] = []
        rest = ""
        for piece, entries in self._pieces:
            if place >= end:
                break
            place, count = place + len(piece), count + 1
            if place > begin:
                taken += entries
            rest = piece[len(piece) - max(0, place - end) :]
        self._pieces[:count] = [(rest, [])] if rest else []
        return taken


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None] | None, count: int | None
) -> PromptLogprobs | UnsetType:
    """Return vLLM's `prompt_logprobs`, or UNSET if `count` is None.

    Each position of the prompt has its token and the `count` most likely tokens, by their ids. The
    first position has null.
    """
    if count is None or entries is None:
        return UNSET
    return [None if entry is None else _by_id(tokenizer, entry, count) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob, count: int) -> dict[str, PromptLogprob]:
    tokens = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[:count], 1):
        tokens.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): PromptLogprob(finite(logprob), rank, token_text(tokenizer, token_id))
        for token_id, (logprob, rank) in tokens.items()
    }


class CompletionLogprobs:
    """Writes `logprobs` of one completion choice, piece by piece.

    `text_offset` counts characters of the choice's text, which begins with `echoed`, the prompt.
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
        """`count` is the number of alternatives."""
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
    ) -> CompletionLogprobsAnswer:
        """Return the lists for these tokens. If the prompt has entries, its tokens come first."""
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
        """Return the offset of each token of the prompt in `echoed`.

        `echoed` lacks the tokens that the tokenizer adds to a text.
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
    ) -> CompletionLogprobsAnswer:
        """Return the lists. A token without an entry, the first of a prompt, has null."""
        return CompletionLogprobsAnswer(
            [self._key(token_id) for token_id in token_ids],
            [None if entry is None else finite(entry.logprob) for entry in entries],
            [None if entry is None else _encoded(self._alternatives(entry)) for entry in entries],
            offsets,
        )

    def _key(self, token_id: int) -> str:
        """Return a token's text. Part of a character is written as in OpenAI's API:
        `bytes:\\xf0\\x9f`.
        """
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in content])

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the chosen token, by their texts.

        Another token with a text that is already used has the key `token_id:N`.
        """
        chosen = self._key(entry.token_id)
        found: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._count]:
            key = self._key(token_id)
            if token_id != entry.token_id and (key == chosen or key in found):
                key = f"token_id:{token_id}"
            found[key] = finite(logprob)
        found.setdefault(chosen, finite(entry.logprob))
        return found
