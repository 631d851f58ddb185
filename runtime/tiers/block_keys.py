"""Names of blocks that every process and machine computes alike."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from .store import KEY_BYTES

_KIND = 15  # Bits of the first byte that number the kind of cache. `KVEvents` reads them.


class BlockKeys:
    """Makes the keys of a model's blocks: a hash of all tokens up to the end of a page.

    The first key of a prefix also depends on `identity`, which must differ whenever equal tokens
    have other keys and values or another memory layout, and on the namespace of the request.
    """

    def __init__(self, identity: bytes, page_size: int) -> None:
        self._identity, self._page_size = identity, page_size

    def of(
        self, parent: bytes | None, tokens: npt.NDArray[np.int64], namespace: bytes
    ) -> list[bytes]:
        """Return a key for each whole page of `tokens`, which follow the page of `parent`."""
        data, width = np.ascontiguousarray(tokens, "<i8").tobytes(), 8 * self._page_size
        last = parent
        if last is None:
            last = blake2b(self._identity + namespace, digest_size=KEY_BYTES).digest()
        keys = list[bytes]()
        for end in range(width, len(data) + 1, width):
            digest = blake2b(last + data[end - width : end], digest_size=KEY_BYTES).digest()
            last = bytes([digest[0] & ~_KIND]) + digest[1:]
            keys.append(last)
        return keys


def key_of_kind(key: bytes, kind: int) -> bytes:
    """Return the key under which a kind of cache keeps its block of a page."""
    return key if kind == 0 else bytes([key[0] | kind]) + key[1:]
