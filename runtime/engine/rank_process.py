"""The process of a rank other than 0: `python -m piecework.runtime.engine.rank_process`.

The first line of its standard input is its job. The rank repeats the calls of rank 0 and ends when
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
from typing import Any, Protocol

from ...kernels.collectives import CollectiveError
from ..config.engine import EngineConfig
from ..config.nodes import split_address
from ..distributed.join import hello, join, keep_to_interface
from ..distributed.node import EXIT_NEVER_JOINED
from ..distributed.processes import END, EXIT_USER_ERROR, follower
from ..distributed.ranks import EngineEnded, RankEnded
from ..distributed.sealed import Sealed, hung_up, read_key
from ..process.logs import set_up_logging
from ..process.parent import end_with_parent, read_line
from .build import Engine, build_engine

logger = logging.getLogger(__name__)

# Settings of each node. Rank 0 decides all others.
_OWN = ("model_path", "tokenizer_path", "num_threads", "cpu_bind", "node_rank", "dist_key_file")


class Calls(Protocol):
    """The source of the calls of rank 0."""

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]: ...


def follow(engine: Engine, calls: Calls, within: float | None = None) -> None:
    """Repeat the calls of rank 0 on this rank's engine until rank 0 ends.

    `within` is the timeout in seconds for the next call while there are requests. None means that
    rank 0 may pause between two steps.
    """
    core, runner, startup = engine
    handlers: dict[str, Callable[..., Any]] = {
        "add": core.add,
        "abort": core.abort,
        "flush_cache": core.flush_cache,
        "step": core.step,
        "advance": startup.follow,
        "give_back_memory": runner.give_back_memory,
    }
    while True:
        call, arguments = calls.next_call(within if core.has_work else None)
        if call == END:
            return
        handlers[call](*arguments)


def main() -> int:
    # Signals may reach the whole process group, but only rank 0 decides when ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(read_line())
    rank = job["rank"]
    # Rank 0 logs what all ranks would log.
    set_up_logging(job["log_level"] if job["log_level"] == "DEBUG" else "ERROR", rank=rank)
    end_with_parent()
    try:
        return _follow(job)
    except EngineEnded as error:
        if error.reason is not None:
            return _say(job, error.reason)
        return 0
    except RankEnded as error:
        logger.info("%s", error)
    except CollectiveError as error:
        logger.error("%s", error)
        if 0 in error.missing and job["is_server"] and "connection" in job:
            # Rank 0 may be stopped (SIGSTOP), and would then ignore all other signals.
            os.kill(os.getppid(), signal.SIGKILL)
    except Exception as error:
        logger.exception("%s", error)
    return 1


def _follow(job: dict[str, Any]) -> int:
    """Join rank 0, build the engine and follow rank 0. Return the exit code."""
    leader = None
    try:
        if "connection" not in job:
            leader, job = _join(job)
    except TimeoutError as error:
        _say(job, str(error))
        return EXIT_NEVER_JOINED
    except ValueError as error:
        return _say(job, str(error))
    ranks = follower(job, leader)
    try:
        engine = build_engine(EngineConfig(**job["config"]), progress=False, ranks=ranks)
    except ValueError as error:
        ranks.fail(str(error))
        return _say(job, str(error))
    # An engine in the process of a user (`LLM`) may pause between two steps.
    follow(engine, ranks, job["seconds"] if job["is_server"] else None)
    return 0


def _join(job: dict[str, Any]) -> tuple[Sealed, dict[str, Any]]:
    """Join rank 0. Return the connection to it, and the job with the settings that it sent."""
    config = EngineConfig(**job["config"])
    assert config.dist_init_addr is not None
    host, _ = split_address(config.dist_init_addr)
    leader, answer = join(
        config.dist_init_addr,
        read_key(config.dist_key_file),
        hello(config, job["rank"]),
        config.dist_timeout,
    )
    keep_to_interface(leader.address)

    def watch() -> None:
        hung_up(leader, None)
        # The main thread may still read the last message of rank 0.
        threading.Event().wait(_LAST_MESSAGE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="rank 0", daemon=True).start()
    settings = answer["config"] | {name: job["config"][name] for name in _OWN}
    return leader, {**job, **answer, "config": settings, "host": host}


# After rank 0 has gone, a rank has this time to find out why.
_LAST_MESSAGE_SECONDS = 3.0


def _say(job: dict[str, Any], reason: str) -> int:
    """Return the exit code of an error that the user can correct.

    On another machine than rank 0's, print the reason for the process that started this rank. On
    rank 0's machine, rank 0 gets it by the connection.
    """
    if "connection" not in job:
        print(json.dumps(reason), flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    # At the interpreter's regular exit, a process group may wait for other ranks.
    code = main()
    sys.stderr.flush()
    os._exit(code)
