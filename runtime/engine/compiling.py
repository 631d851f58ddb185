"""Requests that wait until a thread has compiled their grammar.

A large grammar takes as long as many steps. One grammar is compiled at a time, and only if there is
room for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..core.generation import GenerateRequest
from ..sampling.grammar_cache import Grammars


class CompilingRequests:
    """The waiting requests, in the order of their arrival."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[GenerateRequest, str]] = {}
        self._compiling: tuple[str, Future[Any]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def adapters(self) -> set[str]:
        """The adapters of the waiting requests."""
        return {message.adapter for message, _ in self._waiting.values()}

    def takes(self, message: GenerateRequest) -> bool:
        """Keep a request whose grammar is not compiled yet, until `ready` yields it.

        Return False if the request need not wait.
        """
        grammar = message.params.grammar
        if grammar is None or self._grammars is None or self._grammars.is_compiled(grammar):
            return False
        self._waiting[message.rid] = message, grammar
        self._compile_next()
        return True

    def ready(self) -> Iterator[GenerateRequest]:
        """Yield the requests that can continue, and forget them.

        A request whose grammar is invalid is one of them: the core finds the error again.
        """
        if self._grammars is None or (self._compiling and not self._compiling[1].done()):
            return
        # Keep a reference until the core has the grammar: unused grammars may be dropped.
        held, self._compiling = self._compiling, None
        failed = held is not None and held[1].exception() is not None
        for rid, (message, grammar) in list(self._waiting.items()):
            if self._grammars.is_compiled(grammar) or (held and failed and held[0] == grammar):
                del self._waiting[rid]
                yield message
        self._compile_next()

    def drop(self, rids: Collection[str]) -> None:
        """Forget aborted requests."""
        for rid in rids:
            self._waiting.pop(rid, None)

    def _compile_next(self) -> None:
        """Start to compile the grammar of the first request, if the thread is free and there is
        room.
        """
        if self._compiling or not self._waiting or self._grammars is None:
            return
        if self._grammars.has_room:
            _, grammar = next(iter(self._waiting.values()))
            future = self._thread.submit(self._grammars.matcher, grammar)
            self._compiling = grammar, future

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
