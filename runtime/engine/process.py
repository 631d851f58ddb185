"""The main function of every engine process: `python -m piecework.runtime.engine.process KIND`.

`KIND` is the name of a module (`kind.Kind`). The process owns the tensors. It ends after the
message `Shutdown`, or when its parent ends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...kernels.build_progress import listeners
from ..core.messages import EngineAlive, EngineFailed
from ..process.job import EXIT_USER_ERROR, Job
from ..process.logs import set_up_logging
from ..process.mailbox import Mailbox
from ..process.message_socket import MessageSocket
from ..process.parent import killed_with_parent
from ..process.slices import shorten_slices

if TYPE_CHECKING:
    from .kind import Kind, ServedEngine

logger = logging.getLogger(__name__)

# Errors that would repeat at each start. Others, such as a lack of memory, may pass.
_FAULTS = (TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, ImportError)
_LINGER_SECONDS = 2.0  # How long to wait until the last message is sent.


def run_engine(find: Callable[[], Kind]) -> int:
    """Read the job, build an engine, report that it is ready, and run it. Return the exit code.

    `find` imports the kind of the engine.
    """
    kind, job = Job.read(find)
    # Imports torch, for which `Job.read` stops the collection of garbage.
    from .loop import Loop

    set_up_logging(job.log_level)
    killed_with_parent()
    # Before threads are started, which inherit it.
    shorten_slices()
    assert job.socket is not None
    socket = MessageSocket.connect(job.socket)
    mailbox = Mailbox(socket)
    listeners.append(lambda line: mailbox.send(EngineAlive(doing=line, may_build=True)))
    try:
        engine = _build(kind, job.settings)
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
        Loop(engine, mailbox).run()
        return 0
    finally:
        socket.close(linger=_LINGER_SECONDS)


def _build(kind: Kind, settings: dict[str, Any]) -> ServedEngine:
    """Start the other ranks and build the engine of rank 0."""
    ranks = kind.start_ranks(settings)
    try:
        return kind.build(settings, ranks)
    except ValueError as error:
        ranks.close(reason=str(error))
        raise


if __name__ == "__main__":
    sys.exit(run_engine(partial(import_module, sys.argv[1])))
