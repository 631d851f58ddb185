"""The unfinished requests of an engine. They resume in the next process after a crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ...runtime.core.generation import FinishReason, TokenOutput
from ...runtime.core.messages import AbortRequests, ImageOutput, ToEngine
from ...runtime.core.pooling_messages import PoolOutput
from ...runtime.core.speech_messages import SpeechOutput
from .connection import EngineConnection
from .quarantine import Quarantine

logger = logging.getLogger(__name__)

_UNREADABLE = "its output could not be processed; the server's log has the details"


class Unfinished(Protocol):
    """A request that the engine has not finished.

    `delivered`: the current process has sent output of this request, so the request does not crash
    it.
    """

    rid: str
    delivered: bool

    def goes_by(self, rid: str) -> bool:
        """Whether `rid` is the id of this request or of the client's request it belongs to."""
        ...

    def to_message(self) -> ToEngine:
        """Return the message that starts or resumes this request in an engine process."""
        ...

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Finish the request for its consumer."""
        ...


R = TypeVar("R", bound=Unfinished)


class UnfinishedRequests(Generic[R]):
    """The unfinished requests of one engine, by id. `EngineSupervisor` adds the process."""

    def __init__(self) -> None:
        self._requests: dict[str, R] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._quarantine = Quarantine()
        self._life: EngineConnection | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def unfinished(self) -> Iterator[R]:
        """The unfinished requests, oldest first."""
        return iter(self._requests.values())

    async def abort(self, rid: str | None) -> int:
        """Abort every request that `goes_by` `rid`, or all requests if `rid` is None.

        Their last output has `FinishReason.ABORT`. Return the number of aborted requests.
        """
        chosen = [
            known
            for known, request in self._requests.items()
            if rid is None or request.goes_by(rid)
        ]
        for known in chosen:
            self._end(known, FinishReason.ABORT, None)
        if chosen:
            self._send(AbortRequests(rids=chosen))
        return len(chosen)

    def drop(self, requests: Iterable[R]) -> None:
        """Abort the unfinished ones of these requests, because their consumer is gone."""
        left = [request.rid for request in requests if self._requests.get(request.rid) is request]
        for rid in left:
            self._forget(rid)
        if left:
            self._send(AbortRequests(rids=left))

    def _after_step(
        self,
        outputs: Sequence[TokenOutput]
        | Sequence[ImageOutput]
        | Sequence[PoolOutput]
        | Sequence[SpeechOutput],
        ended: Iterable[str],
        to_abort: list[str],
    ) -> None:
        """Called when the outputs of a step are delivered.

        The requests `ended` are finished. Those in `to_abort` are also aborted in the engine.
        """
        for rid in ended:
            self._forget(rid)
        if to_abort:
            self._send(AbortRequests(rids=to_abort))
        running_alone = self._quarantine.running
        if running_alone is not None and any(output.rid == running_alone for output in outputs):
            self._leave_quarantine()

    def _fail(self, rids: list[str]) -> None:
        """End these requests with an error, here and in the engine."""
        failed = [rid for rid in rids if rid in self._requests]
        for rid in failed:
            self._end(rid, FinishReason.ERROR, _UNREADABLE)
        if failed:
            self._send(AbortRequests(rids=failed))

    def _end(self, rid: str, reason: FinishReason, error: str | None) -> None:
        """Finish a request on this side with `reason`."""
        try:
            self._requests[rid].end(reason, error)
        except Exception:
            logger.exception("the consumer of request %s could not be told its end", rid)
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        self._requests.pop(rid, None)  # the engine may report an end twice
        if rid == self._quarantine.running:
            self._leave_quarantine()
        if not self._requests:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        """Send a message. Without a process it is dropped: `_resume` sends all requests."""
        if self._life is not None:
            self._life.send(message)

    def _resume(self, crashed: bool) -> None:
        """Send the unfinished requests to a new engine process.

        After a crash, requests without output are quarantined and sent one at a time.
        """
        quarantined = {
            rid: None
            for rid, request in self._requests.items()
            if crashed and not request.delivered
        }
        self._quarantine.begin(quarantined)
        for rid, request in list(self._requests.items()):
            request.delivered = False
            if rid not in quarantined:
                self._send_again(rid, request)
        self._leave_quarantine()

    def _send_again(self, rid: str, request: R) -> bool:
        """Send a request to a new process. If that fails, end the request and return False."""
        try:
            self._send(request.to_message())
        except Exception:
            logger.exception("request %s ends: it could not be sent to the new engine process", rid)
            self._end(
                rid,
                FinishReason.ERROR,
                "it could not be sent to a new engine process; the server's log has the details",
            )
            return False
        return True

    def _leave_quarantine(self) -> None:
        """Send the next quarantined request, because the last one did not crash the engine."""
        while (rid := self._quarantine.next()) is not None:
            request = self._requests.get(rid)
            if request is not None and self._send_again(rid, request):
                self._quarantine.run(rid)
                return

    def _end_culprit(self, code: int, *, hung: bool) -> bool:
        """End the request that ran alone with an error, if it may have ended the process.

        Return whether the request is surely the cause. If the process was killed from outside, the
        cause is not known.
        """
        rid = self._quarantine.running
        if rid is None or rid not in self._requests:
            return False
        blame = self._quarantine.blame(code, hung=hung)
        if blame is None:
            return False
        self._end(rid, FinishReason.ERROR, blame.reason)
        return blame.sure

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for rid in list(self._requests):
            self._end(rid, reason, error)
