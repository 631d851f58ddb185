"""Adapters that a thread reads from their files, and requests that wait for them.

Messages are answered in the order of their arrival. One adapter is read at a time, while steps go
on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ..core.generation import FinishReason, GenerateRequest, TokenOutput
from ..core.messages import AdapterAnswer, LoadAdapter, UnloadAdapter
from ..distributed.ranks import Ranks
from ..lora.adapter import DISABLED, Adapter, AdapterFault
from ..lora.store import CHANGED, AdapterStore

logger = logging.getLogger(__name__)

_OFF = AdapterAnswer(error="adapters are off: start with --enable-lora", code=DISABLED)


class LoadingAdapters:
    """The messages that are not answered yet, and the waiting requests, in order of arrival.

    Rank 0 reads an adapter in a thread. The other ranks read it when rank 0 has done so: its files
    are in the memory of the machine then.
    """

    def __init__(self, store: AdapterStore | None, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks
        self._messages: deque[LoadAdapter | UnloadAdapter] = deque()
        self._waiting: dict[str, GenerateRequest] = {}
        # What is read: a message, or the identity of an adapter that requests wait for.
        self._reading: tuple[LoadAdapter | str, Future[Adapter]] | None = None
        self._refused: list[TokenOutput] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter")

    @property
    def pending(self) -> bool:
        return bool(self._messages or self._waiting or self._reading)

    def load(self, message: LoadAdapter) -> None:
        self._messages.append(message)
        self._read_next()

    def unload(self, message: UnloadAdapter) -> None:
        self._messages.append(message)

    def takes(self, message: GenerateRequest) -> bool:
        """Keep a request whose adapter has to be read, until `ready` yields it.

        Return False if the request need not wait.
        """
        if not message.adapter or not self._is_coming(message.adapter):
            return False
        self._waiting[message.rid] = message
        self._read_next()
        return True

    def drop(self, rids: Collection[str]) -> None:
        """Forget aborted requests."""
        for rid in rids:
            self._waiting.pop(rid, None)

    def advance(self, in_use: Collection[str] = ()) -> Iterator[AdapterAnswer]:
        """Take over what was read, and yield the answers to messages that are done.

        `in_use` are the adapters of other requests that the core does not have yet.
        """
        if self._reading is not None and self._reading[1].done():
            (what, future), self._reading = self._reading, None
            answer = self._finish(what, future)
            if isinstance(what, LoadAdapter):
                self._messages.popleft()
                yield answer
        while self._messages and self._reading is None:
            message = self._messages[0]
            if isinstance(message, LoadAdapter) and self._store is not None:
                break
            if isinstance(message, UnloadAdapter) and message.identity in self._adapters(in_use):
                break
            self._messages.popleft()
            yield self._unloaded(message) if isinstance(message, UnloadAdapter) else _OFF
        self._read_next()

    def ready(self) -> Iterator[GenerateRequest]:
        """Yield the requests that can continue, and forget them."""
        if self._store is None:
            return
        for rid, message in list(self._waiting.items()):
            if not self._is_coming(message.adapter):
                del self._waiting[rid]
                yield message

    def refused(self) -> list[TokenOutput]:
        """Return the last outputs of requests whose adapter cannot be read."""
        refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # What every rank does

    def repeat(self, name: str, path: str, identity: str) -> None:
        """Read an adapter that rank 0 has read. Raise `RuntimeError` if it has other contents."""
        assert self._store is not None
        adapter = self._store.read(path)
        if adapter.identity != identity:
            raise RuntimeError(f"{path} differs between the ranks")
        self._store.add(adapter, name, path)

    def repeat_removal(self, identity: str) -> None:
        assert self._store is not None
        self._store.remove(identity)

    # On rank 0

    def _is_coming(self, identity: str) -> bool:
        """Whether an adapter is still to be read, for a message or for requests."""
        if self._store is None or self._store.must_be_read(identity):
            return self._store is not None
        # A message that loads a known adapter again may be behind one that waits for its requests.
        return not self._store.is_known(identity) and any(
            isinstance(message, LoadAdapter) and message.identity == identity
            for message in self._messages
        )

    def _read_next(self) -> None:
        """Start to read the next adapter, if the thread is free."""
        store = self._store
        if store is None or self._reading is not None:
            return
        message = self._messages[0] if self._messages else None
        if isinstance(message, LoadAdapter):
            self._reading = message, self._thread.submit(store.read, message.path)
        elif store.has_room:
            # An `UnloadAdapter` waits for the requests of its adapter, which may have to be read.
            # An adapter whose message failed is not known: its requests end when they are added.
            adapters = (message.adapter for message in self._waiting.values())
            if (identity := next(filter(store.must_be_read, adapters), None)) is not None:
                path = store.info(identity).path
                self._reading = identity, self._thread.submit(store.read, path)

    def _finish(self, what: LoadAdapter | str, future: Future[Adapter]) -> AdapterAnswer:
        assert self._store is not None
        try:
            adapter = _result(future)
            wanted = what.identity if isinstance(what, LoadAdapter) else what
            if wanted and adapter.identity != wanted:
                raise AdapterFault(CHANGED)
        except AdapterFault as error:
            if isinstance(what, str):
                self._refuse(what, error)
            return AdapterAnswer(error=str(error), code=error.code)
        if isinstance(what, LoadAdapter):
            name, path = what.name, what.path
        else:
            known = self._store.info(what)
            name, path = known.name, known.path
        self._ranks.call("add_adapter", name, path, adapter.identity)
        return AdapterAnswer(adapter=self._store.add(adapter, name, path))

    def _refuse(self, identity: str, fault: AdapterFault) -> None:
        """End the requests that wait for an adapter."""
        for rid in [rid for rid, each in self._waiting.items() if each.adapter == identity]:
            del self._waiting[rid]
            self._refused.append(
                TokenOutput(
                    rid=rid,
                    token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=str(fault),
                    code=fault.code,
                )
            )

    def _unloaded(self, message: UnloadAdapter) -> AdapterAnswer:
        if self._store is None:
            return _OFF
        try:
            adapter = self._store.remove(message.identity)
        except AdapterFault as error:
            return AdapterAnswer(error=str(error), code=error.code)
        self._ranks.call("remove_adapter", message.identity)
        return AdapterAnswer(adapter=adapter)

    def _adapters(self, others: Collection[str]) -> set[str]:
        """Return the adapters of requests that the core does not have yet."""
        return {message.adapter for message in self._waiting.values()}.union(others)


def _result(future: Future[Adapter]) -> Adapter:
    """Return what was read. Raise `AdapterFault`."""
    try:
        return future.result()
    except AdapterFault:
        raise
    except Exception as error:
        logger.exception("an adapter cannot be read")
        raise AdapterFault(
            f"the adapter cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from error
