"""Random texts that follow a grammar."""

from __future__ import annotations

import random

import numpy as np

from piecework.runtime.sampling import grammar


class Walk:
    """Of a grammar in Lark, over a vocabulary of the bytes and special tokens."""

    def __init__(self, lark: str, special: dict[str, int] | None = None) -> None:
        self._text = grammar.from_lark(lark, list((special or {}).values()))
        self._special = {id: mark.encode() for mark, id in (special or {}).items()}

    def text(self, seed: int, most: int = 700) -> str | None:
        """None where it does not end."""
        bits = max(self._special, default=0).bit_length()
        matcher = grammar.compiled(grammar._bytes(bits), self._text)
        choose, written = random.Random(seed), b""
        for _ in range(most):
            mask = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            allowed = np.flatnonzero(mask).tolist()
            known = [token for token in allowed if token < 256 or token in self._special]
            if not known or (len(known) < len(allowed) and choose.random() < 0.3):
                return written.decode() if matcher.is_accepting() else None
            plain = [token for token in known if 32 <= token < 127 or token >= 256]
            token = choose.choice(plain if plain and choose.random() < 0.95 else known)
            matcher.consume_token(token)
            written += self._special.get(token, bytes([token % 256]))
        return None
