"""The process of a rank other than 0: `python -m piecework.runtime.engine.rank_process KIND`.

`KIND` is the name of a module (`kind.Kind`). The rank repeats the calls of rank 0 and ends when
rank 0 ends. A rank of another machine joins rank 0 first. It prints errors that the user can
correct to its standard output, for the process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, Protocol, cast

from ...kernels.collectives import CollectiveError
from ..config.engine import EngineConfig
from ..config.nodes import split_address
from ..distributed.join import hello, join, keep_to_interface
from ..distributed.node import EXIT_NEVER_JOINED
from ..distributed.processes import follower
from ..distributed.ranks import EngineEnded, RankEnded
from ..distributed.sealed import Sealed, hung_up, read_key
from ..process.job import EXIT_USER_ERROR, Job
from ..process.logs import set_up_logging
from .kind import Kind, RankedEngine

logger = logging.getLogger(__name__)

# Settings of each node. Rank 0 decides all others.
_OWN = ("model_path", "tokenizer_path", "num_threads", "cpu_bind", "node_rank", "dist_key_file")
# After rank 0 has gone, a rank has this time to find out why.
_LAST_MESSAGE_SECONDS = 3.0


class Calls(Protocol):
    """The source of the calls of rank 0."""

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]: ...


def follow(engine: RankedEngine, ranks: Calls, within: float | None = None) -> NoReturn:
    """Repeat the calls of rank 0 on this rank's engine. Raise `EngineEnded` when rank 0 ends.

    `within` is the timeout in seconds for a call that the engine expects. None means that rank 0
    may pause between two steps.
    """
    calls = engine.calls
    while True:
        name, arguments = ranks.next_call(within if engine.expects_step else None)
        calls[name](*arguments)


def run_rank(find: Callable[[], Kind]) -> int:
    """Read the job, build the engine of this rank and follow rank 0. Return the exit code.

    `find` imports the kind of the engine.
    """
    kind, job = Job.read(find)
    # Rank 0 logs what all ranks would log.
    set_up_logging("DEBUG" if job.log_level == "DEBUG" else "ERROR", rank=job.rank)
    try:
        return _follow(kind, job)
    except EngineEnded as error:
        return 0 if error.reason is None else _say(job, error.reason)
    except RankEnded as error:
        logger.info("%s", error)
    except CollectiveError as error:
        logger.error("%s", error)
        if 0 in error.missing and job.is_server and job.connection is not None:
            # Rank 0 may be stopped (SIGSTOP), and would then ignore all other signals.
            os.kill(os.getppid(), signal.SIGKILL)
    except Exception as error:
        logger.exception("%s", error)
    return 1


def _follow(kind: Kind, job: Job) -> int:
    """Build the engine and follow rank 0. Return the exit code if that is not possible."""
    leader = None
    try:
        if job.connection is None:
            leader, job = _join(job)
    except TimeoutError as error:
        _say(job, str(error))
        return EXIT_NEVER_JOINED
    except ValueError as error:
        return _say(job, str(error))
    ranks = follower(job, leader)
    try:
        engine = kind.build(job.settings, ranks)
    except ValueError as error:
        ranks.fail(str(error))
        return _say(job, str(error))
    # An engine in the process of a user (`LLM`) may pause between two steps.
    follow(cast(RankedEngine, engine), ranks, job.timeout if job.is_server else None)


def _join(job: Job) -> tuple[Sealed, Job]:
    """Join rank 0. Return the connection to it, and the job with the settings that it sent."""
    config = EngineConfig(**job.settings)
    assert config.dist_init_addr is not None
    host, _ = split_address(config.dist_init_addr)
    leader, shared = join(
        config.dist_init_addr,
        read_key(config.dist_key_file),
        hello(config, job.rank),
        config.dist_timeout,
    )
    keep_to_interface(leader.address)

    def watch() -> None:
        hung_up(leader, None)
        # The main thread may still read the last message of rank 0.
        threading.Event().wait(_LAST_MESSAGE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="rank 0", daemon=True).start()
    settings = shared["settings"] | {name: job.settings[name] for name in _OWN}
    return leader, replace(job, **{**shared, "settings": settings, "host": host})


def _say(job: Job, reason: str) -> int:
    """Return the exit code of an error that the user can correct.

    On another machine than rank 0's, print the reason for the process that started this rank. On
    rank 0's machine, rank 0 gets it by the connection.
    """
    if job.connection is None:
        print(json.dumps(reason), flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    # At the interpreter's regular exit, a process group may wait for other ranks.
    code = run_rank(partial(import_module, sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)
