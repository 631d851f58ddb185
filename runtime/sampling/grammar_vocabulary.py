"""Vocabularies in the form of llguidance's `TokenizerWrapper`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer


class Bytes:
    """The 256 bytes, and special tokens up to `size`."""

    def __init__(self, size: int) -> None:
        self.tokens = [bytes([token]) for token in range(256)] + [b""] * (size - 256)
        self.special_token_ids: list[int] = []
        self.bos_token_id, self.eos_token_id = None, size - 1

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class Vocabulary:
    """The first `size` tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = sorted(each for each in tokenizer.special_token_ids if each < size)
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = 0

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)
