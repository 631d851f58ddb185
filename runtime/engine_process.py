"""The engine as a process of its own: `python -m piecework.runtime.engine_process CONFIG INBOX OUTBOX LOG_LEVEL`.

It owns the tensors. It ends when it is told to, or when the process that started it is gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Any

import zmq

from .config import EngineConfig
from .engine import Engine, build_engine
from .ipc import decode, encode, open_socket
from .messages import (
    AbortRequests,
    CacheFlushed,
    EngineChanged,
    EngineFailed,
    EngineReady,
    FlushCache,
    FromEngine,
    GenerateRequest,
    Shutdown,
    StepOutput,
)

EXIT_USER_ERROR = 2
_STARTUP_POLL_MS = 20
"""How long to wait for a message before the next portion of the start-up."""
_FAREWELL_MS = 2000
"""How long to wait until the last message has left."""


class EngineProcess:
    """Receives messages, steps the scheduler, sends what it delivers."""

    def __init__(self, engine: Engine, inbox: Any, outbox: Any) -> None:
        self._scheduler, self._runner, self._startup = engine
        self._inbox = inbox
        self._outbox = outbox
        self._running = True

    def run(self) -> None:
        while self._running:
            self._receive()
            if self._scheduler.has_work:
                self._send(self._scheduler.step())
            if self._startup.pending:
                self._startup.advance()
                if not self._startup.pending:
                    self._send(EngineChanged(info=self._runner.info()))
        self._startup.stop()
        self._runner.close()

    def _receive(self) -> None:
        """Take every message that is there; wait for one where there is nothing else to do."""
        if not self._scheduler.has_work:
            self._runner.rest()
        patience = 0 if self._scheduler.has_work else _STARTUP_POLL_MS if self._startup.pending else None
        while self._running and self._inbox.poll(patience):
            self._handle(decode(self._inbox.recv_multipart()))
            patience = 0

    def _handle(self, message: Any) -> None:
        match message:
            case GenerateRequest():
                self._scheduler.add(message)
            case AbortRequests(rids=rids):
                self._scheduler.abort(rids)
                # No step may follow: without this the figures would stay as they were.
                self._send(StepOutput(outputs=[], stats=self._scheduler.stats()))
            case FlushCache():
                self._send(CacheFlushed(freed_tokens=self._scheduler.flush_cache()))
            case Shutdown():
                self._running = False

    def _send(self, message: FromEngine) -> None:
        self._outbox.send_multipart(encode(message))


def main(argv: list[str]) -> int:
    config = EngineConfig(**json.loads(argv[0]))
    logging.basicConfig(level=argv[3].upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    # Ctrl-C and a service manager's stop reach every process of the group; the web process decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    inbox = open_socket(context, zmq.PULL, argv[1], bind=True)
    outbox = open_socket(context, zmq.PUSH, argv[2], bind=False)
    outbox.setsockopt(zmq.LINGER, _FAREWELL_MS)
    try:
        engine = build_engine(config)
    except ValueError as error:
        outbox.send_multipart(encode(EngineFailed(message=str(error))))
        return EXIT_USER_ERROR
    else:
        outbox.send_multipart(encode(EngineReady(info=engine.runner.info())))
        EngineProcess(engine, inbox, outbox).run()
        return 0
    finally:
        inbox.close()
        outbox.close()
        context.term()


def _end_with_parent() -> None:
    """Our standard input is a pipe that the parent holds open and never writes to: it ends when the parent does."""
    # Not through `sys.stdin`, whose lock would be held by this thread when the interpreter ends.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
