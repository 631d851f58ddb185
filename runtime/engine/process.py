"""The main function of every engine process: `python -m piecework.runtime.engine.process MODULE`.

The first line of its standard input is its job. The process owns the tensors. It ends when it is
told to, or when its parent ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from ...kernels.build_progress import listeners
from ..core.messages import EngineAlive, EngineFailed, FromEngine
from ..process.logs import set_up_logging
from ..process.mailbox import Mailbox
from ..process.message_socket import MessageSocket
from ..process.parent import end_with_parent, killed_with_parent, read_line

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
# On this signal an engine process prints the stacks of its threads to its standard error.
DUMP_SIGNAL = signal.SIGUSR1
# Errors that would repeat at each start. Others, such as a lack of memory, may pass.
_FAULTS = (TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError)
_LINGER_SECONDS = 2.0  # How long to wait until the last message is sent.


class EngineLoop(Protocol):
    """An engine that is ready to serve."""

    def ready(self) -> FromEngine:
        """Return the message that tells the parent so."""
        ...

    def run(self) -> None:
        """Serve until the mailbox closes."""
        ...


# Maps (settings, mailbox) to an engine. Raises `ValueError` for what the user can correct.
Build = Callable[[dict[str, Any], Mailbox], EngineLoop]


def run_engine(find: Callable[[], Build]) -> int:
    """Read the job, build an engine, report that it is ready, and run it. Return the exit code.

    `find` imports the module, which may take seconds. Meanwhile the parent writes the job.
    """
    # Ctrl-C and a service manager's stop reach every process of the group; the web process decides
    # when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The watchdog sends this before it kills a process that hangs. The handler needs no lock.
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # Objects of imports stay alive: searching them for garbage would only slow the imports down.
    gc.disable()
    try:
        build = find()
    finally:
        gc.enable()
    settings, path, log_level = json.loads(read_line())
    set_up_logging(log_level)
    end_with_parent()
    killed_with_parent()
    socket = MessageSocket.connect(path)
    mailbox = Mailbox(socket)
    listeners.append(lambda line: mailbox.send(EngineAlive(doing=line, may_build=True)))
    try:
        engine = build(settings, mailbox)
    except ValueError as error:
        # The error may quote a file name or a text that is not valid Unicode.
        reason = str(error).encode(errors="backslashreplace").decode()
        mailbox.send(EngineFailed(message=reason))
        return EXIT_USER_ERROR
    except _FAULTS as error:
        logger.exception("the engine cannot be built")
        mailbox.send(
            EngineFailed(
                message=f"the engine cannot be built ({type(error).__name__}, see the traceback in "
                "the log): this is a bug of the server; report it, and choose another model"
            )
        )
        return EXIT_USER_ERROR
    else:
        mailbox.send(engine.ready())
        engine.run()
        return 0
    finally:
        socket.close(linger=_LINGER_SECONDS)


def _build_of(module: str) -> Build:
    build: Build = import_module(module).build
    return build


if __name__ == "__main__":
    sys.exit(run_engine(partial(_build_of, sys.argv[1])))
