"""Runs the sequences of one HTTP request side by side, and stops them when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from ..runtime.engine.messages import FinishReason
from ..runtime.tokenizer.output_processor import GenerationOutput, GenerationRequest, merge
from .errors import ClientGone, InternalError, InvalidRequest
from .metrics import SequenceClock
from .state import Serving

T = TypeVar("T")
Update = tuple[int, GenerationOutput]
"""Which sequence, and what is new about it."""


class SequenceGroup:
    """Generates several sequences at once.

    One task a sequence takes outputs as they come, so that a slow reader finds what came meanwhile
    merged into one. Leaving the `async with` block aborts every sequence that still runs.
    """

    def __init__(self, serving: Serving, requests: Sequence[GenerationRequest]) -> None:
        self._serving = serving
        self._requests = requests
        self._rids = {request.rid for request in requests}
        self._names = self._rids.union(*(request.belongs_to for request in requests))
        self._pending: dict[int, list[GenerationOutput]] = {}
        self._running = len(requests)
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._claim_rids()
        self._tasks = [
            asyncio.create_task(self._run(index, request))
            for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._serving.live_rids.difference_update(self._names)

    def _claim_rids(self) -> None:
        """Clients may choose ids; two requests of one id could not be told apart, and who aborts
        one must not end the other.
        """
        taken = self._names & self._serving.live_rids
        if taken or len(self._rids) < len(self._requests):
            which = (
                f"{min(taken)!r} is in use" if taken else "several sequences would have the same"
            )
            raise InvalidRequest(
                f"rid: {which}; choose another.", param="rid", code="duplicate_rid"
            )
        self._serving.live_rids.update(self._names)

    async def next(self) -> list[Update]:
        """What is new, at least one update; empty once all sequences have ended. Raises what a
        sequence raised.
        """
        while not self._pending and self._running and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return [(index, merge(outputs)) for index, outputs in pending.items()]

    async def all(self) -> list[GenerationOutput]:
        """Each sequence as one output, once all have ended. Raises what a sequence raised."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [merge(self._pending[index]) for index in range(len(self._requests))]

    async def _run(self, index: int, request: GenerationRequest) -> None:
        clock = SequenceClock(self._serving.metrics)
        try:
            # Closing the generator early is what aborts its request.
            async with contextlib.aclosing(self._serving.engine.generate(request)) as outputs:
                async for output in outputs:
                    clock.output(output)
                    if output.finish_reason is FinishReason.ERROR:
                        raise InternalError(
                            f"The engine could not finish the request: {output.error}.",
                            code="engine_error",
                        )
                    self._pending.setdefault(index, []).append(output)
                    self._arrived.set()
        except Exception as error:
            clock.fail()
            self._error = self._error or error
        finally:
            clock.end()
            self._running -= 1
            self._arrived.set()
            if self._running == 0 or self._error is not None:
                self._ended.set()


async def generate_all(
    serving: Serving, requests: Sequence[GenerationRequest]
) -> list[GenerationOutput]:
    """Each sequence whole. Raises what a sequence raised."""
    async with SequenceGroup(serving, requests) as group:
        return await group.all()


async def unless_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and has ended, before `ClientGone` is raised.

    `receive` belongs to a request whose body has been read: the one message that may still come is
    the disconnect.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_client_goes(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    raise ClientGone("The client went away.")


async def _client_goes(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
