"""What every engine process does: `python -m piecework.runtime.engine.process MODULE`, its job as
the first line of its standard input.

It owns the tensors. It ends when it is told to, or when the process that started it is gone.
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

from ..core.messages import EngineFailed, FromEngine
from ..process.logs import set_up_logging
from ..process.mailbox import Mailbox
from ..process.message_socket import MessageSocket
from ..process.parent import end_with_parent, killed_with_parent, read_line

logger = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
DUMP_SIGNAL = signal.SIGUSR1
"""Makes an engine process print on its standard error what its threads do."""
# Faults that come again at each start. Others, such as memory that is taken, may pass.
_FAULTS = (TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError)
_FAREWELL_SECONDS = 2.0
"""How long to wait until the last message has left."""


class EngineLoop(Protocol):
    """An engine that is ready to serve."""

    def ready(self) -> FromEngine:
        """The message that says so."""
        ...

    def run(self) -> None:
        """Serve until told to end."""
        ...


Build = Callable[[dict[str, Any], Mailbox], EngineLoop]
"""(settings, mailbox) to an engine. Raises `ValueError` that the user can mend."""


def run_engine(find: Callable[[], Build]) -> int:
    """Read the job, build an engine, say that it is ready, and let it run; returns the exit code.

    `find` may import for seconds: the job is made meanwhile.
    """
    # Ctrl-C and a service manager's stop reach every process of the group; the web process decides
    # when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Asked for before a process that hangs is killed. Needs no lock, and no thread that goes on.
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # What imports make stays: looking for garbage among it would only make them longer.
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
    try:
        engine = build(settings, mailbox)
    except ValueError as error:
        # A file's name or text that it quotes may be no Unicode.
        reason = str(error).encode(errors="backslashreplace").decode()
        mailbox.send(EngineFailed(message=reason))
        return EXIT_USER_ERROR
    except _FAULTS as error:
        logger.exception("the engine cannot be built")
        mailbox.send(
            EngineFailed(
                message=f"the engine cannot be built ({type(error).__name__}, see the traceback in "
                "the log): this is a fault of the server; report it, and choose another model"
            )
        )
        return EXIT_USER_ERROR
    else:
        mailbox.send(engine.ready())
        engine.run()
        return 0
    finally:
        socket.close(linger=_FAREWELL_SECONDS)


def _build_of(module: str) -> Build:
    build: Build = import_module(module).build
    return build


if __name__ == "__main__":
    sys.exit(run_engine(partial(_build_of, sys.argv[1])))
