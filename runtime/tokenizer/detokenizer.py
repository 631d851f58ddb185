"""Converts token ids to text as they arrive, in constant time per token.

Incomplete characters and possible stop strings are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from tokenizers.decoders import DecodeStream

from .stop_strings import StopStrings
from .token_bytes import Spelling, has_byte_tokens, incomplete_character
from .tokenizer import Tokenizer

_CONTEXT = 8  # Tokens of the prompt that give a decoder the context of the first new token.
_LOOK_BACK = 64  # Tokens without text after which a decoder's replacement characters are final.
_REPLACEMENT = "\ufffd"


class Decoded(NamedTuple):
    """New final text. `stop` is the stop string that was found, with `consumed` of the pushed
    ids.
    """

    text: str
    stop: str | None
    consumed: int


class Detokenizer:
    """Decodes one sequence.

    The results of `push` and `finish` add up to `tokenizer.decode` of all ids as a continuation of
    the prompt. The text is cut before the first complete stop string, or after it with
    `include_stop`. Texts of hidden special tokens count for stop strings. An incomplete character
    at the end is left out. Bytes that cannot become a character become U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
        visible: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """Stop strings that are complete before `min_tokens` tokens are text."""
        self._hidden: frozenset[int] = (
            tokenizer.special_token_ids - visible if skip_special_tokens else frozenset()
        )
        shown = (token_id for token_id in reversed(prompt_ids) if token_id not in self._hidden)
        context = list(islice(shown, _CONTEXT))[::-1]
        self._stream: _Stream = (_DecoderStream if tokenizer.spelling is None else _ByteStream)(
            tokenizer, context
        )
        self._stops = StopStrings(stop) if any(stop) else None
        self._include_stop = include_stop
        self._stopped = False
        self._min_tokens = min_tokens
        self._count = 0  # tokens so far
        # Hidden tokens whose text is part of a stop string: they may end the text.
        self._watched: dict[int, str] = {}
        for token_id in self._hidden if self._stops is not None else ():
            text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            if text and any(text in string for string in stop):
                self._watched[token_id] = text
        self._unseen: list[tuple[int, int]] = []  # where their texts lie in the whole text
        self._read = self._given = 0  # characters that went into `_stops`, and that it gave

    def push(self, token_ids: Sequence[int]) -> Decoded:
        """Add ids and return the text that is certain."""
        assert not self._stopped, "a sequence that met its stop string goes on"
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self._count += 1
            if token_id in self._hidden:
                piece = self._watched.get(token_id)
                if piece is None:
                    continue
                self._unseen.append((self._read, self._read + len(piece)))
            else:
                piece = self._stream.push(token_id)
            if self._stops is None:
                text += piece
                continue
            self._read += len(piece)
            certain, stop = self._stops.push(piece, may_stop=self._count >= self._min_tokens)
            text += self._cut(certain, stop)
            if stop is not None:
                return Decoded(text, stop, count)
        return Decoded(text, None, len(token_ids))

    def finish(self) -> str:
        """End the sequence and return the text that was held back."""
        if self._stopped:
            return ""
        if self._stops is None:
            return self._stream.finish()
        text, stop = self._stops.push(
            self._stream.finish(), may_stop=self._count >= self._min_tokens
        )
        return self._cut(text if stop is not None else text + self._stops.finish(), stop)

    def _cut(self, text: str, stop: str | None) -> str:
        """Return the visible part of a text that `_stops` returned."""
        end = len(text)
        if stop is not None:
            self._stopped = True
            end -= len(stop)
        shown, place = [], 0
        for begin, behind in self._unseen:
            shown.append(text[place : min(max(place, begin - self._given), end)])
            place = min(max(place, behind - self._given), end)
        self._given += len(text)
        self._unseen = [span for span in self._unseen if span[1] > self._given]
        shown.append(text[place:end])
        return "".join(shown) + (text[end:] if self._include_stop else "")


class _Stream(Protocol):
    """Converts consecutive tokens to text without incomplete characters."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """Return the text that was held back, without an incomplete character at the end."""
        ...


class _ByteStream:
    """Tokens that are bytes. At most three bytes of an incomplete character are kept.

    `DecodeStream` decodes all ids since its last text again for each id, which gets slow if tokens
    leave a character incomplete. It also fails if bytes after a SentencePiece character make that
    character invalid.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        assert isinstance(tokenizer.spelling, Spelling)
        self._token_bytes = tokenizer.token_bytes
        self._strip_blank = tokenizer.spelling.strips_blank and not any(
            map(tokenizer.token_bytes, context)
        )
        self._incomplete = b""

    def push(self, token_id: int) -> str:
        content = self._incomplete + self._token_bytes(token_id)
        text, used = codecs.utf_8_decode(content, "replace", False)
        self._incomplete = content[used:]
        if self._strip_blank and text:
            self._strip_blank = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""


class _DecoderStream:
    """Tokens that a decoder of the tokenizers library, such as WordPiece, converts to text.

    `DecodeStream` looks back to its last text. This class limits the distance, and decodes the rest
    again at the end.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._backend = tokenizer.backend
        self._has_bytes = has_byte_tokens(tokenizer.backend)
        self._shown: list[int]
        self._waiting: list[int]
        self._restart([] if self._decode(context).endswith(_REPLACEMENT) else list(context))

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id) or ""
        # The decoder has changed text that was given before; tokenizers raises no narrower class.
        except Exception:
            text = self._text_of(self._waiting)
            self._restart(self._waiting[-1:])
            return text
        if text:
            self._shown, self._waiting = self._waiting, []
        elif len(self._waiting) >= _LOOK_BACK:
            text = self._text_of(self._waiting)
            self._restart(self._waiting)
        return text

    def finish(self) -> str:
        tokens = (
            [self._backend.id_to_token(token_id) or "" for token_id in self._waiting]
            if self._has_bytes
            else []
        )
        # One byte a token: as many tokens as the incomplete character has bytes.
        return self._text_of(
            self._waiting[: len(self._waiting) - len(incomplete_character(tokens))]
        )

    def _text_of(self, waiting: Sequence[int]) -> str:
        return self._decode([*self._shown, *waiting])[len(self._decode(self._shown)) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _restart(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)
        self._shown, self._waiting = context, []
