"""The requests that an engine process has and has not finished: they come, end, and resume in its
next life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ...runtime.core.generation import FinishReason, TokenOutput
from ...runtime.core.messages import AbortRequests, ImageOutput, ToEngine
from ...runtime.core.pooling_messages import PoolOutput
from .connection import EngineConnection
from .quarantine import Quarantine

logger = logging.getLogger(__name__)

_UNREADABLE = "its output could not be processed; the server's log has the details"


class Unfinished(Protocol):
    """A request that the engine has and has not finished.

    `delivered`: the present life of the engine has shown that it outlives this request.
    """

    rid: str
    delivered: bool

    def goes_by(self, rid: str) -> bool:
        """Whether `rid` is its id, or that of the client's request which it is a part of."""
        ...

    def to_message(self) -> ToEngine:
        """What a new life of the engine needs to go on with it."""
        ...

    def end(self, reason: FinishReason, error: str | None) -> None:
        """Tell its consumer that it is over."""
        ...


R = TypeVar("R", bound=Unfinished)


class UnfinishedRequests(Generic[R]):
    """The requests of one engine, by id; what concerns the process that serves them is
    `EngineSupervisor`'s.
    """

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
        """Them, the oldest first."""
        return iter(self._requests.values())

    async def abort(self, rid: str | None) -> int:
        """Abort every request that goes by `rid` (None: all): its last output says
        `FinishReason.ABORT`. Returns how many.
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
        """Their consumer is gone: nobody waits for what is unfinished of them."""
        left = [one.rid for one in requests if self._requests.get(one.rid) is one]
        for rid in left:
            self._forget(rid)
        if left:
            self._send(AbortRequests(rids=left))

    def _after_step(
        self,
        outputs: Sequence[TokenOutput] | Sequence[ImageOutput] | Sequence[PoolOutput],
        ended: Iterable[str],
        to_abort: list[str],
    ) -> None:
        """The outputs of a step have been delivered: these requests are over, and those of them the
        engine is to abort.
        """
        for rid in ended:
            self._forget(rid)
        if to_abort:
            self._send(AbortRequests(rids=to_abort))
        alone = self._quarantine.running
        if alone is not None and any(output.rid == alone for output in outputs):
            self._leave_quarantine()

    def _fail(self, rids: list[str]) -> None:
        """Requests that this side cannot go on with."""
        failed = [rid for rid in rids if rid in self._requests]
        for rid in failed:
            self._end(rid, FinishReason.ERROR, _UNREADABLE)
        if failed:
            self._send(AbortRequests(rids=failed))

    def _end(self, rid: str, reason: FinishReason, error: str | None) -> None:
        """Finish a request here; its consumer gets what there is of it, and `reason`."""
        try:
            self._requests[rid].end(reason, error)
        except Exception:
            logger.exception("request %s could not be told that it is over", rid)
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        self._requests.pop(rid, None)  # an engine may tell an end twice
        if rid == self._quarantine.running:
            self._leave_quarantine()
        if not self._requests:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        """Between two lives nothing is sent: the next one begins with everything that is
        unfinished.
        """
        if self._life is not None:
            self._life.send(message)

    def _resume(self, crashed: bool) -> None:
        """Send what is unfinished to a new life of the engine: what is quarantined after a crash
        one at a time, the rest at once.
        """
        quarantined = {
            rid: None for rid, one in self._requests.items() if crashed and not one.delivered
        }
        self._quarantine.begin(quarantined)
        for rid, request in list(self._requests.items()):
            request.delivered = False
            if rid not in quarantined:
                self._send_again(rid, request)
        self._leave_quarantine()

    def _send_again(self, rid: str, request: R) -> bool:
        """Whether it could be sent; else it is over."""
        try:
            self._send(request.to_message())
        except Exception:
            logger.exception(
                "request %s ends: it could not be given to the new engine process", rid
            )
            self._end(
                rid,
                FinishReason.ERROR,
                "it could not be given to a new engine process; the server's log has the details",
            )
            return False
        return True

    def _leave_quarantine(self) -> None:
        """The engine has outlived the request that ran alone: the next one may."""
        while (rid := self._quarantine.next()) is not None:
            request = self._requests.get(rid)
            if request is not None and self._send_again(rid, request):
                self._quarantine.run(rid)
                return

    def _end_who_is_to_blame(self, code: int, *, hung: bool) -> bool:
        """Answer the request that ran alone with an error if it may be to blame for the end of a
        process that served.

        Returns whether it surely is, as far as can be known: who kills a process from outside does
        not say why.
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
