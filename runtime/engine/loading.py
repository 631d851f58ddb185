"""Requests that wait until their prefix is loaded from a tier below the KV cache.

One prefix is loaded at a time: a thread reads its blocks while requests run, and between two steps
a piece is written into the cache. A request waits only if that is sooner than computing the prefix,
by the measured speeds of both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from ..core.generation import GenerateRequest
from ..tiers.restoring import Restoration
from ..tiers.tiers import Found, Piece, Tiers

logger = logging.getLogger(__name__)

_TOKENS_AT_LEAST = 64  # A step with fewer tokens says little about the speed of prompts.
_PIECES_AHEAD = 4  # Pieces that are read before they are written into the cache.
_WEIGHT = 0.2  # The newest measurement's share of an average.


class LoadingRequests:
    """The waiting requests, in the order of their arrival.

    Attributes:
        loaded_tokens: Total number of tokens whose keys and values were loaded.
        failures: Total number of prefixes that could not be loaded to the end. Their requests
            compute the rest.
    """

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers
        self._waiting: dict[str, GenerateRequest] = {}
        self._load: _Load | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-load")
        self._token_seconds = 0.0  # To compute a token of a prompt; 0 if not measured yet.
        self._byte_seconds = 0.0  # To load a byte; 0 if not measured yet.
        self.loaded_tokens = self.failures = 0

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or self._load is not None

    @property
    def adapters(self) -> set[str]:
        """The adapters of the waiting requests."""
        return {message.adapter for message in self._waiting.values()}

    def takes(self, message: GenerateRequest) -> bool:
        """Keep a request while its prefix is loaded, until `ready` yields it.

        Return False if the request need not wait.
        """
        if self._find(message) is None:
            return False
        self._waiting[message.rid] = message
        return True

    def ready(self) -> Iterator[GenerateRequest]:
        """Write a piece that was read into the cache.

        Yield the requests that can continue, and forget them.
        """
        if self._load is not None:
            if not self._load.advance():
                return
            yield from self._end(self._load)
        while self._waiting and self._load is None:
            message = next(iter(self._waiting.values()))
            # An earlier request may have loaded or computed the same prefix.
            if (found := self._find(message)) is None:
                del self._waiting[message.rid]
                yield message
            elif self._tiers is not None:
                self._load = _Load(self._tiers, message.rid, found, self._thread)

    def drop(self, rids: Collection[str]) -> None:
        """Forget aborted requests. What is being loaded for them stays in the cache."""
        for rid in rids:
            self._waiting.pop(rid, None)
            if self._load is not None and self._load.rid == rid:
                self.end()

    def end(self) -> None:
        """End what is being loaded. Waiting requests look again for what is worth loading."""
        if self._load is not None:
            self._load.end()
            self._load = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with so many new tokens took."""
        if num_tokens >= _TOKENS_AT_LEAST:
            self._token_seconds = _averaged(self._token_seconds, seconds / num_tokens)

    def close(self) -> None:
        self.end()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _find(self, message: GenerateRequest) -> Found | None:
        """Return what is worth loading for a request, or None."""
        if self._tiers is None or message.params.prompt_logprobs is not None:
            return None  # Log-probabilities of a prompt need the logits of every position.
        found = self._tiers.find(message.names(), message.namespace)
        if found is None or not self._token_seconds or not self._byte_seconds:
            return found
        sooner = found.num_bytes * self._byte_seconds < found.gained * self._token_seconds
        return found if sooner else None

    def _end(self, load: _Load) -> Iterator[GenerateRequest]:
        """Yield the request of a load that ended, which may have been aborted."""
        load.end()
        self._load = None
        if load.failed:
            self.failures += 1
        else:
            seconds = time.monotonic() - load.began
            per_byte = seconds / max(1, load.found.num_bytes)
            self._byte_seconds = _averaged(self._byte_seconds, per_byte)
            if self._tiers is not None and self._token_seconds:
                self._tiers.budget.gain(load.found.gained * self._token_seconds - seconds)
            self.loaded_tokens += load.found.gained
        if load.rid in self._waiting:
            message = self._waiting.pop(load.rid)
            yield message if load.failed else replace(message, loaded=load.found.sources)


class _Load:
    """Reads a prefix in another thread, and restores what was read.

    Attributes:
        failed: Whether a block was missing or damaged, or did not fit into the cache.
    """

    def __init__(self, tiers: Tiers, rid: str, found: Found, thread: ThreadPoolExecutor) -> None:
        self._tiers, self.rid, self.found = tiers, rid, found
        self.began, self.failed = time.monotonic(), False
        self._restoration = Restoration(tiers.cache, tiers.copies, found)
        self._thread = thread
        self._unread = deque(found.pieces)
        self._reads: deque[tuple[Piece, Future[torch.Tensor | None]]] = deque()
        self._read_ahead()

    def advance(self) -> bool:
        """Write one piece into the cache if it was read. Return whether the load is over."""
        if self._reads and self._reads[0][1].done():
            piece, future = self._reads.popleft()
            try:
                blocks = future.result()
            except Exception:
                logger.exception("blocks of the KV cache cannot be read")
                blocks = None
            self.failed = blocks is None or not self._restoration.insert(piece, blocks)
            self._read_ahead()
        return self.failed or not self._reads

    def end(self) -> None:
        for _, future in self._reads:
            future.cancel()
        self._restoration.close()

    def _read_ahead(self) -> None:
        while self._unread and len(self._reads) < _PIECES_AHEAD:
            piece = self._unread.popleft()
            self._reads.append((piece, self._thread.submit(self._tiers.read, piece)))


def _averaged(average: float, value: float) -> float:
    return value if not average else average + _WEIGHT * (value - average)
