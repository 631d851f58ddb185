"""Collects the outputs of one HTTP request's sequences, and aborts them if the client
disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.types import Receive

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.output_processor import RequestOutput, RequestState, merge
from ..core.body_stages import became_prompt
from ..core.errors import ApiError, ClientGone, InternalError, InvalidRequest
from ..observability.request_record import RequestRecord, current_record
from ..observability.sequence_clock import SequenceClock
from .kept_logprobs import logprobs_in
from .state import Serving

T = TypeVar("T")
Update = tuple[int, RequestOutput]  # Number of the sequence, and its new output.
# More log-probabilities than this are written in a thread, not on the event loop.
_WRITTEN_AT_ONCE = 4096
_writer = ThreadPoolExecutor(1, thread_name_prefix="write-logprobs")


class Collector:
    """Generates several sequences at once for one reader.

    The engine puts outputs as they arrive. Outputs that arrive while the reader is busy are merged.
    While the reader waits, `take` gets each output that does not end a sequence. If `take` returns
    True, the output is used and the reader keeps waiting. Leaving the `with` block aborts every
    sequence that still runs. `clocks` has the times of each sequence.
    """

    take: Callable[[int, RequestOutput], bool] | None = None

    def __init__(
        self, serving: Serving, requests: Sequence[RequestState], *, keeps_all: bool = False
    ) -> None:
        """If `keeps_all`, the reader holds log-probabilities until all sequences end."""
        self._engine = serving.engine
        self._live_rids = serving.live_rids
        self._kept = serving.kept_logprobs
        self._keeps_all = keeps_all
        self._requests = requests
        self._names = {name for one in requests for name in (one.name, *one.belongs_to)}
        self.clocks = [SequenceClock(serving.metrics, request) for request in requests]
        self._model = serving.model_name
        self._decode = serving.engine.tokenizer.decode
        self._record: RequestRecord | None = None
        self._pending: dict[int, list[RequestOutput]] = {}
        self._running = len(requests)
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        """Add the sequences to the engine.

        Raise `InvalidRequest` for an id that is in use, and the engine's error if it takes no
        request.
        """
        # Requests with the same id could not be told apart, and aborting one would end the other.
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
                list(zip(self._requests, self.clocks, strict=True)),
            )
        try:
            for index, request in enumerate(self._requests):
                request.deliver = partial(self._put, index)
                self._engine.add_request(request)
        except Exception as error:
            for clock in self.clocks[index:]:
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
            # Break the cycle between the request and this collector. A full garbage collection
            # would free it late, because megabytes of token ids do not trigger one.
            request.deliver = _ignore
        self._live_rids.difference_update(self._names)
        self._kept.drop(self)
        for clock in self.clocks:
            clock.end()
        if self._record is not None:
            record, self._record = self._record, None
            record.leave()

    def _put(self, index: int, output: RequestOutput) -> None:
        """Handle an output. The engine calls this."""
        self.clocks[index].output(output)
        if output.finish_reason is not None:
            self._running -= 1
        if self._error is not None:
            return
        if self._keeps_all:
            self._keep(output)
        take = None if self._reader is None or output.finish_reason is not None else self.take
        if take is not None and take(index, output):
            return
        if output.finish_reason is FinishReason.ERROR:
            self._error = error_of(output)
        else:
            self._pending.setdefault(index, []).append(output)
            if not self._keeps_all:
                self._keep(output)
        self._wake()

    def _keep(self, output: RequestOutput) -> None:
        if count := logprobs_in(output):
            self._kept.add(self, count)

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # The reader may be cancelled.
            reader.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End the sequences with `error`, which `next` raises."""
        self._error = error
        self._pending.clear()
        self._engine.drop(self._requests)
        self._wake()

    async def next(self) -> list[Update]:
        """Return what is new: at least one update, or an empty list after all sequences have ended.

        Raise the error that ended a sequence.
        """
        if not self._pending and self._running and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, {}
        if not self._keeps_all:
            self._kept.drop(self)
        return [
            (index, outputs[0] if len(outputs) == 1 else merge(outputs))
            for index, outputs in pending.items()
        ]

    async def all(self) -> list[RequestOutput]:
        """Wait for all sequences and return one output each. Raise an error that ended a
        sequence.
        """
        outputs: list[list[RequestOutput]] = [[] for _ in self._requests]

        def keep(index: int, output: RequestOutput) -> bool:
            outputs[index].append(output)
            return True

        self.take, self._keeps_all = keep, True
        while updates := await self.next():
            for update in updates:
                keep(*update)
        return [merge(own) for own in outputs]

    async def written(self, write: Callable[[list[RequestOutput]], T]) -> T:
        """Wait for all sequences and return `write(outputs)`.

        Many log-probabilities are written in a thread, one answer after another. Raise the error
        that ended a sequence.
        """
        outputs = await self.all()
        if self._kept.held(self) <= _WRITTEN_AT_ONCE:
            return write(outputs)
        return await asyncio.get_running_loop().run_in_executor(_writer, write, outputs)


def error_of(output: RequestOutput) -> ApiError:
    """Return the error of a sequence that ended with `FinishReason.ERROR`."""
    reason = f"The engine could not finish the request: {output.error}"
    if output.code is None:
        return InternalError(f"{reason}.", code="engine_error")
    return InvalidRequest(
        f"{reason}; send a simpler form for its text or its tools.", code=output.code
    )


def _ignore(output: RequestOutput) -> None:
    """Drop an output that has no reader."""


async def generate_all(serving: Serving, requests: Sequence[RequestState]) -> list[RequestOutput]:
    """Return each sequence as one output. Raise the error that ended a sequence."""
    with Collector(serving, requests) as collector:
        return await collector.all()


async def unless_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or raise `ClientGone` if the client disconnects first.

    In that case `work` is cancelled and has ended before the error is raised. `receive` belongs to
    a request whose body has been read, so the only message that can still arrive is the disconnect.
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
        # The exception keeps this frame alive, and the frame would keep the exception and megabytes
        # of its frames until the next full garbage collection.
        del task, watch
    raise ClientGone("The client went away.")


async def _client_goes(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
