"""Requests whose grammars are compiled in a thread before the core takes them: a large one takes as
long as many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..core.messages import GenerateRequest
from ..sampling.grammar import Grammars


class CompilingRequests:
    """In the order in which they came."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[GenerateRequest, Future[Any]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    def takes(self, message: GenerateRequest) -> bool:
        """Whether the request waits here, for `ready` to give it back."""
        grammar = message.params.grammar
        if grammar is None or self._grammars is None or self._grammars.is_compiled(grammar):
            return False
        future = self._thread.submit(self._grammars.matcher, grammar)
        self._waiting[message.rid] = message, future
        return True

    def ready(self) -> Iterator[GenerateRequest]:
        """Those that can go on, which forgets them; also those whose grammar has a fault, which
        the core then finds again. One whose grammar has been forgotten since waits again.
        """
        for rid, (message, future) in list(self._waiting.items()):
            if future.done():
                del self._waiting[rid]
                if future.exception() is not None or not self.takes(message):
                    yield message

    def drop(self, rids: Collection[str]) -> None:
        """Forget aborted ones."""
        for rid in rids:
            if (found := self._waiting.pop(rid, None)) is not None:
                found[1].cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
