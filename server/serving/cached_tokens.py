"""Where the cached tokens of prompts were found."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from ...runtime.tokenizer.output_processor import RequestState
from ..core.answers import Answer


class CachedTokensDetails(Answer):
    """SGLang's names: `device` is the KV cache, `host` the memory below it, `storage` the disk."""

    device: int
    host: int
    storage: int


def cached_tokens_details(requests: Sequence[RequestState]) -> CachedTokensDetails | UnsetType:
    """Count the cached tokens by tier, or return `UNSET` if the KV cache had them all."""
    host = sum(request.loaded[0] for request in requests)
    storage = sum(request.loaded[1] for request in requests)
    if not host and not storage:
        return UNSET
    cached = sum(request.cached_tokens or 0 for request in requests)
    return CachedTokensDetails(max(0, cached - host - storage), host, storage)
