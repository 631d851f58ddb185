"""Collects the outputs of one HTTP request's sequences, and stops them when the client goes
away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from ..runtime.engine.messages import FinishReason
from ..runtime.tokenizer.output_processor import RequestOutput, RequestState, merge
from .errors import ApiError, ClientGone, InternalError, InvalidRequest
from .http.body_stages import became_prompt
from .request_record import RequestRecord, current_record
from .sequence_clock import SequenceClock
from .state import Serving

T = TypeVar("T")
Update = tuple[int, RequestOutput]
"""Which sequence, and what is new about it."""


class Collector:
    """Generates several sequences at once, for one reader.

    The engine puts outputs as they come, so that a slow reader finds what came meanwhile merged
    into one. `take` is given each that does not end a sequence while the reader waits for it, and
    says whether it could use it at once: then the reader waits on. Leaving the `with` block aborts
    every sequence that still runs.
    """

    take: Callable[[int, RequestOutput], bool] | None = None

    def __init__(self, serving: Serving, requests: Sequence[RequestState]) -> None:
        self._engine = serving.engine
        self._live_rids = serving.live_rids
        self._requests = requests
        self._names = {name for one in requests for name in (one.name, *one.belongs_to)}
        self._clocks = [SequenceClock(serving.metrics, request) for request in requests]
        self._model = serving.model_name
        self._decode = serving.engine.tokenizer.decode
        self._record: RequestRecord | None = None
        self._pending: dict[int, list[RequestOutput]] = {}
        self._running = len(requests)
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        """Raises `InvalidRequest` for an id that is in use, and what the engine does where it takes
        no request.
        """
        # Two requests of one id could not be told apart, and who aborts one must not end the other.
        taken = self._names & self._live_rids
        if taken or len({one.name for one in self._requests}) < len(self._requests):
            which = (
                f"{min(taken)!r} is in use" if taken else "several sequences would have the same"
            )
            raise InvalidRequest(
                f"rid: {which}; choose another.", param="rid", code="duplicate_rid"
            )
        became_prompt()
        self._live_rids.update(self._names)
        if (record := current_record.get()) is not None:
            self._record = record
            record.join(
                self._model,
                self._decode,
                list(zip(self._requests, self._clocks, strict=True)),
            )
        try:
            for index, request in enumerate(self._requests):
                request.deliver = partial(self._put, index)
                self._engine.add_request(request)
        except Exception as error:
            for clock in self._clocks[index:]:
                clock.fail()
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.drop(self._requests)
        for request in self._requests:
            # Else each would hold this collector, which holds it: no memory would be free before a
            # full garbage collection, which megabytes of token ids do not bring about.
            request.deliver = _ignore
        self._live_rids.difference_update(self._names)
        for clock in self._clocks:
            clock.end()
        if self._record is not None:
            record, self._record = self._record, None
            record.leave()

    def _put(self, index: int, output: RequestOutput) -> None:
        """What the engine calls."""
        self._clocks[index].output(output)
        reader = self._reader
        if output.finish_reason is not None:
            self._running -= 1
        elif reader is not None and self.take is not None and self.take(index, output):
            return
        if output.finish_reason is FinishReason.ERROR:
            self._error = self._error or error_of(output)
        else:
            self._pending.setdefault(index, []).append(output)
        if reader is not None:
            self._reader = None
            if not reader.done():  # cancelled
                reader.set_result(None)

    async def next(self) -> list[Update]:
        """What is new, at least one update; empty once all sequences have ended. Raises what ended
        a sequence.
        """
        if not self._pending and self._running and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        return [
            (index, outputs[0] if len(outputs) == 1 else merge(outputs))
            for index, outputs in pending.items()
        ]

    async def all(self) -> list[RequestOutput]:
        """Each sequence as one output, once all have ended. Raises what ended a sequence."""
        outputs: list[list[RequestOutput]] = [[] for _ in self._requests]

        def keep(index: int, output: RequestOutput) -> bool:
            outputs[index].append(output)
            return True

        self.take = keep
        while updates := await self.next():
            for update in updates:
                keep(*update)
        return [merge(own) for own in outputs]


def error_of(output: RequestOutput) -> ApiError:
    """What ended a sequence with `FinishReason.ERROR`."""
    reason = f"The engine could not finish the request: {output.error}"
    if output.code is None:
        return InternalError(f"{reason}.", code="engine_error")
    return InvalidRequest(
        f"{reason}; send a simpler form for its text or its tools.", code=output.code
    )


def _ignore(output: RequestOutput) -> None:
    """Nobody reads it any more."""


async def generate_all(serving: Serving, requests: Sequence[RequestState]) -> list[RequestOutput]:
    """Each sequence whole. Raises what ended a sequence."""
    with Collector(serving, requests) as collector:
        return await collector.all()


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
        # An exception keeps this frame, which would keep the exception, and all that its frames
        # hold: megabytes until the next full garbage collection.
        del task, watch
    raise ClientGone("The client went away.")


async def _client_goes(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
