"""The bytes of tokens, in the two families of vocabularies of language models."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tokenizers

METASPACE = "\u2581"  # The blank in SentencePiece vocabularies.


class Spelling(NamedTuple):
    """`to_bytes` returns the bytes of a token. A text is the bytes of its tokens.

    If `strips_blank`, one blank at the beginning of the text is removed.
    """

    to_bytes: Callable[[str], bytes]
    strips_blank: bool


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling | None:
    """Return how a tokenizer spells bytes, or None if its decoder does more than join bytes."""
    match _decoders(backend):
        case [{"type": "ByteLevel"}]:
            return Spelling(byte_level_bytes, strips_blank=False)
        case [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            match rest:
                case []:
                    return Spelling(byte_fallback_bytes, strips_blank=False)
                case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return Spelling(byte_fallback_bytes, strips_blank=True)
    return None


def _decoders(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    return steps


def byte_alphabet() -> str:
    """The 256 characters that stand for bytes 0 to 255 in byte-level BPE (GPT-2's
    `bytes_to_unicode`).

    A byte that prints in Latin-1 stands for itself, the others are lifted to U+0100 and on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    lifted = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printing else next(lifted)) for byte in range(256))


_BYTE_OF = {char: byte for byte, char in enumerate(byte_alphabet())}


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE. A token with other characters is plain
    text.
    """
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def byte_fallback_bytes(token: str) -> bytes:
    """Return the bytes of a token of a SentencePiece vocabulary: text, or a byte like `<0xE2>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(METASPACE, " ").encode()


def has_byte_tokens(backend: tokenizers.Tokenizer) -> bool:
    """Return whether some tokens are single bytes, spelled `<0xE2>`."""
    return any(step["type"] == "ByteFallback" for step in _decoders(backend))


def incomplete_character(tokens: Sequence[str]) -> bytes:
    """Return the bytes at the end of SentencePiece tokens that begin a character."""
    content = b"".join(map(byte_fallback_bytes, tokens))
    return content[codecs.utf_8_decode(content, "replace", False)[1] :]
