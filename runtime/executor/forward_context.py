"""What attention, and only attention, reads during a forward: the step's plan and the KV cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from ...kernels.attention import AttentionBackend, AttentionMetadata
from ..cache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step: what its backend has planned, and the keys and values of every layer."""

    backend: AttentionBackend
    plan: Any
    pool: KVPool


class _Current(threading.local):
    """Of each thread: an engine runs in one, and a process may hold several."""

    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one that attention reads inside the block."""
    previous, _current.context = _current.context, context
    try:
        yield
    finally:
        _current.context = previous


_on_layer: Callable[[], None] | None = None


def tell_each_layer(callback: Callable[[], None]) -> None:
    """`callback` is called whenever attention runs on the host: a sign that a long step goes on."""
    global _on_layer
    _on_layer = callback


def layer_begins() -> None:
    if _on_layer is not None:
        _on_layer()


def current_context() -> ForwardContext:
    context = _current.context
    assert context is not None, "attention ran outside a forward_context"
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """A model's attention over its KV cache, from which each step gets its context."""

    backend: AttentionBackend
    pool: KVPool

    def step(self, metadata: AttentionMetadata) -> AbstractContextManager[None]:
        """The context of a step that `metadata` describes."""
        return self.planned(self.backend.plan(metadata, self.pool.page_size))

    def planned(self, plan: Any) -> AbstractContextManager[None]:
        """The context of a step that the backend has planned already."""
        return forward_context(ForwardContext(backend=self.backend, plan=plan, pool=self.pool))
