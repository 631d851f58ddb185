"""An engine process that starts beside the serving one and takes its place once it is ready.

The serving process may have started without the kernels of its device, because they were not
compiled yet. Its successor compiles them, at low priority, while the first process serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...runtime.core.messages import EngineAlive, EngineFailed
from ...runtime.process.ipc import decode
from .connection import EngineConnection
from .spawn import spawn

logger = logging.getLogger(__name__)


class Successor:
    """An engine process that is not serving yet.

    Attributes:
        connection: The socket of the process.
        ended: The task that runs the process. Its result is the exit code.
        doing: What the process does, according to its last message. None: it does not go on.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Any,
        log_level: str,
        *,
        take_over: Callable[[Successor], None],
        receive: Callable[[list[bytes]], None],
    ) -> None:
        """Start the process. `take_over` is called when it is ready.

        `receive` gets the message that says so, and all later ones.
        """
        self.doing: str | None = "starting"
        self._failure: str | None = None
        self._take_over = take_over
        self._receive = receive
        process = spawn(command, kernels="required")
        self.connection = EngineConnection()
        self.ended = asyncio.create_task(
            self.connection.run(process, config, log_level, self._handle)
        )
        self.ended.add_done_callback(self._has_ended)

    def close(self) -> None:
        """Kill the process."""
        self.doing = None
        self.connection.end()

    def _handle(self, frames: list[bytes]) -> None:
        if self.doing is not None:
            match decode(frames):
                case EngineAlive(doing=doing):
                    self.doing = doing
                    return
                case EngineFailed(message=message):
                    self._failure = message
                    return
            self.doing = None
            self._take_over(self)
        self._receive(frames)

    def _has_ended(self, ended: asyncio.Task[int]) -> None:
        if self.doing is not None:
            reason = self._failure or f"its process ended with exit code {ended.result()}"
            logger.warning("the engine serves without kernels: %s", reason)
            self.doing = None
        self.connection.close()
