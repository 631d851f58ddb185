"""What every engine process does: `python -m MODULE CONFIG INBOX OUTBOX LOG_LEVEL`.

It owns the tensors. It ends when it is told to, or when the process that started it is gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from .ipc import encode, open_socket
from .messages import EngineFailed, FromEngine

EXIT_USER_ERROR = 2
_FAREWELL_MS = 2000
"""How long to wait until the last message has left."""


class EngineLoop(Protocol):
    """An engine that is ready to serve."""

    def ready(self) -> FromEngine:
        """The message that says so."""
        ...

    def run(self) -> None:
        """Serve until told to end."""
        ...


Build = Callable[[dict[str, Any], Any, Any], EngineLoop]
"""(settings, inbox, outbox) to an engine. Raises `ValueError` that the user can mend."""


def run_engine(argv: list[str], build: Build) -> int:
    """Build an engine from its settings in JSON, say that it is ready, and let it run; returns the exit code."""
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
        engine = build(json.loads(argv[0]), inbox, outbox)
    except ValueError as error:
        outbox.send_multipart(encode(EngineFailed(message=str(error))))
        return EXIT_USER_ERROR
    else:
        outbox.send_multipart(encode(engine.ready()))
        engine.run()
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
