"""The loop of an engine process: receive messages, do a step, send its results."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ...kernels.collectives import CollectiveError
from ..core.messages import AbortRequests, FromEngine
from ..distributed.ranks import RankError
from ..process.heartbeat import Heartbeat
from ..process.mailbox import Mailbox
from .kind import ServedEngine

logger = logging.getLogger(__name__)


class Loop:
    """Runs an engine of any kind for the process at the other end of a mailbox."""

    def __init__(self, engine: ServedEngine, mailbox: Mailbox) -> None:
        self._engine, self._mailbox = engine, mailbox
        self._heart = Heartbeat(mailbox.send)
        engine.connect(self._heart.beat_again, self._pause)

    def run(self) -> None:
        """Serve until the mailbox closes. Raise `SystemExit` if the ranks cannot continue."""
        ranks, lost = self._engine.ranks, True
        try:
            while self._mailbox.is_open:
                if (work := self._engine.work()) is None:
                    self._heart.wait(self._mailbox.waits, self._engine.give_back_memory)
                self._receive(0 if work is None else work.patience)
                self._beat()
                self._send(self._engine.step())
            self._engine.close()
            lost = False
        except Exception as error:
            if ranks.size == 1:
                raise
            trace = None if isinstance(error, RankError | CollectiveError) else error
            logger.error("the engine's %d ranks end: %s", ranks.size, error, exc_info=trace)
            raise SystemExit(1) from None
        finally:
            ranks.close(lost=lost)

    def handle(self, message: Any) -> None:
        """Handle a message and send the answers."""
        if isinstance(message, AbortRequests):
            self._engine.abort(message.rids)
            # If no step follows, the server's statistics would stay outdated.
            self._send([self._engine.report()])
        else:
            self._send(self._engine.handle(message))

    def _receive(self, patience: int) -> None:
        """Handle all messages that have arrived. Wait up to `patience` ms for the first."""
        for message in self._mailbox.received(patience):
            self.handle(message)

    def _beat(self) -> None:
        if (work := self._engine.work()) is not None:
            self._heart.beat(work.doing, may_build=work.may_build)

    def _pause(self) -> None:
        self._beat()
        self._receive(0)
        self._send([self._engine.report()])

    def _send(self, messages: Iterable[FromEngine]) -> None:
        for message in messages:
            self._mailbox.send(message)
